// SPDX-License-Identifier: GPL-2.0-or-later
//
// What others change of ours, one thing at a time with ip, bridge, tc and nft, is noticed and put
// back: for a closed port and for a released one. That no packet gets out meanwhile is what the
// leak tests count; here it is what is there afterwards, seen with the same tools.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>

#include "plugin/host/host.h"
#include "tests/support/changes.h"
#include "tests/support/netns.h"

namespace agentgate::host {
namespace {

using namespace std::chrono_literals;
using netdriver::Ownership;
using netdriver::PortState;
using test::Change;
using test::kChanges;
using test::kControls;
using test::NetNamespace;

const std::string kNetwork(64, 'a');
const std::string kClosed = std::string(63, 'b') + "1";
const std::string kReleased = "c" + std::string(63, 'd');

class GuardTest : public test::KernelTest {
 protected:
  void SetUp() override {
    KernelTest::SetUp();
    if (IsSkipped()) return;
    char pattern[] = "/tmp/agentgate-guard-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern), nullptr);
    directory = pattern;
    space = std::make_unique<NetNamespace>();
    // Another bridge of the host. An address of its own would be one of the host's, and in a set.
    space->sh("ip link add br9 type bridge; ip link set br9 addrgenmode none; ip link set br9 up");
  }
  void TearDown() override {
    host.reset();
    std::error_code ignored;
    std::filesystem::remove_all(directory, ignored);
  }

  void start_host(Ownership ownership) {
    host.reset();
    Options options;
    options.state_directory = directory;
    options.manage_firewall = false;
    options.orphan_age = std::chrono::hours(1);
    options.guard = guard;
    options.ownership = ownership;
    options.on_repair = [this](const Repair& repair) {
      const std::lock_guard lock(mutex);
      repairs.push_back(repair);
    };
    space->run([&] { host = Host::start(std::move(options)); });
  }
  void start(Ownership ownership) {
    start_host(ownership);
    NetworkRecord network;
    network.id = NetworkId::parse(kNetwork).value();
    network.gateway4 = Ipv4InterfaceAddress::parse("172.30.0.1/24").value();
    network.gateway6 = Ipv6InterfaceAddress::parse("2001:db8:30::1/64").value();
    network.policy = "web";
    ok(host->create_network(network));
    add(kClosed, "11");
    add(kReleased, "12");
    const EndpointId id = EndpointId::parse(kReleased).value();
    ok(host->prepare(id));
    PolicyRecord policy;
    policy.spec.name = "web";
    const auto to = Ipv4Address::parse("192.0.2.80").value();
    policy.spec.v4.allow.push_back({{to, to}, Protocol::tcp, {443, 443}});
    policy.spec = netdriver::normalise(policy.spec);
    Release release;
    release.policy = "web";
    release.container_name = "a1";
    release.process = {1, 1};
    ok(host->release(id, release, policy));
    settle();
  }
  void add(const std::string& id, const std::string& last) {
    EndpointRecord endpoint;
    endpoint.id = EndpointId::parse(id).value();
    endpoint.network = NetworkId::parse(kNetwork).value();
    endpoint.address4 = Ipv4Address::parse("172.30.0." + last).value();
    endpoint.address6 = Ipv6Address::parse("2001:db8:30::" + last).value();
    endpoint.mac = MacAddress::parse("02:00:00:00:01:" + last).value();
    ok(host->create_endpoint(endpoint));
    auto sandbox = std::make_unique<NetNamespace>();
    space->must({"ip", "link", "set", peer_name(endpoint.id).str(), "netns", sandbox->path(),
                 "name", "eth0"});
    sandbox->must({"ip", "link", "set", "eth0", "up"});
    ok(host->join(endpoint.id, "/proc/self/ns/net").map([](const Port&) {}));
    sandboxes.push_back(std::move(sandbox));
  }
  static void ok(const Status& status) { ASSERT_TRUE(status) << status.error().to_string(); }

