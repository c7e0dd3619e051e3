"""FedPer: shared base layers, personal last layers.

Arivazhagan et al., "Federated Learning with Personalization Layers", 2019, Algorithms 1 and 2.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from idiolect.core import tree
from idiolect.core.capabilities import NewcomerModel
from idiolect.core.client import Batch, Local
from idiolect.core.method import Report, Sent, Setup, setting
from idiolect.core.tree import Params, Tree
from idiolect.methods.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedPer(NewcomerModel, FedAvg):
    """Clients train base and head together, upload the base, and keep the head."""

    title: ClassVar[str] = "FedPer"
    paper: ClassVar[str] = "Arivazhagan et al. 2019, Algorithms 1-2"
    presets: ClassVar[dict[str, dict[str, Any]]] = {"pfllib": {"lr": 0.005, "batch": 10}}

    head_layers: int = setting(1, "how many last layers are personal", least=0)
    newcomer_epochs: int = setting(
        10, "passes in which a newcomer trains its head", least=1, deploy=True
    )

    def init_server(self, setup: Setup) -> Params:
        """The server holds the base."""
        return tree.split_layers(setup.params, self.head_layers)[0]

    def init_personal(self, setup: Setup) -> Params:
        """A client holds a head."""
        return tree.split_layers(setup.params, self.head_layers)[1]

    def client_step(self, sent: Sent, personal: Params, local: Local) -> tuple[Report, Params]:
        """Train the whole network; report its base, keep its head."""
        trained = self.fit(local, {**sent.shared, **personal})
        head, base = tree.split(trained, personal.__contains__)
        return Report(base, local.size), head

    def deploy(self, sent: Sent, personal: Params, local: Local) -> Params:
        """Put the own head on the shared base."""
        return {**sent.shared, **personal}

    def adapt(self, sent: Sent, personal: Params, local: Local) -> Params:
        """A newcomer has no head yet: train one on the fixed base."""
        if not personal:
            return self.deploy(sent, personal, local)

        def loss(head: Params, batch: Batch) -> Tensor:
            return local.loss({**sent.shared, **head}, batch)

        head = self.fit(local, personal, loss, lr=self.lr, epochs=self.newcomer_epochs)
        return {**sent.shared, **head}

    def models(self, sent: Sent, deployed: Params) -> dict[str, Tree]:
        """A base alone predicts nothing: there is no global model."""
        return {"personal": deployed}
