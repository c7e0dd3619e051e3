"""Stacked clients without vmap's transforms, by plain autograd: how a CPU trains them.

Within vmap every operation passes through a transform, which on a CPU costs a small network more
than its arithmetic. Where vmap over clients is the only transform under way, gradients, steps,
dense layers and losses may take the stacks themselves, their clients along the first axis.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import Function

from idiolect.errors import MethodError

_LEVEL = 1  # of the outermost transform

Named = dict[str, Tensor]


def clients_of_stack() -> int | None:
    """Return the number of clients where vmap over them is the only transform, else None."""
    inner = _functorch.peek_interpreter_stack()
    if inner is None or inner.level() != _LEVEL or inner.key() != _functorch.TransformType.Vmap:
        return None
    return int(_functorch.CVmapInterpreterPtr(inner).batchSize())


def _all_stacked(*tensors: Tensor) -> bool:
    """Say whether clients differ in each tensor, and vmap over them is the only transform."""
    return all(map(_functorch.is_batchedtensor, tensors)) and clients_of_stack() is not None


class Beneath:
    """Leaves vmap for a while."""

    def __enter__(self) -> None:
        """Leave vmap."""
        self._vmap = _functorch.pop_dynamic_layer_stack()

    def __exit__(self, *_: object) -> None:
        """Go on within vmap."""
        _functorch.push_dynamic_layer_stack(self._vmap)


def _stack_of(tensor: Tensor, clients: int = 0) -> Tensor:
    """Return the stack beneath a tensor; one that all clients share is repeated, not copied."""
    if not _functorch.is_batchedtensor(tensor):
        return tensor.expand(clients, *tensor.shape)
    whole: Tensor = _functorch.get_unwrapped(tensor)
    axis = _functorch.maybe_get_bdim(tensor)
    return whole.movedim(axis, 0) if axis else whole


def _of_a_client(stack: Tensor) -> Tensor:
    """Return what a client sees of a stack."""
    seen: Tensor = _functorch._add_batch_dim(stack, 0, _LEVEL)
    return seen


# Gradients. A client's loss depends on its own parameters alone, so the gradient of the sum of all
# losses is the stack of their gradients.


def stacked_gradient(
    objective: Callable[[Named], tuple[Tensor, Named]], params: Named, clients: int
) -> tuple[Named, Named]:
    """Return the gradient of an objective, and what else it returned."""
    with Beneath():
        leaves = [_stack_of(leaf, clients).detach().requires_grad_() for leaf in params.values()]
    value, others = objective(dict(zip(params, map(_of_a_client, leaves), strict=True)))
    found = [
        torch.zeros_like(leaf) if own is None else own
        for leaf, own in zip(leaves, _gradients(value, leaves), strict=True)
    ]
    gradient = dict(zip(params, map(_of_a_client, found), strict=True))
    return gradient, {name: one.detach() for name, one in others.items()}


def stacked_descent(
    objective: Callable[[Named], Tensor], params: Named, clients: int, rate: float, spare: bool
) -> Named:
    """Return the parameters minus rate times the gradient; where they are `spare`, in their place.

    The gradient by the weights of dense layers is never there: its factors are multiplied into the
    weights. For a small batch, reading and writing weights is most of the work.
    """
    with Beneath():
        stacks = [_stack_of(leaf, clients) for leaf in params.values()]
        leaves = [stack.detach().requires_grad_() for stack in stacks]
    factors: list[list[tuple[Tensor, Tensor]]] = [[] for _ in leaves]
    for leaf, own in zip(leaves, factors, strict=True):
        leaf.factors = own  # type: ignore[attr-defined]
    value = objective(dict(zip(params, map(_of_a_client, leaves), strict=True)))
    found = _gradients(value, leaves)
    with Beneath(), torch.no_grad():
        for place, (gradient, products) in enumerate(zip(found, factors, strict=True)):
            stack = stacks[place] if spare else stacks[place].clone()
            for left, right in products:
                stack.baddbmm_(left, right, alpha=-rate)
            if gradient is not None:
                stack.add_(gradient, alpha=-rate)
            stacks[place] = stack
    return dict(zip(params, map(_of_a_client, stacks), strict=True))


def _gradients(values: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    """Return the gradients of all clients' values, each by its own row of every leaf."""
    if values.numel() != 1:
        raise MethodError(f"a loss is one number, but this one has the shape {[*values.shape]}")
    below = _functorch.get_unwrapped(values) if _functorch.is_batchedtensor(values) else values
    if not below.requires_grad:
        return [None] * len(leaves)
    with Beneath():
        return list(torch.autograd.grad(below.sum(), leaves, allow_unused=True))