  static std::string state(const Result<netdriver::PortReport>& report) {
    if (!report) return report.error().to_string();
    std::string out = report->state == PortState::released ? "released"
                      : report->state == PortState::closed ? "closed"
                                                           : "inconsistent";
    for (const auto& one : report->differences) out += "; " + one.where + " " + one.found;
    return out;
  }
  std::string states() {
    const auto network = host->inspect_network(NetworkId::parse(kNetwork).value());
    std::string out = state(host->inspect(EndpointId::parse(kClosed).value())) + ", " +
                      state(host->inspect(EndpointId::parse(kReleased).value()));
    if (!network) return out + ", " + network.error().to_string();
    for (const auto& one : *network) out += "; " + one.where + " " + one.found;
    for (const std::string& id : {kClosed, kReleased}) {
      const auto foreign = host->foreign_entries(EndpointId::parse(id).value());
      if (!foreign) return out + ", " + foreign.error().to_string();
      for (const auto& one : *foreign) out += "; " + one.where + " " + one.found;
    }
    return out;
  }
  // What nft lists, whatever the order it was made in.
  std::multiset<std::string> ruleset() {
    std::multiset<std::string> out;
    std::istringstream lines(space->must({"nft", "-s", "list", "ruleset"}));
    for (std::string line; std::getline(lines, line);) out.insert(line);
    return out;
  }
  // Until the guard has nothing more to look at.
  void settle() {
    for (std::uint64_t before = ~0ULL;;) {
      const std::uint64_t now = host->snapshot().guard.looks;
      if (now == before) return;
      before = now;
      std::this_thread::sleep_for(50ms);
    }
  }
  std::size_t count() {
    const std::lock_guard lock(mutex);
    return repairs.size();
  }

  void apply(const Change& change) {
    const std::string released = port_name(EndpointId::parse(kReleased).value()).str();
    const std::string closed = port_name(EndpointId::parse(kClosed).value()).str();
    const std::string bridge = bridge_name(NetworkId::parse(kNetwork).value()).str();
    space->sh("port=" + released + " other=" + closed + " bridge=" + bridge +
              " mac=02:00:00:00:01:12 other_mac=02:00:00:00:01:11 ip4=172.30.0.12 "
              "ip6=2001:db8:30::12 gateway4=172.30.0.1/24 gateway6=2001:db8:30::1/64\n" +
              change.script);
  }
  void is_put_back(const Change& change) {
    SCOPED_TRACE(change.name);
    const std::size_t before = count();
    const auto rules = ruleset();
    const auto start = std::chrono::steady_clock::now();
    apply(change);
    while (count() == before && std::chrono::steady_clock::now() - start < 5s) {
      std::this_thread::sleep_for(1ms);
    }
    ASSERT_GT(count(), before) << "not noticed; " << states();
    settle();
    EXPECT_EQ(states(), "closed, released");
    EXPECT_TRUE(ruleset() == rules) << space->must({"nft", "-s", "list", "ruleset"});
    const std::lock_guard lock(mutex);
    for (std::size_t i = before; i < repairs.size(); ++i) {
      EXPECT_FALSE(repairs[i].found.empty());
      EXPECT_TRUE(repairs[i].left.empty())
          << repairs[i].left.front().where << " " << repairs[i].left.front().found;
      EXPECT_TRUE(repairs[i].closed.empty());
      std::printf("%-24s noticed and put back in %.1f ms: %s\n", change.name,
                  repairs[i].milliseconds, repairs[i].found.front().where.c_str());
    }
  }

