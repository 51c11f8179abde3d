// SPDX-License-Identifier: GPL-2.0-or-later
//
// What a process has left after drop_privileges(), as the kernel says it, and what it can still do.
#include "plugin/daemon/privileges.h"

#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sched.h>
#include <spawn.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <functional>
#include <string>

#include "netdriver/gate_kernel.h"
#include "tests/support/netns.h"

// NOLINTNEXTLINE(readability-redundant-declaration): POSIX has it in no header
extern char** environ;

namespace agentgate {
namespace {

std::string status_line(const std::string& key) {
  std::ifstream file("/proc/thread-self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(key + ":\t", 0) == 0) return line.substr(key.size() + 2);
  }
  return "";
}

// 0 if `work` is true in a process of its own that has dropped its privileges.
int in_child(const std::function<bool()>& work) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(drop_privileges() ? (work() ? 0 : 2) : 3);
  int status = -1;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

class Privileges : public test::KernelTest {};

TEST_F(Privileges, TheKernelSaysSo) {
  constexpr unsigned long long kMay =
      1ULL << CAP_NET_ADMIN | 1ULL << CAP_NET_RAW | 1ULL << CAP_SYS_ADMIN | 1ULL << CAP_SYS_PTRACE |
      1ULL << CAP_DAC_OVERRIDE | 1ULL << CAP_CHOWN | 1ULL << CAP_BPF;
  EXPECT_EQ(in_child([] {
              const auto set = [](const char* key) {
                return std::stoull(status_line(key), nullptr, 16);
              };
              return set("CapEff") == kMay && set("CapPrm") == kMay && set("CapBnd") == kMay &&
                     set("CapInh") == 0 && set("CapAmb") == 0 && status_line("NoNewPrivs") == "1" &&
                     status_line("Seccomp") == "2";
            }),
            0);
}

TEST_F(Privileges, WhatIsNotNeededIsRefused) {
  const std::pair<const char*, std::function<long()>> calls[] = {
      {"mount", [] { return ::mount("none", "/mnt", "tmpfs", 0, nullptr); }},
      {"umount2", [] { return ::syscall(SYS_umount2, "/proc", 0); }},
      {"init_module", [] { return ::syscall(SYS_init_module, nullptr, 0, ""); }},
      {"kexec_load", [] { return ::syscall(SYS_kexec_load, 0, 0, nullptr, 0); }},
      {"unshare", [] { return ::unshare(CLONE_NEWNS); }},
      {"setuid", [] { return ::syscall(SYS_setuid, 0); }},
      {"chroot", [] { return ::syscall(SYS_chroot, "/"); }},
      {"io_uring_setup", [] { return ::syscall(SYS_io_uring_setup, 1, nullptr); }},
      {"keyctl", [] { return ::syscall(SYS_keyctl, 0, 0, 0, 0, 0); }},
      {"perf_event_open", [] { return ::syscall(SYS_perf_event_open, nullptr, 0, 0, -1, 0); }}};
  for (const auto& [name, call] : calls) {
    // Without the filter they say something else, or do it.
    EXPECT_EQ(in_child([&call = call] { return call() == -1 && errno == EPERM; }), 0) << name;
  }
}

TEST_F(Privileges, WhatIsNeededStillWorks) {
  const test::NetNamespace space;
  const test::NetNamespace other;
  const int status = space.run([&] {
    return in_child([&] {
      auto gate = netdriver::Gate::open();
      if (!gate || !(*gate)->restore({})) return false;
      // Another namespace is looked into by a thread of its own.
      if (!(*gate)->sandbox_links(other.fd())) return false;
      // iptables, as the firewall's keeper starts it.
      char program[] = "iptables-nft";
      char list[] = "-S";
      char* arguments[] = {program, list, nullptr};
      pid_t child = 0;
      if (::posix_spawnp(&child, program, nullptr, nullptr, arguments, environ) != 0) return false;
      int ended = -1;
      ::waitpid(child, &ended, 0);
      return ended == 0;
    });
  });
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace agentgate
