// SPDX-License-Identifier: GPL-2.0-or-later
//
// agprobe: the attack frames, taps and listeners of tests/support as a command, for tests against
// real engines, the demo and the leak harness. It shares no code with the plugin.
//
// Results go to stdout as one JSON object; what is wrong goes to stderr. Exit code 0: it ran (what
// arrived is for the caller to judge), 1: it could not, 64: usage.
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <csignal>
#include <cstring>
#include <exception>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "tests/support/frames.h"
#include "tests/support/sniffer.h"

namespace {

using agentgate::Ipv4Address;
using agentgate::Ipv6Address;
using agentgate::MacAddress;
using namespace agentgate::test;
using nlohmann::json;

constexpr int kUsage = 64;  // EX_USAGE

template <std::size_t N>
std::array<std::uint8_t, N> parse_address(int family, const std::string& text) {
  std::array<std::uint8_t, N> out{};
  if (::inet_pton(family, text.c_str(), out.data()) != 1) {
    throw CLI::ValidationError("'" + text + "' is not an address of this family");
  }
  return out;
}

MacAddress parse_mac(const std::string& text) {
  std::array<std::uint8_t, 6> out{};
  std::istringstream in(text);
  std::string part;
  std::size_t i = 0;
  while (std::getline(in, part, ':') && i < 6 && part.size() == 2 &&
         part.find_first_not_of("0123456789abcdefABCDEF") == std::string::npos) {
    out[i++] = static_cast<std::uint8_t>(std::stoul(part, nullptr, 16));
  }
  if (i != 6 || text.size() != 17)
    throw CLI::ValidationError("'" + text + "' is not a MAC address");
  return MacAddress(out);
}

void add_identity(CLI::App& app, Identity& who) {
  const auto station = [&](const std::string& name, Station& into, bool mac) {
    if (mac) {
      app.add_option_function<std::string>(
          "--" + name + "-mac", [&into](const std::string& text) { into.mac = parse_mac(text); },
          "MAC of " + name);
    }
    app.add_option_function<std::string>(
        "--" + name + "-ip4",
        [&into](const std::string& text) {
          into.ip4 = Ipv4Address(parse_address<4>(AF_INET, text));
        },
        "IPv4 address of " + name);
    app.add_option_function<std::string>(
        "--" + name + "-ip6",
        [&into](const std::string& text) {
          into.ip6 = Ipv6Address(parse_address<16>(AF_INET6, text));
        },
        "IPv6 address of " + name);
  };
  station("own", who.own, true);
  station("gateway", who.gateway, true);
  station("neighbour", who.neighbour, true);
  station("outside", who.outside, false);
  app.add_option_function<std::string>(
      "--metadata-ip4",
      [&who](const std::string& text) {
        who.metadata4 = Ipv4Address(parse_address<4>(AF_INET, text));
      },
      "Metadata server (169.254.169.254)");
  app.add_option("--port", who.port, "Destination port of UDP, TCP and SCTP")
      ->capture_default_str();
  app.add_option("--source-port", who.source_port, "Their source port")->capture_default_str();
}

// "all", names, "category:NAME", "released:passes|dropped|either"; commas between.
std::vector<const FrameKind*> select(const std::vector<std::string>& wanted) {
  std::vector<bool> chosen(catalogue().size(), false);
  for (const auto& word : wanted) {
    bool found = false;
    for (const auto& kind : catalogue()) {
      static constexpr const char* released[] = {"dropped", "passes", "either"};
      if (word == "all" || word == kind.name || word == "category:" + kind.category ||
          word == std::string("released:") + released[static_cast<int>(kind.released)]) {
        chosen[kind.number - 1U] = true;
        found = true;
      }
    }
    if (!found) {
      throw CLI::ValidationError("--kinds: '" + word + "' is no kind, see `agprobe list`");
    }
  }
  std::vector<const FrameKind*> out;
  for (const auto& kind : catalogue()) {
    if (chosen[kind.number - 1U]) out.push_back(&kind);
  }
  return out;
}

class Namespace {
 public:
  explicit Namespace(const std::string& what) : fd_(what.empty() ? -1 : open_namespace(what)) {}
  ~Namespace() {
    if (fd_ >= 0) ::close(fd_);
  }
  Namespace(const Namespace&) = delete;
  Namespace& operator=(const Namespace&) = delete;
  [[nodiscard]] NamespaceFd fd() const { return fd_; }

 private:
  NamespaceFd fd_;
};

// The signals are blocked before any thread starts, so that only this sees them.
class StopSignal {
 public:
  StopSignal() {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    if (::pthread_sigmask(SIG_BLOCK, &set, nullptr) != 0) {
      throw std::system_error(errno, std::generic_category(), "pthread_sigmask");
    }
    fd_ = ::signalfd(-1, &set, SFD_CLOEXEC);
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "signalfd");
  }
  ~StopSignal() { ::close(fd_); }
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  // Negative: without end.
  void wait(double seconds) const {
    pollfd polled{fd_, POLLIN, 0};
    const auto begin = std::chrono::steady_clock::now();
    for (;;) {
      int left = -1;
      if (seconds >= 0) {
        const std::chrono::duration<double> gone = std::chrono::steady_clock::now() - begin;
        left = static_cast<int>(std::max(0.0, seconds - gone.count()) * 1000.0);
      }
      const int result = ::poll(&polled, 1, left);
      if (result > 0 || (result == 0 && left >= 0)) return;
    }
  }

