// SPDX-License-Identifier: GPL-2.0-or-later
#include "tests/support/frames.h"

#include <algorithm>
#include <initializer_list>
#include <utility>

namespace agentgate::test {
namespace {

constexpr std::array<std::uint8_t, 6> kMagic = {0xA6, 'g', 'P', 0x9D, 'r', 0xB1};

using View = std::span<const std::uint8_t>;
using Mac = std::array<std::uint8_t, 6>;

template <class... Parts>
Bytes join(const Parts&... parts) {
  Bytes out;
  (out.insert(out.end(), parts.begin(), parts.end()), ...);
  return out;
}

template <class Integer>
Bytes number(Integer value, int bytes) {
  Bytes out;
  for (int i = bytes - 1; i >= 0; --i) {
    out.push_back(static_cast<std::uint8_t>(static_cast<std::uint64_t>(value) >> (8 * i)));
  }
  return out;
}
Bytes u8(unsigned value) { return number(value, 1); }
Bytes u16(unsigned value) { return number(value, 2); }
Bytes u32(std::uint64_t value) { return number(value, 4); }
Bytes zeros(std::size_t count) { return Bytes(count, 0); }
Bytes raw(std::initializer_list<unsigned> bytes) {
  Bytes out;
  for (unsigned byte : bytes) out.push_back(static_cast<std::uint8_t>(byte));
  return out;
}
Bytes text(std::string_view characters) { return {characters.begin(), characters.end()}; }
void put16(Bytes& out, std::size_t offset, unsigned value) {
  out[offset] = static_cast<std::uint8_t>(value >> 8U);
  out[offset + 1] = static_cast<std::uint8_t>(value);
}

std::uint16_t internet_checksum(View data, std::uint32_t sum = 0) {
  for (std::size_t i = 0; i < data.size(); ++i) {
    sum += i % 2 == 0 ? static_cast<std::uint32_t>(data[i]) << 8U : data[i];
  }
  while (sum >> 16U) sum = (sum & 0xFFFFU) + (sum >> 16U);
  return static_cast<std::uint16_t>(~sum);
}

std::uint32_t crc32c(View data) {
  std::uint32_t crc = 0xFFFFFFFF;
  for (std::uint8_t byte : data) {
    crc ^= byte;
    for (int i = 0; i < 8; ++i) crc = (crc >> 1U) ^ ((crc & 1U) != 0 ? 0x82F63B78U : 0U);
  }
  return ~crc;
}

// ---- Ethernet

constexpr Mac kBroadcast = {0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF};
constexpr Mac kZeroMac = {};
constexpr Mac kStrangerMac = {0x02, 0x66, 0x66, 0x66, 0x66, 0x66};
constexpr Mac kAllNodesMac = {0x33, 0x33, 0, 0, 0, 1};
constexpr Mac kAllRoutersMac = {0x33, 0x33, 0, 0, 0, 2};
// IEEE 802.1D link-local group addresses.
constexpr Mac link_local_group(std::uint8_t last) { return {0x01, 0x80, 0xC2, 0, 0, last}; }

Bytes ethernet(View destination, View source, unsigned type, View payload) {
  return join(destination, source, u16(type), payload);
}
Bytes tagged(View destination, View source,
             std::initializer_list<std::pair<unsigned, unsigned>> tags, unsigned type,
             View payload) {
  Bytes out = join(destination, source);
  for (const auto& [protocol, vid] : tags) out = join(out, u16(protocol), u16(vid));
  return join(out, u16(type), payload);
}
// 802.3: the field after the addresses is the length; the marker follows as padding would.
Bytes ieee8023(View destination, View source, View llc, View trailer) {
  return join(destination, source, u16(static_cast<unsigned>(llc.size())), llc, trailer);
}

// ---- IP

struct Ends {
  Bytes source;
  Bytes destination;
};
template <class Address>
Bytes bytes_of(const Address& address) {
  return {address.bytes().begin(), address.bytes().end()};
}
template <class Address>
Ends ends(const Address& source, const Address& destination) {
  return {bytes_of(source), bytes_of(destination)};
}

std::uint16_t transport_checksum(const Ends& e, unsigned protocol, View data) {
  const Bytes pseudo = join(e.source, e.destination, u32(data.size()), u32(protocol));
  std::uint32_t sum = static_cast<std::uint16_t>(~internet_checksum(pseudo));
  return internet_checksum(data, sum);
}

Bytes udp(const Ends& e, unsigned source, unsigned destination, View payload) {
  Bytes out = join(u16(source), u16(destination), u16(static_cast<unsigned>(8 + payload.size())),
                   u16(0), payload);
  const auto sum = transport_checksum(e, 17, out);
  put16(out, 6, sum == 0 ? 0xFFFF : sum);
  return out;
}
Bytes tcp_syn(const Ends& e, unsigned source, unsigned destination, View payload) {
  Bytes out = join(u16(source), u16(destination), u32(0x01020304), u32(0),
                   raw({0x50, 0x02, 0xFF, 0xFF, 0, 0, 0, 0}), payload);
  put16(out, 16, transport_checksum(e, 6, out));
  return out;
}
Bytes icmp4(unsigned type, unsigned code, View rest) {
  Bytes out = join(u8(type), u8(code), u16(0), rest);
  put16(out, 2, internet_checksum(out));
  return out;
}
Bytes icmp6(const Ends& e, unsigned type, unsigned code, View rest) {
  Bytes out = join(u8(type), u8(code), u16(0), rest);
  put16(out, 2, transport_checksum(e, 58, out));
  return out;
}
Bytes sctp_init(unsigned source, unsigned destination, View payload) {
  // The marker is a parameter of a type that receivers skip (high bits 10).
  const Bytes parameter =
      join(u16(0x8042), u16(static_cast<unsigned>(4 + payload.size())), payload);
  const Bytes chunk = join(raw({1, 0}), u16(static_cast<unsigned>(20 + parameter.size())), u32(7),
                           u32(65536), u16(1), u16(1), u32(9), parameter);
  Bytes out = join(u16(source), u16(destination), u32(0), u32(0), chunk);
  const std::uint32_t crc = crc32c(out);
  for (std::size_t i = 0; i < 4; ++i) out[8 + i] = static_cast<std::uint8_t>(crc >> (8 * i));
  return out;
}

struct Ip4 {
  unsigned protocol = 17;
  unsigned ttl = 64;
  unsigned id = 0x4147;
  unsigned fragment = 0;  // flags and offset in units of 8 bytes
  Bytes options{};        // a multiple of 4 bytes
};
constexpr unsigned kMoreFragments = 0x2000;

Bytes ip4(const Ends& e, const Ip4& with, View payload) {
  const auto header = static_cast<unsigned>(20 + with.options.size());
  Bytes out =
      join(u8(0x40 | header / 4), u8(0), u16(static_cast<unsigned>(header + payload.size())),
           u16(with.id), u16(with.fragment), u8(with.ttl), u8(with.protocol), u16(0), e.source,
           e.destination, with.options);
  put16(out, 10, internet_checksum(out));
  return join(out, payload);
}
Bytes ip6(const Ends& e, unsigned next, View payload, unsigned hops = 64) {
  return join(u32(0x60000000), u16(static_cast<unsigned>(payload.size())), u8(next), u8(hops),
              e.source, e.destination, payload);
}
// A hop-by-hop or destination options header that carries `payload` in an option that receivers
// skip (type 0x1e), 4 bytes of header and option type before it.
Bytes ip6_options(unsigned next, View payload) {
  Bytes out = join(u8(next), u8(0), u8(0x1E), u8(static_cast<unsigned>(payload.size())), payload);
  while (out.size() % 8 != 0) out.push_back(0);  // Pad1
  out[1] = static_cast<std::uint8_t>(out.size() / 8 - 1);
  return out;
}
// Kinds differ in `id`, else two lone fragments of different kinds would make a datagram.
Bytes ip6_fragment(unsigned next, unsigned id, unsigned offset, bool more) {
  return join(u8(next), u8(0), u16(offset << 3U | (more ? 1U : 0U)), u32(0x41470000U | id));
}

Mac multicast_mac(const Ipv4Address& group) {
  const auto& b = group.bytes();
  return {0x01, 0x00, 0x5E, static_cast<std::uint8_t>(b[1] & 0x7FU), b[2], b[3]};
}
Mac multicast_mac(const Ipv6Address& group) {
  const auto& b = group.bytes();
  return {0x33, 0x33, b[12], b[13], b[14], b[15]};
}
Ipv6Address group6(std::uint8_t scope, unsigned last) {
  std::array<std::uint8_t, 16> out = {0xFF, scope};
  out[14] = static_cast<std::uint8_t>(last >> 8U);
  out[15] = static_cast<std::uint8_t>(last);
  return Ipv6Address(out);
}
Ipv6Address solicited_node(const Ipv6Address& address) {
  const auto& b = address.bytes();
  return Ipv6Address({0xFF, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xFF, b[13], b[14], b[15]});
}
Ipv6Address link_local(const MacAddress& mac) {
  const auto& m = mac.bytes();
  return Ipv6Address({0xFE, 0x80, 0, 0, 0, 0, 0, 0, static_cast<std::uint8_t>(m[0] ^ 2U), m[1],
                      m[2], 0xFF, 0xFE, m[3], m[4], m[5]});
}
constexpr Ipv4Address kAnyone4(std::array<std::uint8_t, 4>{255, 255, 255, 255});
constexpr Ipv4Address kStranger4(std::array<std::uint8_t, 4>{203, 0, 113, 77});
const Ipv6Address kStranger6({0x20, 0x01, 0x0D, 0xB8, 0x66, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x66});
const Ipv6Address kAllNodes = group6(2, 1);

// ---- ARP and neighbour discovery

struct Arp {
  unsigned operation = 1;
  View sender_mac;
  Ipv4Address sender;
  View target_mac;
  Ipv4Address target;
};
// The marker sits in the padding that Ethernet's minimum size asks for anyway.
Bytes arp(View destination, View source, const Arp& a, View marker, unsigned type = 0x0806) {
  return ethernet(destination, source, type,
                  join(raw({0, 1, 8, 0, 6, 4}), u16(a.operation), a.sender_mac, a.sender.bytes(),
                       a.target_mac, a.target.bytes(), u16(0), marker));
}

Bytes nd_link_option(unsigned type, View mac) { return join(u8(type), u8(1), mac); }
// Option 253 is for experiments (RFC 4727); receivers skip it.
Bytes nd_marker_option(View marker) { return join(raw({253, 3, 0, 0, 0, 0, 0, 0}), marker); }

Bytes nd(View destination_mac, View source_mac, const Ipv6Address& source,
         const Ipv6Address& destination, unsigned type, View rest) {
  const Ends e = ends(source, destination);
  return ethernet(destination_mac, source_mac, 0x86DD, ip6(e, 58, icmp6(e, type, 0, rest), 255));
}
Bytes router_advertisement_body(View mac, View marker) {
  const Bytes prefix = join(raw({3, 4, 64, 0xC0}), u32(3600), u32(3600), u32(0),
                            raw({0x20, 0x01, 0x0D, 0xB8, 0x0B, 0xAD}), zeros(10));
  return join(raw({64, 0, 0x07, 0x08}), u32(0), u32(0), nd_link_option(1, mac), prefix,
              nd_marker_option(marker));
}

// ---- the catalogue

constexpr Released D = Released::dropped;
constexpr Released P = Released::passes;
constexpr Released E = Released::either;

using One = std::function<Bytes(const Identity&, View marker)>;
using Many = std::function<std::vector<Bytes>(const Identity&, View marker)>;

class Catalogue {
 public:
  std::vector<FrameKind> kinds;

