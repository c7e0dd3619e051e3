"""Ditto: a personal model held near the global one, beside FedAvg.

Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021,
Algorithm 1. The server averages clients alike, as the algorithm prints it; `uniform = false` weighs
them by their examples.

The preset `pfllib` has the rate and batch of PFLlib; its default μ = 0 would make this local
training beside FedAvg.
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
class Ditto(NewcomerModel, FedAvg):
    """FedAvg, and at each client a model v that minimises f(v) + pull/2 · ‖v − w‖²."""

    title: ClassVar[str] = "Ditto"
    paper: ClassVar[str] = "Li et al. 2021, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {"pfllib": {"lr": 0.005, "batch": 10}}

    uniform: bool = setting(True, "weigh clients alike, as printed, instead of by their examples")
    pull: float = setting(1.0, "strength of the pull to the global model (λ)", least=0)

    def init_personal(self, setup: Setup) -> Params:
        """The personal model v starts as the initial one."""
        return setup.params

    def client_step(self, sent: Sent, personal: Params, local: Local) -> tuple[Report, Params]:
        """Train the global model for the server and the personal one near it."""
        report, _ = super().client_step(sent, (), local)

        def loss(v: Params, batch: Batch) -> Tensor:
            return local.loss(v, batch) + self.pull / 2 * tree.sqdist(v, sent.shared)

        return report, self.fit(local, personal, loss)

    def deploy(self, sent: Sent, personal: Params, local: Local) -> Params:
        """Use the personal model."""
        return personal

    def adapt(self, sent: Sent, personal: Params, local: Local) -> Params:
        """A newcomer starts v from the global model and trains it for a round."""
        return self.client_step(sent, sent.shared, local)[1]

    def models(self, sent: Sent, deployed: Params) -> dict[str, Tree]:
        """The personal v and the global w."""
        return {"personal": deployed, "global": sent.shared}
