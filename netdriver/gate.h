// SPDX-License-Identifier: GPL-2.0-or-later
//
// The gate: what stands between a container and everything else, as one desired state.
//
// This header says what the kernel shall look like, in value types. Gate (gate_kernel.h) applies
// it and reads it back into the same types, so that "is it as meant" is a comparison with ==.
// Nothing here knows of Docker, HTTP, policy files or names.
//
// Three layers, each of them default-deny:
//   1 port     `table netdev agentgate`: an ingress and an egress chain on each host veth
//   2 bridge   flags of the bridge port, FDB, neighbours, `table bridge agentgate`
//   3 network  `table inet agentgate`: verdict maps from a container's address to its policy
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "netdriver/types.h"

namespace agentgate::netdriver {

// Names. The prefixes are what one constant rule matches, so a link of ours is closed even
// before anything else about it is set up. All links carry kLinkGroup.
inline constexpr const char* kTable = "agentgate";
inline constexpr const char* kBridgePrefix = "agn";
inline constexpr const char* kPortPrefix = "agp";
inline constexpr const char* kPeerPrefix = "agc";
inline constexpr std::uint32_t kLinkGroup = 0x6167;  // "ag"

// Marks live in one byte of the skb mark, so that they coexist with other users of it.
inline constexpr std::uint32_t kMarkMask = 0x00FF0000;
inline constexpr std::uint32_t kPortMark = 0x00A10000;     // layer 1: this frame is the port's own
inline constexpr std::uint32_t kVerdictMark = 0x00A60000;  // layer 3: a policy allows this packet

// NFLOG group that layer drops are logged to (rate-limited).
inline constexpr std::uint16_t kLogGroup = 2577;

// One network: a bridge and the addresses the host has on it.
struct NetworkSpec {
  InterfaceName bridge;
  MacAddress mac;  // of the bridge device; fixed, so that ports can be bound to it
  std::optional<Ipv4InterfaceAddress> gateway4;
  std::optional<Ipv6InterfaceAddress> gateway6;
  std::uint32_t mtu = 1500;  // bytes
  bool masquerade = true;
  bool operator==(const NetworkSpec&) const = default;
};

// One port: a veth whose host end is enslaved to the network's bridge.
struct PortSpec {
  InterfaceName name;    // host end
  InterfaceName peer;    // container end; Docker moves and renames it
  InterfaceName bridge;  // of its network
  MacAddress mac;        // of the container end
  std::optional<Ipv4Address> address4;
  std::optional<Ipv6Address> address6;

  // Copied from the network, since the port's rules are bound to them.
  MacAddress bridge_mac;
  std::optional<Ipv4Address> gateway4;
  std::optional<Ipv6Address> gateway6;
  std::uint32_t mtu = 1500;

  // Controls of step 9 (FDB entry, permanent neighbours) are in place. They open nothing.
  bool prepared = false;
  // The policy this port is released to; nothing while it is closed.
  std::optional<std::string> policy;
  // For people who read `nft list ruleset`: the comment of the port's element in @released.
  std::string label;

  bool operator==(const PortSpec&) const = default;
};

// A set of `address . protocol . port` in the kernel's terms.
template <class Address>
struct AllowEntry {  // a box of addresses and ports; single values are first == last
  AddressRange<Address> addresses;
  Protocol protocol = Protocol::tcp;
  PortRange ports;
  auto operator<=>(const AllowEntry&) const = default;
};

template <class Address>
struct PolicyFamily {
  std::vector<AddressRange<Address>> deny;           // wins over everything
  std::vector<AllowEntry<Address>> private_entries;  // judged before the always-deny set
  std::vector<AllowEntry<Address>> allow;            // judged after the always-deny set
  bool operator==(const PolicyFamily&) const = default;
};

// A policy with every name resolved. Shared by all ports that are released to it.
// Entries may repeat and overlap; normalise() makes the canonical form that == compares.
struct PolicySpec {
  std::string name;  // [a-z0-9][a-z0-9_-]{0,31}
  // Answer denied TCP with a reset and everything else with an ICMP error, rather than silence.
  bool reject = true;
  PolicyFamily<Ipv4Address> v4;
  PolicyFamily<Ipv6Address> v6;
  bool operator==(const PolicySpec&) const = default;
};

// Sorts, merges and makes the boxes of each list disjoint, as the kernel's interval sets demand.
[[nodiscard]] PolicySpec normalise(PolicySpec policy);

// `allow` without what `deny` covers; the result is normalised. A deny entry is a box as well, so
// one that names a service takes away that service only.
template <class Address>
[[nodiscard]] std::vector<AllowEntry<Address>> subtract(
    const std::vector<AllowEntry<Address>>& allow, const std::vector<AllowEntry<Address>>& deny);

// The always-deny set: loopback, link-local with the metadata addresses, RFC 1918, CGNAT, ULA,
// multicast, reserved space. The host's own addresses are added by the
// caller (GateSpec::host4, host6).
[[nodiscard]] const std::vector<Ipv4Range>& always_deny4();
[[nodiscard]] const std::vector<Ipv6Range>& always_deny6();

// Everything of ours on this host.
struct GateSpec {
  std::map<InterfaceName, NetworkSpec> networks;  // by bridge
  std::map<InterfaceName, PortSpec> ports;        // by host end
  std::map<std::string, PolicySpec> policies;     // by name; normalised
  std::vector<Ipv4Range> host4;                   // the host's own addresses, merged
  std::vector<Ipv6Range> host6;
  bool operator==(const GateSpec&) const = default;
};

// One difference between what is meant and what the kernel has.
struct Difference {
  std::string where;  // "layer 1, chain agp0123456789-in, rule 3", "bridge port agp…, flag locked"
  std::string expected;  // "" when something is there that should not be
  std::string found;     // "" when something is missing
  bool operator==(const Difference&) const = default;
};

}  // namespace agentgate::netdriver
