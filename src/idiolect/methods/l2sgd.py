"""L2SGD: local models that step towards their mean now and then.

Hanzely, Richtárik, "Federated Learning of a Mixture of Global and Local Models", 2020, Algorithm 1
(L2GD) with gradients of batches. It minimises the mean of f_i(x_i) + λ/2 ‖x_i − x̄‖². With
probability 1 − p all clients take a step x_i ← x_i − α/(n(1−p)) ∇f_i(x_i), and with probability p
one to the mean: x_i ← (1 − αλ/(np)) x_i + αλ/(np) x̄; only that one needs a server. Here a round is
what lies between two of those. With rate η = α/(n(1−p)) and K local steps, which the coin gives a
mean of (1 − p)/p, the step to the mean has the length αλ/(np) = λ η K, at most one: K is fixed by
`steps` or `epochs` in place of the coin, so that clients of equal size agree on it. Clients are
weighed alike. The variance-reduced L2SGD+ is not done. A newcomer starts from the mean.

Written from notes and released code: the paper's text was not at hand to check equation numbers.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from idiolect.core import optim, tree
from idiolect.core.capabilities import NewcomerModel
from idiolect.core.client import Batch, Local
from idiolect.core.method import PLAIN_STEPS, Report, Sent, Setup, setting
from idiolect.core.tree import Params
from idiolect.methods.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class L2SGD(NewcomerModel, FedAvg):
    """Clients train their own models and, once a round, move them a part of the way to the mean."""

    title: ClassVar[str] = "L2SGD"
    paper: ClassVar[str] = "Hanzely and Richtárik 2020, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    unused: ClassVar[tuple[str, ...]] = PLAIN_STEPS

    uniform: bool = setting(True, "weigh clients alike, as printed, instead of by their examples")
    pull: float = setting(0.1, "strength of the pull to the mean (λ)", least=0)

    def init_personal(self, setup: Setup) -> Params:
        """The own model starts as the initial one."""
        return setup.params

    def client_step(self, sent: Sent, personal: Params, local: Local) -> tuple[Report, Params]:
        """Move towards the mean, then take local steps; report the own model and keep it."""
        plain = optim.sgd(self.lr, weight_decay=self.weight_decay)

        def step(params: Params, batch: Batch) -> Params:
            stepped: Params = plain.step(params, local.gradient(local.loss, params, batch), ())[0]
            return stepped

        length = (self.pull * self.lr * self._taken(local)).clamp(max=1)
        start = tree.map(lambda own, mean: torch.lerp(own, mean, length), personal, sent.shared)
        own = local.scan(step, start, batch=self.batch, epochs=self.epochs, steps=self.steps)
        return Report(own, local.size), own

    def deploy(self, sent: Sent, personal: Params, local: Local) -> Params:
        """Use the own model."""
        return personal

    def adapt(self, sent: Sent, personal: Params, local: Local) -> Params:
        """A newcomer trains for a round from the mean."""
        return self.client_step(sent, sent.shared, local)[1]

    def _taken(self, local: Local) -> Tensor:
        """Return the local steps of a round (K)."""
        if self.steps:
            return torch.full_like(local.size, self.steps)
        return self.epochs * torch.ceil(local.size / self.batch)
