// SPDX-License-Identifier: GPL-2.0-or-later
//
// The thirteen steps: each failing in turn, and everything that can change between two of them.
#include "plugin/arm/pipeline.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include <nlohmann/json.hpp>

#include "tests/unit/arm/world.h"

namespace agentgate::arm {
namespace {

namespace fs = std::filesystem;
using netdriver::Difference;
using netdriver::PortReport;
using netdriver::PortState;

const Error kError{"do it", EIO, std::nullopt, "it broke"};

class PipelineTest : public test::World {
 protected:
  // Steps before `step` are ok, it failed, those after it did not run.
  static void stopped_at(const Report& report, int step) {
    ASSERT_EQ(report.steps.size(), 13U);
    for (const Step& one : report.steps) {
      const StepOutcome expected = one.number < step    ? StepOutcome::ok
                                   : one.number == step ? StepOutcome::failed
                                                        : StepOutcome::skipped;
      EXPECT_EQ(one.outcome, expected) << one.number << " " << one.name << ": " << one.evidence;
      EXPECT_EQ(one.evidence.empty(), expected == StepOutcome::skipped);
    }
    EXPECT_NE(report.reason.find(report.steps[static_cast<std::size_t>(step) - 1].evidence),
              std::string::npos);
  }
  // Exit 1: nothing was opened, and nothing is open.
  void refused(const Report& report, int step, const std::string& words) {
    EXPECT_EQ(report.outcome, Outcome::refused) << report.reason;
    stopped_at(report, step);
    EXPECT_NE(report.reason.find(words), std::string::npos) << report.reason;
    EXPECT_EQ(ports.count("release"), 0U);
    EXPECT_FALSE(ports.open(endpoint_id()));
  }
  // Exit 2: it was open for a moment, and is closed again.
  void undone(const Report& report, int step, const std::string& words) {
    EXPECT_EQ(report.outcome, Outcome::undone) << report.reason;
    stopped_at(report, step);
    EXPECT_NE(report.reason.find(words), std::string::npos) << report.reason;
    EXPECT_EQ(ports.count("release"), 1U);
    EXPECT_FALSE(ports.open(endpoint_id()));
    EXPECT_FALSE(endpoint().release);
  }
};

TEST_F(PipelineTest, AResolverThatAsksFromTheHost) {
  if (::geteuid() != 0) GTEST_SKIP() << "policy files must be root's";
  old_engine();
  write("engine/etc/resolv.conf", "nameserver 127.0.0.1\n");
  write("cgroups/freezer/docker/" + test::kContainerId + "/freezer.state", "FROZEN\n");
  engine.container.runtime = "runc";
  ports.links[0].addresses = {IpAddress::parse("10.99.0.2").value(),
                              IpAddress::parse("fd99::2").value()};
  policy("web", R"({"version":1,"runtimes":["runc"]})");
  refused(arm("a1", "web"), 5, "CVE-2024-29018");
  policy("web", R"({"version":1,"runtimes":["runc"],"accept_host_resolver":true})");
  const Report report = arm("a1", "web");
  ASSERT_EQ(report.outcome, Outcome::released) << report.reason;
  ASSERT_EQ(report.notes.size(), 1U);
  EXPECT_NE(report.notes[0].find("past the gate"), std::string::npos) << report.notes[0];
  engine.container.runtime = "runsc";  // whose guest does not reach it
  EXPECT_EQ(arm().outcome, Outcome::released);
}

TEST_F(PipelineTest, ReleasesWhatIsAsItMustBe) {
  const Report report = arm();
  ASSERT_EQ(report.outcome, Outcome::released) << report.reason;
  EXPECT_EQ(exit_code(report.outcome), 0);
  ASSERT_EQ(report.steps.size(), 13U);
  for (int i = 0; i < 13; ++i) {
    const Step& step = report.steps[static_cast<std::size_t>(i)];
    EXPECT_EQ(step.number, i + 1);
    EXPECT_EQ(step.outcome, StepOutcome::ok) << step.name;
    EXPECT_FALSE(step.evidence.empty()) << step.name;
    EXPECT_GE(step.milliseconds, 0);
  }
  EXPECT_EQ(report.container, "a1");
  EXPECT_EQ(report.container_id, test::kContainerId);
  EXPECT_EQ(report.endpoint_id, test::kEndpointId);
  EXPECT_EQ(report.network_id, test::kNetworkId);
  EXPECT_EQ(report.port, "agpbbbbbbbbbb");
  EXPECT_EQ(report.policy, "default");
  EXPECT_EQ(report.policy_revision, "builtin");
  EXPECT_TRUE(report.reason.empty());

  // Only these change the kernel, in this order.
  std::vector<std::string> changes;
  for (const auto& call : ports.calls) {
    if (call == "clean" || call == "close" || call == "prepare" || call == "release") {
      changes.push_back(call);
    }
  }
  EXPECT_EQ(changes, (std::vector<std::string>{"clean", "close", "prepare", "release"}));
  ASSERT_TRUE(ports.open(endpoint_id()));
  EXPECT_EQ(ports.opened.at(endpoint_id()).name, "default");
  EXPECT_FALSE(ports.opened.at(endpoint_id()).v4.allow.empty());
  ASSERT_TRUE(endpoint().release);
  EXPECT_EQ(endpoint().release->container_id, test::kContainerId);
  EXPECT_EQ(endpoint().release->container_name, "a1");
  EXPECT_EQ(endpoint().release->process, (ProcessIdentity{test::kContainerPid, 5000}));
  EXPECT_EQ(endpoint().release->policy, "default");
  EXPECT_EQ(text_of("engine/resolv.conf"), policy::resolv_conf(policy::builtin()));
}

TEST_F(PipelineTest, AsksTheEngineLittle) {
  ASSERT_EQ(arm().outcome, Outcome::released);
  EXPECT_EQ(engine.inspects, 3);
  EXPECT_EQ(engine.identifies, 2);
  EXPECT_EQ(engine.infos, 1);
  ASSERT_EQ(arm().outcome, Outcome::released);
  EXPECT_EQ(engine.inspects, 6);
  EXPECT_EQ(engine.infos, 1) << "the runtime table is known until the engine or its file changes";
  write("engine/daemon.json", "{}");
  ASSERT_EQ(arm().outcome, Outcome::released);
  EXPECT_EQ(engine.infos, 2);
  process(test::kEnginePid, 2000, "host", "", "dockerd");
  engine.identity.process.start_time = 2000;
  ASSERT_EQ(arm().outcome, Outcome::released);
  EXPECT_EQ(engine.infos, 3);
}

// ---- each step by itself ---------------------------------------------------------------------

TEST_F(PipelineTest, Step1Capabilities) {
  write("proc/thread-self/status", "CapEff:\t0000000000000000\n");
  refused(arm(), 1, "CAP_NET_ADMIN");
  EXPECT_EQ(ports.calls, std::vector<std::string>());
}

TEST_F(PipelineTest, Step1AuditFile) {
  write("log", "a file where a folder must be");
  refused(arm(), 1, "audit");
}

TEST_F(PipelineTest, Step2EngineSilent) {
  engine.inspect_error = engine.identify_error = Error{"ping", ECONNREFUSED, std::nullopt, "down"};
  refused(arm(), 2, "down");
}

TEST_F(PipelineTest, Step2EngineInAnotherNamespace) {
  process(test::kEnginePid, 1000, "other", "", "dockerd");
  refused(arm(), 2, "another network namespace");
}

TEST_F(PipelineTest, Step3DaemonJsonUnreadable) {
  fs::create_directory(base / "engine/daemon.json");
  refused(arm(), 3, "daemon.json");
}

TEST_F(PipelineTest, Step4UnknownContainer) {
  refused(arm("nobody"), 4, "there is no container 'nobody'");
}

TEST_F(PipelineTest, Step4NotAnAgentgateNetwork) {
  engine.container.attachments[0].name = "bridge";
  engine.container.attachments[0].endpoint_id = std::string(64, 'e');
  refused(arm(), 4, "network bridge is not an agentgate network");
}

TEST_F(PipelineTest, Step4NoEndpoint) {
  engine.container.attachments[0].endpoint_id = "";
  refused(arm(), 4, "no endpoint");
}

TEST_F(PipelineTest, Step4NetworkOfTheEndpointDiffers) {
  engine.container.attachments[0].network_id = std::string(64, 'f');
  refused(arm(), 4, "disagree");
}

TEST_F(PipelineTest, Step4NetworkDiffers) {
  ports.differences["inspect_network 1"] = {{"bridge table, chain forward", "rule 1", ""}};
  refused(arm(), 4, "bridge table, chain forward: expected 'rule 1', found ''");
}

TEST_F(PipelineTest, Step4NetworkUnreadable) {
  ports.errors["inspect_network"] = kError;
  refused(arm(), 4, "it broke");
}

TEST_F(PipelineTest, Step4ForwardingOff) {
  write("proc/sys/net/ipv4/ip_forward", "0\n");
  refused(arm(), 4, "sysctl -w net.ipv4.ip_forward=1");
}

TEST_F(PipelineTest, Step5NotRunning) {
  engine.container.running = engine.container.paused = false;
  engine.container.pid = 0;
  refused(arm(), 4, "not running");
}

TEST_F(PipelineTest, Step5NotPaused) {
  engine.container.paused = false;
  refused(arm(), 5, "docker pause a1");
}

TEST_F(PipelineTest, Step5RestartPolicy) {
  engine.container.restart_policy = "on-failure";
  refused(arm(), 5, "--restart no");
}

TEST_F(PipelineTest, Step5PublishedPorts) {
  engine.container.published_ports = {"80/tcp"};
  refused(arm(), 5, "without -p");
}

TEST_F(PipelineTest, Step5Privileged) {
  engine.container.privileged = true;
  refused(arm(), 4, "--privileged");
}

TEST_F(PipelineTest, Step5HostNamespaces) {
  engine.container.pid_mode = "host";
  refused(arm(), 4, "--pid host");
}

TEST_F(PipelineTest, Step5SecondNetwork) {
  engine.container.attachments.push_back({"bridge", "n", "e", "", "", ""});
  refused(arm(), 4, "2 networks");
}

TEST_F(PipelineTest, Step5WrongRuntime) {
  engine.container.runtime = "runc";
  refused(arm(), 5, "is really runc");
}

TEST_F(PipelineTest, Step5AliasThatIsNotRunsc) {
  engine.information.runtimes["runsc"] = {"/usr/sbin/runc", "", "", {}};
  refused(arm(), 5, "'runsc' is really runc");
}

// Docker 26 to 28 list a shim without its type; the engine's configuration has it.
TEST_F(PipelineTest, Step5ARuntimeThatIsAShim) {
  engine.information.runtimes["runsc"] = {};
  refused(arm(), 5, "is of type ''");
  write("engine/daemon.json",
        R"({"runtimes": {"runsc": {"runtimeType": "io.containerd.runc.v2"}}})");
  refused(arm(), 5, "'runsc' is really runc");
  // What the engine says goes before; it is asked again when its configuration has changed.
  engine.information.runtimes["runsc"] = {"/usr/sbin/runc", "", "", {}};
  write("engine/daemon.json",
        R"({"runtimes": {"runsc": {"runtimeType": "io.containerd.runsc.v1"}}})");
  refused(arm(), 5, "'runsc' is really runc");
  engine.information.runtimes["runsc"] = {};
  write("engine/daemon.json",
        R"({"runtimes": {"runsc": {"runtimeType": "io.containerd.runsc.v1"}} })");
  EXPECT_EQ(arm().outcome, Outcome::released);
}

TEST_F(PipelineTest, Step5NoInfo) {
  engine.info_error = kError;
  refused(arm(), 5, "it broke");
}

TEST_F(PipelineTest, Step5ProcessIsGone) {
  fs::remove_all(base / "proc" / std::to_string(test::kContainerPid));
  refused(arm(), 5, "no such process");
}

TEST_F(PipelineTest, Step5SharedNamespace) {
  process(4300, 1, "container", "0::/docker/" + std::string(64, 'd') + "\n", "spy");
  refused(arm(), 5, "process 4300 (spy)");
}

TEST_F(PipelineTest, Step5UnknownPolicy) {
  refused(arm("a1", "nothing"), 5, "nothing");
  refused(arm("a1", "../x"), 5, "policy name");
}

TEST_F(PipelineTest, Step5FrozenByTheEnginesWordAlone) {
  if (::geteuid() != 0) GTEST_SKIP() << "policy files must be root's";
  policy("both", R"({"version":1,"runtimes":["runc","runsc"],"allow":[
                    {"cidr":"160.79.104.0/24","services":["tcp/443"]}]})");
  engine.container.runtime = "runc";
  ports.links[0].addresses = {IpAddress::parse("10.99.0.2").value(),
                              IpAddress::parse("fd99::2").value()};
  refused(arm("a1", "both"), 5, "the kernel that it is not");
  write("cgroups/freezer/docker/" + test::kContainerId + "/freezer.state", "FROZEN\n");
  const Report report = arm("a1", "both");
  EXPECT_EQ(report.outcome, Outcome::released) << report.reason;
}

