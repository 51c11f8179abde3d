# SPDX-License-Identifier: GPL-2.0-or-later
"""`agentgate run` and `docker agentgate ...` with real clients and engines.

LAB_ENGINE and LAB_RUNTIME choose.
"""
import fcntl
import pty
import select
import subprocess
import termios
import time
import unittest

from common import *  # noqa: F401,F403

RUNTIME = os.environ.get("LAB_RUNTIME") or "runc"
PROBES = [("tcp", ALLOWED, 443), ("tcp", DENIED, 443), ("tcp", METADATA, 80)]
RELEASED, CLOSED = [True, False, False], [False, False, False]
# Says what it is, then tries the allowed address for ever and notes when it was reached.
AGENT = (f"echo up; while :; do nc -w 1 {ALLOWED} 443 -e /bin/true </dev/null 2>/dev/null "
         "&& echo reached && exit 5; sleep 0.1; done")


class DockerCli(Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        plugins = os.path.join(cls.lab.dir, ".docker/cli-plugins")  # HOME is the lab's folder
        os.makedirs(plugins)
        cls.plugin = os.path.join(plugins, "docker-agentgate")
        os.symlink(AGENTGATE, cls.plugin)
        cls.environment = {**cls.lab.environment(), "AGENTGATE_CONTROL_SOCKET": "/run/agentgate/agentgate.sock"}

    def tearDown(self):
        names = self.lab.docker("ps", "-aq").stdout.split()
        if names:
            self.lab.docker("rm", "-f", *names, check=False)

    def call(self, *words, stdin="", env=None, timeout=120):
        """On the host; (exit code, output, errors)."""
        result = subprocess.run(self.lab.nsenter(list(words)), input=stdin, capture_output=True, text=True,
                                timeout=timeout, env=env or self.environment)
        return result.returncode, result.stdout, result.stderr

    def run_(self, *words, **more):
        return self.call(AGENTGATE, "run", "--runtime", RUNTIME, *words, **more)

    def popen(self, *words):
        return subprocess.Popen(self.lab.nsenter(list(words)), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True, env=self.environment, start_new_session=True)

    def nothing_left(self):
        self.assertEqual(self.lab.docker("ps", "-aq").stdout, "")
        self.assertEqual(self.world.leftovers(), [])

    def runs_released(self):
        """The container is released, and not paused any more: before that a signal ends the run."""
        return any(one.get("state") == "released" for one in self.world.ag("status")[1]["endpoints"]) and \
            self.lab.docker("ps", "-q", "--filter", "status=running").stdout != ""

    # -- run --------------------------------------------------------------------------------------
    def test_detached(self):
        started = time.time()
        code, out, error = self.run_("-d", "--name", "r1", "lab/busybox", "sleep", "1000")
        print(f"run -d took {time.time() - started:.2f} s")
        self.assertEqual((code, error), (0, ""))
        self.assertEqual(out.strip(), self.lab.inspect("r1")["Id"])
        self.assertFalse(self.lab.inspect("r1")["State"]["Paused"])
        self.assertEqual(self.world.state("r1"), "released")
        self.reaches("r1", PROBES, RELEASED)
        self.assertEqual(self.world.ag("disarm", "r1")[0], 0)
        self.assertEqual(self.lab.probe("r1", PROBES), CLOSED)
        self.remove("r1")
        self.nothing_left()

    def test_nothing_is_reached_before_the_release(self):
        # An agent that tries from its first instruction on, and has two seconds for it: with a policy
        # whose names do not resolve it reaches nothing, and the far side saw nothing either.
        self.lab.policy("unresolved", {"version": 1, "runtimes": ["runsc", "runc"], "resolvers": [DNS],
                                       "allow": [{"name": "nowhere.test", "services": ["tcp/443"]}]})
        os.mkdir(self.lab.path("slow"))
        slow = self.lab.write("slow/docker", '#!/bin/sh\n[ "$1" = pause ] && sleep 2\nPATH=${PATH#*:}\nexec docker "$@"\n')
        os.chmod(slow, 0o755)
        env = {**self.environment, "PATH": os.path.dirname(slow) + ":" + self.environment["PATH"]}
        script = f"nslookup early.denied.test {DNS} >/dev/null 2>&1 & " + AGENT

        def asked():
            return len([line for line in self.lab.dns_queries("dns") if "early.denied.test" in line])
        code, out, error = self.run_("--rm", "--policy", "unresolved", "lab/busybox", "sh", "-c", script, env=env)
        self.assertEqual((code, out), (121, "up\n"), error)
        self.assertEqual(asked(), 0)
        self.nothing_left()
        # The control: the same agent with a policy.
        code, out, error = self.run_("--rm", "lab/busybox", "sh", "-c", script.replace(" & ", "; ", 1), env=env)
        self.assertEqual((code, out.split()), (5, ["up", "reached"]), error)
        self.assertGreater(asked(), 0)
        self.nothing_left()

    def test_foreground(self):
        code, out, error = self.run_("-i", "--rm", "lab/busybox", "sh", "-c",
                                     "echo first; sleep 1; cat; echo fault >&2; exit 7", stdin="typed\n")
        self.assertEqual((code, out, error), (7, "first\ntyped\n", "fault\n"))
        self.nothing_left()

    def test_a_terminal(self):
        for mode, test in (("-it", "test -t 0"), ("-i", "! test -t 0")):
            code, seen = self.in_terminal(mode, test + " && echo as-it-should; read line; echo got-$line; exit 3",
                                          b"word\n")
            self.assertEqual(code, 3, seen)
            self.assertIn("as-it-should", seen)
            self.assertIn("got-word", seen)
            self.nothing_left()

    def test_control_c_in_a_terminal(self):
        # With -t it is a byte for the container's own terminal; without, a signal for all of us.
        for mode in ("-it", "-i", "-d=false"):
            with self.subTest(mode):
                code, seen = self.in_terminal(mode, "trap 'echo told; exit 9' INT; while :; do sleep 0.1; done", b"\3")
                self.assertEqual(code, 9, seen)
                self.assertIn("told", seen)
                self.nothing_left()

    def in_terminal(self, mode, script, typed):
        """Runs the script in a container, from a terminal; types once it is released."""
        leader, follower = pty.openpty()
        process = subprocess.Popen(
            self.lab.nsenter([AGENTGATE, "run", "--runtime", RUNTIME, mode, "--rm", "lab/busybox", "sh", "-c", script]),
            stdin=follower, stdout=follower, stderr=follower, env=self.environment, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        os.close(follower)
        seen, end, ready = "", time.time() + 90, 0
        while time.time() < end:
            if not ready and self.runs_released():
                ready = time.time() + 1  # for the script to begin
            if ready and time.time() > ready and typed:
                os.write(leader, typed)
                typed = b""
            if not select.select([leader], [], [], 0.2)[0]:
                continue
            try:
                seen += os.read(leader, 4096).decode()
            except OSError:  # the last one has closed its end
                break
        os.close(leader)
        return process.wait(20), seen

    def test_refused(self):
        cidfile = self.lab.path("cid")
        for words, text in ((("--policy", "absent"), "absent"), (("--restart", "always"), "--restart no")):
            for mode in (("-d",), ("--rm",), ()):
                with self.subTest(words=words, mode=mode):
                    code, out, error = self.run_(*mode, "--cidfile", cidfile, *words, "lab/busybox", "sleep", "1000")
                    if "always" in words and "--rm" in mode:  # which Docker itself refuses
                        self.assertEqual(code, 125, error)
                    else:
                        self.assertEqual((code, out), (121, ""), error)
                        self.assertIn(text, error)
                        self.assertIn("was removed", error)
                    self.assertFalse(os.path.exists(cidfile))
                    self.nothing_left()

    def test_what_would_be_refused_does_not_run_at_all(self):
        self.lab.standard_policy("gvisor-only", runtimes=["runsc"])
        folder = self.lab.path("ran")
        os.makedirs(folder, exist_ok=True)
        run = ("-v", folder + ":/ran", "lab/busybox", "sh", "-c", "touch /ran/it; sleep 1000")
        for words, text in ((("--runtime", "runc", "--policy", "gvisor-only"), "runc"),
                            (("--pid", "host"), "--pid"), (("--restart", "always"), "--restart no"),
                            (("-p", "8080:80"), "-p")):
            with self.subTest(words=words):
                code, _, error = self.run_("-d", *words, *run)
                self.assertEqual(code, 121, error)
                self.assertIn(text, error)
                self.assertIn("it was not started", error)
                self.assertEqual(os.listdir(folder), [])
                self.nothing_left()
        code, _, error = self.run_("-d", *run)  # the folder would show it
        self.assertEqual(code, 0, error)
        wait_for("the program", lambda: os.listdir(folder) == ["it"])
        self.tearDown()

    def test_the_network(self):
        code, _, error = self.run_("-d", "--network", "bridge", "lab/busybox", "sleep", "1000")
        self.assertEqual(code, 121, error)
        self.assertIn("was not started", error)
        self.lab.docker("network", "create", "-d", "agentgate", "--subnet", "172.30.9.0/24", "second")
        try:
            code, _, error = self.run_("-d", "lab/busybox", "sleep", "1000")
            self.assertEqual(code, 125)
            self.assertIn("agents", error)
            self.assertIn("second", error)
            code, _, error = self.run_("-d", "--network", "agents", "lab/busybox", "sleep", "1000")
            self.assertEqual(code, 0, error)
        finally:
            self.tearDown()
            self.lab.docker("network", "rm", "second")
        self.nothing_left()

    def test_dockers_exit_codes(self):
        for words in (("lab/busybox", "nosuchprogram"), ("lab/busybox", "/etc"), ("--no-such-option", "lab/busybox")):
            dockers = self.lab.docker("run", "--rm", "--runtime", RUNTIME, "--network", "agents", *words,
                                      check=False).returncode
            self.assertIn(dockers, (125, 126, 127, 128))
            for mode in (("-d",), ("--rm",), ()):
                with self.subTest(words=words, mode=mode):
                    code, out, error = self.run_(*mode, *words)
                    self.assertEqual(code, dockers, error)
                    self.assertEqual(out, "")
                    self.assertNotEqual(error, "")
                    self.nothing_left()

    def test_one_that_ends_at_once(self):
        # Before the pause, mostly; where the pause was quicker, it was released and ended then.
        for mode in (("-d",), ("--rm",)):
            code, _, error = self.run_(*mode, "lab/busybox", "true")
            self.assertIn(code, (121, 0), error)
            if code == 121:
                # The engine may still pause what is just ending; then the arm sees it.
                self.assertRegex(error, r"ended before it could be armed \(its exit code: 0\)|is not running")
                self.assertIn("was removed", error)
            else:
                self.tearDown()
            self.nothing_left()

    def test_the_name_is_in_use(self):
        self.assertEqual(self.run_("-d", "--name", "r2", "lab/busybox", "sleep", "1000")[0], 0)
        code, _, error = self.run_("-d", "--name", "r2", "lab/busybox", "sleep", "1000")
        self.assertEqual(code, 125)
        self.assertIn("in use", error)
        self.assertEqual(self.world.state("r2"), "released")  # the other one is as it was
        self.remove("r2")

    def test_interrupted(self):
        for delay in (0.05, 0.2, 0.4, 0.6, 0.8, 1.1, 1.5):
            for mode in ("-d", "--rm"):
                process = self.popen(AGENTGATE, "run", "--runtime", RUNTIME, mode, "lab/busybox", "sh", "-c",
                                     "trap 'exit 77' INT; while :; do sleep 0.1; done")
                time.sleep(delay)
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does
                try:
                    out, error = process.communicate(timeout=5)
                except subprocess.TimeoutExpired:  # it was released, but had no trap yet
                    os.killpg(process.pid, signal.SIGINT)
                    out, error = process.communicate(timeout=60)
                print(f"interrupted after {delay} s: {mode}: exit {process.returncode}")
                if process.returncode == 0 or out.strip():  # it was quicker, or had just said so
                    self.assertEqual(mode, "-d")
                    self.lab.docker("rm", "-f", out.strip())
                elif process.returncode != -signal.SIGINT:  # that was before it had begun
                    self.assertIn(process.returncode, (130,) if mode == "-d" else (130, 77), error)
                self.nothing_left()

    def test_signals_reach_the_container(self):
        process = self.popen(AGENTGATE, "run", "--runtime", RUNTIME, "--rm", "lab/busybox", "sh", "-c",
                             "trap 'echo told; exit 9' TERM; echo up; while :; do sleep 0.1; done")
        self.assertEqual(process.stdout.readline(), "up\n")
        wait_for("the release", self.runs_released)
        # The program alone, not its group (nsenter has become the program).
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=60)
        self.assertEqual((process.returncode, out), (9, "told\n"), error)
        self.nothing_left()

    def test_daemon_away(self):
        self.world.kill_daemon()
        try:
            code, _, error = self.run_("-d", "lab/busybox", "sleep", "1000")
            self.assertEqual(code, 124, error)
        finally:
            self.world.start_daemon()
        self.nothing_left()

    # -- docker agentgate -------------------------------------------------------------------------
    def test_metadata_and_help(self):
        metadata = json.loads(self.call(self.plugin, "docker-cli-plugin-metadata")[1])
        self.assertEqual(metadata["SchemaVersion"], "0.1.0")
        self.assertIn(metadata["ShortDescription"], self.call("docker", "--help")[1])
        for words in (("docker", "agentgate", "--help"), ("docker", "help", "agentgate")):
            code, out, _ = self.call(*words)
            self.assertEqual(code, 0)
            self.assertIn("Usage: docker agentgate [OPTIONS] SUBCOMMAND", out)
        for words in (("docker", "agentgate", "arm", "--help"), ("docker", "help", "agentgate", "arm")):
            self.assertIn("Usage: docker agentgate arm", self.call(*words)[1])
        self.assertIn("Usage: docker agentgate run", self.call("docker", "agentgate", "run", "--help")[1])

    def test_completion(self):
        code, out, _ = self.call("docker", "__complete", "agentgate", "disa")
        self.assertEqual(code, 0)
        if self.ENGINE != "20.10":  # whose client does not ask plugins
            self.assertIn("disarm\t", out)

    def test_the_commands_by_docker(self):
        self.lab.container("p1", "agents", RUNTIME)
        self.assertEqual(self.call("docker", "agentgate", "arm", "p1")[0], 1)  # not paused: arm's own code
        self.lab.docker("pause", "p1")
        self.assertEqual(self.call("docker", "agentgate", "arm", "p1")[0], 0)
        self.lab.docker("unpause", "p1")
        self.assertEqual(json.loads(self.call("docker", "agentgate", "--json", "check", "p1")[1])["outcome"], "released")
        self.assertEqual(self.call("docker", "agentgate", "disarm", "p1")[0], 0)
        self.assertEqual(self.call("docker", "agentgate", "fly")[0], 64)
        self.remove("p1")

    def test_run_by_docker(self):
        socket = self.environment["DOCKER_HOST"]
        elsewhere = {**self.environment, "DOCKER_HOST": "unix:///nonexistent.sock"}
        without = {key: value for key, value in self.environment.items() if key != "DOCKER_HOST"}
        self.call("docker", "context", "create", "lab", "--docker", f"host={socket}")
        for words, env in ((["docker", "agentgate"], self.environment),
                           (["docker", "-H", socket, "agentgate"], elsewhere),
                           (["docker", f"--host={socket}", "-D", "agentgate"], elsewhere),
                           (["docker", "--context", "lab", "agentgate"], without),
                           (["docker", "agentgate"], {**without, "DOCKER_CONTEXT": "lab"})):
            with self.subTest(words):
                code, out, error = self.call(*words, "run", "--runtime", RUNTIME, "-d", "--name", "p2",
                                             "lab/busybox", "sleep", "1000", env=env)
                self.assertEqual(code, 0, error)
                self.assertEqual(self.world.state("p2"), "released")
                self.remove("p2")
        code, _, error = self.call("docker", "agentgate", "run", "-d", "lab/busybox", "sleep", "1", env=elsewhere)
        self.assertEqual(code, 125, error)
        code, out, error = self.call("docker", "agentgate", "run", "--runtime", RUNTIME, "--rm", "lab/busybox", "sh",
                                     "-c", "sleep 1; echo out; exit 6")
        self.assertEqual((code, out), (6, "out\n"), error)
        self.assertEqual(self.call("docker", "agentgate", "run", "-d", "--policy", "absent", "lab/busybox")[0], 121)
        self.nothing_left()

    def test_docker_is_told_to_stop(self):
        if self.ENGINE == "20.10":
            return  # its client waits for the plugin and tells it nothing
        process = self.popen("docker", "agentgate", "run", "--runtime", RUNTIME, "--rm", "lab/busybox", "sh", "-c",
                             "trap 'echo told; exit 9' TERM; echo up; while :; do sleep 0.1; done")
        self.assertEqual(process.stdout.readline(), "up\n")
        wait_for("the release", self.runs_released)
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=60)
        self.assertEqual(out, "told\n", error)
        self.nothing_left()


if __name__ == "__main__":
    unittest.main(verbosity=2)
