"""The gradients of all clients of a stack at once.

A client's loss depends on its own parameters alone, so the gradient of the sum of all losses is the
stack of their gradients. torch.func.grad within vmap gives the same, but passes every operation
through one more transform.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.core.tree import Params, Tree
from idiolect.kernels.beneath import beneath, gradients, of_a_client, stack_of

Objective = Callable[[Params], tuple[Tensor, Tree]]


def stacked_gradient(objective: Objective, params: Params, clients: int) -> tuple[Params, Tree]:
    """Return the gradient of an objective, and what else it returned."""
    with beneath():
        leaves = [stack_of(leaf, clients).detach().requires_grad_() for leaf in params.values()]
    at = dict(zip(params, map(of_a_client, leaves), strict=True))
    value, others = objective(at)
    gradient = dict(zip(params, map(of_a_client, gradients(value, leaves)), strict=True))
    return gradient, tree.map(torch.detach, others)
