// SPDX-License-Identifier: GPL-2.0-or-later
//
// The exchange of NetlinkSocket with a kernel that does what the real one does only under load:
// interrupted dumps, late answers, silence, answers that do not fit.
#include "netdriver/netlink_socket.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <libmnl/libmnl.h>
#include <linux/rtnetlink.h>
#include <sys/socket.h>

#include <array>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

namespace agentgate::netdriver {
namespace {

using Datagram = std::vector<std::byte>;

// One message with an int as its payload.
Datagram message(std::uint16_t type, std::uint32_t sequence, std::int32_t value = 0,
                 std::uint16_t flags = 0) {
  alignas(8) char buffer[128] = {};
  nlmsghdr* header = mnl_nlmsg_put_header(buffer);
  header->nlmsg_type = type;
  header->nlmsg_flags = flags;
  header->nlmsg_seq = sequence;
  void* payload = mnl_nlmsg_put_extra_header(header, type == NLMSG_ERROR ? sizeof(nlmsgerr) : 4);
  std::memcpy(payload, &value, sizeof value);
  const auto* begin = reinterpret_cast<const std::byte*>(buffer);
  return Datagram(begin, begin + header->nlmsg_len);
}
Datagram operator+(Datagram a, const Datagram& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}
constexpr std::uint16_t kAnswer = RTM_NEWLINK;

class NetlinkSocketTest : public ::testing::Test {
 protected:
  // Answers the n-th request (from 0), whose sequence number it is given.
  using Script = std::function<std::vector<Datagram>(int attempt, const nlmsghdr& request)>;

  void serve(Script script) {
    int ends[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    socket = std::make_unique<NetlinkSocket>(NetlinkSocket::adopt(UniqueFd(ends[0])));
    kernel = std::thread([end = UniqueFd(ends[1]), script = std::move(script)] {
      alignas(8) char buffer[4096];
      for (int attempt = 0;; ++attempt) {
        const ssize_t length = ::recv(end.get(), buffer, sizeof buffer, 0);
        if (length < static_cast<ssize_t>(sizeof(nlmsghdr))) return;
        for (const Datagram& answer : script(attempt, *reinterpret_cast<nlmsghdr*>(buffer))) {
          (void)::send(end.get(), answer.data(), answer.size(), MSG_NOSIGNAL);
        }
      }
    });
  }
  void TearDown() override {
    socket.reset();
    if (kernel.joinable()) kernel.join();
  }
  Status request(bool dump) {
    alignas(8) char buffer[64] = {};
    nlmsghdr* header = mnl_nlmsg_put_header(buffer);
    header->nlmsg_type = RTM_GETLINK;
    header->nlmsg_flags = static_cast<std::uint16_t>(NLM_F_REQUEST | (dump ? NLM_F_DUMP : 0));
    return socket->request(
        header, "ask",
        [&](const nlmsghdr* answer) {
          std::int32_t value = 0;
          std::memcpy(&value, mnl_nlmsg_get_payload(answer), sizeof value);
          seen.push_back(value);
        },
        [&] {
          ++starts;
          seen.clear();
        });
  }

  std::unique_ptr<NetlinkSocket> socket;
  std::thread kernel;
  std::vector<std::int32_t> seen;
  int starts = 0;
};

TEST_F(NetlinkSocketTest, RequestAsksForAnAcknowledgement) {
  serve([](int, const nlmsghdr& r) -> std::vector<Datagram> {
    if ((r.nlmsg_flags & NLM_F_ACK) == 0) return {};
    return {message(kAnswer, r.nlmsg_seq, 5), message(NLMSG_ERROR, r.nlmsg_seq)};
  });
  EXPECT_TRUE(request(false));
  EXPECT_EQ(seen, (std::vector<std::int32_t>{5}));
  EXPECT_EQ(starts, 1);
}

TEST_F(NetlinkSocketTest, ErrorIsReturned) {
  serve([](int, const nlmsghdr& r) -> std::vector<Datagram> {
    return {message(NLMSG_ERROR, r.nlmsg_seq, -EBUSY)};
  });
  const Status status = request(false);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, EBUSY);
  EXPECT_EQ(status.error().operation, "ask");
}

TEST_F(NetlinkSocketTest, DumpOfManyDatagrams) {
  serve([](int, const nlmsghdr& r) -> std::vector<Datagram> {
    return {message(kAnswer, r.nlmsg_seq, 1) + message(kAnswer, r.nlmsg_seq, 2),
            message(kAnswer, r.nlmsg_seq, 3), message(NLMSG_DONE, r.nlmsg_seq)};
  });
  EXPECT_TRUE(request(true));
  EXPECT_EQ(seen, (std::vector<std::int32_t>{1, 2, 3}));
}

// Half a listing must not pass as a whole one.
TEST_F(NetlinkSocketTest, DumpThatFailsAtItsEnd) {
  serve([](int, const nlmsghdr& r) -> std::vector<Datagram> {
    return {message(kAnswer, r.nlmsg_seq, 1), message(NLMSG_DONE, r.nlmsg_seq, -ENOMEM)};
  });
  const Status status = request(true);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, ENOMEM);
}

TEST_F(NetlinkSocketTest, InterruptedDumpIsSentAgain) {
  serve([](int attempt, const nlmsghdr& r) -> std::vector<Datagram> {
    // The mark on an answer in the middle, then on the end alone, then on none.
    return {message(kAnswer, r.nlmsg_seq, attempt, attempt == 0 ? NLM_F_DUMP_INTR : 0),
            message(NLMSG_DONE, r.nlmsg_seq, 0, attempt == 1 ? NLM_F_DUMP_INTR : 0)};
  });
  EXPECT_TRUE(request(true));
  EXPECT_EQ(seen, (std::vector<std::int32_t>{2}));
  EXPECT_EQ(starts, 3);
}

TEST_F(NetlinkSocketTest, DumpThatIsAlwaysInterrupted) {
  serve([](int, const nlmsghdr& r) -> std::vector<Datagram> {
    return {message(NLMSG_DONE, r.nlmsg_seq, 0, NLM_F_DUMP_INTR)};
  });
  const Status status = request(true);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, EINTR);
  EXPECT_EQ(starts, 100);
}