TEST_F(PipelineTest, Step6WhatCannotBeRemovedFailsTheArm) {
  ports.errors["clean"] = kError;
  refused(arm(), 6, "it broke");
}

TEST_F(PipelineTest, Step7NotJoined) {
  endpoint().sandbox_key.clear();
  refused(arm(), 7, "not joined");
}

TEST_F(PipelineTest, Step7SandboxIsGone) {
  fs::remove(base / "sandbox");
  refused(arm(), 7, "sandbox of the endpoint");
}

TEST_F(PipelineTest, Step7AnotherSandbox) {
  fs::remove(base / "sandbox");
  fs::create_symlink(base / "netns/other", base / "sandbox");
  refused(arm(), 7, "not in the sandbox");
}

TEST_F(PipelineTest, Step7SecondLink) {
  ports.links.push_back(ports.links[0]);
  ports.links[1].name = InterfaceName::parse("eth1").value();
  refused(arm(), 7, "2 links besides lo");
}

TEST_F(PipelineTest, Step7LinksUnreadable) {
  ports.errors["sandbox_links"] = kError;
  refused(arm(), 7, "it broke");
}

TEST_F(PipelineTest, Step7NotOneVeth) {
  ports.differences["tie"] = {{"peer index", "7", "9"}};
  refused(arm(), 7, "peer index: expected '7', found '9'");
}

