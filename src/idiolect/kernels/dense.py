"""Dense layers of many clients: batched products, and `dense.cu` for small batches on CUDA."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from idiolect.kernels.autotune import Form
from idiolect.kernels.compiled import kernel, up

_BATCH = 64  # with more examples the library's tiles are full
_SUMS = (80, 40, 20)  # of a thread
_WARP = 32
_THREADS = 128


class Dense(NamedTuple):
    """The sizes of a stack of dense layers."""

    groups: int
    examples: int
    inside: int
    outside: int


class Cut(NamedTuple):
    """How the work is cut: examples and outputs of a thread, and threads of a block."""

    rows: int
    lines: int
    threads: int = _THREADS


def forms(task: str, sizes: Dense) -> dict[str, Form]:
    """All ways to do a task on a GPU, by name."""
    known: dict[str, Form] = {"plain": _PLAIN[task]}
    for cut in _cuts(task, sizes):
        name = "dense " + "x".join(map(str, cut))
        known[name] = functools.partial(_OWN[task], cut=cut)
    return known


def _cuts(task: str, sizes: Dense) -> Iterator[Cut]:
    if sizes.examples > _BATCH:
        return
    if task == "kernels":
        yield from (Cut(1, lines) for lines in (4, 8, 16))
        return
    pieces = -(-sizes.examples // 20)
    rows = -(-sizes.examples // pieces)
    if task == "images":
        yield Cut(rows, 1)
        if rows > 8:
            yield Cut(-(-rows // 2), 1)
        return
    warps = min(8, max(1, sizes.inside // (_WARP * _vector(sizes))))
    for sums in _SUMS:
        yield Cut(rows, min(sizes.outside, max(1, sums // rows)), _WARP * warps)


# y = x wᵀ + b, the gradient by x, and those by w and b.


def plain_forward(x: Tensor, w: Tensor, b: Tensor, sizes: Dense) -> Tensor:
    """Return x wᵀ + b."""
    return torch.bmm(x, w.mT) + b[:, None]


def plain_rectified(x: Tensor, w: Tensor, b: Tensor, sizes: Dense) -> Tensor:
    """Return x wᵀ + b, cut off below 0."""
    return plain_forward(x, w, b, sizes).relu()


def plain_images(slope: Tensor, w: Tensor, sizes: Dense) -> Tensor:
    """Return the gradient with respect to the examples."""
    return torch.bmm(slope, w)


def plain_kernels(slope: Tensor, x: Tensor, sizes: Dense) -> tuple[Tensor, Tensor]:
    """Return the gradients with respect to weights and biases."""
    return torch.bmm(slope.mT, x), slope.sum(1)


def forward(
    x: Tensor, w: Tensor, b: Tensor, sizes: Dense, cut: Cut, rectify: bool = False
) -> Tensor:
    """Return x wᵀ + b, perhaps cut off below 0: a block for a few outputs."""
    s, y = sizes, x.new_empty(sizes.groups, sizes.examples, sizes.outside)
    x, stride = _laid(x)
    shared = 4 * cut.rows * cut.lines * cut.threads // _WARP
    _kernel("FORWARD", "dense", s, cut, shared, rectify)(
        (-(-s.outside // cut.lines), s.groups, -(-s.examples // cut.rows)),
        (cut.threads, 1, 1),
        [x, w.contiguous(), b.contiguous(), y, stride],
        shared,
    )
    return y


def images(slope: Tensor, w: Tensor, sizes: Dense, cut: Cut) -> Tensor:
    """Return the gradient with respect to the examples: a thread for a few numbers of each."""
    s, out = sizes, slope.new_empty(sizes.groups, sizes.examples, sizes.inside)
    shared = 4 * s.outside * cut.rows
    _kernel("IMAGES", "images", s, cut, shared)(
        (_across(s), s.groups, -(-s.examples // cut.rows)),
        (_THREADS, 1, 1),
        [slope.contiguous(), w.contiguous(), out],
        shared,
    )
    return out


def kernels(slope: Tensor, x: Tensor, sizes: Dense, cut: Cut) -> tuple[Tensor, Tensor]:
    """Return the gradients with respect to weights and biases in one pass."""
    s, dw = sizes, x.new_empty(sizes.groups, sizes.outside, sizes.inside)
    db, (x, stride) = x.new_empty(s.groups, s.outside), _laid(x)
    shared = 4 * s.examples * cut.lines
    _kernel("KERNELS", "kernels", s, cut, shared)(
        (_across(s), s.groups, -(-s.outside // cut.lines)),
        (_THREADS, 1, 1),
        [slope.contiguous(), x, dw, db, stride],
        shared,
    )
    return dw, db


_PLAIN: dict[str, Form] = {
    "forward": plain_forward,
    "rectified": plain_rectified,
    "images": plain_images,
    "kernels": plain_kernels,
}
_OWN: dict[str, Form] = {
    "forward": forward,
    "rectified": functools.partial(forward, rectify=True),
    "images": images,
    "kernels": kernels,
}


def _laid(x: Tensor) -> tuple[Tensor, int]:
    """Return examples that lie close within a group, and how far it is to the next group."""
    close = x.stride()[1:] == (x.shape[2], 1) and x.stride(0) % 4 == 0 and x.data_ptr() % 16 == 0
    x = x if close else x.contiguous()
    return x, x.stride(0)


def _vector(sizes: Dense) -> int:
    return 4 if sizes.inside % 4 == 0 else 1


def _across(sizes: Dense) -> int:
    """Return how many blocks cover what an example has before the layer."""
    return up(sizes.inside, _THREADS * _vector(sizes)) // (_THREADS * _vector(sizes))


def _kernel(
    task: str, name: str, sizes: Dense, cut: Cut, shared: int = 0, rectify: bool = False
) -> Any:
    constants = {
        **({"RELU": 1} if rectify else {}),
        task: 1, "N": sizes.examples, "IN": sizes.inside, "OUT": sizes.outside,
        "VEC": _vector(sizes), "THREADS": cut.threads, "ROWS": cut.rows, "LINES": cut.lines,
    }  # fmt: skip
    return kernel("dense.cu", name, constants, shared)
