# SPDX-License-Identifier: GPL-2.0-or-later
"""The daemon with many released ports: arm, refresh, memory, processor time, start, instructions."""
import ctypes
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time

from .api import post
from .hosts import ALLOWED, POLICY, SERVER, wait_for

METRICS = ("arm, all released", "disarm to last packet", "refresh", "packets lost in refreshes", "memory",
           "memory after arms", "CPU idle", "CPU at 50 arms/s", "arms/s of 50 asked", "start")
BULK_DNS = "192.0.2.55"
TICKS = os.sysconf("SC_CLK_TCK")


def process(scale):
    """agentgated's pid: nsenter becomes it."""
    return scale.lab.processes["agentgated"].pid


def resident(pid):
    with open(f"/proc/{pid}/status") as file:
        return int(re.search(r"VmRSS:\s+(\d+)", file.read())[1]) / 1024


def seconds_of_cpu(pid):
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def cpu(pid, seconds, work=None):
    """Per cent of one core while work() runs, or for so many seconds."""
    before, start = seconds_of_cpu(pid), time.perf_counter()
    if work:
        work()
    else:
        time.sleep(seconds)
    return 100 * (seconds_of_cpu(pid) - before) / (time.perf_counter() - start)


def rearm(scale, container):
    scale.disarm(container)
    return scale.arm(container)


def paced(scale, per_second, seconds, cells):
    """Arms at a steady rate from two threads, over all cells but the measured one."""
    numbers = iter(range(int(per_second * seconds)))
    lock, start, errors = threading.Lock(), time.perf_counter(), []

    def worker():
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            time.sleep(max(0.0, start + number / per_second - time.perf_counter()))
            try:
                rearm(scale, f"c{number % cells + 1}")
            except (RuntimeError, OSError) as error:
                errors.append(error)
                return
    threads = [threading.Thread(target=worker) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return int(per_second * seconds) / (time.perf_counter() - start)


class LastPacket(threading.Thread):
    """When the last packet came in at the far end of the uplink, by the kernel's clock."""
    SO_TIMESTAMPNS = 35

    def __init__(self, lab):
        super().__init__(daemon=True)
        self.lab, self.last, self.count, self.stop = lab, 0.0, 0, False
        self.ready = threading.Event()

    def run(self):
        libc = ctypes.CDLL(None, use_errno=True)
        with open(self.lab.netns("internet")) as file:  # of this thread only
            if libc.setns(file.fileno(), 0x40000000) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800)) as tap:
            tap.bind(("far0", 0x0800))
            tap.setsockopt(socket.SOL_SOCKET, self.SO_TIMESTAMPNS, 1)
            tap.settimeout(0.05)
            self.ready.set()
            while not self.stop:
                try:
                    data, extra, _, _ = tap.recvmsg(96, 128)
                except TimeoutError:
                    continue
                if data[23] != 17:  # UDP
                    continue
                seconds, ns = struct.unpack("qq", extra[0][2])
                self.last, self.count = seconds + ns / 1e9, self.count + 1


SENDER = f"""
import socket, time
to = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end = time.time() + 0.4
while time.time() < end:
    try:
        to.sendto(b"x", ("{SERVER}", 5201))
    except OSError:
        pass  # refused
    time.sleep(0.0001)
"""


def disarm_to_last_packet(scale):
    """From the request of a disarm until the last packet of a sending port came out: ms. 0 when none did
    after the request, None when the sender had ended by itself."""
    watch = LastPacket(scale.lab)
    watch.start()
    assert watch.ready.wait(5)
    sender = subprocess.Popen(scale.client([sys.executable, "-c", SENDER]))
    wait_for("packets", lambda: watch.count > 50, 10, 0.002)
    start = time.time()
    scale.disarm("c0")
    sending = sender.poll() is None  # else it stopped by itself
    sender.wait()
    watch.stop = True
    watch.join()
    scale.arm("c0")
    return max(0.0, (watch.last - start) * 1000) if sending else None


# -- refresh --------------------------------------------------------------------------------------
def bulk_policy(names, prefixes, turn):
    """Every turn takes some prefixes away and adds others."""
    half = prefixes // 2
    allow = list(POLICY["allow"]) + [{"name": f"n{n}.bulk.test", "services": ["tcp/443"]} for n in range(names - 1)]
    for n in range(half):
        at = (2 * n + (turn % 2 if n < 50 else 0)) * 16  # of 198.18.0.0/15, never next to each other
        allow.append({"cidr": f"198.{18 + (at >> 16)}.{at >> 8 & 255}.{at & 255}/28", "services": ["tcp/443"]})
        allow.append({"cidr": f"2001:db8:{4096 + 2 * n:x}::/48", "services": ["tcp/443"]})
    return dict(POLICY, allow=allow)


