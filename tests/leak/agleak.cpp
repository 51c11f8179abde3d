// SPDX-License-Identifier: GPL-2.0-or-later
//
// agleak: what gets out of a port while somebody changes things under it, counted frame by frame.
//
// One world: a container that sends every kind of frame of the catalogue at full rate, a closed
// neighbour, an uplink with a station behind it, and a Host with its guard, as the daemon has it.
// One scenario: a change of tests/support/changes.h, made in the middle of the sending. The taps
// are AF_PACKET sockets on the bridge device, in the neighbour and on the uplink, and raw sockets
// of the host; none of them shares code with the gate.
//
// What may pass of a released port is what passed of it before any change (the sending of that
// time is the positive control: taps that see nothing are an error). Whatever else is seen is a
// leak. Exit 0: nothing leaked and every change of ours was put back.
#include <fnmatch.h>
#include <gtest/gtest.h>
#include <spdlog/spdlog.h>
#include <sys/utsname.h>
#include <CLI/CLI.hpp>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <thread>

#include <nlohmann/json.hpp>

#include "plugin/host/host.h"
#include "tests/support/changes.h"
#include "tests/support/netns.h"
#include "tests/support/sniffer.h"

namespace agentgate::leak {
namespace {

using namespace std::chrono_literals;
using host::Host;
using netdriver::Ownership;
using test::Change;
using test::Identity;
using test::NetNamespace;
using test::Sniffer;

struct Row {
  std::string scenario, ownership, state;
  std::uint64_t sent = 0, allowed = 0, leaked = 0;
  double noticed_ms = -1;   // from the change's end to the end of the repair; -1: none was needed
  double repaired_ms = -1;  // of that, what the repair took
  std::string leaks;        // where and of what kind
  bool put_back = true;
};

void must(const Status& status) {
  if (!status) throw std::runtime_error(status.error().to_string());
}

// Added to a run's number for the frames that no policy of ours allows.
constexpr std::uint64_t kForbidden = 1ULL << 40U;

// Where a frame was seen, and of which kind.
using Place = std::pair<std::string, std::uint16_t>;

class World {
 public:
  explicit World(Ownership ownership) {
    char pattern[] = "/tmp/agentgate-leak-XXXXXX";
    if (::mkdtemp(pattern) == nullptr) throw std::runtime_error("no directory for the state");
    directory_ = pattern;
    test::make_veth({space_, "up0", "", {"203.0.113.1/24", "2001:db8:ffff::1/64"}},
                    {uplink_, "eth0", "", {}});
    who_ = Identity::example();
    NetworkRecord network;
    network.id = NetworkId::parse(std::string(64, 'a')).value();
    network.gateway4 = Ipv4InterfaceAddress{who_.gateway.ip4, 24};
    network.gateway6 = Ipv6InterfaceAddress{who_.gateway.ip6, 64};
    network.policy = "web";
    network.masquerade = false;
    who_.gateway.mac = network.spec().mac;
    who_.port = 443;
    bridge_ = network.spec().bridge.str();
    uplink_.sh("ip link set eth0 address 02:00:00:00:0f:0f; ip addr add " +
               who_.outside.ip4.to_string() + "/32 dev eth0; ip addr add " +
               who_.outside.ip6.to_string() + "/128 dev eth0 nodad");
    space_.sh(
        "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 "
        "net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0;"
        "ip link set lo up;"
        "ip link add br9 type bridge; ip link set br9 addrgenmode none; ip link set br9 up;"
        "ip route replace default dev up0; ip -6 route replace default dev up0;"
        "ip neigh replace " +
        who_.outside.ip4.to_string() +
        " dev up0 lladdr 02:00:00:00:0f:0f nud permanent;"
        "ip neigh replace " +
        who_.outside.ip6.to_string() + " dev up0 lladdr 02:00:00:00:0f:0f nud permanent");
    ownership_ = ownership;
    start();
    must(host_->create_network(network));
    move_in(id_, who_.own, container_);
    move_in(neighbour_id_, who_.neighbour, neighbour_);
  }
  ~World() {
    host_.reset();
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }

