// SPDX-License-Identifier: GPL-2.0-or-later
//
// Docker's embedded resolver answers on 127.0.0.11 in a container and passes on what it does not
// know. Engines before 25.0.5 pass it to a loopback server of the host's resolver file from the
// host's network namespace (CVE-2024-29018); 25.0.5 and newer do not for endpoints like ours, which
// have half routes in place of a gateway. Servers of a container's own (--dns) or of the engine's
// configuration are always asked through the container's port.
//
// The engine's version decides, since there is nothing to probe: no API tells what the resolver
// does, and a query that is sent to find out is the leak itself.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <sstream>

#include "plugin/arm/checks.h"
#include "plugin/arm/engine_files.h"

namespace agentgate::arm {
namespace {

using TimePoint = std::chrono::system_clock::time_point;

constexpr std::array kFixed = {25, 0, 5};
// When a process started is known to a second or two.
constexpr std::chrono::seconds kProcessSlack{2};
// The engine reads the resolver file a moment before it takes the container to be started.
constexpr std::chrono::seconds kReadBefore{1};

// Where an engine looks that finds systemd's stub, 127.0.0.53, as the only server.
constexpr const char* kSystemdStub = "127.0.0.53";
constexpr const char* kBehindTheStub = "/run/systemd/resolve/resolv.conf";

// A version that cannot be read is taken for an old one.
bool is_fixed(const std::string& version) {
  std::array<int, 3> seen{};
  const char* at = version.data();
  const char* const end = at + version.size();
  for (std::size_t i = 0; i < seen.size(); ++i) {
    if (i > 0 && (at == end || *at++ != '.')) return false;
    const auto [rest, error] = std::from_chars(at, end, seen[i]);
    if (error != std::errc()) return false;
    at = rest;
  }
  return seen >= kFixed;
}

std::vector<std::string> servers_of(const std::string& text) {
  static constexpr std::string_view key = "nameserver";
  std::vector<std::string> out;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string word;
    words >> word;
    if (word.rfind(key, 0) != 0) continue;
    std::string server = word.substr(key.size());
    if (server.empty()) words >> server;
    if (!server.empty()) out.push_back(std::move(server));
  }
  return out;
}

bool is_loopback(const std::string& server) {
  return server.rfind("127.", 0) == 0 || server == "::1";
}

TimePoint time_of(const timespec& time) {
  return TimePoint(std::chrono::duration_cast<TimePoint::duration>(
      std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec)));
}

// When it became the file that it is: of the inode, which nobody can set, and of a symbolic link
// that may have pointed elsewhere. The epoch where there is none.
Result<TimePoint> changed(const std::string& path, std::int64_t engine_pid, const System& system) {
  const EngineFiles files(engine_pid, system);
  TimePoint out{};
  for (const int flags : {O_PATH, O_PATH | O_NOFOLLOW}) {
    const auto file = files.open(path, flags);
    if (!file && file.error().code == ENOENT) continue;
    if (!file) return tl::unexpected(file.error());
    struct stat status {};
    if (::fstat(file->get(), &status) < 0) return fail_errno("stat " + path);
    out = std::max(out, time_of(status.st_ctim));
  }
  return out;
}

Result<TimePoint> started(const ProcessIdentity& process, const System& system) {
  const std::string path = system.proc + "/stat";
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("btime ", 0) != 0) continue;
    const long long boot = std::strtoll(line.c_str() + 6, nullptr, 10);
    const auto seconds = process.start_time / static_cast<std::uint64_t>(::sysconf(_SC_CLK_TCK));
    return TimePoint(std::chrono::seconds(boot + static_cast<long long>(seconds)));
  }
  return fail("read " + path, "it does not say when the host was booted", EPROTO);
}

// "2026-01-02T03:04:05.123456789Z", always UTC.
Result<TimePoint> parse_time(const std::string& text) {
  std::tm time{};
  const char* rest = ::strptime(text.c_str(), "%Y-%m-%dT%H:%M:%S", &time);
  if (rest == nullptr) return fail("read a time of the engine's", text, EPROTO);
  double fraction = 0;
  if (*rest == '.') fraction = std::strtod(rest, nullptr);
  return TimePoint(std::chrono::seconds(::timegm(&time)) +
                   std::chrono::milliseconds(static_cast<long>(fraction * 1000)));
}

// `--dns ADDRESS` of the engine's command line.
std::string dns_argument(std::int64_t pid, const System& system) {
  std::ifstream arguments(system.proc + "/" + std::to_string(pid) + "/cmdline");
  for (std::string argument; std::getline(arguments, argument, '\0');) {
    if (argument.rfind("--dns=", 0) == 0) return argument.substr(6);
    if (argument == "--dns" && std::getline(arguments, argument, '\0')) return argument;
  }
  return {};
}

}  // namespace

