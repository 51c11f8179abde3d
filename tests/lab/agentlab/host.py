# SPDX-License-Identifier: GPL-2.0-or-later
"""One Docker host: namespaces, an engine of the wanted version, and what tests do with it."""

import http.client
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess

from . import fetch, image
from .errors import LabError
from .namespace import HERE, Namespace, remove_cgroups, wait_for
from .sniff import Sniffer

ENGINES = tuple(fetch.ENGINE_SOURCES)
RESOLV_CONF = "nameserver 192.0.2.53\noptions timeout:1 attempts:1\n"


class Host(Namespace):
    """A host with Docker's default paths: /run/docker.sock, /var/lib/docker, /etc/docker.

    eth0 is the cable to the internet: `address`, `address6` and, on the local network,
    `lan_address`. `daemon` is merged into daemon.json; `runsc` chooses the build.
    """

    def __init__(self, lab, internet, number, engine, runsc=fetch.DEFAULT_RUNSC, daemon=None,
                 resolv_conf=RESOLV_CONF, forwarding=True):
        self.engine = fetch.fetch_engine(engine)
        self.runc = fetch.fetch_runc()
        self.runsc = fetch.fetch_runsc(runsc) if runsc else None
        self._internet, self._number, self._forwarding = internet, number, forwarding
        super().__init__(lab, f"host{number}", resolv_conf)
        self._connect()
        self.daemon = self._daemon_json(daemon or {})
        self.write("/etc/docker/daemon.json", json.dumps(self.daemon, indent=1) + "\n")

    def _connect(self):
        self.containerd = self.dockerd = None
        self.address, self.lan_address, self.address6 = self._internet.attach(self, self._number)
        if self._forwarding:
            self.sysctl("net/ipv4/ip_forward", 1)
            self.sysctl("net/ipv6/conf/all/forwarding", 1)

    def reboot(self):
        """A power cut and a new start: disks stay; processes, /run, links and rules are gone.

        The engine is not started: start_agentgated() and start_engine() in the order of the test.
        """
        self.end()
        shutil.rmtree(self.base / "run")
        remove_cgroups(self.lab.cgroup + "/" + self.name)
        self.launch()
        self._connect()

    def _daemon_json(self, extra):
        runtimes = {"runsc-alias-not-really": {"path": str(self.runc)}}
        if self.runsc:
            runtimes["runsc"] = {"path": str(self.runsc), "runtimeArgs": self.runsc_args()}
            # Without this gVisor gives nobody raw sockets, whatever --cap-add says.
            runtimes["runsc-raw"] = {"path": str(self.runsc), "runtimeArgs": self.runsc_args() + ["--net-raw"]}
        if self.engine.name != "20.10":
            # Debian packages no containerd-shim-runsc-v1; this is a type that is not gVisor's.
            runtimes["runsc-type-not-really"] = {"runtimeType": "io.containerd.runc.v2"}
        settings = {"runtimes": runtimes, "cgroup-parent": f"/{self.lab.cgroup}/{self.name}", "storage-driver": "overlay2",
                    "shutdown-timeout": 3}
        settings.update({key: value for key, value in extra.items() if key != "runtimes"})
        settings["runtimes"].update(extra.get("runtimes", {}))
        return {key: value for key, value in settings.items() if value is not None}

    def runsc_args(self):
        # 2022's runsc has no systrap.
        return ["--platform=ptrace"] if "20221219" in str(self.runsc) else ["--platform=systrap"]

    def environment(self):
        env = super().environment()
        runtimes = [str(self.runc.parent)] + ([str(self.runsc.parent)] if self.runsc else [])
        env["PATH"] = ":".join(self.engine.path + runtimes + [env["PATH"]])
        if self.engine.libraries:
            env["LD_LIBRARY_PATH"] = ":".join(self.engine.libraries)
        return env

    def write(self, path, text, mode=0o644):
        """Writes a file inside, as root, with its folders."""
        self.run("sh", "-c", 'mkdir -p "$(dirname "$1")" && cat > "$1" && chmod "$2" "$1"', "sh", path,
                 oct(mode)[2:], input=text if text else b"")

    def read(self, path):
        return self.run("cat", path)

    # -- the engine

    def start_engine(self, images=(image.BUSYBOX_IMAGE, image.PYTHON_IMAGE), timeout=60):
        """Starts containerd and dockerd and waits for the API; makes the test images if missing."""
        if self.containerd is None or not self.containerd.alive():
            self.write("/etc/containerd/config.toml",
                       'version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n')
            self.containerd = self.start("containerd", log="containerd.log")
            wait_for(lambda: self._up(self.containerd, "/run/containerd/containerd.sock"), timeout, "containerd is up")
        self.start_dockerd(timeout)
        for name in images:
            self.import_image(name)

    def start_dockerd(self, timeout=60):
        """dockerd alone, as after a restart of the service."""
        if self.dockerd is not None and self.dockerd.alive():
            raise LabError(f"{self.name}: dockerd runs already")
        self.exec("rm", "-f", "/run/docker.pid")
        self.dockerd = self.start("dockerd", "--containerd", "/run/containerd/containerd.sock", log="dockerd.log")

        def answers():
            if not self.dockerd.alive():
                tail = "\n".join(self.dockerd.output().splitlines()[-20:])
                raise LabError(f"{self.name}: dockerd ended:\n{tail}")
            return self.api("GET", "/_ping", timeout=5)[0] == 200

        wait_for(answers, timeout, "dockerd answers", interval=0.1)

    def _up(self, process, socket_path):
        if not process.alive():
            raise LabError(f"{self.name}: ended: {process.output()[-2000:]}")
        return os.path.exists(self.outside(socket_path))

    def stop_dockerd(self):
        """As the service manager would: SIGTERM and wait."""
        code = self.dockerd.stop(40)
        self.dockerd = None
        return code

    def kill_dockerd(self):
        """A crash: SIGKILL to dockerd alone. Containers go on."""
        self.dockerd.kill()
        self.dockerd = None

    def kill_engine(self):
        """What a power cut leaves: dockerd, containerd, every shim and container gone at once."""
        self.kill_dockerd()
        if self.containerd is not None:
            self.containerd.kill()
            self.containerd = None
        for pid in self.cgroup_pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        # What is left under the first process now are shims, and what they had started.
        self.exec("sh", "-c", 'for p in /proc/[0-9]*; do case "$(tr "\\0" " " < $p/cmdline)" in '
                              '*containerd-shim*|*runsc*) kill -9 "${p#/proc/}";; esac; done')

    def cgroup_pids(self):
        """The processes of this lab's containers, by the PIDs that the machine knows."""
        pids = set()
        for path in pathlib.Path("/sys/fs/cgroup").glob(f"*/{self.lab.cgroup}/{self.name}/**/cgroup.procs"):
            try:
                pids.update(int(word) for word in path.read_text().split())
            except OSError:
                pass
        return sorted(pids)

    def stop_engine(self):
        if self.dockerd is not None:
            self.stop_dockerd()
        if self.containerd is not None:
            self.containerd.stop()
            self.containerd = None

    def outside(self, path):
        """Where a path under /run is for a process outside."""
        if not path.startswith("/run/"):
            raise LabError(f"{path} is not under /run")
        return str(self.base / path[1:])

    @property
    def socket(self):
        """The API's socket, from outside: DOCKER_HOST is "unix://" and this."""
        return self.outside("/run/docker.sock")

    def docker(self, *argv, check=False, timeout=120, input=None):
        """`docker ARGS`; answers with a CompletedProcess."""
        return self.exec("docker", *argv, check=check, timeout=timeout, input=input)

    def docker_ok(self, *argv, **kwargs):
        """`docker ARGS` that must succeed; answers with its output, stripped."""
        return self.docker(*argv, check=True, **kwargs).stdout.strip()

    def inspect(self, name, kind="container"):
        return json.loads(self.docker_ok(kind, "inspect", name))[0]

    def api(self, method, path, body=None, timeout=30, socket_path=None):
        """One request to the engine's API, or to another socket: (status, text)."""
        return request(socket_path or self.socket, method, path, body, timeout)

    def import_image(self, name=image.BUSYBOX_IMAGE):
        """Makes a test image on this host, unless it is there."""
        if self.docker("image", "inspect", name).returncode:
            self.docker_ok("import", "-c", 'CMD ["sleep", "1000000"]', "-c", "ENV PATH=/bin", image.build(name), name)

    # -- drivers

    def start_stub(self, name="agentgate", mode="half-routes", *options):
        """The logging stub in place of the driver; its requests are in stub_requests()."""
        return self.python(str(HERE.parent / "stub_driver.py"), "--name", name, "--mode", mode,
                           "--log", str(self.logs / "stub.requests"), *options, log=f"stub.{name}.log")

    def stub_requests(self):
        """What Docker sent to every stub so far, in order: method, path, headers, body."""
        path = self.logs / "stub.requests"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def start_agentgated(self, binary, args=(), env=None, log="agentgated.log",
                         ready="/run/docker/plugins/agentgate.sock", timeout=20):
        """Starts the daemon inside and waits until it listens on `ready`. Output goes to logs/`log`."""
        self.run("mkdir", "-p", "/run/docker/plugins", "/run/agentgate")
        process = self.start(binary, *args, log=log, env=env)

        def listening():
            if not process.alive():
                raise LabError(f"{self.name}: agentgated ended with {process.wait()}:\n{process.output()[-4000:]}")
            return ready is None or connects(self.outside(ready))

        wait_for(listening, timeout, f"{self.name}: agentgated listens on {ready}")
        return process

    # -- containers from outside

    def container_pid(self, name):
        """The PID of a container's first process, as this host knows it."""
        pid = self.inspect(name)["State"]["Pid"]
        if not pid:
            raise LabError(f"container {name} does not run")
        return pid

    def outer_pid(self, inner):
        """The machine's PID of the process that has PID `inner` in this host."""
        # Of a container's processes, the PID namespace is below the host's: the level tells which
        # of a process's PIDs is the one in this host.
        level = len(nspids(self.pid)) - 1
        namespace = os.readlink(f"/proc/{self.pid}/root/proc/{inner}/ns/pid")
        for pid in os.listdir("/proc"):
            try:
                if (pid.isdigit() and os.readlink(f"/proc/{pid}/ns/pid") == namespace
                        and nspids(pid)[level] == inner):
                    return int(pid)
            except (OSError, IndexError):
                continue
        raise LabError(f"{self.name}: no process {inner}")

    def container_net(self, name):
        """The path of a container's network namespace, from outside. Works under runsc too."""
        return f"/proc/{self.pid}/root/proc/{self.container_pid(name)}/ns/net"

    def in_container_net(self, name, *argv, timeout=30, input=None):
        """Runs a program of the machine in a container's network namespace (not in its file system)."""
        return subprocess.run(["nsenter", f"--net={self.container_net(name)}", "--", *map(str, argv)],
                              capture_output=True, text=True, timeout=timeout, input=input)

    def probe(self, container, probes, timeout=2):
        """Tries things from inside a lab/python container, all at once (probe.py).

        A probe is a tuple (kind, address, port) or a dict; the answer is one dict each. Raises if
        the container cannot run it.
        """
        wanted = [one if isinstance(one, dict) else dict(zip(("kind", "to", "port"), one)) for one in probes]
        done = self.docker("exec", "-i", container, "python3", "-I", "-", str(timeout), json.dumps(wanted),
                           input=(HERE / "probe.py").read_text(), timeout=timeout * 3 + 30)
        try:
            return json.loads(done.stdout)
        except ValueError:
            raise LabError(f"probe in {container}: exit {done.returncode}\n{done.stdout}{done.stderr}") from None

    def reaches(self, container, probes, timeout=2):
        """probe(), but only whether each got an answer."""
        return [result["ok"] for result in self.probe(container, probes, timeout)]

    def stream(self, container, address, port, kind="tcp"):
        """A flow that goes on in the container (port: 22, or a UDP port): what came back is in the Stream."""
        return Stream(self, container, address, port, kind)

    def sniff(self, interface="eth0"):
        return Sniffer(self.net(), interface)

    def sniff_container(self, name, interface="eth0"):
        return Sniffer(self.container_net(name), interface)

    def listen(self, address, tcp=(), udp=(), name="service"):
        """Services of the host on one address (it need not be there yet); answers with a Services."""
        return Services(self, address, tcp, udp, name)

    # -- the end

    def close(self):
        if not self.closed and self.dockerd is not None and self.dockerd.alive():
            # Not for the processes, which end with the namespace: for a clean end of the data.
            self.dockerd.signal(signal.SIGKILL)
        super().close()


