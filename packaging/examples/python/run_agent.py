#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0-or-later
"""Starts a container on an agentgate network, arms it and lets it go on.

usage: run_agent.py [--network NAME] [--policy NAME] [--runtime NAME] IMAGE [COMMAND...]
Prints the container's id. Exit 1: it was not released, and was removed.

With Docker's SDK (Debian: python3-docker) and the control API of agentgate (docs/api.md).
"""
import argparse
import contextlib
import http.client
import json
import socket
import sys

import docker

CONTROL_SOCKET = "/run/agentgate/agentgate.sock"


class NotReleased(Exception):
    """The report's "reason" says why, and mostly what to do."""


class Control(http.client.HTTPConnection):
    """The daemon's control socket."""

    def __init__(self, path=CONTROL_SOCKET, timeout=60):
        super().__init__("agentgate", timeout=timeout)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def ask(operation, container_id, policy=None):
    """The report of an arm or disarm (docs/openapi.json)."""
    body = {"container": container_id}
    if policy:
        body["policy"] = policy
    control = Control()
    try:
        control.request("POST", "/v1/" + operation, json.dumps(body), {"Content-Type": "application/json"})
        return json.loads(control.getresponse().read())
    finally:
        control.close()


def run_agent(client, image, command=None, network="agents", policy=None, **options):
    """A released container. Whatever goes wrong before that, the container is removed."""
    driver = client.networks.get(network).attrs["Driver"]
    if driver.partition(":")[0].rpartition("/")[2] != "agentgate":
        # On any other network it would be open from its start on.
        raise NotReleased(f"network {network} is of driver {driver}")
    container = client.containers.create(image, command, network=network, **options)
    try:
        container.start()  # closed
        container.pause()
        report = ask("arm", container.id, policy)
        if report.get("outcome") != "released":
            raise NotReleased(report.get("reason") or report)
        container.unpause()
    except BaseException:
        # The arm may have been done though its answer was lost, and the removal can fail.
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            ask("disarm", container.id)
        container.remove(force=True, v=True)
        raise
    return container


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="agents")
    parser.add_argument("--policy")
    parser.add_argument("--runtime")
    parser.add_argument("image", metavar="IMAGE")
    parser.add_argument("command", metavar="COMMAND", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    try:
        container = run_agent(docker.from_env(), args.image, args.command or None, args.network, args.policy,
                              runtime=args.runtime)
    except (NotReleased, docker.errors.DockerException, OSError) as error:
        print(f"run_agent: {error}", file=sys.stderr)
        return 1
    print(container.id)
    return 0


if __name__ == "__main__":
    sys.exit(main())
