// SPDX-License-Identifier: GPL-2.0-or-later
#include "netdriver/monitor.h"

#include <libmnl/libmnl.h>
#include <linux/neighbour.h>
#include <linux/netfilter/nf_tables.h>
#include <linux/netfilter/nfnetlink.h>
#include <linux/rtnetlink.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "netdriver/gate.h"
#include "netdriver/netlink_socket.h"
#include "netdriver/rtnl.h"
#include "netdriver/rtnl_wire.h"

namespace agentgate::netdriver {
namespace {

constexpr std::size_t kBuffer = 64UL * 1024;

bool has_prefix(const InterfaceName& name, const char* prefix) {
  return name.str().rfind(prefix, 0) == 0;
}

// By name, or by group for one that was renamed. The container's end is the container's business.
bool is_ours(const wire::LinkChange& link) {
  return has_prefix(link.name, kPortPrefix) || has_prefix(link.name, kBridgePrefix) ||
         (link.group == kLinkGroup && !has_prefix(link.name, kPeerPrefix));
}

Status join(const NetlinkSocket& socket, std::initializer_list<int> groups) {
  for (const int group : groups) {
    if (::setsockopt(socket.fd(), SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, &group, sizeof group) < 0) {
      return fail_errno("listen to netlink notifications");
    }
  }
  return {};
}

}  // namespace

bool Notices::empty() const {
  return !tables && !ip_tables && !addresses && !lost && links.empty() && gone.empty() &&
         fdb.empty() && neighbours.empty();
}

void Notices::merge(Notices other) {
  tables = tables || other.tables;
  ip_tables = ip_tables || other.ip_tables;
  addresses = addresses || other.addresses;
  lost = lost || other.lost;
  links.merge(other.links);
  gone.merge(other.gone);
  fdb.merge(other.fdb);
  neighbours.merge(other.neighbours);
}

struct Monitor::Impl {
  Impl(NetlinkSocket r, NetlinkSocket n, std::uint32_t o)
      : rtnl(std::move(r)), nft(std::move(n)), own(o) {}

  NetlinkSocket rtnl;
  NetlinkSocket nft;
  std::uint32_t own = 0;
  std::map<std::uint32_t, InterfaceName> names;
  std::vector<std::byte> buffer = std::vector<std::byte>(kBuffer);

