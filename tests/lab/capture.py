#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0-or-later
"""Captures what an engine sends to a network driver, for tests/golden/ENGINE/.

Every command of the matrix runs on a fresh host with the logging stub as the driver. Each request
becomes one file NNN-VERB-CASE.json with the command that caused it and the request as it came: the
body stays text, ids and order stay what they were.
"""

import argparse
import json
import pathlib
import shutil
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from labhost.host import ENGINES, Lab  # noqa: E402

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "golden"
IMAGE = "lab/busybox"


class Capture:
    def __init__(self, lab, target):
        self.lab, self.target = lab, target
        self.version = lab.docker("version", "--format", "{{.Server.Version}}").stdout.split("+")[0].strip()
        self.seen = self.number = 0

    def collect(self, case, command):
        requests = self.lab.stub_requests()
        for request in requests[self.seen:]:
            self.number += 1
            verb = request["path"].rpartition(".")[2]
            entry = {"engine": self.version, "case": case, "command": command, **request}
            path = self.target / f"{self.number:03}-{verb}-{case}.json"
            path.write_text(json.dumps(entry, indent=1) + "\n")
        self.seen = len(requests)

    def docker(self, case, *argv, fails=False):
        """One command; `fails`: it is expected to (None: it may), and is captured all the same."""
        done = self.lab.docker(*argv, check=False)
        if fails is not None and bool(done.returncode) != fails:
            raise RuntimeError(f"{case}: docker {' '.join(argv)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        self.collect(case, "docker " + " ".join(argv))

    def create(self, case, name, *argv, driver="agentgate"):
        self.docker(case, "network", "create", "-d", driver, *argv, name)

    def run(self, case, name, *argv):
        """docker run, then its removal: what both send."""
        self.docker(case, "run", "-d", "--name", name, *argv, IMAGE)
        self.docker(case + "-rm", "rm", "-f", name)


def matrix(c, lab):
    modern = lab.engine != "20.10"
    lab.start_stub()
    c.create("first", "n-plain", "--subnet", "172.30.0.0/24")
    c.create("default-pool", "n-auto")
    c.create("options", "n-options", "--subnet", "172.30.1.0/24", "--label", "lab=1", "--attachable",
             "-o", "agentgate.policy=web", "-o", "agentgate.mtu=1400")
    c.create("foreign-options", "n-foreign", "--subnet", "172.30.2.0/24", "-o", "k=v", "-o", "a.b=c")
    c.create("ipv6", "n-six", "--subnet", "172.30.3.0/24", "--gateway", "172.30.3.1", "--ipv6",
             "--subnet", "2001:db8:30::/64", "--gateway", "2001:db8:30::1")
    c.create("internal", "n-internal", "--internal", "--subnet", "172.30.4.0/24")
    c.create("aux-address", "n-aux", "--subnet", "172.30.5.0/24", "--gateway", "172.30.5.254", "--ip-range",
             "172.30.5.128/25", "--aux-address", "printer=172.30.5.129", "--aux-address", "scanner=172.30.5.130")
    if lab.engine == "28.5":
        c.create("no-ipv4", "n-only-six", "--ipv4=false", "--ipv6", "--subnet", "2001:db8:31::/64")
        c.run("run-no-ipv4", "c-only-six", "--network", "n-only-six")

    c.run("run", "c-run", "--network", "n-plain")
    c.run("run-runsc", "c-runsc", "--network", "n-plain", "--runtime", "runsc")
    c.run("run-ipv6", "c-six", "--network", "n-six")
    c.run("run-internal", "c-internal", "--network", "n-internal")
    c.run("run-aux", "c-aux", "--network", "n-aux")
    c.run("published", "c-published", "--network", "n-plain", "-p", "127.0.0.1:8080:80", "-p", "5353:53/udp",
          "--expose", "90/udp")
    c.run("exposed", "c-exposed", "--network", "n-plain", "--expose", "8000-8002")
    c.run("publish-all", "c-all", "--network", "n-plain", "-P", "--expose", "8000")
    c.run("published-internal", "c-pubint", "--network", "n-internal", "-p", "8081:80")
    c.run("mac-address", "c-mac", "--network", "n-plain", "--mac-address", "02:42:ac:1e:00:77")
    c.run("ip", "c-ip", "--network", "n-six", "--ip", "172.30.3.77", "--ip6", "2001:db8:30::77")
    c.run("link-local-ip", "c-ll", "--network", "n-plain", "--link-local-ip", "169.254.34.68")
    c.run("dns", "c-dns", "--network", "n-plain", "--dns", "192.0.2.54")
    c.run("driver-opt", "c-opt", "--network",
          "name=n-six,driver-opt=agentgate.policy=web,driver-opt=dk=dv,ip=172.30.3.20,alias=front")
    c.run("driver-opt-own", "c-optown", "--network", "name=n-plain,driver-opt=agentgate.policy=web")
    c.run("driver-opt-portmap", "c-optmap", "--network",
          "name=n-internal,driver-opt=com.docker.network.portmap=text")
    c.run("options-network", "c-options", "--network", "n-options")

    c.docker("create", "create", "--name", "c-life", "--network", "n-plain", IMAGE)
    for verb in ("start", "pause", "unpause", "restart", "stop", "start", "kill", "rm"):
        c.docker("life-" + verb, verb, *(["-t", "1"] if verb in ("restart", "stop") else []), "c-life")
    c.docker("bad-command", "run", "--name", "c-bad", "--network", "n-plain", IMAGE, "/no/such/program", fails=True)
    c.docker("bad-command-rm", "rm", "c-bad")
    c.docker("policy", "run", "-d", "--name", "c-policy", "--restart", "on-failure:1", "--network", "n-plain",
             IMAGE, "sh", "-c", "sleep 0.2; exit 3")
    end = time.monotonic() + 15
    while lab.inspect("c-policy")["RestartCount"] < 1 or lab.inspect("c-policy")["State"]["Running"]:
        if time.monotonic() > end:
            raise RuntimeError("the restart policy did nothing")
        time.sleep(0.1)
    c.collect("policy-restart", "(restart policy)")
    c.docker("policy-rm", "rm", "-f", "c-policy")

    c.docker("connect-run", "run", "-d", "--name", "c-two", "--network", "bridge", IMAGE)
    c.docker("connect-running", "network", "connect", "--ip", "172.30.0.50", "n-plain", "c-two")
    # Some engines refuse an address that lies in a route which the sandbox has: in a half route too.
    c.docker("connect-second", "network", "connect", *(["--driver-opt", "agentgate.policy=web"] if modern else []),
             "--alias", "two", "n-six", "c-two", fails=None)
    c.docker("disconnect-running", "network", "disconnect", "n-plain", "c-two")
    c.docker("stop-two", "stop", "-t", "1", "c-two")
    c.docker("connect-stopped", "network", "connect", "n-internal", "c-two")
    c.docker("start-three", "start", "c-two", fails=None)
    c.docker("disconnect-force", "network", "disconnect", "-f", "n-internal", "c-two", fails=None)
    c.docker("rm-two", "rm", "-f", "c-two")

    # A driver that answers Join with a gateway is also told about external connectivity.
    lab.start_stub("agentgate-gw", "gateway")
    c.create("gateway", "n-gw", "--subnet", "172.30.8.0/24", "--ipv6", "--subnet", "2001:db8:38::/64",
             driver="agentgate-gw")
    c.run("gateway-run", "c-gw", "--network", "n-gw", "-p", "8082:80")
    c.docker("gateway-network-rm", "network", "rm", "n-gw")
    lab.stop_stub("agentgate-gw")

    # A driver that dies over a request: Docker sends it again, with an empty body.
    lab.start_stub("agentgate-drop", "half-routes", "--drop-once", "CreateEndpoint")
    c.create("retry", "n-drop", "--subnet", "172.30.9.0/24", driver="agentgate-drop")
    c.docker("retry-run", "run", "-d", "--name", "c-drop", "--network", "n-drop", IMAGE, fails=True)
    c.docker("retry-rm", "rm", "-f", "c-drop")
    c.docker("retry-network-rm", "network", "rm", "n-drop")
    lab.stop_stub("agentgate-drop")

    c.docker("before-engine-stop", "run", "-d", "--name", "c-stay", "--network", "n-plain", "--restart", "always",
             IMAGE)
    lab.stop("dockerd", seconds=40)
    c.collect("engine-stop", "(SIGTERM to dockerd)")
    lab.start_engine()
    end = time.monotonic() + 15
    while not lab.inspect("c-stay")["State"]["Running"] and time.monotonic() < end:
        time.sleep(0.1)
    c.collect("engine-start", "(dockerd starts again)")
    c.docker("after-engine-start", "rm", "-f", "c-stay")
    for name in lab.docker("network", "ls", "--filter", "driver=agentgate", "--format",
                           "{{.Name}}").stdout.split():
        c.docker("network-rm-" + name.removeprefix("n-"), "network", "rm", name)


def capture(engine, target):
    """Replaces what is in `target`/ENGINE; answers with how many requests there are."""
    folder = target / engine
    with Lab(engine) as lab:
        lab.start_engine()
        lab.import_image()
        work = pathlib.Path(lab.path("golden"))
        work.mkdir()
        c = Capture(lab, work)
        matrix(c, lab)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(work, folder)
        return c.number


def main():
    parser = argparse.ArgumentParser(prog="scripts/lab capture", description=__doc__.splitlines()[0])
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"of {', '.join(ENGINES)}; without, all")
    parser.add_argument("--target", type=pathlib.Path, default=GOLDEN, help="folder; default tests/golden")
    args = parser.parse_args()
    for engine in args.engines or ENGINES:
        started = time.monotonic()
        count = capture(engine, args.target)
        print(f"{engine}: {count} requests in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
