// SPDX-License-Identifier: GPL-2.0-or-later
//
// disarm, check, refresh and doctor.
#include <arpa/inet.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <utility>

#include <nlohmann/json.hpp>

#include "tests/unit/arm/world.h"

namespace agentgate::arm {
namespace {

namespace fs = std::filesystem;
using netdriver::PortReport;
using netdriver::PortState;

const Error kDown{"ask", ECONNREFUSED, std::nullopt, "the engine is down"};

bool mentions(const std::vector<std::string>& list, const std::string& words) {
  return std::any_of(list.begin(), list.end(),
                     [&](const std::string& one) { return one.find(words) != std::string::npos; });
}

// ---- precheck ----------------------------------------------------------------------------------

class PrecheckTest : public test::World {
 protected:
  Report ask(std::optional<std::string> policy, std::optional<std::string> network) {
    return pipeline().precheck({"a1", std::move(policy), std::move(network)});
  }
};

TEST_F(PrecheckTest, WhatCouldBeArmedIsNotRefused) {
  engine.container.running = false;
  engine.container.paused = false;
  engine.container.pid = 0;
  engine.container.attachments[0].endpoint_id.clear();
  const Report report = ask(std::nullopt, test::kNetworkId);
  EXPECT_EQ(report.outcome, Outcome::closed) << report.reason;
  EXPECT_EQ(report.operation, "precheck");
  EXPECT_EQ(report.policy, ports.known_networks.begin()->second.policy);
  EXPECT_TRUE(report.steps.empty());
  EXPECT_EQ(ports.count("release") + ports.count("close") + ports.count("clean"), 0U);
}

TEST_F(PrecheckTest, WhatAnArmWouldRefuseIsRefused) {
  const std::string network = test::kNetworkId;
  engine.container.privileged = true;
  Report report = ask(std::nullopt, network);
  EXPECT_EQ(report.outcome, Outcome::refused);
  EXPECT_NE(report.reason.find("privileged"), std::string::npos) << report.reason;
  engine.container.privileged = false;
  engine.container.runtime = "crun";
  report = ask(std::nullopt, network);
  EXPECT_EQ(report.outcome, Outcome::refused);
  EXPECT_NE(report.reason.find("crun"), std::string::npos) << report.reason;
}

TEST_F(PrecheckTest, WithoutAPolicyNothingCanBeSaid) {
  EXPECT_EQ(ask(std::nullopt, std::nullopt).outcome, Outcome::refused);
  EXPECT_EQ(ask(std::nullopt, std::string(64, '7')).outcome, Outcome::refused);
  EXPECT_EQ(ask("absent", std::nullopt).outcome, Outcome::refused);
}

// ---- disarm ------------------------------------------------------------------------------------

class DisarmTest : public test::World {
 protected:
  void SetUp() override {
    World::SetUp();
    ASSERT_EQ(arm().outcome, Outcome::released);
    ports.calls.clear();
  }
  void closes(const std::string& container) {
    const Report report = pipeline().disarm(container);
    EXPECT_EQ(report.outcome, Outcome::closed) << report.reason;
    EXPECT_EQ(report.operation, "disarm");
    EXPECT_FALSE(ports.open(endpoint_id()));
    EXPECT_GE(ports.count("clean"), 1U);
  }
};

TEST_F(DisarmTest, ByName) {
  closes("a1");
  EXPECT_FALSE(endpoint().prepared);  // FDB entry and neighbours are gone too
}
TEST_F(DisarmTest, ById) { closes(test::kContainerId); }
TEST_F(DisarmTest, ByShortId) { closes(test::kContainerId.substr(0, 12)); }

TEST_F(DisarmTest, Twice) {
  closes("a1");
  closes("a1");
}

TEST_F(DisarmTest, WithoutTheEngine) {
  engine.inspect_error = kDown;
  closes("a1");
}

TEST_F(DisarmTest, WithoutTheEngineByShortId) {
  engine.inspect_error = kDown;
  closes(test::kContainerId.substr(0, 12));
}

TEST_F(DisarmTest, ShortPrefixesMeanNothing) {
  engine.inspect_error = kDown;
  const Report report = pipeline().disarm("ccc");
  EXPECT_EQ(report.outcome, Outcome::refused);
  EXPECT_TRUE(ports.open(endpoint_id()));
}

TEST_F(DisarmTest, AContainerThatIsGone) {
  engine.container.name = "other";
  engine.container.id = std::string(64, 'e');
  closes("a1");
}

TEST_F(DisarmTest, AContainerThatStopped) {
  engine.container.running = engine.container.paused = false;
  engine.container.attachments[0].endpoint_id = "";
  closes("a1");
  const Report again = pipeline().disarm("a1");
  EXPECT_EQ(again.outcome, Outcome::closed);
  EXPECT_TRUE(mentions(again.notes, "not running"));
}

TEST_F(DisarmTest, AfterARename) {
  engine.container.name = "new-name";
  closes("new-name");
}

TEST_F(DisarmTest, TheOldNameOfAnotherMeansNobodyElse) {
  // a1 was renamed and runs on; a new a1 was made.
  EndpointRecord renamed = endpoint();
  renamed.id = EndpointId::parse(std::string(64, 'd')).value();
  renamed.release = Release{std::string(64, 'e'), "a1", {4999, 77}, "default", "2026"};
  process(4999, 77, "other", "", "still-there");
  ports.endpoints[renamed.id] = renamed;
  ports.opened[renamed.id] = {};
  closes("a1");
  EXPECT_TRUE(ports.open(renamed.id));
}

TEST_F(DisarmTest, Unknown) {
  const Report report = pipeline().disarm("nobody");
  EXPECT_EQ(report.outcome, Outcome::refused);
  EXPECT_NE(report.reason.find("there is no container 'nobody'"), std::string::npos);
  EXPECT_TRUE(ports.open(endpoint_id()));
}

TEST_F(DisarmTest, OnAnotherNetwork) {
  ports.endpoints.clear();
  const Report report = pipeline().disarm("a1");
  EXPECT_EQ(report.outcome, Outcome::refused);
  EXPECT_NE(report.reason.find("not on an agentgate network"), std::string::npos);
}

TEST_F(DisarmTest, FailingIsSaidLoudly) {
  ports.errors["clean"] = Error{"close", EIO, std::nullopt, "it broke"};
  const Report report = pipeline().disarm("a1");
  EXPECT_NE(exit_code(report.outcome), 0);
  EXPECT_NE(report.reason.find("could not be closed"), std::string::npos);
  EXPECT_NE(report.reason.find("it broke"), std::string::npos);
  ASSERT_EQ(report.steps.size(), 1U);
  EXPECT_EQ(report.steps[0].outcome, StepOutcome::failed);
}

TEST_F(DisarmTest, IsAudited) {
  closes("a1");
  const auto lines = audit_lines();
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_EQ(nlohmann::json::parse(lines[1])["operation"], "disarm");
  EXPECT_EQ(nlohmann::json::parse(lines[1])["outcome"], "closed");
}

// ---- check -------------------------------------------------------------------------------------

class CheckTest : public test::World {
 protected:
  // check never changes anything.
  Report check(const std::string& container = "a1") {
    ports.calls.clear();
    Report report = pipeline().check(container);
    for (const char* change :
         {"close", "clean", "prepare", "release", "update_policy", "save_resolution"}) {
      EXPECT_EQ(ports.count(change), 0U) << change;
    }
    return report;
  }
  void inconsistent(const std::string& words) {
    const Report report = check();
    EXPECT_EQ(report.outcome, Outcome::inconsistent);
    EXPECT_EQ(exit_code(report.outcome), 3);
    EXPECT_TRUE(mentions(report.differences, words))
        << (report.differences.empty() ? "no differences" : report.differences[0]);
    EXPECT_FALSE(report.reason.empty());
  }
};

TEST_F(CheckTest, Closed) {
  const Report report = check();
  EXPECT_EQ(report.outcome, Outcome::closed) << report.reason;
  EXPECT_EQ(report.port, "agpbbbbbbbbbb");
  EXPECT_EQ(report.policy, "default");
}

TEST_F(CheckTest, ReleasedAndClosedAgain) {
  ASSERT_EQ(arm().outcome, Outcome::released);
  engine.container.paused = false;  // as it shall be afterwards
  const Report report = check();
  EXPECT_EQ(report.outcome, Outcome::released)
      << (report.differences.empty() ? report.reason : report.differences[0]);
  EXPECT_TRUE(report.notes.empty()) << report.notes[0];
  ASSERT_EQ(pipeline().disarm("a1").outcome, Outcome::closed);
  EXPECT_EQ(check().outcome, Outcome::closed);
  EXPECT_EQ(audit_lines().size(), 2U) << "a check is no deed";
}

TEST_F(CheckTest, WithoutTheEngine) {
  ASSERT_EQ(arm().outcome, Outcome::released);
  engine.inspect_error = kDown;
  const Report report = check();
  EXPECT_EQ(report.outcome, Outcome::released) << report.reason;
  EXPECT_TRUE(mentions(report.notes, "the engine is down"));
  EXPECT_EQ(report.container_id, test::kContainerId);
}

TEST_F(CheckTest, Unknown) {
  const Report report = check("nobody");
  EXPECT_EQ(report.outcome, Outcome::refused);
  EXPECT_NE(report.reason.find("'nobody'"), std::string::npos);
}

TEST_F(CheckTest, DifferencesOfThePort) {
  ports.reports["inspect"] = PortReport{PortState::inconsistent, {{"flag locked", "on", "off"}}};
  inconsistent("flag locked: expected 'on', found 'off'");
}

TEST_F(CheckTest, DifferencesOfTheNetwork) {
  ports.differences["inspect_network"] = {{"bridge", "up", "down"}};
  inconsistent("bridge: expected 'up', found 'down'");
}

TEST_F(CheckTest, EntriesOfOthersOnThePort) {
  ports.differences["foreign_entries"] = {{"port p, FDB", "", "02:00:00:00:99:99"}};
  inconsistent("port p, FDB: expected '', found '02:00:00:00:99:99'");
}

TEST_F(CheckTest, Unreadable) {
  for (const char* call : {"inspect", "inspect_network", "foreign_entries"}) {
    ports.errors = {{call, Error{"read", EIO, std::nullopt, "it broke"}}};
    const Report report = check();
    EXPECT_EQ(report.outcome, Outcome::inconsistent) << call;
    EXPECT_NE(report.reason.find("it broke"), std::string::npos) << report.reason;
  }
}

TEST_F(CheckTest, ReleasedByRecordOnly) {
  ASSERT_EQ(arm().outcome, Outcome::released);
  ports.reports["inspect"] = PortReport{PortState::closed, {}};
  inconsistent("closed in the kernel");
}

TEST_F(CheckTest, Premises) {
  ASSERT_EQ(arm().outcome, Outcome::released);
  const engine::Container good = engine.container;
  engine.container.restart_policy = "always";
  inconsistent("--restart no");
  engine.container = good;
  engine.container.attachments.push_back({"bridge", "n", "e", "", "", ""});
  inconsistent("2 networks");
  engine.container = good;
  process(4300, 1, "container", "0::/docker/" + std::string(64, 'd') + "\n", "spy");
  inconsistent("process 4300 (spy)");
  fs::remove_all(base / "proc/4300");
  ports.links.push_back(ports.links[0]);
  inconsistent("2 links besides lo");
  ports.links.pop_back();
  process(test::kContainerPid, 9999, "container", "", "another");
  inconsistent("another process");
  fs::remove_all(base / "proc" / std::to_string(test::kContainerPid));
  inconsistent("another process");
}

TEST_F(CheckTest, NamesThatDrifted) {
  ASSERT_EQ(arm().outcome, Outcome::released);
  auto& names = ports.resolutions["default"].names;
  names["left.example.com"] = names.begin()->second;
  names.erase("api.anthropic.com");
  names.at("platform.claude.com").error = "SERVFAIL";
  const Report report = check();
  EXPECT_EQ(report.outcome, Outcome::released);
  EXPECT_TRUE(mentions(report.notes, "left.example.com has left the file"));
  EXPECT_TRUE(mentions(report.notes, "api.anthropic.com is not resolved yet"));
  EXPECT_TRUE(mentions(report.notes, "SERVFAIL"));
  EXPECT_TRUE(mentions(report.notes, "agentgate refresh"));
}

TEST_F(CheckTest, APolicyFileThatIsGone) {
  ASSERT_EQ(arm().outcome, Outcome::released);
  endpoint().release->policy = "gone";
  EXPECT_TRUE(mentions(check().notes, "gone"));
}

// ---- refresh -----------------------------------------------------------------------------------

// Answers A for the names it knows, nothing for AAAA, NXDOMAIN for the rest, in a network
// namespace of its own.
class RefreshTest : public test::World {
 protected:
  void SetUp() override {
    World::SetUp();
    if (::geteuid() != 0) GTEST_SKIP() << "needs root for a network namespace";
    ASSERT_EQ(::unshare(CLONE_NEWNET), 0);  // gtest runs each test in this thread; a new one each
    const int control = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    ifreq request{};
    std::strcpy(request.ifr_name, "lo");
    request.ifr_flags = IFF_UP | IFF_RUNNING;
    ASSERT_EQ(::ioctl(control, SIOCSIFFLAGS, &request), 0);
    ::close(control);
    server_ = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ASSERT_EQ(::bind(server_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    socklen_t length = sizeof address;
    ASSERT_EQ(::getsockname(server_, reinterpret_cast<sockaddr*>(&address), &length), 0);
    options.resolvers = {"127.0.0.1:" + std::to_string(ntohs(address.sin_port))};
    thread_ = std::thread([this] { serve(); });

    policy("web", R"({"version":1,"grace_seconds":3600,"allow":[
                      {"name":"one.example.net","services":["tcp/443"]},
                      {"name":"two.example.net","services":["tcp/443"]}]})");
    ports.known_networks.begin()->second.policy = "web";
    answer("one.example.net", {"160.79.104.1"});
    answer("two.example.net", {"160.79.104.2"});
  }
  void TearDown() override {
    done_ = true;
    if (thread_.joinable()) thread_.join();
    if (server_ >= 0) ::close(server_);
    World::TearDown();
  }
  void answer(const std::string& name, const std::vector<std::string>& addresses) {
    const std::lock_guard lock(mutex_);
    answers_[name] = addresses;
  }
  void forget(const std::string& name) {
    const std::lock_guard lock(mutex_);
    answers_.erase(name);
  }
  Refreshed refresh_one(const std::optional<std::string>& name = std::nullopt) {
    const auto all = pipeline().refresh(name);
    EXPECT_EQ(all.size(), 1U);
    return all.empty() ? Refreshed() : all[0];
  }
  static std::vector<std::string> allowed(const netdriver::PolicySpec& spec) {
    std::vector<std::string> out;
    for (const auto& entry : spec.v4.allow) {
      out.push_back(entry.addresses.first.to_string() + "-" + entry.addresses.last.to_string());
    }
    return out;
  }

