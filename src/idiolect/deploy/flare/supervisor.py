"""The lasting process of a server or a node: started, watched, started again, ended cleanly."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from idiolect.core.checkpoint import write_whole
from idiolect.deploy.disclosure import REMARK
from idiolect.deploy.flare import require
from idiolect.deploy.flare.job_layout import MODULES
from idiolect.deploy.flare.kits import HOST_FILE, NODE_FILE, MemberKit, settle
from idiolect.deploy.node_process import isolated, locked
from idiolect.deploy.serve_experiment import ServerSettings
from idiolect.deploy.site import NodeSettings
from idiolect.errors import DeployError

Say = Callable[[str], None]
_CALM = 60.0  # seconds after which an end counts as a first one
_PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0)  # seconds before each new start

# FLARE has no other way to tell a process beside it who has come: its log says so.
_SIGNS = {
    "server": {
        "New client ": "a node joined",
        "Server started": "the server is listening; waiting for nodes and for jobs",
    },
    "node": {
        "Successfully registered client": "registered with the server; waiting for a run",
    },
}


def keep_running(kit: MemberKit, own: NodeSettings | ServerSettings, say: Say) -> None:
    """Run a kit's process until interrupted, starting it again whenever it ends by itself.

    `own` is what the operator says of this machine.
    """
    require()
    settle(kit)
    name = NODE_FILE if isinstance(own, NodeSettings) else HOST_FILE
    write_whole(kit.home / name, own.to_json().encode())
    with locked(kit.home / "parent", 1.0) as free:
        if not free:
            raise DeployError(f"{kit.folder} is in use by another process of this machine")
        failures = 0
        while True:
            began = time.monotonic()
            with _started(kit) as process:
                say(f"{kit.role} {kit.name} started (process {process.pid}); log: {_log(kit)}")
                if kit.role == "node":
                    say(f"waiting for the server at {kit.host}:{kit.port}")
                _follow(kit, process, say)
            failures = 0 if time.monotonic() - began > _CALM else failures + 1
            pause = _PAUSES[min(failures, len(_PAUSES)) - 1] if failures else _PAUSES[0]
            say(f"the process ended (status {process.returncode}); starts again in {pause:g} s")
            time.sleep(pause)


def command(kit: MemberKit) -> list[str]:
    """Return the command that is a server's or a node's lasting process."""
    own = ["secure_train=true", f"org={kit.org}", "config_folder=config"]
    if kit.role == "server":
        config = "fed_server.json"
    else:
        config = "fed_client.json"
        own.insert(1, f"uid={kit.name}")
    # -P: nothing is imported from the folder it works in, the kit, where jobs are put too.
    python = [sys.executable, "-P", "-u", "-m", "idiolect.deploy.flare.job_guard"]
    return [*python, MODULES[kit.role], "-m", str(kit.folder), "-s", config, "--set", *own]


def _log(kit: MemberKit) -> Path:
    return kit.folder / "log.txt"


@contextlib.contextmanager
def _started(kit: MemberKit) -> Iterator["subprocess.Popen[bytes]"]:
    """Start the process in a group of its own; whatever happens, the whole group ends."""
    for mark in ("shutdown.fl", "restart.fl", "pid.fl"):
        (kit.folder / mark).unlink(missing_ok=True)
    kit.home.mkdir(parents=True, exist_ok=True)
    with (kit.home / "engine.out").open("ab") as words:
        process = subprocess.Popen(
            command(kit),
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            cwd=kit.folder,
            env=isolated(environment(), kit.folder),
            start_new_session=True,
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


def _follow(kit: MemberKit, process: "subprocess.Popen[bytes]", say: Say) -> None:
    """Tell what the logs show, until the process ends."""
    path, signs = _log(kit), _SIGNS[kit.role]
    own = kit.home / "node.log"  # of the training process
    places = {one: one.stat().st_size if one.exists() else 0 for one in (path, own)}
    while process.poll() is None:
        time.sleep(0.5)
        for line in _new_lines(path, places):
            for mark, words in signs.items():
                if mark in line:
                    say(words + (f": {line.split(mark)[1][:60]}" if mark.endswith(" ") else ""))
        for line in _new_lines(own, places):
            if words := node_words(line):
                say(words)


def _new_lines(path: Path, places: "dict[Path, int]") -> list[str]:
    """Return the lines that were added to a log since the last look."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(min(places[path], path.stat().st_size))  # the log may have been rotated
        text = file.read().decode(errors="replace")
        places[path] = file.tell()
    return text.splitlines()


def node_words(line: str) -> str:
    """Return what of a line in a training process's log is for the operator's eyes, if anything.

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
