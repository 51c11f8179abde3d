// SPDX-License-Identifier: GPL-2.0-or-later
#include "netdriver/netlink_socket.h"

#include <libmnl/libmnl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "netdriver/rtnl_wire.h"

namespace agentgate::netdriver {
namespace {

constexpr int kDumpAttempts = 100;
// The kernel makes the datagrams of a dump as large as the reader's buffer, up to 32 KiB.
constexpr std::size_t kBuffer = 64UL * 1024;
constexpr int kReceiveQueue = 4 << 20;

}  // namespace

NetlinkSocket::NetlinkSocket(UniqueFd fd)
    : fd_(std::move(fd)), buffer_(std::make_unique<std::byte[]>(kBuffer)) {}

Result<NetlinkSocket> NetlinkSocket::open(int protocol) {
  UniqueFd fd(::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, protocol));
  if (!fd.valid()) return fail_errno("open netlink socket");
  const int on = 1;
  if (::setsockopt(fd.get(), SOL_NETLINK, NETLINK_EXT_ACK, &on, sizeof on) < 0 ||
      ::setsockopt(fd.get(), SOL_NETLINK, NETLINK_CAP_ACK, &on, sizeof on) < 0) {
    return fail_errno("set up netlink socket");
  }
  // Filters in dump requests are honoured or refused, never ignored (since 4.20).
  (void)::setsockopt(fd.get(), SOL_NETLINK, NETLINK_GET_STRICT_CHK, &on, sizeof on);
  // Outside the first user namespace FORCE is refused, and the default has to do.
  (void)::setsockopt(fd.get(), SOL_SOCKET, SO_RCVBUFFORCE, &kReceiveQueue, sizeof kReceiveQueue);
  // Connected to the kernel, the socket takes no unicast of another process (netlink_connect).
  sockaddr_nl kernel{};
  kernel.nl_family = AF_NETLINK;
  if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&kernel), sizeof kernel) < 0) {
    return fail_errno("connect netlink socket");
  }
  return NetlinkSocket(std::move(fd));
}

NetlinkSocket NetlinkSocket::adopt(UniqueFd fd) { return NetlinkSocket(std::move(fd)); }

std::uint32_t NetlinkSocket::portid() const {
  sockaddr_nl own{};
  socklen_t length = sizeof own;
  if (::getsockname(fd_.get(), reinterpret_cast<sockaddr*>(&own), &length) < 0 ||
      own.nl_family != AF_NETLINK) {
    return 0;
  }
  return own.nl_pid;
}

std::uint32_t NetlinkSocket::next_sequence() {
  if (++sequence_ == 0) ++sequence_;
  return sequence_;
}

Status NetlinkSocket::send(std::span<const std::byte> datagram, const std::string& operation) {
  ssize_t sent = 0;
  do {
    sent = ::send(fd_.get(), datagram.data(), datagram.size(), MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) return fail_errno(operation, "send");
  return {};
}

Result<std::size_t> NetlinkSocket::receive(std::span<std::byte> buffer, Clock::time_point deadline,
                                           const std::string& operation) {
  for (;;) {
    sockaddr_nl from{};
    socklen_t from_length = sizeof from;
    // Netlink answers within send(), so that the first try finds something and poll() is rare.
    const ssize_t length =
        ::recvfrom(fd_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT | MSG_TRUNC,
                   reinterpret_cast<sockaddr*>(&from), &from_length);
    if (length >= 0) {
      // What another process sent before connect() took effect.
      if (from.nl_family == AF_NETLINK && from.nl_pid != 0) continue;
      if (static_cast<std::size_t>(length) > buffer.size()) {
        return fail(operation, "an answer of " + std::to_string(length) + " bytes does not fit",
                    EMSGSIZE);
      }
      return static_cast<std::size_t>(length);
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return fail_errno(operation, "receive");
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return fail(operation, "the kernel does not answer", ETIMEDOUT);
    pollfd waiting{fd_.get(), POLLIN, 0};
    if (::poll(&waiting, 1, static_cast<int>(std::min<long>(left, 60'000))) < 0 && errno != EINTR) {
      return fail_errno(operation, "wait for an answer");
    }
  }
}

Status NetlinkSocket::request(nlmsghdr* message, const std::string& operation, const Visit& visit,
                              const std::function<void()>& restart) {
  const bool dump = (message->nlmsg_flags & NLM_F_DUMP) == NLM_F_DUMP;
  if (!dump) message->nlmsg_flags |= NLM_F_ACK;
  for (int attempt = 0; attempt < kDumpAttempts; ++attempt) {
    if (restart) restart();
    const std::uint32_t sequence = next_sequence();
    message->nlmsg_seq = sequence;
    const std::span<const std::byte> datagram(reinterpret_cast<const std::byte*>(message),
                                              message->nlmsg_len);
    if (Status sent = send(datagram, operation); !sent) return sent;
    const Result<bool> interrupted = collect(sequence, dump, operation, visit);
    if (!interrupted) return tl::unexpected(interrupted.error());
    if (!*interrupted) return {};
  }
  return fail(operation, "other writers interrupt every dump", EINTR);
}

Result<bool> NetlinkSocket::collect(std::uint32_t sequence, bool dump, const std::string& operation,
                                    const Visit& visit) {
  bool interrupted = false;
  for (;;) {
    const auto length = receive({buffer_.get(), kBuffer}, Clock::now() + patience_, operation);
    if (!length) {
      if (length.error().code != ENOBUFS || !dump) return tl::unexpected(length.error());
      // Part of the dump is lost; its end still has to be read, or the next dump is EBUSY.
      interrupted = true;
      continue;
    }
    int left = static_cast<int>(*length);
    for (const auto* answer = reinterpret_cast<const nlmsghdr*>(buffer_.get());
         mnl_nlmsg_ok(answer, left); answer = mnl_nlmsg_next(answer, &left)) {
      // Late answers to a request that was given up.
      if (answer->nlmsg_seq != sequence) continue;
      if ((answer->nlmsg_flags & NLM_F_DUMP_INTR) != 0) interrupted = true;
      if (answer->nlmsg_type == NLMSG_DONE || answer->nlmsg_type == NLMSG_ERROR) {
        Error error = wire::parse_error(answer, operation);
        if (error.code != 0) return tl::unexpected(std::move(error));
        return interrupted;
      }
      if (visit) visit(answer);
    }
  }
}

}  // namespace agentgate::netdriver
