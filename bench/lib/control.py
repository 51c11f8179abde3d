# SPDX-License-Identifier: GPL-2.0-or-later
"""Attach, arm, disarm, check, teardown: a real engine for each contestant."""
import concurrent.futures
import random
import time


def timed_run(host, number):
    """docker run and docker rm, wall time in ms."""
    start = time.perf_counter()
    host.run_container(f"r{number}")
    up = time.perf_counter()
    host.lab.docker("rm", "-f", f"r{number}")
    return (up - start) * 1000, (time.perf_counter() - up) * 1000


def attach(results, hosts, ports, repeat, runs):
    """The hosts are filled to `ports` already."""
    agentgate = hosts["agentgate"]
    for round_ in range(repeat):
        results.add("attach", ports, "agentgate", agentgate.attach(5000 + round_))
        agentgate.detach(5000 + round_)
    for round_ in range(runs):
        pair = [hosts["agentgate"], hosts["docker-bridge"]]
        random.shuffle(pair)
        for host in pair:
            run, remove = timed_run(host, round_)
            results.add("docker run", ports, host.name, run)
            results.add("docker rm", ports, host.name, remove)


def arm(results, hosts, ports, repeat, script_repeat):
    """Each arm starts from a closed port, each disarm from a released one."""
    agentgate, script = hosts["agentgate"], hosts["script"]
    for round_ in range(repeat + 1):
        report, ms = agentgate.arm("measured")
        check = agentgate.check("measured")
        disarm = agentgate.disarm("measured")
        if round_ == 0:  # names are resolved, programs in the cache
            continue
        results.add("arm", ports, "agentgate", ms)
        results.add("arm step 11", ports, "agentgate", report["steps"][10]["ms"])
        results.add("check", ports, "agentgate", check)
        results.add("disarm", ports, "agentgate", disarm)
        results.add_steps(ports, report)
        if round_ <= script_repeat:
            results.add("arm", ports, "script", script.ask("arm", "measured"))
            results.add("disarm", ports, "script", script.ask("disarm", "measured"))


def teardown(results, hosts, count, rounds):
    pair = [hosts["agentgate"], hosts["docker-bridge"]]
    for _ in range(rounds):
        random.shuffle(pair)
        for host in pair:
            names = [f"t{n}" for n in range(count)]
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                list(pool.map(host.run_container, names))
            start = time.perf_counter()
            host.lab.docker("rm", "-f", *names, timeout=600)
            results.add("teardown of all", count, host.name, time.perf_counter() - start)
