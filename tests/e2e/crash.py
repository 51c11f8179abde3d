# SPDX-License-Identifier: GPL-2.0-or-later
"""SIGKILL in every arm step and every driver verb: never open, and the next start repairs."""
import threading
import unittest

from common import *  # noqa: F401,F403

REACH = [("tcp", ALLOWED, 443)]
FORBIDDEN = [("tcp", DENIED, 443), ("tcp", METADATA, 80)]


class Crash(Case):
    def died(self):
        process = self.lab.processes["agentgated"]
        wait_for("the daemon to be killed", lambda: process.poll() is not None, 20)
        self.assertEqual(process.returncode, -signal.SIGKILL)

    def test_in_every_arm_step(self):
        self.lab.container("c1", "agents")
        # The end of a step before the controls is the beginning of the next.
        points = [f"arm.step.{n}" for n in range(1, 14)]
        points += [f"arm.step.{n}.done" for n in range(9, 14)]
        points += ["host.release.saved", "host.release.released", "host.close.closed"]
        for point in points:
            with self.subTest(point):
                self.world.restart_daemon({"AGENTGATE_FAILPOINT": point})
                self.lab.docker("pause", "c1")
                code, _, _ = self.world.ag("arm", "c1")
                self.died()
                self.assertEqual(code, 4)
                self.lab.docker("unpause", "c1")
                # Before the batch of step 11 nothing passes; after it the policy holds, no more.
                step = int(point.split(".")[2]) if point.startswith("arm") else 11
                before = step < 11 or point in ("arm.step.11", "host.release.saved", "host.close.closed")
                expected = [not before, False, False]
                self.reaches("c1", REACH + FORBIDDEN, expected)
                self.world.start_daemon()
                self.assertEqual(self.world.state("c1"), "closed" if before else "released", point)
                self.assertEqual(self.lab.probe("c1", FORBIDDEN, seconds=1), [False, False], point)
        # And it can be armed as if nothing had been.
        self.armed("c1")
        self.reaches("c1", REACH, [True])
        self.remove("c1")

    def interrupted(self, *command):
        """A docker command during which the daemon dies and is started again: how it ended."""
        outcome = []
        thread = threading.Thread(target=lambda: outcome.append(self.lab.docker(*command, check=False)))
        thread.start()
        self.died()
        self.world.start_daemon()
        thread.join()
        self.assertEqual(len(outcome), 1, "docker did not end")
        return outcome[0]

    def test_in_every_driver_verb(self):
        for verb in ("CreateEndpoint", "Join", "Leave", "DeleteEndpoint"):
            for when in ("begin", "done"):
                point = f"driver.{verb}.{when}"
                with self.subTest(point):
                    self.world.restart_daemon({"AGENTGATE_FAILPOINT": point})
                    if verb in ("Leave", "DeleteEndpoint"):
                        self.lab.container("c2", "agents")
                        self.interrupted("rm", "-f", "c2")
                    else:
                        done = self.interrupted("run", "-d", "--name", "c2", "--network", "agents", "lab/busybox",
                                                "sleep", "1000")
                        running = self.lab.docker("ps", "-q", "-f", "name=^c2$").stdout.strip()
                        self.assertEqual(done.returncode == 0, bool(running), done)
                        if running:  # an engine that asks again has it; most give up
                            self.assertEqual(self.lab.probe("c2", REACH), [False])
                            self.assertEqual(self.world.state("c2"), "closed")
                    self.remove("c2")
        # What the interrupted requests left is collected; a new container works.
        wait_for("what is left to be collected", lambda: self.world.leftovers() == [], 60)
        self.lab.container("c3", "agents")
        self.armed("c3")
        self.reaches("c3", REACH + FORBIDDEN, [True, False, False])
        self.assertNotEqual(self.world.leftovers(), [])
        self.remove("c3")

    def create_second(self, subnet):
        return ["network", "create", "-d", "agentgate", "--subnet", subnet, "second"]

    def test_in_network_verbs(self):
        for number, point in enumerate(("driver.CreateNetwork.begin", "host.create_network.saved",
                                        "driver.CreateNetwork.done")):
            with self.subTest(point):
                self.world.restart_daemon({"AGENTGATE_FAILPOINT": point})
                done = self.interrupted(*self.create_second(f"172.28.{number}.0/24"))
                known = self.lab.docker("network", "ls", "-q", "-f", "name=^second$").stdout.strip()
                self.assertEqual(done.returncode == 0, bool(known), done)
                status = self.world.ag("status")[1]
                self.assertTrue(status["ready"], status)
                if known:
                    self.lab.docker("network", "rm", "second")
                # Another one can be made and removed as if nothing had been.
                self.lab.docker(*self.create_second(f"172.29.{number}.0/24"))
                bridge = self.world.bridge("second")
                self.assertIn(bridge, self.world.links())
                self.lab.docker("network", "rm", "second")
                self.assertNotIn(bridge, self.world.links())

    def test_what_was_interrupted_can_be_done_again(self):
        self.world.restart_daemon({"AGENTGATE_FAILPOINT": "driver.CreateNetwork.done"})
        self.interrupted(*self.create_second("172.28.9.0/24"))
        self.lab.docker(*self.create_second("172.28.9.0/24"))
        self.lab.docker("network", "rm", "second")

    def test_released_survives_kill_and_restart(self):
        self.lab.container("c4", "agents")
        self.armed("c4")
        before = self.lab.run(["nft", "-s", "-a", "list", "ruleset"]).stdout
        self.world.restart_daemon()
        self.assertIn(f"{self.world.port('c4')}-in", before)
        self.assertEqual(self.lab.run(["nft", "-s", "-a", "list", "ruleset"]).stdout, before)
        self.assertEqual(self.world.state("c4"), "released")
        self.reaches("c4", REACH + FORBIDDEN, [True, False, False])
        self.remove("c4")

    def test_a_flow_lives_through_thirty_kills(self):
        self.lab.policy("plain", {"version": 1, "runtimes": ["runc"], "allow": [
            {"cidr": f"{ALLOWED}/32", "services": ["tcp/80"]}]})
        self.lab.container("c5", "agents")
        self.armed("c5", "--policy", "plain")
        # The server answers each line with as many bytes; one connection for all of it.
        self.lab.docker("exec", "-d", "c5", "sh", "-c",
                        f"while :; do echo; sleep 0.05; done | nc {ALLOWED} 80 >/tmp/flow; : >/tmp/ended")

        def answered():
            return int(self.lab.docker("exec", "c5", "wc", "-c", "/tmp/flow").stdout.split()[0])
        wait_for("a first answer", answered, 10)
        for kill in range(30):
            before = answered()
            self.world.kill_daemon()
            if kill % 10 == 0:  # nobody is there, and it is what it was
                self.assertEqual(self.lab.probe("c5", FORBIDDEN, seconds=1), [False, False])
            self.world.start_daemon()
            wait_for(f"an answer after kill {kill + 1}", lambda: answered() > before, 10)
        self.assertNotEqual(self.lab.docker("exec", "c5", "test", "-e", "/tmp/ended", check=False).returncode, 0)
        self.assertEqual(self.world.state("c5"), "released")
        self.assertEqual(self.lab.probe("c5", FORBIDDEN, seconds=1), [False, False])
        self.remove("c5")

    def test_a_second_daemon_refuses(self):
        second = self.lab.run(
            [AGENTGATED, "--state-directory", self.lab.path("state"), "--driver-socket",
             "/run/second.sock", "--control-socket", "/run/second-control.sock"],
            check=False, timeout=60)
        self.assertNotEqual(second.returncode, 0)
        self.assertIn("another agentgated", second.stderr)
        self.assertTrue(self.world.ag("status")[1]["ready"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