  // What a daemon that was killed leaves is what this leaves: nothing is taken down.
  void stop() { host_.reset(); }
  void start() {
    host::Options options;
    options.state_directory = directory_;
    options.manage_firewall = false;
    options.orphan_age = std::chrono::hours(1);
    options.ownership = ownership_;
    options.on_repair = [this](const host::Repair& repair) {
      const std::lock_guard lock(mutex_);
      repairs_.push_back({std::chrono::steady_clock::now(), repair});
    };
    space_.run([&] { host_ = Host::start(std::move(options)); });
  }
  void restart() {
    stop();
    std::this_thread::sleep_for(100ms);
    start();
    settle();
  }

  // Whether tables outlive the daemon on this kernel.
  bool persistent() { return host_->snapshot().features.owner_persist; }

  void release() {
    PolicyRecord policy;
    policy.spec.name = "web";
    policy.spec.v4.allow.push_back(
        {{who_.outside.ip4, who_.outside.ip4}, Protocol::tcp, {443, 443}});
    policy.spec.v6.allow.push_back(
        {{who_.outside.ip6, who_.outside.ip6}, Protocol::tcp, {443, 443}});
    policy.spec = netdriver::normalise(policy.spec);
    must(host_->prepare(id_));
    Release release;
    release.policy = "web";
    release.container_name = "a1";
    release.process = {1, 1};
    must(host_->release(id_, release, policy));
    settle();
  }
  void close() {
    must(host_->clean(id_));
    settle();
  }

  // Sends for `before`, makes the change, sends until it is put back and a while longer.
  Row run(const Change& change, const std::set<Place>& may, bool expect_repair) {
    Row row;
    row.scenario = change.name;
    const std::size_t repairs = count();
    const std::uint64_t number = ++run_;
    Taps taps(*this, number);
    test::Blaster blaster(container_.fd(), "eth0", frames(number));
    blaster.wait_sent(2000, 5s);
    const auto begin = std::chrono::steady_clock::now();
    const auto done =
        change.script == nullptr
            ? test::Output{0, "", ""}
            : space_.exec(
                  {"/bin/sh", "-ec",
                   "port=" + port_name(id_).str() + " other=" + port_name(neighbour_id_).str() +
                       " bridge=" + bridge_ + " mac=" + who_.own.mac.to_string() +
                       " other_mac=" + who_.neighbour.mac.to_string() +
                       " ip4=" + who_.own.ip4.to_string() + " ip6=" + who_.own.ip6.to_string() +
                       " gateway4=" + who_.gateway.ip4.to_string() + "/24 gateway6=" +
                       who_.gateway.ip6.to_string() + "/64" + "\n" + change.script});
    if (change.script == nullptr) restart();
    // What may not be done shall not have been: owned tables are nobody else's to change.
    if (change.tables && ownership_ != Ownership::none) {
      row.put_back = done.status != 0 || std::string(change.script) == "nft flush ruleset";
    } else if (done.status != 0) {
      throw std::runtime_error(std::string(change.name) + ": " + done.err);
    }
    if (expect_repair) {
      while (count() == repairs && std::chrono::steady_clock::now() - begin < 5s) {
        std::this_thread::sleep_for(1ms);
      }
    }
    const std::uint64_t sent = blaster.counts().sent;
    blaster.wait_sent(sent + 4000, 5s);
    settle();
    row.sent = blaster.stop().sent;
    // Where the tables went with the daemon it is the token that drops, behind the tap on the
    // bridge.
    taps.judge(may, change.script == nullptr && ownership_ == Ownership::owner, row);
    const std::lock_guard lock(mutex_);
    for (std::size_t i = repairs; i < repairs_.size(); ++i) {
      row.noticed_ms = std::chrono::duration<double, std::milli>(repairs_[i].first - begin).count();
      row.repaired_ms = repairs_[i].second.milliseconds;
      if (!repairs_[i].second.left.empty()) row.put_back = false;
    }
    if (expect_repair && repairs_.size() == repairs) row.put_back = false;
    return row;
  }
  // What passes while nobody changes anything. With br_netfilter the bridge takes lone fragments
  // and packets with a bad header for itself, and without it hands them on to the bridge device.
  std::set<Place> baseline() {
    std::set<Place> out;
    for (const char* on : {"0", "1"}) {
      space_.sh(std::string("for i in iptables ip6tables arptables; do sysctl -qw "
                            "net.bridge.bridge-nf-call-$i=") +
                on + "; done");
      out.merge(once());
    }
    return out;
  }
  std::set<Place> once() {
    const std::uint64_t number = ++run_;
    Taps taps(*this, number);
    test::Blaster blaster(container_.fd(), "eth0", frames(number));
    blaster.wait_sent(6000, 10s);
    blaster.stop();
    return taps.seen();
  }
  // Whether the kernel has what is meant, with nothing left to look at.
  std::string state() {
    settle();
    const auto report = host_->inspect(id_);
    if (!report) return report.error().to_string();
    std::string out = report->state == netdriver::PortState::released ? "released"
                      : report->state == netdriver::PortState::closed ? "closed"
                                                                      : "inconsistent";
    for (const auto& one : report->differences) out += "; " + one.where;
    return out;
  }

