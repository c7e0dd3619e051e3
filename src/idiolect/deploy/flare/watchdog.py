"""The process that an operator starts: it keeps the engine's running, and says what happens.

Light, as it lasts: nothing of the engine, and no torch. When it is killed the engine ends with it.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from idiolect.deploy.flare.job_layout import HOME, MODULES
from idiolect.deploy.processes import REMARK, end_with_parent, isolated, locked

_CALM = 15.0  # seconds after which an end counts as a first one: it had started
_PAUSES = (1.0, 1.0, 2.0, 5.0, 10.0)  # seconds before each new start
_OUT = "engine.out"  # what the engine prints: what its logs do not have
_OUT_LIMIT = 5 << 20  # bytes; then the file before it is replaced by it
_SETTLED = 2.0  # seconds for which a new certificate must lie there before it is used
_AGAIN = 300.0  # seconds before the same is said again

# FLARE has no other way to tell a process beside it who has come: its log says so.
_SIGNS = {
    "server": {
        "New client ": "a node joined",
        "Server started": "the server is listening; waiting for nodes and for jobs",
    },
    "node": {"Successfully registered client": "registered with the server; waiting for a run"},
}
_TROUBLE = (
    # What a log line has, and what it means to whoever reads this console. The first that fits.
    (
        "certificate has expired",
        "the server's certificate has expired: its operator must renew it",
    ),
    (
        "certificate is not yet valid",
        "the server's certificate is not valid yet: check this machine's clock, then the server's",
    ),
    (
        "certificate verify failed",
        "who answers at {where} is not this federation's server: check the address, or whether "
        "the kits were made anew",
    ),
    (
        "alert certificate expired",
        "the server refuses this kit's certificate, which has expired: ask for a renewed one "
        "(`idiolect federation renew`)",
    ),
    (
        "alert",
        "the server refuses this kit's certificate: it is of another federation, or was revoked; "
        "ask whoever made the kits",
    ),
    ("getaddrinfo", "the name {host} does not resolve here: check DNS, or server.host of the kits"),
    ("Name or service not known", "the name {host} does not resolve here: check DNS"),
    ("Connect call failed", "nobody answers at {where}: the server is down, or a firewall is shut"),
    ("address already in use", "port {port} is taken by another process of this machine"),
)
_WATCHED = ("failed with exception", "Connector [", "error while attempting to bind")


@dataclass(frozen=True)
class WatchedKit:
    """What is needed of a kit to run it."""

    folder: Path
    role: str
    name: str
    org: str
    host: str
    port: int

    @property
    def home(self) -> Path:
        """Where idiolect keeps its own files in the kit."""
        return self.folder / HOME

    @classmethod
    def read(cls, folder: Path) -> "WatchedKit":
        """Read what a kit says about itself."""
        raw = tomllib.loads((folder / "idiolect.toml").read_text())
        return cls(folder.resolve(), *(raw[key] for key in ("role", "name", "org", "host", "port")))


class Console:
    """Where the operator is told what happens: a line an event, as text or as JSON."""

    def __init__(self, kit: WatchedKit, as_json: bool) -> None:
        self._about = {"role": kit.role, "name": kit.name}
        self._json = as_json
        self._said: dict[str, float] = {}
        self.events = 0

    def say(self, text: str) -> None:
        """Say something; parts of it may be another member's words, so no control characters."""
        self.events += 1
        line = text = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
        if self._json:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            line = json.dumps({"time": stamp, **self._about, "event": text})
        print(line, flush=True)

    def say_rarely(self, text: str) -> None:
        """Say something that goes on happening, every few minutes."""
        now = time.monotonic()
        if now - self._said.get(text, -_AGAIN) >= _AGAIN:
            self._said[text] = now
            self.say(text)


def command(kit: WatchedKit) -> list[str]:
    """Return the command that is a server's or a node's long-running process."""
    own = ["secure_train=true", f"org={kit.org}", "config_folder=config"]
    if kit.role == "server":
        config = "fed_server.json"
    else:
        config = "fed_client.json"
        own.insert(1, f"uid={kit.name}")
    # -P: nothing is imported from the folder it works in, the kit, where jobs are put too.
    python = [sys.executable, "-P", "-u", "-m", "idiolect.deploy.flare.job_guard"]
    return [*python, MODULES[kit.role], "-m", str(kit.folder), "-s", config, "--set", *own]


def watch(kit: WatchedKit, console: Console) -> int:
    """Run a kit's engine until interrupted, starting it again whenever it ends by itself."""
    with locked(kit.home / "parent", 10.0) as free:
        if not free:
            words = f"error: {kit.folder} is in use by another process of this machine"
            print(words, file=sys.stderr)
            return 8
        if kit.role == "server" and (taken := taken_port(kit.port)):
            print(f"error: {taken}", file=sys.stderr)
            return 8
        failures = 0
        while True:
            began = time.monotonic()
            with _started(kit) as process:
                log = kit.folder / "log.txt"
                console.say(f"{kit.role} {kit.name} started (process {process.pid}); log: {log}")
                if kit.role == "node":
                    console.say(f"waiting for the server at {kit.host}:{kit.port}")
                why = _follow(kit, process, console)
            if why:
                console.say(f"{why}; starts again")
                continue
            failures = 0 if time.monotonic() - began > _CALM else failures + 1
            pause = _PAUSES[min(failures, len(_PAUSES)) - 1] if failures else _PAUSES[0]
            status = process.returncode
            console.say(f"the process ended (status {status}); starts again in {pause:g} s")
            time.sleep(pause)


