// SPDX-License-Identifier: GPL-2.0-or-later
//
// The gate on the real kernel: what it makes, seen with ip, bridge and nft; what it reads back.
#include "netdriver/gate_kernel.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/support/netns.h"

namespace agentgate::netdriver {
namespace {

using test::NetNamespace;

InterfaceName name(const char* text) { return InterfaceName::parse(text).value(); }

NetworkSpec network() {
  NetworkSpec out;
  out.bridge = name("agn0123456789");
  out.mac = MacAddress::parse("02:00:00:00:00:01").value();
  out.gateway4 = Ipv4InterfaceAddress::parse("172.30.0.1/24").value();
  out.gateway6 = Ipv6InterfaceAddress::parse("2001:db8:30::1/64").value();
  return out;
}

PortSpec port(int number = 1) {
  const std::string digit = std::to_string(number);
  PortSpec out;
  out.name = name(("agp000000000" + digit).c_str());
  out.peer = name(("agc000000000" + digit).c_str());
  out.bridge = network().bridge;
  out.mac = MacAddress::parse("02:00:00:00:01:0" + digit).value();
  out.address4 = Ipv4Address::parse("172.30.0.1" + digit).value();
  out.address6 = Ipv6Address::parse("2001:db8:30::1" + digit).value();
  out.bridge_mac = network().mac;
  out.gateway4 = network().gateway4->address;
  out.gateway6 = network().gateway6->address;
  return out;
}

PolicySpec policy() {
  PolicySpec out;
  out.name = "web";
  const auto a = Ipv4Address::parse("192.0.2.80").value();
  out.v4.allow.push_back({{a, a}, Protocol::tcp, {443, 443}});
  out.v4.allow.push_back(
      {Ipv4Prefix::parse("198.51.100.0/24").value().range(), Protocol::tcp, {443, 443}});
  const auto b = Ipv6Address::parse("2001:db8::80").value();
  out.v6.allow.push_back({{b, b}, Protocol::tcp, {443, 443}});
  out.v4.deny.push_back(Ipv4Prefix::parse("198.51.100.128/25").value().range());
  return normalise(out);
}

std::string text(const std::vector<Difference>& differences) {
  std::string out;
  for (const auto& d : differences) {
    out += d.where + ": expected '" + d.expected + "' found '" + d.found + "'\n";
  }
  return out;
}

class GateTest : public test::KernelTest {
 protected:
  void SetUp() override {
    KernelTest::SetUp();
    if (IsSkipped()) return;
    host = std::make_unique<NetNamespace>();
    reopen();
    restore({});
  }
  void reopen(Ownership ownership = Ownership::best) {
    gate.reset();
    host->run([&] {
      auto opened = Gate::open(ownership);
      ASSERT_TRUE(opened) << opened.error().to_string();
      gate = std::move(*opened);
    });
  }
  // Tables that stay when their owner ends: owned where the kernel can (since 6.9).
  [[nodiscard]] Ownership lasting() const {
    return gate->features().owner_persist ? Ownership::best : Ownership::none;
  }
  std::vector<InterfaceName> restore(const GateSpec& spec) {
    auto result = gate->restore(spec);
    EXPECT_TRUE(result) << result.error().to_string();
    return result ? result->closed : std::vector<InterfaceName>{};
  }
  void ok(const Status& status) { ASSERT_TRUE(status) << status.error().to_string(); }

  // A released port, with the container's end moved away and up.
  void make_released(PortSpec& p) {
    ok(gate->create_network(network()));
    ok(gate->create_port(p));
    p.prepared = true;
    ok(gate->prepare_port(p));
    p.policy = "web";
    p.label = "a1";
    ok(gate->release_port(p, policy()));
  }
  PortReport inspect(const PortSpec& p, const PolicySpec* pol = nullptr) {
    auto report = gate->inspect_port(network(), p, pol);
    EXPECT_TRUE(report) << report.error().to_string();
    return report ? *report : PortReport{};
  }

