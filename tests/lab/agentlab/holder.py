# SPDX-License-Identifier: GPL-2.0-or-later
"""The first process of a set of namespaces (network, mount, PID, UTS, IPC).

Started by namespace.py with a JSON configuration as its argument. It prints the PID that it has
outside, prepares the mounts, prints "ready", reaps what is orphaned, and ends when its standard
input does. Being PID 1 of its PID namespace, the kernel ends everything in it then: nothing of
the lab outlives the process that made it, not even if that one is killed.
"""

import ctypes
import json
import os
import select
import signal
import sys

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
PR_SET_PDEATHSIG = 1

libc = ctypes.CDLL(None, use_errno=True)


def check(result, what):
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def mount(source, target, kind=None, flags=0, data=None):
    encoded = [None if part is None else os.fsencode(part) for part in (source, target, kind, data)]
    check(libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]),
          f"mount {kind or ''} {source} on {target}")


def prepare(config):
    base = config["base"]

    def folder(name):
        path = os.path.join(base, name)
        os.makedirs(path, exist_ok=True)
        return path

    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mount("proc", "/proc", "proc")
    # A sysfs made in this network namespace shows its devices. It would hide the cgroups, without
    # which no runtime starts, so these are put back.
    has_cgroups = os.path.ismount("/sys/fs/cgroup")
    if has_cgroups:
        mount("/sys/fs/cgroup", folder("cgroup"), flags=MS_BIND | MS_REC)
    mount("sysfs", "/sys", "sysfs")
    if has_cgroups:
        mount(folder("cgroup"), "/sys/fs/cgroup", flags=MS_BIND | MS_REC)
    if os.path.isdir("/sys/fs/bpf"):
        mount("bpf", "/sys/fs/bpf", "bpf", data="mode=700")
    mount(folder("run"), "/run", flags=MS_BIND)
    for name, target in (("etc", "/etc"), ("lib", "/var/lib")):
        layers = f"lowerdir={target},upperdir={folder(name + '.upper')},workdir={folder(name + '.work')}"
        mount("overlay", target, "overlay", data=layers)
    # The engines' own data is on the plain file system: overlay2 does not stack on an overlay.
    for name in ("docker", "containerd"):
        os.makedirs("/var/lib/" + name, exist_ok=True)
        mount(folder("data/" + name), "/var/lib/" + name, flags=MS_BIND)
    # A machine's resolv.conf may be a link to somewhere under /run.
    if os.path.lexists("/etc/resolv.conf"):
        os.unlink("/etc/resolv.conf")
    with open("/etc/resolv.conf", "w") as file:
        file.write(config["resolv_conf"])
    with open("/etc/hosts", "w") as file:
        file.write(f"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {config['name']}\n")
    name = config["name"].encode()
    check(libc.sethostname(name, len(name)), "sethostname")


def serve():
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    wake, poke = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(poke)
    while True:
        readable, _, _ = select.select([0, wake], [], [])
        if wake in readable:
            os.read(wake, 4096)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        if 0 in readable and not os.read(0, 4096):
            return


def main():
    config = json.loads(sys.argv[1])
    os.setsid()
    check(libc.unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET), "unshare")
    told, tell = os.pipe()
    child = os.fork()
    if child:
        # Whoever ends this process wants the namespaces gone.
        print(child, flush=True)
        os.close(tell)
        os.close(0)
        os.close(1)
        os.waitpid(child, 0)
        return
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    os.close(tell)
    os.read(told, 1)  # the PID comes first
    os.close(told)
    prepare(config)
    print("ready", flush=True)
    os.close(1)
    serve()


main()
