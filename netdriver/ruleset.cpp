// SPDX-License-Identifier: GPL-2.0-or-later
#include "netdriver/ruleset.h"

// First: the kernel's headers give way to it, not the other way round.
#include <netinet/icmp6.h>
#include <netinet/in.h>

#include <linux/if_ether.h>
#include <linux/netfilter.h>
#include <linux/netfilter/nf_conntrack_common.h>
#include <linux/netfilter/nf_tables.h>
#include <linux/netfilter_bridge.h>
#include <net/if_arp.h>

#include <algorithm>
#include <cstring>

namespace agentgate::netdriver::ruleset {
namespace {

using nft::Bytes;
using nft::Chain;
using nft::Element;
using nft::Family;
using nft::Hook;
using nft::Rule;
using nft::Set;
using nft::Verdict;

// linux/netfilter_arp.h and nf_tables.h have no name for these in older headers.
constexpr std::uint32_t kNetdevIngress = 0;  // NF_NETDEV_INGRESS
constexpr std::uint32_t kNetdevEgress = 1;   // NF_NETDEV_EGRESS, since 5.16

// Before conntrack (-200), before br_netfilter (0) and before anything that usual tools install.
constexpr std::int32_t kEarly = -310;
// Before the iptables filter table (0), so that DOCKER-USER sees the verdict mark.
constexpr std::int32_t kBeforeFilter = -10;
constexpr std::int32_t kSourceNat = 100;

constexpr std::size_t kIfNameSize = 16;
constexpr std::uint8_t kDirectionReply = 1;  // IP_CT_DIR_REPLY, in no uapi header

Bytes bytes_of(const MacAddress& mac) { return Bytes(mac.bytes().begin(), mac.bytes().end()); }
Bytes bytes_of(const Ipv4Address& ip) { return Bytes(ip.bytes().begin(), ip.bytes().end()); }
Bytes bytes_of(const Ipv6Address& ip) { return Bytes(ip.bytes().begin(), ip.bytes().end()); }
Bytes be16(std::uint16_t value) {
  return {static_cast<std::uint8_t>(value >> 8), static_cast<std::uint8_t>(value & 0xFF)};
}
Bytes host32(std::uint32_t value) {
  Bytes out(4);
  std::memcpy(out.data(), &value, 4);
  return out;
}
void pad4(Bytes& bytes) { bytes.resize((bytes.size() + 3) / 4 * 4); }
Bytes ifname(const std::string& name) {  // as the kernel keeps it: 16 bytes, zero-padded
  Bytes out(name.begin(), name.end());
  out.resize(kIfNameSize);
  return out;
}

// Builds one rule; reads like the rule.
class Builder {
 public:
  explicit Builder(std::string comment = {}) { rule_.comment = std::move(comment); }
  operator Rule() && { return std::move(rule_); }  // NOLINT(google-explicit-constructor)

  Builder&& payload(std::uint32_t base, std::uint32_t offset, Bytes value,
                    std::uint32_t op = NFT_CMP_EQ) && {
    add(nft::Payload{base, offset, static_cast<std::uint32_t>(value.size()), 0});
    add(nft::Cmp{op, 0, std::move(value)});
    return std::move(*this);
  }
  Builder&& link(std::uint32_t offset, Bytes value) && {
    return std::move(*this).payload(NFT_PAYLOAD_LL_HEADER, offset, std::move(value));
  }
  Builder&& network(std::uint32_t offset, Bytes value) && {
    return std::move(*this).payload(NFT_PAYLOAD_NETWORK_HEADER, offset, std::move(value));
  }
  Builder&& transport(std::uint32_t offset, Bytes value, std::uint32_t op = NFT_CMP_EQ) && {
    return std::move(*this).payload(NFT_PAYLOAD_TRANSPORT_HEADER, offset, std::move(value), op);
  }
  Builder&& ether_daddr(const MacAddress& mac) && {
    return std::move(*this).link(0, bytes_of(mac));
  }
  Builder&& ether_saddr(const MacAddress& mac) && {
    return std::move(*this).link(6, bytes_of(mac));
  }
  // Of the frame as it was on the wire: for a frame whose VLAN tag the receive path took off,
  // the kernel puts the tag back before it looks (nft_payload_copy_vlan), so a tagged frame
  // never has the type of what it carries. VLAN 0 included.
  Builder&& ether_type(std::uint16_t type) && { return std::move(*this).link(12, be16(type)); }

