# SPDX-License-Identifier: GPL-2.0-or-later
"""Requests over Unix sockets, and what they took."""
import http.client
import json
import socket
import time


class Unix(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost", timeout=120)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def post(path, verb, body):
    """The answer and the milliseconds until it was there whole."""
    start = time.perf_counter()
    connection = Unix(path)
    connection.request("POST", verb, json.dumps(body))
    answer = connection.getresponse()
    text = answer.read()
    ms = (time.perf_counter() - start) * 1000
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{verb}: {answer.status}: {text[:500]}")
    return json.loads(text), ms
