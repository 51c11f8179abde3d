# SPDX-License-Identifier: GPL-2.0-or-later
"""Many at once, and no window: nothing left over, nothing out before the release."""
import concurrent.futures
import json
import time
import unittest

from common import *  # noqa: F401,F403


class Many(Case):
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
        self.assertEqual(self.world.leftovers(), [])

    def received(self):
        """Frames that the bridge device and queries that the internet's DNS servers have received."""
        time.sleep(0.5)  # what is under way arrives
        link = json.loads(self.lab.run(["ip", "-s", "-j", "link", "show", "dev", self.world.bridge()]).stdout)[0]
        return link["stats64"]["rx"]["packets"], sum(len(self.lab.dns_queries(s)) for s in ("dns", "dns-other"))

    def test_immediate_connect_a_hundred_times(self):
        # The first thing that the process does is to connect, to ask and to send; nothing may come
        # out. It counts by itself what it put on its link.
        def start(number):
            return self.lab.docker(
                "run", "--rm", "--name", f"i{number}", "--network", "agents", "lab/busybox", "sh", "-c",
                f"for i in 1 2 3; do nc -w 1 {ALLOWED} 80 </dev/null & nc -w 1 {DENIED} 443 </dev/null & done; "
                f"nslookup api.allowed.test >/dev/null & nslookup api.allowed.test {DNS} >/dev/null & "
                "sleep 0.5; echo sent $(cat /sys/class/net/eth0/statistics/tx_packets)", check=False)

        before = self.received()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            done = list(pool.map(start, range(100)))
        after = self.received()
        self.assertEqual([(run.returncode, run.stderr[-500:]) for run in done if run.returncode], [])
        sent = [int(run.stdout.removeprefix("sent ")) for run in done]
        self.assertEqual(len(sent), 100)
        self.assertGreater(min(sent), 0, "a container sent nothing: this shows nothing")
        self.assertEqual(after, before, "the bridge device received frames, or a DNS server queries")
        self.assertEqual(self.world.leftovers(), [])

        # The same counters, and the same look for what is left, see an armed container.
        self.lab.container("armed", "agents")
        self.armed("armed")
        then = self.received()  # the arm itself asked for names
        self.reaches("armed", [("tcp", ALLOWED, 443), ("dns", DNS, "api.allowed.test")], [True, True])
        frames, queries = (one - other for one, other in zip(self.received(), then))
        self.assertGreater(frames, 5)
        self.assertGreater(queries, 0)
        found = self.world.leftovers()
        self.assertLessEqual({self.world.port("armed"), "rules of a port", "sets of a policy"}, set(found))
        self.assertTrue(any(self.world.attachment("armed")["EndpointID"] in what for what in found), found)
        self.remove("armed")
        self.assertEqual(self.world.leftovers(), [])


if __name__ == "__main__":
    unittest.main(verbosity=2)
