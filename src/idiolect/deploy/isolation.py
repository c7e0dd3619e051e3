"""Processes that import nothing from where they work: what arrives there is not code."""

import os
from collections.abc import Mapping
from pathlib import Path


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
