// SPDX-License-Identifier: GPL-2.0-or-later
//
// Every rule of the ruleset by itself. Where two layers hold the same frame, one is left out, so
// that what is seen is the other one's doing; scripts/mutants breaks the rules one at a time and
// shows that some test here or in leak_test.cpp notices.
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if.h>

#include "tests/kernel/leak/leak.h"

namespace agentgate::netdriver {
namespace {

using test::Bytes;

struct Link {
  const NetNamespace& where;
  std::string name;
};

class Rules : public Leak {
 protected:
  // Which of `frames`, by place, come in at `at`. Frames are told apart by their bytes.
  static std::set<std::size_t> pass(const Link& from, const Link& at,
                                    const std::vector<Bytes>& frames, std::uint32_t mark = 0) {
    Sniffer tap(at.where.fd(), at.name,
                {.run = kRun, .who = {}, .keep = 65536, .keep_unknown = true, .promiscuous = true});
    Sender sender(from.where.fd(), from.name, mark);
    for (const Bytes& frame : frames) EXPECT_EQ(sender.send(frame), 0);
    std::this_thread::sleep_for(150ms);
    tap.stop();
    EXPECT_EQ(tap.counts().drops, 0U);
    std::set<Bytes> came;
    for (const auto& seen : tap.frames()) {
      if (!seen.outgoing) came.insert(seen.bytes);
    }
    std::set<std::size_t> out;
    for (std::size_t i = 0; i < frames.size(); ++i) {
      if (came.contains(frames[i])) out.insert(i);
    }
    return out;
  }

  struct Range {
    std::size_t first, last;
  };
  static constexpr std::size_t kEnd = 10000;
  // Changes each byte in turn. What no rule looks at is `free`; everything else must matter.
  static void expect_bound(const Link& from, const Link& at, const std::string& what,
                           const Bytes& frame, const std::vector<Range>& free,
                           std::uint32_t mark = 0) {
    std::vector<Bytes> frames;
    for (std::size_t i = 0; i < frame.size(); ++i) {
      frames.push_back(frame);
      frames.back()[i] ^= 1U;
    }
    frames.push_back(frame);
    const std::set<std::size_t> came = pass(from, at, frames, mark);
    EXPECT_TRUE(came.contains(frame.size())) << what << ": does not pass at all";
    for (const std::size_t i : came) {
      const bool is_free = std::any_of(free.begin(), free.end(), [&](const Range& range) {
        return i >= range.first && i <= range.last;
      });
      EXPECT_TRUE(is_free || i == frame.size()) << what << ": byte " << i << " may be anything";
    }
  }
  [[nodiscard]] Bytes frame(const char* kind, const Identity& as) const {
    return find_kind(kind)->build(as, kRun).front();
  }

  // Gives what comes from the port the port mark, as layer 1 would.
  void mark_what_comes_from(const std::string& link, int number) const {
    const std::string table = "mark" + std::to_string(number);
    host->sh("nft 'table netdev " + table + " { chain c { type filter hook ingress device " + link +
             " priority -320; meta mark set 0xa10000; }; }'");
  }
  static bool is_mac(const Bytes& frame, std::size_t offset, const MacAddress& mac) {
    const auto& bytes = mac.bytes();
    return std::equal(bytes.begin(), bytes.end(), frame.begin() + static_cast<long>(offset));
  }
  static constexpr std::size_t kTo = 0, kFrom = 6;  // places of the addresses
  // The kinds that came in with (or without) that address there.
  static Names kinds_with(const Sniffer& tap, std::size_t offset, const MacAddress& mac,
                          bool with = true) {
    Names out;
    for (const auto& seen : tap.frames()) {
      if (!seen.outgoing && seen.kind && is_mac(seen.bytes, offset, mac) == with)
        out.insert(find_kind(*seen.kind)->name);
    }
    return out;
  }
  // Everything of either container's, to the other.
  [[nodiscard]] PolicySpec each_other() const {
    PolicySpec out = policy();
    for (const test::Station& s : {who.own, who.neighbour}) {
      for (const Protocol protocol : {Protocol::tcp, Protocol::udp}) {
        out.v4.private_entries.push_back({{s.ip4, s.ip4}, protocol, {1, 65535}});
        out.v6.private_entries.push_back({{s.ip6, s.ip6}, protocol, {1, 65535}});
      }
    }
    return normalise(out);
  }
  // To "stolen". Before Linux 6.2 a link is renamed only while it is DOWN.
  void rename_bridge() const {
    host->sh("B=" + std::string(kBridge) +
             "; ip link set $B name stolen ||"
             " { ip link set $B down; ip link set $B name stolen; ip link set stolen up; }");
  }
  // What the host sends or hands on to A, by IP, other than neighbour advertisements.
  [[nodiscard]] std::size_t ip_packets(const Sniffer& at_a) const {
    std::size_t out = 0;
    for (const auto& seen : at_a.frames()) {
      if (seen.outgoing || seen.bytes.size() < 34 || !is_mac(seen.bytes, kFrom, who.gateway.mac))
        continue;
      const unsigned type = seen.bytes[12] * 256U + seen.bytes[13];
      const bool advertisement = type == ETH_P_IPV6 && seen.bytes.size() > 54 &&
                                 seen.bytes[20] == IPPROTO_ICMPV6 && seen.bytes[54] == 136;
      out += (type == ETH_P_IP || type == ETH_P_IPV6) && !advertisement ? 1 : 0;
    }
    return out;
  }
  // All that the host's own programs could send to A.
  void send_from_the_host() const {
    // 0x88 is where a neighbour advertisement has its type.
    for (const IpAddress& ip : {IpAddress(who.own.ip4), IpAddress(who.own.ip6)}) {
      host->run([&] {
        const auto [to, size] = socket_address(ip, 443);
        const int family = ip.is_v4() ? AF_INET : AF_INET6;
        for (const std::uint16_t source : {std::uint16_t{0}, std::uint16_t{0x8800}}) {
          for (const int type : {SOCK_DGRAM, SOCK_STREAM}) {
            const int fd = ::socket(family, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
            const auto [from, length] = socket_address(
                ip.is_v4() ? IpAddress(who.gateway.ip4) : IpAddress(who.gateway.ip6), source);
            EXPECT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&from), length), 0);
            (void)::connect(fd, reinterpret_cast<const sockaddr*>(&to), size);
            (void)::send(fd, "x", 1, MSG_NOSIGNAL);
            ::close(fd);
          }
        }
        for (const int protocol :
             {int{IPPROTO_ICMP}, int{IPPROTO_ICMPV6}, int{IPPROTO_SCTP}, int{IPPROTO_GRE}}) {
          for (const std::uint8_t type : {8, 128, 135, 136, 137}) {
            // In its own family that is the one thing that passes.
            if (!ip.is_v4() && protocol == IPPROTO_ICMPV6 && type == 136) continue;
            const int fd = ::socket(family, SOCK_RAW | SOCK_CLOEXEC, protocol);
            const std::uint8_t message[64] = {type};
            const auto [raw, length] = socket_address(ip, 0);
            (void)::sendto(fd, message, sizeof message, 0, reinterpret_cast<const sockaddr*>(&raw),
                           length);
            ::close(fd);
          }
        }
      });
    }
    std::this_thread::sleep_for(150ms);
  }
  [[nodiscard]] Sniffer::Options everything() const {
    return {.run = kRun, .who = who, .keep = 65536, .keep_unknown = true};
  }
};

