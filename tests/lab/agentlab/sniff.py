# SPDX-License-Identifier: GPL-2.0-or-later
"""Frames on an interface in a network namespace, by AF_PACKET: not with the code under test."""

import ctypes
import dataclasses
import ipaddress
import os
import select
import socket
import struct
import threading
import time

from .errors import LabError

CLONE_NEWNET = 0x40000000
SOL_PACKET, PACKET_STATISTICS = 263, 6
ETH_P_ALL = 3
PACKET_OUTGOING = 4

_libc = ctypes.CDLL(None, use_errno=True)


def in_netns(path, function):
    """Calls `function()` in a thread that is in the network namespace `path`.

    A socket that it returns stays in that namespace.
    """
    result = {}

    def work():
        try:
            with open(path) as namespace:
                if _libc.setns(namespace.fileno(), CLONE_NEWNET):
                    error = ctypes.get_errno()
                    raise OSError(error, f"setns {path}: {os.strerror(error)}")
            result["value"] = function()
        except OSError as error:
            result["error"] = error

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if "error" in result:
        raise LabError(str(result["error"])) from result["error"]
    return result["value"]


@dataclasses.dataclass(frozen=True)
class Frame:
    """One frame; what a layer does not have is None."""

    time: float
    outgoing: bool
    dst_mac: str
    src_mac: str
    ethertype: int
    vlan: int | None
    src: str | None
    dst: str | None
    proto: str | None
    sport: int | None
    dport: int | None
    flags: int | None
    raw: bytes = dataclasses.field(repr=False)

    def has(self, address):
        return address in (self.src, self.dst, self.src_mac, self.dst_mac)


_PROTO = {1: "icmp", 6: "tcp", 17: "udp", 58: "icmp6", 2: "igmp"}


def decode(raw, when=0.0, outgoing=False):
    def mac(data):
        return ":".join(f"{byte:02x}" for byte in data)

    ethertype = struct.unpack_from("!H", raw, 12)[0] if len(raw) >= 14 else 0
    at, vlan = 14, None
    while ethertype in (0x8100, 0x88A8) and len(raw) >= at + 4:
        tag, ethertype = struct.unpack_from("!HH", raw, at)
        vlan, at = tag & 0xFFF, at + 4
    src = dst = proto = sport = dport = flags = None
    try:
        if ethertype == 0x0800:
            src, dst = (str(ipaddress.IPv4Address(raw[at + o:at + o + 4])) for o in (12, 16))
            proto = raw[at + 9]
            at += (raw[at] & 15) * 4
        elif ethertype == 0x86DD:
            src, dst = (str(ipaddress.IPv6Address(raw[at + o:at + o + 16])) for o in (8, 24))
            proto = raw[at + 6]
            at += 40
            while proto in (0, 43, 60) and len(raw) > at + 1:
                proto, at = raw[at], at + 8 + raw[at + 1] * 8
        elif ethertype == 0x0806:
            proto = "arp"
            src, dst = (str(ipaddress.IPv4Address(raw[at + o:at + o + 4])) for o in (14, 24))
        if proto in (6, 17):
            sport, dport = struct.unpack_from("!HH", raw, at)
            if proto == 6:
                flags = raw[at + 13]
        if isinstance(proto, int):
            proto = _PROTO.get(proto, str(proto))
    except (IndexError, struct.error, ipaddress.AddressValueError):
        pass
    return Frame(when, outgoing, mac(raw[:6]), mac(raw[6:12]), ethertype, vlan, src, dst, proto, sport, dport,
                 flags, raw)


class Sniffer:
    """Collects frames from its making to stop(). Usable in a `with`.

    Both directions of the interface are seen; `outgoing` is from the interface's own view. Dropping
    an outgoing frame in nft's egress hook comes before AF_PACKET sees it, dropping an incoming one
    in the ingress hook comes after.
    """

    def __init__(self, netns, interface):
        self.interface = interface
        self._frames = []
        self._lock = threading.Lock()
        self.received = self.dropped = 0

        def open_socket():
            sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
            # The auxiliary data has the VLAN tag that the kernel took off.
            sock.setsockopt(SOL_PACKET, 8, 1)
            sock.bind((interface, ETH_P_ALL))
            return sock

        self._sock = in_netns(netns, open_socket)
        self._sock.setblocking(False)
        self._wake, self._poke = os.pipe()
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _collect(self):
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            events = poll.poll()
            stop = any(fd == self._wake for fd, _ in events)
            while True:
                try:
                    raw, extra, _, address = self._sock.recvmsg(65536, 128)
                except BlockingIOError:
                    break
                except OSError:
                    return
                for level, kind, data in extra:
                    if (level, kind) == (SOL_PACKET, 8) and len(data) >= 20:
                        status, _, _, _, _, tci, tpid = struct.unpack_from("=IIIHHHH", data)
                        if status & 0x10:
                            raw = raw[:12] + struct.pack("!HH", tpid or 0x8100, tci) + raw[12:]
                frame = decode(raw, time.time(), address[2] == PACKET_OUTGOING)
                with self._lock:
                    self._frames.append(frame)
            if stop:
                return

    def frames(self, **match):
        """The frames so far; `match`: only those whose attributes have these values."""
        with self._lock:
            frames = list(self._frames)
        return [f for f in frames if all(getattr(f, key) == value for key, value in match.items())]

    def clear(self):
        with self._lock:
            self._frames.clear()

    def stop(self):
        """Stops and answers with all frames. Raises if the kernel had to drop some."""
        if self._sock.fileno() < 0:
            return self.frames()
        os.write(self._poke, b"x")
        self._thread.join()
        packets, drops = struct.unpack("=II", self._sock.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
        self.received, self.dropped = packets, drops
        self._sock.close()
        os.close(self._wake)
        os.close(self._poke)
        if drops:
            raise LabError(f"sniffer on {self.interface}: {drops} of {packets} frames lost")
        return self.frames()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()
