// SPDX-License-Identifier: GPL-2.0-or-later
//
// The frames that tell a container where its gateway is, byte by byte as tcpdump -xx shows what
// Linux itself answers to a look-up.
#include "netdriver/announce.h"

#include <gtest/gtest.h>

#include <cerrno>

namespace agentgate::netdriver {
namespace {

using Frame = std::vector<std::uint8_t>;

PortSpec port() {
  PortSpec out;
  out.mac = MacAddress::parse("02:00:00:00:01:01").value();
  out.bridge_mac = MacAddress::parse("02:00:00:00:00:01").value();
  out.address4 = Ipv4Address::parse("172.30.0.11").value();
  out.gateway4 = Ipv4Address::parse("172.30.0.1").value();
  out.address6 = Ipv6Address::parse("2001:db8:30::11").value();
  out.gateway6 = Ipv6Address::parse("2001:db8:30::1").value();
  return out;
}

TEST(Announce, ArpReplyOfTheGatewayToTheContainer) {
  const Frame expected = {0x02, 0x00, 0x00, 0x00, 0x01, 0x01, 0x02, 0x00, 0x00, 0x00,
                          0x00, 0x01, 0x08, 0x06,                                     // Ethernet
                          0x00, 0x01, 0x08, 0x00, 0x06, 0x04, 0x00, 0x02,             // reply
                          0x02, 0x00, 0x00, 0x00, 0x00, 0x01, 172,  30,   0,    1,    // sender
                          0x02, 0x00, 0x00, 0x00, 0x01, 0x01, 172,  30,   0,    11};  // target
  ASSERT_EQ(gateway_frames(port()).size(), 2U);
  EXPECT_EQ(gateway_frames(port())[0], expected);
}

TEST(Announce, NeighbourAdvertisementHasAValidChecksum) {
  const Frame frame = gateway_frames(port()).at(1);
  ASSERT_EQ(frame.size(), 14U + 40 + 32);
  EXPECT_EQ(frame[14 + 7], 255);   // hop limit
  EXPECT_EQ(frame[14 + 40], 136);  // neighbour advertisement
  // RFC 1071: over everything with the checksum in place the sum is all ones.
  std::uint32_t sum = 32 + 58;  // length and next header of the pseudo header
  for (std::size_t i = 14 + 8; i < frame.size(); i += 2) {
    sum += static_cast<std::uint32_t>(frame[i] << 8 | frame[i + 1]);
  }
  while ((sum >> 16) != 0) sum = (sum & 0xFFFF) + (sum >> 16);
  EXPECT_EQ(sum, 0xFFFFU);
}

TEST(Announce, OnlyFamiliesWithAnAddressAndAGateway) {
  PortSpec one = port();
  one.gateway6.reset();
  EXPECT_EQ(gateway_frames(one).size(), 1U);
  one.address4.reset();
  EXPECT_TRUE(gateway_frames(one).empty());
}

TEST(Announce, WhatCannotBeSentIsAnError) {
  const Status status = announce_gateway(-1, 1, port());
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, EBADF) << status.error().to_string();
}

}  // namespace
}  // namespace agentgate::netdriver
