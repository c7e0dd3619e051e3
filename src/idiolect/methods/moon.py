"""MOON: contrast each example's features with those of the last local model.

Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021, Algorithm 1. A client adds to its
loss μ times −log e^{s/τ} / (e^{s/τ} + e^{s'/τ}), where s is the cosine of the features under the
model in training and under the received one, s' the same with the client's model of its last round:
the former are to be near, the latter far (Eq. 3). The paper contrasts the output of a projection
head of two layers that it adds to the network; here, as in PFLlib, it is what enters the
classifier, so that any network will do. Before a client's first round its last model is the initial
one.

Written from notes and released code: the paper's text was not at hand to check equation numbers.

The preset `pfllib` leaves μ as it is here; PFLlib's default of 0 would make this FedAvg.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional

from idiolect.core import losses
from idiolect.core.client import Batch, Local
from idiolect.core.method import Report, Sent, Setup, setting
from idiolect.core.tree import Params
from idiolect.methods.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class MOON(FedAvg):
    """FedAvg whose clients draw features to the global model's and away from their last one's."""

    title: ClassVar[str] = "MOON"
    paper: ClassVar[str] = "Li et al. 2021 (MOON), Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5, "batch": 64, "epochs": 10},
        "pfllib": {"lr": 0.005, "batch": 10, "temperature": 1.0},
    }

    contrast: float = setting(1.0, "weight of the contrast (μ)", least=0)
    temperature: float = setting(0.5, "temperature of the contrast (τ)", above=0)

    def init_personal(self, setup: Setup) -> Params:
        """The last model is the initial one."""
        return setup.params

    def client_step(self, sent: Sent, personal: Params, local: Local) -> tuple[Report, Params]:
        """Train with the contrast; report the model and keep it as the last one."""

        def loss(params: Params, batch: Batch) -> Tensor:
            own = local.features(params, batch.x, batch.training, weight=batch.weight)
            logits = local.head(params, own, batch.training, weight=batch.weight)
            near, far = (
                functional.cosine_similarity(own, local.features(other, batch.x), dim=-1)
                for other in (sent.shared, personal)
            )
            # −log of a share of two is a softplus of the difference.
            apart = functional.softplus((far - near) / self.temperature)
            wanted = local.task.loss(logits, batch.y, batch.weight)
            return wanted + self.contrast * losses.weighted_mean(apart, batch.weight)

        trained = self.fit(local, sent.shared, loss)
        return Report(trained, local.size), trained
