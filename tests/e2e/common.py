# SPDX-License-Identifier: GPL-2.0-or-later
"""What the end-to-end tests share: the lab with agentgate in it, and a network."""
import json
import os
import signal
import subprocess
import sys
import time
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "lab"))
from labhost.host import *  # noqa: E402,F401,F403
from labhost import frames  # noqa: E402
from labhost.hold import Hold  # noqa: E402

BUILD = os.environ.get("AGENTGATE_BUILD", os.path.join(ROOT, "build", "debug"))
AGENTGATE = os.path.join(BUILD, "plugin/cli/agentgate")
AGENTGATED = os.path.join(BUILD, "plugin/daemon/agentgated")
FRAMES = os.path.join(ROOT, "tests/lab/labhost/frames.py")

SUBNET, GATEWAY = "172.30.0.0/24", "172.30.0.1"
SUBNET6, GATEWAY6 = "2001:db8:30::/64", "2001:db8:30::1"
HOST_SERVICE = 8080


class World:
    """A lab with engine, agentgated, a network and shortcuts."""

    def __init__(self, engine="20.10", daemon=None):
        self.lab = Lab(engine, daemon=daemon)

    def __enter__(self):
        self.lab.__enter__()
        try:
            self.prepare()
        except BaseException:
            self.dump()
            self.lab.close()
            raise
        return self

    def prepare(self):
        self.lab.standard_policy()
        self.start_daemon()
        self.lab.start_engine()
        self.lab.import_image()
        self.create_network()

    def __exit__(self, kind, *unused):
        if kind is not None:
            self.dump()
        self.lab.close()

    def dump(self):
        for name in ("agentgated", "dockerd"):
            try:
                print(f"--- {name}\n{self.lab.log_of(name)[-6000:]}", file=sys.stderr)
            except OSError:
                pass

    def start_daemon(self, env=None):
        self.lab.write("agentgated.log", "")
        self.lab.start_agentgated(AGENTGATED, "--resolver", DNS, env=env)

    def kill_daemon(self):
        self.lab.stop("agentgated", signal.SIGKILL)

    def restart_daemon(self, env=None):
        self.kill_daemon()
        self.start_daemon(env)

    def hold_daemon_at(self, point):
        """Starts the daemon anew so that it will stand still at a failpoint; returns the Hold."""
        self.kill_daemon()
        self.lab.write("agentgated.log", "")
        hold = Hold()
        self.lab.start_agentgated(AGENTGATED, "--resolver", DNS, env={"AGENTGATE_FAILPOINT": point},
                                  wrap=hold.prefix, pass_fds=[hold.fd])
        return hold

    def create_network(self, name="agents", *options):
        self.lab.docker("network", "create", "-d", "agentgate", "--subnet", SUBNET, "--ipv6",
                        "--subnet", SUBNET6, "-o", "agentgate.policy=lab", *options, name)

    def ag(self, *arguments, timeout=60):
        return self.lab.agentgate(AGENTGATE, *arguments, timeout=timeout)

    def arm_paused(self, name, *options):
        self.lab.docker("pause", name)
        answer = self.ag("arm", name, *options)
        self.lab.docker("unpause", name)
        return answer

    def settled(self, name, probes, expected, seconds=10):
        """What the container reaches, and after how many seconds.

        A container that sent while it was closed has a look-up of the gateway under way, and it or
        the name look-up behind it may fail once more after the release (docs/operations.md). So what
        must be reached is waited for. What must not be reached gets no second chance: one answer
        is a failure, whenever it comes.
        """
        start = time.time()
        while True:
            seen = self.lab.probe(name, probes)
            wrong = any(s and not e for s, e in zip(seen, expected))
            if seen == list(expected) or wrong or time.time() - start > seconds:
                return seen, time.time() - start
            time.sleep(0.3)

    def state(self, name):
        return self.ag("check", name)[1].get("outcome")

    def bridge(self, name="agents"):
        return "agn" + self.lab.docker("network", "inspect", "-f", "{{.Id}}", name).stdout[:10]

    def attachment(self, name, network="agents"):
        return self.lab.inspect(name)["NetworkSettings"]["Networks"][network]

    def port(self, name, network="agents"):
        return "agp" + self.attachment(name, network)["EndpointID"][:10]

    def nft(self):
        return self.lab.run(["nft", "list", "ruleset"]).stdout

    def links(self):
        return [link["ifname"] for link in json.loads(self.lab.run(["ip", "-j", "link"]).stdout)]

    def leftovers(self):
        """What is there of containers: links, rules, sets, files. Nothing, when there are none."""
        rules = self.nft()
        found = [link for link in self.links() if link.startswith(("agp", "agc"))]
        if "agp" in rules.replace('"agp*"', ""):
            found.append("rules of a port")
        if "lab.allow" in rules:
            found.append("sets of a policy")
        return found + os.listdir(self.lab.path("state/endpoints"))

    # -- frames -----------------------------------------------------------------------------------
    def identity(self, name, other):
        a, b = self.attachment(name), self.attachment(other)
        gateway = json.loads(self.lab.run(["ip", "-j", "link", "show", self.bridge()]).stdout)[0]
        return {"own_mac": a["MacAddress"], "own4": a["IPAddress"], "own6": a["GlobalIPv6Address"],
                "gw_mac": gateway["address"], "gw4": GATEWAY, "gw6": GATEWAY6,
                "other_mac": b["MacAddress"], "other4": b["IPAddress"],
                "other6": b["GlobalIPv6Address"], "out4": DENIED, "out6": DENIED6,
                "allowed4": DNS, "allowed6": ALLOWED6}

    def count(self, netns, devices, sources, work, seconds=3.0):
        """Counts marked frames on devices of a namespace while work() runs."""
        process = subprocess.Popen(
            [sys.executable, FRAMES, "count", netns, str(seconds), *devices, *sources],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"
        try:
            result = work()
        finally:
            out, _ = process.communicate()  # end of input: it counts for `seconds` more
        assert process.returncode == 0
        return json.loads(out), result

    def sender(self, name, other):
        """What send_frames needs to know of two containers; good while the engine is away, too."""
        return {"who": self.identity(name, other), "pid": self.lab.inspect(name)["State"]["Pid"],
                "bridge": self.bridge(), "port": self.port(other)}

    def send_frames(self, sender, seconds=1.0, meanwhile=None):
        """Sends the catalogue from the container's side; returns what came out where, and what was
        sent. meanwhile() runs while it is counted.

        "control" in a count are frames of the bridge's own MAC: answers to the other container.
        """
        who = sender["who"]

        def work():
            out = subprocess.run([sys.executable, FRAMES, "send", f"/proc/{sender['pid']}/ns/net", "eth0",
                                  json.dumps(who)], capture_output=True, text=True)
            assert out.returncode == 0, out.stderr
            if meanwhile:
                meanwhile()
            return json.loads(out.stdout)
        sources = [who["own_mac"], "02:de:ad:00:00:01", "02:de:ad:00:00:02", "02:de:ad:00:00:03",
                   "control=" + who["gw_mac"]]
        counts, sent = self.count(self.lab.netns(), [sender["bridge"], "up0", sender["port"]], sources, work,
                                  seconds)
        missing = {kind for kind in frames.catalogue(who) if sent.get(kind) != frames.TIMES}
        assert not missing, f"not sent: {missing}"
        return {"bridge": counts[sender["bridge"]], "uplink": counts["up0"],
                "neighbour": counts[sender["port"]]}, sent


def total(counts):
    """All frames in what send_frames() counted, but for the control."""
    return sum(number for kinds in counts.values() for kind, number in kinds.items() if kind != "control")


class Case(unittest.TestCase):
    """Tests that share one World; each removes what it made."""

    ENGINE = os.environ.get("LAB_ENGINE", "28.5")
    DAEMON = None  # for daemon.json

    @classmethod
    def setUpClass(cls):
        cls.world = World(cls.ENGINE, daemon=cls.DAEMON).__enter__()
        cls.lab = cls.world.lab

    @classmethod
    def tearDownClass(cls):
        cls.world.__exit__(None)

    def run(self, result=None):
        def problems():
            return len(result.failures) + len(result.errors) if result is not None else 0
        before = problems()
        outcome = super().run(result)
        if problems() > before and hasattr(self, "world"):
            self.world.dump()
        return outcome

    def armed(self, name, *options):
        """Arms a container that runs; it must be released."""
        code, report, error = self.world.arm_paused(name, *options)
        self.assertEqual((code, report.get("outcome")), (0, "released"), (report, error))
        return report

    def reaches(self, name, probes, expected):
        self.assertEqual(self.world.settled(name, probes, expected)[0], expected)

    def remove(self, *names):
        """Removes containers; none of them may be left, whatever docker said."""
        for name in names:
            self.lab.docker("rm", "-f", name, check=False)
        left = self.lab.docker("ps", "-a", "--format", "{{.Names}}").stdout.split()
        self.assertEqual(set(left) & set(names), set())


# What a probe tries; whether a container on Docker's own bridge reaches it (IPv4 only there);
# whether a released one does.
def probes(neighbour):
    return [
        ("allowed name, tcp/443", ("tcp", ALLOWED, 443), True, True),
        ("allowed name, tcp/443, IPv6", ("tcp", ALLOWED6, 443), None, True),
        ("resolver of the policy", ("dns", DNS, "api.allowed.test"), True, True),
        ("name through the container's resolver file", ("name", "", "api.allowed.test"), True, True),
        ("allowed address, other port", ("tcp", ALLOWED, 80), True, False),
        ("allowed address, other protocol (udp/53)", ("dns", ALLOWED, "api.allowed.test"), True, False),
        ("other address", ("tcp", DENIED, 443), True, False),
        ("other address, IPv6", ("tcp", DENIED6, 443), None, False),
        ("DNS server that is not listed", ("dns", OTHER_DNS, "api.allowed.test"), True, False),
        ("metadata service", ("tcp", METADATA, 80), True, False),
        ("host service on the gateway", ("tcp", GATEWAY, HOST_SERVICE), None, False),
        ("host service on another address", ("tcp", UPLINK_HOST, HOST_SERVICE), True, False),
        ("private network behind the host", ("tcp", LAN, 443), True, False),
        ("neighbour container", ("tcp", neighbour, 7000), None, False),
    ]


def start_host_services(world):
    world.lab.host_services(f"tcp:{GATEWAY}:{HOST_SERVICE}", f"tcp:{UPLINK_HOST}:{HOST_SERVICE}")
