"""FedProto: clients share the mean features of each class, and no parameters.

Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022,
Algorithm 1. A prototype is the mean of what enters the head over a class's examples (Eq. 3). The
server averages prototypes by the examples behind them (Eq. 6, in the sense of its text: as printed
it divides once more by the number of clients, so that prototypes would shrink; both released codes
average clients alike). A class nobody reported keeps its prototype. In the paper all clients take
part in every round. Where few do, prototypes of the cohort alone may be far from the features of
clients that are absent: `keep` lets a round count so much in the next one, and so on (0.5 was
better than 0 in small, with half of the clients absent). The server's saved state tells the share
of each class among the cohort's examples. Clients minimise cross-entropy plus λ times the mean
squared distance of each example's features to the global prototype of its class, example by example
as the released code has it. Networks may differ if their features have the same size. As in the
paper, the class of the nearest global prototype is predicted; the head only trains the features
(`predict_by = "head"` predicts by it).

What is reported are sums of features and counts by class, over the client's number of examples:
prototypes and counts follow, also from the mean over clients, so secure sums will do.
Equations, presets and what is said of released code are by our notes: the text was not at hand to
check.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect.core import losses, tree
from idiolect.core.capabilities import Averaging, NewcomerModel
from idiolect.core.client import Batch, Local
from idiolect.core.method import Method, Report, Sent, Setup, setting
from idiolect.core.tree import Params, Tree


class Gathered(NamedTuple):
    """What the server keeps of the reports."""

    features: Tensor  # [class, feature] the global prototypes
    classes: Tensor  # [class] how many examples are behind each, beside those of other classes


class Prototypes(NamedTuple):
    """The global prototypes, as they are sent."""

    features: Tensor  # [class, feature]
    known: Tensor  # [class] 1 where a client has reported the class


class Classifier(NamedTuple):
    """What a client uses: its own network, and the global prototypes."""

    params: Params
    prototypes: Prototypes


@dataclass(frozen=True, kw_only=True)
class FedProto(Averaging, NewcomerModel, Method):
    """Clients pull their features towards the common prototype of each class."""

    title: ClassVar[str] = "FedProto"
    needs_classes: ClassVar[str] = "a prototype"
    moves: ClassVar[bool] = False
    paper: ClassVar[str] = "Tan et al. 2022, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"lr": 0.01, "momentum": 0.5, "batch": 8},
        "pfllib": {"lr": 0.005, "batch": 10},
    }

    pull: float = setting(1.0, "weight of the distance to the prototypes (λ)", least=0)
    keep: float = setting(0.0, "how much a round counts in the next one", least=0, below=1)
    predict_by: str = setting("prototype", "or by head", choices=("prototype", "head"), deploy=True)
    newcomer_epochs: int = setting(20, "passes in which a newcomer trains", least=1, deploy=True)

    def init_server(self, setup: Setup) -> Gathered:
        """No prototype is known."""
        features = setup.sizes.new_zeros(setup.classes, *setup.features[-1:])
        return Gathered(features, features.new_zeros(setup.classes))

    def init_personal(self, setup: Setup) -> Params:
        """Each client has a network of its own, which it never sends."""
        return setup.params

    def send(self, state: Gathered, cohort: Tensor) -> Sent:
        """Send the prototypes, and which there are."""
        return Sent(Prototypes(state.features, (state.classes > 0).to(state.classes)))

    def client_step(self, sent: Sent, personal: Params, local: Local) -> tuple[Report, Params]:
        """Train towards the global prototypes; report sums of features and counts by class."""
        params = self.fit(local, personal, partial(self._loss, local, sent.shared))

        def by_class(batch: Batch) -> Params:
            features = local.features(params, batch.x).flatten(0, -2)
            y, weight = batch.y.reshape(-1, 1), batch.weight.reshape(-1, 1)
            member = (y == torch.arange(len(sent.shared.known), device=y.device)) * weight
            labels = weight.sum().clamp(min=1)
            return {"features": member.T @ features / labels, "classes": member.sum(0) / labels}

        total, _ = local.total(by_class, "train")
        return Report(tree.scale(1 / local.size.clamp(min=1), total), local.size), params

    def server_step(self, state: Gathered, cohort: Tensor, reports: Report) -> Gathered:
        """Average prototypes by the examples behind them, and with those of rounds before."""
        mean = tree.mean(reports.params, self.weights(reports.size))
        reported = mean["classes"] > 0
        earlier = self.keep * state.classes
        count = torch.where(reported, earlier + mean["classes"], state.classes)
        sums = earlier.unsqueeze(-1) * state.features + mean["features"]
        means = sums / count.clamp(min=1e-12).unsqueeze(-1)
        features = torch.where(reported.unsqueeze(-1), means, state.features)
        return Gathered(features, count)

    def reference(self, state: Gathered, cohort: Tensor) -> Params:
        """Reports are not changes of a state: clipping and robust rules go from zero."""
        features, classes = tree.map(torch.zeros_like, state)
        return {"features": features, "classes": classes}

    def deploy(self, sent: Sent, personal: Params, local: Local) -> Classifier:
        """Use the own network with the global prototypes."""
        return Classifier(personal, sent.shared)

    def adapt(self, sent: Sent, personal: Params, local: Local) -> Classifier:
        """A newcomer trains its network towards the prototypes, which stay as they are."""
        loss = partial(self._loss, local, sent.shared)
        fitted = self.fit(local, personal, loss, lr=self.lr, epochs=self.newcomer_epochs)
        return Classifier(fitted, sent.shared)

    def models(self, sent: Sent, deployed: Classifier) -> dict[str, Tree]:
        """There is no global model."""
        return {"personal": deployed} if deployed else {}

    def predict(self, model: Classifier, x: Tensor, local: Local) -> Tensor:
        """Return minus the squared distance to each known prototype, or the head's logits."""
        if self.predict_by == "head":
            return local.logits(model.params, x)
        off = local.features(model.params, x).unsqueeze(-2) - model.prototypes.features
        away, known = off.square().sum(-1), model.prototypes.known
        farthest = (away * known).amax(-1, keepdim=True)  # unknown classes come after it
        return -torch.where(known > 0, away, farthest + 1e4)

    def _loss(self, local: Local, to: Prototypes, params: Params, batch: Batch) -> Tensor:
        features = local.features(params, batch.x, batch.training, weight=batch.weight)
        logits = local.head(params, features, batch.training, weight=batch.weight)
        off = (features - to.features[batch.y]).square().mean(-1) * to.known[batch.y]
        pull = self.pull * losses.weighted_mean(off, batch.weight)
        return losses.cross_entropy(logits, batch.y, batch.weight) + pull
