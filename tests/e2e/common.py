# SPDX-License-Identifier: GPL-2.0-or-later
"""What the end-to-end tests share: the lab with agentgate in it, and a network."""
import json
import os
import re
import signal
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "lab"))
from labhost.host import *  # noqa: E402,F401,F403
from labhost import host as labhost_host  # noqa: E402

# A test that is told to stop still takes its lab down: atexit does not run on a plain SIGTERM.
signal.signal(signal.SIGTERM, lambda *unused: sys.exit(143))

BUILD = os.environ.get("AGENTGATE_BUILD", os.path.join(ROOT, "build", "debug"))
AGENTGATE = os.path.join(BUILD, "plugin/cli/agentgate")
AGENTGATED = os.path.join(BUILD, "plugin/daemon/agentgated")
FRAMES = os.path.join(ROOT, "tests/lab/labhost/frames.py")

SUBNET, GATEWAY = "172.30.0.0/24", "172.30.0.1"
SUBNET6, GATEWAY6 = "2001:db8:30::/64", "2001:db8:30::1"
HOST_SERVICE = 8080


class World:
    """A lab with engine, agentgated, a network and shortcuts."""

    def __init__(self, engine="20.10", network=True, env=None, extra=()):
        self.lab = Lab(engine)
        self.network_wanted, self.env, self.extra = network, env, list(extra)

    def __enter__(self):
        self.lab.__enter__()
        try:
            self.lab.standard_policy()
            self.start_daemon(env=self.env)
            self.lab.start_engine()
            self.lab.import_image()
            if self.network_wanted:
                self.create_network()
        except BaseException:
            self.dump()
            self.lab.close()
            raise
        return self

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

    def start_daemon(self, env=None, wait=True):
        self.lab.write("agentgated.log", "")
        self.lab.start_agentgated(AGENTGATED, "--resolver", DNS, *self.extra, env=env, wait=wait)

    def kill_daemon(self):
        self.lab.stop("agentgated", signal.SIGKILL)

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

    # -- frames -----------------------------------------------------------------------------------
    def identity(self, name, other):
        a, b = self.attachment(name), self.attachment(other)
        gateway = json.loads(self.lab.run(["ip", "-j", "link", "show", self.bridge()]).stdout)[0]
        return {"own_mac": a["MacAddress"], "own4": a["IPAddress"], "own6": a["GlobalIPv6Address"],
                "gw_mac": gateway["address"], "gw4": GATEWAY, "gw6": GATEWAY6,
                "other_mac": b["MacAddress"], "other4": b["IPAddress"],
                "other6": b["GlobalIPv6Address"], "out4": DENIED, "out6": DENIED6}

    def count(self, netns, devices, sources, work, seconds=3):
        """Counts marked frames on devices of a namespace while work() runs."""
        process = subprocess.Popen(
            [sys.executable, FRAMES, "count", netns, str(seconds), *devices, *sources],
            stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"
        result = work()
        out = process.stdout.read()
        assert process.wait() == 0
        return json.loads(out), result

    def send_frames(self, name, other):
        """Sends the catalogue from the container's side; returns what came out where."""
        who = self.identity(name, other)
        pid = self.lab.inspect(name)["State"]["Pid"]

        def work():
            out = subprocess.run([sys.executable, FRAMES, "send", f"/proc/{pid}/ns/net", "eth0",
                                  json.dumps(who)], capture_output=True, text=True)
            assert out.returncode == 0, out.stderr
            return json.loads(out.stdout)
        sources = [who["own_mac"], "02:de:ad:00:00:01", "02:de:ad:00:00:02", "02:de:ad:00:00:03"]
        return self.count(self.lab.netns(), [self.bridge(), "up0", self.port(other)], sources, work)


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
    world.lab.spawn("host-services", world.lab.nsenter(
        [sys.executable, os.path.join(ROOT, "tests/lab/labhost/servers.py"),
         world.lab.path("server.pem"), f"tcp:{GATEWAY}:{HOST_SERVICE}",
         f"tcp:{UPLINK_HOST}:{HOST_SERVICE}"]))
    wait_for("host services", lambda: str(HOST_SERVICE) in world.lab.run(["ss", "-ltn"]).stdout)