 private:
  void serve() {
    std::array<char, 512> packet{};
    while (!done_) {
      pollfd waiting{server_, POLLIN, 0};
      if (::poll(&waiting, 1, 20) <= 0) continue;
      sockaddr_in from{};
      socklen_t length = sizeof from;
      const ssize_t size = ::recvfrom(server_, packet.data(), packet.size(), 0,
                                      reinterpret_cast<sockaddr*>(&from), &length);
      if (size < 17) continue;
      std::string name;
      std::size_t at = 12;
      while (packet[at] != 0) {
        if (!name.empty()) name += '.';
        name.append(&packet[at + 1], static_cast<std::size_t>(packet[at]));
        at += static_cast<std::size_t>(packet[at]) + 1;
      }
      const bool is_a = packet[at + 2] == 1;
      const std::string question(packet.data() + 12, at + 5 - 12);
      std::vector<std::string> addresses;
      bool known = false;
      {
        const std::lock_guard lock(mutex_);
        const auto found = answers_.find(name);
        known = found != answers_.end();
        if (known && is_a) addresses = found->second;
      }
      std::string out(packet.data(), 2);
      out += static_cast<char>(0x81);
      out += static_cast<char>(known ? 0x80 : 0x83);
      out += std::string("\0\1\0", 3) + static_cast<char>(addresses.size()) +
             std::string("\0\0\0\0", 4) + question;
      for (const auto& text : addresses) {
        in_addr address{};
        ::inet_pton(AF_INET, text.c_str(), &address);
        out += std::string("\xc0\x0c\0\1\0\1\0\0\0\x3c\0\4", 12) +
               std::string(reinterpret_cast<const char*>(&address), 4);
      }
      ::sendto(server_, out.data(), out.size(), 0, reinterpret_cast<sockaddr*>(&from), length);
    }
  }