// ---- layer 1

TEST_F(Rules, LayerOneBindsEveryByteOfWhatAReleasedPortSends) {
  make_open();
  install(Family::netdev, {1});
  bring_open_up();
  const Link from{*a, "eth0"};
  const Link at{*host, kBridge};
  expect_bound(from, at, "IPv4", frame("own-outside-udp", who), {{14, 25}, {30, kEnd}});
  expect_bound(from, at, "IPv6", frame("own-outside6-udp", who), {{14, 21}, {38, kEnd}});
  expect_bound(from, at, "ICMPv6", frame("own-outside6-icmp", who), {{14, 21}, {38, kEnd}});
  for (const char* kind : {"arp-request-gateway", "arp-request-gateway-unicast"}) {
    expect_bound(from, at, kind, frame(kind, who), {{32, 37}, {42, kEnd}});
  }
  // Version, traffic class, flow and length; checksum and reserved; options.
  expect_bound(from, at, "to the group", frame("nd-solicit-gateway", who),
               {{14, 19}, {56, 61}, {78, kEnd}});
  // With another next header it is any IPv6 to the bridge.
  expect_bound(from, at, "to the gateway", frame("nd-solicit-gateway-unicast", who),
               {{14, 20}, {56, 61}, {78, kEnd}});

  std::vector<Bytes> types;
  for (unsigned type = 0; type < 256; ++type) {
    types.push_back(frame("own-outside6-icmp", who));
    types.back()[54] = static_cast<std::uint8_t>(type);
  }
  const std::set<std::size_t> came = pass(from, at, types);
  EXPECT_EQ(came.size(), 130U);
  EXPECT_EQ(*came.rbegin(), 129U);
}

TEST_F(Rules, LayerOneBindsEveryByteOfWhatAReleasedPortGets) {
  make_open();
  install(Family::netdev, {1});
  bring_open_up();
  const Link from{*host, kBridge};
  const Link at{*a, "eth0"};
  // What the host sends by the bridge: from the outside, the bridge's MAC.
  Identity sender = who;
  sender.own = {who.gateway.mac, who.outside.ip4, who.outside.ip6};
  sender.gateway = who.own;
  const Bytes ip4 = frame("own-gateway-udp", sender);
  const Bytes ip6 = frame("own-gateway6-udp", sender);
  expect_bound(from, at, "IPv4", ip4, {{14, 29}, {34, kEnd}}, kVerdictMark);
  expect_bound(from, at, "IPv6", ip6, {{14, 37}, {54, kEnd}}, kVerdictMark);
  // The other bits of the mark are somebody else's.
  EXPECT_EQ(pass(from, at, {ip4, ip6}, kVerdictMark | 0x12000034).size(), 2U);
  for (const std::uint32_t mark : {0U, kPortMark, kVerdictMark | 0x00010000, 0xFFFFFFFF}) {
    EXPECT_EQ(pass(from, at, {ip4, ip6}, mark).size(), 0U) << mark;
  }
  Bytes arp = frame("arp-request-gateway-unicast", who);
  const auto put = [&](std::size_t offset, const auto& bytes) {
    std::copy(bytes.begin(), bytes.end(), arp.begin() + static_cast<long>(offset));
  };
  put(0, who.own.mac.bytes());
  put(6, who.gateway.mac.bytes());
  arp[21] = 2;
  put(22, who.gateway.mac.bytes());
  put(28, who.gateway.ip4.bytes());
  put(32, who.own.mac.bytes());
  put(38, who.own.ip4.bytes());
  expect_bound(from, at, "ARP", arp, {{32, 37}, {42, kEnd}});
}

// ---- layer 2

// Sockets of one protocol on the port itself see what the bridge hands back to it: the link-local
// groups, which skip the prerouting hook. Not LLDP's own group: its frames come to no hook of the
// bridge at all (br_handle_frame), and layer 1 alone holds them.
class PortListener {
 public:
  PortListener(const NetNamespace& where, const std::string& link,
               const std::vector<int>& protocols = {ETH_P_PAE, ETH_P_SLOW, ETH_P_PAUSE, 0x88B5}) {
    where.run([&] {
      for (const int protocol : protocols) {
        const int fd = ::socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        sockaddr_ll at{};
        at.sll_family = AF_PACKET;
        at.sll_protocol = htons(static_cast<std::uint16_t>(protocol));
        at.sll_ifindex = static_cast<int>(::if_nametoindex(link.c_str()));
        EXPECT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&at), sizeof at), 0);
        sockets_.push_back(fd);
      }
    });
  }
  ~PortListener() {
    for (const int fd : sockets_) ::close(fd);
  }
  PortListener(const PortListener&) = delete;
  PortListener& operator=(const PortListener&) = delete;
  [[nodiscard]] std::size_t frames() const {
    std::size_t out = 0;
    char buffer[2048];
    for (const int fd : sockets_) {
      while (::recv(fd, buffer, sizeof buffer, 0) > 0) ++out;
    }
    return out;
  }

 private:
  std::vector<int> sockets_;
};