  Builder&& meta(std::uint32_t key, Bytes value, std::uint32_t op = NFT_CMP_EQ) && {
    add(nft::Meta{key, 0});
    add(nft::Cmp{op, 0, std::move(value)});
    return std::move(*this);
  }
  Builder&& nfproto(std::uint8_t family) && {
    return std::move(*this).meta(NFT_META_NFPROTO, {family});
  }
  Builder&& l4proto(std::uint8_t protocol, std::uint32_t op = NFT_CMP_EQ) && {
    return std::move(*this).meta(NFT_META_L4PROTO, {protocol}, op);
  }
  // A comparison shorter than the name matches a prefix.
  Builder&& in_prefix(const char* prefix, std::uint32_t op = NFT_CMP_EQ) && {
    return std::move(*this).meta(NFT_META_IIFNAME, Bytes(prefix, prefix + std::strlen(prefix)), op);
  }
  Builder&& out_prefix(const char* prefix, std::uint32_t op = NFT_CMP_EQ) && {
    return std::move(*this).meta(NFT_META_OIFNAME, Bytes(prefix, prefix + std::strlen(prefix)), op);
  }
  Builder&& in_group() && { return std::move(*this).meta(NFT_META_IIFGROUP, host32(kLinkGroup)); }
  Builder&& out_group() && { return std::move(*this).meta(NFT_META_OIFGROUP, host32(kLinkGroup)); }
  Builder&& mark_is(std::uint32_t mark, std::uint32_t op = NFT_CMP_EQ) && {
    add(nft::Meta{NFT_META_MARK, 0});
    add(nft::Bitwise{0, host32(kMarkMask), host32(0)});
    add(nft::Cmp{op, 0, host32(mark)});
    return std::move(*this);
  }
  Builder&& set_mark(std::uint32_t mark) && {
    add(nft::Meta{NFT_META_MARK, 0});
    add(nft::Bitwise{0, host32(~kMarkMask), host32(mark)});
    add(nft::MetaSet{NFT_META_MARK, 0});
    return std::move(*this);
  }
  // ct state/status: any of `bits` set.
  Builder&& ct_has(std::uint32_t key, std::uint32_t bits) && {
    add(nft::Ct{key, 0});
    add(nft::Bitwise{0, host32(bits), host32(0)});
    add(nft::Cmp{NFT_CMP_NEQ, 0, host32(0)});
    return std::move(*this);
  }
  Builder&& ct_is(std::uint32_t key, Bytes value) && {
    add(nft::Ct{key, 0});
    add(nft::Cmp{NFT_CMP_EQ, 0, std::move(value)});
    return std::move(*this);
  }
  Builder&& load(std::uint32_t base, std::uint32_t offset, std::uint32_t length,
                 std::uint32_t reg) && {
    add(nft::Payload{base, offset, length, reg});
    return std::move(*this);
  }
  Builder&& load_meta(std::uint32_t key, std::uint32_t reg) && {
    add(nft::Meta{key, reg});
    return std::move(*this);
  }
  Builder&& in_set(const std::string& set) && {
    add(nft::Lookup{set, 0, false});
    return std::move(*this);
  }
  Builder&& verdict_map(const std::string& map) && {
    add(nft::Lookup{map, 0, true});
    return std::move(*this);
  }
  Builder&& counter() && {
    add(nft::Counter{});
    return std::move(*this);
  }
  Builder&& log(const std::string& prefix) && {
    add(nft::Limit{10, 1, 20});
    add(nft::Log{kLogGroup, prefix});
    return std::move(*this);
  }
  Builder&& expression(nft::Expression e) && {
    add(std::move(e));
    return std::move(*this);
  }
  Builder&& accept() && { return std::move(*this).verdict({NF_ACCEPT, {}}); }
  Builder&& drop() && { return std::move(*this).verdict({NF_DROP, {}}); }
  Builder&& go(const std::string& chain) && { return std::move(*this).verdict({NFT_GOTO, chain}); }
  Builder&& verdict(Verdict verdict) && {
    add(std::move(verdict));
    return std::move(*this);
  }

