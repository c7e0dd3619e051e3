"""GPFL: global embeddings of classes guide the features, a conditional valve parts them.

Zhang et al., "GPFL: Simultaneously Learning Global and Personalized Feature Information for
Personalized Federated Learning", ICCV 2023, Algorithm 1. A valve makes of features h and a vector c
the features ReLU(h ⊙ (γ(c) + 1) + β(c)), γ and β each dense, ReLU, layer norm. With c the mean of
all class embeddings they are general, with c the mean by the client's own classes personal. The
loss has three parts: cross-entropy of the personal head on the personal features; cross-entropy of
the cosines of the general features with all embeddings; λ times the distance of the general
features to the received embedding of their class. Embeddings and valve have a weight decay μ. The
server averages body, embeddings and valve by examples; the head stays.

c is made of the received embeddings, and the distance is the mean over examples. The released code
(github.com/TsingZ0/GPFL ed7a7fe, and PFLlib d832e76) makes c of the embeddings that the client
itself trained the round before, of zeros before its first, and takes one norm over the whole batch,
so that λ depends on the batch's size: `conditions = "trained"`, `distance = "batch"`, preset
`released`, with which ours equals PFLlib's to rounding (compare_with_pfllib.py). A newcomer trains
a head on the fixed rest, with c of the received embeddings. Classification only.

Written from notes and released code: the paper's text was not at hand to check equation numbers.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from idiolect.core import losses, tree
from idiolect.core.capabilities import NewcomerModel, Preparation
from idiolect.core.client import Batch, Local
from idiolect.core.method import Report, Sent, Setup, setting
from idiolect.core.network import drawn_dense
from idiolect.core.tree import Params, Tree
from idiolect.methods.fedavg import FedAvg

EXTRA = "gpfl."  # before the names of what is not the network's


class GuidedHead(NamedTuple):
    """What a client keeps: its head, how often it has each class, and what makes c if it does."""

    head: Params
    prior: Tensor  # [class] adds up to one
    conditions: Params  # embeddings that it trained; empty where c is made of the received ones


class Guided(NamedTuple):
    """What a client uses: what is shared, and what it keeps."""

    params: Params
    head: Params
    prior: Tensor
    conditions: Params


@dataclass(frozen=True, kw_only=True)
class GPFL(Preparation, NewcomerModel, FedAvg):
    """Clients learn general features near shared class embeddings, and personal ones beside."""

    title: ClassVar[str] = "GPFL"
    needs_classes: ClassVar[str] = "an embedding"
    paper: ClassVar[str] = "Zhang et al. 2023 (GPFL), Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"lr": 0.005, "batch": 10, "guide": 0.01, "extra_decay": 0.1},
        "released": {
            **{"lr": 0.005, "batch": 10, "guide": 0.01, "extra_decay": 0.1},
            **{"conditions": "trained", "distance": "batch"},
        },
    }

    head_layers: int = setting(1, "how many last layers are personal", least=1)
    guide: float = setting(0.01, "weight of the distance to the embeddings (λ)", least=0)
    extra_decay: float = setting(0.1, "weight decay of embeddings and valve (μ)", least=0)
    conditions: str = setting("received", "embeddings that make c", choices=("received", "trained"))
    distance: str = setting(
        "example", "mean distance of examples, or one norm of all", choices=("example", "batch")
    )
    newcomer_epochs: int = setting(
        10, "passes in which a newcomer trains its head", least=1, deploy=True
    )

    def init_server(self, setup: Setup) -> Params:
        """Draw embeddings and valve from the run's seed; the server holds no head."""
        draw, width, like = (
            torch.Generator().manual_seed(setup.seed),
            setup.features[-1],
            setup.sizes,
        )
        body = tree.split_layers(setup.params, self.head_layers)[0]
        drawn = torch.randn(setup.classes, width, generator=draw, dtype=torch.float64)
        extra = {"embeddings": drawn.to(like)}
        for part in ("gamma", "beta"):
            dense = drawn_dense(width, width, draw, like)
            norm = {"scale": like.new_ones(width), "shift": like.new_zeros(width)}
            extra |= {f"{part}.{name}": leaf for name, leaf in (dense | norm).items()}
        return {**body, **{EXTRA + name: leaf for name, leaf in extra.items()}}

    def init_personal(self, setup: Setup) -> GuidedHead:
        """A client holds a head; its classes are not counted yet."""
        head = tree.split_layers(setup.params, self.head_layers)[1]
        zeros = setup.sizes.new_zeros(setup.classes, setup.features[-1])
        return GuidedHead(head, setup.sizes.new_zeros(setup.classes), self._kept(zeros))

    def prepare(self, sent: Sent, personal: GuidedHead, local: Local) -> GuidedHead:
        """Count the classes."""
        return personal._replace(prior=local.class_shares(len(personal.prior)))

    def client_step(
        self, sent: Sent, personal: GuidedHead, local: Local
    ) -> tuple[Report, GuidedHead]:
        """Train everything; report all but the head."""
        received = sent.shared[EXTRA + "embeddings"]
        made_of = personal.conditions.get("embeddings", received)
        general, own = made_of.mean(0), personal.prior @ made_of

        def loss(params: Params, batch: Batch) -> Tensor:
            extra, network = tree.split(params, lambda name: name.startswith(EXTRA))
            given: dict[str, Any] = {"training": batch.training, "weight": batch.weight}
            features = local.features(network, batch.x, **given)
            logits = local.head(network, valve(extra, features, own), **given)
            guided = valve(extra, features, general)
            cosines = (
                functional.normalize(guided, dim=-1)
                @ functional.normalize(extra[EXTRA + "embeddings"], dim=-1).mT
            )
            squares: Tensor = (guided - received[batch.y]).square().sum(-1)
            # A tiny number under the root, whose gradient at zero would be infinite.
            if self.distance == "batch":
                off = ((batch.weight * squares).sum() + 1e-24).sqrt()
            else:
                off = losses.weighted_mean((squares + 1e-24).sqrt(), batch.weight)
            return (
                losses.cross_entropy(logits, batch.y, batch.weight)
                + losses.cross_entropy(cosines, batch.y, batch.weight)
                + self.guide * off
                + self.extra_decay / 2 * tree.dot(extra, extra)
            )

        trained = self.fit(local, {**sent.shared, **personal.head}, loss)
        head, rest = tree.split(trained, personal.head.__contains__)
        kept = self._kept(rest[EXTRA + "embeddings"])
        return Report(rest, local.size), GuidedHead(head, personal.prior, kept)

    def deploy(self, sent: Sent, personal: GuidedHead, local: Local) -> Guided:
        """Put the own head on what is shared."""
        return Guided(sent.shared, *personal)

    def adapt(self, sent: Sent, personal: GuidedHead, local: Local) -> Guided:
        """A newcomer counts its classes and trains a head."""
        prior = local.class_shares(len(personal.prior))
        kept = self._kept(sent.shared[EXTRA + "embeddings"])

        def loss(head: Params, batch: Batch) -> Tensor:
            logits = self.predict(Guided(sent.shared, head, prior, kept), batch.x, local)
            return losses.cross_entropy(logits, batch.y, batch.weight)

        head = self.fit(local, personal.head, loss, lr=self.lr, epochs=self.newcomer_epochs)
        return Guided(sent.shared, head, prior, kept)

    def models(self, sent: Sent, deployed: Guided) -> dict[str, Tree]:
        """Without a head there is no whole global model."""
        return {"personal": deployed} if deployed else {}

    def predict(self, model: Guided, x: Tensor, local: Local) -> Tensor:
        """Return the head's logits on the personal features."""
        extra, body = tree.split(model.params, lambda name: name.startswith(EXTRA))
        made_of = model.conditions.get("embeddings", extra[EXTRA + "embeddings"])
        network, own = {**body, **model.head}, model.prior @ made_of
        return local.head(network, valve(extra, local.features(network, x), own))

    def _kept(self, embeddings: Tensor) -> Params:
        return {"embeddings": embeddings} if self.conditions == "trained" else {}


def valve(extra: Params, features: Tensor, condition: Tensor) -> Tensor:
    """Scale and shift features by what two small networks make of a condition."""

    def made(part: str) -> Tensor:
        weight, bias, scale, shift = (
            extra[f"{EXTRA}{part}.{name}"] for name in ("weight", "bias", "scale", "shift")
        )
        hidden = functional.linear(condition, weight, bias).relu()
        return functional.layer_norm(hidden, scale.shape, scale, shift)

    return (features * (made("gamma") + 1) + made("beta")).relu()
