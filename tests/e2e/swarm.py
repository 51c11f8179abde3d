# SPDX-License-Identifier: GPL-2.0-or-later
"""A swarm of three hosts whose network is the managed plugin's: docs/swarm.md, command by command."""
import concurrent.futures
import contextlib
import re
import unittest

import plugin_build
from common import *  # noqa: F401,F403
from story import MAY_PASS

ENGINE = os.environ.get("LAB_ENGINE", "28.5")
PLUGIN = "REGISTRY/agentgate/plugin:0.1.0"
REACH = [("tcp", ALLOWED, 443), ("tcp", ALLOWED6, 443), ("tcp", DENIED, 443), ("tcp", METADATA, 80)]
CLOSED, RELEASED = [False] * 4, [True, True, False, False]
# It ends when it is told to, unlike a sleep of the first process.
IMAGE = ["lab/busybox", "sh", "-c", "trap exit TERM; while :; do sleep 1; done"]


def document():
    """The blocks of docs/swarm.md in order: (first line without "# ", commands)."""
    with open(os.path.join(ROOT, "docs/swarm.md")) as file:
        blocks = re.findall(r"^```\n# ([^\n]*)\n(.*?)^```$", file.read(), re.M | re.S)
    return [(who, text.rstrip("\n")) for who, text in blocks]


class Node(World):
    """One host of the swarm; World's frames and shortcuts for it."""

    def __init__(self, number, first=None):  # noqa: super-init-not-called  the lab is made here
        self.lab = Lab(ENGINE, name=f"node{number}", joined=first.lab if first else None)
        self.number = number
        self.lab.__enter__()

    def start(self, plugin):
        lab = self.lab
        lab.standard_policy()
        lab.start_engine()
        lab.import_image()
        # What the document installs from a registry, from a build.
        lab.docker("plugin", "create", self.name(), plugin)
        lab.docker("plugin", "set", self.name(), f"state.source={lab.path('state')}",
                   f"policies.source={lab.path('policies')}", f"log.source={lab.path('log')}",
                   "AGENTGATE_ENGINE_PID_FILE=/run/dockerd.pid", f"AGENTGATE_RESOLVER={DNS}",
                   "AGENTGATE_LOG_LEVEL=debug")
        lab.docker("plugin", "enable", self.name())
        wait_for("the plugin", lambda: self.ag("status")[1].get("ready") is True)

    def name(self):
        return PLUGIN.replace("REGISTRY", "registry.test")

    def close(self):
        with contextlib.suppress(Exception):
            # Swarm first, or it brings back what is removed; then what is on the network, then the
            # plugin, whose cgroup is not below the lab's: the engine removes that.
            self.lab.docker("swarm", "leave", "--force", check=False)
            left = self.lab.docker("ps", "-aq").stdout.split()
            if left:
                self.lab.docker("rm", "-f", *left, check=False)
            self.lab.docker("plugin", "disable", "-f", self.name(), check=False)
            self.lab.docker("plugin", "rm", "-f", self.name(), check=False)
        self.lab.close()

    def shell(self, text, **words):
        """Commands of the document, with its words in capitals replaced."""
        words = {"REGISTRY": "registry.test", "ADDRESS": self.lab.segment_address(), "POLICY": "lab",
                 "SUBNET": f"172.30.{self.number}.0/24", "SUBNET6": f"2001:db8:30:{self.number}::/64",
                 "IMAGE": " ".join(f"'{word}'" for word in IMAGE), **words}
        text = re.sub(r"\b[A-Z]+6?\b", lambda word: words.get(word[0], word[0]), text)
        environment = self.lab.environment()
        environment["PATH"] = os.path.dirname(AGENTGATE) + ":" + environment["PATH"]
        return self.lab.run(["sh", "-ec", text], env=environment, timeout=120)

    def tasks(self, service, running=True):
        return self.lab.docker("ps", "--quiet", "--no-trunc", *([] if running else ["-a"]), "--filter",
                               f"label=com.docker.swarm.service.name={service}").stdout.split()

    def task(self, service, but=None, seconds=60):
        """The one task of the service here, when it runs; `but` is one that has had its time."""
        found = []

        def there():
            found[:] = [one for one in self.tasks(service) if one != but]
            return found and "agents" in self.lab.inspect(found[0])["NetworkSettings"]["Networks"]
        wait_for(f"a task of {service} on node {self.number}", there, seconds, 0.2)
        return found[0]

    def identity(self, name, other):
        mine = dict(super().identity(name, other), gw4=f"172.30.{self.number}.1",
                    gw6=f"2001:db8:30:{self.number}::1")
        return mine

    def empty(self):
        """No bridge, no port, and no network on disk."""
        links = [link for link in self.links() if link.startswith(("agn", "agp", "agc"))]
        return not links and os.listdir(self.lab.path("state/networks")) == []

    def plugin_log(self):
        return [line for line in self.lab.log_of("dockerd").splitlines() if "plugin=" in line]

    def arm(self, task):
        code, report, error = self.arm_paused(task)
        return code, report.get("outcome"), report.get("reason") or error


