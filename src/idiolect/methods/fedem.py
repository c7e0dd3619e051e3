"""FedEM: several global models, of which each client has a mixture of its own.

Marfoq, Neglia, Bellet, Kameni, Vidal, "Federated Multi-Task Learning under a Mixture of
Distributions", NeurIPS 2021, Algorithm 1. Each example of a client is taken to come from one of M
components. In a round the client finds how likely each component is for each of its training
examples, by the received models and its weights (E step); takes the means of these as its new
weights, and trains every model on all examples, each weighed by its component's likelihood (M
step). The server averages each model over clients by their examples. Deployed are the server's
models with the client's weights, which mix probabilities. What the E step finds follows from the
models received, so it is computed anew for every batch and not stored; an example that is a
sequence has one component, found by the mean of its places' losses, as in the released code.

The paper draws the M models independently. Here they begin as IFCA's do. A newcomer finds its
weights by `newcomer_steps` E and M steps in which the models stay; a client that took part in no
round, or has no examples, mixes all models alike. Classification only.

The released code (omarfoq/FedEM b80911f) averages over all clients also where few were drawn: the
absent ones still have the models as they were received, so the server moves by a part of the way
only (aggregator.py, CentralizedAggregator). On CIFAR it leaves out each client's last, incomplete
batch. A newcomer's weights take one step whenever it is scored, from those of the scoring before.

Written from notes and released code: the paper's text was not at hand to check equation numbers.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.core.capabilities import NewcomerModel
from idiolect.core.client import Batch, Local
from idiolect.core.method import Report, Sent, Setup, setting
from idiolect.core.tree import Params, Tree
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.ifca import initial_models


class Weighted(NamedTuple):
    """What a client uses: the global models, and its weights of them."""

    models: Params  # [component, ...]
    weights: Tensor  # [component]


@dataclass(frozen=True, kw_only=True)
class FedEM(NewcomerModel, FedAvg):
    """Clients train several global models together, each by the examples that it explains best."""

    title: ClassVar[str] = "FedEM"
    paper: ClassVar[str] = "Marfoq et al. 2021, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    needs_classes: ClassVar[str] = "a likelihood"

    components: int = setting(3, "number of global models (M)", least=1, models=True)
    newcomer_steps: int = setting(
        10, "E and M steps by which a newcomer finds its weights", least=1, deploy=True
    )

    def init_server(self, setup: Setup) -> Params:
        """Begin with different models."""
        return initial_models(setup, self.components)

    def init_personal(self, setup: Setup) -> Tensor:
        """All components weigh alike."""
        return setup.sizes.new_full((self.components,), 1 / self.components)

    def client_step(self, sent: Sent, personal: Tensor, local: Local) -> tuple[Report, Tensor]:
        """Find the components of the examples, and train each model by its own."""
        optimiser = self.local_optimiser(local)
        models = self._apart(sent.shared)

        def step(carry: Any, batch: Batch) -> Any:
            likely = self._likely(models, personal, batch, local)
            return [
                optimiser.step(params, local.gradient(_weighing(local, own), params, batch), memory)
                for (params, memory), own in zip(carry, likely, strict=True)
            ]

        start = [(params, optimiser.init(params)) for params in models]
        end = local.scan(step, start, batch=self.batch, epochs=self.epochs, steps=self.steps)
        trained = tree.stack([params for params, _ in end])
        return Report(trained, local.size), self._weights(sent.shared, personal, local)

    def deploy(self, sent: Sent, personal: Tensor, local: Local) -> Weighted:
        """Mix the global models by the client's weights."""
        return Weighted(sent.shared, personal)

    def adapt(self, sent: Sent, personal: Tensor, local: Local) -> Weighted:
        """A newcomer finds its weights; the models stay."""
        for _ in range(self.newcomer_steps):
            personal = self._weights(sent.shared, personal, local)
        return Weighted(sent.shared, personal)

    def models(self, sent: Sent, deployed: Weighted) -> dict[str, Tree]:
        """There is no single global model."""
        return {"personal": deployed} if deployed else {}

    def predict(self, model: Weighted, x: Tensor, local: Local) -> Tensor:
        """Mix the probabilities of all models."""
        said = torch.stack([local.logits(one, x) for one in self._apart(model.models)])
        return local.task.mixture(said, _log(model.weights))

    def _apart(self, models: Params) -> list[Params]:
        return [tree.map(lambda leaf, n=n: leaf[n], models) for n in range(self.components)]

    def _likely(self, models: list[Params], weights: Tensor, batch: Batch, local: Local) -> Tensor:
        """Return how likely each component is for each example: [component, example] (E step)."""
        counted = batch.weight.flatten(1) if batch.y.dim() > 1 else batch.weight.unsqueeze(1)
        share = counted / counted.sum(1, keepdim=True).clamp(min=1e-12)

        def fits(params: Params) -> Tensor:
            outputs = local.logits(params, batch.x)
            chance = local.task.evidence(outputs, batch.y, batch.weight).chance
            return (_log(chance).reshape(share.shape) * share).sum(1)

        said = torch.stack([fits(params) for params in models])
        return (_log(weights).unsqueeze(1) + said).softmax(0)

    def _weights(self, shared: Params, weights: Tensor, local: Local) -> Tensor:
        """Return the mean of what is likely over the training examples (M step)."""
        models = self._apart(shared)

        def mean(batch: Batch) -> Tensor:
            likely = self._likely(models, weights, batch, local)
            counted = batch.weight.flatten(1).sum(1) if batch.y.dim() > 1 else batch.weight
            return (likely * counted).sum(1) / counted.sum().clamp(min=1e-12)

        found = local.mean(mean, "train")
        return torch.where(local.size > 0, found, weights)


def _weighing(local: Local, likely: Tensor) -> Any:
    """Return the loss of a batch whose examples count as much as they are likely."""

    def loss(params: Params, batch: Batch) -> Tensor:
        outputs = local.logits(params, batch.x, batch.training, weight=batch.weight)
        own = likely.reshape(-1, *[1] * (batch.weight.dim() - 1)) * batch.weight
        share = own.sum() / batch.weight.sum().clamp(min=1e-12)
        return local.task.loss(outputs, batch.y, own) * share

    return loss


def _log(shares: Tensor) -> Tensor:
    return shares.clamp(min=1e-30).log()
