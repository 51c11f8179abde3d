# SPDX-License-Identifier: GPL-2.0-or-later
"""The far side of the lab's hosts: a namespace that plays the internet and the local network.

Documentation addresses for what is public. Everything answers, so that a test which sees no answer
has seen the gate and not a missing server.
"""

import json
import subprocess

from .errors import LabError
from .namespace import Namespace, wait_for
from .sniff import Sniffer

ALLOWED, ALLOWED6 = "192.0.2.80", "2001:db8::80"
DENIED, DENIED6 = "192.0.2.81", "2001:db8::81"
REBIND = "192.0.2.82"
DNS, DNS6 = "192.0.2.53", "2001:db8:53::53"
OTHER_DNS = "192.0.2.54"
METADATA, METADATA6 = "169.254.169.254", "fd00:ec2::254"
NEIGHBOUR = "10.20.30.40"

GATEWAY, GATEWAY6 = "198.51.100.1", "2001:db8:100::1"
LAN_GATEWAY = "10.20.30.1"

# Several servers and names of each kind, for policies that list more than one.
RECORDS = {
    "api.allowed.test": [ALLOWED, ALLOWED6],
    "denied.test": [DENIED, DENIED6],
    "rebind.test": [NEIGHBOUR],
    "v4only.test": [REBIND],
}
TCP = {"22": "banner", "80": "http", "443": "https", "853": "banner", "8443": "https"}
UDP = [443, 4789]


