"""Channels of images dealt to two halves, and joined again: `halves.cu`.

Torch joins images that are not without gaps, such as halves of others, by a slow copy for each.
Differentiable any number of times, since the derivatives of both functions are the other.
"""

from typing import Any

import torch
from torch import Tensor

from idiolect.kernels.compiled import attempt, launch
from idiolect.kernels.vmap_rules import GroupedFunction, call, float32_on_cuda

_THREADS = 256
_BYTES = 16  # that are copied at once


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the second half of the channels."""
    if not float32_on_cuda(x):
        first, second = x.chunk(2, 1)
        return first, second
    first, second = call(_Halve, x[None], False)
    return first.squeeze(0), second.squeeze(0)


def dealt(one: Tensor, other: Tensor) -> Tensor:
    """Return images whose channels are those of one and of the other in turn."""
    if not float32_on_cuda(one):
        return torch.stack([one, other], 2).flatten(1, 2)
    joined: Tensor = call(_Join, one[None], other[None], True)
    return joined.squeeze(0)


class _Join(GroupedFunction):
    """Two of [group, image, channel, ...] -> one with the channels of both, perhaps in turn."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.in_turn = inputs[2]

    @staticmethod
    def forward(one: Tensor, other: Tensor, in_turn: bool) -> Any:
        return attempt(
            "images joined",
            lambda: _launched(one, other, in_turn),
            lambda: _joined(one, other, in_turn),
            on=one,
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return *call(_Halve, gradient, ctx.in_turn), None


class _Halve(GroupedFunction):
    """The reverse: two views."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.in_turn = inputs[1]

    @staticmethod
    def forward(x: Tensor, in_turn: bool) -> Any:
        half = x.shape[2] // 2
        return (x[:, :, ::2], x[:, :, 1::2]) if in_turn else (x[:, :, :half], x[:, :, half:])

    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor) -> Any:
        return call(_Join, one, other, ctx.in_turn), None


def _joined(one: Tensor, other: Tensor, in_turn: bool) -> Tensor:
    return torch.stack([one, other], 3).flatten(2, 3) if in_turn else torch.cat([one, other], 2)


def _launched(one: Tensor, other: Tensor, in_turn: bool) -> Tensor:
    """Do the same in one launch, where both can be read 16 bytes at a time."""
    groups, images, channels = one.shape[:3]
    channel = one[0, 0, 0].numel() * one.element_size()  # bytes
    if channel % _BYTES or not channel or not _readable(one) or not _readable(other):
        return _joined(one, other, in_turn)
    out = one.new_empty(groups, images, 2 * channels, *one.shape[3:])
    pieces = channel // _BYTES
    constants = {"THREADS": _THREADS, "DEALT": int(in_turn)}
    constants |= {"CHANNELS": channels, "PIECES": pieces}
    each = _BYTES // one.element_size()
    strides = [own.stride(axis) // each for own in (one, other) for axis in (1, 2)]
    grid = (-(-groups * images * 2 * channels * pieces // _THREADS), 1, 1)
    given = [one, other, out, groups * images, *strides]
    launch("halves.cu", "join", constants, grid, _THREADS, given)
    return out


def _readable(x: Tensor) -> bool:
    """Say whether channels lie without gaps in them, whole pieces of 16 bytes apart."""
    each, images = _BYTES // x.element_size(), x.shape[1]
    whole = x.stride(1) % each == x.stride(2) % each == 0 and x.data_ptr() % _BYTES == 0
    follow = len(x) == 1 or x.stride(0) == images * x.stride(1)
    return whole and follow and x[0, 0, 0].is_contiguous() and x.numel() < 1 << 31