  // `open`: b bridge device, n neighbour, u uplink.
  void many(const char* name, const char* category, std::string_view open, Released released,
            Many builder, bool marked = true) {
    FrameKind kind;
    kind.number = static_cast<std::uint16_t>(kinds.size() + 1);
    kind.name = name;
    kind.category = category;
    kind.marked = marked;
    kind.open_bridge = {open.find('b') != open.npos, open.find('n') != open.npos,
                        open.find('u') != open.npos};
    kind.released = released;
    kind.builder = [builder = std::move(builder)](const Identity& who, const Marker& marker) {
      return builder(who, marker.bytes());
    };
    kinds.push_back(std::move(kind));
  }
  void one(const char* name, const char* category, std::string_view open, Released released,
           One builder, bool marked = true) {
    many(
        name, category, open, released,
        [builder = std::move(builder)](const Identity& who, View marker) {
          return std::vector<Bytes>{builder(who, marker)};
        },
        marked);
  }
};

// Own MAC to the gateway's MAC.
Bytes via_gateway(const Identity& i, View packet, unsigned type = 0x0800) {
  return ethernet(i.gateway.mac.bytes(), i.own.mac.bytes(), type, packet);
}
Bytes udp4(const Identity& i, const Ipv4Address& source, const Ipv4Address& destination,
           View payload, const Ip4& with = {}) {
  const Ends e = ends(source, destination);
  return ip4(e, with, udp(e, i.source_port, i.port, payload));
}
Bytes udp6(const Identity& i, const Ipv6Address& source, const Ipv6Address& destination,
           View payload) {
  const Ends e = ends(source, destination);
  return ip6(e, 17, udp(e, i.source_port, i.port, payload));
}
Bytes tcp4(const Identity& i, const Ipv4Address& source, const Ipv4Address& destination,
           View payload) {
  const Ends e = ends(source, destination);
  return ip4(e, {.protocol = 6}, tcp_syn(e, i.source_port, i.port, payload));
}
Bytes tcp6(const Identity& i, const Ipv6Address& source, const Ipv6Address& destination,
           View payload) {
  const Ends e = ends(source, destination);
  return ip6(e, 6, tcp_syn(e, i.source_port, i.port, payload));
}
Bytes echo4(const Ipv4Address& source, const Ipv4Address& destination, View payload) {
  return ip4(ends(source, destination), {.protocol = 1},
             icmp4(8, 0, join(u16(0x4147), u16(1), payload)));
}
Bytes echo6(const Ipv6Address& source, const Ipv6Address& destination, View payload) {
  const Ends e = ends(source, destination);
  return ip6(e, 58, icmp6(e, 128, 0, join(u16(0x4147), u16(1), payload)));
}

void add_own(Catalogue& c) {
  c.one("own-gateway-udp", "own", "b", P, [](const Identity& i, View m) {
    return via_gateway(i, udp4(i, i.own.ip4, i.gateway.ip4, m));
  });
  c.one("own-gateway-tcp-syn", "own", "b", P, [](const Identity& i, View m) {
    return via_gateway(i, tcp4(i, i.own.ip4, i.gateway.ip4, m));
  });
  c.one("own-gateway-icmp", "own", "b", P, [](const Identity& i, View m) {
    return via_gateway(i, echo4(i.own.ip4, i.gateway.ip4, m));
  });
  c.one("own-gateway6-udp", "own", "b", P, [](const Identity& i, View m) {
    return via_gateway(i, udp6(i, i.own.ip6, i.gateway.ip6, m), 0x86DD);
  });
  c.one("own-gateway6-tcp-syn", "own", "b", P, [](const Identity& i, View m) {
    return via_gateway(i, tcp6(i, i.own.ip6, i.gateway.ip6, m), 0x86DD);
  });
  c.one("own-gateway6-icmp", "own", "b", P, [](const Identity& i, View m) {
    return via_gateway(i, echo6(i.own.ip6, i.gateway.ip6, m), 0x86DD);
  });
  c.one("own-outside-udp", "own", "bu", P, [](const Identity& i, View m) {
    return via_gateway(i, udp4(i, i.own.ip4, i.outside.ip4, m));
  });
  c.one("own-outside-tcp-syn", "own", "bu", P, [](const Identity& i, View m) {
    return via_gateway(i, tcp4(i, i.own.ip4, i.outside.ip4, m));
  });
  c.one("own-outside-icmp", "own", "bu", P, [](const Identity& i, View m) {
    return via_gateway(i, echo4(i.own.ip4, i.outside.ip4, m));
  });
  c.one("own-outside-sctp", "own", "bu", P, [](const Identity& i, View m) {
    return via_gateway(i, ip4(ends(i.own.ip4, i.outside.ip4), {.protocol = 132},
                              sctp_init(i.source_port, i.port, m)));
  });
  c.one("own-outside-gre", "own", "bu", P, [](const Identity& i, View m) {
    return via_gateway(i, ip4(ends(i.own.ip4, i.outside.ip4), {.protocol = 47},
                              join(u16(0), u16(0x0800), udp4(i, i.own.ip4, i.outside.ip4, m))));
  });
  c.one("own-outside-ipip", "own", "bu", P, [](const Identity& i, View m) {
    return via_gateway(i, ip4(ends(i.own.ip4, i.outside.ip4), {.protocol = 4},
                              udp4(i, i.own.ip4, i.neighbour.ip4, m)));
  });
  c.one("own-outside-6in4", "own", "bu", P, [](const Identity& i, View m) {
    return via_gateway(i, ip4(ends(i.own.ip4, i.outside.ip4), {.protocol = 41},
                              udp6(i, i.own.ip6, i.neighbour.ip6, m)));
  });
  c.one("own-outside-esp", "own", "bu", P, [](const Identity& i, View m) {
    return via_gateway(i, ip4(ends(i.own.ip4, i.outside.ip4), {.protocol = 50},
                              join(u32(0x41474147), u32(1), m, zeros(16))));
  });
  c.one("own-outside-proto253", "own", "bu", P, [](const Identity& i, View m) {
    return via_gateway(i, ip4(ends(i.own.ip4, i.outside.ip4), {.protocol = 253}, m));
  });
  c.one("own-outside6-udp", "own", "bu", P, [](const Identity& i, View m) {
    return via_gateway(i, udp6(i, i.own.ip6, i.outside.ip6, m), 0x86DD);
  });
  c.one("own-outside6-tcp-syn", "own", "bu", P, [](const Identity& i, View m) {
    return via_gateway(i, tcp6(i, i.own.ip6, i.outside.ip6, m), 0x86DD);
  });
  c.one("own-outside6-icmp", "own", "bu", P, [](const Identity& i, View m) {
    return via_gateway(i, echo6(i.own.ip6, i.outside.ip6, m), 0x86DD);
  });
  c.one("own-outside6-proto253", "own", "bu", P, [](const Identity& i, View m) {
    return via_gateway(i, ip6(ends(i.own.ip6, i.outside.ip6), 253, m), 0x86DD);
  });
  c.one("own-outside6-4in6", "own", "bu", P, [](const Identity& i, View m) {
    return via_gateway(
        i, ip6(ends(i.own.ip6, i.outside.ip6), 4, udp4(i, i.own.ip4, i.neighbour.ip4, m)), 0x86DD);
  });
  c.one("own-metadata-tcp-syn", "own", "bu", P, [](const Identity& i, View m) {
    Identity http = i;
    http.port = 80;
    return via_gateway(i, tcp4(http, i.own.ip4, i.metadata4, m));
  });
  c.one("own-metadata-udp", "own", "bu", P, [](const Identity& i, View m) {
    return via_gateway(i, udp4(i, i.own.ip4, i.metadata4, m));
  });
  c.one("own-loopback-udp", "own", "b", P, [](const Identity& i, View m) {
    return via_gateway(i, udp4(i, i.own.ip4, Ipv4Address({127, 0, 0, 1}), m));
  });
  c.one("own-ttl1-udp", "own", "b", P, [](const Identity& i, View m) {
    return via_gateway(i, udp4(i, i.own.ip4, i.outside.ip4, m, {.ttl = 1}));
  });
}

void add_neighbour(Catalogue& c) {
  const auto direct = [](const Identity& i, View packet, unsigned type = 0x0800) {
    return ethernet(i.neighbour.mac.bytes(), i.own.mac.bytes(), type, packet);
  };
  c.one("neighbour-direct-udp", "neighbour", "n", D, [=](const Identity& i, View m) {
    return direct(i, udp4(i, i.own.ip4, i.neighbour.ip4, m));
  });
  c.one("neighbour-direct-tcp-syn", "neighbour", "n", D, [=](const Identity& i, View m) {
    return direct(i, tcp4(i, i.own.ip4, i.neighbour.ip4, m));
  });
  c.one("neighbour-direct-icmp", "neighbour", "n", D,
        [=](const Identity& i, View m) { return direct(i, echo4(i.own.ip4, i.neighbour.ip4, m)); });
  c.one("neighbour-direct6-udp", "neighbour", "n", D, [=](const Identity& i, View m) {
    return direct(i, udp6(i, i.own.ip6, i.neighbour.ip6, m), 0x86DD);
  });
  c.one("neighbour-direct6-linklocal", "neighbour", "n", D, [=](const Identity& i, View m) {
    return direct(i, udp6(i, link_local(i.own.mac), link_local(i.neighbour.mac), m), 0x86DD);
  });
  c.one("neighbour-direct-outside-ip", "neighbour", "n", D,
        [=](const Identity& i, View m) { return direct(i, udp4(i, i.own.ip4, i.outside.ip4, m)); });
  c.one("neighbour-routed-udp", "neighbour", "bn", P, [](const Identity& i, View m) {
    return via_gateway(i, udp4(i, i.own.ip4, i.neighbour.ip4, m));
  });
  c.one("neighbour-routed-tcp-syn", "neighbour", "bn", P, [](const Identity& i, View m) {
    return via_gateway(i, tcp4(i, i.own.ip4, i.neighbour.ip4, m));
  });
  c.one("neighbour-routed-icmp", "neighbour", "bn", P, [](const Identity& i, View m) {
    return via_gateway(i, echo4(i.own.ip4, i.neighbour.ip4, m));
  });
  c.one("neighbour-routed6-udp", "neighbour", "bn", P, [](const Identity& i, View m) {
    return via_gateway(i, udp6(i, i.own.ip6, i.neighbour.ip6, m), 0x86DD);
  });
}

void add_spoofed(Catalogue& c) {
  const auto spoofed = [](const Identity& i, View source_mac, View packet, unsigned type = 0x0800) {
    return ethernet(i.gateway.mac.bytes(), source_mac, type, packet);
  };
  c.one("spoof-mac", "spoof", "bu", D, [=](const Identity& i, View m) {
    return spoofed(i, kStrangerMac, udp4(i, i.own.ip4, i.outside.ip4, m));
  });
  c.one("spoof-mac6", "spoof", "bu", D, [=](const Identity& i, View m) {
    return spoofed(i, kStrangerMac, udp6(i, i.own.ip6, i.outside.ip6, m), 0x86DD);
  });
  c.one("spoof-mac-gateway", "spoof", "bu", D, [=](const Identity& i, View m) {
    return spoofed(i, i.gateway.mac.bytes(), udp4(i, i.own.ip4, i.outside.ip4, m));
  });
  c.one("spoof-mac-neighbour", "spoof", "bu", D, [=](const Identity& i, View m) {
    return spoofed(i, i.neighbour.mac.bytes(), udp4(i, i.own.ip4, i.outside.ip4, m));
  });
  c.one("spoof-ip-neighbour", "spoof", "bu", D, [](const Identity& i, View m) {
    return via_gateway(i, udp4(i, i.neighbour.ip4, i.outside.ip4, m));
  });
  c.one("spoof-ip-gateway", "spoof", "b", D, [](const Identity& i, View m) {
    return via_gateway(i, udp4(i, i.gateway.ip4, i.outside.ip4, m));
  });
  // The host's ICMP error to the outside quotes it, so it reaches the uplink.
  c.one("spoof-ip-outside", "spoof", "bu", D, [](const Identity& i, View m) {
    return via_gateway(i, udp4(i, i.outside.ip4, i.gateway.ip4, m));
  });
  c.one("spoof-ip-stranger", "spoof", "bu", D, [](const Identity& i, View m) {
    return via_gateway(i, udp4(i, kStranger4, i.outside.ip4, m));
  });
  c.one("spoof-ip-zero", "spoof", "b", D, [](const Identity& i, View m) {
    return via_gateway(i, udp4(i, Ipv4Address(), i.gateway.ip4, m));
  });
  c.one("spoof-ip-loopback", "spoof", "b", D, [](const Identity& i, View m) {
    return via_gateway(i, udp4(i, Ipv4Address({127, 0, 0, 1}), i.gateway.ip4, m));
  });
  c.one("spoof-ip-tcp-syn", "spoof", "bu", D, [](const Identity& i, View m) {
    return via_gateway(i, tcp4(i, i.neighbour.ip4, i.outside.ip4, m));
  });
  c.one("spoof-ip-icmp-reflect", "spoof", "bn", D, [](const Identity& i, View m) {
    return via_gateway(i, echo4(i.neighbour.ip4, i.gateway.ip4, m));
  });
  c.one("spoof-neighbour-whole", "spoof", "bu", D, [=](const Identity& i, View m) {
    return spoofed(i, i.neighbour.mac.bytes(), udp4(i, i.neighbour.ip4, i.outside.ip4, m));
  });
  c.one("spoof-gateway-to-neighbour", "spoof", "n", D, [](const Identity& i, View m) {
    return ethernet(i.neighbour.mac.bytes(), i.own.mac.bytes(), 0x0800,
                    udp4(i, i.gateway.ip4, i.neighbour.ip4, m));
  });
  c.one("spoof-gateway-whole-to-neighbour", "spoof", "n", D, [](const Identity& i, View m) {
    return ethernet(i.neighbour.mac.bytes(), i.gateway.mac.bytes(), 0x0800,
                    udp4(i, i.gateway.ip4, i.neighbour.ip4, m));
  });
  c.one("spoof-ip6-neighbour", "spoof", "bu", D, [](const Identity& i, View m) {
    return via_gateway(i, udp6(i, i.neighbour.ip6, i.outside.ip6, m), 0x86DD);
  });
  c.one("spoof-ip6-gateway", "spoof", "bu", D, [](const Identity& i, View m) {
    return via_gateway(i, udp6(i, i.gateway.ip6, i.outside.ip6, m), 0x86DD);
  });
  c.one("spoof-ip6-outside", "spoof", "bu", D, [](const Identity& i, View m) {
    return via_gateway(i, udp6(i, i.outside.ip6, i.gateway.ip6, m), 0x86DD);
  });
  c.one("spoof-ip6-stranger", "spoof", "bu", D, [](const Identity& i, View m) {
    return via_gateway(i, udp6(i, kStranger6, i.outside.ip6, m), 0x86DD);
  });
  c.one("spoof-ip6-mapped", "spoof", "bu", D, [](const Identity& i, View m) {
    std::array<std::uint8_t, 16> mapped = {};
    mapped[10] = mapped[11] = 0xFF;
    std::copy_n(i.own.ip4.bytes().begin(), 4, mapped.begin() + 12);
    return via_gateway(i, udp6(i, Ipv6Address(mapped), i.outside.ip6, m), 0x86DD);
  });
  c.one("spoof-ip6-linklocal", "spoof", "b", D, [](const Identity& i, View m) {
    return via_gateway(i, udp6(i, link_local(i.own.mac), i.gateway.ip6, m), 0x86DD);
  });
}

void add_group(Catalogue& c) {
  const auto to = [](const Identity& i, View mac, View packet, unsigned type = 0x0800) {
    return ethernet(mac, i.own.mac.bytes(), type, packet);
  };
  c.one("broadcast-limited-udp", "group", "bn", D, [=](const Identity& i, View m) {
    return to(i, kBroadcast, udp4(i, i.own.ip4, kAnyone4, m));
  });
  c.one("broadcast-mac-gateway-ip", "group", "bn", D, [=](const Identity& i, View m) {
    return to(i, kBroadcast, udp4(i, i.own.ip4, i.gateway.ip4, m));
  });
  c.one("broadcast-mac-outside-ip", "group", "bn", D, [=](const Identity& i, View m) {
    return to(i, kBroadcast, udp4(i, i.own.ip4, i.outside.ip4, m));
  });
  c.one("broadcast-mac-metadata-ip", "group", "bn", D, [=](const Identity& i, View m) {
    return to(i, kBroadcast, udp4(i, i.own.ip4, i.metadata4, m));
  });
  c.one("broadcast-ip-gateway-mac", "group", "b", P,
        [](const Identity& i, View m) { return via_gateway(i, udp4(i, i.own.ip4, kAnyone4, m)); });
  c.one("multicast-udp", "group", "bn", D, [=](const Identity& i, View m) {
    const Ipv4Address group({239, 1, 2, 3});
    return to(i, multicast_mac(group), udp4(i, i.own.ip4, group, m));
  });
  c.one("multicast-all-hosts-icmp", "group", "bn", D, [=](const Identity& i, View m) {
    const Ipv4Address group({224, 0, 0, 1});
    return to(i, multicast_mac(group), echo4(i.own.ip4, group, m));
  });
  c.one("multicast-mac-gateway-ip", "group", "bn", D, [=](const Identity& i, View m) {
    return to(i, multicast_mac(Ipv4Address({224, 0, 0, 1})), udp4(i, i.own.ip4, i.gateway.ip4, m));
  });
  c.one("multicast6-udp", "group", "bn", D, [=](const Identity& i, View m) {
    return to(i, kAllNodesMac, udp6(i, i.own.ip6, kAllNodes, m), 0x86DD);
  });
  c.one("multicast6-all-nodes-icmp", "group", "bn", D, [=](const Identity& i, View m) {
    return to(i, kAllNodesMac, echo6(i.own.ip6, kAllNodes, m), 0x86DD);
  });
  c.one("multicast6-mac-gateway-ip", "group", "bn", D, [=](const Identity& i, View m) {
    return to(i, kAllNodesMac, udp6(i, i.own.ip6, i.gateway.ip6, m), 0x86DD);
  });
  c.one("igmp-report", "group", "bn", D, [=](const Identity& i, View m) {
    const Ipv4Address group({239, 1, 2, 3});
    return to(
        i, multicast_mac(group),
        ip4(ends(i.own.ip4, group), {.protocol = 2, .ttl = 1, .options = raw({0x94, 4, 0, 0})},
            icmp4(0x16, 0, join(group.bytes(), m))));
  });
}

void add_arp(Catalogue& c) {
  c.one("arp-request-gateway", "arp", "bn", P, [](const Identity& i, View m) {
    return arp(kBroadcast, i.own.mac.bytes(),
               {1, i.own.mac.bytes(), i.own.ip4, kZeroMac, i.gateway.ip4}, m);
  });
  c.one("arp-request-gateway-unicast", "arp", "b", P, [](const Identity& i, View m) {
    return arp(i.gateway.mac.bytes(), i.own.mac.bytes(),
               {1, i.own.mac.bytes(), i.own.ip4, kZeroMac, i.gateway.ip4}, m);
  });
  c.one("arp-gratuitous-gateway", "arp", "bn", D, [](const Identity& i, View m) {
    return arp(kBroadcast, i.own.mac.bytes(),
               {1, i.own.mac.bytes(), i.gateway.ip4, kZeroMac, i.gateway.ip4}, m);
  });
  c.one("arp-gratuitous-gateway-reply", "arp", "bn", D, [](const Identity& i, View m) {
    return arp(kBroadcast, i.own.mac.bytes(),
               {2, i.own.mac.bytes(), i.gateway.ip4, kBroadcast, i.gateway.ip4}, m);
  });
  c.one("arp-gratuitous-own", "arp", "bn", D, [](const Identity& i, View m) {
    return arp(kBroadcast, i.own.mac.bytes(),
               {1, i.own.mac.bytes(), i.own.ip4, kZeroMac, i.own.ip4}, m);
  });
  c.one("arp-reply-neighbour", "arp", "n", D, [](const Identity& i, View m) {
    return arp(i.neighbour.mac.bytes(), i.own.mac.bytes(),
               {2, i.own.mac.bytes(), i.gateway.ip4, i.neighbour.mac.bytes(), i.neighbour.ip4}, m);
  });
  c.one("arp-reply-gateway", "arp", "b", D, [](const Identity& i, View m) {
    return arp(i.gateway.mac.bytes(), i.own.mac.bytes(),
               {2, i.own.mac.bytes(), i.neighbour.ip4, i.gateway.mac.bytes(), i.gateway.ip4}, m);
  });
  c.one("arp-request-neighbour", "arp", "bn", D, [](const Identity& i, View m) {
    return arp(kBroadcast, i.own.mac.bytes(),
               {1, i.own.mac.bytes(), i.own.ip4, kZeroMac, i.neighbour.ip4}, m);
  });
  c.one("arp-request-neighbour-unicast", "arp", "n", D, [](const Identity& i, View m) {
    return arp(i.neighbour.mac.bytes(), i.own.mac.bytes(),
               {1, i.own.mac.bytes(), i.own.ip4, kZeroMac, i.neighbour.ip4}, m);
  });
  c.one("arp-ether-source-differs", "arp", "bn", D, [](const Identity& i, View m) {
    return arp(kBroadcast, i.own.mac.bytes(),
               {1, i.neighbour.mac.bytes(), i.own.ip4, kZeroMac, i.gateway.ip4}, m);
  });
  c.one("arp-ether-source-spoofed", "arp", "bn", D, [](const Identity& i, View m) {
    return arp(kBroadcast, kStrangerMac, {1, i.own.mac.bytes(), i.own.ip4, kZeroMac, i.gateway.ip4},
               m);
  });
  c.one("arp-sender-ip-neighbour", "arp", "bn", D, [](const Identity& i, View m) {
    return arp(kBroadcast, i.own.mac.bytes(),
               {1, i.own.mac.bytes(), i.neighbour.ip4, kZeroMac, i.gateway.ip4}, m);
  });
  c.one("arp-sender-ip-outside", "arp", "bn", D, [](const Identity& i, View m) {
    return arp(kBroadcast, i.own.mac.bytes(),
               {1, i.own.mac.bytes(), i.outside.ip4, kZeroMac, i.gateway.ip4}, m);
  });
  c.one("arp-probe", "arp", "bn", D, [](const Identity& i, View m) {
    return arp(kBroadcast, i.own.mac.bytes(),
               {1, i.own.mac.bytes(), Ipv4Address(), kZeroMac, i.gateway.ip4}, m);
  });
  c.one("arp-request-metadata", "arp", "bn", D, [](const Identity& i, View m) {
    return arp(kBroadcast, i.own.mac.bytes(),
               {1, i.own.mac.bytes(), i.own.ip4, kZeroMac, i.metadata4}, m);
  });
  c.one("rarp-request", "arp", "bn", D, [](const Identity& i, View m) {
    return arp(kBroadcast, i.own.mac.bytes(),
               {3, i.own.mac.bytes(), Ipv4Address(), i.own.mac.bytes(), Ipv4Address()}, m, 0x8035);
  });
}

void add_vlan(Catalogue& c) {
  const auto own_in = [](std::initializer_list<std::pair<unsigned, unsigned>> tags) {
    return [tags = std::vector(tags)](const Identity& i, View m) {
      Bytes out = join(i.gateway.mac.bytes(), i.own.mac.bytes());
      for (const auto& [protocol, vid] : tags) out = join(out, u16(protocol), u16(vid));
      return join(out, u16(0x0800), udp4(i, i.own.ip4, i.outside.ip4, m));
    };
  };
  c.one("vlan-0", "vlan", "bu", D, own_in({{0x8100, 0}}));
  c.one("vlan-0-priority-7", "vlan", "bu", D, own_in({{0x8100, 0xE000}}));
  c.one("vlan-5", "vlan", "b", D, own_in({{0x8100, 5}}));
  c.one("vlan-1ad-0", "vlan", "bu", D, own_in({{0x88A8, 0}}));
  c.one("vlan-qinq", "vlan", "b", D, own_in({{0x88A8, 5}, {0x8100, 6}}));
  c.one("vlan-qinq-8100", "vlan", "b", D, own_in({{0x8100, 5}, {0x8100, 6}}));
  c.one("vlan-5-in-0", "vlan", "b", D, own_in({{0x8100, 0}, {0x8100, 5}}));
  c.one("vlan-0-in-0", "vlan", "bu", D, own_in({{0x8100, 0}, {0x8100, 0}}));
  c.one("vlan-9100", "vlan", "b", D, own_in({{0x9100, 5}}));
  c.one("vlan-0-ip6", "vlan", "bu", D, [](const Identity& i, View m) {
    return tagged(i.gateway.mac.bytes(), i.own.mac.bytes(), {{0x8100, 0}}, 0x86DD,
                  udp6(i, i.own.ip6, i.outside.ip6, m));
  });
  c.one("vlan-0-arp", "vlan", "bn", D, [](const Identity& i, View m) {
    const Bytes plain = arp(kBroadcast, i.own.mac.bytes(),
                            {1, i.own.mac.bytes(), i.own.ip4, kZeroMac, i.gateway.ip4}, m);
    return tagged(kBroadcast, i.own.mac.bytes(), {{0x8100, 0}}, 0x0806, View(plain).subspan(14));
  });
  c.one("vlan-5-neighbour", "vlan", "n", D, [](const Identity& i, View m) {
    return tagged(i.neighbour.mac.bytes(), i.own.mac.bytes(), {{0x8100, 5}}, 0x0800,
                  udp4(i, i.own.ip4, i.neighbour.ip4, m));
  });
}

void add_link_control(Catalogue& c) {
  const Bytes bpdu_llc = raw({0x42, 0x42, 0x03});
  const auto bpdu = [=](const Identity& i) {
    const Bytes bridge = join(u16(0), i.own.mac.bytes());  // priority 0: claims to be the root
    return join(bpdu_llc, u16(0), u8(0), u8(0), u8(0), bridge, u32(0), bridge, u16(0x8001), u16(0),
                u16(20 << 8U), u16(2 << 8U), u16(15 << 8U));
  };
  c.one("stp-bpdu", "link", "bn", D, [=](const Identity& i, View m) {
    return ieee8023(link_local_group(0), i.own.mac.bytes(), bpdu(i), m);
  });
  c.one("stp-bpdu-unicast", "link", "b", D, [=](const Identity& i, View m) {
    return ieee8023(i.gateway.mac.bytes(), i.own.mac.bytes(), bpdu(i), m);
  });
  c.one("stp-pvst", "link", "bn", D, [=](const Identity& i, View m) {
    const Mac group = {0x01, 0x00, 0x0C, 0xCC, 0xCC, 0xCD};
    const Bytes whole = bpdu(i);
    return ieee8023(group, i.own.mac.bytes(),
                    join(raw({0xAA, 0xAA, 3, 0, 0, 0x0C, 0x01, 0x0B}), View(whole).subspan(3),
                         raw({0, 0, 0, 2, 0, 1})),
                    m);
  });
  const auto lldp = [](const Identity& i, View m) {
    return join(raw({0x02, 7, 4}), i.own.mac.bytes(), raw({0x04, 7, 3}), i.own.mac.bytes(),
                raw({0x06, 2, 0, 120, 0xFE, 20, 0x00, 0x12, 0x34, 0x01}), m, raw({0, 0}));
  };
  c.one("lldp", "link", "", D, [=](const Identity& i, View m) {
    return ethernet(link_local_group(0x0E), i.own.mac.bytes(), 0x88CC, lldp(i, m));
  });
  c.one("lldp-nearest-customer", "link", "bn", D, [=](const Identity& i, View m) {
    return ethernet(link_local_group(0x00), i.own.mac.bytes(), 0x88CC, lldp(i, m));
  });
  c.one("eapol-start", "link", "", D, [](const Identity& i, View m) {
    return ethernet(link_local_group(0x03), i.own.mac.bytes(), 0x888E, join(raw({1, 1, 0, 0}), m));
  });
  c.one("eapol-unicast", "link", "b", D, [](const Identity& i, View m) {
    return ethernet(i.gateway.mac.bytes(), i.own.mac.bytes(), 0x888E, join(raw({1, 1, 0, 0}), m));
  });
  c.one("pause", "link", "", D, [](const Identity& i, View m) {
    return ethernet(link_local_group(0x01), i.own.mac.bytes(), 0x8808,
                    join(raw({0, 1, 0xFF, 0xFF}), zeros(26), m));
  });
  c.one("lacp", "link", "", D, [](const Identity& i, View m) {
    const Bytes info =
        join(u16(0x8000), i.own.mac.bytes(), u16(1), u16(0x8000), u16(1), raw({0x3D, 0, 0, 0}));
    return ethernet(link_local_group(0x02), i.own.mac.bytes(), 0x8809,
                    join(raw({1, 1, 1, 20}), info, raw({2, 20}), info, raw({3, 16, 0, 1}),
                         zeros(12), raw({0, 0}), zeros(34), m));
  });
  for (const unsigned last :
       {0x04U, 0x05U, 0x06U, 0x07U, 0x08U, 0x09U, 0x0AU, 0x0BU, 0x0CU, 0x0DU, 0x0FU}) {
    const std::string name = std::string("link-group-0") + "0123456789abcdef"[last];
    c.one(name.c_str(), "link", "", D, [=](const Identity& i, View m) {
      return ethernet(link_local_group(static_cast<std::uint8_t>(last)), i.own.mac.bytes(), 0x88B5,
                      join(m, zeros(30)));
    });
  }
  c.one("link-group-mvrp", "link", "bn", D, [](const Identity& i, View m) {
    return ethernet(link_local_group(0x21), i.own.mac.bytes(), 0x88F5, join(u8(0), m, zeros(30)));
  });
  c.one("cdp", "link", "bn", D, [](const Identity& i, View m) {
    const Mac group = {0x01, 0x00, 0x0C, 0xCC, 0xCC, 0xCC};
    Bytes packet = join(raw({2, 180, 0, 0, 0, 1}), u16(4 + kMarkerSize), m);
    put16(packet, 2, internet_checksum(packet));
    return ieee8023(group, i.own.mac.bytes(),
                    join(raw({0xAA, 0xAA, 3, 0, 0, 0x0C, 0x20, 0x00}), packet), zeros(8));
  });
  c.one("ptp", "link", "bn", D, [](const Identity& i, View m) {
    const Mac group = {0x01, 0x1B, 0x19, 0, 0, 0};
    return ethernet(group, i.own.mac.bytes(), 0x88F7, join(raw({0, 2, 0, 44}), zeros(40), m));
  });
  c.one("loopback-ctp", "link", "b", D, [](const Identity& i, View m) {
    return via_gateway(i, join(raw({0, 0, 1, 0, 0, 0}), m, zeros(24)), 0x9000);
  });
  c.one("macsec", "link", "b", D, [](const Identity& i, View m) {
    return via_gateway(i, join(raw({0x00, 0x2C, 0, 0, 0, 1, 8, 0}), m, zeros(24)), 0x88E5);
  });
}

void add_neighbour_discovery(Catalogue& c) {
  const auto solicit = [](const Identity& i, const Ipv6Address& target, View m) {
    return join(u32(0), target.bytes(), nd_link_option(1, i.own.mac.bytes()), nd_marker_option(m));
  };
  const auto advertise = [](const Ipv6Address& target, View mac, View m) {
    return join(u32(0x20000000), target.bytes(), nd_link_option(2, mac), nd_marker_option(m));
  };
  c.one("nd-solicit-gateway", "nd", "bn", P, [=](const Identity& i, View m) {
    const auto group = solicited_node(i.gateway.ip6);
    return nd(multicast_mac(group), i.own.mac.bytes(), i.own.ip6, group, 135,
              solicit(i, i.gateway.ip6, m));
  });
  c.one("nd-solicit-gateway-unicast", "nd", "b", P, [=](const Identity& i, View m) {
    return nd(i.gateway.mac.bytes(), i.own.mac.bytes(), i.own.ip6, i.gateway.ip6, 135,
              solicit(i, i.gateway.ip6, m));
  });
  c.one("nd-solicit-gateway-linklocal", "nd", "bn", E, [=](const Identity& i, View m) {
    const auto group = solicited_node(i.gateway.ip6);
    return nd(multicast_mac(group), i.own.mac.bytes(), link_local(i.own.mac), group, 135,
              solicit(i, i.gateway.ip6, m));
  });
  // The option names a neighbour's MAC for the container's own address.
  c.one("nd-solicit-gateway-other-lladdr", "nd", "bn", E, [](const Identity& i, View m) {
    const auto group = solicited_node(i.gateway.ip6);
    return nd(multicast_mac(group), i.own.mac.bytes(), i.own.ip6, group, 135,
              join(u32(0), i.gateway.ip6.bytes(), nd_link_option(1, i.neighbour.mac.bytes()),
                   nd_marker_option(m)));
  });
  c.one("nd-solicit-gateway-spoofed", "nd", "bn", D, [=](const Identity& i, View m) {
    const auto group = solicited_node(i.gateway.ip6);
    return nd(multicast_mac(group), i.own.mac.bytes(), i.neighbour.ip6, group, 135,
              solicit(i, i.gateway.ip6, m));
  });
  c.one("nd-solicit-neighbour", "nd", "bn", D, [=](const Identity& i, View m) {
    const auto group = solicited_node(i.neighbour.ip6);
    return nd(multicast_mac(group), i.own.mac.bytes(), i.own.ip6, group, 135,
              solicit(i, i.neighbour.ip6, m));
  });
  c.one("nd-solicit-dad", "nd", "bn", D, [](const Identity& i, View m) {
    const auto group = solicited_node(i.gateway.ip6);
    return nd(multicast_mac(group), i.own.mac.bytes(), Ipv6Address(), group, 135,
              join(u32(0), i.gateway.ip6.bytes(), nd_marker_option(m)));
  });
  c.one("nd-advertise-gateway", "nd", "bn", D, [=](const Identity& i, View m) {
    return nd(kAllNodesMac, i.own.mac.bytes(), i.own.ip6, kAllNodes, 136,
              advertise(i.gateway.ip6, i.own.mac.bytes(), m));
  });
  c.one("nd-advertise-gateway-to-neighbour", "nd", "n", D, [=](const Identity& i, View m) {
    return nd(i.neighbour.mac.bytes(), i.own.mac.bytes(), i.gateway.ip6, i.neighbour.ip6, 136,
              advertise(i.gateway.ip6, i.own.mac.bytes(), m));
  });
  c.one("nd-advertise-neighbour-to-gateway", "nd", "b", D, [=](const Identity& i, View m) {
    return nd(i.gateway.mac.bytes(), i.own.mac.bytes(), i.own.ip6, i.gateway.ip6, 136,
              advertise(i.neighbour.ip6, i.own.mac.bytes(), m));
  });
  c.one("nd-advertise-own", "nd", "bn", D, [=](const Identity& i, View m) {
    return nd(kAllNodesMac, i.own.mac.bytes(), i.own.ip6, kAllNodes, 136,
              advertise(i.own.ip6, i.own.mac.bytes(), m));
  });
  c.one("nd-router-advertise", "nd", "bn", D, [](const Identity& i, View m) {
    return nd(kAllNodesMac, i.own.mac.bytes(), link_local(i.own.mac), kAllNodes, 134,
              router_advertisement_body(i.own.mac.bytes(), m));
  });
  c.one("nd-router-advertise-to-gateway", "nd", "b", D, [](const Identity& i, View m) {
    return nd(i.gateway.mac.bytes(), i.own.mac.bytes(), i.own.ip6, i.gateway.ip6, 134,
              router_advertisement_body(i.own.mac.bytes(), m));
  });
  c.one("nd-router-solicit", "nd", "bn", D, [](const Identity& i, View m) {
    return nd(kAllRoutersMac, i.own.mac.bytes(), link_local(i.own.mac), group6(2, 2), 133,
              join(u32(0), nd_link_option(1, i.own.mac.bytes()), nd_marker_option(m)));
  });
  c.one("nd-redirect", "nd", "n", D, [](const Identity& i, View m) {
    return nd(i.neighbour.mac.bytes(), i.own.mac.bytes(), link_local(i.gateway.mac),
              i.neighbour.ip6, 137,
              join(u32(0), link_local(i.own.mac).bytes(), i.outside.ip6.bytes(),
                   nd_link_option(2, i.own.mac.bytes()), nd_marker_option(m)));
  });
  c.one("nd-redirect-to-gateway", "nd", "b", D, [](const Identity& i, View m) {
    return nd(i.gateway.mac.bytes(), i.own.mac.bytes(), i.own.ip6, i.gateway.ip6, 137,
              join(u32(0), link_local(i.own.mac).bytes(), i.outside.ip6.bytes(),
                   nd_link_option(2, i.own.mac.bytes()), nd_marker_option(m)));
  });
  const auto hidden = [](const Identity& i, View m, unsigned header, const Ipv6Address& source,
                         const Ipv6Address& destination, View mac) {
    const Ends e = ends(source, destination);
    return ethernet(mac, i.own.mac.bytes(), 0x86DD,
                    ip6(e, header,
                        join(ip6_options(58, zeros(4)),
                             icmp6(e, 134, 0, router_advertisement_body(i.own.mac.bytes(), m))),
                        255));
  };
  c.one("nd-router-advertise-hop-by-hop", "nd", "bn", D, [=](const Identity& i, View m) {
    return hidden(i, m, 0, link_local(i.own.mac), kAllNodes, kAllNodesMac);
  });
  c.one("nd-router-advertise-dest-options", "nd", "bn", D, [=](const Identity& i, View m) {
    return hidden(i, m, 60, link_local(i.own.mac), kAllNodes, kAllNodesMac);
  });
  c.one("nd-router-advertise-hop-by-hop-to-gateway", "nd", "b", D, [=](const Identity& i, View m) {
    return hidden(i, m, 0, i.own.ip6, i.gateway.ip6, i.gateway.mac.bytes());
  });
  c.many("nd-router-advertise-fragmented", "nd", "bn", D, [](const Identity& i, View m) {
    const Ends e = ends(link_local(i.own.mac), kAllNodes);
    // The first fragment holds nothing but options, so only who reassembles sees the type.
    const Bytes first = ip6_options(58, m);
    const Bytes rest = icmp6(e, 134, 0, router_advertisement_body(i.own.mac.bytes(), m));
    const auto frame = [&](View packet) {
      return ethernet(kAllNodesMac, i.own.mac.bytes(), 0x86DD, packet);
    };
    return std::vector<Bytes>{
        frame(ip6(e, 44, join(ip6_fragment(60, 1, 0, true), first), 255)),
        frame(ip6(e, 44,
                  join(ip6_fragment(60, 1, static_cast<unsigned>(first.size() / 8), false), rest),
                  255))};
  });
  const auto router_alert = raw({58, 0, 5, 2, 0, 0, 1, 0});
  c.one("mld-report", "nd", "bn", D, [=](const Identity& i, View m) {
    const Ends e = ends(link_local(i.own.mac), group6(2, 0x16));
    return ethernet(
        Mac{0x33, 0x33, 0, 0, 0, 0x16}, i.own.mac.bytes(), 0x86DD,
        ip6(e, 0,
            join(router_alert, icmp6(e, 143, 0,
                                     join(u16(0), u16(1), raw({4, kMarkerSize / 4, 0, 0}),
                                          group6(5, 0x1234).bytes(), m))),
            1));
  });
  c.one("mld-query", "nd", "bn", D, [=](const Identity& i, View m) {
    const Ends e = ends(link_local(i.own.mac), kAllNodes);
    // Group and source specific; the marker is the source.
    return ethernet(kAllNodesMac, i.own.mac.bytes(), 0x86DD,
                    ip6(e, 0,
                        join(router_alert, icmp6(e, 130, 0,
                                                 join(u16(1000), u16(0), group6(5, 0x1234).bytes(),
                                                      raw({2, 125}), u16(1), m))),
                        1));
  });
}

void add_service_discovery(Catalogue& c) {
  // BOOTP: the marker is in option 43 (vendor specific).
  const auto bootp = [](const Identity& i, View m, unsigned operation, unsigned message,
                        const Ipv4Address& yours, const Ipv4Address& server) {
    return join(raw({operation, 1, 6, 0}), u32(0x41474147), u16(0), u16(0x8000), u32(0),
                yours.bytes(), server.bytes(), u32(0), i.own.mac.bytes(), zeros(10), zeros(192),
                raw({0x63, 0x82, 0x53, 0x63, 53, 1, message, 43, kMarkerSize}), m, raw({255}));
  };
  c.one("dhcp4-discover", "service", "bn", D, [=](const Identity& i, View m) {
    const Ends e = ends(Ipv4Address(), kAnyone4);
    return ethernet(kBroadcast, i.own.mac.bytes(), 0x0800,
                    ip4(e, {}, udp(e, 68, 67, bootp(i, m, 1, 1, Ipv4Address(), Ipv4Address()))));
  });
  c.one("dhcp4-offer-rogue", "service", "bn", D, [=](const Identity& i, View m) {
    const Ends e = ends(i.own.ip4, kAnyone4);
    return ethernet(kBroadcast, i.own.mac.bytes(), 0x0800,
                    ip4(e, {}, udp(e, 67, 68, bootp(i, m, 2, 2, i.neighbour.ip4, i.own.ip4))));
  });
  const auto dhcp6 = [](unsigned message, View m) {
    // A DUID of type 2 (enterprise number) whose identifier is the marker.
    return join(u8(message), raw({0x41, 0x47, 0x41}), u16(1), u16(6 + kMarkerSize), u16(2),
                u32(32473), m);
  };
  c.one("dhcp6-solicit", "service", "bn", D, [=](const Identity& i, View m) {
    const Ipv6Address group({0xFF, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 2});
    const Ends e = ends(link_local(i.own.mac), group);
    return ethernet(multicast_mac(group), i.own.mac.bytes(), 0x86DD,
                    ip6(e, 17, udp(e, 546, 547, dhcp6(1, m))));
  });
  c.one("dhcp6-advertise-rogue", "service", "n", D, [=](const Identity& i, View m) {
    const Ends e = ends(link_local(i.own.mac), link_local(i.neighbour.mac));
    return ethernet(i.neighbour.mac.bytes(), i.own.mac.bytes(), 0x86DD,
                    ip6(e, 17, udp(e, 547, 546, dhcp6(2, m))));
  });
  const auto query = [](View m) {
    return join(raw({0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, kMarkerSize}), m, raw({5}), text("local"),
                raw({0, 0, 1, 0, 1}));
  };
  c.one("mdns", "service", "bn", D, [=](const Identity& i, View m) {
    const Ipv4Address group({224, 0, 0, 251});
    const Ends e = ends(i.own.ip4, group);
    return ethernet(multicast_mac(group), i.own.mac.bytes(), 0x0800,
                    ip4(e, {.ttl = 255}, udp(e, 5353, 5353, query(m))));
  });
  c.one("mdns6", "service", "bn", D, [=](const Identity& i, View m) {
    const auto group = group6(2, 0xFB);
    const Ends e = ends(link_local(i.own.mac), group);
    return ethernet(multicast_mac(group), i.own.mac.bytes(), 0x86DD,
                    ip6(e, 17, udp(e, 5353, 5353, query(m)), 255));
  });
  c.one("llmnr", "service", "bn", D, [=](const Identity& i, View m) {
    const Ipv4Address group({224, 0, 0, 252});
    const Ends e = ends(i.own.ip4, group);
    return ethernet(multicast_mac(group), i.own.mac.bytes(), 0x0800,
                    ip4(e, {.ttl = 1}, udp(e, i.source_port, 5355, query(m))));
  });
  c.one("ssdp", "service", "bn", D, [](const Identity& i, View m) {
    const Ipv4Address group({239, 255, 255, 250});
    const Ends e = ends(i.own.ip4, group);
    return ethernet(multicast_mac(group), i.own.mac.bytes(), 0x0800,
                    ip4(e, {.ttl = 2},
                        udp(e, i.source_port, 1900,
                            join(text("M-SEARCH * HTTP/1.1\r\nHOST: 239.255.255.250:1900\r\n"
                                      "MAN: \"ssdp:discover\"\r\nMX: 1\r\nST: ssdp:all\r\n\r\n"),
                                 m))));
  });
  c.one("netbios-name", "service", "bn", D, [=](const Identity& i, View m) {
    const Ends e = ends(i.own.ip4, kAnyone4);
    return ethernet(kBroadcast, i.own.mac.bytes(), 0x0800, ip4(e, {}, udp(e, 137, 137, query(m))));
  });
}

void add_malformed_ip(Catalogue& c) {
  // A datagram in two parts: the second begins after `split` bytes (a multiple of 8).
  const auto parts = [](const Identity& i, View m, std::size_t split) {
    const Ends e = ends(i.own.ip4, i.outside.ip4);
    const Bytes whole = udp(e, i.source_port, i.port, join(m, m));
    return std::pair{Bytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(split)),
                     Bytes(whole.begin() + static_cast<std::ptrdiff_t>(split), whole.end())};
  };
  c.one("fragment4-first", "malformed", "bu", E, [=](const Identity& i, View m) {
    return via_gateway(i, ip4(ends(i.own.ip4, i.outside.ip4),
                              {.id = 0x4101, .fragment = kMoreFragments}, parts(i, m, 24).first));
  });
  c.one("fragment4-later", "malformed", "bu", E, [=](const Identity& i, View m) {
    return via_gateway(i, ip4(ends(i.own.ip4, i.outside.ip4), {.id = 0x4102, .fragment = 3},
                              parts(i, m, 24).second));
  });
  c.many("fragment4-whole", "malformed", "bu", E, [=](const Identity& i, View m) {
    const Ends e = ends(i.own.ip4, i.outside.ip4);
    const auto [first, second] = parts(i, m, 24);
    return std::vector<Bytes>{
        via_gateway(i, ip4(e, {.id = 0x4103, .fragment = kMoreFragments}, first)),
        via_gateway(i, ip4(e, {.id = 0x4103, .fragment = 3}, second))};
  });
  c.many("fragment4-overlap", "malformed", "bu", E, [=](const Identity& i, View m) {
    const Ends e = ends(i.own.ip4, i.outside.ip4);
    // The second rewrites what the first said of the ports.
    return std::vector<Bytes>{
        via_gateway(i, ip4(e, {.id = 0x4104, .fragment = kMoreFragments}, parts(i, m, 24).first)),
        via_gateway(i, ip4(e, {.id = 0x4104, .fragment = 1}, join(m, m)))};
  });
  c.many("fragment4-tiny", "malformed", "bu", E, [=](const Identity& i, View m) {
    const Ends e = ends(i.own.ip4, i.outside.ip4);
    const Bytes whole = tcp_syn(e, i.source_port, i.port, m);
    // 8 bytes: ports, but not the flags.
    return std::vector<Bytes>{
        via_gateway(i, ip4(e, {.protocol = 6, .id = 0x4105, .fragment = kMoreFragments},
                           View(whole).first(8))),
        via_gateway(i,
                    ip4(e, {.protocol = 6, .id = 0x4105, .fragment = 1}, View(whole).subspan(8)))};
  });
  c.one("fragment4-neighbour-later", "malformed", "n", D, [=](const Identity& i, View m) {
    return ethernet(i.neighbour.mac.bytes(), i.own.mac.bytes(), 0x0800,
                    ip4(ends(i.own.ip4, i.neighbour.ip4), {.id = 0x4106, .fragment = 3},
                        parts(i, m, 24).second));
  });
  c.one("fragment4-spoofed-later", "malformed", "bu", D, [=](const Identity& i, View m) {
    return via_gateway(i, ip4(ends(i.neighbour.ip4, i.outside.ip4), {.id = 0x4107, .fragment = 3},
                              parts(i, m, 24).second));
  });
  const auto parts6 = [](const Identity& i, View m, bool first) {
    const Ends e = ends(i.own.ip6, i.outside.ip6);
    const Bytes whole = udp(e, i.source_port, i.port, join(m, m));
    return via_gateway(i,
                       ip6(e, 44,
                           first ? join(ip6_fragment(17, 2, 0, true), View(whole).first(24))
                                 : join(ip6_fragment(17, 3, 3, false), View(whole).subspan(24))),
                       0x86DD);
  };
  c.one("fragment6-first", "malformed", "bu", E,
        [=](const Identity& i, View m) { return parts6(i, m, true); });
  c.one("fragment6-later", "malformed", "bu", E,
        [=](const Identity& i, View m) { return parts6(i, m, false); });
  c.one("fragment6-atomic", "malformed", "bu", E, [](const Identity& i, View m) {
    const Ends e = ends(i.own.ip6, i.outside.ip6);
    return via_gateway(
        i, ip6(e, 44, join(ip6_fragment(17, 4, 0, false), udp(e, i.source_port, i.port, m))),
        0x86DD);
  });
  c.one("ip4-source-route", "malformed", "b", E, [](const Identity& i, View m) {
    // Loose source route to the outside by way of the gateway; the checksum is the last hop's.
    return via_gateway(i, ip4(ends(i.own.ip4, i.gateway.ip4),
                              {.options = join(raw({0x83, 7, 4}), i.outside.ip4.bytes(), u8(0))},
                              udp(ends(i.own.ip4, i.outside.ip4), i.source_port, i.port, m)));
  });
  c.one("ip4-record-route", "malformed", "bu", E, [](const Identity& i, View m) {
    return via_gateway(
        i, udp4(i, i.own.ip4, i.outside.ip4, m, {.options = join(raw({7, 7, 4}), u32(0), u8(0))}));
  });
  c.one("ip4-router-alert", "malformed", "bu", E, [](const Identity& i, View m) {
    return via_gateway(i, udp4(i, i.own.ip4, i.outside.ip4, m, {.options = raw({0x94, 4, 0, 0})}));
  });
  c.one("ip4-bad-checksum", "malformed", "b", E, [](const Identity& i, View m) {
    Bytes packet = udp4(i, i.own.ip4, i.outside.ip4, m);
    packet[10] ^= 0xFFU;
    return via_gateway(i, packet);
  });
  c.one("ip4-length-beyond-frame", "malformed", "b", E, [](const Identity& i, View m) {
    Bytes packet = udp4(i, i.own.ip4, i.outside.ip4, m);
    put16(packet, 2, 1400);
    put16(packet, 10, 0);
    put16(packet, 10, internet_checksum(View(packet).first(20)));
    return via_gateway(i, packet);
  });
  c.one("ip4-trailer", "malformed", "bu", E, [](const Identity& i, View m) {
    return via_gateway(i, join(udp4(i, i.own.ip4, i.outside.ip4, m), zeros(40), m));
  });
  c.one("ip6-in-ip4-ethertype", "malformed", "b", D, [](const Identity& i, View m) {
    return via_gateway(i, udp6(i, i.own.ip6, i.outside.ip6, m), 0x0800);
  });
  c.one("ip4-in-ip6-ethertype", "malformed", "b", D, [](const Identity& i, View m) {
    return via_gateway(i, udp4(i, i.own.ip4, i.outside.ip4, m), 0x86DD);
  });
  c.one("ip4-icmp-redirect", "malformed", "n", D, [](const Identity& i, View m) {
    return ethernet(
        i.neighbour.mac.bytes(), i.own.mac.bytes(), 0x0800,
        ip4(ends(i.gateway.ip4, i.neighbour.ip4), {.protocol = 1},
            icmp4(5, 1, join(i.own.ip4.bytes(), udp4(i, i.neighbour.ip4, i.outside.ip4, m)))));
  });
  c.one("ip6-routing-type0", "malformed", "bu", E, [](const Identity& i, View m) {
    const Ends e = ends(i.own.ip6, i.outside.ip6);
    return via_gateway(i,
                       ip6(e, 43,
                           join(raw({17, 2, 0, 0, 0, 0, 0, 0}), i.outside.ip6.bytes(),
                                udp(e, i.source_port, i.port, m))),
                       0x86DD);
  });
  c.one("ip6-routing-type0-gateway", "malformed", "b", E, [](const Identity& i, View m) {
    // Asks the gateway to send it on to the neighbour; the checksum is that of the last hop.
    const Ends last = ends(i.own.ip6, i.neighbour.ip6);
    return via_gateway(i,
                       ip6(ends(i.own.ip6, i.gateway.ip6), 43,
                           join(raw({17, 2, 0, 1, 0, 0, 0, 0}), i.neighbour.ip6.bytes(),
                                udp(last, i.source_port, i.port, m))),
                       0x86DD);
  });
  c.one("ip6-hop-by-hop", "malformed", "bu", E, [](const Identity& i, View m) {
    const Ends e = ends(i.own.ip6, i.outside.ip6);
    return via_gateway(
        i, ip6(e, 0, join(ip6_options(17, zeros(4)), udp(e, i.source_port, i.port, m))), 0x86DD);
  });
  c.one("ip6-dest-options", "malformed", "bu", E, [](const Identity& i, View m) {
    const Ends e = ends(i.own.ip6, i.outside.ip6);
    return via_gateway(
        i, ip6(e, 60, join(ip6_options(17, zeros(4)), udp(e, i.source_port, i.port, m))), 0x86DD);
  });
  c.one("ip6-no-next-header", "malformed", "bu", E, [](const Identity& i, View m) {
    return via_gateway(i, ip6(ends(i.own.ip6, i.outside.ip6), 59, m), 0x86DD);
  });
}

void add_other_protocols(Catalogue& c) {
  const auto plain = [](unsigned type) {
    return [type](const Identity& i, View m) { return via_gateway(i, join(m, zeros(30)), type); };
  };
  c.one("ether-88b5", "ether", "b", D, plain(0x88B5));
  c.one("ether-88b5-broadcast", "ether", "bn", D, [](const Identity& i, View m) {
    return ethernet(kBroadcast, i.own.mac.bytes(), 0x88B5, join(m, zeros(30)));
  });
  c.one("ether-88b5-neighbour", "ether", "n", D, [](const Identity& i, View m) {
    return ethernet(i.neighbour.mac.bytes(), i.own.mac.bytes(), 0x88B5, join(m, zeros(30)));
  });
  c.one("ether-88b5-unknown-unicast", "ether", "n", D, [](const Identity& i, View m) {
    const Mac nobody = {0x02, 0x77, 0x77, 0x77, 0x77, 0x77};
    return ethernet(nobody, i.own.mac.bytes(), 0x88B5, join(m, zeros(30)));
  });
  c.one("ether-decnet", "ether", "b", D, plain(0x6003));
  c.one("ether-ipx", "ether", "b", D, plain(0x8137));
  c.one("ether-appletalk", "ether", "b", D, plain(0x809B));
  c.one("ether-tipc", "ether", "b", D, plain(0x88CA));
  c.one("ether-batman", "ether", "b", D, plain(0x4305));
  c.one("ether-ffff", "ether", "b", D, plain(0xFFFF));
  c.one("ether-fcoe", "ether", "b", D, plain(0x8906));
  c.one("wake-on-lan", "ether", "bn", D, [](const Identity& i, View m) {
    Bytes magic = join(kBroadcast);
    for (int n = 0; n < 16; ++n) magic = join(magic, i.neighbour.mac.bytes());
    return ethernet(kBroadcast, i.own.mac.bytes(), 0x0842, join(magic, m));
  });
  c.one("wake-on-lan-udp", "ether", "bn", D, [](const Identity& i, View m) {
    Bytes magic = join(kBroadcast);
    for (int n = 0; n < 16; ++n) magic = join(magic, i.neighbour.mac.bytes());
    const Ends e = ends(i.own.ip4, kAnyone4);
    return ethernet(kBroadcast, i.own.mac.bytes(), 0x0800,
                    ip4(e, {}, udp(e, i.source_port, 9, join(magic, m))));
  });
  c.one("pppoe-discovery", "ether", "bn", D, [](const Identity& i, View m) {
    // Host-Uniq carries the marker.
    return ethernet(kBroadcast, i.own.mac.bytes(), 0x8863,
                    join(raw({0x11, 0x09}), u16(0), u16(8 + kMarkerSize), u16(0x0101), u16(0),
                         u16(0x0103), u16(kMarkerSize), m));
  });
  c.one("pppoe-session", "ether", "b", D, [](const Identity& i, View m) {
    const Bytes inner = udp4(i, i.own.ip4, i.outside.ip4, m);
    return via_gateway(i,
                       join(raw({0x11, 0}), u16(1), u16(static_cast<unsigned>(2 + inner.size())),
                            u16(0x0021), inner),
                       0x8864);
  });
  c.one("mpls", "ether", "b", D, [](const Identity& i, View m) {
    return via_gateway(
        i, join(u32(100U << 12U | 1U << 8U | 64U), udp4(i, i.own.ip4, i.outside.ip4, m)), 0x8847);
  });
  c.one("mac-in-mac", "ether", "b", D, [](const Identity& i, View m) {
    return via_gateway(i,
                       join(u32(0x00000066), i.gateway.mac.bytes(), i.own.mac.bytes(), u16(0x0800),
                            udp4(i, i.own.ip4, i.outside.ip4, m)),
                       0x88E7);
  });
  c.one("transparent-ethernet", "ether", "b", D, [](const Identity& i, View m) {
    return via_gateway(i,
                       ethernet(i.gateway.mac.bytes(), i.own.mac.bytes(), 0x0800,
                                udp4(i, i.own.ip4, i.outside.ip4, m)),
                       0x6558);
  });
  c.one("llc-snap-ip4", "ether", "b", D, [](const Identity& i, View m) {
    return ieee8023(i.gateway.mac.bytes(), i.own.mac.bytes(),
                    join(raw({0xAA, 0xAA, 3, 0, 0, 0, 8, 0}), udp4(i, i.own.ip4, i.outside.ip4, m)),
                    {});
  });
  c.one("llc-snap-arp", "ether", "bn", D, [](const Identity& i, View m) {
    const Bytes plain_arp = arp(kBroadcast, i.own.mac.bytes(),
                                {1, i.own.mac.bytes(), i.own.ip4, kZeroMac, i.gateway.ip4}, m);
    return ieee8023(kBroadcast, i.own.mac.bytes(),
                    join(raw({0xAA, 0xAA, 3, 0, 0, 0, 8, 6}), View(plain_arp).subspan(14)), {});
  });
  c.one("llc-netbios", "ether", "bn", D, [](const Identity& i, View m) {
    const Mac group = {0x03, 0, 0, 0, 0, 1};
    return ieee8023(group, i.own.mac.bytes(), join(raw({0xF0, 0xF0, 3}), zeros(27), m), {});
  });
  c.one("llc-test", "ether", "b", D, [](const Identity& i, View m) {
    return ieee8023(i.gateway.mac.bytes(), i.own.mac.bytes(), join(raw({0, 1, 0xF3}), zeros(27), m),
                    {});
  });
  c.one("ipx-raw-8023", "ether", "bn", D, [](const Identity& i, View m) {
    return ieee8023(kBroadcast, i.own.mac.bytes(),
                    join(u16(0xFFFF), u16(30 + kMarkerSize), raw({0, 0}), zeros(4), kBroadcast,
                         u16(0x0452), zeros(4), i.own.mac.bytes(), u16(0x4000), m),
                    {});
  });
  c.one("length-zero", "ether", "b", D, [](const Identity& i, View m) {
    return ieee8023(i.gateway.mac.bytes(), i.own.mac.bytes(), {}, join(m, zeros(30)));
  });
}

void add_shapes(Catalogue& c) {
  const auto sized = [](std::size_t frame) {
    return [frame](const Identity& i, View m) {
      return via_gateway(
          i, udp4(i, i.own.ip4, i.outside.ip4, join(m, zeros(frame - 42 - kMarkerSize))));
    };
  };
  c.one("size-60", "shape", "bu", P, sized(60));
  c.one("size-1514", "shape", "bu", P, sized(1514));
  // A veth takes a VLAN tag's worth more than its MTU, tagged or not; what is longer dies in it.
  c.one("size-1518", "shape", "bu", E, sized(1518));
  c.one("size-1519", "shape", "", D, sized(1519));
  c.one("size-9014", "shape", "", D, sized(9014));
  c.one(
      "size-42", "shape", "b", P,
      [](const Identity& i, View) { return via_gateway(i, udp4(i, i.own.ip4, i.outside.ip4, {})); },
      false);
  c.one(
      "size-14", "shape", "b", D,
      [](const Identity& i, View) { return via_gateway(i, {}, 0x88B6); }, false);
  c.one(
      "size-14-ip4", "shape", "b", E, [](const Identity& i, View) { return via_gateway(i, {}); },
      false);
  c.one(
      "size-34-ip4-header-only", "shape", "b", E,
      [](const Identity& i, View) {
        return via_gateway(i, ip4(ends(i.own.ip4, i.outside.ip4), {.id = 0x4108}, {}));
      },
      false);
  c.one(
      "size-15-arp", "shape", "bn", D,
      [](const Identity& i, View) {
        return ethernet(kBroadcast, i.own.mac.bytes(), 0x0806, raw({0}));
      },
      false);
  const auto with = [](const Identity& i, View destination, View source, View m) {
    return ethernet(destination, source, 0x0800, udp4(i, i.own.ip4, i.outside.ip4, m));
  };
  c.one("mac-zero-source", "shape", "", D,
        [=](const Identity& i, View m) { return with(i, i.gateway.mac.bytes(), kZeroMac, m); });
  c.one("mac-zero-destination", "shape", "n", D,
        [=](const Identity& i, View m) { return with(i, kZeroMac, i.own.mac.bytes(), m); });
  c.one("mac-zero-both", "shape", "", D,
        [=](const Identity& i, View m) { return with(i, kZeroMac, kZeroMac, m); });
  c.one("mac-multicast-source", "shape", "", D, [=](const Identity& i, View m) {
    return with(i, i.gateway.mac.bytes(), Mac{0x01, 0, 0x5E, 1, 2, 3}, m);
  });
  c.one("mac-broadcast-source", "shape", "", D,
        [=](const Identity& i, View m) { return with(i, i.gateway.mac.bytes(), kBroadcast, m); });
  c.one("mac-own-destination", "shape", "", D, [=](const Identity& i, View m) {
    return with(i, i.own.mac.bytes(), i.own.mac.bytes(), m);
  });
}

std::vector<FrameKind> make_catalogue() {
  Catalogue c;
  add_own(c);
  add_neighbour(c);
  add_spoofed(c);
  add_group(c);
  add_arp(c);
  add_vlan(c);
  add_link_control(c);
  add_neighbour_discovery(c);
  add_service_discovery(c);
  add_malformed_ip(c);
  add_other_protocols(c);
  add_shapes(c);
  return std::move(c.kinds);
}

}  // namespace

