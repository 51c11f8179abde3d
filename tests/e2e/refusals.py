# SPDX-License-Identifier: GPL-2.0-or-later
"""Every reason to refuse an arm, on a real engine: exit 1, the reason says the mend, still closed."""
import os
import threading
import time
import unittest

from common import *  # noqa: F401,F403

ENGINE = os.environ.get("LAB_ENGINE", "20.10")
REACH = [("tcp", ALLOWED, 443)]


class Refusals(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.world = World(ENGINE).__enter__()
        cls.lab = cls.world.lab

    @classmethod
    def tearDownClass(cls):
        cls.world.__exit__(None)

    def setUp(self):
        self.made = []

    def tearDown(self):
        for name in self.made:
            self.lab.docker("rm", "-f", name, check=False)

    def container(self, name, *extra, runtime="runc", network="agents", pause=True):
        self.made.append(name)
        self.lab.container(name, network, runtime, *extra)
        if pause:
            self.lab.docker("pause", name)

    def refused(self, name, text, paused=True, probe=True):
        code, report, error = self.world.ag("arm", name)
        self.assertEqual(code, 1, (report, error))
        self.assertEqual(report["code"], "GATED_UNARMED")
        self.assertIn(text, report["reason"])
        if paused:
            self.lab.docker("unpause", name)
        if probe:
            self.assertEqual(self.lab.probe(name, REACH), [False])
            self.assertEqual(self.world.state(name), "closed")
        return report

    def test_unknown_name(self):
        code, report, _ = self.world.ag("arm", "nobody")
        self.assertEqual(code, 1, report)
        self.assertIn("no container", report["reason"])

    def test_not_paused(self):
        self.container("r1", pause=False)
        self.refused("r1", "docker pause r1", paused=False)

    def test_not_running(self):
        self.container("r2", pause=False)
        self.lab.docker("kill", "r2")
        self.refused("r2", "not running", paused=False, probe=False)

    def test_restart_policy(self):
        self.container("r3", "--restart", "on-failure")
        self.refused("r3", "--restart no")

    def test_second_network(self):
        self.container("r4", pause=False)
        connected = self.lab.docker("network", "connect", "bridge", "r4", check=False)
        if connected.returncode != 0:  # Docker itself refuses where the half routes are in the way
            self.assertIn("conflicts with existing route", connected.stderr)
            return
        self.lab.docker("pause", "r4")
        code, report, _ = self.world.ag("arm", "r4")
        self.assertEqual(code, 1)
        self.assertIn("networks", report["reason"])

    def test_privileged(self):
        self.container("r5", "--privileged")
        self.refused("r5", "privileged", probe=False)

    def test_host_namespaces(self):
        self.container("r6", "--pid", "host")
        self.refused("r6", "--pid")
        self.container("r7", "--ipc", "host")
        self.refused("r7", "--ipc")

    def test_published_ports_are_refused_at_start(self):
        self.made.append("r8")
        result = self.lab.docker("run", "-d", "--name", "r8", "--network", "agents", "-p", "8080:80",
                                 "lab/busybox", "sleep", "100", check=False)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("publish", (result.stdout + result.stderr).lower())

    def test_shared_namespace(self):
        self.container("r9", pause=False)
        self.made.insert(0, "r9b")
        self.lab.docker("run", "-d", "--name", "r9b", "--network", "container:r9", "lab/busybox",
                        "sleep", "1000")
        self.lab.docker("pause", "r9")
        self.refused("r9", "shares its network namespace")

    def test_other_network(self):
        self.container("r10", network="bridge", pause=False)
        self.lab.docker("pause", "r10")
        code, report, _ = self.world.ag("arm", "r10")
        self.assertEqual(code, 1)
        self.assertIn("not an agentgate network", report["reason"])

    def test_wrong_runtime_and_alias(self):
        self.lab.standard_policy("gvisor-only", runtimes=["runsc"])
        self.container("r11")
        code, report, _ = self.world.ag("arm", "r11", "--policy", "gvisor-only")
        self.assertEqual(code, 1)
        self.assertIn("runc", report["reason"])
        self.container("r12", runtime="fake-runsc")
        code, report, _ = self.world.ag("arm", "r12", "--policy", "gvisor-only")
        self.assertEqual(code, 1)
        self.assertIn("runc", report["reason"])
        self.container("r13", runtime="runsc")
        code, report, error = self.world.ag("arm", "r13", "--policy", "gvisor-only")
        self.assertEqual(code, 0, (report, error))

    def test_broken_and_missing_policy(self):
        self.container("r14")
        self.lab.policy("broken", {"version": 1, "alow": []})
        code, report, _ = self.world.ag("arm", "r14", "--policy", "broken")
        self.assertEqual(code, 1)
        self.assertIn("alow", report["reason"])
        code, report, _ = self.world.ag("arm", "r14", "--policy", "absent")
        self.assertEqual(code, 1)
        self.lab.policy("unresolvable", {"version": 1, "runtimes": ["runc"], "allow": [
            {"name": "nowhere.allowed.test", "services": ["tcp/443"]}]})
        code, report, _ = self.world.ag("arm", "r14", "--policy", "unresolvable")
        self.assertEqual(code, 1)
        self.assertIn("nowhere.allowed.test", report["reason"])
        self.lab.policy("rebind", {"version": 1, "runtimes": ["runc"], "allow": [
            {"name": "metadata.rebind.test", "services": ["tcp/80"]}]})
        code, report, _ = self.world.ag("arm", "r14", "--policy", "rebind")
        self.assertEqual(code, 1, "a name that points to the metadata service was allowed")

    def test_unpaused_in_the_middle(self):
        # Whatever moment it hits, the port is never left open to a container that was not paused.
        self.container("r15", pause=False)
        for delay in (0, 0.002, 0.005, 0.01, 0.02):
            self.lab.docker("pause", "r15")

            def unpause():
                time.sleep(delay)
                self.lab.docker("unpause", "r15", check=False)
            thread = threading.Thread(target=unpause)
            thread.start()
            code, report, _ = self.world.ag("arm", "r15")
            thread.join()
            state = self.world.state("r15")
            if code == 0:
                self.assertEqual(state, "released")
            else:
                self.assertIn(code, (1, 2), report)
                self.assertEqual(state, "closed", report)
            self.world.ag("disarm", "r15")

    def test_restarted_loses_its_release(self):
        self.container("r16", pause=False)
        self.assertEqual(self.world.arm_paused("r16")[0], 0)
        self.assertEqual(self.world.settled("r16", REACH, [True])[0], [True])
        self.lab.docker("restart", "-t", "0", "r16")
        self.assertEqual(self.lab.probe("r16", REACH), [False])
        self.assertEqual(self.world.state("r16"), "closed")

    def test_usage_and_unreachable_daemon(self):
        run = self.lab.run([AGENTGATE, "arm"], check=False)
        self.assertEqual(run.returncode, 64)
        run = self.lab.run([AGENTGATE, "--socket", "/run/nowhere.sock", "status"], check=False)
        self.assertEqual(run.returncode, 4)

    def test_network_options(self):
        def create(*options):
            result = self.lab.docker("network", "create", "-d", "agentgate", *options, "other",
                                     check=False)
            if result.returncode == 0:
                self.lab.docker("network", "rm", "other")
            return result.returncode, result.stdout + result.stderr
        code, text = create("--subnet", "172.31.0.0/24", "-o", "agentgate.polcy=lab")
        self.assertNotEqual(code, 0)
        self.assertIn("agentgate.policy", text)
        code, text = create("--subnet", "172.31.0.0/24", "--internal")
        self.assertNotEqual(code, 0)
        code, text = create("--subnet", "172.31.0.0/24", "-o", "agentgate.mtu=12")
        self.assertNotEqual(code, 0)
        code, text = create("--subnet", "172.31.0.0/24", "-o", "agentgate.mtu=1400")
        self.assertEqual(code, 0, text)

    def test_refresh_adds_and_removes_at_once(self):
        self.lab.standard_policy("changing")
        self.container("r18")
        self.assertEqual(self.world.ag("arm", "r18", "--policy", "changing")[0], 0)
        self.lab.docker("unpause", "r18")
        other = [("tcp", DENIED, 443)]
        self.assertEqual(self.world.settled("r18", REACH + other, [True, False])[0], [True, False])
        self.lab.policy("changing", {"version": 1, "runtimes": ["runc"], "resolvers": [DNS], "allow": [
            {"name": "denied.test", "services": ["tcp/443"]}]})
        code, report, error = self.world.ag("refresh", "--policy", "changing")
        self.assertEqual(code, 0, (report, error))
        self.assertEqual(self.world.settled("r18", REACH + other, [False, True])[0], [False, True])
        self.assertEqual(self.world.state("r18"), "released")
        # A file that is broken now changes nothing.
        self.lab.policy("changing", {"version": 2})
        code, report, _ = self.world.ag("refresh", "--policy", "changing")
        self.assertEqual(code, 1, report)
        self.assertEqual(self.world.settled("r18", REACH + other, [False, True])[0], [False, True])


if __name__ == "__main__":
    unittest.main(verbosity=2)
