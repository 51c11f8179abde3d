# SPDX-License-Identifier: GPL-2.0-or-later
"""For end-to-end tests: a Docker host of the lab with agentgate on it.

AGENTGATE_BUILD is the build directory (default build/debug), AGENTGATE_LAB_ENGINES the engines
(default: all). A test module makes one case per engine:

    class Closed(AgentgateCase):
        def test_nothing_leaves(self):
            self.start("a1", runtime="runsc")
            self.assertEqual(self.host.reaches("a1", [("tcp", ALLOWED, 443)]), [False])

    load_tests = for_every_engine(Closed)
"""

import json
import os
import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/lab"))

from agentlab import ENGINES, Lab  # noqa: E402
from agentlab.image import PYTHON_IMAGE  # noqa: E402
from agentlab.internet import (ALLOWED, ALLOWED6, DENIED, DENIED6, DNS, DNS6, METADATA, METADATA6,  # noqa: E402,F401
                               NEIGHBOUR, OTHER_DNS)

BUILD = pathlib.Path(os.environ.get("AGENTGATE_BUILD", ROOT / "build/debug")).resolve()
AGENTGATED = BUILD / "plugin/daemon/agentgated"
AGENTGATE = BUILD / "plugin/cli/agentgate"
CHOSEN = os.environ.get("AGENTGATE_LAB_ENGINES", " ".join(ENGINES)).split()

SUBNET, GATEWAY = "172.30.0.0/24", "172.30.0.1"
SUBNET6, GATEWAY6 = "2001:db8:30::/64", "2001:db8:30::1"
POLICY = {
    "version": 1,
    "runtimes": ["runc", "runsc"],
    "resolvers": [DNS],
    "allow": [{"name": "api.allowed.test", "services": ["tcp/443"]}],
}


class AgentgateCase(unittest.TestCase):
    """One host for the tests of a class; containers are removed after each test.

    Class attributes that a subclass may set: ENGINE, POLICIES (name -> document), DAEMON_ARGS,
    DAEMON_ENV, and HOST (options of Lab.host).
    """

    ENGINE = CHOSEN[0]
    POLICIES = {"lab": POLICY}
    DAEMON_ARGS = ("--log-level", "debug")
    DAEMON_ENV = {}
    HOST = {}

    @classmethod
    def setUpClass(cls):
        if not AGENTGATED.exists():
            raise unittest.SkipTest(f"{AGENTGATED} is not built; AGENTGATE_BUILD names the build directory")
        cls.lab = Lab()
        try:
            cls.net, cls.host = cls.lab.internet(), cls.lab.host(cls.ENGINE, **cls.HOST)
            for name, document in cls.POLICIES.items():
                cls.policy(name, document)
            cls.start_daemon()
            cls.host.start_engine()
            cls.create_network("agents", "-o", "agentgate.policy=" + next(iter(cls.POLICIES)))
        except BaseException:
            cls.dump()
            cls.lab.close()
            raise

    @classmethod
    def tearDownClass(cls):
        cls.lab.close()

    def run(self, result=None):
        problems = 0 if result is None else len(result.failures) + len(result.errors)
        outcome = super().run(result)
        if result is not None and len(result.failures) + len(result.errors) > problems:
            self.dump()
        return outcome

    def tearDown(self):
        left = self.host.docker("ps", "-aq").stdout.split()
        if left:
            self.host.docker("rm", "-f", *left)
        self.net.clear_journal()

    @classmethod
    def dump(cls):
        """The ends of the logs, for whoever reads a failure."""
        if not hasattr(cls, "host"):
            return
        for log in ("agentgated.log", "dockerd.log"):
            path = cls.host.logs / log
            if path.exists():
                print(f"--- {cls.ENGINE} {log}\n{path.read_text(errors='replace')[-4000:]}", file=sys.stderr)

    # -- agentgate

    @classmethod
    def policy(cls, name, document):
        cls.host.write(f"/etc/agentgate/policies/{name}.json", json.dumps(document, indent=1) + "\n")

    @classmethod
    def start_daemon(cls, *args, env=None):
        cls.daemon = cls.host.start_agentgated(AGENTGATED, (*cls.DAEMON_ARGS, *args), {**cls.DAEMON_ENV, **(env or {})})

    @classmethod
    def agentgate(cls, *args, timeout=60):
        """The CLI: (exit code, its JSON or None, what it wrote to standard error)."""
        done = cls.host.exec(AGENTGATE, "--json", *args, timeout=timeout)
        try:
            return done.returncode, json.loads(done.stdout), done.stderr
        except ValueError:
            return done.returncode, None, done.stdout + done.stderr

    def arm(self, name, *args):
        """Pause, arm, unpause; answers like agentgate()."""
        self.host.docker_ok("pause", name)
        answer = self.agentgate("arm", name, *args)
        self.host.docker_ok("unpause", name)
        return answer

    def release(self, name, *args):
        """arm() that must succeed; answers with the report."""
        code, report, errors = self.arm(name, *args)
        self.assertEqual(code, 0, (report, errors))
        return report

    # -- Docker

    @classmethod
    def create_network(cls, name, *options, subnet=SUBNET, subnet6=SUBNET6):
        six = ["--ipv6", "--subnet", subnet6] if subnet6 else []
        cls.host.docker_ok("network", "create", "-d", "agentgate", "--subnet", subnet, *six, *options, name)

    def start(self, name, *options, runtime="runc", network="agents", image=PYTHON_IMAGE, command=()):
        """docker run -d; answers with the inspected container."""
        self.host.docker_ok("run", "-d", "--name", name, "--runtime", runtime, "--network", network, *options, image,
                            *command)
        return self.host.inspect(name)

    def endpoint(self, name, network="agents"):
        return self.host.inspect(name)["NetworkSettings"]["Networks"][network]

    def port(self, name, network="agents"):
        """The host's end of a container's veth."""
        return "agp" + self.endpoint(name, network)["EndpointID"][:10]

    def bridge(self, network="agents"):
        return "agn" + self.host.inspect(network, "network")["Id"][:10]

    # -- what must not be seen

    def assert_silent(self, work, *interfaces, name, network="agents"):
        """While `work()` runs, no frame to or from container `name` is on these interfaces of the host.

        Behind NAT a frame has the host's addresses: what came to the far side is in its journal.
        """
        endpoint = self.endpoint(name, network)
        own = {endpoint[key] for key in ("MacAddress", "IPAddress", "GlobalIPv6Address")} - {""}
        sniffers = [self.host.sniff(interface) for interface in interfaces]
        try:
            result = work()
        finally:
            frames = {s.interface: s.stop() for s in sniffers}
        seen = {name: [f for f in all_of if own & {f.src, f.dst, f.src_mac, f.dst_mac}]
                for name, all_of in frames.items()}
        self.assertEqual({name: some for name, some in seen.items() if some}, {})
        return result


def for_every_engine(*cases):
    """A load_tests that runs every case on every chosen engine."""

    def load_tests(loader, _standard, _pattern):
        suite = unittest.TestSuite()
        for case in cases:
            for engine in CHOSEN:
                name = f"{case.__name__}_{engine.replace('.', '_')}"
                suite.addTests(loader.loadTestsFromTestCase(type(name, (case,), {"ENGINE": engine})))
        return suite

    return load_tests
