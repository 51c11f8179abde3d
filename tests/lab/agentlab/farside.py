# SPDX-License-Identifier: GPL-2.0-or-later
"""Servers that answer on every address of their network namespace and note who came.

argv: a JSON object {"tcp": {"80": "http", "443": "https", "22": "banner"}, "udp": [443],
"certificate": path, "journal": path, "address": one address or absent for all, "name": text}.
Each connection, request and datagram is one JSON line in the journal, written before the answer.
"""

import http.server
import ipaddress
import json
import os
import socket
import socketserver
import ssl
import struct
import sys
import threading
import time

IP_PKTINFO = 8
IPV6_RECVPKTINFO, IPV6_PKTINFO = 49, 50
IP_FREEBIND, IPV6_FREEBIND = 15, 78

config = json.loads(sys.argv[1])
journal = os.open(config["journal"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def plain(address):
    """An address without the form that IPv4 has on an IPv6 socket."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


def note(kind, proto, peer, local, **more):
    line = {"time": time.time(), "kind": kind, "proto": proto, "src": plain(peer[0]), "sport": peer[1],
            "dst": plain(local[0]), "dport": local[1], **more}
    os.write(journal, (json.dumps(line) + "\n").encode())


class Web(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self):
        local = self.connection.getsockname()
        note("request", "tcp", self.client_address, local, path=self.path, host=self.headers.get("Host", ""))
        if self.path.startswith("/bytes/"):
            body = b"x" * int(self.path.rpartition("/")[2])
        elif plain(local[0]) == "169.254.169.254":
            body = b"metadata-secret\n"
        else:
            body = f"{config.get('name', 'farside')} {plain(local[0])}\n".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_PUT = do_POST = do_HEAD = do_GET

    def log_message(self, *_):
        pass


class Banner(socketserver.BaseRequestHandler):
    def handle(self):
        self.request.settimeout(30)
        try:
            self.request.sendall(b"hello\n")
            while data := self.request.recv(65536):
                self.request.sendall(data)
        except OSError:
            pass


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address, port, handler, context):
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.context = context
        super().__init__((address, port), handler, bind_and_activate=False)
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self.socket.setsockopt(socket.IPPROTO_IPV6, IPV6_FREEBIND, 1)
        else:
            self.socket.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)
        self.server_bind()
        self.server_activate()

    def process_request(self, request, client_address):
        note("connection", "tcp", client_address, request.getsockname())
        super().process_request(request, client_address)

    def finish_request(self, request, client_address):
        # The handshake belongs into the connection's own thread: it may never end.
        if self.context:
            request.settimeout(30)
            with self.context.wrap_socket(request, server_side=True) as secure:
                super().finish_request(secure, client_address)
        else:
            super().finish_request(request, client_address)

    def handle_error(self, request, client_address):
        pass


def echo(address, port):
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setsockopt(socket.IPPROTO_IPV6, IPV6_RECVPKTINFO, 1)
        sock.setsockopt(socket.IPPROTO_IPV6, IPV6_FREEBIND, 1)
    else:
        sock.setsockopt(socket.IPPROTO_IP, IP_PKTINFO, 1)
        sock.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)
    sock.bind((address, port))

    def loop():
        while True:
            data, extra, _, peer = sock.recvmsg(65536, 256)
            local, reply = address, []
            for level, kind, info in extra:
                # Answer from the address that was asked, which is not the one routing would take.
                if (level, kind) == (socket.IPPROTO_IP, IP_PKTINFO):
                    local = socket.inet_ntop(socket.AF_INET, info[8:12])
                    reply = [(level, kind, struct.pack("=I4s4s", 0, info[8:12], b"\0" * 4))]
                elif (level, kind) == (socket.IPPROTO_IPV6, IPV6_PKTINFO):
                    local = socket.inet_ntop(socket.AF_INET6, info[:16])
                    reply = [(level, kind, info[:16] + struct.pack("=I", 0))]
            note("datagram", "udp", peer, (local, port), size=len(data))
            try:
                sock.sendmsg([data], reply, 0, peer)
            except OSError:
                pass

    threading.Thread(target=loop, daemon=True).start()


def main():
    address = config.get("address")
    context = None
    if config.get("certificate"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config["certificate"])
    handlers = {"http": Web, "https": Web, "banner": Banner}
    for port, kind in config.get("tcp", {}).items():
        server = Server(address or "::", int(port), handlers[kind], context if kind == "https" else None)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    for port in config.get("udp", []):
        for one in [address] if address else ["0.0.0.0", "::"]:
            echo(one, int(port))
    print("READY", flush=True)
    threading.Event().wait()


main()
