"""Run several methods into one folder and write what they found."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from idiolect.engine.callbacks import Watch
from idiolect.errors import CheckpointError, IdiolectError
from idiolect.experiment.protocols import Course
from idiolect.experiment.run_state import SHELF
from idiolect.experiment.train import finished, train
from idiolect.results import document, holdings, metrics, scaling
from idiolect.results.document import Document

EXPERIMENT = "experiment.toml"
_FILES = (
    EXPERIMENT,
    scaling.FILE,
    holdings.FILE,
    document.FILE,
    metrics.FILE,
    "comparison.json",
)
_FOLDERS = (
    "checkpoints",
    "globals",
    "models",
    "newcomers",
    "traces",
    "parts",
    "tune",
    scaling.VOCABULARY,
    SHELF,
)


def run(
    jobs: Sequence[Course],
    folder: Path,
    about: Mapping[str, Any],
    *,
    resume: bool = False,
    only: Sequence[str] = (),
    watch: Watch | None = None,
) -> Document:
    """Train every job in turn; finished ones are read from their checkpoints.

    The result is written after each method, so that a later one's failure does not cost it. With
    labels in `only`, other methods stand in the result if they were finished before.
    """
    wanted = [job for job in jobs if not only or job.label in only]
    left_out = [job for job in jobs if resume and job not in wanted]
    done = {job.label: kept for job in left_out if (kept := finished(job, folder))}
    content: Document = {}
    for job in wanted:
        earlier = list(done.values())
        done[job.label] = train(job, folder, resume=resume, watch=watch, earlier=earlier)
        outcomes = [done[job.label].outcome for job in jobs if job.label in done]
        content = document.document(about, outcomes, complete=len(outcomes) == len(jobs))
        metrics.write(folder, outcomes)
        document.write(folder, content)
    return content


@contextmanager
def opened(folder: Path, *, resume: bool, overwrite: bool = False) -> Iterator[Path]:
    """Hold a folder for a run; one that holds another run, or is in use, is refused."""
    held = [name for name in (*_FILES, *_FOLDERS) if (folder / name).exists()]
    if held and not (resume or overwrite):
        raise CheckpointError(
            f"{folder} already holds a run; add --resume to go on with it (or to see its result), "
            "or choose another --out"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise IdiolectError(
            f"cannot write to {folder}: {error.strerror}; choose another --out"
        ) from error
    with lock:
        _hold(lock, folder)
        if held and overwrite:
            cleared(folder)
        for part in folder.rglob(".*.part"):  # left by a process that was killed while writing
            part.unlink(missing_ok=True)
        yield folder


def _hold(lock: IO[str], folder: Path) -> None:
    """Lock a folder against other processes; the lock goes with the process, however it ends."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system: two runs in a folder are the user's risk
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise IdiolectError(
            f"another process is running in {folder}; wait until it ends, or choose another --out"
        ) from None


def cleared(folder: Path) -> None:
    """Remove a run's files from its folder, and nothing else."""
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)
    for name in _FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
