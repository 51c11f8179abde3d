// SPDX-License-Identifier: GPL-2.0-or-later
//
// Rtnl on the real kernel. What it made is seen with ip and bridge; what it reads was made with
// them. Every Rtnl here was opened by a thread that is gone and is used from outside the
// namespace, so that each test also shows that the socket stays where it was opened.
#include "netdriver/rtnl.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <libmnl/libmnl.h>
#include <linux/if_link.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <sys/socket.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#include "netdriver/netlink_socket.h"
#include "netdriver/rtnl_wire.h"
#include "tests/support/netns.h"

namespace agentgate::netdriver {
namespace {

using nlohmann::json;
using test::NetNamespace;

constexpr std::uint32_t kGroup = 4711;

InterfaceName name(const std::string& text) { return InterfaceName::parse(text).value(); }
MacAddress mac(const std::string& text) { return MacAddress::parse(text).value(); }
IpAddress ip(const std::string& text) { return IpAddress::parse(text).value(); }

VethSpec veth(const std::string& host, const std::string& peer) {
  return {name(host), name(peer), mac("02:00:00:00:01:01"), 1400, kGroup};
}
BridgeSpec bridge(const std::string& text) {
  return {name(text), mac("02:00:00:00:00:01"), 1400, kGroup};
}

// Objects with "ifname", as one of that name.
json named(const json& list, const std::string& key, const std::string& value) {
  for (const auto& item : list) {
    if (item.is_object() && item.value(key, "") == value) return item;
  }
  return json::object();
}

// Whether the running kernel is at least that one: for what no tool of Debian 12 can tell.
bool kernel_is(int major, int minor) {
  utsname system{};
  int found[2] = {};
  if (::uname(&system) != 0 || std::sscanf(system.release, "%d.%d", &found[0], &found[1]) != 2) {
    return false;
  }
  return std::pair(found[0], found[1]) >= std::pair(major, minor);
}

bool has_flag(const json& link, const std::string& flag) {
  const auto& flags = link.at("flags");
  return std::find(flags.begin(), flags.end(), flag) != flags.end();
}

class RtnlTest : public test::KernelTest {
 protected:
  void SetUp() override {
    KernelTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    host = std::make_unique<NetNamespace>();
    rtnl = open_in(*host);
    ASSERT_NE(rtnl, nullptr);
  }

  static std::unique_ptr<Rtnl> open_in(const NetNamespace& where) {
    auto opened = where.run([] { return Rtnl::open(); });
    EXPECT_TRUE(opened) << opened.error().to_string();
    return opened ? std::move(*opened) : nullptr;
  }

  static void ok(const Status& status) { ASSERT_TRUE(status) << status.error().to_string(); }
  // Fails with `code`, and says of what.
  static void refused(const Status& status, int code, const std::string& about) {
    ASSERT_FALSE(status);
    EXPECT_EQ(errno_name(status.error().code), errno_name(code)) << status.error().to_string();
    EXPECT_NE(status.error().operation.find(about), std::string::npos)
        << status.error().to_string();
  }
  template <class T>
  static T value(Result<T> result) {
    EXPECT_TRUE(result) << result.error().to_string();
    return result ? std::move(*result) : T{};
  }

  json ip_link(const std::string& link) const {
    const json list = host->json({"ip", "-j", "-d", "link", "show", "dev", link});
    return list.at(0);
  }
  bool exists(const std::string& link) const {
    return !named(host->json({"ip", "-j", "link", "show"}), "ifname", link).empty();
  }
  std::uint32_t index(const std::string& link) const { return ip_link(link)["ifindex"]; }
  json addresses_of(const std::string& link) const {
    return host->json({"ip", "-j", "addr", "show", "dev", link}).at(0)["addr_info"];
  }
  json neighbour(const std::string& address) const {
    return named(host->json({"ip", "-j", "neigh", "show", "nud", "all"}), "dst", address);
  }
  json fdb_of(const std::string& port) const {
    json out = json::array();
    for (const auto& entry : host->json({"bridge", "-j", "fdb", "show", "dev", port})) {
      if (entry.is_object() && entry.contains("master")) out.push_back(entry);
    }
    return out;
  }
  // br0 with port p0 (peer c0), both DOWN.
  void make_port() {
    ok(rtnl->create_bridge(bridge("br0")));
    ok(rtnl->create_veth(veth("p0", "c0")));
    ok(rtnl->enslave(name("p0"), name("br0")));
  }

