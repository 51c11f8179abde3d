# SPDX-License-Identifier: GPL-2.0-or-later
"""A Docker host in namespaces: network, mounts, engine, agentgated; and the internet behind it."""
import atexit
import glob
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from . import fetch

HERE = os.path.dirname(os.path.abspath(__file__))

DNS, DNS6, OTHER_DNS = "192.0.2.53", "2001:db8:53::53", "192.0.2.54"
ALLOWED, ALLOWED6, DENIED, DENIED6 = "192.0.2.80", "2001:db8:80::80", "192.0.2.81", "2001:db8:80::81"
METADATA, LAN = "169.254.169.254", "10.99.0.9"
UPLINK_HOST, UPLINK_FAR = "203.0.113.2", "203.0.113.1"
UPLINK6_HOST, UPLINK6_FAR = "2001:db8:113::2", "2001:db8:113::1"
ENGINES = fetch.ENGINES
SEGMENT = "198.51.100"  # of hosts that are joined: host N has the address N in it
HOLDERS = ("host", "internet", "switch")  # processes that keep a namespace open
PREFIX = "agentlab-"  # of a lab's folder in the directory for temporary files, and of its cgroup


class Timeout(Exception):
    pass


def wait_for(what, condition, seconds=30, every=0.05):
    end = time.time() + seconds
    while time.time() < end:
        if condition():
            return
        time.sleep(every)
    raise Timeout(what)


def start_time(pid):
    """When a process started, in ticks since boot: a pid alone may be somebody else's by now."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except OSError:
        return None


def end_strays(holders):
    """containerd's shims outlive containerd on purpose. Whatever still runs in a namespace that a
    lab made is the lab's to end; the holders that keep the namespaces go last."""
    inside, parents, strays = set(), {}, set()
    for pid in holders:
        try:
            inside.add(os.readlink(f"/proc/{pid}/ns/net"))
        except OSError:
            pass
    inside.discard(os.readlink("/proc/self/ns/net"))  # never the machine's own
    for entry in filter(str.isdigit, os.listdir("/proc")):
        pid = int(entry)
        try:
            with open(f"/proc/{pid}/stat") as file:
                parents[pid] = int(file.read().rpartition(")")[2].split()[1])
            if pid not in holders and os.readlink(f"/proc/{pid}/ns/net") in inside:
                strays.add(pid)
        except OSError:
            pass  # it ended by itself
    while True:  # a shim's containers are in namespaces of their own
        more = {pid for pid, parent in parents.items() if parent in strays} - strays - holders
        if not more:
            break
        strays |= more
    for pid in strays:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass


def remove_folder(folder):
    """A lab's folder, what is mounted below it, and its cgroups."""
    with open("/proc/self/mounts") as file:
        mounts = [line.split()[1] for line in file if line.split()[1].startswith(folder + "/")]
    for mount in sorted(mounts, reverse=True):
        subprocess.run(["umount", "-l", mount], stderr=subprocess.DEVNULL)
    name = os.path.basename(folder)
    for top in glob.glob(f"/sys/fs/cgroup/*/{name}") + glob.glob(f"/sys/fs/cgroup/{name}"):
        for group, _, _ in os.walk(top, topdown=False):
            for _ in range(50):  # one whose processes were just killed is busy for a moment
                try:
                    os.rmdir(group)
                except FileNotFoundError:
                    pass
                except OSError:
                    time.sleep(0.02)
                    continue
                break
    shutil.rmtree(folder, ignore_errors=True)


def labs():
    """The labs on this machine: (folder, pid of the owner, whether the owner lives, engine)."""
    found = []
    for note in sorted(glob.glob(os.path.join(tempfile.gettempdir(), PREFIX + "*", "owner.json"))):
        try:
            with open(note) as file:
                owner = json.load(file)
        except (OSError, ValueError):
            continue  # it is being made or removed right now
        found.append((os.path.dirname(note), owner["pid"],
                      start_time(owner["pid"]) == owner["start"], owner["engine"]))
    return found


def sweep():
    """Ends and removes what labs left whose owner was killed; every new lab does this first."""
    removed = []
    for folder, _, alive, _ in labs():
        if alive:
            continue
        holders = set()
        for note in glob.glob(os.path.join(folder, "*.holder")):
            with open(note) as file:
                pid, start = map(int, file.read().split())
            if start_time(pid) == start:
                holders.add(pid)
        end_strays(holders)
        for pid in holders:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        remove_folder(folder)
        removed.append(folder)
    return removed


