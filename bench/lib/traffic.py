# SPDX-License-Identifier: GPL-2.0-or-later
"""What a released port carries: a TCP stream, small packets, round trips. To the far side, routed."""
import json
import os
import random
import re
import shutil
import subprocess
import time

from .hosts import SERVER


def output(argv, seconds):
    for attempt in range(3):
        done = subprocess.run(argv, capture_output=True, text=True, timeout=seconds + 60)
        if done.returncode == 0:
            return done.stdout
        time.sleep(0.5)  # iperf3's server serves one at a time
    raise RuntimeError(f"{' '.join(argv)}: {done.stdout[-1000:]}{done.stderr[-1000:]}")


def received(lab):
    """Packets that came in at the far end of the uplink."""
    link = json.loads(lab.run(["ip", "-s", "-j", "link", "show", "dev", "far0"], "internet").stdout)[0]
    return link["stats64"]["rx"]["packets"]


def stream(host, seconds, client=None):
    client = client or host.client
    argv = client(["iperf3", "-c", SERVER, "-J", "-t", str(seconds)])
    return json.loads(output(argv, seconds))["end"]["sum_received"]["bits_per_second"] / 1e9


def small_packets(host, seconds):
    """18 bytes of UDP as fast as one sender can; counted where they leave the far end of the uplink."""
    before = received(host.lab)
    text = output(host.client(["iperf3", "-c", SERVER, "-u", "-b", "0", "-l", "18", "-J", "-t", str(seconds)]), seconds)
    return (received(host.lab) - before) / json.loads(text)["end"]["sum"]["seconds"] / 1000


def round_trip(host, seconds, client=None):
    """Median of one TCP connection's request and response."""
    client = client or host.client
    text = output(client(["sockperf", "ping-pong", "--tcp", "-i", SERVER, "-p", "11111", "-t", str(seconds),
                          "-m", "64", "--full-rtt"]), seconds)
    return float(re.search(r"percentile 50\.000 =\s*([\d.]+)", text)[1])


def measure(results, hosts, ports, rounds, seconds):
    hosts = list(hosts)
    for _ in range(rounds):
        random.shuffle(hosts)
        for host in hosts:
            results.add("TCP stream", ports, host.name, stream(host, seconds))
        random.shuffle(hosts)
        for host in hosts:
            results.add("small packets", ports, host.name, small_packets(host, seconds))
        random.shuffle(hosts)
        for host in hosts:
            results.add("round trip", ports, host.name, round_trip(host, seconds))


# -- runsc: the programs run in the guest ---------------------------------------------------------
def import_image(lab):
    """lab/bench: busybox, iperf3, sockperf and the libraries that they are linked to."""
    root = lab.path("image")
    files = set()
    for program in ("iperf3", "sockperf"):
        path = shutil.which(program)
        files.add(path)
        listed = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
        files.update(re.findall(r"(/\S+) \(0x", listed))
    for file in files:
        at = root + (file if file.startswith(("/lib", "/usr")) else "/bin/" + os.path.basename(file))
        os.makedirs(os.path.dirname(at), exist_ok=True)
        shutil.copy(file, at)
    tar = subprocess.run(["tar", "-C", root, "-c", "."], check=True, capture_output=True).stdout
    subprocess.run(["docker", "import", "-c", 'CMD ["sleep", "1000000"]', "-c", "ENV PATH=/bin:/usr/bin", "-",
                    "lab/bench"], input=tar, check=True, env=lab.environment(), stdout=subprocess.DEVNULL)


def guest(host, container):
    """The command prefix of a program in a container."""
    def client(argv):
        environment = host.lab.environment()
        return ["env", *[f"{key}={environment[key]}" for key in ("DOCKER_HOST", "PATH", "HOME")],
                "docker", "exec", container, *argv]
    return client


def runsc(results, agentgate, docker, amount):
    name, clients = "guest", {}
    for host in (agentgate, docker):
        import_image(host.lab)
        host.run_container(name, runtime="runsc", image="lab/bench")
        if "iperf3" not in host.lab.processes:
            host.serve()
        clients[host] = guest(host, name)
    agentgate.lab.docker("pause", name)
    agentgate.arm(name)
    agentgate.lab.docker("unpause", name)
    for _ in range(amount.rounds):
        pair = [agentgate, docker]
        random.shuffle(pair)
        for host in pair:
            results.add("TCP stream, runsc", 1, host.name, stream(host, amount.seconds, clients[host]))
        random.shuffle(pair)
        for host in pair:
            results.add("round trip, runsc", 1, host.name, round_trip(host, amount.seconds, clients[host]))
