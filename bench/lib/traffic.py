# SPDX-License-Identifier: GPL-2.0-or-later
"""What a released port carries: a TCP stream, small packets, round trips. To the far side, routed."""
import json
import random
import re
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


def measure_runsc(results, pairs, rounds, seconds):
    """pairs: (host, container that has the programs, released)."""
    pairs = list(pairs)
    for _ in range(rounds):
        random.shuffle(pairs)
        for host, container in pairs:
            def client(argv, host=host, container=container):
                return ["env", "DOCKER_HOST=" + host.lab.environment()["DOCKER_HOST"],
                        "PATH=" + host.lab.environment()["PATH"], "docker", "exec", container, *argv]
            results.add("TCP stream, runsc", 1, host.name, stream(host, seconds, client))
            results.add("round trip, runsc", 1, host.name, round_trip(host, seconds, client))
