// SPDX-License-Identifier: GPL-2.0-or-later
//
// `agentgate run` against a client of Docker's that is a script and a daemon that is a function.
// Both write what they were asked into one file.
#include "plugin/cli/run.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "plugin/cli/cli.h"
#include "plugin/http/server.h"

namespace agentgate::cli {
namespace {

using nlohmann::json;
using Words = std::vector<std::string>;

constexpr const char* kId = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

// Each command is a function; a test puts its own in the file `behaviour`.
constexpr const char* kFakeDocker = R"sh(#!/bin/sh
cd "$(dirname "$0")" || exit 99
[ "$1" = -H ] && { echo "host $2" >> calls; shift 2; }
verb=$1
shift
echo "$verb $*" | sed 's/agentgate.run=[0-9a-f]\{16\}/agentgate.run=TOKEN/' >> calls
ID=0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
do_run() {
  printf '  -a, --attach list  To\n  -d, --detach      Run\n  -i, --interactive  Keep\n  -t, --tty   A\n      --rm    Remove\n'
}
do_network() {
  case $1 in ls) printf 'bridge bridge\nagentgate agents\n' ;; *) echo agentgate $ID ;; esac
}
do_create() { echo warning >&2; echo $ID; }
do_inspect() { case $* in *ExitCode*) echo 3 ;; *) echo agents; echo ;; esac; }
do_start() {
  touch running
  [ "$1" = --attach ] || { echo $ID; return; }
  echo "from the container"
  while [ ! -e unpaused ]; do [ -e removed ] && exit 137; sleep 0.01; done
  exit 7
}
do_pause() {
  [ -e running ] || { echo "Error response from daemon: container is not running" >&2; exit 1; }
}
do_unpause() { touch unpaused; }
do_rm() { touch removed; }
do_ps() { :; }
do_logs() { echo "last words"; }
[ -e behaviour ] && . ./behaviour
do_$verb "$@"
)sh";

class RunTest : public testing::Test {
 protected:
  void SetUp() override {
    char pattern[] = "/tmp/agentgate-run-XXXXXX";
    directory_ = ::mkdtemp(pattern);
    write("docker", kFakeDocker);
    std::filesystem::permissions(directory_ / "docker", std::filesystem::perms::owner_all);
    context_.docker = {(directory_ / "docker").string()};
    context_.socket = (directory_ / "control.sock").string();
    serve();
  }
  void TearDown() override {
    server_.reset();
    std::filesystem::remove_all(directory_);
  }
  void serve() {
    http::Options options;
    options.socket = context_.socket;
    auto started = http::Server::start(options, [this](const http::Request& request) {
      note(request.method + " " + request.path + " " + request.body);
      if (request.path == "/v1/health") return http::Response{health_, R"({"version":1})"};
      if (request.path == "/v1/precheck") return http::Response{200, precheck_};
      if (request.path == "/v1/disarm") return http::Response{200, disarmed_};
      return http::Response{status_, report_};
    });
    ASSERT_TRUE(started) << started.error().to_string();
    server_ = std::move(*started);
  }
  void note(const std::string& line) {
    std::ofstream(directory_ / "calls", std::ios::app) << line << "\n";
  }
  void write(const std::string& name, const std::string& text) {
    std::ofstream(directory_ / name) << text;
  }
  void behave(const std::string& text) { write("behaviour", text); }
  void answer_arm(int exit, const std::string& outcome) {
    report_ = json{{"container", kId}, {"outcome", outcome}, {"exit", exit}, {"reason", "why not"}}
                  .dump();
  }
  [[nodiscard]] std::string read(const std::string& name) const {
    std::ifstream stream(directory_ / name);
    return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
  }
  int run(const Words& words) {
    std::filesystem::remove(directory_ / "calls");
    out_.str("");
    err_.str("");
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    const int code = run_container(context_, words, out_, err_);
    child_out_ = testing::internal::GetCapturedStdout();
    child_err_ = testing::internal::GetCapturedStderr();
    return code;
  }
  // The verbs that were called, in order; of repeated ones the first.
  [[nodiscard]] std::string verbs() const {
    std::istringstream lines(read("calls"));
    std::string out;
    std::string last;
    for (std::string line; std::getline(lines, line);) {
      const std::string verb =
          line.rfind("POST", 0) == 0 || line.rfind("GET", 0) == 0
              ? line.substr(line.find("/v1/") + 4,
                            line.find(' ', line.find("/v1/")) - line.find("/v1/") - 4)
              : line.substr(0, line.find(' '));
      if (verb != last) out += (out.empty() ? "" : " ") + verb;
      last = verb;
    }
    return out;
  }
  [[nodiscard]] bool called(const std::string& text) const {
    return read("calls").find(text) != std::string::npos;
  }
  [[nodiscard]] bool said(const std::string& text) const {
    return err_.str().find(text) != std::string::npos;
  }
  // Sends the signal to the thread that runs, once that was called.
  std::thread signal_at(const std::string& call, int number) {
    return std::thread([this, call, number, target = ::pthread_self()] {
      for (int i = 0; i < 1000 && !called(call); ++i) ::usleep(5000);
      ::usleep(50000);
      ::pthread_kill(target, number);
    });
  }