TEST_F(NetlinkSocketTest, LateAnswersAreSkipped) {
  serve([](int, const nlmsghdr& r) -> std::vector<Datagram> {
    return {message(kAnswer, r.nlmsg_seq - 1, 66) + message(NLMSG_ERROR, r.nlmsg_seq - 1, -EPERM),
            message(kAnswer, 0, 77),  // a notification
            message(kAnswer, r.nlmsg_seq, 5) + message(NLMSG_ERROR, r.nlmsg_seq)};
  });
  EXPECT_TRUE(request(false));
  EXPECT_EQ(seen, (std::vector<std::int32_t>{5}));
}

TEST_F(NetlinkSocketTest, SilenceEnds) {
  serve([](int attempt, const nlmsghdr& r) -> std::vector<Datagram> {
    if (attempt == 0) return {};
    return {message(NLMSG_ERROR, r.nlmsg_seq - 1, -EPERM), message(NLMSG_ERROR, r.nlmsg_seq)};
  });
  socket->set_patience(std::chrono::milliseconds(50));
  const auto before = NetlinkSocket::Clock::now();
  const Status status = request(false);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, ETIMEDOUT);
  EXPECT_GE(NetlinkSocket::Clock::now() - before, std::chrono::milliseconds(50));
  // The answer that came too late is not taken for the next one's.
  socket->set_patience(std::chrono::seconds(5));
  EXPECT_TRUE(request(false));
}

TEST_F(NetlinkSocketTest, AnswerThatDoesNotFit) {
  serve([](int, const nlmsghdr&) -> std::vector<Datagram> { return {Datagram(70'000)}; });
  const Status status = request(false);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, EMSGSIZE);
}

// A length that lies must neither be believed nor stop the exchange for ever.
TEST_F(NetlinkSocketTest, LengthsThatLie) {
  serve([](int, const nlmsghdr& r) -> std::vector<Datagram> {
    Datagram longer = message(kAnswer, r.nlmsg_seq, 1);
    const std::uint32_t lie = 60'000;
    std::memcpy(longer.data(), &lie, sizeof lie);
    Datagram shorter = message(kAnswer, r.nlmsg_seq, 1);
    const std::uint32_t small = 3;
    std::memcpy(shorter.data(), &small, sizeof small);
    return {longer, shorter, Datagram(5), message(NLMSG_ERROR, r.nlmsg_seq)};
  });
  EXPECT_TRUE(request(false));
  EXPECT_TRUE(seen.empty());
}

TEST_F(NetlinkSocketTest, SequenceNumbersAreNeverZero) {
  serve([](int, const nlmsghdr&) -> std::vector<Datagram> { return {}; });
  const auto first = socket->next_sequence();
  EXPECT_NE(first, 0U);
  EXPECT_EQ(socket->next_sequence(), first + 1);
}

TEST(NetlinkSocketOpen, HasAPortAndClosesOnExec) {
  auto a = NetlinkSocket::open(NETLINK_ROUTE);
  ASSERT_TRUE(a) << a.error().to_string();
  auto b = NetlinkSocket::open(NETLINK_ROUTE);
  ASSERT_TRUE(b);
  EXPECT_NE(a->portid(), 0U);
  EXPECT_NE(a->portid(), b->portid());
  EXPECT_NE(::fcntl(a->fd(), F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_FALSE(NetlinkSocket::open(31));
}

TEST(UniqueFd, ClosesOnce) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd keep(ends[1]);
  {
    UniqueFd a(ends[0]);
    UniqueFd b(std::move(a));
    EXPECT_FALSE(a.valid());  // NOLINT
    EXPECT_EQ(b.get(), ends[0]);
    UniqueFd c;
    c = std::move(b);
    EXPECT_NE(::fcntl(ends[0], F_GETFD), -1);
  }
  EXPECT_EQ(::fcntl(ends[0], F_GETFD), -1);
  UniqueFd released(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const UniqueFd again(released.release());
  EXPECT_FALSE(released.valid());
  EXPECT_NE(::fcntl(again.get(), F_GETFD), -1);
}

}  // namespace
}  // namespace agentgate::netdriver
