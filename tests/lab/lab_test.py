#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0-or-later
"""The lab itself: what other tests rely on. AGENTGATE_LAB_ENGINES chooses engines (default: all)."""

import os
import pathlib
import signal
import subprocess
import sys
import time
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from labhost import fetch  # noqa: E402
from labhost.host import (ALLOWED, ALLOWED6, DENIED, DENIED6, DNS, DNS6, ENGINES, LAN, METADATA,  # noqa: E402
                          OTHER_DNS, UPLINK_HOST, Lab, labs, start_time, wait_for)

CHOSEN = os.environ.get("AGENTGATE_LAB_ENGINES", " ".join(ENGINES)).split()
SUBNET, GATEWAY = "172.30.0.0/24", "172.30.0.1"
PROBES = [("tcp", ALLOWED, 443), ("tcp", ALLOWED6, 443), ("tcp", DENIED, 443), ("tcp", DENIED6, 443),
          ("tcp", ALLOWED, 80), ("tcp", METADATA, 80), ("tcp", LAN, 443), ("dns", DNS, "api.allowed.test"),
          ("dns", DNS6, "api.allowed.test"), ("dns", ALLOWED, "api.allowed.test"),
          ("dns", OTHER_DNS, "denied.test"), ("tcp", GATEWAY, 8080), ("tcp", UPLINK_HOST, 8080)]
# Nobody is there: a probe can also say no.
NOBODY = [("tcp", "192.0.2.99", 443), ("tcp", ALLOWED, 81), ("dns", "192.0.2.99", "api.allowed.test"),
          ("dns", DNS, "nobody.allowed.test"), ("tcp", GATEWAY, 8081)]


def machine():
    """What of the machine's own a lab could have changed."""
    return {
        "links": subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout,
        "rules": subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True).stdout,
        "mounts": pathlib.Path("/proc/self/mounts").read_text(),
        "docker": [os.path.exists(path) for path in
                   ("/etc/docker", "/var/lib/docker", "/run/docker.sock", "/run/docker", "/opt/containerd")],
        "forward": pathlib.Path("/proc/sys/net/ipv4/ip_forward").read_text(),
    }