TEST_F(PipelineTest, Step7TheEngineSaysOtherwise) {
  const engine::Attachment good = engine.container.attachments[0];
  for (const auto change : {+[](engine::Attachment& a) { a.mac = "02:00:00:00:00:99"; },
                            +[](engine::Attachment& a) { a.address4 = "10.99.0.9"; },
                            +[](engine::Attachment& a) { a.address4 = ""; },
                            +[](engine::Attachment& a) { a.address6 = "fd99::9"; }}) {
    engine.container.attachments[0] = good;
    change(engine.container.attachments[0]);
    refused(arm(), 7, "the engine says MAC");
  }
}

TEST_F(PipelineTest, Step7AddressesUnderRunc) {
  if (::geteuid() != 0) GTEST_SKIP() << "policy files must be root's";
  policy("runc", R"({"version":1,"runtimes":["runc"],"allow":[
                    {"cidr":"160.79.104.0/24","services":["tcp/443"]}]})");
  engine.container.runtime = "runc";
  write("cgroups/freezer/docker/" + test::kContainerId + "/freezer.state", "FROZEN\n");
  refused(arm("a1", "runc"), 7, "lacks the endpoint's address");
}

TEST_F(PipelineTest, Step8CloseFails) {
  ports.errors["close 1"] = kError;
  refused(arm(), 8, "it broke");
}

