"""Autograd functions with an axis of groups before all others, and how vmap maps them."""

import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import Function

from idiolect.kernels.deferred import images_computed


def float32_on_cuda(x: Tensor) -> bool:
    """Return whether a layer works in single precision on CUDA, which our kernels are for."""
    return x.is_cuda and x.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")


def halved_on_cuda(x: Tensor) -> bool:
    """Return whether a layer multiplies in bfloat16 on CUDA, by torch's autocast."""
    return (
        x.is_cuda
        and torch.is_autocast_enabled("cuda")
        and torch.get_autocast_dtype("cuda") == torch.bfloat16
        and x.dtype in (torch.float32, torch.bfloat16)
    )


def vmaps_under_way() -> int:
    """Return how many vmaps are under way, one within the other."""
    levels = torch._C._functorch.get_interpreter_stack() or []
    return sum(one.key() == torch._C._functorch.TransformType.Vmap for one in levels)


def differs_everywhere(x: Tensor) -> bool:
    """Return whether each vmap under way maps a tensor; where it does not, all see the same."""
    mapped = vmaps_under_way()
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        mapped -= torch._C._functorch.is_batchedtensor(x)
        x = torch._C._functorch.get_unwrapped(x)
    return mapped == 0


def call(function: type[Function], *inputs: Any) -> Any:
    """Apply a function, which torch leaves untyped."""
    return function.apply(*inputs)  # type: ignore[no-untyped-call]


class GroupedFunction(Function):
    """A function of tensors [group, ...] and of options after them; all are kept for backward.

    Mapped over clients, their axis becomes part of the groups. Where the first tensors, as many as
    `joins_examples`, are [group, example, ...], and clients differ in these alone, it becomes part
    of the examples instead. Images that are deferred are computed for those that do not `merge`.
    """

    joins_examples: ClassVar[int] = 0
    merges: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Give the function tensors that it can read."""
        super().__init_subclass__(**options)
        own = cls.__dict__.get("forward")
        if own is None or cls.merges:
            return

        @functools.wraps(own.__func__)
        def forward(*inputs: Any) -> Any:
            return own.__func__(*map(images_computed, inputs))

        cls.forward = staticmethod(forward)  # type: ignore[method-assign]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep tensors and options."""
        tensors, ctx.options = _split(inputs)
        ctx.save_for_backward(*tensors)

    @classmethod
    def may_join(cls, first: Tensor, *rest: Any) -> bool:
        """Say whether clients may become part of the examples; `first` is [group, client, ...]."""
        return True

    @classmethod
    def vmap(cls, info: Any, dims: Any, *inputs: Any) -> Any:
        """Map over clients."""
        tensors, options = _split(inputs)
        size, dims, axis = info.batch_size, dims[: len(tensors)], 0
        joined = cls.joins_examples
        if (
            joined
            and all(dim is None for dim in dims[joined:])
            and (dims[0] is None or cls.may_join(tensors[0].movedim(dims[0], 1), *inputs[1:]))
        ):
            axis = 1
            tensors = (*_into_examples(size, dims, tensors[:joined]), *tensors[joined:])
        else:
            tensors = _into_groups(size, dims, tensors)
        out = call(cls, *tensors, *options)
        if isinstance(out, tuple):
            return tuple(part.unflatten(axis, (size, -1)) for part in out), (axis,) * len(out)
        return out.unflatten(axis, (size, -1)), axis


def _split(inputs: tuple[Any, ...]) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    count = sum(isinstance(one, Tensor) for one in inputs)
    return inputs[:count], inputs[count:]


def _into_examples(size: int, dims: Any, inputs: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """Make the mapped axis part of the examples: all have the same weights."""
    for tensor, dim in zip(inputs, dims, strict=False):
        if dim is None:
            tensor = tensor.unsqueeze(1).expand(-1, size, *tensor.shape[1:])
        else:
            tensor = tensor.movedim(dim, 1)
        yield tensor.flatten(1, 2)


def _into_groups(size: int, dims: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Make the mapped axis part of the groups: each of its entries has its own weights."""
    moved = (
        t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip(inputs, dims, strict=True)
    )
    return tuple(t.flatten(0, 1) for t in moved)
