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

from agentlab import ENGINES, Lab, LabError, internet  # noqa: E402
from agentlab.image import PYTHON_IMAGE  # noqa: E402
from agentlab.lab import labs  # noqa: E402
from agentlab.namespace import wait_for  # noqa: E402

CHOSEN = os.environ.get("AGENTGATE_LAB_ENGINES", " ".join(ENGINES)).split()


def machine():
    """What of the machine's own a lab could have changed."""
    return {
        "links": subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout,
        "rules": subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True).stdout,
        "mounts": pathlib.Path("/proc/self/mounts").read_text(),
        "docker": [os.path.exists(path) for path in ("/etc/docker", "/var/lib/docker", "/run/docker.sock")],
        "forward": pathlib.Path("/proc/sys/net/ipv4/ip_forward").read_text(),
    }


class EngineTests(unittest.TestCase):
    """On every engine: both runtimes start behind the stub, pause works, everything is reachable."""

    def engine(self, name):
        with Lab() as lab:
            net, host = lab.internet(), lab.host(name)
            host.start_engine()
            self.assertTrue(host.docker_ok("version", "--format", "{{.Server.Version}}").startswith(name))
            host.start_stub()
            host.docker_ok("network", "create", "-d", "agentgate", "--subnet", "172.30.0.0/24", "--ipv6", "--subnet",
                           "2001:db8:30::/64", "agents")
            # The stub gates nothing and does no NAT: routes and an open FORWARD make a control group.
            for prefix in ("172.30.0.0/24", "2001:db8:30::/64"):
                net.route(prefix, host)
            host.run("iptables", "-P", "FORWARD", "ACCEPT")
            host.exec("ip6tables", "-P", "FORWARD", "ACCEPT")
            for runtime in ("runc", "runsc"):
                with self.subTest(runtime=runtime):
                    self.container(net, host, runtime)
            refused = host.docker("run", "--rm", "--runtime", "no-such", "lab/busybox", "true")
            self.assertNotEqual(refused.returncode, 0)

    def container(self, net, host, runtime):
        started = time.monotonic()
        host.docker_ok("run", "-d", "--name", runtime, "--runtime", runtime, "--network", "agents", PYTHON_IMAGE)
        print(f"{host.engine.version} {runtime}: started in {time.monotonic() - started:.2f} s", flush=True)
        net.clear_journal()
        probes = [("https", internet.ALLOWED, 443), ("https", internet.ALLOWED6, 443), ("http", internet.DENIED, 80),
                  ("udp", internet.ALLOWED, 443), ("udp", internet.ALLOWED6, 443), ("http", internet.METADATA, 80),
                  ("tcp", internet.NEIGHBOUR, 22),
                  {"kind": "dns", "to": internet.DNS, "name": "api.allowed.test"},
                  {"kind": "dns", "to": internet.DNS6, "name": "api.allowed.test", "type": "AAAA"},
                  {"kind": "dns", "to": internet.OTHER_DNS, "name": "denied.test"}]
        results = host.probe(runtime, probes)
        for probe, result in zip(probes, results):
            self.assertTrue(result["ok"], (probe, result))
        self.assertEqual(results[5]["answer"], "200 metadata-secret")
        seen = {(entry["kind"], entry["dst"], entry["dport"]) for entry in net.journal()}
        self.assertIn(("request", internet.ALLOWED6, 443), seen)
        self.assertIn(("datagram", internet.ALLOWED, 443), seen)
        self.assertIn("denied.test", {name for name, _, _ in net.dns_queries("unlisted")})

        stream = host.stream(runtime, internet.ALLOWED, 22)
        with host.sniff_container(runtime) as sniffer:
            wait_for(lambda: len(sniffer.frames(proto="tcp", dport=22)) > 5, 10, "frames of the flow")
            host.docker_ok("pause", runtime)
            self.assertEqual(host.inspect(runtime)["State"]["Status"], "paused")
            time.sleep(0.3)
            sniffer.clear()
            time.sleep(0.5)
            self.assertEqual(sniffer.frames(dport=22, flags=24), [])
            host.docker_ok("unpause", runtime)
            wait_for(lambda: sniffer.frames(proto="tcp", dport=22), 10, "frames after unpause")
        # The flow goes on with what comes after: answers keep arriving, however many there were.
        before = len(stream.received())
        wait_for(lambda: len(stream.received()) > before + 5, 10, "answers after unpause")
        links = host.in_container_net(runtime, "ip", "-o", "link").stdout
        self.assertEqual(links.count("\n"), 2, links)
        # No second interface, and the pid that the machine knows is the same process.
        outer = host.outer_pid(host.container_pid(runtime))
        self.assertEqual(os.stat(f"/proc/{outer}/ns/net").st_ino, os.stat(host.container_net(runtime)).st_ino)

    def test_20_10(self):
        self.skip_unless("20.10")

    def test_26_1(self):
        self.skip_unless("26.1")

    def test_28_5(self):
        self.skip_unless("28.5")

    def skip_unless(self, name):
        if name not in CHOSEN:
            self.skipTest("not chosen")
        self.engine(name)


