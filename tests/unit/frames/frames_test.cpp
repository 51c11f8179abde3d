// SPDX-License-Identifier: GPL-2.0-or-later
//
// The catalogue judged by tcpdump: every kind is what its name says, with right checksums.
#include "tests/support/frames.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/unit/frames/expected.h"

namespace agentgate::test {
namespace {

constexpr std::uint64_t kRun = 1;

struct Built {
  std::string name;  // of the kind, "/2" for its second frame
  const FrameKind* kind;
  Bytes bytes;
};

std::vector<Built> build_all() {
  std::vector<Built> out;
  for (const auto& kind : catalogue()) {
    int part = 0;
    for (auto& frame : kind.build(Identity::example(), kRun)) {
      ++part;
      out.push_back(
          {kind.name + (part == 1 ? "" : "/" + std::to_string(part)), &kind, std::move(frame)});
    }
  }
  return out;
}

// tcpdump's text for each frame, continuation lines joined.
std::vector<std::string> decode(const std::vector<Bytes>& frames) {
  char path[] = "/tmp/agentgate-frames-XXXXXX";
  const int fd = ::mkstemp(path);
  if (fd < 0) return {};
  const Bytes file = pcap(frames);
  const bool written = ::write(fd, file.data(), file.size()) == static_cast<ssize_t>(file.size());
  ::close(fd);
  std::vector<std::string> out;
  FILE* pipe =
      written
          ? ::popen((std::string("tcpdump -nn -e -vv -t -r - 2>/dev/null <") + path).c_str(), "r")
          : nullptr;
  if (pipe != nullptr) {
    std::string line;
    for (int c = 0; (c = std::fgetc(pipe)) != EOF;) {
      if (c != '\n') {
        line += static_cast<char>(c);
        continue;
      }
      if (!line.empty() && line[0] != ' ' && line[0] != '\t') {
        out.push_back(line);
      } else if (!out.empty() && line.substr(std::min(line.size(), line.find_first_not_of(" \t")))
                                         .starts_with("0x") == false) {  // no hex dumps
        out.back() += " " + line;
      }
      line.clear();
    }
    ::pclose(pipe);
  }
  ::unlink(path);
  return out;
}

void replace_all(std::string& text, const std::string& from, const std::string& to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) {
    text.replace(at, from.size(), to);
  }
}

std::string readable(std::string text) {
  for (const auto& [from, to] :
       std::initializer_list<std::pair<const char*, const char*>>{{"02:00:00:00:01:01", "own"},
                                                                  {"02:00:00:00:01:02", "nb"},
                                                                  {"02:00:00:00:00:01", "gw"},
                                                                  {"ff:ff:ff:ff:ff:ff", "all"},
                                                                  {"192.0.2.11", "own4"},
                                                                  {"192.0.2.12", "nb4"},
                                                                  {"192.0.2.1", "gw4"},
                                                                  {"198.51.100.2", "out4"},
                                                                  {"169.254.169.254", "meta4"},
                                                                  {"2001:db8:2::11", "own6"},
                                                                  {"2001:db8:2::12", "nb6"},
                                                                  {"2001:db8:2::1", "gw6"},
                                                                  {"2001:db8:51::2", "out6"},
                                                                  {"fe80::ff:fe00:101", "own-ll"},
                                                                  {"fe80::ff:fe00:102", "nb-ll"},
                                                                  {"fe80::ff:fe00:1", "gw-ll"},
                                                                  {"(tos 0x0, ", "("},
                                                                  {"id 16711, ", ""}}) {
    replace_all(text, from, to);
  }
  // The sums depend on the marker; that they are right is another test's business.
  for (std::size_t at = 0; (at = text.find("cksum 0x", at)) != std::string::npos; at += 6) {
    const std::size_t end = text.find_first_not_of("0123456789abcdef", at + 8);
    if (text.compare(end, 10, " (correct)") == 0) text.erase(at + 6, end - at - 6);
  }
  std::string out;
  for (const char c : text) {
    const char plain = c == '\t' ? ' ' : c;
    if (plain != ' ' || out.empty() || out.back() != ' ') out += plain;
  }
  return out;
}

TEST(Frames, TcpdumpReadsEachAsMeant) {
  if (std::system("command -v tcpdump >/dev/null 2>&1") != 0) GTEST_SKIP() << "needs tcpdump";
  const auto built = build_all();
  std::vector<Bytes> frames;
  for (const auto& one : built) frames.push_back(one.bytes);
  const auto decoded = decode(frames);
  ASSERT_EQ(decoded.size(), built.size());
  std::map<std::string, const Expected*> expected;
  for (const auto& one : kExpected) expected[one.frame] = &one;
  for (std::size_t i = 0; i < built.size(); ++i) {
    const std::string text = readable(decoded[i]);
    const auto found = expected.find(built[i].name);
    ASSERT_NE(found, expected.end()) << built[i].name << ": " << text;
    EXPECT_TRUE(text.starts_with(found->second->link)) << built[i].name << ": " << text;
    EXPECT_NE(text.find(found->second->content), std::string::npos)
        << built[i].name << ": " << text;
    expected.erase(found);
  }
  EXPECT_TRUE(expected.empty()) << expected.begin()->first << " is in no catalogue";
}

TEST(Frames, ChecksumsAreRightUnlessTheKindSaysOtherwise) {
  if (std::system("command -v tcpdump >/dev/null 2>&1") != 0) GTEST_SKIP() << "needs tcpdump";
  const auto built = build_all();
  std::vector<Bytes> frames;
  for (const auto& one : built) frames.push_back(one.bytes);
  const auto decoded = decode(frames);
  ASSERT_EQ(decoded.size(), built.size());
  std::set<std::string> bad;
  for (std::size_t i = 0; i < built.size(); ++i) {
    for (const char* complaint : {"bad cksum", "bad udp cksum", "incorrect", "bad icmp6 cksum",
                                  "wrong icmp cksum", "bad igmp cksum"}) {
      if (decoded[i].find(complaint) != std::string::npos) bad.insert(built[i].name);
    }
  }
  EXPECT_EQ(bad, (std::set<std::string>{"ip4-bad-checksum"}));
}

// tcpdump does not check SCTP's checksum. This is the bitwise definition, most significant first.
std::uint32_t crc32c(const Bytes& data) {
  const auto reflect = [](std::uint32_t value, unsigned bits) {
    std::uint32_t out = 0;
    for (unsigned i = 0; i < bits; ++i) out |= ((value >> i) & 1U) << (bits - 1 - i);
    return out;
  };
  std::uint32_t crc = 0xFFFFFFFF;
  for (const std::uint8_t byte : data) {
    crc ^= reflect(byte, 8) << 24U;
    for (int i = 0; i < 8; ++i) crc = (crc << 1U) ^ ((crc >> 31U) != 0 ? 0x1EDC6F41U : 0U);
  }
  return ~reflect(crc, 32);
}

TEST(Frames, SctpChecksumIsRight) {
  const std::string_view check = "123456789";
  ASSERT_EQ(crc32c({check.begin(), check.end()}), 0xE3069283U);
  const auto frame = find_kind("own-outside-sctp")->build(Identity::example(), kRun).at(0);
  Bytes packet(frame.begin() + 34, frame.end());
  const std::uint32_t stated = packet[8] | static_cast<std::uint32_t>(packet[9]) << 8U |
                               static_cast<std::uint32_t>(packet[10]) << 16U |
                               static_cast<std::uint32_t>(packet[11]) << 24U;
  std::fill_n(packet.begin() + 8, 4, 0);
  EXPECT_EQ(crc32c(packet), stated);
}

TEST(Catalogue, IsWellFormed) {
  std::set<std::string> names;
  std::set<std::string> categories;
  std::uint16_t number = 0;
  for (const auto& kind : catalogue()) {
    EXPECT_EQ(kind.number, ++number);
    EXPECT_TRUE(names.insert(kind.name).second) << kind.name;
    EXPECT_EQ(kind.name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-"), kind.name.npos)
        << kind.name;
    categories.insert(kind.category);
    EXPECT_EQ(find_kind(kind.name), &kind);
    EXPECT_EQ(find_kind(kind.number), &kind);
    // A released port lets nothing further than a bridge without rules does.
    EXPECT_TRUE(kind.released != Released::passes || kind.open_bridge.bridge) << kind.name;
  }
  EXPECT_GE(names.size(), 45U);
  EXPECT_EQ(categories,
            (std::set<std::string>{"arp", "ether", "group", "link", "malformed", "nd", "neighbour",
                                   "own", "service", "shape", "spoof", "vlan"}));
  EXPECT_EQ(find_kind("nosuch"), nullptr);
  EXPECT_EQ(find_kind(std::uint16_t{0}), nullptr);
  EXPECT_EQ(find_kind(static_cast<std::uint16_t>(number + 1)), nullptr);
}

// Bound means: own MAC to the gateway's, and own IP address, in an untagged IP frame; or ARP and
// neighbour solicitation for the gateway. Read from the bytes, not from the builder.
TEST(Catalogue, OnlyBoundFramesPassAReleasedPort) {
  const Identity who = Identity::example();
  for (const auto& [name, kind, bytes] : build_all()) {
    if (kind->released != Released::passes) continue;
    const auto at = [&bytes = bytes](std::size_t offset, const auto& wanted) {
      return bytes.size() >= offset + wanted.size() &&
             std::equal(wanted.begin(), wanted.end(),
                        bytes.begin() + static_cast<std::ptrdiff_t>(offset));
    };
    EXPECT_TRUE(at(6, who.own.mac.bytes())) << name;
    const unsigned type = static_cast<unsigned>(bytes[12]) << 8U | bytes[13];
    if (type == 0x0806) {
      EXPECT_TRUE(at(22, who.own.mac.bytes()) && at(28, who.own.ip4.bytes()) &&
                  at(38, who.gateway.ip4.bytes()) && bytes[21] == 1)
          << name;
      continue;
    }
    const bool solicitation = type == 0x86DD && bytes[20] == 58 && bytes[54] == 135;
    EXPECT_TRUE(at(0, who.gateway.mac.bytes()) || solicitation) << name;
    EXPECT_TRUE(!solicitation || at(62, who.gateway.ip6.bytes())) << name;
    EXPECT_TRUE(type == 0x0800 ? at(26, who.own.ip4.bytes()) : at(22, who.own.ip6.bytes())) << name;
  }
}

TEST(Marker, IsFoundInEveryMarkedFrameAndInNoOther) {
  const Identity who = Identity::example();
  const Recogniser recogniser(kRun, who);
  const Recogniser without_identity(kRun);
  const Recogniser other_run(kRun + 1);
  for (const auto& [name, kind, bytes] : build_all()) {
    const auto marker = Marker::find(bytes);
    EXPECT_EQ(recogniser.kind_of(bytes), kind->number) << name;
    EXPECT_EQ(other_run.kind_of(bytes), std::nullopt) << name;
    // The second of these fragments is the one that carries it; the first is known by its bytes.
    if (name == "fragment4-tiny") {
      EXPECT_FALSE(marker) << name;
      continue;
    }
    ASSERT_EQ(marker.has_value(), kind->marked) << name;
    if (marker) {
      EXPECT_EQ(*marker, (Marker{kind->number, kRun})) << name;
    } else {
      EXPECT_EQ(without_identity.kind_of(bytes), std::nullopt) << name;
    }
  }
}

TEST(Marker, SurvivesTruncationOnlyWhole) {
  const auto bytes = Marker{7, 0x0102030405060708}.bytes();
  EXPECT_EQ(Marker::find(bytes), (Marker{7, 0x0102030405060708}));
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(Marker::find(std::span(bytes).first(length))) << length;
  }
}

}  // namespace
}  // namespace agentgate::test
