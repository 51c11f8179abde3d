# SPDX-License-Identifier: GPL-2.0-or-later
"""The engine's embedded resolver on a host whose own DNS server is on loopback.

Engines before 25.0.5 ask that server from the host's namespace, for closed containers too
(CVE-2024-29018): seen here in the server's log. There an arm is refused unless the policy accepts it.
Newer ones do not ask it, and everything is armed.
"""
import time
import unittest

from common import *  # noqa: F401,F403

EMBEDDED = "127.0.0.11"
REACH = [("tcp", ALLOWED, 443)]


class Resolver(Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.leaks = cls.ENGINE == "20.10"
        cls.lab.spawn("dns-host", cls.lab.nsenter(
            ["dnsmasq", "--keep-in-foreground", "--no-resolv", "--no-hosts", "--bind-interfaces",
             "--listen-address=127.0.0.1", "--pid-file=", "--user=root", "--log-queries", "--log-facility=-",
             "--address=/test/192.0.2.80"]))
        wait_for("the host's DNS server", lambda: "127.0.0.1:53" in cls.lab.run(["ss", "-lnuH"]).stdout)
        cls.lab.policy("accepts", {"version": 1, "runtimes": ["runc"], "resolvers": [DNS],
                                   "accept_host_resolver": True,
                                   "allow": [{"name": "api.allowed.test", "services": ["tcp/443"]}]})

    def setUp(self):
        self.made = []
        self.lab.write("resolv.conf", "nameserver 127.0.0.1\n")

    def tearDown(self):
        self.remove(*self.made)

    def container(self, name, *extra, runtime="runc"):
        self.made.append(name)
        self.lab.container(name, "agents", runtime, *extra)

    def asked(self, container, name):
        """Who is asked when the container asks the embedded resolver: "host", "port" or nobody."""
        self.lab.docker("exec", container, "timeout", "3", "nslookup", "-type=a", name, EMBEDDED, check=False)
        time.sleep(0.2)  # the log is written by another process
        return [who for who, log in (("host", "dns-host"), ("port", "dns"))
                if any(f" {name} " in line for line in self.lab.dns_queries(log))]

    def by_host(self):
        return ["host"] if self.leaks else []

    def finding(self):
        code, report, error = self.world.ag("doctor")
        return next(one for one in report["findings"] if one["check"] == "resolver.loopback")

    def refused(self, name, text, *options):
        code, report, error = self.world.arm_paused(name, *options)
        self.assertEqual((code, report.get("code")), (1, "GATED_UNARMED"), (report, error))
        self.assertIn(text, report["reason"])
        self.assertEqual([step["step"] for step in report["steps"] if step["outcome"] == "failed"], [5])
        self.assertEqual(self.lab.probe(name, REACH), [False])
        self.assertEqual(self.world.state(name), "closed")

    def test_closed_refused_and_accepted(self):
        self.container("d1")
        self.assertEqual(self.asked("d1", "closed.test"), self.by_host())
        if self.leaks:
            self.refused("d1", "CVE-2024-29018")
            self.assertEqual(self.finding()["outcome"], "missing")
            report = self.armed("d1", "--policy", "accepts")
            self.assertTrue(any("past the gate" in note for note in report["notes"]), report["notes"])
        else:
            self.assertEqual(self.finding()["outcome"], "ok")
            self.assertFalse(self.armed("d1").get("notes"))
        self.reaches("d1", REACH, [True])
        self.assertEqual(self.asked("d1", "released.test"), self.by_host())

    def test_a_server_of_the_container(self):
        self.container("d2", "--dns", DNS)
        self.assertEqual(self.asked("d2", "closed.own.test"), [])
        self.armed("d2")
        self.reaches("d2", REACH, [True])
        self.assertEqual(self.asked("d2", "released.own.test"), ["port"])

    def test_gvisor_does_not_reach_it(self):
        self.container("d3", runtime="runsc")
        self.assertEqual(self.asked("d3", "closed.gvisor.test"), [])
        self.armed("d3")
        self.assertEqual(self.asked("d3", "released.gvisor.test"), [])

    def test_the_file_was_changed_after_the_start(self):
        self.container("d4")
        self.lab.write("resolv.conf", f"nameserver {DNS}\n")
        self.assertEqual(self.finding()["outcome"], "ok")
        # The container still has what the file held when it started.
        self.assertEqual(self.asked("d4", "changed.test"), self.by_host())
        if not self.leaks:
            self.armed("d4")
            return
        self.refused("d4", "started before /etc/resolv.conf was changed")
        time.sleep(2.5)
        self.lab.docker("restart", "-t", "0", "d4")
        self.armed("d4")
        self.reaches("d4", REACH, [True])
        self.assertEqual(self.asked("d4", "restarted.test"), ["port"])

    def test_a_server_of_the_engine(self):
        try:
            self.lab.daemon_json({"dns": [DNS]})
            time.sleep(2.5)
            self.container("d5")
            if self.leaks:  # the engine has not read it
                self.lab.daemon_json({"dns": [DNS]})
                self.refused("d5", "restart the engine")
            self.remove("d5")
            self.lab.stop("dockerd")
            self.lab.start_engine()
            time.sleep(2.5)
            self.assertEqual(self.finding()["outcome"], "ok")
            self.container("d5")
            self.assertEqual(self.asked("d5", "closed.engine.test"), [])
            self.armed("d5")
            self.reaches("d5", REACH, [True])
            self.assertEqual(self.asked("d5", "released.engine.test"), ["port"])
        finally:
            self.lab.daemon_json({})
            self.lab.stop("dockerd")
            self.lab.start_engine()


if __name__ == "__main__":
    unittest.main(verbosity=2)
