"""Local and Centralised: the references that personalisation is compared with.

Local: every client trains alone, the floor that personalisation must beat.

No server draws a cohort here: every client trains in every round, so that each has the same budget,
rounds × local epochs, whatever `cohort` says for the other methods. Centralised: one
model on everybody's data, which privacy forbids.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from idiolect.core.capabilities import NewcomerModel
from idiolect.core.client import Local
from idiolect.core.method import Method, Sent, Setup, setting
from idiolect.core.tree import Params, Tree
from idiolect.methods.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class LocalOnly(NewcomerModel, Method):
    """No federation: each client keeps training its own model, and nothing is sent."""

    title: ClassVar[str] = "Local"
    presets: ClassVar[dict[str, dict[str, Any]]] = {"pfllib": {"lr": 0.005, "batch": 10}}
    alone: ClassVar[bool] = True

    newcomer_epochs: int = setting(20, "passes in which a newcomer trains", least=1, deploy=True)

    def init_server(self, setup: Setup) -> Tree:
        """The server knows nothing."""
        return ()

    def init_personal(self, setup: Setup) -> Params:
        """Start from the common initial model."""
        return setup.params

    def client_step(self, sent: Sent, personal: Params, local: Local) -> tuple[Tree, Params]:
        """Train the own model; report nothing."""
        return (), self.fit(local, personal)

    def deploy(self, sent: Sent, personal: Params, local: Local) -> Params:
        """Use the own model."""
        return personal

    def adapt(self, sent: Sent, personal: Params, local: Local) -> Params:
        """A newcomer trains alone: there is nothing to join."""
        return self.fit(local, personal, lr=self.lr, epochs=self.newcomer_epochs)

    def models(self, sent: Sent, deployed: Params) -> dict[str, Tree]:
        """There is no global model."""
        return {"personal": deployed}


@dataclass(frozen=True, kw_only=True)
class Centralised(FedAvg):
    """Train on the union of all clients' data, as if it could be gathered; score per client."""

    title: ClassVar[str] = "Centralised"
    paper: ClassVar[str] = ""
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    pooled: ClassVar[bool] = True