TEST_F(Rules, LayerTwosTableHoldsLinkLocalGroups) {
  make_open();
  bring_open_up();
  const PortListener listener(*host, port(1).name.str());
  send_all(*a, "eth0", who);
  EXPECT_GE(listener.frames(), 10U);
  install(Family::bridge);
  send_all(*a, "eth0", who);
  EXPECT_EQ(listener.frames(), 0U);
}

// LLDP's own group comes to no hook of the bridge (br_handle_frame returns RX_HANDLER_PASS), and a
// program that listens for LLDP on the port itself hears it: unless the port's group_fwd_mask has
// it taken for any other frame.
TEST_F(Rules, WithoutItsFlagsLayerTwoLetsLldpThrough) {
  make_open();
  install(Family::bridge);
  bring_open_up();
  const PortListener listener(*host, port(1).name.str(), {ETH_P_LLDP});
  send_all(*a, "eth0", who);
  EXPECT_GE(listener.frames(), 1U);
}

TEST_F(Rules, LayerTwoAloneHoldsLldp) {
  make_open(kPortFlags);
  install(Family::bridge);
  bring_open_up();
  const PortListener listener(*host, port(1).name.str(), {ETH_P_LLDP});
  send_all(*a, "eth0", who);
  EXPECT_EQ(listener.frames(), 0U);
}

// A port that was renamed is known by its group.
TEST_F(Rules, LayerTwosTableHoldsARenamedPort) {
  make_open("ip link set $P group " + std::to_string(kLinkGroup));
  install(Family::bridge, {1});
  bring_open_up();
  host->sh(
      "for i in 1 2; do ip link set agp000000000$i down; ip link set agp000000000$i name"
      " stolen$i; ip link set stolen$i up; done");
  await_forwarding({"stolen1", "stolen2"});
  mark_what_comes_from("stolen1", 1);
  const PortListener listener(*host, "stolen1");
  expect_nothing(blast(who));
  EXPECT_FALSE(has_learnt());
  EXPECT_EQ(blast_inwards(), 0U) << last_in;
  EXPECT_EQ(listener.frames(), 0U);
}

// Released, without layer 1 and without most of the port flags, on a bridge that somebody else put
// a link of his own on.
TEST_F(Rules, LayerTwosTableBindsAReleasedPort) {
  // Without learning: LLDP, which no hook of the bridge sees, would move the FDB's entries about.
  make_open("bridge link set dev $P learning off");
  install(Family::bridge, {1, 2});
  NetNamespace stranger;
  host->must({"ip", "link", "add", "other0", "type", "veth", "peer", "name", "other1"});
  host->must({"ip", "link", "set", "other1", "netns", stranger.path(), "name", "eth0"});
  host->must({"ip", "link", "set", "other0", "master", kBridge, "up"});
  stranger.must({"ip", "link", "set", "eth0", "up"});
  bring_open_up();
  await_forwarding({"other0"});
  mark_what_comes_from(port(1).name.str(), 1);

  const MacAddress& mac = who.own.mac;
  Sniffer at_bridge(host->fd(), kBridge, everything());
  Sniffer at_stranger(stranger.fd(), "eth0", everything());
  Sniffer at_b(b->fd(), "eth0", everything());
  send_all(*a, "eth0", who);
  for (Sniffer* tap : {&at_bridge, &at_stranger, &at_b}) tap->stop();
  EXPECT_GT(kinds_with(at_bridge, kFrom, mac).size(), 20U);
  EXPECT_EQ(text(kinds_with(at_bridge, kFrom, mac, false)), "");
  // Nothing from port to port; what the host routes is layer 3's business.
  EXPECT_EQ(text(kinds_with(at_stranger, kFrom, who.gateway.mac, false)), "");
  EXPECT_EQ(text(kinds_with(at_b, kFrom, who.gateway.mac, false)), "");

  // The other port has no mark; with one, it may not use the first one's MAC.
  Sniffer unmarked(host->fd(), kBridge, everything());
  send_all(*b, "eth0", as_neighbour(who));
  unmarked.stop();
  EXPECT_EQ(text(names(unmarked.counts().kinds)), "");
  mark_what_comes_from(port(2).name.str(), 2);
  Sniffer marked(host->fd(), kBridge, everything());
  send_all(*b, "eth0", who);
  marked.stop();
  EXPECT_EQ(text(kinds_with(marked, kFrom, who.neighbour.mac, false)), "");

  // From the host: what is the port's, and by its own link.
  Identity from_host = who;
  std::swap(from_host.own, from_host.gateway);
  Sniffer to_a(a->fd(), "eth0", everything());
  send_all(*host, kBridge, from_host);
  to_a.stop();
  EXPECT_GT(kinds_with(to_a, kTo, mac).size(), 5U);
  EXPECT_EQ(text(kinds_with(to_a, kTo, mac, false)), "");
  const auto entry_on = [&](int number) {
    host->must({"bridge", "fdb", "replace", mac.to_string(), "dev", port(number).name.str(),
                "master", "static"});
  };
  entry_on(2);
  Sniffer to_b(b->fd(), "eth0", everything());
  send_all(*host, kBridge, from_host);
  to_b.stop();
  EXPECT_EQ(text(kinds_with(to_b, kTo, who.neighbour.mac, false)), "");
  entry_on(1);

  // From the stranger's link.
  Identity from_stranger = who;
  from_stranger.own.mac = MacAddress({0x02, 0x77, 0, 0, 0, 1});
  from_stranger.neighbour = who.own;
  Sniffer again_a(a->fd(), "eth0", everything());
  send_all(stranger, "eth0", from_stranger);
  again_a.stop();
  EXPECT_EQ(text(kinds_with(again_a, kFrom, who.gateway.mac, false)), "");
}

