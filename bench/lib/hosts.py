# SPDX-License-Identifier: GPL-2.0-or-later
"""The contestants: each has a Docker host of its own in namespaces, and a far side of its own.

A host has `fill(n)`, which brings it to n ports besides the measured one, and `client(argv)`, a
command in the network namespace of the measured container.
"""
import json
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
os.environ.setdefault("AGENTGATE_BUILD", os.path.join(ROOT, "build", "release"))
sys.path.insert(0, os.path.join(ROOT, "tests", "e2e"))
from common import AGENTGATED, ALLOWED, DNS, Lab, UPLINK_HOST, wait_for  # noqa: E402

from . import script_tool  # noqa: E402
from .api import post  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
POOL, PREFIX = "172.29.0.0/16", "172.29"
SERVER = ALLOWED  # iperf3 on 5201, sockperf on 11111
POLICY = {"version": 1, "runtimes": ["runsc", "runc"], "resolvers": [DNS], "allow": [
    {"name": "api.allowed.test", "services": ["tcp/443", "tcp/5201", "udp/5201", "tcp/11111"]}]}


def address_of(number):
    """Of the port with that number; .0.x and .1.x stay free for real containers."""
    return f"{PREFIX}.{4 + number // 250}.{1 + number % 250}"


class Host:
    name = ""

    def __init__(self, version):
        self.lab = Lab(version)
        self.filled = 0

    def __enter__(self):
        self.lab.__enter__()
        try:
            self.prepare()
        except BaseException:
            for log in ("agentgated", "dockerd", "stub"):
                try:
                    print(f"--- {log}\n{self.lab.log_of(log)[-3000:]}", file=sys.stderr)
                except OSError:
                    pass
            self.lab.close()
            raise
        return self

    def __exit__(self, *unused):
        self.lab.close()

    def serve(self):
        """iperf3 and sockperf on the far side."""
        internet = self.lab.nsenter
        self.lab.spawn("iperf3", internet(["iperf3", "-s", "-B", SERVER], "internet"))
        self.lab.spawn("sockperf", internet(["sockperf", "server", "--tcp", "-i", SERVER, "-p", "11111"], "internet"))
        wait_for("servers of the benchmark", lambda: all(
            f"{SERVER}:{port}" in self.lab.run(["ss", "-lntH"], "internet").stdout for port in (5201, 11111)))

    def start_docker(self):
        self.lab.start_engine()
        self.lab.import_image()

    def batch(self, program, lines):
        """ip and bridge read many commands from a file."""
        path = self.lab.write(program + ".batch", "\n".join(lines) + "\n")
        self.lab.run([program, "-batch", path], timeout=600)

    def veths(self, bridge, numbers):
        lines = []
        for n in numbers:
            lines += [f"link add bv{n} type veth peer name bw{n}", f"link set bv{n} addrgenmode none",
                      f"link set bw{n} addrgenmode none", f"link set bv{n} master {bridge} up", f"link set bw{n} up"]
        self.batch("ip", lines)

    def fill(self, total):
        if total > self.filled:
            self.add(range(self.filled, total))
            self.filled = total

    def run_container(self, name, runtime="runc", image="lab/busybox"):
        self.lab.docker("run", "-d", "--name", name, "--runtime", runtime, "--network", self.network, image)

    def client(self, argv):
        return ["nsenter", "-t", str(self.pid), "-n", *argv]

    def measured(self, name="measured"):
        self.run_container(name)
        self.pid = self.lab.inspect(name)["State"]["Pid"]


class Agentgate(Host):
    """A real engine; the ports besides the measured ones are endpoints without a container."""
    name, network = "agentgate", "bench"

    def prepare(self):
        self.lab.policy("lab", POLICY)
        self.lab.start_agentgated(AGENTGATED, "--resolver", DNS, log_level="info")
        self.driver = self.lab.path("run/docker/plugins/agentgate.sock")
        self.control = self.lab.path("run/agentgate/agentgate.sock")
        self.start_docker()
        self.lab.docker("network", "create", "-d", "agentgate", "--subnet", POOL, "-o", "agentgate.policy=lab", "bench")
        self.id = self.lab.docker("network", "inspect", "-f", "{{.Id}}", "bench").stdout.strip()

    def attach(self, number):
        """CreateEndpoint and Join as dockerd sends them; the milliseconds of both."""
        endpoint = f"{number:010x}" + "e" * 54
        _, create = post(self.driver, "/NetworkDriver.CreateEndpoint", {
            "NetworkID": self.id, "EndpointID": endpoint, "Options": {},
            "Interface": {"Address": address_of(number) + "/16", "AddressIPv6": "", "MacAddress": ""}})
        _, join = post(self.driver, "/NetworkDriver.Join", {
            "NetworkID": self.id, "EndpointID": endpoint, "SandboxKey": "/etc/hostname", "Options": {}})
        return create + join

    def detach(self, number):
        for verb in ("Leave", "DeleteEndpoint"):
            post(self.driver, "/NetworkDriver." + verb,
                 {"NetworkID": self.id, "EndpointID": f"{number:010x}" + "e" * 54})

    def add(self, numbers):
        for number in numbers:
            self.attach(number)

    def arm(self, container):
        report, ms = post(self.control, "/v1/arm", {"container": container})
        if report["outcome"] != "released":
            raise RuntimeError(f"arm: {report['reason']}")
        return report, ms

    def check(self, container):
        report, ms = post(self.control, "/v1/check", {"container": container})
        if report["outcome"] not in ("released", "closed"):
            raise RuntimeError(f"check: {report}")
        return ms

    def disarm(self, container):
        return post(self.control, "/v1/disarm", {"container": container})[1]

    def measured(self, name="measured", runtime="runc"):
        self.run_container(name, runtime=runtime)
        self.pid = self.lab.inspect(name)["State"]["Pid"]
        self.lab.docker("pause", name)