  std::filesystem::path directory_;
  RunContext context_;
  std::unique_ptr<http::Server> server_;
  int health_ = 200, status_ = 200;
  std::string report_ = R"({"outcome":"released","exit":0})";
  std::string precheck_ = R"({"outcome":"closed","exit":0})";
  std::string disarmed_ = R"({"outcome":"closed","exit":0})";
  std::ostringstream out_, err_;
  std::string child_out_, child_err_;
};

TEST_F(RunTest, DetachedPrintsTheId) {
  EXPECT_EQ(run({"-d", "--name", "a1", "--policy", "web", "img", "cmd", "-d"}), 0) << err_.str();
  EXPECT_EQ(out_.str(), std::string(kId) + "\n");
  const std::string order = verbs();  // the first tries to pause it may come before the start
  EXPECT_EQ(order.substr(0, 41), "run health network create inspect network");
  EXPECT_EQ(order.substr(order.size() - 23), "start pause arm unpause");
  EXPECT_TRUE(called("create --label agentgate.run=TOKEN --network agents --name a1 img cmd -d\n"));
  EXPECT_TRUE(called("arm {\"container\":\"" + std::string(kId) + "\",\"policy\":\"web\"}"));
  EXPECT_TRUE(called("start " + std::string(kId) + "\n"));
  EXPECT_TRUE(err_.str().empty()) << err_.str();
  EXPECT_EQ(child_err_, "warning\n");  // the client's own words reach the user
}

TEST_F(RunTest, ForegroundHasTheContainersOutputAndExitCode) {
  EXPECT_EQ(run({"--rm", "--network", "x", "img"}), 7);
  EXPECT_EQ(child_out_, "from the container\n");
  // The first tries to pause it may come before the start.
  const std::string order = verbs();
  EXPECT_EQ(order.substr(0, 33), "run health create inspect network");
  EXPECT_EQ(order.substr(order.size() - 23), "start pause arm unpause");
  EXPECT_TRUE(called("create --label agentgate.run=TOKEN --network x") == false);
  EXPECT_TRUE(called("create --label agentgate.run=TOKEN --rm --network x img\n"));
  EXPECT_TRUE(called("start --attach " + std::string(kId)));
  EXPECT_TRUE(out_.str().empty());
}

TEST_F(RunTest, InputIsAttachedOnlyWithI) {
  EXPECT_EQ(run({"-i", "--detach-keys", "ctrl-x", "img"}), 7);
  EXPECT_TRUE(called("start --attach --interactive --detach-keys ctrl-x "));
  std::filesystem::remove(directory_ / "unpaused");
  EXPECT_EQ(run({"-i", "-a", "stdout", "-a", "stderr", "img"}), 7);
  EXPECT_FALSE(called("start --attach --interactive"));
  // Detached, its input stays open when the first client that attached goes.
  EXPECT_EQ(run({"-di", "img"}), 0);
  EXPECT_TRUE(called("--attach stdout --attach stderr -i img"));
}

