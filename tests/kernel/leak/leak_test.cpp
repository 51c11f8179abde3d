// SPDX-License-Identifier: GPL-2.0-or-later
//
// Hostile code behind the gate, and hostile traffic in front of it. The first test has no gate at
// all: what it counts is what the zeros of the others are worth.
#include <linux/netfilter/nf_tables.h>
#include <linux/netfilter/nfnetlink.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>

#include <atomic>
#include <functional>
#include <memory>
#include <sstream>

#include "netdriver/token.h"
#include "tests/kernel/leak/leak.h"

namespace agentgate::netdriver {
namespace {

// ---- what the zeros are worth

TEST_F(Leak, WithoutAGateTheFramesDoPass) {
  make_open();
  bring_open_up();
  const Reached reached = blast(who);
  EXPECT_GE(reached.bridge.size(), 40U) << text(reached.bridge);
  EXPECT_GE(reached.neighbour.size(), 30U) << text(reached.neighbour);
  EXPECT_GE(reached.uplink.size(), 15U) << text(reached.uplink);
  EXPECT_GE(reached.host.size(), 8U) << text(reached.host);
  EXPECT_TRUE(has_learnt());
  EXPECT_GE(blast_inwards(), 40U);
}

// ---- closed

TEST_F(Leak, ClosedPortPassesNothingEitherWay) {
  make_gated();
  expect_nothing(blast(who));
  EXPECT_EQ(blast_inwards(), 0U) << last_in;
  // Step 9 opens nothing.
  PortSpec p = port(1);
  p.prepared = true;
  ok(gate->prepare_port(p));
  expect_nothing(blast(who));
  EXPECT_EQ(blast_inwards(), 0U) << last_in;
}

TEST_F(Leak, PortClosedAgainPassesNothingEitherWay) {
  make_gated();
  PortSpec p = port(1);
  release(p);
  EXPECT_FALSE(blast(who).bridge.empty());
  ok(gate->close_port(p));
  expect_nothing(blast(who));
  EXPECT_EQ(blast_inwards(), 0U) << last_in;
}

// ---- one layer alone (DESIGN.md, invariant 2)

TEST_F(Leak, LayerOneAlone) {
  make_open();
  install(Family::netdev);
  bring_open_up();
  expect_nothing(blast(who));
  EXPECT_EQ(blast_inwards(), 0U) << last_in;
}

TEST_F(Leak, LayerTwoAlone) {
  make_open(kPortFlags);
  install(Family::bridge);
  bring_open_up();
  expect_nothing(blast(who));
  EXPECT_EQ(blast_inwards(), 0U) << last_in;
}

TEST_F(Leak, LayerTwosTableAlone) {
  make_open();
  install(Family::bridge);
  bring_open_up();
  expect_nothing(blast(who));
  EXPECT_FALSE(has_learnt());
  EXPECT_EQ(blast_inwards(), 0U) << last_in;
}

TEST_F(Leak, LayerTwosPortFlagsAlone) {
  make_open(kPortFlags);
  bring_open_up();
  // `locked` without an FDB entry is what holds where a foreign flush takes the tables.
  expect_nothing(blast(who));
}

TEST_F(Leak, LayerThreeAlone) {
  make_open();
  install(Family::inet);
  bring_open_up();
  const Reached reached = blast(who);
  EXPECT_EQ(text(reached.host), "");
  EXPECT_EQ(text(reached.uplink), "");
  for (const auto& kind : reached.neighbour) {
    EXPECT_FALSE(kind.starts_with("neighbour-routed")) << kind;
  }
  EXPECT_FALSE(reached.bridge.empty());  // so the layer was asked
}

// ---- released

TEST_F(Leak, ReleasedPortPassesWhatTheDesignLists) {
  make_gated();
  PortSpec p = port(1);
  release(p);
  const Reached reached = blast(who);  // to port 7777: not in the policy
  for (const auto& kind : catalogue()) {
    const bool seen = reached.bridge.contains(kind.name);
    if (kind.released == test::Released::either) continue;
    EXPECT_EQ(seen, kind.released == test::Released::passes) << kind.name;
  }
  EXPECT_EQ(text(reached.neighbour), "");
  EXPECT_EQ(text(reached.uplink), "");
  // Neighbour solicitations for the gateway are what the network itself needs.
  for (const auto& kind : reached.host) EXPECT_TRUE(kind.starts_with("nd-solicit-gateway")) << kind;
}

TEST_F(Leak, ReleasedPortReachesOnlyItsDestinations) {
  make_gated();
  PortSpec p = port(1);
  release(p);
  for (const auto& [protocol, number, kinds] :
       {std::tuple{Protocol::tcp, 443, Names{"own-outside-tcp-syn", "own-outside6-tcp-syn"}},
        std::tuple{Protocol::udp, 53, Names{"own-outside-udp", "own-outside6-udp"}}}) {
    Identity to = who;
    to.port = static_cast<std::uint16_t>(number);
    const Reached reached = blast(to);
    for (const auto& kind : kinds) EXPECT_TRUE(reached.uplink.contains(kind)) << kind;
    EXPECT_FALSE(reached.uplink_frames.empty());
    for (const auto& seen : reached.uplink_frames) {
      if (!seen.outgoing) continue;
      const auto* kind = find_kind(*seen.kind);
      EXPECT_NE(kind->released, test::Released::dropped) << kind->name;
      EXPECT_TRUE(goes_to(seen.bytes, who.outside, protocol, to.port)) << kind->name;
    }
    EXPECT_EQ(text(reached.neighbour), "");
    for (const auto& kind : reached.host) {
      EXPECT_TRUE(kind.starts_with("nd-solicit-gateway")) << kind;
    }
  }
  // The right port of the wrong address, of both families.
  for (const char* other :
       {"198.51.100.3", "169.254.169.254", "10.0.0.1", "192.0.2.12", "192.0.2.1"}) {
    Identity wrong = who;
    wrong.outside.ip4 = Ipv4Address::parse(other).value();
    wrong.outside.ip6 = Ipv6Address::parse("2001:db8:51::3").value();
    wrong.port = 443;
    const Reached reached = blast(wrong);
    EXPECT_EQ(text(reached.uplink), "") << other;
    EXPECT_EQ(text(reached.neighbour), "") << other;
  }
}

TEST_F(Leak, RealConnectionsFollowThePolicy) {
  make_gated();
  PortSpec p = port(1);
  release(p);
  for (const IpAddress& server : {IpAddress(who.outside.ip4), IpAddress(who.outside.ip6)}) {
    SCOPED_TRACE(server.to_string());
    if (!p.policy) {
      p.policy = "web";
      ok(gate->release_port(p, policy()));
    }
    const int listener = listen_on(*uplink, server, 443);
    const int other = listen_on(*uplink, server, 444);
    const auto open_flow = [&] {
      const int client = connect_to(*a, server, 443, 3s);
      EXPECT_GE(client, 0) << client;
      return std::pair{client,
                       client < 0 ? -1 : ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC)};
    };
    auto [client, accepted] = open_flow();
    ASSERT_GE(client, 0);
    EXPECT_TRUE(arrives(client, accepted));
    EXPECT_TRUE(arrives(accepted, client));
    EXPECT_LT(connect_to(*a, server, 444), 0);
    EXPECT_LT(connect_to(*b, server, 443), 0);  // the neighbour is closed

    // An element that goes takes live flows with it, in both directions.
    ok(gate->update_policy(policy(false)));
    EXPECT_FALSE(arrives(accepted, client));
    EXPECT_FALSE(arrives(client, accepted));
    ::close(client);
    ::close(accepted);

    ok(gate->update_policy(policy()));
    std::tie(client, accepted) = open_flow();
    ASSERT_GE(client, 0);
    EXPECT_TRUE(arrives(client, accepted));
    ok(gate->close_port(p));
    p.policy.reset();
    EXPECT_FALSE(arrives(accepted, client));
    EXPECT_FALSE(arrives(client, accepted));
    for (const int fd : {client, accepted, listener, other}) ::close(fd);
  }
}

TEST_F(Leak, UnsolicitedPacketsDoNotEnterAReleasedPort) {
  make_gated();
  PortSpec p = port(1);
  release(p);
  Identity server = from_outside();
  for (const std::uint16_t source : {443, 53}) {
    server.source_port = source;
    Sniffer at_a(a->fd(), "eth0", options(server));
    send_all(*uplink, "eth0", server);
    at_a.stop();
    Names seen = names(at_a.counts().kinds);
    // In the next test.
    seen.erase("spoof-ip-outside");
    seen.erase("spoof-ip6-outside");
    EXPECT_EQ(text(seen), "") << source;
  }
}

// Known and open: with rp_filter off, the uplink can send the host a packet that claims to be from
// a released container, and the host's ICMP error about it goes to the container: to conntrack it
// is RELATED, whoever sent the packet. Skips as long as that is so, and fails if more than such
// errors comes in.
TEST_F(Leak, ErrorsAboutPacketsSpoofedByTheUplink) {
  make_gated();
  PortSpec p = port(1);
  release(p);
  const Identity server = from_outside();
  Sniffer at_a(a->fd(), "eth0", options(server));
  send_all(*uplink, "eth0", server);
  at_a.stop();
  bool came = false;
  for (const auto& seen : at_a.frames()) {
    if (seen.outgoing || !seen.kind) continue;
    came = true;
    const bool icmp4 =
        seen.bytes.at(12) == 0x08 && seen.bytes.at(23) == IPPROTO_ICMP && seen.bytes.at(34) == 3;
    const bool icmp6 =
        seen.bytes.at(12) == 0x86 && seen.bytes.at(20) == IPPROTO_ICMPV6 && seen.bytes.at(54) == 1;
    EXPECT_TRUE(icmp4 || icmp6) << find_kind(*seen.kind)->name;
  }
  EXPECT_FALSE(came) << "the host's errors about packets that claim a container's address came in";
}

TEST_F(Leak, ReleasedNeighboursCannotReachEachOther) {
  make_gated();
  PortSpec p1 = port(1);
  PortSpec p2 = port(2);
  release(p1);
  release(p2);
  Identity https = who;
  https.port = 443;
  for (const Identity& as : {who, https}) {
    EXPECT_EQ(text(blast(as).neighbour), "");
    const Identity back = as_neighbour(as);
    Sniffer at_a(a->fd(), "eth0", options(back, kRun + 1));
    send_all(*b, "eth0", back, kRun + 1);
    at_a.stop();
    EXPECT_EQ(text(names(at_a.counts().kinds)), "");
  }
}

// Where the kernel has no owner,persist (before 6.9) all tables can go at once: by a foreign flush
// if they are plain, with the daemon if they are its own. Until they are back the token on the
// bridge device is what holds a released port.
class LeakWithToken : public Leak {
 protected:
  void attach() {
    bridge = host->json({"ip", "-j", "link", "show", kBridge})[0]["ifindex"].get<std::uint32_t>();
    auto opened = host->run([] { return Token::open(); });
    ASSERT_TRUE(opened) << opened.error().to_string();
    token = std::make_unique<Token>(std::move(*opened));
    ok(token->attach(bridge));
  }
  // Frames that container A receives, ARP aside, of what others and the host try.
  [[nodiscard]] std::size_t inwards() const {
    Sniffer::Options everything = options(who);
    everything.keep_unknown = true;
    Sniffer at_a(a->fd(), "eth0", everything);
    Identity from_host = who;
    std::swap(from_host.own, from_host.gateway);
    send_all(*host, kBridge, from_host);
    send_all(*b, "eth0", as_neighbour(who));
    send_all(*uplink, "eth0", from_outside());
    at_a.stop();
    std::size_t out = 0;
    for (const auto& seen : at_a.frames()) {
      const bool arp = seen.bytes.at(12) == 0x08 && seen.bytes.at(13) == 0x06;
      if (!seen.outgoing && !arp) ++out;
    }
    return out;
  }
  // `lose` takes the tables of the released port away.
  void holds_after(const std::function<void()>& lose) {
    // What the policy allows passes the token, both ways.
    const int listener = listen_on(*uplink, who.outside.ip4, 443);
    const int client = connect_to(*a, who.outside.ip4, 443, 3s);
    ASSERT_GE(client, 0) << client;
    const int accepted = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    EXPECT_TRUE(arrives(client, accepted));
    EXPECT_TRUE(arrives(accepted, client));

    lose();
    ASSERT_EQ(host->must({"nft", "list", "ruleset"}), "");
    Identity https = who;
    https.port = 443;
    for (const Identity& as : {who, https}) {
      const Reached reached = blast(as);
      EXPECT_FALSE(reached.bridge.empty());  // a tap on the device is asked before the token
      EXPECT_EQ(text(reached.neighbour), "");
      EXPECT_EQ(text(reached.uplink), "");
      EXPECT_EQ(text(reached.host), "");
    }
    EXPECT_FALSE(arrives(accepted, client));
    EXPECT_FALSE(arrives(client, accepted));
    EXPECT_EQ(inwards(), 0U);
    EXPECT_TRUE(*token->present(bridge));

    // What the zeros are worth.
    ok(token->detach(bridge));
    EXPECT_GE(blast(who).uplink.size(), 10U);
    EXPECT_GE(inwards(), 20U);
    for (const int fd : {client, accepted, listener}) ::close(fd);
  }

