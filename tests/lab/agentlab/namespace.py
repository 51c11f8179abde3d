# SPDX-License-Identifier: GPL-2.0-or-later
"""A set of namespaces, and processes in it."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

from .errors import LabError

HERE = pathlib.Path(__file__).resolve().parent
CGROUPS = pathlib.Path("/sys/fs/cgroup")


def wait_for(condition, timeout, what, interval=0.02):
    """Polls until `condition()` is true and answers with what it returned."""
    end = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise LabError(f"after {timeout} s still not: {what}")
        time.sleep(interval)


def remove_cgroups(parent):
    for top in list(CGROUPS.glob(f"*/{parent}")) + list(CGROUPS.glob(parent)):
        for folder, _, _ in os.walk(top, topdown=False):
            # A cgroup of processes that were just killed is busy for a moment.
            for _ in range(50):
                try:
                    os.rmdir(folder)
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.02)


class Process:
    """A process inside a namespace, by the PID that it has outside."""

    def __init__(self, popen, log=None):
        self.popen = popen
        self.log = log
        # nsenter forks to enter the PID namespace; its child is the program itself.
        children = f"/proc/{popen.pid}/task/{popen.pid}/children"

        def child():
            try:
                with open(children) as file:
                    found = file.read().split()
            except OSError:
                found = []
            return found or popen.poll() is not None

        found = wait_for(child, 10, "the start of a process", interval=0.002)
        self.pid = int(found[0]) if isinstance(found, list) else None

    def signal(self, number):
        if self.pid is None:
            return
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            pass

    def alive(self):
        return self.popen.poll() is None

    def wait(self, timeout=None):
        return self.popen.wait(timeout)

    def stop(self, timeout=15):
        """SIGTERM, then SIGKILL; answers with the exit code."""
        self.signal(signal.SIGTERM)
        try:
            return self.wait(timeout)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self):
        self.signal(signal.SIGKILL)
        return self.wait(10)

    def output(self):
        return pathlib.Path(self.log).read_text(errors="replace") if self.log else ""


class Namespace:
    """A network, mount, PID, UTS and IPC namespace with an own /run, /etc and /var/lib."""

    def __init__(self, lab, name, resolv_conf=""):
        self.lab = lab
        self.name = name
        self.base = lab.base / name
        self.base.mkdir()
        self.logs = self.base / "log"
        self.logs.mkdir()
        self.closed = False
        self._resolv_conf = resolv_conf
        self.launch()

    def launch(self):
        """Makes the namespaces, on what their folder holds already."""
        self._processes = []
        config = {"name": self.name, "base": str(self.base), "resolv_conf": self._resolv_conf}
        errors = open(self.logs / "holder.log", "w")
        self._holder = subprocess.Popen(
            [sys.executable, "-I", str(HERE / "holder.py"), json.dumps(config)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
        errors.close()
        pid = self._holder.stdout.readline().strip()
        ready = self._holder.stdout.readline().strip()
        if ready != "ready":
            self._holder.stdin.close()
            self._holder.wait()
            raise LabError(f"namespaces of {self.name}: {(self.logs / 'holder.log').read_text()}")
        self.pid = int(pid)
        self.run("ip", "link", "set", "lo", "up")

    # -- processes

    def enter(self, argv):
        """The command line that runs `argv` inside."""
        return ["nsenter", "--target", str(self.pid), "--net", "--mount", "--pid", "--uts", "--ipc", "--", *argv]

    def environment(self):
        return {"PATH": "/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8",
                "TERM": os.environ.get("TERM", "dumb")}

    def exec(self, *argv, input=None, timeout=60, env=None, check=False):
        """Runs a command inside to its end; answers with a CompletedProcess (text)."""
        argv = [str(part) for part in argv]
        popen = subprocess.Popen(
            self.enter(argv), stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**self.environment(), **(env or {})})
        data = input.encode() if isinstance(input, str) else input
        try:
            out, err = popen.communicate(data, timeout)
        except subprocess.TimeoutExpired:
            Process(popen).signal(signal.SIGKILL)
            out, err = popen.communicate()
            raise LabError(f"{self.name}: {' '.join(argv)}: not done after {timeout} s\n"
                           f"{out.decode(errors='replace')}{err.decode(errors='replace')}") from None
        done = subprocess.CompletedProcess(argv, popen.returncode, out.decode(errors="replace"),
                                           err.decode(errors="replace"))
        if check and done.returncode:
            raise LabError(f"{self.name}: {' '.join(argv)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def run(self, *argv, **kwargs):
        """exec() that must succeed; answers with what it wrote to standard output."""
        return self.exec(*argv, check=True, **kwargs).stdout

    def start(self, *argv, log, env=None, stdin=subprocess.DEVNULL):
        """Starts a process inside that writes to the file `log` (in logs/)."""
        path = self.logs / log
        with open(path, "ab") as file:
            popen = subprocess.Popen(self.enter([str(part) for part in argv]), stdin=stdin, stdout=file,
                                     stderr=subprocess.STDOUT, env={**self.environment(), **(env or {})})
        process = Process(popen, path)
        self._processes.append(process)
        return process

    def python(self, script, *argv, log, env=None):
        """Starts one of the lab's own scripts inside and waits until it says that it is ready."""
        path = self.logs / log
        offset = path.stat().st_size if path.exists() else 0
        process = self.start("/usr/bin/python3", "-I", str(HERE / script), *argv, log=log, env=env)

        def ready():
            if not process.alive():
                raise LabError(f"{self.name}: {script} ended: {process.output()}")
            return "READY\n" in path.read_text(errors="replace")[offset:]

        wait_for(ready, 15, f"{script} ready in {self.name}")
        return process

    # -- kernel

    def net(self):
        """The path of the network namespace."""
        return f"/proc/{self.pid}/ns/net"

    def ip(self, *argv):
        """`ip -j ARGS` as Python values."""
        out = self.run("ip", "-j", *argv)
        return json.loads(out) if out.strip() else []

    def sysctl(self, key, value=None):
        path = "/proc/sys/" + key
        if value is None:
            return self.run("cat", path).strip()
        return self.run("sh", "-c", f"echo {value} > {path}")

    # -- the end

    def end(self):
        """Ends everything inside; the folder stays."""
        # The first process ends with its standard input, and everything inside with it.
        self._holder.stdin.close()
        try:
            self._holder.wait(10)
        except subprocess.TimeoutExpired:
            os.kill(self.pid, signal.SIGKILL)
            self._holder.wait()
        self._holder.stdout.close()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.popen.kill()
                process.popen.wait()

    def close(self):
        """Ends everything inside and removes the folder. Never raises."""
        if self.closed:
            return
        self.closed = True
        self.end()
        if not self.lab.keep:
            shutil.rmtree(self.base, ignore_errors=True)
