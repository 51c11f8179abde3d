// SPDX-License-Identifier: GPL-2.0-or-later
//
// Hostile code behind the gate, and hostile traffic in front of it, counted with AF_PACKET taps
// that share nothing with the code under test.
//
// Two containers on one network, an uplink behind the host. The first test has no gate at all:
// what it counts is what the zeros of the others are worth.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>

#include "netdriver/gate_kernel.h"
#include "netdriver/nft_socket.h"
#include "netdriver/ruleset.h"
#include "netdriver/token.h"
#include "tests/support/netns.h"
#include "tests/support/sniffer.h"

namespace agentgate::netdriver {
namespace {

using namespace std::chrono_literals;
using nft::Family;
using test::catalogue;
using test::find_kind;
using test::HostListener;
using test::Identity;
using test::NetNamespace;
using test::Sender;
using test::Sniffer;

constexpr const char* kBridge = "agn0123456789";
constexpr std::uint64_t kRun = 0x6c65616b00000001;

InterfaceName name(const std::string& text) { return InterfaceName::parse(text).value(); }

Identity identity() { return Identity::example(); }
// The same place, seen by the other container.
Identity as_neighbour(Identity who) {
  std::swap(who.own, who.neighbour);
  return who;
}

NetworkSpec network() {
  const Identity who = identity();
  NetworkSpec out;
  out.bridge = name(kBridge);
  out.mac = who.gateway.mac;
  out.gateway4 = Ipv4InterfaceAddress{who.gateway.ip4, 24};
  out.gateway6 = Ipv6InterfaceAddress{who.gateway.ip6, 64};
  return out;
}

PortSpec port(int number) {
  const Identity who = identity();
  const test::Station& station = number == 1 ? who.own : who.neighbour;
  PortSpec out;
  out.name = name("agp000000000" + std::to_string(number));
  out.peer = name("agc000000000" + std::to_string(number));
  out.bridge = network().bridge;
  out.mac = station.mac;
  out.address4 = station.ip4;
  out.address6 = station.ip6;
  out.bridge_mac = who.gateway.mac;
  out.gateway4 = who.gateway.ip4;
  out.gateway6 = who.gateway.ip6;
  return out;
}

// tcp/443 and udp/53 of the outside station, both families.
PolicySpec policy(bool with_https = true) {
  const Identity who = identity();
  PolicySpec out;
  out.name = "web";
  const auto a4 = who.outside.ip4;
  const auto a6 = who.outside.ip6;
  if (with_https) {
    out.v4.allow.push_back({{a4, a4}, Protocol::tcp, {443, 443}});
    out.v6.allow.push_back({{a6, a6}, Protocol::tcp, {443, 443}});
  }
  out.v4.allow.push_back({{a4, a4}, Protocol::udp, {53, 53}});
  out.v6.allow.push_back({{a6, a6}, Protocol::udp, {53, 53}});
  return normalise(out);
}

using Names = std::set<std::string>;

Names names(const std::map<std::uint16_t, test::Tally>& kinds, bool outgoing = false) {
  Names out;
  for (const auto& [number, tally] : kinds) {
    if ((outgoing ? tally.outgoing : tally.incoming) > 0) out.insert(find_kind(number)->name);
  }
  return out;
}
std::string text(const Names& all) {
  std::string out;
  for (const auto& one : all) out += one + " ";
  return out;
}

// Where the container's frames were seen.
struct Reached {
  Names bridge, neighbour, uplink, host;
  std::vector<test::Seen> uplink_frames;
};

// Whether a routed frame goes to the address of its family, with that protocol and port. A
// fragment without the transport header is judged by what it has.
bool goes_to(const test::Bytes& frame, const test::Station& to, Protocol protocol,
             std::uint16_t port_number) {
  const auto at = [&](std::size_t i) -> unsigned { return i < frame.size() ? frame[i] : 0; };
  const auto equal = [&](std::size_t offset, const auto& bytes) {
    return frame.size() >= offset + bytes.size() &&
           std::equal(bytes.begin(), bytes.end(), frame.begin() + static_cast<long>(offset));
  };
  const unsigned type = (at(12) << 8U) | at(13);
  std::size_t transport = 0;
  unsigned next = 0;
  bool later_fragment = false;
  if (type == 0x0800) {
    if (!equal(30, to.ip4.bytes())) return false;
    next = at(23);
    later_fragment = (((at(20) << 8U) | at(21)) & 0x1FFFU) != 0;
    transport = 14 + 4U * (at(14) & 15U);
  } else if (type == 0x86DD) {
    if (!equal(38, to.ip6.bytes())) return false;
    next = at(20);
    transport = 54;
    while (next == 0 || next == 43 || next == 44 || next == 60) {
      if (next == 44) later_fragment = (((at(transport + 2) << 8U) | at(transport + 3)) >> 3U) != 0;
      const std::size_t length = next == 44 ? 8 : 8 + 8U * at(transport + 1);
      next = at(transport);
      transport += length;
      if (later_fragment) break;
    }
  } else {
    return false;
  }
  if (next != static_cast<unsigned>(protocol)) return later_fragment && type == 0x86DD;
  return later_fragment || ((at(transport + 2) << 8U) | at(transport + 3)) == port_number;
}

void expect_nothing(const Reached& reached) {
  EXPECT_EQ(text(reached.bridge), "");
  EXPECT_EQ(text(reached.neighbour), "");
  EXPECT_EQ(text(reached.uplink), "");
  EXPECT_EQ(text(reached.host), "");
}

class Leak : public test::KernelTest {
 protected:
  void SetUp() override {
    KernelTest::SetUp();
    if (IsSkipped()) return;
    host = std::make_unique<NetNamespace>();
    a = std::make_unique<NetNamespace>();
    b = std::make_unique<NetNamespace>();
    uplink = std::make_unique<NetNamespace>();
    host->sh(
        "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1"
        " net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0;"
        "if [ -d /proc/sys/net/bridge ]; then sysctl -qw net.bridge.bridge-nf-call-iptables=0"
        " net.bridge.bridge-nf-call-ip6tables=0 net.bridge.bridge-nf-call-arptables=0; fi");
    test::make_veth(
        {*host, "up0", "", {"198.51.100.1/24", "2001:db8:51::1/64"}},
        {*uplink, "eth0", who.outside.mac.to_string(), {"198.51.100.2/24", "2001:db8:51::2/64"}});
    up_mac = MacAddress::parse(
                 host->json({"ip", "-j", "link", "show", "up0"})[0]["address"].get<std::string>())
                 .value();
    // What the host routes leaves at once, and packets to the containers' pool come in.
    host->sh(
        "ip route add default via 198.51.100.2; ip -6 route add default via 2001:db8:51::2;"
        "ip neigh replace 198.51.100.2 dev up0 lladdr 02:00:00:00:02:02 nud permanent;"
        "ip neigh replace 2001:db8:51::2 dev up0 lladdr 02:00:00:00:02:02 nud permanent");
    uplink->sh(
        "ip route add 192.0.2.0/24 via 198.51.100.1; ip -6 route add 2001:db8:2::/64 via "
        "2001:db8:51::1");
  }
  void TearDown() override { gate.reset(); }

