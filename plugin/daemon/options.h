// SPDX-License-Identifier: GPL-2.0-or-later
//
// The options of agentgated (agentgated(8)); each is an environment variable as well.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace agentgate {

struct DaemonOptions {
  std::string state_directory = "/var/lib/agentgate";
  std::string policy_directory = "/etc/agentgate/policies";
  std::vector<std::string> driver_sockets{"/run/docker/plugins/agentgate.sock"};
  std::string control_socket = "/run/agentgate/agentgate.sock";
  std::string engine_socket = "/var/run/docker.sock";
  std::string engine_pid_file = "/var/run/docker.pid";
  std::string daemon_json = "/etc/docker/daemon.json";
  std::string audit_file = "/var/log/agentgate/audit.jsonl";
  std::vector<std::string> resolvers;
  std::string log_level = "info";
  unsigned orphan_age = 60;  // seconds
};

// Returns nothing when the process shall go on, else its exit code (help was printed, or what is
// wrong).
struct ParsedOptions {
  DaemonOptions options;
  int exit = -1;  // -1: go on
};
[[nodiscard]] ParsedOptions parse_options(int argc, const char* const* argv);

}  // namespace agentgate
