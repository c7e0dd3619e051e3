"""Optimisers as pairs of pure functions; each equals its `torch.optim` namesake step for step.

`torch.optim` updates parameters in place, which cannot be mapped over clients; these return new
trees instead.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.core.tree import Tree

Step = Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]


class Optimiser(NamedTuple):
    """`init(params) -> memory` and `step(params, grads, memory) -> (params, memory)`.

    Where a step is nothing but params - rate · grads, `rate` says so: gradients need not be there.
    """

    init: Callable[[Tree], Tree]
    step: Step
    rate: float | None = None


def sgd(
    lr: float | Tensor, momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False
) -> Optimiser:
    """Stochastic gradient descent, as `torch.optim.SGD` without dampening."""
    descent = -lr

    def init(params: Tree) -> Tree:
        return tree.zeros_like(params) if momentum else ()

    def step(params: Tree, grads: Tree, velocity: Tree) -> tuple[Tree, Tree]:
        if weight_decay:
            grads = tree.axpy(weight_decay, params, grads)
        if not momentum:
            return tree.axpy(descent, grads, params), ()
        velocity = tree.axpy(momentum, velocity, grads)
        direction = tree.axpy(momentum, velocity, grads) if nesterov else velocity
        return tree.axpy(descent, direction, params), velocity

    plain = not (momentum or weight_decay or isinstance(lr, Tensor))
    return Optimiser(init, _moving_statistics(step), float(lr) if plain else None)


def _moving_statistics(step: Step) -> Step:
    """Move running statistics by the gradient's drifts: no rate, momentum or decay applies."""

    def both(params: Tree, grads: Tree, memory: Tree) -> tuple[Tree, Tree]:
        if not tree.drifting(grads):
            return step(params, grads, memory)
        stepped, memory = step(params, tree.without_drifts(grads), memory)
        return tree.drifted(grads, params, stepped), memory

    return both


class AdamMemory(NamedTuple):
    """Steps taken, and the running first and second moments of the gradient."""

    taken: Tensor
    first: Tree
    second: Tree


def adam(
    lr: float | Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Optimiser:
    """Adam with L2 weight decay, as `torch.optim.Adam`."""
    keep1, keep2 = betas

    def init(params: Tree) -> AdamMemory:
        taken = tree.leaves(params)[0].new_zeros(())
        return AdamMemory(taken, tree.zeros_like(params), tree.zeros_like(params))

    def step(params: Tree, grads: Tree, memory: AdamMemory) -> tuple[Tree, AdamMemory]:
        if weight_decay:
            grads = tree.axpy(weight_decay, params, grads)
        taken = memory.taken + 1
        first = tree.map(lambda m, g: keep1 * m + (1 - keep1) * g, memory.first, grads)
        second = tree.map(lambda v, g: keep2 * v + (1 - keep2) * g * g, memory.second, grads)
        unbias1, unbias2 = _less_power(keep1, taken), _less_power(keep2, taken).sqrt()

        def move(param: Tensor, m: Tensor, v: Tensor) -> Tensor:
            return param - (lr / unbias1) * m / (v.sqrt() / unbias2 + eps)

        return tree.map(move, params, first, second), AdamMemory(taken, first, second)

    return Optimiser(init, _moving_statistics(step))


def _less_power(keep: float, taken: Tensor) -> Tensor:
    """Return 1 - keep^taken; `1 - 0.999` would keep four digits in single precision."""
    return -torch.expm1(taken * math.log(keep)) if keep else torch.ones_like(taken)


def clipped(inner: Optimiser, max_norm: float) -> Optimiser:
    """Scale gradients down to a total norm first, as `torch.nn.utils.clip_grad_norm_`."""

    def step(params: Tree, grads: Tree, memory: Tree) -> tuple[Tree, Tree]:
        factor = (max_norm / (tree.norm(grads) + 1e-6)).clamp(max=1.0)
        return inner.step(params, tree.scale(factor, grads), memory)

    return Optimiser(inner.init, step)


Schedule = Callable[[Tensor], Tensor]
"""The factor on the base learning rate after a number of rounds, as `torch.optim.lr_scheduler`."""


def exponential(gamma: float) -> Schedule:
    """Multiply by gamma every round, as `ExponentialLR`."""
    return lambda t: torch.exp(t * math.log(gamma))


def step_decay(every: int, gamma: float) -> Schedule:
    """Multiply by gamma once in `every` rounds, as `StepLR`."""
    return lambda t: torch.exp(torch.floor(t / every) * math.log(gamma))


def steps_at(rounds: tuple[int, ...], gamma: float) -> Schedule:
    """Multiply by gamma after each of so many rounds, as `MultiStepLR`."""

    def factor(t: Tensor) -> Tensor:
        passed = sum(((t >= one).to(t.dtype) for one in rounds), torch.zeros_like(t))
        return torch.exp(passed * math.log(gamma))

    return factor


def cosine(total: int) -> Schedule:
    """Fall to zero along half a cosine over `total` rounds, as `CosineAnnealingLR`."""
    return lambda t: 0.5 * (1 + torch.cos(math.pi * t / total))