class Services:
    """TCP and UDP services of a host, and who came."""

    _count = 0

    def __init__(self, host, address, tcp, udp, name):
        Services._count += 1
        self._journal = host.logs / f"{name}.{Services._count}.journal"
        self._journal.touch()
        self.process = host.python(
            "farside.py", json.dumps({"tcp": {str(port): "banner" for port in tcp}, "udp": list(udp),
                                      "address": address, "journal": str(self._journal), "name": name}),
            log=f"{name}.{Services._count}.log")

    def journal(self):
        return [json.loads(line) for line in self._journal.read_text().splitlines()]

    def stop(self):
        self.process.kill()


class Stream:
    """A flow inside a container that sends a number every 20 ms and notes which come back."""

    _count = 0

    def __init__(self, host, container, address, port, kind):
        Stream._count += 1
        self._host, self._container, self._path = host, container, f"/tmp/stream.{Stream._count}"
        script = f"/tmp/stream.{Stream._count}.py"
        host.docker_ok("exec", "-i", container, "sh", "-c", f"cat > {script}", input=(HERE / "probe.py").read_text())
        host.docker_ok("exec", "-d", container, "python3", "-I", script, "stream", address, str(port), self._path,
                       kind)
        wait_for(lambda: self.log(), 10, f"the start of a flow to {address} port {port}", interval=0.1)

    def log(self):
        return self._host.docker("exec", self._container, "cat", self._path).stdout.splitlines()

    def received(self):
        """The numbers that came back: [(number, time)]."""
        pairs = [line.split() for line in self.log()]
        return [(int(pair[0]), float(pair[1])) for pair in pairs if len(pair) == 2 and pair[0].isdigit()]


def nspids(pid):
    """A process's PIDs from this namespace down to its own."""
    with open(f"/proc/{pid}/status") as file:
        line = next(line for line in file if line.startswith("NSpid:"))
    return [int(word) for word in line.split()[1:]]


def connects(path):
    """Does somebody listen on this Unix socket?"""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(2)
        try:
            sock.connect(path)
            return True
        except OSError:
            return False


def request(path, method, target, body=None, timeout=30):
    """One HTTP request over a Unix socket: (status, text); status 0 when nobody listens."""

    class Connection(http.client.HTTPConnection):
        def connect(self):
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(timeout)
            self.sock.connect(path)

    connection = Connection("localhost", timeout=timeout)
    try:
        data = None if body is None else body if isinstance(body, (bytes, str)) else json.dumps(body)
        headers = {} if data is None else {"Content-Type": "application/json"}
        connection.request(method, target, data, headers)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return 0, ""
    finally:
        connection.close()
