"""Work on all clients of a stack beneath vmap, by plain autograd.

Within vmap every operation passes through a transform, which on a CPU costs a small network more
than its arithmetic. Where vmap over clients is the only transform under way, layers and gradients
may take the stacks themselves, their clients along the first axis.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._C import _functorch

from idiolect.errors import MethodError

_LEVEL = 1  # of the outermost transform


def clients_of_stack() -> int | None:
    """Return the number of clients where vmap over them is the only transform, else None."""
    inner = _functorch.peek_interpreter_stack()
    if inner is None or inner.level() != _LEVEL or inner.key() != _functorch.TransformType.Vmap:
        return None
    return int(_functorch.CVmapInterpreterPtr(inner).batchSize())


def all_stacked(*tensors: Tensor) -> bool:
    """Say whether clients differ in each tensor, and vmap over them is the only transform."""
    return all(map(_functorch.is_batchedtensor, tensors)) and clients_of_stack() is not None


@contextmanager
def beneath() -> Iterator[None]:
    """Leave vmap for a while."""
    vmap = _functorch.pop_dynamic_layer_stack()
    try:
        yield
    finally:
        _functorch.push_dynamic_layer_stack(vmap)


def stack_of(tensor: Tensor, clients: int = 0) -> Tensor:
    """Return the stack beneath a tensor; one that all clients share is repeated, not copied."""
    if not _functorch.is_batchedtensor(tensor):
        return tensor.expand(clients, *tensor.shape)
    whole: Tensor = _functorch.get_unwrapped(tensor)
    axis = _functorch.maybe_get_bdim(tensor)
    return whole.movedim(axis, 0) if axis else whole


def of_a_client(stack: Tensor) -> Tensor:
    """Return what a client sees of a stack."""
    seen: Tensor = _functorch._add_batch_dim(stack, 0, _LEVEL)
    return seen


def gradients(values: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Return the gradients of all clients' values, each by its own row of every leaf."""
    if values.numel() != 1:
        raise MethodError(f"a loss is one number, but this one has the shape {[*values.shape]}")
    below = _functorch.get_unwrapped(values) if _functorch.is_batchedtensor(values) else values
    with beneath():
        if not below.requires_grad:
            return [torch.zeros_like(leaf) for leaf in leaves]
        found = torch.autograd.grad(below.sum(), leaves, allow_unused=True, materialize_grads=True)
        return list(found)
