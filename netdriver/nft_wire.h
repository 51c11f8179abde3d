// SPDX-License-Identifier: GPL-2.0-or-later
//
// nftables values to and from netlink messages, through libnftnl. Pure.
// Builders return one message (nlmsghdr and all) with sequence number 0. Decoders take what the
// kernel sent and never trust its lengths further than libnftnl and libmnl check them.
#pragma once

#include <linux/netlink.h>

#include <optional>
#include <string>
#include <utility>

#include "netdriver/nft.h"

namespace agentgate::netdriver::nft::wire {

Bytes table(std::uint16_t type, std::uint16_t flags, Family family,
            std::optional<std::uint32_t> table_flags);
Bytes chain(std::uint16_t type, std::uint16_t flags, Family family, const std::string& name,
            const Chain* value);
// `value` null: all rules of the chain; `chain` empty: all of the table.
Bytes rule(std::uint16_t type, std::uint16_t flags, Family family, const std::string& chain,
           const Rule* value);
Bytes set(std::uint16_t type, std::uint16_t flags, Family family, const std::string& name,
          const Set* value, std::uint32_t id);
// At most kElementsPerMessage elements: a netlink attribute holds 64 KiB.
inline constexpr std::size_t kElementsPerMessage = 200;
Bytes elements(std::uint16_t type, std::uint16_t flags, Family family, const std::string& set,
               const Element* begin, const Element* end);

struct NamedChain {
  std::string table, name;
  Chain chain;
};
struct NamedRule {
  std::string table, chain;
  Rule rule;
};
struct NamedSet {
  std::string table, name;
  Set set;
};
// Nothing: the message does not parse, or is of another kind.
std::optional<std::pair<std::string, std::uint32_t>> parse_table(const nlmsghdr* message);
std::optional<NamedChain> parse_chain(const nlmsghdr* message);
std::optional<NamedRule> parse_rule(const nlmsghdr* message);
std::optional<NamedSet> parse_set(const nlmsghdr* message);
std::optional<std::vector<Element>> parse_elements(const nlmsghdr* message);

}  // namespace agentgate::netdriver::nft::wire
