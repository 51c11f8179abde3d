// SPDX-License-Identifier: GPL-2.0-or-later
//
// agentgated: wires the folders together, starts and stops them in order.
//
// Docker may be waiting for the driver's socket while it boots, so that one listens before the
// state is restored; requests that need the state wait for it, the others are answered at once.
// A stop leaves the kernel as it is: closed ports stay closed, released ones released.
#include <grp.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <systemd/sd-daemon.h>

#include <chrono>
#include <csignal>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "plugin/arm/audit.h"
#include "plugin/arm/pipeline.h"
#include "plugin/control/codec.h"
#include "plugin/control/control.h"
#include "plugin/daemon/logging.h"
#include "plugin/daemon/options.h"
#include "plugin/daemon/privileges.h"
#include "plugin/driver/driver.h"
#include "plugin/engine/engine.h"
#include "plugin/guard/guard.h"
#include "plugin/host/host.h"
#include "plugin/http/server.h"
#include "plugin/store/store.h"

namespace agentgate {
namespace {

// Long enough that Docker gets the reason at once rather than waiting 15 s for a socket, short
// enough that the service manager soon tries again.
constexpr int kFailedFor = 10;  // seconds

constexpr auto kGuardPatience = std::chrono::milliseconds(5000);

gid_t control_group() {
  const group* found = ::getgrnam("agentgate");
  return found != nullptr ? found->gr_gid : 0;
}

std::optional<NetworkRecord> network_of(host::Host& host, const NetworkId& id) {
  const auto networks = host.networks();
  if (!networks) return std::nullopt;
  for (const NetworkRecord& network : *networks) {
    if (network.id == id) return network;
  }
  return std::nullopt;
}

using Servers = std::vector<std::unique_ptr<http::Server>>;
// The sockets are bound before there is a driver, see run().
using LaterDriver = std::promise<driver::Driver*>;

// On failure `made` is null: a request that came meanwhile must not wait for ever.
Result<Servers> listen_for_docker(const DaemonOptions& options, LaterDriver& made) {
  Servers servers;
  const std::shared_future<driver::Driver*> later = made.get_future().share();
  for (const std::string& socket : options.driver_sockets) {
    http::Options to;
    to.socket = socket;
    to.error_body = [](int /*status*/, const std::string& text) {
      return driver::encode_error("agentgate: " + text);
    };
    auto server = http::Server::start(to, [later](const http::Request& request) {
      driver::Driver* driver = later.get();
      if (driver == nullptr) {
        return http::Response{500, driver::encode_error("agentgate: it cannot start; see its log"),
                              "application/json"};
      }
      return driver->handle(request);
    });
    if (!server) {
      made.set_value(nullptr);
      return tl::unexpected(server.error());
    }
    servers.push_back(std::move(*server));
  }
  return servers;
}

Result<std::unique_ptr<http::Server>> listen_for_people(const DaemonOptions& options,
                                                        control::Control& control) {
  http::Options to;
  to.socket = options.control_socket;
  to.mode = 0660;
  to.group = control_group();
  to.error_body = [](int /*status*/, const std::string& text) {
    return control::encode_error({"request", text});
  };
  return http::Server::start(
      to, [&control](const http::Request& request) { return control.handle(request); });
}

// Until a signal ends it. 0: asked to stop; 1: the start failed.
int wait_for_end(const sigset_t& signals, host::Host& host) {
  bool told_ready = false;
  int failed_for = 0;
  for (;;) {
    const timespec second{1, 0};
    const int signal = ::sigtimedwait(&signals, nullptr, &second);
    if (signal == SIGTERM || signal == SIGINT) {
      spdlog::info("stopping on signal {}; the kernel's state stays as it is", signal);
      return 0;
    }
    if (told_ready) continue;
    const host::Snapshot snapshot = host.snapshot();
    if (snapshot.ready) {
      told_ready = true;
      ::sd_notifyf(0, "STATUS=%zu networks, %zu endpoints at start", snapshot.networks.size(),
                   snapshot.endpoints.size());
    } else if (!snapshot.failure.empty() && failed_for++ >= kFailedFor) {
      spdlog::critical("giving up, to be started again: {}", snapshot.failure);
      return 1;
    }
  }
}

arm::Report report_of(const host::Repair& repair) {
  arm::Report out;
  out.operation = "repair";
  out.started_at = repair.at;
  out.milliseconds = repair.milliseconds;
  out.outcome = repair.left.empty() ? arm::Outcome::repaired : arm::Outcome::inconsistent;
  const auto text = [](const netdriver::Difference& one) {
    return one.where + ": expected '" + one.expected + "', found '" + one.found + "'";
  };
  for (const auto& one : repair.found) out.differences.push_back(text(one));
  if (!repair.left.empty()) out.reason = "not put back: " + text(repair.left.front());
  for (const EndpointId& id : repair.closed) out.notes.push_back("closed " + port_name(id).str());
  for (const EndpointId& id : repair.gone) {
    out.notes.push_back("the link of " + port_name(id).str() + " was taken away");
  }
  return out;
}

int run(const DaemonOptions& options) {
  // Blocked before any thread exists, so that all of them leave signals to wait_for_end().
  sigset_t signals;
  ::sigemptyset(&signals);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) ::sigaddset(&signals, signal);
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  ::signal(SIGPIPE, SIG_IGN);  // NOLINT(cert-err33-c)
  ::umask(0077);

