"""Where personal state is kept: in memory, or on disk where it would weigh on every round."""

from collections.abc import Sequence
from pathlib import Path

import torch

from idiolect.core import tree
from idiolect.core.tree import Tree
from idiolect.engine.backend import Backend
from idiolect.engine.disk_state import Shelf
from idiolect.engine.state_store import Store

_LIGHT, _HEAVY = 1 << 26, 1 << 32  # bytes of personal state that memory takes

Starts = Sequence[tuple[Tree, int]]
"""What clients begin with, and how many do, for each run."""


def on_disk(starts: Starts, backend: Backend, cohort: int | None, clients: int) -> bool:
    """Say whether personal state goes to disk: as told, or by its weight.

    In memory a round copies everyone's: nothing to speak of where most take part or all are few,
    and too much where a small cohort is drawn from very many.
    """
    weight = sum(tree.nbytes(start) * count for start, count in starts)
    if backend.personal != "auto" or not weight:
        return backend.personal == "disk" and weight > 0
    if backend.place.type == "cuda":
        return weight > torch.cuda.get_device_properties(backend.place).total_memory // 4
    few = cohort is not None and 4 * cohort <= clients
    return weight > (_LIGHT if few else _HEAVY)


def store(starts: Starts, backend: Backend, disk: bool, path: Path | None) -> Store | Shelf:
    """Make the place where personal state is kept."""
    if not disk:
        return Store(starts, backend.place)
    return Shelf(starts, backend.place, path, backend.personal_mb << 20)
