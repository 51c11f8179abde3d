// SPDX-License-Identifier: GPL-2.0-or-later
//
// The place where the leak tests happen: two containers on one network, an uplink behind the
// host. Frames are counted with AF_PACKET taps that share nothing with the code under test.
#pragma once

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <thread>

#include "netdriver/gate_kernel.h"
#include "netdriver/nft_socket.h"
#include "netdriver/ruleset.h"
#include "tests/support/netns.h"
#include "tests/support/sniffer.h"

namespace agentgate::netdriver {

using namespace std::chrono_literals;
using nft::Family;
using test::catalogue;
using test::find_kind;
using test::HostListener;
using test::Identity;
using test::NetNamespace;
using test::Sender;
using test::Sniffer;

inline constexpr const char* kBridge = "agn0123456789";
inline constexpr std::uint64_t kRun = 0x6c65616b00000001;

inline InterfaceName name(const std::string& text) { return InterfaceName::parse(text).value(); }

inline Identity identity() { return Identity::example(); }
// The same place, seen by the other container.
inline Identity as_neighbour(Identity who) {
  std::swap(who.own, who.neighbour);
  return who;
}

inline NetworkSpec network() {
  const Identity who = identity();
  NetworkSpec out;
  out.bridge = name(kBridge);
  out.mac = who.gateway.mac;
  out.gateway4 = Ipv4InterfaceAddress{who.gateway.ip4, 24};
  out.gateway6 = Ipv6InterfaceAddress{who.gateway.ip6, 64};
  return out;
}

inline PortSpec port(int number) {
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
inline PolicySpec policy(bool with_https = true) {
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

inline Names names(const std::map<std::uint16_t, test::Tally>& kinds, bool outgoing = false) {
  Names out;
  for (const auto& [number, tally] : kinds) {
    if ((outgoing ? tally.outgoing : tally.incoming) > 0) out.insert(find_kind(number)->name);
  }
  return out;
}
inline std::string text(const Names& all) {
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
inline bool goes_to(const test::Bytes& frame, const test::Station& to, Protocol protocol,
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

inline void expect_nothing(const Reached& reached) {
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
  // The carrier takes its time to reach the bridge, and until then nothing passes anyway: a zero
  // that was counted earlier would be worth nothing.
  void await_forwarding(const std::vector<std::string>& links = {port(1).name.str(),
                                                                 port(2).name.str()}) const {
    for (const std::string& link : links) {
      std::string state;
      for (int i = 0; i < 250 && state != "forwarding"; ++i) {
        if (i != 0) std::this_thread::sleep_for(20ms);
        state = host->json({"ip", "-j", "-d", "link", "show",
                            link})[0]["linkinfo"]["info_slave_data"]["state"]
                    .get<std::string>();
      }
      ASSERT_EQ(state, "forwarding") << link;
    }
  }
  // Gate and two closed ports, the containers' ends moved in and up.
  void make_gated() {
    open_gate();
    make_gated_ports();
  }
  void make_gated_ports() {
    NetworkSpec spec = network();
    spec.masquerade = masquerade;
    ok(gate->create_network(spec));
    ok(gate->create_port(port(1)));
    ok(gate->create_port(port(2)));
    move_in(*host, port(1).peer.str(), *a, who.own);
    move_in(*host, port(2).peer.str(), *b, who.neighbour);
    await_forwarding();
  }
  void release(PortSpec& p, const PolicySpec& to = policy()) {
    p.prepared = true;
    ok(gate->prepare_port(p));
    p.policy = to.name;
    ok(gate->release_port(p, to));
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
    await_forwarding();
  }
  // One table alone, as the gate has it for two ports, closed or released to policy().
  void install(Family family, const std::set<int>& released = {}) {
    GateSpec spec;
    spec.networks[network().bridge] = network();
    spec.networks[network().bridge].masquerade = masquerade;
    for (int number : {1, 2}) {
      PortSpec p = port(number);
      if (released.contains(number)) p.policy = policy().name;
      spec.ports[p.name] = p;
    }
    if (!released.empty()) spec.policies[policy().name] = policy();
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
      "bcast_flood off; ip link set $P type bridge_slave group_fwd_mask 0x4000";

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
  // The catalogue from container A. `bridge_name` is what the bridge is called by now.
  Reached blast(const Identity& as, const std::string& bridge_name = kBridge) const {
    Sniffer bridge(host->fd(), bridge_name, options(as));
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
                up.frames()};
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
  // Whether the bridge has learnt where the MAC is that the spoofed kinds claim.
  [[nodiscard]] bool has_learnt() const {
    return host->must({"bridge", "fdb", "show", "br", kBridge}).find("02:66:66:66:66:66") !=
           std::string::npos;
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
  bool masquerade = true;
  MacAddress up_mac;
  mutable std::string last_in;  // what blast_inwards saw, for the failure's message
  std::unique_ptr<NetNamespace> host, a, b, uplink;
  std::unique_ptr<Gate> gate;
};

}  // namespace agentgate::netdriver