  std::unique_ptr<Token> token;
  std::uint32_t bridge = 0;
};

TEST_F(LeakWithToken, HoldsAReleasedPortAfterAFlush) {
  make_open(kPortFlags);
  GateSpec spec;
  spec.networks[network().bridge] = network();
  spec.policies["web"] = policy();
  PortSpec p = port(1);
  p.policy = "web";
  spec.ports[p.name] = p;
  spec.ports[port(2).name] = port(2);
  for (const Family family : {Family::netdev, Family::bridge, Family::inet}) install(family, spec);
  host->sh("bridge fdb replace " + p.mac.to_string() + " dev " + p.name.str() + " master static");
  bring_open_up();
  attach();
  holds_after([&] { host->must({"nft", "flush", "ruleset"}); });
}

TEST_F(LeakWithToken, HoldsAReleasedPortWhoseTablesWentWithTheirOwner) {
  open_gate(Ownership::owner);
  make_gated_ports();
  PortSpec p = port(1);
  release(p);
  attach();
  holds_after([&] { gate.reset(); });
}

// ---- while things change

std::vector<test::Bytes> all_frames(const Identity& as, std::uint64_t run = kRun) {
  std::vector<test::Bytes> out;
  for (const auto& kind : catalogue()) {
    for (auto& frame : kind.build(as, run)) {
      if (frame.size() <= 1514) out.push_back(std::move(frame));
    }
  }
  return out;
}

// Two senders take turns: one sends while the port is closed, being made or being removed, the
// other while it is released. Their frames carry different run numbers, so that a frame of the
// first on the bridge is a leak whenever a tap gets to read it.
TEST_F(Leak, NoWindowInTwoHundredLives) {
  constexpr std::uint64_t kClosedRun = kRun + 0x100;
  open_gate();
  ok(gate->create_network(network()));
  ok(gate->create_port(port(2)));
  move_in(*host, port(2).peer.str(), *b, who.neighbour);
  Identity https = who;
  https.port = 443;
  const std::string peer = port(1).peer.str();
  const auto closed_frames = all_frames(https, kClosedRun);
  const auto open_frames = all_frames(https);
  Sniffer closed_bridge(host->fd(), kBridge, {.run = kClosedRun, .who = {}});
  Sniffer closed_up(host->fd(), "up0", {.run = kClosedRun, .who = {}});
  Sniffer bridge(host->fd(), kBridge, options(https));
  Sniffer neighbour(b->fd(), "eth0", {.run = kRun, .who = {}, .keep_unknown = true});
  Sniffer up(host->fd(), "up0", options(https));
  std::uint64_t closed_sent = 0;
  int lives_that_sent = 0;
  auto sender = std::make_unique<test::Blaster>(a->fd(), peer, closed_frames);
  for (int life = 0; life < 200; ++life) {
    PortSpec p = port(1);
    ok(gate->create_port(p));
    host->must({"ip", "link", "set", peer, "netns", a->path()});
    ASSERT_TRUE(sender->wait_sent(sender->counts().sent + 400, 5s)) << "life " << life;
    p.prepared = true;
    ok(gate->prepare_port(p));
    ASSERT_TRUE(sender->wait_sent(sender->counts().sent + 500, 5s));
    closed_sent += sender->stop().sent;
    // What the kernel still has queued of them must not meet the released port.
    std::this_thread::sleep_for(5ms);
    const std::uint64_t before = bridge.counts().marked().incoming;
    sender = std::make_unique<test::Blaster>(a->fd(), peer, open_frames);
    ASSERT_TRUE(sender->wait_sent(200, 5s));
    p.policy = "web";
    ok(gate->release_port(p, policy()));
    ASSERT_TRUE(sender->wait_sent(sender->counts().sent + 600, 5s));
    ok(gate->close_port(p));
    sender->stop();
    sender = std::make_unique<test::Blaster>(a->fd(), peer, closed_frames);
    ASSERT_TRUE(sender->wait_sent(1000, 5s));
    if (bridge.counts().marked().incoming > before) ++lives_that_sent;
    if (life % 2 == 0) ok(gate->unprepare_port(p));
    ok(gate->delete_port(p));
  }
  closed_sent += sender->stop().sent;
  for (Sniffer* one : {&closed_bridge, &closed_up, &bridge, &neighbour, &up}) one->stop();
  EXPECT_GT(closed_sent, 200U * 800U);
  EXPECT_GE(lives_that_sent, 190);  // a tap may be read late
  EXPECT_EQ(text(names(closed_bridge.counts().kinds)), "");
  EXPECT_EQ(text(names(closed_up.counts().kinds, true)), "");
  EXPECT_EQ(neighbour.counts().all.incoming, 0U);
  for (const auto& kind : names(bridge.counts().kinds)) {
    EXPECT_NE(find_kind(kind)->released, test::Released::dropped) << kind;
  }
  EXPECT_TRUE(names(up.counts().kinds, true).contains("own-outside-tcp-syn"));
  std::size_t judged = 0;
  for (const auto& seen : up.frames()) {
    if (!seen.outgoing || !seen.kind) continue;
    EXPECT_TRUE(goes_to(seen.bytes, who.outside, Protocol::tcp, 443))
        << find_kind(*seen.kind)->name;
    ++judged;
  }
  EXPECT_GT(judged, 0U);
  RecordProperty("closed_sent", std::to_string(closed_sent));
  RecordProperty("tap_drops", std::to_string(closed_bridge.counts().drops + bridge.counts().drops));
}

// Hears what the kernel says about links and about chains, and which came first. Both are said
// while the change is made: when one is read here, what was before it is in the other's queue.
class ChangeListener {
 public:
  ChangeListener(const NetNamespace& where, std::string port) : port_(std::move(port)) {
    where.run([&] {
      links_ = open(NETLINK_ROUTE, RTNLGRP_LINK);
      chains_ = open(NETLINK_NETFILTER, NFNLGRP_NFTABLES);
    });
    thread_ = std::thread([this] {
      while (!stop_) {
        pollfd polled[] = {{links_, POLLIN, 0}, {chains_, POLLIN, 0}};
        if (::poll(polled, 2, 20) > 0) {
          read_links();
          read_chains();
          const unsigned before = chains_gone;
          read_links();
          if (gone < before) ++chain_gone_before_link;
        }
      }
    });
  }
  ~ChangeListener() { stop(); }
  ChangeListener(const ChangeListener&) = delete;
  ChangeListener& operator=(const ChangeListener&) = delete;
  void stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
    for (int* fd : {&links_, &chains_}) {
      if (*fd >= 0) ::close(*fd);
      *fd = -1;
    }
  }
  // Of the port's life: links that went up, links that went, chains that came, chains that went.
  unsigned up = 0, gone = 0, chains_made = 0, chains_gone = 0;
  unsigned up_without_chain = 0, chain_gone_before_link = 0, lost = 0;

