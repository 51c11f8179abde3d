// SPDX-License-Identifier: GPL-2.0-or-later
//
// What the daemon cannot do any more once it has started, whatever is sent to it.
#pragma once

#include "netdriver/error.h"

namespace agentgate {

// Keeps CAP_NET_ADMIN and CAP_NET_RAW (links, nftables, iptables), CAP_SYS_ADMIN (entering the
// namespaces of sandboxes), CAP_SYS_PTRACE (their /proc/PID/ns), CAP_DAC_OVERRIDE (resolver files
// of containers) and CAP_BPF (the token, before Linux 6.9), as far as they are there; drops all
// others from every set, the bounding set included. Sets no_new_privs, and a seccomp filter that
// answers EPERM to what no part of the daemon and no iptables needs: modules, mounts, ptrace, keys,
// clocks, other users, unshare, io_uring, perf and the like.
//
// To be called before there is a second thread; children inherit it. EPERM, EINVAL: the kernel
// refused, and the daemon must not go on.
Status drop_privileges();

}  // namespace agentgate
