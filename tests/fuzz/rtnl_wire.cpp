// SPDX-License-Identifier: GPL-2.0-or-later
//
// rtnetlink answers: no decoder reads past a message's end, and an attribute that none of them
// knows, put in front of all others, changes nothing of what they read.
#include <linux/neighbour.h>
#include <linux/rtnetlink.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "netdriver/rtnl_wire.h"

namespace {

using agentgate::netdriver::Link;
using agentgate::netdriver::LinkAddress;
namespace wire = agentgate::netdriver::wire;

struct Decoded {
  std::optional<Link> link;
  std::optional<LinkAddress> address;
  std::optional<wire::NeighbourMessage> neighbour;
  std::optional<std::int32_t> netns;
};

// In a block of its own size, with the length that the socket would have checked.
Decoded decode(const std::vector<std::uint8_t>& bytes) {
  const auto block = std::make_unique<std::uint8_t[]>(bytes.size());
  std::memcpy(block.get(), bytes.data(), bytes.size());
  const auto length = static_cast<std::uint32_t>(bytes.size());
  std::memcpy(block.get(), &length, sizeof length);
  const auto* message = reinterpret_cast<const nlmsghdr*>(block.get());
  (void)wire::parse_error(message, "fuzz").to_string();
  return {wire::parse_link(message), wire::parse_address(message), wire::parse_neighbour(message),
          wire::parse_netns_id(message)};
}

bool same(const std::optional<wire::NeighbourMessage>& a,
          const std::optional<wire::NeighbourMessage>& b) {
  if (!a || !b) return a.has_value() == b.has_value();
  return a->family == b->family && a->link == b->link && a->state == b->state &&
         a->flags == b->flags && a->master == b->master && a->mac == b->mac &&
         a->address == b->address;
}

// Where the attributes of a message of that type begin.
std::size_t header_size(std::uint16_t type) {
  switch (type) {
    case RTM_NEWLINK:
      return sizeof(nlmsghdr) + sizeof(ifinfomsg);
    case RTM_NEWADDR:
      return sizeof(nlmsghdr) + sizeof(ifaddrmsg);
    case RTM_NEWNEIGH:
      return sizeof(nlmsghdr) + sizeof(ndmsg);
    case RTM_NEWNSID:
      return sizeof(nlmsghdr) + NLMSG_ALIGN(sizeof(rtgenmsg));
    default:
      return 0;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < sizeof(nlmsghdr)) return 0;
  std::vector<std::uint8_t> bytes(data, data + size);
  const Decoded plain = decode(bytes);

  std::uint16_t type = 0;
  std::memcpy(&type, data + offsetof(nlmsghdr, nlmsg_type), sizeof type);
  const std::size_t header = header_size(type);
  if (header == 0 || size < header) return 0;
  const nlattr unknown{sizeof(nlattr), 0x3ff0};
  const auto* begin = reinterpret_cast<const std::uint8_t*>(&unknown);
  bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(header), begin, begin + sizeof unknown);
  const Decoded padded = decode(bytes);
  if (padded.link != plain.link || padded.address != plain.address || padded.netns != plain.netns ||
      !same(padded.neighbour, plain.neighbour)) {
    std::abort();
  }
  return 0;
}