  if (const Status dropped = drop_privileges(); !dropped) {
    spdlog::critical("{}", dropped.error().to_string());
    return 1;
  }
  // A second daemon must say so and leave: before it touches the kernel, where it would take the
  // first one's links for leftovers, and rather than answer Docker with errors.
  if (const auto probe = store::Store::open(options.state_directory); !probe) {
    spdlog::critical("{}", probe.error().to_string());
    return 1;
  }
  LaterDriver driver_made;
  auto driver_servers = listen_for_docker(options, driver_made);
  if (!driver_servers) {
    spdlog::critical("{}", driver_servers.error().to_string());
    return 1;
  }

  host::Options host_options;
  host_options.state_directory = options.state_directory;
  host_options.orphan_age = std::chrono::seconds(options.orphan_age);
  host_options.runs = [](const ProcessIdentity& process) {
    const auto now = engine::process_identity(process.pid);
    return now && *now == process;
  };
  // A writer of its own: the first repair may come before there is a pipeline.
  arm::Audit audit(options.audit_file);
  host_options.on_repair = [&audit](const host::Repair& repair) {
    if (const Status written = audit.write(report_of(repair)); !written) {
      spdlog::error("audit: {}", written.error().to_string());
    }
  };
  const auto host = host::Host::start(std::move(host_options));

  driver::Driver driver(*host, [&](const NetworkId& id) { return network_of(*host, id); });
  driver_made.set_value(&driver);

  engine::Engine engine({options.engine_socket, options.engine_pid_file});
  arm::Options arm_options;
  arm_options.policy_directory = options.policy_directory;
  arm_options.daemon_json = options.daemon_json;
  arm_options.audit_file = options.audit_file;
  arm_options.resolvers = options.resolvers;
  arm::Pipeline pipeline(std::move(arm_options), *host, engine);
  // One of its own: the guard interrupts it at the end, and shall not wait as long as a person
  // does.
  engine::Engine watched_engine({options.engine_socket, options.engine_pid_file, kGuardPatience});
  const auto guard = guard::Guard::start({}, watched_engine, pipeline);
  control::Control control(pipeline);
  auto control_server = listen_for_people(options, control);
  int exit = 1;
  if (control_server) {
    ::sd_notify(0, "READY=1");
    spdlog::info("agentgated {} listens", AGENTGATE_VERSION);
    exit = wait_for_end(signals, *host);
    ::sd_notify(0, "STOPPING=1");
    (*control_server)->stop();
  } else {
    spdlog::critical("{}", control_server.error().to_string());
  }
  guard->stop();
  for (auto& server : *driver_servers) server->stop();  // before the driver goes
  return exit;
}

}  // namespace
}  // namespace agentgate

int main(int argc, char** argv) {
  try {
    const auto parsed = agentgate::parse_options(argc, argv);
    if (parsed.exit >= 0) return parsed.exit;
    agentgate::start_logging(parsed.options.log_level);
    return agentgate::run(parsed.options);
  } catch (const std::exception& error) {
    spdlog::critical("{}", error.what());
    return 1;
  }
}
