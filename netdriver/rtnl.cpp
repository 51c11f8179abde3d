// SPDX-License-Identifier: GPL-2.0-or-later
#include "netdriver/rtnl.h"

#include <libmnl/libmnl.h>
#include <linux/if_bridge.h>
#include <linux/if_link.h>
#include <linux/neighbour.h>
#include <linux/net_namespace.h>
#include <linux/rtnetlink.h>
#include <linux/veth.h>
#include <net/if.h>
#include <sched.h>
#include <sys/socket.h>

#include <cstring>
#include <functional>
#include <system_error>
#include <thread>

#include "netdriver/netlink_socket.h"
#include "netdriver/rtnl_wire.h"

namespace agentgate::netdriver {
namespace {

constexpr std::uint8_t kAddrGenNone = 1;  // IN6_ADDR_GEN_MODE_NONE

// One request under construction.
class Message {
 public:
  template <class Header>
  Message(std::uint16_t type, std::uint16_t flags, const Header& header) {
    message_ = mnl_nlmsg_put_header(buffer_);
    message_->nlmsg_type = type;
    message_->nlmsg_flags = static_cast<std::uint16_t>(NLM_F_REQUEST | flags);
    std::memcpy(mnl_nlmsg_put_extra_header(message_, sizeof header), &header, sizeof header);
  }
  void u8(std::uint16_t type, std::uint8_t v) { mnl_attr_put_u8(message_, type, v); }
  void u16(std::uint16_t type, std::uint16_t v) { mnl_attr_put_u16(message_, type, v); }
  void u32(std::uint16_t type, std::uint32_t v) { mnl_attr_put_u32(message_, type, v); }
  void text(std::uint16_t type, const std::string& v) {
    mnl_attr_put_strz(message_, type, v.c_str());
  }
  void bytes(std::uint16_t type, std::span<const std::uint8_t> v) {
    mnl_attr_put(message_, type, v.size(), v.data());
  }
  void nest(std::uint16_t type, const std::function<void()>& fill) {
    nlattr* start = mnl_attr_nest_start(message_, type);
    fill();
    mnl_attr_nest_end(message_, start);
  }
  // A header inside an attribute (VETH_INFO_PEER).
  void raw(const void* data, std::size_t size) {
    std::memcpy(mnl_nlmsg_get_payload_tail(message_), data, size);
    message_->nlmsg_len += static_cast<std::uint32_t>(MNL_ALIGN(size));
  }
  nlmsghdr* header() { return message_; }
  Message(const Message&) = delete;  // message_ points into buffer_
  Message& operator=(const Message&) = delete;

 private:
  alignas(8) char buffer_[4096] = {};
  nlmsghdr* message_;
};

ifinfomsg link_header(std::uint32_t index = 0, unsigned flags = 0, unsigned change = 0) {
  ifinfomsg header{};
  header.ifi_family = AF_UNSPEC;
  header.ifi_index = static_cast<int>(index);
  header.ifi_flags = flags;
  header.ifi_change = change;
  return header;
}

void bridge_options(Message& message) {
  message.nest(IFLA_LINKINFO, [&] {
    message.text(IFLA_INFO_KIND, "bridge");
    message.nest(IFLA_INFO_DATA, [&] {
      message.u32(IFLA_BR_FORWARD_DELAY, 0);
      message.u32(IFLA_BR_STP_STATE, 0);
      message.u16(IFLA_BR_GROUP_FWD_MASK, 0);
      message.u8(IFLA_BR_MCAST_SNOOPING, 0);
      message.u8(IFLA_BR_MCAST_QUERIER, 0);
      message.u8(IFLA_BR_NF_CALL_IPTABLES, 0);
      message.u8(IFLA_BR_NF_CALL_IP6TABLES, 0);
      message.u8(IFLA_BR_NF_CALL_ARPTABLES, 0);
    });
  });
}

}  // namespace

struct Rtnl::Impl {
  NetlinkSocket socket;

  Status exchange(Message& message, const std::string& operation,
                  const NetlinkSocket::Visit& visit = {},
                  const std::function<void()>& restart = {}) {
    return socket.request(message.header(), operation, visit, restart);
  }

