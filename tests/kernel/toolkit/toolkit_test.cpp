// SPDX-License-Identifier: GPL-2.0-or-later
//
// The witness itself: on a bridge without any rule it must see what a container can do, else a
// count of zero behind the gate would mean nothing.
//
// The neighbour and the outside have no addresses and stay silent, so that whatever is seen comes
// from the container or from the host's answer to it.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>

#include "tests/support/netns.h"
#include "tests/support/sniffer.h"

namespace agentgate::test {
namespace {

using namespace std::chrono_literals;

std::string text(const MacAddress& mac) {
  std::string out;
  for (const unsigned byte : mac.bytes()) {
    static constexpr std::string_view digits = "0123456789abcdef";
    if (!out.empty()) out += ':';
    out += digits[byte >> 4U];
    out += digits[byte & 15U];
  }
  return out;
}

constexpr std::uint64_t kRun = 0x1122334455667788;

class OpenBridge : public KernelTest {
 protected:
  void SetUp() override {
    KernelTest::SetUp();
    if (IsSkipped()) return;
    host = std::make_unique<NetNamespace>();
    container = std::make_unique<NetNamespace>();
    neighbour = std::make_unique<NetNamespace>();
    uplink = std::make_unique<NetNamespace>();
    // br_netfilter, where it is there, drops malformed IP on its own account.
    host->sh(
        "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1"
        " net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0"
        " net.ipv4.conf.all.accept_source_route=0;"
        "if [ -d /proc/sys/net/bridge ]; then sysctl -qw net.bridge.bridge-nf-call-iptables=0"
        " net.bridge.bridge-nf-call-ip6tables=0 net.bridge.bridge-nf-call-arptables=0; fi");
    for (const auto* quiet : {container.get(), neighbour.get(), uplink.get()}) {
      quiet->sh("sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1");
    }
    make_bridge({*host, "br0", text(who.gateway.mac), {"192.0.2.1/24", "2001:db8:2::1/64"}});
    // Without snooping every group reaches every port: the widest reach there is.
    host->must({"ip", "link", "set", "br0", "type", "bridge", "mcast_snooping", "0"});
    make_veth({*host, "port1", "", {}}, {*container, "eth0", text(who.own.mac), {}});
    make_veth({*host, "port2", "", {}}, {*neighbour, "eth0", text(who.neighbour.mac), {}});
    make_veth({*host, "up0", "", {"198.51.100.1/24", "2001:db8:51::1/64"}},
              {*uplink, "eth0", text(who.outside.mac), {}});
    enslave(*host, "br0", "port1");
    enslave(*host, "br0", "port2");
    // Frames with the neighbour's MAC as source must not move it to the container's port for the
    // kinds that come after.
    host->must({"bridge", "fdb", "replace", text(who.neighbour.mac), "dev", "port2", "master",
                "static", "sticky"});
    host->sh(
        "ip route add default via 198.51.100.2; ip -6 route add default via 2001:db8:51::2;"
        "ip neigh replace 198.51.100.2 dev up0 lladdr " +
        text(who.outside.mac) + " nud permanent; ip neigh replace 2001:db8:51::2 dev up0 lladdr " +
        text(who.outside.mac) + " nud permanent");
    for (const auto& [station, addresses] :
         {std::pair{who.own, std::pair{"192.0.2.11", "2001:db8:2::11"}},
          std::pair{who.neighbour, std::pair{"192.0.2.12", "2001:db8:2::12"}}}) {
      host->must({"ip", "neigh", "replace", addresses.first, "dev", "br0", "lladdr",
                  text(station.mac), "nud", "permanent"});
      host->must({"ip", "neigh", "replace", addresses.second, "dev", "br0", "lladdr",
                  text(station.mac), "nud", "permanent"});
    }
  }

  [[nodiscard]] static Sniffer::Options options(std::size_t keep = 4096) {
    return {.run = kRun, .who = Identity::example(), .keep = keep};
  }

  // Sends every kind and waits for the last to have come.
  std::map<std::string, int> send_all() const {
    Sender sender(container->fd(), "eth0");
    std::map<std::string, int> errors;
    for (const auto& kind : catalogue()) {
      const int error = sender.send(kind, who, kRun);
      if (error != 0) errors[kind.name] = error;
    }
    std::this_thread::sleep_for(200ms);
    return errors;
  }

