// SPDX-License-Identifier: GPL-2.0-or-later
//
// What others change of ours, as the kernel tells it: nftables, links, neighbours, FDB entries and
// addresses. A notice says where to look, never what is there: whoever is told looks for himself
// (Gate::survey). So a notice too many costs a look, and a forged one nothing more.
//
// Threading: one thread at a time. The sockets stay in the network namespace they were opened in.
// Not known here: what the state should be.
#pragma once

#include <linux/netlink.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "netdriver/error.h"
#include "netdriver/types.h"

namespace agentgate::netdriver {

struct Notices {
  bool tables = false;     // a table called kTable was changed by another socket than ours
  bool ip_tables = false;  // some other table of the families ip or ip6: the engine's firewall
  bool addresses = false;  // the host's own addresses
  bool lost = false;       // the kernel threw notices away (ENOBUFS): anything may have changed
  std::set<InterfaceName> links;                             // with our prefixes or group
  std::set<InterfaceName> gone;                              // of these, deleted or moved away
  std::set<std::pair<InterfaceName, MacAddress>> fdb;        // port, entry
  std::set<std::pair<InterfaceName, IpAddress>> neighbours;  // bridge, entry

  [[nodiscard]] bool empty() const;
  void merge(Notices other);
};

class Monitor {
 public:
  // `own` is the port id of the socket whose nftables batches are ours (NftSocket::portid).
  static Result<std::unique_ptr<Monitor>> open(std::uint32_t own);
  ~Monitor();
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  // Waits until there is a notice or `wake` (a descriptor, not taken over) can be read, and
  // returns all that is there; empty when there is nothing for us.
  Notices wait(int wake);

  // One message of either socket; pure. `names` are the links of ours by index, as learnt so far.
  static void note_rtnl(const nlmsghdr* message, std::map<std::uint32_t, InterfaceName>& names,
                        Notices& out);
  static void note_nft(const nlmsghdr* message, std::uint32_t own, Notices& out);

 private:
  struct Impl;
  explicit Monitor(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace agentgate::netdriver
