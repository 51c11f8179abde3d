# SPDX-License-Identifier: GPL-2.0-or-later
"""An engine of paused containers, each a process in a network namespace of its own.

A thousand real containers do not fit on a small machine. agentgated asks an engine for little, and
takes the rest from the kernel, which here is as with real ones: veths, namespaces, addresses.

usage: stub_engine.py SOCKET RESOLV_CONF
SOCKET.orders is a fifo for lines of JSON: {"cells": N} for N processes, which SOCKET.pids names once
they stand; and {"number", "endpoint", "network", "mac", "address"} for the endpoint of one.
"""
import ctypes
import http.server
import json
import os
import signal
import socketserver
import sys
import threading

CLONE_NEWNET, PR_SET_PDEATHSIG = 0x40000000, 1
libc = ctypes.CDLL(None, use_errno=True)
path, resolv_conf = sys.argv[1:]
pids, endpoints = [], {}


def cell():
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if libc.unshare(CLONE_NEWNET) != 0:
            os._exit(1)
        os.write(tell, b"x")
        os.execv("/bin/sleep", ["sleep", "infinity"])
    os.close(tell)
    if os.read(ready, 1) != b"x":
        raise OSError("no network namespace")
    os.close(ready)
    return pid


def cells(total):
    while len(pids) < total:
        with open(f"{resolv_conf}.{len(pids)}", "w"):
            pass
        pids.append(cell())
    with open(path + ".new", "w") as out:
        out.write(" ".join(map(str, pids)))
    os.rename(path + ".new", path + ".pids")


def container_id(number):
    return f"{number:064x}"


def document(number):
    known = endpoints[number]
    return {"Id": container_id(number), "Name": f"/c{number}", "Config": {"Image": "stub"},
            "ResolvConfPath": f"{resolv_conf}.{number}",
            "HostConfig": {"Runtime": "runsc", "Dns": ["192.0.2.53"], "RestartPolicy": {"Name": "no"}, "NetworkMode": "bench"},
            "State": {"Running": True, "Paused": True, "Pid": pids[number], "StartedAt": "2020-01-01T00:00:00Z"},
            "NetworkSettings": {"Networks": {"bench": {
                "NetworkID": known["network"], "EndpointID": known["endpoint"], "MacAddress": known["mac"],
                "IPAddress": known["address"], "GlobalIPv6Address": ""}}}}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Api-Version", "1.47")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        what = [part for part in self.path.partition("?")[0].split("/") if part and part[:2] != "v1"]
        if what == ["_ping"]:
            return self.answer("OK")
        if what == ["info"]:
            return self.answer({"ID": "stub", "ServerVersion": "stub", "DockerRootDir": "/", "DefaultRuntime": "runsc",
                                "Runtimes": {"runsc": {"runtimeType": "io.containerd.runsc.v1"}}})
        if what == ["events"]:
            self.send_response(200)
            self.send_header("Api-Version", "1.47")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.flush()
            self.rfile.read(1)  # until the other side leaves
            return None
        if len(what) == 3 and what[0] == "containers":
            number = int(what[1][1:]) if what[1].startswith("c") else int(what[1], 16)
            if number in endpoints:
                return self.answer(document(number))
        if len(what) == 2 and what[0] == "networks":
            return self.answer({"Containers": {container_id(n): {"EndpointID": e["endpoint"]}
                                               for n, e in endpoints.items() if e["network"] == what[1]}})
        return self.answer({"message": "no such object"}, 404)


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128

    def get_request(self):
        request, _ = super().get_request()
        return request, ("stub", 0)


server = Server(path, Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
fifo = path + ".orders"
os.mkfifo(fifo)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
try:
    while True:
        with open(fifo) as lines:
            for line in lines:
                one = json.loads(line)
                if "cells" in one:
                    cells(one["cells"])
                else:
                    endpoints[one["number"]] = one
finally:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