  // All of make_port up, with carrier; only a forwarding port takes dynamic FDB entries, and
  // losing the carrier would flush all neighbours that are not permanent.
  void make_live_port() {
    make_port();
    host->sh("ip link set br0 up; ip link set p0 up; ip link set c0 up");
    forwarding("p0");
  }
  void forwarding(const std::string& port) const {
    for (int i = 0; i < 250; ++i) {
      if (ip_link(port)["linkinfo"]["info_slave_data"]["state"] == "forwarding" &&
          ip_link("br0")["operstate"] == "UP") {
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    FAIL() << ip_link(port).dump();
  }

  std::unique_ptr<NetNamespace> host;
  std::unique_ptr<Rtnl> rtnl;
};

// -- Links ------------------------------------------------------------------------------------

TEST_F(RtnlTest, CreateVethMakesBothEndsDown) {
  ok(rtnl->create_veth(veth("p0", "c0")));
  for (const std::string end : {"p0", "c0"}) {
    json link = ip_link(end);
    EXPECT_EQ(link["linkinfo"]["info_kind"], "veth");
    EXPECT_EQ(link["mtu"], 1400);
    EXPECT_EQ(link["group"], std::to_string(kGroup)) << end;
    EXPECT_EQ(link["num_tx_queues"], 1) << end;
    EXPECT_EQ(link["num_rx_queues"], 1) << end;
    EXPECT_EQ(link["operstate"], "DOWN");
    EXPECT_FALSE(has_flag(link, "UP"));
    EXPECT_FALSE(link.contains("master"));
  }
  EXPECT_EQ(ip_link("c0")["address"], "02:00:00:00:01:01");
  EXPECT_EQ(ip_link("p0")["link"], "c0");
}

TEST_F(RtnlTest, HostEndKeepsItsAddressWhenItComesUp) {
  make_port();
  const json before = ip_link("p0")["address"];
  ok(rtnl->set_up(name("br0")));
  ok(rtnl->set_up(name("p0")));
  EXPECT_EQ(ip_link("p0")["address"], before);
  EXPECT_EQ(ip_link("br0")["address"], "02:00:00:00:00:01");
}

TEST_F(RtnlTest, CreateVethRefusesATakenName) {
  ok(rtnl->create_veth(veth("p0", "c0")));
  const auto before = index("p0");
  refused(rtnl->create_veth(veth("p0", "c1")), EEXIST, "p0");
  EXPECT_FALSE(exists("c1"));
  EXPECT_EQ(index("p0"), before);
  refused(rtnl->create_veth(veth("p1", "c0")), EEXIST, "p1");
  EXPECT_FALSE(exists("p1"));
}

TEST_F(RtnlTest, CreateVethRefusesABadMtu) {
  VethSpec spec = veth("p0", "c0");
  spec.mtu = 10;
  refused(rtnl->create_veth(spec), EINVAL, "p0");
  EXPECT_FALSE(exists("c0"));
}

TEST_F(RtnlTest, CreateBridgeIsQuiet) {
  ok(rtnl->create_bridge(bridge("br0")));
  json link = ip_link("br0");
  EXPECT_EQ(link["linkinfo"]["info_kind"], "bridge");
  EXPECT_EQ(link["address"], "02:00:00:00:00:01");
  EXPECT_EQ(link["mtu"], 1400);
  EXPECT_EQ(link["group"], std::to_string(kGroup));
  EXPECT_FALSE(has_flag(link, "UP"));
  // Before anybody sets it up, too.
  EXPECT_EQ(link["inet6_addr_gen_mode"], "none");
  json data = link["linkinfo"]["info_data"];
  EXPECT_EQ(data["stp_state"], 0);
  EXPECT_EQ(data["forward_delay"], 0);
  EXPECT_EQ(data["group_fwd_mask"], "0");
  EXPECT_EQ(data["mcast_snooping"], 0);
  EXPECT_EQ(data["mcast_querier"], 0);
  EXPECT_EQ(data["nf_call_iptables"], 0);
  EXPECT_EQ(data["nf_call_ip6tables"], 0);
  EXPECT_EQ(data["nf_call_arptables"], 0);
}

TEST_F(RtnlTest, CreateBridgeRefusesATakenName) {
  ok(rtnl->create_bridge(bridge("br0")));
  refused(rtnl->create_bridge(bridge("br0")), EEXIST, "br0");
  EXPECT_TRUE(exists("br0"));  // the first one is not undone
}

TEST_F(RtnlTest, DeleteLinkTakesBothEndsAndMayBeRepeated) {
  ok(rtnl->create_veth(veth("p0", "c0")));
  ok(rtnl->create_veth(veth("p1", "c1")));
  ok(rtnl->delete_link(name("p0")));
  EXPECT_FALSE(exists("p0"));
  EXPECT_FALSE(exists("c0"));
  EXPECT_TRUE(exists("p1"));
  ok(rtnl->delete_link(name("p0")));
  // lo can not be deleted: an error other than "not there" is told.
  refused(rtnl->delete_link(name("lo")), EOPNOTSUPP, "lo");
}

TEST_F(RtnlTest, DeleteLinkGroupTakesTheGroupAndNothingElse) {
  for (int i = 0; i < 5; ++i) {
    ok(rtnl->create_veth(veth("p" + std::to_string(i), "c" + std::to_string(i))));
  }
  ok(rtnl->create_bridge(bridge("br0")));
  ok(rtnl->enslave(name("p0"), name("br0")));
  host->must({"ip", "link", "add", "other", "group", "9", "type", "bridge"});
  host->must({"ip", "link", "add", "plain", "type", "bridge"});
  ok(rtnl->delete_link_group(kGroup));
  std::set<std::string> left;
  for (const auto& link : host->json({"ip", "-j", "link", "show"})) left.insert(link["ifname"]);
  EXPECT_EQ(left, (std::set<std::string>{"lo", "other", "plain"}));
  ok(rtnl->delete_link_group(kGroup));
}

TEST_F(RtnlTest, DeleteLinkGroupNeverTakesTheDefaultGroup) {
  host->must({"ip", "link", "add", "plain", "type", "bridge"});
  refused(rtnl->delete_link_group(0), EINVAL, "group");
  EXPECT_TRUE(exists("plain"));
}

TEST_F(RtnlTest, SetUpMakesNoLinkLocalAddress) {
  make_port();
  ok(rtnl->set_up(name("br0")));
  ok(rtnl->set_up(name("p0")));
  ok(rtnl->set_up(name("c0")));  // has a carrier at once
  ok(rtnl->set_up(name("p0")));
  std::vector<std::string> all{"br0", "p0", "c0"};
  for (int i = 1; i < 6; ++i) {
    all.push_back("p" + std::to_string(i));
    all.push_back("c" + std::to_string(i));
    ok(rtnl->create_veth(veth("p" + std::to_string(i), "c" + std::to_string(i))));
    ok(rtnl->set_up(name("p" + std::to_string(i))));
    ok(rtnl->set_up(name("c" + std::to_string(i))));
  }
  // The control: a pair that ip sets up afterwards gets its addresses by the same work queue.
  host->sh("ip link add x0 type veth peer name x1; ip link set x0 up; ip link set x1 up");
  for (int i = 0; i < 100 && addresses_of("x0").empty(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  ASSERT_FALSE(addresses_of("x0").empty());
  for (const std::string& link : all) {
    EXPECT_TRUE(has_flag(ip_link(link), "UP"));
    EXPECT_TRUE(has_flag(ip_link(link), "LOWER_UP")) << link;
    EXPECT_EQ(ip_link(link)["inet6_addr_gen_mode"], "none");
    EXPECT_TRUE(addresses_of(link).empty()) << link << addresses_of(link).dump();
  }
  EXPECT_EQ(ip_link("p0")["linkinfo"]["info_slave_data"]["state"], "forwarding");
}

TEST_F(RtnlTest, SetUpOfALinkTooSmallForIpv6) {
  BridgeSpec small = bridge("br0");
  small.mtu = 1000;
  ok(rtnl->create_bridge(small));
  ok(rtnl->set_up(name("br0")));
  EXPECT_TRUE(has_flag(ip_link("br0"), "UP"));
  EXPECT_TRUE(addresses_of("br0").empty());
  EXPECT_EQ(value(rtnl->link(name("br0"))).addrgen_mode, 1);
}

TEST_F(RtnlTest, SetDown) {
  make_port();
  ok(rtnl->set_up(name("p0")));
  ok(rtnl->set_down(name("p0")));
  EXPECT_FALSE(has_flag(ip_link("p0"), "UP"));
  ok(rtnl->set_down(name("p0")));
  refused(rtnl->set_down(name("nil")), ENODEV, "nil");
  refused(rtnl->set_up(name("nil")), ENODEV, "nil");
}

// -- Bridge ports -----------------------------------------------------------------------------

TEST_F(RtnlTest, EnslaveWhileDown) {
  ok(rtnl->create_bridge(bridge("br0")));
  ok(rtnl->create_veth(veth("p0", "c0")));
  ok(rtnl->enslave(name("p0"), name("br0")));
  EXPECT_EQ(ip_link("p0")["master"], "br0");
  EXPECT_FALSE(has_flag(ip_link("p0"), "UP"));
  // Again: nothing is undone on the way.
  ok(rtnl->set_port_flags(name("p0"), gate_flags()));
  ok(rtnl->enslave(name("p0"), name("br0")));
  EXPECT_EQ(ip_link("p0")["linkinfo"]["info_slave_data"]["isolated"], true);
}

TEST_F(RtnlTest, EnslaveErrors) {
  make_port();
  refused(rtnl->enslave(name("nil"), name("br0")), ENODEV, "nil");
  refused(rtnl->enslave(name("p0"), name("nil")), ENODEV, "nil");
  EXPECT_EQ(ip_link("p0")["master"], "br0");
  ok(rtnl->create_bridge(bridge("br1")));
  const Status loop = rtnl->enslave(name("br1"), name("br0"));
  refused(loop, ELOOP, "br1");
  EXPECT_NE(loop.error().text.find("bridge"), std::string::npos) << loop.error().to_string();
  refused(rtnl->enslave(name("c0"), name("p0")), EOPNOTSUPP, "c0");
}

TEST_F(RtnlTest, BridgeTakes1023Ports) {
  ok(rtnl->create_bridge(bridge("br0")));
  VethSpec spec = veth("p0", "c0");
  for (int i = 0; i < 1024; ++i) {
    spec.name = name("p" + std::to_string(i));
    spec.peer = name("c" + std::to_string(i));
    ok(rtnl->create_veth(spec));
    if (i < 1023) ok(rtnl->enslave(spec.name, name("br0")));
  }
  refused(rtnl->enslave(spec.name, name("br0")), ENOSPC, "p1023");
  EXPECT_EQ(host->json({"ip", "-j", "link", "show", "master", "br0"}).size(), 1023U);
  EXPECT_FALSE(ip_link("p1023").contains("master"));
  EXPECT_EQ(value(rtnl->links()).size(), 2U * 1024 + 2);
  // A freed place can be used.
  ok(rtnl->delete_link(name("p7")));
  ok(rtnl->enslave(spec.name, name("br0")));
  ok(rtnl->delete_link_group(kGroup));
  EXPECT_EQ(value(rtnl->links()).size(), 1U);
}

struct FlagCase {
  bool BridgePortFlags::*member;
  const char* key;  // in info_slave_data of `ip -d -j link`
};
const FlagCase kFlags[] = {
    {&BridgePortFlags::isolated, "isolated"},
    {&BridgePortFlags::learning, "learning"},
    {&BridgePortFlags::locked, "locked"},
    {&BridgePortFlags::unicast_flood, "flood"},
    {&BridgePortFlags::multicast_flood, "mcast_flood"},
    {&BridgePortFlags::broadcast_flood, "bcast_flood"},
    {&BridgePortFlags::hairpin, "hairpin"},
    {&BridgePortFlags::bpdu_guard, "guard"},
    {&BridgePortFlags::proxy_arp, "proxy_arp"},
    {&BridgePortFlags::neigh_suppress, "neigh_suppress"},
    {&BridgePortFlags::multicast_fast_leave, "fastleave"},
};

TEST_F(RtnlTest, EachPortFlagIsItsOwn) {
  make_port();
  BridgePortFlags none;
  for (const auto& flag : kFlags) none.*flag.member = false;
  for (const auto& set : kFlags) {
    BridgePortFlags flags = none;
    flags.*set.member = true;
    ok(rtnl->set_port_flags(name("p0"), flags));
    json seen = ip_link("p0")["linkinfo"]["info_slave_data"];
    for (const auto& flag : kFlags) {
      EXPECT_EQ(seen.at(flag.key), flag.key == set.key) << set.key << " set, " << flag.key;
    }
    EXPECT_EQ(seen.at("proxy_arp_wifi"), seen.at("proxy_arp"));
    const Link link = value(rtnl->link(name("p0")));
    ASSERT_TRUE(link.port);
    EXPECT_EQ(*link.port, flags) << set.key;
  }
}

TEST_F(RtnlTest, EachPortFlagIsReadAsItsOwn) {
  make_port();
  BridgePortFlags none;
  for (const auto& flag : kFlags) none.*flag.member = false;
  for (const auto& set : kFlags) {
    ok(rtnl->set_port_flags(name("p0"), none));
    host->must({"ip", "link", "set", "dev", "p0", "type", "bridge_slave", set.key, "on"});
    BridgePortFlags flags = none;
    flags.*set.member = true;
    const Link link = value(rtnl->link(name("p0")));
    ASSERT_TRUE(link.port);
    EXPECT_EQ(*link.port, flags) << set.key;
  }
}

TEST_F(RtnlTest, GateFlagsSurviveSetUp) {
  make_port();
  ok(rtnl->set_port_flags(name("p0"), gate_flags()));
  ok(rtnl->set_port_flags(name("p0"), gate_flags()));
  ok(rtnl->set_up(name("br0")));
  ok(rtnl->set_up(name("p0")));
  ok(rtnl->set_up(name("c0")));
  json port =
      named(host->json({"bridge", "-j", "-d", "link", "show", "dev", "p0"}), "ifname", "p0");
  for (const char* on : {"isolated", "locked"}) EXPECT_EQ(port[on], true) << on;
  for (const char* off : {"learning", "flood", "mcast_flood", "bcast_flood", "hairpin", "guard",
                          "fastleave", "neigh_suppress"}) {
    EXPECT_EQ(port[off], false) << off;
  }
}

TEST_F(RtnlTest, MabIsRefused) {
  make_port();
  BridgePortFlags flags = gate_flags();
  flags.mab = true;
  refused(rtnl->set_port_flags(name("p0"), flags), EINVAL, "p0");
}

TEST_F(RtnlTest, MabIsSeenAndSwitchedOff) {
  if (!kernel_is(6, 2)) GTEST_SKIP() << "kernel without the port flag mab";
  make_port();
  // ip of Debian 12 has no word for it.
  const auto set_mab = [&](std::uint8_t on) -> Status {
    return host->run([&]() -> Status {
      auto socket = NetlinkSocket::open(NETLINK_ROUTE);
      if (!socket) return tl::unexpected(socket.error());
      alignas(8) char buffer[512] = {};
      nlmsghdr* message = mnl_nlmsg_put_header(buffer);
      message->nlmsg_type = RTM_NEWLINK;
      message->nlmsg_flags = NLM_F_REQUEST;
      mnl_nlmsg_put_extra_header(message, sizeof(ifinfomsg));
      mnl_attr_put_strz(message, IFLA_IFNAME, "p0");
      nlattr* info = mnl_attr_nest_start(message, IFLA_LINKINFO);
      mnl_attr_put_strz(message, IFLA_INFO_SLAVE_KIND, "bridge");
      nlattr* data = mnl_attr_nest_start(message, IFLA_INFO_SLAVE_DATA);
      mnl_attr_put_u8(message, IFLA_BRPORT_LEARNING, 1);
      mnl_attr_put_u8(message, IFLA_BRPORT_LOCKED, 1);
      mnl_attr_put_u8(message, wire::kBrportMab, on);
      mnl_attr_nest_end(message, data);
      mnl_attr_nest_end(message, info);
      return socket->request(message, "set mab");
    });
  };
  ok(set_mab(1));
  EXPECT_TRUE(value(rtnl->link(name("p0"))).port->mab);
  ok(rtnl->set_port_flags(name("p0"), gate_flags()));
  EXPECT_EQ(value(rtnl->link(name("p0"))).port, gate_flags());
}

TEST_F(RtnlTest, SetPortFlagsErrors) {
  ok(rtnl->create_veth(veth("p0", "c0")));
  refused(rtnl->set_port_flags(name("p0"), gate_flags()), EOPNOTSUPP, "p0");
  refused(rtnl->set_port_flags(name("nil"), gate_flags()), ENODEV, "nil");
}

// -- Addresses --------------------------------------------------------------------------------

TEST_F(RtnlTest, AddAddress) {
  ok(rtnl->create_bridge(bridge("br0")));
  ok(rtnl->set_up(name("br0")));
  ok(rtnl->add_address(name("br0"), ip("192.0.2.1"), 24));
  ok(rtnl->add_address(name("br0"), ip("2001:db8::1"), 64));
  json seen = addresses_of("br0");
  ASSERT_EQ(seen.size(), 2U) << seen.dump();
  EXPECT_EQ(seen[0]["local"], "192.0.2.1");
  EXPECT_EQ(seen[0]["prefixlen"], 24);
  EXPECT_FALSE(seen[0].contains("address"));  // no far end
  EXPECT_EQ(seen[1]["local"], "2001:db8::1");
  EXPECT_EQ(seen[1]["prefixlen"], 64);
  EXPECT_EQ(seen[1]["nodad"], true);
  // The bridge has no carrier here, with which duplicate address detection would never end.
  EXPECT_FALSE(seen[1].contains("tentative")) << seen.dump();

  refused(rtnl->add_address(name("br0"), ip("192.0.2.1"), 24), EEXIST, "192.0.2.1");
  refused(rtnl->add_address(name("br0"), ip("2001:db8::1"), 64), EEXIST, "2001:db8::1");
  refused(rtnl->add_address(name("nil"), ip("192.0.2.1"), 24), ENODEV, "nil");
  refused(rtnl->add_address(name("br0"), ip("192.0.2.9"), 33), EINVAL, "192.0.2.9");
  EXPECT_EQ(addresses_of("br0").size(), 2U);
}

TEST_F(RtnlTest, AddressesOfAllLinks) {
  host->sh(
      "ip link add br0 type bridge; ip addr add 192.0.2.1/24 dev br0;"
      "ip addr add 192.0.2.2/24 dev br0; ip addr add 2001:db8::1/64 dev br0 nodad;"
      // The far end of a point-to-point link is no address of ours.
      "ip addr add 198.51.100.1 peer 198.51.100.2/32 dev br0");
  auto seen = value(rtnl->addresses());
  std::vector<LinkAddress> expected{
      {1, ip("127.0.0.1"), 8},
      {1, ip("::1"), 128},
      {index("br0"), ip("192.0.2.1"), 24},
      {index("br0"), ip("192.0.2.2"), 24},
      {index("br0"), ip("198.51.100.1"), 32},
      {index("br0"), ip("2001:db8::1"), 64},
  };
  std::sort(seen.begin(), seen.end());
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(seen, expected);
}

// -- FDB --------------------------------------------------------------------------------------

TEST_F(RtnlTest, FdbEntryIsStatic) {
  make_port();
  const MacAddress address = mac("02:00:00:00:01:01");
  EXPECT_EQ(value(rtnl->find_fdb(index("br0"), address)), std::nullopt);
  for (int i = 0; i < 2; ++i) {
    ok(rtnl->set_fdb(name("p0"), address));
    json seen = named(fdb_of("p0"), "mac", "02:00:00:00:01:01");
    EXPECT_EQ(seen["state"], "static") << fdb_of("p0").dump();
    EXPECT_EQ(seen["master"], "br0");
  }
  EXPECT_EQ(value(rtnl->find_fdb(index("br0"), address)),
            (FdbEntry{index("p0"), address, true, false}));
  ok(rtnl->delete_fdb(name("p0"), address));
  EXPECT_TRUE(named(fdb_of("p0"), "mac", "02:00:00:00:01:01").empty());
  EXPECT_EQ(value(rtnl->find_fdb(index("br0"), address)), std::nullopt);
  ok(rtnl->delete_fdb(name("p0"), address));
}

TEST_F(RtnlTest, FdbEntryReplacesWhatIsThere) {
  make_live_port();
  ok(rtnl->create_veth(veth("p1", "c1")));
  ok(rtnl->enslave(name("p1"), name("br0")));
  host->sh("ip link set p1 up; ip link set c1 up");
  forwarding("p1");
  const std::string address = "02:00:00:00:09:01";
  // A dynamic one on another port, then our own one on another port.
  host->must({"bridge", "fdb", "add", address, "dev", "p1", "master", "dynamic"});
  ok(rtnl->set_fdb(name("p0"), mac(address)));
  EXPECT_EQ(named(fdb_of("p0"), "mac", address)["state"], "static");
  EXPECT_TRUE(named(fdb_of("p1"), "mac", address).empty());
  ok(rtnl->set_fdb(name("p1"), mac(address)));
  EXPECT_TRUE(named(fdb_of("p0"), "mac", address).empty());
  EXPECT_EQ(named(fdb_of("p1"), "mac", address)["state"], "static");
  // On p0 it is not any more; what p1 has stays.
  ok(rtnl->delete_fdb(name("p0"), mac(address)));
  EXPECT_EQ(named(fdb_of("p1"), "mac", address)["state"], "static");
}

TEST_F(RtnlTest, FdbOfOneBridge) {
  make_live_port();
  ok(rtnl->create_bridge(bridge("br1")));
  ok(rtnl->create_veth(veth("p1", "c1")));
  ok(rtnl->enslave(name("p1"), name("br1")));
  host->must({"bridge", "fdb", "add", "02:00:00:00:02:01", "dev", "p0", "master", "static"});
  host->must({"bridge", "fdb", "add", "02:00:00:00:02:02", "dev", "p0", "master", "dynamic"});
  host->must({"bridge", "fdb", "add", "02:00:00:00:02:03", "dev", "p1", "master", "static"});
  const auto entries = value(rtnl->fdb(index("br0")));
  const auto has = [&](const FdbEntry& entry) {
    return std::count(entries.begin(), entries.end(), entry);
  };
  const auto p0 = index("p0");
  EXPECT_EQ(has({p0, mac("02:00:00:00:02:01"), true, false}), 1);
  EXPECT_EQ(has({p0, mac("02:00:00:00:02:02"), false, false}), 1);
  EXPECT_EQ(has({p0, mac(ip_link("p0")["address"]), false, true}), 1);
  // The same ones for VLAN 1, if the kernel has VLAN filtering; nothing else.
  const bool vlans = !host->json({"bridge", "-j", "vlan", "show", "dev", "p0"}).empty();
  EXPECT_EQ(has({p0, mac("02:00:00:00:02:01"), true, false, 1}), vlans ? 1 : 0);
  for (const auto& entry : entries) EXPECT_LE(entry.vlan, vlans ? 1 : 0);
  for (const auto& entry : entries) {
    EXPECT_NE(entry.mac, mac("02:00:00:00:02:03"));
    EXPECT_NE(entry.port, index("p1"));
  }
}

TEST_F(RtnlTest, FdbErrors) {
  ok(rtnl->create_veth(veth("p0", "c0")));
  const MacAddress address = mac("02:00:00:00:01:01");
  EXPECT_FALSE(rtnl->set_fdb(name("p0"), address));  // no port of a bridge
  refused(rtnl->set_fdb(name("nil"), address), ENODEV, "nil");
  refused(rtnl->delete_fdb(name("nil"), address), ENODEV, "nil");
  EXPECT_FALSE(rtnl->find_fdb(index("p0"), address));  // no bridge
}

// -- Neighbours -------------------------------------------------------------------------------

TEST_F(RtnlTest, NeighbourIsPermanent) {
  ok(rtnl->create_bridge(bridge("br0")));
  ok(rtnl->set_up(name("br0")));
  const auto br0 = index("br0");
  for (const std::string text : {"192.0.2.11", "2001:db8::11"}) {
    const IpAddress address = ip(text);
    EXPECT_EQ(value(rtnl->find_neighbour(br0, address)), std::nullopt);
    for (const std::string lladdr : {"02:00:00:00:01:01", "02:00:00:00:01:02"}) {  // replaces
      ok(rtnl->set_neighbour(name("br0"), address, mac(lladdr)));
      json seen = neighbour(text);
      EXPECT_EQ(seen["state"], json::array({"PERMANENT"})) << seen.dump();
      EXPECT_EQ(seen["lladdr"], lladdr);
      EXPECT_EQ(seen["dev"], "br0");
      EXPECT_EQ(value(rtnl->find_neighbour(br0, address)),
                (Neighbour{br0, address, mac(lladdr), true}));
    }
    ok(rtnl->delete_neighbour(name("br0"), address));
    EXPECT_EQ(value(rtnl->find_neighbour(br0, address)), std::nullopt);
    ok(rtnl->delete_neighbour(name("br0"), address));
  }
}

TEST_F(RtnlTest, NeighbourReplacesALearntOne) {
  make_live_port();
  for (const std::string text : {"192.0.2.11", "2001:db8::11"}) {
    host->must(
        {"ip", "neigh", "add", text, "lladdr", "02:00:00:00:09:09", "dev", "br0", "nud", "stale"});
    EXPECT_EQ(value(rtnl->find_neighbour(index("br0"), ip(text))),
              (Neighbour{index("br0"), ip(text), mac("02:00:00:00:09:09"), false}));
    ok(rtnl->set_neighbour(name("br0"), ip(text), mac("02:00:00:00:01:01")));
    EXPECT_EQ(neighbour(text)["state"], json::array({"PERMANENT"}));
    EXPECT_EQ(neighbour(text)["lladdr"], "02:00:00:00:01:01");
  }
}

TEST_F(RtnlTest, NeighboursOfOneLink) {
  ok(rtnl->create_bridge(bridge("br0")));
  ok(rtnl->create_bridge(bridge("br1")));
  host->sh(
      "ip link set br1 up;"
      "ip neigh add 192.0.2.11 lladdr 02:00:00:00:01:01 dev br0 nud permanent;"
      "ip neigh add 192.0.2.12 lladdr 02:00:00:00:01:02 dev br0 nud stale;"
      "ip neigh add 2001:db8::11 lladdr 02:00:00:00:01:01 dev br0 nud permanent;"
      "ip neigh add 192.0.2.13 lladdr 02:00:00:00:01:03 dev br1 nud permanent");
  const auto br0 = index("br0");
  const auto seen = value(rtnl->neighbours(br0));
  const auto has = [&](const Neighbour& entry) {
    return std::count(seen.begin(), seen.end(), entry);
  };
  EXPECT_EQ(has({br0, ip("192.0.2.11"), mac("02:00:00:00:01:01"), true}), 1);
  EXPECT_EQ(has({br0, ip("192.0.2.12"), mac("02:00:00:00:01:02"), false}), 1);
  EXPECT_EQ(has({br0, ip("2001:db8::11"), mac("02:00:00:00:01:01"), true}), 1);
  for (const auto& entry : seen) EXPECT_EQ(entry.link, br0) << entry.address.to_string();
}

TEST_F(RtnlTest, NeighbourErrors) {
  refused(rtnl->set_neighbour(name("nil"), ip("192.0.2.1"), mac("02:00:00:00:01:01")), ENODEV,
          "nil");
  refused(rtnl->delete_neighbour(name("nil"), ip("192.0.2.1")), ENODEV, "nil");
}

// -- Reading links ----------------------------------------------------------------------------

TEST_F(RtnlTest, LinkIsWhatIpSays) {
  make_port();
  host->sh("ip link set br0 up; ip link set p0 up");
  for (const std::string text : {"br0", "p0", "c0", "lo"}) {
    json seen = ip_link(text);
    const Link link = value(rtnl->link(name(text)));
    EXPECT_EQ(link.index, seen["ifindex"]);
    EXPECT_EQ(link.name.str(), text);
    EXPECT_EQ(link.mac.to_string(), seen["address"].get<std::string>());
    EXPECT_EQ(link.mtu, seen["mtu"]);
    EXPECT_EQ(link.group, text == "lo" ? 0 : kGroup);
    EXPECT_EQ(link.kind, seen.contains("linkinfo")
                             ? seen["linkinfo"].value("info_kind", std::string())
                             : std::string());
    EXPECT_EQ(link.up, has_flag(seen, "UP"));
    EXPECT_EQ(link.master, text == "p0" ? index("br0") : 0);
    EXPECT_EQ(link.peer, text == "p0" ? index("c0") : text == "c0" ? index("p0") : 0);
    EXPECT_FALSE(link.peer_netns);
    EXPECT_EQ(link.port.has_value(), text == "p0");
    EXPECT_EQ(link.port_state.has_value(), text == "p0");
    EXPECT_EQ(link.addrgen_mode == 1, seen["inet6_addr_gen_mode"] == "none") << text;
    EXPECT_EQ(link.stp.has_value(), text == "br0");
    EXPECT_EQ(value(rtnl->link(link.index)), link);
  }
}

TEST_F(RtnlTest, LinkReadsTheOptionsOfABridge) {
  ok(rtnl->create_bridge(bridge("br0")));
  Link link = value(rtnl->link(name("br0")));
  EXPECT_EQ(link.stp, false);
  EXPECT_EQ(link.multicast_snooping, false);
  EXPECT_EQ(link.group_forward_mask, 0);
  EXPECT_NE(link.vlan_filtering, true);
  host->must({"ip", "link", "set", "br0", "type", "bridge", "stp_state", "1"});
  EXPECT_EQ(value(rtnl->link(name("br0"))).stp, true);
  host->must({"ip", "link", "set", "br0", "type", "bridge", "mcast_snooping", "1"});
  EXPECT_EQ(value(rtnl->link(name("br0"))).multicast_snooping, true);
  host->must({"ip", "link", "set", "br0", "type", "bridge", "group_fwd_mask", "0x4008"});
  EXPECT_EQ(value(rtnl->link(name("br0"))).group_forward_mask, 0x4008);
}

TEST_F(RtnlTest, LinkThatIsNotThere) {
  const auto by_name = rtnl->link(name("nil"));
  ASSERT_FALSE(by_name);
  EXPECT_EQ(by_name.error().code, ENODEV);
  const auto by_index = rtnl->link(987654);
  ASSERT_FALSE(by_index);
  EXPECT_EQ(by_index.error().code, ENODEV);
  EXPECT_NE(by_index.error().operation.find("987654"), std::string::npos);
}

TEST_F(RtnlTest, LinksAreAll) {
  for (int i = 0; i < 100; ++i) {
    ok(rtnl->create_veth(veth("p" + std::to_string(i), "c" + std::to_string(i))));
  }
  std::set<std::string> expected;
  for (const auto& link : host->json({"ip", "-j", "link", "show"})) {
    expected.insert(link["ifname"].get<std::string>() + " " + link["ifindex"].dump());
  }
  std::set<std::string> seen;
  const auto links = value(rtnl->links());
  for (const Link& link : links) seen.insert(link.name.str() + " " + std::to_string(link.index));
  EXPECT_EQ(seen, expected);
  EXPECT_EQ(links.size(), 201U);
}

// A writer moves a link between the first and the last place of the dump. At every moment at least
// one of "first" and "last" is there; a listing put together from two moments can lack both.
TEST_F(RtnlTest, InterruptedDumpsAreRepeated) {
  host->must({"ip", "link", "add", "first", "index", "100", "type", "bridge"});
  VethSpec spec = veth("p0", "c0");
  for (int i = 0; i < 150; ++i) {
    spec.name = name("p" + std::to_string(i));
    spec.peer = name("c" + std::to_string(i));
    ok(rtnl->create_veth(spec));
  }
  std::atomic<bool> stop{false};
  std::atomic<int> moves{0};
  std::thread writer([&] {
    host->run([&] {
      auto socket = NetlinkSocket::open(NETLINK_ROUTE);
      if (!socket) return;
      const auto change = [&](std::uint16_t type, const char* link, int at) {
        alignas(8) char buffer[512] = {};
        nlmsghdr* message = mnl_nlmsg_put_header(buffer);
        message->nlmsg_type = type;
        message->nlmsg_flags = NLM_F_REQUEST;
        if (type == RTM_NEWLINK) message->nlmsg_flags |= NLM_F_CREATE | NLM_F_EXCL;
        auto* header =
            static_cast<ifinfomsg*>(mnl_nlmsg_put_extra_header(message, sizeof(ifinfomsg)));
        header->ifi_index = at;
        mnl_attr_put_strz(message, IFLA_IFNAME, link);
        if (type == RTM_NEWLINK) {
          nlattr* info = mnl_attr_nest_start(message, IFLA_LINKINFO);
          mnl_attr_put_strz(message, IFLA_INFO_KIND, "bridge");
          mnl_attr_nest_end(message, info);
        }
        return socket->request(message, link).has_value();
      };
      while (!stop) {
        if (change(RTM_NEWLINK, "last", 9000) && change(RTM_DELLINK, "first", 100) &&
            change(RTM_NEWLINK, "first", 100) && change(RTM_DELLINK, "last", 9000)) {
          ++moves;
        }
      }
    });
  });
  int listings = 0;
  // Three seconds, and on a slow machine until it has shown something.
  const auto start = std::chrono::steady_clock::now();
  const auto since_start = [&] { return std::chrono::steady_clock::now() - start; };
  while (since_start() < std::chrono::seconds(3) ||
         ((listings <= 10 || moves <= 10) && since_start() < std::chrono::seconds(60))) {
    const auto links = rtnl->links();
    if (!links) {
      EXPECT_EQ(links.error().code, EINTR) << links.error().to_string();
      continue;
    }
    ++listings;
    const auto has = [&](const std::string& text) {
      return std::count_if(links->begin(), links->end(),
                           [&](const Link& link) { return link.name.str() == text; });
    };
    EXPECT_GE(has("first") + has("last"), 1);
    EXPECT_EQ(links->size() - static_cast<std::size_t>(has("first") + has("last")), 301U);
  }
  stop = true;
  writer.join();
  EXPECT_GT(listings, 10);
  EXPECT_GT(moves, 10);
  RecordProperty("listings", listings);
  RecordProperty("moves", moves);
}

// -- Namespaces -------------------------------------------------------------------------------

TEST_F(RtnlTest, SocketStaysInItsNamespace) {
  const NetNamespace other;
  ok(rtnl->create_veth(veth("p0", "c0")));
  // A thread opens here, moves there, and still works here.
  host->run([&] {
    auto here = Rtnl::open();
    ASSERT_TRUE(here) << here.error().to_string();
    ASSERT_EQ(::setns(other.fd(), CLONE_NEWNET), 0);
    EXPECT_TRUE((*here)->link(name("p0")));
    ok((*here)->create_bridge(bridge("br0")));
    ok((*here)->enslave(name("p0"), name("br0")));
    EXPECT_EQ((*here)->links()->size(), 4U);
    auto there = Rtnl::open();
    ASSERT_TRUE(there);
    EXPECT_FALSE((*there)->link(name("p0")));
  });
  EXPECT_EQ(ip_link("p0")["master"], "br0");
  EXPECT_EQ(other.json({"ip", "-j", "link", "show"}).size(), 1U);
}

TEST_F(RtnlTest, OpenInAnotherNamespace) {
  const NetNamespace other;
  other.must({"ip", "link", "add", "there", "type", "bridge"});
  char own[64] = {};
  char after[64] = {};
  ASSERT_GT(::readlink("/proc/thread-self/ns/net", own, sizeof own - 1), 0);
  auto there = Rtnl::open_in(other.fd());
  ASSERT_TRUE(there) << there.error().to_string();
  ASSERT_GT(::readlink("/proc/thread-self/ns/net", after, sizeof after - 1), 0);
  EXPECT_STREQ(own, after);
  EXPECT_TRUE((*there)->link(name("there")));
  EXPECT_FALSE(rtnl->link(name("there")));
  // The descriptor is still the caller's.
  EXPECT_NE(::fcntl(other.fd(), F_GETFD), -1);

  auto bad = Rtnl::open_in(-1);
  ASSERT_FALSE(bad);
  EXPECT_EQ(bad.error().code, EBADF);
  const int file = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  bad = Rtnl::open_in(file);
  ::close(file);
  ASSERT_FALSE(bad);
  EXPECT_EQ(bad.error().code, EINVAL);
}

TEST_F(RtnlTest, PeerInAnotherNamespace) {
  const NetNamespace other;
  EXPECT_EQ(value(rtnl->netns_id(other.fd())), std::nullopt);
  ok(rtnl->create_veth(veth("p0", "c0")));
  EXPECT_FALSE(value(rtnl->link(name("p0"))).peer_netns);
  host->must({"ip", "link", "set", "c0", "netns", other.path()});

  const auto id = value(rtnl->netns_id(other.fd()));
  ASSERT_TRUE(id);
  const Link port = value(rtnl->link(name("p0")));
  EXPECT_EQ(port.peer_netns, id);
  EXPECT_EQ(*id, ip_link("p0")["link_netnsid"]);
  // The other end, as its own namespace has it: each names the other's index.
  auto there = Rtnl::open_in(other.fd());
  ASSERT_TRUE(there);
  const Link end = value((*there)->link(name("c0")));
  EXPECT_EQ(port.peer, end.index);
  EXPECT_EQ(end.peer, port.index);
  EXPECT_EQ(end.mac, mac("02:00:00:00:01:01"));
  EXPECT_EQ(end.peer_netns, value((*there)->netns_id(host->fd())));

  const NetNamespace third;
  EXPECT_EQ(value(rtnl->netns_id(third.fd())), std::nullopt);
  EXPECT_FALSE(rtnl->netns_id(-1));
}

// Whoever has CAP_NET_ADMIN in a sandbox's namespace can send to every netlink socket there.
TEST_F(RtnlTest, AnswersOfAnotherProcessAreNotHeard) {
  const auto ports = [&] {
    return host->run([] {
      std::set<std::uint32_t> out;
      std::ifstream table("/proc/thread-self/net/netlink");
      std::string line;
      std::getline(table, line);
      while (std::getline(table, line)) {
        std::istringstream words(line);
        std::string socket;
        int protocol = 0;
        std::uint32_t id = 0;
        words >> socket >> protocol >> id;
        if (protocol == NETLINK_ROUTE && id != 0) out.insert(id);
      }
      return out;
    });
  };
  // Those of `rtnl`, one way or the other: it is the only user of the namespace.
  const std::set<std::uint32_t> targets = ports();
  ASSERT_EQ(targets.size(), 1U);
  int delivered = 0;
  host->run([&] {
    const int forger = ::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
    ASSERT_GE(forger, 0);
    // "There is a link nil", and "done", for every sequence number that may come next.
    for (std::uint32_t sequence = 1; sequence <= 8; ++sequence) {
      alignas(8) char buffer[512] = {};
      nlmsghdr* link = mnl_nlmsg_put_header(buffer);
      link->nlmsg_type = RTM_NEWLINK;
      link->nlmsg_seq = sequence;
      auto* header = static_cast<ifinfomsg*>(mnl_nlmsg_put_extra_header(link, sizeof(ifinfomsg)));
      header->ifi_index = 666;
      mnl_attr_put_strz(link, IFLA_IFNAME, "nil");
      nlmsghdr* done = mnl_nlmsg_put_header(buffer + link->nlmsg_len);
      done->nlmsg_type = NLMSG_ERROR;
      done->nlmsg_seq = sequence;
      mnl_nlmsg_put_extra_header(done, sizeof(nlmsgerr));
      sockaddr_nl to{};
      to.nl_family = AF_NETLINK;
      to.nl_pid = *targets.begin();
      if (::sendto(forger, buffer, link->nlmsg_len + done->nlmsg_len, 0,
                   reinterpret_cast<sockaddr*>(&to), sizeof to) > 0) {
        ++delivered;
      }
    }
    ::close(forger);
  });
  const auto link = rtnl->link(name("nil"));
  ASSERT_FALSE(link) << "forged link " << link->index << ", delivered " << delivered;
  EXPECT_EQ(link.error().code, ENODEV);
}

}  // namespace
}  // namespace agentgate::netdriver
