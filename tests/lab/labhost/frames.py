# SPDX-License-Identifier: GPL-2.0-or-later
"""Frames from a container's side, and a count of where they come out. Runs in the lab's namespaces.

usage: frames.py send NETNS DEVICE JSON      JSON: own_mac own4 own6 gw_mac gw4 gw6 other_mac other4
                                             other6 out4 out6 allowed4 allowed6
       frames.py count NETNS SECONDS DEVICE... MAC... [control=MAC]
           counts until SECONDS after the end of its input; prints {"DEVICE": {"KIND": N}}

A frame carries "AGLAB:KIND:" where it has room, so it is recognised after routing too; a frame
without room (ARP) is recognised by its ether source, which no one else in the lab uses. Frames of
the control's MAC that carry no mark are counted as "control".
"""
import json
import os
import re
import socket
import struct
import sys
import time

PKT_OUTGOING = 4
TIMES = 3  # each kind is sent so often


def enter(netns):
    fd = os.open(netns, os.O_RDONLY)
    import ctypes
    if ctypes.CDLL(None, use_errno=True).setns(fd, 0x40000000) != 0:
        raise OSError(ctypes.get_errno(), "setns " + netns)


def mac(text):
    return bytes.fromhex(text.replace(":", ""))


def v4(text):
    return socket.inet_aton(text)


def v6(text):
    return socket.inet_pton(socket.AF_INET6, text)


def checksum(data):
    if len(data) % 2:
        data += b"\0"
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ip4(src, dst, protocol, payload, fragment=0, ttl=64, options=b""):
    length = 20 + len(options) + len(payload)
    head = struct.pack("!BBHHHBBH4s4s", 0x45 + len(options) // 4, 0, length, 7, fragment, ttl,
                       protocol, 0, v4(src), v4(dst)) + options
    return head[:10] + struct.pack("!H", checksum(head)) + head[12:] + payload


def udp4(src, dst, port, data):
    return struct.pack("!HHHH", 40000, port, 8 + len(data), 0) + data


def l4sum6(src, dst, protocol, payload, at):
    pseudo = v6(src) + v6(dst) + struct.pack("!II", len(payload), protocol)
    value = checksum(pseudo + payload) or 0xFFFF
    return payload[:at] + struct.pack("!H", value) + payload[at + 2:]


def ip6(src, dst, protocol, payload, hops=64):
    return struct.pack("!IHBB", 6 << 28, len(payload), protocol, hops) + v6(src) + v6(dst) + payload


def icmp6(src, dst, body, hops=255):
    return ip6(src, dst, 58, l4sum6(src, dst, 58, body, 2), hops)


def arp(op, sha, spa, tha, tpa):
    return struct.pack("!HHBBH", 1, 0x0800, 6, 4, op) + mac(sha) + v4(spa) + mac(tha) + v4(tpa)