# A dense layer.


def suits_linear(x: Tensor, w: Tensor, b: Tensor) -> bool:
    """Say whether a dense layer is one of a stack on a CPU."""
    return (
        x.dim() == 2
        and b.dim() == 1
        and x.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and _all_stacked(x, w, b)
    )


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Return x Aᵀ + b of a client of a stack."""
    turned = w.shape[0] < x.shape[0]
    with Beneath():
        y = _call(_HostLinear, *map(_stack_of, (x, w, b)), turned)
        # Not within the function: what is a view there must not be changed in place.
        y = y.mT if turned else y
    return _of_a_client(y)


class _HostLinear(Function):
    """x [client, example, in], w [client, out, in], b [client, out] -> y [client, example, out].

    Where it is `turned`, y is [client, out, example]. Products are taken in the order that is
    fastest on a CPU, and the gradient by the weights lies in memory as they do.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, turned: bool) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.turned, ctx.factors = turned, getattr(w, "factors", None)
        if turned:
            return torch.baddbmm(b.unsqueeze(2), w, x.mT)
        return torch.baddbmm(b.unsqueeze(1), x, w.mT)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        by_x, by_w, by_b, _ = ctx.needs_input_grad
        across = g if ctx.turned else g.mT
        if by_w and ctx.factors is not None:
            ctx.factors.append((across, x))
            by_w = False
        return (
            torch.bmm(across.mT, w) if by_x else None,
            torch.bmm(across, x) if by_w else None,
            across.sum(2) if by_b else None,
            None,
        )


# Cross-entropy.


def suits_cross_entropy(logits: Tensor, labels: Tensor, share: Tensor) -> bool:
    """Say whether a loss is one of a stack on a CPU."""
    return (
        logits.device.type == "cpu"
        and logits.dim() == 2
        and logits.dtype == share.dtype
        and labels.dtype == torch.int64
        and labels.shape == share.shape == logits.shape[:1]
        and _all_stacked(logits, labels, share)
        and not _stack_of(share).requires_grad
    )


def cross_entropy(logits: Tensor, labels: Tensor, share: Tensor) -> Tensor:
    """Return the sum of the losses of a client's examples, each times its share; few classes."""
    with Beneath():
        loss = _call(_HostCrossEntropy, *map(_stack_of, (logits, labels, share)))
    return _of_a_client(loss)


class _HostCrossEntropy(Function):
    """Logits [client, row, class], labels and share [client, row] -> a loss for each client."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, share: Tensor) -> Tensor:
        # torch's log_softmax is slow over the last axis where classes are few.
        likely, label = logits.mT.log_softmax(1), labels.unsqueeze(1)
        ctx.save_for_backward(likely, label, share)
        return torch.bmm(likely.gather(1, label), share.unsqueeze(2)).flatten().neg_()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Any:
        likely, label, share = ctx.saved_tensors
        each = (share * factor.unsqueeze(1)).unsqueeze(1)
        by_logits = likely.exp().mul_(each).scatter_add_(1, label, -each)
        return by_logits.mT, None, None


def _call(function: type[Function], *inputs: Any) -> Tensor:
    made: Tensor = function.apply(*inputs)  # type: ignore[no-untyped-call]
    return made
