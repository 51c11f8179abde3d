// SPDX-License-Identifier: GPL-2.0-or-later
//
// What a container must be like before its port is released, one function per reason to refuse.
// Those that take the engine's description alone are pure; the others read /proc and files, whose
// place System names. Each returns what it saw (evidence), or an error whose text says what is
// wrong and the mend. Threading: any.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "netdriver/gate_kernel.h"
#include "plugin/engine/engine.h"
#include "plugin/model.h"
#include "plugin/policy/policy.h"

namespace agentgate::arm {

using Evidence = Result<std::string>;

// Where the kernel shows itself; tests put folders of their own in its place.
struct System {
  std::string proc = "/proc";
  std::string cgroups = "/sys/fs/cgroup";
};

// Capabilities of the calling thread (CapEff of /proc/thread-self/status).
[[nodiscard]] Evidence check_capabilities(const System& system);
// The daemon and the engine's process are in one network namespace. Reads /proc/PID/ns/net.
[[nodiscard]] Evidence check_namespace(std::int64_t engine_pid, const System& system);
// What a file of the engine's holds (engine_files.h); nothing where there is none.
[[nodiscard]] Result<std::optional<std::string>> read_as_engine(const std::string& path,
                                                                std::int64_t engine_pid,
                                                                const System& system);
// SHA-256 of such a file as hex, or "absent".
[[nodiscard]] Evidence hash_of(const std::string& path, std::int64_t engine_pid,
                               const System& system);
// Forwarding is on for the families that the port has. Reads /proc/sys/net.
[[nodiscard]] Evidence check_forwarding(const EndpointRecord& endpoint, const System& system);

// Pure.
[[nodiscard]] Evidence check_paused(const engine::Container& container);
[[nodiscard]] Evidence check_restart_policy(const engine::Container& container);
[[nodiscard]] Evidence check_networks(const engine::Container& container);
[[nodiscard]] Evidence check_privileges(const engine::Container& container);
[[nodiscard]] Evidence check_ports(const engine::Container& container);

// What a runtime is, whatever it is called: "runsc" or "runc".
struct RuntimeSeen {
  std::string kind;
  std::string evidence;
  // What listens on a loopback address of the container's namespace is not there for its programs:
  // gVisor with its own network stack.
  bool own_loopback = false;
};
// By the program's own text, read where the engine finds it: in the root directory and the PATH of
// the engine's process. Remembers a program by inode, size and time.
[[nodiscard]] Result<RuntimeSeen> identify_runtime(const std::string& name,
                                                   const engine::Runtime& runtime,
                                                   std::int64_t engine_pid, const System& system);
// The container's runtime by the engine's runtime table, and whether the policy allows it.
[[nodiscard]] Result<RuntimeSeen> check_runtime(const engine::Container& container,
                                                const engine::Info& info,
                                                const policy::Policy& policy,
                                                std::int64_t engine_pid, const System& system);

// From where the engine's embedded resolver asks for containers that have no servers of their own.
struct EngineResolver {
  bool by_host = false;  // from the host's network namespace, where no port is
  std::string seen;      // "engine 20.10.24 asks 127.0.0.1 of /etc/resolv.conf"
  // It reads its files when it starts, and the resolver file when a container starts: so much holds
  // for containers that started after this, because of that.
  std::chrono::system_clock::time_point since;
  std::string since_what;
};
[[nodiscard]] Result<EngineResolver> find_engine_resolver(const std::string& engine_version,
                                                          const ProcessIdentity& engine,
                                                          const std::string& daemon_json,
                                                          const std::string& resolv_conf,
                                                          const System& system);
// The engine does not send the container's DNS queries from the host's network namespace, or the
// policy accepts it: then `note` says so. `by_engine` is asked for only when it decides.
[[nodiscard]] Evidence check_resolver(const engine::Container& container,
                                      const RuntimeSeen& runtime, const policy::Policy& policy,
                                      const std::function<Result<EngineResolver>()>& by_engine,
                                      std::string& note);

// The kernel's word on whether the process is frozen, where its cgroup can be read: in our view of
// the cgroups, else in the engine's. Only runc
// pauses by the freezer: runsc asks its own kernel to stop, and the host's shows nothing of it.
[[nodiscard]] Evidence check_frozen(std::int64_t pid, const std::string& runtime_kind,
                                    std::int64_t engine_pid, const System& system);
// Which processes are in which network namespace: one look through /proc, for as many containers
// as one likes.
using Namespace = std::pair<dev_t, ino_t>;
using Occupants = std::map<Namespace, std::vector<std::string>>;
// Where the processes are that the kernel does not let us look at (EACCES, EPERM): nowhere known.
inline constexpr Namespace kHidden{};
// What ends meanwhile is left out; any other error than those two is returned.
[[nodiscard]] Result<Occupants> find_occupants(const System& system);
// The network namespace that a file stands for. What stat(2) says where there is none.
[[nodiscard]] Result<Namespace> namespace_of(const std::string& path);
// No process outside the container's cgroup is in its network namespace.
[[nodiscard]] Evidence check_alone(std::int64_t pid, const std::string& container_id, int netns_fd,
                                   const System& system, const Occupants& occupants);

// What the container's own links say (pipeline step 7): exactly one besides lo and the tunnel
// modules' own, with the endpoint's MAC and no address but the endpoint's. Under runsc the
// addresses have left the host's view.
struct LinkSeen {
  netdriver::SandboxLink link;
  std::string evidence;
};
[[nodiscard]] Result<LinkSeen> check_links(const std::vector<netdriver::SandboxLink>& links,
                                           const EndpointRecord& endpoint,
                                           bool addresses_may_be_absent);

}  // namespace agentgate::arm
