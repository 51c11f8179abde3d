// SPDX-License-Identifier: GPL-2.0-or-later
//
// The server is attacked with raw sockets: what a well-behaved client library would never send.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "plugin/http/client.h"
#include "plugin/http/server.h"

namespace agentgate::http {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

class Connection {
 public:
  explicit Connection(const std::filesystem::path& path) {
    fd_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
    if (::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
      ::close(fd_);
      fd_ = -1;
    }
  }
  Connection(Connection&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Connection(const Connection&) = delete;
  ~Connection() {
    if (fd_ >= 0) ::close(fd_);
  }
  [[nodiscard]] bool connected() const { return fd_ >= 0; }
  bool send(const std::string& text) const {
    std::size_t sent = 0;
    while (sent < text.size()) {
      const ssize_t count = ::send(fd_, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
      if (count <= 0) return false;
      sent += static_cast<std::size_t>(count);
    }
    return true;
  }
  // Everything until the server closes.
  [[nodiscard]] std::string receive(std::chrono::milliseconds patience = 10s) const {
    std::string out;
    const auto until = Clock::now() + patience;
    for (;;) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
      pollfd entry{fd_, POLLIN, 0};
      if (left <= 0 || ::poll(&entry, 1, static_cast<int>(left)) <= 0) return out + "<timeout>";
      char buffer[4096];
      const ssize_t count = ::recv(fd_, buffer, sizeof buffer, 0);
      if (count <= 0) return out;
      out.append(buffer, static_cast<std::size_t>(count));
    }
  }

 private:
  int fd_ = -1;
};

class HttpTest : public testing::Test {
 protected:
  void SetUp() override {
    char pattern[] = "/tmp/agentgate-http-XXXXXX";
    directory_ = ::mkdtemp(pattern);
    options_.socket = directory_ / "run" / "test.sock";
    options_.read_timeout = 700ms;
    options_.error_body = [](int status, const std::string& text) {
      return "{\"status\":" + std::to_string(status) + ",\"text\":\"" + text + "\"}";
    };
  }
  void TearDown() override {
    server_.reset();
    std::filesystem::remove_all(directory_);
  }
  void start() {
    auto started = Server::start(options_, [this](const Request& request) {
      ++calls_;
      last_uid_ = request.peer.uid;
      last_pid_ = request.peer.pid;
      if (request.path == "/throw") throw std::runtime_error("a secret");
      if (request.path == "/slow") std::this_thread::sleep_for(400ms);
      if (request.path == "/unknown") return Response{404, "no such path", "text/plain"};
      return Response{200, request.method + " " + request.path + " [" + request.body + "]",
                      "text/plain"};
    });
    ASSERT_TRUE(started) << started.error().to_string();
    server_ = std::move(*started);
  }
  [[nodiscard]] std::string ask(const std::string& text) const {
    const Connection connection(options_.socket);
    if (!connection.connected()) return "<no connection>";
    connection.send(text);
    return connection.receive();
  }
  static std::string post(const std::string& path, const std::string& body,
                          const std::string& headers = {}) {
    return "POST " + path + " HTTP/1.1\r\nHost: \r\n" + headers +
           "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
  }
  static bool status_is(const std::string& answer, int status) {
    return answer.rfind("HTTP/1.1 " + std::to_string(status) + " ", 0) == 0;
  }

