// SPDX-License-Identifier: GPL-2.0-or-later
//
// Files that the engine names, as the engine sees them: runtimes, daemon.json, resolver files of
// containers. The engine may live in a mount namespace of its own, and the daemon does: in a
// managed plugin it sees little of the host, as a service it may write only where its unit lets it.
// So they are reached by /proc/PID/root of the engine's process, which needs CAP_SYS_PTRACE.
#pragma once

#include <cstdint>
#include <string>

#include "netdriver/error.h"
#include "netdriver/unique_fd.h"
#include "plugin/arm/checks.h"

namespace agentgate::arm {

class EngineFiles {
 public:
  EngineFiles(std::int64_t pid, const System& system);
  // An absolute path. Symbolic links are the engine's: they start at its root, not at ours, and do
  // not lead out of it.
  [[nodiscard]] Result<netdriver::UniqueFd> open(const std::string& path, int flags) const;
  // As the engine would find a program: a bare name through its PATH. `path` becomes where it is.
  [[nodiscard]] Result<netdriver::UniqueFd> open_program(const std::string& program,
                                                         std::string& path) const;

 private:
  [[nodiscard]] std::string search_path() const;

  std::string process_;
  netdriver::UniqueFd root_;
  int failed_;  // why there is no root_
};

}  // namespace agentgate::arm
