// SPDX-License-Identifier: GPL-2.0-or-later
//
// Links, bridge ports, FDB entries, neighbours and addresses over rtnetlink.
//
// One request, one answer; every error keeps the kernel's errno and extack text. The decoders
// (rtnl_wire.h) are pure. Threading: one thread at a time. The socket stays in the network
// namespace it was opened in, whatever the thread does later.
// libnl is not used for the exchange: it maps errno to its own codes and loses it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "netdriver/types.h"

namespace agentgate::netdriver {

struct VethSpec {
  InterfaceName name;  // host end
  InterfaceName peer;
  MacAddress peer_mac;
  std::uint32_t mtu = 1500;
  std::uint32_t group = 0;
};

struct BridgeSpec {
  InterfaceName name;
  MacAddress mac;
  std::uint32_t mtu = 1500;
  std::uint32_t group = 0;
};

struct BridgePortFlags {  // IFLA_BRPORT_*
  bool isolated = false;
  bool learning = true;
  bool locked = false;
  bool unicast_flood = true;
  bool multicast_flood = true;
  bool broadcast_flood = true;
  bool hairpin = false;
  bool bpdu_guard = false;
  bool proxy_arp = false;
  bool neigh_suppress = false;
  bool multicast_fast_leave = false;
  bool mab = false;  // IFLA_BRPORT_MAB, since 6.2: must never be on
  // Link-local groups (01:80:c2:00:00:0x, one bit each) that the bridge treats like any other
  // frame.
  std::uint16_t group_forward_mask = 0;
  bool operator==(const BridgePortFlags&) const = default;
};

// What a port of ours has.
[[nodiscard]] constexpr BridgePortFlags gate_flags() {
  BridgePortFlags flags;
  flags.isolated = true;
  flags.learning = false;
  flags.locked = true;
  flags.unicast_flood = false;
  flags.multicast_flood = false;
  flags.broadcast_flood = false;
  // LLDP: else br_handle_frame hands it to whoever listens on the port, past every hook and
  // `locked`.
  flags.group_forward_mask = 1U << 0x0E;
  return flags;
}

struct Link {
  std::uint32_t index = 0;
  InterfaceName name;
  std::string kind;  // IFLA_INFO_KIND
  MacAddress mac;
  std::uint32_t mtu = 0;
  std::uint32_t group = 0;
  bool up = false;                         // IFF_UP
  std::uint32_t master = 0;                // index, 0 without
  std::uint32_t peer = 0;                  // IFLA_LINK, 0 without
  std::optional<std::int32_t> peer_netns;  // IFLA_LINK_NETNSID: the peer is in another namespace
  std::optional<BridgePortFlags> port;     // of a bridge port
  std::optional<std::uint8_t> port_state;  // IFLA_BRPORT_STATE, 3 is forwarding
  // IFLA_INET6_ADDR_GEN_MODE: 1 is none, which a link without an IPv6 side counts as.
  std::uint8_t addrgen_mode = 0;
  // Of a bridge:
  std::optional<bool> stp, multicast_snooping, vlan_filtering;
  std::optional<std::uint16_t> group_forward_mask;
  bool operator==(const Link&) const = default;
};

struct FdbEntry {
  std::uint32_t port = 0;  // link index
  MacAddress mac;
  bool is_static = false;  // NUD_NOARP
  bool permanent = false;  // NUD_PERMANENT: the port's own address (local)
  // A bridge with VLAN filtering compiled in gives each port default_pvid 1, and every entry that
  // names no VLAN is there twice: for VLAN 0, the one that counts while filtering is off, and 1.
  std::uint16_t vlan = 0;
  bool operator==(const FdbEntry&) const = default;
};

struct Neighbour {
  std::uint32_t link = 0;
  IpAddress address;
  MacAddress mac;
  bool permanent = false;  // NUD_PERMANENT
  bool operator==(const Neighbour&) const = default;
};

struct LinkAddress {
  std::uint32_t link = 0;
  IpAddress address;
  std::uint8_t length = 0;
  auto operator<=>(const LinkAddress&) const = default;
};

class Rtnl {
 public:
  // In the calling thread's network namespace.
  static Result<std::unique_ptr<Rtnl>> open();
  // In another one; done by a short-lived thread, so that the caller's never changes.
  // `netns_fd` is not taken over. EPERM without CAP_SYS_ADMIN.
  static Result<std::unique_ptr<Rtnl>> open_in(int netns_fd);
  ~Rtnl();
  Rtnl(const Rtnl&) = delete;
  Rtnl& operator=(const Rtnl&) = delete;

