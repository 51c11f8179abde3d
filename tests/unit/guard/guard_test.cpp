// SPDX-License-Identifier: GPL-2.0-or-later
//
// The guard between an engine's socket that does what the test says and a pipeline that notes what
// it is asked for.
#include "plugin/guard/guard.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

namespace agentgate::guard {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
const std::string kHead = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";

std::string chunk(const std::string& text) {
  std::array<char, 32> length{};
  std::snprintf(length.data(), length.size(), "%zx\r\n", text.size());
  return length.data() + text + "\r\n";
}
std::string container_event(const std::string& action, const std::string& id) {
  return R"({"Type":"container","Action":")" + action + R"(","Actor":{"ID":")" + id +
         R"(","Attributes":{"name":"name-)" + id + "\"}}}\n";
}
std::string network_event(const std::string& action, const std::string& container) {
  return R"({"Type":"network","Action":")" + action +
         R"(","Actor":{"ID":"n1","Attributes":{"name":"second","container":")" + container +
         "\"}}}\n";
}

// Answers pings; what it does with a request for events is the test's.
class Socket {
 public:
  explicit Socket(std::string path) : path_(std::move(path)) {
    fd_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path_.c_str(), sizeof address.sun_path - 1);
    EXPECT_EQ(::bind(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(::listen(fd_, 16), 0);
    thread_ = std::thread([this] { run(); });
  }
  ~Socket() {
    ::shutdown(fd_, SHUT_RDWR);
    thread_.join();
    ::close(fd_);
    for (const int stream : streams_) ::close(stream);
    std::filesystem::remove(path_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  // What is sent to each that asks for events, from now on.
  void answer(const std::string& text) {
    const std::lock_guard lock(mutex_);
    answer_ = text;
  }
  void silent(bool on) {
    const std::lock_guard lock(mutex_);
    silent_ = on;
  }
  // To all who listen now; whether all took it.
  bool tell(const std::string& text) {
    const std::lock_guard lock(mutex_);
    return std::all_of(streams_.begin(), streams_.end(), [&](int stream) {
      return ::send(stream, text.data(), text.size(), MSG_NOSIGNAL) ==
             static_cast<ssize_t>(text.size());
    });
  }
  void drop() {
    const std::lock_guard lock(mutex_);
    for (const int stream : streams_) ::close(stream);
    streams_.clear();
  }
  std::vector<std::string> requests() {
    const std::lock_guard lock(mutex_);
    return requests_;
  }

 private:
  void run() {
    for (;;) {
      const int connection = ::accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC);
      if (connection < 0) return;
      std::string text;
      std::array<char, 4096> buffer{};
      while (text.find("\r\n\r\n") == std::string::npos) {
        const ssize_t length = ::recv(connection, buffer.data(), buffer.size(), 0);
        if (length <= 0) break;
        text.append(buffer.data(), static_cast<std::size_t>(length));
      }
      const std::lock_guard lock(mutex_);
      if (text.empty()) {
        ::close(connection);
        continue;
      }
      requests_.push_back(text.substr(0, text.find('\r')));
      if (silent_) {
        streams_.push_back(connection);
      } else if (text.rfind("GET /_ping", 0) == 0) {
        const std::string pong =
            "HTTP/1.1 200 OK\r\nApi-Version: 1.51\r\nContent-Length: 2\r\n"
            "Connection: close\r\n\r\nOK";
        EXPECT_GT(::send(connection, pong.data(), pong.size(), MSG_NOSIGNAL), 0);
        ::close(connection);
      } else {
        EXPECT_GT(::send(connection, answer_.data(), answer_.size(), MSG_NOSIGNAL), 0);
        streams_.push_back(connection);
      }
    }
  }

  const std::string path_;
  int fd_ = -1;
  std::mutex mutex_;
  std::string answer_ = kHead;
  bool silent_ = false;
  std::vector<int> streams_;
  std::vector<std::string> requests_;
  std::thread thread_;
};

class FakeWatched : public arm::Watched {
 public:
  Result<std::vector<std::string>> released() override {
    const std::lock_guard lock(mutex_);
    if (!ready) return fail("releases", "not known yet", EAGAIN);
    return releases;
  }
  arm::Rechecked recheck(const std::vector<std::string>& containers, arm::Premises which,
                         engine::Api& /*engine*/, const std::string& event) override {
    std::string text = which == arm::Premises::kernel   ? "kernel"
                       : which == arm::Premises::engine ? "engine"
                                                        : "all";
    for (const auto& one : containers) text += " " + one;
    return note(text + ": " + event, containers.front());
  }
  arm::Rechecked started(const std::string& container, engine::Api& /*engine*/,
                         const std::string& event) override {
    return note("started " + container + ": " + event, container);
  }
  void guard_seen(const arm::EngineGuardStatus& status) override {
    const std::lock_guard lock(mutex_);
    status_ = status;
    changed_.notify_all();
  }

  arm::EngineGuardStatus status() {
    const std::lock_guard lock(mutex_);
    return status_;
  }
  std::vector<std::string> calls() {
    const std::lock_guard lock(mutex_);
    return calls_;
  }
  std::ptrdiff_t count(const std::string& call) {
    const auto all = calls();
    return std::count(all.begin(), all.end(), call);
  }
  void set(const std::function<void()>& change) {
    const std::lock_guard lock(mutex_);
    change();
    changed_.notify_all();
  }

  std::vector<std::string> releases{"c1", "c2"};
  bool ready = true;
  bool held = false;                           // judging waits
  std::map<std::string, arm::Rechecked> next;  // the answer for a container, once

 private:
  arm::Rechecked note(const std::string& call, const std::string& container) {
    std::unique_lock lock(mutex_);
    calls_.push_back(call);
    changed_.notify_all();
    changed_.wait(lock, [&] { return !held; });
    const auto found = next.find(container);
    if (found == next.end()) return {};
    arm::Rechecked out = found->second;
    next.erase(found);
    return out;
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> calls_;
  arm::EngineGuardStatus status_;
};

class GuardTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/agentgate-guard-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    directory_ = name;
    options.backoff_least = 5ms;
    options.backoff_most = 40ms;
    options.retry_least = 5ms;
    options.retry_most = 40ms;
    engine_options.timeout = 5000ms;
  }
  void TearDown() override {
    guard_.reset();
    engine_.reset();
    std::filesystem::remove_all(directory_);
  }
  [[nodiscard]] std::string path() const { return directory_ + "/docker.sock"; }
  void start() {
    engine_options.socket = path();
    engine_ = std::make_unique<engine::Engine>(engine_options);
    guard_ = Guard::start(options, *engine_, watched);
  }
  static bool eventually(const std::function<bool()>& condition) {
    const auto end = Clock::now() + 10s;
    while (!condition()) {
      if (Clock::now() > end) return false;
      std::this_thread::sleep_for(1ms);
    }
    return true;
  }
  // Connected, and everything judged that there is to judge.
  void settle() {
    ASSERT_TRUE(eventually([&] { return watched.status().connected; }));
    const std::string why = ": connection to the engine's events";
    ASSERT_TRUE(eventually([&] { return watched.count("engine c2" + why) > 0; }));
    EXPECT_EQ(watched.count("kernel c1 c2" + why), 1) << "one look through /proc for all";
    EXPECT_EQ(watched.count("engine c1" + why), 1);
  }
  void expect_call(const std::string& call) {
    EXPECT_TRUE(eventually([&] { return watched.count(call) > 0; }))
        << call << " is not among\n"
        << [&] {
             std::string all;
             for (const auto& one : watched.calls()) all += one + "\n";
             return all;
           }();
  }
  static arm::Rechecked closed(arm::Outcome outcome) {
    arm::Report report;
    report.port = "agp1";
    report.container_name = "a1";
    report.outcome = outcome;
    report.reason = "premise: it broke";
    return {{report}, {}};
  }

  std::string directory_;
  Options options;
  engine::Engine::Options engine_options;
  FakeWatched watched;
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<Guard> guard_;
};

TEST_F(GuardTest, AsksForTheEventsThatMatterSinceNow) {
  Socket socket(path());
  start();
  settle();
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const std::string request = socket.requests().back();
  EXPECT_EQ(request.rfind("GET /v1.51/events?since=", 0), 0U) << request;
  const double since = std::strtod(request.c_str() + 24, nullptr);
  EXPECT_NEAR(since, std::chrono::duration<double>(now).count(), 30);
  for (const char* word : {"container", "network", "start", "update", "connect", "rename"}) {
    EXPECT_NE(request.find("%22" + std::string(word) + "%22"), std::string::npos) << word;
  }
  EXPECT_EQ(request.find("exec"), std::string::npos);
}

TEST_F(GuardTest, EachKindOfEventHasItsContainerJudged) {
  Socket socket(path());
  start();
  settle();
  for (const char* action : {"restart", "die", "oom", "stop", "kill", "update", "rename",
                             "checkpoint", "restore", "something new"}) {
    ASSERT_TRUE(socket.tell(chunk(container_event(action, "c7"))));
    expect_call("all c7: container " + std::string(action) + " name-c7");
  }
  for (const char* action : {"connect", "disconnect"}) {
    ASSERT_TRUE(socket.tell(chunk(network_event(action, "c8"))));
    expect_call("all c8: network " + std::string(action) + " second");
  }
  ASSERT_TRUE(socket.tell(chunk(container_event("start", "c9"))));
  expect_call("started c9: container start name-c9");
  // About no container: nothing to judge.
  const auto before = watched.calls().size();
  ASSERT_TRUE(socket.tell(chunk(R"({"Type":"network","Action":"create","Actor":{"ID":"n1"}})"
                                "\n")));
  ASSERT_TRUE(socket.tell(chunk(network_event("connect", "c10"))));
  expect_call("all c10: network connect second");
  EXPECT_EQ(watched.calls().size(), before + 1);
  EXPECT_TRUE(watched.status().connected);
  EXPECT_EQ(watched.status().losses, 0U);
}

TEST_F(GuardTest, WhatItClosesIsSeen) {
  Socket socket(path());
  start();
  settle();
  watched.set([&] { watched.next["c1"] = closed(arm::Outcome::undone); });
  ASSERT_TRUE(socket.tell(chunk(network_event("connect", "c1"))));
  ASSERT_TRUE(eventually([&] { return watched.status().closed == 1; }));
  ASSERT_EQ(watched.status().incidents.size(), 1U);
  EXPECT_NE(watched.status().incidents[0].find("port agp1 of a1: premise: it broke"),
            std::string::npos);
  // A container that ended is no incident; one that cannot be closed is, and is not counted.
  watched.set([&] { watched.next["c1"] = closed(arm::Outcome::closed); });
  ASSERT_TRUE(socket.tell(chunk(container_event("die", "c1"))));
  ASSERT_TRUE(eventually([&] { return watched.status().closed == 2; }));
  EXPECT_EQ(watched.status().incidents.size(), 1U);
  watched.set([&] { watched.next["c1"] = closed(arm::Outcome::inconsistent); });
  ASSERT_TRUE(socket.tell(chunk(container_event("update", "c1"))));
  ASSERT_TRUE(eventually([&] { return watched.status().incidents.size() == 2; }));
  EXPECT_EQ(watched.status().closed, 2U);
}

TEST_F(GuardTest, WhatCouldNotBeJudgedIsAskedForAgain) {
  Socket socket(path());
  start();
  settle();
  watched.set([&] { watched.next["c1"] = {{}, {"c1"}}; });
  ASSERT_TRUE(socket.tell(chunk(network_event("connect", "c1"))));
  EXPECT_TRUE(eventually([&] { return watched.count("all c1: network connect second") == 2; }));
  watched.set([&] { watched.next["c3"] = {{}, {"c3"}}; });
  ASSERT_TRUE(socket.tell(chunk(container_event("start", "c3"))));
  EXPECT_TRUE(
      eventually([&] { return watched.count("started c3: container start name-c3") == 2; }));
  std::this_thread::sleep_for(100ms);
  EXPECT_EQ(watched.count("started c3: container start name-c3"), 2) << "and not for ever";
}

TEST_F(GuardTest, WaitsForTheStateToBeRestored) {
  watched.ready = false;
  Socket socket(path());
  start();
  ASSERT_TRUE(eventually([&] { return watched.status().connected; }));
  std::this_thread::sleep_for(30ms);
  EXPECT_TRUE(watched.calls().empty());
  watched.set([&] { watched.ready = true; });
  settle();
}

TEST_F(GuardTest, LooksAtEverythingNowAndThen) {
  options.look_every = 0s;
  Socket socket(path());
  start();
  ASSERT_TRUE(eventually([&] { return watched.count("kernel c1 c2: a look at everything") > 2; }));
}

TEST_F(GuardTest, ALossIsNoticedAndMendedAndEverythingJudged) {
  Socket socket(path());
  start();
  settle();
  for (std::uint64_t loss = 1; loss <= 3; ++loss) {
    const auto before = watched.count("engine c2: connection to the engine's events");
    socket.drop();
    ASSERT_TRUE(eventually([&] { return watched.status().losses == loss; }));
    ASSERT_TRUE(eventually([&] {
      return watched.status().connected &&
             watched.count("engine c2: connection to the engine's events") > before;
    }));
  }
  const auto incidents = watched.status().incidents;
  ASSERT_EQ(incidents.size(), 6U);
  EXPECT_NE(incidents[0].find("event stream is lost"), std::string::npos) << incidents[0];
  EXPECT_NE(incidents[0].find("ECONNRESET"), std::string::npos) << incidents[0];
  EXPECT_NE(incidents[1].find("again"), std::string::npos) << incidents[1];
}

TEST_F(GuardTest, WhileTheEngineIsAwayTheKernelIsAsked) {
  auto socket = std::make_unique<Socket>(path());
  start();
  settle();
  socket.reset();
  ASSERT_TRUE(
      eventually([&] { return watched.count("kernel c1 c2: loss of the engine's events") >= 3; }));
  const auto status = watched.status();
  EXPECT_FALSE(status.connected);
  EXPECT_EQ(status.losses, 1U) << "a failed attempt is no other loss";
  EXPECT_EQ(status.incidents.size(), 1U);
  EXPECT_NE(status.reason.find("cannot be reached"), std::string::npos) << status.reason;
  Socket back(path());
  EXPECT_TRUE(eventually(
      [&] { return watched.count("engine c2: connection to the engine's events") == 2; }));
}

TEST_F(GuardTest, AnEngineThatWasNeverThere) {
  start();
  ASSERT_TRUE(eventually([&] { return !watched.status().reason.empty(); }));
  EXPECT_FALSE(watched.status().connected);
  EXPECT_EQ(watched.status().losses, 0U);
  EXPECT_TRUE(watched.status().incidents.empty());
  Socket socket(path());
  settle();
  EXPECT_TRUE(watched.status().reason.empty());
}

TEST_F(GuardTest, GarbageIsALoss) {
  const std::string garbage[] = {"nonsense\r\n\r\n",
                                 "HTTP/1.1 503 Unavailable\r\n\r\n",
                                 kHead + "zz\r\n",
                                 kHead + chunk("{\"Type\":\n"),
                                 kHead + chunk(std::string(2 << 20, 'x')),
                                 kHead + std::string(100000, '1'),
                                 std::string(100000, 'h')};
  for (const std::string& answer : garbage) {
    std::filesystem::remove(path());
    Socket socket(path());
    socket.answer(answer);
    start();
    EXPECT_TRUE(eventually([&] {
      return watched.status().reason.find("EPROTO") != std::string::npos;
    })) << answer.substr(0, 60)
        << ": " << watched.status().reason;
    // As soon as it behaves, it is heard.
    socket.answer(kHead);
    EXPECT_TRUE(eventually([&] { return watched.status().connected; }));
    guard_.reset();
    engine_.reset();
    watched.guard_seen({});
  }
}

TEST_F(GuardTest, AttemptsBecomeRarer) {
  options.backoff_least = 10ms;
  options.backoff_most = 200ms;
  Socket socket(path());
  socket.answer("nonsense\r\n\r\n");
  start();
  std::this_thread::sleep_for(1s);
  const auto requests = socket.requests();
  const auto tried = std::count_if(requests.begin(), requests.end(), [](const std::string& one) {
    return one.find("/events") != std::string::npos;
  });
  EXPECT_GE(tried, 3);
  EXPECT_LE(tried, 10) << "10, 20, 40, 80, 160, 200, 200, 200 ms";
}

TEST_F(GuardTest, StopsAtOnceWhateverTheEngineDoes) {
  const std::pair<const char*, std::function<void(Socket&)>> engines[] = {
      {"good", [](Socket&) {}},
      {"silent from the start", [](Socket& socket) { socket.silent(true); }},
      {"silent in the head", [](Socket& socket) { socket.answer("HTTP/1.1 200 OK\r\n"); }},
      {"silent in a line", [](Socket& socket) { socket.answer(kHead + "100\r\n{\"Ty"); }}};
  for (const auto& [what, prepare] : engines) {
    std::filesystem::remove(path());
    Socket socket(path());
    prepare(socket);
    start();
    ASSERT_TRUE(eventually([&] { return !socket.requests().empty(); })) << what;
    std::this_thread::sleep_for(50ms);
    const auto began = Clock::now();
    guard_->stop();
    EXPECT_LT(Clock::now() - began, 1s) << what;
    guard_->stop();
    guard_.reset();
    EXPECT_EQ(engine_->inspect("c1").error().code, ECANCELED);
    engine_.reset();
    watched.guard_seen({});
  }
}

TEST_F(GuardTest, AStallInTheMiddleOfALineIsALoss) {
  engine_options.timeout = 200ms;
  Socket socket(path());
  start();
  settle();
  // Silence between events is none.
  std::this_thread::sleep_for(500ms);
  EXPECT_EQ(watched.status().losses, 0U);
  ASSERT_TRUE(socket.tell("100\r\n{\"Ty"));
  ASSERT_TRUE(eventually([&] { return watched.status().losses == 1; }));
  EXPECT_NE(watched.status().incidents[0].find("ETIMEDOUT"), std::string::npos);
}

TEST_F(GuardTest, TheStreamIsReadWhileSomethingIsJudged) {
  options.most_waiting = 50;
  Socket socket(path());
  start();
  settle();
  watched.set([&] { watched.held = true; });
  ASSERT_TRUE(socket.tell(chunk(network_event("connect", "c1"))));
  expect_call("all c1: network connect second");
  // Many for few containers wait once each; more than can be kept become one look at everything.
  // The socket takes them all only if somebody reads.
  for (int number = 0; number < 20000; ++number) {
    ASSERT_TRUE(socket.tell(chunk(container_event("update", "x" + std::to_string(number % 40)))));
  }
  for (int number = 0; number < 100; ++number) {
    ASSERT_TRUE(socket.tell(chunk(container_event("update", "y" + std::to_string(number)))));
  }
  const auto before = watched.calls().size();
  EXPECT_TRUE(watched.status().connected);
  std::this_thread::sleep_for(50ms);
  watched.set([&] { watched.held = false; });
  expect_call("kernel c1 c2: more events than can be kept");
  expect_call("engine c2: more events than can be kept");
  EXPECT_LE(watched.calls().size() - before, 60U);
}

TEST_F(GuardTest, EventsGoBeforeWhatIsLeftOfALookAtEverything) {
  watched.releases = {"c1", "c2", "c3", "c4"};
  watched.held = true;
  Socket socket(path());
  start();
  expect_call("kernel c1 c2 c3 c4: connection to the engine's events");
  ASSERT_TRUE(socket.tell(chunk(network_event("connect", "c9"))));
  std::this_thread::sleep_for(100ms);
  watched.set([&] { watched.held = false; });
  expect_call("engine c4: connection to the engine's events");
  EXPECT_EQ(watched.calls().at(1), "all c9: network connect second");
}

}  // namespace
}  // namespace agentgate::guard
