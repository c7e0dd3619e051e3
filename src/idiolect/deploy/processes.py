"""Processes of a server or a node: what they may import, whose folder it is, when they end.

Light to import: the process that watches all others lives here for months.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from filelock import FileLock, Timeout

REMARK = "beside the other sites: "  # before each remark about a site's data in its node's log
_PATIENCE = 15.0  # seconds for a process of a job that was aborted to end
_PDEATHSIG = 1  # of prctl: the signal that a process gets when its parent ends


def isolated(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return an environment in which Python finds no module below a folder, nor where it starts.

    What the operator installed, or put on PYTHONPATH by a whole path, is found as before.
    """
    closed = folder.resolve()
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    kept = [one for one in given if os.path.isabs(one) and not _inside(one, closed)]
    left = {key: value for key, value in environment.items() if key != "PYTHONPATH"}
    paths = {"PYTHONPATH": os.pathsep.join(kept)} if kept else {}
    return {**left, **paths, "PYTHONSAFEPATH": "1"}


def _inside(path: str, folder: Path) -> bool:
    return Path(path).resolve().is_relative_to(folder)


@contextlib.contextmanager
def locked(home: Path, patience: float = _PATIENCE) -> Iterator[bool]:
    """Hold a folder for this process; False where another one does not let go."""
    home.mkdir(parents=True, exist_ok=True)
    lock = FileLock(home / ".lock")
    try:
        lock.acquire(timeout=patience, poll_interval=0.1)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def end_with_parent() -> None:
    """Have this process killed when its parent ends, however that does; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
