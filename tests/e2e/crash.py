# SPDX-License-Identifier: GPL-2.0-or-later
"""SIGKILL in every arm step and every driver verb: never open, and the next start repairs."""
import os
import unittest

from common import *  # noqa: F401,F403

ENGINE = os.environ.get("LAB_ENGINE", "28.5")
REACH = [("tcp", ALLOWED, 443)]
FORBIDDEN = [("tcp", DENIED, 443), ("tcp", METADATA, 80)]


class Crash(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.world = World(ENGINE).__enter__()
        cls.lab = cls.world.lab

    @classmethod
    def tearDownClass(cls):
        cls.world.__exit__(None)

    def restart(self, env=None):
        self.world.kill_daemon()
        self.world.start_daemon(env=env)

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
                self.restart({"AGENTGATE_FAILPOINT": point})
                self.lab.docker("pause", "c1")
                code, _, _ = self.world.ag("arm", "c1")
                self.died()
                self.assertEqual(code, 4)
                self.lab.docker("unpause", "c1")
                # Before the batch of step 11 nothing passes; after it the policy holds, no more.
                step = int(point.split(".")[2]) if point.startswith("arm") else 11
                before = step < 11 or point in ("arm.step.11", "host.release.saved", "host.close.closed")
                expected = [not before, False, False]
                self.assertEqual(self.world.settled("c1", REACH + FORBIDDEN, expected)[0], expected)
                self.world.start_daemon()
                self.assertEqual(self.world.state("c1"), "closed" if before else "released", point)
                self.assertEqual(self.lab.probe("c1", FORBIDDEN, seconds=1), [False, False], point)
        # And it can be armed as if nothing had been.
        self.assertEqual(self.world.arm_paused("c1")[0], 0)
        self.assertEqual(self.world.settled("c1", REACH, [True])[0], [True])
        self.lab.docker("rm", "-f", "c1")

    def test_in_every_driver_verb(self):
        for verb in ("CreateEndpoint", "Join", "Leave", "DeleteEndpoint"):
            for when in ("begin", "done"):
                point = f"driver.{verb}.{when}"
                with self.subTest(point):
                    self.restart({"AGENTGATE_FAILPOINT": point})
                    import threading
                    outcome = []
                    if verb in ("Leave", "DeleteEndpoint"):
                        self.lab.container("c2", "agents")
                        work = lambda: outcome.append(self.lab.docker("rm", "-f", "c2", check=False))
                    else:
                        work = lambda: outcome.append(self.lab.docker(
                            "run", "-d", "--name", "c2", "--network", "agents", "lab/busybox", "sleep",
                            "1000", check=False))
                    thread = threading.Thread(target=work)
                    thread.start()
                    self.died()
                    self.world.start_daemon()
                    thread.join()
                    running = self.lab.docker("ps", "-q", "-f", "name=c2").stdout.strip()
                    if running:
                        self.assertEqual(self.lab.probe("c2", REACH), [False])
                    self.lab.docker("rm", "-f", "c2", check=False)
        # What the interrupted requests left is collected; a new container works.
        self.lab.container("c3", "agents")
        code, report, error = self.world.arm_paused("c3")
        self.assertEqual(code, 0, (report, error))
        self.assertEqual(self.world.settled("c3", REACH + FORBIDDEN, [True, False, False])[0], [True, False, False])
        self.lab.docker("rm", "-f", "c3")

    def test_in_network_verbs(self):
        for point in ("driver.CreateNetwork.begin", "host.create_network.saved",
                      "driver.CreateNetwork.done"):
            with self.subTest(point):
                self.restart({"AGENTGATE_FAILPOINT": point})
                import threading
                thread = threading.Thread(target=lambda: self.lab.docker(
                    "network", "create", "-d", "agentgate", "--subnet", "172.28.0.0/24", "second",
                    check=False))
                thread.start()
                self.died()
                self.world.start_daemon()
                thread.join()
                self.lab.docker("network", "rm", "second", check=False)
                status = self.world.ag("status")[1]
                self.assertTrue(status["ready"], status)

    def test_released_survives_kill_and_restart(self):
        self.lab.container("c4", "agents")
        self.assertEqual(self.world.arm_paused("c4")[0], 0)
        before = self.lab.run(["nft", "-s", "-a", "list", "ruleset"]).stdout
        self.restart()
        self.assertEqual(self.lab.run(["nft", "-s", "-a", "list", "ruleset"]).stdout, before)
        self.assertEqual(self.world.state("c4"), "released")
        self.assertEqual(self.world.settled("c4", REACH + FORBIDDEN, [True, False, False])[0], [True, False, False])
        self.lab.docker("rm", "-f", "c4")

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