  std::unique_ptr<NetNamespace> host;
  std::unique_ptr<Gate> gate;
};

TEST_F(GateTest, NetworkIsAsSpecified) {
  ok(gate->create_network(network()));
  ok(gate->create_network(network()));  // again
  auto differences = gate->inspect_network(network());
  ASSERT_TRUE(differences) << differences.error().to_string();
  EXPECT_TRUE(differences->empty()) << text(*differences);
  const auto link = host->json({"ip", "-j", "-d", "addr", "show", "agn0123456789"})[0];
  EXPECT_EQ(link["address"], "02:00:00:00:00:01");
  ASSERT_EQ(link["addr_info"].size(), 2U) << link.dump();  // no fe80
  ok(gate->delete_network(network().bridge));
  ok(gate->delete_network(network().bridge));
  EXPECT_EQ(host->exec({"ip", "link", "show", "agn0123456789"}).status, 1);
  EXPECT_EQ(host->must({"nft", "list", "set", "inet", "agentgate", "masquerade4"}).find("172.30"),
            std::string::npos);
}

TEST_F(GateTest, PortIsCreatedClosed) {
  ok(gate->create_network(network()));
  ok(gate->create_port(port()));
  EXPECT_EQ(inspect(port()).state, PortState::closed) << text(inspect(port()).differences);
  const auto link = host->json({"ip", "-j", "-d", "link", "show", "agp0000000001"})[0];
  EXPECT_EQ(link["master"], "agn0123456789");
  const auto& slave = link["linkinfo"]["info_slave_data"];
  EXPECT_EQ(slave["isolated"], true);
  EXPECT_EQ(slave["locked"], true);
  EXPECT_EQ(slave["learning"], false);
  EXPECT_EQ(slave["flood"], false);
  EXPECT_EQ(slave["mcast_flood"], false);
  EXPECT_EQ(slave["bcast_flood"], false);
  ok(gate->delete_port(port()));
  ok(gate->delete_port(port()));
  const std::string rules = host->must({"nft", "list", "ruleset"});
  EXPECT_EQ(rules.find("agp000000"), std::string::npos) << rules;
}

TEST_F(GateTest, ReleaseIsReadBack) {
  PortSpec p = port();
  make_released(p);
  const PolicySpec pol = policy();
  const PortReport report = inspect(p, &pol);
  EXPECT_EQ(report.state, PortState::released) << text(report.differences);
  // What another policy would be is not what is there.
  PolicySpec other = policy();
  other.v4.allow[0].ports = {444, 444};
  EXPECT_EQ(inspect(p, &other).state, PortState::inconsistent);

  ok(gate->close_port(p));
  PortSpec closed_port = p;
  closed_port.policy.reset();
  EXPECT_EQ(inspect(closed_port).state, PortState::closed)
      << text(inspect(closed_port).differences);
  EXPECT_EQ(inspect(p, &pol).state, PortState::closed);
  ok(gate->delete_policy("web"));
  EXPECT_EQ(host->must({"nft", "list", "table", "inet", "agentgate"}).find("web"),
            std::string::npos);
}

TEST_F(GateTest, TamperingIsNamed) {
  PortSpec p = port();
  make_released(p);
  const PolicySpec pol = policy();
  host->must({"bridge", "link", "set", "dev", "agp0000000001", "isolated", "off"});
  PortReport report = inspect(p, &pol);
  EXPECT_EQ(report.state, PortState::inconsistent);
  ASSERT_EQ(report.differences.size(), 1U) << text(report.differences);
  EXPECT_NE(report.differences[0].where.find("isolated"), std::string::npos);
  host->must({"bridge", "link", "set", "dev", "agp0000000001", "isolated", "on"});
  host->must({"bridge", "fdb", "del", "02:00:00:00:01:01", "dev", "agp0000000001", "master"});
  report = inspect(p, &pol);
  ASSERT_EQ(report.differences.size(), 1U) << text(report.differences);
  EXPECT_NE(report.differences[0].where.find("FDB"), std::string::npos);
}

// A stranger may rename a bridge between the repair's look at the names and its look at the bridge.
TEST_F(GateTest, ABridgeThatWasRenamedIsNotMadeASecondTime) {
  ok(gate->create_network(network()));
  const std::string bridge = network().bridge.str();
  const auto before = host->json({"ip", "-j", "link", "show", bridge})[0]["ifindex"];
  host->sh("ip link set " + bridge + " down; ip link set " + bridge + " name other1");
  ok(gate->create_network(network()));
  const auto after = host->json({"ip", "-j", "link", "show", bridge})[0];
  EXPECT_EQ(after["ifindex"], before);
  EXPECT_NE(host->exec({"ip", "link", "show", "other1"}).status, 0);
  EXPECT_NE(after["flags"].dump().find("\"UP\""), std::string::npos) << after.dump();
}

// Anything that another program changes is named.
struct Tamper {
  const char* name;
  const char* command;  // $P the port, $B the bridge
  const char* where;
};
void PrintTo(const Tamper& tamper, std::ostream* out) { *out << tamper.command; }

class Tampering : public GateTest, public ::testing::WithParamInterface<Tamper> {
 protected:
  void SetUp() override {
    GateTest::SetUp();
    if (IsSkipped() || std::string(GetParam().command).rfind("nft ", 0) != 0) return;
    // Tables that anybody can change.
    gate.reset();
    host->must({"nft", "flush", "ruleset"});
    host->run([&] {
      auto opened = Gate::open(Ownership::none);
      ASSERT_TRUE(opened) << opened.error().to_string();
      gate = std::move(*opened);
    });
    restore({});
  }
  void tamper() {
    host->sh(std::string("P=agp0000000001 B=agn0123456789 M=02:00:00:00:01:01; ") +
             GetParam().command);
  }
  static void expect_named(const std::vector<Difference>& differences) {
    const bool named = std::any_of(differences.begin(), differences.end(), [](const Difference& d) {
      return d.where.find(GetParam().where) != std::string::npos;
    });
    EXPECT_TRUE(named) << "found: " << text(differences);
  }
};
std::string tamper_name(const ::testing::TestParamInfo<Tamper>& info) { return info.param.name; }

using TamperingWithAReleasedPort = Tampering;
TEST_P(TamperingWithAReleasedPort, IsNamed) {
  PortSpec p = port();
  make_released(p);
  const PolicySpec pol = policy();
  ASSERT_EQ(inspect(p, &pol).state, PortState::released);
  tamper();
  const PortReport report = inspect(p, &pol);
  EXPECT_EQ(report.state, PortState::inconsistent);
  expect_named(report.differences);
}
INSTANTIATE_TEST_SUITE_P(
    Links, TamperingWithAReleasedPort,
    ::testing::Values(
        Tamper{"Group", "ip link set $P group default", ", group"},
        Tamper{"Down", "ip link set $P down", ", up"},
        Tamper{"NoMaster", "ip link set $P nomaster", ", master"},
        Tamper{"OtherMaster", "ip link add other type bridge; ip link set $P master other",
               ", master"},
        Tamper{"AddrGenMode", "ip link set $P addrgenmode eui64", "addrgenmode"},
        Tamper{"Gone", "ip link del $P", "link agp0000000001"},
        Tamper{"OtherKind", "ip link del $P; ip link add $P type bridge", ", kind"},
        Tamper{"Isolated", "bridge link set dev $P isolated off", "flag isolated"},
        Tamper{"Learning", "bridge link set dev $P learning on", "flag learning"},
        Tamper{"Locked", "bridge link set dev $P locked off", "flag locked"},
        Tamper{"Flood", "bridge link set dev $P flood on", "flag flood"},
        Tamper{"McastFlood", "bridge link set dev $P mcast_flood on", "flag mcast_flood"},
        Tamper{"BcastFlood", "bridge link set dev $P bcast_flood on", "flag bcast_flood"},
        Tamper{"Hairpin", "bridge link set dev $P hairpin on", "flag hairpin"},
        Tamper{"Guard", "bridge link set dev $P guard on", "flag guard"},
        Tamper{"ProxyArp", "ip link set $P type bridge_slave proxy_arp on", "flag proxy_arp"},
        Tamper{"ProxyArpWifi", "ip link set $P type bridge_slave proxy_arp_wifi on",
               "flag proxy_arp"},
        Tamper{"NeighSuppress", "bridge link set dev $P neigh_suppress on", "flag neigh_suppress"},
        Tamper{"Fastleave", "bridge link set dev $P fastleave on", "flag fastleave"},
        Tamper{"State", "ip link set agc0000000001 up; sleep .5; bridge link set dev $P state 2",
               ", state"},
        Tamper{"FdbGone", "bridge fdb del $M dev $P master", "FDB"},
        Tamper{"FdbDynamic",
               "ip link set agc0000000001 up; sleep .5; bridge fdb del $M dev $P master;"
               "bridge fdb add $M dev $P master dynamic",
               "FDB"},
        Tamper{"FdbElsewhere",
               "ip link add other type veth peer name another; ip link set other master $B;"
               "bridge fdb replace $M dev other master static",
               "FDB"},
        Tamper{"Neighbour4Gone", "ip neigh del 172.30.0.11 dev $B", "neighbour 172.30.0.11"},
        Tamper{"Neighbour4Other",
               "ip neigh replace 172.30.0.11 dev $B lladdr 02:00:00:00:09:09 nud permanent",
               "neighbour 172.30.0.11"},
        Tamper{"Neighbour4NotPermanent",
               "ip neigh replace 172.30.0.11 dev $B lladdr $M nud reachable",
               "neighbour 172.30.0.11"},
        Tamper{"Neighbour6Gone", "ip neigh del 2001:db8:30::11 dev $B",
               "neighbour 2001:db8:30::11"},
        Tamper{"Neighbour6Other",
               "ip neigh replace 2001:db8:30::11 dev $B lladdr 02:00:00:00:09:09 nud permanent",
               "neighbour 2001:db8:30::11"}),
    tamper_name);

INSTANTIATE_TEST_SUITE_P(
    Tables, TamperingWithAReleasedPort,
    ::testing::Values(
        Tamper{"Ingress", "nft insert rule netdev agentgate $P-in accept",
               "chain agp0000000001-in"},
        Tamper{"Egress", "nft insert rule netdev agentgate $P-out accept",
               "chain agp0000000001-out"},
        Tamper{"IngressEmpty", "nft flush chain netdev agentgate $P-in", "chain agp0000000001-in"},
        Tamper{"Released", "nft delete element bridge agentgate released { $P . $M }",
               "set released"},
        Tamper{"From4", "nft delete element inet agentgate from4 { 172.30.0.11 }", "map from4"},
        Tamper{"To6", "nft delete element inet agentgate to6 { 2001:db8:30::11 }", "map to6"},
        Tamper{"Allow4", "nft add element inet agentgate web.allow4 { 203.0.113.9 . tcp . 22 }",
               "set web.allow4"},
        Tamper{"Allow6", "nft flush set inet agentgate web.allow6", "set web.allow6"},
        Tamper{"PolicyFrom4", "nft insert rule inet agentgate from4_web accept", "chain from4_web"},
        Tamper{"PolicyTo6", "nft insert rule inet agentgate to6_web accept", "chain to6_web"}),
    tamper_name);

using TamperingWithAClosedPort = Tampering;
TEST_P(TamperingWithAClosedPort, IsNamed) {
  ok(gate->create_network(network()));
  ok(gate->create_port(port()));
  ASSERT_EQ(inspect(port()).state, PortState::closed);
  tamper();
  const PortReport report = inspect(port());
  EXPECT_EQ(report.state, PortState::inconsistent);
  expect_named(report.differences);
}
INSTANTIATE_TEST_SUITE_P(
    Links, TamperingWithAClosedPort,
    ::testing::Values(Tamper{"Locked", "bridge link set dev $P locked off", "flag locked"},
                      Tamper{"Fdb", "bridge fdb replace $M dev $P master static", "FDB"},
                      Tamper{"Neighbour4",
                             "ip neigh replace 172.30.0.11 dev $B lladdr $M nud permanent",
                             "neighbour 172.30.0.11"},
                      Tamper{"Neighbour6",
                             "ip neigh replace 2001:db8:30::11 dev $B lladdr $M nud permanent",
                             "neighbour 2001:db8:30::11"}),
    tamper_name);

INSTANTIATE_TEST_SUITE_P(
    Tables, TamperingWithAClosedPort,
    ::testing::Values(
        Tamper{"Ingress", "nft insert rule netdev agentgate $P-in accept",
               "chain agp0000000001-in"},
        Tamper{"Released", "nft add element bridge agentgate released { $P . $M }", "set released"},
        Tamper{"From4", "nft add element inet agentgate from4 { 172.30.0.11 : goto allowed }",
               "map from4"}),
    tamper_name);

using TamperingWithANetwork = Tampering;
TEST_P(TamperingWithANetwork, IsNamed) {
  ok(gate->create_network(network()));
  auto differences = gate->inspect_network(network());
  ASSERT_TRUE(differences && differences->empty());
  tamper();
  differences = gate->inspect_network(network());
  ASSERT_TRUE(differences) << differences.error().to_string();
  expect_named(*differences);
}
INSTANTIATE_TEST_SUITE_P(
    Links, TamperingWithANetwork,
    ::testing::Values(
        Tamper{"Gone", "ip link del $B", "bridge agn0123456789"},
        Tamper{"Kind", "ip link del $B; ip link add $B type veth peer name other", ", kind"},
        Tamper{"Mac", "ip link set $B address 02:00:00:00:09:09", ", MAC"},
        Tamper{"Group", "ip link set $B group default", ", group"},
        Tamper{"Down", "ip link set $B down", ", up"},
        Tamper{"Stp", "ip link set $B type bridge stp_state 1", ", stp"},
        Tamper{"Snooping", "ip link set $B type bridge mcast_snooping 1", ", mcast_snooping"},
        Tamper{"GroupForwardMask", "ip link set $B type bridge group_fwd_mask 16384",
               ", group_fwd_mask"},
        Tamper{"AddressGone", "ip addr del 172.30.0.1/24 dev $B", ", address"},
        Tamper{"Address6Gone", "ip addr del 2001:db8:30::1/64 dev $B", ", address"},
        Tamper{"AddressMore", "ip addr add 172.31.0.1/24 dev $B", ", address"},
        Tamper{"Address6More", "ip addr add 2001:db8:31::1/64 dev $B", ", address"}),
    tamper_name);

INSTANTIATE_TEST_SUITE_P(
    Tables, TamperingWithANetwork,
    ::testing::Values(
        Tamper{"Forward", "nft insert rule inet agentgate forward accept", "chain forward"},
        Tamper{"FromPort", "nft insert rule bridge agentgate from_port accept", "chain from_port"},
        Tamper{"NoTable", "nft delete table bridge agentgate", "table bridge agentgate"},
        Tamper{"Flags", "nft add table inet agentgate { flags dormant \\; }", "flags"},
        Tamper{"Always4", "nft flush set inet agentgate always4", "set always4"},
        Tamper{"Always6", "nft flush set inet agentgate always6", "set always6"},
        Tamper{"Host4", "nft add element inet agentgate host4 { 203.0.113.1 }", "set host4"},
        Tamper{"Pool4", "nft flush set inet agentgate pool4", "set pool4"},
        Tamper{"Masquerade6", "nft flush set inet agentgate masquerade6", "set masquerade6"}),
    tamper_name);

// What the kernel has for the port outside of the chains, by the tools' account.
TEST_F(GateTest, ControlsComeAndGo) {
  const auto fdb = [&] {
    return host->must({"bridge", "fdb", "show", "dev", "agp0000000001"}).find("02:00:00:00:01:01 ");
  };
  const auto neighbours = [&] {
    std::string out;
    for (const char* address : {"172.30.0.11", "2001:db8:30::11"}) {
      const auto found = host->json({"ip", "-j", "neigh", "show", "to", address});
      if (found.empty()) continue;
      out += found[0]["lladdr"].get<std::string>() + " " + found[0]["state"][0].get<std::string>() +
             "; ";
    }
    return out;
  };
  const std::string there = "02:00:00:00:01:01 PERMANENT; 02:00:00:00:01:01 PERMANENT; ";
  PortSpec p = port();
  make_released(p);
  EXPECT_NE(fdb(), std::string::npos);
  EXPECT_EQ(neighbours(), there);
  ok(gate->close_port(p));
  ok(gate->unprepare_port(p));
  EXPECT_EQ(fdb(), std::string::npos);
  EXPECT_EQ(neighbours(), "");
  // An arm puts the flags back as well.
  host->must({"bridge", "link", "set", "dev", "agp0000000001", "locked", "off", "isolated", "off"});
  ok(gate->prepare_port(p));
  EXPECT_EQ(neighbours(), there);
  const auto link = host->json({"ip", "-j", "-d", "link", "show", "agp0000000001"})[0];
  EXPECT_EQ(link["linkinfo"]["info_slave_data"]["locked"], true);
  EXPECT_EQ(link["linkinfo"]["info_slave_data"]["isolated"], true);
  ok(gate->release_port(p, policy()));
  ok(gate->delete_port(p));
  EXPECT_EQ(neighbours(), "");
  const std::string rules = host->must({"nft", "list", "ruleset"});
  EXPECT_EQ(rules.find("agp0000000001"), std::string::npos);
  EXPECT_EQ(rules.find("172.30.0.11"), std::string::npos);
  EXPECT_EQ(rules.find("2001:db8:30::11"), std::string::npos);
}

// The link went behind the gate's back, and a new port has the same name and addresses.
TEST_F(GateTest, ANewPortDoesNotFindItsPredecessorsElements) {
  PortSpec p = port();
  make_released(p);
  host->must({"ip", "link", "del", "agp0000000001"});
  EXPECT_NE(host->must({"nft", "list", "map", "inet", "agentgate", "from4"}).find("172.30.0.11"),
            std::string::npos);
  ok(gate->create_port(p));  // whatever its policy
  const std::string inet = host->must({"nft", "list", "table", "inet", "agentgate"});
  EXPECT_EQ(inet.find("172.30.0.11"), std::string::npos);
  EXPECT_EQ(inet.find("2001:db8:30::11"), std::string::npos);
  EXPECT_EQ(host->must({"nft", "list", "set", "bridge", "agentgate", "released"}).find("agp"),
            std::string::npos);
  for (const char* chain : {"agp0000000001-in", "agp0000000001-out"}) {
    const std::string rules = host->must({"nft", "list", "chain", "netdev", "agentgate", chain});
    EXPECT_NE(rules.find("policy drop"), std::string::npos) << rules;
    EXPECT_EQ(rules.find("accept"), std::string::npos) << rules;
  }
}

TEST_F(GateTest, APortThatCannotBeMadeLeavesNothing) {
  EXPECT_FALSE(gate->create_port(port()));  // there is no bridge
  EXPECT_EQ(host->exec({"ip", "link", "show", "agp0000000001"}).status, 1);
  EXPECT_EQ(host->must({"nft", "list", "ruleset"}).find("agp000"), std::string::npos);
}

TEST_F(GateTest, AnotherPolicyTakesThePlaceOfTheFirst) {
  PortSpec p = port();
  make_released(p);
  PolicySpec other = policy();
  other.name = "other";
  p.policy = "other";
  ok(gate->release_port(p, other));
  for (const char* map : {"from4", "from6", "to4", "to6"}) {
    const std::string text_of = host->must({"nft", "list", "map", "inet", "agentgate", map});
    EXPECT_NE(text_of.find(std::string("goto ") + map + "_other"), std::string::npos) << text_of;
    EXPECT_EQ(text_of.find("_web"), std::string::npos) << text_of;
  }
}

TEST_F(GateTest, APolicyThatChangedIsReleasedAsItIsNow) {
  PortSpec p = port();
  make_released(p);
  ok(gate->close_port(p));
  PolicySpec changed = policy();
  const auto c = Ipv4Address::parse("203.0.113.9").value();
  changed.v4.allow = {{{c, c}, Protocol::udp, {443, 443}}};
  changed = normalise(changed);
  ok(gate->release_port(p, changed));
  const std::string set = host->must({"nft", "list", "set", "inet", "agentgate", "web.allow4"});
  EXPECT_NE(set.find("203.0.113.9 . udp . 443"), std::string::npos) << set;
  EXPECT_EQ(set.find("192.0.2.80"), std::string::npos) << set;
}

TEST_F(GateTest, APortIsNotReleasedToAPolicyThatIsNotIts) {
  ok(gate->create_network(network()));
  PortSpec p = port();
  ok(gate->create_port(p));
  for (const std::optional<std::string>& its : {std::optional<std::string>(), {"other"}}) {
    p.policy = its;
    const Status refused = gate->release_port(p, policy());
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, EINVAL);
  }
  EXPECT_EQ(host->must({"nft", "list", "ruleset"}).find("172.30.0.11"), std::string::npos);
}

TEST_F(GateTest, HostAddressesAreReplaced) {
  const auto set4 = [](const char* a) {
    const auto ip = Ipv4Address::parse(a).value();
    return std::vector<Ipv4Range>{{ip, ip}};
  };
  const auto set6 = [](const char* a) {
    const auto ip = Ipv6Address::parse(a).value();
    return std::vector<Ipv6Range>{{ip, ip}};
  };
  ok(gate->set_host_addresses(set4("203.0.113.1"), set6("2001:db8:9::1")));
  ok(gate->set_host_addresses(set4("203.0.113.3"), set6("2001:db8:9::3")));
  const std::string inet = host->must({"nft", "list", "table", "inet", "agentgate"});
  EXPECT_EQ(inet.find("203.0.113.1"), std::string::npos);
  EXPECT_EQ(inet.find("2001:db8:9::1"), std::string::npos);
  EXPECT_NE(inet.find("203.0.113.3"), std::string::npos);
  EXPECT_NE(inet.find("2001:db8:9::3"), std::string::npos);
}

TEST_F(GateTest, AForeignLinkOfTheNameIsLeftAlone) {
  for (const char* how : {"address 02:00:00:00:00:01 type bridge",
                          "address 02:00:00:00:09:09 group 24935 type bridge",
                          "address 02:00:00:00:00:01 group 24935 type veth peer name other"}) {
    host->sh(std::string("ip link add agn0123456789 ") + how);
    const Status refused = gate->create_network(network());
    ASSERT_FALSE(refused) << how;
    EXPECT_EQ(refused.error().code, EEXIST) << refused.error().to_string();
    EXPECT_TRUE(host->json({"ip", "-j", "addr", "show", "agn0123456789"})[0]["addr_info"].empty());
    host->must({"ip", "link", "del", "agn0123456789"});
  }
}

TEST_F(GateTest, ANetworkWithAPortStays) {
  ok(gate->create_network(network()));
  ok(gate->create_port(port()));
  const Status refused = gate->delete_network(network().bridge);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, EBUSY);
  EXPECT_EQ(host->exec({"ip", "link", "show", "agn0123456789"}).status, 0);
  ok(gate->delete_port(port()));
  ok(gate->delete_network(network().bridge));
  EXPECT_EQ(host->must({"nft", "list", "table", "inet", "agentgate"}).find("172.30"),
            std::string::npos);
}

