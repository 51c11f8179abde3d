// SPDX-License-Identifier: GPL-2.0-or-later
//
// The decoders against messages that a kernel really sent (the seeds of the fuzz target), against
// messages built here, and against every way of cutting them short.
#include "netdriver/rtnl_wire.h"

#include <gtest/gtest.h>
#include <libmnl/libmnl.h>
#include <linux/if_link.h>
#include <linux/neighbour.h>
#include <linux/net_namespace.h>
#include <linux/rtnetlink.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <vector>

namespace agentgate::netdriver::wire {
namespace {

MacAddress mac(const char* text) { return MacAddress::parse(text).value(); }
IpAddress ip(const char* text) { return IpAddress::parse(text).value(); }

// A message in a block of exactly its size, so that a read past its end is seen (ASan).
class Block {
 public:
  explicit Block(const std::vector<char>& bytes)
      : size_(bytes.size()), data_(std::make_unique<char[]>(bytes.size())) {
    std::memcpy(data_.get(), bytes.data(), size_);
  }
  // Says that it ends after `length` bytes.
  Block cut(std::size_t length) const {
    std::vector<char> bytes(data_.get(), data_.get() + length);
    const auto claim = static_cast<std::uint32_t>(length);
    std::memcpy(bytes.data(), &claim, sizeof claim);
    return Block(bytes);
  }
  [[nodiscard]] const nlmsghdr* get() const {
    return reinterpret_cast<const nlmsghdr*>(data_.get());
  }
  [[nodiscard]] std::size_t size() const { return size_; }

 private:
  std::size_t size_;
  std::unique_ptr<char[]> data_;
};

Block seed(const std::string& name) {
  std::ifstream file(std::filesystem::path(SEEDS) / name, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file),
                                std::istreambuf_iterator<char>()};
  if (bytes.size() < sizeof(nlmsghdr)) throw std::runtime_error("no seed " + name);
  return Block(bytes);
}

template <class Header>
class Builder {
 public:
  Builder(std::uint16_t type, const Header& header, std::uint16_t flags = 0) {
    message_ = mnl_nlmsg_put_header(buffer_);
    message_->nlmsg_type = type;
    message_->nlmsg_flags = flags;
    std::memcpy(mnl_nlmsg_put_extra_header(message_, sizeof header), &header, sizeof header);
  }
  template <class T>
  Builder& put(std::uint16_t type, const T& value) {
    mnl_attr_put(message_, type, sizeof value, &value);
    return *this;
  }
  Builder& text(std::uint16_t type, const char* value) {
    mnl_attr_put(message_, type, std::strlen(value), value);  // without the closing 0
    return *this;
  }
  Builder& open(std::uint16_t type) {
    nests_.push_back(mnl_attr_nest_start(message_, type));
    return *this;
  }
  Builder& close() {
    mnl_attr_nest_end(message_, nests_.back());
    nests_.pop_back();
    return *this;
  }
  [[nodiscard]] Block block() const {
    return Block(std::vector<char>(buffer_, buffer_ + message_->nlmsg_len));
  }