  const Identity who = Identity::example();
  std::unique_ptr<NetNamespace> host, container, neighbour, uplink;
};

TEST_F(OpenBridge, EveryKindArrivesWhereTheCatalogueSays) {
  Sniffer bridge(host->fd(), "br0", options());
  Sniffer at_neighbour(neighbour->fd(), "eth0", options());
  Sniffer up(host->fd(), "up0", options());
  for (const auto& [name, error] : send_all()) {
    // A veth may say that the other end refused the frame.
    EXPECT_EQ(error, ENOBUFS) << name;
    EXPECT_TRUE(find_kind(name)->open_bridge.none()) << name;
  }
  bridge.stop();
  at_neighbour.stop();
  up.stop();
  const auto on_bridge = bridge.counts().kinds;
  const auto on_neighbour = at_neighbour.counts().kinds;
  const auto on_uplink = up.counts().kinds;
  int arriving = 0;
  for (const auto& kind : catalogue()) {
    const auto incoming = [&](const auto& kinds) {
      const auto found = kinds.find(kind.number);
      return found != kinds.end() && found->second.incoming > 0;
    };
    Reach seen;
    seen.bridge = incoming(on_bridge);
    seen.neighbour = incoming(on_neighbour);
    seen.uplink = on_uplink.contains(kind.number) && on_uplink.at(kind.number).outgoing > 0;
    EXPECT_EQ(seen.to_string(), kind.open_bridge.to_string()) << kind.name;
    if (!seen.none()) ++arriving;
  }
  EXPECT_GE(arriving, 45);
  EXPECT_EQ(bridge.counts().drops, 0U);
  RecordProperty("kinds", static_cast<int>(catalogue().size()));
  RecordProperty("arriving", arriving);
}

TEST_F(OpenBridge, FramesArriveByteForByte) {
  Sniffer at_neighbour(neighbour->fd(), "eth0", options());
  Sniffer bridge(host->fd(), "br0", options());
  send_all();
  at_neighbour.stop();
  bridge.stop();
  std::set<Bytes> sent;
  for (const auto& kind : catalogue()) {
    for (auto& frame : kind.build(who, kRun)) sent.insert(std::move(frame));
  }
  std::size_t compared = 0;
  for (const auto* tap : {&at_neighbour, &bridge}) {
    for (const auto& seen : tap->frames()) {
      if (seen.outgoing) continue;
      const auto* kind = find_kind(seen.kind.value());
      // What the host routes back to the bridge has other addresses and a smaller TTL.
      if (kind->name.starts_with("neighbour-routed") || kind->name == "spoof-ip-icmp-reflect")
        continue;
      EXPECT_TRUE(sent.contains(seen.bytes)) << kind->name;
      ++compared;
    }
  }
  EXPECT_GE(compared, 150U);
}

TEST_F(OpenBridge, TagsAreSeenAlthoughTheKernelTakesThemOff) {
  Sniffer bridge(host->fd(), "br0", options());
  Sender sender(container->fd(), "eth0");
  for (const char* name : {"vlan-0", "vlan-5", "vlan-qinq"}) {
    ASSERT_EQ(sender.send(*find_kind(name), who, kRun), 0);
    ASSERT_TRUE(bridge.wait_for(find_kind(name)->number, 2s)) << name;
  }
  bridge.stop();
  std::map<std::string, unsigned> tags;
  for (const auto& seen : bridge.frames()) {
    if (seen.vlan) tags[find_kind(*seen.kind)->name] = *seen.vlan;
  }
  EXPECT_EQ(tags,
            (std::map<std::string, unsigned>{{"vlan-0", 0}, {"vlan-5", 5}, {"vlan-qinq", 5}}));
}

TEST_F(OpenBridge, AClosedWayGivesZero) {
  host->must({"bridge", "link", "set", "dev", "port1", "isolated", "on"});
  host->must({"bridge", "link", "set", "dev", "port2", "isolated", "on"});
  {
    Sniffer at_neighbour(neighbour->fd(), "eth0", options());
    Sender sender(container->fd(), "eth0");
    ASSERT_EQ(sender.send(*find_kind("neighbour-direct-udp"), who, kRun), 0);
    ASSERT_EQ(sender.send(*find_kind("arp-request-neighbour"), who, kRun), 0);
    std::this_thread::sleep_for(100ms);
    at_neighbour.stop();
    EXPECT_EQ(at_neighbour.counts().marked(), Tally{});
  }
  host->must({"ip", "link", "set", "port1", "down"});
  Sniffer everywhere(host->fd(), "", options());
  send_all();
  everywhere.stop();
  EXPECT_EQ(everywhere.counts().marked(), Tally{});
}

TEST_F(OpenBridge, OtherRunsAreNotCounted) {
  Sniffer bridge(host->fd(), "br0", options());
  Sender sender(container->fd(), "eth0");
  ASSERT_EQ(sender.send(*find_kind("own-gateway-udp"), who, kRun + 1), 0);
  ASSERT_EQ(sender.send(*find_kind("own-gateway-icmp"), who, kRun), 0);
  ASSERT_TRUE(bridge.wait_for(find_kind("own-gateway-icmp")->number, 2s));
  bridge.stop();
  EXPECT_EQ(bridge.counts().kinds.size(), 1U);
  EXPECT_GE(bridge.counts().all.incoming, 2U);
}

TEST_F(OpenBridge, OneSnifferSeesEveryLinkAndTellsDirections) {
  Sniffer everywhere(host->fd(), "", options());
  Sender sender(container->fd(), "eth0");
  const auto* kind = find_kind("own-outside-udp");
  ASSERT_EQ(sender.send(*kind, who, kRun), 0);
  std::this_thread::sleep_for(100ms);
  everywhere.stop();
  const auto links = everywhere.counts_by_link();
  ASSERT_TRUE(links.contains("port1") && links.contains("br0") && links.contains("up0"));
  EXPECT_EQ(links.at("port1").kinds.at(kind->number), (Tally{1, 0}));
  EXPECT_EQ(links.at("br0").kinds.at(kind->number), (Tally{1, 0}));
  EXPECT_EQ(links.at("up0").kinds.at(kind->number), (Tally{0, 1}));
  EXPECT_TRUE(!links.contains("port2") || links.at("port2").kinds.empty());
}

TEST_F(OpenBridge, TheHostsStackReceives) {
  HostListener listener(host->fd(), kRun);
  send_all();
  listener.stop();
  const auto counts = listener.counts();
  for (const char* name :
       {"own-gateway-udp", "own-gateway-tcp-syn", "own-gateway-icmp", "own-gateway6-udp",
        "own-gateway6-tcp-syn", "own-gateway6-icmp", "broadcast-limited-udp"}) {
    EXPECT_TRUE(counts.kinds.contains(find_kind(name)->number)) << name;
  }
  EXPECT_FALSE(counts.kinds.contains(find_kind("own-outside-udp")->number));
  EXPECT_GE(counts.all.at("datagram4"), 1U);
  EXPECT_GE(counts.all.at("datagram6"), 1U);
  EXPECT_GE(counts.all.at("tcp4"), 1U);
}

TEST_F(OpenBridge, ListenerCountsConnections) {
  HostListener listener(host->fd(), kRun, 7070);
  EXPECT_EQ(host->exec({"/bin/bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/7070"}).status, 0);
  for (int i = 0; i < 1000 && !listener.counts().all.contains("accepted4"); ++i) {
    std::this_thread::sleep_for(1ms);
  }
  listener.stop();
  EXPECT_EQ(listener.counts().all["accepted4"], 1U);
  EXPECT_EQ(host->exec({"/bin/bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/7070"}).status, 1);
}

TEST_F(OpenBridge, BlasterCountsAgreeWithTheTap) {
  Sniffer bridge(host->fd(), "br0", options(16));
  auto blaster = std::make_unique<Blaster>(container->fd(), "eth0",
                                           find_kind("own-outside-udp")->build(who, kRun));
  ASSERT_TRUE(blaster->wait_sent(20000, 10s));
  const auto sent = blaster->stop();
  std::this_thread::sleep_for(200ms);
  bridge.stop();
  const auto seen = bridge.counts();
  // The receive backlog of a CPU may drop some; nothing is seen that was not sent.
  EXPECT_LE(seen.marked().incoming + seen.drops, sent.sent);
  EXPECT_GE(seen.packets, 10000U);
  EXPECT_EQ(seen.all.incoming + seen.all.outgoing, seen.packets - seen.drops);
  EXPECT_EQ(bridge.frames().size(), 16U);
  EXPECT_EQ(sent.opened, 1U);
}

TEST_F(OpenBridge, BlasterFollowsItsLink) {
  Blaster blaster(container->fd(), "eth0", find_kind("own-outside-udp")->build(who, kRun));
  ASSERT_TRUE(blaster.wait_sent(100, 5s));
  const auto goes_on = [&] {
    const auto at = blaster.counts().sent;
    return blaster.wait_sent(at + 1000, 5s);
  };
  for (int i = 0; i < 5; ++i) {
    container->must({"ip", "link", "set", "eth0", "down"});
    EXPECT_TRUE(goes_on());
  }
  EXPECT_GE(blaster.counts().ups, 5U);
  host->must({"ip", "link", "del", "port1"});
  const auto at = blaster.counts().sent;
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(blaster.counts().sent, at);
  make_veth({*host, "port1", "", {}}, {*container, "eth0", text(who.own.mac), {}});
  enslave(*host, "br0", "port1");
  EXPECT_TRUE(goes_on());
  EXPECT_EQ(blaster.stop().opened, 2U);
}

TEST_F(OpenBridge, ErrorsAreToldApart) {
  EXPECT_THROW(Sniffer(host->fd(), "nosuch", options()), std::system_error);
  EXPECT_THROW(Sender(container->fd(), "nosuch"), std::system_error);
  EXPECT_THROW((void)open_namespace("/nonexistent"), std::system_error);
  Sender sender(container->fd(), "eth0");
  EXPECT_EQ(sender.send(Bytes(13, 0)), EINVAL);  // shorter than a header: the kernel refuses it
}

// The command, as scripts use it: started in the background, told to end by its pid.
class Command {
 public:
  Command(const NetNamespace& where, const std::string& arguments) : where_(where) {
    char name[] = "/tmp/agprobe-XXXXXX";
    if (::mkdtemp(name) == nullptr) throw std::runtime_error("mkdtemp");
    folder_ = name;
    where_.sh(AGPROBE " " + arguments + " --ready-file " + folder_ + "/ready >" + folder_ +
              "/out 2>" + folder_ + "/err & echo $! >" + folder_ + "/pid");
    for (int i = 0; i < 5000 && ::access((folder_ + "/ready").c_str(), F_OK) != 0; ++i) {
      std::this_thread::sleep_for(1ms);
    }
  }
  // A test that failed before finish() must not leave a sender at full rate behind.
  ~Command() {
    where_.exec(
        {"/bin/sh", "-c", "[ ! -e " + folder_ + "/pid ] || kill -TERM $(cat " + folder_ + "/pid)"});
    where_.exec({"/bin/rm", "-r", folder_});
  }
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;