TEST_F(RunTest, TheContainersErrorOutputIsWrittenOn) {
  behave(
      "do_start() { touch running; while [ ! -e unpaused ]; do sleep 0.01; done\n"
      "  i=0; while [ $i -lt 5000 ]; do echo \"error line $i of many\" >&2; i=$((i+1)); done; }\n");
  EXPECT_EQ(run({"img"}), 0);
  EXPECT_EQ(std::count(child_err_.begin(), child_err_.end(), '\n'), 5001);  // and the warning
}

TEST_F(RunTest, ARefusedArmLeavesNothing) {
  answer_arm(1, "refused");
  write("cid", kId);
  for (const Words& words :
       {Words{"-d", "--cidfile", (directory_ / "cid").string(), "img"}, Words{"--rm", "img"}}) {
    EXPECT_EQ(run(words), kRunRefused);
    EXPECT_TRUE(called("rm --force --volumes " + std::string(kId)));
    EXPECT_FALSE(called("unpause"));
    EXPECT_TRUE(said("0123456789ab: refused"));
    EXPECT_TRUE(said("why not"));
    EXPECT_TRUE(said("the container was removed"));
    EXPECT_TRUE(out_.str().empty());
    std::filesystem::remove(directory_ / "removed");
  }
  EXPECT_FALSE(std::filesystem::exists(directory_ / "cid"));
}

TEST_F(RunTest, SomebodyElsesCidfileStays) {
  answer_arm(1, "refused");
  write("cid", "another");
  EXPECT_EQ(run({"-d", "--cidfile", (directory_ / "cid").string(), "img"}), kRunRefused);
  EXPECT_EQ(read("cid"), "another");
}

TEST_F(RunTest, EachOutcomeOfTheArmHasItsCode) {
  answer_arm(2, "undone");
  EXPECT_EQ(run({"-d", "img"}), kRunUndone);
  answer_arm(0, "closed");  // nothing but a release is a success
  EXPECT_EQ(run({"-d", "img"}), kRunRefused);
  report_ = "{}";
  EXPECT_EQ(run({"-d", "img"}), kRunRefused);
  report_ = "not json";
  EXPECT_EQ(run({"-d", "img"}), kRunUnreachable);
  report_ = R"({"error":{"field":"policy","text":"is no name"}})";
  status_ = 400;
  EXPECT_EQ(run({"-d", "img"}), kRunFailed);
  EXPECT_TRUE(said("is no name"));
  status_ = 503;
  EXPECT_EQ(run({"-d", "img"}), kRunUnreachable);
  EXPECT_TRUE(called("rm --force"));
  EXPECT_FALSE(called("unpause"));
}

TEST_F(RunTest, JsonIsTheReportOnTheErrorOutput) {
  context_.as_json = true;
  answer_arm(1, "refused");
  EXPECT_EQ(run({"-d", "img"}), kRunRefused);
  EXPECT_EQ(json::parse(err_.str().substr(0, err_.str().find('\n')))["reason"], "why not");
}

TEST_F(RunTest, WithoutTheDaemonNothingIsCreated) {
  server_.reset();
  EXPECT_EQ(run({"-d", "img"}), kRunUnreachable);
  EXPECT_EQ(verbs(), "run");
  EXPECT_TRUE(said("nothing was created"));
}

TEST_F(RunTest, WaitReadyWaitsForTheDaemon) {
  server_.reset();
  std::thread later([this] {
    ::usleep(400000);
    serve();
  });
  EXPECT_EQ(run({"-d", "--wait-ready", "20s", "img"}), 0) << err_.str();
  later.join();
}

TEST_F(RunTest, ADaemonThatIsNotWellDecidesAtTheArm) {
  health_ = 503;
  EXPECT_EQ(run({"-d", "--wait-ready", "200ms", "img"}), 0) << err_.str();
}