def catalogue(i):
    """name -> frame"""
    own, gw, other = i["own_mac"], i["gw_mac"], i["other_mac"]
    bcast, zero = "ff:ff:ff:ff:ff:ff", "00:00:00:00:00:00"
    out = {}

    def add(name, dst, src, ethertype, payload):
        body = payload(("AGLAB:%s:" % name).encode()) if callable(payload) else payload
        out[name] = mac(dst) + mac(src) + struct.pack("!H", ethertype) + body

    def u4(src, dst, port=9):
        return lambda m: ip4(src, dst, 17, udp4(src, dst, port, m))

    def syn(src, dst, port):
        return lambda m: ip4(src, dst, 6, struct.pack("!HHIIBBHHH", 40000, port, 1, 0, 0x50, 2,
                                                      1000, 0, 0) + m)

    add("own-udp-gateway", gw, own, 0x0800, u4(i["own4"], i["gw4"]))
    add("own-udp-out", gw, own, 0x0800, u4(i["own4"], i["out4"]))
    add("own-tcp-out", gw, own, 0x0800, syn(i["own4"], i["out4"], 80))
    add("allowed-udp", gw, own, 0x0800, u4(i["own4"], i["allowed4"], 53))
    add("own-udp-metadata", gw, own, 0x0800, u4(i["own4"], "169.254.169.254", 80))
    add("own-udp-neighbour-direct", other, own, 0x0800, u4(i["own4"], i["other4"]))
    add("own-udp-neighbour-routed", gw, own, 0x0800, u4(i["own4"], i["other4"]))
    add("own-icmp-gateway", gw, own, 0x0800, lambda m: ip4(i["own4"], i["gw4"], 1, b"\x08\0\0\0\0\1\0\1" + m))
    add("own-gre-out", gw, own, 0x0800, lambda m: ip4(i["own4"], i["out4"], 47, b"\0\0\x08\0" + m))
    add("own-raw-proto-out", gw, own, 0x0800, lambda m: ip4(i["own4"], i["out4"], 253, m))
    add("spoof-mac", gw, "02:de:ad:00:00:01", 0x0800, u4(i["own4"], i["out4"]))
    add("spoof-ip-neighbour", gw, own, 0x0800, u4(i["other4"], i["out4"]))
    add("spoof-ip-gateway", gw, own, 0x0800, u4(i["gw4"], i["out4"]))
    add("spoof-mac-and-ip-of-neighbour", gw, other, 0x0800, u4(i["other4"], i["out4"]))
    add("spoof-gateway-mac", other, gw, 0x0800, u4(i["gw4"], i["other4"]))
    add("broadcast-ip", bcast, own, 0x0800, u4(i["own4"], "255.255.255.255", 67))
    add("multicast-mdns", "01:00:5e:00:00:fb", own, 0x0800, u4(i["own4"], "224.0.0.251", 5353))
    add("dhcp-discover", bcast, own, 0x0800, lambda m: ip4("0.0.0.0", "255.255.255.255", 17,
        struct.pack("!HHHH", 68, 67, 8 + 240 + len(m), 0) + b"\1\1\6\0" + b"\0" * 236 + m))
    add("fragment-first", gw, own, 0x0800, lambda m: ip4(i["own4"], i["out4"], 17, udp4("", "", 9, m + b"x" * 16), 0x2000))
    add("fragment-later", gw, own, 0x0800, lambda m: ip4(i["own4"], i["out4"], 17, m + b"x" * 16, 3))
    add("source-route", gw, own, 0x0800, lambda m: ip4(i["own4"], i["out4"], 17, udp4("", "", 9, m),
        options=b"\x83\x07\x04" + v4(i["gw4"]) + b"\0"))
    add("arp-gateway", bcast, own, 0x0806, arp(1, own, i["own4"], zero, i["gw4"]))
    add("arp-claim-gateway", bcast, own, 0x0806, arp(1, own, i["gw4"], zero, i["gw4"]))
    add("arp-reply-to-neighbour", other, own, 0x0806, arp(2, own, i["gw4"], other, i["other4"]))
    add("arp-who-has-neighbour", bcast, own, 0x0806, arp(1, own, i["own4"], zero, i["other4"]))
    add("arp-other-ether-source", bcast, "02:de:ad:00:00:02", 0x0806, arp(1, own, i["own4"], zero, i["gw4"]))
    add("arp-other-sha", bcast, own, 0x0806, arp(1, "02:de:ad:00:00:03", i["own4"], zero, i["gw4"]))
    for name, tag in (("vlan-0", 0), ("vlan-5", 5)):
        add(name, gw, own, 0x8100, lambda m, t=tag: struct.pack("!HH", t, 0x0800) + u4(i["own4"], i["out4"])(m))
    add("qinq", gw, own, 0x88A8, lambda m: struct.pack("!HHHH", 5, 0x8100, 6, 0x0800) + u4(i["own4"], i["out4"])(m))
    add("stp", "01:80:c2:00:00:00", own, 0x0026, lambda m: b"\x42\x42\x03\0\0\0\0\0" + b"\0" * 30 + m)
    add("lldp", "01:80:c2:00:00:0e", own, 0x88CC, lambda m: b"\x02\x07\x04" + mac(own) + b"\x04\x02\x07a" + m)
    add("eapol", "01:80:c2:00:00:03", own, 0x888E, lambda m: b"\1\1\0\0" + m)
    add("lacp", "01:80:c2:00:00:02", own, 0x8809, lambda m: b"\1\1" + m)
    add("raw-ethertype", gw, own, 0x88B5, lambda m: m + b"x" * 40)
    add("raw-ethertype-broadcast", bcast, own, 0x6003, lambda m: m + b"x" * 40)
    add("pppoe", gw, own, 0x8863, lambda m: b"\x11\x09\0\0\0\0" + m)
    add("mpls", gw, own, 0x8847, lambda m: b"\0\0\x11\x40" + m)
    if i.get("own6"):
        me, g6, o6 = i["own6"], i["gw6"], i["out6"]
        tail = v6(g6)[13:]
        snm = "33:33:ff:" + ":".join("%02x" % b for b in tail)
        sn = "ff02::1:ff%02x:%02x%02x" % tuple(tail)

        def u6(src, dst):
            return lambda m: ip6(src, dst, 17, l4sum6(src, dst, 17, struct.pack("!HHHH", 40000, 9, 8 + len(m), 0) + m, 6))
        def syn6(src, dst, port):
            return lambda m: ip6(src, dst, 6, l4sum6(src, dst, 6, struct.pack(
                "!HHIIBBHHH", 40000, port, 1, 0, 0x50, 2, 1000, 0, 0) + m, 16))
        add("allowed-tcp6", gw, own, 0x86DD, syn6(me, i["allowed6"], 443))
        add("own-udp6-out", gw, own, 0x86DD, u6(me, o6))
        add("own-udp6-gateway", gw, own, 0x86DD, u6(me, g6))
        add("spoof-ip6", gw, own, 0x86DD, u6(i["other6"], o6))
        add("ns-gateway", snm, own, 0x86DD, icmp6(me, sn, b"\x87\0\0\0\0\0\0\0" + v6(g6) + b"\1\1" + mac(own)))
        add("ns-neighbour", "33:33:ff:" + ":".join("%02x" % b for b in v6(i["other6"])[13:]), own, 0x86DD,
            icmp6(me, "ff02::1:ff%02x:%02x%02x" % tuple(v6(i["other6"])[13:]), b"\x87\0\0\0\0\0\0\0" + v6(i["other6"]) + b"\1\1" + mac(own)))
        add("na-claim-gateway", "33:33:00:00:00:01", own, 0x86DD, icmp6(me, "ff02::1", b"\x88\0\0\0\xa0\0\0\0" + v6(g6) + b"\2\1" + mac(own)))
        add("ra", "33:33:00:00:00:01", own, 0x86DD, icmp6("fe80::1", "ff02::1", b"\x86\0\0\0\x40\0\x07\x08" + b"\0" * 8))
        add("rs", "33:33:00:00:00:02", own, 0x86DD, icmp6("fe80::2", "ff02::2", b"\x85\0\0\0\0\0\0\0"))
        add("mld", "33:33:00:00:00:16", own, 0x86DD, icmp6("fe80::2", "ff02::16", b"\x8f\0\0\0\0\0\0\0", 1))
        add("ra-behind-hopbyhop", gw, own, 0x86DD, ip6(me, "ff02::1", 0, b"\x3a\0\x05\x02\0\0\1\0" + b"\x86\0\0\0\x40\0\x07\x08" + b"\0" * 8, 255))
    return out