class HostTests(unittest.TestCase):
    def test_services_names_and_crashes(self):
        with Lab() as lab:
            net, host = lab.internet(), lab.host(CHOSEN[0])
            host.start_engine()
            host.start_stub()
            host.docker_ok("network", "create", "-d", "agentgate", "--subnet", "172.30.0.0/24", "agents")
            host.docker_ok("run", "-d", "--name", "agent", "--network", "agents", PYTHON_IMAGE)
            gateway, uplink = host.listen("172.30.0.1", tcp=[2222]), host.listen(host.address, tcp=[2222], udp=[2223])
            reached = host.reaches("agent", [("tcp", "172.30.0.1", 2222), ("tcp", host.address, 2222),
                                         ("udp", host.address, 2223), ("tcp", host.address, 2224)])
            self.assertEqual(reached, [True, True, True, False])
            self.assertEqual([entry["dport"] for entry in gateway.journal()], [2222])
            self.assertEqual(sorted(entry["dport"] for entry in uplink.journal()), [2222, 2223])

            net.set_records({"new.test": ["192.0.2.82"], "denied.test": []})
            ask = [{"kind": "resolve", "name": "new.test"}, {"kind": "resolve", "name": "denied.test"}]
            net.route("172.30.0.0/24", host)
            host.run("iptables", "-P", "FORWARD", "ACCEPT")
            self.assertEqual([r["answer"] for r in host.probe("agent", ask)], ["192.0.2.82", ""])

            host.kill_dockerd()
            host.start_dockerd()
            self.assertEqual(host.docker_ok("ps", "-q"), "", "without live-restore, containers end with a crash")
            host.docker_ok("start", "agent")
            pid = host.outer_pid(host.container_pid("agent"))
            host.kill_engine()
            wait_for(lambda: not os.path.exists(f"/proc/{pid}"), 10, "the container's process is gone")
            host.start_engine()

            host.run("ip", "link", "add", "left", "type", "bridge")
            host.write("/etc/agentgate/policies/x.json", "{}")
            host.reboot()
            self.assertEqual([link["ifname"] for link in host.ip("link")], ["lo", "eth0"])
            self.assertEqual(host.read("/etc/agentgate/policies/x.json"), "{}")
            host.start_stub()
            host.start_engine()
            self.assertIn("agents", host.docker_ok("network", "ls"))

    def test_errors_say_what_to_do(self):
        with Lab() as lab:
            with self.assertRaisesRegex(LabError, "choose one of"):
                lab.host("19.03")
            host = lab.host(CHOSEN[0], daemon={"no-such-key": 1})
            with self.assertRaisesRegex(LabError, "no-such-key"):
                host.start_engine()

    def test_two_labs_side_by_side(self):
        with Lab() as one, Lab() as two:
            hosts = [lab.host(CHOSEN[0]) for lab in (one, two)] + [two.host(CHOSEN[-1])]
            for host in hosts:
                host.start_engine(images=["lab/busybox"])
                host.docker_ok("run", "-d", "--name", "same", "lab/busybox")
            self.assertEqual({host.docker_ok("ps", "--format", "{{.Names}}") for host in hosts}, {"same"})
            # Hosts of one lab share a lan; those of another do not.
            listener = hosts[2].listen(hosts[2].address, tcp=[2222])
            connect = f"import socket; socket.create_connection(('{hosts[2].address}', 2222), 2)"
            self.assertEqual(hosts[1].exec("python3", "-c", connect).returncode, 0)
            self.assertNotEqual(hosts[0].exec("python3", "-c", connect).returncode, 0)
            self.assertEqual(len(listener.journal()), 1)


class CleanTests(unittest.TestCase):
    SCRIPT = ("import sys, time\nsys.path.insert(0, sys.argv[1])\nfrom agentlab import Lab\n"
              "lab = Lab()\nhost = lab.host(sys.argv[2])\nhost.start_engine(images=['lab/busybox'])\n"
              "host.docker_ok('run', '-d', 'lab/busybox')\nprint(lab.base, flush=True)\n"
              "print(host.outer_pid(host.container_pid(host.docker_ok('ps', '-q'))), flush=True)\ntime.sleep(600)\n")

    def ended_by(self, number):
        before = machine()
        owner = subprocess.Popen([sys.executable, "-c", self.SCRIPT, str(HERE), CHOSEN[0]], stdout=subprocess.PIPE,
                                 text=True)
        folder, pid = (owner.stdout.readline().strip() for _ in range(2))
        self.assertTrue(os.path.exists(f"/proc/{pid}"))
        os.kill(owner.pid, number)
        owner.wait()
        owner.stdout.close()
        wait_for(lambda: not os.path.exists(f"/proc/{pid}"), 10, "the container ended with the lab's owner")
        return before, folder

    def test_a_signal_cleans_up(self):
        before, folder = self.ended_by(signal.SIGTERM)
        self.assertFalse(os.path.exists(folder))
        self.assertEqual(list(pathlib.Path("/sys/fs/cgroup").glob(f"*/{os.path.basename(folder)}")), [])
        self.assertEqual(machine(), before)

    def test_the_next_lab_cleans_up_after_a_kill(self):
        before, folder = self.ended_by(signal.SIGKILL)
        self.assertIn(folder, [str(found) for found, _, alive in labs() if not alive])
        with Lab():
            pass
        self.assertFalse(os.path.exists(folder))
        self.assertEqual(list(pathlib.Path("/sys/fs/cgroup").glob(f"*/{os.path.basename(folder)}")), [])
        self.assertEqual(machine(), before)


if __name__ == "__main__":
    unittest.main(verbosity=2)
