"""FedMD: everyone learns the mean of all predictions on public data.

Li & Wang, "FedMD: Heterogenous Federated Learning via Model Distillation", 2019, Algorithm 1. By
default as in KT-pFL's comparison: soft predictions, KL, no transfer phase. The preset `code` is the
authors': logits, their mean absolute error, Adam, and the transfer phase, in which a network learns
the labels of the public set and then its client's own examples before its first round. That needs a
public set of the private classes. Batches and epochs of a round are those of two of their four
files, FEMNIST with unbalanced classes and CIFAR with balanced ones; the others have 2 epochs, or 10
with batches of 10 and public ones of 128. Not taken over: their transfer phase has batches of its
own, 128 public and 32 private examples, and is stopped early on test data, where here it has the
batches of a round and a number of passes; and their Adam goes on from round to round, where here it
begins anew. A newcomer, who may hold no public examples, does without.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from idiolect.core import losses
from idiolect.core.capabilities import Preparation
from idiolect.core.client import Batch, Local
from idiolect.core.method import Capability, Sent, setting
from idiolect.core.task import Task
from idiolect.core.tree import Params
from idiolect.methods.distilled import KT_PFL_BASELINE, Distilled


@dataclass(frozen=True, kw_only=True)
class FedMD(Preparation, Distilled):
    """One teacher for all: the mean of what clients of any architecture predict."""

    title: ClassVar[str] = "FedMD"
    paper: ClassVar[str] = "Li & Wang 2019, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "code": {
            "exchange": "logits",
            "optimiser": "adam",
            "lr": 0.001,
            "batch": 5,
            "epochs": 4,
            "sample": 5000,
            "transfer_epochs": 20,
            "private_epochs": 25,
        },
        "kt-pfl": KT_PFL_BASELINE,
    }

    exchange: str = setting(
        "soft",
        "what is exchanged: soft predictions, learned by KL, or logits, by their absolute error",
        choices=("soft", "logits"),
    )

    transfer_epochs: int = setting(
        0, "passes over all public examples and their labels before a client's first round", least=0
    )
    private_epochs: int = setting(
        0, "passes over the client's own examples after those, before its first round", least=0
    )

    @property
    def asks_labels(self) -> str:
        """The transfer phase does, too."""
        asking = f"transfer_epochs is {self.transfer_epochs}" if self.transfer_epochs else ""
        return asking or super().asks_labels

    def offers(self, kind: type[Capability]) -> bool:
        """Prepare only where there is a transfer phase."""
        if kind is Preparation:
            return self.transfer_epochs + self.private_epochs > 0
        return super().offers(kind)

    def prepare(self, sent: Sent, personal: Params, local: Local) -> Params:
        """Learn the public labels, then the private ones."""
        if self.transfer_epochs:
            personal = local.fit(
                local.loss,
                personal,
                self.local_optimiser(local),
                "public",
                batch=self.public_batch,
                epochs=self.transfer_epochs,
            )
        if self.private_epochs:
            personal = self.fit(local, personal, epochs=self.private_epochs)
        return personal

    def predictions(self, params: Params, local: Local) -> Tensor:
        """Predict this round's public examples, softly or as logits."""
        if self.exchange == "soft":
            return super().predictions(params, local)

        def raw(batch: Batch) -> Tensor:
            return local.logits(params, batch.x)

        return local.rows(raw, "public", sample=self.sample)

    def towards(self, task: Task, outputs: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        """Return how far outputs are from what was taught."""
        if self.exchange == "soft":
            return super().towards(task, outputs, target, weight)
        return losses.weighted_mean((outputs - target.detach()).abs().mean(-1), weight)