TEST_F(GateTest, UpdateChangesOnlyTheDifference) {
  PortSpec p = port();
  make_released(p);
  PolicySpec changed = policy();
  const auto c = Ipv4Address::parse("203.0.113.9").value();
  changed.v4.allow.push_back({{c, c}, Protocol::udp, {443, 443}});
  changed.v4.allow[0] = {
      Ipv4Prefix::parse("198.51.100.0/23").value().range(), Protocol::tcp, {443, 443}};
  changed.reject = false;
  changed = normalise(changed);
  ok(gate->update_policy(changed));
  EXPECT_EQ(inspect(p, &changed).state, PortState::released)
      << text(inspect(p, &changed).differences);
}

TEST_F(GateTest, RestoreKeepsWhatIsRightAndClosesWhatIsNot) {
  const Ownership ownership = lasting();
  reopen(ownership);
  restore({});
  PortSpec p = port();
  make_released(p);
  GateSpec spec;
  spec.networks[network().bridge] = network();
  spec.ports[p.name] = p;
  spec.policies["web"] = policy();
  const std::string before = host->must({"nft", "-s", "-a", "list", "ruleset"});
  // A new process finds everything right: nothing is touched, handles included.
  reopen(ownership);
  EXPECT_TRUE(restore(spec).empty());
  EXPECT_EQ(host->must({"nft", "-s", "-a", "list", "ruleset"}), before);
  // Its policy says something else than the kernel: closed.
  spec.policies["web"].v4.allow.clear();
  reopen(ownership);
  const auto closed = restore(spec);
  ASSERT_EQ(closed.size(), 1U);
  EXPECT_EQ(closed[0], p.name);
  p.policy.reset();
  EXPECT_EQ(inspect(p).state, PortState::closed) << text(inspect(p).differences);
}

