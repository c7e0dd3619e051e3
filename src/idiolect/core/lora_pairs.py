"""The pairs A, B of LoRA among a network's parameters, by the end of their names."""

from collections.abc import Iterator

import torch
from torch import Tensor

from idiolect.core.tree import Params
from idiolect.errors import MethodError

DOWN, UP = "lora_A", "lora_B"
"""A [rank, in], which comes first, and B [out, rank]; a layer adds scale · B A."""


def is_down(name: str) -> bool:
    """Say whether a parameter is an A."""
    return name.rpartition(".")[2] == DOWN


def is_up(name: str) -> bool:
    """Say whether a parameter is a B."""
    return name.rpartition(".")[2] == UP


def pairs(params: Params) -> Iterator[tuple[str, str]]:
    """Name each A with its B."""
    for name in params:
        if is_down(name):
            yield name, name.removesuffix(DOWN) + UP


def refuse_without(params: Params, title: str) -> None:
    """Refuse a network that has no LoRA."""
    if not any(map(is_down, params)):
        raise MethodError(
            f"{title} divides the matrices of LoRA, and the network has none; add "
            '[adapter] name = "lora" (adapter="lora" in Python), or use fedavg, ditto or fedavg-ft'
        )


def rank_of(params: Params) -> int:
    """Return the rank, which all pairs have in common."""
    ranks = {len(params[down]) for down, _ in pairs(params)}
    if len(ranks) != 1:
        raise MethodError(f"the network's LoRA has ranks {sorted(ranks)}, expected one for all")
    return ranks.pop()


def ranks(params: Params, first: int, last: int) -> Params:
    """Keep these ranks of every pair; other parameters stay as they are."""
    cut = dict(params)
    for down, up in pairs(params):
        cut[down], cut[up] = params[down][first:last], params[up][:, first:last]
    return cut


def masked(params: Params, kept: Tensor) -> Params:
    """Set ranks to zero in stacks of pairs, A [row, rank, ...] and B [row, out, rank, ...].

    `kept` [row, rank] is 1 for ranks that stay.
    """
    cut = dict(params)
    for down, up in pairs(params):
        a, b = params[down], params[up]
        cut[down] = a * kept.to(a.dtype).reshape(*kept.shape, *[1] * (a.dim() - 2))
        cut[up] = b * kept.to(b.dtype).unsqueeze(1).reshape(
            len(kept), 1, kept.shape[1], *[1] * (b.dim() - 3)
        )
    return cut


def orthogonal(matrix: Tensor) -> Tensor:
    """Return the orthogonal matrix nearest to a square one: U Vᵀ of its U Σ Vᵀ."""
    u, _, v = torch.linalg.svd(matrix)
    nearest: Tensor = u @ v
    return nearest