def alive(pid):
    """Whether a process runs: one that was killed and that nobody waits for does not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def cgroups(folder):
    return list(pathlib.Path("/sys/fs/cgroup").glob(f"*/{os.path.basename(folder)}"))


class EngineTests(unittest.TestCase):
    """On every engine: both runtimes start behind the stub, pause works, everything is reachable."""

    def engine(self, name):
        with Lab(name) as lab:
            lab.start_stub()
            lab.start_engine()
            lab.import_image()
            self.assertTrue(lab.docker("version", "--format", "{{.Server.Version}}").stdout.startswith(name + "."))
            lab.docker("network", "create", "-d", "agentgate", "--subnet", SUBNET, "--ipv6", "--subnet",
                       "2001:db8:30::/64", "agents")
            # The stub gates nothing and does no NAT: routes and an open FORWARD make a control group.
            lab.run(["ip", "route", "add", SUBNET, "via", UPLINK_HOST], "internet")
            lab.run(["ip", "-6", "route", "add", "2001:db8:30::/64", "via", "2001:db8:113::2"], "internet")
            lab.run(["iptables", "-P", "FORWARD", "ACCEPT"])
            lab.run(["ip6tables", "-P", "FORWARD", "ACCEPT"])
            lab.host_services(f"tcp:{GATEWAY}:8080", f"tcp:{UPLINK_HOST}:8080")
            for runtime in ("runc", "runsc"):
                with self.subTest(runtime=runtime):
                    self.container(lab, runtime)
            self.assertIn("NetworkDriver.Join", {r["path"].strip("/") for r in lab.stub_requests()})
            refused = lab.docker("run", "--rm", "--runtime", "no-such", "lab/busybox", "true", check=False)
            self.assertNotEqual(refused.returncode, 0)

    def container(self, lab, runtime):
        started = time.monotonic()
        lab.container(runtime, "agents", runtime)
        print(f"{lab.engine} {runtime}: started in {time.monotonic() - started:.2f} s", flush=True)
        kernel = lab.docker("exec", runtime, "cat", "/proc/version").stdout
        self.assertEqual("Linux version 4.4.0 #1 SMP Sun Jan 10" in kernel, runtime == "runsc", kernel)  # gVisor's
        for probe, reached in zip(PROBES, lab.probe(runtime, PROBES)):
            self.assertTrue(reached, probe)
        for probe, reached in zip(NOBODY, lab.probe(runtime, NOBODY, seconds=1)):
            self.assertFalse(reached, probe)
        self.assertTrue(any("denied.test" in line for line in lab.dns_queries("dns-other")))
        # Of these only the tls servers speak TLS, and they do.
        tls = lab.run(["openssl", "s_client", "-connect", f"{ALLOWED}:443"], check=False).stdout
        self.assertIn("CN = api.allowed.test", tls)

        lab.docker("exec", "-d", runtime, "sh", "-c", f"while :; do echo; sleep 0.05; done | nc {ALLOWED} 80 >/tmp/flow")

        def packets():
            return int(lab.run(["sh", "-c", "cat /sys/class/net/agp*/statistics/rx_packets | "
                                            "awk '{ n += $1 } END { print n }'"]).stdout)
        first = packets()
        wait_for("frames of the flow", lambda: packets() > first + 5, 10)
        lab.docker("pause", runtime)
        self.assertEqual(lab.inspect(runtime)["State"]["Status"], "paused")
        time.sleep(0.3)
        still = packets()
        time.sleep(0.5)
        # The far side may still ask for the neighbour; the flow itself stands.
        self.assertLess(packets() - still, 3)
        lab.docker("unpause", runtime)
        after = packets()
        wait_for("frames after unpause", lambda: packets() > after + 5, 10)
        # No second interface, and the pid is the machine's.
        pid = lab.inspect(runtime)["State"]["Pid"]
        links = subprocess.run(["nsenter", f"--net=/proc/{pid}/ns/net", "ip", "-o", "link"], capture_output=True,
                               text=True, check=True).stdout
        self.assertEqual(links.count("\n"), 2, links)
        lab.docker("rm", "-f", runtime)
        wait_for("the end of the container", lambda: not alive(pid), 10)

    def test_20_10(self):
        self.chosen("20.10")

    def test_26_1(self):
        self.chosen("26.1")

    def test_28_5(self):
        self.chosen("28.5")

    def chosen(self, name):
        if name not in CHOSEN:
            self.skipTest("not chosen")
        self.engine(name)


class HostTests(unittest.TestCase):
    def test_the_engine_dies_and_comes_back(self):
        with Lab(CHOSEN[0]) as lab:
            lab.start_stub()
            lab.start_engine()
            lab.import_image()
            lab.docker("network", "create", "-d", "agentgate", "--subnet", SUBNET, "agents")
            lab.container("agent", "agents")
            lab.stop("dockerd", signal.SIGKILL)
            lab.start_engine()
            self.assertEqual(lab.docker("ps", "-q").stdout, "", "without live-restore containers end with a crash")
            lab.docker("start", "agent")
            self.assertTrue(lab.inspect("agent")["State"]["Running"])

    def test_errors_say_what_is_wrong(self):
        with self.assertRaises(KeyError):
            Lab("19.03")
        with Lab(CHOSEN[0], daemon={"no-such-key": 1}) as lab:
            with self.assertRaisesRegex(RuntimeError, "no-such-key"):
                lab.start_engine()

    def test_two_labs_side_by_side(self):
        with Lab(CHOSEN[0]) as one, Lab(CHOSEN[-1]) as two:
            for lab in (one, two):
                lab.start_engine()
                lab.import_image()
                lab.container("same", "bridge")
            self.assertEqual({lab.docker("ps", "--format", "{{.Names}}").stdout.strip() for lab in (one, two)}, {"same"})
            one.host_services(f"tcp:{UPLINK_HOST}:8080")
            here, there = (lab.probe("same", [("tcp", UPLINK_HOST, 8080)]) for lab in (one, two))
            self.assertEqual((here, there), ([True], [False]), "a lab reached the other one's host")

    def test_joined_hosts_reach_each_other_and_nobody_else(self):
        with Lab(ENGINES[0], name="one") as one, Lab(ENGINES[0], name="two", joined=one) as two:
            self.assertEqual([lab.run(["hostname"]).stdout for lab in (one, two)], ["one\n", "two\n"])
            self.assertEqual([lab.segment_address() for lab in (one, two)], ["198.51.100.1", "198.51.100.2"])

            def reaches(lab, other):  # a neighbour that answers has its entry completed
                lab.run(["bash", "-c", f"echo x >/dev/udp/{other.segment_address()}/9"], check=False)
                return "lladdr" in lab.run(["ip", "neigh", "show", other.segment_address()]).stdout
            wait_for("an answer", lambda: reaches(one, two), 5)
            self.assertNotIn("lan0", one.run(["ip", "link"], "internet").stdout)
            two.reboot()
            wait_for("an answer after a reboot", lambda: reaches(two, one), 5)
        self.assertFalse(os.path.exists(one.dir) or os.path.exists(two.dir))

    def test_runsc_is_patched(self):
        with open(fetch.runsc(), "rb") as file:
            code = file.read()
        self.assertNotIn(b"/proc/sys/net/core/rmem_default", code)
        self.assertIn(b"/proc/sys/net/core/./dev_weight", code)


class CleanTests(unittest.TestCase):
    SCRIPT = ("import sys, time\nsys.dont_write_bytecode = True\nsys.path.insert(0, sys.argv[1])\n"
              "from labhost.host import Lab\n"
              "with Lab(sys.argv[2]) as lab:\n"
              "    lab.start_engine()\n    lab.import_image()\n    lab.container('left', 'bridge', sys.argv[3])\n"
              "    print(lab.dir, lab.inspect('left')['State']['Pid'], *[p.pid for p in lab.processes.values()],"
              " flush=True)\n    time.sleep(600)\n")

    def ended_by(self, number, runtime="runc"):
        owner = subprocess.Popen([sys.executable, "-c", self.SCRIPT, str(HERE), CHOSEN[0], runtime],
                                 stdout=subprocess.PIPE, text=True)
        folder, *pids = owner.stdout.readline().split()
        self.assertGreater(len(pids), 5, "the lab did not start")
        self.assertTrue(all(alive(pid) for pid in pids))
        self.assertNotEqual(cgroups(folder), [])
        self.assertIn((folder, owner.pid, True, CHOSEN[0]), labs())
        os.kill(owner.pid, number)
        owner.wait()
        owner.stdout.close()
        return folder, pids

    def gone(self, folder, pids):
        wait_for("the end of everything", lambda: not any(alive(pid) for pid in pids), 10)
        self.assertFalse(os.path.exists(folder))
        self.assertEqual(cgroups(folder), [])

    def test_a_signal_cleans_up(self):
        before = machine()
        self.gone(*self.ended_by(signal.SIGTERM))
        self.assertEqual(machine(), before)

    def test_the_next_lab_cleans_up_after_a_kill(self):
        before = machine()
        for runtime in ("runc", "runsc"):
            folder, pids = self.ended_by(signal.SIGKILL, runtime)
            self.assertIn(folder, [found for found, _, living, _ in labs() if not living])
            with Lab(CHOSEN[0]):
                pass
            self.gone(folder, pids)
        self.assertEqual(machine(), before)

    def test_a_stopped_engine_does_not_hold_up_the_end(self):
        with Lab(CHOSEN[0]) as lab:
            lab.start_engine()
            lab.import_image()
            lab.container("left", "bridge")
            pid = lab.inspect("left")["State"]["Pid"]
            lab.processes["dockerd"].send_signal(signal.SIGSTOP)
            folder, started = lab.dir, time.monotonic()
        self.assertLess(time.monotonic() - started, 60)
        self.gone(folder, [pid])

    def test_start_time_tells_processes_apart(self):
        self.assertIsNotNone(start_time(os.getpid()))
        self.assertIsNone(start_time(2**22 + 1))


if __name__ == "__main__":
    unittest.main(verbosity=2)
