// SPDX-License-Identifier: GPL-2.0-or-later
//
// Value types that the folders of the plugin share: Docker's identifiers, and what agentgate
// remembers of a network and an endpoint. Parsed at the edge, compared with ==, no I/O.
#pragma once

#include <chrono>
#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "netdriver/gate.h"
#include "netdriver/types.h"

namespace agentgate {

// An identifier that Docker made: 64 hex digits for endpoints and local networks, 25 characters
// [a-z0-9] for swarm networks. At least 12 characters [a-z0-9], at most 64: nothing that could
// leave a directory when it becomes a file name.
template <class Tag>
class DockerId {
 public:
  DockerId() = default;
  static Result<DockerId> parse(std::string_view text);
  [[nodiscard]] const std::string& str() const { return text_; }
  [[nodiscard]] bool empty() const { return text_.empty(); }
  auto operator<=>(const DockerId&) const = default;

 private:
  std::string text_;
};
struct NetworkTag {};
struct EndpointTag {};
using NetworkId = DockerId<NetworkTag>;
using EndpointId = DockerId<EndpointTag>;

// Link names from identifiers: prefix and the first ten characters (DESIGN.md, 3).
[[nodiscard]] InterfaceName bridge_name(const NetworkId& id);
[[nodiscard]] InterfaceName port_name(const EndpointId& id);
[[nodiscard]] InterfaceName peer_name(const EndpointId& id);
// A locally administered unicast MAC that is a function of the identifier.
[[nodiscard]] MacAddress mac_of(std::string_view id);

// A policy's name: [a-z0-9][a-z0-9_-]{0,31}.
[[nodiscard]] Status check_policy_name(std::string_view name);

struct NetworkRecord {
  NetworkId id;
  std::optional<Ipv4InterfaceAddress> gateway4;  // the bridge's address; its prefix is the pool
  std::optional<Ipv6InterfaceAddress> gateway6;
  std::string policy;  // agentgate.policy, "default" when not given
  std::uint32_t mtu = 1500;
  bool masquerade = true;

  [[nodiscard]] netdriver::NetworkSpec spec() const;
  bool operator==(const NetworkRecord&) const = default;
};

// A process as the kernel knows it: the pid alone could be another one by now.
struct ProcessIdentity {
  std::int64_t pid = 0;
  std::uint64_t start_time = 0;  // field 22 of /proc/PID/stat, in clock ticks since boot
  bool operator==(const ProcessIdentity&) const = default;
};

// What a released endpoint was released for. Kept so that a restarted daemon can tell whether
// the port still belongs to the same container.
struct Release {
  std::string container_id;
  std::string container_name;
  ProcessIdentity process;
  std::string policy;
  std::string released_at;  // RFC 3339, UTC
  bool committed = false;   // the kernel has taken it; on disk before that it is only meant
  bool operator==(const Release&) const = default;
};

// A policy as ports are released to it: what the kernel was told, not what its file says now.
struct PolicyRecord {
  netdriver::PolicySpec spec;  // normalised
  std::string revision;        // of the file it was compiled from (policy::Policy::revision)
  bool operator==(const PolicyRecord&) const = default;
};

struct EndpointRecord {
  EndpointId id;
  NetworkId network;
  std::optional<Ipv4Address> address4;
  std::optional<Ipv6Address> address6;
  MacAddress mac;
  std::string policy;              // agentgate.policy of the endpoint; empty: the network's
  std::string sandbox_key;         // path of the sandbox's namespace, from Join; empty before it
  bool prepared = false;           // FDB entry and neighbours are in place (pipeline step 9)
  std::optional<Release> release;  // nothing while the port is closed

  [[nodiscard]] netdriver::PortSpec spec(const NetworkRecord& network) const;
  bool operator==(const EndpointRecord&) const = default;
};

// Seconds since the epoch as RFC 3339 text in UTC with milliseconds.
[[nodiscard]] std::string utc_now();

}  // namespace agentgate