// ---- layer 3

TEST_F(Rules, LayerThreeAloneBehindThePortMark) {
  make_open();
  install(Family::inet);
  bring_open_up();
  for (int number : {1, 2}) mark_what_comes_from(port(number).name.str(), number);
  Reached reached = blast(who);
  for (const auto& kind : reached.host) EXPECT_TRUE(kind.starts_with("nd-solicit")) << kind;
  EXPECT_EQ(text(reached.uplink), "");
  for (const auto& kind : reached.neighbour) {
    EXPECT_FALSE(kind.starts_with("neighbour-routed")) << kind;
  }
  // And nothing of the uplink or the host's own.
  Sniffer at_a(a->fd(), "eth0", everything());
  send_all(*uplink, "eth0", from_outside());
  send_from_the_host();
  at_a.stop();
  EXPECT_EQ(ip_packets(at_a), 0U);
}

TEST_F(Rules, LayerThreeAsksForThePortMark) {
  make_open();
  install(Family::inet, {1});
  bring_open_up();
  Identity https = who;
  https.port = 443;
  EXPECT_EQ(text(blast(https).uplink), "");
  mark_what_comes_from(port(1).name.str(), 1);
  const Names uplink_names = blast(https).uplink;
  EXPECT_TRUE(uplink_names.contains("own-outside-tcp-syn"));
  EXPECT_TRUE(uplink_names.contains("own-outside6-tcp-syn"));
}

