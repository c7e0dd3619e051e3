"""FedALA: each client learns, number by number, how much of the global model to take.

Zhang et al., "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI 2023,
Algorithm 1. Before it trains, a client mixes its own last model Θ_i and the global model Θ: the
last p layers become Θ_i + (Θ − Θ_i) ⊙ W_i (Eq. 6), all others are Θ's. W_i in [0, 1] is learned on
a random share of its examples (Eq. 7): in every round one pass, and before the first round in which
Θ is not the initial model, passes until W_i converges. Where the box says "converges" we stop when
a pass moves W_i by less than `tolerance` on average; the released code asks instead for ten losses,
each of a pass's last batch, whose deviation is below a threshold. It also takes the share from a
random place on end rather than at random, and its p counts tensors: 2 there are weight and bias of
the last layer, one layer here. Deployed is the mixture, before training, as their code evaluates
it. Running statistics are Θ's. A newcomer has no model of its own: it trains Θ. Those who are
absent keep model and W_i, while the released code mixes again for everyone in every round.
A client whose only round was the first has no weights yet; deployed, it takes one pass from all of
Θ, not passes until they converge as a second round would.
Equations, preset and what is said of released code are by our notes: the text was not at hand to
check.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect.core import batchnorm, tree
from idiolect.core.capabilities import NewcomerModel, Preparation
from idiolect.core.client import Batch, Local
from idiolect.core.method import Report, Sent, Setup, setting
from idiolect.core.tree import Params
from idiolect.methods.fedavg import FedAvg


class Mixing(NamedTuple):
    """What a client keeps: its model after its last training, and its weights W_i."""

    model: Params
    weights: Params  # of the last layers, from 0 (own) to 1 (global)


@dataclass(frozen=True, kw_only=True)
class FedALA(Preparation, NewcomerModel, FedAvg):
    """Clients train from an element-wise mixture of their own and the global model."""

    title: ClassVar[str] = "FedALA"
    paper: ClassVar[str] = "Zhang et al. 2023 (FedALA), Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {"paper": {"lr": 0.005, "batch": 10}}
    tunes: ClassVar[bool] = True
    first_preparation: ClassVar[int] = 1  # in round 0 the global model is the client's own

    layers: int = setting(1, "last layers whose weights are learned (p)", least=1)
    share: float = setting(
        0.8, "share of the examples that weights are learned on (s)", above=0, most=1
    )
    weight_lr: float = setting(1.0, "learning rate of the weights (η)", above=0)
    start_epochs: int = setting(20, "most passes in which weights converge at first", least=0)
    tolerance: float = setting(0.01, "mean change of weights in a pass at which they have", least=0)

    def init_personal(self, setup: Setup) -> Mixing:
        """Begin with the initial model, and take all of the global one."""
        last = batchnorm.parameters(tree.split_layers(setup.params, self.layers)[1])
        return Mixing(setup.params, tree.map(torch.ones_like, last))

    def prepare(self, sent: Sent, personal: Mixing, local: Local) -> Mixing:
        """Learn the weights on one share of the data until they converge."""

        def learn(carry: tuple[Params, Tensor]) -> tuple[Params, Tensor]:
            weights, converged = carry
            new = self._learned(sent.shared, Mixing(personal.model, weights), local)
            moved = torch.cat([(new[n] - weights[n]).abs().flatten() for n in new]).mean()
            return tree.where(converged, weights, new), converged | (moved < self.tolerance)

        start = personal.weights, local.size < 0
        return Mixing(personal.model, local.repeat(learn, start, self.start_epochs)[0])

    def client_step(self, sent: Sent, personal: Mixing, local: Local) -> tuple[Report, Mixing]:
        """Learn the weights for a pass, mix, train the mixture and report it."""
        weights = self._learned(sent.shared, personal, local)
        model = self.fit(local, _mixed(sent.shared, personal.model, weights))
        return Report(model, local.size), Mixing(model, weights)

    def deploy(self, sent: Sent, personal: Mixing, local: Local) -> Params:
        """Use the mixture that the client would train next."""
        return _mixed(sent.shared, personal.model, self._learned(sent.shared, personal, local))

    def adapt(self, sent: Sent, personal: Mixing, local: Local) -> Params:
        """A newcomer trains the global model for a round."""
        return self.fit(local, sent.shared)

    def _learned(self, shared: Params, personal: Mixing, local: Local) -> Params:
        """Return W_i after a pass of Eq. 7: gradient steps, clipped to [0, 1]."""

        def loss(weights: Params, batch: Batch) -> Tensor:
            return local.loss(_mixed(shared, personal.model, weights), batch)

        def step(weights: Params, batch: Batch) -> Params:
            moved: Params = tree.axpy(
                -self.weight_lr, local.gradient(loss, weights, batch), weights
            )
            return {name: leaf.clamp(0, 1) for name, leaf in moved.items()}

        learned: Params = local.scan(step, personal.weights, batch=self.batch, share=self.share)
        return learned


def _mixed(shared: Params, own: Params, weights: Params) -> Params:
    """Return Eq. 6: own + (shared − own) ⊙ weights in the layers with weights, shared elsewhere."""
    return {**shared, **{n: torch.lerp(own[n], shared[n], w) for n, w in weights.items()}}