def start_bulk_dns(scale, names):
    if "dns-bulk" in scale.lab.processes:
        return
    scale.lab.run(["ip", "addr", "add", BULK_DNS + "/32", "dev", "lo"], "internet")
    records = [f"--host-record=n{n}.bulk.test,192.0.2.{100 + n % 100}" for n in range(names)]
    scale.lab.spawn("dns-bulk", scale.lab.nsenter(
        ["dnsmasq", "--keep-in-foreground", "--no-resolv", "--no-hosts", "--bind-interfaces", "--pid-file=",
         "--user=root", "--local=/test/", "--except-interface=nothing", f"--listen-address={BULK_DNS}",
         f"--host-record=api.allowed.test,{ALLOWED}", *records], "internet"))
    wait_for("names", lambda: f"{BULK_DNS}:53" in scale.lab.run(["ss", "-lnuH"], "internet").stdout)


def refresh_once(scale, amount, turn):
    scale.lab.policy("lab", bulk_policy(amount.names, amount.prefixes, turn))
    answer, ms = post(scale.control, "/v1/refresh", {})
    if [one["ok"] for one in answer["policies"]] != [True]:
        raise RuntimeError(f"refresh: {json.dumps(answer)[:500]}")
    return ms


def refresh(results, scale, ports, amount):
    for turn in range(2):  # the first brings the names
        refresh_once(scale, amount, turn)
    for turn in range(amount.repeat):
        results.add("refresh", ports, "agentgate", refresh_once(scale, amount, turn))
    # And with an allowed flow under way; its receiver counts.
    flow = subprocess.Popen(scale.client(["iperf3", "-c", SERVER, "-u", "-b", "2M", "-l", "200", "-t", "3", "-J"]),
                            stdout=subprocess.PIPE, text=True)
    time.sleep(0.7)
    for turn in range(4):
        refresh_once(scale, amount, turn)
    answer = json.loads(flow.communicate()[0])
    total = answer["end"]["sum"]
    if total["packets"] < 1000:
        raise RuntimeError(f"flow in refreshes: {total}")
    results.add("packets lost in refreshes", ports, "agentgate", total["lost_packets"])
    scale.lab.policy("lab", POLICY)
    post(scale.control, "/v1/refresh", {})


# -- start ----------------------------------------------------------------------------------------
def start(results, scale, ports):
    """From the start of the process until it has verified all ports."""
    scale.lab.stop("agentgated")
    begin = time.perf_counter()
    scale.start(BULK_DNS, every=0.002)
    results.add("start", ports, "agentgate", (time.perf_counter() - begin) * 1000)
    scale.lab.wait_agentgated()


def measure(results, scale, ports, amount):
    start_bulk_dns(scale, amount.names)
    if "iperf3" not in scale.lab.processes:
        scale.serve()
    for _ in range(3 if amount.repeat < 10 else 10):
        start(results, scale, ports)
    scale.arm("c0")
    time.sleep(1)
    results.add("memory", ports, "agentgate", resident(process(scale)))
    results.add("CPU idle", ports, "agentgate", cpu(process(scale), amount.idle))
    for _ in range(amount.repeat):
        results.add("arm, all released", ports, "agentgate", rearm(scale, "c0")[1])
    taken = [disarm_to_last_packet(scale) for _ in range(amount.repeat)]
    for ms in taken:
        if ms is not None:
            results.add("disarm to last packet", ports, "agentgate", ms)
    results.add("CPU at 50 arms/s", ports, "agentgate", cpu(process(scale), 0, lambda: results.add(
        "arms/s of 50 asked", ports, "agentgate", paced(scale, 50, amount.idle, scale.filled - 1))))
    refresh(results, scale, ports, amount)
    results.add("memory after arms", ports, "agentgate", resident(process(scale)))


# -- instructions ---------------------------------------------------------------------------------
def instructions(results, scale, ports, repeat, keep=None):
    """What callgrind counts for an arm: independent of the machine's speed, not of its kernel."""
    lab = scale.lab
    out = lab.path("callgrind.out")
    lab.stop("agentgated")
    scale.start(seconds=600, wrap=["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"])
    pid = str(process(scale))

    def tell(*what):
        lab.run(["callgrind_control", *what, pid], env=dict(lab.environment(), PATH="/usr/sbin:/usr/bin:/sbin:/bin"))
    rearm(scale, "c0")
    scale.disarm("c0")
    for _ in range(repeat):
        tell("--instr=on")
        tell("--zero")
        scale.arm("c0")
        tell("--dump")
        tell("--instr=off")
        scale.disarm("c0")
    lab.stop("agentgated", seconds=60)
    dumps = sorted((f for f in os.listdir(lab.dir) if f.startswith("callgrind.out.")),
                   key=lambda name: int(name.rpartition(".")[2]))
    for name in dumps:
        with open(lab.path(name)) as file:
            total = re.search(r"^(?:summary|totals): (\d+)", file.read(), re.M)
        if total and int(total[1]) > 1000:
            results.add("arm, instructions", ports, "agentgate", int(total[1]) / 1e6)
        if keep:
            shutil.copy(lab.path(name), keep)
    scale.start()
