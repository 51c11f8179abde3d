# SPDX-License-Identifier: GPL-2.0-or-later
"""What can go wrong with a managed plugin: crash, restarts of the engine, disable, upgrade, two daemons."""
import unittest

import managed
import plugin_build
from managed import *  # noqa: F401,F403

ENGINE = os.environ.get("LAB_ENGINE", "28.5")


class Installed(unittest.TestCase):
    """a1 (policy lab) and a3 (policy plain, with a flow) are released, a2 is closed; so it stays."""

    DAEMON = {"live-restore": True}

    @classmethod
    def setUpClass(cls):
        plugin_build.build()
        cls.world = managed.PluginWorld(ENGINE, daemon=cls.DAEMON).__enter__()
        cls.lab = cls.world.lab
        try:
            cls.story = managed.Story(cls.world, print)
            cls.story.installed()
            cls.story.closed()
            cls.story.armed()
        except BaseException:
            cls.world.__exit__(*sys.exc_info())
            raise

    @classmethod
    def tearDownClass(cls):
        cls.world.__exit__(None)

    def run(self, result=None):
        before = len(result.failures) + len(result.errors)
        outcome = super().run(result)
        if len(result.failures) + len(result.errors) > before:
            self.world.dump()
        return outcome

    def setUp(self):
        if not self.world.enabled():  # an earlier test failed
            self.world.enable()

    def unharmed(self, state=True):
        if state:
            self.story.state()
        self.story.released_as_meant()
        self.story.still_closed("a2")

    def refused(self, *command):
        done = self.lab.docker(*command, check=False)
        self.assertNotEqual(done.returncode, 0, done)
        return done.stderr

    def test_killed(self):
        """The engine starts it again at once; releases and flows do not notice."""
        for _ in range(3):
            before = self.world.pid()
            os.kill(before, signal.SIGKILL)
            self.story.flow.goes_on()
            wait_for("another process", lambda old=before: self.world.pid() not in (None, old), 20)
            self.world.wait_ready()
            # One that dies in its first half second is to the engine one that did not start: it is
            # given up after ten seconds, and disabled.
            time.sleep(2)
        self.assertTrue(self.world.enabled())
        self.unharmed()
        self.lab.container("b1", "agents")
        self.story.still_closed("b1")
        self.lab.docker("rm", "-f", "b1")

    def test_told_to_stop_it_stops(self):
        """Long before the engine's ten seconds are over; its sockets are gone, the kernel is as it was."""
        start = time.time()
        self.world.disable()
        self.assertLess(time.time() - start, 5)
        self.assertIsNone(self.world.pid())
        self.assertFalse(os.path.exists(self.lab.path("run/docker/plugins/agentgate.sock")))
        self.unharmed(state=False)
        self.world.enable()
        self.unharmed()

    def test_disabled_with_networks_in_use(self):
        """Docker counts only networks that were made by the plugin's full name, and refuses for those."""
        self.lab.docker("network", "create", "-d", managed.REFERENCE, "--subnet", "172.31.0.0/24", "second")
        self.assertIn("is in use", self.refused("plugin", "disable", managed.REFERENCE))
        self.assertTrue(self.world.enabled())
        self.lab.docker("network", "rm", "second")
        self.lab.docker("network", "create", "-d", "agentgate", "--subnet", "172.31.2.0/24", "third")
        bridge = self.world.bridge("third")
        self.world.disable()  # `agents` is in use, and is not counted
        self.unharmed(state=False)
        start = time.time()
        self.assertIn("agentgate.sock", self.refused("run", "-d", "--name", "b2", "--network", "agents",
                                                     "lab/busybox", "sleep", "1000"))
        self.assertLess(time.time() - start, 40)
        self.lab.docker("rm", "-f", "b2")
        # What Docker removes meanwhile the driver does not hear of; the next one with the subnet replaces it.
        self.lab.docker("network", "rm", "third")
        self.world.enable()
        self.unharmed()
        self.assertIn(bridge, self.world.links())
        self.lab.docker("network", "create", "-d", "agentgate", "--subnet", "172.31.2.0/24", "third")
        self.assertNotIn(bridge, self.world.links())
        self.lab.docker("network", "rm", "third")

    def test_engine_restarted(self):
        """With live-restore the plugin runs on, and the engine forgets which networks are in use."""
        self.lab.docker("network", "create", "-d", managed.REFERENCE, "--subnet", "172.31.1.0/24", "second")
        self.lab.container("b3", "second")
        before = self.world.pid()
        self.lab.stop("dockerd")
        self.assertEqual(self.world.pid(), before)
        self.story.released_as_meant()
        self.lab.start_engine()
        self.assertEqual(self.world.pid(), before)
        self.world.wait_ready()
        self.unharmed()
        # The count is lost, so it is not refused any more; closed stays closed, released released.
        self.world.disable()
        self.unharmed(state=False)
        self.story.still_closed("b3")
        self.world.enable()
        self.unharmed()
        self.assertEqual(self.world.state("b3"), "closed")
        self.lab.docker("rm", "-f", "b3")
        self.lab.docker("network", "rm", "second")

    def test_one_per_host(self):
        """Beside it no daemon of the host starts, nor the plugin beside one; each says why."""
        second = self.lab.run([AGENTGATED, "--state-directory", self.lab.path("state")], check=False)
        self.assertEqual(second.returncode, 1)
        self.assertIn("another agentgated", second.stderr)
        second = self.lab.run([AGENTGATED, "--state-directory", self.lab.path("other-state")], check=False)
        self.assertEqual(second.returncode, 1)
        self.assertIn("is a second agentgated running?", second.stderr)
        self.unharmed()

        self.world.disable()
        self.world.start_daemon()  # the host's takes over where the plugin stopped
        self.unharmed()
        start = time.time()
        self.refused("plugin", "enable", managed.REFERENCE)
        self.assertLess(time.time() - start, 30)
        self.assertIn("another agentgated uses this state directory", self.lab.log_of("dockerd"))
        self.assertFalse(self.world.enabled())
        self.unharmed()
        self.lab.stop("agentgated")
        self.world.enable()  # and back
        self.unharmed()

    def test_upgraded(self):
        self.story.upgraded()

    def test_zz_changed_and_removed(self):
        self.story.changed()
        self.story.removed()