  bool guard = true;  // whether a Host repairs
  std::filesystem::path directory;
  std::unique_ptr<NetNamespace> space;
  std::vector<std::unique_ptr<NetNamespace>> sandboxes;
  std::mutex mutex;
  std::vector<Repair> repairs;
  std::unique_ptr<Host> host;  // last: its thread uses the others
};

TEST_F(GuardTest, WhatOthersChangeOfALinkIsPutBack) {
  start(Ownership::best);
  EXPECT_EQ(states(), "closed, released");
  for (const Change& change : kChanges) {
    if (!change.tables) is_put_back(change);
    if (HasFatalFailure()) return;
  }
  // Not every kernel has it.
  if (space->exec({"ip", "link", "set", "br9", "type", "bridge", "vlan_filtering", "1"}).status ==
      0) {
    is_put_back({"bridge_vlan_filtering", "ip link set $bridge type bridge vlan_filtering 1"});
  }
  for (const Change& change : kControls) {
    is_put_back(change);
    if (HasFatalFailure()) return;
  }
}

TEST_F(GuardTest, WhatOthersChangeOfTheTablesIsPutBack) {
  start(Ownership::none);
  EXPECT_EQ(states(), "closed, released");
  for (const Change& change : kChanges) {
    if (change.tables) is_put_back(change);
    if (HasFatalFailure()) return;
  }
}

TEST_F(GuardTest, OwnedTablesAreNotOthersToChange) {
  start(Ownership::owner);
  const auto rules = ruleset();
  for (const Change& change : kChanges) {
    if (!change.tables) continue;
    const std::string script = change.script;
    const std::string port = port_name(EndpointId::parse(kReleased).value()).str();
    const auto out = space->exec({"/bin/sh", "-c", "port=" + port + " ip4=172.30.0.12\n" + script});
    if (script != "nft flush ruleset") {
      EXPECT_NE(out.status, 0) << change.name;
    }
    EXPECT_TRUE(ruleset() == rules) << change.name;
  }
  EXPECT_EQ(count(), 0U);
}

// What `agentgate check` is made of tells the truth at once, not only what a repair left.
TEST_F(GuardTest, EveryChangeIsSeenBeforeARepair) {
  guard = false;
  std::vector<Change> changes(std::begin(kChanges), std::end(kChanges));
  changes.insert(changes.end(), std::begin(kControls), std::end(kControls));
  for (const Change& change : changes) {
    SCOPED_TRACE(change.name);
    start(change.tables ? Ownership::none : Ownership::best);
    ASSERT_EQ(states(), "closed, released");
    apply(change);
    const std::string seen = states();
    EXPECT_TRUE(seen.find("inconsistent") != std::string::npos ||
                seen.find(';') != std::string::npos)
        << seen;
    EXPECT_EQ(count(), 0U);
    host.reset();
    TearDown();
    SetUp();
    sandboxes.clear();
  }
}

// Names of links hold ten digits of an id. Two ids that share them never share a port or a bridge:
// the second is refused, and the first is as it was.
TEST_F(GuardTest, CollidingNamesAreRefused) {
  start(Ownership::best);
  const auto rules = ruleset();
  std::string id = kReleased;
  id.back() = id.back() == '0' ? '1' : '0';
  EndpointRecord endpoint;
  endpoint.id = EndpointId::parse(id).value();
  ASSERT_EQ(port_name(endpoint.id), port_name(EndpointId::parse(kReleased).value()));
  endpoint.network = NetworkId::parse(kNetwork).value();
  endpoint.address4 = Ipv4Address::parse("172.30.0.99").value();
  endpoint.mac = MacAddress::parse("02:00:00:00:01:99").value();
  const Status again = host->create_endpoint(endpoint);
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error().code, EEXIST);
  EXPECT_NE(again.error().text.find("try again"), std::string::npos) << again.error().text;
  // The refused one is nobody: taking it back takes nothing from the first.
  ok(host->leave(endpoint.id));
  ok(host->delete_endpoint(endpoint.id));

  id = kNetwork;
  id.back() = id.back() == '0' ? '1' : '0';
  NetworkRecord network;
  network.id = NetworkId::parse(id).value();
  ASSERT_EQ(bridge_name(network.id), bridge_name(NetworkId::parse(kNetwork).value()));
  network.gateway4 = Ipv4InterfaceAddress::parse("172.31.0.1/24").value();
  network.policy = "web";
  const Status other = host->create_network(network);
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().code, EEXIST);
  ok(host->delete_network(network.id));
  settle();
  EXPECT_EQ(states(), "closed, released");
  EXPECT_TRUE(ruleset() == rules);

