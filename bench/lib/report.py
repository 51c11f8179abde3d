# SPDX-License-Identifier: GPL-2.0-or-later
"""The table and the plots, from the results alone."""
import os
import platform
import time

from . import plot
from .results import METRICS

# What is asked of agentgate: (metric, ports or None for each, baseline or None for the value itself,
# "<=" or ">=", bound). Ratios are agentgate's to the baseline's.
BOUNDS = (
    ("docker run", None, "docker-bridge", "<=", 1.0),
    ("teardown of all", None, "docker-bridge", "<=", 1.0),
    ("arm", 1, None, "<=", 8),
    ("arm", 1, "script", "<=", 1 / 40),
    ("arm", 1000, "script", "<=", 1 / 200),
    ("arm", 1000, "agentgate at 1", "<=", 1.3),
    ("arm step 11", None, None, "<=", 1),
    ("disarm to last packet", None, None, "<=", 5),
    ("refresh", None, None, "<=", 50),
    ("packets lost in refreshes", None, None, "<=", 0),
    ("TCP stream", None, "docker-bridge", ">=", 0.97),
    ("small packets", None, "docker-bridge", ">=", 0.90),
    ("TCP stream", 1000, "agentgate at 1", ">=", 0.95),
    ("small packets", 1000, "agentgate at 1", ">=", 0.95),
    ("small packets", 100, "script", ">=", 10),
    ("TCP stream, runsc", None, "docker-bridge", ">=", 0.98),
    ("memory", None, None, "<=", 25),
    ("CPU idle", None, None, "<=", 0),
    ("start", None, None, "<=", 1000),
)
PLOTS = ("attach", "arm", "check", "refresh", "memory", "small packets")


def short(value):
    if value is None:
        return ""
    if value == 0:
        return "0"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"


def table(head, rows):
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in lines)


def measured(results):
    rows = [(r["metric"], r["ports"], r["contestant"], short(r["median"]), short(r["p95"]), r["unit"], r["n"])
            for r in results.rows()]
    order = {name: number for number, name in enumerate(METRICS)}
    rows.sort(key=lambda r: (order[r[0]], r[1], r[2]))
    return table(["what", "ports", "contestant", "median", "p95", "unit", "n"], rows)


def judged(results):
    ratios = {(r["metric"], r["ports"], r["baseline"]): r["ratio"] for r in results.ratios()}
    own = {(r["metric"], r["ports"]): r["median"] for r in results.rows() if r["contestant"] == "agentgate"}
    rows = []
    for metric, only, baseline, sign, bound in BOUNDS:
        for ports in sorted(p for m, p in own if m == metric):
            if only not in (None, ports):
                continue
            value = own[metric, ports] if baseline is None else ratios.get((metric, ports, baseline))
            if value is None:
                continue
            good = value <= bound if sign == "<=" else value >= bound
            against = f"to {baseline}" if baseline else METRICS[metric][0]
            rows.append((metric, ports, against, f"{sign} {short(bound)}", short(value), "yes" if good else "**no**"))
    return table(["what", "ports", "ratio or unit", "bound", "measured", "met"], rows)


def other_ratios(results):
    rows = [(r["metric"], r["ports"], r["baseline"], short(r["ratio"])) for r in results.ratios()]
    return table(["what", "ports", "agentgate to", "ratio"], rows)


def steps(results):
    ports = sorted(results.steps)
    if not ports:
        return ""
    import statistics
    rows = [[name, *[short(statistics.median(results.steps[p][name])) for p in ports]]
            for name in results.steps[ports[0]]]
    return table(["step of an arm, ms", *[f"{p} ports" for p in ports]], rows)


def machine():
    with open("/proc/cpuinfo") as file:
        cores = file.read().count("processor\t")
    load = " ".join(f"{one:.1f}" for one in os.getloadavg())
    return f"Kernel {platform.release()}, {cores} cores, load averages when written {load}, {time.strftime('%Y-%m-%d')}."


def markdown(results):
    parts = [("Bounds", judged(results)), ("Medians", measured(results)), ("Ratios", other_ratios(results)),
             ("Steps of an arm", steps(results))]
    return machine() + "\n\n" + "\n\n".join(f"### {name}\n\n{text}" for name, text in parts if text)


BEGIN, END = "<!-- bench/run writes from here -->", "<!-- to here -->"


def write_documents(results, folder):
    for metric in PLOTS:
        series = {}
        for r in results.rows():
            if r["metric"] == metric:
                series.setdefault(r["contestant"], []).append((r["ports"], r["median"], r["p95"]))
        if series:
            name = metric.replace(" ", "-") + ".svg"
            with open(os.path.join(folder, name), "w") as file:
                file.write(plot.growth(metric, METRICS[metric][0], series))
    path = os.path.join(folder, "README.md")
    with open(path) as file:
        text = file.read()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    with open(path, "w") as file:
        file.write(f"{before}{BEGIN}\n{markdown(results)}\n{END}{after}")
