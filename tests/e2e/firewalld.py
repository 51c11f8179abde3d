# SPDX-License-Identifier: GPL-2.0-or-later
"""firewalld is started, reloaded and stopped under containers that send: closed stays closed, and
released never passes more than its policy. Both of its backends."""
import threading
import time
import unittest

from common import *  # noqa: F401,F403

FORBIDDEN = [("tcp", DENIED, 443), ("tcp", ALLOWED, 80), ("tcp", METADATA, 80), ("tcp", LAN, 443),
             ("tcp", GATEWAY, HOST_SERVICE)]


class Firewalld(Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        start_host_services(cls.world)

    def tearDown(self):
        self.lab.stop_firewalld()
        self.lab.run(["sh", "-c", "nft delete table inet firewalld 2>/dev/null; iptables -F; ip6tables -F"])
        self.lab.stop("dockerd")
        self.lab.start_engine()
        self.remove("quiet", "released", "other")

    def under(self, what, work):
        """work() while the closed container sends all kinds of frames, again and again, and the
        released one tries what its policy forbids."""
        sender = self.world.sender("quiet", "other")
        who, stop, sent, passed = sender["who"], threading.Event(), [], []

        def send():
            while not stop.is_set():
                out = subprocess.run([sys.executable, FRAMES, "send", f"/proc/{sender['pid']}/ns/net", "eth0",
                                      json.dumps(who)], capture_output=True, text=True)
                sent.append(sum(json.loads(out.stdout).values()))

        def tries():
            while not stop.is_set():
                passed.append(any(self.lab.probe("released", FORBIDDEN, seconds=1)))

        def all_of_it():
            threads = [threading.Thread(target=send), threading.Thread(target=tries)]
            for thread in threads:
                thread.start()
            time.sleep(0.3)
            try:
                begin = time.time()
                work()
                took = time.time() - begin
                time.sleep(1)
            finally:
                stop.set()
                for thread in threads:
                    thread.join()
            return took
        sources = [who["own_mac"], "02:de:ad:00:00:01", "02:de:ad:00:00:02", "02:de:ad:00:00:03",
                   "control=" + who["gw_mac"]]
        counts, took = self.world.count(self.lab.netns(), [sender["bridge"], "up0", sender["port"]], sources,
                                        all_of_it, 1.0)
        leaked = total(counts)
        states = [self.world.state(name) for name in ("quiet", "released")]
        print(f"\n{what} ({took:.1f} s): {sum(sent)} frames of a closed port, {leaked} came out; "
              f"{len(passed)} rounds of forbidden tries, {sum(passed)} passed; check says {', '.join(states)}", flush=True)
        self.assertGreater(sum(sent), 100)
        self.assertGreater(len(passed), 0)
        self.assertEqual(leaked, 0, counts)
        self.assertEqual(sum(passed), 0)
        return states

    def with_backend(self, backend):
        self.lab.container("quiet", "agents")
        self.lab.container("other", "agents")
        self.lab.container("released", "agents")
        self.armed("released")
        self.reaches("released", [("tcp", ALLOWED, 443)], [True])
        self.under(f"firewalld started, {backend}", lambda: self.lab.start_firewalld(backend))
        self.under(f"firewalld reloaded, {backend}", lambda: self.lab.firewall_cmd("--reload"))
        self.under(f"firewalld reloaded completely, {backend}", lambda: self.lab.firewall_cmd("--complete-reload"))

        def engine():
            self.lab.stop("dockerd")
            self.lab.start_engine()
        # The engine finds firewalld on the bus and gives its chains to it.
        engine()
        for name in ("quiet", "other", "released"):
            self.lab.docker("start", name)
        code, report, error = self.world.arm_paused("released")
        print(f"armed under firewalld: exit {code}", flush=True)
        self.assertEqual(code, 0, (report, error))
        # What the docs say has to be done for allowed traffic to pass.
        before = self.lab.probe("released", [("tcp", ALLOWED, 443), ("tcp", ALLOWED6, 443)])
        self.lab.firewall_cmd("--permanent", "--zone=trusted", "--add-interface=" + self.world.bridge())
        self.lab.firewall_cmd("--reload")
        allowed = [("tcp", ALLOWED, 443), ("tcp", ALLOWED6, 443)]
        after, _ = self.world.settled("released", allowed, [True, True])
        print(f"allowed traffic under firewalld: {before}; with the bridge in zone trusted: {after}", flush=True)
        self.assertEqual(after, [True, True])
        states = self.under(f"firewalld reloaded under its engine, {backend}",
                            lambda: self.lab.firewall_cmd("--reload"))
        self.assertEqual(states, ["closed", "released"])

    def test_nftables(self):
        self.with_backend("nftables")

    def test_iptables(self):
        self.with_backend("iptables")


if __name__ == "__main__":
    unittest.main(verbosity=2)
