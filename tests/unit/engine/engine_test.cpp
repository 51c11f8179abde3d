// SPDX-License-Identifier: GPL-2.0-or-later
//
// The client against a small engine on a Unix socket: one that behaves, and several that do not.
#include "plugin/engine/engine.h"

#include <gtest/gtest.h>
#include <httplib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <thread>

#include "tests/unit/engine/answers.h"

namespace agentgate::engine {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

class SocketTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/agentgate-engine-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    directory_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  [[nodiscard]] std::string socket() const { return directory_ + "/docker.sock"; }
  [[nodiscard]] Engine::Options options() const {
    return {socket(), directory_ + "/docker.pid", 2000ms};
  }

  std::string directory_;
};

class FakeEngine {
 public:
  explicit FakeEngine(const std::string& path) {
    server_.set_address_family(AF_UNIX);
    server_.set_keep_alive_max_count(1);
    server_.Get("/_ping", [this](const httplib::Request& request, httplib::Response& response) {
      note(request);
      response.status = ping_status;
      if (!api_version.empty()) response.set_header("Api-Version", api_version);
      response.set_content("OK", "text/plain");
    });
    server_.Get(R"(/v(\d+\.\d+)/(.*))", [this](const httplib::Request& request,
                                               httplib::Response& response) {
      note(request);
      if (!only_version.empty() && request.matches[1].str() != only_version) {
        response.status = 400;
        response.set_content(R"({"message":"client version is too new"})", "application/json");
        return;
      }
      const std::string what = request.matches[2].str();
      const char* body = what == "containers/a1/json" ? test::kContainer20
                         : what == "info"             ? test::kInfo20
                         : what == "networks/n1" ? R"({"Containers":{"c":{"EndpointID":"e1"}}})"
                                                 : nullptr;
      if (what == "containers/broken/json") {
        response.status = 500;
        response.set_content(R"({"message":"it broke"})", "application/json");
      } else if (body == nullptr) {
        response.status = 404;
        response.set_content(R"({"message":"No such container: x"})", "application/json");
      } else {
        // dockerd answers inspect in chunks.
        response.set_chunked_content_provider(
            "application/json", [text = std::string(body)](std::size_t, httplib::DataSink& sink) {
              for (std::size_t at = 0; at < text.size(); at += 100) {
                const std::string part = text.substr(at, 100);
                sink.write(part.data(), part.size());
              }
              sink.done();
              return true;
            });
      }
    });
    EXPECT_TRUE(server_.bind_to_port(path.c_str(), 80));
    thread_ = std::thread([this] { server_.listen_after_bind(); });
    while (!server_.is_running()) std::this_thread::sleep_for(1ms);
  }
  ~FakeEngine() {
    server_.stop();
    thread_.join();
  }
  FakeEngine(const FakeEngine&) = delete;
  FakeEngine& operator=(const FakeEngine&) = delete;

  std::vector<std::string> paths() {
    const std::lock_guard lock(mutex_);
    return paths_;
  }
  std::string host() {
    const std::lock_guard lock(mutex_);
    return host_;
  }

  std::string api_version = "1.41";
  std::string only_version;  // empty: any
  int ping_status = 200;

 private:
  void note(const httplib::Request& request) {
    const std::lock_guard lock(mutex_);
    paths_.push_back(request.path);
    host_ = request.get_header_value("Host");
  }
  httplib::Server server_;
  std::thread thread_;
  std::mutex mutex_;
  std::vector<std::string> paths_;
  std::string host_;
};