// Chains at the priority of "raw", the first that usual tools install, see nothing of a closed
// port even where layer 1 is missing.
TEST_F(Rules, ClosedPortIsHeldBeforeForeignChains) {
  make_open();
  bring_open_up();
  host->sh(R"(nft '
    table bridge early { counter seen { }
      chain c { type filter hook prerouting priority -300; iifname "agp*" counter name "seen"; }; }
    table inet early { counter seen { }
      chain c { type filter hook prerouting priority -300; iifname "agn*" counter name "seen"; }; }')");
  const auto sees = [&](const char* family) {
    host->must({"nft", "reset", "counter", family, "early", "seen"});
    send_all(*a, "eth0", who);
    return host->must({"nft", "list", "counter", family, "early", "seen"}).find("packets 0 ") ==
           std::string::npos;
  };
  EXPECT_TRUE(sees("inet"));
  install(Family::inet);
  EXPECT_FALSE(sees("inet"));
  EXPECT_TRUE(sees("bridge"));
  install(Family::bridge);
  EXPECT_FALSE(sees("bridge"));
}

TEST_F(Rules, LayerThreeHoldsAPortWithoutABridge) {
  make_open();
  bring_open_up();
  const std::string link = port(1).name.str();
  host->sh("ip addr flush dev " + std::string(kBridge) + "; ip link set " + link +
           " nomaster; sysctl -qw net.ipv6.conf." + link +
           ".disable_ipv6=0; ip addr add "
           "192.0.2.1/24 dev " +
           link + "; ip addr add 2001:db8:2::1/64 dev " + link + " nodad");
  Identity direct = who;
  direct.gateway.mac =
      MacAddress::parse(
          host->json({"ip", "-j", "link", "show", link})[0]["address"].get<std::string>())
          .value();
  Reached reached = blast(direct);
  EXPECT_TRUE(reached.uplink.contains("own-outside-udp"));
  EXPECT_TRUE(reached.uplink.contains("own-outside6-udp"));
  install(Family::inet);
  reached = blast(direct);
  EXPECT_EQ(text(reached.uplink), "");
  EXPECT_EQ(text(reached.host), "");
}

// A flow that the outside began before the rules were there goes on in the original direction:
// established, and no reply.
TEST_F(Rules, OldFlowsDoNotEnter) {
  masquerade = false;
  make_open();
  bring_open_up();
  for (int number : {1, 2}) mark_what_comes_from(port(number).name.str(), number);
  host->sh(
      "nft 'table inet track { chain c { type filter hook forward priority 0;"
      " ct state new counter; }; }'");
  Identity server = from_outside();
  server.source_port = 53;
  server.port = 40000;
  Identity client = who;
  client.source_port = 40000;
  client.port = 53;
  Sender outside(uplink->fd(), "eth0");
  Sender inside(a->fd(), "eth0");
  const std::vector<std::string> kinds = {"own-outside-udp", "own-outside6-udp"};
  const auto all_come = [&](Sender& sender, const Identity& as, const NetNamespace& where,
                            std::uint64_t run) {
    Sniffer tap(where.fd(), "eth0", options(as, run));
    for (const auto& kind : kinds) sender.send(*find_kind(kind), as, run);
    std::this_thread::sleep_for(100ms);
    tap.stop();
    return names(tap.counts().kinds).size();
  };
  ASSERT_EQ(all_come(outside, server, *a, 1), 2U);
  ASSERT_EQ(all_come(inside, client, *uplink, 2), 2U);
  ASSERT_EQ(all_come(outside, server, *a, 3), 2U);
  // One that the container began, to a place that the policy does not name.
  Identity other_client = who;
  Identity other_server = from_outside();
  other_server.source_port = other_client.port;
  other_server.port = other_client.source_port = 40002;
  ASSERT_EQ(all_come(inside, other_client, *uplink, 7), 2U);
  ASSERT_EQ(all_come(outside, other_server, *a, 8), 2U);
  install(Family::inet, {1});
  EXPECT_EQ(all_come(outside, server, *a, 4), 0U);
  EXPECT_EQ(all_come(outside, other_server, *a, 9), 0U);
  // What the container asked for itself comes.
  server.port = client.source_port = 40001;
  EXPECT_EQ(all_come(inside, client, *uplink, 5), 2U);
  EXPECT_EQ(all_come(outside, server, *a, 6), 2U);
}

// A foreign helper that expects connections to the container.
TEST_F(Rules, RelatedConnectionsDoNotEnter) {
  masquerade = false;
  make_gated();
  PortSpec p = port(1);
  release(p);
  host->sh(R"(nft 'table inet helper {
    counter related { }
    ct expectation later { protocol tcp; dport 9876; timeout 1m; size 4; l3proto ip; }
    chain c { type filter hook forward priority 10; tcp dport 443 ct expectation set "later"; }
    chain d { type filter hook forward priority -20; tcp dport 9876 ct state related counter name "related"; }
  }')");
  const int listener = listen_on(*uplink, who.outside.ip4, 443);
  const int data = listen_on(*a, who.own.ip4, 9876);
  const int control = connect_to(*a, who.outside.ip4, 443, 3s);
  ASSERT_GE(control, 0);
  Sniffer at_a(a->fd(), "eth0", everything());
  EXPECT_EQ(connect_to(*uplink, who.own.ip4, 9876), -ETIMEDOUT);
  at_a.stop();
  EXPECT_EQ(ip_packets(at_a), 0U);
  EXPECT_EQ(host->must({"nft", "list", "counter", "inet", "helper", "related"}).find("packets 0 "),
            std::string::npos);
  for (const int fd : {listener, data, control}) ::close(fd);
}

// What the host's own programs send to a released port.
TEST_F(Rules, TheHostDoesNotReachAReleasedPort) {
  make_gated();
  PortSpec p = port(1);
  release(p);
  Sniffer at_a(a->fd(), "eth0", everything());
  send_from_the_host();
  at_a.stop();
  EXPECT_EQ(ip_packets(at_a), 0U);
}

// Its own packets to itself, from an address of the pool, are nobody's claim.
TEST_F(Rules, TheHostReachesItselfByTheGatewaysAddress) {
  make_gated();
  host->must({"ip", "link", "set", "lo", "up"});
  for (const IpAddress& ip : {IpAddress(who.gateway.ip4), IpAddress(who.gateway.ip6)}) {
    const int listener = listen_on(*host, ip, 443);
    const int client = connect_to(*host, ip, 443, 3s);
    EXPECT_GE(client, 0) << ip.to_string();
    ::close(client);
    ::close(listener);
  }
}

// Sends what the input hook could take for a neighbour solicitation.
TEST_F(Rules, OnlyNeighbourSolicitationsReachTheHost) {
  make_gated();
  PortSpec p = port(1);
  release(p);
  Identity as = who;
  as.source_port = 0x8700;  // where ICMPv6 has its type
  EXPECT_FALSE(blast(as).host.contains("own-gateway6-udp"));
  // Protocol 58 over IPv4.
  Bytes strange = frame("own-gateway-icmp", who);
  strange[23] = IPPROTO_ICMPV6;
  strange[34] = 135;
  strange[24] = 0;
  strange[25] = 0;
  std::uint32_t sum = 0;
  for (std::size_t i = 14; i < 34; i += 2) sum += strange[i] * 256U + strange[i + 1];
  while (sum >> 16U) sum = (sum & 0xFFFFU) + (sum >> 16U);
  strange[24] = static_cast<std::uint8_t>(~sum >> 8U);
  strange[25] = static_cast<std::uint8_t>(~sum);
  const int raw = host->run(
      [] { return ::socket(AF_INET, SOCK_RAW | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_ICMPV6); });
  Sender sender(a->fd(), "eth0");
  EXPECT_EQ(sender.send(strange), 0);
  std::this_thread::sleep_for(100ms);
  char buffer[256];
  EXPECT_LT(::recv(raw, buffer, sizeof buffer, 0), 0);
  ::close(raw);
}

// A datagram's error, 0 when none comes in time.
int answer_to_datagram(const NetNamespace& from, const sockaddr_storage& to, socklen_t size) {
  return from.run([&] {
    const int fd = ::socket(to.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    EXPECT_EQ(::connect(fd, reinterpret_cast<const sockaddr*>(&to), size), 0);
    (void)::send(fd, "x", 1, 0);
    pollfd polled{fd, POLLIN, 0};
    int error = 0;
    socklen_t length = sizeof error;
    if (::poll(&polled, 1, 1000) > 0) ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
    ::close(fd);
    return error;
  });
}

TEST_F(Rules, ErrorsAboutItsOwnPacketsComeBack) {
  make_gated();
  PortSpec p = port(1);
  release(p);
  for (const IpAddress& ip : {IpAddress(who.outside.ip4), IpAddress(who.outside.ip6)}) {
    SCOPED_TRACE(ip.to_string());
    // The host's, about what is denied.
    EXPECT_EQ(connect_to(*a, ip, 444, 3s), -ECONNREFUSED);
    const auto [denied, size] = socket_address(ip, 54);
    EXPECT_EQ(answer_to_datagram(*a, denied, size), ip.is_v4() ? EHOSTUNREACH : EACCES);
    // The far side's, about what is allowed: nobody listens.
    const auto [allowed, length] = socket_address(ip, 53);
    EXPECT_EQ(answer_to_datagram(*a, allowed, length), ECONNREFUSED);
  }
  // The host's, about what is allowed and has too few hops.
  Identity dns = who;
  dns.port = 53;
  Bytes hop6 = frame("own-outside6-udp", dns);
  hop6[21] = 1;
  Sniffer at_a(a->fd(), "eth0", options(dns));
  Sender sender(a->fd(), "eth0");
  sender.send(*find_kind("own-ttl1-udp"), dns, kRun);
  sender.send(hop6);
  std::this_thread::sleep_for(150ms);
  at_a.stop();
  EXPECT_EQ(text(names(at_a.counts().kinds)), "own-outside6-udp own-ttl1-udp ");

  PolicySpec silent = policy();
  silent.reject = false;
  ok(gate->update_policy(silent));
  EXPECT_EQ(connect_to(*a, who.outside.ip4, 444), -ETIMEDOUT);
  EXPECT_EQ(connect_to(*a, who.outside.ip6, 444), -ETIMEDOUT);
}

// Somebody's published port, say: the container asks for what is denied and would get what is
// allowed.
TEST_F(Rules, RewrittenDestinationsDoNotPass) {
  make_gated();
  PortSpec p = port(1);
  release(p);
  host->sh(
      "nft 'table inet nat { chain c { type nat hook prerouting priority -100;"
      " tcp dport 444 redirect to :443; ip daddr 198.51.100.2 tcp dport 445 dnat ip to"
      " 198.51.100.2:443; ip6 daddr 2001:db8:51::2 tcp dport 445 dnat ip6 to"
      " [2001:db8:51::2]:443; }; }'");
  for (const IpAddress& ip : {IpAddress(who.outside.ip4), IpAddress(who.outside.ip6)}) {
    const int listener = listen_on(*uplink, ip, 443);
    const int client = connect_to(*a, ip, 443, 3s);
    EXPECT_GE(client, 0);
    EXPECT_LT(connect_to(*a, ip, 445), 0);
    EXPECT_LT(connect_to(*a, ip, 444), 0);
    ::close(client);
    ::close(listener);
  }
}

// Even where a policy says so, and both are released to it.
TEST_F(Rules, NeverBetweenAgents) {
  make_gated();
  PortSpec p1 = port(1);
  PortSpec p2 = port(2);
  release(p1, each_other());
  release(p2, each_other());
  const Reached reached = blast(who);
  EXPECT_TRUE(reached.bridge.contains("neighbour-routed-udp"));
  EXPECT_EQ(text(reached.neighbour), "");
}

// What prerouting would see first is taken away: a packet may have passed it when the bridge gets
// its other name.
TEST_F(Rules, LayerThreeKnowsARenamedBridgeByItsGroup) {
  make_open("ip link set " + std::string(kBridge) + " group " + std::to_string(kLinkGroup));
  install(Family::inet);
  host->must({"nft", "flush", "chain", "inet", "agentgate", "prerouting"});
  bring_open_up();
  for (int number : {1, 2}) mark_what_comes_from(port(number).name.str(), number);
  rename_bridge();
  const Reached reached = blast(who, "stolen");
  EXPECT_TRUE(reached.bridge.contains("own-outside-udp"));
  for (const auto& kind : reached.host) EXPECT_TRUE(kind.starts_with("nd-solicit")) << kind;
  EXPECT_EQ(text(reached.uplink), "");
  for (const auto& kind : reached.neighbour) {
    EXPECT_FALSE(kind.starts_with("neighbour-routed")) << kind;
  }
  Sniffer at_a(a->fd(), "eth0", everything());
  send_from_the_host();
  at_a.stop();
  EXPECT_EQ(ip_packets(at_a), 0U);
}

TEST_F(Rules, NeverBetweenAgentsOfARenamedBridge) {
  make_open("ip link set " + std::string(kBridge) + " group " + std::to_string(kLinkGroup));
  GateSpec spec;
  spec.networks[network().bridge] = network();
  spec.policies[each_other().name] = each_other();
  for (int number : {1, 2}) {
    PortSpec p = port(number);
    p.policy = each_other().name;
    spec.ports[p.name] = p;
  }
  install(Family::inet, spec);
  host->must({"nft", "flush", "chain", "inet", "agentgate", "prerouting"});
  bring_open_up();
  for (int number : {1, 2}) mark_what_comes_from(port(number).name.str(), number);
  rename_bridge();
  for (const auto& kind : blast(who, "stolen").neighbour) {
    EXPECT_FALSE(kind.starts_with("neighbour-routed")) << kind;
  }
}

// An error about a container's packet holds a piece of it. Without the bridge's address the way to
// the container is the default route.
TEST_F(Rules, TheHostsErrorsDoNotLeaveByTheUplink) {
  make_gated();
  PortSpec p = port(1);
  release(p);
  host->sh("ip addr flush dev " + std::string(kBridge));
  Identity dns = who;
  dns.port = 53;
  Bytes hop6 = frame("own-outside6-udp", dns);
  hop6[21] = 1;
  Sniffer bridge(host->fd(), kBridge, everything());
  Sniffer up(host->fd(), "up0", everything());
  Sender sender(a->fd(), "eth0");
  sender.send(*find_kind("own-ttl1-udp"), dns, kRun);  // allowed, with too few hops
  sender.send(hop6);
  send_all(*a, "eth0", who);  // denied
  up.stop();
  bridge.stop();
  EXPECT_GT(bridge.frames().size(), 20U);
  std::size_t to_agent = 0;
  for (const auto& seen : up.frames()) {
    const Bytes& f = seen.bytes;
    const auto at = [&](std::size_t offset, const auto& bytes) {
      return f.size() >= offset + bytes.size() &&
             std::equal(bytes.begin(), bytes.end(), f.begin() + static_cast<long>(offset));
    };
    if (seen.outgoing && (at(30, who.own.ip4.bytes()) || at(38, who.own.ip6.bytes()))) ++to_agent;
  }
  EXPECT_EQ(to_agent, 0U);
}

class Masquerade : public Rules {
 protected:
  // Of what leaves by the uplink: datagrams of the container, and of the host's own from an
  // address that is not of the pool.
  std::multiset<std::string> sources_at_uplink() {
    make_gated();
    PortSpec p = port(1);
    release(p);
    Identity dns = who;
    dns.port = 53;
    Sniffer up(host->fd(), "up0", everything());
    Sender sender(a->fd(), "eth0");
    sender.send(*find_kind("own-outside-udp"), dns, kRun);
    sender.send(*find_kind("own-outside6-udp"), dns, kRun);
    host->sh(
        "ip link set lo up; ip addr add 203.0.113.5/32 dev lo;"
        "ip addr add 2001:db8:77::5/128 dev lo nodad");
    for (const auto& ends : {std::pair{IpAddress(Ipv4Address::parse("203.0.113.5").value()),
                                       IpAddress(who.outside.ip4)},
                             std::pair{IpAddress(Ipv6Address::parse("2001:db8:77::5").value()),
                                       IpAddress(who.outside.ip6)}}) {
      const IpAddress from = ends.first;
      const IpAddress to = ends.second;
      host->run([&] {
        const int fd = ::socket(to.is_v4() ? AF_INET : AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0);
        const auto [source, length] = socket_address(from, 5353);
        EXPECT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&source), length), 0);
        const auto [target, size] = socket_address(to, 5353);
        (void)::sendto(fd, "x", 1, 0, reinterpret_cast<const sockaddr*>(&target), size);
        ::close(fd);
      });
    }
    std::this_thread::sleep_for(100ms);
    up.stop();
    std::multiset<std::string> sources;
    for (const auto& seen : up.frames()) {
      if (!seen.outgoing) continue;
      const auto& f = seen.bytes;
      if (f[12] == 0x08 && f[13] == 0 && f[23] == IPPROTO_UDP) {
        sources.insert(Ipv4Address({f[26], f[27], f[28], f[29]}).to_string());
      } else if (f[12] == 0x86 && f[20] == IPPROTO_UDP) {
        std::array<std::uint8_t, 16> source{};
        std::copy_n(f.begin() + 22, 16, source.begin());
        sources.insert(Ipv6Address(source).to_string());
      }
    }
    return sources;
  }
};

