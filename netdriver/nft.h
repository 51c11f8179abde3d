// SPDX-License-Identifier: GPL-2.0-or-later
//
// nftables objects as value types.
//
// What we send and what we read back are the same types, compared with ==. Only what the gate
// needs is here; an expression the kernel has and we do not know decodes to Unknown, which is
// equal to nothing we would ever send. Handles, counters' values and timestamps are left out of
// the comparison: they are not meaning.
//
// Registers are counted in 32-bit units from 0 (NFT_REG32_00). Data is in the byte order that the
// kernel compares in: network order for packet fields, host order for meta and ct keys.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "netdriver/gate.h"

namespace agentgate::netdriver::nft {

using Bytes = std::vector<std::uint8_t>;

enum class Family : std::uint8_t { inet = 1, ip = 2, netdev = 5, bridge = 7 };  // NFPROTO_*

// -- expressions ----------------------------------------------------------------------------

struct Payload {           // packet field -> register
  std::uint32_t base = 0;  // NFT_PAYLOAD_*
  std::uint32_t offset = 0, length = 0;
  std::uint32_t reg = 0;
  bool operator==(const Payload&) const = default;
};
struct Meta {             // meta key -> register
  std::uint32_t key = 0;  // NFT_META_*
  std::uint32_t reg = 0;
  bool operator==(const Meta&) const = default;
};
struct MetaSet {  // register -> meta key
  std::uint32_t key = 0;
  std::uint32_t reg = 0;
  bool operator==(const MetaSet&) const = default;
};
struct Ct {               // conntrack key -> register
  std::uint32_t key = 0;  // NFT_CT_*
  std::uint32_t reg = 0;
  bool operator==(const Ct&) const = default;
};
struct Cmp {
  std::uint32_t op = 0;  // NFT_CMP_*
  std::uint32_t reg = 0;
  Bytes data;
  bool operator==(const Cmp&) const = default;
};
struct Bitwise {  // reg = (reg & mask) ^ value
  std::uint32_t reg = 0;
  Bytes mask, value;
  bool operator==(const Bitwise&) const = default;
};
struct Lookup {  // in the set, or (verdict map) take its verdict
  std::string set;
  std::uint32_t reg = 0;
  bool verdict_map = false;
  bool operator==(const Lookup&) const = default;
};
struct Verdict {
  std::int32_t code = 0;  // NF_ACCEPT, NF_DROP, NFT_JUMP, NFT_GOTO, NFT_RETURN
  std::string chain;      // for jump and goto
  auto operator<=>(const Verdict&) const = default;
};
struct Counter {
  bool operator==(const Counter&) const = default;
};
struct Limit {  // packets
  std::uint64_t rate = 0;
  std::uint64_t unit = 1;  // seconds
  std::uint32_t burst = 0;
  bool operator==(const Limit&) const = default;
};
struct Log {  // NFLOG
  std::uint16_t group = 0;
  std::string prefix;
  bool operator==(const Log&) const = default;
};
struct Masquerade {
  bool operator==(const Masquerade&) const = default;
};
struct Reject {
  std::uint32_t type = 0;  // NFT_REJECT_*
  std::uint8_t code = 0;
  bool operator==(const Reject&) const = default;
};
struct Unknown {  // read back only
  std::string name;
  bool operator==(const Unknown&) const { return false; }
};

using Expression = std::variant<Payload, Meta, MetaSet, Ct, Cmp, Bitwise, Lookup, Verdict, Counter,
                                Limit, Log, Masquerade, Reject, Unknown>;

struct Rule {
  std::vector<Expression> expressions;
  std::string comment;
  bool operator==(const Rule&) const = default;
};

// -- chains, sets, tables ---------------------------------------------------------------------

struct Hook {
  std::string type;          // "filter", "nat"
  std::uint32_t number = 0;  // NF_INET_*, NF_BR_*, NF_NETDEV_*
  std::int32_t priority = 0;
  std::uint32_t policy = 1;  // NF_ACCEPT or NF_DROP
  std::string device;        // netdev family
  bool operator==(const Hook&) const = default;
};

struct Chain {
  std::optional<Hook> hook;  // base chain
  std::vector<Rule> rules;
  bool operator==(const Chain&) const = default;
};

struct Element {
  Bytes key;
  Bytes key_end;              // of a box in a concatenated interval set; empty otherwise
  bool interval_end = false;  // first value after an interval (rbtree sets)
  std::optional<Verdict> verdict;
  std::string comment;
  bool operator==(const Element&) const = default;
  // Where one interval ends and the next begins at the same key, the end comes first: that is the
  // order in which the kernel's rbtree takes them.
  [[nodiscard]] bool operator<(const Element& other) const;
};

struct Set {
  std::uint32_t flags = 0;     // NFT_SET_MAP, NFT_SET_INTERVAL, NFT_SET_CONCAT
  std::uint32_t key_type = 0;  // for listings only
  std::uint32_t key_length = 0;
  std::vector<std::uint8_t> fields;  // lengths of a concatenation, in bytes
  std::vector<Element> elements;     // sorted
  bool operator==(const Set&) const = default;
};

struct Table {
  std::uint32_t flags = 0;  // NFT_TABLE_F_*
  std::map<std::string, Chain> chains;
  std::map<std::string, Set> sets;
  bool operator==(const Table&) const = default;
};

// The tables called kTable, by family.
using Ruleset = std::map<Family, Table>;

// For differences and logs: "payload(1+12,4)->r0 cmp(r0 == 0800) goto x".
[[nodiscard]] std::string to_string(const Expression& expression);
[[nodiscard]] std::string to_string(const Rule& rule);
[[nodiscard]] std::string to_string(const Element& element);
[[nodiscard]] std::string to_string(const Hook& hook);
[[nodiscard]] std::string_view to_string(Family family);

// What differs, chain by chain, rule by rule, element by element.
void compare(const std::string& where, const Chain& expected, const Chain& found,
             std::vector<Difference>& out);
void compare(const std::string& where, const Set& expected, const Set& found,
             std::vector<Difference>& out);
void compare(const std::string& where, const Table& expected, const Table& found,
             std::vector<Difference>& out);

}  // namespace agentgate::netdriver::nft
