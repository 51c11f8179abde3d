# SPDX-License-Identifier: GPL-2.0-or-later
"""The engine hangs, dies or is restarted between two steps of an arm: never released.

The daemon stands still at a failpoint (labhost/hold.py) while the test does it, and goes on then.
"""
import subprocess
import threading
import unittest

from common import *  # noqa: F401,F403

REACH = [("tcp", ALLOWED, 443), ("tcp", ALLOWED6, 443), ("dns", DNS, "api.allowed.test"), ("tcp", DENIED, 443)]
STEPS = [f"arm.step.{n}" for n in range(1, 14)] + ["arm.step.11.done", "arm.step.12.done"]


def released_before(point):
    """Whether the batch of step 11 is behind this point."""
    step = int(point.split(".")[2])
    return step > 11 or point == "arm.step.11.done"


class EngineGone(Case):
    # The container outlives its engine: only the arm's own checks are between it and a release.
    DAEMON = {"live-restore": True}

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        try:
            cls.lab.container("c1", "agents")
            cls.lab.container("c2", "agents")
            cls.sender = cls.world.sender("c1", "c2")
        except BaseException:
            cls.tearDownClass()
            raise

    def engine_back(self):
        """Whatever was done to the engine, it answers again."""
        process = self.lab.processes.get("dockerd")
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGCONT)
            self.lab.wait_engine()
        else:
            self.lab.start_engine()

    def restart_engine(self):
        self.lab.stop("dockerd", signal.SIGKILL)
        self.lab.start_engine()

    def hang_engine(self):
        self.lab.processes["dockerd"].send_signal(signal.SIGSTOP)

    def kill_engine(self):
        self.lab.stop("dockerd", signal.SIGKILL)

    def arm_meanwhile(self, point, work):
        """Arms c1, and does work() while the daemon is at a point: exit code and report."""
        self.engine_back()
        self.lab.docker("unpause", "c1", check=False)  # if the point before this one failed
        hold = self.world.hold_daemon_at(point)
        answers = []
        try:
            self.lab.docker("pause", "c1")
            arm = threading.Thread(target=lambda: answers.append(self.world.ag("arm", "c1", timeout=120)))
            arm.start()
            try:
                hold.wait()
                work()
            finally:
                hold.go()
                arm.join()
        finally:
            hold.close()
        self.assertEqual(len(answers), 1, "the arm did not end")
        return answers[0][:2]

    def nothing_passes(self):
        """From the container's network namespace, which needs no engine."""
        counts, _ = self.world.send_frames(self.sender, seconds=0.3)
        self.assertEqual(total(counts), 0, counts)

    def still_closed(self, code, report, expected):
        self.assertIn(code, expected, report)
        self.assertEqual(report["outcome"], {1: "refused", 2: "undone"}[code], report)
        self.assertTrue(report["reason"])
        self.assertNotIn("COULD NOT BE READ BACK", report["reason"])
        self.nothing_passes()
        self.engine_back()
        self.assertEqual(self.world.state("c1"), "closed")
        self.lab.docker("unpause", "c1")
        self.nothing_passes()
        self.assertEqual(self.lab.probe("c1", REACH, seconds=1), [False] * len(REACH))

    def released_and_seen(self):
        """The control: without all that it is released, and the same look at the same places sees it."""
        self.armed("c1")
        self.armed("c2")
        self.reaches("c1", REACH, [True, True, True, False])
        counts, _ = self.world.send_frames(
            self.sender, seconds=0.3, meanwhile=lambda: self.lab.probe("c2", REACH[:1]))
        self.assertTrue(counts["bridge"].get("own-udp-out"), counts)
        self.assertTrue(counts["uplink"].get("allowed-udp"), counts)
        self.assertTrue(counts["neighbour"].get("control"), counts)
        for name in ("c1", "c2"):
            self.assertEqual(self.world.ag("disarm", name)[0], 0)

    def each(self, points, work, expected):
        for point in points:
            with self.subTest(point):
                code, report = self.arm_meanwhile(point, work)
                self.still_closed(code, report, expected(point))
        self.released_and_seen()

    def test_a_daemon_that_was_only_held_releases(self):
        # The hold itself changes nothing, so what follows is the engine's doing.
        for point in ("arm.step.1", "arm.step.12.done"):
            code, report = self.arm_meanwhile(point, lambda: None)
            self.assertEqual((code, report["outcome"]), (0, "released"), report)
            self.lab.docker("unpause", "c1")
            self.reaches("c1", REACH, [True, True, True, False])
            self.assertEqual(self.world.ag("disarm", "c1")[0], 0)

    def test_killed(self):
        self.each(STEPS, self.kill_engine, lambda point: (2,) if released_before(point) else (1,))

    def test_hanging(self):
        # Each of these waits until the daemon gives up on an answer.
        points = [f"arm.step.{n}" for n in (1, 3, 5, 9, 11, 12, 13)] + ["arm.step.11.done"]
        self.each(points, self.hang_engine, lambda point: (2,) if released_before(point) else (1,))

    def test_restarted(self):
        # From step 3 on the daemon knows which engine it began with.
        points = [point for point in STEPS if point not in ("arm.step.1", "arm.step.2")]
        self.each(points, self.restart_engine, lambda point: (2,) if released_before(point) else (1, 2))

    def test_killed_with_an_earlier_release(self):
        # What cannot be verified now loses what it had.
        for point, expected in (("arm.step.2", 2), ("arm.step.9", 1), ("arm.step.11", 1)):
            with self.subTest(point):
                self.armed("c1")
                code, report = self.arm_meanwhile(point, self.kill_engine)
                self.still_closed(code, report, (expected,))


class EngineTakesTheContainer(Case):
    """Without live-restore a new engine ends the containers of the old one."""

    def test_restarted(self):
        for number, point in enumerate(("arm.step.4", "arm.step.7", "arm.step.9", "arm.step.11",
                                        "arm.step.11.done", "arm.step.13")):
            with self.subTest(point):
                name = f"d{number}"
                hold = self.world.hold_daemon_at(point)
                try:
                    self.lab.container(name, "agents")
                    self.lab.docker("pause", name)
                    answers = []
                    arm = threading.Thread(target=lambda: answers.append(self.world.ag("arm", name, timeout=120)))
                    arm.start()
                    hold.wait()
                    self.lab.stop("dockerd", signal.SIGKILL)
                    self.lab.start_engine(wait=False)
                    time.sleep(1)  # it may wait for the daemon, which is still held
                    hold.go()
                    arm.join()
                finally:
                    hold.close()
                self.lab.wait_engine()
                code, report, error = answers[0]
                self.assertIn(code, (1, 2), (report, error))
                self.assertIn(report["outcome"], ("refused", "undone"))
                self.assertFalse(self.lab.inspect(name)["State"]["Running"])
                # Started again it is closed.
                self.lab.docker("start", name)
                self.assertEqual(self.world.state(name), "closed")
                self.assertEqual(self.lab.probe(name, REACH, seconds=1), [False] * len(REACH))
                self.armed(name)
                self.reaches(name, REACH, [True, True, True, False])
                self.remove(name)
        wait_for("what is left to be collected", lambda: self.world.leftovers() == [], 90)


if __name__ == "__main__":
    unittest.main(verbosity=2)