  static void ok(const Status& status) { ASSERT_TRUE(status) << status.error().to_string(); }

  static void move_in(const NetNamespace& from, const std::string& peer, const NetNamespace& to,
                      const test::Station& station) {
    from.must({"ip", "link", "set", peer, "netns", to.path(), "name", "eth0"});
    to.sh("sysctl -qw net.ipv6.conf.eth0.accept_dad=0; ip addr add " + station.ip4.to_string() +
          "/24 dev eth0; ip addr add " + station.ip6.to_string() +
          "/64 dev eth0 nodad; ip link set eth0 up; ip route add default via 192.0.2.1;"
          "ip -6 route add default via 2001:db8:2::1");
  }

  void open_gate(Ownership ownership = Ownership::best) {
    host->run([&] {
      auto opened = Gate::open(ownership);
      ASSERT_TRUE(opened) << opened.error().to_string();
      gate = std::move(*opened);
      auto restored = gate->restore({});
      ASSERT_TRUE(restored) << restored.error().to_string();
    });
  }
  // Gate and two closed ports, the containers' ends moved in and up.
  void make_gated() {
    open_gate();
    make_gated_ports();
  }
  void make_gated_ports() {
    ok(gate->create_network(network()));
    ok(gate->create_port(port(1)));
    ok(gate->create_port(port(2)));
    move_in(*host, port(1).peer.str(), *a, who.own);
    move_in(*host, port(2).peer.str(), *b, who.neighbour);
  }
  void release(PortSpec& p) {
    p.prepared = true;
    ok(gate->prepare_port(p));
    p.policy = "web";
    ok(gate->release_port(p, policy()));
  }

