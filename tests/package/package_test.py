# SPDX-License-Identifier: GPL-2.0-or-later
"""The Debian package on a Debian that boots in namespaces: install, upgrade, remove, purge.

usage: package_test.py [--suite bookworm|trixie] [--deb FILE]

The machine has the suite's own Docker. A container is released, another is closed; both send all the
time, and what reaches the far side is counted by rules there, not by the code under test.
"""
import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

from machine import ROOT, Machine, Root, fetch, wait_for

RELEASES = {"bookworm": "12", "trixie": "13"}
OLD = "0.0.1-1"
ALLOWED, DENIED = "192.0.2.80", "192.0.2.81"
LINK = "agn0123456789"

# path: (mode, group)
FILES = {
    "/usr/bin/agentgate": (0o755, "root"),
    "/usr/sbin/agentgated": (0o755, "root"),
    "/usr/lib/systemd/system/agentgated.service": (0o644, "root"),
    "/usr/lib/sysusers.d/agentgate.conf": (0o644, "root"),
    "/usr/share/agentgate/remove-rules": (0o755, "root"),
    "/usr/share/agentgate/policies/default.json": (0o644, "root"),
    "/usr/share/man/man1/agentgate.1.gz": (0o644, "root"),
    "/usr/share/man/man8/agentgated.8.gz": (0o644, "root"),
    "/usr/share/bash-completion/completions/agentgate": (0o644, "root"),
    "/usr/share/zsh/vendor-completions/_agentgate": (0o644, "root"),
    "/usr/share/fish/vendor_completions.d/agentgate.fish": (0o644, "root"),
    "/usr/share/doc/agentgate/copyright": (0o644, "root"),
    "/usr/share/doc/agentgate/changelog.Debian.gz": (0o644, "root"),
    "/usr/share/doc/agentgate/changelog.gz": (0o644, "root"),
    "/etc/logrotate.d/agentgate": (0o644, "root"),
    "/etc/agentgate": (0o755, "root"),
    "/etc/agentgate/policies": (0o755, "root"),
    # Made by the service.
    "/var/lib/agentgate": (0o700, "root"),
    "/var/log/agentgate": (0o750, "root"),
    "/run/agentgate": (0o755, "root"),
    "/run/agentgate/agentgate.sock": (0o660, "agentgate"),
}

SETUP = f"""
ip netns add far
ip link add up0 type veth peer name far0 netns far
ip addr add 203.0.113.2/24 dev up0
ip link set up0 up
ip -n far addr add 203.0.113.1/24 dev far0
for one in lo far0; do ip -n far link set $one up; done
for one in {ALLOWED} {DENIED}; do ip -n far addr add $one/32 dev lo; done
ip route add default via 203.0.113.1
ip netns exec far nft -f - <<END
table ip far {{
  counter allowed {{}}
  counter other {{}}
  chain in {{
    type filter hook input priority 0; policy accept;
    iif lo accept
    ip saddr 203.0.113.2 ip daddr {ALLOWED} tcp dport 80 counter name allowed accept
    counter name other
  }}
}}
END
systemd-run --quiet --unit=far-server ip netns exec far busybox nc -ll -p 80 -e busybox cat
mkdir -p /root/image/bin /root/image/tmp
cp /bin/busybox /root/image/bin
for one in sh nc sleep wc echo touch test; do ln -s busybox /root/image/bin/$one; done
tar -C /root/image -c . | docker import -c 'CMD ["sleep", "1000000"]' -c 'ENV PATH=/bin' - test
"""
# The allowed server echoes each line: one connection for all of it. Beside it, what is not allowed.
FLOW = f"while :; do echo; sleep 0.05; done | nc {ALLOWED} 80 >/tmp/flow; touch /tmp/ended"
DENIED_TRIES = f"while :; do nc -w 1 {DENIED} 80 </dev/null; nc -w 1 {ALLOWED} 81 </dev/null; done"
CLOSED_TRIES = (f": >/tmp/got; while :; do nc -w 1 {DENIED} 80 </dev/null; nc -w 1 {ALLOWED} 81 </dev/null; "
                f"echo x | nc -w 1 {ALLOWED} 80 >>/tmp/got; done")


def dependencies(deb):
    """The first alternative of each package that it depends on."""
    field = subprocess.run(["dpkg-deb", "-f", deb, "Depends"], check=True, capture_output=True, text=True).stdout
    return [re.match(r"[a-z0-9.+-]+", one.strip())[0] for one in field.split(",")]


