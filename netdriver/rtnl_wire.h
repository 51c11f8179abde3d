// SPDX-License-Identifier: GPL-2.0-or-later
//
// Decoders of rtnetlink messages. Pure; they take what came and never read past its length.
#pragma once

#include <linux/netlink.h>

#include <cstdint>
#include <optional>
#include <string>

#include "netdriver/error.h"
#include "netdriver/rtnl.h"

namespace agentgate::netdriver::wire {

constexpr std::uint16_t kBrportMab = 40;  // IFLA_BRPORT_MAB, since 6.2; older headers lack it

// Nothing: the message is of another kind or too short to be one. An attribute that is too short
// for its type is left out.
std::optional<Link> parse_link(const nlmsghdr* message);
std::optional<LinkAddress> parse_address(const nlmsghdr* message);

// What RTM_NEWLINK and RTM_DELLINK notifications of any family have in common.
struct LinkChange {
  std::uint8_t family = 0;
  std::uint32_t index = 0;
  InterfaceName name;
  std::uint32_t group = 0;  // 0 in notifications of the bridge family, which leave it out
  bool deleted = false;
};
std::optional<LinkChange> parse_link_change(const nlmsghdr* message);
// The link that RTM_NEWADDR or RTM_DELADDR is about.
std::optional<std::uint32_t> parse_address_link(const nlmsghdr* message);

// The link that a notification of a queueing discipline or filter is about.
std::optional<std::uint32_t> parse_tc_link(const nlmsghdr* message);

// RTM_NEWNEIGH of any family.
struct NeighbourMessage {
  std::uint8_t family = 0;
  std::uint32_t link = 0;
  std::uint16_t state = 0;  // NUD_*
  std::uint8_t flags = 0;   // NTF_*
  std::uint32_t master = 0;
  std::uint16_t vlan = 0;
  MacAddress mac;
  std::optional<IpAddress> address;
};
std::optional<NeighbourMessage> parse_neighbour(const nlmsghdr* message);
// RTM_DELNEIGH as well.
std::optional<NeighbourMessage> parse_neighbour_change(const nlmsghdr* message);

// Answer to RTM_GETNSID; negative when the other namespace has no id here.
std::optional<std::int32_t> parse_netns_id(const nlmsghdr* message);

// What NLMSG_ERROR (with NETLINK_CAP_ACK set) or NLMSG_DONE says. code 0 is success.
Error parse_error(const nlmsghdr* message, std::string operation);

}  // namespace agentgate::netdriver::wire
