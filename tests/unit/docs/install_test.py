# SPDX-License-Identifier: GPL-2.0-or-later
"""scripts/install into a folder, and out of it again.

usage: install_test.py BUILD
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[3]
BUILD = pathlib.Path(sys.argv[1]).resolve()
FILES = {
    "opt/ag/bin/agentgate", "opt/ag/sbin/agentgated", "opt/ag/share/man/man1/agentgate.1",
    "opt/ag/share/man/man8/agentgated.8", "etc/systemd/system/agentgated.service",
    "opt/ag/share/bash-completion/completions/agentgate",
} | {f"opt/ag/share/agentgate/policies/{path.name}" for path in (ROOT / "packaging/policies").glob("*.json")}


class Install(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dest = pathlib.Path(folder.name)

    def install(self, *arguments, code=0):
        run = subprocess.run(["bash", ROOT / "scripts/install", *arguments], capture_output=True, text=True,
                             env={**os.environ, "DESTDIR": str(self.dest)})
        self.assertEqual(run.returncode, code, run.stdout + run.stderr)
        return run.stdout + run.stderr

    def files(self):
        return {str(path.relative_to(self.dest)) for path in self.dest.rglob("*") if path.is_file()}

    def test_in_and_out(self):
        for _ in range(2):  # an update is the same command
            self.install("--prefix", "/opt/ag/", "--build", str(BUILD))
            self.assertEqual(self.files(), FILES)
        policies = self.dest / "etc/agentgate/policies"
        self.assertEqual(policies.stat().st_mode & 0o777, 0o755)
        unit = (self.dest / "etc/systemd/system/agentgated.service").read_text()
        self.assertIn("\nExecStart=/opt/ag/sbin/agentgated\n", unit)
        self.assertEqual(unit.count("ExecStart="), 1)
        self.assertIn("\nBefore=docker.service\n", unit)
        (policies / "mine.json").write_text("{}")

        self.install("--uninstall", "--prefix", "/opt/ag")
        self.assertEqual(self.files(), {"etc/agentgate/policies/mine.json"})
        self.install("--uninstall", "--purge", "--prefix", "/opt/ag")
        self.assertEqual(self.files(), set())

    def test_refusals_change_nothing(self):
        for arguments in (["--prefix", "relative"], ["--prefix"], ["--nonsense"], ["--purge"], ["--start"],
                          ["--prefix", "/opt/a b"], ["--start", "--uninstall"]):
            with self.subTest(arguments):
                self.assertIn("--help", self.install(*arguments, code=64))
        self.assertIn("is missing", self.install("--build", str(self.dest), code=1))
        self.assertEqual(self.files(), set())

    def test_help_names_every_option(self):
        text = self.install("--help")
        script = (ROOT / "scripts/install").read_text()
        documented = (ROOT / "docs/install.md").read_text()
        for option in ("--prefix", "--build", "--start", "--uninstall", "--purge"):
            self.assertIn(f"  {option}", text)
            self.assertIn(f"`{option}", documented)
            self.assertIn(option, script)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