 private:
  static int open(int protocol, unsigned group) {
    const int fd = ::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC | SOCK_NONBLOCK, protocol);
    const int size = 8 << 20;
    ::setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof size);
    sockaddr_nl any{};
    any.nl_family = AF_NETLINK;
    EXPECT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&any), sizeof any), 0);
    EXPECT_EQ(::setsockopt(fd, SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, &group, sizeof group), 0);
    return fd;
  }
  template <class Take>
  void read(int fd, const std::string& name, Take take) {
    alignas(nlmsghdr) char buffer[65536];
    for (;;) {
      const ssize_t size = ::recv(fd, buffer, sizeof buffer, 0);
      if (size < 0 && errno == ENOBUFS) ++lost;
      if (size <= 0) return;
      auto rest = static_cast<unsigned>(size);
      for (auto* message = reinterpret_cast<nlmsghdr*>(buffer); NLMSG_OK(message, rest);
           message = NLMSG_NEXT(message, rest)) {
        const char* begin = reinterpret_cast<const char*>(message);
        // The name as an attribute has it, with the zero behind it.
        if (std::search(begin, begin + message->nlmsg_len, name.c_str(),
                        name.c_str() + name.size() + 1) != begin + message->nlmsg_len) {
          take(*message);
        }
      }
    }
  }
  void read_links() {
    read(links_, port_, [&](nlmsghdr& message) {
      const auto* link = static_cast<const ifinfomsg*>(NLMSG_DATA(&message));
      if (link->ifi_family != AF_UNSPEC) return;
      if (message.nlmsg_type == RTM_DELLINK) {
        ++gone;
      } else if ((link->ifi_flags & IFF_UP) != 0 && up == gone) {
        ++up;
        read_chains();
        if (chains_made < up) ++up_without_chain;
      }
    });
  }
  void read_chains() {
    read(chains_, port_ + "-in", [&](nlmsghdr& message) {
      const unsigned type = message.nlmsg_type & 0xFFU;
      if (type == NFT_MSG_NEWCHAIN) ++chains_made;
      if (type == NFT_MSG_DELCHAIN) ++chains_gone;
    });
  }

  const std::string port_;
  int links_ = -1, chains_ = -1;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// By the kernel's own account: no port is up without its chains, or not on the bridge, or without