  // The first gone, its name is free, and what bears it next is closed.
  ok(host->delete_endpoint(EndpointId::parse(kReleased).value()));
  endpoint.address4 = Ipv4Address::parse("172.30.0.12").value();
  endpoint.address6 = Ipv6Address::parse("2001:db8:30::12").value();
  endpoint.mac = MacAddress::parse("02:00:00:00:01:12").value();
  ok(host->create_endpoint(endpoint));
  EXPECT_EQ(state(host->inspect(endpoint.id)), "closed");
  EXPECT_EQ(space->must({"bridge", "fdb", "show", "dev", port_name(endpoint.id).str()})
                .find("02:00:00:00:01:12"),
            std::string::npos);
}

// A swarm's network comes back under its id, and its subnet is each host's own matter: after a
// crash of the engine, which nobody is told about, it may be another. Who is on it is never left
// behind.
TEST_F(GuardTest, ANetworkOfTheSameIdReplacesOneThatNobodyIsOn) {
  start(Ownership::best);
  NetworkRecord network;
  network.id = NetworkId::parse(kNetwork).value();
  network.gateway4 = Ipv4InterfaceAddress::parse("172.31.0.1/24").value();
  network.policy = "web";
  const Status early = host->create_network(network);
  ASSERT_FALSE(early);
  EXPECT_EQ(early.error().code, EEXIST);
  EXPECT_NE(early.error().text.find("remove what is on it"), std::string::npos);
  settle();
  EXPECT_EQ(states(), "closed, released");

  ok(host->delete_endpoint(EndpointId::parse(kReleased).value()));
  EXPECT_FALSE(host->create_network(network)) << "there is still one on it";
  // The sandbox of the other goes without a word, as when the engine is killed.
  const std::string sandbox = directory / "sandbox";
  std::ofstream(sandbox).close();
  ok(host->join(EndpointId::parse(kClosed).value(), sandbox).map([](const Port&) {}));
  EXPECT_FALSE(host->create_network(network));
  std::filesystem::remove(sandbox);
  ok(host->create_network(network));
  EXPECT_FALSE(host->find(EndpointId::parse(kClosed).value()));
  const std::string bridge = bridge_name(network.id).str();
  const std::string addresses = space->must({"ip", "addr", "show", bridge});
  EXPECT_NE(addresses.find("172.31.0.1/24"), std::string::npos) << addresses;
  EXPECT_EQ(addresses.find("172.30.0.1"), std::string::npos) << addresses;
  EXPECT_EQ(space->must({"ip", "link"}).find("agp"), std::string::npos);
  ok(host->create_network(network));  // and again, as it is
}

// Its own work is not taken for that of others.
TEST_F(GuardTest, OwnChangesAreNoRepair) {
  start(Ownership::best);
  const EndpointId id = EndpointId::parse(kReleased).value();
  for (int i = 0; i < 20; ++i) {
    ok(host->clean(id));
    ok(host->prepare(id));
    ok(host->close(id));
  }
  ok(host->delete_endpoint(EndpointId::parse(kClosed).value()));
  settle();
  EXPECT_EQ(count(), 0U);
  EXPECT_EQ(host->snapshot().guard.lost, 1U);  // the look after the start
}

// The next daemon has to know the links that it did not make.
TEST_F(GuardTest, AfterARestartItGuardsWhatItFound) {
  start(Ownership::best);
  start_host(Ownership::best);
  settle();
  EXPECT_EQ(states(), "closed, released");
  EXPECT_TRUE(host->snapshot().features.bridge_locked);  // seen on what it found
  for (const Change& change : kControls) {
    is_put_back(change);
    if (HasFatalFailure()) return;
  }
}

// As before Linux 6.9: the tables go with the daemon, and what it had released is released again.
TEST_F(GuardTest, WithoutPersistAReleaseOutlivesTheDaemon) {
  start(Ownership::owner);
  const auto rules = ruleset();
  host.reset();
  EXPECT_EQ(space->must({"nft", "list", "tables"}).find("agentgate"), std::string::npos);
  start_host(Ownership::owner);
  settle();
  EXPECT_EQ(states(), "closed, released");
  EXPECT_TRUE(ruleset() == rules);
  // Unless somebody was at its controls meanwhile.
  host.reset();
  apply({"", "bridge fdb del $mac dev $port master"});
  start_host(Ownership::owner);
  settle();
  EXPECT_EQ(states(), "closed, closed");
}