def send(netns, device, identity):
    enter(netns)
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    sock.bind((device, 0))
    sent = {}
    for _ in range(TIMES):
        for name, frame in catalogue(identity).items():
            try:
                sock.send(frame if len(frame) >= 60 else frame + b"\0" * (60 - len(frame)))
                sent[name] = sent.get(name, 0) + 1
            except OSError as error:
                print(f"{name}: {error}", file=sys.stderr)
    print(json.dumps(sent))


def count(netns, seconds, devices, sources, control):
    enter(netns)
    import select
    socks = {}
    counts = {device: {} for device in devices}
    for device in devices:
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        sock.bind((device, 0))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        socks[sock] = device
    print("ready", flush=True)
    end = None
    pattern = re.compile(rb"AGLAB:([a-z0-9-]+):")
    sources, control = [mac(s) for s in sources], [mac(s) for s in control]
    while end is None or time.time() < end:
        for sock in select.select(list(socks) + ([sys.stdin] if end is None else []), [], [], 0.1)[0]:
            if sock is sys.stdin:
                end = time.time() + seconds
                continue
            data, address = sock.recvfrom(65536)
            device = socks[sock]
            match = pattern.search(data)
            if match:
                kind = match.group(1).decode()
            elif data[6:12] in sources:
                kind = "unmarked-%04x" % struct.unpack("!H", data[12:14])[0]
            elif data[6:12] in control:
                kind = "control"
            else:
                continue
            # On a port's host end incoming frames are seen before the gate; only what leaves counts.
            if device.startswith("agp") and address[2] != PKT_OUTGOING:
                continue
            counts[device][kind] = counts[device].get(kind, 0) + 1
    print(json.dumps(counts))


if __name__ == "__main__":
    if sys.argv[1] == "send":
        send(sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
    else:
        rest = sys.argv[4:]
        count(sys.argv[2], float(sys.argv[3]), [a for a in rest if ":" not in a],
              [a for a in rest if ":" in a and "=" not in a],
              [a.partition("=")[2] for a in rest if a.startswith("control=")])