// one of its flags; and no chain goes before its link. And by layer 2's counter: nothing comes to
// it, however much is sent while ports come and go.
TEST_F(Leak, OrderOfMakingAndRemovingAPort) {
  open_gate();
  ok(gate->create_network(network()));
  test::Output events;
  std::thread monitor([&] {
    events = host->exec({"timeout", "4", "bridge", "-o", "-d", "monitor", "link"});
  });
  std::this_thread::sleep_for(300ms);
  const PortSpec p = port(1);
  ChangeListener changes(*host, p.name.str());
  test::Blaster sender(host->fd(), p.peer.str(), all_frames(who));
  constexpr unsigned kLives = 30;
  for (unsigned life = 0; life < kLives; ++life) {
    ok(gate->create_port(p));
    EXPECT_TRUE(sender.wait_sent(sender.counts().sent + 200, 5s)) << "life " << life;
    ok(gate->delete_port(p));
  }
  sender.stop();
  std::this_thread::sleep_for(100ms);
  changes.stop();
  monitor.join();
  EXPECT_EQ(changes.lost, 0U);
  EXPECT_EQ(changes.up, kLives);
  EXPECT_EQ(changes.chains_made, kLives);
  EXPECT_EQ(changes.up_without_chain, 0U);
  EXPECT_EQ(changes.chain_gone_before_link, 0U);
  EXPECT_NE(host->must({"nft", "list", "chain", "bridge", "agentgate", "from_port"})
                .find("counter packets 0 bytes 0"),
            std::string::npos);
  std::istringstream lines(events.out);
  std::size_t up = 0;
  for (std::string line; std::getline(lines, line);) {
    if (line.find(" " + p.name.str() + "@") == std::string::npos ||
        (line.find(",UP") == std::string::npos && line.find("<UP") == std::string::npos)) {
      continue;
    }
    EXPECT_NE(line.find("master agn0123456789"), std::string::npos) << line;
    if (line.find(" hairpin ") == std::string::npos) continue;  // not about the port
    ++up;
    for (const char* flag : {" isolated on", " locked on", " learning off", " flood off",
                             " mcast_flood off", " bcast_flood off"}) {
      EXPECT_NE(line.find(flag), std::string::npos) << flag << ": " << line;
    }
  }
  EXPECT_GE(up, kLives);
}

