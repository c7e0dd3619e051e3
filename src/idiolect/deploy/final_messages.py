"""What nodes tell each other by way of the hub when training is over: on the wire, and in sum."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from idiolect.core import tree
from idiolect.core.method import Report
from idiolect.core.tree import Tree
from idiolect.deploy import wire
from idiolect.deploy.refusals import Refused
from idiolect.engine.final_exchange import Sums, added, fair, without
from idiolect.engine.server_update import Traffic

MOST_TOLD = 100_000  # numbers; sums cross as text in a message's head, which has a limit


class Hearing(NamedTuple):
    """What nodes are to hear: a sum, whose numbers are in it, and what crossed for it."""

    sums: Sums
    counted: frozenset[int] = frozenset()
    traffic: Traffic = Traffic(0, 0, 0)

    @property
    def plain(self) -> dict[str, Any]:
        """The sums as JSON has them, to the last digit; compression would round them."""
        return {"sums": {name: leaf.tolist() for name, leaf in self.sums.items()}}


def heard(found: Mapping[int, Tree], up: int) -> Hearing | None:
    """Add up what nodes told."""
    if not found:
        return None
    present = sorted(found)
    sums = added(tree.stack([found[client] for client in present]))
    return Hearing(sums, frozenset(present), _traffic(sums, len(present), (0, up)))


def heard_by_sum(present: Sequence[int], mean: Report, up: int, more: Sequence[int]) -> Hearing:
    """Read the same out of a sum under masks."""
    sums = {name: leaf * mean.size for name, leaf in tree.named(mean.params).items()}
    crossed = (more[0], up + more[1])
    return Hearing(sums, frozenset(present), _traffic(sums, len(present), crossed))


def _traffic(sums: Sums, nodes: int, more: Sequence[int]) -> Traffic:
    # Models that are sent to be scored are not counted, here or in a simulation.
    return Traffic(0, nodes * tree.nbytes(dict(sums)) + more[0], more[1])


def hidden(told: Tree) -> Report:
    """Make of what a node tells what it adds to a sum under masks; nothing if it is not fair."""
    rows = tree.map(lambda leaf: leaf.unsqueeze(0), told)
    named = {name: leaf.double() for name, leaf in tree.named(told).items()}
    if not bool(fair(rows)):
        named = tree.zeros_like(named)
    return Report(named, torch.ones((), dtype=torch.float64))


def read(plain: Any) -> Sums:
    """Read sums as the hub wrote them."""
    try:
        sums = {str(name): torch.tensor(own, dtype=torch.float64) for name, own in plain.items()}
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise Refused("format", "sums that are no numbers") from error
    wire.refuse_nonfinite(sums)
    return sums


def others(sums: Sums, told: Tree) -> Sums:
    """Take a node's own numbers off sums that have them."""
    rows = tree.map(lambda leaf: leaf.unsqueeze(0).cpu(), told)
    form = {name: leaf.shape for name, leaf in tree.named(told).items()}
    if {name: leaf.shape for name, leaf in sums.items()} != form:
        raise Refused("structure", f"expected sums of {', '.join(form)}, of what this node told")
    return {name: leaf[0] for name, leaf in without(sums, rows).items()}