TEST_F(PipelineTest, Step8ReadsBackOpen) {
  ports.reports["inspect 1"] = PortReport{PortState::inconsistent, {{"layer 1", "0", "3 rules"}}};
  refused(arm(), 8, "does not read back closed: layer 1");
}

TEST_F(PipelineTest, Step9PrepareFails) {
  ports.errors["prepare"] = kError;
  refused(arm(), 9, "it broke");
}

TEST_F(PipelineTest, Step9APolicyThatCoversTheHost) {
  if (::geteuid() != 0) GTEST_SKIP() << "policy files must be root's";
  policy("wide", R"({"version":1,"allow":[{"cidr":"160.79.104.0/24","services":["tcp/443"]}]})");
  ports.addresses.push_back(IpAddress::parse("160.79.104.7").value());
  refused(arm("a1", "wide"), 9, "160.79.104.7");
}

TEST_F(PipelineTest, Step9NamesThatDoNotResolve) {
  auto& resolution = ports.resolutions["default"];
  resolution.names.begin()->second.addresses.clear();
  refused(arm(), 9, resolution.names.begin()->first);
}

TEST_F(PipelineTest, Step9RebindingToTheHostLeavesNothing) {
  auto& resolved = ports.resolutions["default"].names.begin()->second;
  resolved.addresses.resize(1);
  resolved.addresses[0].address = IpAddress::parse("169.254.169.254").value();
  refused(arm(), 9, "do not resolve");
  resolved.addresses[0].address = IpAddress::parse("192.0.2.1").value();  // the host's own
  ports.calls.clear();
  refused(arm(), 9, "do not resolve");
}

TEST_F(PipelineTest, Step9ResolverFile) {
  const fs::path file = base / "engine/resolv.conf";
  fs::remove(file);
  refused(arm(), 9, "/resolv.conf");
  fs::create_symlink(base / "engine/daemon.json", file);
  refused(arm(), 9, "/resolv.conf");
  EXPECT_FALSE(fs::exists(base / "engine/daemon.json"));
  fs::remove(file);
  ASSERT_EQ(::mkfifo(file.c_str(), 0600), 0);
  refused(arm(), 9, "/resolv.conf");
  fs::remove(file);
  fs::create_directory(file);
  refused(arm(), 9, "/resolv.conf");
}

