"""Orders in memory of stacked weights, [group, out, channel, row, column]: `weight_order.cu`.

Kernels for channels last read them in other orders, and torch's copies into those, and of gradients
back, take twice as long as memory does. So gradients stay in the order in which they were made, and
a step leaves the weights in it, [group, out, row, column, channel], with a copy in bfloat16 behind
them where products are: the next step then has nothing to lay out.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from idiolect.kernels.compiled import aligned, attempt, launch
from idiolect.kernels.deferred import Deferred, DeferredTensor

_THREADS = 256
_ROOM = 96 * 1024  # bytes of shared memory of a block, at most
_SIDE = 64  # of a piece that is turned
_SEVERAL = 8  # numbers that a thread adds


def by_taps(w: Tensor, like: Tensor, channels: int, rounded: bool = False) -> Tensor:
    """Return [group, out, row, column, channel], with zeros for more channels than there are."""
    if _repeated(w):
        return _for_each(by_taps(w[:1], like, channels, rounded), len(w))
    groups, out, inputs, *kernel = w.shape
    taps, room = math.prod(kernel), 4 * w[0, 0].numel()
    kernels = _suits(w) and room <= _ROOM and channels % 2 == 0
    laid, alike = w.permute(0, 1, 3, 4, 2), like.dtype == w.dtype
    if channels == inputs and laid.is_contiguous():
        if not (alike and rounded and kernels):
            return laid if alike else _rounded(laid, like)
        w, given = laid, [inputs * taps, 1, channels * taps]
    else:
        given = [inputs, taps, channels]
    made = like.new_empty(groups, out, *kernel, channels)
    if not kernels:
        made[..., :inputs] = laid
        made[..., inputs:].zero_()
        return made
    _launch("by_taps", like, (groups * out, 1, 1), [w.contiguous(), made, *given], room, rounded)
    return made


def turned(w: Tensor, like: Tensor, rounded: bool = False) -> Tensor:
    """Return [group, channel, row, column, out]."""
    if _repeated(w):
        return _for_each(turned(w[:1], like, rounded), len(w))
    groups, out, inputs, *kernel = w.shape
    taps, made = math.prod(kernel), like.new_empty(groups, inputs, *kernel, out)
    if not _suits(w) or out % 2 or inputs * taps % 2:
        return made.copy_(w.permute(0, 2, 3, 4, 1))
    laid = w.permute(0, 1, 3, 4, 2)
    stepped = laid.is_contiguous()
    given = aligned(laid if stepped else w)
    if stepped and like.dtype == torch.bfloat16 and (copy := _copy_behind(laid)) is not None:
        given = copy
    constants = {"LAID": int(stepped), "SHORT": _short(given)}
    grid = (-(-inputs * taps // _SIDE), groups, -(-out // _SIDE))
    arguments = [given, made, out, inputs, taps]
    _launch("turned", like, grid, arguments, 4 * _SIDE * (_SIDE + 1), rounded, **constants)
    return made


def put_back(parts: Tensor, channels: int) -> Tensor:
    """Sum [part, group, out, row, column, channel], and return it as weights are; less channels.

    What is bfloat16 is made single precision.
    """
    many, groups, out, *kernel, wide = parts.shape
    taps = kernel[0] * kernel[1]
    room = 4 * (wide + 1) * taps
    if not _suits(parts, torch.float32, torch.bfloat16) or room > _ROOM:
        kind = torch.float32 if parts.dtype == torch.bfloat16 else parts.dtype
        total = parts.sum(0, dtype=kind)
        return total[..., :channels].permute(0, 1, 4, 2, 3).contiguous()
    dw = parts.new_empty(groups, out, channels, *kernel, dtype=torch.float32)
    given = [parts, dw, many, channels, taps, wide]
    _launch("put_back", parts, (groups * out, 1, 1), given, room)
    return dw


def gradient(parts: Tensor, channels: int, half: bool) -> Tensor:
    """Return the sum of such parts as a gradient by the weights: put back unless a step takes it.

    `half` says that products are in bfloat16, so that a step makes a copy in it.
    """
    return DeferredTensor(_SumByTaps(parts, channels, half))


class _SumByTaps(Deferred):
    """A sum of parts [part, group, out, row, column, channel]."""

    def __init__(self, parts: Tensor, channels: int, half: bool) -> None:
        _, groups, out, *kernel, _ = parts.shape
        single = torch.float32 if parts.dtype == torch.bfloat16 else parts.dtype
        like = parts.new_empty(0, dtype=single)
        super().__init__((groups, out, channels, *kernel), like)
        self._parts, self._half = parts, half

    def make(self) -> Tensor:
        """Return it as weights are."""
        return put_back(self._parts, self.shape[2])

    def added(self, factor: float, to: Tensor) -> Tensor | None:
        """Return weights plus factor times this, in its order."""
        parts, whole = self._parts, self._parts.shape[-1] == self.shape[2]
        alike = to.shape[1:] == self.shape[1:] and len(to) in (1, self.shape[0])
        suit = _suits(parts, torch.float32, torch.bfloat16) and to.dtype == torch.float32
        if not (suit and alike and whole) or parts[0, 0].numel() % _SEVERAL:
            return None

        def own() -> Tensor:
            return self._stepped(factor, aligned(to.permute(0, 1, 3, 4, 2)))

        return attempt("steps of weights", own, lambda: None, on=to)

    def _stepped(self, factor: float, laid: Tensor) -> Tensor:
        parts, shared = self._parts, int(len(laid) == 1)
        many, groups, numbers = len(parts), parts.shape[1], parts[0, 0].numel()
        made, copy = _with_room(parts.shape[1:], parts, self._half)
        grid = (-(-numbers // (_SEVERAL * _THREADS)), groups, 1)
        given = [float(factor), parts, many, groups * numbers, laid, shared, made, copy, numbers]
        _launch("add_parts", copy, grid, given, 0, SHORT=_short(parts))
        return made.permute(0, 1, 4, 2, 3)


def as_stepped(w: Tensor, half: bool) -> Tensor:
    """Return the same weights as a step leaves them."""
    laid = w.permute(0, 1, 3, 4, 2)
    made, copy = _with_room(laid.shape, w, half)
    made.data.copy_(laid)  # `data`, since what is changed has no copy any more
    if half:
        copy.data.copy_(laid)
    return made.permute(0, 1, 4, 2, 3)


def _with_room(sizes: Sequence[int], like: Tensor, half: bool) -> tuple[Tensor, Tensor]:
    """Return room for numbers, and, if `half`, behind it in memory for as many in bfloat16.

    A byte more tells such memory from any other.
    """
    if not half:
        made = like.new_empty(sizes)
        return made, made
    many = math.prod(sizes)
    room = like.new_empty(6 * many + 1, dtype=torch.uint8)
    made, copy = room[: 4 * many].view(torch.float32), room[4 * many : -1].view(torch.bfloat16)
    return made.view(sizes), copy.view(sizes)


def _copy_behind(laid: Tensor) -> Tensor | None:
    """Return the copy in bfloat16 of all numbers of a memory; None where there is none.

    What was changed in place since, which torch counts, is no longer the same.
    """
    memory, many = laid.untyped_storage(), laid.numel()
    if memory.nbytes() != 6 * many + 1 or laid.is_inference() or laid._version:
        return None
    copy = laid.new_empty(0, dtype=torch.bfloat16)
    return copy.set_(memory, 2 * many, laid.shape, laid.stride())


def _rounded(laid: Tensor, like: Tensor) -> Tensor:
    copy = _copy_behind(laid) if like.dtype == torch.bfloat16 else None
    return laid.to(like.dtype) if copy is None else copy


def _short(given: Tensor) -> int:
    return int(given.dtype == torch.bfloat16)


def _repeated(w: Tensor) -> bool:
    """Say whether all clients share one row of weights."""
    return len(w) > 1 and w.stride(0) == 0


def _for_each(row: Tensor, groups: int) -> Tensor:
    return row.expand(groups, *row.shape[1:]).contiguous()


def _suits(w: Tensor, *kinds: torch.dtype) -> bool:
    return w.dtype in (kinds or (torch.float32,)) and 0 < w.numel() < 1 << 31


Grid = tuple[int, int, int]


def _launch(
    name: str, like: Tensor, grid: Grid, given: list[object], room: int, rounded: bool = False,
    **own: int,
) -> None:  # fmt: skip
    half = like.dtype == torch.bfloat16
    constants: dict[str, int | str] = {"THREADS": _THREADS, "ROUNDED": int(rounded and not half)}
    constants |= {"LAID": 0, "SHORT": 0, **own}
    constants |= {"HALF": 1} if half else {}
    launch("weight_order.cu", name, constants, grid, _THREADS, given, room)
