// SPDX-License-Identifier: GPL-2.0-or-later
//
// Eyes and hands on a link: AF_PACKET taps, senders and listeners, each in a given namespace.
//
// Threading: every object runs one thread of its own inside the namespace from construction to
// stop(); all its methods may be called from any thread. Errors: constructors throw
// std::system_error (no such link, no permission); nothing throws later.
//
// What a tap sees: a tap on the host end of a container's veth sees frames before any netdev or
// tc ingress hook, so an incoming frame there is no leak. Leaks are: incoming on the bridge device,
// outgoing on another port (or incoming in the neighbour's namespace), outgoing on the uplink.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/frames.h"

namespace agentgate::test {

// An open file of a network namespace; -1 is the caller's own.
using NamespaceFd = int;

struct Seen {   // one recorded frame
  Bytes bytes;  // with its VLAN tag, which the kernel hands over apart from the frame
  bool outgoing = false;
  std::optional<std::uint16_t> vlan;  // tag control information of the outermost tag
  std::optional<std::uint16_t> kind;  // if it is of this run
};

struct Tally {
  std::uint64_t incoming = 0;
  std::uint64_t outgoing = 0;
  bool operator==(const Tally&) const = default;
};

struct SnifferCounts {
  Tally all;
  std::map<std::uint16_t, Tally> kinds;  // by number of the kind; this run's only
  // From PACKET_STATISTICS: what the kernel offered to the tap, and how much of it found the
  // queue full. all.incoming + all.outgoing == packets - drops once the queue is read empty.
  std::uint64_t packets = 0;
  std::uint64_t drops = 0;
  [[nodiscard]] Tally marked() const;  // sum of kinds
};

class Sniffer {
 public:
  struct Options {
    std::uint64_t run = 0;
    std::optional<Identity> who;  // for kinds without a marker
    std::size_t keep = 256;       // frames recorded; all are counted
    bool keep_unknown = false;    // record frames that are of no kind as well
    // Makes a bridge device hand every frame of every port to the host: it changes what is
    // measured, so it is off.
    bool promiscuous = false;
  };

  // An empty interface name means every link of the namespace, also those made later.
  Sniffer(NamespaceFd where, const std::string& interface, Options options);
  ~Sniffer();
  Sniffer(const Sniffer&) = delete;
  Sniffer& operator=(const Sniffer&) = delete;

  // Reads what is queued, ends the thread and closes the tap. Counts stay readable.
  void stop();
  [[nodiscard]] SnifferCounts counts() const;
  // By name of the link, for a sniffer of every link. A link that was gone before its name could
  // be asked for is "#index".
  [[nodiscard]] std::map<std::string, SnifferCounts> counts_by_link() const;
  [[nodiscard]] std::vector<Seen> frames() const;
  // Waits until a frame that has `kind` came (in either direction), or the time is over.
  bool wait_for(std::uint16_t kind, std::chrono::milliseconds timeout) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Sends frames once each, in order, bringing the link up and its MTU to the size of the frame
// first, as root in a container would.
class Sender {
 public:
  // `mark` is the mark of what it sends (SO_MARK), for a sender on the host.
  Sender(NamespaceFd where, const std::string& interface, std::uint32_t mark = 0);
  ~Sender();
  Sender(const Sender&) = delete;
  Sender& operator=(const Sender&) = delete;

  // The errno of the kernel, 0 if it took the frame.
  int send(const Bytes& frame);
  // Every frame of the kind; the first errno.
  int send(const FrameKind& kind, const Identity& who, std::uint64_t run);
  // What SIOCSIFFLAGS said.
  int bring_up();

 private:
  int socket_ = -1;
  std::string interface_;
};

// Sends the same frames over and over as fast as the kernel takes them. Waits for a link that is
// not there yet, opens again after it was replaced, and brings it up whenever it finds it down.
class Blaster {
 public:
  struct Counts {
    std::uint64_t sent = 0;     // taken by the kernel
    std::uint64_t refused = 0;  // ENOBUFS, ENETDOWN, ENXIO
    std::uint64_t ups = 0;      // times it set the link up
    std::uint64_t opened = 0;   // times it bound to a link of that name
  };
  Blaster(NamespaceFd where, std::string interface, std::vector<Bytes> frames);
  ~Blaster();
  Blaster(const Blaster&) = delete;
  Blaster& operator=(const Blaster&) = delete;
  Counts stop();
  [[nodiscard]] Counts counts() const;
  bool wait_sent(std::uint64_t at_least, std::chrono::milliseconds timeout) const;

 private:
  void loop();
  std::string interface_;
  std::vector<Bytes> frames_;
  std::atomic<std::uint64_t> sent_{0}, refused_{0}, ups_{0}, opened_{0};
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// What reaches the stack of a namespace: raw sockets for every protocol of the catalogue (they
// see a packet after netfilter's input hook), and a UDP socket and a TCP listener on `port`.
class HostListener {
 public:
  struct Counts {
    // "udp4", "tcp6", "icmp4", …: what raw sockets received; "accepted4/6": TCP connections;
    // "datagram4/6": on the UDP socket.
    std::map<std::string, std::uint64_t> all;
    std::map<std::uint16_t, std::uint64_t> kinds;  // raw sockets only, this run's only
  };
  HostListener(NamespaceFd where, std::uint64_t run, std::uint16_t port = 7777);
  ~HostListener();
  HostListener(const HostListener&) = delete;
  HostListener& operator=(const HostListener&) = delete;
  void stop();
  [[nodiscard]] Counts counts() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Opens the namespace of a process id, a path, or a name under /run/netns. Throws
// std::system_error. The caller closes it.
[[nodiscard]] NamespaceFd open_namespace(const std::string& what);

}  // namespace agentgate::test
