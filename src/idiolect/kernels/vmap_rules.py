"""How functions with an axis of groups before all others are mapped over clients."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def single(x: Tensor) -> bool:
    """Say whether a layer is to work in single precision on CUDA, which is what ours are for."""
    return x.is_cuda and x.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")


def call(function: type[Function], *inputs: Any) -> Any:
    """Apply a function; torch does not say of what types."""
    return function.apply(*inputs)  # type: ignore[no-untyped-call]


def mapped(
    function: type[Function], size: int, dims: Any, inputs: tuple[Tensor, ...], rest: Any
) -> Any:
    """Map over clients: as more examples where all share the kernels, else as more groups."""
    shared = all(dim is None for dim in dims[1:])
    axis = 1 if shared else 0
    if shared:
        inputs = (inputs[0].movedim(dims[0], 1).flatten(1, 2), *inputs[1:])
    else:
        inputs = into_groups(size, dims, inputs)
    out = call(function, *inputs, *rest)
    if isinstance(out, tuple):
        return tuple(part.unflatten(axis, (size, -1)) for part in out), (axis,) * len(out)
    return out.unflatten(axis, (size, -1)), axis


def into_groups(size: int, dims: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Make the mapped axis part of the groups: each of its entries has its own kernels."""
    moved = (
        t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip(inputs, dims, strict=True)
    )
    return tuple(t.flatten(0, 1) for t in moved)
