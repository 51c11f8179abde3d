// SPDX-License-Identifier: GPL-2.0-or-later
//
// The token on the real kernel: seen with tc, judged by datagrams between a container's namespace
// and the host. That a released port without its tables passes nothing is in tests/kernel/leak.
#include "netdriver/token.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "netdriver/gate.h"
#include "netdriver/types.h"
#include "tests/support/netns.h"
#include "tests/support/sniffer.h"

namespace agentgate::netdriver {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;
using test::NetNamespace;

constexpr std::uint16_t kPort = 7777;
constexpr const char* kHostAddresses[] = {"192.0.2.1", "2001:db8:2::1"};
constexpr const char* kContainerAddresses[] = {"192.0.2.11", "2001:db8:2::11"};

class TokenTest : public test::KernelTest {
 protected:
  void SetUp() override {
    KernelTest::SetUp();
    if (IsSkipped()) return;
    host = std::make_unique<NetNamespace>();
    container = std::make_unique<NetNamespace>();
    test::make_bridge({*host, "br0", "02:00:00:00:00:01", {"192.0.2.1/24", "2001:db8:2::1/64"}});
    test::make_veth(
        {*host, "p0", "", {}},
        {*container, "eth0", "02:00:00:00:01:01", {"192.0.2.11/24", "2001:db8:2::11/64"}});
    // What the host's stack says on the port itself (MLD, router solicitations) is not the
    // bridge's.
    host->must({"sysctl", "-qw", "net.ipv6.conf.p0.disable_ipv6=1"});
    test::enslave(*host, "br0", "p0");
    for (int i : {0, 1}) {
      know(*host, "br0", kContainerAddresses[i], "02:00:00:00:01:01");
      know(*container, "eth0", kHostAddresses[i], "02:00:00:00:00:01");
    }
    host->run([&] {
      auto opened = Token::open();
      ASSERT_TRUE(opened) << opened.error().to_string();
      token = std::make_unique<Token>(std::move(*opened));
    });
    ASSERT_NE(token, nullptr);
    index = host->json({"ip", "-j", "link", "show", "br0"})[0]["ifindex"];
  }
  static void know(const NetNamespace& where, const char* link, const char* address,
                   const char* mac) {
    where.must({"ip", "neigh", "replace", address, "dev", link, "lladdr", mac, "nud", "permanent"});
  }

  static void ok(const Status& status) { ASSERT_TRUE(status) << status.error().to_string(); }
  bool present() {
    auto out = token->present(index);
    EXPECT_TRUE(out) << out.error().to_string();
    return out && *out;
  }
  // Filters of one direction as tc has them.
  json filters(const char* direction) const {
    json out = json::array();
    for (const auto& filter : host->json({"tc", "-j", "filter", "show", "dev", "br0", direction})) {
      if (filter.contains("options") && filter["options"].contains("handle")) out.push_back(filter);
    }
    return out;
  }
  // What layer 1 does to a frame of the port, without the rest of it.
  void mark_incoming(const std::string& mark) const {
    host->sh(
        "nft 'add table netdev t; delete table netdev t; add table netdev t;"
        "add chain netdev t c { type filter hook ingress device p0 priority -310; };"
        "add rule netdev t c meta mark set " +
        mark + "'");
  }