  // No fe80 address when the link comes up. A request of its own: do_setlink applies the flags
  // first, and a new link that finds its carrier there has the address at once (6.18, in 19 of 20
  // tries).
  Status no_link_local(const InterfaceName& name, const std::string& operation) {
    Message message(RTM_NEWLINK, 0, link_header());
    message.text(IFLA_IFNAME, name.str());
    message.nest(IFLA_AF_SPEC, [&] {
      message.nest(AF_INET6, [&] { message.u8(IFLA_INET6_ADDR_GEN_MODE, kAddrGenNone); });
    });
    Status status = exchange(message, operation);
    // A link without an IPv6 side (MTU below 1280, ipv6.disable=1) has nothing to switch off.
    if (!status && status.error().code == EAFNOSUPPORT) return {};
    return status;
  }

  Result<std::uint32_t> index_of(const InterfaceName& name, const std::string& operation) {
    Message message(RTM_GETLINK, 0, link_header());
    message.text(IFLA_IFNAME, name.str());
    std::uint32_t index = 0;
    const Status status = exchange(message, operation, [&](const nlmsghdr* answer) {
      if (const auto link = wire::parse_link(answer)) index = link->index;
    });
    if (!status) return tl::unexpected(status.error());
    if (index == 0) return fail(operation, "no such link", ENODEV);
    return index;
  }

  Result<Link> get(Message& message, const std::string& operation) {
    std::optional<Link> out;
    const Status status = exchange(message, operation, [&](const nlmsghdr* answer) {
      if (auto link = wire::parse_link(answer)) out = std::move(link);
    });
    if (!status) return tl::unexpected(status.error());
    if (!out) return fail(operation, "no such link", ENODEV);
    return *out;
  }

