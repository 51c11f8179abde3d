// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/daemon/privileges.h"

#include <cap-ng.h>
#include <seccomp.h>
#include <sys/prctl.h>

#include <cerrno>
#include <memory>

namespace agentgate {
namespace {

constexpr capng_type_t kEverySet =
    static_cast<capng_type_t>(CAPNG_EFFECTIVE | CAPNG_PERMITTED | CAPNG_BOUNDING_SET);

Status drop_capabilities() {
  const std::string operation = "drop capabilities";
  capng_clear(CAPNG_SELECT_ALL);
  if (capng_get_caps_process() != 0) return fail(operation, "they cannot be read", EINVAL);
  bool kept[CAP_LAST_CAP + 1] = {};
  for (const unsigned capability : {CAP_NET_ADMIN, CAP_NET_RAW, CAP_SYS_ADMIN, CAP_SYS_PTRACE,
                                    CAP_DAC_OVERRIDE, CAP_BPF, CAP_CHOWN}) {
    kept[capability] = capng_have_capability(CAPNG_PERMITTED, capability) != 0;
  }
  const bool setpcap = capng_have_capability(CAPNG_EFFECTIVE, CAP_SETPCAP) != 0;
  capng_clear(CAPNG_SELECT_ALL);
  for (unsigned capability = 0; capability <= CAP_LAST_CAP; ++capability) {
    if (kept[capability]) capng_update(CAPNG_ADD, kEverySet, capability);
  }
  // The bounding set first: that needs CAP_SETPCAP, which goes with the others. Where the service
  // manager has taken it already the set is small enough.
  if (setpcap && capng_apply(CAPNG_SELECT_BOUNDS) != 0) {
    return fail(operation, "the bounding set", EPERM);
  }
  if (capng_apply(CAPNG_SELECT_CAPS) != 0) return fail(operation, "", EPERM);
  return {};
}

// By name, since not every kernel's headers know them all; one that libseccomp does not know does
// not exist for it either.
constexpr const char* kForbidden[] = {
    // the kernel itself
    "init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot",
    "iopl", "ioperm", "create_module", "query_module", "lookup_dcookie", "syslog",
    // file systems
    "mount", "umount", "umount2", "pivot_root", "chroot", "open_tree", "move_mount", "fsopen",
    "fsconfig", "fsmount", "fspick", "mount_setattr", "swapon", "swapoff", "quotactl",
    "quotactl_fd", "acct", "open_by_handle_at", "name_to_handle_at", "fanotify_init", "mknod",
    "mknodat",
    // other processes
    "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp", "pidfd_getfd", "move_pages",
    "migrate_pages",
    // namespaces of our own: joining one (setns) is needed, making one is not
    "unshare",
    // other users
    "setuid", "setgid", "setreuid", "setregid", "setresuid", "setresgid", "setgroups", "setfsuid",
    "setfsgid",
    // clocks and names
    "settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "stime", "sethostname",
    "setdomainname",
    // large surfaces that nothing here uses
    "io_uring_setup", "io_uring_enter", "io_uring_register", "perf_event_open", "userfaultfd",
    "add_key", "request_key", "keyctl", "personality", "vhangup", "nfsservctl", "uselib", "ustat",
    "sysfs", "_sysctl", "modify_ldt", "vm86", "vm86old"};

Status filter_system_calls() {
  const std::string operation = "install the seccomp filter";
  const std::unique_ptr<void, void (*)(scmp_filter_ctx)> filter(::seccomp_init(SCMP_ACT_ALLOW),
                                                                &::seccomp_release);
  if (!filter) return fail(operation, "no memory", ENOMEM);
  const auto forbid = [&](const char* name) -> int {
    const int number = ::seccomp_syscall_resolve_name(name);
    if (number == __NR_SCMP_ERROR) return 0;
    return ::seccomp_rule_add(filter.get(), SCMP_ACT_ERRNO(EPERM), number, 0);
  };
  for (const char* name : kForbidden) {
    if (const int failed = forbid(name); failed < 0 && failed != -EDOM) {
      return fail(operation, name, -failed);
    }
  }
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  // The leak check of a sanitizer stops the process by it.
  if (const int failed = forbid("ptrace"); failed < 0) return fail(operation, "ptrace", -failed);
#endif
  if (const int failed = ::seccomp_load(filter.get()); failed < 0) {
    return fail(operation, "", -failed);
  }
  return {};
}

}  // namespace

Status drop_privileges() {
  if (Status dropped = drop_capabilities(); !dropped) return dropped;
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return fail_errno("set no_new_privs");
  return filter_system_calls();
}

}  // namespace agentgate