  static bool arrives(const NetNamespace& from, const NetNamespace& to, const std::string& address,
                      std::uint32_t mark, std::chrono::milliseconds patience) {
    const IpAddress ip = IpAddress::parse(address).value();
    sockaddr_in in4{};
    in4.sin_family = AF_INET;
    in4.sin_port = htons(kPort);
    sockaddr_in6 in6{};
    in6.sin6_family = AF_INET6;
    in6.sin6_port = htons(kPort);
    std::copy(ip.bytes().begin(), ip.bytes().end(),
              ip.is_v4() ? reinterpret_cast<std::uint8_t*>(&in4.sin_addr)
                         : reinterpret_cast<std::uint8_t*>(&in6.sin6_addr));
    const auto* name = ip.is_v4() ? reinterpret_cast<const sockaddr*>(&in4)
                                  : reinterpret_cast<const sockaddr*>(&in6);
    const socklen_t size = ip.is_v4() ? sizeof in4 : sizeof in6;
    const auto open = [&] {
      return ::socket(ip.is_v4() ? AF_INET : AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    };
    const int receiver = to.run([&] {
      const int fd = open();
      EXPECT_EQ(::bind(fd, name, size), 0) << errno;
      return fd;
    });
    const int sender = from.run(open);
    EXPECT_EQ(::setsockopt(sender, SOL_SOCKET, SO_MARK, &mark, sizeof mark), 0) << errno;
    // The egress filter's drop is ENOBUFS to the sender where the kernel tells it.
    (void)::sendto(sender, "x", 1, 0, name, size);
    pollfd polled{receiver, POLLIN, 0};
    const bool out = ::poll(&polled, 1, static_cast<int>(patience.count())) > 0;
    ::close(sender);
    ::close(receiver);
    return out;
  }
  // Of both families.
  void inwards(bool expected, std::uint32_t mark = 0) const {
    for (const char* to : kHostAddresses) {
      EXPECT_EQ(arrives(*container, *host, to, mark, expected ? 3000ms : 200ms), expected) << to;
    }
  }
  void outwards(std::uint32_t mark, bool expected) const {
    for (const char* to : kContainerAddresses) {
      EXPECT_EQ(arrives(*host, *container, to, mark, expected ? 3000ms : 200ms), expected)
          << to << " mark " << std::hex << mark;
    }
  }

  std::unique_ptr<NetNamespace> host, container;
  std::unique_ptr<Token> token;
  std::uint32_t index = 0;
};

TEST_F(TokenTest, IsAttachedOnceAndDetached) {
  EXPECT_FALSE(present());
  for (int i = 0; i < 2; ++i) {
    ok(token->attach(index));
    EXPECT_TRUE(present());
    for (const char* direction : {"ingress", "egress"}) {
      const json seen = filters(direction);
      ASSERT_EQ(seen.size(), 1U) << seen.dump();
      EXPECT_EQ(seen[0]["kind"], "bpf");
      EXPECT_EQ(seen[0]["pref"], 1);
      EXPECT_EQ(seen[0]["protocol"], "all");
      EXPECT_EQ(seen[0]["options"]["bpf_name"], "agentgate");
      EXPECT_EQ(seen[0]["options"]["direct-action"], true);
    }
  }
  for (int i = 0; i < 2; ++i) {
    ok(token->detach(index));
    EXPECT_FALSE(present());
    EXPECT_TRUE(filters("ingress").empty());
    EXPECT_TRUE(filters("egress").empty());
  }
}

TEST_F(TokenTest, OutlivesWhoAttachedIt) {
  ok(token->attach(index));
  token.reset();
  inwards(false);
  host->run([&] {
    auto again = Token::open();
    ASSERT_TRUE(again) << again.error().to_string();
    auto seen = again->present(index);
    ASSERT_TRUE(seen) << seen.error().to_string();
    EXPECT_TRUE(*seen);
  });
}

TEST_F(TokenTest, NoFlushOfTheRulesetTakesIt) {
  ok(token->attach(index));
  host->must({"nft", "flush", "ruleset"});
  EXPECT_TRUE(present());
}

TEST_F(TokenTest, LinkThatIsNotThere) {
  const Status status = token->attach(987654);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, ENODEV) << status.error().to_string();
  EXPECT_NE(status.error().operation.find("987654"), std::string::npos);
  const auto seen = token->present(987654);
  ASSERT_TRUE(seen) << seen.error().to_string();
  EXPECT_FALSE(*seen);
  ok(token->detach(987654));
}

// What others do to it is seen: each of these opens a direction, or may.
TEST_F(TokenTest, TamperingIsSeen) {
  // Two programs of the old kind: pass everything.
  const std::string pass = " bpf direct-action bytecode '1,6 0 0 0'";
  for (const std::string& done : {std::string("tc filter del dev br0 ingress pref 1"),
                                  std::string("tc filter del dev br0 egress pref 1"),
                                  std::string("tc qdisc del dev br0 clsact"),
                                  "tc filter replace dev br0 ingress pref 1 handle 1" + pass,
                                  "tc filter replace dev br0 egress pref 1 handle 1" + pass,
                                  // Asked before ours.
                                  "tc filter add dev br0 ingress pref 1" + pass,
                                  "tc filter add dev br0 egress pref 1" + pass}) {
    ok(token->attach(index));
    ASSERT_TRUE(present()) << done;
    host->sh(done);
    EXPECT_FALSE(present()) << done;
    host->exec({"tc", "qdisc", "del", "dev", "br0", "clsact"});
  }
}

TEST_F(TokenTest, FiltersOfOthersStay) {
  host->sh(
      "tc qdisc add dev br0 clsact;"
      "tc filter add dev br0 ingress pref 7 bpf direct-action bytecode '1,6 0 0 4294967295'");
  ok(token->attach(index));
  EXPECT_TRUE(present());
  ok(token->detach(index));
  const json left = filters("ingress");
  ASSERT_EQ(left.size(), 1U) << left.dump();
  EXPECT_EQ(left[0]["pref"], 7);
}

TEST_F(TokenTest, AQdiscWithoutEgressIsInTheWay) {
  host->must({"tc", "qdisc", "add", "dev", "br0", "ingress"});
  const Status status = token->attach(index);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, EBUSY) << status.error().to_string();
  EXPECT_FALSE(present());
  EXPECT_TRUE(filters("ingress").empty());
}