// While nobody was there to see it, somebody changed the links.
TEST_F(GateTest, RestorePutsTheLinksRight) {
  const Ownership ownership = lasting();
  reopen(ownership);
  restore({});
  PortSpec p = port();
  make_released(p);
  GateSpec spec;
  spec.networks[network().bridge] = network();
  spec.ports[p.name] = p;
  spec.policies["web"] = policy();
  gate.reset();
  host->sh(
      "bridge link set dev agp0000000001 isolated off locked off learning on flood on;"
      "bridge fdb del 02:00:00:00:01:01 dev agp0000000001 master;"
      "ip neigh replace 172.30.0.11 dev agn0123456789 lladdr 02:00:00:00:09:09 nud permanent;"
      "ip neigh del 2001:db8:30::11 dev agn0123456789; ip link set agp0000000001 nomaster");
  reopen(ownership);
  EXPECT_TRUE(restore(spec).empty());
  auto link = host->json({"ip", "-j", "-d", "link", "show", "agp0000000001"})[0];
  EXPECT_EQ(link["master"], "agn0123456789");
  auto& slave = link["linkinfo"]["info_slave_data"];
  EXPECT_EQ(slave["isolated"], true);
  EXPECT_EQ(slave["locked"], true);
  EXPECT_EQ(slave["learning"], false);
  EXPECT_EQ(slave["flood"], false);
  EXPECT_NE(host->must({"bridge", "fdb", "show", "dev", "agp0000000001"})
                .find("02:00:00:00:01:01 master agn0123456789 static"),
            std::string::npos);
  for (const char* address : {"172.30.0.11", "2001:db8:30::11"}) {
    const auto found = host->json({"ip", "-j", "neigh", "show", "to", address});
    ASSERT_EQ(found.size(), 1U);
    EXPECT_EQ(found[0]["lladdr"], "02:00:00:00:01:01");
    EXPECT_EQ(found[0]["state"][0], "PERMANENT");
  }
  // A port whose link is gone is told about, and its elements go.
  gate.reset();
  host->must({"ip", "link", "del", "agp0000000001"});
  reopen(ownership);
  EXPECT_EQ(restore(spec), std::vector<InterfaceName>{p.name});
  EXPECT_EQ(host->must({"nft", "list", "ruleset"}).find("172.30.0.11"), std::string::npos);
}