TEST_F(Masquerade, HidesThePoolAndNothingElse) {
  const std::multiset<std::string> expected = {"198.51.100.1", "203.0.113.5", "2001:db8:51::1",
                                               "2001:db8:77::5"};
  EXPECT_EQ(sources_at_uplink(), expected);
}

TEST_F(Masquerade, CanBeOff) {
  masquerade = false;
  const std::multiset<std::string> expected = {who.own.ip4.to_string(), "203.0.113.5",
                                               who.own.ip6.to_string(), "2001:db8:77::5"};
  EXPECT_EQ(sources_at_uplink(), expected);
}

// Our verdict is there before the filter table, where DOCKER-USER asks for it.
TEST_F(Rules, TheVerdictMarkIsThereForTheFilterTable) {
  make_gated();
  PortSpec p = port(1);
  release(p);
  host->sh(
      "nft 'table inet filter { chain c { type filter hook forward priority 0; policy drop;"
      " meta mark and 0xff0000 == 0xa60000 accept; }; }'");
  const int listener = listen_on(*uplink, who.outside.ip4, 443);
  const int client = connect_to(*a, who.outside.ip4, 443, 3s);
  EXPECT_GE(client, 0);
  ::close(client);
  ::close(listener);
}

// Layer 3 knows the bridge by its name; under another one it is a stranger that claims the
// addresses of the pool.
TEST_F(Rules, ReleasedPortOfARenamedBridgeGetsNoMore) {
  make_gated();
  PortSpec p = port(1);
  release(p);
  rename_bridge();
  const auto tap = [&](const char* link) {
    return std::make_unique<Sniffer>(host->fd(), link, options(who));
  };
  const auto bridge = tap("stolen");
  const auto up = tap("up0");
  HostListener listener(host->fd(), kRun);
  send_all(*a, "eth0", who);
  listener.stop();
  bridge->stop();
  up->stop();
  EXPECT_EQ(text(names(up->counts().kinds, true)), "");
  for (const auto& [kind, count] : listener.counts().kinds) {
    EXPECT_TRUE(find_kind(kind)->name.starts_with("nd-solicit-gateway")) << find_kind(kind)->name;
  }
}

