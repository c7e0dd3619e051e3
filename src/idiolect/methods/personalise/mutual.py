"""Two models that teach each other: the gradients of both at the same values.

Each one's loss takes the other's logits as constants, those of evaluation mode. Where networks do
the same in training, one forward pass of each serves both losses.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from idiolect.core.client import Batch, Local
from idiolect.core.tree import Params


class Side(NamedTuple):
    """A model, the network it belongs to, and loss(parameters, logits, the other's logits)."""

    params: Params
    network: str
    loss: Callable[[Params, Tensor, Tensor], Tensor]


def slopes(one: Side, two: Side, batch: Batch, local: Local) -> tuple[Params, Params]:
    """Return the gradient of each side's loss on a batch."""
    if local.steady:
        return _together(one, two, batch, local)
    return _taught(one, two, batch, local), _taught(two, one, batch, local)


def _taught(own: Side, peer: Side, batch: Batch, local: Local) -> Params:
    constant = local.logits(peer.params, batch.x, network=peer.network).detach()

    def objective(params: Params, batch: Batch) -> Tensor:
        logits = local.logits(params, batch.x, batch.training, own.network)
        return own.loss(params, logits, constant)

    return local.gradient(objective, own.params, batch)


def _together(one: Side, two: Side, batch: Batch, local: Local) -> tuple[Params, Params]:
    """Differentiate the sum: with peers constant, no loss depends on the other's parameters."""
    sides = (one, two)

    def objective(both: Params, batch: Batch) -> Tensor:
        params = [_part(both, place, side) for place, side in enumerate(sides)]
        first, second = (
            local.logits(own, batch.x, batch.training, side.network)
            for own, side in zip(params, sides, strict=True)
        )
        return one.loss(params[0], first, second.detach()) + two.loss(
            params[1], second, first.detach()
        )

    both = {f"{n} {name}": leaf for n, side in enumerate(sides) for name, leaf in side[0].items()}
    slope = local.gradient(objective, both, batch)
    return _part(slope, 0, one), _part(slope, 1, two)


def _part(both: Params, place: int, side: Side) -> Params:
    return {name: both[f"{place} {name}"] for name in side.params}
