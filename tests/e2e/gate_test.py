#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0-or-later
"""Closed, released, disarmed: under both runtimes, on every engine."""

import time
import unittest

from lab_fixture import (ALLOWED, ALLOWED6, DENIED, DNS, GATEWAY, METADATA, NEIGHBOUR, OTHER_DNS, AgentgateCase,
                         for_every_engine)

PROBES = {
    "allowed": ("https", ALLOWED, 443),
    "allowed over IPv6": ("https", ALLOWED6, 443),
    "resolver": {"kind": "dns", "to": DNS, "name": "api.allowed.test"},
    "other port": ("http", ALLOWED, 80),
    "other protocol": ("udp", ALLOWED, 443),
    "other address": ("https", DENIED, 443),
    "other resolver": {"kind": "dns", "to": OTHER_DNS, "name": "api.allowed.test"},
    "metadata": ("http", METADATA, 80),
    "neighbour network": ("tcp", NEIGHBOUR, 22),
    "host on the gateway": ("tcp", GATEWAY, 2222),
}
RELEASED = {"allowed", "allowed over IPv6", "resolver"}


class Gate(AgentgateCase):
    def setUp(self):
        self.service = self.host.listen(GATEWAY, tcp=[2222])
        self.addCleanup(self.service.stop)

    def reached(self, name="a1"):
        return {what for what, ok in zip(PROBES, self.host.reaches(name, PROBES.values())) if ok}

    def story(self, runtime):
        self.start("a1", runtime=runtime)
        self.assertEqual(self.assert_silent(self.reached, self.bridge(), "eth0", name="a1"), set())
        self.assertEqual(self.net.journal(), [])

        self.release("a1")
        self.assertEqual(self.reached(), RELEASED)
        self.assertEqual({entry["dst"] for entry in self.net.journal()}, {ALLOWED, ALLOWED6})
        self.assertEqual(self.service.journal(), [])
        self.assertEqual(self.agentgate("check", "a1")[0], 0)

        self.assertEqual(self.agentgate("disarm", "a1")[0], 0)
        self.assertEqual(self.assert_silent(self.reached, self.bridge(), "eth0", name="a1"), set())

    def test_runc(self):
        self.story("runc")

    def test_runsc(self):
        self.story("runsc")

    def test_disarm_cuts_a_live_flow(self):
        self.start("a1", runtime="runsc")
        self.release("a1")
        flow = self.host.stream("a1", ALLOWED, 443, "udp")
        self.assertEqual(flow.received(), [], "udp/443 is not in the policy")
        self.assertEqual(self.agentgate("disarm", "a1")[0], 0)
        # The same flow by a policy that has it.
        self.policy("udp", {"version": 1, "runtimes": ["runsc"], "allow": [
            {"cidr": f"{ALLOWED}/32", "services": ["udp/443"]}]})
        self.release("a1", "--policy", "udp")
        deadline = time.monotonic() + 10
        while not flow.received() and time.monotonic() < deadline:
            time.sleep(0.2)
        self.assertTrue(flow.received())
        self.assertEqual(self.agentgate("disarm", "a1")[0], 0)
        time.sleep(0.2)
        before = len(flow.received())
        time.sleep(0.5)
        self.assertEqual(len(flow.received()), before)

    def test_what_only_looks_like_runsc_is_refused(self):
        self.policy("strict", {"version": 1, "runtimes": ["runsc"], "allow": [
            {"cidr": f"{ALLOWED}/32", "services": ["tcp/443"]}]})
        runtimes = ["runsc-alias-not-really"] + (["runsc-type-not-really"] if self.ENGINE != "20.10" else [])
        for number, runtime in enumerate(runtimes):
            with self.subTest(runtime=runtime):
                self.start(f"a{number}", runtime=runtime)
                code, report, errors = self.arm(f"a{number}", "--policy", "strict")
                self.assertEqual(code, 1, (report, errors))


load_tests = for_every_engine(Gate)

if __name__ == "__main__":
    unittest.main(verbosity=2)
