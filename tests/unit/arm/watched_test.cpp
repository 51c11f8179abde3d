// SPDX-License-Identifier: GPL-2.0-or-later
//
// What the guard asks of the pipeline: each premise of a release, by itself.
#include <thread>

#include <nlohmann/json.hpp>

#include "tests/unit/arm/world.h"

namespace agentgate::arm {
namespace {

const std::string kOther(64, 'd');

class WatchedTest : public test::World {
 protected:
  void SetUp() override {
    World::SetUp();
    if (HasFatalFailure()) return;
    ASSERT_EQ(arm().outcome, Outcome::released);
    engine.container.paused = false;
    lines_ = audit_lines().size();
  }
  Rechecked recheck(Premises which = Premises::all) {
    return pipeline().recheck({test::kContainerId}, which, engine, "network connect second");
  }
  // Closed for this reason, and everybody who must know does.
  void closed(const Rechecked& done, const std::string& reason, Outcome outcome = Outcome::undone) {
    ASSERT_EQ(done.closed.size(), 1U);
    const Report& report = done.closed.front();
    EXPECT_EQ(report.operation, "guard");
    EXPECT_EQ(report.outcome, outcome);
    EXPECT_NE(report.reason.find(reason), std::string::npos) << report.reason;
    EXPECT_EQ(report.container_name, "a1");
    EXPECT_EQ(report.container_id, test::kContainerId);
    EXPECT_EQ(report.port, "agpbbbbbbbbbb");
    EXPECT_FALSE(ports.open(endpoint_id()));
    EXPECT_FALSE(endpoint().release);
    EXPECT_FALSE(endpoint().prepared) << "a closed port's FDB entry weakens layer 2";
    EXPECT_TRUE(done.again.empty());
    ASSERT_EQ(audit_lines().size(), lines_ + 1);
    const auto line = nlohmann::json::parse(audit_lines().back());
    EXPECT_EQ(line["operation"], "guard");
    EXPECT_EQ(line["outcome"], to_string(outcome));
    EXPECT_EQ(line["reason"], report.reason);
  }
  void untouched(const Rechecked& done, bool again) {
    EXPECT_TRUE(done.closed.empty()) << done.closed.front().reason;
    EXPECT_EQ(done.again, again ? std::vector{test::kContainerId} : std::vector<std::string>());
    EXPECT_TRUE(ports.open(endpoint_id()));
    EXPECT_TRUE(endpoint().release);
    EXPECT_EQ(audit_lines().size(), lines_);
  }
  // Another container, started in the network namespace of that name.
  engine::Container& other(const std::string& netns, const std::string& mode = "bridge") {
    process(777, 9000, netns, "0::/docker/" + kOther + "\n", "sleep");
    engine::Container& out = engine.others[kOther];
    out.id = kOther;
    out.name = "n1";
    out.running = true;
    out.pid = 777;
    out.network_mode = mode;
    return out;
  }
  std::size_t lines_ = 0;
};

TEST_F(WatchedTest, UnchangedStaysReleased) {
  untouched(recheck(), false);
  EXPECT_EQ(pipeline().released().value(), std::vector{test::kContainerId});
  engine.container.name = "renamed";
  untouched(recheck(), false);
  untouched(pipeline().recheck({kOther}, Premises::all, engine, "container die x"), false);
  untouched(pipeline().recheck({}, Premises::all, engine, "nothing"), false);
}

TEST_F(WatchedTest, RestartPolicy) {
  engine.container.restart_policy = "always";
  closed(recheck(), "premise: its restart policy is 'always'");
  EXPECT_TRUE(recheck().closed.empty()) << "once";
}

TEST_F(WatchedTest, SecondNetwork) {
  engine.container.attachments.push_back({"second", std::string(64, 'e'), "x", "", "", ""});
  closed(recheck(), "premise: it is on 2 networks");
}

TEST_F(WatchedTest, NoNetwork) {
  engine.container.attachments.clear();
  closed(recheck(), "premise: it is on no network");
}

TEST_F(WatchedTest, SecondLink) {
  ports.links.push_back(ports.links.front());
  const int before = engine.inspects;
  closed(recheck(), "premise: its namespace has 2 links");
  EXPECT_EQ(engine.inspects, before) << "what the kernel says is enough";
}

TEST_F(WatchedTest, AProcessThatIsGoneIsNotHeldAgainstIt) {
  std::filesystem::remove_all(base / "proc/4242");
  closed(recheck(), "its process has ended", Outcome::closed);
}

TEST_F(WatchedTest, AnotherProcessOfThatNumber) {
  process(test::kContainerPid, 6000, "container", "0::/\n", "other");
  closed(recheck(), "its process has ended", Outcome::closed);
}

TEST_F(WatchedTest, Stranger) {
  process(778, 9000, "container", "0::/system.slice/ssh.service\n", "sh");
  closed(recheck(Premises::kernel), "process 778 (sh)");
}

TEST_F(WatchedTest, WhatExecStartsIsNoStranger) {
  // In the namespace first, in the cgroup a moment later.
  process(778, 9000, "container", "0::/system.slice/docker.service\n", "runc:[2:INIT]");
  std::thread runc([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    process(778, 9000, "container", "0::/docker/" + test::kContainerId + "\n", "sh");
  });
  const Rechecked done = recheck();
  runc.join();
  untouched(done, false);
}

TEST_F(WatchedTest, AnEngineThatIsAwayClosesNothing) {
  engine.inspect_error = Error{"inspect", ECONNREFUSED, std::nullopt, "not there"};
  untouched(recheck(), true);
  untouched(recheck(Premises::kernel), false);
  engine.inspect_error = Error{"inspect", ENOENT, std::nullopt, "No such container"};
  closed(recheck(), "the engine does not know the container");
}

TEST_F(WatchedTest, WhatCannotBeLookedAtIsAskedForAgain) {
  ports.errors["sandbox_links"] = Error{"links", ETIMEDOUT, std::nullopt, "busy"};
  untouched(recheck(), true);
  ports.errors.clear();
  ports.errors["find"] = Error{"find", ETIMEDOUT, std::nullopt, "busy"};
  untouched(recheck(), true);
}

TEST_F(WatchedTest, APortThatDoesNotCloseIsTriedAgain) {
  engine.container.restart_policy = "always";
  ports.errors["clean"] = Error{"clean", EIO, std::nullopt, "it broke"};
  Rechecked done = recheck();
  ASSERT_EQ(done.closed.size(), 1U);
  EXPECT_EQ(done.closed[0].outcome, Outcome::inconsistent);
  EXPECT_NE(done.closed[0].reason.find("COULD NOT BE READ BACK CLOSED"), std::string::npos);
  EXPECT_EQ(done.again, std::vector{test::kContainerId});
  EXPECT_EQ(ports.count("clean"), 3U) << "arm, and twice";
  ports.errors.clear();
  ++lines_;
  closed(recheck(), "restart policy");
}

TEST_F(WatchedTest, APortThatGoesMeanwhileIsClosed) {
  engine.container.restart_policy = "always";
  ports.errors["clean"] = Error{"clean", ENOENT, std::nullopt, "the endpoint is not known"};
  EXPECT_EQ(recheck().closed.at(0).outcome, Outcome::undone);
}

TEST_F(WatchedTest, ANeighbourThatStarts) {
  other("container");
  closed(pipeline().started(kOther, engine, "container start n1"),
         "premise: container n1 was started in its network namespace");
}

TEST_F(WatchedTest, ANeighbourThatHasEnded) {
  engine::Container& gone = other("container", "container:" + test::kContainerId);
  gone.pid = 0;
  gone.running = false;
  std::filesystem::remove_all(base / "proc/777");
  closed(pipeline().started(kOther, engine, "container start n1"), "container n1 was started");
}

TEST_F(WatchedTest, StartsElsewhereAndOfTheContainerItself) {
  other("other");
  untouched(pipeline().started(kOther, engine, "container start n1"), false);
  untouched(pipeline().started(std::string(64, 'f'), engine, "container start gone"), false);
  untouched(pipeline().started(test::kContainerId, engine, "container start a1"), false);
  engine.inspect_error = Error{"inspect", ETIMEDOUT, std::nullopt, "it hangs"};
  EXPECT_EQ(pipeline().started(kOther, engine, "container start n1").again,
            std::vector<std::string>{kOther});
}

TEST_F(WatchedTest, StartsAreNotAskedForWhileNothingIsReleased) {
  ASSERT_TRUE(ports.close(endpoint_id()));
  const int before = engine.inspects;
  EXPECT_TRUE(pipeline().started(kOther, engine, "container start n1").closed.empty());
  EXPECT_EQ(engine.inspects, before);
}

TEST_F(WatchedTest, NothingIsSaidBeforeTheStateIsRestored) {
  ports.ready = false;
  EXPECT_EQ(pipeline().released().error().code, EAGAIN);
  untouched(recheck(), true);
  EXPECT_EQ(pipeline().started(kOther, engine, "x").again, std::vector<std::string>{kOther});
}

TEST_F(WatchedTest, DoesNotWaitForAnArmAndDoesNotUndoAnother) {
  // While an arm of it runs it is asked for again; afterwards it is judged as it is then.
  engine.container.paused = true;
  bool asked = false;
  Rechecked meanwhile;
  ports.on_call = [&](const std::string& call) {
    if (call.rfind("prepare", 0) != 0 || asked) return;
    asked = true;
    std::thread guard([&] {
      const auto now = endpoint().release;
      endpoint().release = Release{test::kContainerId, "a1", {test::kContainerPid, 5000}, "x", "y"};
      meanwhile = recheck();
      endpoint().release = now;
    });
    guard.join();
  };
  ASSERT_EQ(arm().outcome, Outcome::released);
  EXPECT_TRUE(asked);
  EXPECT_TRUE(meanwhile.closed.empty());
  EXPECT_EQ(meanwhile.again, std::vector{test::kContainerId});
  ports.on_call = [](const std::string&) {};
  lines_ = audit_lines().size();
  untouched(recheck(), false);
}

TEST_F(WatchedTest, AnArmLooksAgainWhoIsInTheNamespace) {
  // Who comes during an arm is no news to the guard yet: nothing is released then.
  engine.container.paused = true;
  ports.on_call = [&](const std::string& call) {
    if (call.rfind("release", 0) == 0) process(778, 9000, "container", "0::/ssh\n", "sh");
  };
  const Report report = arm();
  EXPECT_EQ(report.outcome, Outcome::undone);
  EXPECT_NE(report.reason.find("process 778"), std::string::npos) << report.reason;
  EXPECT_FALSE(ports.open(endpoint_id()));
}

TEST_F(WatchedTest, StatusHasTheGuardsIncidents) {
  EngineGuardStatus status;
  status.connected = true;
  status.incidents = {"2026-01-02T00:00:00Z engine guard: lost"};
  pipeline().guard_seen(status);
  EXPECT_EQ(pipeline().status().incidents, status.incidents);
  EXPECT_TRUE(pipeline().engine_guard().connected);
}

}  // namespace
}  // namespace agentgate::arm
