# SPDX-License-Identifier: GPL-2.0-or-later
"""Samples, medians, ratios: what the suites fill and the report reads."""
import json
import math
import statistics

# metric: (unit, contestants to compare with, how). "medians": ratio of medians. "rounds": median of
# the ratios within a round, which a machine that others use as well shifts less.
METRICS = {
    "attach": ("ms", (), "medians"),
    "docker run": ("ms", ("docker-bridge",), "medians"),
    "docker rm": ("ms", ("docker-bridge",), "medians"),
    "teardown of all": ("s", ("docker-bridge",), "medians"),
    "arm": ("ms", ("script",), "medians"),
    "arm, all released": ("ms", (), "medians"),
    "arm step 11": ("ms", (), "medians"),
    "disarm": ("ms", ("script",), "medians"),
    "disarm to last packet": ("ms", (), "medians"),
    "check": ("ms", (), "medians"),
    "refresh": ("ms", (), "medians"),
    "packets lost in refreshes": ("packets", (), "medians"),
    "TCP stream": ("Gb/s", ("docker-bridge", "plain-bridge", "script"), "rounds"),
    "small packets": ("kpps", ("docker-bridge", "plain-bridge", "script"), "rounds"),
    "round trip": ("us", ("docker-bridge", "plain-bridge", "script"), "rounds"),
    "TCP stream, runsc": ("Gb/s", ("docker-bridge",), "rounds"),
    "round trip, runsc": ("us", ("docker-bridge",), "rounds"),
    "memory": ("MB", (), "medians"),
    "memory after arms": ("MB", (), "medians"),
    "CPU idle": ("%", (), "medians"),
    "CPU at 50 arms/s": ("%", (), "medians"),
    "arms/s of 50 asked": ("/s", (), "medians"),
    "start": ("ms", (), "medians"),
    "arm, instructions": ("million", (), "medians"),
}
MAY_BE_ZERO = {"CPU idle", "packets lost in refreshes", "disarm to last packet"}
GROWTH = ("attach", "docker run", "arm", "arm, all released", "disarm", "check", "refresh", "memory", "start",
          "TCP stream", "small packets", "round trip")


class Results:
    def __init__(self):
        self.samples = {}  # (metric, ports, contestant) -> values in the order of the rounds
        self.steps = {}    # ports -> {step of an arm: [ms]}

    def add(self, metric, ports, contestant, value):
        assert metric in METRICS, metric
        self.samples.setdefault((metric, ports, contestant), []).append(value)

    def add_steps(self, ports, report):
        for step in report["steps"]:
            name = f"{step['step']} {step['name']}"
            self.steps.setdefault(ports, {}).setdefault(name, []).append(step["ms"])

    def median(self, metric, ports, contestant="agentgate"):
        values = self.samples.get((metric, ports, contestant))
        return statistics.median(values) if values else None

    def rows(self):
        for (metric, ports, contestant), values in self.samples.items():
            ordered = sorted(values)
            yield {"metric": metric, "ports": ports, "contestant": contestant, "unit": METRICS[metric][0],
                   "n": len(values), "median": round(statistics.median(values), 4),
                   "p95": round(ordered[min(len(ordered) - 1, math.ceil(0.95 * len(ordered)) - 1)], 4)}

    def ratios(self):
        """agentgate to each baseline; and agentgate to itself at the smallest number of ports."""
        for metric, (_, baselines, how) in METRICS.items():
            ports_of = sorted(p for m, p, c in self.samples if (m, c) == (metric, "agentgate"))
            for ports in ports_of:
                own = self.samples[metric, ports, "agentgate"]
                for baseline in baselines:
                    other = self.samples.get((metric, ports, baseline))
                    if not other:
                        continue
                    if how == "rounds" and len(own) == len(other):
                        ratio = statistics.median(a / b for a, b in zip(own, other) if b)
                    else:
                        ratio = statistics.median(own) / statistics.median(other)
                    yield {"metric": metric, "ports": ports, "contestant": "agentgate", "baseline": baseline,
                           "ratio": round(ratio, 5)}
                first = self.median(metric, ports_of[0])
                if metric in GROWTH and ports != ports_of[0] and first:
                    yield {"metric": metric, "ports": ports, "contestant": "agentgate",
                           "baseline": f"agentgate at {ports_of[0]}",
                           "ratio": round(self.median(metric, ports) / first, 5)}

    def problems(self, expected):
        """What is missing or cannot be; nothing about how fast it was."""
        out = [f"{key}: no number" for key in sorted(expected) if key not in self.samples]
        for key, values in self.samples.items():
            low = 0 if key[0] in MAY_BE_ZERO else 1e-9
            wrong = [v for v in values if not (isinstance(v, (int, float)) and math.isfinite(v) and v >= low)]
            if wrong:
                out.append(f"{key}: implausible: {wrong[:3]}")
        return out

    def save(self, path):
        with open(path, "w") as file:
            json.dump([*self.rows(), *self.ratios()], file, indent=1)
            file.write("\n")
