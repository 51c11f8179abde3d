# SPDX-License-Identifier: GPL-2.0-or-later
"""The whole story on a real engine: closed, refused, released, disarmed. Used by scripts/demo.

usage: story.py [--engine 20.10|26.1|28.5] [--runtime runsc|runc] [--json FILE]
Exit 0 only if everything was as it must be.
"""
import argparse
import platform
import time

from common import *  # noqa: F401,F403


# Where a released container's frames must be seen, and its neighbour's answers.
MAY_PASS = {"bridge": ["allowed-udp", "allowed-tcp6", "own-udp-out"], "uplink": ["allowed-udp", "allowed-tcp6"],
            "neighbour": ["control"]}
LAYER_ONE_STOPS = ("spoof", "vlan", "qinq", "stp", "lldp", "eapol", "lacp", "raw-", "pppoe", "mpls", "broadcast",
                   "multicast", "dhcp", "own-udp-neighbour-direct")


def say(text):
    print(text, flush=True)


def run_probes(world, name, list_of_probes):
    seen = world.lab.probe(name, [probe[1] for probe in list_of_probes])
    return list(zip(list_of_probes, seen))


def tell(world, engine, runtime):
    lab = world.lab
    story = {"engine": engine, "runtime": runtime, "kernel": platform.release()}
    problems = []

    def must(condition, text):
        if not condition:
            problems.append(text)
            say(f"   WRONG: {text}")

    say("1. Two containers start on the network `agents` (driver agentgate). They run at once.")
    lab.container("a1", "agents", runtime)
    lab.container("a2", "agents", "runc", command=("sh", "-c", "while :; do echo lab | nc -l -p 7000; done"))
    start_host_services(world)
    matrix = probes(world.attachment("a2")["IPAddress"])

    say("2. Control: the same tries from a container on Docker's own bridge network.")
    lab.container("control", "bridge", runtime, "--dns", DNS)
    control = run_probes(world, "control", [p for p in matrix if p[2] is not None and
                                            not (runtime == "runsc" and p[1][0] == "name")])
    for probe, seen in control:
        must(seen == probe[2], f"control: {probe[0]}: expected {probe[2]}, seen {seen}")
    story["control"] = {"probes": [{"what": p[0], "expected": p[2], "seen": s} for p, s in control]}
    lab.docker("rm", "-f", "control")

    say("3. Closed: a1 tries everything; raw frames are sent from its side and counted outside.")
    closed = run_probes(world, "a1", matrix)
    for probe, seen in closed:
        must(not seen, f"closed, but reached: {probe[0]}")
    counts, sent = world.send_frames(world.sender("a1", "a2"))
    leaked = total(counts)
    must(leaked == 0, f"frames leaked while closed: {counts}")
    say(f"   {sum(sent.values())} frames of {len(sent)} kinds sent, {leaked} came out")
    story["closed"] = {"frames_sent": sum(sent.values()), "frame_kinds": len(sent),
                       "frames_leaked": leaked,
                       "probes": [{"what": p[0], "expected": False, "seen": s} for p, s in closed]}
    checks = [world.state("a1")]

    say("4. Refused: arm of a container that is not paused.")
    code, report, _ = world.ag("arm", "a1")
    must(code == 1 and report.get("code") == "GATED_UNARMED", f"arm unpaused: exit {code}")
    say(f"   exit {code}: {report.get('reason')}")
    story["refused"] = {"exit": code, "reason": report.get("reason")}

    say("5. docker pause a1 && agentgate arm a1 && docker unpause a1")
    code, report, error = world.arm_paused("a1")
    must(code == 0 and report.get("outcome") == "released", f"arm: exit {code}: {report.get('reason')} {error}")
    for step in report.get("steps", []):
        say(f"   {step['outcome']:<7} {step['step']:>2} {step['name']:<20} {step['ms']:>8.3f} ms")
    say(f"   {report.get('outcome')} in {report.get('ms')} ms")
    story["arm"] = {"exit": code, "ms": report.get("ms"), "steps": report.get("steps", [])}

    say("6. Released: the same tries.")
    seen, delay = world.settled("a1", [probe[1] for probe in matrix], [probe[3] for probe in matrix])
    released = list(zip(matrix, seen))
    say(f"   as it stays after {delay:.1f} s")
    for probe, seen in released:
        must(seen == probe[3], f"released: {probe[0]}: expected {probe[3]}, seen {seen}")
    story["released"] = {"probes": [{"what": p[0], "expected": p[3], "seen": s} for p, s in released],
                         "settled_s": round(delay, 3)}
    checks.append(world.state("a1"))
    code, _, error = world.arm_paused("a2")
    must(code == 0, f"arm of the neighbour: {error}")
    counts, _ = world.send_frames(world.sender("a1", "a2"), meanwhile=lambda: run_probes(world, "a2", matrix[:2]))
    # The same counters as in step 3: what may pass is seen by each of them.
    passed = {where: sum(kinds.get(kind, 0) for kind in MAY_PASS[where]) for where, kinds in counts.items()}
    for where, kinds in counts.items():
        for kind in MAY_PASS[where]:
            must(kinds.get(kind), f"released, but {kind} was not seen on the {where}: {kinds}")
    beyond = total({where: counts[where] for where in ("uplink", "neighbour")}) - passed["uplink"]
    must(beyond == 0, f"frames beyond the policy while released: {counts}")
    wrong = [kind for kind in counts["bridge"] if kind.startswith(LAYER_ONE_STOPS)]
    must(not wrong, f"frames on the bridge that are not the container's own: {wrong}")
    neighbour = run_probes(world, "a1", [matrix[-1]])
    must(not neighbour[0][1], "two released neighbours reach each other")
    story["released"]["frames_beyond_policy"] = beyond
    story["released"]["frames_passed"] = passed

    say("7. agentgate disarm a1")
    code, _, error = world.ag("disarm", "a1")
    must(code == 0, f"disarm: {error}")
    disarmed = run_probes(world, "a1", matrix)
    for probe, seen in disarmed:
        must(not seen, f"disarmed, but reached: {probe[0]}")
    story["disarmed"] = {"probes": [{"what": p[0], "expected": False, "seen": s} for p, s in disarmed]}
    checks.append(world.state("a1"))
    story["check"] = checks
    must(checks == ["closed", "released", "closed"], f"check said {checks}")

    lab.docker("rm", "-f", "a1", "a2")
    lab.docker("network", "rm", "agents")
    left = [link for link in world.links() if link.startswith(("agn", "agp", "agc"))]
    must(not left, f"links left: {left}")
    story["problems"] = problems
    story["ok"] = not problems

    say("")
    say(f"{'tried':<44} {'closed':<9} {'released':<9} {'disarmed':<9}")
    word = {True: "reached", False: "-"}
    for number, probe in enumerate(matrix):
        say(f"{probe[0]:<44} {word[closed[number][1]]:<9} {word[released[number][1]]:<9} "
            f"{word[disarmed[number][1]]:<9}")
    say(f"{'check says':<44} {checks[0]:<9} {checks[1]:<9} {checks[2]:<9}")
    say(f"\n{'Everything as it must be.' if story['ok'] else 'NOT AS IT MUST BE: ' + '; '.join(problems)}")
    return story


def main():
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="28.5", choices=["20.10", "26.1", "28.5"])
    parser.add_argument("--runtime", default="runsc", choices=["runsc", "runc"])
    parser.add_argument("--json", metavar="FILE", help="write what was seen to FILE")
    options = parser.parse_args()
    started = time.time()
    with World(options.engine) as world:
        say(f"Lab: engine {options.engine}, runtime {options.runtime}, kernel {platform.release()}, "
            f"up in {time.time() - started:.1f} s")
        story = tell(world, options.engine, options.runtime)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(story, file, indent=1)
    sys.exit(0 if story["ok"] else 1)


if __name__ == "__main__":
    main()
