// SPDX-License-Identifier: GPL-2.0-or-later
//
// agentgated: the daemon. It puts the parts together and waits for a signal; it changes nothing in
// the kernel when it ends, so released containers stay released and closed ones closed.
//
// Order of start: the host begins its work on its own thread, then the driver's socket listens at
// once (Docker gives a plugin a few seconds, and asks it for its capabilities before anything
// else), then the control socket.
#include <CLI/CLI.hpp>
#include <grp.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include <csignal>

#include "plugin/arm/pipeline.h"
#include "plugin/control/control.h"
#include "plugin/driver/driver.h"
#include "plugin/engine/engine.h"
#include "plugin/host/host.h"
#include "plugin/http/server.h"

namespace {

using namespace agentgate;  // NOLINT(google-build-using-namespace): this file is the program

struct Settings {
  std::string state_directory = "/var/lib/agentgate";
  std::string policy_directory = "/etc/agentgate/policies";
  std::string driver_socket = "/run/docker/plugins/agentgate.sock";
  std::string control_socket = "/run/agentgate/agentgate.sock";
  std::string engine_socket = "/var/run/docker.sock";
  std::string engine_pid_file = "/var/run/docker.pid";
  std::string daemon_json = "/etc/docker/daemon.json";
  std::string audit_file = "/var/log/agentgate/audit.jsonl";
  std::vector<std::string> resolvers;
  std::string log_level = "info";
  unsigned orphan_age = 60;
};

void set_up_log(const std::string& level) {
  auto logger = spdlog::stderr_color_mt("agentgated");
  // Under systemd the journal has the time, and takes the priority from <N>.
  if (::getenv("JOURNAL_STREAM") != nullptr) {
    logger->set_pattern("%l: %v");
  } else {
    logger->set_pattern("%Y-%m-%dT%H:%M:%S.%e%z %l: %v");
  }
  spdlog::set_default_logger(logger);
  spdlog::set_level(spdlog::level::from_str(level));
}

int run(const Settings& settings) {
  set_up_log(settings.log_level);
  // Before any thread starts, so that all of them have it.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  ::umask(0077);

  host::Options host_options;
  host_options.state_directory = settings.state_directory;
  host_options.orphan_age = std::chrono::seconds(settings.orphan_age);
  host_options.compile_policy = [&](const std::string& name, const policy::Resolution& resolution,
                                    const std::vector<IpAddress>& own) {
    return arm::compile_from_disk(settings.policy_directory, name, resolution, own);
  };
  const auto host = host::Host::start(host_options);

  driver::Driver driver(*host, [&](const NetworkId& id) -> std::optional<NetworkRecord> {
    const auto networks = host->networks();
    if (!networks) return std::nullopt;
    for (const NetworkRecord& network : *networks) {
      if (network.id == id) return network;
    }
    return std::nullopt;
  });
  http::Options driver_options;
  driver_options.socket = settings.driver_socket;
  auto driver_server = http::Server::start(
      driver_options, [&](const http::Request& request) { return driver.handle(request); });
  if (!driver_server) {
    spdlog::critical("{}", driver_server.error().to_string());
    return 1;
  }

  engine::Engine engine({settings.engine_socket, settings.engine_pid_file});
  arm::Options arm_options;
  arm_options.policy_directory = settings.policy_directory;
  arm_options.daemon_json = settings.daemon_json;
  arm_options.audit_file = settings.audit_file;
  arm_options.resolvers = settings.resolvers;
  arm::Pipeline pipeline(arm_options, *host, engine);
  control::Control control(pipeline);
  http::Options control_options;
  control_options.socket = settings.control_socket;
  if (const group* members = ::getgrnam("agentgate")) {
    control_options.mode = 0660;
    control_options.group = members->gr_gid;
  }
  auto control_server = http::Server::start(
      control_options, [&](const http::Request& request) { return control.handle(request); });
  if (!control_server) {
    spdlog::critical("{}", control_server.error().to_string());
    return 1;
  }
  ::sd_notify(0, "READY=1");
  spdlog::info("listening on {} and {}", settings.driver_socket, settings.control_socket);

  // A start that failed for good (a second daemon, a missing kernel feature) ends the process.
  for (;;) {
    const timespec patience{1, 0};
    const int signal = ::sigtimedwait(&signals, nullptr, &patience);
    if (signal > 0) {
      spdlog::info("signal {}: stopping; the kernel's state stays as it is", signal);
      break;
    }
    const host::Snapshot snapshot = host->snapshot();
    if (!snapshot.ready && !snapshot.failure.empty()) {
      spdlog::critical("cannot work: {}", snapshot.failure);
      ::sd_notify(0, ("STATUS=" + snapshot.failure).c_str());
      (*control_server)->stop();
      (*driver_server)->stop();
      return 1;
    }
  }
  ::sd_notify(0, "STOPPING=1");
  (*control_server)->stop();
  (*driver_server)->stop();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Docker network driver whose containers start closed. See agentgated(8).",
               "agentgated");
  Settings settings;
  const auto path = [&](const char* name, const char* variable, std::string& value,
                        const char* help) {
    app.add_option(name, value, help)->envname(variable)->capture_default_str();
  };
  path("--state-directory", "AGENTGATE_STATE_DIRECTORY", settings.state_directory,
       "networks and endpoints, one file each");
  path("--policy-directory", "AGENTGATE_POLICY_DIRECTORY", settings.policy_directory,
       "policy files");
  path("--driver-socket", "AGENTGATE_DRIVER_SOCKET", settings.driver_socket,
       "where Docker finds the driver");
  path("--control-socket", "AGENTGATE_CONTROL_SOCKET", settings.control_socket,
       "where the command line finds the daemon");
  path("--engine-socket", "AGENTGATE_ENGINE_SOCKET", settings.engine_socket, "Docker's API");
  path("--engine-pid-file", "AGENTGATE_ENGINE_PID_FILE", settings.engine_pid_file,
       "names the engine's process when its socket is the service manager's");
  path("--daemon-json", "AGENTGATE_DAEMON_JSON", settings.daemon_json,
       "the engine's configuration file");
  path("--audit-file", "AGENTGATE_AUDIT_FILE", settings.audit_file,
       "one line per arm, disarm and refusal; empty: none");
  app.add_option("--resolver", settings.resolvers,
                 "DNS server (ADDRESS or ADDRESS:PORT) for the names of policies; repeatable; "
                 "default: the host's")
      ->envname("AGENTGATE_RESOLVER");
  app.add_option("--log-level", settings.log_level, "least severity that is logged")
      ->envname("AGENTGATE_LOG_LEVEL")
      ->check(CLI::IsMember({"debug", "info", "warning", "error"}))
      ->capture_default_str();
  app.add_option("--orphan-age", settings.orphan_age,
                 "seconds after which an endpoint that nobody joined is removed")
      ->envname("AGENTGATE_ORPHAN_AGE")
      ->check(CLI::Range(1U, 86400U))
      ->capture_default_str();
  app.set_version_flag("--version", AGENTGATE_VERSION);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return code == 0 ? 0 : 64;
  }
  return run(settings);
}