 private:
  int fd_ = -1;
};

// Tells a script that from now on nothing is missed.
void ready(const std::string& file) {
  std::cerr << "ready" << std::endl;
  if (!file.empty()) std::ofstream(file) << ::getpid() << "\n";
}

json to_json(const Tally& tally) {
  return {{"incoming", tally.incoming}, {"outgoing", tally.outgoing}};
}

json to_json(const SnifferCounts& counts) {
  json kinds = json::object();
  for (const auto& [number, tally] : counts.kinds) {
    const FrameKind* kind = find_kind(number);
    kinds[kind != nullptr ? kind->name : "#" + std::to_string(number)] = to_json(tally);
  }
  json out = {{"all", to_json(counts.all)}, {"marked", to_json(counts.marked())}, {"kinds", kinds}};
  if (counts.packets != 0 || counts.drops != 0) {
    out["packets"] = counts.packets;
    out["tap_drops"] = counts.drops;
  }
  return out;
}

json list_kinds(const std::vector<const FrameKind*>& kinds) {
  json out = json::array();
  for (const auto* kind : kinds) {
    static constexpr const char* released[] = {"dropped", "passes", "either"};
    out.push_back({{"number", kind->number},
                   {"name", kind->name},
                   {"category", kind->category},
                   {"marked", kind->marked},
                   {"open_bridge", kind->open_bridge.to_string()},
                   {"released", released[static_cast<int>(kind->released)]}});
  }
  return out;
}

struct Options {
  std::string netns;
  std::vector<std::string> devices;
  std::string device = "eth0";
  std::string ready_file;
  std::vector<std::string> kinds = {"all"};
  std::uint64_t run = 0;
  unsigned repeat = 1;
  unsigned gap_us = 0;
  double seconds = 1;
  double limit = -1;
  bool promiscuous = false;
  Identity who;
};

json frames(const Options& o) {
  const Namespace where(o.netns);
  const auto kinds = select(o.kinds);
  Sender sender(where.fd(), o.device);
  std::uint64_t total = 0;
  json by_kind = json::object();
  for (const auto* kind : kinds) {
    std::uint64_t sent = 0;
    std::uint64_t refused = 0;
    int error = 0;
    for (unsigned i = 0; i < o.repeat; ++i) {
      for (const auto& frame : kind->build(o.who, o.run)) {
        const int result = sender.send(frame);
        ++(result == 0 ? sent : refused);
        if (error == 0) error = result;
        if (o.gap_us != 0) std::this_thread::sleep_for(std::chrono::microseconds(o.gap_us));
      }
    }
    total += sent;
    by_kind[kind->name] = {{"sent", sent}, {"refused", refused}};
    if (error != 0) by_kind[kind->name]["error"] = std::generic_category().message(error);
  }
  return {{"run_id", o.run}, {"dev", o.device}, {"sent", total}, {"kinds", by_kind}};
}

// seconds < 0: until a signal.
json sniff(const Options& o, const StopSignal& signal, double seconds, bool with_identity) {
  struct Tap {
    std::string name;
    std::unique_ptr<Namespace> where;
    std::unique_ptr<Sniffer> sniffer;
  };
  std::vector<Tap> taps;
  for (const auto& device : o.devices) {
    Tap tap;
    tap.name = device;
    const auto at = device.rfind('@');
    tap.where =
        std::make_unique<Namespace>(at == std::string::npos ? o.netns : device.substr(0, at));
    const std::string name = at == std::string::npos ? device : device.substr(at + 1);
    Sniffer::Options options;
    options.run = o.run;
    if (with_identity) options.who = o.who;
    options.keep = 0;
    options.promiscuous = o.promiscuous;
    tap.sniffer = std::make_unique<Sniffer>(tap.where->fd(), name == "*" ? "" : name, options);
    taps.push_back(std::move(tap));
  }
  ready(o.ready_file);
  const auto begin = std::chrono::steady_clock::now();
  signal.wait(seconds);
  const std::chrono::duration<double> gone = std::chrono::steady_clock::now() - begin;
  json devices = json::object();
  for (auto& tap : taps) {
    tap.sniffer->stop();
    devices[tap.name] = to_json(tap.sniffer->counts());
    const auto links = tap.sniffer->counts_by_link();
    for (const auto& [link, counts] : links) devices[tap.name]["links"][link] = to_json(counts);
  }
  return {{"run_id", o.run}, {"seconds", gone.count()}, {"devices", devices}};
}

