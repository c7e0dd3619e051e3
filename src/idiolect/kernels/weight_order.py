"""Orders in memory of stacked weights, [group, out, channel, row, column]: `weight_order.cu`.

Kernels for channels last read them in other orders, and torch's copies into those, and of gradients
back, take twice as long as memory does.
"""

import torch
from torch import Tensor

from idiolect.kernels.compiled import launch

_THREADS = 256
_ROOM = 96 * 1024  # bytes of shared memory of a block, at most
_ROWS, _COLUMNS = 64, 32  # of a piece that is turned


def by_taps(w: Tensor, like: Tensor, channels: int, rounded: bool = False) -> Tensor:
    """Return [group, out, row, column, channel], with zeros for more channels than there are."""
    groups, out, inputs, *kernel = w.shape
    taps = kernel[0] * kernel[1]
    made = like.new_empty(groups, out, *kernel, channels)
    room = 4 * inputs * taps
    if not _suits(w) or room > _ROOM or channels % 2:
        made[..., :inputs] = w.permute(0, 1, 3, 4, 2)
        made[..., inputs:].zero_()
        return made
    given = [w.contiguous(), made, inputs, taps, channels]
    _launch("by_taps", like, rounded, (groups * out, 1, 1), given, room)
    return made


def turned(w: Tensor, like: Tensor, rounded: bool = False) -> Tensor:
    """Return [group, channel, row, column, out]."""
    groups, out, inputs, *kernel = w.shape
    made = like.new_empty(groups, inputs, *kernel, out)
    if not _suits(w) or out % 2:
        return made.copy_(w.permute(0, 2, 3, 4, 1))
    columns = inputs * kernel[0] * kernel[1]
    grid = (-(-columns // _COLUMNS), groups, -(-out // _ROWS))
    room = 4 * _ROWS * (_COLUMNS + 1)
    _launch("turned", like, rounded, grid, [w.contiguous(), made, out, columns], room)
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
    _launch("put_back", parts, False, (groups * out, 1, 1), given, room)
    return dw


def _suits(w: Tensor, *kinds: torch.dtype) -> bool:
    return w.dtype in (kinds or (torch.float32,)) and 0 < w.numel() < 1 << 31


Grid = tuple[int, int, int]


def _launch(
    name: str, like: Tensor, rounded: bool, grid: Grid, given: list[object], room: int
) -> None:
    half = like.dtype == torch.bfloat16
    constants: dict[str, int | str] = {"THREADS": _THREADS, "ROUNDED": int(rounded and not half)}
    constants |= {"HALF": 1} if half else {}
    launch("weight_order.cu", name, constants, grid, _THREADS, given, room)