TEST_F(GuardTest, TheTokenIsPutBack) {
  start(Ownership::none);
  is_put_back({"token", "tc qdisc del dev $bridge clsact"});
  is_put_back({"token_one_way", "tc filter del dev $bridge ingress"});
}

TEST_F(GuardTest, APortWhoseLinkIsTakenAwayIsForgotten) {
  start(Ownership::best);
  apply({"", "ip link del $port"});
  for (int i = 0; i < 500 && count() == 0; ++i) std::this_thread::sleep_for(10ms);
  ASSERT_EQ(count(), 1U);
  EXPECT_EQ(repairs[0].gone.size(), 1U);
  EXPECT_FALSE(host->find(EndpointId::parse(kReleased).value()));
  const std::string rules = space->must({"nft", "list", "ruleset"});
  EXPECT_EQ(rules.find("172.30.0.12"), std::string::npos);
  EXPECT_EQ(rules.find("web"), std::string::npos);
}

// A limit of the process for as long as it lives.
class Limit {
 public:
  Limit(__rlimit_resource resource, rlim_t value) : resource_(resource) {
    ::signal(SIGXFSZ, SIG_IGN);  // the write shall fail instead
    ::getrlimit(resource_, &before_);
    const rlimit now{value, before_.rlim_max};
    ::setrlimit(resource_, &now);
  }
  ~Limit() { ::setrlimit(resource_, &before_); }
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;

 private:
  __rlimit_resource resource_;
  rlimit before_{};
};

// As when the disk is full: nothing can be written, and what is not on disk is not done.
TEST_F(GuardTest, AFullDiskOpensNothingAndLosesNothing) {
  start(Ownership::best);
  const EndpointId id = EndpointId::parse(kReleased).value();
  Release release;
  release.policy = "web";
  release.container_name = "a1";
  release.process = {1, 1};
  PolicyRecord policy;
  policy.spec.name = "web";
  ok(host->clean(id));
  ok(host->prepare(id));
  EndpointRecord more;
  more.id = EndpointId::parse("e" + std::string(63, 'f')).value();
  more.network = NetworkId::parse(kNetwork).value();
  more.address4 = Ipv4Address::parse("172.30.0.13").value();
  more.mac = MacAddress::parse("02:00:00:00:01:13").value();
  {
    const Limit full(RLIMIT_FSIZE, 0);
    const Status made = host->create_endpoint(more);
    ASSERT_FALSE(made);
    EXPECT_NE(made.error().to_string().find("free space"), std::string::npos)
        << made.error().to_string();
    EXPECT_FALSE(host->release(id, release, policy));
  }
  settle();
  EXPECT_EQ(states(), "closed, closed");
  EXPECT_NE(space->exec({"ip", "link", "show", port_name(more.id).str()}).status, 0);
  ok(host->create_endpoint(more));
  ok(host->release(id, release, policy));
  settle();
  EXPECT_EQ(states(), "closed, released");
  start_host(Ownership::best);
  settle();
  EXPECT_EQ(states(), "closed, released");
}

// A regrouped and renamed port is known by its index.
TEST_F(GuardTest, APortWithoutNameAndGroupIsHadBack) {
  start(Ownership::best);
  is_put_back(
      {"group_and_name",
       "until printf 'link set %s group 5\\nlink set %s down\\nlink set %s name foo\\n' $port "
       "$port $port | ip -b -; do :; done"});
  EXPECT_NE(space->exec({"ip", "link", "show", "foo"}).status, 0);
}

