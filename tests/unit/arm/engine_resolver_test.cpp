// SPDX-License-Identifier: GPL-2.0-or-later
#include <gtest/gtest.h>

#include <thread>

#include "tests/unit/arm/world.h"

namespace agentgate::arm {
namespace {

namespace fs = std::filesystem;
using std::chrono::hours;
using std::chrono::seconds;

class EngineResolverTest : public test::World {
 protected:
  void SetUp() override {
    World::SetUp();
    old_engine();
  }
  void host_asks(const std::string& servers) { write("engine/etc/resolv.conf", servers); }
  Result<EngineResolver> found() {
    return find_engine_resolver(
        engine.information.server_version,
        engine::process_identity(test::kEnginePid, options.system.proc).value(),
        options.daemon_json, options.host_resolv_conf, options.system);
  }
  bool by_host() {
    const auto seen = found();
    EXPECT_TRUE(seen) << seen.error().to_string();
    return seen && seen->by_host;
  }
  Evidence check(const RuntimeSeen& runtime = {"runc", "", false}) {
    note.clear();
    asked = 0;
    return check_resolver(
        engine.container, runtime, of,
        [this] {
          ++asked;
          return found();
        },
        note);
  }
  void refused(const std::string& words) {
    const Evidence evidence = check();
    ASSERT_FALSE(evidence) << "it said: " << *evidence;
    EXPECT_NE(evidence.error().text.find(words), std::string::npos) << evidence.error().text;
    EXPECT_EQ(evidence.error().code, EPERM);
  }