 private:
  void add(nft::Expression e) { rule_.expressions.push_back(std::move(e)); }
  Rule rule_;
};

Chain base(const char* type, std::uint32_t hook, std::int32_t priority, std::uint32_t policy,
           std::string device = {}) {
  Chain chain;
  chain.hook = Hook{type, hook, priority, policy, std::move(device)};
  return chain;
}

// Counts and (rate-limited) logs whatever arrives here; the drop that follows is the caller's.
void add_drop(Chain& chain, const std::string& log_prefix) {
  chain.rules.push_back(Builder("count").counter());
  chain.rules.push_back(Builder("log").log(log_prefix));
  chain.rules.push_back(Builder().drop());
}

// nft's own numbers for data types (src/datatype.h there), for listings only.
constexpr std::uint32_t kTypeIpv4 = 7, kTypeIpv6 = 8, kTypeEther = 9, kTypeProtocol = 12,
                        kTypeService = 13, kTypeIfName = 41;
constexpr std::uint32_t concat(std::initializer_list<std::uint32_t> types) {
  std::uint32_t out = 0;
  for (const std::uint32_t type : types) out = (out << 6) | type;
  return out;
}

// What differs between the two IP families in layer 3.
template <class Address>
struct Ip;
template <>
struct Ip<Ipv4Address> {
  static constexpr const char* suffix = "4";
  static constexpr std::uint32_t saddr = 12, daddr = 16, size = 4;
  static constexpr std::uint32_t type = kTypeIpv4;
  static const std::vector<Ipv4Range>& always_deny() { return always_deny4(); }
};
template <>
struct Ip<Ipv6Address> {
  static constexpr const char* suffix = "6";
  static constexpr std::uint32_t saddr = 8, daddr = 24, size = 16;
  static constexpr std::uint32_t type = kTypeIpv6;
  static const std::vector<Ipv6Range>& always_deny() { return always_deny6(); }
};

template <class Address>
std::vector<Element> interval_elements(const std::vector<AddressRange<Address>>& ranges) {
  std::vector<Element> out;
  for (const auto& range : ranges) {
    Element first;
    first.key = bytes_of(range.first);
    out.push_back(std::move(first));
    if (const auto after = next(range.last)) {
      Element end;
      end.key = bytes_of(*after);
      end.interval_end = true;
      out.push_back(std::move(end));
    }
  }
  std::sort(out.begin(), out.end());
  return out;
}

template <class Address>
Set interval_set() {
  Set set;
  set.flags = NFT_SET_INTERVAL;
  set.key_type = Ip<Address>::type;
  set.key_length = Ip<Address>::size;
  return set;
}

template <class Address>
Set service_set(bool ranges) {
  Set set;
  set.flags = NFT_SET_CONCAT;
  if (ranges) set.flags |= NFT_SET_INTERVAL;
  set.key_type = concat({Ip<Address>::type, kTypeProtocol, kTypeService});
  set.key_length = Ip<Address>::size + 4 + 4;
  set.fields = {static_cast<std::uint8_t>(Ip<Address>::size), 1, 2};
  return set;
}

template <class Address>
Bytes service_key(const Address& address, Protocol protocol, std::uint16_t port) {
  Bytes key = bytes_of(address);
  key.push_back(static_cast<std::uint8_t>(protocol));
  pad4(key);
  const Bytes number = be16(port);
  key.insert(key.end(), number.begin(), number.end());
  pad4(key);
  return key;
}

// A few single values go to the hash set, everything wider to the interval set: the hash is what
// most packets of a name-derived policy hit.
constexpr unsigned kMaxExpanded = 16;

template <class Address>
void add_services(const std::vector<AllowEntry<Address>>& entries, Set& exact, Set& ranges) {
  for (const auto& entry : entries) {
    std::vector<Address> addresses;
    for (std::optional<Address> at = entry.addresses.first;
         at && *at <= entry.addresses.last && addresses.size() <= kMaxExpanded; at = next(*at)) {
      addresses.push_back(*at);
    }
    const unsigned ports = static_cast<unsigned>(entry.ports.last - entry.ports.first) + 1;
    if (addresses.size() * ports <= kMaxExpanded) {
      for (const Address& address : addresses) {
        for (unsigned i = 0; i < ports; ++i) {
          Element element;
          element.key = service_key(address, entry.protocol,
                                    static_cast<std::uint16_t>(entry.ports.first + i));
          exact.elements.push_back(std::move(element));
        }
      }
    } else {
      Element element;
      element.key = service_key(entry.addresses.first, entry.protocol, entry.ports.first);
      element.key_end = service_key(entry.addresses.last, entry.protocol, entry.ports.last);
      ranges.elements.push_back(std::move(element));
    }
  }
  std::sort(exact.elements.begin(), exact.elements.end());
  std::sort(ranges.elements.begin(), ranges.elements.end());
}

std::string chain_name(const char* direction, const char* suffix, const std::string& policy) {
  return std::string(direction) + suffix + "_" + policy;
}
std::string set_name(const std::string& policy, const char* kind, const char* suffix) {
  return policy + "." + kind + suffix;
}

template <class Address>
void policy_family(const PolicySpec& policy, const PolicyFamily<Address>& family,
                   PolicyObjects& out) {
  using F = Ip<Address>;
  const auto name = [&](const char* kind) { return set_name(policy.name, kind, F::suffix); };
  const std::string deny = name("deny");
  const std::string private_exact = name("private");
  const std::string private_ranges = name("private_ranges");
  const std::string allow_exact = name("allow");
  const std::string allow_ranges = name("allow_ranges");

  Set& deny_set = out.sets[deny] = interval_set<Address>();
  deny_set.elements = interval_elements(family.deny);
  Set& ps = out.sets[private_exact] = service_set<Address>(false);
  Set& pr = out.sets[private_ranges] = service_set<Address>(true);
  add_services(family.private_entries, ps, pr);
  Set& as = out.sets[allow_exact] = service_set<Address>(false);
  Set& ar = out.sets[allow_ranges] = service_set<Address>(true);
  add_services(family.allow, as, ar);

  // Key: the far address, the protocol, the far port. Non-first fragments have no port and match
  // nothing; conntrack reassembles before, so only what it could not is lost.
  constexpr std::uint32_t words = F::size / 4;
  const auto far_service = [&](std::uint32_t address_offset, std::uint32_t port_offset,
                               const std::string& set) {
    return Builder()
        .load(NFT_PAYLOAD_NETWORK_HEADER, address_offset, F::size, 0)
        .load_meta(NFT_META_L4PROTO, words)
        .load(NFT_PAYLOAD_TRANSPORT_HEADER, port_offset, 2, words + 1)
        .in_set(set);
  };
  const auto to_address = [&](const std::string& set) {
    return Builder().load(NFT_PAYLOAD_NETWORK_HEADER, F::daddr, F::size, 0).in_set(set);
  };
  const std::string denied = policy.reject ? "reject" : "discard";
  const std::string always = std::string("always") + F::suffix;
  const std::string host = std::string("host") + F::suffix;

  Chain& from = out.chains[chain_name("from", F::suffix, policy.name)];
  from.rules.push_back(to_address(deny).go(denied));
  from.rules.push_back(far_service(F::daddr, 2, private_exact).go("allowed"));
  from.rules.push_back(far_service(F::daddr, 2, private_ranges).go("allowed"));
  from.rules.push_back(to_address(always).go(denied));
  from.rules.push_back(to_address(host).go(denied));
  from.rules.push_back(far_service(F::daddr, 2, allow_exact).go("allowed"));
  from.rules.push_back(far_service(F::daddr, 2, allow_ranges).go("allowed"));
  from.rules.push_back(Builder().go(denied));

  // Replies: the same look-ups with source for destination, so that a removed element cuts live
  // flows in both directions (facts: conntrack alone lets the server go on).
  const auto from_address = [&](const std::string& set) {
    return Builder().load(NFT_PAYLOAD_NETWORK_HEADER, F::saddr, F::size, 0).in_set(set);
  };
  Chain& to = out.chains[chain_name("to", F::suffix, policy.name)];
  to.rules.push_back(from_address(deny).go("discard"));
  to.rules.push_back(far_service(F::saddr, 0, private_exact).go("allowed"));
  to.rules.push_back(far_service(F::saddr, 0, private_ranges).go("allowed"));
  to.rules.push_back(from_address(always).go("discard"));
  to.rules.push_back(from_address(host).go("discard"));
  to.rules.push_back(far_service(F::saddr, 0, allow_exact).go("allowed"));
  to.rules.push_back(far_service(F::saddr, 0, allow_ranges).go("allowed"));
  to.rules.push_back(Builder().go("discard"));
}

template <class Address>
Set verdict_map() {
  Set set;
  set.flags = NFT_SET_MAP;
  set.key_type = Ip<Address>::type;
  set.key_length = Ip<Address>::size;
  return set;
}

nft::Table inet_skeleton() {
  nft::Table table;
  table.sets["from4"] = verdict_map<Ipv4Address>();
  table.sets["from6"] = verdict_map<Ipv6Address>();
  table.sets["to4"] = verdict_map<Ipv4Address>();
  table.sets["to6"] = verdict_map<Ipv6Address>();
  table.sets["always4"] = interval_set<Ipv4Address>();
  table.sets["always4"].elements = interval_elements(always_deny4());
  table.sets["always6"] = interval_set<Ipv6Address>();
  table.sets["always6"].elements = interval_elements(always_deny6());
  table.sets[kHostSet4] = interval_set<Ipv4Address>();
  table.sets[kHostSet6] = interval_set<Ipv6Address>();
  table.sets[kPool4] = interval_set<Ipv4Address>();
  table.sets[kPool6] = interval_set<Ipv6Address>();
  table.sets[kMasquerade4] = interval_set<Ipv4Address>();
  table.sets[kMasquerade6] = interval_set<Ipv6Address>();

  Chain& allowed = table.chains["allowed"];
  allowed.rules.push_back(Builder("verdict mark").set_mark(kVerdictMark).accept());
  Chain& discard = table.chains["discard"];
  add_drop(discard, "agentgate network ");
  Chain& reject = table.chains["reject"];
  reject.rules.push_back(Builder("count").counter());
  reject.rules.push_back(Builder("log").log("agentgate denied "));
  reject.rules.push_back(
      Builder().l4proto(IPPROTO_TCP).expression(nft::Reject{NFT_REJECT_TCP_RST, 0}));
  reject.rules.push_back(Builder().expression(
      nft::Reject{NFT_REJECT_ICMPX_UNREACH, NFT_REJECT_ICMPX_ADMIN_PROHIBITED}));

  // A port that is up but not (yet, any more) enslaved would be routed from by its own address.
  Chain& prerouting = table.chains["prerouting"] =
      base("filter", NF_INET_PRE_ROUTING, kEarly, NF_ACCEPT);
  prerouting.rules.push_back(Builder("port without a bridge").in_prefix(kPortPrefix).go("discard"));
  // A stranger's packet that claims a container's address would have the host answer it with an
  // error, and the container would get that as RELATED. IPv6 has no rp_filter to stop it.
  prerouting.rules.push_back(Builder("an agent's address from elsewhere")
                                 .in_prefix(kBridgePrefix, NFT_CMP_NEQ)
                                 .meta(NFT_META_IIFNAME, ifname("lo"), NFT_CMP_NEQ)
                                 .nfproto(NFPROTO_IPV4)
                                 .load(NFT_PAYLOAD_NETWORK_HEADER, 12, 4, 0)
                                 .in_set(kPool4)
                                 .go("discard"));
  prerouting.rules.push_back(Builder("an agent's address from elsewhere")
                                 .in_prefix(kBridgePrefix, NFT_CMP_NEQ)
                                 .meta(NFT_META_IIFNAME, ifname("lo"), NFT_CMP_NEQ)
                                 .nfproto(NFPROTO_IPV6)
                                 .load(NFT_PAYLOAD_NETWORK_HEADER, 8, 16, 0)
                                 .in_set(kPool6)
                                 .go("discard"));
  prerouting.rules.push_back(Builder("no port mark")
                                 .in_prefix(kBridgePrefix)
                                 .mark_is(kPortMark, NFT_CMP_NEQ)
                                 .go("discard"));
  prerouting.rules.push_back(
      Builder("no port mark").in_group().mark_is(kPortMark, NFT_CMP_NEQ).go("discard"));

  // From here on by name and by group: a bridge can get another name while a packet is between
  // two hooks. One change cannot take both away.
  Chain& input = table.chains["input"] = base("filter", NF_INET_LOCAL_IN, kBeforeFilter, NF_ACCEPT);
  input.rules.push_back(Builder().in_prefix(kBridgePrefix).go("to_host"));
  input.rules.push_back(Builder().in_group().go("to_host"));

  Chain& to_host = table.chains["to_host"];
  to_host.rules.push_back(Builder("neighbour solicitation for the gateway")
                              .nfproto(NFPROTO_IPV6)
                              .l4proto(IPPROTO_ICMPV6)
                              .transport(0, {ND_NEIGHBOR_SOLICIT})
                              .accept());
  to_host.rules.push_back(Builder("host").go("discard"));

  Chain& output = table.chains["output"] =
      base("filter", NF_INET_LOCAL_OUT, kBeforeFilter, NF_ACCEPT);
  output.rules.push_back(Builder().out_prefix(kBridgePrefix).go("from_host"));
  output.rules.push_back(Builder().out_group().go("from_host"));
  // What the host says to an agent (an error holds a piece of the agent's own packet) goes by the
  // default route when the bridge has lost its address.
  output.rules.push_back(Builder("to an agent's address elsewhere")
                             .meta(NFT_META_OIFNAME, ifname("lo"), NFT_CMP_NEQ)
                             .nfproto(NFPROTO_IPV4)
                             .load(NFT_PAYLOAD_NETWORK_HEADER, 16, 4, 0)
                             .in_set(kPool4)
                             .go("discard"));
  output.rules.push_back(Builder("to an agent's address elsewhere")
                             .meta(NFT_META_OIFNAME, ifname("lo"), NFT_CMP_NEQ)
                             .nfproto(NFPROTO_IPV6)
                             .load(NFT_PAYLOAD_NETWORK_HEADER, 24, 16, 0)
                             .in_set(kPool6)
                             .go("discard"));

  Chain& from_host = table.chains["from_host"];
  from_host.rules.push_back(Builder("neighbour advertisement of the gateway")
                                .nfproto(NFPROTO_IPV6)
                                .l4proto(IPPROTO_ICMPV6)
                                .transport(0, {ND_NEIGHBOR_ADVERT})
                                .go("allowed"));
  for (const int protocol : {int{IPPROTO_ICMP}, int{IPPROTO_ICMPV6}, int{IPPROTO_TCP}}) {
    // ICMP errors about the container's own packets, and the resets of chain "reject".
    from_host.rules.push_back(Builder("errors about its own packets")
                                  .ct_has(NFT_CT_STATE, NF_CT_STATE_BIT(IP_CT_RELATED))
                                  .l4proto(static_cast<std::uint8_t>(protocol))
                                  .go("allowed"));
  }
  from_host.rules.push_back(Builder("host").go("discard"));

  Chain& forward = table.chains["forward"] =
      base("filter", NF_INET_FORWARD, kBeforeFilter, NF_ACCEPT);
  forward.rules.push_back(Builder().in_prefix(kBridgePrefix).go("from"));
  forward.rules.push_back(Builder().in_group().go("from"));
  forward.rules.push_back(Builder().out_prefix(kBridgePrefix).go("to"));
  forward.rules.push_back(Builder().out_group().go("to"));

  Chain& from = table.chains["from"];
  from.rules.push_back(Builder("never between agents").out_prefix(kBridgePrefix).go("discard"));
  from.rules.push_back(Builder("never between agents").out_group().go("discard"));
  // A destination that someone's DNAT rewrote (a published port of another container) was never
  // what the policy allowed.
  from.rules.push_back(
      Builder("rewritten destination").ct_has(NFT_CT_STATUS, IPS_DST_NAT).go("discard"));
  from.rules.push_back(Builder()
                           .nfproto(NFPROTO_IPV4)
                           .load(NFT_PAYLOAD_NETWORK_HEADER, 12, 4, 0)
                           .verdict_map("from4"));
  from.rules.push_back(Builder()
                           .nfproto(NFPROTO_IPV6)
                           .load(NFT_PAYLOAD_NETWORK_HEADER, 8, 16, 0)
                           .verdict_map("from6"));
  from.rules.push_back(Builder("not released").go("discard"));

  Chain& to = table.chains["to"];
  const auto established_reply = [] {
    return Builder()
        .ct_has(NFT_CT_STATE, NF_CT_STATE_BIT(IP_CT_ESTABLISHED))
        .ct_is(NFT_CT_DIRECTION, {kDirectionReply});
  };
  to.rules.push_back(established_reply()
                         .nfproto(NFPROTO_IPV4)
                         .load(NFT_PAYLOAD_NETWORK_HEADER, 16, 4, 0)
                         .verdict_map("to4"));
  to.rules.push_back(established_reply()
                         .nfproto(NFPROTO_IPV6)
                         .load(NFT_PAYLOAD_NETWORK_HEADER, 24, 16, 0)
                         .verdict_map("to6"));
  for (const int protocol : {int{IPPROTO_ICMP}, int{IPPROTO_ICMPV6}}) {
    to.rules.push_back(Builder("path MTU and unreachable for its own flows")
                           .ct_has(NFT_CT_STATE, NF_CT_STATE_BIT(IP_CT_RELATED))
                           .l4proto(static_cast<std::uint8_t>(protocol))
                           .go("allowed"));
  }
  to.rules.push_back(Builder().go("discard"));

  Chain& postrouting = table.chains["postrouting"] =
      base("nat", NF_INET_POST_ROUTING, kSourceNat, NF_ACCEPT);
  postrouting.rules.push_back(Builder()
                                  .out_prefix(kBridgePrefix, NFT_CMP_NEQ)
                                  .nfproto(NFPROTO_IPV4)
                                  .load(NFT_PAYLOAD_NETWORK_HEADER, 12, 4, 0)
                                  .in_set(kMasquerade4)
                                  .expression(nft::Masquerade{}));
  postrouting.rules.push_back(Builder()
                                  .out_prefix(kBridgePrefix, NFT_CMP_NEQ)
                                  .nfproto(NFPROTO_IPV6)
                                  .load(NFT_PAYLOAD_NETWORK_HEADER, 8, 16, 0)
                                  .in_set(kMasquerade6)
                                  .expression(nft::Masquerade{}));
  return table;
}

Bytes port_key(const InterfaceName& port, const MacAddress& mac) {
  Bytes key = ifname(port.str());
  const Bytes address = bytes_of(mac);
  key.insert(key.end(), address.begin(), address.end());
  pad4(key);
  return key;
}

nft::Table bridge_skeleton() {
  nft::Table table;
  Set& released = table.sets["released"];
  released.flags = NFT_SET_CONCAT;
  released.key_type = concat({kTypeIfName, kTypeEther});
  released.key_length = kIfNameSize + 8;
  released.fields = {kIfNameSize, 6};

  Chain& from = table.chains["from_port"];
  from.rules.push_back(Builder("released, and layer 1's mark")
                           .mark_is(kPortMark)
                           .load_meta(NFT_META_IIFNAME, 0)
                           .load(NFT_PAYLOAD_LL_HEADER, 6, 6, 4)
                           .in_set("released")
                           .accept());
  add_drop(from, "agentgate bridge from ");
  Chain& to = table.chains["to_port"];
  to.rules.push_back(Builder("released")
                         .load_meta(NFT_META_OIFNAME, 0)
                         .load(NFT_PAYLOAD_LL_HEADER, 0, 6, 4)
                         .in_set("released")
                         .accept());
  add_drop(to, "agentgate bridge to ");
  Chain& between = table.chains["between_ports"];
  add_drop(between, "agentgate bridge between ");

  Chain& prerouting = table.chains["prerouting"] =
      base("filter", NF_BR_PRE_ROUTING, kEarly, NF_ACCEPT);
  // By group first: that stays when a port is renamed out of the prefix.
  prerouting.rules.push_back(Builder().in_group().go("from_port"));
  prerouting.rules.push_back(Builder().in_prefix(kPortPrefix).go("from_port"));
  // Link-local group addresses (01:80:c2:00:00:0x: LLDP, EAPOL, LACP, pause) skip prerouting
  // (br_handle_frame) and come to the input hook only.
  Chain& input = table.chains["input"] = base("filter", NF_BR_LOCAL_IN, kEarly, NF_ACCEPT);
  input.rules.push_back(Builder().in_group().go("from_port"));
  input.rules.push_back(Builder().in_prefix(kPortPrefix).go("from_port"));
  Chain& forward = table.chains["forward"] = base("filter", NF_BR_FORWARD, kEarly, NF_ACCEPT);
  forward.rules.push_back(Builder().in_group().go("between_ports"));
  forward.rules.push_back(Builder().out_group().go("between_ports"));
  forward.rules.push_back(Builder().in_prefix(kPortPrefix).go("between_ports"));
  forward.rules.push_back(Builder().out_prefix(kPortPrefix).go("between_ports"));
  Chain& postrouting = table.chains["postrouting"] =
      base("filter", NF_BR_POST_ROUTING, kEarly, NF_ACCEPT);
  postrouting.rules.push_back(Builder().out_group().go("to_port"));
  postrouting.rules.push_back(Builder().out_prefix(kPortPrefix).go("to_port"));
  return table;
}

MacAddress solicited_node_mac(const Ipv6Address& address) {  // RFC 2464, 7
  const auto& b = address.bytes();
  return MacAddress({0x33, 0x33, 0xFF, b[13], b[14], b[15]});
}
Ipv6Address solicited_node(const Ipv6Address& address) {  // RFC 4291, 2.7.1
  const auto& b = address.bytes();
  return Ipv6Address({0xFF, 0x02, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x01, 0xFF, b[13], b[14], b[15]});
}

void add_closed_rules(Chain& chain, const char* direction) {
  chain.rules.push_back(Builder("count").counter());
  chain.rules.push_back(Builder("log").log(std::string("agentgate port ") + direction + " "));
}

}  // namespace

std::string ingress_chain(const InterfaceName& port) { return port.str() + "-in"; }
std::string egress_chain(const InterfaceName& port) { return port.str() + "-out"; }

Chain ingress(const PortSpec& port) {
  Chain chain = base("filter", kNetdevIngress, kEarly, NF_DROP, port.name.str());
  if (port.policy) {
    const auto own = [&](std::uint16_t type, const char* comment) {
      return Builder(comment).ether_saddr(port.mac).ether_type(type);
    };
    if (port.address4) {
      chain.rules.push_back(own(ETH_P_IP, "own IPv4 to the bridge")
                                .ether_daddr(port.bridge_mac)
                                .network(12, bytes_of(*port.address4))
                                .set_mark(kPortMark)
                                .accept());
    }
    if (port.address4 && port.gateway4) {
      // RFC 826: hardware Ethernet, protocol IPv4, sizes 6 and 4, operation request.
      const Bytes request = {0, ARPHRD_ETHER, 0x08, 0x00, 6, 4, 0, ARPOP_REQUEST};
      for (const MacAddress& to :
           {MacAddress({0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF}), port.bridge_mac}) {
        chain.rules.push_back(own(ETH_P_ARP, "who has the gateway")
                                  .ether_daddr(to)
                                  .network(0, request)
                                  .network(8, bytes_of(port.mac))
                                  .network(14, bytes_of(*port.address4))
                                  .network(24, bytes_of(*port.gateway4))
                                  .set_mark(kPortMark)
                                  .accept());
      }
    }
    if (port.address6) {
      const auto own6 = [&](const char* comment) {
        return own(ETH_P_IPV6, comment)
            .ether_daddr(port.bridge_mac)
            .network(8, bytes_of(*port.address6));
      };
      chain.rules.push_back(own6("own IPv6 to the bridge")
                                .l4proto(IPPROTO_ICMPV6, NFT_CMP_NEQ)
                                .set_mark(kPortMark)
                                .accept());
      // Types below 130 are errors and echo; from 130 on it is MLD, neighbour discovery, RA.
      chain.rules.push_back(own6("own ICMPv6 errors and echo")
                                .l4proto(IPPROTO_ICMPV6)
                                .transport(0, {130}, NFT_CMP_LT)
                                .set_mark(kPortMark)
                                .accept());
    }
    if (port.address6 && port.gateway6) {
      struct Target {
        MacAddress mac;
        Ipv6Address address;
      };
      for (const Target& to :
           {Target{solicited_node_mac(*port.gateway6), solicited_node(*port.gateway6)},
            Target{port.bridge_mac, *port.gateway6}}) {
        // Next header straight after the fixed one, hop limit 255 (RFC 4861, 7.1.1; RFC 6980).
        chain.rules.push_back(own(ETH_P_IPV6, "neighbour solicitation for the gateway")
                                  .ether_daddr(to.mac)
                                  .network(6, {IPPROTO_ICMPV6, 255})
                                  .network(8, bytes_of(*port.address6))
                                  .network(24, bytes_of(to.address))
                                  .network(40, {ND_NEIGHBOR_SOLICIT, 0})
                                  .network(48, bytes_of(*port.gateway6))
                                  .set_mark(kPortMark)
                                  .accept());
      }
    }
  }
  add_closed_rules(chain, "from");
  return chain;
}

Chain egress(const PortSpec& port) {
  Chain chain = base("filter", kNetdevEgress, kEarly, NF_DROP, port.name.str());
  if (port.policy) {
    const auto own = [&](std::uint16_t type, const char* comment) {
      return Builder(comment).ether_saddr(port.bridge_mac).ether_daddr(port.mac).ether_type(type);
    };
    if (port.address4) {
      chain.rules.push_back(own(ETH_P_IP, "allowed IPv4")
                                .network(16, bytes_of(*port.address4))
                                .mark_is(kVerdictMark)
                                .accept());
    }
    if (port.address4 && port.gateway4) {
      const Bytes reply = {0, ARPHRD_ETHER, 0x08, 0x00, 6, 4, 0, ARPOP_REPLY};
      chain.rules.push_back(own(ETH_P_ARP, "the gateway is")
                                .network(0, reply)
                                .network(8, bytes_of(port.bridge_mac))
                                .network(14, bytes_of(*port.gateway4))
                                .network(24, bytes_of(*port.address4))
                                .accept());
    }
    if (port.address6) {
      chain.rules.push_back(own(ETH_P_IPV6, "allowed IPv6")
                                .network(24, bytes_of(*port.address6))
                                .mark_is(kVerdictMark)
                                .accept());
    }
  }
  add_closed_rules(chain, "to");
  return chain;
}

std::vector<Placed> released_elements(const PortSpec& port, const std::string& policy) {
  std::vector<Placed> out;
  Element bridge;
  bridge.key = port_key(port.name, port.mac);
  bridge.comment = port.label;
  out.push_back({Family::bridge, "released", bridge});
  const auto map = [&](const char* set, Bytes key, const std::string& chain) {
    Element element;
    element.key = std::move(key);
    element.verdict = Verdict{NFT_GOTO, chain};
    out.push_back({Family::inet, set, std::move(element)});
  };
  if (port.address4) {
    map("from4", bytes_of(*port.address4), chain_name("from", "4", policy));
    map("to4", bytes_of(*port.address4), chain_name("to", "4", policy));
  }
  if (port.address6) {
    map("from6", bytes_of(*port.address6), chain_name("from", "6", policy));
    map("to6", bytes_of(*port.address6), chain_name("to", "6", policy));
  }
  return out;
}

PolicyObjects policy(const PolicySpec& spec) {
  PolicyObjects out;
  policy_family(spec, spec.v4, out);
  policy_family(spec, spec.v6, out);
  return out;
}

std::vector<Placed> network_elements(const NetworkSpec& network) {
  std::vector<Placed> out;
  const auto place = [&](const char* set, const std::vector<Element>& elements) {
    for (const Element& element : elements) out.push_back({Family::inet, set, element});
  };
  if (network.gateway4) {
    const auto pool = interval_elements<Ipv4Address>({network.gateway4->prefix().range()});
    place(kPool4, pool);
    if (network.masquerade) place(kMasquerade4, pool);
  }
  if (network.gateway6) {
    const auto pool = interval_elements<Ipv6Address>({network.gateway6->prefix().range()});
    place(kPool6, pool);
    if (network.masquerade) place(kMasquerade6, pool);
  }
  return out;
}

std::vector<Element> intervals(const std::vector<Ipv4Range>& ranges) {
  return interval_elements(ranges);
}
std::vector<Element> intervals(const std::vector<Ipv6Range>& ranges) {
  return interval_elements(ranges);
}

nft::Table skeleton(Family family, std::uint32_t table_flags) {
  nft::Table table;
  if (family == Family::inet) table = inet_skeleton();
  if (family == Family::bridge) table = bridge_skeleton();
  table.flags = table_flags;
  return table;
}

nft::Ruleset render(const GateSpec& spec, std::uint32_t table_flags) {
  nft::Ruleset out;
  for (const Family family : {Family::netdev, Family::bridge, Family::inet}) {
    out[family] = skeleton(family, table_flags);
  }
  nft::Table& inet = out[Family::inet];
  inet.sets[kHostSet4].elements = intervals(spec.host4);
  inet.sets[kHostSet6].elements = intervals(spec.host6);
  for (const auto& [bridge, network] : spec.networks) {
    for (Placed& placed : network_elements(network)) {
      inet.sets[placed.set].elements.push_back(std::move(placed.element));
    }
  }
  for (const auto& [name, value] : spec.policies) {
    PolicyObjects objects = policy(value);
    inet.sets.merge(objects.sets);
    inet.chains.merge(objects.chains);
  }
  for (const auto& [name, port] : spec.ports) {
    out[Family::netdev].chains[ingress_chain(name)] = ingress(port);
    out[Family::netdev].chains[egress_chain(name)] = egress(port);
    if (!port.policy) continue;
    for (Placed& placed : released_elements(port, *port.policy)) {
      out[placed.family].sets[placed.set].elements.push_back(std::move(placed.element));
    }
  }
  for (auto& [family, table] : out) {
    for (auto& [name, set] : table.sets) std::sort(set.elements.begin(), set.elements.end());
  }
  return out;
}

}  // namespace agentgate::netdriver::ruleset