// One network's trouble is not another's; and what cannot be put back is closed.
TEST_F(GuardTest, ABridgeThatCannotBeHadBackShutsItsPortsAlone) {
  start(Ownership::best);
  NetworkRecord other;
  other.id = NetworkId::parse(std::string(64, '9')).value();
  other.gateway4 = Ipv4InterfaceAddress::parse("172.31.0.1/24").value();
  other.policy = "web";
  ok(host->create_network(other));
  EndpointRecord endpoint;
  endpoint.id = EndpointId::parse("8" + std::string(63, '7')).value();
  endpoint.network = other.id;
  endpoint.address4 = Ipv4Address::parse("172.31.0.11").value();
  endpoint.mac = MacAddress::parse("02:00:00:00:02:11").value();
  ok(host->create_endpoint(endpoint));
  ok(host->join(endpoint.id, "/proc/self/ns/net").map([](const Port&) {}));
  settle();
  const std::string bridge = bridge_name(other.id).str();
  // The stranger has to be quicker than the repair between the two commands: it tries until it is.
  space->sh("for i in $(seq 200); do printf 'link del " + bridge + "\\nlink add " + bridge +
            " type veth peer name x0\\n' | ip -b - 2>&- && exit 0; done; exit 1");
  for (int i = 0; i < 500 && host->snapshot().guard.failures == 0; ++i) {
    std::this_thread::sleep_for(10ms);
  }
  EXPECT_GE(host->snapshot().guard.failures, 1U);
  const auto link = space->json({"ip", "-j", "link", "show", port_name(endpoint.id).str()})[0];
  EXPECT_EQ(link["operstate"], "DOWN") << link.dump();
  EXPECT_EQ(state(host->inspect(EndpointId::parse(kReleased).value())), "released");
  // The place is free again: it is had back.
  space->must({"ip", "link", "del", bridge});
  for (int i = 0; i < 300; ++i) {
    if (state(host->inspect(endpoint.id)) == "closed") break;
    std::this_thread::sleep_for(50ms);
  }
  EXPECT_EQ(state(host->inspect(endpoint.id)), "closed");
  EXPECT_EQ(states(), "closed, released");
}

// Before Linux 6.9 only the disk says what was released, and a release that was not finished is
// none.
TEST_F(GuardTest, WithoutPersistAnUnfinishedReleaseIsClosed) {
  start(Ownership::owner);
  host.reset();
  const auto file = directory / "endpoints" / (kReleased + ".json");
  std::ifstream in(file);
  std::string text((std::istreambuf_iterator<char>(in)), {});
  const auto at = text.find("\"committed\": true");
  ASSERT_NE(at, std::string::npos) << text;
  text.replace(at, 17, "\"committed\": false");
  std::ofstream(file) << text;
  start_host(Ownership::owner);
  settle();
  EXPECT_EQ(states(), "closed, closed");
}

// A close that could not be written is not forgotten, whatever the next start has to go by.
TEST_F(GuardTest, ACloseOnAFullDiskStaysClosed) {
  for (const Ownership ownership : {Ownership::best, Ownership::owner}) {
    start(ownership);
    const EndpointId id = EndpointId::parse(kReleased).value();
    {
      const Limit full(RLIMIT_FSIZE, 0);
      EXPECT_FALSE(host->close(id));
      EXPECT_FALSE(host->close(id));
      settle();
      EXPECT_EQ(state(host->inspect(id)), "closed");
      host.reset();
    }
    start_host(ownership);
    settle();
    EXPECT_EQ(states(), "closed, closed");
    host.reset();
    TearDown();
    SetUp();
    sandboxes.clear();
    repairs.clear();
  }
}

// The notices of others do not hide what is ours.
TEST_F(GuardTest, AmongManyNoticesOursAreHeard) {
  start(Ownership::best);
  space->sh(
      "i=0; while [ $i -lt 40 ]; do echo link add d$i type bridge; i=$((i+1)); done | ip -b -;"
      "bridge link set dev " +
      port_name(EndpointId::parse(kReleased).value()).str() + " isolated off");
  for (int i = 0; i < 500 && count() == 0; ++i) std::this_thread::sleep_for(10ms);
  settle();
  EXPECT_EQ(states(), "closed, released");
}

}  // namespace
}  // namespace agentgate::host