  nlohmann::json finish() const {
    return nlohmann::json::parse(where_.sh(
        "kill -TERM $(cat " + folder_ + "/pid); while kill -0 $(cat " + folder_ +
        "/pid) 2>/dev/null; do sleep 0.01; done; rm " + folder_ + "/pid; cat " + folder_ + "/out"));
  }

 private:
  const NetNamespace& where_;
  std::string folder_;
};

class AgprobeTest : public OpenBridge {
 protected:
  [[nodiscard]] std::string identity() const {
    return " --own-mac " + text(who.own.mac) +
           " --own-ip4 192.0.2.11 --own-ip6 2001:db8:2::11 --gateway-mac " + text(who.gateway.mac) +
           " --gateway-ip4 192.0.2.1 --gateway-ip6 2001:db8:2::1 --neighbour-mac " +
           text(who.neighbour.mac) +
           " --neighbour-ip4 192.0.2.12 --neighbour-ip6 2001:db8:2::12"
           " --outside-ip4 198.51.100.2 --outside-ip6 2001:db8:51::2";
  }
};

TEST_F(AgprobeTest, WatchSeesWhatFramesSends) {
  const Command watch(*host,
                      "watch --run-id 5 --dev br0,up0," + neighbour->path() + "@eth0" + identity());
  const auto sent = nlohmann::json::parse(
      container->sh(AGPROBE " frames --run-id 5 --repeat 2 --dev eth0 --kinds all" + identity()));
  std::this_thread::sleep_for(200ms);
  const auto seen = watch.finish();
  EXPECT_EQ(sent["kinds"].size(), catalogue().size());
  EXPECT_EQ(sent["kinds"]["own-gateway-udp"]["sent"], 2);
  EXPECT_EQ(seen["run_id"], 5);
  for (const auto& kind : catalogue()) {
    const auto count = [&](const std::string& device, const char* direction) {
      return seen["devices"][device]["kinds"]
          .value(kind.name, nlohmann::json::object())
          .value(direction, 0);
    };
    EXPECT_EQ(count("br0", "incoming") > 0, kind.open_bridge.bridge) << kind.name;
    EXPECT_EQ(count(neighbour->path() + "@eth0", "incoming") > 0, kind.open_bridge.neighbour)
        << kind.name;
    EXPECT_EQ(count("up0", "outgoing") > 0, kind.open_bridge.uplink) << kind.name;
  }
}

TEST_F(AgprobeTest, BlastsListensAndSniffs) {
  const Command listen(*host, "listen --run-id 6");
  const Command blast(*container,
                      "blast --run-id 6 --kinds own-gateway-udp --dev eth0" + identity());
  const auto seen = nlohmann::json::parse(
      host->sh(AGPROBE " sniff --run-id 6 --dev '*' --seconds 0.3" + identity()));
  const auto sent = blast.finish();
  const auto received = listen.finish();
  EXPECT_GT(sent["sent"], 1000);
  EXPECT_GT(seen["devices"]["*"]["links"]["br0"]["kinds"]["own-gateway-udp"]["incoming"], 100);
  EXPECT_GT(received["all"]["udp4"], 100);
  EXPECT_GT(received["kinds"]["own-gateway-udp"], 100);
}

TEST_F(AgprobeTest, SaysWhatIsWrong) {
  const auto status = [&](const std::string& arguments) {
    const Output output = host->exec({"/bin/sh", "-c", AGPROBE " " + arguments});
    EXPECT_FALSE(output.err.empty()) << arguments;
    return output.status;
  };
  EXPECT_EQ(status("frames"), 64);
  EXPECT_EQ(status("frames --run-id 1 --dev br0 --kinds nosuch"), 64);
  EXPECT_EQ(status("frames --run-id 1 --dev br0 --own-mac 02:00"), 64);
  EXPECT_EQ(status("frames --run-id 1 --dev br0 --own-ip4 1.2.3"), 64);
  EXPECT_EQ(status("frames --run-id 1 --dev nosuch"), 1);
  EXPECT_EQ(status("sniff --run-id 1 --dev nosuch"), 1);
  EXPECT_EQ(status("sniff --run-id 1 --dev br0 --netns /nonexistent"), 1);
  const auto list = nlohmann::json::parse(host->sh(AGPROBE " list"));
  EXPECT_EQ(list.size(), catalogue().size());
  EXPECT_EQ(list[0]["open_bridge"], catalogue()[0].open_bridge.to_string());
}

TEST(NetNamespaceTest, RunsInsideAndHandsBack) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root";
  const NetNamespace space;
  space.must({"ip", "link", "add", "only0", "type", "bridge"});
  const auto links = space.json({"ip", "-j", "link"});
  EXPECT_EQ(links.size(), 2U) << links.dump();
  EXPECT_EQ(space.run([] { return 42; }), 42);
  EXPECT_THROW(space.run([] { throw std::runtime_error("inside"); }), std::runtime_error);
  const Output output = space.exec({"/bin/sh", "-c", "echo out; echo err >&2; exit 3"});
  EXPECT_EQ(output.status, 3);
  EXPECT_EQ(output.out, "out\n");
  EXPECT_EQ(output.err, "err\n");
  EXPECT_EQ(space.exec({"/bin/sh", "-c", "kill -9 $$"}).status, 128 + 9);
  EXPECT_EQ(space.exec({"/nonexistent"}).status, 127);
}

}  // namespace
}  // namespace agentgate::test