class Scale(Agentgate):
    """agentgated with a stub for the engine, and a namespace for each port: all can be released."""

    def prepare(self):
        lab = self.lab
        lab.start_engine()  # of no use but that its own rules are there, and ours in DOCKER-USER
        self.socket = lab.path("run/stub.sock")
        os.mkdir(lab.path("resolv"))
        lab.spawn("stub", lab.nsenter([sys.executable, os.path.join(HERE, "stub_engine.py"), "/run/stub.sock",
                                       lab.path("resolv/conf")]))
        wait_for("stub engine", lambda: os.path.exists(self.socket + ".orders"))
        lab.policy("lab", POLICY)
        self.driver = lab.path("run/docker/plugins/agentgate.sock")
        self.control = lab.path("run/agentgate/agentgate.sock")
        self.start()
        wait_for("rules in DOCKER-USER", lambda: self.lab.run(["iptables", "-w", "-S", "AGENTGATE"],
                                                              check=False).returncode == 0)
        self.id = "b" * 64
        post(self.driver, "/NetworkDriver.CreateNetwork", {
            "NetworkID": self.id, "IPv6Data": [],
            "Options": {"com.docker.network.generic": {"agentgate.policy": "lab"}},
            "IPv4Data": [{"AddressSpace": "LocalDefault", "Gateway": PREFIX + ".0.1/16", "Pool": POOL}]})

    def start(self, resolver=DNS, seconds=120, every=0.05, **more):
        """Returns when all ports are verified; with 1000 of them under valgrind that takes a while."""
        self.lab.write("agentgated.log", "")
        self.lab.start_agentgated(AGENTGATED, "--resolver", resolver, "--engine-socket", "/run/stub.sock",
                                  log_level="info", wait=False, **more)
        wait_for("agentgated", lambda: "ready:" in self.lab.log_of("agentgated"), seconds, every)

    def add(self, numbers):
        numbers, moves, tell = list(numbers), [], []
        self.cells(numbers[-1] + 1)
        for number in numbers:
            endpoint = f"{number:010x}" + "e" * 54
            answer, _ = post(self.driver, "/NetworkDriver.CreateEndpoint", {
                "NetworkID": self.id, "EndpointID": endpoint, "Options": {},
                "Interface": {"Address": address_of(number) + "/16", "AddressIPv6": "", "MacAddress": ""}})
            post(self.driver, "/NetworkDriver.Join", {
                "NetworkID": self.id, "EndpointID": endpoint, "Options": {},
                "SandboxKey": f"/proc/{self.pids[number]}/ns/net"})
            moves.append(f"link set agc{endpoint[:10]} netns {self.pids[number]}")
            tell.append(json.dumps({"number": number, "endpoint": endpoint, "network": self.id,
                                    "mac": answer["Interface"]["MacAddress"], "address": address_of(number)}))
        self.batch("ip", moves)
        for number in numbers:
            lines = [f"link set agc{number:010x} name eth0", f"addr add {address_of(number)}/16 dev eth0",
                     "link set eth0 up", "link set lo up", f"route add default via {PREFIX}.0.1"]
            subprocess.run(["nsenter", "-t", str(self.pids[number]), "-n", "ip", "-batch", "-"],
                           input="\n".join(lines) + "\n", text=True, check=True)
        self.order(*tell)
        for number in numbers:
            if number:  # 0 is the measured one
                self.arm_cell(number)

    def order(self, *lines):
        with open(self.socket + ".orders", "w") as fifo:
            fifo.write("\n".join(lines) + "\n")

    def cells(self, total):
        """As many processes as ports: what looks through /proc shall not find more of them."""
        self.order(json.dumps({"cells": total}))
        self.pids = []

        def stand():
            try:
                with open(self.socket + ".pids") as file:
                    self.pids = [int(pid) for pid in file.read().split()]
            except FileNotFoundError:
                pass
            return len(self.pids) >= total
        wait_for("processes", stand, 120)

    def fill(self, total):
        super().fill(total + 1)  # besides the measured one

    def arm_cell(self, number):
        return self.arm(f"c{number}")

    def client(self, argv):
        return ["nsenter", "-t", str(self.pids[0]), "-n", *argv]