// What others on the host do to a closed port, under full rate. The names say what was done.
class Meddling : public Leak,
                 public ::testing::WithParamInterface<std::pair<const char*, const char*>> {};

TEST_P(Meddling, ClosedPortStaysClosed) {
  make_gated();
  Sniffer bridge(host->fd(), kBridge, options(who));
  Sniffer neighbour(b->fd(), "eth0", options(who));
  Sniffer up(host->fd(), "up0", options(who));
  HostListener listener(host->fd(), kRun);
  test::Blaster blaster(a->fd(), "eth0", all_frames(who));
  ASSERT_TRUE(blaster.wait_sent(1000, 5s));
  // Before Linux 6.2 a link is renamed only while it is DOWN.
  const std::string rename =
      "rename() { ip link set $1 name $2 ||"
      " { ip link set $1 down; ip link set $1 name $2; ip link set $2 up; }; };";
  const test::Output done = host->exec({"/bin/sh", "-ec", rename + GetParam().second});
  EXPECT_EQ(done.status, 0) << done.err;
  EXPECT_TRUE(blaster.wait_sent(blaster.counts().sent + 20000, 5s));
  blaster.stop();
  std::this_thread::sleep_for(50ms);
  listener.stop();
  bridge.stop();
  neighbour.stop();
  up.stop();
  EXPECT_EQ(text(names(neighbour.counts().kinds)), "");
  EXPECT_EQ(text(names(up.counts().kinds, true)), "");
  EXPECT_EQ(listener.counts().kinds.size(), 0U);
  const Names on_bridge = names(bridge.counts().kinds);
  EXPECT_EQ(text(on_bridge), "");
}

