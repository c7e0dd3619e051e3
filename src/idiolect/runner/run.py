"""Run several methods into one folder and write what they found."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from idiolect.errors import CheckpointError, IdiolectError
from idiolect.results import document, metrics, scaling
from idiolect.results.document import Document
from idiolect.runner.job import Job
from idiolect.runner.train import Trained, train
from idiolect.runner.watch import Watch

EXPERIMENT = "experiment.toml"
_FILES = (EXPERIMENT, scaling.FILE, document.FILE, metrics.FILE)
_FOLDERS = ("checkpoints", "globals", "models", "newcomers")


def run(
    jobs: Sequence[Job],
    folder: Path,
    about: Mapping[str, Any],
    *,
    resume: bool = False,
    watch: Watch | None = None,
) -> Document:
    """Train every job in turn; finished ones are read from their checkpoints.

    The result is written after each method, so that a later one's failure does not cost it.
    """
    done: list[Trained] = []
    content: Document = {}
    for job in jobs:
        done.append(train(job, folder, resume=resume, watch=watch, earlier=done))
        outcomes = [trained.outcome for trained in done]
        content = document.document(about, outcomes, complete=len(outcomes) == len(jobs))
        metrics.write(folder, outcomes)
        document.write(folder, content)
    return content


def opened(folder: Path, *, resume: bool, overwrite: bool = False) -> Path:
    """Return a folder to write a run to; one that holds another run is refused."""
    held = [name for name in (*_FILES, *_FOLDERS) if (folder / name).exists()]
    if held and overwrite:
        cleared(folder)
    elif held and not resume:
        raise CheckpointError(
            f"{folder} already holds a run; add --resume to go on with it (or to see its result), "
            "or choose another --out"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for part in folder.rglob(".*.part"):  # left by a process that was killed while writing
            part.unlink(missing_ok=True)
    except OSError as error:
        raise IdiolectError(
            f"cannot write to {folder}: {error.strerror}; choose another --out"
        ) from error
    return folder


def cleared(folder: Path) -> None:
    """Remove a run's files from its folder, and nothing else."""
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)
    for name in _FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