  // All that is there now.
  void drain(NetlinkSocket& socket, bool is_nft, Notices& out) {
    for (;;) {
      const auto length = socket.receive(buffer, NetlinkSocket::Clock::now(), "read notifications");
      if (!length && length.error().code == ETIMEDOUT) return;
      if (!length) {
        out.lost = true;
        // ENOBUFS is told once and reading goes on; anything else would come again at once.
        if (length.error().code == ENOBUFS || length.error().code == EMSGSIZE) continue;
        return;
      }
      int left = static_cast<int>(*length);
      for (const auto* message = reinterpret_cast<const nlmsghdr*>(buffer.data());
           mnl_nlmsg_ok(message, left); message = mnl_nlmsg_next(message, &left)) {
        if (is_nft) {
          note_nft(message, own, out);
        } else {
          note_rtnl(message, names, out);
        }
      }
    }
  }
};

Monitor::Monitor(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Monitor::~Monitor() = default;

Result<std::unique_ptr<Monitor>> Monitor::open(std::uint32_t own) {
  auto rtnl = NetlinkSocket::open(NETLINK_ROUTE);
  if (!rtnl) return tl::unexpected(rtnl.error());
  auto nft = NetlinkSocket::open(NETLINK_NETFILTER);
  if (!nft) return tl::unexpected(nft.error());
  auto impl = std::make_unique<Impl>(std::move(*rtnl), std::move(*nft), own);
  Status joined = join(impl->rtnl, {RTNLGRP_LINK, RTNLGRP_NEIGH, RTNLGRP_IPV4_IFADDR,
                                    RTNLGRP_IPV6_IFADDR, RTNLGRP_TC});
  if (joined) joined = join(impl->nft, {NFNLGRP_NFTABLES});
  if (!joined) return tl::unexpected(joined.error());
  // Listening first: what comes into being meanwhile is heard.
  auto asked = Rtnl::open();
  if (!asked) return tl::unexpected(asked.error());
  auto links = (*asked)->links();
  if (!links) return tl::unexpected(links.error());
  for (const Link& link : *links) {
    wire::LinkChange as_heard;
    as_heard.name = link.name;
    as_heard.group = link.group;
    if (is_ours(as_heard)) impl->names[link.index] = link.name;
  }
  return std::unique_ptr<Monitor>(new Monitor(std::move(impl)));
}

Notices Monitor::wait(int wake) {
  Notices out;
  pollfd waiting[] = {
      {impl_->rtnl.fd(), POLLIN, 0}, {impl_->nft.fd(), POLLIN, 0}, {wake, POLLIN, 0}};
  if (::poll(waiting, 3, -1) < 0) return out;
  impl_->drain(impl_->rtnl, false, out);
  impl_->drain(impl_->nft, true, out);
  return out;
}

void Monitor::note_rtnl(const nlmsghdr* message, std::map<std::uint32_t, InterfaceName>& names,
                        Notices& out) {
  switch (message->nlmsg_type) {
    case RTM_NEWLINK:
    case RTM_DELLINK: {
      const auto link = wire::parse_link_change(message);
      if (!link) return;
      const auto known = names.find(link->index);
      // A link that we knew under another name: that one is gone.
      if (known != names.end() && known->second != link->name) out.links.insert(known->second);
      if (is_ours(*link)) {
        out.links.insert(link->name);
        if (link->deleted) out.gone.insert(link->name);
      }
      // Off a bridge comes as RTM_DELLINK of the bridge family, and the link is still there.
      if (link->deleted && link->family != AF_BRIDGE) {
        names.erase(link->index);
      } else if (is_ours(*link)) {
        names[link->index] = link->name;
      }
      return;
    }
    case RTM_NEWADDR:
    case RTM_DELADDR: {
      out.addresses = true;
      const auto index = wire::parse_address_link(message);
      const auto link = index ? names.find(*index) : names.end();
      if (link != names.end()) out.links.insert(link->second);
      return;
    }
    case RTM_NEWQDISC:
    case RTM_DELQDISC:
    case RTM_NEWTFILTER:
    case RTM_DELTFILTER: {
      const auto index = wire::parse_tc_link(message);
      const auto link = index ? names.find(*index) : names.end();
      if (link != names.end()) out.links.insert(link->second);
      return;
    }
    case RTM_NEWNEIGH:
    case RTM_DELNEIGH: {
      const auto entry = wire::parse_neighbour_change(message);
      if (!entry) return;
      const auto link = names.find(entry->link);
      if (link == names.end()) return;
      if (entry->family == AF_BRIDGE) {
        out.fdb.emplace(link->second, entry->mac);
      } else if (entry->address) {
        out.neighbours.emplace(link->second, *entry->address);
      }
      return;
    }
    default:
      return;
  }
}

void Monitor::note_nft(const nlmsghdr* message, std::uint32_t own, Notices& out) {
  if (NFNL_SUBSYS_ID(message->nlmsg_type) != NFNL_SUBSYS_NFTABLES) return;
  // Who changed it (nf_tables_api.c puts the requester's port id into its notifications). 0 is
  // the kernel: a chain that went with its device.
  if (message->nlmsg_pid == own) return;
  const int kind = NFNL_MSG_TYPE(message->nlmsg_type);
  if (kind == NFT_MSG_NEWGEN) return;
  const std::size_t header = MNL_NLMSG_HDRLEN + MNL_ALIGN(sizeof(nfgenmsg));
  if (message->nlmsg_len < header + sizeof(nlattr)) return;
  const auto* begin = reinterpret_cast<const std::uint8_t*>(message);
  nfgenmsg generic{};
  std::memcpy(&generic, begin + MNL_NLMSG_HDRLEN, sizeof generic);
  // In every kind of object the table's name is attribute 1 (NFTA_TABLE_NAME, NFTA_CHAIN_TABLE, …).
  bool named_ours = false;
  for (std::size_t at = header; at + sizeof(nlattr) <= message->nlmsg_len;) {
    nlattr attribute{};
    std::memcpy(&attribute, begin + at, sizeof attribute);
    if (attribute.nla_len < sizeof attribute || at + attribute.nla_len > message->nlmsg_len) break;
    if ((attribute.nla_type & NLA_TYPE_MASK) == NFTA_TABLE_NAME) {
      const auto* name = reinterpret_cast<const char*>(begin + at + sizeof attribute);
      const std::size_t size = attribute.nla_len - sizeof attribute;
      named_ours = std::string(name, ::strnlen(name, size)) == kTable;
      break;
    }
    at += MNL_ALIGN(attribute.nla_len);
  }
  if (named_ours) {
    out.tables = true;
  } else if (generic.nfgen_family == AF_INET || generic.nfgen_family == AF_INET6) {
    out.ip_tables = true;
  }
}

}  // namespace agentgate::netdriver
