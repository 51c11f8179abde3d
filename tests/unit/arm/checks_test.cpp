// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/arm/checks.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <thread>

#include "tests/unit/arm/world.h"

namespace agentgate::arm {
namespace {

namespace fs = std::filesystem;

class ChecksTest : public test::World {
 protected:
  // The check says no, with these words.
  static void refuses(const Evidence& evidence, const std::string& words) {
    ASSERT_FALSE(evidence) << "it said: " << *evidence;
    EXPECT_NE(evidence.error().text.find(words), std::string::npos) << evidence.error().text;
  }
  Result<RuntimeSeen> runtime(const engine::Runtime& of, const std::string& name = "r") {
    return identify_runtime(name, of, test::kEnginePid, options.system);
  }
  void refuses_runtime(const engine::Runtime& of, const std::string& words) {
    const auto seen = runtime(of);
    ASSERT_FALSE(seen) << "it is " << seen->kind;
    EXPECT_NE(seen.error().text.find(words), std::string::npos) << seen.error().text;
  }
  Evidence alone() {
    const int fd = ::open((base / "netns/container").c_str(), O_RDONLY | O_CLOEXEC);
    const auto occupants = find_occupants(options.system).value();
    auto evidence =
        check_alone(test::kContainerPid, test::kContainerId, fd, options.system, occupants);
    ::close(fd);
    return evidence;
  }
  netdriver::SandboxLink link(const std::string& name, const std::string& kind, bool up) {
    netdriver::SandboxLink out;
    out.name = InterfaceName::parse(name).value();
    out.kind = kind;
    out.up = up;
    return out;
  }
};

TEST_F(ChecksTest, Capabilities) {
  EXPECT_TRUE(check_capabilities(options.system));
  // Without bit 12 (NET_ADMIN), 21 (SYS_ADMIN), 19 (SYS_PTRACE).
  const std::pair<const char*, const char*> missing[] = {{"000001ffffffefff", "CAP_NET_ADMIN"},
                                                         {"000001ffffdfffff", "CAP_SYS_ADMIN"},
                                                         {"000001fffff7ffff", "CAP_SYS_PTRACE"}};
  for (const auto& [mask, name] : missing) {
    write("proc/thread-self/status", std::string("CapEff:\t") + mask + "\n");
    refuses(check_capabilities(options.system), name);
  }
  fs::remove(base / "proc/thread-self/status");
  EXPECT_FALSE(check_capabilities(options.system));
}

TEST_F(ChecksTest, NamespaceOfTheEngine) {
  EXPECT_TRUE(check_namespace(test::kEnginePid, options.system));
  process(test::kEnginePid, 1000, "other", "", "dockerd");
  refuses(check_namespace(test::kEnginePid, options.system), "another network namespace");
  EXPECT_FALSE(check_namespace(99999, options.system));
}

TEST_F(ChecksTest, Hash) {
  EXPECT_EQ(hash_of("/none", test::kEnginePid, options.system).value(), "absent");
  // An engine that has ended has no daemon.json to speak of, rather than none.
  EXPECT_FALSE(hash_of("/daemon.json", 99999, options.system));
  write("engine/daemon.json", "abc");
  EXPECT_EQ(hash_of("/daemon.json", test::kEnginePid, options.system).value(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  // A link is the engine's: it starts at the engine's root.
  write("outside.json", "other");
  fs::create_symlink("/daemon.json", base / "engine/link.json");
  fs::create_symlink(base / "outside.json", base / "engine/out.json");
  EXPECT_EQ(hash_of("/link.json", test::kEnginePid, options.system).value(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hash_of("/out.json", test::kEnginePid, options.system).value(), "absent");
}

TEST_F(ChecksTest, Forwarding) {
  EndpointRecord both = endpoint();
  EXPECT_TRUE(check_forwarding(both, options.system));
  write("proc/sys/net/ipv6/conf/all/forwarding", "0\n");
  refuses(check_forwarding(both, options.system), "sysctl -w net.ipv6.conf.all.forwarding=1");
  EndpointRecord only_v4 = both;
  only_v4.address6.reset();
  EXPECT_TRUE(check_forwarding(only_v4, options.system));
  write("proc/sys/net/ipv4/ip_forward", "0\n");
  refuses(check_forwarding(only_v4, options.system), "sysctl -w net.ipv4.ip_forward=1");
  EndpointRecord only_v6 = both;
  only_v6.address4.reset();
  write("proc/sys/net/ipv6/conf/all/forwarding", "1\n");
  fs::remove(base / "proc/sys/net/bridge/bridge-nf-call-iptables");  // only reported
  EXPECT_TRUE(check_forwarding(only_v6, options.system));
}

TEST_F(ChecksTest, RuntimeByItsOwnText) {
  EXPECT_EQ(runtime({"/usr/bin/runsc", "", "", {}})->kind, "runsc");
  EXPECT_EQ(runtime({"runc", "", "", {}})->kind, "runc");  // through the engine's PATH
  EXPECT_EQ(runtime({"runc", "", "", {}})->evidence, "/usr/sbin/runc");
  // A name says nothing.
  fs::copy_file(base / "engine/usr/sbin/runc", base / "engine/usr/local-runsc");
  EXPECT_EQ(runtime({"/usr/local-runsc", "", "", {}}, "runsc")->kind, "runc");
  write("engine/usr/bin/crun", std::string("\177ELF") + "libcrun");
  refuses_runtime({"/usr/bin/crun", "", "", {}}, "neither gVisor's runsc nor runc");
  refuses_runtime({"/usr/bin/none", "", "", {}}, "/usr/bin/none");
  refuses_runtime({"none", "", "", {}}, "not in the engine's PATH");
  refuses_runtime({"/usr/bin", "", "", {}}, "not a program");
  write("engine/usr/bin/empty", "");
  refuses_runtime({"/usr/bin/empty", "", "", {}}, "neither");
}

TEST_F(ChecksTest, AScriptThatNamesGvisorIsNotGvisor) {
  write("engine/usr/bin/wrapper", "#!/bin/sh\n# gvisor.dev/gvisor/runsc\nexec runc \"$@\"\n");
  refuses_runtime({"/usr/bin/wrapper", "", "", {}}, "wrapper script");
}

TEST_F(ChecksTest, RuntimeLinksAreTheEnginesOwn) {
  // An absolute link starts at the engine's root, not at ours.
  fs::create_symlink("/usr/bin/runsc", base / "engine/usr/bin/link");
  EXPECT_EQ(runtime({"/usr/bin/link", "", "", {}})->kind, "runsc");
  write("outside", std::string("\177ELF") + "gvisor.dev/gvisor/runsc");
  fs::create_symlink("../../../outside", base / "engine/usr/bin/out");
  EXPECT_FALSE(runtime({"/usr/bin/out", "", "", {}}));
}

TEST_F(ChecksTest, RuntimeTextAnywhereInTheProgram) {
  const std::string text = "gvisor.dev/gvisor/runsc";
  // Across the border of two reads too.
  for (const std::size_t at :
       {std::size_t{4}, std::size_t{(1 << 20) - 30}, std::size_t{(1 << 20) - 5},
        std::size_t{(1 << 20)}, std::size_t{(3 << 20) - 1}}) {
    std::string program(4 << 20, '\0');
    program.replace(0, 4, "\177ELF");
    program.replace(at, text.size(), text);
    const std::string name = "big" + std::to_string(at);
    write("engine/usr/bin/" + name, program);
    EXPECT_EQ(runtime({"/usr/bin/" + name, "", "", {}})->kind, "runsc") << at;
  }
}

TEST_F(ChecksTest, AProgramThatWasReplacedIsReadAgain) {
  ASSERT_EQ(runtime({"/usr/bin/runsc", "", "", {}})->kind, "runsc");
  write("engine/usr/bin/runsc.new", std::string("\177ELF") + "github.com/opencontainers/runc");
  fs::rename(base / "engine/usr/bin/runsc.new", base / "engine/usr/bin/runsc");
  EXPECT_EQ(runtime({"/usr/bin/runsc", "", "", {}})->kind, "runc");
}

TEST_F(ChecksTest, RuntimeByShim) {
  EXPECT_EQ(runtime({"", "io.containerd.runsc.v1", "", {}})->kind, "runsc");
  EXPECT_EQ(runtime({"io.containerd.runsc.v1", "", "", {}})->kind, "runsc");
  EXPECT_EQ(runtime({"", "io.containerd.runc.v2", "", {}})->kind, "runc");
  // The runc shim runs what its options name.
  EXPECT_EQ(runtime({"", "io.containerd.runc.v2", "/usr/bin/runsc", {}})->kind, "runsc");
  write("engine/usr/bin/crun", std::string("\177ELF") + "libcrun");
  refuses_runtime({"", "io.containerd.runc.v2", "/usr/bin/crun", {}}, "neither");
  refuses_runtime({"", "io.containerd.kata.v2", "", {}}, "io.containerd.kata.v2");
  refuses_runtime({"", "io.containerd.runsc.v1.evil", "", {}}, "cannot verify");
  refuses_runtime({"", "", "", {}}, "cannot verify");
}

TEST_F(ChecksTest, RuntimeAndPolicy) {
  const auto check = [&](const std::string& name, std::vector<std::string> allowed) {
    engine.container.runtime = name;
    policy::Policy policy;
    policy.name = "p";
    policy.runtimes = std::move(allowed);
    const auto seen = check_runtime(engine.container, engine.information, policy, test::kEnginePid,
                                    options.system);
    return seen ? Evidence(seen->evidence) : Evidence(tl::unexpected(seen.error()));
  };
  EXPECT_TRUE(check("runsc", {"runsc"}));
  EXPECT_TRUE(check("runc", {"runsc", "runc"}));
  EXPECT_TRUE(check("io.containerd.runsc.v1", {"runsc"}));
  refuses(check("runc", {"runsc"}), "is really runc");
  refuses(check("gone", {"runsc"}), "does not know");
  engine.information.runtimes["gvisor"] = {"/usr/sbin/runc", "", "", {}};
  refuses(check("gvisor", {"runsc"}), "'gvisor' is really runc");
  refuses(check("runsc", {}), "is really runsc");
}

TEST_F(ChecksTest, FrozenByV1) {
  const auto frozen = [&](const std::string& kind) {
    return check_frozen(test::kContainerPid, kind, test::kEnginePid, options.system);
  };
  const std::string state = "cgroups/freezer/docker/" + test::kContainerId + "/freezer.state";
  refuses(frozen("runc"), "THAWED");
  EXPECT_TRUE(frozen("runsc"));
  write(state, "FREEZING\n");
  EXPECT_FALSE(frozen("runc"));
  write(state, "FROZEN\n");
  EXPECT_TRUE(frozen("runc"));
  fs::remove(base / state);
  EXPECT_TRUE(frozen("runc"));  // not visible from here
  write("engine/sys/fs/cgroup" + state.substr(7), "THAWED\n");
  refuses(frozen("runc"), "THAWED");  // but from where the engine is
}

TEST_F(ChecksTest, FrozenByV2) {
  process(test::kContainerPid, 5000, "container", "0::/system.slice/docker-x.scope\n", "sh");
  const std::string events = "cgroups/system.slice/docker-x.scope/cgroup.events";
  write(events, "populated 1\nfrozen 0\n");
  refuses(check_frozen(test::kContainerPid, "runc", test::kEnginePid, options.system),
          "not frozen");
  EXPECT_TRUE(check_frozen(test::kContainerPid, "runsc", test::kEnginePid, options.system));
  write(events, "populated 1\nfrozen 1\n");
  EXPECT_TRUE(check_frozen(test::kContainerPid, "runc", test::kEnginePid, options.system));
}

TEST_F(ChecksTest, AloneInItsNamespace) {
  EXPECT_EQ(alone().value(), "1 processes in its namespace, all its own");
  const std::string own = "4:freezer:/docker/" + test::kContainerId;
  process(4300, 1, "container", own + "\n0::/\n", "child");
  process(4301, 1, "container", own + "/sub\n0::/\n", "systemd");  // below it
  process(4302, 1, "other", "0::/\n", "elsewhere");
  EXPECT_EQ(alone().value(), "3 processes in its namespace, all its own");
  process(4303, 1, "container", "4:freezer:/docker/" + std::string(64, 'd') + "\n0::/\n", "spy");
  refuses(alone(), "process 4303 (spy)");
  fs::remove(base / "proc/4303/cgroup");  // it is just ending
  EXPECT_TRUE(alone());
}

TEST_F(ChecksTest, Links) {
  const auto check = [&](bool absent = true) {
    const auto seen = check_links(ports.links, endpoint(), absent);
    return seen ? Evidence(seen->evidence) : Evidence(tl::unexpected(seen.error()));
  };
  auto& own = ports.links[0];
  EXPECT_TRUE(check());
  refuses(check(false), "lacks the endpoint's address 10.99.0.2");
  own.addresses = {IpAddress::parse("10.99.0.2").value(), IpAddress::parse("fd99::2").value(),
                   IpAddress::parse("fe80::1").value()};
  EXPECT_TRUE(check(false));
  own.addresses.push_back(IpAddress::parse("10.99.0.3").value());
  refuses(check(), "10.99.0.3");
  refuses(check(false), "10.99.0.3");
  own.addresses.clear();
  own.mac = MacAddress::parse("02:00:00:00:00:03").value();
  refuses(check(), "02:00:00:00:00:03");
  ports.links.clear();
  refuses(check(), "0 links");
}

TEST_F(ChecksTest, ASecondLink) {
  const auto with = [&](const netdriver::SandboxLink& other) {
    const auto seen = check_links({ports.links[0], other}, endpoint(), true);
    return seen ? Evidence(seen->evidence) : Evidence(tl::unexpected(seen.error()));
  };
  refuses(with(link("eth1", "veth", true)), "2 links besides lo (eth0, eth1)");
  refuses(with(link("eth1", "veth", false)), "2 links");
  const std::pair<const char*, const char*> fallback[] = {
      {"tunl0", "ipip"},     {"gre0", "gre"},       {"gretap0", "gretap"},
      {"erspan0", "erspan"}, {"ip_vti0", "vti"},    {"ip6_vti0", "vti6"},
      {"sit0", "sit"},       {"ip6tnl0", "ip6tnl"}, {"ip6gre0", "ip6gre"}};
  for (const auto& [name, kind] : fallback) {
    EXPECT_TRUE(with(link(name, kind, false))) << name;
    EXPECT_FALSE(with(link(name, kind, true))) << name;
    EXPECT_FALSE(with(link(name, "veth", false))) << "a veth called " << name;
  }
  EXPECT_FALSE(with(link("sit1", "sit", false)));
}

TEST_F(ChecksTest, Container) {
  engine::Container& c = engine.container;
  const engine::Container good = c;
  EXPECT_TRUE(check_paused(c));
  EXPECT_TRUE(check_restart_policy(c));
  EXPECT_TRUE(check_networks(c));
  EXPECT_TRUE(check_privileges(c));
  EXPECT_TRUE(check_ports(c));

  c.paused = false;
  refuses(check_paused(c), "docker pause a1");
  c = good, c.running = false;
  refuses(check_paused(c), "not running");
  c = good, c.pid = 0;
  refuses(check_paused(c), "not running");
  c = good, c.restarting = true;
  refuses(check_paused(c), "being restarted");
  c = good, c.restart_policy = "";
  EXPECT_TRUE(check_restart_policy(c));
  for (const char* policy : {"always", "on-failure", "unless-stopped", "NO", "no "}) {
    c.restart_policy = policy;
    refuses(check_restart_policy(c), "--restart no");
  }
  c = good, c.attachments.clear();
  refuses(check_networks(c), "on no network");
  c = good, c.attachments.push_back({"bridge", "n", "e", "", "", ""});
  refuses(check_networks(c), "(agents, bridge)");
  refuses(check_networks(c), "disconnect it");
  c.attachments.back().name = "ingress";
  c.swarm_service = "web";
  refuses(check_networks(c), "(agents, ingress)");
  refuses(check_networks(c), "docker service update --publish-rm PORT web");
  c = good, c.privileged = true;
  refuses(check_privileges(c), "--privileged");
  for (const char* mode : {"host", "container:x"}) {
    c = good, c.network_mode = mode;
    refuses(check_privileges(c), "network mode");
    c = good, c.pid_mode = mode;
    refuses(check_privileges(c), "--pid");
    c = good, c.ipc_mode = mode;
    refuses(check_privileges(c), "--ipc");
    c = good, c.uts_mode = mode;
    refuses(check_privileges(c), "--uts");
  }
  c = good, c.userns_mode = "host", c.cgroupns_mode = "host", c.ipc_mode = "shareable";
  EXPECT_TRUE(check_privileges(c));
  c = good, c.published_ports = {"80/tcp"};
  refuses(check_ports(c), "80/tcp");
  c = good, c.publish_all_ports = true;
  refuses(check_ports(c), "-P");
}

// The quick way through the real /proc, against one stat for each process.
TEST_F(ChecksTest, EachProcessIsFoundWhereStatFindsIt) {
  const pid_t apart = ::fork();
  if (apart == 0) {
    // Without the right to a namespace of its own it stays in ours, and is looked for there.
    (void)::unshare(CLONE_NEWNET);
    ::pause();
    ::_exit(0);
  }
  ASSERT_GT(apart, 0);
  const std::string child = std::to_string(apart);
  const auto own = namespace_of("/proc/self/ns/net").value();
  for (int i = 0; i < 200 && namespace_of("/proc/" + child + "/ns/net").value() == own; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const auto occupants = find_occupants(System{});
  ASSERT_TRUE(occupants) << occupants.error().to_string();
  std::size_t looked_at = 0;
  for (const auto& [where, processes] : *occupants) {
    for (const std::string& process : processes) {
      const auto now = namespace_of("/proc/" + process + "/ns/net");
      if (where == kHidden) {
        EXPECT_FALSE(now) << process;
        continue;
      }
      if (!now) continue;  // it has ended
      EXPECT_EQ(*now, where) << process;
      ++looked_at;
    }
  }
  const auto in = [&](const Namespace& where) { return occupants->find(where); };
  EXPECT_GT(looked_at, 2U);
  const auto is_among = [](const auto& entry, const std::string& process) {
    return std::find(entry.begin(), entry.end(), process) != entry.end();
  };
  EXPECT_TRUE(is_among(in(own)->second, std::to_string(::getpid())));
  const auto its = namespace_of("/proc/" + child + "/ns/net").value();
  EXPECT_TRUE(is_among(in(its)->second, child));
  if (::geteuid() == 0) {
    EXPECT_NE(its, own);
  }
  ::kill(apart, SIGKILL);
  ::waitpid(apart, nullptr, 0);
}

// Such a process cannot be ruled out, and is said.
TEST_F(ChecksTest, ProcessesThatMayNotBeLookedAtAreCounted) {
  auto occupants = find_occupants(options.system).value();
  occupants[kHidden] = {"1", "2"};
  const int fd = ::open((base / "netns/container").c_str(), O_RDONLY | O_CLOEXEC);
  EXPECT_EQ(
      check_alone(test::kContainerPid, test::kContainerId, fd, options.system, occupants).value(),
      "1 processes in its namespace, all its own; 2 of the host may not be looked at");
  ::close(fd);
}

TEST_F(ChecksTest, AProcessThatCannotBeLookedAtRefuses) {
  write("proc/4711/ns", "no directory");
  const auto occupants = find_occupants(options.system);
  ASSERT_FALSE(occupants);
  EXPECT_EQ(occupants.error().code, ENOTDIR);
}

}  // namespace
}  // namespace agentgate::arm
