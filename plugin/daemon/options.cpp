// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/daemon/options.h"

#include <CLI/CLI.hpp>
#include <iostream>

#include "netdriver/types.h"

namespace agentgate {
namespace {

constexpr int kExitUsage = 64;

std::string check_absolute(const std::string& path) {
  return !path.empty() && path[0] == '/' ? "" : "must be an absolute path";
}

// "ADDRESS", "IPV4:PORT" or "[IPV6]:PORT".
std::string check_resolver(const std::string& text) {
  if (IpAddress::parse(text)) return "";
  const auto colon = text.rfind(':');
  if (colon != std::string::npos) {
    std::string host = text.substr(0, colon);
    const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
    if (bracketed) host = host.substr(1, host.size() - 2);
    const auto address = IpAddress::parse(host);
    if (address && address->is_v6() == bracketed &&
        Service::parse("udp/" + text.substr(colon + 1))) {
      return "";
    }
  }
  return "'" + text + "' is not ADDRESS, IPV4:PORT or [IPV6]:PORT";
}

}  // namespace

ParsedOptions parse_options(int argc, const char* const* argv) {
  ParsedOptions out;
  DaemonOptions& it = out.options;
  CLI::App app{"Docker network driver whose containers start closed and are released by policy.",
               "agentgated"};
  const CLI::Validator absolute(check_absolute, "PATH");
  const auto path = [&](const char* flag, std::string& value, const char* variable,
                        const char* text) {
    return app.add_option(flag, value, text)
        ->envname(variable)
        ->check(absolute)
        ->capture_default_str();
  };
  path("--state-directory", it.state_directory, "AGENTGATE_STATE_DIRECTORY",
       "Networks and endpoints, kept over restarts");
  path("--policy-directory", it.policy_directory, "AGENTGATE_POLICY_DIRECTORY", "Policy files");
  app.add_option("--driver-socket", it.driver_sockets,
                 "Where Docker finds the driver; may be given more than once")
      ->envname("AGENTGATE_DRIVER_SOCKET")
      ->check(absolute)
      ->delimiter(',')
      ->capture_default_str();
  path("--control-socket", it.control_socket, "AGENTGATE_CONTROL_SOCKET",
       "The control API; mode 0660, group agentgate where there is one");
  path("--engine-socket", it.engine_socket, "AGENTGATE_ENGINE_SOCKET", "Docker's API");
  path("--engine-pid-file", it.engine_pid_file, "AGENTGATE_ENGINE_PID_FILE",
       "Names the engine's process when its socket is systemd's");
  path("--daemon-json", it.daemon_json, "AGENTGATE_DAEMON_JSON", "The engine's configuration");
  app.add_option("--audit-file", it.audit_file,
                 "One JSON line for each arm, disarm and refusal; empty: none")
      ->envname("AGENTGATE_AUDIT_FILE")
      ->capture_default_str();
  app.add_option("--resolver", it.resolvers,
                 "DNS server for the names in policies, ADDRESS[:PORT]; may be given more than "
                 "once; the host's own without it")
      ->envname("AGENTGATE_RESOLVER")
      ->check(CLI::Validator(check_resolver, "ADDRESS"))
      ->delimiter(',');
  app.add_option("--log-level", it.log_level, "trace, debug, info, warn or error")
      ->envname("AGENTGATE_LOG_LEVEL")
      ->check(CLI::IsMember({"trace", "debug", "info", "warn", "error"}))
      ->capture_default_str();
  app.add_option("--orphan-age", it.orphan_age,
                 "Seconds after which an endpoint that no container joined is removed")
      ->envname("AGENTGATE_ORPHAN_AGE")
      ->check(CLI::Range(1, 86400))
      ->capture_default_str();
  app.set_version_flag("--version", "agentgated " AGENTGATE_VERSION);
  try {
    app.parse(argc, argv);
    if (!it.audit_file.empty() && it.audit_file[0] != '/') {
      throw CLI::ValidationError("--audit-file", "must be an absolute path");
    }
  } catch (const CLI::ParseError& error) {
    out.exit = app.exit(error, std::cout, std::cerr) == 0 ? 0 : kExitUsage;
  }
  return out;
}

}  // namespace agentgate
