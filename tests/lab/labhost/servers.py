# SPDX-License-Identifier: GPL-2.0-or-later
"""The far side: answers "lab HOST PORT" on every address and port it is given.

usage: servers.py CERT tcp:ADDRESS:PORT tls:ADDRESS:PORT udp:ADDRESS:PORT ...
"""
import socket
import ssl
import sys
import threading


def tcp(address, port, tls):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(128)

    def serve(connection):
        try:
            connection.settimeout(20)
            if tls:
                connection = tls.wrap_socket(connection, server_side=True)
            body = f"lab {address} {port}\n".encode()
            connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            while connection.recv(4096):
                connection.sendall(body)
        except OSError:
            pass
        finally:
            connection.close()

    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


def udp(address, port):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_DGRAM)
    sock.bind((address, port))
    while True:
        data, peer = sock.recvfrom(2048)
        sock.sendto(b"lab " + data, peer)


def main():
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(sys.argv[1])
    for spec in sys.argv[2:]:
        kind, rest = spec.split(":", 1)
        address, port = rest.rsplit(":", 1)
        target, args = (udp, (address, int(port))) if kind == "udp" else (
            tcp, (address, int(port), tls if kind == "tls" else None))
        threading.Thread(target=target, args=args, daemon=True).start()
    threading.Event().wait()


main()
