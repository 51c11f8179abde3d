# SPDX-License-Identifier: GPL-2.0-or-later
"""The host as a whole: reboots, orders of start, lost state, names that come again."""
import os
import shutil
import time
import unittest

from common import *  # noqa: F401,F403

REACH = [("tcp", ALLOWED, 443)]
TRIED = [("tcp", ALLOWED, 443), ("tcp", ALLOWED6, 443), ("tcp", DENIED, 443), ("dns", DNS, "api.allowed.test")]


class HostCase(Case):
    def setUp(self):
        self.made = []

    def tearDown(self):
        self.remove(*self.made)

    def start(self, name, *extra, runtime="runc"):
        self.made.append(name)
        return self.lab.container(name, "agents", runtime, *extra)

    def running(self):
        return set(self.lab.docker("ps", "--format", "{{.Names}}").stdout.split())

    def closed(self, name, other):
        """By what check says, by what the container reaches, by the frames that come out."""
        self.assertEqual(self.world.state(name), "closed")
        self.assertEqual(self.lab.probe(name, TRIED, seconds=2), [False] * len(TRIED))
        counts, sent = self.world.send_frames(self.world.sender(name, other))
        self.assertEqual(total(counts), 0, counts)
        self.assertGreater(sum(sent.values()), 0)

    def armed_again(self, name):
        self.armed(name)
        self.reaches(name, REACH, [True])
        self.assertEqual(self.lab.probe(name, [("tcp", DENIED, 443)], seconds=1), [False])


class Reboot(HostCase):
    """The kernel forgets, the disk stays."""

    def reboot(self):
        self.lab.reboot()
        self.assertEqual([link for link in self.world.links() if link.startswith("ag")], [])
        self.assertNotIn("agentgate", self.world.nft())

    def test_daemon_first_with_fifty_containers(self):
        # As systemd does it: Before=docker.service.
        self.start("was-released", "--restart", "no")
        self.start("was-closed")
        self.armed_again("was-released")
        fifty = [f"again{number}" for number in range(50)]
        for name in fifty:
            self.start(name, "--restart", "always")
        self.reboot()
        start = time.time()
        self.world.start_daemon()
        ready = time.time()
        self.lab.start_engine()
        up = time.time()
        wait_for("fifty containers", lambda: len(self.running()) == 50, 60, 0.2)
        print(f"\nreboot, daemon first: daemon ready after {(ready - start) * 1000:.0f} ms, engine up "
              f"{up - ready:.1f} s later, 50 containers {time.time() - up:.1f} s after that", flush=True)
        self.assertEqual(self.running(), set(fifty))
        for name in fifty:
            self.assertEqual(self.world.state(name), "closed", name)
        self.closed("again0", "again1")
        # What is left of those that did not come back is nothing.
        ours = {self.world.attachment(name)["EndpointID"] for name in fifty}
        self.assertEqual({name.removesuffix(".json") for name in os.listdir(self.lab.path("state/endpoints"))}, ours)
        # The one that was released comes back closed, and can be armed as ever.
        self.lab.docker("start", "was-released", "was-closed")
        self.closed("was-released", "was-closed")
        self.armed_again("was-released")

    def test_docker_first(self):
        self.start("early", "--restart", "always")
        self.start("late")
        self.reboot()
        start = time.time()
        self.lab.start_engine()  # waits for the driver 15 s for each container that it would start
        up = time.time() - start
        self.assertNotIn("early", self.running())
        failed = self.lab.docker("start", "late", check=False)
        self.assertNotEqual(failed.returncode, 0)
        print(f"\nreboot, engine without the daemon: up after {up:.1f} s; docker start: {failed.stderr.strip()}",
              flush=True)
        self.world.start_daemon()
        self.lab.docker("start", "early", "late")
        self.closed("early", "late")
        self.lab.docker("rm", "-f", "early")  # its restart policy is nothing that is armed
        self.armed_again("late")

    def test_engine_alone_is_restarted(self):
        # SIGKILL, no live-restore: Docker drops its stale endpoints without telling a v1 plugin.
        self.start("c1", "--restart", "always")
        self.start("c2")
        self.armed_again("c2")
        old = {self.world.attachment(name)["EndpointID"] for name in ("c1", "c2")}
        self.lab.stop("dockerd", signal.SIGKILL)
        self.lab.stop("containerd", signal.SIGKILL)
        end_shims(self.lab)
        self.lab.start_engine()
        wait_for("c1", lambda: "c1" in self.running(), 30)
        new = self.world.attachment("c1")["EndpointID"]
        self.assertNotIn(new, old)
        wait_for("stale endpoints are collected",
                 lambda: set(os.listdir(self.lab.path("state/endpoints"))) == {new + ".json"}, 90, 0.5)
        ports = {link for link in self.world.links() if link.startswith("agp")}
        self.assertEqual(ports, {"agp" + new[:10]})
        self.lab.docker("start", "c2")
        self.closed("c1", "c2")
        self.armed_again("c2")