class Lab:
    """Use as a context manager. Everything it starts it stops, by process id.

    `daemon` is merged into daemon.json; `keep` leaves the logs behind. `name` is the host's.
    `joined` is another lab: the hosts of both are in one segment, each with an internet of its own.
    """

    def __init__(self, engine="20.10", verbose=False, daemon=None, keep=False, name="lab", joined=None):
        if os.geteuid() != 0:
            raise PermissionError("the lab makes namespaces: it needs root")
        self.engine, self.verbose, self.keep = engine, verbose, keep
        self.daemon = daemon or {}
        self.name = name
        self.joined = joined
        self.number = None  # in the segment
        self.processes = {}  # name -> Popen, in order of start
        self.bundle = fetch.bundle(engine)
        self.runc = os.path.join(fetch.bundle("20.10"), "usr/sbin/runc")
        self.runsc = fetch.runsc()
        sweep()
        self.dir = tempfile.mkdtemp(prefix=PREFIX)

    # -- processes --------------------------------------------------------------------------------
    def spawn(self, name, argv, env=None, pass_fds=()):
        with open(os.path.join(self.dir, name + ".log"), "ab") as log:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                       env=env, start_new_session=True, pass_fds=pass_fds)
        self.processes[name] = process
        return process

    def log_of(self, name):
        with open(os.path.join(self.dir, name + ".log"), errors="replace") as file:
            return file.read()

    def stop(self, name, sig=signal.SIGTERM, seconds=20):
        process = self.processes.pop(name, None)
        if process is None or process.poll() is not None:
            return
        process.send_signal(sig)
        process.send_signal(signal.SIGCONT)  # a test may have stopped it
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    # -- namespaces -------------------------------------------------------------------------------
    def _holder(self, name, script):
        """A process that keeps a namespace open; returns its pid once the script is through."""
        ready = os.path.join(self.dir, name + ".ready")
        process = self.spawn(name, ["unshare", "--net", "--mount", "--uts", "/bin/sh", "-ec",
                                    script + f"\ntouch {ready}\nexec sleep infinity"])

        def done():
            if process.poll() is not None:
                raise RuntimeError(f"{name} did not start: {self.log_of(name)}")
            return os.path.exists(ready)
        self.write(name + ".holder", f"{process.pid} {start_time(process.pid)}")
        wait_for(name, done)
        return process.pid

    def __enter__(self):
        atexit.register(self.close)
        try:
            return self._make()
        except BaseException:
            self.close()
            raise

    def _make(self):
        # One that is told to stop still takes itself down: atexit does not run on a plain SIGTERM.
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, lambda sig, _: sys.exit(128 + sig))
        d = self.dir
        self.write("owner.json", json.dumps({"pid": os.getpid(), "start": start_time(os.getpid()),
                                             "engine": self.engine}))
        for folder in ("run", "etc", "etc-docker", "policies", "state", "log", "cgroup"):
            os.makedirs(os.path.join(d, folder), exist_ok=True)
        os.chmod(os.path.join(d, "policies"), 0o755)
        self.write("resolv.conf", f"nameserver {DNS}\n")
        self.daemon_json({})
        addresses = " ".join(f"{a}/32" for a in (DNS, OTHER_DNS, ALLOWED, DENIED, METADATA, LAN))
        addresses6 = " ".join(f"{a}/128" for a in (DNS6, ALLOWED6, DENIED6))
        self.internet = self._holder("internet", f"""
            mount --make-rprivate /
            ip link set lo up
            for a in {addresses}; do ip addr add $a dev lo; done
            for a in {addresses6}; do ip -6 addr add $a dev lo nodad; done
        """)
        if self.joined:
            self.joined.plug(self)
        self._boot()
        self._start_internet()
        return self

    def plug(self, other):
        """A place on the switch, which is the first lab's, for another lab; for itself before that."""
        if self.number is None:
            self.switch = self._holder("switch", "ip link add name switch type bridge; ip link set switch up")
            self.number, self.places = 1, itertools.count(2)
            self._wire()
        other.switch, other.places, other.number = self.switch, self.places, next(self.places)

    def _wire(self):
        port = f"port{self.number}"
        self.run(["ip", "link", "add", "lan0", "type", "veth", "peer", "name", port, "netns", str(self.switch)])
        self.run(["ip", "addr", "add", f"{self.segment_address()}/24", "dev", "lan0"])
        self.run(["ip", "link", "set", "lan0", "up"])
        self.run(["ip", "link", "set", port, "master", "switch", "up"], "switch")

    def segment_address(self):
        return f"{SEGMENT}.{self.number}"

    def _boot(self):
        """The host's namespaces, with nothing in them but the uplink and the segment."""
        d = self.dir
        self.host = self._holder("host", f"""
            mount --make-rprivate /
            mount --rbind /sys/fs/cgroup {d}/cgroup
            mount -t sysfs sysfs /sys
            mount --rbind {d}/cgroup /sys/fs/cgroup
            mount --bind {d}/run /run
            mount -t tmpfs tmpfs {d}/etc
            mkdir {d}/etc/upper {d}/etc/work
            mount -t overlay overlay -o lowerdir=/etc,upperdir={d}/etc/upper,workdir={d}/etc/work /etc
            mkdir -p /etc/docker
            mount --bind {d}/etc-docker /etc/docker
            mount --bind {d}/resolv.conf /etc/resolv.conf
            ip link set lo up
            ip link add up0 type veth peer name far0 netns {self.internet}
            ip addr add {UPLINK_HOST}/24 dev up0
            ip -6 addr add {UPLINK6_HOST}/64 dev up0 nodad
            ip link set up0 up
            nsenter -t {self.internet} -n ip addr add {UPLINK_FAR}/24 dev far0
            nsenter -t {self.internet} -n ip -6 addr add {UPLINK6_FAR}/64 dev far0 nodad
            nsenter -t {self.internet} -n ip link set far0 up
            ip route add default via {UPLINK_FAR}
            ip -6 route add default via {UPLINK6_FAR}
            echo 1 > /proc/sys/net/ipv4/ip_forward
            echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
            hostname {self.name}
            mount --make-rshared /
        """)
        if self.number is not None:
            self._wire()

    def reboot(self):
        """Everything of the host ends at once, and its kernel forgets; its disk stays as it is."""
        for name in reversed(list(self.processes)):
            if name not in (*HOLDERS, "servers", "dns", "dns-other"):
                self.stop(name, signal.SIGKILL)
        end_strays({self.host})
        self.run(["ip", "link", "del", "far0"], "internet")
        if self.number is not None:
            self.run(["ip", "link", "del", f"port{self.number}"], "switch")
        self.stop("host", signal.SIGKILL)
        for name in os.listdir(self.path("run")):
            path = self.path("run/" + name)
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
        os.unlink(self.path("host.ready"))
        self._boot()

    def __exit__(self, *unused):
        self.close()

    def close(self):
        atexit.unregister(self.close)
        if not os.path.isdir(self.dir):
            return
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)  # a test may have stopped it
        if "dockerd" in self.processes and self.processes["dockerd"].poll() is None:
            try:
                ids = self.docker("ps", "-aq", check=False, timeout=30).stdout.split()
                if ids:
                    self.docker("rm", "-f", *ids, check=False, timeout=120)
            except subprocess.TimeoutExpired:
                pass  # what runs on is ended below
        for name in reversed(list(self.processes)):
            if name not in HOLDERS:
                self.stop(name)
        end_strays({self.processes[name].pid for name in HOLDERS if name in self.processes})
        for name in HOLDERS:
            self.stop(name, signal.SIGKILL)
        if self.keep:
            os.unlink(self.path("owner.json"))  # nobody's to sweep
        else:
            remove_folder(self.dir)

    def write(self, name, text):
        path = os.path.join(self.dir, name)
        with open(path, "w") as file:
            file.write(text)
        return path

    def path(self, name):
        return os.path.join(self.dir, name)

    def netns(self, who="host"):
        return f"/proc/{getattr(self, who)}/ns/net"

    def nsenter(self, argv, who="host"):
        return ["nsenter", "-t", str(getattr(self, who)), "-n", "-m", "-u"] + argv

    def run(self, argv, who="host", check=True, timeout=60, env=None):
        result = subprocess.run(self.nsenter(argv, who), capture_output=True, text=True,
                                timeout=timeout, env=env, stdin=subprocess.DEVNULL)
        if self.verbose:
            print("+", " ".join(argv), "->", result.returncode, file=sys.stderr)
        if check and result.returncode != 0:
            raise RuntimeError(f"{' '.join(argv)}: exit {result.returncode}: {result.stdout}{result.stderr}")
        return result

    # -- the internet -----------------------------------------------------------------------------
    def _start_internet(self):
        certificate = self.path("server.pem")
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
                        "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30", "-subj",
                        "/CN=api.allowed.test", "-keyout", certificate + ".key", "-out", certificate],
                       check=True, stderr=subprocess.DEVNULL)
        with open(certificate, "a") as out, open(certificate + ".key") as key:
            out.write(key.read())
        listen = []
        for address in (ALLOWED, DENIED, ALLOWED6, DENIED6, LAN):
            listen += [f"tls:{address}:443", f"tcp:{address}:80", f"udp:{address}:443"]
        listen += [f"tcp:{METADATA}:80", f"tcp:{UPLINK_FAR}:443"]
        self.spawn("servers", self.nsenter([sys.executable, os.path.join(HERE, "servers.py"),
                                            certificate] + listen, "internet"))
        for name, addresses in (("dns", (DNS, DNS6, ALLOWED)), ("dns-other", (OTHER_DNS,))):
            self.spawn(name, self.nsenter(
                ["dnsmasq", "--keep-in-foreground", "--no-resolv", "--no-hosts", "--bind-interfaces",
                 "--except-interface=nothing", "--pid-file=", "--user=root", "--log-queries",
                 "--log-facility=-", "--local-ttl=60", "--local=/test/",
                 *[f"--listen-address={a}" for a in addresses],
                 f"--host-record=api.allowed.test,{ALLOWED},{ALLOWED6}",
                 f"--host-record=denied.test,{DENIED},{DENIED6}",
                 f"--host-record=metadata.rebind.test,{METADATA}"], "internet"))
        def up():
            listening = self.run(["ss", "-lntuH"], "internet").stdout
            names = [self.processes[name].poll() for name in ("servers", "dns", "dns-other")]
            if names != [None] * 3:
                raise RuntimeError("the internet ended: " + "".join(
                    self.log_of(name) for name in ("servers", "dns", "dns-other")))
            wanted = [one.partition(":")[2] for one in listen] + [f"{DNS}:53", f"{OTHER_DNS}:53"]
            return all(one.replace(ALLOWED6, f"[{ALLOWED6}]").replace(DENIED6, f"[{DENIED6}]") in listening
                       for one in wanted)
        wait_for("servers", up)

    def host_services(self, *what):
        """Services of the Docker host itself, each as servers.py wants it: "tcp:ADDRESS:PORT"."""
        self.spawn("host-services", self.nsenter(
            [sys.executable, os.path.join(HERE, "servers.py"), self.path("server.pem"), *what]))

        def up():
            listening = self.run(["ss", "-ltnH"]).stdout
            return all(one.partition(":")[2] in listening for one in what)
        wait_for("host services", up)

    def dns_queries(self, name="dns"):
        return [line for line in self.log_of(name).splitlines() if "query[" in line]

    # -- the engine -------------------------------------------------------------------------------
    def environment(self):
        path = ":".join([os.path.join(self.bundle, p) for p in ("usr/bin", "usr/sbin")] +
                        [os.path.join(fetch.bundle("20.10"), "usr/sbin"),
                         "/usr/local/sbin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"])
        return {"PATH": path, "HOME": self.dir, "DOCKER_HOST": "unix://" + self.path("run/docker.sock"),
                "LANG": "C.UTF-8"}

    def daemon_json(self, extra):
        config = {"cgroup-parent": "/" + os.path.basename(self.dir), "runtimes": {
            "runsc": {"path": self.runsc, "runtimeArgs": ["--platform=systrap"]},
            "fake-runsc": {"path": self.runc}}}
        if self.engine != "20.10":  # a type that is not gVisor's, whatever it is called
            config["runtimes"]["typed-runsc"] = {"runtimeType": "io.containerd.runc.v2"}
        config.update(self.daemon)
        config.update(extra)
        self.write("etc-docker/daemon.json", json.dumps(config, indent=1))

    def start_engine(self, wait=True):
        env = self.environment()
        if "containerd" not in self.processes:
            self.write("containerd.toml", 'version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri", '
                                          '"io.containerd.internal.v1.opt"]\n')
            self.spawn("containerd", self.nsenter(
                ["containerd", "--config", self.path("containerd.toml"), "--root", self.path("containerd"), "--state", "/run/ctr", "-a",
                 "/run/ctr.sock"]), env)
            wait_for("containerd", lambda: os.path.exists(self.path("run/ctr.sock")))
        self.spawn("dockerd", self.nsenter(
            ["dockerd", "--containerd", "/run/ctr.sock", "--data-root", self.path("docker"),
             "--pidfile", "/run/dockerd.pid", "-H",
             "unix:///run/docker.sock"]), env)
        if wait:
            self.wait_engine()

    def wait_engine(self):
        def up():
            if self.processes["dockerd"].poll() is not None:
                raise RuntimeError("dockerd ended: " + self.log_of("dockerd")[-3000:])
            return self.docker("version", check=False).returncode == 0
        wait_for("dockerd", up, 60)

    def docker(self, *arguments, check=True, timeout=120):
        result = subprocess.run(["docker", *arguments], capture_output=True, text=True,
                                env=self.environment(), timeout=timeout, stdin=subprocess.DEVNULL)
        if self.verbose:
            print("+ docker", " ".join(arguments), "->", result.returncode, file=sys.stderr)
        if check and result.returncode != 0:
            raise RuntimeError(f"docker {' '.join(arguments)}: {result.stdout}{result.stderr}")
        return result

    def inspect(self, name):
        return json.loads(self.docker("inspect", name).stdout)[0]

    def import_image(self):
        root = self.path("image")
        for folder in ("bin", "etc", "tmp"):
            os.makedirs(os.path.join(root, folder), exist_ok=True)
        shutil.copy("/bin/busybox", root + "/bin/busybox")
        for applet in subprocess.run(["/bin/busybox", "--list"], check=True, capture_output=True,
                                     text=True).stdout.split():
            if applet != "busybox" and not os.path.islink(f"{root}/bin/{applet}"):
                os.symlink("busybox", f"{root}/bin/{applet}")
        tar = subprocess.run(["tar", "-C", root, "-c", "."], check=True, capture_output=True).stdout
        subprocess.run(["docker", "import", "-c", 'CMD ["sleep", "1000000"]', "-c", "ENV PATH=/bin",
                        "-", "lab/busybox"], input=tar, check=True, env=self.environment(),
                       stdout=subprocess.DEVNULL)

    # -- drivers ----------------------------------------------------------------------------------
    def start_stub(self, name="agentgate", mode="half-routes", *options):
        """The logging stub in place of the driver; its requests are in stub_requests()."""
        process = f"stub.{name}"
        self.spawn(process, self.nsenter(
            [sys.executable, os.path.join(os.path.dirname(HERE), "stub_driver.py"), "--name", name,
             "--mode", mode, "--log", self.path("stub.requests"), *options]))

        def up():
            if self.processes[process].poll() is not None:
                raise RuntimeError(f"{process} ended: {self.log_of(process)}")
            return "READY" in self.log_of(process)
        wait_for(process, up)

    def stop_stub(self, name):
        self.stop(f"stub.{name}", signal.SIGKILL)
        os.unlink(self.path(f"run/docker/plugins/{name}.sock"))

    def stub_requests(self):
        """What Docker sent to every stub so far, in order: method, path, headers, body."""
        try:
            with open(self.path("stub.requests")) as file:
                return [json.loads(line) for line in file]
        except FileNotFoundError:
            return []

    # -- agentgate --------------------------------------------------------------------------------
    def start_agentgated(self, binary, *extra, env=None, wait=True, wrap=(), pass_fds=(),
                         log_level="debug"):
        environment = dict(self.environment(), **(env or {}))
        os.makedirs(self.path("run/docker/plugins"), exist_ok=True)
        self.spawn("agentgated", self.nsenter(
            [*wrap, binary, "--state-directory", self.path("state"), "--policy-directory",
             self.path("policies"), "--audit-file", self.path("log/audit.jsonl"),
             "--engine-pid-file", "/run/dockerd.pid", "--log-level", log_level, *extra]), environment,
            pass_fds)
        if wait:
            self.wait_agentgated()

    def wait_agentgated(self):
        def up():
            if self.processes["agentgated"].poll() is not None:
                raise RuntimeError("agentgated ended: " + self.log_of("agentgated")[-3000:])
            return os.path.exists(self.path("run/agentgate/agentgate.sock")) and \
                "ready:" in self.log_of("agentgated")
        wait_for("agentgated", up)

    def policy(self, name, document):
        self.write(f"policies/{name}.json", json.dumps(document, indent=1))

    def standard_policy(self, name="lab", runtimes=("runsc", "runc")):
        self.policy(name, {
            "version": 1, "runtimes": list(runtimes), "resolvers": [DNS],
            "allow": [{"name": "api.allowed.test", "services": ["tcp/443"]}]})

    def agentgate(self, binary, *arguments, timeout=60):
        """Exit code and the JSON that it printed."""
        result = self.run([binary, "--socket", "/run/agentgate/agentgate.sock", "--json",
                           *arguments], check=False, timeout=timeout)
        try:
            return result.returncode, json.loads(result.stdout), result.stderr
        except json.JSONDecodeError:
            return result.returncode, {}, result.stdout + result.stderr

    # -- firewalld --------------------------------------------------------------------------------
    def start_firewalld(self, backend):
        """With the bus it needs. Its programs are laid over /usr, for it and its client alone."""
        bundle = fetch.bundle("firewalld")
        etc = f"cp -a {bundle}/etc/firewalld /etc/; sed -i 's/^FirewallBackend=.*/FirewallBackend={backend}/'"
        self.run(["sh", "-ec", etc + " /etc/firewalld/firewalld.conf; mkdir -p /run/dbus"])
        bus = self.write("bus.conf", """<busconfig><type>system</type>
            <listen>unix:path=/run/dbus/system_bus_socket</listen><auth>EXTERNAL</auth>
            <policy context="default"><allow user="*"/><allow own="*"/><allow send_destination="*" eavesdrop="true"/>
            <allow eavesdrop="true"/></policy></busconfig>""")
        self.spawn("bus", self.nsenter(self._over(bundle, ["dbus-daemon", "--nofork", "--nopidfile", "--config-file",
                                                           bus])))
        wait_for("the bus", lambda: os.path.exists(self.path("run/dbus/system_bus_socket")))
        self.spawn("firewalld", self.nsenter(self._over(bundle, ["/usr/bin/python3", "/usr/sbin/firewalld", "--nofork",
                                                                 "--nopid", "--log-file=/run/firewalld.log"])))

        def up():
            if self.processes["firewalld"].poll() is not None:
                raise RuntimeError("firewalld ended: " + self.log_of("firewalld")[-3000:])
            return self.firewall_cmd("--state", check=False).returncode == 0
        wait_for("firewalld", up, 60, 0.3)

    def firewall_cmd(self, *arguments, check=True):
        return self.run(self._over(fetch.bundle("firewalld"), ["/usr/bin/python3", "/usr/bin/firewall-cmd", *arguments]),
                        check=check)

    @staticmethod
    def _over(bundle, argv):
        """A command with the bundle's /usr over the machine's."""
        mount = f"mount -t overlay overlay -o lowerdir={bundle}/usr:/usr /usr"
        return ["unshare", "--mount", "--propagation", "private", "sh", "-ec", f'{mount}; exec "$@"', "sh", *argv]

    def stop_firewalld(self):
        self.stop("firewalld")
        self.stop("bus")  # it takes its socket away

    # -- containers and probes --------------------------------------------------------------------
    def container(self, name, network, runtime="runc", *extra, command=("sleep", "1000000")):
        self.docker("run", "-d", "--name", name, "--runtime", runtime, "--network", network, *extra,
                    "lab/busybox", *command)
        return self.inspect(name)

    def probe(self, name, probes, seconds=4):
        """Tries each (kind, address, port) inside the container, all at once; a bool for each."""
        script = []
        # The answer's address; the server's own is printed with its port, whatever it says.
        found = r"grep -Eq '^Address.* 192\.0\.2\.8[01]$'"
        for number, (kind, address, port) in enumerate(probes):
            if kind == "tcp":
                test = (f'r=$(echo | timeout {seconds} nc -w {seconds} {address} {port} 2>/dev/null); '
                        f'test -n "$r"')
                if port == 443:  # TLS: the server waits for a hello; that it connects is enough
                    test = f"timeout {seconds} nc -w {seconds} {address} {port} -e /bin/true </dev/null 2>/dev/null"
            elif kind == "dns":  # address: server, port: name
                test = f"timeout {seconds} nslookup {port} {address} 2>/dev/null | {found}"
            elif kind == "name":  # through the container's own resolver file
                test = f"timeout {seconds} nslookup {port} 2>/dev/null | {found}"
            else:
                raise ValueError(f"no such probe: {kind}")
            script.append(f"( if {test}; then echo {number} yes; else echo {number} no; fi ) &")
        script.append("wait")
        result = self.docker("exec", name, "sh", "-c", "\n".join(script), check=False, timeout=300)
        answers = dict(line.split() for line in result.stdout.splitlines() if len(line.split()) == 2)
        if len(answers) != len(probes):
            raise RuntimeError(f"probe in {name}: {result.stdout}{result.stderr}")
        return [answers[str(number)] == "yes" for number in range(len(probes))]