// Accepts connections and does with each what the test says.
class RawServer {
 public:
  RawServer(const std::string& path, std::function<void(int)> serve) : serve_(std::move(serve)) {
    fd_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
    EXPECT_EQ(::bind(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(::listen(fd_, 16), 0);
    thread_ = std::thread([this] {
      for (;;) {
        const int connection = ::accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC);
        if (connection < 0) return;
        serve_(connection);
        ::close(connection);
      }
    });
  }
  ~RawServer() {
    ::shutdown(fd_, SHUT_RDWR);
    thread_.join();
    ::close(fd_);
  }
  RawServer(const RawServer&) = delete;
  RawServer& operator=(const RawServer&) = delete;

 private:
  int fd_ = -1;
  std::function<void(int)> serve_;
  std::thread thread_;
};

bool tell(int fd, const std::string& text) {
  return ::send(fd, text.data(), text.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(text.size());
}
// The request's header; false when the client only looked whether somebody is there.
bool read_request(int fd) {
  std::string text;
  char buffer[4096];
  while (text.find("\r\n\r\n") == std::string::npos) {
    const ssize_t length = ::recv(fd, buffer, sizeof buffer, 0);
    if (length <= 0) return false;
    text.append(buffer, static_cast<std::size_t>(length));
  }
  return true;
}

TEST_F(SocketTest, NegotiatesTheEnginesVersionUpToTheNewestKnown) {
  const std::pair<const char*, const char*> cases[] = {
      {"1.41", "1.41"}, {"1.45", "1.45"}, {"1.51", "1.51"}, {"1.55", "1.51"}};
  for (const auto& [announced, chosen] : cases) {
    std::filesystem::remove(socket());
    FakeEngine fake(socket());
    fake.api_version = announced;
    Engine engine(options());
    const auto identity = engine.identify();
    ASSERT_TRUE(identity) << identity.error().to_string();
    EXPECT_EQ(identity->api_version, chosen);
    ASSERT_TRUE(engine.inspect("a1"));
    EXPECT_EQ(fake.paths().back(), std::string("/v") + chosen + "/containers/a1/json");
    EXPECT_EQ(fake.host(), "localhost");
  }
}

TEST_F(SocketTest, NegotiatesByItselfAndOnce) {
  FakeEngine fake(socket());
  Engine engine(options());
  ASSERT_TRUE(engine.inspect("a1"));
  ASSERT_TRUE(engine.inspect("a1"));
  EXPECT_EQ(fake.paths(), (std::vector<std::string>{"/_ping", "/v1.41/containers/a1/json",
                                                    "/v1.41/containers/a1/json"}));
}

TEST_F(SocketTest, NegotiatesAgainWithAnOlderEngine) {
  FakeEngine fake(socket());
  fake.api_version = "1.45";
  Engine engine(options());
  ASSERT_TRUE(engine.inspect("a1"));
  fake.api_version = fake.only_version = "1.41";
  const auto container = engine.inspect("a1");
  ASSERT_TRUE(container) << container.error().to_string();
  EXPECT_EQ(fake.paths().back(), "/v1.41/containers/a1/json");
  // And does not go on for ever when the engine says no to that as well.
  fake.only_version = "1.30";
  const auto refused = engine.inspect("a1");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, EPROTO);
  EXPECT_NE(refused.error().text.find("client version is too new"), std::string::npos);
}

TEST_F(SocketTest, RefusesAVersionItDoesNotKnow) {
  FakeEngine fake(socket());
  Engine engine(options());
  for (const char* version : {"", "2.0", "1", "1.", "1.x", "x.41", "1.-4"}) {
    fake.api_version = version;
    const auto identity = engine.identify();
    ASSERT_FALSE(identity) << version;
    EXPECT_EQ(identity.error().code, EPROTO);
  }
  fake.api_version = "1.41";
  fake.ping_status = 500;
  EXPECT_FALSE(engine.identify());
}

TEST_F(SocketTest, IdentifiesTheProcessBehindTheSocket) {
  const FakeEngine fake(socket());
  Engine engine(options());
  const auto identity = engine.identify();
  ASSERT_TRUE(identity) << identity.error().to_string();
  EXPECT_EQ(identity->process.pid, ::getpid());
  EXPECT_EQ(identity->process, process_identity(::getpid()).value());
  EXPECT_EQ(engine.identify().value(), *identity);
}

TEST_F(SocketTest, DecodesWhatItAsksFor) {
  const FakeEngine fake(socket());
  Engine engine(options());
  const auto container = engine.inspect("a1");
  ASSERT_TRUE(container) << container.error().to_string();
  EXPECT_EQ(container->name, "a1");
  EXPECT_EQ(engine.info().value().runtimes.count("runsc"), 1U);
  EXPECT_EQ(engine.network_endpoints("n1").value(), std::vector<std::string>{"e1"});
}

TEST_F(SocketTest, SaysWhichErrorItWas) {
  FakeEngine fake(socket());
  Engine engine(options());
  const auto missing = engine.inspect("nobody");
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, ENOENT);
  EXPECT_EQ(missing.error().text, "No such container: x");
  const auto broken = engine.inspect("broken");
  ASSERT_FALSE(broken);
  EXPECT_EQ(broken.error().code, EPROTO);
  EXPECT_NE(broken.error().text.find("500: it broke"), std::string::npos);
}

TEST_F(SocketTest, AReferenceCannotChangeThePath) {
  FakeEngine fake(socket());
  Engine engine(options());
  for (const char* reference :
       {"", ".", "..", "a1/../../info", "a1?x=y", "a1%2f", "a 1", "-a", "a1\r\nX: y", "\xc3\xa4"}) {
    const auto refused = engine.inspect(reference);
    ASSERT_FALSE(refused) << reference;
    EXPECT_EQ(refused.error().code, ENOENT);
    EXPECT_FALSE(engine.network_endpoints(reference));
  }
  EXPECT_TRUE(fake.paths().empty());
}

TEST_F(SocketTest, NobodyThere) {
  Engine engine(options());
  const auto absent = engine.inspect("a1");
  ASSERT_FALSE(absent);
  EXPECT_EQ(absent.error().code, ECONNREFUSED);  // never ENOENT: that is a missing container
  EXPECT_NE(absent.error().text.find(socket()), std::string::npos);
  EXPECT_EQ(engine.identify().error().code, ECONNREFUSED);

  {
    const RawServer gone(socket(), [](int) {});
  }
  EXPECT_EQ(engine.inspect("a1").error().code, ECONNREFUSED);

  Engine::Options long_path = options();
  long_path.socket = "/tmp/" + std::string(200, 'x');
  EXPECT_EQ(Engine(long_path).identify().error().code, ENAMETOOLONG);
}

