// SPDX-License-Identifier: GPL-2.0-or-later
//
// What a container must be like before its port is released, one function per reason to refuse.
// Those that take the engine's description are pure; the others read /proc and files, and say so.
// Each returns what it saw (evidence), or an error whose text says what is wrong and the mend.
#pragma once

#include <string>

#include "netdriver/gate_kernel.h"
#include "plugin/engine/engine.h"
#include "plugin/model.h"
#include "plugin/policy/policy.h"

namespace agentgate::arm {

using Evidence = Result<std::string>;

// Capabilities of the calling process (CapEff of /proc/thread-self/status).
[[nodiscard]] Evidence check_capabilities();
// The daemon and the engine's process are in one network namespace. Reads /proc/PID/ns/net.
[[nodiscard]] Evidence check_namespace(std::int64_t engine_pid);
// SHA-256 of the file as hex, or "absent".
[[nodiscard]] Evidence hash_of(const std::string& path);
// Forwarding is on for the families that the port has. Reads /proc/sys/net.
[[nodiscard]] Evidence check_forwarding(const EndpointRecord& endpoint);

// Pure.
[[nodiscard]] Evidence check_paused(const engine::Container& container);
[[nodiscard]] Evidence check_restart_policy(const engine::Container& container);
[[nodiscard]] Evidence check_networks(const engine::Container& container);
[[nodiscard]] Evidence check_privileges(const engine::Container& container);
[[nodiscard]] Evidence check_ports(const engine::Container& container);

// The engine's runtime table says what the container's runtime is; what it says is verified on the
// binary itself (its own text, not its name). Reads the file, remembers it by inode and time.
[[nodiscard]] Evidence check_runtime(const engine::Container& container, const engine::Info& info,
                                     const policy::Policy& policy);
// "runsc", "runc", or what is wrong with it.
[[nodiscard]] Evidence identify_runtime(const std::string& name, const engine::Runtime& runtime);

// The kernel's word on whether the process is frozen, where its cgroup can be read.
[[nodiscard]] Evidence check_frozen(std::int64_t pid);
// No process outside the container's cgroup is in its network namespace. Reads /proc.
[[nodiscard]] Evidence check_alone(std::int64_t pid, int netns_fd);

// What the container's own links say (pipeline step 7).
[[nodiscard]] Evidence check_links(const std::vector<netdriver::SandboxLink>& links,
                                   const EndpointRecord& endpoint, bool addresses_may_be_absent,
                                   netdriver::SandboxLink& out);

}  // namespace agentgate::arm