  // The same links by hand, with the kernel's defaults: open. `port_setup` runs on each port while
  // it is DOWN, with $P as its name. The ports have no IPv6 of their own: what the host's stack
  // says on the port device itself (MLD reports) never sees the bridge, and is layer 1's business
  // alone.
  void make_open(const std::string& port_setup = ":") {
    test::make_bridge(
        {*host, kBridge, who.gateway.mac.to_string(), {"192.0.2.1/24", "2001:db8:2::1/64"}});
    host->must({"ip", "link", "set", kBridge, "type", "bridge", "mcast_snooping", "0"});
    for (int number : {1, 2}) {
      const PortSpec p = port(number);
      host->sh("P=" + p.name.str() + "; ip link add $P type veth peer name " + p.peer.str() +
               " address " + p.mac.to_string() +
               "; sysctl -qw net.ipv6.conf.$P.disable_ipv6=1; ip link set $P master " + kBridge +
               "; " + port_setup);
      for (const std::string& ip : {p.address4->to_string(), p.address6->to_string()}) {
        host->must({"ip", "neigh", "replace", ip, "dev", kBridge, "lladdr", p.mac.to_string(),
                    "nud", "permanent"});
      }
    }
  }
  void bring_open_up() {
    for (int number : {1, 2}) host->must({"ip", "link", "set", port(number).name.str(), "up"});
    move_in(*host, port(1).peer.str(), *a, who.own);
    move_in(*host, port(2).peer.str(), *b, who.neighbour);
  }
  // One table alone, as the gate has it for two closed ports.
  void install(Family family) {
    GateSpec spec;
    spec.ports[port(1).name] = port(1);
    spec.ports[port(2).name] = port(2);
    install(family, spec);
  }
  // With no flag: everybody's to flush.
  void install(Family family, const GateSpec& spec) {
    const nft::Table table = ruleset::render(spec, 0)[family];
    host->run([&] {
      auto socket = nft::NftSocket::open();
      ASSERT_TRUE(socket) << socket.error().to_string();
      nft::Batch batch;
      batch.add_table(family, 0);
      for (const auto& [set, value] : table.sets) batch.add_set(family, set, value);
      for (const auto& [chain, value] : table.chains) batch.add_chain(family, chain, value);
      for (const auto& [chain, value] : table.chains) {
        for (const auto& rule : value.rules) batch.add_rule(family, chain, rule);
      }
      for (const auto& [set, value] : table.sets) batch.add_elements(family, set, value.elements);
      ok((*socket)->commit(batch, "install one layer"));
    });
  }
  static constexpr const char* kPortFlags =
      "bridge link set dev $P isolated on learning off locked on flood off mcast_flood off "
      "bcast_flood off";

  // Every kind of the catalogue from `from`.
  static void send_all(const NetNamespace& from, const std::string& interface, const Identity& as,
                       std::uint64_t run = kRun) {
    Sender sender(from.fd(), interface);
    for (const auto& kind : catalogue()) sender.send(kind, as, run);
    std::this_thread::sleep_for(150ms);
  }
  [[nodiscard]] static Sniffer::Options options(const Identity& as, std::uint64_t run = kRun) {
    return {.run = run, .who = as};
  }
  // The catalogue from container A.
  Reached blast(const Identity& as) const {
    Sniffer bridge(host->fd(), kBridge, options(as));
    Sniffer neighbour(b->fd(), "eth0", options(as));
    Sniffer up(host->fd(), "up0", options(as));
    HostListener listener(host->fd(), kRun);
    send_all(*a, "eth0", as);
    listener.stop();
    bridge.stop();
    neighbour.stop();
    up.stop();
    EXPECT_EQ(bridge.counts().drops + neighbour.counts().drops + up.counts().drops, 0U);
    Reached out{names(bridge.counts().kinds),
                names(neighbour.counts().kinds),
                names(up.counts().kinds, true),
                {},
                {}};
    for (const auto& [kind, count] : listener.counts().kinds)
      out.host.insert(find_kind(kind)->name);
    return out;
  }
  // The catalogue at container A from the host's bridge device, the neighbour and the uplink, and
  // datagrams of the host's own stack. Returns all frames that A received, by anybody.
  std::uint64_t blast_inwards() const {
    Sniffer::Options everything = options(who);
    everything.keep_unknown = true;
    Sniffer at_a(a->fd(), "eth0", everything);
    Identity from_host = who;
    std::swap(from_host.own, from_host.gateway);
    send_all(*host, kBridge, from_host);
    send_all(*b, "eth0", as_neighbour(who));
    send_all(*uplink, "eth0", from_outside());
    host->run([&] {
      for (const IpAddress& ip : {IpAddress(who.own.ip4), IpAddress(who.own.ip6)}) {
        const int fd = ::socket(ip.is_v4() ? AF_INET : AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0);
        const auto [address, size] = socket_address(ip, 7777);
        (void)::sendto(fd, "x", 1, 0, reinterpret_cast<const sockaddr*>(&address), size);
        ::close(fd);
      }
    });
    std::this_thread::sleep_for(150ms);
    at_a.stop();
    last_in.clear();
    for (const auto& seen : at_a.frames()) {
      if (seen.outgoing) continue;
      last_in += "\n" + (seen.kind ? find_kind(*seen.kind)->name : std::string("unknown")) + ": ";
      for (std::size_t i = 0; i < std::min<std::size_t>(seen.bytes.size(), 64); ++i) {
        constexpr std::string_view digits = "0123456789abcdef";
        last_in += digits[seen.bytes[i] >> 4U];
        last_in += digits[seen.bytes[i] & 15U];
      }
    }
    return at_a.counts().all.incoming;
  }
  // Own packets of the outside station to A, through the host.
  [[nodiscard]] Identity from_outside() const {
    Identity out = who;
    out.own = who.outside;
    out.gateway.mac = up_mac;
    out.outside = who.own;
    return out;
  }

