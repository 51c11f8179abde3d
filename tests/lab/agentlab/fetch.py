# SPDX-License-Identifier: GPL-2.0-or-later
"""Engines and runtimes from Debian, unpacked into a cache directory.

Packages are unpacked (dpkg -x), never installed: no service starts, no maintainer script runs and
the machine's package database does not change. The archive is the one that the machine's own apt
uses, asked for other suites with lists and caches of the lab's own.
"""

import contextlib
import dataclasses
import fcntl
import glob
import json
import os
import pathlib
import shutil
import subprocess
import tempfile

from .errors import LabError

DEFAULT_CACHE = "/var/cache/agentgate-lab"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


@dataclasses.dataclass(frozen=True)
class Source:
    """Packages of one suite that are unpacked together. `version`: what the first one must be."""

    name: str
    suite: str
    packages: tuple
    version: str = ""


ENGINE_SOURCES = {
    "20.10": Source("20.10", "bookworm", ("docker.io", "containerd", "libdevmapper1.02.1"), "20.10."),
    "26.1": Source("26.1", "trixie", ("docker.io", "containerd", "docker-cli"), "26.1."),
    "28.5": Source("28.5", "forky", ("docker.io", "containerd", "docker-cli"), "28.5."),
}
# One runc for every engine: the newer suites' runc needs a newer libc than Debian 12 has.
RUNC_SOURCE = Source("runc", "bookworm", ("runc",))
RUNSC_SOURCES = {
    "20221219": Source("runsc-20221219", "bookworm", ("runsc",)),
    "20240729": Source("runsc-20240729", "trixie", ("runsc",)),
}
DEFAULT_RUNSC = "20240729"

# runsc before August 2024 takes the presence of this file for the machine's first network
# namespace; from about kernel 6.15 it is in every namespace. The replacement is as long, and is
# what upstream looks at since.
RUNSC_OLD_PROBE = b"/proc/sys/net/core/rmem_default"
RUNSC_NEW_PROBE = b"/proc/sys/net/core/./dev_weight"


@dataclasses.dataclass(frozen=True)
class Engine:
    """An unpacked engine: where its programs are and what it calls itself."""

    name: str
    version: str
    root: pathlib.Path

    @property
    def path(self):
        return [str(self.root / "usr/sbin"), str(self.root / "usr/bin")]

    @property
    def libraries(self):
        return sorted({os.path.dirname(p) for p in glob.glob(f"{self.root}/**/*.so*", recursive=True)})


def cache_dir():
    return pathlib.Path(os.environ.get("AGENTGATE_LAB_CACHE", DEFAULT_CACHE))


@contextlib.contextmanager
def _locked():
    cache = cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield cache


def _archive():
    targets = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(COMPONENT)", "Created-By: Packages"],
        check=True, capture_output=True, text=True).stdout
    addresses = [line.split()[0] for line in targets.splitlines() if line.endswith(" main")]
    # A security archive has no engines of its own; it is never the first choice.
    addresses.sort(key=lambda address: "security" in address)
    if not addresses:
        raise LabError("apt has no package index: run 'apt-get update' first")
    return addresses[0]


def _apt(cache, suite):
    """The options that make apt work on one suite and in a directory of its own."""
    base = cache / "apt" / suite
    for folder in ("lists/partial", "cache/archives/partial"):
        (base / folder).mkdir(parents=True, exist_ok=True)
    sources = base / "sources.list"
    sources.write_text(f"deb [signed-by={KEYRING}] {_archive()} {suite} main\n")
    settings = {
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": base / "lists",
        "Dir::Cache": base / "cache",
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
    }
    return ["apt-get", "-q"] + [part for key, value in settings.items() for part in ("-o", f"{key}={value}")]


def _run(command, **kwargs):
    done = subprocess.run(command, capture_output=True, text=True, **kwargs)
    if done.returncode:
        raise LabError(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def _unpack(cache, source):
    """Downloads and unpacks `source` once; answers with its folder and package versions."""
    target = cache / "unpacked" / source.name
    note = target / "packages.json"
    if note.exists():
        return target, json.loads(note.read_text())
    apt = _apt(cache, source.suite)
    if not glob.glob(f"{cache}/apt/{source.suite}/lists/*Packages*"):
        _run(apt + ["update", "--error-on=any"])
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=source.name + ".") as work:
        downloads = pathlib.Path(work) / "deb"
        root = pathlib.Path(work) / "root"
        downloads.mkdir()
        root.mkdir()
        try:
            _run(apt + ["download", *source.packages], cwd=downloads)
        except LabError:
            # The archive may have moved on since the lists were fetched.
            _run(apt + ["update", "--error-on=any"])
            _run(apt + ["download", *source.packages], cwd=downloads)
        versions = {}
        for deb in sorted(downloads.iterdir()):
            name, version = _run(["dpkg-deb", "-W", "--showformat", "${Package}\t${Version}", deb]).split("\t")
            versions[name] = version
            _run(["dpkg", "-x", deb, root])
        if not versions[source.packages[0]].startswith(source.version):
            raise LabError(f"suite {source.suite} has {source.packages[0]} {versions[source.packages[0]]} now, "
                           f"not {source.version}x: teach fetch.py where {source.name} is")
        (root / "packages.json").write_text(json.dumps(versions, indent=1) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        root.rename(target)
    return target, versions


def fetch_engine(name):
    """The engine `name` ("20.10", "26.1", "28.5"), from the cache or from Debian."""
    if name not in ENGINE_SOURCES:
        raise LabError(f"engine {name} is unknown: choose one of {', '.join(ENGINE_SOURCES)}")
    with _locked() as cache:
        root, versions = _unpack(cache, ENGINE_SOURCES[name])
    return Engine(name, versions["docker.io"].split("+")[0], root)


def fetch_runc():
    with _locked() as cache:
        root, _ = _unpack(cache, RUNC_SOURCE)
    return root / "usr/sbin/runc"


def kernel_misleads_runsc():
    """Does a fresh network namespace show what runsc takes for a sign of the first one?"""
    return subprocess.run(["unshare", "--net", "test", "-e", RUNSC_OLD_PROBE.decode()]).returncode == 0


def fetch_runsc(version=DEFAULT_RUNSC):
    """The path of a runsc that starts on this kernel, patched if it has to be."""
    if version not in RUNSC_SOURCES:
        raise LabError(f"runsc {version} is unknown: choose one of {', '.join(RUNSC_SOURCES)}")
    with _locked() as cache:
        root, _ = _unpack(cache, RUNSC_SOURCES[version])
        original = root / "usr/bin/runsc"
        if not kernel_misleads_runsc():
            return original
        patched = root / "patched/runsc"
        if not patched.exists():
            code = original.read_bytes()
            if RUNSC_OLD_PROBE not in code:
                return original
            patched.parent.mkdir(exist_ok=True)
            partial = patched.with_suffix(".partial")
            partial.write_bytes(code.replace(RUNSC_OLD_PROBE, RUNSC_NEW_PROBE))
            partial.chmod(0o755)
            partial.rename(patched)
        return patched


def fetch_all(report=print):
    for name in ENGINE_SOURCES:
        engine = fetch_engine(name)
        report(f"engine {name}: {engine.version} in {engine.root}")
    report(f"runc: {fetch_runc()}")
    for version in RUNSC_SOURCES:
        report(f"runsc {version}: {fetch_runsc(version)}")
