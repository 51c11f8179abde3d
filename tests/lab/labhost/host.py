# SPDX-License-Identifier: GPL-2.0-or-later
"""A Docker host in namespaces: network, mounts, engine, agentgated; and the internet behind it."""
import atexit
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


class Timeout(Exception):
    pass


def wait_for(what, condition, seconds=30, every=0.05):
    end = time.time() + seconds
    while time.time() < end:
        if condition():
            return
        time.sleep(every)
    raise Timeout(what)


class Lab:
    """Use as a context manager. Everything it starts it stops, by process id."""

    def __init__(self, engine="20.10", verbose=False):
        self.engine, self.verbose = engine, verbose
        self.dir = tempfile.mkdtemp(prefix="agentlab-")
        self.processes = {}  # name -> Popen, in order of start
        self.bundle = fetch.bundle(engine)
        self.runc = os.path.join(fetch.bundle("20.10"), "usr/sbin/runc")
        self.runsc = fetch.runsc()

    # -- processes --------------------------------------------------------------------------------
    def spawn(self, name, argv, env=None):
        with open(os.path.join(self.dir, name + ".log"), "ab") as log:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                       env=env, start_new_session=True)
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
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    # -- namespaces -------------------------------------------------------------------------------
    def _holder(self, name, script):
        """A process that keeps a namespace open; returns its pid once the script is through."""
        ready = os.path.join(self.dir, name + ".ready")
        process = self.spawn(name, ["unshare", "--net", "--mount", "/bin/sh", "-ec",
                                    script + f"\ntouch {ready}\nexec sleep infinity"])

        def done():
            if process.poll() is not None:
                raise RuntimeError(f"{name} did not start: {self.log_of(name)}")
            return os.path.exists(ready)
        wait_for(name, done)
        return process.pid

    def __enter__(self):
        atexit.register(self.close)
        d = self.dir
        os.makedirs("/etc/docker", exist_ok=True)
        for folder in ("run", "etc-docker", "policies", "state", "log", "cgroup"):
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
        self.host = self._holder("host", f"""
            mount --make-rprivate /
            mount --rbind /sys/fs/cgroup {d}/cgroup
            mount -t sysfs sysfs /sys
            mount --rbind {d}/cgroup /sys/fs/cgroup
            mount --bind {d}/run /run
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
        """)
        self._start_internet()
        return self

    def __exit__(self, *unused):
        self.close()

    def close(self):
        atexit.unregister(self.close)
        if not os.path.isdir(self.dir):
            return
        if "dockerd" in self.processes and self.processes["dockerd"].poll() is None:
            ids = self.docker("ps", "-aq", check=False).stdout.split()
            if ids:
                self.docker("rm", "-f", *ids, check=False, timeout=120)
        for name in reversed(list(self.processes)):
            if name not in ("host", "internet"):
                self.stop(name)
        self._end_strays()
        for name in ("host", "internet"):
            self.stop(name, signal.SIGKILL)
        for mount in sorted(self._mounts(), reverse=True):
            subprocess.run(["umount", "-l", mount], stderr=subprocess.DEVNULL)
        shutil.rmtree(self.dir, ignore_errors=True)

    def _end_strays(self):
        """containerd's shims outlive containerd on purpose. Whatever still runs in a namespace that
        this lab made is the lab's to end; the holders that keep the namespaces go last."""
        holders = {self.processes[name].pid for name in ("host", "internet") if name in self.processes}
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

    def _mounts(self):
        with open("/proc/self/mounts") as file:
            return [line.split()[1] for line in file if line.split()[1].startswith(self.dir)]

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
        return ["nsenter", "-t", str(getattr(self, who)), "-n", "-m"] + argv

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
        wait_for("servers", lambda: self.run(
            ["/bin/sh", "-c", f"exec 3<>/dev/tcp/{ALLOWED}/80"], check=False).returncode == 0 or
            "LISTEN" in self.run(["ss", "-ltn", "sport", "=", ":80"], "internet").stdout)

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
        config = {"runtimes": {
            "runsc": {"path": self.runsc, "runtimeArgs": ["--platform=systrap"]},
            "fake-runsc": {"path": self.runc}}}
        config.update(extra)
        self.write("etc-docker/daemon.json", json.dumps(config, indent=1))

    def start_engine(self, wait=True):
        env = self.environment()
        if "containerd" not in self.processes:
            self.spawn("containerd", self.nsenter(
                ["containerd", "--root", self.path("containerd"), "--state", "/run/ctr", "-a",
                 "/run/ctr.sock"]), env)
            wait_for("containerd", lambda: os.path.exists(self.path("run/ctr.sock")))
        self.spawn("dockerd", self.nsenter(
            ["dockerd", "--containerd", "/run/ctr.sock", "--data-root", self.path("docker"),
             "--exec-root", "/run/dk", "--pidfile", "/run/dockerd.pid", "-H",
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
        os.makedirs(root + "/bin", exist_ok=True)
        os.makedirs(root + "/etc", exist_ok=True)
        shutil.copy("/bin/busybox", root + "/bin/busybox")
        for applet in ("sh", "sleep", "nc", "wget", "nslookup", "cat", "ip", "ping", "true", "echo",
                       "date", "timeout", "ls", "seq"):
            if not os.path.islink(f"{root}/bin/{applet}"):
                os.symlink("busybox", f"{root}/bin/{applet}")
        tar = subprocess.run(["tar", "-C", root, "-c", "."], check=True, capture_output=True).stdout
        subprocess.run(["docker", "import", "-", "lab/busybox"], input=tar, check=True,
                       env=self.environment(), stdout=subprocess.DEVNULL)

    # -- agentgate --------------------------------------------------------------------------------
    def start_agentgated(self, binary, *extra, env=None, wait=True):
        environment = dict(self.environment(), **(env or {}))
        os.makedirs(self.path("run/docker/plugins"), exist_ok=True)
        self.spawn("agentgated", self.nsenter(
            [binary, "--state-directory", self.path("state"), "--policy-directory",
             self.path("policies"), "--audit-file", self.path("log/audit.jsonl"),
             "--engine-pid-file", "/run/dockerd.pid", "--log-level", "debug", *extra]), environment)
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

    # -- containers and probes --------------------------------------------------------------------
    def container(self, name, network, runtime="runc", *extra, command=("sleep", "1000000")):
        self.docker("run", "-d", "--name", name, "--runtime", runtime, "--network", network, *extra,
                    "lab/busybox", *command)
        return self.inspect(name)

    def probe(self, name, probes, seconds=4):
        """Tries each (kind, address, port) inside the container, all at once; a bool for each."""
        script = []
        for number, (kind, address, port) in enumerate(probes):
            if kind == "tcp":
                test = (f'r=$(echo | timeout {seconds} nc -w {seconds} {address} {port} 2>/dev/null); '
                        f'test -n "$r"')
                if port == 443:  # TLS: the server waits for a hello; that it connects is enough
                    test = f"timeout {seconds} nc -w {seconds} {address} {port} -e /bin/true </dev/null 2>/dev/null"
            elif kind == "dns":  # address: server, port: name
                test = f"timeout {seconds} nslookup {port} {address} 2>/dev/null | grep -q 192.0.2"
            elif kind == "name":  # through the container's own resolver file
                test = f"timeout {seconds} nslookup {port} 2>/dev/null | grep -q 192.0.2"
            script.append(f"( if {test}; then echo {number} yes; else echo {number} no; fi ) &")
        script.append("wait")
        result = self.docker("exec", name, "sh", "-c", "\n".join(script), check=False, timeout=300)
        answers = dict(line.split() for line in result.stdout.splitlines() if len(line.split()) == 2)
        if len(answers) != len(probes):
            raise RuntimeError(f"probe in {name}: {result.stdout}{result.stderr}")
        return [answers[str(number)] == "yes" for number in range(len(probes))]
