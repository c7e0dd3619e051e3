"""What crosses the network in a round, and what of it can be joined."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from idiolect.core import tree
from idiolect.core.method import Method
from idiolect.core.tree import Tree
from idiolect.data.federation import TrainData
from idiolect.engine.client_group import CohortRequest
from idiolect.engine.sampling import Attendance
from idiolect.errors import MethodError

Crossing = dict[str, dict[str, list[int]]]
"""What goes `up`, comes `down` and `stays`, for one client in one round: leaves and shapes."""


class Traffic(NamedTuple):
    """What crossed the network in one round of one run."""

    clients: int
    bytes_down: int
    bytes_up: int
    public_bytes: int = 0  # public examples that clients got at their first round, counted apart


class Handout:
    """What it costs to hand every client the public examples once, in the first round it is in."""

    def __init__(self, method: Method, lessons: Sequence[TrainData]) -> None:
        self._each = [
            len(own.public) * int(np.asarray(own.public.x[:1]).nbytes)
            if own.public is not None and method.public == "clients"
            else 0
            for own in lessons
        ]
        self._had: list[set[int]] = [set() for _ in lessons]
        self._rounds = 0  # those that are counted in `_had`

    def added(
        self,
        traffic: Sequence[Traffic],
        cohorts: Sequence[np.ndarray],
        round: int,
        attendance: Sequence[Attendance],
    ) -> list[Traffic]:
        """Add a round's share to its traffic; who came before tells a resumed run's past."""
        if any(self._each):
            for before in range(self._rounds, round):
                for own, had in zip(attendance, self._had, strict=True):
                    had |= set(own.training(before).tolist())
        self._rounds = round + 1
        told = []
        for run, (one, cohort) in enumerate(zip(traffic, cohorts, strict=True)):
            new = set(cohort.tolist()) - self._had[run]
            self._had[run] |= new
            told.append(one._replace(public_bytes=len(new) * self._each[run]))
        return told


def counted(call: CohortRequest, reports: Tree) -> Traffic:
    """Count exactly what would cross the network: trees down and up, leaf by leaf."""
    clients = len(call.cohort)
    down = clients * tree.nbytes(call.sent.shared) + tree.nbytes(call.sent.own)
    return Traffic(clients, down, tree.nbytes(reports))


def crossed(call: CohortRequest, reports: Tree, personal: Tree, group: Tree = ()) -> Crossing:
    """Name what would cross the network and what would not; of one client, so no client axis."""

    def shapes(held: Tree, stacked: bool) -> dict[str, list[int]]:
        return {name: list(leaf.shape)[stacked:] for name, leaf in tree.named(held).items()}

    return {
        "up": shapes(reports, True),
        "down": {
            **shapes(call.sent.shared, False),
            **shapes(call.sent.own, True),
            **shapes(group, False),
        },
        "stays": shapes(personal, True),
    }


def refuse_unequal(parts: list[Tree]) -> None:
    """Across architectures only equal shapes can be aggregated; name the leaf that differs."""
    if len(parts) < 2:
        return
    named = [tree.named(part) for part in parts]
    for other in named[1:]:
        for name in sorted(set(named[0]) | set(other)):
            shapes = [
                tuple(leaves[name].shape[1:]) if name in leaves else "absent"
                for leaves in (named[0], other)
            ]
            if shapes[0] != shapes[1]:
                raise MethodError(
                    f"report leaf {name!r} is {shapes[0]} for one architecture and {shapes[1]} for "
                    "another; across architectures report only tensors of equal shape, such as "
                    "soft predictions"
                )