 private:
  struct Taps {
    Taps(World& world, std::uint64_t run)
        : bridge(world.space_.fd(), world.bridge_, {.run = run, .who = world.who_}),
          neighbour(world.neighbour_.fd(), "eth0", {.run = run, .who = world.who_}),
          uplink(world.space_.fd(), "up0", {.run = run, .who = world.who_}),
          forbidden(world.space_.fd(), "up0", {.run = run + kForbidden, .who = {}}),
          listener(world.space_.fd(), run) {}
    std::map<Place, std::uint64_t> stop() {
      std::this_thread::sleep_for(20ms);
      for (Sniffer* one : {&bridge, &neighbour, &uplink, &forbidden}) {
        one->stop();
        drops += one->counts().drops;
      }
      listener.stop();
      std::map<Place, std::uint64_t> out;
      for (const auto& [kind, tally] : bridge.counts().kinds)
        out[{"bridge", kind}] += tally.incoming;
      for (const auto& [kind, tally] : neighbour.counts().kinds) {
        out[{"neighbour", kind}] += tally.incoming;
      }
      for (const auto& [kind, tally] : uplink.counts().kinds)
        out[{"uplink", kind}] += tally.outgoing;
      for (const auto& [kind, tally] : forbidden.counts().kinds) {
        out[{"uplink-forbidden", kind}] += tally.outgoing;
      }
      for (const auto& [kind, number] : listener.counts().kinds) out[{"host", kind}] += number;
      std::erase_if(out, [](const auto& one) { return one.second == 0; });
      return out;
    }
    std::set<Place> seen() {
      std::set<Place> out;
      for (const auto& [place, number] : stop()) out.insert(place);
      return out;
    }
    void judge(const std::set<Place>& may, bool not_the_bridge, Row& row) {
      std::set<std::string> leaks;
      for (const auto& [place, number] : stop()) {
        if (may.count(place) != 0) {
          row.allowed += number;
        } else if (place.first != "bridge" || !not_the_bridge) {
          row.leaked += number;
          leaks.insert(place.first + ":" + test::find_kind(place.second)->name);
        }
      }
      for (const auto& one : leaks) row.leaks += one + " ";
      if (drops != 0) {
        row.leaks += std::to_string(drops) + " frames lost by the taps ";
        row.put_back = false;
      }
    }
    std::uint64_t drops = 0;  // frames that a tap lost, and nobody judged
    Sniffer bridge, neighbour, uplink, forbidden;
    test::HostListener listener;
  };