def taken_port(port: int) -> str:
    """Say that a port is taken by another process; empty where it is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return (
                f"port {port} cannot be used ({error.strerror}): stop the process that has it "
                f"(`ss -ltnp 'sport = :{port}'`), or give the federation another server.port"
            )
    return ""


@contextlib.contextmanager
def _started(kit: WatchedKit) -> Iterator["subprocess.Popen[bytes]"]:
    """Start the process in a group of its own; whatever happens, the whole group ends."""
    for mark in ("shutdown.fl", "restart.fl", "pid.fl"):
        (kit.folder / mark).unlink(missing_ok=True)
    kit.home.mkdir(parents=True, exist_ok=True)
    printed = kit.home / _OUT
    if printed.exists() and printed.stat().st_size > _OUT_LIMIT:
        printed.replace(printed.with_suffix(".out.1"))
    with printed.open("ab") as words:
        process = subprocess.Popen(
            command(kit),
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            cwd=kit.folder,
            env=isolated(environment(), kit.folder),
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    try:
        yield process
    finally:
        end_group(process)


def end_group(process: "subprocess.Popen[bytes]", grace: float = 5.0) -> None:
    """End a process and all it started: politely, then not."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    process.wait()


def _follow(kit: WatchedKit, process: "subprocess.Popen[bytes]", console: Console) -> str:
    """Tell what the logs show, until the process ends, or should; return why it should."""
    engine, own = kit.folder / "log.txt", kit.home / "node.log"  # of the training process
    places = {one: one.stat().st_size if one.exists() else 0 for one in (engine, own)}
    certificate = _certificate(kit)
    while process.poll() is None:
        time.sleep(0.5)
        for line in _new_lines(engine, places):
            tell(kit, line, console)
        for line in _new_lines(own, places):
            if words := node_words(line):
                console.say(words)
        if (now := _certificate(kit)) and now != certificate:
            return "there is a new certificate"
    return ""


def tell(kit: WatchedKit, line: str, console: Console) -> None:
    """Say what a line of the engine's log means, if it means something to an operator."""
    for mark, words in _SIGNS[kit.role].items():
        if mark in line:
            console.say(words + (f": {line.split(mark)[1][:60]}" if mark.endswith(" ") else ""))
    for mark in (" CLOCK ", " VERSION "):
        if ("idiolect" in line and mark in line) or (" flare - " in line and mark in line):
            console.say(line.split(mark, 1)[1])
    if any(mark in line for mark in _WATCHED):
        for mark, words in _TROUBLE:
            if mark in line:
                where = f"{kit.host}:{kit.port}"
                console.say_rarely(words.format(where=where, host=kit.host, port=kit.port))
                return


def _certificate(kit: WatchedKit) -> bytes:
    """Return a kit's certificate, if it and its key have lain there for a moment."""
    base = kit.folder / "startup" / ("server" if kit.role == "server" else "client")
    files = [base.with_suffix(".crt"), base.with_suffix(".key"), base.parent / "rootCA.pem"]
    try:
        newest = max(one.stat().st_ctime for one in files)
        return files[0].read_bytes() if time.time() - newest > _SETTLED else b""
    except OSError:
        return b""


def _new_lines(path: Path, places: "dict[Path, int]") -> list[str]:
    """Return the lines that were added to a log since the last look."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        size = path.stat().st_size
        file.seek(places[path] if places[path] <= size else 0)  # the log may have been rotated
        text = file.read().decode(errors="replace")
        places[path] = file.tell()
    return text.splitlines()


def node_words(line: str) -> str:
    """Return what of a line in a training process's log the operator should see, if anything.

    Runs that begin and end, remarks about the site's data, and refusals with their cause; not those
    that a restart mends.
    """
    if "INFO opened run " in line:
        return f"a run has started: {line.split('INFO opened run ', 1)[1].split()[0]}"
    if "INFO run " in line and line.endswith(" is over"):
        return f"{line.split('INFO ', 1)[1]}; waiting for another"
    for mark, words in ((f"WARNING {REMARK}", REMARK), ("ERROR refused with ", "refused ")):
        if mark in line:
            said = line.split(mark, 1)[1]
            passing = said.startswith(("'closed'", "'protocol'", "'busy'"))
            return "" if passing else f"{words}{said[:400]}"
    return ""


_SETTINGS = {
    # Seconds in which an answer is sent again where no receipt came, and between two attempts. The
    # engine's own minute leaves thousands of waiting threads where rounds are short.
    "NVFLARE_STREAMING_RETRY_TIMEOUT": "10",
    "NVFLARE_STREAMING_RETRY_WAIT": "1",
    "MALLOC_ARENA_MAX": "2",  # heaps
}


def environment() -> Mapping[str, str]:
    """Return the environment of the engine's processes; what the operator has set is kept."""
    return {**_SETTINGS, **os.environ}


def main(words: list[str] | None = None, run: Callable[..., int] = watch) -> int:
    """Be the process."""
    parser = argparse.ArgumentParser(prog="idiolect")
    parser.add_argument("kit", type=Path)
    parser.add_argument("--log", choices=("text", "json"), default="text")
    parser.add_argument("--metrics", type=int, default=0)
    given = parser.parse_args(words)
    kit = WatchedKit.read(given.kit)
    console = Console(kit, given.log == "json")
    if given.metrics:
        from idiolect.deploy.flare.prometheus import serve_metrics

        serve_metrics(kit, console, given.metrics)
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        return run(kit, console)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


def _interrupted(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
