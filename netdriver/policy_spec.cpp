// SPDX-License-Identifier: GPL-2.0-or-later
#include <algorithm>
#include <array>
#include <map>
#include <optional>

#include "netdriver/gate.h"

namespace agentgate::netdriver {
namespace {

template <class Address>
using Ranges = std::vector<AddressRange<Address>>;
template <class Address>
using Entries = std::vector<AllowEntry<Address>>;
using Ports = std::vector<PortRange>;  // sorted, disjoint, not adjacent

// The port ranges that are open at one point of a sweep, with how often each of them is.
class ActivePorts {
 public:
  void add(PortRange range) { ++count_[range]; }
  void remove(PortRange range) {
    const auto at = count_.find(range);
    if (--at->second == 0) count_.erase(at);
  }
  [[nodiscard]] Ports merged() const {
    Ports out;
    for (const auto& [range, count] : count_) {
      if (!out.empty() && range.first <= out.back().last + 1) {
        out.back().last = std::max(out.back().last, range.last);
      } else {
        out.push_back(range);
      }
    }
    return out;
  }

 private:
  std::map<PortRange, unsigned> count_;
};

Ports minus(const Ports& from, const Ports& take) {
  Ports out;
  auto cut = take.begin();
  for (const PortRange& range : from) {
    unsigned first = range.first;
    while (cut != take.end() && cut->last < first) ++cut;
    for (auto at = cut; at != take.end() && at->first <= range.last; ++at) {
      if (at->first > first) {
        out.push_back(
            {static_cast<std::uint16_t>(first), static_cast<std::uint16_t>(at->first - 1)});
      }
      first = at->last + 1U;
    }
    if (first <= range.last) out.push_back({static_cast<std::uint16_t>(first), range.last});
  }
  return out;
}

template <class Address>
Address before(const Address& address) {  // never of the first one
  auto bytes = address.bytes();
  for (auto byte = bytes.rbegin(); byte != bytes.rend(); ++byte) {
    if ((*byte)-- != 0) break;
  }
  return Address(bytes);
}

// Sweeps over the addresses: the widest address ranges within which the same ports are open.
// What comes out depends on what is covered alone, not on how the entries say it.
template <class Address>
Entries<Address> by_address(const Entries<Address>& allow, const Entries<Address>& deny,
                            Protocol protocol) {
  struct Event {
    Address at;
    bool begin;
    bool denies;
    PortRange ports;
  };
  std::vector<Event> events;
  events.reserve(2 * (allow.size() + deny.size()));
  for (const auto* list : {&allow, &deny}) {
    for (const auto& entry : *list) {
      if (entry.protocol != protocol) continue;
      events.push_back({entry.addresses.first, true, list == &deny, entry.ports});
      // An entry that reaches the last address never ends.
      if (const auto after = next(entry.addresses.last)) {
        events.push_back({*after, false, list == &deny, entry.ports});
      }
    }
  }
  std::sort(events.begin(), events.end(),
            [](const Event& a, const Event& b) { return a.at < b.at; });

  Entries<Address> out;
  ActivePorts open;
  ActivePorts closed;
  Ports current;
  Address since;
  const auto flush = [&](const Address& last) {
    for (const PortRange& ports : current) out.push_back({{since, last}, protocol, ports});
  };
  for (std::size_t i = 0; i < events.size();) {
    const Address at = events[i].at;
    // Beginnings before ends: a range that ends here and begins again must not count below zero.
    for (; i < events.size() && events[i].at == at; ++i) {
      ActivePorts& side = events[i].denies ? closed : open;
      if (events[i].begin) side.add(events[i].ports);
    }
    for (std::size_t j = i; j-- > 0 && events[j].at == at;) {
      if (!events[j].begin) (events[j].denies ? closed : open).remove(events[j].ports);
    }
    Ports here = minus(open.merged(), closed.merged());
    if (here == current) continue;
    if (!current.empty()) flush(before(at));
    current = std::move(here);
    since = at;
  }
  std::array<std::uint8_t, Address::bits / 8> ones{};
  ones.fill(0xFF);
  flush(Address(ones));
  return out;
}

// The same region cut the other way: the widest port ranges within which the same addresses are
// open. `boxes` come from by_address(). Nothing when it takes more boxes than that.
template <class Address>
std::optional<Entries<Address>> by_port(const Entries<Address>& boxes) {
  std::vector<unsigned> cuts;
  std::map<PortRange, Ranges<Address>> columns;  // of one port range; sorted, since `boxes` are
  for (const auto& box : boxes) columns[box.ports].push_back(box.addresses);
  // Each slice looks at every column, and where there are this many it would not win anyway.
  if (columns.size() > 256) return std::nullopt;
  for (const auto& [ports, ranges] : columns) {
    cuts.push_back(ports.first);
    cuts.push_back(ports.last + 1U);
  }
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  Entries<Address> out;
  for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
    Ranges<Address> here;
    for (const auto& [ports, ranges] : columns) {
      if (ports.first > cuts[i]) break;
      if (cuts[i] > ports.last) continue;
      here.insert(here.end(), ranges.begin(), ranges.end());
    }
    here = merge(std::move(here));
    if (out.size() + here.size() > boxes.size()) return std::nullopt;
    for (const auto& range : here) {
      out.push_back(
          {range,
           boxes.front().protocol,
           {static_cast<std::uint16_t>(cuts[i]), static_cast<std::uint16_t>(cuts[i + 1] - 1)}});
    }
  }
  return out;
}

// Disjoint boxes for what `allow` covers and `deny` does not. Both ways to cut are functions of
// the region, and so is the choice between them: equal regions give equal boxes.
template <class Address>
Entries<Address> boxes_of(Entries<Address> allow, const Entries<Address>& deny) {
  std::sort(allow.begin(), allow.end());
  allow.erase(std::unique(allow.begin(), allow.end()), allow.end());
  Entries<Address> out;
  for (const Protocol protocol : {Protocol::tcp, Protocol::udp}) {
    Entries<Address> boxes = by_address(allow, deny, protocol);
    if (boxes.empty()) continue;
    if (auto other = by_port(boxes)) boxes = std::move(*other);
    out.insert(out.end(), boxes.begin(), boxes.end());
  }
  std::sort(out.begin(), out.end());
  return out;
}

template <class Address>
void normalise_family(PolicyFamily<Address>& family) {
  family.deny = merge(std::move(family.deny));
  family.private_entries = boxes_of<Address>(std::move(family.private_entries), {});
  family.allow = boxes_of<Address>(std::move(family.allow), {});
}

template <class Address>
Ranges<Address> ranges_of(std::initializer_list<const char*> prefixes) {
  Ranges<Address> out;
  for (const char* text : prefixes) {
    out.push_back(BasicPrefix<Address>::parse(text).value().range());
  }
  return merge(std::move(out));
}

}  // namespace

