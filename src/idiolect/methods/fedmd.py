"""FedMD: everyone learns the mean of all predictions on public data.

Li & Wang, "FedMD: Heterogenous Federated Learning via Model Distillation", 2019, Algorithm 1. By
default as in KT-pFL's comparison: soft predictions, KL. The preset `code` is the authors': logits,
their mean absolute error, Adam. Their transfer phase, in which networks first learn the labels of
the public set, is left out: it needs a public set of the private classes (`labelled` learns those
in every round).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from idiolect import losses
from idiolect.local import Batch, Local
from idiolect.method import setting
from idiolect.methods.distilled import Distilled
from idiolect.tree import Params


@dataclass(frozen=True, kw_only=True)
class FedMD(Distilled):
    """One teacher for all: the mean of what clients of any architecture predict."""

    title: ClassVar[str] = "FedMD"
    paper: ClassVar[str] = "Li & Wang 2019, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "code": {"exchange": "logits", "optimiser": "adam", "lr": 0.001, "sample": 5000}
    }

    exchange: str = setting(
        "soft",
        "what is exchanged: soft predictions, learned by KL, or logits, by their absolute error",
        choices=("soft", "logits"),
    )

    def predictions(self, params: Params, local: Local) -> Tensor:
        """Predict this round's public examples, softly or as logits."""
        if self.exchange == "soft":
            return super().predictions(params, local)

        def raw(batch: Batch) -> Tensor:
            return local.logits(params, batch.x)

        return local.rows(raw, "public", sample=self.sample)

    def towards(self, logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        """Return how far logits are from what was taught."""
        if self.exchange == "soft":
            return super().towards(logits, target, weight)
        return losses.weighted_mean((logits - target.detach()).abs().mean(-1), weight)