TEST_F(RunTest, TheOnlyNetworkIsTaken) {
  behave("do_network() { echo 'bridge bridge'; }\n");
  EXPECT_EQ(run({"-d", "img"}), kRunFailed);
  EXPECT_TRUE(said("docker network create -d agentgate"));
  behave("do_network() { printf 'agentgate one\\nagentgate:latest two\\nnotagentgate x\\n'; }\n");
  EXPECT_EQ(run({"-d", "img"}), kRunFailed);
  EXPECT_TRUE(said("--network: one, two\n"));
  EXPECT_EQ(verbs(), "run health network");
  behave(
      "do_network() { case $1 in ls) echo 'reg.test/x/agentgate:1 one' ;; *) echo "
      "reg.test/x/agentgate:1 ;; esac; }\n");
  EXPECT_EQ(run({"-d", "img"}), 0) << err_.str();
}

TEST_F(RunTest, WhatIsNotOnOurNetworkAloneIsNotStarted) {
  for (const char* text :
       {"do_network() { [ $1 = ls ] && echo 'agentgate a' || echo bridge; }\n",
        "do_inspect() { echo agents; echo other; }\n", "do_inspect() { :; }\n"}) {
    behave(text);
    EXPECT_EQ(run({"-d", "img"}), kRunRefused) << text;
    EXPECT_FALSE(called("start"));
    EXPECT_TRUE(called("rm --force"));
  }
}

TEST_F(RunTest, AFailedCreateIs125) {
  behave("do_create() { echo 'name is in use' >&2; exit 1; }\n");
  EXPECT_EQ(run({"-d", "img"}), kRunFailed);
  EXPECT_FALSE(called("rm --force"));  // the one with that name is not ours
  EXPECT_EQ(child_err_, "name is in use\n");
}

TEST_F(RunTest, WhatCreateLeftBehindIsRemoved) {
  behave("do_create() { exit 1; }\ndo_ps() { echo $ID; }\n");
  EXPECT_EQ(run({"-d", "img"}), kRunFailed);
  EXPECT_TRUE(called("ps --all --quiet --no-trunc --filter label=agentgate.run=TOKEN"));
  EXPECT_TRUE(called("rm --force --volumes " + std::string(kId)));
}

TEST_F(RunTest, WhatCannotBeStartedHasDockersExitCodes) {
  const std::pair<const char*, int> cases[] = {
      {"exec: nosuch: executable file not found in $PATH", kRunNotFound},
      {"exec: /x: no such file or directory", kRunNotFound},
      {"exec: /etc: permission denied", kRunNotExecutable},
      {"exec: /etc: is a directory", kRunNotExecutable},
      {"ports cannot be published", kRunFailed}};
  for (const auto& [text, code] : cases) {
    behave(std::string("do_start() { echo 'Error response from daemon: ") + text +
           "' >&2; exit 1; }\n");
    for (const Words& words : {Words{"-d", "img"}, Words{"--rm", "img"}}) {
      EXPECT_EQ(run(words), code) << text;
      EXPECT_TRUE(said(text) || child_err_.find(text) != std::string::npos);
      EXPECT_TRUE(called("rm --force"));
    }
  }
}

TEST_F(RunTest, OneThatEndsBeforeThePauseIsRefused) {
  behave("do_start() { echo out; echo oops >&2; exit 1; }\n");
  EXPECT_EQ(run({"img"}), kRunRefused);
  EXPECT_TRUE(said("ended before it could be armed (its exit code: 1)"));
  EXPECT_EQ(child_out_, "out\n");
  EXPECT_EQ(run({"-d", "img"}), kRunFailed);  // here the client says that it could not be started
  behave("do_start() { echo $ID; }\n");
  EXPECT_EQ(run({"-d", "img"}), kRunRefused);
  EXPECT_TRUE(said("(its exit code: 3)"));
  EXPECT_TRUE(said("last words"));
  EXPECT_FALSE(called("arm"));
  EXPECT_TRUE(called("rm --force"));
}

