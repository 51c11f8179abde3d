# SPDX-License-Identifier: GPL-2.0-or-later
"""Builds the managed plugin with a real Docker: the one that answers, or an engine of the lab."""
import glob
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "lab"))
from labhost import fetch  # noqa: E402
from labhost.host import Lab  # noqa: E402

PLUGIN = os.environ.get("AGENTGATE_PLUGIN", os.path.join(ROOT, "build", "plugin"))
SOURCES = ["config.json", "Dockerfile", ".dockerignore", "CMakeLists.txt", "CMakePresets.json", "scripts/deps",
           "netdriver/**", "plugin/**"]


def sources():
    """What the plugin is made from, as a hash."""
    out = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(glob.glob(os.path.join(ROOT, pattern), recursive=True)):
            if os.path.isfile(path):
                with open(path, "rb") as file:
                    out.update(os.path.relpath(path, ROOT).encode() + b"\0" + hashlib.sha256(file.read()).digest())
    return out.hexdigest()


def fresh():
    """Whether the plugin is there and made from the sources as they are."""
    try:
        with open(os.path.join(PLUGIN, "sources")) as file:
            return file.read() == sources()
    except OSError:
        return False


def build_with(docker, base=None):
    """docker(arguments) runs it, with the output on standard error."""
    what = sources()
    new = PLUGIN + ".new"
    shutil.rmtree(new, ignore_errors=True)
    os.makedirs(os.path.join(new, "rootfs"))
    arguments = ["--build-arg", f"BASE={base}", "--network", "none"] if base else []
    docker(["build", *arguments, "-t", "agentgate/rootfs", ROOT], stdout=sys.stderr)
    container = docker(["create", "agentgate/rootfs"], stdout=subprocess.PIPE).stdout.decode().strip()
    try:
        tar = docker(["export", container], stdout=subprocess.PIPE).stdout
    finally:
        docker(["rm", container], stdout=subprocess.DEVNULL)
    # What `docker create` puts there for itself is not the image's.
    subprocess.run(["tar", "-C", os.path.join(new, "rootfs"), "-x", "--exclude=.dockerenv", "--exclude=dev",
                    "--exclude=proc", "--exclude=sys"], input=tar, check=True)
    shutil.copy(os.path.join(ROOT, "config.json"), new)
    with open(os.path.join(new, "sources"), "w") as file:
        file.write(what)
    shutil.rmtree(PLUGIN, ignore_errors=True)
    os.rename(new, PLUGIN)


def build_in_lab(engine="28.5"):
    """Nothing of the machine's is used but the archive of its apt, the first time."""
    base = fetch.base_image()
    with Lab(engine) as lab:
        lab.start_engine()

        def docker(arguments, **options):
            # The builder of Debian's docker is the one inside the engine.
            return subprocess.run(["docker", *arguments], check=True, stdin=subprocess.DEVNULL,
                                  env={**lab.environment(), "DOCKER_BUILDKIT": "0"}, **options)
        docker(["import", base, "lab/base"], stdout=subprocess.DEVNULL)
        build_with(docker, "lab/base")


def assemble(agentgated, folder):
    """A plugin with the daemon of a build, sanitizers and all, in a second: config.json, the daemon, iptables,
    and the machine's libraries. For tests that are about something else than what the Dockerfile makes."""
    root = os.path.join(folder, "rootfs")
    for name in ("usr/sbin", "usr/lib", "usr/lib64", "etc", "host", "run", "tmp", "var"):
        os.makedirs(os.path.join(root, name))
    for name in ("sbin", "lib", "lib64"):
        os.symlink("usr/" + name, os.path.join(root, name))
    os.symlink("/run", os.path.join(root, "var/run"))
    shutil.copy(os.path.join(ROOT, "config.json"), folder)
    programs = {"agentgated": agentgated, "iptables": "/usr/sbin/iptables", "ip6tables": "/usr/sbin/ip6tables"}
    for kind in ("nft", "legacy"):
        for name in ("iptables", "ip6tables"):
            programs[f"{name}-{kind}"] = f"/usr/sbin/{name}-{kind}"
    modules = glob.glob("/usr/lib/*/xtables")[0]
    shutil.copytree(modules, root + modules)
    for name, program in programs.items():
        subprocess.run(["strip", "--strip-debug", "-o", os.path.join(root, "usr/sbin", name), program], check=True)
    linked = subprocess.run(["ldd", *programs.values(), *glob.glob(modules + "/*.so")], capture_output=True, text=True)
    for library in sorted({word for word in linked.stdout.split() if word.startswith("/") and ":" not in word}):
        target = root + os.path.join("/usr", library.removeprefix("/usr/").lstrip("/"))
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copy(library, target)
    for name, line in (("passwd", "root:x:0:0:root:/:/usr/sbin/nologin\n"), ("group", "root:x:0:\n")):
        with open(os.path.join(root, "etc", name), "w") as file:
            file.write(line)
    return folder


def size():
    total = 0
    for folder, _, files in os.walk(os.path.join(PLUGIN, "rootfs")):
        total += sum(os.lstat(os.path.join(folder, name)).st_size for name in files)
    return total


def build(where="auto", again=False):
    """Makes build/plugin unless it is fresh; what was done, with figures."""
    if fresh() and not again:
        return {"built": False, "bytes": size()}
    start = time.time()
    docker = shutil.which("docker")
    answers = docker is not None and subprocess.run([docker, "version"], capture_output=True).returncode == 0
    if where == "docker" or (where == "auto" and answers):
        if os.geteuid() != 0:
            raise PermissionError("the files of the plugin must be root's: run as root")
        build_with(lambda arguments, **options: subprocess.run(["docker", *arguments], check=True, **options))
    else:
        build_in_lab()
    return {"built": True, "seconds": round(time.time() - start, 1), "bytes": size()}


if __name__ == "__main__":
    print(json.dumps(build()))
