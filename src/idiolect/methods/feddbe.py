"""FedDBE: a personal bias of the features, and global features whose mean is held in place.

Zhang et al., "Eliminating Domain Bias for Federated Learning in Representation Space", NeurIPS
2023, Algorithm 1. A client adds a trainable vector of its own (the personalised representation bias
memory) to the features before they enter the head, and holds the mean of a batch's features near a
global mean: κ times half the mean squared difference (their released form; μ is the weight of the
batch in a running mean, 1 in their CNN runs). Network parameters are averaged by examples, the
vector stays. The global mean is fixed before: each client trains the initial model for a round
without all this and reports the mean of its features. Here that is what a client does before its
first round; the server takes the mean of the first cohort at the end of the first round, which
therefore has no pull yet. For a client's mean the released code takes the running one, at μ = 1
that of its last batch alone; here it is over all its examples. A newcomer fits the vector alone.

Written from notes and released code: the paper's text was not at hand to check equation numbers.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.core.capabilities import Averaging, NewcomerModel, Preparation
from idiolect.core.client import Batch, Local
from idiolect.core.method import Method, Report, Sent, Setup, setting
from idiolect.core.tree import Params, Tree

BIAS = "representation bias"  # the name of the vector among a network's parameters
MEAN = "running_mean"  # in a report; servers average a statistic of that name and do not step on it


class Held(NamedTuple):
    """What the server keeps: the network, the global mean of features, and whether it is known."""

    params: Params
    mean: Tensor  # [feature]
    known: Tensor


class Debiased(NamedTuple):
    """What a client keeps: its vector, and the mean of its features after the preparation."""

    bias: Tensor  # [feature]
    mean: Tensor


class Shifted(NamedTuple):
    """What a client uses: the global network and its vector."""

    params: Params
    bias: Tensor


@dataclass(frozen=True, kw_only=True)
class FedDBE(Averaging, Preparation, NewcomerModel, Method):
    """Clients add a vector of their own to the features, and hold the features' mean in place."""

    title: ClassVar[str] = "FedDBE"
    paper: ClassVar[str] = "Zhang et al. 2023 (DBE), Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"lr": 0.005, "batch": 10, "pull": 50.0, "batch_share": 1.0}
    }

    pull: float = setting(50.0, "strength of the pull to the global mean of features (κ)", least=0)
    batch_share: float = setting(
        1.0, "weight of a batch in the running mean of features (μ)", above=0, most=1
    )
    newcomer_epochs: int = setting(
        10, "passes in which a newcomer trains its vector", least=1, deploy=True
    )

    def init_server(self, setup: Setup) -> Held:
        """No mean is known."""
        mean = setup.sizes.new_zeros(setup.features[-1:])
        return Held(setup.params, mean, setup.sizes.new_zeros(()))

    def init_personal(self, setup: Setup) -> Debiased:
        """Nothing is added at first."""
        nothing = setup.sizes.new_zeros(setup.features[-1:])
        return Debiased(nothing, nothing)

    def prepare(self, sent: Sent, personal: Debiased, local: Local) -> Debiased:
        """Train the received model for a round, and take the mean of its features."""
        trained = self.fit(local, sent.shared.params)

        def mean(batch: Batch) -> Tensor:
            return _mean(local.features(trained, batch.x), batch.weight)

        total, labels = local.total(mean, "train")
        return personal._replace(mean=total / labels.clamp(min=1))

    def client_step(self, sent: Sent, personal: Debiased, local: Local) -> tuple[Report, Debiased]:
        """Train network and vector; report the network, and the mean of the preparation."""
        held: Held = sent.shared
        optimiser = self.local_optimiser(local)

        def step(carry: Any, batch: Batch) -> Any:
            params, running, memory = carry

            def loss(params: Params, batch: Batch) -> Tensor:
                network, bias = _parted(params)
                given: dict[str, Any] = {"training": batch.training, "weight": batch.weight}
                features = local.features(network, batch.x, **given)
                logits = local.head(network, features + bias, **given)
                mean = torch.lerp(running, _mean(features, batch.weight), self.batch_share)
                off = (mean - held.mean).square().mean() / 2
                wanted = local.task.loss(logits, batch.y, batch.weight)
                return wanted + self.pull * held.known * off

            grads = local.gradient(loss, params, batch)
            if self.batch_share < 1:
                now = _mean(local.features(_parted(params)[0], batch.x), batch.weight)
                running = torch.lerp(running, now, self.batch_share)
            params, memory = optimiser.step(params, grads, memory)
            return params, running, memory

        start = {**held.params, BIAS: personal.bias}
        trained, _, _ = local.scan(
            step,
            (start, torch.zeros_like(held.mean), optimiser.init(start)),
            batch=self.batch,
            epochs=self.epochs,
            steps=self.steps,
        )
        network, bias = _parted(trained)
        mean = torch.where(held.known > 0, held.mean, personal.mean)  # asked for once
        told: Tree = {"network": network, MEAN: mean}
        return Report(told, local.size), personal._replace(bias=bias)

    def server_step(self, state: Held, cohort: Tensor, reports: Report) -> Held:
        """Average networks; keep the mean that is known."""
        found = tree.mean(reports.params, self.weights(reports.size))
        mean = torch.where(state.known > 0, state.mean, found[MEAN])
        return Held(found["network"], mean, torch.ones_like(state.known))

    def reference(self, state: Held, cohort: Tensor) -> Tree:
        """A client that changed nothing would report what is known."""
        return {"network": state.params, MEAN: state.mean}

    def deploy(self, sent: Sent, personal: Debiased, local: Local) -> Shifted:
        """Add the own vector to the global features."""
        return Shifted(sent.shared.params, personal.bias)

    def adapt(self, sent: Sent, personal: Debiased, local: Local) -> Shifted:
        """A newcomer trains the vector alone."""
        params = sent.shared.params

        def loss(own: Params, batch: Batch) -> Tensor:
            logits = self.predict(Shifted(params, own[BIAS]), batch.x, local)
            return local.task.loss(logits, batch.y, batch.weight)

        start = {BIAS: personal.bias}
        own = self.fit(local, start, loss, lr=self.lr, epochs=self.newcomer_epochs)
        return Shifted(params, own[BIAS])

    def models(self, sent: Sent, deployed: Shifted) -> dict[str, Tree]:
        """With the vector, and without."""
        return {"personal": deployed, "global": sent.shared.params}

    def predict(self, model: Shifted | Params, x: Tensor, local: Local) -> Tensor:
        """Return the outputs with the vector, where there is one."""
        if not isinstance(model, Shifted):
            return local.logits(model, x)
        return local.head(model.params, local.features(model.params, x) + model.bias)


def _mean(features: Tensor, weight: Tensor) -> Tensor:
    """Return the mean features of a batch's labels: [feature]."""
    flat, share = features.flatten(0, -2), weight.reshape(-1, 1)
    return (flat * share).sum(0) / share.sum().clamp(min=1e-12)


def _parted(params: Params) -> tuple[Params, Tensor]:
    """Part the vector from the network's parameters."""
    return {name: leaf for name, leaf in params.items() if name != BIAS}, params[BIAS]
