# SPDX-License-Identifier: GPL-2.0-or-later
"""A lab whose driver is the managed plugin, from a real registry, and the plugin's life in steps."""
import contextlib
import shutil
import tempfile

import plugin_build
from common import *  # noqa: F401,F403
from story import MAY_PASS

REGISTRY = "127.0.0.1:5000"
REFERENCE, NEXT = f"{REGISTRY}/agentgate/plugin:1", f"{REGISTRY}/agentgate/plugin:2"
REACH = [("tcp", ALLOWED, 443)]
FORBIDDEN = [("tcp", DENIED, 443), ("tcp", METADATA, 80), ("tcp", ALLOWED, 81)]


class Flow:
    """A connection of a released container that is asked for an answer again and again."""

    def __init__(self, world, name):
        self.world, self.name = world, name
        # The server answers each line with as many bytes; one connection for all of it. What it
        # writes is read through /proc, since the engine may be away.
        world.lab.docker("exec", "-d", name, "sh", "-c",
                         f"while :; do echo; sleep 0.05; done | nc {ALLOWED} 80 >/tmp/flow; : >/tmp/ended")
        self.root = f"/proc/{world.lab.inspect(name)['State']['Pid']}/root/tmp"
        wait_for("a first answer", self.answered, 10)

    def answered(self):
        try:
            return os.stat(self.root + "/flow").st_size
        except FileNotFoundError:
            return 0

    def goes_on(self, seconds=10):
        before = self.answered()
        wait_for("another answer on the same connection", lambda: self.answered() > before, seconds)
        if os.path.exists(self.root + "/ended"):
            raise AssertionError("the connection has ended")


class PluginWorld(World):
    """The world of the other tests with the plugin in place of the daemon. Installs nothing yet."""

    def prepare(self):
        self.lab.standard_policy()
        self.lab.policy("plain", {"version": 1, "runtimes": ["runc"], "allow": [
            {"cidr": f"{ALLOWED}/32", "services": ["tcp/80"]}]})
        self.lab.start_engine()
        self.lab.import_image()
        self._start_registry()

    def __exit__(self, kind, *unused):
        try:
            if kind is not None:
                self.dump()
            # The plugin's cgroup is not below the lab's: the engine removes it.
            for one in self.plugins():
                self.lab.docker("plugin", "rm", "-f", one, check=False)
        finally:
            self.lab.close()

    def _start_registry(self):
        config = self.lab.write("registry.yml", json.dumps({
            "version": "0.1", "storage": {"filesystem": {"rootdirectory": self.lab.path("registry")}},
            "http": {"addr": REGISTRY}}))
        self.lab.spawn("registry", self.lab.nsenter([fetch.registry(), "serve", config]), self.lab.environment())
        port = REGISTRY.rpartition(":")[2]
        wait_for("the registry", lambda: f":{port} " in self.lab.run(["ss", "-ltnH"]).stdout)

    # -- the plugin -------------------------------------------------------------------------------
    def plugins(self):
        return self.lab.docker("plugin", "ls", "--format", "{{.Name}}", check=False).stdout.split()

    def settings(self):
        lab = self.lab
        return [f"state.source={lab.path('state')}", f"policies.source={lab.path('policies')}",
                f"log.source={lab.path('log')}", "AGENTGATE_ENGINE_PID_FILE=/run/dockerd.pid",
                f"AGENTGATE_RESOLVER={DNS}", "AGENTGATE_LOG_LEVEL=debug"]

    def enabled(self):
        return self.lab.docker("plugin", "inspect", "-f", "{{.Enabled}}", REFERENCE).stdout.strip() == "true"

    def pid(self):
        """The plugin's process, by its program and its network namespace; None while there is none."""
        inside = os.readlink(self.lab.netns())
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{entry}/exe") == "/usr/sbin/agentgated" and \
                        os.readlink(f"/proc/{entry}/ns/net") == inside:
                    return int(entry)
        return None

    def ready(self):
        return self.ag("status")[1].get("ready") is True

    def wait_ready(self, seconds=20):
        wait_for("the plugin to be ready", self.ready, seconds)

    def enable(self):
        self.lab.docker("plugin", "enable", REFERENCE)
        self.wait_ready()

    def disable(self):
        self.lab.docker("plugin", "disable", REFERENCE)

    def publish(self):
        """Two versions in the registry, and none on the host."""
        with tempfile.TemporaryDirectory(dir=self.lab.dir) as folder:
            later = os.path.join(folder, "later")
            shutil.copytree(plugin_build.PLUGIN, later, symlinks=True)
            with open(os.path.join(later, "config.json")) as file:
                config = json.load(file)
            config["description"] += " (next)"
            with open(os.path.join(later, "config.json"), "w") as file:
                json.dump(config, file)
            for reference, source in ((REFERENCE, plugin_build.PLUGIN), (NEXT, later)):
                yield f"create {reference.rpartition(':')[2]}", ["create", reference, source]
                yield f"push {reference.rpartition(':')[2]}", ["push", reference]
                yield None, ["rm", reference]

    def install(self):
        self.lab.docker("plugin", "install", "--grant-all-permissions", REFERENCE, *self.settings())
        self.wait_ready()


def must(condition, text):
    if not condition:
        raise AssertionError(text)


def must_be(seen, expected, text):
    must(seen == expected, f"{text}: expected {expected}, seen {seen}")