TEST_F(SocketTest, NotAnEngine) {
  const RawServer server(socket(), [](int fd) {
    if (read_request(fd)) tell(fd, "SSH-2.0-OpenSSH\r\n");
  });
  Engine engine(options());
  const auto refused = engine.identify();
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, EPROTO);
}

TEST_F(SocketTest, AnAnswerThatBreaksOff) {
  const RawServer server(socket(), [](int fd) {
    if (read_request(fd))
      tell(fd, "HTTP/1.1 200 OK\r\nApi-Version: 1.41\r\nContent-Length: 100\r\n\r\n{");
  });
  Engine engine(options());
  const auto started = Clock::now();
  const auto refused = engine.inspect("a1");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, EPROTO);
  EXPECT_LT(Clock::now() - started, 1s);
}

TEST_F(SocketTest, SilenceEndsAtTheTimeout) {
  std::atomic<bool> done = false;
  const RawServer server(socket(), [&](int) {
    while (!done) std::this_thread::sleep_for(5ms);
  });
  Engine::Options quick = options();
  quick.timeout = 200ms;
  Engine engine(quick);
  const auto started = Clock::now();
  const auto refused = engine.inspect("a1");
  const auto took = Clock::now() - started;
  done = true;
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ETIMEDOUT);
  EXPECT_GE(took, 190ms);
  EXPECT_LT(took, 1s);
}

// Each byte comes well within the timeout of one read; together they never end.
void drips(const std::string& socket, const Engine::Options& options, const std::string& start) {
  std::atomic<bool> done = false;
  const RawServer server(socket, [&](int fd) {
    if (!read_request(fd)) return;
    tell(fd, start);
    while (!done && tell(fd, "x")) std::this_thread::sleep_for(10ms);
  });
  Engine engine(options);
  const auto started = Clock::now();
  const auto refused = engine.inspect("a1");
  const auto took = Clock::now() - started;
  done = true;
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ETIMEDOUT) << refused.error().to_string();
  EXPECT_LT(took, 1s);
}

TEST_F(SocketTest, ABodyThatDripsEndsAtTheTimeout) {
  Engine::Options quick = options();
  quick.timeout = 200ms;
  drips(socket(), quick, "HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n");
}

TEST_F(SocketTest, AHeaderThatDripsEndsAtTheTimeout) {
  Engine::Options quick = options();
  quick.timeout = 200ms;
  drips(socket(), quick, "HTTP/1.1 200 OK\r\nX-Slow: ");
}

TEST_F(SocketTest, AnAnswerWithoutEndIsCutOff) {
  const RawServer server(socket(), [](int fd) {
    if (!read_request(fd)) return;
    tell(fd, "HTTP/1.1 200 OK\r\nApi-Version: 1.41\r\nTransfer-Encoding: chunked\r\n\r\n");
    const std::string chunk = "100000\r\n" + std::string(0x100000, 'x') + "\r\n";
    for (int i = 0; i < 64 && tell(fd, chunk); ++i) {
    }
  });
  Engine::Options slow = options();
  slow.timeout = 20000ms;
  Engine engine(slow);
  const auto refused = engine.inspect("a1");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, EPROTO);
  EXPECT_NE(refused.error().text.find("16 MiB"), std::string::npos);
}

TEST_F(SocketTest, ManyThreadsAtOnce) {
  const FakeEngine fake(socket());
  Engine engine(options());
  std::atomic<int> good = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int n = 0; n < 20; ++n) {
        if (engine.inspect("a1") && engine.identify()) ++good;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(good, 80);
}

TEST(ProcessIdentity, IsFieldTwentyTwo) {
  char name[] = "/tmp/agentgate-proc-XXXXXX";
  ASSERT_NE(::mkdtemp(name), nullptr);
  const std::filesystem::path proc = name;
  std::filesystem::create_directory(proc / "7");
  const auto with = [&](const std::string& stat) {
    std::ofstream(proc / "7" / "stat") << stat;
    return process_identity(7, proc.string());
  };
  // The command may hold spaces and parentheses.
  const std::string rest = " S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 424242 20 21\n";
  EXPECT_EQ(with("7 (a) b) (c" + std::string(")") + rest).value(), (ProcessIdentity{7, 424242}));
  EXPECT_FALSE(with("7 (a) S 1 2"));
  EXPECT_FALSE(with("7 (a) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 x 20"));
  EXPECT_EQ(with("").error().code, ESRCH);
  EXPECT_EQ(process_identity(8, proc.string()).error().code, ESRCH);
  std::filesystem::remove_all(proc);
  const auto self = process_identity(::getpid());
  ASSERT_TRUE(self);
  EXPECT_GT(self->start_time, 0U);
}

}  // namespace
}  // namespace agentgate::engine
