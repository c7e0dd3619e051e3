"""The forms that a stacked convolution can be done in."""

import functools

from idiolect.kernels import depthwise, grouped_convolution, tensor, thin, wide
from idiolect.kernels.autotune import Form
from idiolect.kernels.convolution_shape import Shape


def forms(task: str, shape: Shape, most: int = 4) -> dict[str, Form]:
    """All ways to do a task on a GPU, by name; `most` so many cuts of the wide kernels."""
    known: dict[str, Form] = {"plain": getattr(grouped_convolution, task)}
    if shape.depthwise:
        return known | {"depthwise": getattr(depthwise, task)}
    for tile in thin.tiles(task, shape):
        name = "thin " + "x".join(map(str, tile))
        known[name] = functools.partial(getattr(thin, task), tile=tile)
    for cut in wide.tiles(task, shape, most):
        name = "wide " + "x".join(map(str, cut))
        known[name] = functools.partial(getattr(wide, task), tile=cut)
    for part in tensor.tiles(task, shape):
        name = "tensor " + "x".join(map(str, part))
        known[name] = functools.partial(getattr(tensor, task), tile=part)
    return known


def owned(task: str, shape: Shape) -> bool:
    """Say whether there are kernels of our own for a task."""
    return any(thin.tiles(task, shape)) or bool(wide.tiles(task, shape, 1))