class Story:
    """The plugin from its build to its removal; each step has its time, and ends the story if it fails."""

    def __init__(self, world, say=lambda text: None):
        self.world, self.lab, self.say = world, world.lab, say
        self.steps = []

    @contextlib.contextmanager
    def step(self, name):
        start = time.time()
        entry = {"step": name, "ok": False, "ms": 0}
        self.steps.append(entry)
        try:
            yield
            entry["ok"] = True
        except BaseException as error:
            entry["error"] = str(error)[-2000:]
            raise
        finally:
            entry["ms"] = round((time.time() - start) * 1000)
            self.say(f"{'ok' if entry['ok'] else 'FAILED':<7} {entry['ms']:>7} ms  {name}")

    def installed(self):
        for name, command in self.world.publish():
            with self.step(f"docker plugin {name}") if name else contextlib.nullcontext():
                self.lab.docker("plugin", *command)
        with self.step("docker plugin install from the registry"):
            self.world.install()
            must(self.world.enabled(), "it is not enabled")
        with self.step("docker network create -d agentgate"):
            self.world.create_network()

    def closed(self):
        with self.step("containers start closed"):
            self.lab.container("a1", "agents")
            self.lab.container("a2", "agents", "runc", "--restart", "no")
            self.sender = self.world.sender("a1", "a2")
            self.still_closed("a1")
            counts, sent = self.world.send_frames(self.sender)
            must(sum(sent.values()) > 100, f"only {sent} were sent")
            must_be(total(counts), 0, f"frames that leaked ({counts})")

    def still_closed(self, name):
        must_be(self.lab.probe(name, REACH + FORBIDDEN, seconds=1), [False] * 4, f"{name} is closed, but reaches")

    def armed(self):
        with self.step("agentgate arm of the host"):
            for name, policy in (("a1", "lab"), ("a3", "plain")):
                if name == "a3":
                    self.lab.container("a3", "agents")
                code, report, error = self.world.arm_paused(name, "--policy", policy)
                must((code, report.get("outcome")) == (0, "released"), f"arm {name}: {code} {report} {error}")
            self.flow = Flow(self.world, "a3")
            seen, _ = self.world.settled("a1", REACH + FORBIDDEN, [True] + [False] * 3)
            must_be(seen, [True] + [False] * 3, "a1 reaches")
            self.released_as_meant()

    def released_as_meant(self, flow=True):
        """By frames: what the policy of a1 allows passes, nothing else; the flow of a3 goes on; a2 is closed."""
        counts, _ = self.world.send_frames(self.sender)
        for kind in MAY_PASS["uplink"]:
            must(counts["uplink"].get(kind), f"released, but {kind} was not seen on the uplink: {counts}")
        beyond = sum(n for kind, n in counts["uplink"].items() if kind not in MAY_PASS["uplink"] + ["control"]) + \
            sum(n for kind, n in counts["neighbour"].items() if kind != "control")
        must_be(beyond, 0, f"frames beyond the policy ({counts})")
        if flow:
            self.flow.goes_on()

    def state(self, closed=("a2",), released=("a1", "a3")):
        for names, state in ((closed, "closed"), (released, "released")):
            for name in names:
                must_be(self.world.state(name), state, f"check {name}")

    def upgraded(self):
        with self.step("docker plugin disable, a released flow runs"):
            self.world.disable()  # not refused: Docker does not count networks by the short name
            must(self.world.pid() is None, "its process still runs")
        with self.step("while it is disabled: released as meant, closed is closed"):
            self.released_as_meant()
            self.still_closed("a2")
        with self.step("docker plugin upgrade"):
            self.lab.docker("plugin", "upgrade", "--grant-all-permissions", "--skip-remote-check", REFERENCE, NEXT)
        with self.step("docker plugin set: an upgrade forgets the settings"):
            self.lab.docker("plugin", "set", REFERENCE, *self.world.settings())
        with self.step("docker plugin enable"):
            self.world.enable()
            text = self.lab.docker("plugin", "inspect", "-f", "{{.Config.Description}}", REFERENCE).stdout
            must("(next)" in text, f"it is not the next version: {text}")
        with self.step("after the upgrade: networks, releases and the flow are what they were"):
            self.state()
            self.released_as_meant()
            self.still_closed("a2")
            self.lab.container("a4", "agents")
            self.still_closed("a4")
            self.lab.docker("rm", "-f", "a4")

    def changed(self):
        with self.step("docker plugin disable, set, enable"):
            refused = self.lab.docker("plugin", "set", REFERENCE, "AGENTGATE_LOG_LEVEL=warn", check=False)
            must(refused.returncode != 0, "docker took a setting while the plugin is enabled")
            self.world.disable()
            self.lab.docker("plugin", "set", REFERENCE, "AGENTGATE_LOG_LEVEL=warn")
            self.world.enable()
            with open(f"/proc/{self.world.pid()}/environ") as file:
                must("AGENTGATE_LOG_LEVEL=warn" in file.read().split("\0"), "the setting did not reach the daemon")
            self.state()
            self.flow.goes_on()

    def removed(self):
        with self.step("agentgate disarm, containers and network removed"):
            must_be(self.world.ag("disarm", "a1")[0], 0, "disarm")
            counts, _ = self.world.send_frames(self.sender)
            must_be(total(counts), 0, f"frames that leaked ({counts})")
            self.lab.docker("rm", "-f", "a1", "a2", "a3")
            must_be(self.world.leftovers(), [], "left of containers")
            self.lab.docker("network", "rm", "agents")
        with self.step("docker plugin rm"):
            self.world.disable()
            self.lab.docker("plugin", "rm", REFERENCE)
            must_be(self.world.plugins(), [], "plugins left")
            must(not os.path.exists(self.lab.path("run/docker/plugins/agentgate.sock")), "its socket is left")
            left = [link for link in self.world.links() if link.startswith(("agn", "agp", "agc"))]
            must_be(left, [], "links left")

    def tell(self):
        for chapter in (self.installed, self.closed, self.armed, self.upgraded, self.changed, self.removed):
            chapter()