class Boot(unittest.TestCase):
    """The engine starts the plugin long before it answers, and containers before that."""

    def test_slow_engine(self):
        plugin_build.build()
        with managed.PluginWorld(ENGINE) as world:
            lab = world.lab
            lab.docker("plugin", "create", managed.REFERENCE, plugin_build.PLUGIN)
            lab.docker("plugin", "set", managed.REFERENCE, *world.settings())
            world.enable()
            world.create_network()
            lab.docker("run", "-d", "--name", "a1", "--network", "agents", "--restart", "always", "lab/busybox",
                       "sleep", "1000000")
            lab.stop("dockerd")
            self.assertIsNone(world.pid())
            lab.start_engine(wait=False)
            wait_for("the plugin's process", world.pid, 30, every=0.01)
            engine = lab.processes["dockerd"]
            engine.send_signal(signal.SIGSTOP)
            try:
                time.sleep(3)
                world.wait_ready(10)  # nobody answers on the engine's socket, and it does not wait for that
            finally:
                engine.send_signal(signal.SIGCONT)
            lab.wait_engine()
            self.assertTrue(world.enabled())
            # It was started while the engine did not answer yet: by a driver that was ready.
            wait_for("the container", lambda: lab.inspect("a1")["State"]["Running"], 10)
            self.assertEqual(world.state("a1"), "closed")
            self.assertEqual(lab.probe("a1", managed.REACH + managed.FORBIDDEN, seconds=1), [False] * 4)
            lab.docker("rm", "-f", "a1")
            lab.container("a2", "agents")
            code, report, error = world.arm_paused("a2")
            self.assertEqual((code, report.get("outcome")), (0, "released"), (report, error))
            self.assertEqual(world.settled("a2", managed.REACH + managed.FORBIDDEN, [True] + [False] * 3)[0],
                             [True] + [False] * 3)


if __name__ == "__main__":
    unittest.main(verbosity=2)
