// SPDX-License-Identifier: GPL-2.0-or-later
#include <algorithm>
#include <map>

#include "netdriver/gate.h"

namespace agentgate::netdriver {
namespace {

template <class Address>
using Ranges = std::vector<AddressRange<Address>>;

template <class Address>
std::optional<Address> previous(const Address& address) {
  auto bytes = address.bytes();
  for (auto byte = bytes.rbegin(); byte != bytes.rend(); ++byte) {
    if ((*byte)-- != 0) return Address(bytes);
  }
  return std::nullopt;
}

// `from` and `take` merged; what of `from` is not in `take`.
template <class Address>
Ranges<Address> minus(const Ranges<Address>& from, const Ranges<Address>& take) {
  Ranges<Address> out;
  for (AddressRange<Address> rest : from) {
    bool left = true;
    for (const auto& cut : take) {
      if (cut.last < rest.first || rest.last < cut.first) continue;
      if (rest.first < cut.first) out.push_back({rest.first, *previous(cut.first)});
      const auto after = next(cut.last);
      if (!after || rest.last <= cut.last) {
        left = false;
        break;
      }
      rest.first = *after;
    }
    if (left) out.push_back(rest);
  }
  return out;
}

// Cuts the ports of each protocol where any entry begins or ends; within such a slice the entries
// are plain address ranges. Neighbouring slices with the same addresses are joined again.
template <class Address>
std::vector<AllowEntry<Address>> slice(const std::vector<AllowEntry<Address>>& allow,
                                       const std::vector<AllowEntry<Address>>& deny) {
  std::vector<AllowEntry<Address>> out;
  for (const Protocol protocol : {Protocol::tcp, Protocol::udp}) {
    std::vector<unsigned> cuts;
    for (const auto* list : {&allow, &deny}) {
      for (const auto& entry : *list) {
        if (entry.protocol != protocol) continue;
        cuts.push_back(entry.ports.first);
        cuts.push_back(entry.ports.last + 1U);
      }
    }
    std::sort(cuts.begin(), cuts.end());
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
    Ranges<Address> open;      // of the slices joined so far
    unsigned open_from = 0;
    const auto flush = [&](unsigned end) {
      for (const auto& range : open) {
        out.push_back({range, protocol,
                       {static_cast<std::uint16_t>(open_from), static_cast<std::uint16_t>(end - 1)}});
      }
      open.clear();
    };
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
      const auto in_slice = [&](const std::vector<AllowEntry<Address>>& list) {
        Ranges<Address> ranges;
        for (const auto& entry : list) {
          if (entry.protocol == protocol && entry.ports.first <= cuts[i] &&
              cuts[i] <= entry.ports.last) {
            ranges.push_back(entry.addresses);
          }
        }
        return merge(std::move(ranges));
      };
      Ranges<Address> here = minus(in_slice(allow), in_slice(deny));
      if (here != open) {
        flush(cuts[i]);
        open = std::move(here);
        open_from = cuts[i];
      }
    }
    if (!cuts.empty()) flush(cuts.back());
  }
  std::sort(out.begin(), out.end());
  return out;
}

template <class Address>
void normalise_family(PolicyFamily<Address>& family) {
  family.deny = merge(std::move(family.deny));
  family.private_entries = slice<Address>(family.private_entries, {});
  family.allow = slice<Address>(family.allow, {});
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
  return slice(allow, deny);
}
template std::vector<AllowEntry<Ipv4Address>> subtract(const std::vector<AllowEntry<Ipv4Address>>&,
                                                       const std::vector<AllowEntry<Ipv4Address>>&);
template std::vector<AllowEntry<Ipv6Address>> subtract(const std::vector<AllowEntry<Ipv6Address>>&,
                                                       const std::vector<AllowEntry<Ipv6Address>>&);

const std::vector<Ipv4Range>& always_deny4() {
  // IANA IPv4 special-purpose registry, less the documentation and benchmark blocks: nobody has
  // anything to protect there, and test set-ups use them.
  static const auto ranges = ranges_of<Ipv4Address>({
      "0.0.0.0/8",       // this network
      "10.0.0.0/8",      // RFC 1918
      "100.64.0.0/10",   // RFC 6598, carrier-grade NAT
      "127.0.0.0/8",     // loopback
      "169.254.0.0/16",  // link-local, with the clouds' metadata address
      "172.16.0.0/12",   // RFC 1918
      "192.0.0.0/24",    // RFC 6890, protocol assignments
      "192.168.0.0/16",  // RFC 1918
      "224.0.0.0/4",     // multicast
      "240.0.0.0/4",     // reserved, with the limited broadcast address
  });
  return ranges;
}

const std::vector<Ipv6Range>& always_deny6() {
  static const auto ranges = ranges_of<Ipv6Address>({
      "::/96",          // unspecified, loopback, IPv4-compatible (deprecated)
      "::ffff:0.0.0.0/96",  // IPv4-mapped: an IPv4 address past the IPv4 rules
      "64:ff9b::/96",   // RFC 6052: the same through a NAT64
      "64:ff9b:1::/48", // RFC 8215, local NAT64
      "100::/64",       // RFC 6666, discard-only
      "2002::/16",      // 6to4: carries IPv4 addresses
      "2001::/32",      // Teredo: the same
      "fc00::/7",       // ULA, with the clouds' IPv6 metadata addresses
      "fe80::/10",      // link-local
      "fec0::/10",      // site-local (deprecated)
      "ff00::/8",       // multicast
  });
  return ranges;
}

}  // namespace agentgate::netdriver
