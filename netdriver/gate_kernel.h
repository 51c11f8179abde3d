// SPDX-License-Identifier: GPL-2.0-or-later
//
// Gate: the desired state of gate.h, in the kernel.
//
// Threading: one thread only (the owner thread), in the network namespace of the engine. The
// nftables tables belong to this object's netlink socket where the kernel has `owner,persist`.
// Every method is synchronous; each nftables change is one batch.
// Order and failure: create_* stop at the first error and undo what they did, hiding no error;
// delete_* go on and report the errors together. All of them can be repeated.
#pragma once

#include <memory>
#include <set>
#include <vector>

#include "netdriver/gate.h"

namespace agentgate::netdriver {

// What the running kernel offers, found by trying.
struct KernelFeatures {
  bool owner = false;          // table flag owner (since 5.12)
  bool owner_persist = false;  // table flags owner,persist (since 6.9)
  bool bridge_locked = false;  // bridge port flag locked (since 5.16)
  bool netdev_egress = false;  // netdev egress hook (since 5.16)
};

// What check() and the read-back of a release see of one port.
enum class PortState { closed, released, inconsistent };

struct PortReport {
  PortState state = PortState::closed;
  std::vector<Difference> differences;  // empty unless inconsistent
};

// What of ours is not as meant.
struct Survey {
  std::vector<Difference> differences;
  std::set<InterfaceName> ports;    // whose link, flags, FDB entry or neighbours are among them
  std::set<InterfaceName> bridges;  // that are, or whose addresses are, among them
  bool tables = false;
  [[nodiscard]] bool empty() const { return differences.empty(); }
};

struct Restored {
  std::vector<InterfaceName> closed;   // ports that could not stay as they are meant, or are gone
  std::vector<InterfaceName> removed;  // links of ours that nobody knows
};

struct Repaired {
  std::vector<InterfaceName> gone;    // ports whose link is not there any more
  std::vector<InterfaceName> closed;  // could not be brought to what is meant; their links are DOWN
  std::vector<Difference> left;       // what could not be repaired
};

// What the kernel says of a sandbox's link (pipeline step 7).
struct SandboxLink {
  InterfaceName name;
  std::uint32_t index = 0;
  std::uint32_t peer_index = 0;  // IFLA_LINK: index of the other end
  MacAddress mac;
  bool up = false;
  std::string kind;  // IFLA_INFO_KIND, "veth"
  std::vector<IpAddress> addresses;
};

// How the tables are protected from others. `best` is what the kernel offers; the others are for
// tests of what an older one leaves.
enum class Ownership { best, owner, none };

class Gate {
 public:
  // Opens the sockets in the calling thread's network namespace and claims the tables.
  // EPERM: another process owns them (a second daemon). Nothing is changed on failure.
  static Result<std::unique_ptr<Gate>> open(Ownership ownership = Ownership::best);
  ~Gate();
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  [[nodiscard]] const KernelFeatures& features() const;

  // Brings the kernel to `want`, after a start. Ports that `want` has as released stay so without
  // interruption if the kernel has exactly that; a port that differs in anything is closed (and is
  // returned as such). Where the kernel has no `persist` the tables are gone with their owner: then
  // a released port is released again if its link and its controls are exactly as meant. Links with
  // our group and names that `want` does not know are removed.
  Result<Restored> restore(const GateSpec& want);

  // Compares everything of ours with `want`, and changes nothing. Reads the tables once and asks
  // for each link by itself.
  Result<Survey> survey(const GateSpec& want);
  // The same for one port's link, flags, FDB entry and neighbours, and for one bridge.
  Result<std::vector<Difference>> inspect_link(const PortSpec& port);
  Result<std::vector<Difference>> inspect_bridge(const NetworkSpec& network);
  // Puts back what others changed while this process was there to see it: unlike restore(), a port
  // that is meant to be released is released again, in the same batch as all else. What cannot be
  // put back is closed, and where that fails too its link is set DOWN.
  Result<Repaired> repair(const GateSpec& want);
  // Whether there is a link of that name.
  Result<bool> has_link(const InterfaceName& name);
  // Whether open() found no tables where they end with their owner (before Linux 6.9). Then
  // restore() has only the caller's word for what was released.
  [[nodiscard]] bool tables_went_with_owner() const;
  // For Monitor::open.
  [[nodiscard]] std::uint32_t nft_portid() const;

  Status create_network(const NetworkSpec& network);
  // EBUSY: a port is still on it.
  Status delete_network(const InterfaceName& bridge);

  // Makes the veth with the gate already closed: link DOWN, layer 1, flags, enslaved, UP.
  // ENOSPC: the bridge has all the ports a Linux bridge takes (1023).
  Status create_port(const PortSpec& port);
  // Link first, then its chains and elements. Unknown ports are fine.
  Status delete_port(const PortSpec& port);

  // One batch: out of layer 3's maps and layer 2's @released, layer 1 emptied. Idempotent.
  // Returns only after reading back that it is so.
  Status close_port(const PortSpec& port);
  // Step 9: flags, FDB entry, permanent neighbours. Opens nothing.
  Status prepare_port(const PortSpec& port);
  // Undoes prepare_port.
  Status unprepare_port(const PortSpec& port);
  // Step 11: the one batch. `policy` is created or updated in the same batch. Not read back here.
  Status release_port(const PortSpec& port, const PolicySpec& policy);

  // After a release: tells the container its gateway's MAC address (announce.h). Opens nothing.
  Status announce(const PortSpec& port);

  // Replaces a policy's sets in one batch for all ports released to it.
  Status update_policy(const PolicySpec& policy);
  // EBUSY: a port is released to it.
  Status delete_policy(const std::string& name);
  // Replaces the host's own addresses in the always-deny set.
  Status set_host_addresses(const std::vector<Ipv4Range>& v4, const std::vector<Ipv6Range>& v6);

  // Reads all layers of one port and compares them field by field. `policy` is what the port is
  // meant to be released to, or null when it is meant to be closed; host4/host6 as in GateSpec.
  // The state is what the kernel does, not what was meant: a port meant to be released that is
  // found closed in all layers is `closed`.
  Result<PortReport> inspect_port(const NetworkSpec& network, const PortSpec& port,
                                  const PolicySpec* policy);
  // FDB entries on the port that are not its own. Apart from inspect_port(), which an arm calls
  // again and again: the kernel goes through the bridge's whole FDB for it. Nothing where the port
  // is not on its bridge, which is a difference by itself.
  Result<std::vector<Difference>> foreign_entries(const PortSpec& port);
  // Compares bridge device, addresses, the constant part of the three tables and the sets that
  // all networks share.
  Result<std::vector<Difference>> inspect_network(const NetworkSpec& network);

  // The links of a network namespace besides lo, as its own kernel view has them.
  // `netns_fd` is any descriptor of the namespace; it is not taken over.
  Result<std::vector<SandboxLink>> sandbox_links(int netns_fd);
  // Whether host end `port` and `link` (of namespace netns_fd) are the two ends of one veth, and
  // the host end is enslaved to `bridge`. Returns the reasons why not.
  Result<std::vector<Difference>> tie(const PortSpec& port, const SandboxLink& link, int netns_fd);

  // The addresses of all local interfaces, for the always-deny set.
  Result<std::vector<IpAddress>> host_addresses();

 private:
  struct Impl;
  explicit Gate(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace agentgate::netdriver