// Not one instruction of it runs if it is known before that it could not be armed.
TEST_F(RunTest, WhatWouldBeRefusedIsNotStarted) {
  precheck_ = R"({"container":"x","outcome":"refused","exit":1,"reason":"runtime runc"})";
  EXPECT_EQ(run({"-d", "img"}), kRunRefused);
  EXPECT_TRUE(called(R"(POST /v1/precheck {"container":")" + std::string(kId) + R"(","network":")" +
                     kId + R"("})"));
  EXPECT_TRUE(said("runtime runc"));
  EXPECT_TRUE(said("it was not started"));
  EXPECT_FALSE(called("start "));
  EXPECT_TRUE(called("rm --force"));
  EXPECT_EQ(run({"--policy", "web", "-d", "img"}), kRunRefused);
  EXPECT_TRUE(called(R"("policy":"web"})"));
  behave("do_inspect() { echo agents lab; }\n");
  EXPECT_EQ(run({"-d", "img"}), kRunRefused);
  EXPECT_TRUE(called(R"("policy":"lab"})"));
  behave("");
  precheck_ = "garbage";
  EXPECT_EQ(run({"-d", "img"}), kRunRefused);
  EXPECT_FALSE(called("start "));
}

TEST_F(RunTest, OneThatCannotBePausedInTimeIsRefused) {
  behave("do_pause() { echo 'not today' >&2; exit 1; }\n");
  EXPECT_EQ(run({"--wait-ready", "300ms", "img"}), kRunRefused);
  EXPECT_TRUE(said("not today"));
  EXPECT_TRUE(called("rm --force"));
}

TEST_F(RunTest, AFailedUnpauseIsNoSuccess) {
  behave("do_unpause() { echo no >&2; exit 1; }\n");
  EXPECT_EQ(run({"-d", "img"}), kRunFailed);
  EXPECT_TRUE(called("rm --force"));
  EXPECT_TRUE(out_.str().empty());
}

TEST_F(RunTest, WhatCannotBeRemovedIsNamed) {
  answer_arm(1, "refused");
  behave("do_rm() { echo busy >&2; exit 1; }\n");
  EXPECT_EQ(run({"-d", "img"}), kRunRefused);
  EXPECT_TRUE(said("is closed, but could not be removed: busy; remove it: docker rm -f " +
                   std::string(kId)));
  EXPECT_FALSE(called("/v1/disarm"));  // a refused one never was released
  EXPECT_FALSE(said("was removed"));
  behave("do_rm() { echo 'Error: No such container: x' >&2; exit 1; }\n");
  EXPECT_EQ(run({"-d", "--rm", "img"}), kRunRefused);
  EXPECT_TRUE(said("was removed"));
}

// A release whose container cannot be removed would be one that nobody knows of.
TEST_F(RunTest, WhatMayBeReleasedIsClosedBeforeItIsRemoved) {
  const char* const no_removal = "do_rm() { echo busy >&2; exit 1; }\n";
  behave(std::string("do_unpause() { echo no >&2; exit 1; }\n") + no_removal);
  EXPECT_EQ(run({"-d", "img"}), kRunFailed);
  std::string order = verbs();
  EXPECT_EQ(order.substr(order.size() - 21), "arm unpause disarm rm");
  EXPECT_TRUE(called("disarm {\"container\":\"" + std::string(kId) + "\"}"));
  EXPECT_TRUE(said("is closed, but could not be removed"));

  disarmed_ = R"({"outcome":"inconsistent","exit":3})";
  EXPECT_EQ(run({"-d", "img"}), kRunFailed);
  EXPECT_TRUE(said("may be released, and could not be removed: busy"));
  EXPECT_FALSE(said("is closed"));

  // An arm without an answer may have been done all the same.
  report_ = "not json";
  behave(no_removal);
  EXPECT_EQ(run({"-d", "img"}), kRunUnreachable);
  order = verbs();
  EXPECT_EQ(order.substr(order.size() - 13), "arm disarm rm");
}

