# SPDX-License-Identifier: GPL-2.0-or-later
"""Tries what it is told, all at once, from inside a container; prints a JSON list of results.

argv: seconds, and a JSON list of probes {"kind": "tcp|tls|http|https|udp|dns|resolve|icmp",
"to": address, "port": port, "name": name}. A result is {"ok": bool, "error": text, "answer": text,
"seconds": number}. Sent to the interpreter as text: it is not in the image.

With "stream" as the first argument it keeps one flow going instead: see stream().
"""

import concurrent.futures
import errno
import json
import os
import random
import socket
import ssl
import struct
import sys
import time


def family(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def dial(probe, timeout):
    sock = socket.socket(family(probe["to"]), socket.SOCK_STREAM)
    sock.settimeout(timeout)
    sock.connect((probe["to"], probe["port"]))
    return sock


def secure(sock, name):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(sock, server_hostname=name or None)


def get(sock, probe):
    host = probe.get("name") or f"[{probe['to']}]"
    sock.sendall(f"GET {probe.get('path', '/')} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    answer = b""
    while part := sock.recv(65536):
        answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return f"{head.split(b' ')[1].decode()} {body[:200].decode(errors='replace').strip()}"


def exchange(probe, data, timeout):
    with socket.socket(family(probe["to"]), socket.SOCK_DGRAM) as sock:
        sock.connect((probe["to"], probe["port"]))
        end = time.monotonic() + timeout
        while (left := end - time.monotonic()) > 0:
            sock.settimeout(min(left, 0.5))
            try:
                sock.send(data)
                return sock.recv(65536)
            except TimeoutError:
                pass
        raise TimeoutError("timed out")


def ask_dns(probe, timeout):
    number, kind = random.randrange(65536), {"A": 1, "AAAA": 28}[probe.get("type", "A")]
    name = b"".join(bytes([len(label)]) + label.encode() for label in probe["name"].split(".")) + b"\0"
    question = struct.pack("!HHHHHH", number, 0x0100, 1, 0, 0, 0) + name + struct.pack("!HH", kind, 1)
    answer = exchange({**probe, "port": probe.get("port", 53)}, question, timeout)
    if answer[:2] != question[:2]:
        raise OSError("answer to something else")
    code, count = answer[3] & 15, struct.unpack_from("!H", answer, 6)[0]
    # Any answer came from the server that was asked: that is what a gate's test wants to know.
    return f"code {code}, {count} answers"


def echo(probe, timeout):
    six = ":" in probe["to"]
    with socket.socket(family(probe["to"]), socket.SOCK_RAW, 58 if six else 1) as sock:
        sock.settimeout(timeout)
        mark = os.urandom(8)
        packet = struct.pack("!BBHHH", 128 if six else 8, 0, 0, 7, 1) + mark
        if not six:
            total = sum(struct.unpack(f"!{len(packet) // 2}H", packet))
            total = (total & 0xFFFF) + (total >> 16)
            packet = packet[:2] + struct.pack("!H", ~(total + (total >> 16)) & 0xFFFF) + packet[4:]
        sock.sendto(packet, (probe["to"], 0))
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            data = sock.recv(2048)
            body = data if six else data[20:]
            if body[0] == (129 if six else 0) and mark in body:
                return "echo reply"
    raise TimeoutError("timed out")


def attempt(probe, timeout):
    kind = probe["kind"]
    if kind == "udp":
        return exchange(probe, probe.get("data", "probe").encode(), timeout).decode(errors="replace")
    if kind == "dns":
        return ask_dns(probe, timeout)
    if kind == "icmp":
        return echo(probe, timeout)
    if kind == "resolve":
        return " ".join(sorted({info[4][0] for info in socket.getaddrinfo(probe["name"], None)}))
    with dial(probe, timeout) as sock:
        if kind == "tcp":
            return "connected"
        if kind == "http":
            return get(sock, probe)
        with secure(sock, probe.get("name")) as safe:
            return safe.version() if kind == "tls" else get(safe, probe)


def one(probe, timeout):
    start = time.monotonic()
    while True:
        left = timeout - (time.monotonic() - start)
        try:
            result = {"ok": True, "error": "", "answer": attempt(probe, max(left, 0.1))}
        except OSError as error:
            result = {"ok": False, "error": f"{type(error).__name__}: {error}", "answer": ""}
            # A neighbour that was asked for before the gate opened fails a second later: not the
            # gate's word.
            if error.errno == errno.EHOSTUNREACH and left > 0.2:
                time.sleep(0.1)
                continue
        break
    return {**result, "seconds": round(time.monotonic() - start, 3)}


def stream(address, port, path, kind):
    """Sends a number every 20 ms and writes "NUMBER TIME" to `path` for each that comes back."""
    sock = socket.socket(family(address), socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM)
    sock.settimeout(5)
    sock.connect((address, port))
    if kind == "tcp":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.recv(6)  # the greeting
    sock.setblocking(False)
    number = 0
    with open(path, "w", buffering=1) as log:
        log.write("start\n")
        while True:
            number += 1
            for step in (lambda: sock.send(f"{number}\n".encode()), lambda: got(sock, log)):
                try:
                    step()
                except BlockingIOError:
                    pass
                except OSError as error:
                    log.write(f"error {error}\n")
                    if kind == "tcp":
                        return
            time.sleep(0.02)


def got(sock, log):
    data = sock.recv(65536)
    if not data:
        raise OSError("closed by the far side")
    for word in data.split():
        log.write(f"{word.decode()} {time.time()}\n")


def main():
    if sys.argv[1] == "stream":
        stream(sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5])
        return
    timeout, probes = float(sys.argv[1]), json.loads(sys.argv[2])
    socket.setdefaulttimeout(timeout)
    with concurrent.futures.ThreadPoolExecutor(max(1, min(64, len(probes)))) as pool:
        print(json.dumps(list(pool.map(lambda probe: one(probe, timeout), probes))))


main()
