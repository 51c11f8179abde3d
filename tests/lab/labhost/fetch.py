# SPDX-License-Identifier: GPL-2.0-or-later
"""Gets engines, gVisor, Compose and kernels from Debian's archive into a cache, without installing them.

Every engine is unpacked with dpkg -x into the cache; the machine's own packages, services and apt
state stay as they are. The archive's address is the machine's own (apt-get indextargets).
"""
import fcntl
import glob
import hashlib
import os
import shutil
import subprocess
import tempfile

DEPS = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../scripts/deps"))
CACHE = os.environ.get("AGENTGATE_LAB_CACHE", "/var/cache/agentgate-lab")

# name: (suite, packages). runc is Debian 12's everywhere: newer ones need a newer libc.
BUNDLES = {
    "20.10": ("bookworm", ["docker.io", "containerd", "runc"]),
    "26.1": ("trixie", ["docker.io", "docker-cli", "containerd"]),
    "28.5": ("forky", ["docker.io", "docker-cli", "containerd"]),
    "runsc": ("bookworm-backports", ["runsc"]),
    "firewalld": ("bookworm", ["firewalld", "python3-firewall", "python3-nftables", "python3-dbus", "python3-gi",
                               "gir1.2-glib-2.0", "libgirepository-1.0-1", "dbus-daemon", "dbus-bin",
                               "libdbus-1-3", "libapparmor1"]),
    # Compose and Docker's SDK for Python, with what they import and a machine may not have.
    "compose": ("bookworm", ["docker-compose", "python3-docker"] + ["python3-" + name for name in (
        "attr", "certifi", "chardet", "charset-normalizer", "distro", "distutils", "docopt", "dockerpty",
        "dotenv", "idna", "jsonschema", "pkg-resources", "pyrsistent", "requests", "six", "texttable",
        "urllib3", "websocket", "yaml")]),
    "registry": ("bookworm", ["docker-registry"]),
    "debootstrap": ("bookworm", ["debootstrap"]),
}
ENGINES = ["20.10", "26.1", "28.5"]
# Kernels that scripts/vm boots, and the suite that has each as linux-image-cloud-amd64.
KERNELS = {"6.1": "bookworm", "6.12": "trixie"}


def _archive():
    out = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"],
        check=True, capture_output=True, text=True).stdout.split()
    plain = [uri for uri in out if "security" not in uri]
    if not plain:
        raise RuntimeError("apt has no archive; run apt-get update")
    return plain[0]


def _apt(cache, suite):
    """A folder for apt to work in, and the options that make it work there, on that suite."""
    work = os.path.join(cache, "apt-" + suite)
    for folder in ("lists/partial", "cache/archives/partial", "debs"):
        os.makedirs(os.path.join(work, folder), exist_ok=True)
    sources = os.path.join(work, "sources.list")
    with open(sources, "w") as file:
        file.write("deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] "
                   f"{_archive()} {suite} main\n")
    return work, ["-o", f"Dir::Etc::SourceList={sources}", "-o", "Dir::Etc::SourceParts=/dev/null",
                  "-o", f"Dir::State::Lists={work}/lists", "-o", f"Dir::Cache={work}/cache",
                  "-o", "APT::Sandbox::User=root", "-qq"]


