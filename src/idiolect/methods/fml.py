"""FML: a shared and a private model teach each other, without pulls.

Shen et al., "Federated Mutual Learning", 2020, Eqs. 4-5 and Algorithm 1. Both models step on the
same batch; KL is summed over classes. PFLlib (d832e76) divides it by their number and does not hold
the teacher constant: the gradient of each loss moves the other model as well.

The preset `pfllib` has the rate and batch of PFLlib; its defaults α = 1, β = 0 would leave
the private model without a teacher and the shared one without labels.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from idiolect.core.capabilities import NewcomerModel
from idiolect.core.client import Batch, Local
from idiolect.core.method import Report, Sent, Setup, setting
from idiolect.core.task import Task
from idiolect.core.tree import Params, Tree
from idiolect.methods.fedavg import FedAvg


class PrivateModel(NamedTuple):
    """Parameters of the client's own architecture."""

    params: Params


class GlobalModel(NamedTuple):
    """Parameters of the global architecture."""

    params: Params


class Peer(NamedTuple):
    """A model, the network it belongs to, and loss(parameters, logits, the other's logits)."""

    params: Params
    network: str
    loss: Callable[[Params, Tensor, Tensor], Tensor]


class FmlCarry(NamedTuple):
    """The shared model and the private one, with their optimisers' memories."""

    shared: Params
    private: Params
    shared_memory: Tree
    private_memory: Tree


@dataclass(frozen=True, kw_only=True)
class FML(NewcomerModel, FedAvg):
    """The private model never leaves; the shared one carries what it learned."""

    title: ClassVar[str] = "FML"
    paper: ClassVar[str] = "Shen et al. 2020, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {"pfllib": {"lr": 0.005, "batch": 10}}

    private_share: float = setting(
        0.5, "weight of the labels in the private model's loss (α)", least=0, most=1
    )
    shared_share: float = setting(
        0.5, "weight of the labels in the shared model's loss (β)", least=0, most=1
    )

    newcomer_epochs: int = setting(20, "passes in which a newcomer trains", least=1, deploy=True)

    def init_personal(self, setup: Setup) -> Params:
        """The private model starts with its own architecture."""
        return setup.auxiliary

    def client_step(self, sent: Sent, personal: Params, local: Local) -> tuple[Report, Params]:
        """Train both models together; report the shared one."""
        optimiser = self.local_optimiser(local)

        def step(now: FmlCarry, batch: Batch) -> FmlCarry:
            gradient_shared, gradient_private = mutual_gradients(
                Peer(now.shared, "main", _loss(self.shared_share, batch, local.task)),
                Peer(now.private, "auxiliary", _loss(self.private_share, batch, local.task)),
                batch,
                local,
            )
            shared, shared_memory = optimiser.step(now.shared, gradient_shared, now.shared_memory)
            private, private_memory = optimiser.step(
                now.private, gradient_private, now.private_memory
            )
            return FmlCarry(shared, private, shared_memory, private_memory)

        start = FmlCarry(
            sent.shared, personal, optimiser.init(sent.shared), optimiser.init(personal)
        )
        end = local.scan(step, start, batch=self.batch, epochs=self.epochs, steps=self.steps)
        return Report(end.shared, local.size), end.private

    def deploy(self, sent: Sent, personal: Params, local: Local) -> PrivateModel:
        """Use the private model."""
        return PrivateModel(personal)

    def adapt(self, sent: Sent, personal: Params, local: Local) -> PrivateModel:
        """A newcomer's private model, which starts afresh, learns with the shared one."""
        longer = replace(self, epochs=self.newcomer_epochs, steps=0)
        return PrivateModel(longer.client_step(sent, personal, local)[1])

    def models(self, sent: Sent, deployed: PrivateModel) -> dict[str, Tree]:
        """The private and the shared model."""
        scored: dict[str, Tree] = {"global": GlobalModel(sent.shared)}
        return {"personal": deployed, **scored} if deployed else scored

    def predict(self, model: Tree, x: Tensor, local: Local) -> Tensor:
        """Run a model on the architecture it belongs to."""
        return logits_of(model, x, local)


def _loss(labels: float, batch: Batch, task: Task) -> Callable[[Params, Tensor, Tensor], Tensor]:
    """Weigh the labels of a batch against what the other model says of it."""

    def loss(own: Params, logits: Tensor, taught: Tensor) -> Tensor:
        hard = task.loss(logits, batch.y, batch.weight)
        return labels * hard + (1 - labels) * task.divergence(logits, taught, batch.weight)

    return loss


def mutual_gradients(one: Peer, two: Peer, batch: Batch, local: Local) -> tuple[Params, Params]:
    """Return the gradient of each model's loss on a batch, both at the same values.

    Each loss takes the other model's logits as constants, those of evaluation mode. Where networks
    do the same in training, one forward pass of each serves both losses.
    """
    if local.steady:
        return _together(one, two, batch, local)
    return _taught(one, two, batch, local), _taught(two, one, batch, local)


def _taught(own: Peer, peer: Peer, batch: Batch, local: Local) -> Params:
    constant = local.logits(peer.params, batch.x, network=peer.network).detach()

    def objective(params: Params, batch: Batch) -> Tensor:
        logits = local.logits(params, batch.x, batch.training, own.network)
        return own.loss(params, logits, constant)

    return local.gradient(objective, own.params, batch)


def _together(one: Peer, two: Peer, batch: Batch, local: Local) -> tuple[Params, Params]:
    """Differentiate the sum: with peers constant, no loss depends on the other's parameters."""
    sides = (one, two)

    def objective(both: Params, batch: Batch) -> Tensor:
        params = [_part(both, place, side) for place, side in enumerate(sides)]
        first, second = (
            local.logits(own, batch.x, batch.training, side.network)
            for own, side in zip(params, sides, strict=True)
        )
        return one.loss(params[0], first, second.detach()) + two.loss(
            params[1], second, first.detach()
        )

    both = {f"{n} {name}": leaf for n, side in enumerate(sides) for name, leaf in side[0].items()}
    gradient = local.gradient(objective, both, batch)
    return _part(gradient, 0, one), _part(gradient, 1, two)


def _part(both: Params, place: int, side: Peer) -> Params:
    return {name: both[f"{place} {name}"] for name in side.params}


def logits_of(model: PrivateModel | GlobalModel, x: Tensor, local: Local) -> Tensor:
    """Run a model on the architecture it belongs to."""
    network = "auxiliary" if isinstance(model, PrivateModel) else "main"
    return local.logits(model.params, x, network=network)