class Swarm(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.nodes, cls.start, cls.blocks = [], time.time(), document()
        try:
            for number in (1, 2, 3):
                cls.nodes.append(Node(number, cls.nodes[0] if cls.nodes else None))
            plugin = plugin_build.assemble(AGENTGATED, cls.nodes[0].lab.path("plugin"))
            with concurrent.futures.ThreadPoolExecutor() as pool:
                list(pool.map(lambda node: node.start(plugin), cls.nodes))
            cls.say("three hosts with the plugin")
        except BaseException:
            cls.tearDownClass()
            raise

    @classmethod
    def tearDownClass(cls):
        for node in reversed(cls.nodes):
            node.close()

    @classmethod
    def say(cls, text):
        print(f"{time.time() - cls.start:6.1f} s  {text}", flush=True)

    def run(self, result=None):
        before = len(result.failures) + len(result.errors)
        outcome = super().run(result)
        if len(result.failures) + len(result.errors) > before:
            for node in self.nodes:
                print(f"=== node {node.number}", file=sys.stderr)
                node.dump()
        return outcome

    # -- the document -----------------------------------------------------------------------------
    def block(self, who, holding):
        """The next block of the document must be this one."""
        at, text = self.blocks.pop(0)
        self.assertEqual(at, who)
        self.assertIn(holding, text)
        return text

    # -- what is seen -----------------------------------------------------------------------------
    def assert_closed(self, node, task):
        self.assertEqual(node.state(task), "closed")
        self.assertEqual(node.lab.probe(task, REACH, seconds=1), CLOSED)
        counts, sent = node.send_frames(node.sender(task, "by-hand"))
        self.assertGreater(sum(sent.values()), 100)
        self.assertEqual(total(counts), 0, counts)

    def assert_released(self, node, task):
        self.assertEqual(node.state(task), "released")
        self.assertEqual(node.settled(task, REACH, RELEASED)[0], RELEASED)
        counts, _ = node.send_frames(node.sender(task, "by-hand"))
        for kind in MAY_PASS["uplink"]:  # the control: what is counted does come by
            self.assertTrue(counts["uplink"].get(kind), counts)
        beyond = {kind for kind in counts["uplink"] if kind not in MAY_PASS["uplink"] + ["control"]} | \
            {kind for kind in counts["neighbour"] if kind != "control"}
        self.assertEqual(beyond, set(), counts)

    def errors(self, service):
        return self.nodes[0].lab.docker("service", "ps", "--no-trunc", "--format", "{{.CurrentState}} {{.Error}}",
                                        service).stdout

    # -- the story --------------------------------------------------------------------------------
    def test_story(self):
        first, *others = nodes = self.nodes
        self.assertIn("docker plugin install", self.block("every node", PLUGIN))
        first.shell(self.block("first manager", "swarm init"))
        token = first.lab.docker("swarm", "join-token", "-q", "worker").stdout.strip()
        join = self.block("every other node", "swarm join")
        for node in others:
            node.shell(join, TOKEN=token, MANAGER=first.lab.segment_address())
        config = self.block("every node", "--config-only")
        for node in nodes:
            node.shell(config)
        short = first.lab.docker("network", "create", "-d", "agentgate", "--scope", "swarm", "--config-from", "agconf",
                                 "short", check=False)
        self.assertIn("legacy plugin agentgate", short.stderr)
        first.shell(self.block("manager", "--scope swarm"))
        tasks = {node: node.task("web") for node in nodes}
        by_hand = self.block("any node", "docker run")
        for node in nodes:
            node.shell(by_hand)
        self.say("a service on all, and a container by hand")

        for node, task in tasks.items():
            self.assert_closed(node, task)
        self.say("all closed, by frames")
        used = first.lab.docker("plugin", "disable", first.name(), check=False)
        self.assertIn("is in use", used.stderr)
        arm = self.block("the node of a task", "agentgate arm $task")
        for number, node in enumerate(nodes):
            self.assertNotIn("stays closed", node.shell(arm).stdout)
            self.assert_released(node, tasks[node])
            for later in nodes[number + 1:]:
                self.assertEqual(later.state(tasks[later]), "closed")
        self.say("armed node by node, by frames")

        self.replaced(nodes[1], tasks)
        self.crashed(nodes[2], tasks)
        self.configured_anew(nodes[2], tasks, config)
        self.drained(nodes)
        self.published(nodes)

        for node in nodes:
            node.lab.docker("rm", "-f", "by-hand")
        first.shell(self.block("manager", "service rm web"))
        for node in nodes:
            wait_for("the network to go", node.empty, 40)
        last = self.block("every node", "network rm agconf")
        for node in nodes:
            node.shell(last)
        self.assertEqual(self.blocks, [])
        self.say("taken down, nothing left")

    def replaced(self, node, tasks):
        old, port = tasks[node], node.port(tasks[node])
        node.lab.docker("kill", old)
        new = node.task("web", but=old)
        self.assertNotIn(port, node.links())
        self.assertNotIn(port, node.nft())
        self.assertEqual(node.ag("check", old)[0], 1)
        self.assert_closed(node, new)
        self.assertEqual(node.lab.inspect(new)["HostConfig"]["RestartPolicy"]["Name"], "no")
        self.assertEqual(node.arm(new), (0, "released", ""))
        tasks[node] = new
        self.say("a task that died: closed in its next life")

    def crashed(self, node, tasks):
        """kill -9 of the engine: the network is made again under its id, and is what it was."""
        old, port, bridge = tasks[node], node.port(tasks[node]), node.bridge()
        index = json.loads(node.lab.run(["ip", "-j", "link", "show", bridge]).stdout)[0]["ifindex"]
        sender = node.sender(old, "by-hand")
        node.lab.stop("dockerd", signal.SIGKILL)
        counts, _ = node.send_frames(sender)  # nothing opens while it is away
        for kind in MAY_PASS["uplink"]:
            self.assertTrue(counts["uplink"].get(kind), counts)
        self.assertFalse(set(counts["uplink"]) - {*MAY_PASS["uplink"], "control"}, counts)
        before = len(node.plugin_log())
        node.lab.start_engine()
        new = node.task("web", but=old)
        log = node.plugin_log()[before:]
        self.assertTrue([line for line in log if "/NetworkDriver.CreateNetwork: {}" in line], log)
        self.assertFalse([line for line in log if "refused:" in line or "DeleteNetwork" in line], log)
        self.assertEqual(json.loads(node.lab.run(["ip", "-j", "link", "show", bridge]).stdout)[0]["ifindex"], index)
        self.assertNotIn(port, node.links())
        node.lab.docker("rm", "-f", "by-hand", check=False)
        node.lab.docker("run", "-d", "--name", "by-hand", "--network", "agents", *IMAGE)
        self.assert_closed(node, new)
        self.assertEqual(node.arm(new), (0, "released", ""))
        tasks[node] = new
        self.say("engine killed: same bridge, closed tasks")

    def configured_anew(self, node, tasks, config):
        """The engine is killed, and when the network comes back to the node its subnet is another."""
        manager, name, bridge = self.nodes[0].lab, node.lab.name, node.bridge()
        node.lab.docker("rm", "-f", "by-hand")
        node.lab.stop("dockerd", signal.SIGKILL)
        manager.docker("node", "update", "--availability", "drain", name)
        node.lab.start_engine()
        wait_for("the task to be gone", lambda: not node.tasks("web"), 30)
        self.assertIn(bridge, node.links())  # nobody told the driver
        self.assertNotIn("agents", node.lab.docker("network", "ls", "--format", "{{.Name}}").stdout.split())
        node.shell("docker network rm agconf")
        node.number += 100
        node.shell(config)
        manager.docker("node", "update", "--availability", "active", name)
        tasks[node] = node.task("web", but=tasks[node])
        self.assertTrue(node.attachment(tasks[node])["IPAddress"].startswith(f"172.30.{node.number}."))
        self.assertEqual(node.bridge(), bridge)
        node.lab.docker("run", "-d", "--name", "by-hand", "--network", "agents", *IMAGE)
        self.assert_closed(node, tasks[node])
        self.assertEqual(node.arm(tasks[node]), (0, "released", ""))
        self.assert_released(node, tasks[node])
        self.say("engine killed, another subnet: the network is made anew")

    def drained(self, nodes):
        manager = nodes[0].lab
        manager.docker("service", "create", "--detach", "--name", "one", "--stop-grace-period", "2s", "--network",
                       "agents", "--constraint", "node.role==worker", *IMAGE)
        wait_for("a task of one", lambda: any(node.tasks("one") for node in nodes), 30, 0.2)
        here = next(node for node in nodes if node.tasks("one"))
        there = next(node for node in nodes[1:] if node is not here)
        old = here.task("one")
        self.assertEqual(here.arm(old), (0, "released", ""))
        here.lab.docker("rm", "-f", "by-hand")
        manager.docker("node", "update", "--availability", "drain", here.lab.name)
        self.assert_closed(there, there.task("one"))
        # The last one has left: Docker has the network removed there.
        wait_for("the network to go", here.empty, 40)
        self.assertNotIn("agp", here.nft().replace('"agp*"', ""))
        manager.docker("node", "update", "--availability", "active", here.lab.name)
        again = here.task("web")
        here.lab.docker("run", "-d", "--name", "by-hand", "--network", "agents", *IMAGE)
        self.assert_closed(here, again)
        manager.docker("service", "rm", "one")
        self.say("drained: closed elsewhere, nothing left here, closed when it is back")

    def published(self, nodes):
        manager, node = nodes[0].lab, nodes[1]
        common = ["service", "create", "--detach", "--stop-grace-period", "2s", "--network", "agents",
                  "--constraint", "node.hostname==node2"]
        manager.docker(*common, "--name", "published", "--publish", "80", *IMAGE)
        manager.docker(*common, "--name", "on-host", "--publish", "published=8081,target=80,mode=host", *IMAGE)
        old = node.task("published")
        code, outcome, reason = node.arm(old)
        self.assertEqual((code, outcome), (1, "refused"))
        self.assertIn("(agents, ingress) as a task of service published", reason)
        self.assertIn("docker service update --publish-rm PORT published", reason)
        # Its third link is on docker_gwbridge, which the engine does not list among its networks.
        links = node.lab.docker("exec", old, "ip", "link").stdout
        self.assertEqual(len(re.findall(r"^\d+: eth", links, re.M)), 3, links)
        wait_for("the reason", lambda: "ports cannot be published" in self.errors("on-host"), 30, 0.5)
        self.assertEqual(node.tasks("on-host"), [])
        self.say("published ports are refused: " + reason)
        nodes[0].shell(self.block("manager", "--publish-rm 80 published"))
        new = node.task("published", but=old)
        self.assert_closed(node, new)
        self.assertEqual(node.arm(new), (0, "released", ""))
        manager.docker("service", "rm", "published", "on-host")
        self.say("with the port removed it is armed")


if __name__ == "__main__":
    unittest.main(verbosity=2)
