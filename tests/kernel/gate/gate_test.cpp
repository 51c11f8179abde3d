// SPDX-License-Identifier: GPL-2.0-or-later
//
// The gate on the real kernel: what it makes, seen with ip, bridge and nft; what it reads back.
#include "netdriver/gate_kernel.h"

#include <gtest/gtest.h>

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
    return result ? *result : std::vector<InterfaceName>{};
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

// Without `persist` the tables go with their owner, and nothing says any more that the port was
// as meant.
TEST_F(GateTest, RestoreClosesWhatWentWithItsOwner) {
  reopen(Ownership::owner);
  restore({});
  PortSpec p = port();
  make_released(p);
  GateSpec spec;
  spec.networks[network().bridge] = network();
  spec.ports[p.name] = p;
  spec.policies["web"] = policy();
  reopen(Ownership::owner);
  EXPECT_EQ(restore(spec), std::vector<InterfaceName>{p.name});
  p.policy.reset();
  EXPECT_EQ(inspect(p).state, PortState::closed) << text(inspect(p).differences);
}

TEST_F(GateTest, RestoreRemovesStrangersOfOurs) {
  ok(gate->create_network(network()));
  ok(gate->create_port(port()));
  restore({});
  EXPECT_EQ(host->must({"nft", "list", "ruleset"}).find("agp000"), std::string::npos);
  EXPECT_EQ(host->exec({"ip", "link", "show", "agp0000000001"}).status, 1);
  EXPECT_EQ(host->exec({"ip", "link", "show", "agn0123456789"}).status, 1);
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