  std::filesystem::path directory_;
  Options options_;
  std::unique_ptr<Server> server_;
  std::atomic<int> calls_{0};
  std::atomic<uid_t> last_uid_{static_cast<uid_t>(-1)};
  std::atomic<pid_t> last_pid_{0};
};

TEST_F(HttpTest, AnswersWhatDockerSends) {
  start();
  // 20.10: an empty Host, no Content-Type, keep-alive.
  const std::string answer =
      ask("POST /NetworkDriver.Join HTTP/1.1\r\nHost: \r\nUser-Agent: Go-http-client/1.1\r\n"
          "Content-Length: 3\r\nAccept: application/vnd.docker.plugins.v1.2+json\r\n\r\n{}\n");
  EXPECT_TRUE(status_is(answer, 200)) << answer;
  EXPECT_NE(answer.find("POST /NetworkDriver.Join [{}\n]"), std::string::npos) << answer;
  EXPECT_EQ(last_uid_, ::getuid());
  EXPECT_EQ(last_pid_, ::getpid());
}

TEST_F(HttpTest, AnEmptyBodyIsAnEmptyBody) {
  start();
  for (const char* text :
       {"POST /a HTTP/1.1\r\nHost: \r\nContent-Length: 0\r\n\r\n", "POST /a HTTP/1.1\r\n\r\n"}) {
    const auto began = Clock::now();
    const std::string answer = ask(text);
    EXPECT_TRUE(status_is(answer, 200)) << answer;
    EXPECT_NE(answer.find("POST /a []"), std::string::npos) << answer;
    EXPECT_LT(Clock::now() - began, 500ms);
  }
}

TEST_F(HttpTest, TheHandlerDecidesAboutMethodsAndPaths) {
  start();
  EXPECT_NE(ask("GET /x?y=1 HTTP/1.1\r\nHost: a\r\n\r\n").find("GET /x []"), std::string::npos);
  EXPECT_NE(ask("DELETE /x HTTP/1.1\r\nHost: a\r\n\r\n").find("DELETE /x []"), std::string::npos);
  EXPECT_TRUE(status_is(ask(post("/unknown", "{}")), 404));
}

TEST_F(HttpTest, RefusesBodiesItCannotBound) {
  options_.body_limit = 1000;
  start();
  const std::string large(1001, 'x');
  EXPECT_TRUE(status_is(ask(post("/a", large)), 413));
  EXPECT_TRUE(status_is(
      ask("POST /a HTTP/1.1\r\nHost: \r\nContent-Length: 99999999999999999\r\n\r\n"), 413));
  EXPECT_TRUE(status_is(ask("POST /a HTTP/1.1\r\nHost: \r\nTransfer-Encoding: chunked\r\n\r\n"
                            "2\r\n{}\r\n0\r\n\r\n"),
                        411));
  EXPECT_TRUE(status_is(ask(post("/a", "xxxx", "Content-Encoding: gzip\r\n")), 415));
  EXPECT_TRUE(
      status_is(ask(post("/a", "xxxx", "Content-Type: multipart/form-data; boundary=b\r\n")), 415));
  EXPECT_EQ(calls_, 0);
  EXPECT_TRUE(status_is(ask(post("/a", std::string(1000, 'x'))), 200));
}

TEST_F(HttpTest, RefusesLengthsThatCanBeReadTwoWays) {
  start();
  EXPECT_TRUE(status_is(
      ask("POST /a HTTP/1.1\r\nHost: \r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}x"), 400));
  EXPECT_TRUE(status_is(ask("POST /a HTTP/1.1\r\nHost: \r\nContent-Length: abc\r\n\r\n{}"), 400));
  EXPECT_TRUE(status_is(ask("POST /a HTTP/1.1\r\nHost: \r\nContent-Length: -1\r\n\r\n{}"), 400));
  EXPECT_EQ(calls_, 0);
}

TEST_F(HttpTest, BoundsHeadersAndPaths) {
  options_.header_limit = 4096;
  options_.body_limit = 4096;
  start();
  std::string flood = "POST /a HTTP/1.1\r\nHost: \r\n";
  for (int i = 0; i < 2000; ++i)
    flood += "X-" + std::to_string(i) + ": " + std::string(50, 'h') + "\r\n";
  const std::string answer = ask(flood + "Content-Length: 2\r\n\r\n{}");
  EXPECT_FALSE(status_is(answer, 200)) << answer;
  EXPECT_TRUE(status_is(ask("GET /" + std::string(3000, 'p') + " HTTP/1.1\r\n\r\n"), 414));
  const std::string longer = ask("POST /" + std::string(60000, 'p') + " HTTP/1.1\r\n\r\n");
  EXPECT_FALSE(status_is(longer, 200)) << longer;
  EXPECT_EQ(calls_, 0);
  EXPECT_TRUE(status_is(ask(post("/a", "{}")), 200));
}

TEST_F(HttpTest, GarbageIsAnsweredOrDropped) {
  start();
  for (const std::string& text :
       {std::string("\r\n\r\n"), std::string("GET\r\n\r\n"), std::string(100, '\0'),
        std::string("POST /a HTTP/9.9\r\n\r\n"), std::string("\x16\x03\x01\x02\r\n\r\n"),
        std::string("POST  HTTP/1.1\r\nContent-Length: 1\r\n\r\nx")}) {
    const std::string answer = ask(text);
    EXPECT_FALSE(status_is(answer, 200)) << answer;
  }
  EXPECT_TRUE(status_is(ask(post("/a", "{}")), 200));
}

TEST_F(HttpTest, AThrowingHandlerLeaksNothing) {
  start();
  const std::string answer = ask(post("/throw", "{}"));
  EXPECT_TRUE(status_is(answer, 500)) << answer;
  EXPECT_EQ(answer.find("secret"), std::string::npos) << answer;
  EXPECT_NE(answer.find("\"internal error\""), std::string::npos) << answer;
}

TEST_F(HttpTest, SlowClientsBlockNobodyAndAreCutOff) {
  start();
  std::vector<Connection> slow;
  for (int i = 0; i < 20; ++i) {
    slow.emplace_back(options_.socket);
    slow.back().send("POST /a HTTP/1.1\r\nHo");
  }
  for (int i = 0; i < 20; ++i) {  // whole headers, half a body
    slow.emplace_back(options_.socket);
    slow.back().send("POST /a HTTP/1.1\r\nHost: \r\nContent-Length: 10\r\n\r\n{");
  }
  const auto began = Clock::now();
  EXPECT_TRUE(status_is(ask(post("/a", "{}")), 200));
  EXPECT_LT(Clock::now() - began, 400ms);
  // A byte now and then does not keep the connection.
  const Connection dripping(options_.socket);
  bool cut = false;
  for (int i = 0; i < 20 && !cut; ++i) {
    cut = !dripping.send("P");
    std::this_thread::sleep_for(100ms);
  }
  EXPECT_TRUE(cut);
  EXPECT_EQ(calls_, 1);
}

TEST_F(HttpTest, IdleConnectionsBlockNobody) {
  start();
  std::vector<Connection> idle;
  for (int i = 0; i < 64; ++i) {
    idle.emplace_back(options_.socket);
    ASSERT_TRUE(idle.back().connected());
  }
  const auto began = Clock::now();
  EXPECT_TRUE(status_is(ask(post("/a", "{}")), 200));
  EXPECT_LT(Clock::now() - began, 400ms);
  EXPECT_EQ(idle[0].receive(3s), "");  // closed by the read timeout, without an answer
}

TEST_F(HttpTest, MoreClientsThanConnectionsAllGetTheirAnswer) {
  options_.connections = 4;
  start();
  std::vector<std::thread> clients;
  std::atomic<int> good{0};
  clients.reserve(60);
  for (int i = 0; i < 60; ++i) {
    clients.emplace_back([&] { good += status_is(ask(post("/a", "{}")), 200) ? 1 : 0; });
  }
  for (auto& client : clients) client.join();
  EXPECT_EQ(good, 60);
}

TEST_F(HttpTest, TheSocketHasItsModeAndGroup) {
  options_.mode = 0660;
  options_.group = ::getuid() == 0 ? 65534 : ::getgid();
  const mode_t before = ::umask(0);
  start();
  ::umask(before);
  struct stat found {};
  ASSERT_EQ(::stat(options_.socket.c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 07777U, 0660U);
  EXPECT_EQ(found.st_gid, *options_.group);
  EXPECT_EQ(::umask(before), before);  // nobody changed it
}

TEST_F(HttpTest, AStaleSocketIsReplacedALiveOneIsNot) {
  start();
  const auto second = Server::start(options_, [](const Request&) { return Response{}; });
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, EADDRINUSE) << second.error().to_string();
  EXPECT_TRUE(status_is(ask(post("/a", "{}")), 200));
  server_.reset();
  EXPECT_FALSE(std::filesystem::exists(options_.socket));

  const int stale = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, options_.socket.c_str(), sizeof address.sun_path - 1);
  ASSERT_EQ(::bind(stale, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ::close(stale);
  start();
  EXPECT_TRUE(status_is(ask(post("/a", "{}")), 200));
}

TEST_F(HttpTest, AFileIsNotReplaced) {
  std::filesystem::create_directories(options_.socket.parent_path());
  std::ofstream(options_.socket) << "precious";
  const auto refused = Server::start(options_, [](const Request&) { return Response{}; });
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, EEXIST);
  EXPECT_EQ(std::filesystem::file_size(options_.socket), 8U);
}

TEST_F(HttpTest, StopLetsHandlersFinishAndDropsTheIdle) {
  options_.read_timeout = 10s;
  start();
  const Connection idle(options_.socket);
  std::string answer;
  std::thread client([&] { answer = ask(post("/slow", "{}")); });
  while (calls_ == 0) std::this_thread::sleep_for(5ms);
  const auto began = Clock::now();
  server_->stop();
  EXPECT_LT(Clock::now() - began, 3s);
  client.join();
  EXPECT_TRUE(status_is(answer, 200)) << answer;
  EXPECT_FALSE(std::filesystem::exists(options_.socket));
}

TEST_F(HttpTest, StopLeavesAnothersSocketAlone) {
  start();
  std::filesystem::remove(options_.socket);
  std::ofstream(options_.socket) << "another's";
  server_.reset();
  EXPECT_TRUE(std::filesystem::exists(options_.socket));
}

TEST_F(HttpTest, RefusesPathsThatDoNotFit) {
  options_.socket = directory_ / std::string(120, 's');
  EXPECT_EQ(Server::start(options_, [](const Request&) { return Response{}; }).error().code,
            EINVAL);
  options_.socket = "relative.sock";
  EXPECT_EQ(Server::start(options_, [](const Request&) { return Response{}; }).error().code,
            EINVAL);
}

TEST_F(HttpTest, TheClientSaysWhyNobodyAnswers) {
  const auto nobody = request(options_.socket, "GET", "/a", "", 1s);
  ASSERT_FALSE(nobody);
  EXPECT_EQ(nobody.error().code, ENOENT);
  start();
  const auto got = request(options_.socket, "POST", "/a", "{}", 1s);
  ASSERT_TRUE(got) << got.error().to_string();
  EXPECT_EQ(got->status, 200);
  EXPECT_EQ(got->body, "POST /a [{}]");
  const auto late = request(options_.socket, "POST", "/slow", "{}", 100ms);
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code, ETIMEDOUT) << late.error().to_string();
}

}  // namespace
}  // namespace agentgate::http
