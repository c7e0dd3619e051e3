"""FML: a shared and a private model teach each other, without pulls.

Shen et al., "Federated Mutual Learning", 2020, Eqs. 4-5 and Algorithm 1. Both models step on the
same batch; KL is summed over classes (the public port divides by their number).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from torch import Tensor

from idiolect.core import losses
from idiolect.core.capabilities import NewcomerModel
from idiolect.core.client import Batch, Local
from idiolect.core.method import Report, Sent, Setup, setting
from idiolect.core.tree import Params, Tree
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.personalise import mutual
from idiolect.methods.personalise.mutual import Side
from idiolect.methods.pfml import Global, Private, logits_of


class Pair(NamedTuple):
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
        rule = self.local_optimiser(local)

        def step(now: Pair, batch: Batch) -> Pair:
            slope_shared, slope_private = mutual.slopes(
                Side(now.shared, "main", _loss(self.shared_share, batch)),
                Side(now.private, "auxiliary", _loss(self.private_share, batch)),
                batch,
                local,
            )
            shared, shared_memory = rule.step(now.shared, slope_shared, now.shared_memory)
            private, private_memory = rule.step(now.private, slope_private, now.private_memory)
            return Pair(shared, private, shared_memory, private_memory)

        start = Pair(sent.shared, personal, rule.init(sent.shared), rule.init(personal))
        end = local.scan(step, start, batch=self.batch, epochs=self.epochs, steps=self.steps)
        return Report(end.shared, local.size), end.private

    def deploy(self, sent: Sent, personal: Params, local: Local) -> Private:
        """Use the private model."""
        return Private(personal)

    def adapt(self, sent: Sent, personal: Params, local: Local) -> Private:
        """A newcomer's private model, which starts afresh, learns with the shared one."""
        longer = replace(self, epochs=self.newcomer_epochs, steps=0)
        return Private(longer.client_step(sent, personal, local)[1])

    def models(self, sent: Sent, deployed: Private) -> dict[str, Tree]:
        """The private and the shared model."""
        scored: dict[str, Tree] = {"global": Global(sent.shared)}
        return {"personal": deployed, **scored} if deployed else scored

    def predict(self, model: Tree, x: Tensor, local: Local) -> Tensor:
        """Run a model on the architecture it belongs to."""
        return logits_of(model, x, local)


def _loss(labels: float, batch: Batch) -> Callable[[Params, Tensor, Tensor], Tensor]:
    """Weigh the labels of a batch against what the other model says of it."""

    def loss(own: Params, logits: Tensor, taught: Tensor) -> Tensor:
        hard = losses.cross_entropy(logits, batch.y, batch.weight)
        return labels * hard + (1 - labels) * losses.divergence(logits, taught, batch.weight)

    return loss
