"""Which form of a stacked convolution is fastest here: measured once a shape, then remembered."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from idiolect.stacked import plain, thin, wide
from idiolect.stacked.shape import Shape

Form = Callable[..., Any]
_TRIALS = 3
_chosen: dict[tuple[str, Shape], Form] = {}


def fastest(task: str, shape: Shape, *inputs: Tensor) -> Any:
    """Do a task (a function of `plain`) in the form that was measured fastest on this GPU."""
    first = getattr(plain, task)
    if not inputs[0].is_cuda or inputs[0].dtype != torch.float32:
        return first(*inputs, shape)
    if (task, shape) not in _chosen:
        if torch.cuda.is_current_stream_capturing():  # timing would break the capture
            return first(*inputs, shape)
        _chosen[task, shape] = _measured(task, shape, inputs)
    return _chosen[task, shape](*inputs, shape)


def forms(task: str, shape: Shape, most: int = 4) -> dict[str, Form]:
    """All ways to do a task on a GPU, by name; `most` so many cuts of the wide kernels."""
    known: dict[str, Form] = {"plain": getattr(plain, task)}
    for tile in thin.tiles(task, shape):
        name = "thin " + "x".join(map(str, tile))
        known[name] = functools.partial(getattr(thin, task), tile=tile)
    for cut in wide.tiles(task, shape, most):
        name = "wide " + "x".join(map(str, cut))
        known[name] = functools.partial(getattr(wide, task), tile=cut)
    return known


def owned(task: str, shape: Shape) -> bool:
    """Say whether there are kernels of our own for a task."""
    return any(thin.tiles(task, shape)) or bool(wide.tiles(task, shape, 1))


def _measured(task: str, shape: Shape, inputs: tuple[Tensor, ...]) -> Form:
    """Time every form on the real inputs; one that does not run here is out."""
    known, took = forms(task, shape), {}
    for name, form in known.items():
        try:
            took[name] = milliseconds(form, *inputs, shape)
        except (RuntimeError, AttributeError):  # no compiler, or too little memory on the chip
            if name == "plain":
                raise
    return known[min(took, key=took.__getitem__)]


def milliseconds(form: Form, *inputs: Any) -> float:
    """Return the least of a few times on the device."""
    form(*inputs)  # compiles, and makes handles
    least = float("inf")
    for _ in range(_TRIALS):
        start, end = (
            torch.Event("cuda", enable_timing=True),
            torch.Event("cuda", enable_timing=True),
        )
        start.record()
        form(*inputs)
        end.record()
        end.synchronize()
        least = min(least, start.elapsed_time(end))
    return least