  int server_ = -1;
  std::thread thread_;
  std::atomic<bool> done_ = false;
  std::mutex mutex_;
  std::map<std::string, std::vector<std::string>> answers_;
};

TEST_F(RefreshTest, AnArmResolvesWhatIsNotKnown) {
  const Report report = arm();
  ASSERT_EQ(report.outcome, Outcome::released) << report.reason;
  EXPECT_EQ(allowed(ports.opened.at(endpoint_id())),
            std::vector<std::string>{"160.79.104.1-160.79.104.2"});
  EXPECT_EQ(ports.count("save_resolution"), 1U);
  ports.calls.clear();
  ASSERT_EQ(arm().outcome, Outcome::released);
  EXPECT_EQ(ports.count("save_resolution"), 0U) << "young enough";
}

TEST_F(RefreshTest, AnArmFailsOnANameThatDoesNotResolve) {
  forget("two.example.net");
  const Report report = arm();
  EXPECT_EQ(report.outcome, Outcome::refused);
  EXPECT_NE(report.reason.find("two.example.net"), std::string::npos);
  EXPECT_EQ(report.reason.find("one.example.net"), std::string::npos);
  EXPECT_FALSE(ports.open(endpoint_id()));
}

TEST_F(RefreshTest, KeepsWhatRotatedOutAndAddsWhatIsNew) {
  ASSERT_EQ(arm().outcome, Outcome::released);
  answer("one.example.net", {"160.79.104.11"});
  const Refreshed refreshed = refresh_one();
  EXPECT_TRUE(refreshed.ok) << refreshed.error;
  EXPECT_EQ(refreshed.policy, "web");
  EXPECT_EQ(refreshed.ports, 1U);
  EXPECT_EQ(refreshed.revision.size(), 12U);
  EXPECT_EQ(refreshed.added, std::vector<std::string>{"one.example.net 160.79.104.11"});
  EXPECT_EQ(refreshed.kept, std::vector<std::string>{"one.example.net 160.79.104.1"});
  EXPECT_TRUE(refreshed.removed.empty());
  ASSERT_EQ(ports.updates.size(), 1U);
  EXPECT_EQ(allowed(ports.updates[0]),
            (std::vector<std::string>{"160.79.104.1-160.79.104.2", "160.79.104.11-160.79.104.11"}));
}

TEST_F(RefreshTest, DropsWhatIsPastItsGrace) {
  ASSERT_EQ(arm().outcome, Outcome::released);
  for (auto& [name, resolved] : ports.resolutions["web"].names) {
    for (auto& address : resolved.addresses) address.last_seen -= std::chrono::hours(2);
  }
  answer("one.example.net", {"160.79.104.11"});
  const Refreshed refreshed = refresh_one();
  EXPECT_EQ(refreshed.removed, std::vector<std::string>{"one.example.net 160.79.104.1"});
  EXPECT_EQ(allowed(ports.updates.back()),
            (std::vector<std::string>{"160.79.104.2-160.79.104.2", "160.79.104.11-160.79.104.11"}));
}

TEST_F(RefreshTest, DropsAtOnceWhatLeftTheFile) {
  ASSERT_EQ(arm().outcome, Outcome::released);
  policy("web", R"({"version":1,"allow":[{"name":"two.example.net","services":["tcp/443"]}]})");
  const Refreshed refreshed = refresh_one();
  EXPECT_TRUE(refreshed.ok) << refreshed.error;
  EXPECT_EQ(refreshed.removed, std::vector<std::string>{"one.example.net 160.79.104.1"});
  EXPECT_EQ(allowed(ports.updates.back()), std::vector<std::string>{"160.79.104.2-160.79.104.2"});
  EXPECT_EQ(ports.resolutions["web"].names.size(), 1U);
}

TEST_F(RefreshTest, KeepsTheLastGoodAddressesOfNamesThatFail) {
  ASSERT_EQ(arm().outcome, Outcome::released);
  forget("one.example.net");
  forget("two.example.net");
  const Refreshed refreshed = refresh_one();
  EXPECT_FALSE(refreshed.ok);
  EXPECT_NE(refreshed.error.find("one.example.net"), std::string::npos);
  EXPECT_NE(refreshed.error.find("last addresses stay"), std::string::npos);
  EXPECT_EQ(refreshed.kept.size(), 2U);
  EXPECT_TRUE(refreshed.removed.empty());
  EXPECT_EQ(allowed(ports.updates.back()), std::vector<std::string>{"160.79.104.1-160.79.104.2"});
}

TEST_F(RefreshTest, ABrokenFileChangesNothing) {
  ASSERT_EQ(arm().outcome, Outcome::released);
  policy("web", "{");
  const Refreshed refreshed = refresh_one();
  EXPECT_FALSE(refreshed.ok);
  EXPECT_NE(refreshed.error.find("stays as it is"), std::string::npos);
  EXPECT_TRUE(ports.updates.empty());
}

TEST_F(RefreshTest, AFileThatChangesMeanwhileChangesNothing) {
  ASSERT_EQ(arm().outcome, Outcome::released);
  bool changed = false;
  ports.on_call = [&](const std::string& call) {
    if (call.rfind("host_addresses", 0) != 0 || changed) return;
    changed = true;
    policy("web", R"({"version":1,"allow":[{"name":"two.example.net","services":["tcp/443"]}]})");
  };
  const Refreshed refreshed = refresh_one();
  EXPECT_FALSE(refreshed.ok);
  EXPECT_NE(refreshed.error.find("changed meanwhile"), std::string::npos);
  EXPECT_TRUE(ports.updates.empty());
  EXPECT_TRUE(refresh_one().ok);
}

TEST_F(RefreshTest, AKernelThatRefusesIsReported) {
  ASSERT_EQ(arm().outcome, Outcome::released);
  ports.errors["update_policy"] = Error{"update", EIO, std::nullopt, "it broke"};
  const auto before = ports.resolutions["web"];
  answer("one.example.net", {"160.79.104.11"});
  const Refreshed refreshed = refresh_one();
  EXPECT_FALSE(refreshed.ok);
  EXPECT_NE(refreshed.error.find("it broke"), std::string::npos);
  EXPECT_TRUE(refreshed.added.empty()) << "nothing was added";
  EXPECT_EQ(ports.resolutions["web"], before);
}

TEST_F(RefreshTest, OnlyWhatIsInUseOrNamed) {
  EXPECT_TRUE(pipeline().refresh(std::nullopt).empty());
  const Refreshed named = refresh_one("web");
  EXPECT_TRUE(named.ok) << named.error;
  EXPECT_EQ(named.ports, 0U);
  const Refreshed missing = refresh_one("nothing");
  EXPECT_FALSE(missing.ok);
  EXPECT_NE(missing.error.find("nothing"), std::string::npos);
}

// ---- doctor, status ----------------------------------------------------------------------------

class DoctorTest : public test::World {
 protected:
  Finding finding(const std::string& check) {
    for (const auto& one : pipeline().doctor()) {
      if (one.check == check) return one;
    }
    ADD_FAILURE() << "no finding " << check;
    return {};
  }
};

TEST_F(DoctorTest, NothingIsMissing) {
  pipeline().guard_seen({true, utc_now(), "", 0, 0, {}});
  for (const auto& one : pipeline().doctor()) {
    if (one.check == "firewall.iptables") continue;  // of the machine that runs the test
    EXPECT_EQ(one.outcome, "ok") << one.check << ": " << one.seen;
    EXPECT_TRUE(one.mend.empty()) << one.check;
  }
  for (const char* change : {"close", "clean", "prepare", "release", "update_policy"}) {
    EXPECT_EQ(ports.count(change), 0U);
  }
}

TEST_F(DoctorTest, EachThingThatIsMissing) {
  const auto missing = [&](const std::string& check, const std::string& outcome,
                           const std::string& mend) {
    const Finding one = finding(check);
    EXPECT_EQ(one.outcome, outcome) << check;
    EXPECT_NE(one.mend.find(mend), std::string::npos) << check << ": " << one.mend;
  };
  ports.features = {};
  missing("kernel.owner_persist", "warning", "6.9");
  missing("kernel.netdev_egress", "missing", "5.16");
  missing("kernel.bridge_locked", "missing", "5.16");
  const auto endpoints = std::exchange(ports.endpoints, {});
  EXPECT_EQ(finding("kernel.bridge_locked").outcome, "ok");  // no port has shown it yet
  ports.endpoints = endpoints;
  write("proc/sys/net/ipv4/ip_forward", "0\n");
  write("proc/sys/net/ipv6/conf/all/forwarding", "0\n");
  missing("forwarding.ipv4", "missing", "ip_forward=1");
  missing("forwarding.ipv6", "missing", "forwarding=1");
  ports.known_networks.begin()->second.gateway6.reset();
  EXPECT_EQ(finding("forwarding.ipv6").outcome, "ok");
  engine.information.runtimes.erase("runsc");
  missing("runtime.runsc", "warning", "install runsc");
  write("engine/etc/resolv.conf", "nameserver 127.0.0.1\n");
  EXPECT_EQ(finding("resolver.loopback").outcome, "ok");  // 28.5.2
  old_engine();
  missing("resolver.loopback", "warning", "\"dns\"");
  process(test::kEnginePid, 1000, "other", "", "dockerd");
  EXPECT_EQ(finding("engine.namespace").outcome, "missing");
  missing("engine.events", "missing", "--engine-socket");
  engine.identify_error = kDown;
  missing("engine.api", "missing", "--engine-socket");
  write("proc/thread-self/status", "CapEff:\t0\n");
  EXPECT_EQ(finding("daemon.capabilities").outcome, "missing");
}

TEST_F(DoctorTest, ResolverOfTheHost) {
  old_engine();
  EXPECT_EQ(finding("resolver.loopback").outcome, "ok");
  write("engine/etc/resolv.conf", "nameserver 127.0.0.1\n");
  EXPECT_EQ(finding("resolver.loopback").outcome, "warning");  // no policy allows runc
  if (::geteuid() == 0) {
    policy("web", R"({"version":1,"runtimes":["runc"]})");
    EXPECT_EQ(finding("resolver.loopback").outcome, "missing");
    EXPECT_NE(finding("resolver.loopback").seen.find("under policy web"), std::string::npos);
    policy("web", R"({"version":1,"runtimes":["runc"],"accept_host_resolver":true})");
    EXPECT_EQ(finding("resolver.loopback").outcome, "warning");
  }
  write("engine/daemon.json", R"({"dns":["192.0.2.53"]})");
  EXPECT_EQ(finding("resolver.loopback").outcome, "ok");
  write("engine/daemon.json", "{");
  EXPECT_EQ(finding("resolver.loopback").outcome, "missing");
}

TEST_F(DoctorTest, PolicyFiles) {
  if (::geteuid() != 0) GTEST_SKIP() << "policy files must be root's";
  policy("good", R"({"version":1})");
  policy("bad", "{");
  EXPECT_EQ(finding("policy.good").outcome, "ok");
  EXPECT_EQ(finding("policy.default").outcome, "ok");
  EXPECT_EQ(finding("policy.bad").outcome, "missing");
  fs::permissions(base / "policies", fs::perms::all);
  EXPECT_EQ(finding("policy.good").outcome, "missing");
}

TEST_F(DoctorTest, StatusIsTheHosts) {
  EXPECT_TRUE(pipeline().status().ready);
  EXPECT_EQ(pipeline().status().endpoints.size(), 1U);
}

}  // namespace
}  // namespace agentgate::arm
