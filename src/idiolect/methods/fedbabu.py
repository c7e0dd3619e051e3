"""FedBABU: federate the body under a head that nobody trains, then fine-tune at every client.

Oh, Kim, Yun, "FedBABU: Towards Enhanced Representation for Federated Image Classification", ICLR
2022, Algorithm 1. The head stays as it was drawn, the same for everyone; clients train the body and
the server averages it by examples. Personal models are fine-tuned after the rounds, by default
whole, as the paper's are. A newcomer does the same. PFLlib (d832e76) fine-tunes once after the last
round, from what the client itself trained in it rather than from the average, and prints as "best
accuracy" the best of the rounds before, which is that of the global model.

Written from notes and released code: the paper's text was not at hand to check equation numbers.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from idiolect.core import tree
from idiolect.core.client import Batch, Local
from idiolect.core.method import Report, Sent, setting
from idiolect.core.tree import Params, Tree
from idiolect.methods.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedBABU(FedAvg):
    """Clients train the body under a fixed random head; each fine-tunes the result for itself."""

    title: ClassVar[str] = "FedBABU"
    paper: ClassVar[str] = "Oh et al. 2022, Algorithm 1"
    averages: ClassVar[bool] = True
    tunes: ClassVar[bool] = True
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "pfllib": {"lr": 0.005, "batch": 10, "tune_epochs": 10, "tune_lr": 0.005}
    }

    head_layers: int = setting(1, "how many last layers stay as they were drawn", least=0)
    tune: str = setting("all", "what is fine-tuned", choices=("all", "body", "head"), deploy=True)
    tune_epochs: int = setting(
        5, "passes over the client's data after training", least=1, deploy=True
    )
    tune_lr: float = setting(0.01, "learning rate of the fine-tuning", above=0, deploy=True)

    def client_step(self, sent: Sent, personal: Tree, local: Local) -> tuple[Report, Tree]:
        """Train the body under the head as it is; report the body."""
        body, head = tree.split_layers(sent.shared, self.head_layers)
        return Report(self._trained(body, head, local), local.size), personal

    def server_step(self, state: Params, cohort: Tensor, reports: Report) -> Params:
        """Average the body."""
        body, _ = tree.split_layers(state, self.head_layers)
        return {**state, **super().server_step(body, cohort, reports)}

    def reference(self, state: Params, cohort: Tensor) -> Params:
        """Only the body is reported."""
        return tree.split_layers(state, self.head_layers)[0]

    def deploy(self, sent: Sent, personal: Tree, local: Local) -> Params:
        """Fine-tune the whole model, or its body or head alone."""
        body, head = tree.split_layers(sent.shared, self.head_layers)
        parts = {"all": (sent.shared, {}), "body": (body, head), "head": (head, body)}
        tuned, still = parts[self.tune]
        if not tuned:  # there is no head
            return {**sent.shared}
        fitted = self._trained(tuned, still, local, lr=self.tune_lr, epochs=self.tune_epochs)
        return {**sent.shared, **fitted}

    def _trained(self, tuned: Params, still: Params, local: Local, **given: Any) -> Params:
        """Train some of the parameters while the others stand still."""

        def loss(tuned: Params, batch: Batch) -> Tensor:
            return local.loss({**tuned, **still}, batch)

        return self.fit(local, tuned, loss, **given)