Result<EngineResolver> find_engine_resolver(const std::string& engine_version,
                                            const ProcessIdentity& engine,
                                            const std::string& daemon_json,
                                            const std::string& resolv_conf, const System& system) {
  EngineResolver out;
  const std::string name = "engine " + engine_version;
  if (is_fixed(engine_version)) {
    out.seen = name + " asks nobody from the host for agentgate networks";
    return out;
  }
  auto text = read_as_engine(daemon_json, engine.pid, system);
  if (!text) return tl::unexpected(text.error());
  engine::DnsSettings settings;
  if (*text) {
    auto read = engine::dns_from_daemon_json(**text);
    if (!read) return tl::unexpected(read.error());
    settings = std::move(*read);
  }
  const auto start = started(engine, system);
  if (!start) return tl::unexpected(start.error());
  const auto configured = changed(daemon_json, engine.pid, system);
  if (!configured) return tl::unexpected(configured.error());
  const bool settings_hold = *configured <= *start + kProcessSlack;
  const std::string argument = dns_argument(engine.pid, system);
  if (!argument.empty() || (!settings.servers.empty() && settings_hold)) {
    out.seen = name + " asks " + (argument.empty() ? settings.servers.front() : argument) + " of " +
               (argument.empty() ? daemon_json : "its --dns") + " through the container's port";
    out.since = *start + kProcessSlack;
    out.since_what = "the engine was started";
    return out;
  }
  std::string path = settings.resolv_conf.empty() ? resolv_conf : settings.resolv_conf;
  for (;;) {
    text = read_as_engine(path, engine.pid, system);
    if (!text) return tl::unexpected(text.error());
    const auto at = changed(path, engine.pid, system);
    if (!at) return tl::unexpected(at.error());
    if (*at + kReadBefore >= out.since) {
      out.since = *at + kReadBefore;
      out.since_what = path + " was changed";
    }
    const auto servers = *text ? servers_of(**text) : std::vector<std::string>();
    // It looks for the stub once, when it starts.
    if (path == resolv_conf && settings.resolv_conf.empty() &&
        servers == std::vector<std::string>{kSystemdStub} && *at <= *start + kProcessSlack) {
      path = kBehindTheStub;
      continue;
    }
    const auto loopback = std::find_if(servers.begin(), servers.end(), is_loopback);
    out.by_host = loopback != servers.end();
    out.seen = name;
    if (out.by_host) {
      out.seen.append(" asks ").append(*loopback).append(" of ").append(path).append(
          " from the host's network namespace (CVE-2024-29018)");
    } else {
      out.seen.append(" finds no loopback server in ").append(path);
    }
    break;
  }
  // Another "resolv-conf" than the engine knows says nothing about the one that it reads.
  out.by_host = out.by_host || (!settings_hold && !settings.resolv_conf.empty());
  if (out.by_host && !settings_hold) {
    out.seen += "; " + daemon_json + " was changed after the engine started: restart the engine";
  }
  return out;
}

Evidence check_resolver(const engine::Container& container, const RuntimeSeen& runtime,
                        const policy::Policy& policy,
                        const std::function<Result<EngineResolver>()>& by_engine,
                        std::string& note) {
  if (runtime.own_loopback) return "the engine's resolver is not there for its guest";
  if (!container.dns.empty()) {
    return "the engine's resolver asks its own " + container.dns.front() + " through its port";
  }
  const auto resolver = by_engine();
  if (!resolver) return tl::unexpected(resolver.error());
  const auto start = parse_time(container.started_at);
  if (!start) return tl::unexpected(start.error());
  std::string problem;
  if (resolver->by_host) {
    problem = resolver->seen;
  } else if (resolver->since != TimePoint() && *start < resolver->since) {
    problem = resolver->seen + ", but the container was started before " + resolver->since_what +
              " and may have been given other servers: restart it";
  } else {
    return resolver->seen;
  }
  if (policy.accept_host_resolver) {
    note = "its DNS queries may leave by the host, past the gate: " + problem +
           " (\"accept_host_resolver\" of policy " + policy.name + ")";
    return "the engine's resolver may ask from the host, which the policy accepts";
  }
  return fail(
      "",
      "its DNS queries would leave by the host, past the gate: " + problem +
          "; recreate it with --dns ADDRESS or --runtime runsc, set \"dns\" in daemon.json, "
          "or set \"accept_host_resolver\" in policy " +
          policy.name,
      EPERM);
}

}  // namespace agentgate::arm
