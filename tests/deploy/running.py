"""A real federation on loopback: kits, a server and nodes as processes, ended whatever happens."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from typer.testing import CliRunner

from idiolect.cli import app

SMALL = """
min_sites = 1
min_cohort = 1
min_batch = 1
min_examples = 1
min_scored = 0
max_rounds = 5000
max_seeds = 100
max_reports = 100000
max_runs = 1000
short_batches = true
"""
"""What sites with a few rows of data that are no secret allow."""

ADMIN, MEMBER = "lead@hub.org", "guest@hub.org"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Running:
    """The processes of a federation of `idiolect` commands."""

    def __init__(
        self,
        folder: Path,
        nodes: int = 4,
        policy: str | None = SMALL,
        leads: Sequence[str] = (ADMIN,),
    ) -> None:
        self.policy = policy
        self._leads = leads
        self.folder = folder
        self.kits = folder / "kits"
        self.sites = [f"site-{n}" for n in range(nodes)]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._port = free_port()
        self.provision("init")

    def provision(self, verb: str, *options: str) -> str:
        """Make or change kits for the sites there are; returns what was printed.

        In this process: another would spend two seconds on imports, and signs no better.
        """
        project = self.folder / "project.toml"
        sites = ", ".join(f'{{ name = "{site}" }}' for site in self.sites)
        leads = ", ".join(f'{{ email = "{lead}" }}' for lead in self._leads)
        project.write_text(
            f'name = "test"\nserver = {{ host = "localhost", port = {self._port} }}\n'
            f"sites = [{sites}]\n"
            f'admins = [{leads}, {{ email = "{MEMBER}", role = "member" }}]\n'
        )
        words = ("federation", verb, str(project), "--out", str(self.kits), *options)
        done = CliRunner().invoke(app, words)
        if done.exit_code:
            ended = subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)
            raise CommandFailed(ended, self.told())
        for site in self.sites if verb in ("init", "add") else ():
            self.allow(site, self.policy)
        return done.stdout

    def allow(self, site: str, policy: str | None) -> None:
        """Write what a site allows; None leaves its kit as it was made."""
        if policy is not None:
            (self.kits / site / "policy.toml").write_text(policy)

    def start(
        self,
        name: str,
        *options: str,
        before: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the server or a node, by way of another command and with variables if asked."""
        verb = "server" if name == "server" else "node"
        with (self.folder / f"{name}.out").open("ab") as words:
            self.processes[name] = subprocess.Popen(
                [*before, sys.executable, "-m", "idiolect", verb, str(self.kits / name), *options],
                stdout=words,
                stderr=words,
                cwd=self.folder,
                env={**os.environ, **(environment or {})},
            )

    def start_all(self) -> None:
        """Start everyone, each node with its client's share of the experiment's data."""
        self.start("server")
        for number, site in enumerate(self.sites):
            self.start(site, "--data", "embedded", "--client", str(number))

    def command(self, *words: str, timeout: float = 240) -> "subprocess.CompletedProcess[str]":
        """Run a command to its end."""
        done = subprocess.run(
            [sys.executable, "-m", "idiolect", *words],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=self.folder,
            check=False,
        )
        if done.returncode:
            raise CommandFailed(done, self.told())
        return done

    def run(self, experiment: Path, out: Path, *options: str, kit: str = ADMIN) -> str:
        """Run an experiment on the federation; returns what was printed."""
        words = ["run", str(experiment), "--on", str(self.kits / kit), "--out", str(out), *options]
        return self.command(*words).stdout

    def told(self) -> str:
        """Return what everyone printed and the end of the engine's error logs."""
        parts = [
            f"{path.name}:\n{path.read_text()}"
            for path in sorted(self.folder.glob("*.out"))
            if path.is_file()
        ]
        for path in sorted(self.kits.rglob("*.log")) + sorted(self.kits.rglob("error_log.txt")):
            parts.append(f"{path}:\n{path.read_text(errors='replace')[-1500:]}")
        return "\n".join(parts)

    def engine(self, name: str) -> list[int]:
        """Return the numbers of the engine's processes of a kit, parents first."""
        found = []
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if b"-m" in words and str(self.kits / name).encode() in words:
                    if any(word.startswith(b"nvflare.") for word in words):
                        age = (folder / "stat").read_text().rsplit(")", 1)[1].split()[19]
                        found.append((int(age), int(folder.name)))
        return [pid for _, pid in sorted(found)]  # numbers start over, ages do not

    def training(self, name: str) -> list[int]:
        """Return the numbers of a node's processes that train: what its job has started."""
        own, found = self.engine(name), []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit():
                    parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
                    if parent in own and int(folder.name) not in own:
                        found.append(int(folder.name))
        return found

    def close(self) -> None:
        """End every process, politely first, and make sure of it."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        # A job's process ends by itself when its parent is gone; it may take a moment.
        until = time.monotonic() + 60
        while left := [pid for name in ("server", *self.sites) for pid in self.engine(name)]:
            if time.monotonic() > until:
                break
            time.sleep(0.1)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + 5
        while any(self.engine(name) for name in ("server", *self.sites)):
            if time.monotonic() > until:
                break
            time.sleep(0.1)
        assert not left, f"processes outlived their parents: {left}"


class CommandFailed(AssertionError):
    """A command that ended with an error, and all that was printed meanwhile."""

    def __init__(self, done: "subprocess.CompletedProcess[str]", told: str) -> None:
        self.done = done
        super().__init__(f"{done.args} ended with {done.returncode}: {done.stderr}\n{told}")
