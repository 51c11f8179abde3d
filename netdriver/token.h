// SPDX-License-Identifier: GPL-2.0-or-later
//
// The token: a BPF program on a network's bridge device that passes only what carries the gate's
// marks.
//
// Layers 1 to 3 are nftables tables. Where the kernel cannot keep them from others (no table flags
// owner,persist: before 6.9), a foreign `nft flush ruleset` takes all of them at once, and a
// released port would be an ordinary one until they are put back. The token is no nftables object:
// a frame enters by the bridge device only with layer 1's port mark, and leaves by it only with
// layer 3's verdict mark or as ARP. Without the tables nobody sets the marks, so nothing passes.
// It never opens anything, and it says nothing of frames between two ports (those do not pass the
// bridge device; the port flags isolated and locked are what holds there).
//
// Owns: the two programs (loaded once, at open), the clsact qdisc's filters of ours. May not know:
// ports, policies, tables. Threading: one thread at a time; acts in the network namespace that it
// was opened in. Needs CAP_BPF and CAP_NET_ADMIN, CONFIG_BPF_SYSCALL, CONFIG_NET_SCH_INGRESS,
// CONFIG_NET_CLS_BPF and CONFIG_NET_CLS_ACT; an error says which of them is missing.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "netdriver/error.h"
#include "netdriver/netlink_socket.h"
#include "netdriver/unique_fd.h"

namespace agentgate::netdriver {

class Token {
 public:
  // Loads the programs. Nothing is attached yet.
  static Result<Token> open();

  // Both directions of the link. Idempotent: a filter of ours that is there is replaced without a
  // moment in which neither holds. EBUSY: another program's qdisc or filter has our place.
  // A failure may leave one direction attached, which only drops more.
  Status attach(std::uint32_t ifindex);
  // Whether exactly our two programs are what both directions ask first. A link that does not exist
  // has none.
  Result<bool> present(std::uint32_t ifindex);
  // The filters only; the qdisc stays, since it may have others'. None is success.
  Status detach(std::uint32_t ifindex);

 private:
  struct Program {
    UniqueFd fd;
    std::array<std::uint8_t, 8> tag{};  // the kernel's hash of the instructions
  };
  Token(NetlinkSocket socket, Program ingress, Program egress);
  static Result<Program> load(bool ingress);
  Status is_clsact(std::uint32_t ifindex, const std::string& operation);
  Result<bool> first_is(std::uint32_t ifindex, std::uint32_t parent, const Program& program);

  NetlinkSocket socket_;
  Program ingress_, egress_;
};

}  // namespace agentgate::netdriver