PolicySpec normalise(PolicySpec policy) {
  normalise_family(policy.v4);
  normalise_family(policy.v6);
  return policy;
}

template <class Address>
std::vector<AllowEntry<Address>> subtract(const std::vector<AllowEntry<Address>>& allow,
                                          const std::vector<AllowEntry<Address>>& deny) {
  return boxes_of(allow, deny);
}
template std::vector<AllowEntry<Ipv4Address>> subtract(const std::vector<AllowEntry<Ipv4Address>>&,
                                                       const std::vector<AllowEntry<Ipv4Address>>&);
template std::vector<AllowEntry<Ipv6Address>> subtract(const std::vector<AllowEntry<Ipv6Address>>&,
                                                       const std::vector<AllowEntry<Ipv6Address>>&);

const std::vector<Ipv4Range>& always_deny4() {
  // IANA IPv4 special-purpose registry, less the documentation and benchmark blocks: nobody has
  // anything to protect there, and test set-ups use them.
  static const auto ranges = ranges_of<Ipv4Address>({
      "0.0.0.0/8",         // this network
      "10.0.0.0/8",        // RFC 1918
      "100.64.0.0/10",     // RFC 6598, carrier-grade NAT
      "127.0.0.0/8",       // loopback
      "168.63.129.16/32",  // Azure's host agent and resolver: a metadata service on a public
                           // address
      "169.254.0.0/16",    // link-local, with the clouds' metadata address
      "172.16.0.0/12",     // RFC 1918
      "192.0.0.0/24",      // RFC 6890, protocol assignments
      "192.168.0.0/16",    // RFC 1918
      "224.0.0.0/4",       // multicast
      "240.0.0.0/4",       // reserved, with the limited broadcast address
  });
  return ranges;
}

const std::vector<Ipv6Range>& always_deny6() {
  static const auto ranges = ranges_of<Ipv6Address>({
      "::/96",              // unspecified, loopback, IPv4-compatible (deprecated)
      "::ffff:0.0.0.0/96",  // IPv4-mapped: an IPv4 address past the IPv4 rules
      "64:ff9b::/96",       // RFC 6052: the same through a NAT64
      "64:ff9b:1::/48",     // RFC 8215, local NAT64
      "100::/64",           // RFC 6666, discard-only
      "2002::/16",          // 6to4: carries IPv4 addresses
      "2001::/32",          // Teredo: the same
      "fc00::/7",           // ULA, with the clouds' IPv6 metadata addresses
      "fe80::/10",          // link-local
      "fec0::/10",          // site-local (deprecated)
      "ff00::/8",           // multicast
  });
  return ranges;
}

}  // namespace agentgate::netdriver