  static std::pair<sockaddr_storage, socklen_t> socket_address(const IpAddress& ip,
                                                               std::uint16_t number) {
    sockaddr_storage out{};
    if (ip.is_v4()) {
      auto* in = reinterpret_cast<sockaddr_in*>(&out);
      in->sin_family = AF_INET;
      in->sin_port = htons(number);
      std::copy(ip.bytes().begin(), ip.bytes().end(),
                reinterpret_cast<std::uint8_t*>(&in->sin_addr));
      return {out, sizeof(sockaddr_in)};
    }
    auto* in6 = reinterpret_cast<sockaddr_in6*>(&out);
    in6->sin6_family = AF_INET6;
    in6->sin6_port = htons(number);
    std::copy(ip.bytes().begin(), ip.bytes().end(), in6->sin6_addr.s6_addr);
    return {out, sizeof(sockaddr_in6)};
  }
  static int listen_on(const NetNamespace& where, const IpAddress& ip, std::uint16_t number) {
    return where.run([&] {
      const int fd = ::socket(ip.is_v4() ? AF_INET : AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
      const int on = 1;
      ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
      const auto [address, size] = socket_address(ip, number);
      EXPECT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&address), size), 0) << errno;
      EXPECT_EQ(::listen(fd, 8), 0);
      return fd;
    });
  }
  // A descriptor, or minus the errno (ETIMEDOUT after `timeout`).
  static int connect_to(const NetNamespace& where, const IpAddress& ip, std::uint16_t number,
                        std::chrono::milliseconds timeout = 300ms) {
    return where.run([&] {
      const int fd =
          ::socket(ip.is_v4() ? AF_INET : AF_INET6, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
      const auto [address, size] = socket_address(ip, number);
      int error = 0;
      if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), size) != 0) {
        error = errno;
        pollfd polled{fd, POLLOUT, 0};
        if (error == EINPROGRESS) {
          error = ETIMEDOUT;
          if (::poll(&polled, 1, static_cast<int>(timeout.count())) > 0) {
            socklen_t length = sizeof error;
            ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
          }
        }
      }
      if (error == 0) return fd;
      ::close(fd);
      return -error;
    });
  }
  static bool arrives(int from, int to, std::chrono::milliseconds timeout = 400ms) {
    if (::send(from, "ping", 4, MSG_NOSIGNAL) != 4) return false;
    pollfd polled{to, POLLIN, 0};
    char buffer[16];
    return ::poll(&polled, 1, static_cast<int>(timeout.count())) > 0 &&
           ::recv(to, buffer, sizeof buffer, MSG_DONTWAIT) == 4;
  }

  const Identity who = identity();
  MacAddress up_mac;
  mutable std::string last_in;  // what blast_inwards saw, for the failure's message
  std::unique_ptr<NetNamespace> host, a, b, uplink;
  std::unique_ptr<Gate> gate;
};

// ---- what the zeros are worth

TEST_F(Leak, WithoutAGateTheFramesDoPass) {
  make_open();
  bring_open_up();
  const Reached reached = blast(who);
  EXPECT_GE(reached.bridge.size(), 40U) << text(reached.bridge);
  EXPECT_GE(reached.neighbour.size(), 30U) << text(reached.neighbour);
  EXPECT_GE(reached.uplink.size(), 15U) << text(reached.uplink);
  EXPECT_GE(reached.host.size(), 8U) << text(reached.host);
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
    for (const auto& seen : reached.uplink_frames) {
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
