#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0-or-later
"""A remote network driver that logs every request as it came, and answers just enough.

It makes a plain bridge and veths so that containers start; it gates nothing. --mode chooses the
answer to Join: half routes with DisableGatewayService (what agentgate answers), a gateway (so that
Docker calls ProgramExternalConnectivity), or neither.
"""

import argparse
import http.server
import json
import os
import socketserver
import subprocess
import threading

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--name", default="agentgate", help="driver name, for /run/docker/plugins/NAME.sock")
parser.add_argument("--mode", choices=["half-routes", "gateway", "none"], default="half-routes")
parser.add_argument("--drop-once", metavar="VERB", default="",
                    help="close the connection without an answer when VERB comes first, as a crash would")
parser.add_argument("--log", required=True, help="file that gets one JSON object for each request")
args = parser.parse_args()

networks, endpoints, dropped = {}, {}, set()
log_lock = threading.Lock()


def ip(*argv):
    subprocess.run(["ip", *argv], check=True, capture_output=True, text=True)


def create_network(body):
    bridge = "agn" + body["NetworkID"][:10]
    network = {"bridge": bridge, "gateways": []}
    ip("link", "add", bridge, "type", "bridge")
    for data in (body.get("IPv4Data") or []) + (body.get("IPv6Data") or []):
        if data.get("Gateway"):
            ip("addr", "add", data["Gateway"], "dev", bridge, *(["nodad"] if ":" in data["Gateway"] else []))
            network["gateways"].append(data["Gateway"].split("/")[0])
    ip("link", "set", bridge, "up")
    networks[body["NetworkID"]] = network
    return {}


def delete_network(body):
    network = networks.pop(body["NetworkID"], None)
    if network:
        ip("link", "del", network["bridge"])
    return {}


def create_endpoint(body):
    short = body["EndpointID"][:10]
    network = networks[body["NetworkID"]]
    asked = body["Interface"].get("MacAddress")
    address = body["Interface"].get("Address", "").split("/")[0]
    mac = asked or "02:42:" + ":".join(f"{int(part):02x}" for part in (address or "10.0.0.1").split("."))
    ip("link", "add", "agp" + short, "type", "veth", "peer", "name", "agc" + short, "address", mac)
    ip("link", "set", "agp" + short, "master", network["bridge"], "up")
    endpoints[body["EndpointID"]] = "agp" + short
    return {"Interface": {} if asked else {"MacAddress": mac}}


def delete_endpoint(body):
    port = endpoints.pop(body["EndpointID"], None)
    if port:
        subprocess.run(["ip", "link", "del", port], capture_output=True)
    return {}


def join(body):
    answer = {"InterfaceName": {"SrcName": "agc" + body["EndpointID"][:10], "DstPrefix": "eth"}}
    gateways = networks[body["NetworkID"]]["gateways"]
    if args.mode == "half-routes":
        answer["DisableGatewayService"] = True
        answer["StaticRoutes"] = [
            {"Destination": half, "RouteType": 0, "NextHop": gateway} for gateway in gateways
            for half in (("::/1", "8000::/1") if ":" in gateway else ("0.0.0.0/1", "128.0.0.0/1"))]
    elif args.mode == "gateway":
        for gateway in gateways:
            answer["GatewayIPv6" if ":" in gateway else "Gateway"] = gateway
    return answer


VERBS = {
    "Plugin.Activate": lambda _: {"Implements": ["NetworkDriver"]},
    "NetworkDriver.GetCapabilities": lambda _: {"Scope": "local", "ConnectivityScope": "local",
                                                "GwAllocChecker": True},
    "NetworkDriver.GwAllocCheck": lambda _: {},
    "NetworkDriver.CreateNetwork": create_network,
    "NetworkDriver.DeleteNetwork": delete_network,
    "NetworkDriver.CreateEndpoint": create_endpoint,
    "NetworkDriver.DeleteEndpoint": delete_endpoint,
    "NetworkDriver.EndpointOperInfo": lambda _: {"Value": {}},
    "NetworkDriver.Join": join,
    "NetworkDriver.Leave": lambda _: {},
    "NetworkDriver.ProgramExternalConnectivity": lambda _: {},
    "NetworkDriver.RevokeExternalConnectivity": lambda _: {},
}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        with log_lock, open(args.log, "a") as log:
            log.write(json.dumps({"method": self.command, "path": self.path, "version": self.request_version,
                                  "headers": [list(item) for item in self.headers.items()], "body": raw}) + "\n")
        if args.drop_once and self.path.endswith("." + args.drop_once) and args.drop_once not in dropped:
            dropped.add(args.drop_once)
            self.close_connection = True
            return
        verb = VERBS.get(self.path[1:])
        status, answer = 200, {}
        if verb is None:
            status, answer = 404, {"Err": "not implemented"}
        else:
            try:
                answer = verb(json.loads(raw) if raw.strip() else {})
            except (KeyError, ValueError, subprocess.CalledProcessError) as error:
                status, answer = 500, {"Err": f"{error} {getattr(error, 'stderr', '')}"}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_POST

    def address_string(self):
        return "docker"

    def log_message(self, *_):
        pass


class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


os.makedirs("/run/docker/plugins", exist_ok=True)
path = f"/run/docker/plugins/{args.name}.sock"
if os.path.exists(path):
    os.unlink(path)
server = Server(path, Handler)
print("READY", flush=True)
server.serve_forever()
