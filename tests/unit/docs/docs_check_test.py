# SPDX-License-Identifier: GPL-2.0-or-later
"""docs-check against trees in which one thing was changed: it must name that thing.

usage: docs_check_test.py AGENTGATE AGENTGATED
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[3]
BINARIES = sys.argv[1:3]

# file, what is replaced, by what, what the check must say
CHANGES = [
    ("docs/cli.md", "`--timeout SECONDS`", "`--patience SECONDS`", ["--timeout is missing", "--patience does not exist"]),
    ("docs/cli.md", "| `health` |", "| `healthy` |", ["health is missing", "healthy does not exist"]),
    ("docs/cli.md", "| 64 |", "| 65 |", ["exit code 64 is missing", "exit code 65 does not exist"]),
    ("docs/concepts.md", "| 2 | released", "| 5 | released", ["exit code 2 is missing", "exit code 5 does not exist"]),
    ("packaging/man/agentgate.1", ".B 4\n", ".B 6\n", ["exit code 4 is missing", "exit code 6 does not exist"]),
    ("packaging/man/agentgated.8", "\\-\\-orphan\\-age", "\\-\\-orphan\\-years", ["--orphan-age is missing"]),
    ("docs/operations.md", "| `--log-level` |", "| `--loglevel` |", ["--log-level is missing"]),
    ("docs/operations.md", "| `60` |", "| `61` |", ["default of --orphan-age"]),
    ("docs/operations.md", "`AGENTGATE_RESOLVER`", "`AGENTGATE_DNS`", ["AGENTGATE_RESOLVER is missing"]),
    ("docs/driver.md", "| `agentgate.mtu` |", "| `agentgate.size` |", ["agentgate.mtu is missing"]),
    ("docs/policy.md", "| `grace_seconds` |", "| `grace` |", ["grace_seconds is missing", "grace does not exist"]),
    ("docs/policy.md", "| `optional` |", "| `maybe` |", ["optional is missing"]),
    ("plugin/policy/keys.h", '"reject",', '"reject", "quota",', ["policy key quota is missing"]),
    ("docs/api.md", "`POST /v1/refresh`", "`POST /v1/renew`", ["POST /v1/refresh is missing", "/v1/renew does not exist"]),
    ("docs/openapi.json", '"/v1/doctor"', '"/v1/nurse"', ["GET /v1/doctor is missing"]),
    ("plugin/control/control.cpp", '{"GET", "/v1/version"', '{"GET", "/v1/versions"', ["GET /v1/versions is missing"]),
    ("plugin/cli/cli.h", "kExitUnreachable = 4", "kExitUnreachable = 7", ["exit code 7 is missing"]),
    ("config.json", '"CAP_SYS_PTRACE"', '"CAP_SYS_BOOT"', ["CAP_SYS_BOOT is missing", "CAP_SYS_PTRACE does not exist"]),
    ("config.json", '"AGENTGATE_LOG_LEVEL"', '"AGENTGATE_LOUD"', ["AGENTGATE_LOUD does not exist"]),
    ("docs/managed-plugin.md", "| `state.source` |", "| `state.path` |", ["state.source is missing"]),
    ("docs/managed-plugin.md", "| `discovery` |", "| `found` |", ["mount discovery is missing"]),
    ("docs/managed-plugin.md", "| `info` |", "| `warn` |", ["default of AGENTGATE_LOG_LEVEL"]),
    ("README.md", "agentgate check a1", "agentgate inspect a1", ["command inspect does not exist"]),
    ("README.md", "agentgate doctor", "agentgate doctor --all-of-it", ["--all-of-it does not exist"]),
    ("README.md", "(docs/policy.md)", "(docs/policies.md)", ["link docs/policies.md leads nowhere"]),
    ("CONTRIBUTING.md", "`plugin/engine/engine.h`", "`plugin/engine/motor.h`", ["path plugin/engine/motor.h"]),
    ("CONTRIBUTING.md", "--preset debug &&", "--preset debugging &&", ["preset debugging does not exist"]),
    ("packaging/completion/agentgate.bash", "version policy\"", "versions policy\"",
     ["command version is missing", "command versions does not exist"]),
    ("packaging/completion/agentgate.bash", "--policy --all", "--policy", ["'agentgate refresh': option --all is missing"]),
    ("packaging/completion/agentgate.bash", "policy\\ list) echo \"--policy-directory", "policy\\ list) echo \"--directory",
     ["option --policy-directory is missing", "option --directory does not exist"]),
    ("packaging/completion/_agentgate", "'doctor:", "'nurse:", ["command of commands doctor is missing", "nurse does not"]),
    ("packaging/completion/_agentgate", "'--timeout[", "'--patience[", ["--timeout is missing", "--patience does not"]),
    ("packaging/completion/_agentgate", "--all[", "--most[", ["option of refresh --most does not exist"]),
    ("packaging/completion/_agentgate", "'--policy-directory[", "'--folder[",
     ["option of policy list --policy-directory is missing"]),
    ("packaging/completion/agentgate.fish", "-a health", "-a healthy", ["command health is missing", "healthy does not"]),
    ("packaging/completion/agentgate.fish", "-l policy-directory", "-l folder",
     ["option of agentgate policy list --policy-directory is missing"]),
    ("packaging/completion/agentgate.fish", "-l timeout", "-l patience", ["option of agentgate --timeout is missing"]),
    ("docs/run.md", "| 122 |", "| 123 |", ["exit code 122 is missing", "exit code 123 does not exist"]),
    ("docs/run.md", "docker agentgate run", "docker agentgate start", ["command start does not exist"]),
    ("plugin/cli/run.h", "kRunUndone = 122", "kRunUndone = 123", ["docs/run.md: exit code 123 is missing",
                                                                  "agentgate run --help: exit code 123 is missing"]),
    ("packaging/man/agentgate.1", ".B 124\n", ".B 123\n", ["exit code 124 is missing"]),
    ("docs/engines.md", "| story | as it must be", "| story | better than that", ["its table is not that of"]),
    ("docs/engines.json", '"ok": true', '"ok": false', ["docs/engines.json: 20.10 runc story: as it must be"]),
    ("docs/engines.json", '"what": "guard"', '"what": "guards"', ["28.5 runc and runsc guard was not tried"]),
    ("docs/threat-model.md", "`LayerOneAlone`", "`LayerNineAlone`", ["test LayerNineAlone does not exist"]),
]


def run(root):
    return subprocess.run([sys.executable, "-B", ROOT / "scripts/docs-check", "--root", root, *BINARIES],
                          capture_output=True, text=True)


def tree_with(folder, file, old, new):
    """The repository by links, with one file changed."""
    for entry in ROOT.iterdir():
        if entry.name.startswith((".git", "build")):
            continue
        if entry.name == pathlib.Path(file).parts[0]:
            (shutil.copytree if entry.is_dir() else shutil.copy)(entry, folder / entry.name)
        else:
            (folder / entry.name).symlink_to(entry)
    text = (folder / file).read_text()
    if old not in text:
        raise AssertionError(f"{file} has no '{old}' any more: adapt this test")
    (folder / file).write_text(text.replace(old, new))


class DocsCheck(unittest.TestCase):
    def test_notices_each_change(self):
        for file, old, new, expected in CHANGES:
            with self.subTest(file=file, change=new), tempfile.TemporaryDirectory() as folder:
                tree_with(pathlib.Path(folder), file, old, new)
                result = run(folder)
                self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
                for text in expected:
                    self.assertIn(text, result.stdout)

    def test_usage(self):
        result = subprocess.run([sys.executable, "-B", ROOT / "scripts/docs-check"], capture_output=True, text=True)
        self.assertEqual(result.returncode, 2)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