  Status neighbour(std::uint16_t type, std::uint16_t flags, std::uint8_t family,
                   const InterfaceName& link, std::uint16_t state, std::uint8_t neighbour_flags,
                   const MacAddress* mac, const IpAddress* address, const std::string& operation) {
    const auto index = index_of(link, operation);
    if (!index) return tl::unexpected(index.error());
    ndmsg header{};
    header.ndm_family = family;
    header.ndm_ifindex = static_cast<int>(*index);
    header.ndm_state = state;
    header.ndm_flags = neighbour_flags;
    Message message(type, flags, header);
    if (address != nullptr) message.bytes(NDA_DST, address->bytes());
    if (mac != nullptr) message.bytes(NDA_LLADDR, mac->bytes());
    return exchange(message, operation);
  }
};

namespace {
std::uint8_t family_of(const IpAddress& address) { return address.is_v4() ? AF_INET : AF_INET6; }
}  // namespace

Rtnl::Rtnl(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Rtnl::~Rtnl() = default;

Result<std::unique_ptr<Rtnl>> Rtnl::open() {
  auto socket = NetlinkSocket::open(NETLINK_ROUTE);
  if (!socket) return tl::unexpected(socket.error());
  return std::unique_ptr<Rtnl>(new Rtnl(std::make_unique<Impl>(Impl{std::move(*socket)})));
}

Result<std::unique_ptr<Rtnl>> Rtnl::open_in(int netns_fd) {
  Result<std::unique_ptr<Rtnl>> out;
  try {
    std::thread([&] {
      if (::setns(netns_fd, CLONE_NEWNET) < 0) {
        out = fail_errno("enter network namespace");
      } else {
        out = open();
      }
    }).join();
  } catch (const std::system_error& error) {
    return fail("enter network namespace", "no thread for it", error.code().value());
  }
  return out;
}

Status Rtnl::create_veth(const VethSpec& spec) {
  Message message(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, link_header());
  const auto common = [&](const InterfaceName& name) {
    message.text(IFLA_IFNAME, name.str());
    message.u32(IFLA_MTU, spec.mtu);
    message.u32(IFLA_GROUP, spec.group);
    message.u32(IFLA_NUM_TX_QUEUES, 1);
    message.u32(IFLA_NUM_RX_QUEUES, 1);
  };
  common(spec.name);
  message.nest(IFLA_LINKINFO, [&] {
    message.text(IFLA_INFO_KIND, "veth");
    message.nest(IFLA_INFO_DATA, [&] {
      message.nest(VETH_INFO_PEER, [&] {
        const ifinfomsg peer = link_header();
        message.raw(&peer, sizeof peer);
        common(spec.peer);
        message.bytes(IFLA_ADDRESS, spec.peer_mac.bytes());
      });
    });
  });
  return impl_->exchange(message, "create veth " + spec.name.str());
}

Status Rtnl::create_bridge(const BridgeSpec& spec) {
  const std::string operation = "create bridge " + spec.name.str();
  Message message(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, link_header());
  message.text(IFLA_IFNAME, spec.name.str());
  message.bytes(IFLA_ADDRESS, spec.mac.bytes());
  message.u32(IFLA_MTU, spec.mtu);
  message.u32(IFLA_GROUP, spec.group);
  bridge_options(message);
  if (Status created = impl_->exchange(message, operation); !created) return created;
  // In the create message addrgenmode is EAFNOSUPPORT: the link has no IPv6 side yet (6.18).
  Status status = impl_->no_link_local(spec.name, operation);
  if (!status) (void)delete_link(spec.name);
  return status;
}

Status Rtnl::set_bridge_options(const InterfaceName& name) {
  // While STP runs a forward delay of 0 is ERANGE (br_set_forward_delay).
  Message off(RTM_NEWLINK, 0, link_header());
  off.text(IFLA_IFNAME, name.str());
  off.nest(IFLA_LINKINFO, [&] {
    off.text(IFLA_INFO_KIND, "bridge");
    off.nest(IFLA_INFO_DATA, [&] { off.u32(IFLA_BR_STP_STATE, 0); });
  });
  const std::string operation = "set options of bridge " + name.str();
  if (Status status = impl_->exchange(off, operation); !status) return status;
  Message message(RTM_NEWLINK, 0, link_header());
  message.text(IFLA_IFNAME, name.str());
  bridge_options(message);
  return impl_->exchange(message, operation);
}

Status Rtnl::no_vlan_filtering(const InterfaceName& name) {
  Message message(RTM_NEWLINK, 0, link_header());
  message.text(IFLA_IFNAME, name.str());
  message.nest(IFLA_LINKINFO, [&] {
    message.text(IFLA_INFO_KIND, "bridge");
    message.nest(IFLA_INFO_DATA, [&] { message.u8(IFLA_BR_VLAN_FILTERING, 0); });
  });
  return impl_->exchange(message, "switch off VLAN filtering of bridge " + name.str());
}

Status Rtnl::delete_link(const InterfaceName& name) {
  Message message(RTM_DELLINK, 0, link_header());
  message.text(IFLA_IFNAME, name.str());
  Status status = impl_->exchange(message, "delete link " + name.str());
  if (!status && status.error().code == ENODEV) return {};
  return status;
}

Status Rtnl::delete_link_group(std::uint32_t group) {
  // Every link of the host that nobody gave a group is in group 0.
  if (group == 0) return fail("delete link group", "0 is everybody's group", EINVAL);
  Message message(RTM_DELLINK, 0, link_header());
  message.u32(IFLA_GROUP, group);
  Status status = impl_->exchange(message, "delete link group");
  if (!status && status.error().code == ENODEV) return {};
  return status;
}

Status Rtnl::enslave(const InterfaceName& port, const InterfaceName& bridge) {
  const std::string operation = "enslave " + port.str() + " to " + bridge.str();
  const auto master = impl_->index_of(bridge, operation);
  if (!master) return tl::unexpected(master.error());
  Message message(RTM_NEWLINK, 0, link_header());
  message.text(IFLA_IFNAME, port.str());
  message.u32(IFLA_MASTER, *master);
  Status status = impl_->exchange(message, operation);
  // br_add_if: no free port number is EXFULL.
  if (!status && status.error().code == EXFULL) status.error().code = ENOSPC;
  return status;
}

Status Rtnl::set_port_flags(const InterfaceName& port, const BridgePortFlags& flags) {
  const std::string operation = "set bridge port flags of " + port.str();
  if (flags.mab) return fail(operation, "mab must never be on", EINVAL);
  Message message(RTM_NEWLINK, 0, link_header());
  message.text(IFLA_IFNAME, port.str());
  message.nest(IFLA_LINKINFO, [&] {
    message.text(IFLA_INFO_SLAVE_KIND, "bridge");
    message.nest(IFLA_INFO_SLAVE_DATA, [&] {
      message.u8(IFLA_BRPORT_ISOLATED, flags.isolated ? 1 : 0);
      message.u8(IFLA_BRPORT_LEARNING, flags.learning ? 1 : 0);
      message.u8(IFLA_BRPORT_LOCKED, flags.locked ? 1 : 0);
      message.u8(IFLA_BRPORT_UNICAST_FLOOD, flags.unicast_flood ? 1 : 0);
      message.u8(IFLA_BRPORT_MCAST_FLOOD, flags.multicast_flood ? 1 : 0);
      message.u8(IFLA_BRPORT_BCAST_FLOOD, flags.broadcast_flood ? 1 : 0);
      message.u8(IFLA_BRPORT_MODE, flags.hairpin ? 1 : 0);
      message.u8(IFLA_BRPORT_GUARD, flags.bpdu_guard ? 1 : 0);
      message.u8(IFLA_BRPORT_PROXYARP, flags.proxy_arp ? 1 : 0);
      message.u8(IFLA_BRPORT_PROXYARP_WIFI, flags.proxy_arp ? 1 : 0);
      message.u8(IFLA_BRPORT_NEIGH_SUPPRESS, flags.neigh_suppress ? 1 : 0);
      message.u8(IFLA_BRPORT_FAST_LEAVE, flags.multicast_fast_leave ? 1 : 0);
      message.u16(IFLA_BRPORT_GROUP_FWD_MASK, flags.group_forward_mask);
      message.u8(wire::kBrportMab, 0);  // kernels before 6.2 skip what they do not know
    });
  });
  return impl_->exchange(message, operation);
}

Status Rtnl::set_up(const InterfaceName& name) {
  const std::string operation = "set " + name.str() + " up";
  if (Status quiet = impl_->no_link_local(name, operation); !quiet) return quiet;
  Message message(RTM_NEWLINK, 0, link_header(0, IFF_UP, IFF_UP));
  message.text(IFLA_IFNAME, name.str());
  return impl_->exchange(message, operation);
}

Status Rtnl::rename(std::uint32_t index, const InterfaceName& name) {
  const std::string operation = "rename link " + std::to_string(index) + " to " + name.str();
  Message down(RTM_NEWLINK, 0, link_header(index, 0, IFF_UP));
  if (Status status = impl_->exchange(down, operation); !status) return status;
  Message message(RTM_NEWLINK, 0, link_header(index));
  message.text(IFLA_IFNAME, name.str());
  return impl_->exchange(message, operation);
}

Status Rtnl::set_mac(const InterfaceName& name, const MacAddress& mac) {
  Message message(RTM_NEWLINK, 0, link_header());
  message.text(IFLA_IFNAME, name.str());
  message.bytes(IFLA_ADDRESS, mac.bytes());
  return impl_->exchange(message, "set MAC address of " + name.str());
}

Status Rtnl::set_group(const InterfaceName& name, std::uint32_t group) {
  Message message(RTM_NEWLINK, 0, link_header());
  message.text(IFLA_IFNAME, name.str());
  message.u32(IFLA_GROUP, group);
  return impl_->exchange(message, "set group of " + name.str());
}

Status Rtnl::set_down(const InterfaceName& name) {
  Message message(RTM_NEWLINK, 0, link_header(0, 0, IFF_UP));
  message.text(IFLA_IFNAME, name.str());
  return impl_->exchange(message, "set " + name.str() + " down");
}

Status Rtnl::add_address(const InterfaceName& name, const IpAddress& address, std::uint8_t length) {
  const std::string operation = "add address " + address.to_string() + " to " + name.str();
  const auto index = impl_->index_of(name, operation);
  if (!index) return tl::unexpected(index.error());
  ifaddrmsg header{};
  header.ifa_family = family_of(address);
  header.ifa_prefixlen = length;
  // Without a port the bridge has no carrier, and duplicate address detection would never end.
  header.ifa_flags = address.is_v6() ? IFA_F_NODAD : 0;
  header.ifa_index = *index;
  Message message(RTM_NEWADDR, NLM_F_CREATE | NLM_F_EXCL, header);
  message.bytes(IFA_LOCAL, address.bytes());
  message.bytes(IFA_ADDRESS, address.bytes());
  return impl_->exchange(message, operation);
}

Status Rtnl::delete_address(const LinkAddress& address) {
  ifaddrmsg header{};
  header.ifa_family = family_of(address.address);
  header.ifa_prefixlen = address.length;
  header.ifa_index = address.link;
  Message message(RTM_DELADDR, 0, header);
  message.bytes(IFA_LOCAL, address.address.bytes());
  Status status = impl_->exchange(message, "delete address " + address.address.to_string());
  if (!status && status.error().code == EADDRNOTAVAIL) return {};
  return status;
}

Status Rtnl::set_fdb(const InterfaceName& port, const MacAddress& mac) {
  return impl_->neighbour(RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE, AF_BRIDGE, port, NUD_NOARP,
                          NTF_MASTER, &mac, nullptr,
                          "set FDB entry " + mac.to_string() + " on " + port.str());
}

Status Rtnl::delete_fdb(const InterfaceName& port, const MacAddress& mac) {
  Status status = impl_->neighbour(RTM_DELNEIGH, 0, AF_BRIDGE, port, 0, NTF_MASTER, &mac, nullptr,
                                   "delete FDB entry " + mac.to_string() + " on " + port.str());
  if (!status && status.error().code == ENOENT) return {};
  return status;
}

Status Rtnl::set_neighbour(const InterfaceName& link, const IpAddress& address,
                           const MacAddress& mac) {
  return impl_->neighbour(RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE, family_of(address), link,
                          NUD_PERMANENT, 0, &mac, &address,
                          "set neighbour " + address.to_string() + " on " + link.str());
}

Status Rtnl::delete_neighbour(const InterfaceName& link, const IpAddress& address) {
  Status status =
      impl_->neighbour(RTM_DELNEIGH, 0, family_of(address), link, 0, 0, nullptr, &address,
                       "delete neighbour " + address.to_string() + " on " + link.str());
  if (!status && status.error().code == ENOENT) return {};
  return status;
}

Result<Link> Rtnl::link(const InterfaceName& name) {
  Message message(RTM_GETLINK, 0, link_header());
  message.text(IFLA_IFNAME, name.str());
  return impl_->get(message, "read link " + name.str());
}

Result<Link> Rtnl::link(std::uint32_t index) {
  Message message(RTM_GETLINK, 0, link_header(index));
  return impl_->get(message, "read link " + std::to_string(index));
}

Result<std::vector<Link>> Rtnl::links() {
  Message message(RTM_GETLINK, NLM_F_DUMP, link_header());
  std::vector<Link> out;
  const Status status = impl_->exchange(
      message, "read links",
      [&](const nlmsghdr* answer) {
        if (auto link = wire::parse_link(answer)) out.push_back(std::move(*link));
      },
      [&] { out.clear(); });
  if (!status) return tl::unexpected(status.error());
  return out;
}

Result<std::vector<FdbEntry>> Rtnl::fdb(std::uint32_t bridge_index, std::uint32_t port_index) {
  ndmsg header{};
  header.ndm_family = AF_BRIDGE;
  header.ndm_ifindex = static_cast<int>(port_index);
  Message message(RTM_GETNEIGH, NLM_F_DUMP, header);
  message.u32(NDA_MASTER, bridge_index);
  std::vector<FdbEntry> out;
  const Status status = impl_->exchange(
      message, "read FDB",
      [&](const nlmsghdr* answer) {
        const auto entry = wire::parse_neighbour(answer);
        if (!entry || entry->family != AF_BRIDGE || entry->master != bridge_index) return;
        if (port_index != 0 && entry->link != port_index) return;
        out.push_back({entry->link, entry->mac, (entry->state & NUD_NOARP) != 0,
                       (entry->state & NUD_PERMANENT) != 0, entry->vlan});
      },
      [&] { out.clear(); });
  if (!status) return tl::unexpected(status.error());
  return out;
}

Result<std::optional<FdbEntry>> Rtnl::find_fdb(std::uint32_t bridge_index, const MacAddress& mac) {
  ndmsg header{};
  header.ndm_family = AF_BRIDGE;
  header.ndm_flags = NTF_MASTER;
  Message message(RTM_GETNEIGH, 0, header);
  message.bytes(NDA_LLADDR, mac.bytes());
  message.u32(NDA_MASTER, bridge_index);
  std::optional<FdbEntry> out;
  const Status status = impl_->exchange(message, "look up FDB entry", [&](const nlmsghdr* answer) {
    if (const auto entry = wire::parse_neighbour(answer)) {
      out = FdbEntry{entry->link, entry->mac, (entry->state & NUD_NOARP) != 0,
                     (entry->state & NUD_PERMANENT) != 0, entry->vlan};
    }
  });
  if (!status && status.error().code == ENOENT) return std::optional<FdbEntry>();
  if (!status) return tl::unexpected(status.error());
  return out;
}

Result<std::optional<Neighbour>> Rtnl::find_neighbour(std::uint32_t link_index,
                                                      const IpAddress& address) {
  ndmsg header{};
  header.ndm_family = family_of(address);
  header.ndm_ifindex = static_cast<int>(link_index);
  Message message(RTM_GETNEIGH, 0, header);
  message.bytes(NDA_DST, address.bytes());
  std::optional<Neighbour> out;
  const Status status = impl_->exchange(message, "look up neighbour", [&](const nlmsghdr* answer) {
    const auto entry = wire::parse_neighbour(answer);
    if (!entry || !entry->address) return;
    out = Neighbour{entry->link, *entry->address, entry->mac, (entry->state & NUD_PERMANENT) != 0};
  });
  if (!status && status.error().code == ENOENT) return std::optional<Neighbour>();
  if (!status) return tl::unexpected(status.error());
  return out;
}

Result<std::vector<Neighbour>> Rtnl::neighbours(std::uint32_t link_index) {
  std::vector<Neighbour> out;
  for (const std::uint8_t family : {AF_INET, AF_INET6}) {
    ndmsg header{};
    header.ndm_family = family;
    Message message(RTM_GETNEIGH, NLM_F_DUMP, header);
    message.u32(NDA_IFINDEX, link_index);
    const std::size_t before = out.size();
    const Status status = impl_->exchange(
        message, "read neighbours",
        [&](const nlmsghdr* answer) {
          const auto entry = wire::parse_neighbour(answer);
          if (!entry || !entry->address || entry->link != link_index) return;
          out.push_back(
              {entry->link, *entry->address, entry->mac, (entry->state & NUD_PERMANENT) != 0});
        },
        [&] { out.resize(before); });
    if (!status) return tl::unexpected(status.error());
  }
  return out;
}

Result<std::vector<LinkAddress>> Rtnl::addresses() {
  ifaddrmsg header{};
  Message message(RTM_GETADDR, NLM_F_DUMP, header);
  std::vector<LinkAddress> out;
  const Status status = impl_->exchange(
      message, "read addresses",
      [&](const nlmsghdr* answer) {
        if (const auto address = wire::parse_address(answer)) out.push_back(*address);
      },
      [&] { out.clear(); });
  if (!status) return tl::unexpected(status.error());
  return out;
}

Result<std::optional<std::int32_t>> Rtnl::netns_id(int netns_fd) {
  rtgenmsg header{};
  header.rtgen_family = AF_UNSPEC;
  Message message(RTM_GETNSID, 0, header);
  message.u32(NETNSA_FD, static_cast<std::uint32_t>(netns_fd));
  std::optional<std::int32_t> out;
  const Status status = impl_->exchange(message, "read namespace id", [&](const nlmsghdr* answer) {
    const auto id = wire::parse_netns_id(answer);
    if (id && *id >= 0) out = id;
  });
  if (!status) return tl::unexpected(status.error());
  return out;
}

}  // namespace agentgate::netdriver