class Internet(Namespace):
    """Bridge `lan`: 198.51.100.0/24, 2001:db8:100::/64 and 10.20.30.0/24, one port for each host."""

    def __init__(self, lab):
        super().__init__(lab, "internet")
        self.records = {name: list(addresses) for name, addresses in RECORDS.items()}
        self._dns = {}
        self._network()
        self._certificate()
        self.journal_path = self.logs / "journal"
        self.journal_path.touch()
        self.servers = self.python(
            "farside.py", json.dumps({"tcp": TCP, "udp": UDP, "certificate": str(self.certificate),
                                      "journal": str(self.journal_path), "name": "farside"}),
            log="farside.log")
        self.hosts_file = self.base / "records"
        self._write_records()
        for name, addresses in (("listed", [DNS, DNS6]), ("unlisted", [OTHER_DNS])):
            self._dns[name] = self._start_dns(name, addresses)

    def _network(self):
        commands = ["link add lan type bridge",
                    "link set lan up",
                    f"addr add {GATEWAY}/24 dev lan",
                    f"addr add {LAN_GATEWAY}/24 dev lan",
                    f"addr add {NEIGHBOUR}/24 dev lan",
                    f"addr add {GATEWAY6}/64 dev lan nodad",
                    f"addr add {METADATA6}/128 dev lo nodad"]
        commands += [f"addr add {address}/32 dev lo" for address in
                     (ALLOWED, DENIED, REBIND, DNS, OTHER_DNS, METADATA)]
        commands += [f"addr add {address}/128 dev lo nodad" for address in (ALLOWED6, DENIED6, DNS6)]
        self.run("ip", "-batch", "-", input="\n".join(commands) + "\n")
        # Frames on the lan are frames, whatever the machine's default for br_netfilter is.
        for family in ("ip", "ip6", "arp"):
            self.exec("sh", "-c", f"echo 0 > /proc/sys/net/bridge/bridge-nf-call-{family}tables")
        self.sysctl("net/ipv4/ip_forward", 1)
        self.sysctl("net/ipv6/conf/all/forwarding", 1)

    def _certificate(self):
        key, cert = self.base / "key.pem", self.base / "cert.pem"
        names = ",".join(f"DNS:{name}" for name in RECORDS)
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
                        "-nodes", "-days", "30", "-subj", "/CN=agentgate lab", "-addext", f"subjectAltName={names}",
                        "-keyout", key, "-out", cert], check=True, capture_output=True)
        self.certificate = self.base / "both.pem"
        self.certificate.write_text(key.read_text() + cert.read_text())

    # -- names

    def _write_records(self):
        lines = [f"{address} {name}" for name, addresses in self.records.items() for address in addresses]
        self.hosts_file.write_text("\n".join(lines) + "\n")

    def _start_dns(self, name, addresses, ttl=60):
        process = self.start(
            "dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--user=root", "--no-resolv", "--no-hosts",
            "--bind-interfaces", "--except-interface=lo", *[f"--listen-address={a}" for a in addresses],
            f"--addn-hosts={self.hosts_file}", f"--local-ttl={ttl}", "--local=/#/", "--pid-file=",
            "--cname=www.allowed.test,api.allowed.test", f"--address=/wild.test/{ALLOWED}",
            "--log-queries", f"--log-facility={self.logs / ('dns.' + name)}", log=f"dnsmasq.{name}.log")

        def ready():
            if not process.alive():
                raise LabError(f"dnsmasq {name}: {process.output()}{self._dns_log(name)}")
            return "read " in self._dns_log(name)

        wait_for(ready, 10, f"dnsmasq {name}")
        return process

    def _dns_log(self, name):
        path = self.logs / ("dns." + name)
        return path.read_text(errors="replace") if path.exists() else ""

    def set_records(self, records):
        """Replaces or adds names; an empty list removes one. In force when this returns."""
        for name, addresses in records.items():
            self.records[name] = list(addresses)
        self._write_records()
        for name, process in self._dns.items():
            before = self._dns_log(name).count("read ")
            process.signal(1)
            wait_for(lambda n=name, b=before: self._dns_log(n).count("read ") > b, 10, "dnsmasq read its records")

    def dns_queries(self, server="listed"):
        """The queries that a server got: (name, type, client)."""
        found = []
        for line in self._dns_log(server).splitlines():
            words = line.split()
            for at, word in enumerate(words):
                if word.startswith("query["):
                    found.append((words[at + 1], word[6:-1], words[at + 3]))
        return found

    def stop_dns(self, server="listed"):
        self._dns.pop(server).kill()

    def start_dns(self, server="listed", ttl=60):
        self._dns[server] = self._start_dns(server, [DNS, DNS6] if server == "listed" else [OTHER_DNS], ttl)

    # -- what came

    def journal(self, **match):
        """What the servers saw, as dicts; `match`: only entries with these values."""
        entries = [json.loads(line) for line in self.journal_path.read_text().splitlines()]
        return [e for e in entries if all(e.get(key) == value for key, value in match.items())]

    def clear_journal(self):
        self.journal_path.write_text("")

    def sniff(self, interface="lan"):
        return Sniffer(self.net(), interface)

    # -- hosts

    def attach(self, host, number):
        """A cable from the lan to the host's eth0."""
        if number > 200:
            raise LabError("the lan has no more addresses")
        port = f"host{number}"
        # After a reboot the old cable goes away together with the old namespace, a little later.
        self.exec("ip", "link", "del", port)
        # The PID is the one that the machine knows: enter nothing but the network namespace.
        done = subprocess.run(["nsenter", f"--net={self.net()}", "ip", "link", "add", port, "type", "veth",
                               "peer", "name", "eth0", "netns", str(host.pid)], capture_output=True, text=True)
        if done.returncode:
            raise LabError(f"cable to {host.name}: {done.stderr}")
        self.run("ip", "link", "set", port, "master", "lan", "up")
        v4, lan, v6 = f"198.51.100.{number + 10}", f"10.20.30.{number + 100}", f"2001:db8:100::{number + 10:x}"
        commands = ["link set eth0 up", f"addr add {v4}/24 dev eth0", f"addr add {lan}/24 dev eth0",
                    f"addr add {v6}/64 dev eth0 nodad", f"route add default via {GATEWAY} src {v4}",
                    f"-6 route add default via {GATEWAY6}"]
        host.run("ip", "-batch", "-", input="\n".join(c for c in commands if not c.startswith("-6")) + "\n")
        host.run("ip", "-6", "route", "add", "default", "via", GATEWAY6)
        return v4, lan, v6

    def route(self, prefix, host):
        """A way back to a network behind `host`, for tests without NAT."""
        family = ("-6", host.address6) if ":" in prefix else ("-4", host.address)
        self.run("ip", family[0], "route", "replace", prefix, "via", family[1])
