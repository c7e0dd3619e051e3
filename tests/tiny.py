"""A small experiment that trains in a second or two, for the tests of runs."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from idiolect.cli import app

TOML = """
name = "tiny"
seeds = [0, 1]
rounds = 6
cohort = 4

[data]
partition = { name = "iid", clients = 6, per_client = 30 }

[model]
name = "mlr"

[training]
batch = 10
lr = 0.05

[backend]
width = 4
checkpoint_every = 1

[[methods]]
name = "local"

[[methods]]
name = "fedavg"
momentum = 0.9

[[methods]]
name = "fedavg-ft"
tune_epochs = 2
"""


def write(folder: Path, text: str = TOML) -> Path:
    path = folder / "tiny.toml"
    path.write_text(text)
    return path


def command(*arguments: Any) -> list[str]:
    return [sys.executable, "-m", "idiolect", *map(str, arguments)]


def idiolect(*arguments: Any, cwd: Path, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run the command line for real."""
    environment = {**os.environ, "IDIOLECT_CACHE": str(cwd / "cache"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


def here(*arguments: Any, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Run it in this process, on one core too, where nothing depends on processes.

    Another would spend two seconds on imports.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(cwd)
            patch.setenv("IDIOLECT_CACHE", str(cwd / "cache"))
            done = CliRunner().invoke(app, [str(one) for one in arguments])
    finally:
        torch.set_num_threads(threads)
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def started(*arguments: Any, cwd: Path) -> "subprocess.Popen[str]":
    """Start the command line and leave it running."""
    environment = {**os.environ, "IDIOLECT_CACHE": str(cwd / "cache"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command(*arguments),
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def checkpoints(folder: Path) -> dict[str, int]:
    """Say when each checkpoint of a run was written, in nanoseconds."""
    found = {}
    for path in (folder / "checkpoints").glob("[!.]*.safetensors"):
        with contextlib.suppress(FileNotFoundError):
            found[path.name] = path.stat().st_mtime_ns
    return found


def findings(folder: Path) -> dict[str, Any]:
    """Read a result without the time it took."""
    content: dict[str, Any] = json.loads((folder / "result.json").read_text())
    for method in content["methods"].values():
        del method["speed"]
    return content
