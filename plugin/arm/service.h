// SPDX-License-Identifier: GPL-2.0-or-later
//
// The operations that people and orchestrators ask for, as the control API offers them.
// Every method may be called from any thread and never throws; operations on one container are
// done one after the other.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plugin/arm/report.h"
#include "plugin/arm/watched.h"
#include "plugin/host/host.h"

namespace agentgate::arm {

struct ArmRequest {
  std::string container;              // name or id
  std::optional<std::string> policy;  // else the endpoint's, else the network's
  // Only for precheck, where there is no endpoint yet: the id of its network, as it knows the
  // policy.
  std::optional<std::string> network{};
};

// What `refresh` did to one policy.
struct Refreshed {
  std::string policy;
  std::string revision;
  bool ok = false;
  std::string error;
  std::vector<std::string> added, removed;  // "name address" or "address/length"
  std::vector<std::string> kept;            // rotated out but within grace, or last good
  std::size_t ports = 0;                    // released ports that use it
};

// One finding of `doctor`.
struct Finding {
  std::string check;    // "kernel.owner_persist", "engine.api", "forwarding.ipv4", "runtime.runsc"
  std::string outcome;  // ok, warning, missing
  std::string seen;
  std::string mend;  // empty when ok
};

class Service {
 public:
  virtual ~Service() = default;
  virtual Report arm(const ArmRequest& request) = 0;
  // Whether a container that was created, and not started, would be refused for what is known of it
  // by then: the parts of steps 2, 3 and 5 that need no process. Changes nothing; closed when not.
  virtual Report precheck(const ArmRequest& request) = 0;
  virtual Report disarm(const std::string& container) = 0;
  virtual Report check(const std::string& container) = 0;
  // All policies in use, or the one named.
  virtual std::vector<Refreshed> refresh(const std::optional<std::string>& policy) = 0;
  virtual host::Snapshot status() = 0;
  virtual EngineGuardStatus engine_guard() = 0;
  virtual std::vector<Finding> doctor() = 0;
};

}  // namespace agentgate::arm
