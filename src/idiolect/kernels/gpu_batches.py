"""Batches made on the GPU, one launch each: rows drawn and examples taken, for every client.

Rows are NumPy's permutations. Examples stored as bytes are gathered and decoded at once.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from idiolect.kernels.compiled import REALS, attempt, launch, round_up
from idiolect.kernels.vmap_rules import call

_TAKE_THREADS, _SHUFFLE_THREADS = 256, 64
_BYTES = 4  # of a place in shared memory
_MOST = 1 << 13  # places that a client's one thread shuffles; beyond that the host is faster


def suits_take(x: Tensor, shift: Tensor, factor: Tensor) -> bool:
    """Return whether there is a kernel: bytes on a GPU, one shift for all or for each channel."""
    channels = x.shape[1] if x.dim() > 2 else 1
    return (
        x.is_cuda
        and x.dtype == torch.uint8
        and shift.shape == factor.shape
        and shift.dtype == torch.float32
        and x.dim() > 1
        and shift.numel() in (1, channels)
        and shift.numel() == shift.shape[0]
        and all(size == 1 for size in shift.shape[1:])
        and (shift.numel() == 1 or shift.dim() == x.dim() - 1)
    )


def take(x: Tensor, rows: Tensor, shift: Tensor, factor: Tensor) -> Tensor:
    """Return (x[rows] - shift) · factor."""
    made: Tensor = call(_Take, x, rows, shift, factor)
    return made


class _Take(Function):
    """Nothing here is learned, so there is no gradient."""

    @staticmethod
    def forward(x: Tensor, rows: Tensor, shift: Tensor, factor: Tensor) -> Tensor:
        def plain() -> Tensor:
            return (x[rows].to(shift.dtype) - shift) * factor

        return attempt("examples", lambda: _launched(x, rows, shift, factor), plain)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, rows: Tensor, *rest: Tensor) -> Any:
        if dims[0] is not None or dims[2] is not None or dims[3] is not None:
            raise RuntimeError("vmap over the pool of examples, of which there is one")
        return call(_Take, x, rows.movedim(dims[1], 0), *rest), 0


def _launched(x: Tensor, rows: Tensor, shift: Tensor, factor: Tensor) -> Tensor:
    """Lay examples of [client, step, ...] out step by step, so that no step need copy its own."""
    if rows.dim() > 2:
        return _in_order(x, rows.transpose(0, 1), shift, factor).transpose(0, 1)
    return _in_order(x, rows, shift, factor)


def _in_order(x: Tensor, rows: Tensor, shift: Tensor, factor: Tensor) -> Tensor:
    numbers, rows = x[0].numel(), rows.contiguous()
    out = shift.new_empty(*rows.shape, *x.shape[1:])
    constants = {"NUMBERS": numbers, "PLANE": numbers // shift.numel(), "THREADS": _TAKE_THREADS}
    if rows.numel():
        given = [x.contiguous(), rows, shift.contiguous(), factor.contiguous(), out]
        launch("gather.cu", "take", constants, (rows.numel(), 1, 1), _TAKE_THREADS, given)
    return out


def suits_shuffle(longest: int, epochs: int, weight: Tensor) -> bool:
    """Return whether there is a kernel that is faster than the host."""
    return longest * epochs <= _MOST and weight.dtype in REALS


def shuffle(
    who: Tensor,
    held: Tensor,
    rows: Tensor,
    weight: Tensor,
    longest: int,
    key: tuple[int, int, int],
    batch: int,
    steps: int,
    epochs: int,
) -> None:
    """Write rows and weights [client, step, example] of a round.

    `who` has for every client its seed, number, count of examples and where its rows begin in
    `held`; `key` is what else the draws depend on: tag, round and call. Without `steps` they are as
    many as the epochs take.
    """
    shared = round_up(_BYTES * max(longest, 1), 4096)
    constants: dict[str, int | str] = {"REAL": REALS[weight.dtype], "THREADS": _SHUFFLE_THREADS}
    given = [who, held, rows, weight, *key, batch, steps, epochs, *rows.shape[1:]]
    launch(
        "permutations.cu", "shuffle", constants, (len(who), 1, 1), _SHUFFLE_THREADS, given, shared
    )
