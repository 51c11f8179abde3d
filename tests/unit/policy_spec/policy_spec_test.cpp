// SPDX-License-Identifier: GPL-2.0-or-later
//
// normalise() and subtract() against brute force: in a small universe every address and port is
// asked for, before and after.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <random>

#include "netdriver/gate.h"

namespace agentgate::netdriver {
namespace {

using Box4 = AllowEntry<Ipv4Address>;

Ipv4Address v4(std::uint32_t value) {
  return Ipv4Address({static_cast<std::uint8_t>(value >> 24),
                      static_cast<std::uint8_t>(value >> 16), static_cast<std::uint8_t>(value >> 8),
                      static_cast<std::uint8_t>(value)});
}
Ipv6Address v6(std::uint32_t value, std::uint8_t fill) {
  std::array<std::uint8_t, 16> bytes{};
  bytes.fill(fill);
  for (int i = 0; i < 4; ++i) bytes[15 - i] = static_cast<std::uint8_t>(value >> (8 * i));
  return Ipv6Address(bytes);
}

// A universe of `size` addresses and ports at the low or at the high end of both spaces, so that
// the first and the last address and port take part.
template <class Address>
struct Universe;
template <>
struct Universe<Ipv4Address> {
  bool high;
  [[nodiscard]] Ipv4Address at(unsigned i) const { return v4(high ? 0xFFFFFFFFU - i : i); }
};
template <>
struct Universe<Ipv6Address> {
  bool high;
  [[nodiscard]] Ipv6Address at(unsigned i) const {
    return high ? v6(0xFFFFFFFFU - i, 0xFF) : v6(i, 0);
  }
};
std::uint16_t port_at(bool high, unsigned i) {
  return static_cast<std::uint16_t>(high ? 65535U - i : 1U + i);
}

constexpr unsigned kSize = 9;

template <class Address>
AllowEntry<Address> random_box(std::mt19937& random, const Universe<Address>& universe) {
  const auto pick = [&] { return static_cast<unsigned>(random() % kSize); };
  Address a = universe.at(pick());
  Address b = universe.at(pick());
  if (b < a) std::swap(a, b);
  std::uint16_t p = port_at(universe.high, pick());
  std::uint16_t q = port_at(universe.high, pick());
  if (q < p) std::swap(p, q);
  return {{a, b}, random() % 2 == 0 ? Protocol::tcp : Protocol::udp, {p, q}};
}

template <class Address>
unsigned hits(const std::vector<AllowEntry<Address>>& boxes, const Address& address,
              Protocol protocol, std::uint16_t port) {
  return static_cast<unsigned>(std::count_if(boxes.begin(), boxes.end(), [&](const auto& box) {
    return box.protocol == protocol && box.addresses.first <= address &&
           address <= box.addresses.last && box.ports.first <= port && port <= box.ports.last;
  }));
}

template <class Address>
void brute_force(unsigned seed) {
  std::mt19937 random(seed);
  for (int round = 0; round < 300; ++round) {
    const Universe<Address> universe{round % 2 == 1};
    std::vector<AllowEntry<Address>> allow;
    std::vector<AllowEntry<Address>> deny;
    for (auto n = random() % 8; n > 0; --n) allow.push_back(random_box(random, universe));
    for (auto n = random() % 5; n > 0; --n) deny.push_back(random_box(random, universe));
    const auto got = subtract(allow, deny);
    ASSERT_TRUE(std::is_sorted(got.begin(), got.end()));
    for (unsigned i = 0; i < kSize; ++i) {
      for (unsigned j = 0; j < kSize; ++j) {
        for (const Protocol protocol : {Protocol::tcp, Protocol::udp}) {
          const Address address = universe.at(i);
          const std::uint16_t port = port_at(universe.high, j);
          const unsigned expected =
              hits(allow, address, protocol, port) > 0 && hits(deny, address, protocol, port) == 0;
          // Exactly one box: the kernel's interval sets refuse an overlap.
          ASSERT_EQ(hits(got, address, protocol, port), expected)
              << "round " << round << ", " << address.to_string() << " port " << port;
        }
      }
    }
    for (const auto& box : got) {
      ASSERT_LE(box.addresses.first, box.addresses.last);
      ASSERT_LE(box.ports.first, box.ports.last);
    }
    // What comes out again comes out the same.
    ASSERT_EQ(subtract(got, {}), got);
    // However the same region is written, the boxes are the same.
    std::vector<AllowEntry<Address>> cells;
    for (const auto& box : got) {
      if (box.ports.single()) {
        cells.push_back(box);
        continue;
      }
      const auto middle = static_cast<std::uint16_t>((box.ports.first + box.ports.last) / 2);
      cells.push_back({box.addresses, box.protocol, {box.ports.first, middle}});
      cells.push_back(
          {box.addresses, box.protocol, {static_cast<std::uint16_t>(middle + 1), box.ports.last}});
    }
    cells.insert(cells.end(), got.begin(), got.end());
    std::shuffle(cells.begin(), cells.end(), random);
    ASSERT_EQ(subtract(cells, {}), got);
  }
}

TEST(Subtract, IsExactForIpv4) { brute_force<Ipv4Address>(1); }
TEST(Subtract, IsExactForIpv6) { brute_force<Ipv6Address>(2); }

TEST(Normalise, IsIdempotentAndKeepsWhatIsCovered) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    const Universe<Ipv4Address> four{round % 2 == 1};
    const Universe<Ipv6Address> six{round % 2 == 1};
    PolicySpec spec;
    spec.name = "p";
    for (int i = 0; i < 6; ++i) {
      spec.v4.allow.push_back(random_box(random, four));
      spec.v4.private_entries.push_back(random_box(random, four));
      spec.v4.deny.push_back(random_box(random, four).addresses);
      spec.v6.allow.push_back(random_box(random, six));
      spec.v6.private_entries.push_back(random_box(random, six));
      spec.v6.deny.push_back(random_box(random, six).addresses);
    }
    const PolicySpec once = normalise(spec);
    EXPECT_EQ(normalise(once), once);
    PolicySpec shuffled = spec;
    std::shuffle(shuffled.v4.allow.begin(), shuffled.v4.allow.end(), random);
    std::shuffle(shuffled.v6.deny.begin(), shuffled.v6.deny.end(), random);
    shuffled.v4.allow.push_back(shuffled.v4.allow.front());
    EXPECT_EQ(normalise(shuffled), once);
    for (unsigned i = 0; i < kSize; ++i) {
      const auto covered = [&](const std::vector<Ipv4Range>& ranges) {
        return std::count_if(ranges.begin(), ranges.end(), [&](const Ipv4Range& range) {
          return range.first <= four.at(i) && four.at(i) <= range.last;
        });
      };
      EXPECT_EQ(covered(once.v4.deny), covered(spec.v4.deny) > 0 ? 1 : 0);
      for (unsigned j = 0; j < kSize; ++j) {
        const std::uint16_t port = port_at(four.high, j);
        EXPECT_EQ(hits(once.v4.private_entries, four.at(i), Protocol::tcp, port),
                  hits(spec.v4.private_entries, four.at(i), Protocol::tcp, port) > 0 ? 1U : 0U);
        EXPECT_EQ(hits(once.v6.allow, six.at(i), Protocol::udp, port),
                  hits(spec.v6.allow, six.at(i), Protocol::udp, port) > 0 ? 1U : 0U);
      }
    }
  }
}