def with_version(deb, version, folder):
    """The same package with another version."""
    tree = pathlib.Path(folder) / "tree"
    subprocess.run(["dpkg-deb", "-R", deb, tree], check=True)
    control = tree / "DEBIAN/control"
    control.write_text(re.sub(r"(?m)^Version: .*$", f"Version: {version}", control.read_text()))
    out = pathlib.Path(folder) / f"agentgate_{version}.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-b", tree, out], check=True, stdout=subprocess.DEVNULL)
    return out


def on_this_machine(suite):
    try:
        return f'VERSION_ID="{RELEASES[suite]}"' in pathlib.Path("/etc/os-release").read_text()
    except OSError:
        return False


def built(suite, folder):
    """The package for a suite: built here, or in a root of the suite, with the unit tests."""
    if on_this_machine(suite):
        done = subprocess.run([ROOT / "scripts/package"], check=True, capture_output=True, text=True)
        return ROOT / done.stdout.splitlines()[-1]
    listed = subprocess.run(["sh", ROOT / "scripts/deps", "build", "--list"], check=True, capture_output=True,
                            text=True)
    tools = ["libgtest-dev", "dpkg-dev", "python3", "iproute2", "procps", "nftables", "tcpdump", "ccache", "bash",
             "file"]
    cache = pathlib.Path(fetch.CACHE) / f"ccache-{suite}"
    cache.mkdir(exist_ok=True)
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or str(int(time.time()))
    with Root(suite, listed.stdout.split() + tools) as root:
        shutil.copytree(ROOT, root.path / "src", symlinks=True,
                        ignore=lambda path, names: [name for name in names if path == str(ROOT) and
                                                    (name.startswith("build") or name == ".git")])
        root.chroot(f"""
            export CCACHE_DIR=/ccache SOURCE_DATE_EPOCH={epoch}
            g++ --version | head -1
            cd /src
            scripts/package
            cmake --preset release -DAGENTGATE_TESTS=ON >/dev/null
            cmake --build --preset release -- --quiet
            ctest --test-dir build/release -L '^unit$' --output-on-failure --no-tests=error -j2 | tail -40
            exit ${{PIPESTATUS[0]}}
        """, {cache: "/ccache"})
        deb = next((root.path / "src/build").glob("agentgate_*.deb"))
        return pathlib.Path(shutil.copy(deb, folder))