// The daemon was killed after step 9 had reached the kernel and before it was on disk: the port is
// closed and not prepared, and `locked` alone must hold it again.
TEST_F(GateTest, RestoreTakesAwayControlsThatAreNotWanted) {
  PortSpec p = port();
  ok(gate->create_network(network()));
  ok(gate->create_port(p));
  ok(gate->prepare_port(p));
  GateSpec spec;
  spec.networks[network().bridge] = network();
  spec.ports[p.name] = p;
  gate.reset();
  host->run([&] { gate = std::move(*Gate::open()); });
  restore(spec);
  EXPECT_EQ(
      host->must({"bridge", "fdb", "show", "dev", "agp0000000001"}).find("02:00:00:00:01:01 "),
      std::string::npos);
  EXPECT_EQ(inspect(p).state, PortState::closed) << text(inspect(p).differences);
}

TEST_F(GateTest, RestoreRemovesStrangersOfOurs) {
  ok(gate->create_network(network()));
  ok(gate->create_port(port()));
  // Of a name like ours, but not of our group; and the other way round.
  host->sh(
      "ip link add agp00foreign type veth peer name agn00foreign;"
      "ip link add foreign group 24935 type veth peer name foreign2");
  restore({});
  EXPECT_EQ(host->must({"nft", "list", "ruleset"}).find("agp000"), std::string::npos);
  EXPECT_EQ(host->exec({"ip", "link", "show", "agp0000000001"}).status, 1);
  EXPECT_EQ(host->exec({"ip", "link", "show", "agn0123456789"}).status, 1);
  for (const char* foreign : {"agp00foreign", "agn00foreign", "foreign"}) {
    EXPECT_EQ(host->exec({"ip", "link", "show", foreign}).status, 0) << foreign;
  }
}