def end_shims(lab):
    """The shims and their containers, as the end of a machine would; not agentgated, not the stage."""
    keep = {process.pid for process in lab.processes.values()}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        pid = int(entry)
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                mine = "containerd-shim" in file.read()
            if mine and pid not in keep and os.readlink(f"/proc/{pid}/ns/net") == os.readlink(lab.netns()):
                with open(f"/proc/{pid}/task/{pid}/children") as file:
                    children = [int(child) for child in file.read().split()]
                for one in [pid, *children]:
                    os.kill(one, signal.SIGKILL)
        except OSError:
            pass  # it ended by itself


class Lost(HostCase):
    """The kernel stays, the disk forgets."""

    def test_state_directory_is_lost(self):
        self.start("aa")
        self.start("bb")
        self.armed_again("aa")
        self.world.kill_daemon()
        shutil.move(self.lab.path("state"), self.lab.path("state.lost"))
        os.mkdir(self.lab.path("state"))
        self.world.start_daemon()
        # Nobody knows what a was released to: nothing of it passes, whatever is left of its link.
        self.assertEqual(self.lab.probe("aa", TRIED, seconds=1), [False] * len(TRIED))
        code, report, error = self.world.ag("check", "aa")
        self.assertNotEqual(report.get("outcome"), "released", (report, error))
        left = [link for link in self.world.links() if link.startswith("ag")]
        print(f"\nstate lost: check says {report.get('outcome')} ({report.get('reason')}); links left: {left}",
              flush=True)
        incidents = self.world.ag("status")[1]["incidents"]
        self.assertEqual(len([one for one in incidents if "does not know it; removed" in one]), 3, incidents)
        self.remove("aa", "bb")
        failed = self.lab.docker("run", "--name", "cc", "--network", "agents", "lab/busybox", "true", check=False)
        self.assertNotEqual(failed.returncode, 0)
        print(f"docker run: {failed.stderr.strip()}", flush=True)
        self.assertIn("docker network rm", failed.stderr)
        # What the message says is done, and all is as before.
        self.remove("cc")
        self.lab.docker("network", "rm", "agents")
        self.world.create_network()
        self.start("dd")
        self.start("ee")
        self.closed("dd", "ee")
        self.armed_again("dd")


class Checkpoint(HostCase):
    """What is restored is another container to the gate. 28.5 cannot restore one with a network."""

    ENGINE, DAEMON = "20.10", {"experimental": True}

    def checkpoint_again(self, container, name):
        """containerd refuses while its collector has not yet taken away what an earlier checkpoint of the same
        container left in the content store."""
        def done():
            made = self.lab.docker("checkpoint", "create", container, name, check=False)
            if made.returncode != 0 and "already exists" not in made.stderr:
                self.fail(made.stderr)
            return made.returncode == 0
        wait_for("the second checkpoint", done, 60, 1)

    def test_a_restored_container_is_closed(self):
        self.start("cp", runtime="runsc")
        self.start("other")
        self.armed_again("cp")
        self.lab.docker("checkpoint", "create", "--leave-running", "cp", "first")
        self.assertEqual(self.world.state("cp"), "released")  # it never stopped
        self.checkpoint_again("cp", "second")
        self.assertNotEqual(self.world.state("cp"), "released")
        self.lab.docker("start", "--checkpoint", "second", "cp")
        self.closed("cp", "other")
        self.armed_again("cp")


class Names(HostCase):
    def test_a_name_and_an_address_come_again(self):
        self.start("twice", "--ip", "172.30.0.77", "--mac-address", "02:42:ac:1e:00:4d")
        self.start("other")
        self.armed_again("twice")
        for restart in (False, True):
            with self.subTest(daemon_restarted=restart):
                self.lab.docker("rm", "-f", "twice")
                if restart:
                    self.world.restart_daemon()
                self.start("twice", "--ip", "172.30.0.77", "--mac-address", "02:42:ac:1e:00:4d")
                self.closed("twice", "other")
                self.armed_again("twice")

    def test_a_name_is_taken_while_the_daemon_is_dead(self):
        self.start("gone", "--ip", "172.30.0.78")
        self.start("other")
        self.armed_again("gone")
        self.world.kill_daemon()
        self.lab.docker("rm", "-f", "gone", check=False, timeout=120)
        self.world.start_daemon()
        self.lab.docker("rm", "-f", "gone", check=False)
        self.start("gone", "--ip", "172.30.0.78")
        self.closed("gone", "other")


if __name__ == "__main__":
    unittest.main(verbosity=2)