Identity Identity::example() {
  Identity out;
  out.own = {MacAddress({0x02, 0, 0, 0, 0x01, 0x01}), Ipv4Address({192, 0, 2, 11}),
             Ipv6Address({0x20, 0x01, 0x0D, 0xB8, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x11})};
  out.gateway = {MacAddress({0x02, 0, 0, 0, 0, 0x01}), Ipv4Address({192, 0, 2, 1}),
                 Ipv6Address({0x20, 0x01, 0x0D, 0xB8, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1})};
  out.neighbour = {MacAddress({0x02, 0, 0, 0, 0x01, 0x02}), Ipv4Address({192, 0, 2, 12}),
                   Ipv6Address({0x20, 0x01, 0x0D, 0xB8, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x12})};
  out.outside = {MacAddress({0x02, 0, 0, 0, 0x02, 0x02}), Ipv4Address({198, 51, 100, 2}),
                 Ipv6Address({0x20, 0x01, 0x0D, 0xB8, 0, 0x51, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2})};
  return out;
}

std::array<std::uint8_t, kMarkerSize> Marker::bytes() const {
  std::array<std::uint8_t, kMarkerSize> out{};
  std::copy(kMagic.begin(), kMagic.end(), out.begin());
  out[6] = static_cast<std::uint8_t>(kind >> 8U);
  out[7] = static_cast<std::uint8_t>(kind);
  for (std::size_t i = 0; i < 8; ++i) out[8 + i] = static_cast<std::uint8_t>(run >> (56 - 8 * i));
  return out;
}

