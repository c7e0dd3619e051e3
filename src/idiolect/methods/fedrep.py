"""FedRep: alternate between the personal head and the shared representation.

Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021,
Algorithm 1. The server averages clients alike, as the algorithm prints it; `uniform = false` weighs
them by their examples, as FedPer does. The authors' code (lgcollins/FedRep d82e629) ends with a
round in which all clients train the head alone for ten epochs or more; here nothing follows the
rounds.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from idiolect.core.client import Batch, Local
from idiolect.core.method import Report, Sent, setting
from idiolect.core.tree import Params
from idiolect.methods.fedper import FedPer


@dataclass(frozen=True, kw_only=True)
class FedRep(FedPer):
    """Clients fit the head on the received base first, then the base under that head."""

    title: ClassVar[str] = "FedRep"
    paper: ClassVar[str] = "Collins et al. 2021, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "pfllib": {"lr": 0.005, "batch": 10, "head_epochs": 1, "uniform": False}
    }

    uniform: bool = setting(True, "weigh clients alike, as printed, instead of by their examples")
    head_epochs: int = setting(5, "passes over the data for the head in a round", least=1)

    def client_step(self, sent: Sent, personal: Params, local: Local) -> tuple[Report, Params]:
        """Fit the head with the base fixed, then the base with the head fixed."""

        def head_loss(head: Params, batch: Batch) -> Tensor:
            return local.loss({**sent.shared, **head}, batch)

        head = personal
        if personal:
            head = self.fit(local, personal, head_loss, epochs=self.head_epochs)

        def base_loss(base: Params, batch: Batch) -> Tensor:
            return local.loss({**base, **head}, batch)

        return Report(self.fit(local, sent.shared, base_loss), local.size), head
