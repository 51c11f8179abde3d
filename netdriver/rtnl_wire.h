// SPDX-License-Identifier: GPL-2.0-or-later
//
// Decoders of rtnetlink messages. Pure; they take what came and never read past its length.
#pragma once

#include <linux/netlink.h>

#include <optional>

#include "netdriver/error.h"
#include "netdriver/rtnl.h"

namespace agentgate::netdriver::wire {

// Nothing: the message is of another kind or too short to be one. An attribute that is too short
// for its type is left out.
std::optional<Link> parse_link(const nlmsghdr* message);
std::optional<LinkAddress> parse_address(const nlmsghdr* message);

// RTM_NEWNEIGH of any family.
struct NeighbourMessage {
  std::uint8_t family = 0;
  std::uint32_t link = 0;
  std::uint16_t state = 0;  // NUD_*
  std::uint8_t flags = 0;   // NTF_*
  std::uint32_t master = 0;
  MacAddress mac;
  std::optional<IpAddress> address;
};
std::optional<NeighbourMessage> parse_neighbour(const nlmsghdr* message);

// The extended acknowledgement of NLMSG_ERROR (NETLINK_CAP_ACK set). code 0 is success.
Error parse_error(const nlmsghdr* message, std::string operation);

}  // namespace agentgate::netdriver::wire