  policy::Policy of;
  std::string note;
  int asked = 0;
};

TEST_F(EngineResolverTest, LoopbackServersOfTheHostAreAskedFromTheHost) {
  EXPECT_FALSE(by_host());
  for (const char* text :
       {"nameserver 127.0.0.1\n", "nameserver 192.0.2.53\n\tnameserver\t127.1.2.3 # x\n",
        "nameserver127.0.0.1\n", "nameserver ::1\n",
        "nameserver 127.0.0.53\nnameserver 127.0.0.1\n"}) {
    host_asks(text);
    EXPECT_TRUE(by_host()) << text;
  }
  for (const char* text : {"", "# nameserver 127.0.0.1\n", "search 127.0.0.1\n",
                           "nameserver 192.0.2.127\noptions ndots:1\n"}) {
    host_asks(text);
    EXPECT_FALSE(by_host()) << text;
  }
  fs::remove(base / "engine/etc/resolv.conf");
  EXPECT_FALSE(by_host());
}

TEST_F(EngineResolverTest, TheEnginesVersionDecides) {
  host_asks("nameserver 127.0.0.1\n");
  for (const char* version : {"20.10.24+dfsg1", "23.0.11", "24.0.9", "25.0.4", "25.0", "dev", ""}) {
    engine.information.server_version = version;
    EXPECT_TRUE(by_host()) << version;
  }
  fs::remove(base / "proc/stat");  // what is not needed is not read
  for (const char* version : {"25.0.5", "26.1.5+dfsg1", "28.5.2", "29.0.0-rc.1", "100.0.0"}) {
    engine.information.server_version = version;
    EXPECT_FALSE(by_host()) << version;
    EXPECT_TRUE(check()) << version;
  }
}

TEST_F(EngineResolverTest, SystemdsStubIsLookedThroughAsTheEngineDoes) {
  host_asks("nameserver 127.0.0.53\noptions edns0\n");
  write("engine/run/systemd/resolve/resolv.conf", "nameserver 192.0.2.53\n");
  EXPECT_FALSE(by_host());
  write("engine/run/systemd/resolve/resolv.conf", "nameserver 127.0.0.1\n");
  EXPECT_TRUE(by_host());
  write("engine/run/systemd/resolve/resolv.conf", "nameserver 192.0.2.53\n");
  // The engine had started when the file came to be the stub: it reads that file itself.
  write("proc/stat", "btime 1000000\n");
  EXPECT_TRUE(by_host());
}

TEST_F(EngineResolverTest, ServersOfTheEngineAreAskedThroughThePort) {
  host_asks("nameserver 127.0.0.1\n");
  write("engine/daemon.json", R"({"dns":["192.0.2.53"]})");
  EXPECT_FALSE(by_host());
  EXPECT_TRUE(check());
  // The engine does not know the file as it is now.
  write("proc/stat", "btime 1000000\n");
  EXPECT_TRUE(by_host());
  EXPECT_NE(found()->seen.find("restart the engine"), std::string::npos) << found()->seen;
  write("engine/daemon.json", "{}");
  write(fs::path("proc") / std::to_string(test::kEnginePid) / "cmdline",
        std::string("dockerd\0--dns\000192.0.2.53\0", 24));
  EXPECT_FALSE(by_host());
  write(fs::path("proc") / std::to_string(test::kEnginePid) / "cmdline",
        std::string("dockerd\0--dns=192.0.2.53\0", 24));
  EXPECT_FALSE(by_host());
  write(fs::path("proc") / std::to_string(test::kEnginePid) / "cmdline",
        std::string("dockerd\0--dns-opt=x\0", 20));
  EXPECT_TRUE(by_host());
}

TEST_F(EngineResolverTest, AnotherResolverFile) {
  write("engine/daemon.json", R"({"resolv-conf":"/other"})");
  write("engine/other", "nameserver 127.0.0.1\n");
  EXPECT_TRUE(by_host());
  write("engine/other", "nameserver 192.0.2.53\n");
  host_asks("nameserver 127.0.0.1\n");
  EXPECT_FALSE(by_host());
  write("proc/stat", "btime 1000000\n");
  EXPECT_TRUE(by_host());
}

TEST_F(EngineResolverTest, WhatCannotBeReadIsNoPermission) {
  host_asks("nameserver 127.0.0.1\n");
  for (const char* text : {"{", R"({"dns":"192.0.2.53"})", R"({"dns":[1]})"}) {
    write("engine/daemon.json", text);
    EXPECT_FALSE(found()) << text;
    EXPECT_FALSE(check()) << text;
  }
  write("engine/daemon.json", "{}");
  engine.container.started_at = "yesterday";
  EXPECT_FALSE(check());
  write("proc/stat", "cpu\n");
  EXPECT_FALSE(found());
}

TEST_F(EngineResolverTest, RefusesUnlessThePolicyAccepts) {
  EXPECT_TRUE(check()) << check().error().text;
  host_asks("nameserver 127.0.0.1\n");
  of.name = "web";
  refused("engine 20.10.24+dfsg1 asks 127.0.0.1 of /etc/resolv.conf");
  refused("--dns");
  refused("\"accept_host_resolver\" in policy web");
  EXPECT_TRUE(note.empty());
  of.accept_host_resolver = true;
  EXPECT_TRUE(check());
  EXPECT_NE(note.find("past the gate"), std::string::npos) << note;
  host_asks("nameserver 192.0.2.53\n");
  EXPECT_TRUE(check());
  EXPECT_TRUE(note.empty()) << note;
}

TEST_F(EngineResolverTest, ServersOfTheContainerAndTheGuestsOwnLoopback) {
  host_asks("nameserver 127.0.0.1\n");
  EXPECT_TRUE(check({"runsc", "", true}));
  EXPECT_EQ(asked, 0);
  EXPECT_FALSE(check({"runsc", "", false}));
  engine.container.dns = {"192.0.2.53"};
  EXPECT_TRUE(check());
  EXPECT_EQ(asked, 0);
}

TEST_F(EngineResolverTest, AContainerThatIsOlderThanTheFileMayHaveOtherServers) {
  started(seconds(-60));
  refused("started before /etc/resolv.conf was changed");
  started(seconds(0));  // it is read a moment before the container counts as started
  refused("started before /etc/resolv.conf was changed");
  started(seconds(10));
  EXPECT_TRUE(check());
  // A link to a file that is old enough, but that pointed elsewhere until now.
  write("engine/etc/a", "nameserver 192.0.2.53\n");
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  started(seconds(0));
  fs::remove(base / "engine/etc/resolv.conf");
  fs::create_symlink("a", base / "engine/etc/resolv.conf");
  refused("started before /etc/resolv.conf was changed");
  // Older than the engine, whose configuration was another one then (live restore).
  write("engine/daemon.json", R"({"dns":["192.0.2.53"]})");
  started(seconds(60));
  refused("started before the engine was started");
  started(hours(2));
  EXPECT_TRUE(check());
}

TEST_F(EngineResolverTest, GvisorHasALoopbackOfItsOwnUnlessItUsesTheHostsStack) {
  const auto own = [&](const std::vector<std::string>& arguments) {
    return identify_runtime("r", {"/usr/bin/runsc", "", "", arguments}, test::kEnginePid,
                            options.system)
        .value()
        .own_loopback;
  };
  EXPECT_TRUE(own({}));
  EXPECT_TRUE(own({"--platform=systrap", "--network=sandbox"}));
  EXPECT_TRUE(own({"--network=none"}));
  EXPECT_FALSE(own({"--network=host"}));
  EXPECT_FALSE(own({"-network=host"}));
  EXPECT_FALSE(own({"--network", "host"}));
  EXPECT_FALSE(own({"--network=sandbox", "--network=host"}));
  // What a shim's configuration says is not known.
  EXPECT_FALSE(identify_runtime("r", {"", "io.containerd.runsc.v1", "", {}}, test::kEnginePid,
                                options.system)
                   ->own_loopback);
  EXPECT_FALSE(
      identify_runtime("r", {"runc", "", "", {}}, test::kEnginePid, options.system)->own_loopback);
}

}  // namespace
}  // namespace agentgate::arm