def bundle(name):
    """The folder of a bundle, fetched if need be."""
    suite, packages = BUNDLES[name]
    target = os.path.join(CACHE, name)
    os.makedirs(CACHE, exist_ok=True)
    with open(os.path.join(CACHE, ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(os.path.join(target, ".complete")):
            return target
        work, options = _apt(CACHE, suite)
        apt = ["apt-get", *options]
        subprocess.run(apt + ["update"], check=True)
        subprocess.run(apt + ["download"] + packages, check=True, cwd=os.path.join(work, "debs"),
                       stdout=subprocess.DEVNULL)
        os.makedirs(target, exist_ok=True)
        for package in packages:
            newest = max(glob.glob(f"{work}/debs/{package}_*.deb"), key=os.path.getmtime)
            if package == "docker.io" and not os.path.basename(newest).startswith(f"docker.io_{name}."):
                raise RuntimeError(f"suite {suite} has {os.path.basename(newest)} now, not {name}: "
                                   "teach tests/lab/labhost/fetch.py where that engine is")
            subprocess.run(["dpkg", "-x", newest, target], check=True)
        open(os.path.join(target, ".complete"), "w").close()
    return target


def runsc():
    """A runsc that starts on this kernel.

    Kernels from about 6.15 show net.core.rmem_default in every network namespace, and Debian's
    runsc takes its presence for the host's namespace. Later gVisor looks at dev_weight instead;
    the same change is made here in the binary, with a string of the same length.
    """
    original = os.path.join(bundle("runsc"), "usr/bin/runsc")
    patched = os.path.join(CACHE, "runsc-patched")
    if not os.path.exists(patched):
        with open(original, "rb") as file:
            data = file.read()
        data = data.replace(b"/proc/sys/net/core/rmem_default", b"/proc/sys/net/core/./dev_weight")
        with open(patched + ".new", "wb") as file:
            file.write(data)
        os.chmod(patched + ".new", 0o755)
        os.rename(patched + ".new", patched)
    return patched


def registry():
    """The program of a registry."""
    return os.path.join(bundle("registry"), "usr/bin/docker-registry")


def base_image():
    """A tar of Debian 12 with what the Dockerfile installs, as its BASE: it then needs no network."""
    with open(DEPS, "rb") as file:
        wanted = hashlib.sha256(file.read()).hexdigest()[:16]
    folder = os.path.join(bundle("debootstrap"), "usr")
    target = os.path.join(CACHE, f"base-{wanted}.tar")
    with open(os.path.join(CACHE, ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(target):
            return target
        for old in glob.glob(os.path.join(CACHE, "base-*.tar")):
            os.unlink(old)
        with tempfile.TemporaryDirectory(prefix="base-", dir=CACHE) as root:
            os.chmod(root, 0o755)
            # Namespaces of its own, so that nothing stays mounted or running whatever happens.
            script = f"""
                export DEBOOTSTRAP_DIR={folder}/share/debootstrap LC_ALL=C
                sh {folder}/sbin/debootstrap --variant=minbase bookworm {root} {_archive()} >&2
                cp /etc/resolv.conf {root}/etc/resolv.conf
                cp {DEPS} {root}/deps
                mount -t proc proc {root}/proc
                chroot {root} /deps plugin >&2
                umount {root}/proc
                rm -rf {root}/deps {root}/var/lib/apt/lists/* {root}/var/cache/apt {root}/usr/share/doc
                tar -C {root} -cf {target}.new .
            """
            done = subprocess.run(["unshare", "--mount", "--pid", "--fork", "sh", "-ec", script],
                                  stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                  stderr=subprocess.PIPE, text=True)
            if done.returncode != 0:
                raise RuntimeError("base image: " + done.stderr[-3000:])
        os.rename(target + ".new", target)
    return target


def kernel(name):
    """The boot image of a kernel, its folder of modules, and its release (as of uname -r)."""
    suite = KERNELS[name]
    cache = os.path.join(CACHE, "vm")
    target = os.path.join(cache, "linux-" + name)
    os.makedirs(cache, exist_ok=True)
    with open(os.path.join(cache, ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(os.path.join(target, ".complete")):
            work, options = _apt(cache, suite)
            subprocess.run(["apt-get", *options, "update"], check=True)
            # The package of that name only depends on the kernel of the day.
            depends = subprocess.run(["apt-cache", *options, "depends", "--important", "linux-image-cloud-amd64"],
                                     check=True, capture_output=True, text=True).stdout
            package = next(line.split()[1] for line in depends.splitlines() if "Depends:" in line)
            if not package.startswith(f"linux-image-{name}."):
                raise RuntimeError(f"suite {suite} has {package} now, not {name}: "
                                   "teach tests/lab/labhost/fetch.py where that kernel is")
            subprocess.run(["apt-get", *options, "download", package], check=True,
                           cwd=os.path.join(work, "debs"), stdout=subprocess.DEVNULL)
            newest = max(glob.glob(f"{work}/debs/{package}_*.deb"), key=os.path.getmtime)
            shutil.rmtree(target, ignore_errors=True)
            subprocess.run(["dpkg", "-x", newest, target], check=True)
            open(os.path.join(target, ".complete"), "w").close()
    image = glob.glob(f"{target}/boot/vmlinuz-*")[0]
    release = os.path.basename(image).removeprefix("vmlinuz-")
    # Below /lib until Debian 12, below /usr/lib since.
    return image, glob.glob(f"{target}/**/lib/modules/{release}", recursive=True)[0], release


def compose():
    """The program docker-compose, and the environment for it and for programs with Docker's SDK."""
    packages = os.path.join(bundle("compose"), "usr/lib")
    return (["/usr/bin/python3", "-B", os.path.join(bundle("compose"), "usr/bin/docker-compose")],
            {"PYTHONPATH": f"{packages}/python3/dist-packages:{packages}/python3.11"})


def fetch(engines=ENGINES):
    for name in engines:
        print(f"engine {name}: {bundle(name)}")
    print(f"compose: {bundle('compose')}")
    print(f"runc: {os.path.join(bundle('20.10'), 'usr/sbin/runc')}")
    print(f"runsc: {runsc()}")
