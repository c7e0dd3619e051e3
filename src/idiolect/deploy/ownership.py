"""Whose run it is: whoever submitted it first, and nobody else goes on with it.

A run's name is no key: everyone may know it. The server, and each node for itself, writes down who
submitted a run before it keeps anything else of it, and compares from then on.
"""

import contextlib
import json
import os
from pathlib import Path

from idiolect.errors import ConfigError, DeployError

FOLDER = "owners"  # in a home: a file for each run
NOBODY = ""  # where there are no members: runs in one process, or --on local

_LONGEST = 64  # characters of a run's name


class NotOwner(ConfigError):
    """A run of someone else."""


def run_name(run: str) -> str:
    """Return a run's name if it can name files and nothing else."""
    if not (run.isascii() and run.isalnum() and len(run) <= _LONGEST):
        raise ConfigError(f"a run is named by at most {_LONGEST} letters and digits")
    return run


def claim(home: Path, run: str, submitter: str, *traces: Path) -> None:
    """Make a new run the submitter's, or check that it is; otherwise nothing is changed.

    `traces`: what there is of a run only if it began before; then somebody must own it.
    """
    path = _path(home, run)
    if not path.exists():
        if any(trace.exists() for trace in traces):
            raise NotOwner(
                f"nobody is known to own run {run} here (an older version kept no owners); start a "
                f"new run, or let the operator of this machine write {path.name} into {FOLDER}"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        # Of two at once only one creates the file.
        with contextlib.suppress(FileExistsError), path.open("x") as file:
            json.dump({"run": run, "submitter": submitter}, file)
            file.flush()
            os.fsync(file.fileno())
    check(home, run, submitter)


def check(home: Path, run: str, submitter: str) -> None:
    """Refuse a run that is not the submitter's, or that is not known here."""
    path = _path(home, run)
    try:
        known = json.loads(path.read_text())["submitter"]
    except FileNotFoundError:
        raise NotOwner(f"this server holds no run {run} of {submitter}") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DeployError(f"{path} is damaged; the operator must mend it") from error
    if known != submitter:
        raise NotOwner(
            f"run {run} was not started by {submitter}: only whoever started a run goes on with "
            "it, adds to it or uses its models; start a run of your own in another --out folder"
        )


def _path(home: Path, run: str) -> Path:
    return home / FOLDER / f"{run_name(run)}.json"