TEST_F(PipelineTest, Step9TheResolverFileIsWrittenInPlace) {
  write("engine/resolv.conf", std::string(4000, '#'));
  struct stat before {};
  ASSERT_EQ(::stat((base / "engine/resolv.conf").c_str(), &before), 0);
  ASSERT_EQ(arm().outcome, Outcome::released);
  struct stat after {};
  ASSERT_EQ(::stat((base / "engine/resolv.conf").c_str(), &after), 0);
  EXPECT_EQ(before.st_ino, after.st_ino);  // it is bind-mounted
  EXPECT_EQ(text_of("engine/resolv.conf"), policy::resolv_conf(policy::builtin()));
}

TEST_F(PipelineTest, Step10ReadsBackOtherwise) {
  ports.reports["inspect 2"] = PortReport{PortState::inconsistent, {{"FDB entry", "static", ""}}};
  refused(arm(), 10, "FDB entry");
}

TEST_F(PipelineTest, Step10NetworkChanged) {
  ports.differences["inspect_network 2"] = {{"bridge", "up", "down"}};
  refused(arm(), 10, "the network has changed");
}

TEST_F(PipelineTest, Step10ResolverFileChanged) {
  ports.on_call = [&](const std::string& call) {
    if (call == "inspect 2") write("engine/resolv.conf", "nameserver 6.6.6.6\n");
  };
  refused(arm(), 10, "resolver file does not read back");
}

// An FDB entry would weaken layer 2 of a port that stays closed.
TEST_F(PipelineTest, WhatStep9DidIsUndoneWhenALaterStepFails) {
  ports.reports["inspect 2"] = PortReport{PortState::inconsistent, {{"FDB entry", "static", ""}}};
  refused(arm(), 10, "FDB entry");
  EXPECT_FALSE(endpoint().prepared);
}

TEST_F(PipelineTest, TheGatewayIsAnnouncedOnceItIsReleased) {
  EXPECT_EQ(arm().outcome, Outcome::released);
  EXPECT_EQ(ports.calls.back(), "announce");
  ports.errors["announce"] = kError;
  const Report report = arm();
  EXPECT_EQ(report.outcome, Outcome::released);
  ASSERT_FALSE(report.notes.empty());
  EXPECT_NE(report.notes.back().find("not announced"), std::string::npos);
}

TEST_F(PipelineTest, Step11ReleaseFails) {
  ports.errors["release"] = kError;
  const Report report = arm();
  EXPECT_EQ(report.outcome, Outcome::refused);
  stopped_at(report, 11);
  // Whether the kernel took the batch may be unknown: it is closed again in any case.
  EXPECT_EQ(ports.calls.back(), "clean");
  EXPECT_FALSE(ports.open(endpoint_id()));
}

TEST_F(PipelineTest, Step12ReadsBackOtherwise) {
  ports.reports["inspect 3"] =
      PortReport{PortState::inconsistent, {{"layer 3, verdict map", "10.99.0.2", ""}}};
  undone(arm(), 12, "layer 3, verdict map");
}

TEST_F(PipelineTest, Step12ReadsBackClosed) {
  ports.reports["inspect 3"] = PortReport{PortState::closed, {}};
  undone(arm(), 12, "the port is closed");
}

TEST_F(PipelineTest, Step12Unreadable) {
  ports.errors["inspect 3"] = kError;
  undone(arm(), 12, "it broke");
}

TEST_F(PipelineTest, Step13AnotherEngine) {
  engine.on_identify = [&](int call) {
    if (call == 2) engine.identity.process.start_time = 2000;
  };
  undone(arm(), 13, "engine was restarted");
}

TEST_F(PipelineTest, Step13AnotherVersion) {
  engine.on_identify = [&](int call) {
    if (call == 2) engine.identity.api_version = "1.45";
  };
  undone(arm(), 13, "engine was restarted");
}

TEST_F(PipelineTest, Step13EngineSilent) {
  engine.on_identify = [&](int call) {
    if (call == 2) engine.identify_error = kError;
  };
  undone(arm(), 13, "it broke");
}

TEST_F(PipelineTest, Step13DaemonJsonChanged) {
  engine.on_identify = [&](int call) {
    if (call == 2) write("engine/daemon.json", R"({"live-restore":true})");
  };
  undone(arm(), 13, "daemon.json was changed");
}

// ---- races -----------------------------------------------------------------------------------

TEST_F(PipelineTest, UnpausedBeforeTheRelease) {
  engine.on_inspect = [&](int call) { engine.container.paused = call < 2; };
  refused(arm(), 11, "not paused");
}

TEST_F(PipelineTest, UnpausedAfterTheRelease) {
  engine.on_inspect = [&](int call) { engine.container.paused = call < 3; };
  undone(arm(), 12, "not paused");
}

