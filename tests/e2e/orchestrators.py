# SPDX-License-Identifier: GPL-2.0-or-later
"""The examples for orchestrators, as they are in packaging/examples: Compose and Docker's SDK."""
import subprocess
import unittest

from common import *  # noqa: F401,F403
from labhost import fetch  # noqa: E402

EXAMPLES = os.path.join(ROOT, "packaging/examples")
PROBES = [("tcp", ALLOWED, 443), ("name", "", "api.allowed.test"), ("tcp", DENIED, 443), ("tcp", METADATA, 80)]
RELEASED = [True, True, False, False]


class Orchestrators(Case):
    def setUp(self):
        self.compose, environment = fetch.compose()
        self.environment = {**self.lab.environment(), **environment, "COMPOSE": " ".join(self.compose),
                            "COMPOSE_PROJECT_NAME": "agents", "AGENT_POLICY": "lab"}
        self.environment["PATH"] = os.path.dirname(AGENTGATE) + ":" + self.environment["PATH"]

    def call(self, *words, env=None):
        return subprocess.run(self.lab.nsenter(list(words)), capture_output=True, text=True, timeout=180,
                              stdin=subprocess.DEVNULL, env={**self.environment, **(env or {})})

    def up(self, **env):
        return self.call(os.path.join(EXAMPLES, "compose/up"), env=env)

    def down(self):
        return self.call(*self.compose, "-f", os.path.join(EXAMPLES, "compose/docker-compose.yml"), "down")

    def containers(self):
        return self.lab.docker("ps", "-aq", "--no-trunc").stdout.split()

    def test_compose(self):
        for runtime in ("runsc", "runc"):
            with self.subTest(runtime):
                result = self.up(AGENT_RUNTIME=runtime)
                self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
                containers = self.containers()
                self.assertEqual(len(containers), 2)
                for container in containers:
                    self.assertEqual(self.lab.inspect(container)["HostConfig"]["Runtime"], runtime)
                    self.assertEqual(self.world.state(container), "released")
                    self.reaches(container, PROBES, RELEASED)
                result = self.down()
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertEqual((self.containers(), self.world.leftovers()), ([], []))

    def test_compose_refused(self):
        self.lab.policy("gvisor-only", {"version": 1, "runtimes": ["runsc"], "allow": []})
        result = self.up(AGENT_RUNTIME="runc", AGENT_POLICY="gvisor-only")
        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        self.assertIn("is really runc", result.stdout)
        self.assertEqual((self.containers(), self.world.leftovers()), ([], []))
        self.assertNotIn("agents_agents", self.lab.docker("network", "ls", "--format", "{{.Name}}").stdout)

    def test_sdk(self):
        program = ["/usr/bin/python3", "-B", os.path.join(EXAMPLES, "python/run_agent.py")]
        result = self.call(*program, "--runtime", "runsc", "lab/busybox", "sleep", "1000")
        self.assertEqual(result.returncode, 0, result.stderr)
        container = result.stdout.strip()
        self.assertEqual(self.world.state(container), "released")
        self.reaches(container, PROBES, RELEASED)
        self.lab.docker("rm", "-f", container)
        for words, text in ((["--policy", "absent"], "absent"), (["--network", "bridge"], "bridge")):
            result = self.call(*program, *words, "lab/busybox", "sleep", "1000")
            self.assertEqual(result.returncode, 1)
            self.assertIn(text, result.stderr)
            self.assertEqual((self.containers(), self.world.leftovers()), ([], []))


if __name__ == "__main__":
    unittest.main(verbosity=2)