  void move_in(const EndpointId& id, const test::Station& as, const NetNamespace& where) {
    EndpointRecord endpoint;
    endpoint.id = id;
    endpoint.network = NetworkId::parse(std::string(64, 'a')).value();
    endpoint.address4 = as.ip4;
    endpoint.address6 = as.ip6;
    endpoint.mac = as.mac;
    must(host_->create_endpoint(endpoint));
    space_.must({"ip", "link", "set", peer_name(id).str(), "netns", where.path(), "name", "eth0"});
    where.sh("ip link set eth0 addrgenmode none; ip link set eth0 up; ip addr add " +
             as.ip4.to_string() + "/24 dev eth0; ip addr add " + as.ip6.to_string() +
             "/64 dev eth0 nodad");
    must(host_->join(id, "/proc/self/ns/net").map([](const host::Port&) {}));
  }
  // To an allowed service, and in a run of their own to a forbidden one of the same station.
  std::vector<test::Bytes> frames(std::uint64_t run) const {
    std::vector<test::Bytes> out;
    for (const std::uint16_t port : {443, 7777}) {
      Identity as = who_;
      as.port = port;
      for (const auto& kind : test::catalogue()) {
        // Pieces of both runs would be put together: one's ports, the other's marker.
        if (port != 443 && kind.name.rfind("fragment", 0) == 0) continue;
        for (auto& frame : kind.build(as, port == 443 ? run : run + kForbidden)) {
          if (frame.size() <= 1514) out.push_back(std::move(frame));
        }
      }
    }
    return out;
  }
  std::size_t count() {
    const std::lock_guard lock(mutex_);
    return repairs_.size();
  }
  void settle() {
    for (std::uint64_t before = ~0ULL;;) {
      const std::uint64_t now = host_->snapshot().guard.looks;
      if (now == before) return;
      before = now;
      std::this_thread::sleep_for(30ms);
    }
  }

