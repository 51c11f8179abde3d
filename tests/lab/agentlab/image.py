# SPDX-License-Identifier: GPL-2.0-or-later
"""The test images, made of the machine's own files: no registry is needed.

lab/busybox is one static busybox. lab/python adds the machine's Python, for what busybox cannot
ask (TLS, UDP, many probes at once: probe.py).
"""

import fcntl
import glob
import io
import os
import re
import subprocess
import tarfile

from .errors import LabError
from .fetch import cache_dir

BUSYBOX_IMAGE = "lab/busybox"
PYTHON_IMAGE = "lab/python"
BUSYBOX = "/bin/busybox"
PYTHON = "/usr/bin/python3"
FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000::/tmp:/bin/sh\n",
    "etc/group": "root:x:0:\nagent:x:1000:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
# Of the standard library, what no probe imports and what is large.
LEFT_OUT = re.compile(r"/(test|tests|idlelib|tkinter|lib2to3|ensurepip|pydoc_data|config-[^/]*|turtledemo|"
                      r"unittest|sqlite3|xmlrpc|wsgiref|curses|dbm|venv)(/|$)|/dist-packages(/|$)")


def _busybox_files(tar):
    try:
        applets = subprocess.run([BUSYBOX, "--list"], check=True, capture_output=True, text=True).stdout.split()
    except OSError as error:
        raise LabError(f"{BUSYBOX}: {error.strerror}; install busybox-static") from None
    for folder in ("bin", "etc", "tmp", "root", "proc", "sys", "dev", "var"):
        entry = tarfile.TarInfo(folder)
        entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
        tar.addfile(entry)
    tar.add(BUSYBOX, "bin/busybox")
    for applet in applets:
        if applet != "busybox":
            entry = tarfile.TarInfo(f"bin/{applet}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
    for name, text in FILES.items():
        entry = tarfile.TarInfo(name)
        entry.size = len(text)
        tar.addfile(entry, io.BytesIO(text.encode()))


def _libraries(programs):
    found = set()
    for program in programs:
        done = subprocess.run(["ldd", program], capture_output=True, text=True)
        found.update(re.findall(r"(/\S+) \(0x", done.stdout))
    return sorted(found)


def _python_files(tar):
    program = os.path.realpath(PYTHON)
    # Of the Python that goes into the image, whichever one runs this.
    library = subprocess.run(
        [PYTHON, "-I", "-c", "import sysconfig; print(sysconfig.get_paths()['stdlib'])"],
        check=True, capture_output=True, text=True).stdout.strip()
    tar.add(program, program[1:])
    for name in ("python3", "python"):
        entry = tarfile.TarInfo(f"bin/{name}")
        entry.type, entry.linkname = tarfile.SYMTYPE, program
        tar.addfile(entry)
    tar.add(library, library[1:], filter=lambda entry: None if LEFT_OUT.search("/" + entry.name) else entry)
    for path in _libraries([program] + glob.glob(f"{library}/lib-dynload/*.so")):
        tar.add(os.path.realpath(path), path[1:])


def build(name):
    """The path of a tar that `docker import` makes image `name` of; made once."""
    maker = {BUSYBOX_IMAGE: [_busybox_files], PYTHON_IMAGE: [_busybox_files, _python_files]}[name]
    folder = cache_dir() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    sources = [BUSYBOX, __file__] + ([PYTHON] if len(maker) > 1 else [])
    stamp = "-".join(str(int(os.stat(path).st_mtime)) for path in sources)
    target = folder / f"{name.replace('/', '-')}-{stamp}.tar"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            for old in folder.glob(f"{name.replace('/', '-')}-*.tar"):
                old.unlink()
            partial = target.with_suffix(".partial")
            with tarfile.open(partial, mode="w") as tar:
                for part in maker:
                    part(tar)
            partial.rename(target)
    return target
