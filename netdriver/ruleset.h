// SPDX-License-Identifier: GPL-2.0-or-later
//
// The gate in nftables terms: GateSpec -> tables, chains, sets, elements. Pure.
//
// This file is the place to read what is dropped and what passes; docs/datapath.md explains why.
// The constant part (skeleton) is there before any port; a network adds an element to the
// masquerade sets; a port adds two chains of its own and, while released, one element to each map.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "netdriver/gate.h"
#include "netdriver/nft.h"

namespace agentgate::netdriver::ruleset {

// Names of a port's chains in `table netdev agentgate`.
[[nodiscard]] std::string ingress_chain(const InterfaceName& port);
[[nodiscard]] std::string egress_chain(const InterfaceName& port);

// The constant part of a table: base chains, shared chains, empty sets.
[[nodiscard]] nft::Table skeleton(nft::Family family, std::uint32_t table_flags);

// Layer 1 of a port, as its `policy` says: closed without one.
[[nodiscard]] nft::Chain ingress(const PortSpec& port);
[[nodiscard]] nft::Chain egress(const PortSpec& port);

// An element of a set of ours.
struct Placed {
  nft::Family family;
  std::string set;
  nft::Element element;
  bool operator==(const Placed&) const = default;
};

// A network's elements in the sets of pools and of what is masqueraded. Pools are kept apart even
// where they touch, so that one can go without the other.
[[nodiscard]] std::vector<Placed> network_elements(const NetworkSpec& network);

// What a released port has in the sets and maps of layers 2 and 3. `policy` is the port's.
[[nodiscard]] std::vector<Placed> released_elements(const PortSpec& port,
                                                    const std::string& policy);

// Chains and sets of a policy in `table inet agentgate`, by name.
struct PolicyObjects {
  std::map<std::string, nft::Set> sets;
  std::map<std::string, nft::Chain> chains;
};
[[nodiscard]] PolicyObjects policy(const PolicySpec& policy);

// Elements of the shared sets of layer 3.
[[nodiscard]] std::vector<nft::Element> intervals(const std::vector<Ipv4Range>& ranges);
[[nodiscard]] std::vector<nft::Element> intervals(const std::vector<Ipv6Range>& ranges);
inline constexpr const char* kHostSet4 = "host4";
inline constexpr const char* kHostSet6 = "host6";
inline constexpr const char* kPool4 = "pool4";
inline constexpr const char* kPool6 = "pool6";
inline constexpr const char* kMasquerade4 = "masquerade4";
inline constexpr const char* kMasquerade6 = "masquerade6";

// Everything: what the kernel shall have for `spec`.
[[nodiscard]] nft::Ruleset render(const GateSpec& spec, std::uint32_t table_flags);

}  // namespace agentgate::netdriver::ruleset
