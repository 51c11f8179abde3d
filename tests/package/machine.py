# SPDX-License-Identifier: GPL-2.0-or-later
"""Debian roots from Debian's archive, and machines that boot them in namespaces of their own."""
import atexit
import fcntl
import hashlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/lab"))
from labhost import fetch  # noqa: E402


PREFIX = "agentgate-package-"


def sweep():
    """Removes the roots of tests that were killed."""
    for folder in pathlib.Path(tempfile.gettempdir()).glob(PREFIX + "[0-9]*-*"):
        owner = folder.name[len(PREFIX):].split("-")[0]
        if not pathlib.Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def tarball(suite, packages):
    """A Debian of that suite with these packages and what they need; made once."""
    packages = sorted(set(packages))
    name = hashlib.sha256(" ".join(packages).encode()).hexdigest()[:12]
    folder = pathlib.Path(fetch.CACHE) / "roots"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{suite}-{name}.tar"
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            new = folder / f"new-{suite}-{name}.tar"
            made = subprocess.run(
                ["mmdebstrap", "--quiet", "--variant=apt", "--include=" + ",".join(packages), suite, new,
                 fetch._archive()], capture_output=True, text=True)
            if made.returncode != 0:
                raise RuntimeError(f"mmdebstrap {suite}: {made.stdout}{made.stderr}")
            new.rename(target)
    return target


class Root:
    """A folder with a root file system, for as long as it is used as a context manager."""

    def __init__(self, suite, packages):
        self.tar = tarball(suite, packages)
        self.folder = None

    def __enter__(self):
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, lambda sig, _: sys.exit(128 + sig))
        atexit.register(self.close)
        sweep()
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self.path = self.folder / "root"
        self.path.mkdir()
        subprocess.run(["tar", "-C", self.path, "-xf", self.tar], check=True)
        return self

    def __exit__(self, *unused):
        self.close()

    def close(self):
        atexit.unregister(self.close)
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None

    def chroot(self, script, binds=()):
        """Runs a shell script in the root, without any network; {folder: where} are mounted there."""
        # The root is a mount of its own, since tests change how theirs propagates.
        lines = ["set -e", "ip link set lo up", f"mount --bind {self.path} {self.path}",
                 f"mount -t proc proc {self.path}/proc",
                 f"mount --rbind /dev {self.path}/dev", f"mount -t tmpfs tmpfs {self.path}/tmp"]
        for folder, where in dict(binds).items():
            lines += [f"mkdir -p {self.path}{where}", f"mount --bind {folder} {self.path}{where}"]
        lines += [f"exec chroot {self.path} /usr/bin/env -i HOME=/root LANG=C.UTF-8 "
                  "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin bash -euc \"$0\""]
        subprocess.run(["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--mount", "--propagation",
                        "private", "--pid", "--fork", "--kill-child", "bash", "-c", "\n".join(lines), script],
                       check=True, stdin=subprocess.DEVNULL)


class Machine(Root):
    """A root that is booted by systemd, with a network of its own that leads nowhere."""

    def __enter__(self):
        super().__enter__()
        try:
            self._boot()
        except BaseException:
            self.close()
            raise
        return self

    def _boot(self):
        self.log = open(self.folder / "console", "wb")
        self.nspawn = subprocess.Popen(
            # Its end is ordered even when this test is killed.
            ["setpriv", "--pdeathsig", "TERM", "systemd-nspawn", "--quiet", "--directory", self.path,
             "--machine", f"agentgate-{os.getpid()}", "--register=no", "--keep-unit", "--link-journal=no", "--resolv-conf=off",
             "--timezone=off", "--private-network",
             # Docker's own needs: sysctls, cgroups, keys and BPF.
             "--capability=all", "--system-call-filter=@keyring bpf", "--console=pipe", "--boot"],
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, start_new_session=True,
            env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1", "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network"})
        self.pid = None

        def leader():
            if self.nspawn.poll() is not None:
                raise RuntimeError("systemd-nspawn ended: " + (self.folder / "console").read_text(errors="replace"))
            children = pathlib.Path(f"/proc/{self.nspawn.pid}/task/{self.nspawn.pid}/children").read_text().split()
            for child in children:
                if pathlib.Path(f"/proc/{child}/comm").read_text().strip() == "systemd":
                    self.pid = child
            return self.pid is not None
        wait_for("systemd in the machine", leader, 30)
        wait_for("the machine's boot", lambda: self.run("systemctl is-system-running", check=False).stdout.strip() in
                 ("running", "degraded"), 90)

    def close(self):
        if getattr(self, "nspawn", None) and self.nspawn.poll() is None:
            self.nspawn.terminate()  # it shuts the machine down
            try:
                self.nspawn.wait(30)
            except subprocess.TimeoutExpired:
                if self.pid:
                    os.kill(int(self.pid), signal.SIGKILL)
                self.nspawn.kill()
                self.nspawn.wait()
        super().close()

    def run(self, script, check=True, timeout=120):
        """A shell script in the machine."""
        done = subprocess.run(["nsenter", "-t", self.pid, "-a", "/usr/bin/env", "-i", "HOME=/root", "LANG=C.UTF-8",
                               "DEBIAN_FRONTEND=noninteractive",
                               "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                               "bash", "-euc", script],
                              capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
        if check and done.returncode != 0:
            raise AssertionError(f"{script}: exit {done.returncode}: {done.stdout}{done.stderr}")
        return done

    def out(self, script):
        return self.run(script).stdout.strip()

    def code(self, script):
        return self.run(script, check=False).returncode


def wait_for(what, condition, seconds=30):
    end = time.time() + seconds
    while not condition():
        if time.time() > end:
            raise AssertionError(f"waited {seconds} s for {what}")
        time.sleep(0.1)
