// SPDX-License-Identifier: GPL-2.0-or-later
#include "netdriver/rtnl_wire.h"

#include <libmnl/libmnl.h>
#include <linux/if_bridge.h>
#include <linux/if_link.h>
#include <linux/neighbour.h>
#include <linux/net_namespace.h>
#include <linux/rtnetlink.h>
#include <net/if.h>

#include <cstring>
#include <functional>
#include <limits>

namespace agentgate::netdriver::wire {
namespace {

using Visit = std::function<void(int type, const nlattr* attribute)>;

// Walks attributes from `begin` to `end`; stops at the first that does not fit.
void walk(const std::uint8_t* begin, const std::uint8_t* end, const Visit& visit) {
  while (begin + sizeof(nlattr) <= end) {
    const auto* attribute = reinterpret_cast<const nlattr*>(begin);
    if (attribute->nla_len < sizeof(nlattr) || attribute->nla_len > end - begin) return;
    visit(attribute->nla_type & NLA_TYPE_MASK, attribute);
    const std::size_t step = MNL_ALIGN(attribute->nla_len);
    if (step > static_cast<std::size_t>(end - begin)) return;
    begin += step;
  }
}
void walk(const nlmsghdr* message, std::size_t header, const Visit& visit) {
  const auto* begin = reinterpret_cast<const std::uint8_t*>(message);
  walk(begin + MNL_NLMSG_HDRLEN + MNL_ALIGN(header), begin + message->nlmsg_len, visit);
}
void walk_nested(const nlattr* nest, const Visit& visit) {
  const auto* begin = reinterpret_cast<const std::uint8_t*>(nest);
  walk(begin + sizeof(nlattr), begin + nest->nla_len, visit);
}

std::size_t size(const nlattr* a) { return a->nla_len - sizeof(nlattr); }
const std::uint8_t* data(const nlattr* a) {
  return reinterpret_cast<const std::uint8_t*>(a) + sizeof(nlattr);
}
template <class T>
std::optional<T> number(const nlattr* a) {
  if (size(a) < sizeof(T)) return std::nullopt;
  T value{};
  std::memcpy(&value, data(a), sizeof value);
  return value;
}
std::string text(const nlattr* a) {
  const auto* begin = reinterpret_cast<const char*>(data(a));
  return std::string(begin, ::strnlen(begin, size(a)));
}
MacAddress mac(const nlattr* a) {
  std::array<std::uint8_t, 6> bytes{};
  if (size(a) == bytes.size()) std::memcpy(bytes.data(), data(a), bytes.size());
  return MacAddress(bytes);
}

template <class Header>
const Header* header_of(const nlmsghdr* message) {
  if (message->nlmsg_len < MNL_NLMSG_HDRLEN + MNL_ALIGN(sizeof(Header))) return nullptr;
  return reinterpret_cast<const Header*>(reinterpret_cast<const std::uint8_t*>(message) +
                                         MNL_NLMSG_HDRLEN);
}

void parse_port(const nlattr* nest, Link& link) {
  BridgePortFlags flags;
  walk_nested(nest, [&](int type, const nlattr* a) {
    const bool on = number<std::uint8_t>(a).value_or(0) != 0;
    switch (type) {
      case IFLA_BRPORT_STATE:
        link.port_state = number<std::uint8_t>(a);
        break;
      case IFLA_BRPORT_ISOLATED:
        flags.isolated = on;
        break;
      case IFLA_BRPORT_LEARNING:
        flags.learning = on;
        break;
      case IFLA_BRPORT_LOCKED:
        flags.locked = on;
        break;
      case IFLA_BRPORT_UNICAST_FLOOD:
        flags.unicast_flood = on;
        break;
      case IFLA_BRPORT_MCAST_FLOOD:
        flags.multicast_flood = on;
        break;
      case IFLA_BRPORT_BCAST_FLOOD:
        flags.broadcast_flood = on;
        break;
      case IFLA_BRPORT_MODE:
        flags.hairpin = on;
        break;
      case IFLA_BRPORT_GUARD:
        flags.bpdu_guard = on;
        break;
      case IFLA_BRPORT_PROXYARP:
      case IFLA_BRPORT_PROXYARP_WIFI:
        flags.proxy_arp = flags.proxy_arp || on;
        break;
      case IFLA_BRPORT_NEIGH_SUPPRESS:
        flags.neigh_suppress = on;
        break;
      case IFLA_BRPORT_FAST_LEAVE:
        flags.multicast_fast_leave = on;
        break;
      case IFLA_BRPORT_GROUP_FWD_MASK:
        flags.group_forward_mask = number<std::uint16_t>(a).value_or(0);
        break;
      case kBrportMab:
        flags.mab = on;
        break;
      default:
        break;
    }
  });
  link.port = flags;
}

void parse_bridge(const nlattr* nest, Link& link) {
  walk_nested(nest, [&](int type, const nlattr* a) {
    if (type == IFLA_BR_STP_STATE) link.stp = number<std::uint32_t>(a).value_or(1) != 0;
    if (type == IFLA_BR_MCAST_SNOOPING) {
      link.multicast_snooping = number<std::uint8_t>(a).value_or(1) != 0;
    }
    if (type == IFLA_BR_VLAN_FILTERING) {
      link.vlan_filtering = number<std::uint8_t>(a).value_or(1) != 0;
    }
    if (type == IFLA_BR_GROUP_FWD_MASK) link.group_forward_mask = number<std::uint16_t>(a);
  });
}

}  // namespace

std::optional<Link> parse_link(const nlmsghdr* message) {
  const auto* header = header_of<ifinfomsg>(message);
  if (message->nlmsg_type != RTM_NEWLINK || header == nullptr) return std::nullopt;
  Link link;
  link.index = static_cast<std::uint32_t>(header->ifi_index);
  link.up = (header->ifi_flags & IFF_UP) != 0;
  walk(message, sizeof *header, [&](int type, const nlattr* a) {
    switch (type) {
      case IFLA_IFNAME:
        if (auto name = InterfaceName::parse(text(a))) link.name = *name;
        break;
      case IFLA_ADDRESS:
        link.mac = mac(a);
        break;
      case IFLA_MTU:
        link.mtu = number<std::uint32_t>(a).value_or(0);
        break;
      case IFLA_GROUP:
        link.group = number<std::uint32_t>(a).value_or(0);
        break;
      case IFLA_MASTER:
        link.master = number<std::uint32_t>(a).value_or(0);
        break;
      case IFLA_LINK:
        link.peer = number<std::uint32_t>(a).value_or(0);
        break;
      case IFLA_LINK_NETNSID:
        link.peer_netns = number<std::int32_t>(a);
        break;
      case IFLA_LINKINFO: {
        std::string slave;
        const nlattr* info = nullptr;
        const nlattr* slave_data = nullptr;
        walk_nested(a, [&](int inner, const nlattr* b) {
          if (inner == IFLA_INFO_KIND) link.kind = text(b);
          if (inner == IFLA_INFO_DATA) info = b;
          if (inner == IFLA_INFO_SLAVE_KIND) slave = text(b);
          if (inner == IFLA_INFO_SLAVE_DATA) slave_data = b;
        });
        if (link.kind == "bridge" && info != nullptr) parse_bridge(info, link);
        if (slave == "bridge" && slave_data != nullptr) parse_port(slave_data, link);
        break;
      }
      case IFLA_AF_SPEC:
        link.addrgen_mode = IN6_ADDR_GEN_MODE_NONE;
        walk_nested(a, [&](int family, const nlattr* b) {
          if (family != AF_INET6) return;
          link.addrgen_mode = 0;
          walk_nested(b, [&](int inner, const nlattr* c) {
            if (inner == IFLA_INET6_ADDR_GEN_MODE) {
              link.addrgen_mode = number<std::uint8_t>(c).value_or(0);
            }
          });
        });
        break;
      default:
        break;
    }
  });
  return link;
}

std::optional<LinkChange> parse_link_change(const nlmsghdr* message) {
  const auto* header = header_of<ifinfomsg>(message);
  if ((message->nlmsg_type != RTM_NEWLINK && message->nlmsg_type != RTM_DELLINK) ||
      header == nullptr) {
    return std::nullopt;
  }
  LinkChange out;
  out.family = header->ifi_family;
  out.index = static_cast<std::uint32_t>(header->ifi_index);
  out.deleted = message->nlmsg_type == RTM_DELLINK;
  walk(message, sizeof *header, [&](int type, const nlattr* a) {
    if (type == IFLA_GROUP) out.group = number<std::uint32_t>(a).value_or(0);
    if (type != IFLA_IFNAME) return;
    if (auto name = InterfaceName::parse(text(a))) out.name = *name;
  });
  return out;
}

std::optional<std::uint32_t> parse_address_link(const nlmsghdr* message) {
  const auto* header = header_of<ifaddrmsg>(message);
  if ((message->nlmsg_type != RTM_NEWADDR && message->nlmsg_type != RTM_DELADDR) ||
      header == nullptr) {
    return std::nullopt;
  }
  return header->ifa_index;
}

std::optional<std::uint32_t> parse_tc_link(const nlmsghdr* message) {
  const auto* header = header_of<tcmsg>(message);
  if (header == nullptr) return std::nullopt;
  return static_cast<std::uint32_t>(header->tcm_ifindex);
}

std::optional<LinkAddress> parse_address(const nlmsghdr* message) {
  const auto* header = header_of<ifaddrmsg>(message);
  if (message->nlmsg_type != RTM_NEWADDR || header == nullptr) return std::nullopt;
  LinkAddress out;
  out.link = header->ifa_index;
  out.length = header->ifa_prefixlen;
  std::optional<IpAddress> local;
  std::optional<IpAddress> address;
  walk(message, sizeof *header, [&](int type, const nlattr* a) {
    if (type != IFA_LOCAL && type != IFA_ADDRESS) return;
    auto ip = IpAddress::from_bytes({data(a), size(a)});
    if (!ip) return;
    (type == IFA_LOCAL ? local : address) = *ip;
  });
  // IFA_ADDRESS is the far end of a point-to-point link; IFA_LOCAL, where it is, our own.
  if (!local && !address) return std::nullopt;
  out.address = local ? *local : *address;
  return out;
}

std::optional<NeighbourMessage> parse_neighbour(const nlmsghdr* message) {
  if (message->nlmsg_type != RTM_NEWNEIGH) return std::nullopt;
  return parse_neighbour_change(message);
}

std::optional<NeighbourMessage> parse_neighbour_change(const nlmsghdr* message) {
  const auto* header = header_of<ndmsg>(message);
  if ((message->nlmsg_type != RTM_NEWNEIGH && message->nlmsg_type != RTM_DELNEIGH) ||
      header == nullptr) {
    return std::nullopt;
  }
  NeighbourMessage out;
  out.family = header->ndm_family;
  out.link = static_cast<std::uint32_t>(header->ndm_ifindex);
  out.state = header->ndm_state;
  out.flags = header->ndm_flags;
  walk(message, sizeof *header, [&](int type, const nlattr* a) {
    if (type == NDA_LLADDR) out.mac = mac(a);
    if (type == NDA_MASTER) out.master = number<std::uint32_t>(a).value_or(0);
    if (type == NDA_VLAN) out.vlan = number<std::uint16_t>(a).value_or(0);
    if (type == NDA_DST) {
      if (auto ip = IpAddress::from_bytes({data(a), size(a)})) out.address = *ip;
    }
  });
  return out;
}

std::optional<std::int32_t> parse_netns_id(const nlmsghdr* message) {
  if (message->nlmsg_type != RTM_NEWNSID || header_of<rtgenmsg>(message) == nullptr) {
    return std::nullopt;
  }
  std::optional<std::int32_t> out;
  walk(message, sizeof(rtgenmsg), [&](int type, const nlattr* a) {
    if (type == NETNSA_NSID) out = number<std::int32_t>(a);
  });
  return out;
}

Error parse_error(const nlmsghdr* message, std::string operation) {
  Error error;
  error.operation = std::move(operation);
  const auto* code = header_of<std::int32_t>(message);
  const bool done = message->nlmsg_type == NLMSG_DONE;
  // The end of a dump has had its errno since 2.6.12 or so, but nothing promises it.
  if (code == nullptr && done) return error;
  if (code == nullptr || (!done && header_of<nlmsgerr>(message) == nullptr)) {
    error.code = EBADMSG;
    error.text = "the kernel's answer is too short";
    return error;
  }
  // Not a plain minus: there is no positive of the smallest number.
  error.code = *code == std::numeric_limits<std::int32_t>::min() ? EBADMSG : -*code;
  if ((message->nlmsg_flags & NLM_F_ACK_TLVS) == 0) return error;
  walk(message, done ? sizeof(std::int32_t) : sizeof(nlmsgerr), [&](int type, const nlattr* a) {
    if (type == NLMSGERR_ATTR_MSG) error.text = text(a);
    if (type == NLMSGERR_ATTR_OFFS) error.offset = number<std::uint32_t>(a);
  });
  return error;
}

}  // namespace agentgate::netdriver::wire
