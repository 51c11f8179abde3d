# SPDX-License-Identifier: GPL-2.0-or-later
"""Many at once, and no window: nothing left over, nothing out before the release."""
import concurrent.futures
import os
import unittest

from common import *  # noqa: F401,F403

ENGINE = os.environ.get("LAB_ENGINE", "28.5")


class Many(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.world = World(ENGINE).__enter__()
        cls.lab = cls.world.lab

    @classmethod
    def tearDownClass(cls):
        cls.world.__exit__(None)

    def leftovers(self):
        rules = self.world.nft()
        found = [link for link in self.world.links() if link.startswith(("agp", "agc"))]
        if "agp" in rules.replace('"agp*"', ""):
            found.append("rules of a port")
        if "lab.allow" in rules:
            found.append("sets of a policy")
        return found + os.listdir(self.lab.path("state/endpoints"))

    def test_fifty_at_once(self):
        names = [f"m{n}" for n in range(50)]

        def life(name):
            self.lab.container(name, "agents")
            code, report, error = self.world.arm_paused(name)
            if code != 0:
                return f"{name}: {report.get('reason')} {error}"
            if self.lab.probe(name, [("tcp", ALLOWED, 443), ("tcp", DENIED, 443)]) != [True, False]:
                return f"{name}: reaches something else than its policy"
            self.lab.docker("rm", "-f", name)
            return None
        with concurrent.futures.ThreadPoolExecutor(10) as pool:
            problems = [p for p in pool.map(life, names) if p]
        self.assertEqual(problems, [])
        self.assertEqual(self.leftovers(), [])

    def test_immediate_connect_a_hundred_times(self):
        # The first thing that the process does is to connect and to send; nothing may come out.
        bridge = self.world.bridge()

        def start(number):
            self.lab.docker(
                "run", "--rm", "--name", f"i{number}", "--network", "agents", "lab/busybox", "sh", "-c",
                f"for i in 1 2 3; do nc -w 1 {ALLOWED} 80 </dev/null & nc -w 1 {DENIED} 443 </dev/null & "
                "done; sleep 0.2", check=False)

        def work():
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                list(pool.map(start, range(100)))
            return None
        before = self.lab.run(["ip", "-s", "-j", "link", "show", "dev", bridge]).stdout
        queries = len(self.lab.dns_queries())
        work()
        after = self.lab.run(["ip", "-s", "-j", "link", "show", "dev", bridge]).stdout
        received = [json.loads(text)[0]["stats64"]["rx"]["packets"] for text in (before, after)]
        self.assertEqual(received[1] - received[0], 0, "the bridge device received frames")
        self.assertEqual(len(self.lab.dns_queries()), queries)
        self.assertEqual(self.leftovers(), [])


if __name__ == "__main__":
    unittest.main(verbosity=2)
