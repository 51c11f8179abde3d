# SPDX-License-Identifier: GPL-2.0-or-later
"""Every reason to refuse an arm, on a real engine: exit 1, the reason says the mend, still closed."""
import threading
import time
import unittest

from common import *  # noqa: F401,F403

REACH = [("tcp", ALLOWED, 443)]


class Refusals(Case):
    def setUp(self):
        self.made = []

    def tearDown(self):
        self.remove(*self.made)

    def container(self, name, *extra, runtime="runc", network="agents", pause=True):
        self.made.append(name)
        self.lab.container(name, network, runtime, *extra)
        if pause:
            self.lab.docker("pause", name)

    def refused(self, name, text, *options, paused=True, probe=True):
        """The arm is refused with that in its reason; the container, unpaused again, is closed."""
        code, report, error = self.world.ag("arm", name, *options)
        self.assertEqual(code, 1, (report, error))
        self.assertEqual(report["code"], "GATED_UNARMED")
        self.assertIn(text, report["reason"])
        if paused:
            self.lab.docker("unpause", name)
        if probe:
            self.assertEqual(self.lab.probe(name, REACH), [False])
            self.assertEqual(self.world.state(name), "closed")
        return report

    def test_none_of_these_containers_is_refused_for_something_else(self):
        # The control for every refusal here: without what is wrong with them, they are released.
        for runtime in ("runc", "runsc"):
            self.container("r0-" + runtime, runtime=runtime, pause=False)
            self.armed("r0-" + runtime)
            self.reaches("r0-" + runtime, REACH, [True])

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
        # It has a way out by its other network, which is why it must not be armed.
        self.refused("r4", "networks", probe=False)
        self.assertEqual(self.world.state("r4"), "closed")

    def test_privileged(self):
        try:
            self.container("r5", "--privileged")
        except RuntimeError as error:
            # 20.10 asks for every capability that it knows of, newer ones for those that they have.
            if self.ENGINE != "20.10" or "unable to apply caps" not in str(error):
                raise
            self.skipTest("the engine cannot start a privileged container with this machine's capabilities")
        self.refused("r5", "privileged")

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
        self.container("r10", network="bridge")
        self.refused("r10", "not an agentgate network", probe=False)

    def test_wrong_runtime_and_alias(self):
        self.lab.standard_policy("gvisor-only", runtimes=["runsc"])
        runtimes = {"runc": "is really runc", "fake-runsc": "is really runc"}
        if self.ENGINE != "20.10":  # which knows no runtimeType
            runtimes["typed-runsc"] = "is really runc (shim io.containerd.runc.v2)"
        for runtime, text in runtimes.items():
            with self.subTest(runtime):
                self.container("r11-" + runtime, runtime=runtime)
                self.refused("r11-" + runtime, text, "--policy", "gvisor-only")
        self.container("r13", runtime="runsc", pause=False)
        self.armed("r13", "--policy", "gvisor-only")

    def test_broken_and_missing_policy(self):
        self.lab.policy("broken", {"version": 1, "alow": []})
        self.lab.policy("unresolvable", {"version": 1, "runtimes": ["runc"], "allow": [
            {"name": "nowhere.allowed.test", "services": ["tcp/443"]}]})
        self.lab.policy("rebind", {"version": 1, "runtimes": ["runc"], "allow": [
            {"name": "metadata.rebind.test", "services": ["tcp/80"]}]})
        self.container("r14", pause=False)
        for policy, text in (("broken", "alow"), ("absent", "absent"), ("unresolvable", "nowhere.allowed.test"),
                             ("rebind", "metadata.rebind.test")):
            with self.subTest(policy):
                self.lab.docker("pause", "r14")
                self.refused("r14", text, "--policy", policy)
                self.assertEqual(self.lab.probe("r14", [("tcp", METADATA, 80)]), [False])

    def test_unpaused_in_the_middle(self):
        # Whatever moment it hits, the port is never left open to a container that was not paused.
        self.container("r15", pause=False)
        for delay in (0, 0.002, 0.005, 0.01, 0.02):
            self.lab.docker("pause", "r15")

            def unpause():
                time.sleep(delay)
                unpaused.append(self.lab.docker("unpause", "r15", check=False))
            unpaused = []
            thread = threading.Thread(target=unpause)
            thread.start()
            code, report, _ = self.world.ag("arm", "r15")
            thread.join()
            self.assertEqual([run.returncode for run in unpaused], [0], unpaused)
            state = self.world.state("r15")
            if code == 0:
                self.assertEqual(state, "released")
            else:
                self.assertIn(code, (1, 2), report)
                self.assertEqual(state, "closed", report)
                self.assertEqual(self.lab.probe("r15", REACH, seconds=1), [False])
            self.assertEqual(self.world.ag("disarm", "r15")[0], 0)

    def test_restarted_loses_its_release(self):
        self.container("r16", pause=False)
        self.armed("r16")
        self.reaches("r16", REACH, [True])
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
        self.assertIn("internal", text)
        code, text = create("--subnet", "172.31.0.0/24", "-o", "agentgate.mtu=12")
        self.assertNotEqual(code, 0)
        self.assertIn("mtu", text)
        code, text = create("--subnet", "172.31.0.0/24", "-o", "agentgate.mtu=1400")
        self.assertEqual(code, 0, text)

    def test_refresh_adds_and_removes_at_once(self):
        self.lab.standard_policy("changing")
        self.container("r18", pause=False)
        self.armed("r18", "--policy", "changing")
        other = [("tcp", DENIED, 443)]
        self.reaches("r18", REACH + other, [True, False])
        self.lab.policy("changing", {"version": 1, "runtimes": ["runc"], "resolvers": [DNS], "allow": [
            {"name": "denied.test", "services": ["tcp/443"]}]})
        code, report, error = self.world.ag("refresh", "--policy", "changing")
        self.assertEqual(code, 0, (report, error))
        self.reaches("r18", REACH + other, [False, True])
        self.assertEqual(self.world.state("r18"), "released")
        # A file that is broken now changes nothing.
        self.lab.policy("changing", {"version": 2})
        code, report, _ = self.world.ag("refresh", "--policy", "changing")
        self.assertEqual(code, 1, report)
        self.reaches("r18", REACH + other, [False, True])

    def test_disarm_cuts_a_live_flow(self):
        # A flow that is established already ends with the disarm, under both runtimes.
        self.lab.policy("plain", {"version": 1, "runtimes": ["runc", "runsc"], "allow": [
            {"cidr": f"{ALLOWED}/32", "services": ["tcp/80"]}]})
        for runtime in ("runc", "runsc"):
            with self.subTest(runtime):
                name = "r19-" + runtime
                self.container(name, runtime=runtime, pause=False)
                self.armed(name, "--policy", "plain")
                # The server answers each line with as many bytes.
                self.lab.docker("exec", "-d", name, "sh", "-c",
                                f"while :; do echo; sleep 0.05; done | nc {ALLOWED} 80 >/tmp/flow")

                def answered():
                    seen = self.lab.docker("exec", name, "wc", "-c", "/tmp/flow", check=False).stdout.split()
                    return int(seen[0]) if seen else 0
                wait_for("a first answer", answered, 10)
                first = answered()
                wait_for("more answers", lambda: answered() > first, 10)
                self.assertEqual(self.world.ag("disarm", name)[0], 0)
                time.sleep(0.2)
                last = answered()
                time.sleep(2)
                self.assertEqual(answered(), last, "the flow went on")
                self.assertGreater(last, first)


if __name__ == "__main__":
    unittest.main(verbosity=2)