class DockerBridge(Host):
    name, network = "docker-bridge", "plain"

    def prepare(self):
        self.start_docker()
        self.lab.docker("network", "create", "--subnet", POOL, "plain")
        self.bridge = "br-" + self.lab.docker("network", "inspect", "-f", "{{.Id}}", "plain").stdout[:12]

    def add(self, numbers):
        self.veths(self.bridge, numbers)


class Script(Host):
    """Each container's rules are put first, so those of the container that was armed first come last.
    Traffic goes through that one; arm and disarm are measured with another."""
    name, network = "script", script_tool.NETWORK

    def prepare(self):
        self.start_docker()
        self.lab.docker("network", "create", "--subnet", POOL, self.network)
        self.bridge = "br-" + self.lab.docker("network", "inspect", "-f", "{{.Id}}", self.network).stdout[:12]
        self.inside(f"script_tool.install_gate('{self.bridge}')")
        self.tool = subprocess.Popen(
            self.lab.nsenter([sys.executable, os.path.join(HERE, "script_tool.py")]), env=self.lab.environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.tool.stdout.readline()

    def __exit__(self, *unused):
        self.tool.stdin.close()
        self.tool.wait()
        super().__exit__(*unused)

    def measured(self, name="measured"):
        super().measured(name)
        self.lab.docker("pause", name)
        self.run_container("first")
        self.lab.docker("pause", "first")
        self.ask("arm", "first")
        self.pid = self.lab.inspect("first")["State"]["Pid"]

    def inside(self, code):
        path = f"import sys; sys.path.insert(0, {HERE!r})"
        self.lab.run([sys.executable, "-B", "-c", f"{path}; import script_tool; {code}"])

    def ask(self, verb, container):
        self.tool.stdin.write(f"{verb} {container}\n")
        self.tool.stdin.flush()
        answer = json.loads(self.tool.stdout.readline())
        if "error" in answer:
            raise RuntimeError(f"script: {verb}: {answer['error']}")
        return answer["ms"]

    def add(self, numbers):
        """What arming each would have left, in a few transactions instead of minutes."""
        numbers = list(numbers)
        self.veths(self.bridge, numbers)
        rules, restore = [], ["*filter"]
        fdb, neigh = [], []
        for n in numbers:
            ip, veth, mac = address_of(n), f"bv{n}", f"02:be:00:00:{n >> 8:02x}:{n & 255:02x}"
            rules.append(script_tool.port_table(f"f{n}", veth))
            rules.append(script_tool.accept_rules(f"f{n}", mac, ip, PREFIX + ".0.1"))
            rules.append(f"add element netdev {script_tool.GATE} released {{ {mac} }}\n")
            for chain, rule in reversed(script_tool.iptables_rules(f"f{n}", ip, self.bridge, veth)):
                restore.append(" ".join(["-I", chain, *rule]))
            fdb += [f"link set dev {veth} isolated on", f"link set dev {veth} learning off",
                    f"link set dev {veth} locked on", f"fdb replace {mac} dev {veth} master static"]
            neigh.append(f"neigh replace {ip} lladdr {mac} dev {self.bridge} nud permanent")
        self.lab.run(["nft", "-f", self.lab.write("fill.nft", "".join(rules))], timeout=600)
        restore.append("COMMIT\n")
        self.lab.run(["iptables-restore", "-w", "--noflush", self.lab.write("fill.iptables", "\n".join(restore))],
                     timeout=600, env=self.lab.environment())
        self.batch("bridge", fdb)
        self.batch("ip", neigh)


class PlainBridge(Host):
    """The floor: routing over a bridge, no engine, no rule, no connection tracking."""
    name = "plain-bridge"

    def prepare(self):
        lab = self.lab
        lab.spawn("cell", lab.nsenter(["unshare", "--net", "sleep", "infinity"]))
        own = os.readlink(lab.netns())
        cell = lab.processes["cell"].pid
        others = (own, os.readlink("/proc/self/ns/net"))
        wait_for("namespace", lambda: os.readlink(f"/proc/{cell}/ns/net") not in others)
        self.pid = cell
        self.bridge = "plain0"
        self.batch("ip", ["link add plain0 type bridge", f"addr add {PREFIX}.0.1/16 dev plain0", "link set plain0 up",
                          f"link add pv0 type veth peer name eth0 netns {cell}", "link set pv0 master plain0 up"])
        subprocess.run(self.client(["ip", "-batch", "-"]), text=True, check=True, input="\n".join(
            [f"addr add {PREFIX}.0.2/16 dev eth0", "link set eth0 up", f"route add default via {PREFIX}.0.1"]) + "\n")
        lab.run(["ip", "route", "add", POOL, "via", UPLINK_HOST], "internet")

    def add(self, numbers):
        self.veths(self.bridge, numbers)

    def measured(self, name="measured"):
        pass