TEST(Normalise, JoinsWhatTouches) {
  PolicySpec spec;
  spec.v4.allow = {{{v4(10), v4(20)}, Protocol::tcp, {443, 443}},
                   {{v4(21), v4(30)}, Protocol::tcp, {443, 443}},
                   {{v4(10), v4(30)}, Protocol::tcp, {444, 450}}};
  const Box4 one{{v4(10), v4(30)}, Protocol::tcp, {443, 450}};
  EXPECT_EQ(normalise(spec).v4.allow, std::vector<Box4>{one});
}

TEST(Normalise, KeepsProtocolsApart) {
  PolicySpec spec;
  spec.v4.allow = {{{v4(1), v4(2)}, Protocol::udp, {53, 53}},
                   {{v4(1), v4(2)}, Protocol::tcp, {53, 53}}};
  EXPECT_EQ(normalise(spec).v4.allow.size(), 2U);
}

TEST(Normalise, TakesTheWholeSpace) {
  PolicySpec spec;
  const Box4 everything{{v4(0), v4(0xFFFFFFFFU)}, Protocol::tcp, {1, 65535}};
  spec.v4.allow = {everything, {{v4(7), v4(7)}, Protocol::tcp, {1, 2}}};
  EXPECT_EQ(normalise(spec).v4.allow, std::vector<Box4>{everything});
  EXPECT_TRUE(subtract<Ipv4Address>(spec.v4.allow, {everything}).empty());
}

// Cut by ports, 200 networks with a port range of their own each would be 200 * 200 boxes.
TEST(Normalise, CutsTheCheaperWay) {
  PolicySpec spec;
  for (unsigned i = 0; i < 200; ++i) {
    spec.v4.allow.push_back(
        {{v4(i * 1024), v4(i * 1024 + 255)},
         Protocol::tcp,
         {static_cast<std::uint16_t>(1000 + i), static_cast<std::uint16_t>(5000 + i)}});
  }
  EXPECT_EQ(normalise(spec).v4.allow.size(), 200U);
  // And the other way round: one port range, whose neighbours have other addresses.
  spec.v4.allow.clear();
  for (unsigned i = 0; i < 200; ++i) {
    spec.v4.allow.push_back(
        {{v4(1000 + i), v4(5000 + i)},
         Protocol::tcp,
         {static_cast<std::uint16_t>(1 + i * 10), static_cast<std::uint16_t>(5 + i * 10)}});
  }
  EXPECT_EQ(normalise(spec).v4.allow.size(), 200U);
}

