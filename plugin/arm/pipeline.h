// SPDX-License-Identifier: GPL-2.0-or-later
//
// The arm pipeline (DESIGN.md, 4): thirteen steps in five phases. A step that fails ends the run;
// before step 11 nothing is rolled back, since the port is simply still closed. From step 11 on a
// failure closes the port again at once.
//
// A refused arm also closes what an earlier arm had released: exit 1 always means closed.
//
// It asks the engine and the kernel, compares, and decides; it changes the kernel only through
// host::Ports. Operations on one container are serialised. After a release the guard asks for its
// premises to be judged again (watched.h).
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "plugin/arm/checks.h"
#include "plugin/arm/service.h"
#include "plugin/arm/watched.h"
#include "plugin/engine/engine.h"
#include "plugin/host/host.h"

namespace agentgate::arm {

struct Options {
  std::filesystem::path policy_directory = "/etc/agentgate/policies";
  std::string daemon_json = "/etc/docker/daemon.json";
  std::string audit_file;              // empty: none
  std::vector<std::string> resolvers;  // for the names of policies; empty: the host's own
  std::string host_resolv_conf = "/etc/resolv.conf";  // as the engine sees it
  System system;                                      // where /proc and the cgroups are
};

class Pipeline : public Service, public Watched {
 public:
  // Both must outlive the pipeline.
  Pipeline(Options options, host::Ports& ports, engine::Api& engine);
  ~Pipeline() override;

  Report arm(const ArmRequest& request) override;
  Report precheck(const ArmRequest& request) override;
  Report disarm(const std::string& container) override;
  Report check(const std::string& container) override;
  std::vector<Refreshed> refresh(const std::optional<std::string>& policy) override;
  host::Snapshot status() override;  // with the guard's incidents
  EngineGuardStatus engine_guard() override;
  std::vector<Finding> doctor() override;

  Result<std::vector<std::string>> released() override;
  Rechecked recheck(const std::vector<std::string>& containers, Premises which, engine::Api& engine,
                    const std::string& event) override;
  Rechecked started(const std::string& container, engine::Api& engine,
                    const std::string& event) override;
  void guard_seen(const EngineGuardStatus& status) override;

 private:
  struct Impl;
  struct Run;
  std::unique_ptr<Impl> impl_;
};

}  // namespace agentgate::arm
