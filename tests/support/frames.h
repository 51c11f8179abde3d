// SPDX-License-Identifier: GPL-2.0-or-later
//
// The catalogue of frames that hostile code in a container may send.
//
// Owns: how each kind looks byte by byte, and where each kind arrives on a bridge that has no
// rules. May not know: anything of the code under test but its plain value types; it is the
// independent witness. Everything is pure and may be called from any thread.
//
// Every frame carries a marker of 16 bytes (magic, kind, run) where the format has room for it, so
// that it is recognised after it was routed, translated or quoted in an ICMP error. Frames without
// room are compared byte by byte, which works on the link they were sent to only.
//
// Kinds are append-only: the number of a kind is its place in the catalogue, and reports of
// earlier runs name it.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "netdriver/types.h"

namespace agentgate::test {

using Bytes = std::vector<std::uint8_t>;

struct Station {
  MacAddress mac;
  Ipv4Address ip4;
  Ipv6Address ip6;
};

// Who sends, and who is around.
struct Identity {
  Station own;        // the container
  Station gateway;    // the bridge device
  Station neighbour;  // another container on the same bridge
  Station outside;    // beyond the uplink; its MAC is not used
  Ipv4Address metadata4{{169, 254, 169, 254}};
  std::uint16_t source_port = 40000;
  std::uint16_t port = 7777;  // destination of UDP, TCP and SCTP where the kind has none of its own

  // Documentation addresses in private MACs; tests that build their own links may use it as it is.
  static Identity example();
};

inline constexpr std::size_t kMarkerSize = 16;
// `run` tells the frames of one run from those of another on the same machine.
struct Marker {
  std::uint16_t kind = 0;
  std::uint64_t run = 0;

  [[nodiscard]] std::array<std::uint8_t, kMarkerSize> bytes() const;
  // The first marker anywhere in `frame`, of whatever run.
  static std::optional<Marker> find(std::span<const std::uint8_t> frame);
  bool operator==(const Marker&) const = default;
};

// Where something that carries the frame's marker is seen: the frame itself, an answer to it, or
// an ICMP error that quotes it.
struct Reach {
  bool bridge = false;     // the bridge device takes it up
  bool neighbour = false;  // the other container receives it
  bool uplink = false;     // it leaves by the uplink
  bool operator==(const Reach&) const = default;
  [[nodiscard]] bool none() const { return !bridge && !neighbour && !uplink; }
  // "bridge+uplink", "none"
  [[nodiscard]] std::string to_string() const;
};

// What layers 1 and 2 of a released port do with the kind (DESIGN.md, 3). Layer 3 judges what
// passes by the policy, so `passes` promises an arrival on the bridge device and nothing further.
// `either`: well bound but odd (fragments, options); the design does not say, and both are safe.
enum class Released : std::uint8_t { dropped, passes, either };

struct FrameKind {
  std::uint16_t number = 0;  // 1 for the first in the catalogue
  std::string name;          // [a-z0-9-]+
  std::string category;
  bool marked = true;  // false: recognised by its bytes alone
  Reach open_bridge;   // measured on a plain bridge; tests/kernel/toolkit keeps it true
  Released released = Released::dropped;
  // A kind may be more than one frame, to be sent in this order (fragments).
  std::function<std::vector<Bytes>(const Identity&, const Marker&)> builder;

  [[nodiscard]] std::vector<Bytes> build(const Identity& who, std::uint64_t run) const {
    return builder(who, {number, run});
  }
};

[[nodiscard]] const std::vector<FrameKind>& catalogue();
// nullptr if there is no such kind.
[[nodiscard]] const FrameKind* find_kind(std::string_view name);
[[nodiscard]] const FrameKind* find_kind(std::uint16_t number);

// Says of which kind of this run a frame is.
class Recogniser {
 public:
  // Without an identity, kinds that carry no marker are not recognised.
  explicit Recogniser(std::uint64_t run, const std::optional<Identity>& who = std::nullopt);
  [[nodiscard]] std::optional<std::uint16_t> kind_of(std::span<const std::uint8_t> frame) const;

 private:
  std::uint64_t run_;
  std::map<Bytes, std::uint16_t> exact_;
};

// A classic pcap file (Ethernet, microseconds) of the frames, for tcpdump and people.
[[nodiscard]] Bytes pcap(const std::vector<Bytes>& frames);

}  // namespace agentgate::test