TEST_F(RunTest, LogsDoNotSteerTheTerminal) {
  behave("do_start() { echo $ID; }\ndo_logs() { printf 'a\\033[2J\\007\\rb\\tc\\nd\\177\\n'; }\n");
  EXPECT_EQ(run({"-d", "img"}), kRunRefused);
  EXPECT_TRUE(said("a [2J  b\tc\nd \n")) << err_.str();
}

TEST_F(RunTest, ASignalInEachStepLeavesNothing) {
  const std::pair<const char*, const char*> steps[] = {
      {"create", "do_create() { sleep 20; }\ndo_ps() { echo $ID; }\n"},
      {"inspect", "do_inspect() { sleep 20; }\n"},
      {"start", "do_start() { sleep 20; }\n"},
      {"pause", "do_pause() { sleep 20; }\n"},
      {"unpause", "do_unpause() { sleep 20; }\n"}};
  for (const auto& [step, text] : steps) {
    behave(text);
    for (const int number : {SIGINT, SIGTERM}) {
      std::thread sender = signal_at(step + std::string(" "), number);
      EXPECT_EQ(run({"-d", "img"}), 128 + number) << step;
      sender.join();
      EXPECT_TRUE(called("rm --force --volumes " + std::string(kId))) << step;
      EXPECT_TRUE(out_.str().empty());
    }
  }
}

TEST_F(RunTest, ASignalInTheForegroundReachesTheContainer) {
  behave(
      "do_start() { touch running; while [ ! -e killed ]; do sleep 0.01; done; exit 9; }\n"
      "do_kill() { touch killed; }\n");
  for (const int number : {SIGTERM, SIGINT, SIGUSR1}) {
    std::thread sender = signal_at("unpause ", number);
    EXPECT_EQ(run({"img"}), 9);
    sender.join();
    EXPECT_TRUE(called("kill --signal " + std::to_string(number) + " " + kId));
    EXPECT_FALSE(called("rm --force"));
    std::filesystem::remove(directory_ / "killed");
  }
}

TEST_F(RunTest, AfterwardsSignalsAreAsBefore) {
  sigset_t before;
  sigset_t after;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &before);
  EXPECT_EQ(run({"-d", "img"}), 0);
  ::pthread_sigmask(SIG_SETMASK, nullptr, &after);
  EXPECT_EQ(sigismember(&before, SIGINT), sigismember(&after, SIGINT));
}

TEST_F(RunTest, NoClientIsSaid) {
  context_.docker = {"/nonexistent/docker"};
  EXPECT_EQ(run({"-d", "img"}), kRunFailed);
  EXPECT_TRUE(said("/nonexistent/docker"));
}

TEST_F(RunTest, ATerminalIsNeededForBoth) {
  if (::isatty(STDIN_FILENO) == 0) {
    EXPECT_EQ(run({"-it", "img"}), kRunFailed);
    EXPECT_EQ(verbs(), "run");
  }
  EXPECT_EQ(run({"-dit", "img"}), 0) << err_.str();
}

// The whole way: called by Docker's client, which says who it is and which engine is meant.
TEST_F(RunTest, AsAPlugin) {
  ::setenv("DOCKER_CLI_PLUGIN_ORIGINAL_CLI_COMMAND", context_.docker[0].c_str(), 1);
  const std::vector<const char*> argv{"/x/docker-agentgate",
                                      "-H",
                                      "unix:///e.sock",
                                      "agentgate",
                                      "--socket",
                                      context_.socket.c_str(),
                                      "run",
                                      "-d",
                                      "img"};
  std::filesystem::remove(directory_ / "calls");
  const int code = cli::run(static_cast<int>(argv.size()), argv.data(), out_, err_);
  ::unsetenv("DOCKER_CLI_PLUGIN_ORIGINAL_CLI_COMMAND");
  EXPECT_EQ(code, 0) << err_.str();
  EXPECT_EQ(out_.str(), std::string(kId) + "\n");
  EXPECT_TRUE(called("host unix:///e.sock\nunpause "));
}

}  // namespace
}  // namespace agentgate::cli