 private:
  alignas(8) char buffer_[2048] = {};
  nlmsghdr* message_;
  std::vector<nlattr*> nests_;
};

TEST(RtnlWire, LinkOfABridgeFromTheKernel) {
  const auto link = parse_link(seed("link-bridge").get());
  ASSERT_TRUE(link);
  EXPECT_EQ(link->index, 2U);
  EXPECT_EQ(link->name.str(), "br0");
  EXPECT_EQ(link->kind, "bridge");
  EXPECT_EQ(link->mac, mac("02:00:00:00:00:01"));
  EXPECT_EQ(link->mtu, 1500U);
  EXPECT_EQ(link->group, 0U);
  EXPECT_TRUE(link->up);
  EXPECT_EQ(link->stp, false);
  EXPECT_EQ(link->multicast_snooping, true);
  EXPECT_EQ(link->group_forward_mask, 0);
  EXPECT_FALSE(link->port);
  EXPECT_EQ(link->addrgen_mode, IN6_ADDR_GEN_MODE_EUI64);
}

TEST(RtnlWire, LinkOfAPortFromTheKernel) {
  const auto link = parse_link(seed("link-port").get());
  ASSERT_TRUE(link);
  EXPECT_EQ(link->name.str(), "p0");
  EXPECT_EQ(link->kind, "veth");
  EXPECT_EQ(link->mac, mac("02:00:00:00:02:01"));
  EXPECT_FALSE(link->up);
  EXPECT_EQ(link->master, 2U);
  EXPECT_NE(link->peer, 0U);
  EXPECT_FALSE(link->peer_netns);
  EXPECT_EQ(link->port, BridgePortFlags{});
  EXPECT_EQ(link->port_state, 0);
  EXPECT_FALSE(link->stp);
}

TEST(RtnlWire, FdbAndNeighboursFromTheKernel) {
  const auto fdb = parse_neighbour(seed("fdb-static").get());
  ASSERT_TRUE(fdb);
  EXPECT_EQ(fdb->family, AF_BRIDGE);
  EXPECT_EQ(fdb->state, NUD_NOARP);
  EXPECT_EQ(fdb->master, 2U);
  EXPECT_EQ(fdb->mac, mac("02:00:00:00:01:01"));
  EXPECT_FALSE(fdb->address);
  for (const auto& [name, address] :
       {std::pair("neighbour4", "192.0.2.11"), std::pair("neighbour6", "2001:db8::11")}) {
    const auto entry = parse_neighbour(seed(name).get());
    ASSERT_TRUE(entry) << name;
    EXPECT_EQ(entry->link, 2U);
    EXPECT_EQ(entry->state, NUD_PERMANENT);
    EXPECT_EQ(entry->mac, mac("02:00:00:00:01:01"));
    EXPECT_EQ(entry->address, ip(address));
  }
}

TEST(RtnlWire, AddressesFromTheKernel) {
  EXPECT_EQ(parse_address(seed("address4").get()), (LinkAddress{2, ip("192.0.2.1"), 24}));
  EXPECT_EQ(parse_address(seed("address6").get()), (LinkAddress{2, ip("2001:db8::1"), 64}));
}

TEST(RtnlWire, ErrorsFromTheKernel) {
  const Error words = parse_error(seed("error-extack").get(), "enslave");
  EXPECT_EQ(words.operation, "enslave");
  EXPECT_EQ(words.code, ELOOP);
  EXPECT_EQ(words.text, "Can not enslave a bridge to a bridge");
  EXPECT_FALSE(words.offset);
  const Error place = parse_error(seed("error-offset").get(), "set MTU");
  EXPECT_EQ(place.code, ERANGE);
  EXPECT_EQ(place.text, "Attribute failed policy validation");
  EXPECT_EQ(place.offset, 40U);
  EXPECT_EQ(parse_error(seed("ack").get(), "x").code, 0);
  EXPECT_EQ(parse_error(seed("done").get(), "x").code, 0);
}

TEST(RtnlWire, NamespaceIdFromTheKernel) { EXPECT_EQ(parse_netns_id(seed("nsid").get()), -1); }

TEST(RtnlWire, NamespaceId) {
  const auto id = [](std::int32_t value) {
    return parse_netns_id(Builder(RTM_NEWNSID, rtgenmsg{}).put(NETNSA_NSID, value).block().get());
  };
  EXPECT_EQ(id(0), 0);
  EXPECT_EQ(id(7), 7);
  EXPECT_EQ(parse_netns_id(Builder(RTM_NEWNSID, rtgenmsg{}).block().get()), std::nullopt);
  EXPECT_EQ(parse_netns_id(Builder(RTM_NEWLINK, ifinfomsg{}).block().get()), std::nullopt);
}

TEST(RtnlWire, LinkNamesWithoutEndAndNamesThatAreNone) {
  const auto name = [](const char* text) {
    const auto link =
        parse_link(Builder(RTM_NEWLINK, ifinfomsg{}).text(IFLA_IFNAME, text).block().get());
    return link ? link->name.str() : "?";
  };
  EXPECT_EQ(name("eth0"), "eth0");
  EXPECT_EQ(name(""), "");
  EXPECT_EQ(name("a/b"), "");
  EXPECT_EQ(name("0123456789abcdef"), "");
}

TEST(RtnlWire, PortDataCountsOnlyWithItsKind) {
  const auto link = [](const char* slave) {
    return *parse_link(Builder(RTM_NEWLINK, ifinfomsg{})
                           .open(IFLA_LINKINFO)
                           .text(IFLA_INFO_SLAVE_KIND, slave)
                           .open(IFLA_INFO_SLAVE_DATA)
                           .put(IFLA_BRPORT_ISOLATED, std::uint8_t{1})
                           .close()
                           .close()
                           .block()
                           .get());
  };
  ASSERT_TRUE(link("bridge").port);
  EXPECT_TRUE(link("bridge").port->isolated);
  EXPECT_FALSE(link("bond").port);
}

TEST(RtnlWire, AddrgenModeOfALinkWithoutIpv6) {
  EXPECT_EQ(parse_link(Builder(RTM_NEWLINK, ifinfomsg{}).block().get())->addrgen_mode, 0);
  Builder without(RTM_NEWLINK, ifinfomsg{});
  without.open(IFLA_AF_SPEC).open(AF_INET).close().close();
  EXPECT_EQ(parse_link(without.block().get())->addrgen_mode, IN6_ADDR_GEN_MODE_NONE);
  Builder silent(RTM_NEWLINK, ifinfomsg{});
  silent.open(IFLA_AF_SPEC).open(AF_INET6).close().close();
  EXPECT_EQ(parse_link(silent.block().get())->addrgen_mode, 0);
}

// What is too short for its type is left out, and what follows is still read.
TEST(RtnlWire, AttributesTooShort) {
  const auto link = parse_link(Builder(RTM_NEWLINK, ifinfomsg{})
                                   .put(IFLA_MASTER, std::uint16_t{7})
                                   .put(IFLA_LINK_NETNSID, std::uint8_t{7})
                                   .put(IFLA_ADDRESS, std::array<std::uint8_t, 8>{1, 2, 3})
                                   .put(IFLA_MTU, std::uint32_t{1400})
                                   .block()
                                   .get());
  ASSERT_TRUE(link);
  EXPECT_EQ(link->master, 0U);
  EXPECT_FALSE(link->peer_netns);
  EXPECT_TRUE(link->mac.is_zero());
  EXPECT_EQ(link->mtu, 1400U);
}

TEST(RtnlWire, AddressWithoutAddress) {
  EXPECT_FALSE(parse_address(Builder(RTM_NEWADDR, ifaddrmsg{}).block().get()));
  EXPECT_FALSE(parse_address(
      Builder(RTM_NEWADDR, ifaddrmsg{}).put(IFA_ADDRESS, std::array<char, 5>{}).block().get()));
}

TEST(RtnlWire, FarEndIsNotOurs) {
  Builder builder(RTM_NEWADDR, ifaddrmsg{});
  builder.put(IFA_LOCAL, std::array<std::uint8_t, 4>{192, 0, 2, 1});
  builder.put(IFA_ADDRESS, std::array<std::uint8_t, 4>{192, 0, 2, 2});
  EXPECT_EQ(parse_address(builder.block().get())->address, ip("192.0.2.1"));
}

TEST(RtnlWire, OtherKindsOfMessages) {
  EXPECT_FALSE(parse_link(seed("address4").get()));
  EXPECT_FALSE(parse_link(Builder(RTM_DELLINK, ifinfomsg{}).block().get()));
  EXPECT_FALSE(parse_address(seed("link-port").get()));
  EXPECT_FALSE(parse_neighbour(seed("link-port").get()));
}

TEST(RtnlWire, ErrorCodes) {
  nlmsgerr body{};
  body.error = std::numeric_limits<std::int32_t>::min();
  EXPECT_EQ(parse_error(Builder(NLMSG_ERROR, body).block().get(), "x").code, EBADMSG);
  body.error = -ENOENT;
  EXPECT_EQ(parse_error(Builder(NLMSG_ERROR, body).block().get(), "x").code, ENOENT);
  EXPECT_EQ(parse_error(Builder(NLMSG_ERROR, body).block().cut(20).get(), "x").code, EBADMSG);
  // Attributes count only where the kernel says that there are some.
  Builder words(NLMSG_ERROR, body);
  words.text(NLMSGERR_ATTR_MSG, "why");
  EXPECT_EQ(parse_error(words.block().get(), "x").text, "");
  Builder flagged(NLMSG_ERROR, body, NLM_F_ACK_TLVS | NLM_F_CAPPED);
  flagged.text(NLMSGERR_ATTR_MSG, "why");
  EXPECT_EQ(parse_error(flagged.block().get(), "x").text, "why");
}

TEST(RtnlWire, EndOfADumpHasACode) {
  EXPECT_EQ(parse_error(Builder(NLMSG_DONE, std::int32_t{0}).block().get(), "x").code, 0);
  Builder failed(NLMSG_DONE, std::int32_t{-ENOMEM}, NLM_F_ACK_TLVS);
  failed.text(NLMSGERR_ATTR_MSG, "why");
  const Error error = parse_error(failed.block().get(), "x");
  EXPECT_EQ(error.code, ENOMEM);
  EXPECT_EQ(error.text, "why");
  EXPECT_EQ(parse_error(failed.block().cut(sizeof(nlmsghdr)).get(), "x").code, 0);
}

// No length at which one of them reads past the end (ASan judges), and none at which a prefix has
// something that the whole has not.
TEST(RtnlWire, EveryPrefixOfEverySeed) {
  int seeds = 0;
  for (const auto& file : std::filesystem::directory_iterator(SEEDS)) {
    ++seeds;
    const Block whole = seed(file.path().filename().string());
    for (std::size_t length = sizeof(nlmsghdr); length <= whole.size(); ++length) {
      const Block part = whole.cut(length);
      if (const auto link = parse_link(part.get())) {
        EXPECT_EQ(link->index, parse_link(whole.get())->index);
        EXPECT_TRUE(link->mac.is_zero() || link->mac == parse_link(whole.get())->mac);
      }
      if (const auto address = parse_address(part.get())) {
        EXPECT_EQ(address->address, parse_address(whole.get())->address);
      }
      (void)parse_neighbour(part.get());
      (void)parse_netns_id(part.get());
      (void)parse_error(part.get(), "x");
    }
  }
  EXPECT_GE(seeds, 10);
}

}  // namespace
}  // namespace agentgate::netdriver::wire