  // Creates both ends in this namespace, DOWN, one queue each. EEXIST: the name is taken.
  Status create_veth(const VethSpec& spec);
  // Creates the bridge DOWN: no STP, no snooping, group_fwd_mask 0, no ageing surprises, and
  // addrgenmode none, so that it gets no fe80 address.
  Status create_bridge(const BridgeSpec& spec);
  // Puts the options that create_bridge gives back on a bridge that is there.
  Status set_bridge_options(const InterfaceName& name);
  // By itself: EOPNOTSUPP without CONFIG_BRIDGE_VLAN_FILTERING, where it is never on.
  Status no_vlan_filtering(const InterfaceName& name);
  Status delete_link(const InterfaceName& name);  // ENODEV is success
  // All links of the group in one request; none is success. EINVAL: group 0, which is everybody's.
  Status delete_link_group(std::uint32_t group);
  // EXFULL from the kernel (no free port number) becomes ENOSPC.
  Status enslave(const InterfaceName& port, const InterfaceName& bridge);
  // All flags at once. EOPNOTSUPP: it is no bridge port. EINVAL: mab.
  Status set_port_flags(const InterfaceName& port, const BridgePortFlags& flags);
  // addrgenmode none, then UP, so that no fe80 address appears. A link without IPv6 (MTU below
  // 1280) only goes up.
  Status set_up(const InterfaceName& name);
  // Sets the link DOWN first: before 6.2 a link that is up cannot be renamed (EBUSY). It stays
  // DOWN.
  Status rename(std::uint32_t index, const InterfaceName& name);
  Status set_mac(const InterfaceName& name, const MacAddress& mac);
  Status set_group(const InterfaceName& name, std::uint32_t group);
  Status set_down(const InterfaceName& name);
  Status add_address(const InterfaceName& name, const IpAddress& address, std::uint8_t length);
  Status delete_address(const LinkAddress& address);  // EADDRNOTAVAIL is success
  // Static FDB entry of the bridge (NTF_MASTER, NUD_NOARP). Replaces one that is there.
  Status set_fdb(const InterfaceName& port, const MacAddress& mac);
  Status delete_fdb(const InterfaceName& port, const MacAddress& mac);  // ENOENT is success
  Status set_neighbour(const InterfaceName& link, const IpAddress& address, const MacAddress& mac);
  Status delete_neighbour(const InterfaceName& link,
                          const IpAddress& address);  // ENOENT is success

  // ENODEV: no such link.
  Result<Link> link(const InterfaceName& name);
  Result<Link> link(std::uint32_t index);
  // Dumps are repeated when the kernel says that they were interrupted (NLM_F_DUMP_INTR);
  // EINTR after 100 such repeats.
  Result<std::vector<Link>> links();
  // Entries of a bridge's ports, or of one of them: the kernel picks them out (strict checking,
  // since Linux 5.0).
  Result<std::vector<FdbEntry>> fdb(std::uint32_t bridge_index, std::uint32_t port_index = 0);
  // One entry by look-up, without a dump; nothing when there is none.
  Result<std::optional<FdbEntry>> find_fdb(std::uint32_t bridge_index, const MacAddress& mac);
  Result<std::optional<Neighbour>> find_neighbour(std::uint32_t link_index,
                                                  const IpAddress& address);
  Result<std::vector<Neighbour>> neighbours(std::uint32_t link_index);
  Result<std::vector<LinkAddress>> addresses();
  // The id that this socket's namespace has for another one (RTM_GETNSID), assigned by the kernel
  // when a link crosses; nothing when it has none.
  Result<std::optional<std::int32_t>> netns_id(int netns_fd);

 private:
  struct Impl;
  explicit Rtnl(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace agentgate::netdriver