TEST_F(GateTest, OwnedTablesSurviveAForeignFlush) {
  PortSpec p = port();
  make_released(p);
  host->must({"nft", "flush", "ruleset"});
  const PolicySpec pol = policy();
  EXPECT_EQ(inspect(p, &pol).state, PortState::released);
  EXPECT_NE(host->exec({"nft", "delete", "table", "inet", "agentgate"}).status, 0);
}

TEST_F(GateTest, ASecondOwnerIsRefused) {
  host->run([&] {
    auto second = Gate::open();
    ASSERT_FALSE(second);
    EXPECT_EQ(second.error().code, EPERM) << second.error().to_string();
  });
}

// What a container sent while it was closed leaves its look-up of the gateway failing.
TEST_F(GateTest, TheGatewayIsAnnounced) {
  PortSpec p = port();
  ok(gate->create_network(network()));
  ok(gate->create_port(p));
  NetNamespace sandbox;
  host->must({"ip", "link", "set", p.peer.str(), "netns", sandbox.path(), "name", "eth0"});
  sandbox.sh(
      "ip addr add 172.30.0.11/24 dev eth0; ip addr add 2001:db8:30::11/64 dev eth0 nodad;"
      "ip link set eth0 up");
  sandbox.must({"bash", "-c", "echo > /dev/udp/172.30.0.1/9; echo > /dev/udp/2001:db8:30::1/9"});
  const auto known = [&](const char* address) {
    const auto entries = sandbox.json({"ip", "-j", "neigh", "show", "to", address, "dev", "eth0"});
    return entries.empty() ? std::string("no entry") : entries[0].value("lladdr", "no MAC");
  };
  ASSERT_EQ(known("172.30.0.1"), "no MAC");
  ASSERT_EQ(known("2001:db8:30::1"), "no MAC");
  ok(gate->announce(p));  // closed: nothing passes
  EXPECT_EQ(known("172.30.0.1"), "no MAC");
  EXPECT_EQ(known("2001:db8:30::1"), "no MAC");
  p.prepared = true;
  ok(gate->prepare_port(p));
  p.policy = "web";
  ok(gate->release_port(p, policy()));
  ok(gate->announce(p));
  EXPECT_EQ(known("172.30.0.1"), "02:00:00:00:00:01");
  EXPECT_EQ(known("2001:db8:30::1"), "02:00:00:00:00:01");
}

