// SPDX-License-Identifier: GPL-2.0-or-later
//
// The Docker Engine API, as far as pipeline and guard need it: ping, version, info, inspect,
// events.
//
// Knows HTTP, JSON and the API's versions; judges nothing: what a container must be like is the
// pipeline's business. Never used from a driver request (DESIGN.md, 2.8).
// Threading: an Engine may be used from several threads; requests are independent.
// Errors: code ENOENT: no such container or network, and never anything else; ECONNREFUSED, EACCES
// and other errno values: the engine cannot be reached; EPROTO: an answer that is not what the API
// promises; ETIMEDOUT: no whole answer within Options::timeout; ECANCELED: interrupt() was called.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "netdriver/types.h"
#include "plugin/model.h"

namespace agentgate::engine {

// One network of a container (NetworkSettings.Networks).
struct Attachment {
  std::string name;
  std::string network_id;
  std::string endpoint_id;
  std::string mac;       // as the engine says it, may be empty
  std::string address4;  // may be empty
  std::string address6;  // may be empty
};

struct Container {
  std::string id;
  std::string name;  // without the leading slash
  std::string image;
  std::string runtime;  // HostConfig.Runtime, a key of the engine's runtime table
  std::string restart_policy;
  std::string network_mode;
  std::string pid_mode, ipc_mode, uts_mode, userns_mode, cgroupns_mode;
  bool privileged = false;
  bool running = false, paused = false, restarting = false, dead = false;
  std::int64_t pid = 0;
  std::string started_at;
  std::string sandbox_key;
  std::string resolv_conf_path;
  std::vector<std::string> dns;              // HostConfig.Dns: servers of its own
  std::vector<std::string> published_ports;  // "80/tcp" of HostConfig.PortBindings with a binding
  bool publish_all_ports = false;
  std::vector<std::string> capabilities_added;
  std::string swarm_service;  // whose task it is, by its label; empty when it is none's
  std::vector<Attachment> attachments;  // sorted by name
};

struct Runtime {
  std::string path;    // binary; empty when the runtime is a shim
  std::string type;    // runtimeType, e.g. io.containerd.runsc.v1; empty when it is a binary
  std::string binary;  // options.BinaryName of a runc shim; empty: runc
  std::vector<std::string> arguments;
  bool operator==(const Runtime&) const = default;
};

struct Info {
  std::string id;
  std::string server_version;
  std::string docker_root;
  std::string default_runtime;
  std::map<std::string, Runtime> runtimes;
};

// Who answers on the socket: the process, from the kernel. With socket activation the socket's
// peer is the service manager; then the pid file names the process.
struct Identity {
  ProcessIdentity process;
  std::string api_version;  // negotiated, "1.41"
  bool operator==(const Identity&) const = default;
};

// Something that the engine did (GET /events).
struct Event {
  std::string type;       // "container" or "network"
  std::string action;     // "start", "connect"
  std::string container;  // id of the container that it is about; empty when it names none
  std::string name;       // of the container or the network, where the engine says it
  bool operator==(const Event&) const = default;
};

class EventSink {
 public:
  virtual ~EventSink() = default;
  virtual void connected() = 0;  // the engine has agreed; nothing from `since` on is missed now
  virtual void event(const Event& event) = 0;
};

// What is asked of an engine; tests put their own in its place.
class Api {
 public:
  virtual ~Api() = default;
  // Pings and negotiates the API version (the engine's own, at most the newest known here).
  virtual Result<Identity> identify() = 0;
  // `reference` is a name or an id. ENOENT when there is none.
  virtual Result<Container> inspect(const std::string& reference) = 0;
  virtual Result<Info> info() = 0;
  // Endpoint ids that the engine has on a network. ENOENT: it does not know the network.
  virtual Result<std::vector<std::string>> network_endpoints(const std::string& network_id) = 0;
  // What may change the state of a container or where it is attached, from `since` on. Returns when
  // the stream ends, which is always an error: ECONNRESET: the engine closed it; EPROTO: it sent
  // something that is not an event, or a line beyond kMaxEventLine; ETIMEDOUT: it did not agree
  // within the timeout or stopped in the middle of a line. The sink must not block for long: the
  // engine drops events for those who do not read them.
  virtual Status events(std::chrono::system_clock::time_point since, EventSink& sink) = 0;
  // For the end: what is under way, in any thread, fails with ECANCELED, and so does all that is
  // asked from now on.
  virtual void interrupt() = 0;
};

constexpr std::size_t kMaxEventLine = 1 << 20;

class Engine : public Api {
 public:
  struct Options {
    std::string socket = "/var/run/docker.sock";
    std::string pid_file = "/var/run/docker.pid";
    std::chrono::milliseconds timeout{10000};  // for a whole request and its answer
  };
  explicit Engine(Options options);
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  Result<Identity> identify() override;
  Result<Container> inspect(const std::string& reference) override;
  Result<Info> info() override;
  Result<std::vector<std::string>> network_endpoints(const std::string& network_id) override;
  Status events(std::chrono::system_clock::time_point since, EventSink& sink) override;
  void interrupt() override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The decoders by themselves, for tests and fuzzing. They never throw.
[[nodiscard]] Result<Container> container_from_json(std::string_view text);
[[nodiscard]] Result<Info> info_from_json(std::string_view text);
// "runtimes" of the engine's configuration file; none is an empty map.
[[nodiscard]] Result<std::map<std::string, Runtime>> runtimes_from_daemon_json(
    std::string_view text);
struct DnsSettings {
  std::vector<std::string> servers;  // "dns"
  std::string resolv_conf;           // "resolv-conf", where it is not the usual file
};
[[nodiscard]] Result<DnsSettings> dns_from_daemon_json(std::string_view text);
[[nodiscard]] Result<std::vector<std::string>> endpoints_from_json(std::string_view text);
[[nodiscard]] Result<Event> event_from_json(std::string_view text);

// Field 22 of PROC/PID/stat. ESRCH: no such process.
[[nodiscard]] Result<ProcessIdentity> process_identity(std::int64_t pid,
                                                       const std::string& proc = "/proc");

}  // namespace agentgate::engine
