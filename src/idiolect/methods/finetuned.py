"""FedAvg + fine-tuning: each client trains the final global model on its own data.

The greedy local adaptation that the personalisation papers compare with, for example Yu et al.,
"Salvaging Federated Learning by Local Adaptation", 2020.
"""

from dataclasses import dataclass
from typing import ClassVar

from idiolect.core.client import Local
from idiolect.core.method import Method, Sent, setting
from idiolect.core.tree import Params, Tree
from idiolect.methods.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedAvgFT(FedAvg):
    """FedAvg, then local training of the global model at every client."""

    title: ClassVar[str] = "FedAvg + FT"
    paper: ClassVar[str] = "Yu et al. 2020"
    trained_as: ClassVar[type[Method] | None] = FedAvg
    tunes: ClassVar[bool] = True

    tune_epochs: int = setting(
        10, "passes over the client's data after training", least=1, deploy=True
    )
    tune_lr: float = setting(0.01, "learning rate of the fine-tuning", above=0, deploy=True)

    def deploy(self, sent: Sent, personal: Tree, local: Local) -> Params:
        """Fine-tune the global model."""
        rule = self.local_optimiser(local, self.tune_lr)
        return local.fit(local.loss, sent.shared, rule, batch=self.batch, epochs=self.tune_epochs)
