// SPDX-License-Identifier: GPL-2.0-or-later
//
// One netlink socket of any protocol: send, receive, and the exchange of one request.
//
// Owns: the descriptor, sequence numbers, extended acknowledgements. May not know: what is in a
// message past its nlmsghdr.
// Threading: one thread at a time. The socket stays in the network namespace it was opened in.
// Errors: errno of the kernel with its text and offset; ETIMEDOUT when no answer comes.
//
// Only the kernel's own datagrams are heard. In a sandbox's namespace whoever has CAP_NET_ADMIN
// may send to any netlink socket there, and ports and sequence numbers are easy to guess.
#pragma once

#include <linux/netlink.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "netdriver/error.h"
#include "netdriver/unique_fd.h"

namespace agentgate::netdriver {

class NetlinkSocket {
 public:
  using Clock = std::chrono::steady_clock;

  // In the calling thread's network namespace. `protocol`: NETLINK_ROUTE, NETLINK_NETFILTER, …
  static Result<NetlinkSocket> open(int protocol);
  // A connected datagram socket that is there already: for a stand-in of the kernel in tests.
  static NetlinkSocket adopt(UniqueFd fd);

  [[nodiscard]] int fd() const { return fd_.get(); }
  // This end's address; 0 when the socket is not of netlink.
  [[nodiscard]] std::uint32_t portid() const;
  // Never 0, which notifications carry.
  std::uint32_t next_sequence();

  // One datagram, as it is.
  Status send(std::span<const std::byte> datagram, const std::string& operation);
  // One datagram of the kernel; its length. ETIMEDOUT; ENOBUFS: the kernel had to throw answers
  // away; EMSGSIZE: it does not fit, and is lost.
  Result<std::size_t> receive(std::span<std::byte> buffer, Clock::time_point deadline,
                              const std::string& operation);

  using Visit = std::function<void(const nlmsghdr*)>;
  // Sends one request and hands every answer to `visit`, until the acknowledgement or, with
  // NLM_F_DUMP, the end of the dump. Fills in the sequence number, and NLM_F_ACK where it is no
  // dump. A dump that the kernel calls interrupted (NLM_F_DUMP_INTR) is sent again, `restart` is
  // called before every attempt, and EINTR comes after 100.
  Status request(nlmsghdr* message, const std::string& operation, const Visit& visit = {},
                 const std::function<void()>& restart = {});

  // How long request() waits for each datagram; 10 s unless set.
  void set_patience(std::chrono::milliseconds patience) { patience_ = patience; }

 private:
  explicit NetlinkSocket(UniqueFd fd);
  // Receives one attempt's answers. True: the kernel called the dump interrupted.
  Result<bool> collect(std::uint32_t sequence, bool dump, const std::string& operation,
                       const Visit& visit);

  UniqueFd fd_;
  std::unique_ptr<std::byte[]> buffer_;
  std::uint32_t sequence_ = 0;
  std::chrono::milliseconds patience_{10'000};
};

}  // namespace agentgate::netdriver
