"""FedPHP: each client inherits a private model from round to round, and learns from it.

Li et al., "FedPHP: Federated Personalization with Inherited Private Models", ECML PKDD 2021,
Algorithm 1. Beside FedAvg, client i keeps an inherited private model: when it has trained the
received model to wᵢ, that becomes μ times what it was plus 1 − μ times wᵢ. μ grows with the rounds
the client has taken part in, to `keep` after `keep_rounds` of them: what is inherited is wᵢ alone
at first, and a long memory in the end. While it trains, (1 − λ) of the loss is that of the labels,
and λ how far the model is from the inherited one on the same batch: the squared maximum mean
discrepancy of what enters the head (`by = "mmd"`), or the cross-entropy to its outputs at
temperature 4 (`by = "kd"`). The inherited model is the personal one. Running statistics are
inherited like parameters.

The kernels are those of the released code: five Gaussians around the mean distance of the batch's
features. Of a single example, whose distance would be its own measure, so that the term is constant
and its gradient explodes as the models agree, nothing is taken here. The code counts `keep_rounds`
as the rounds that a client takes part in on average over the run, and tries λ of 0.05 and 0.1. In a
client's first round the inherited model is the initial one. A newcomer inherits the global model
and trains for a round.

PFLlib (d832e76) scores the trained model, which the client will overwrite by the next one received,
and not the inherited one; its kernels have fixed widths (`kernels = "fixed"`). Its defaults, λ = 1
and μ = 0, learn from no label and inherit nothing; the preset `pfllib` leaves both as here. Until
December 2024, thus when the tables were printed, it had no inherited model: features were held to
the received model's, and training began from a mixture of the received and the own one.

Written from notes and the released code: the paper's text was not at hand to check equation
numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.core.capabilities import NewcomerModel
from idiolect.core.client import Batch, Local
from idiolect.core.method import Report, Sent, Setup, setting
from idiolect.core.tree import Params, Tree
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.fedcp import WIDTHS, discrepancy

_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the kernels, in mean distances


class Inherited(NamedTuple):
    """What a client keeps: its inherited private model, and its rounds so far."""

    model: Params
    rounds: Tensor


@dataclass(frozen=True, kw_only=True)
class FedPHP(NewcomerModel, FedAvg):
    """FedAvg, and at each client a running mean of its trained models, which teaches the next."""

    title: ClassVar[str] = "FedPHP"
    paper: ClassVar[str] = "Li et al. 2021 (FedPHP), Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "code": {
            "lr": 0.03,
            "momentum": 0.9,
            "weight_decay": 1e-5,
            "clip": 100.0,
            "batch": 64,
            "epochs": 5,
        },
        "pfllib": {"lr": 0.005, "batch": 10, "kernels": "fixed"},
    }

    share: float = setting(
        0.1, "share of the loss that is the distance to the inherited model (λ)", least=0, most=1
    )
    by: str = setting("mmd", "distance: of features, or of outputs", choices=("mmd", "kd"))
    temperature: float = setting(4.0, "temperature of the inherited model's outputs", above=0)
    kernels: str = setting(
        "scaled", "widths of the kernels: by the batch's mean distance, or 10, 15, 20 and 50",
        choices=("scaled", "fixed"),
    )  # fmt: skip
    keep: float = setting(0.9, "most that is kept of the inherited model (μ)", least=0, most=1)
    keep_rounds: int = setting(100, "rounds of a client until that much is kept", least=1)

    def init_personal(self, setup: Setup) -> Inherited:
        """The inherited model starts as the initial one."""
        return Inherited(setup.params, setup.sizes.new_zeros(()))

    def client_step(
        self, sent: Sent, personal: Inherited, local: Local
    ) -> tuple[Report, Inherited]:
        """Train the received model, taught by the inherited one; pass the latter on."""

        def loss(params: Params, batch: Batch) -> Tensor:
            features = local.features(params, batch.x, batch.training, weight=batch.weight)
            logits = local.head(params, features, batch.training, weight=batch.weight)
            wanted = local.task.loss(logits, batch.y, batch.weight)
            if self.by == "kd":
                old = local.task.soften(local.logits(personal.model, batch.x), self.temperature)
                off = local.task.distil_from(logits, old, batch.weight)
            else:
                before = local.features(personal.model, batch.x)
                widths = self._widths(features.detach(), before, batch.weight)
                off = discrepancy(features, before, batch.weight, widths)
            return (1 - self.share) * wanted + self.share * off

        trained = self.fit(local, sent.shared, loss)
        keep = self.keep * (personal.rounds / self.keep_rounds).clamp(max=1)
        model = tree.map(lambda new, old: new + keep * (old - new), trained, personal.model)
        return Report(trained, local.size), Inherited(model, personal.rounds + 1)

    def deploy(self, sent: Sent, personal: Inherited, local: Local) -> Params:
        """Use the inherited model."""
        return personal.model

    def adapt(self, sent: Sent, personal: Inherited, local: Local) -> Params:
        """A newcomer inherits the global model and does one round."""
        return self.client_step(sent, personal._replace(model=sent.shared), local)[1].model

    def models(self, sent: Sent, deployed: Params) -> dict[str, Tree]:
        """The inherited model and the global one."""
        return {"personal": deployed, "global": sent.shared}

    def _widths(self, left: Tensor, right: Tensor, weight: Tensor) -> Sequence[float | Tensor]:
        """Return the kernels' widths; of a kernel exp(−d / 2w) of squared distances d."""
        if self.kernels == "fixed":
            return WIDTHS
        both = torch.cat([left.flatten(0, -2), right.flatten(0, -2)])
        there = (weight.reshape(-1) > 0).to(both.dtype).repeat(2)
        count = there.sum()
        middle = there @ both / count.clamp(min=1)
        # Squared distances of all pairs add up to 2 n times those to the middle.
        total = 2 * count * (there @ (both - middle).square().sum(1))
        mean = total / (count * (count - 1)).clamp(min=1) + 1e-8
        mean = mean.masked_fill(count <= 2, torch.inf)  # one example: all kernels are 1
        return [scale * mean / 2 for scale in _SCALES]