TEST_F(GateTest, SandboxLinkIsTiedToItsPort) {
  ok(gate->create_network(network()));
  ok(gate->create_port(port(1)));
  ok(gate->create_port(port(2)));
  NetNamespace sandbox;
  host->must({"ip", "link", "set", "agc0000000001", "netns", sandbox.path(), "name", "eth0"});
  sandbox.must({"ip", "addr", "add", "172.30.0.11/24", "dev", "eth0"});
  sandbox.must({"ip", "link", "set", "eth0", "up"});
  auto links = gate->sandbox_links(sandbox.fd());
  ASSERT_TRUE(links) << links.error().to_string();
  ASSERT_EQ(links->size(), 1U);
  auto tied = gate->tie(port(1), links->front(), sandbox.fd());
  ASSERT_TRUE(tied) << tied.error().to_string();
  EXPECT_TRUE(tied->empty()) << text(*tied);
  auto other = gate->tie(port(2), links->front(), sandbox.fd());
  ASSERT_TRUE(other);
  EXPECT_FALSE(other->empty());

  // Each single thing that can be wrong, and only it.
  const auto differs = [&](const SandboxLink& link, int netns, const std::string& where) {
    auto result = gate->tie(port(1), link, netns);
    ASSERT_TRUE(result);
    ASSERT_EQ(result->size(), 1U) << where << ":\n" << text(*result);
    EXPECT_NE(result->front().where.find(where), std::string::npos) << text(*result);
  };
  const SandboxLink right = links->front();
  EXPECT_EQ(std::count(right.addresses.begin(), right.addresses.end(), *port(1).address4), 1);
  SandboxLink wrong = right;
  wrong.kind = "macvlan";
  differs(wrong, sandbox.fd(), "kind");
  wrong = right;
  wrong.index += 1;
  differs(wrong, sandbox.fd(), "other end");
  wrong = right;
  wrong.peer_index += 1;
  differs(wrong, sandbox.fd(), "other end");
  wrong = right;
  wrong.mac = port(2).mac;
  differs(wrong, sandbox.fd(), "MAC");
  // A link of the same numbers in another namespace.
  NetNamespace elsewhere;
  host->must({"ip", "link", "set", "agc0000000002", "netns", elsewhere.path()});
  differs(right, elsewhere.fd(), "namespace");
  const NetNamespace nowhere;
  auto unknown = gate->tie(port(1), right, nowhere.fd());
  ASSERT_TRUE(unknown);
  EXPECT_EQ(unknown->size(), 2U) << text(*unknown);
  host->sh("ip link add other type bridge; ip link set agp0000000001 master other");
  differs(right, sandbox.fd(), "bridge");
}