json blast(const Options& o, const StopSignal& signal) {
  const Namespace where(o.netns);
  std::vector<Bytes> list;
  for (const auto* kind : select(o.kinds)) {
    for (auto& frame : kind->build(o.who, o.run)) list.push_back(std::move(frame));
  }
  Blaster blaster(where.fd(), o.device, std::move(list));
  ready(o.ready_file);
  const auto begin = std::chrono::steady_clock::now();
  signal.wait(o.limit);
  const auto counts = blaster.stop();
  const std::chrono::duration<double> gone = std::chrono::steady_clock::now() - begin;
  return {{"run_id", o.run},        {"dev", o.device},           {"seconds", gone.count()},
          {"sent", counts.sent},    {"refused", counts.refused}, {"ups", counts.ups},
          {"opened", counts.opened}};
}

json listen(const Options& o, const StopSignal& signal) {
  const Namespace where(o.netns);
  HostListener listener(where.fd(), o.run, o.who.port);
  ready(o.ready_file);
  signal.wait(o.limit);
  listener.stop();
  const auto counts = listener.counts();
  json kinds = json::object();
  for (const auto& [number, count] : counts.kinds) {
    const FrameKind* kind = find_kind(number);
    kinds[kind != nullptr ? kind->name : "#" + std::to_string(number)] = count;
  }
  return {{"run_id", o.run}, {"all", counts.all}, {"kinds", kinds}};
}

int run(int argc, char** argv) {
  Options o;
  o.who = Identity::example();
  CLI::App app{"Sends attack frames and counts where they arrive"};
  app.require_subcommand(1);
  const auto common = [&](CLI::App* command) {
    command->add_option("--netns", o.netns, "Namespace: pid, path or name (default: this one)");
    command->add_option("--run-id", o.run, "Tells this run's frames from others")->required();
  };
  const auto kinds = [&](CLI::App* command) {
    command
        ->add_option("--kinds", o.kinds,
                     "all, names, category:NAME or released:passes|dropped|either")
        ->delimiter(',')
        ->capture_default_str();
  };
  const auto readiness = [&](CLI::App* command) {
    command->add_option("--ready-file", o.ready_file, "Written once nothing is missed any more");
  };
  const auto taps = [&](CLI::App* command) {
    command
        ->add_option("--dev", o.devices,
                     "Links to watch: NAME, NETNS@NAME, or * for every link, also later ones")
        ->delimiter(',')
        ->required();
    command->add_flag("--promiscuous", o.promiscuous,
                      "Makes a bridge hand all its frames up, which changes what is measured");
    add_identity(*command, o.who);
  };

  CLI::App* list_command = app.add_subcommand("list", "Lists the kinds");
  kinds(list_command);
  CLI::App* frames_command = app.add_subcommand("frames", "Sends every kind once");
  common(frames_command);
  kinds(frames_command);
  add_identity(*frames_command, o.who);
  frames_command->add_option("--dev", o.device, "Link to send on")->capture_default_str();
  frames_command->add_option("--repeat", o.repeat, "Times each kind is sent")
      ->check(CLI::Range(1U, 1000000U))
      ->capture_default_str();
  frames_command->add_option("--gap-us", o.gap_us, "Pause after each frame")->capture_default_str();
  CLI::App* sniff_command = app.add_subcommand("sniff", "Counts for some seconds");
  common(sniff_command);
  taps(sniff_command);
  readiness(sniff_command);
  sniff_command->add_option("--seconds", o.seconds, "How long")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  CLI::App* watch_command = app.add_subcommand("watch", "Counts until SIGTERM or SIGINT");
  common(watch_command);
  taps(watch_command);
  readiness(watch_command);
  CLI::App* blast_command =
      app.add_subcommand("blast", "Sends at full rate until SIGTERM or SIGINT");
  common(blast_command);
  kinds(blast_command);
  readiness(blast_command);
  add_identity(*blast_command, o.who);
  blast_command->add_option("--dev", o.device, "Link to send on; may appear later")
      ->capture_default_str();
  blast_command->add_option("--seconds", o.limit, "Ends by itself after so long");
  CLI::App* listen_command = app.add_subcommand(
      "listen", "Counts what reaches a namespace's stack until SIGTERM or SIGINT");
  common(listen_command);
  readiness(listen_command);
  listen_command->add_option("--port", o.who.port, "Port of its UDP and TCP sockets")
      ->capture_default_str();
  listen_command->add_option("--seconds", o.limit, "Ends by itself after so long");

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return code == 0 ? 0 : kUsage;
  }
  const StopSignal signal;
  json result;
  try {
    if (*list_command) result = list_kinds(select(o.kinds));
    if (*frames_command) result = frames(o);
    if (*sniff_command || *watch_command) {
      const CLI::App* command = *sniff_command ? sniff_command : watch_command;
      result = sniff(o, signal, *sniff_command ? o.seconds : -1, command->count("--own-mac") > 0);
    }
    if (*blast_command) result = blast(o, signal);
    if (*listen_command) result = listen(o, signal);
  } catch (const CLI::ParseError& error) {
    std::cerr << error.what() << "\n";
    return kUsage;
  }
  std::cout << result.dump(2) << std::endl;
  return std::cout ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "agprobe: " << error.what() << "\n";
    return 1;
  }
}