TEST_F(PipelineTest, RestartedBeforeTheRelease) {
  engine.on_inspect = [&](int call) {
    if (call == 2) engine.container.started_at = "2026-01-02T03:04:06Z";
  };
  refused(arm(), 11, "restarted");
}

TEST_F(PipelineTest, AnotherProcessUnderTheSamePid) {
  ports.on_call = [&](const std::string& call) {
    if (call == "prepare 1") {
      process(test::kContainerPid, 9999, "container", "", "runsc-sandbox");
    }
  };
  refused(arm(), 11, "another one now");
}

TEST_F(PipelineTest, ProcessEndsAfterTheRelease) {
  ports.on_call = [&](const std::string& call) {
    if (call == "release 1") fs::remove_all(base / "proc" / std::to_string(test::kContainerPid));
  };
  undone(arm(), 12, "another one now");
}

TEST_F(PipelineTest, RestartPolicyChangedMeanwhile) {
  engine.on_inspect = [&](int call) {
    if (call == 2) engine.container.restart_policy = "always";
  };
  refused(arm(), 11, "--restart no");
}

TEST_F(PipelineTest, NetworkConnectedMeanwhile) {
  engine.on_inspect = [&](int call) {
    if (call == 3) engine.container.attachments.push_back({"bridge", "n", "e", "", "", ""});
  };
  undone(arm(), 12, "networks changed");
}

TEST_F(PipelineTest, ContainerIsGoneMeanwhile) {
  engine.on_inspect = [&](int call) {
    if (call == 2) engine.container.id = std::string(64, 'e');
  };
  refused(arm(), 11, "No such container");
}

TEST_F(PipelineTest, EndpointIsGoneAfterTheRelease) {
  ports.on_call = [&](const std::string& call) {
    if (call == "inspect 3") {
      ports.endpoints.clear();
      ports.opened.clear();
      ports.errors["inspect 3"] = Error{"inspect", ENOENT, std::nullopt, "not known"};
    }
  };
  const Report report = arm();
  EXPECT_EQ(report.outcome, Outcome::undone);
  EXPECT_EQ(report.reason.find("COULD NOT"), std::string::npos);
}

TEST_F(PipelineTest, ClosingAgainFailsOnce) {
  ports.reports["inspect 3"] = PortReport{PortState::inconsistent, {}};
  ports.errors["clean 2"] = kError;  // the first is step 6's
  undone(arm(), 12, "does not read back");
  EXPECT_EQ(ports.count("clean"), 3U);
}

TEST_F(PipelineTest, ClosingAgainFails) {
  ports.reports["inspect 3"] = PortReport{PortState::inconsistent, {}};
  ports.errors["clean 2"] = ports.errors["clean 3"] = kError;
  const Report report = arm();
  EXPECT_EQ(report.outcome, Outcome::undone);
  EXPECT_NE(report.reason.find("COULD NOT BE READ BACK CLOSED"), std::string::npos);
  EXPECT_NE(report.reason.find("remove the container now"), std::string::npos);
}

TEST_F(PipelineTest, ReleaseAndClosingFail) {
  ports.errors["release"] = ports.errors["clean 2"] = ports.errors["clean 3"] = kError;
  const Report report = arm();
  EXPECT_EQ(report.outcome, Outcome::undone) << "it may be open: exit 1 would say that it is not";
  EXPECT_NE(report.reason.find("COULD NOT BE READ BACK CLOSED"), std::string::npos);
}

// A refresh between step 9 and 11 took an address away: the release must not bring it back.
TEST_F(PipelineTest, ARefreshWasFaster) {
  ports.on_call = [&](const std::string& call) {
    if (call != "inspect 2") return;
    for (auto& [name, resolved] : ports.resolutions["default"].names) {
      resolved.addresses.resize(1);
      resolved.addresses[0].address = IpAddress::parse("160.79.104.77").value();
    }
  };
  ASSERT_EQ(arm().outcome, Outcome::released);
  const auto allows = [&](const char* address) {
    const auto& list = ports.opened.at(endpoint_id()).v4.allow;
    return std::any_of(list.begin(), list.end(), [&](const auto& entry) {
      return entry.addresses.first.to_string() == address;
    });
  };
  EXPECT_TRUE(allows("160.79.104.77"));
  EXPECT_FALSE(allows("160.79.104.10"));
}