// ---- policies

template <class Address>
AddressRange<Address> range(const char* first, const char* last) {
  return {Address::parse(first).value(), Address::parse(last).value()};
}

// One entry for each place in the order of look-ups.
PolicySpec ordered() {
  PolicySpec out;
  out.name = "web";
  const auto fill = [](auto& family, const auto& box) {
    const PortRange dns{53, 53};
    const Protocol udp = Protocol::udp;
    family.deny.push_back(box("0", "f"));
    family.private_entries.push_back({box("5", "5"), udp, dns});
    family.private_entries.push_back({box("private", "private"), udp, dns});
    family.private_entries.push_back({box("private-range", "private-range-end"), udp, dns});
    family.allow.push_back({box("always", "always"), udp, dns});
    family.allow.push_back({box("6", "6"), udp, dns});
    family.allow.push_back({box("10", "10"), udp, dns});
    family.allow.push_back({box("exact", "exact"), udp, dns});
    family.allow.push_back({box("range", "range-end"), udp, {1000, 2000}});
  };
  const std::map<std::string, std::pair<const char*, const char*>> places = {
      {"0", {"203.0.113.0", "2001:db8:71::"}},
      {"f", {"203.0.113.15", "2001:db8:71::f"}},
      {"5", {"203.0.113.5", "2001:db8:71::5"}},
      {"6", {"203.0.113.6", "2001:db8:71::6"}},
      {"10", {"203.0.113.16", "2001:db8:71::10"}},
      {"private", {"10.9.0.53", "fd00:9::53"}},
      {"private-range", {"10.8.0.0", "fd00:8::"}},
      {"private-range-end", {"10.8.255.255", "fd00:8::ffff"}},
      {"always", {"10.7.0.1", "fd00:7::1"}},
      {"exact", {"203.0.113.53", "2001:db8:71::53"}},
      {"range", {"203.0.113.64", "2001:db8:71::64"}},
      {"range-end", {"203.0.113.127", "2001:db8:71::ff"}}};
  fill(out.v4, [&](const char* first, const char* last) {
    return range<Ipv4Address>(places.at(first).first, places.at(last).first);
  });
  fill(out.v6, [&](const char* first, const char* last) {
    return range<Ipv6Address>(places.at(first).second, places.at(last).second);
  });
  return normalise(out);
}
// Everything, by the entries that are looked at first.
PolicySpec anything() {
  PolicySpec out;
  out.name = "web";
  out.v4.private_entries.push_back(
      {range<Ipv4Address>("1.0.0.0", "223.255.255.255"), Protocol::udp, {1, 65535}});
  out.v6.private_entries.push_back(
      {range<Ipv6Address>("2000::", "fdff:ffff::"), Protocol::udp, {1, 65535}});
  return normalise(out);
}