// A container that dies takes its veth along, and up to Linux 6.15 the port's chains with it.
TEST_F(GateTest, PortWhoseLinkIsGoneCanBeClosedDeletedAndMadeAgain) {
  for (const bool close_first : {true, false}) {
    PortSpec p = port();
    make_released(p);
    host->must({"ip", "link", "del", p.name.str()});
    if (close_first) {
      ok(gate->close_port(p));
      ok(gate->close_port(p));
      for (const char* family : {"bridge", "inet"}) {
        const std::string table = host->must({"nft", "list", "table", family, "agentgate"});
        EXPECT_EQ(table.find("172.30.0.11"), std::string::npos) << table;
        EXPECT_EQ(table.find(p.name.str()), std::string::npos) << table;
      }
    }
    ok(gate->delete_port(p));
    EXPECT_EQ(host->must({"nft", "list", "ruleset"}).find(p.name.str()), std::string::npos);
    ok(gate->create_port(p));
    PortSpec again = port();
    EXPECT_EQ(inspect(again).state, PortState::closed) << text(inspect(again).differences);
    ok(gate->delete_port(p));
  }
}

// Up to Linux 6.15 its chains follow it, from then on they wait for one of the old name.
TEST_F(GateTest, PortWhoseLinkIsRenamedCanBeClosedAndDeleted) {
  PortSpec p = port();
  make_released(p);
  host->sh("ip link set " + p.name.str() + " down; ip link set " + p.name.str() +
           " name stolen; ip link set stolen up");
  const PolicySpec pol = policy();
  EXPECT_EQ(inspect(p, &pol).state, PortState::inconsistent);
  ok(gate->close_port(p));
  const std::string rules = host->must({"nft", "list", "ruleset"});
  EXPECT_EQ(rules.find("172.30.0.11"), std::string::npos) << rules;
  ok(gate->delete_port(p));
}

}  // namespace
}  // namespace agentgate::netdriver