TEST_F(PipelineTest, ThePolicyFileWasChangedMeanwhile) {
  if (::geteuid() != 0) GTEST_SKIP() << "policy files must be root's";
  ports.on_call = [&](const std::string& call) {
    if (call == "prepare 1") {
      policy("default", R"({"version":1,"allow":[
                            {"cidr":"160.79.104.0/24","services":["tcp/443"]}]})");
    }
  };
  refused(arm(), 11, "was changed meanwhile");
}

// ---- what an earlier arm left ------------------------------------------------------------------

TEST_F(PipelineTest, ArmingAgainReleasesAgain) {
  ASSERT_EQ(arm().outcome, Outcome::released);
  ports.calls.clear();
  bool was_open_between = true;
  ports.on_call = [&](const std::string& call) {
    if (call == "prepare 1") was_open_between = ports.open(endpoint_id());
  };
  ASSERT_EQ(arm().outcome, Outcome::released);
  EXPECT_FALSE(was_open_between);
}

TEST_F(PipelineTest, ARefusedArmClosesTheEarlierRelease) {
  ASSERT_EQ(arm().outcome, Outcome::released);
  engine.container.paused = false;
  const Report report = arm();
  EXPECT_EQ(report.outcome, Outcome::undone) << "exit 1 would say that it was closed all the time";
  EXPECT_NE(report.reason.find("not paused"), std::string::npos);
  EXPECT_NE(report.reason.find("is undone"), std::string::npos);
  EXPECT_FALSE(ports.open(endpoint_id()));
}

TEST_F(PipelineTest, ARefusedArmClosesTheEarlierReleaseWithoutTheEngine) {
  ASSERT_EQ(arm().outcome, Outcome::released);
  engine.inspect_error = engine.identify_error = kError;
  EXPECT_EQ(arm("b2").outcome, Outcome::refused);
  EXPECT_TRUE(ports.open(endpoint_id()));
  EXPECT_EQ(arm(test::kContainerId.substr(0, 12)).outcome, Outcome::undone);
  EXPECT_FALSE(ports.open(endpoint_id()));
}

TEST_F(PipelineTest, ARefusedArmThatCannotCloseSaysSo) {
  ASSERT_EQ(arm().outcome, Outcome::released);
  engine.container.paused = false;
  ports.errors["close"] = kError;
  const Report report = arm();
  EXPECT_EQ(report.outcome, Outcome::undone);
  EXPECT_NE(report.reason.find("COULD NOT BE READ BACK CLOSED"), std::string::npos);
}

TEST_F(PipelineTest, WhatAnEarlierContainerOfThatNameLeftIsRemoved) {
  EndpointRecord stale = endpoint();
  stale.id = EndpointId::parse(std::string(64, 'd')).value();
  stale.release = Release{std::string(64, 'e'), "a1", {4999, 1}, "default", "2026"};
  ports.endpoints[stale.id] = stale;
  ports.opened[stale.id] = {};
  const Report report = arm();
  ASSERT_EQ(report.outcome, Outcome::released);
  EXPECT_FALSE(ports.open(stale.id));
  EXPECT_NE(report.steps[5].evidence.find("agpdddddddddd"), std::string::npos);
}

TEST_F(PipelineTest, AContainerThatWasRenamedKeepsItsRelease) {
  EndpointRecord renamed = endpoint();
  renamed.id = EndpointId::parse(std::string(64, 'd')).value();
  renamed.release = Release{std::string(64, 'e'), "a1", {4999, 77}, "default", "2026"};
  process(4999, 77, "other", "", "still-there");
  ports.endpoints[renamed.id] = renamed;
  ports.opened[renamed.id] = {};
  ASSERT_EQ(arm().outcome, Outcome::released);
  EXPECT_TRUE(ports.open(renamed.id));
}

// ---- policies ----------------------------------------------------------------------------------

TEST_F(PipelineTest, RequestBeforeEndpointBeforeNetwork) {
  if (::geteuid() != 0) GTEST_SKIP() << "policy files must be root's";
  for (const char* name : {"request", "endpoint", "network"}) {
    policy(name, R"({"version":1,"allow":[{"cidr":"160.79.104.0/24","services":["tcp/443"]}]})");
  }
  ports.known_networks.begin()->second.policy = "network";
  EXPECT_EQ(arm().policy, "network");
  endpoint().policy = "endpoint";
  EXPECT_EQ(arm().policy, "endpoint");
  const Report report = arm("a1", "request");
  EXPECT_EQ(report.policy, "request");
  EXPECT_EQ(report.outcome, Outcome::released) << report.reason;
  EXPECT_EQ(endpoint().release->policy, "request");
  EXPECT_EQ(report.policy_revision.size(), 12U);
}