struct Destination {
  const char* what;
  const char* ip4;
  const char* ip6;
  std::uint16_t port;
  bool allowed;
};
constexpr Destination kDestinations[] = {
    {"denied and allowed", "203.0.113.6", "2001:db8:71::6", 53, false},
    {"denied and private", "203.0.113.5", "2001:db8:71::5", 53, false},
    {"the last one denied", "203.0.113.15", "2001:db8:71::f", 53, false},
    {"the first one not denied", "203.0.113.16", "2001:db8:71::10", 53, true},
    {"private", "10.9.0.53", "fd00:9::53", 53, true},
    {"private, other port", "10.9.0.53", "fd00:9::53", 54, false},
    {"private, other address", "10.9.0.54", "fd00:9::54", 53, false},
    {"private range", "10.8.1.1", "fd00:8::11", 53, true},
    {"private range, other port", "10.8.1.1", "fd00:8::11", 54, false},
    {"always denied and allowed", "10.7.0.1", "fd00:7::1", 53, false},
    {"the host's and allowed", "203.0.113.100", "2001:db8:71::c0", 1500, false},
    {"allowed", "203.0.113.53", "2001:db8:71::53", 53, true},
    {"allowed, other port", "203.0.113.53", "2001:db8:71::53", 54, false},
    {"allowed range", "203.0.113.99", "2001:db8:71::99", 1500, true},
    {"allowed range, first port", "203.0.113.64", "2001:db8:71::64", 1000, true},
    {"allowed range, last port", "203.0.113.127", "2001:db8:71::ff", 2000, true},
    {"allowed range, port below", "203.0.113.99", "2001:db8:71::99", 999, false},
    {"allowed range, port above", "203.0.113.99", "2001:db8:71::99", 2001, false},
    {"beyond the allowed range", "203.0.113.128", "2001:db8:71::100", 1500, false},
    {"nowhere named", "198.51.100.2", "2001:db8:51::2", 53, false},
};

class PolicyOrder : public Rules {
 protected:
  // Different for each destination, so that each has a flow of its own.
  static constexpr std::uint16_t kFirstPort = 41000;
  [[nodiscard]] Identity to(std::size_t place) const {
    Identity out = who;
    out.outside.ip4 = Ipv4Address::parse(kDestinations[place].ip4).value();
    out.outside.ip6 = Ipv6Address::parse(kDestinations[place].ip6).value();
    out.port = kDestinations[place].port;
    out.source_port = static_cast<std::uint16_t>(kFirstPort + place);
    return out;
  }
  // The answer's sender, on the uplink.
  [[nodiscard]] Identity answer(std::size_t place) const {
    Identity out = from_outside();
    const Identity asked = to(place);
    out.own.ip4 = asked.outside.ip4;
    out.own.ip6 = asked.outside.ip6;
    std::swap(out.port, out.source_port);
    out.source_port = asked.port;
    out.port = asked.source_port;
    return out;
  }
  // Sends the kind as each; which of them come to the tap, by place.
  std::set<std::size_t> come(const NetNamespace& from, const NetNamespace& at,
                             const std::string& link, bool outgoing, const char* kind,
                             const std::function<Identity(std::size_t)>& as) const {
    std::set<std::size_t> out;
    constexpr std::uint64_t first = kRun + 0x1000;
    std::vector<std::unique_ptr<Sniffer>> taps;
    Sender sender(from.fd(), "eth0");
    Sniffer tap(at.fd(), link, {.run = kRun, .who = {}, .keep = 65536, .keep_unknown = true});
    for (std::size_t i = 0; i < std::size(kDestinations); ++i) {
      EXPECT_EQ(sender.send(*find_kind(kind), as(i), first + i), 0);
    }
    std::this_thread::sleep_for(150ms);
    tap.stop();
    for (const auto& seen : tap.frames()) {
      const auto marker = test::Marker::find(seen.bytes);
      if (seen.outgoing == outgoing && marker && marker->run >= first &&
          marker->run < first + std::size(kDestinations)) {
        out.insert(marker->run - first);
      }
    }
    return out;
  }
  static void expect_as_listed(const std::set<std::size_t>& came, bool as_listed = true) {
    for (std::size_t i = 0; i < std::size(kDestinations); ++i) {
      EXPECT_EQ(came.contains(i), as_listed ? kDestinations[i].allowed : true)
          << kDestinations[i].what;
    }
  }
  void make_released(const PolicySpec& to_what) {
    masquerade = false;
    make_gated();
    const auto h4 = Ipv4Address::parse("203.0.113.100").value();
    const auto h6 = Ipv6Address::parse("2001:db8:71::c0").value();
    ok(gate->set_host_addresses({{h4, h4}}, {{h6, h6}}));
    PortSpec p = port(1);
    release(p, to_what);
  }
};

TEST_F(PolicyOrder, OfWhatTheContainerSends) {
  make_released(ordered());
  const auto as = [&](std::size_t i) { return to(i); };
  for (const char* kind : {"own-outside-udp", "own-outside6-udp"}) {
    SCOPED_TRACE(kind);
    expect_as_listed(come(*a, *host, "up0", true, kind, as));
  }
  for (const char* kind : {"own-outside-tcp-syn", "own-outside6-tcp-syn"}) {
    EXPECT_TRUE(come(*a, *host, "up0", true, kind, as).empty()) << kind;
  }
}

// Flows that were allowed go on as the new policy says, and what comes for the others is not
// answered: the far side is not told that there is somebody.
TEST_F(PolicyOrder, OfWhatIsAnswered) {
  make_released(anything());
  const auto as = [&](std::size_t i) { return to(i); };
  const auto back = [&](std::size_t i) { return answer(i); };
  for (const char* kind : {"own-outside-udp", "own-outside6-udp"}) {
    SCOPED_TRACE(kind);
    expect_as_listed(come(*a, *host, "up0", true, kind, as), false);
    expect_as_listed(come(*uplink, *a, "eth0", false, kind, back), false);
  }
  ok(gate->update_policy(ordered()));
  for (const char* kind : {"own-outside-udp", "own-outside6-udp"}) {
    SCOPED_TRACE(kind);
    expect_as_listed(come(*uplink, *a, "eth0", false, kind, back));
    EXPECT_TRUE(come(*uplink, *host, "up0", true, kind, back).empty());
  }
}

}  // namespace
}  // namespace agentgate::netdriver
