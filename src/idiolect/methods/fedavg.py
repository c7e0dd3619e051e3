"""FedAvg: average what the clients trained; and FedAvg + FT, fine-tuned at every client.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017, Algorithm 1. Fine-tuning is the local adaptation that the personalisation papers
compare with, for example Yu et al., "Salvaging Federated Learning by Local Adaptation", 2020.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from idiolect.core import tree
from idiolect.core.capabilities import Averaging
from idiolect.core.client import Local
from idiolect.core.method import Method, Report, Sent, alike, setting, towards
from idiolect.core.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class FedAvg(Averaging, Method):
    """Clients train the global model on their data; the server averages the results."""

    title: ClassVar[str] = "FedAvg"
    paper: ClassVar[str] = "McMahan et al. 2017, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {"pfllib": {"lr": 0.005, "batch": 10}}

    uniform: bool = setting(False, "weigh clients alike instead of by their examples")
    server_lr: float = setting(1.0, "how far the server moves towards the average", above=0)

    def client_step(self, sent: Sent, personal: Tree, local: Local) -> tuple[Report, Tree]:
        """Train the received model and report it."""
        return Report(self.fit(local, sent.shared), local.size), personal

    def server_step(self, state: Params, cohort: Tensor, reports: Report) -> Params:
        """Move the global model towards the clients' average."""
        average: Params = tree.mean(reports.params, self.weights(reports.size))
        moved: Params = towards(state, average, self.server_lr)
        return moved

    def weights(self, size: Tensor) -> Tensor:
        """Weigh clients by their examples, or alike."""
        return alike(size) if self.uniform else size


@dataclass(frozen=True, kw_only=True)
class FedAvgFT(FedAvg):
    """FedAvg, then local training of the global model at every client."""

    title: ClassVar[str] = "FedAvg + FT"
    paper: ClassVar[str] = "Yu et al. 2020"
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    trained_as: ClassVar[type[Method] | None] = FedAvg
    tunes: ClassVar[bool] = True

    tune_epochs: int = setting(
        10, "passes over the client's data after training", least=1, deploy=True
    )
    tune_steps: int = setting(
        0, "steps after training instead of passes; 0: use tune_epochs", least=0, deploy=True
    )
    tune_lr: float = setting(0.01, "learning rate of the fine-tuning", above=0, deploy=True)

    def deploy(self, sent: Sent, personal: Tree, local: Local) -> Params:
        """Fine-tune the global model."""
        epochs, steps = self.tune_epochs, self.tune_steps
        return self.fit(local, sent.shared, lr=self.tune_lr, epochs=epochs, steps=steps)