TEST_F(TokenTest, AnotherKindOfFilterIsInTheWay) {
  host->sh("tc qdisc add dev br0 clsact; tc filter add dev br0 egress pref 1 u32 match u32 0 0");
  const Status status = token->attach(index);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, EBUSY) << status.error().to_string();
  EXPECT_FALSE(present());
}

TEST_F(TokenTest, InwardsOnlyWithThePortMark) {
  inwards(true);  // what the zeros are worth
  ok(token->attach(index));
  inwards(false);
  // Root of a container can mark; the kernel takes marks off at the border of a namespace.
  inwards(false, kPortMark);
  mark_incoming("0x00a10000");
  inwards(true);
  mark_incoming("0x12a13456");  // the other three bytes are others'
  inwards(true);
  for (const char* other : {"0x00a60000", "0x00a00000", "0x00010000", "0x0000a100", "0xff000000"}) {
    mark_incoming(other);
    inwards(false);
  }
  ok(token->detach(index));
  inwards(true);
}

TEST_F(TokenTest, OutwardsOnlyWithTheVerdictMarkOrAsArp) {
  outwards(0, true);
  ok(token->attach(index));
  outwards(kVerdictMark, true);
  outwards(0x12A63456, true);
  for (const std::uint32_t other : {0x0U, kPortMark, 0x00A40000U, 0x0000A600U, 0xFF000000U}) {
    outwards(other, false);
  }
  // The host's own look-up of a container, and nothing else of a host that tries.
  for (const char* address : kContainerAddresses) {
    host->must({"ip", "neigh", "del", address, "dev", "br0"});
  }
  test::Sniffer::Options options;
  options.keep_unknown = true;
  test::Sniffer at_container(container->fd(), "eth0", options);
  outwards(0, false);
  std::this_thread::sleep_for(100ms);
  at_container.stop();
  std::size_t arp = 0;
  for (const auto& seen : at_container.frames()) {
    if (seen.outgoing) continue;
    const bool is_arp = seen.bytes.at(12) == 0x08 && seen.bytes.at(13) == 0x06;
    EXPECT_TRUE(is_arp) << ::testing::PrintToString(seen.bytes);
    ++arp;
  }
  EXPECT_GE(arp, 1U);
}

}  // namespace
}  // namespace agentgate::netdriver
