"""What a job of ours looks like: two configurations, and not a file more; names on the wire.

Light to import: FLARE's long-running processes compare every job that arrives with it.
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

SERVER = "config/config_fed_server.json"
CLIENT = "config/config_fed_client.json"
APP = "app"
HOME = "idiolect"  # where a kit keeps what idiolect writes; in it:
STATUS = "status.json"  # how the engine's long-running process is
DOING = "doing"  # runs that are being done, each with
PROGRESS = "progress.json"  # how far it is
META = "meta.json"

# FLARE's own programs, by the role of a kit.
MODULES = {
    "server": "nvflare.private.fed.app.server.server_train",
    "node": "nvflare.private.fed.app.client.client_train",
}

# What FLARE itself puts into each folder of a job: the submitter's signature and certificate.
SIGNED = (".__nvfl_sig.json", ".__nvfl_submitter.crt")
LARGEST = 16 << 20  # bytes of a file; an experiment may carry a list of words
_HERE = "idiolect.deploy.flare.flare_job"

# How server and nodes talk to each other's long-running processes.
FRESH = 25.0  # seconds; nodes are heard of every ten
CHANNEL, TOPIC, HELLO = "idiolect", "ask", "hello"
VERSION_SAID, TIME_SAID = "idiolect_version", "idiolect_time"  # headers of the server's hello
# Headers: which message; what became of it; a name for this process, drawn when it starts.
MARK, STATE, PROCESS = "idiolect_mark", "idiolect_state", "idiolect_process"
DONE, WORKING, QUEUED, UNKNOWN = "done", "working", "queued", "unknown"
TURN = 2.0  # seconds that a node lets the server wait before it says that it is still working


@dataclass(frozen=True)
class FlareTask:
    """What a job is to do, and of whom it is asked."""

    run: str  # its own number, through however many jobs
    sites: tuple[str, ...]
    least: int  # sites that must be there
    join: float  # seconds the others have
    experiment: str = ""  # as TOML
    only: tuple[str, ...] = ()  # labels; empty: all methods
    wanted: Sequence[Any] | None = None  # of newcomers: what they adapt to
    describe: bool = False  # statistics of the sites' data instead of training
    signed: str = ""  # by whoever submits it (`submission`)

    @property
    def kind(self) -> str:
        """What is asked for: run, adapt or describe."""
        return "describe" if self.describe else "run" if self.wanted is None else "adapt"


class ServerArguments(TypedDict):
    """The arguments of the server's side of a job."""

    run: str
    experiment: str
    sites: list[str]
    only: list[str]
    wanted: list[Any] | None
    describe: bool
    signed: str


def server(arguments: ServerArguments) -> dict[str, Any]:
    """Return the server's configuration."""
    return {
        "format_version": 2,
        "workflows": [{"id": "run", "path": f"{_HERE}.ServerSide", "args": arguments}],
        "components": [],
        "task_data_filters": [],
        "task_result_filters": [],
    }


def client() -> dict[str, Any]:
    """Return the configuration of a job on nodes, where none is ever started: the engine asks."""
    return {
        "format_version": 2,
        "executors": [],
        "components": [],
        "task_data_filters": [],
        "task_result_filters": [],
    }


def meta(run: str, least: int, sites: list[str]) -> dict[str, Any]:
    """Return what is said of a job: no id, which the server draws."""
    return {
        "name": f"idiolect-{run}",
        "resource_spec": {},
        "min_clients": least,
        "deploy_map": {APP: ["server", *sites]},
    }


def write(folder: Path, task: FlareTask) -> Path:
    """Write a job's folder: two configurations and no code."""
    arguments: ServerArguments = {
        "run": task.run,
        "experiment": base64.b64encode(task.experiment.encode()).decode(),
        "sites": list(task.sites),
        "only": list(task.only),
        "wanted": None if task.wanted is None else list(task.wanted),
        "describe": task.describe,
        "signed": task.signed,
    }
    files = {
        META: meta(task.run, task.least, list(task.sites)),
        f"{APP}/{SERVER}": server(arguments),
        f"{APP}/{CLIENT}": client(),
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1))
    return folder