double milliseconds(const PolicySpec& spec, std::size_t& boxes) {
  double best = 1e9;
  for (int i = 0; i < 5; ++i) {
    const auto start = std::chrono::steady_clock::now();
    boxes = normalise(spec).v4.allow.size();
    best = std::min(
        best, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
                  .count());
  }
  return best;
}

TEST(Normalise, FourThousandPrefixesWithThreePortsAreQuick) {
  std::mt19937 random(4);
  PolicySpec spec;
  for (int i = 0; i < 4000; ++i) {
    const auto length = static_cast<std::uint8_t>(16 + random() % 17);
    const Ipv4Range range = Ipv4Prefix(v4(static_cast<std::uint32_t>(random())), length).range();
    for (const std::uint16_t port : {22, 80, 443}) {
      spec.v4.allow.push_back({range, Protocol::tcp, {port, port}});
    }
  }
  std::size_t boxes = 0;
  const double took = milliseconds(spec, boxes);
  std::cout << "4000 prefixes x 3 ports: " << took << " ms, " << boxes << " boxes\n";
  EXPECT_LE(boxes, 12000U);
  // The bound of a release build is 20 ms; with sanitizers it is about ten times slower.
  EXPECT_LT(took, 1000);
}

TEST(Normalise, UnfriendlyShapesEnd) {
  std::size_t boxes = 0;
  // Neighbouring addresses with nested port ranges.
  PolicySpec spec;
  for (unsigned i = 0; i < 16000; ++i) {
    spec.v4.allow.push_back(
        {{v4(i), v4(i)},
         Protocol::tcp,
         {static_cast<std::uint16_t>(1 + i), static_cast<std::uint16_t>(65535 - i)}});
  }
  EXPECT_LT(milliseconds(spec, boxes), 5000);
  EXPECT_EQ(boxes, 16000U);
  // A chain of nested prefixes with 32 services each.
  spec.v4.allow.clear();
  for (std::uint8_t length = 1; length <= 32; ++length) {
    for (unsigned i = 0; i < 32; ++i) {
      const auto port = static_cast<std::uint16_t>(length * 1000U + i * 2);
      spec.v4.allow.push_back(
          {Ipv4Prefix(v4(0x01020304), length).range(), Protocol::tcp, {port, port}});
    }
  }
  EXPECT_LT(milliseconds(spec, boxes), 5000);
}

template <class Address>
bool denied(const std::vector<AddressRange<Address>>& list, const char* text) {
  const Address address = Address::parse(text).value();
  return std::any_of(list.begin(), list.end(), [&](const auto& range) {
    return range.first <= address && address <= range.last;
  });
}

TEST(AlwaysDeny, HoldsWhatNoAgentMayReach) {
  for (const char* text :
       {"0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.100.100.200",
        "127.0.0.1", "127.255.255.255", "168.63.129.16", "169.254.169.254", "172.16.0.1",
        "172.31.255.255", "192.0.0.192", "192.168.1.1", "224.0.0.251", "239.255.255.255",
        "240.0.0.1", "255.255.255.255"}) {
    EXPECT_TRUE(denied(always_deny4(), text)) << text;
  }
  for (const char* text :
       {"1.1.1.1", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255",
        "128.0.0.0", "168.63.129.15", "168.63.129.17", "169.253.255.255", "172.15.255.255",
        "172.32.0.0", "192.167.255.255", "192.169.0.0", "223.255.255.255"}) {
    EXPECT_FALSE(denied(always_deny4(), text)) << text;
  }
  for (const char* text :
       {"::", "::1", "::ffff:1.2.3.4", "64:ff9b::a9fe:a9fe", "100::1", "2002:a9fe:a9fe::1",
        "2001::1", "fc00::1", "fd00:ec2::254", "fd20:ce::254", "fe80::1", "fec0::1", "ff02::1"}) {
    EXPECT_TRUE(denied(always_deny6(), text)) << text;
  }
  for (const char* text :
       {"2606:4700:4700::1111", "2607:6bc0::1", "2a00::1", "2001:4860:4860::8888"}) {
    EXPECT_FALSE(denied(always_deny6(), text)) << text;
  }
}

TEST(AlwaysDeny, IsSortedAndDisjoint) {
  EXPECT_EQ(agentgate::merge(always_deny4()), always_deny4());
  EXPECT_EQ(agentgate::merge(always_deny6()), always_deny6());
}

}  // namespace
}  // namespace agentgate::netdriver
