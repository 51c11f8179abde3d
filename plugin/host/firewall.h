// SPDX-License-Identifier: GPL-2.0-or-later
//
// The engine's own firewall. Docker's FORWARD chain may drop by policy, and no accept of ours in
// another table overrules that; so the two jumps below stand in DOCKER-USER, one constant pair per
// host and address family:
//   -i agn+ -j AGENTGATE, -o agn+ -j AGENTGATE      AGENTGATE: accept what carries layer 3's
//                                                   verdict mark, drop the rest
// This is the only place of the daemon that runs another program (iptables), at start, when the
// engine shows up, and when the rules were found missing; never in an arm, attach or detach.
// Threading: any one thread at a time. Blocks while iptables runs.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "netdriver/error.h"

namespace agentgate::host {

struct FirewallState {
  std::vector<std::string> present;  // tools whose DOCKER-USER has the pair, e.g. "iptables-nft"
  std::vector<std::string> problems;
};

// Puts the pair first in every DOCKER-USER chain there is (iptables and ip6tables, nft and legacy).
// Engines with the nftables backend have none and need none. Can be repeated; changes nothing when
// all is as it should be. A call of iptables that takes longer than `patience` is killed and is a
// problem (iptables itself waits up to ten seconds for its lock).
FirewallState ensure_docker_user(std::chrono::milliseconds patience = std::chrono::seconds(20));

}  // namespace agentgate::host
