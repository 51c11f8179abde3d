# SPDX-License-Identifier: GPL-2.0-or-later
"""A lab: what was made together and ends together."""

import atexit
import os
import pathlib
import shutil
import signal

from .errors import LabError
from .host import Host
from .internet import Internet
from .namespace import remove_cgroups

ROOT = pathlib.Path("/tmp")
PREFIX = "agentlab-"


def _start_time(pid):
    """When process `pid` started, in ticks since boot: a PID alone may be somebody else's by now."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def labs():
    """The labs on this machine: (folder, pid of the owner, is the owner alive)."""
    found = []
    for folder in sorted(ROOT.glob(PREFIX + "*")):
        parts = folder.name[len(PREFIX):].split("-")
        if len(parts) == 3 and all(part.isdigit() for part in parts):
            pid = int(parts[0])
            found.append((folder, pid, _start_time(pid) == int(parts[1])))
    return found


def sweep():
    """Removes what labs left whose owner was killed. Their processes ended with the owner."""
    removed = []
    for folder, _, alive in labs():
        if not alive:
            shutil.rmtree(folder, ignore_errors=True)
            remove_cgroups(folder.name)
            removed.append(folder)
    return removed


_open = []


def _close_all():
    for lab in list(_open):
        lab.close()


def _on_signal(number, _frame):
    raise SystemExit(128 + number)


class Lab:
    """Owns namespaces, a folder under /tmp and a cgroup. Use it in a `with`."""

    _count = 0

    def __init__(self, keep=False):
        if os.geteuid() != 0:
            raise LabError("the lab makes namespaces: it needs root")
        sweep()
        Lab._count += 1
        self.keep = keep
        self.name = f"{PREFIX}{os.getpid()}-{_start_time(os.getpid())}-{Lab._count}"
        self.base = ROOT / self.name
        self.base.mkdir(mode=0o711)
        self.cgroup = self.name
        self._members = []
        self._internet = None
        if not _open:
            atexit.register(_close_all)
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, _on_signal)
        _open.append(self)

    def internet(self):
        """The far side; one for each lab, made when first asked for."""
        if self._internet is None:
            self._internet = Internet(self)
            self._members.append(self._internet)
        return self._internet

    def host(self, engine="20.10", **options):
        """A Docker host on the lab's internet; its engine is not started yet."""
        internet = self.internet()
        number = sum(isinstance(member, Host) for member in self._members)
        host = Host(self, internet, number, engine, **options)
        self._members.append(host)
        return host

    def close(self):
        if self not in _open:
            return
        _open.remove(self)
        for member in reversed(self._members):
            member.close()
        remove_cgroups(self.cgroup)
        if not self.keep:
            shutil.rmtree(self.base, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