INSTANTIATE_TEST_SUITE_P(
    Foreign, Meddling,
    ::testing::Values(
        std::pair{"FlushRuleset", "nft flush ruleset"},
        std::pair{"IsolatedOff", "bridge link set dev agp0000000001 isolated off"},
        std::pair{"AllFlagsOff",
                  "for p in agp0000000001 agp0000000002; do bridge link set dev $p isolated off"
                  " locked off learning on flood on mcast_flood on bcast_flood on; done"},
        std::pair{"NoMaster", "ip link set agp0000000001 nomaster"},
        std::pair{"NoMasterWithAddress",
                  "ip link set agp0000000001 nomaster; ip addr add 192.0.2.1/24 dev agp0000000001"},
        std::pair{"OtherBridge",
                  "ip link add other type bridge; ip link set other up;"
                  "ip link set agp0000000001 master other"},
        std::pair{"Renamed", "rename agp0000000001 stolen"},
        std::pair{"FdbEntry",
                  "bridge fdb replace 02:00:00:00:01:01 dev agp0000000001 master static"},
        std::pair{"RenamedWithFdbEntry",
                  "bridge fdb replace 02:00:00:00:01:01 dev agp0000000001 master static;"
                  "rename agp0000000001 stolen"}),
    [](const auto& instance) { return std::string(instance.param.first); });

}  // namespace
}  // namespace agentgate::netdriver
