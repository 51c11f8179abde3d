# SPDX-License-Identifier: GPL-2.0-or-later
"""The baseline "script": the same gate made by running docker, ip, bridge, nft and iptables.

Written from the published description of the approach (docs/performance/README.md). Runs on the host;
reads "arm NAME" or "disarm NAME" lines and answers each with the milliseconds it took. It stays
running between them, so the start of an interpreter is not counted against it.
"""
import hashlib
import json
import subprocess
import sys
import time

NETWORK, GATE, MARK = "agents-net", "agents_gate", "0x1"
RESOLVERS = ("192.0.2.53", "192.0.2.54")
ENDPOINTS = (("192.0.2.80", "tcp"), ("192.0.2.80", "udp"))
PORTS = "443,5201,11111"  # the API's, and the ones that the benchmark measures through


class Refused(Exception):
    pass


def run(*argv, feed=None, check=True):
    done = subprocess.run(argv, input=feed, capture_output=True, text=True, close_fds=False)
    if check and done.returncode != 0:
        raise Refused(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout


def nft(text):
    return run("nft", "-f", "-", feed=text)


def require(condition, text):
    if not condition:
        raise Refused(text)


def install_gate(bridge):
    nft(f"""table netdev {GATE} {{
  set released {{ type ether_addr; }}
  chain ingress {{ type filter hook ingress device "{bridge}" priority 0; policy drop;
    ether saddr @released meta mark {MARK} accept; }}
  chain egress {{ type filter hook egress device "{bridge}" priority 0; policy drop;
    ether daddr @released accept; }}
}}""")


def port_table(name, veth):
    return f"""table netdev as_port_{name} {{
  chain ingress {{ type filter hook ingress device "{veth}" priority 0; policy drop; }}
  chain egress {{ type filter hook egress device "{veth}" priority 0; policy drop; }}
}}
"""


def accept_rules(name, mac, ip, gateway):
    table = f"netdev as_port_{name}"
    return f"""add rule {table} ingress ether saddr {mac} ip saddr {ip} meta mark set {MARK} accept
add rule {table} ingress ether saddr {mac} arp saddr ip {ip} arp daddr ip {gateway} meta mark set {MARK} accept
add rule {table} egress ether daddr {mac} ip daddr {ip} accept
add rule {table} egress ether daddr {mac} ether type arp accept
"""


def iptables_rules(name, ip, bridge, veth):
    """(chain, rule) in the order in which they must stand; what a container adds, all told ten."""
    tag = ["-m", "comment", "--comment", f"agent-net:{name}"]
    user = []
    for resolver in RESOLVERS:
        for protocol in ("udp", "tcp"):
            user.append(["-s", ip, "-d", resolver, "-p", protocol, "--dport", "53", *tag, "-j", "ACCEPT"])
    for address, protocol in ENDPOINTS:
        user.append(["-s", ip, "-d", address, "-p", protocol, "-m", "multiport", "--dports", PORTS, *tag,
                     "-j", "ACCEPT"])
    user.append(["-s", ip, *tag, "-j", "DROP"])
    user.append(["-o", bridge, "-m", "physdev", "--physdev-in", veth, "--physdev-is-bridged", *tag, "-j", "DROP"])
    host = [["-s", ip, "-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", *tag, "-j", "ACCEPT"],
            ["-s", ip, *tag, "-j", "DROP"]]
    return [("DOCKER-USER", rule) for rule in user] + [("INPUT", rule) for rule in host]


def engine():
    with open("/etc/docker/daemon.json", "rb") as file:
        return run("docker", "info", "-f", "{{.ID}}"), hashlib.sha256(file.read()).hexdigest()


def inspect(name):
    return json.loads(run("docker", "inspect", name))[0]


def require_paused(container):
    require(container["State"]["Running"] and container["State"]["Paused"], "not paused")
    require(list(container["NetworkSettings"]["Networks"]) == [NETWORK], "on another network")
    require(container["HostConfig"]["RestartPolicy"]["Name"] == "no", "restart policy")


def tagged(chain, name):
    return [line for line in run("iptables", "-w", "-S", chain).splitlines() if f'agent-net:{name}"' in line
            or f"agent-net:{name} " in line]


def elements():
    return run("nft", "list", "set", "netdev", GATE, "released")


def clean(name, mac, ip, bridge, veth):
    if mac in elements():
        nft(f"delete element netdev {GATE} released {{ {mac} }}")
    if f"as_port_{name}\n" in run("nft", "list", "tables", "netdev") + "\n":
        run("nft", "delete", "table", "netdev", f"as_port_{name}")
    for chain in ("DOCKER-USER", "INPUT"):
        for line in tagged(chain, name):
            run("iptables", "-w", "-D", *[word.strip('"') for word in line.split()[1:]])
    if any(n.get("dst") == ip and "PERMANENT" in n["state"]
           for n in json.loads(run("ip", "-j", "neigh", "show", "dev", bridge))):
        run("ip", "neigh", "del", ip, "dev", bridge)
    if any(f["mac"] == mac and "static" in f.get("flags", []) + [f.get("state")]
           for f in json.loads(run("bridge", "-j", "fdb", "show", "dev", veth))):
        run("bridge", "fdb", "del", mac, "dev", veth, "master", "static")


def arm(name):
    # 1 to 5
    with open("/proc/self/status") as status:
        effective = [int(line.split()[1], 16) for line in status if line.startswith("CapEff")]
    require(effective[0] >> 12 & 1, "CAP_NET_ADMIN")
    run("docker", "version", "-f", "{{.Server.Version}}")
    before = engine()
    network = json.loads(run("docker", "network", "inspect", NETWORK))[0]
    bridge = "br-" + network["Id"][:12]
    run("nft", "list", "table", "netdev", GATE)
    with open("/proc/sys/net/bridge/bridge-nf-call-iptables") as file:
        require(file.read().strip() == "1", "bridge-nf-call-iptables")
    container = inspect(name)
    require_paused(container)
    attachment = container["NetworkSettings"]["Networks"][NETWORK]
    mac, ip, pid = attachment["MacAddress"], attachment["IPAddress"], str(container["State"]["Pid"])
    # 7, since 6 needs the veth for its FDB entry
    inside = json.loads(run("nsenter", "-t", pid, "-n", "ip", "-j", "addr", "show"))
    links = [link for link in inside if link["ifname"] != "lo"]
    require(len(links) == 1 and links[0]["address"] == mac, "links of the container")
    require(any(a["local"] == ip for a in links[0]["addr_info"]), "address of the container")
    host = [link for link in json.loads(run("ip", "-j", "link", "show", "master", bridge))
            if link["ifindex"] == links[0]["link_index"]]
    require(len(host) == 1, "veth")
    veth = host[0]["ifname"]
    # 6
    clean(name, mac, ip, bridge, veth)
    # 8
    nft(port_table(name, veth))
    require("policy drop" in run("nft", "list", "table", "netdev", f"as_port_{name}"), "port table")
    require(mac not in elements(), "still released")
    # 9
    for flag in ("isolated on", "learning off", "locked on"):
        run("bridge", "link", "set", "dev", veth, *flag.split())
    run("bridge", "fdb", "replace", mac, "dev", veth, "master", "static")
    run("ip", "neigh", "replace", ip, "lladdr", mac, "dev", bridge, "nud", "permanent")
    run("getent", "ahostsv4", "localhost")  # stands for the look-up of the endpoints' names
    rules = iptables_rules(name, ip, bridge, veth)
    for chain, rule in reversed(rules):  # each is put first, so the last goes in first
        run("iptables", "-w", "-I", chain, *rule)
    # 10
    flags = json.loads(run("bridge", "-j", "-d", "link", "show", "dev", veth))[0]
    require(flags["isolated"] and not flags["learning"] and flags["locked"], "flags")
    run("nft", "list", "table", "netdev", f"as_port_{name}")
    require(len(tagged("DOCKER-USER", name)) + len(tagged("INPUT", name)) == len(rules), "iptables rules")
    # 11 to 13
    require_paused(inspect(name))
    nft(f"flush chain netdev as_port_{name} ingress\nflush chain netdev as_port_{name} egress\n"
        + accept_rules(name, mac, ip, attachment["Gateway"])
        + f'add element netdev {GATE} released {{ {mac} comment "{name}" }}\n')
    require("mark set" in run("nft", "list", "table", "netdev", f"as_port_{name}"), "release")
    require(mac in elements(), "not released")
    require_paused(inspect(name))
    require(engine() == before, "engine changed")


def disarm(name):
    network = json.loads(run("docker", "network", "inspect", NETWORK))[0]
    bridge = "br-" + network["Id"][:12]
    container = inspect(name)
    attachment = container["NetworkSettings"]["Networks"][NETWORK]
    inside = json.loads(run("nsenter", "-t", str(container["State"]["Pid"]), "-n", "ip", "-j", "link", "show"))
    index = [link for link in inside if link["ifname"] != "lo"][0]["link_index"]
    veth = [link for link in json.loads(run("ip", "-j", "link", "show", "master", bridge))
            if link["ifindex"] == index][0]["ifname"]
    clean(name, attachment["MacAddress"], attachment["IPAddress"], bridge, veth)


def main():
    print("{}", flush=True)
    for line in sys.stdin:
        verb, name = line.split()
        start = time.perf_counter()
        try:
            {"arm": arm, "disarm": disarm}[verb](name)
            answer = {"ms": (time.perf_counter() - start) * 1000}
        except (Refused, IndexError, KeyError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