TEST_F(PipelineTest, WithoutResolversTheFileIsLeftAlone) {
  if (::geteuid() != 0) GTEST_SKIP() << "policy files must be root's";
  policy("bare", R"({"version":1,"allow":[{"cidr":"160.79.104.0/24","services":["tcp/443"]}]})");
  ASSERT_EQ(arm("a1", "bare").outcome, Outcome::released);
  EXPECT_EQ(text_of("engine/resolv.conf"), "nameserver 127.0.0.11\n");
}

TEST_F(PipelineTest, AddedCapabilitiesAreNoted) {
  engine.container.capabilities_added = {"CAP_NET_ADMIN"};
  const Report report = arm();
  ASSERT_EQ(report.outcome, Outcome::released);
  ASSERT_EQ(report.notes.size(), 1U);
  EXPECT_NE(report.notes[0].find("CAP_NET_ADMIN"), std::string::npos);
}

// ---- audit and report --------------------------------------------------------------------------

TEST_F(PipelineTest, EveryArmIsOneLineOfTheAuditFile) {
  ASSERT_EQ(arm().outcome, Outcome::released);
  engine.container.name = "has \"quotes\"\n and a new line";
  arm("nobody");
  const auto lines = audit_lines();
  ASSERT_EQ(lines.size(), 2U);
  const auto released = nlohmann::json::parse(lines[0]);
  EXPECT_EQ(released["outcome"], "released");
  EXPECT_EQ(released["exit"], 0);
  EXPECT_EQ(released["code"], "");
  EXPECT_EQ(released["steps"].size(), 13U);
  const auto refusal = nlohmann::json::parse(lines[1]);
  EXPECT_EQ(refusal["outcome"], "refused");
  EXPECT_EQ(refusal["code"], "GATED_UNARMED");
  EXPECT_EQ(refusal["exit"], 1);
  EXPECT_EQ(refusal["steps"][3]["outcome"], "failed");
  EXPECT_EQ(refusal["steps"][4]["outcome"], "skipped");
  struct stat status {};
  ASSERT_EQ(::stat(options.audit_file.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777 & ~0640U, 0U);
}

TEST_F(PipelineTest, NoAuditFileIsFine) {
  options.audit_file.clear();
  EXPECT_EQ(arm().outcome, Outcome::released);
}

TEST_F(PipelineTest, ExitCodes) {
  EXPECT_EQ(exit_code(Outcome::released), 0);
  EXPECT_EQ(exit_code(Outcome::closed), 0);
  EXPECT_EQ(exit_code(Outcome::refused), 1);
  EXPECT_EQ(exit_code(Outcome::undone), 2);
  EXPECT_EQ(exit_code(Outcome::inconsistent), 3);
}

// ---- one at a time -----------------------------------------------------------------------------

// Step 2 takes a while and then fails.
class SlowEngine : public engine::Api {
 public:
  explicit SlowEngine(const engine::Container& container) : container_(container) {}
  Result<engine::Identity> identify() override {
    const int now = ++inside_;
    int before = most;
    while (before < now && !most.compare_exchange_weak(before, now)) {
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    --inside_;
    return tl::unexpected(kError);
  }
  Result<engine::Container> inspect(const std::string& reference) override {
    engine::Container out = container_;
    // By name or by id it is the same container; others have ids of their own.
    if (reference != container_.name && reference != container_.id) out.id = reference;
    return out;
  }
  Result<engine::Info> info() override { return tl::unexpected(kError); }
  Result<std::vector<std::string>> network_endpoints(const std::string& /*id*/) override {
    return tl::unexpected(kError);
  }
  Status events(std::chrono::system_clock::time_point /*since*/,
                engine::EventSink& /*sink*/) override {
    return tl::unexpected(kError);
  }
  void interrupt() override {}
  std::atomic<int> most = 0;

 private:
  const engine::Container container_;
  std::atomic<int> inside_ = 0;
};

TEST_F(PipelineTest, ArmsOfOneContainerAreOneAfterTheOther) {
  const auto at_once = [&](const std::vector<std::string>& containers) {
    SlowEngine slow(engine.container);
    Pipeline shared(options, ports, slow);
    std::vector<std::thread> threads;
    for (const auto& container : containers) {
      threads.emplace_back([&shared, container] {
        EXPECT_EQ(shared.arm({container, std::nullopt}).outcome, Outcome::refused);
      });
    }
    for (auto& thread : threads) thread.join();
    return slow.most.load();
  };
  EXPECT_EQ(at_once({"a1", test::kContainerId, "a1", test::kContainerId}), 1);
  EXPECT_GT(at_once({"a1", "b2", "c3", "d4"}), 1);
}

}  // namespace
}  // namespace agentgate::arm
