# SPDX-License-Identifier: GPL-2.0-or-later
"""What happens to a container after its release: what breaks a premise closes the port, and how soon."""
import json
import os
import signal
import subprocess
import time
import unittest

from common import *  # noqa: F401,F403

REACH = [("tcp", ALLOWED, 443)]


class Guarded(Case):
    """A container "g1" that is released."""

    def setUp(self):
        self.made = []
        wait_for("the guard", lambda: self.guard()["connected"])
        self.release("g1")

    def tearDown(self):
        if "dockerd" not in self.lab.processes:
            self.lab.start_engine()
        self.remove(*reversed(self.made))

    def guard(self):
        return self.world.ag("status")[1]["engine_guard"]

    def run_container(self, name, network="agents", runtime="runc"):
        self.made.append(name)
        return self.lab.container(name, network, runtime)

    def release(self, name, runtime="runc"):
        self.run_container(name, runtime=runtime)
        self.armed(name)
        self.reaches(name, REACH, [True])

    def released(self, name):
        return [one for one in self.world.ag("status")[1]["endpoints"]
                if one["release"] and one["release"]["container_name"] == name]

    def closes(self, what, work, reason, name="g1"):
        """work() closes the port: from its return until `check` says so, in time, and for sure."""
        incidents = len(self.world.ag("status")[1]["incidents"])
        start = time.time()
        work()
        returned = time.time()
        wait_for(f"{what}: the port is closed", lambda: not self.released(name), 10, 0.01)
        closed = time.time()
        print(f"\n{what}: closed {(closed - returned) * 1000:.0f} ms after the command returned "
              f"({(returned - start) * 1000:.0f} ms)", flush=True)
        self.assertEqual(self.lab.probe(name, REACH), [False])
        code, report, error = self.world.ag("check", name)
        self.assertEqual((code, report.get("outcome")), (0, "closed"), (report, error))
        if not reason:
            return
        line = self.audited(reason)
        self.assertEqual((line["exit"], line["outcome"], line["container_name"]), (2, "undone", name), line)
        new = self.world.ag("status")[1]["incidents"][incidents:]
        self.assertTrue([text for text in new if reason in text], new)

    def audited(self, reason):
        """The last line of the guard in the audit file."""
        with open(self.lab.path("log/audit.jsonl")) as file:
            lines = [json.loads(line) for line in file]
        lines = [line for line in lines if line["operation"] == "guard"]
        self.assertTrue(lines, "the guard wrote nothing")
        self.assertIn(reason, lines[-1]["reason"])
        return lines[-1]

    def stays(self, name="g1", seconds=2):
        end = time.time() + seconds
        while time.time() < end:
            self.assertEqual(self.world.state(name), "released")
            time.sleep(0.2)
        self.reaches(name, REACH, [True])


class Events(Guarded):
    def test_second_network(self):
        self.lab.docker("network", "create", "--internal", "--subnet", "172.29.0.0/24", "second")
        try:
            # Under runc Docker itself refuses, since the half routes are in the way. It lists the
            # network all the same and tells nobody; the next look, here for another event, finds it.
            refused = self.lab.docker("network", "connect", "second", "g1", check=False)
            self.assertIn("conflicts with existing route", refused.stderr)
            self.assertEqual(self.world.state("g1"), "inconsistent")
            self.closes("second network that Docker refused, at the next event",
                        lambda: self.lab.docker("kill", "-s", "CONT", "g1"), "2 networks")
            # runsc takes the routes out of the host's view, and Docker's check finds nothing.
            self.release("g2", runtime="runsc")
            self.closes("second network", lambda: self.lab.docker("network", "connect", "second", "g2"),
                        "premise: ", name="g2")
        finally:
            self.remove("g1", "g2")
            self.lab.docker("network", "rm", "second", check=False)

    def test_disconnect(self):
        # The driver does this one; the guard finds nothing that is released.
        self.lab.docker("network", "disconnect", "agents", "g1")
        self.assertEqual(self.released("g1"), [])

    def test_restart_policy(self):
        self.closes("restart policy", lambda: self.lab.docker("update", "--restart", "always", "g1"),
                    "restart policy is 'always'")

    def test_neighbour(self):
        self.closes("neighbour in its network namespace",
                    lambda: self.run_container("n1", "container:g1"),
                    "container n1 was started in its network namespace")

    def test_neighbour_that_ends_at_once(self):
        def work():
            self.made.append("n2")
            self.lab.docker("run", "--name", "n2", "--network", "container:g1", "lab/busybox", "true")
        self.closes("neighbour that ended at once", work, "container n2 was started in its network namespace")

    def test_neighbour_that_was_made_before(self):
        self.made.append("n3")
        self.lab.docker("create", "--name", "n3", "--network", "container:g1", "lab/busybox", "sleep", "1000")
        self.stays(seconds=0.5)
        self.closes("neighbour that was made before", lambda: self.lab.docker("start", "n3"),
                    "container n3 was started in its network namespace")

    def test_restarted(self):
        self.closes("docker restart", lambda: self.lab.docker("restart", "-t", "0", "g1"), "")

    def test_killed(self):
        def ended():
            code, report, _ = self.world.ag("check", "g1")
            return report.get("outcome") != "released"
        self.lab.docker("kill", "g1")
        start = time.time()
        wait_for("the port is gone", ended, 10, 0.01)
        print(f"\ndocker kill: closed {(time.time() - start) * 1000:.0f} ms after", flush=True)
        self.assertEqual(self.released("g1"), [])

    def test_harmless(self):
        self.run_container("other", "bridge")
        self.lab.docker("network", "create", "third")
        self.lab.docker("network", "connect", "third", "other")
        self.lab.docker("rename", "g1", "g1x")
        self.made.append("g1x")
        self.lab.docker("update", "--memory", "256m", "--memory-swap", "512m", "g1x", check=False)
        self.lab.docker("kill", "-s", "CONT", "g1x")
        self.lab.docker("restart", "-t", "0", "other")
        for _ in range(20):  # what exec starts is in the namespace before it is in the cgroup
            self.lab.docker("exec", "g1x", "true")
        self.stays("g1x")
        self.lab.docker("pause", "g1x")
        self.lab.docker("unpause", "g1x")
        self.stays("g1x")
        self.lab.docker("rm", "-f", "other")
        self.lab.docker("network", "rm", "third")
        self.assertEqual([line for line in self.released("g1")][0]["release"]["container_id"],
                         self.lab.inspect("g1x")["Id"])

    def test_a_burst_of_starts(self):
        # Each start is looked at; one of them is a neighbour.
        names = [f"b{number}" for number in range(12)]
        for name in names:
            self.made.append(name)
            network = "container:g1" if name == "b7" else "none"
            self.lab.docker("create", "--name", name, "--network", network, "lab/busybox", "sleep", "1000")
        self.closes("neighbour among 12 containers", lambda: self.lab.docker("start", *names),
                    "container b7 was started")