std::optional<Marker> Marker::find(std::span<const std::uint8_t> frame) {
  const auto at = std::search(frame.begin(), frame.end(), kMagic.begin(), kMagic.end());
  if (frame.end() - at < static_cast<std::ptrdiff_t>(kMarkerSize)) return std::nullopt;
  Marker out;
  out.kind = static_cast<std::uint16_t>(at[6] << 8U | at[7]);
  for (std::ptrdiff_t i = 8; i < 16; ++i) out.run = out.run << 8U | at[i];
  return out;
}

std::string Reach::to_string() const {
  std::string out;
  const auto add = [&](bool present, const char* name) {
    if (present) out += (out.empty() ? "" : "+") + std::string(name);
  };
  add(bridge, "bridge");
  add(neighbour, "neighbour");
  add(uplink, "uplink");
  return out.empty() ? "none" : out;
}

const std::vector<FrameKind>& catalogue() {
  static const std::vector<FrameKind> kinds = make_catalogue();
  return kinds;
}

const FrameKind* find_kind(std::string_view name) {
  for (const auto& kind : catalogue()) {
    if (kind.name == name) return &kind;
  }
  return nullptr;
}

const FrameKind* find_kind(std::uint16_t number) {
  return number >= 1 && number <= catalogue().size() ? &catalogue()[number - 1U] : nullptr;
}

Recogniser::Recogniser(std::uint64_t run, const std::optional<Identity>& who) : run_(run) {
  if (!who) return;
  for (const auto& kind : catalogue()) {
    for (auto& frame : kind.build(*who, run)) {
      // A marked kind may have a frame without one, too (the head of a tiny fragment).
      if (!Marker::find(frame)) exact_.emplace(std::move(frame), kind.number);
    }
  }
}

std::optional<std::uint16_t> Recogniser::kind_of(std::span<const std::uint8_t> frame) const {
  if (const auto marker = Marker::find(frame); marker && marker->run == run_) return marker->kind;
  if (exact_.empty() || frame.size() > 64) return std::nullopt;
  const auto found = exact_.find(Bytes(frame.begin(), frame.end()));
  if (found == exact_.end()) return std::nullopt;
  return found->second;
}

Bytes pcap(const std::vector<Bytes>& frames) {
  Bytes out = join(u32(0xA1B2C3D4), u16(2), u16(4), u32(0), u32(0), u32(65535), u32(1));
  std::uint32_t second = 0;
  for (const auto& frame : frames) {
    out = join(out, u32(second++), u32(0), u32(frame.size()), u32(frame.size()), frame);
  }
  return out;
}

}  // namespace agentgate::test