  std::filesystem::path directory_;
  Ownership ownership_ = Ownership::best;
  Identity who_;
  std::string bridge_;
  NetNamespace space_, uplink_, container_, neighbour_;
  const EndpointId id_ = EndpointId::parse("c" + std::string(63, 'd')).value();
  const EndpointId neighbour_id_ = EndpointId::parse("b" + std::string(63, 'e')).value();
  std::uint64_t run_ = 0x6c65616b00010000;
  std::mutex mutex_;
  std::vector<std::pair<std::chrono::steady_clock::time_point, host::Repair>> repairs_;
  std::unique_ptr<Host> host_;  // last: its thread uses the others
};

// What the design lists for a released port: the bridge takes what is bound to the port, the host
// answers solicitations for the gateway, and by the uplink leaves TCP to the one allowed service.
bool may_pass(const std::string& place, const test::FrameKind& kind) {
  const auto begins = [&](const char* prefix) { return kind.name.rfind(prefix, 0) == 0; };
  if (place == "bridge") return kind.released != test::Released::dropped;
  if (place == "host") return begins("nd-solicit-gateway");
  if (place == "uplink") {
    return kind.name == "own-outside-tcp-syn" || kind.name == "own-outside6-tcp-syn" ||
           kind.name == "fragment4-tiny";
  }
  return false;
}

const char* name_of(Ownership ownership) {
  switch (ownership) {
    case Ownership::best:
      return "best";
    case Ownership::owner:
      return "owner";
    case Ownership::none:
      return "none";
  }
  return "";
}

void print(const Row& row) {
  std::printf("%-24s %-6s %-9s %9llu %9llu %7llu %9.1f %9.1f %s\n", row.scenario.c_str(),
              row.ownership.c_str(), row.state.c_str(), static_cast<unsigned long long>(row.sent),
              static_cast<unsigned long long>(row.allowed),
              static_cast<unsigned long long>(row.leaked), row.noticed_ms, row.repaired_ms,
              (row.leaks + (row.put_back ? "" : " NOT PUT BACK")).c_str());
  std::fflush(stdout);
}

int run(int argc, char** argv) {
  CLI::App app("What leaks from a port while others change things under it");
  int cycles = 1;
  std::string only = "*";
  std::string json_file;
  std::vector<std::string> ownerships = {"best", "owner"};
  app.add_option("--cycles", cycles, "How often each scenario is run")->check(CLI::PositiveNumber);
  app.add_option("--scenario", only, "Shell pattern of the scenarios to run");
  app.add_option("--tables", ownerships,
                 "How the tables are protected: best (owner,persist), owner (as before Linux 6.9), "
                 "none (never so in the daemon; shows what a watcher alone lets through)")
      ->check(CLI::IsMember({"best", "owner", "none"}));
  app.add_option("--json", json_file, "Where to write the rows");
  CLI11_PARSE(app, argc, argv);
  spdlog::set_level(spdlog::level::off);
  utsname kernel{};
  ::uname(&kernel);
  std::vector<Row> rows;
  bool good = true;
  std::printf("%-24s %-6s %-9s %9s %9s %7s %9s %9s\n", "scenario", "tables", "port", "sent",
              "allowed", "leaked", "after ms", "repair ms");
  for (const Ownership ownership : {Ownership::best, Ownership::owner, Ownership::none}) {
    if (std::find(ownerships.begin(), ownerships.end(), name_of(ownership)) == ownerships.end()) {
      continue;
    }
    for (const bool released : {false, true}) {
      World world(ownership);
      if (ownership == Ownership::best && !world.persistent()) {
        if (!released) std::printf("this kernel has no table flag persist: best is owner here\n");
        continue;
      }
      const std::string state = released ? "released" : "closed";
      // Released first in both worlds: taps that see nothing then would see no leak either.
      world.release();
      std::set<Place> may = world.baseline();
      std::set<std::string> places;
      bool as_designed = true;
      for (const auto& [place, kind] : may) {
        places.insert(place);
        as_designed = as_designed && may_pass(place, *test::find_kind(kind));
      }
      if (!released && as_designed) {
        world.close();
        may = world.baseline();
        as_designed = may.empty();
      }
      if (!as_designed || places != std::set<std::string>{"bridge", "uplink", "host"}) {
        std::printf(
            "before any change a %s port reaches what it must not, or the taps are broken:\n",
            state.c_str());
        for (const auto& [place, kind] : may) {
          std::printf("  %s %s\n", place.c_str(), test::find_kind(kind)->name.c_str());
        }
        return 1;
      }
      const auto play = [&](const Change& change, bool expect_repair) {
        if (::fnmatch(only.c_str(), change.name, 0) != 0) return;
        for (int cycle = 0; cycle < cycles; ++cycle) {
          Row row = world.run(change, may, expect_repair);
          row.ownership = name_of(ownership);
          row.state = state;
          const std::string after = world.state();
          if (after != state) row.put_back = false;
          if (!row.put_back) row.leaks += after;
          good = good && row.leaked == 0 && row.put_back && (!released || row.allowed > 0);
          if (cycles == 1 || row.leaked != 0 || !row.put_back) print(row);
          rows.push_back(std::move(row));
        }
      };
      for (const Change& change : test::kChanges) {
        // Chains of a policy and elements of a released port are there only while it is released.
        if (change.released && !released) continue;
        play(change, !change.tables || ownership == Ownership::none);
      }
      play({"daemon_restarted", nullptr}, false);
      if (released) {
        for (const Change& change : test::kControls) play(change, true);
      }
      for (const Change& change : test::kSurroundings) {
        if (ownership == Ownership::none && std::string(change.name) == "flush_of_owned_tables") {
          continue;
        }
        play(change, false);
      }
    }
  }
  std::uint64_t sent = 0;
  std::uint64_t leaked = 0;
  for (const Row& row : rows) {
    sent += row.sent;
    leaked += row.leaked;
  }
  std::printf("%zu runs, %llu frames sent, %llu leaked: %s\n", rows.size(),
              static_cast<unsigned long long>(sent), static_cast<unsigned long long>(leaked),
              good ? "good" : "NOT GOOD");
  if (!json_file.empty()) {
    nlohmann::ordered_json out = nlohmann::ordered_json::array();
    for (const Row& row : rows) {
      out.push_back({{"scenario", row.scenario},
                     {"kernel", kernel.release},
                     {"tables", row.ownership},
                     {"port_state", row.state},
                     {"sent", row.sent},
                     {"allowed", row.allowed},
                     {"leaked", row.leaked},
                     {"after_ms", row.noticed_ms},
                     {"repaired_ms", row.repaired_ms},
                     {"put_back", row.put_back}});
    }
    std::ofstream(json_file) << out.dump(1) << "\n";
  }
  return good && !rows.empty() ? 0 : 1;
}

}  // namespace
}  // namespace agentgate::leak

int main(int argc, char** argv) {
  try {
    return agentgate::leak::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "agleak: %s\n", error.what());
    return 1;
  }
}