class Blind(Guarded):
    """The engine is killed; what happens meanwhile is found when it is back."""

    DAEMON = {"live-restore": True}

    def kill_engine(self):
        self.lab.stop("dockerd", signal.SIGKILL)
        start = time.time()
        wait_for("the loss is noticed", lambda: not self.guard()["connected"], 10)
        print(f"\nloss noticed after {(time.time() - start) * 1000:.0f} ms", flush=True)

    def test_unchanged_stays_released(self):
        losses = self.guard()["losses"]
        lines = self.lab.log_of("agentgated").count("not connected to the engine's events")
        self.kill_engine()
        time.sleep(2)  # several attempts
        finding = [one for one in self.world.ag("doctor")[1]["findings"] if one["check"] == "engine.events"][0]
        self.assertEqual(finding["outcome"], "missing")
        self.assertEqual(len(self.released("g1")), 1)
        self.lab.start_engine()
        start = time.time()
        wait_for("connected again", lambda: self.guard()["connected"], 10)
        print(f"\nconnected {(time.time() - start) * 1000:.0f} ms after the engine was up", flush=True)
        self.assertEqual(self.guard()["losses"], losses + 1)
        self.assertTrue([text for text in self.world.ag("status")[1]["incidents"] if "event stream is lost" in text])
        log = self.lab.log_of("agentgated")
        self.assertEqual(log.count("not connected to the engine's events"), lines + 1, "said once")
        self.stays("g1")

    def test_process_ends_while_blind(self):
        pid = self.lab.inspect("g1")["State"]["Pid"]
        self.kill_engine()
        start = time.time()
        os.kill(pid, signal.SIGKILL)
        wait_for("the port is closed", lambda: not self.released("g1"), 15, 0.02)
        print(f"\nprocess ended while the engine was away: closed after "
              f"{(time.time() - start) * 1000:.0f} ms", flush=True)
        self.lab.start_engine()

    def test_neighbour_while_blind(self):
        # Somebody else's process: no engine, no event.
        pid = self.lab.inspect("g1")["State"]["Pid"]
        self.kill_engine()
        stranger = subprocess.Popen(["nsenter", "-t", str(pid), "-n", "sleep", "100"])
        try:
            start = time.time()
            wait_for("the port is closed", lambda: not self.released("g1"), 15, 0.02)
            print(f"\nstranger while the engine was away: closed after "
                  f"{(time.time() - start) * 1000:.0f} ms", flush=True)
            self.audited("shares its network namespace")
        finally:
            stranger.kill()
            stranger.wait()
            self.lab.start_engine()
        self.assertEqual(self.lab.probe("g1", REACH), [False])

    def test_changed_while_the_guard_is_blind(self):
        # The daemon is dead, not the engine: what happened is found at its start.
        self.world.kill_daemon()
        self.lab.docker("update", "--restart", "always", "g1")
        self.assertEqual(self.lab.probe("g1", REACH), [True])
        start = time.time()
        self.world.start_daemon()
        wait_for("the port is closed", lambda: not self.released("g1"), 15, 0.02)
        print(f"\nrestart policy changed while the daemon was dead: closed "
              f"{(time.time() - start) * 1000:.0f} ms after its start", flush=True)
        self.assertEqual(self.lab.probe("g1", REACH), [False])
        self.audited("restart policy is 'always'")


class Dead(Guarded):
    """Without live-restore the engine's death takes its containers with it, when it is back."""

    def test_engine_killed_and_started(self):
        self.lab.stop("dockerd", signal.SIGKILL)
        time.sleep(0.5)
        self.lab.start_engine()
        start = time.time()
        wait_for("the port is closed", lambda: not self.released("g1"), 15, 0.02)
        print(f"\nengine killed and started: closed {(time.time() - start) * 1000:.0f} ms after it was up",
              flush=True)
        self.assertNotEqual(self.world.state("g1"), "released")


if __name__ == "__main__":
    unittest.main(verbosity=2)