class Package(unittest.TestCase):
    """In the order of the names; each starts where the one before ended."""

    suite = deb = None

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="agentgate-deb-")
        cls.addClassCleanup(folder.cleanup)
        if cls.deb is None:
            cls.deb = built(cls.suite, folder.name)
        print(f"package: {cls.deb}")
        old = with_version(cls.deb, OLD, folder.name)
        cls.version = subprocess.run(["dpkg-deb", "-f", cls.deb, "Version"], check=True, capture_output=True,
                                     text=True).stdout.strip()
        machine = Machine(cls.suite, [
            *dependencies(cls.deb), "systemd", "systemd-sysv", "dbus", "logrotate", "iptables", "nftables", "iproute2",
            "kmod", "procps", "docker.io", "busybox-static", *(["docker-cli"] if cls.suite != "bookworm" else [])])
        cls.machine = cls.enterClassContext(machine)
        for source, name in ((old, "old.deb"), (cls.deb, "new.deb")):
            shutil.copy(source, machine.path / "root" / name)

    # -- what is looked at ------------------------------------------------------------------------
    def pid(self):
        return self.machine.out("systemctl show -P MainPID agentgated")

    def installed(self):
        return self.machine.run("dpkg-query -W -f '${db:Status-Status} ${Version}' agentgate", check=False).stdout

    def exists(self, path):
        return self.machine.code(f"test -e {path} -o -L {path}") == 0

    def state(self, container):
        return json.loads(self.machine.run(f"agentgate --json check {container}", check=False).stdout)["outcome"]

    def rules(self):
        # While no daemon runs its tables have no owner.
        return re.sub(r" progname \w+|\n\tflags [a-z,]*(?=\n)", "", self.machine.out("nft -s -a list ruleset"))

    def answered(self):
        return int(self.machine.out("docker exec a1 wc -c /tmp/flow").split()[0])

    def counter(self, name):
        found = self.machine.out(f"ip netns exec far nft -j list counter ip far {name}")
        return next(one["counter"]["packets"] for one in json.loads(found)["nftables"] if "counter" in one)

    def still(self, before, rules):
        """The live flow goes on, the ports and rules are what they were, nothing else came out."""
        wait_for("an answer on the live flow", lambda: self.answered() > before, 10)
        self.assertNotEqual(self.machine.code("docker exec a1 test -e /tmp/ended"), 0)
        self.assertEqual(self.rules(), rules)
        self.assertEqual((self.state("a1"), self.state("a2")), ("released", "closed"))
        self.assertEqual(self.counter("other"), 0)
        self.assertEqual(self.machine.out("docker exec a2 wc -c /tmp/got"), "0 /tmp/got")

    # -- the life of a package --------------------------------------------------------------------
    def test_0_lintian(self):
        done = subprocess.run(["lintian", "--allow-root", "--fail-on", "error,warning", self.deb], capture_output=True,
                              text=True)
        self.assertEqual((done.returncode, done.stdout), (0, ""), done.stderr)

    def test_1_install(self):
        run = self.machine.run
        run("dpkg -i /root/old.deb")
        self.assertEqual(self.installed(), f"installed {OLD}")
        run("udevadm settle 2>/dev/null || true; systemctl is-active agentgated; systemctl is-enabled agentgated")
        for path, (mode, group) in FILES.items():
            # As it is there: ids and links are the machine's.
            self.assertEqual(self.machine.out(f"stat -c '%a %U %G' {path}"), f"{mode:o} root {group}", path)
        self.assertEqual(self.machine.out("readlink -f /usr/libexec/docker/cli-plugins/docker-agentgate"),
                         "/usr/bin/agentgate")
        self.assertEqual(self.machine.out("dpkg -V agentgate"), "")
        self.assertEqual(self.machine.out("dpkg -L agentgate | xargs -d '\\n' stat -c '%U %G' | sort -u"), "root root")
        verified = run("systemd-analyze --man=no verify agentgated.service")
        self.assertNotIn("agentgate", verified.stdout + verified.stderr)
        self.assertEqual(self.machine.out("systemctl show -P Before agentgated").split().count("docker.service"), 1)
        run("agentgate policy check /usr/share/agentgate/policies/*.json; agentgate policy list; agentgate health")
        # Again: nothing changes for those who have it.
        pid = self.pid()
        run("dpkg -i /root/old.deb")
        self.assertNotEqual(self.pid(), pid)

    def test_2_upgrade(self):
        run = self.machine.run
        run(SETUP)
        policy = {"version": 1, "runtimes": ["runc"], "allow": [{"cidr": f"{ALLOWED}/32", "services": ["tcp/80"]}]}
        run(f"echo '{json.dumps(policy)}' >/etc/agentgate/policies/default.json")
        run("docker network create -d agentgate --subnet 172.30.0.0/24 agents")
        for name in ("a1", "a2"):
            run(f"docker run -d --name {name} --network agents test")
        run("docker pause a1; agentgate arm a1; docker unpause a1")
        run(f"docker exec -d a1 sh -c '{FLOW}'; docker exec -d a1 sh -c '{DENIED_TRIES}'")
        run(f"docker exec -d a2 sh -c '{CLOSED_TRIES}'")
        wait_for("the flow", lambda: self.machine.code("docker exec a1 test -s /tmp/flow") == 0, 15)
        self.assertGreater(self.counter("allowed"), 0)
        rules, before, pid = self.rules(), self.answered(), self.pid()
        port = self.machine.out("ip -br link | grep -o '^agp[0-9a-f]*' | wc -l")
        self.assertEqual(port, "2")
        self.still(before, rules)

        before = self.answered()
        run("dpkg -i /root/new.deb")
        self.assertEqual(self.installed(), f"installed {self.version}")
        self.assertNotIn(self.pid(), ("0", pid))
        self.still(before, rules)
        run("agentgate health")
        incidents = json.loads(self.machine.out("agentgate --json status"))
        self.assertNotIn("closed", json.dumps(incidents["incidents"]))
        # A daemon that is not there changes nothing either, nor one that cannot start.
        pid, before = self.pid(), self.answered()
        run("systemctl stop agentgated; dpkg -i /root/new.deb; systemctl start agentgated")
        self.assertNotEqual(self.pid(), pid)
        self.still(before, rules)
        drop_in = "/run/systemd/system/agentgated.service.d"
        run(f"mkdir -p {drop_in}; printf '[Service]\\nExecStart=\\nExecStart=/bin/false\\n' >{drop_in}/false.conf")
        before = self.answered()
        done = run("dpkg -i /root/new.deb")
        self.assertIn("agentgated does not restart; closed ports stay closed", done.stderr)
        self.assertEqual(self.installed(), f"installed {self.version}")
        wait_for("an answer without the daemon", lambda: self.answered() > before, 10)
        self.assertEqual(self.rules(), rules)
        run(f"rm -r {drop_in}; systemctl daemon-reload; systemctl restart agentgated")
        self.still(before, rules)

    def test_3_disabled_stays_disabled(self):
        run, before, rules = self.machine.run, self.answered(), self.rules()
        run("systemctl disable --now agentgated; dpkg -i /root/new.deb")
        self.assertEqual(run("systemctl is-enabled agentgated", check=False).stdout.strip(), "disabled")
        self.assertEqual(run("systemctl is-active agentgated", check=False).stdout.strip(), "inactive")
        run("systemctl enable --now agentgated")
        self.still(before, rules)

    def test_4_rotation(self):
        audit = "/var/log/agentgate/audit.jsonl"
        lines = int(self.machine.out(f"wc -l <{audit}"))
        self.assertGreater(lines, 0)
        self.machine.run("logrotate -f /etc/logrotate.d/agentgate")
        self.assertFalse(self.exists(audit))
        self.machine.run("agentgate arm a2", check=False)  # not paused: refused, and a line
        self.assertEqual(self.machine.out(f"wc -l <{audit}"), "1")
        self.assertEqual(self.machine.out(f"wc -l <{audit}.1"), str(lines))
        self.assertEqual(self.machine.out(f"stat -c '%a %U' {audit}"), "600 root")

    def test_5_removal_is_refused(self):
        pid, before, rules = self.pid(), self.answered(), self.rules()
        for command in ("dpkg -r agentgate", "dpkg --purge agentgate"):
            done = self.machine.run(command, check=False)
            self.assertNotEqual(done.returncode, 0)
            for text in ("agentgate networks exist", "docker network ls -f driver=agentgate",
                         "closed ports are closed, released ones released"):
                self.assertIn(text, done.stderr)
            self.assertEqual(self.installed(), f"installed {self.version}")
            self.assertEqual(self.pid(), pid)
            self.still(before, rules)

    def test_6_remove(self):
        run = self.machine.run
        run("docker rm -f a1 a2; docker network rm agents")
        self.assertEqual(self.counter("other"), 0)
        self.assertIn("table inet agentgate", self.rules())
        self.assertIn("agn+", self.machine.out("iptables -S"))
        run("dpkg -r agentgate")
        self.assertNotIn("agentgate", self.rules().lower())
        self.assertNotIn("agn+", self.machine.out("iptables -S; ip6tables -S"))
        self.assertNotEqual(self.machine.code("pgrep -x agentgated"), 0)
        for path in FILES:
            kept = path.startswith(("/etc/", "/var/"))
            self.assertEqual(self.exists(path), kept, path)
        self.assertTrue(self.exists("/etc/agentgate/policies/default.json"))
        run("getent group agentgate")
        # Docker goes on, and what was ours does not start without its driver.
        run("docker run --rm test echo")

    def test_7_purge(self):
        run = self.machine.run
        run("dpkg -i /root/new.deb; systemctl is-active agentgated; dpkg -r agentgate")
        run(f"ip link add {LINK} type bridge")
        done = run("dpkg --purge agentgate", check=False)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("not purged", done.stderr)
        self.assertTrue(self.exists("/var/lib/agentgate"))
        self.assertTrue(self.exists("/etc/agentgate/policies/default.json"))
        run("getent group agentgate")
        run(f"ip link del {LINK}; dpkg --purge agentgate")
        self.assertNotEqual(self.installed()[:9], "installed")
        for path in FILES:
            self.assertFalse(self.exists(path), path)
        self.assertNotEqual(self.machine.code("getent group agentgate"), 0)
        self.assertEqual(self.machine.out("find / -xdev -name '*agentgate*' ! -path '/proc/*' ! -path '/root/*' "
                                          "! -path '/var/log/journal/*' 2>/dev/null"), "")


def main():
    parser = argparse.ArgumentParser(prog="scripts/package test", description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=RELEASES, default="bookworm")
    parser.add_argument("--deb", type=lambda text: pathlib.Path(text).resolve(), metavar="FILE",
                        help="take this package instead of building one")
    args = parser.parse_args()
    Package.suite, Package.deb = args.suite, args.deb
    unittest.main(argv=sys.argv[:1], verbosity=2, failfast=True)


if __name__ == "__main__":
    main()
