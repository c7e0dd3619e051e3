"""FedProto: clients share the mean features of each class, and no parameters.

Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022,
Algorithm 1. A prototype is the mean of what enters the head over a class's examples (Eq. 3). The
server averages prototypes by the examples behind them (Eq. 6, in the sense of its text: as printed
it divides once more by the number of clients, so that prototypes would shrink; both released codes
average clients alike). A class nobody reported keeps its prototype. Clients minimise cross-entropy
plus λ times the mean squared distance of each example's features to the global prototype of its
class, example by example as the released code has it. Networks may differ if their features have
the same size. As in the paper, the class of the nearest global prototype is predicted; the head
only trains the features (`predict_by = "head"` predicts by it).

What is reported are sums of features and counts by class, over the client's number of examples:
prototypes and counts follow, also from the mean over clients, so secure sums will do.
Equations, presets and what is said of released code are by our notes: the text was not at hand to
check.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect.core import losses, tree
from idiolect.core.capabilities import Averaging, NewcomerModel
from idiolect.core.client import Batch, Local
from idiolect.core.method import Method, Report, Sent, Setup, setting
from idiolect.core.tree import Params, Tree


class Prototypes(NamedTuple):
    """The server's global prototypes."""

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
    paper: ClassVar[str] = "Tan et al. 2022, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"lr": 0.01, "momentum": 0.5, "batch": 8},
        "pfllib": {"lr": 0.005, "batch": 10},
    }

    pull: float = setting(1.0, "weight of the distance to the prototypes (λ)", least=0)
    predict_by: str = setting(
        "prototype",
        "what predicts: the nearest prototype, or the head",
        choices=("prototype", "head"),
        deploy=True,
    )
    newcomer_epochs: int = setting(20, "passes in which a newcomer trains", least=1, deploy=True)

    def init_server(self, setup: Setup) -> Prototypes:
        """No prototype is known."""
        features = setup.sizes.new_zeros(setup.classes, *setup.features[-1:])
        return Prototypes(features, setup.sizes.new_zeros(setup.classes))

    def init_personal(self, setup: Setup) -> Params:
        """Each client has a network of its own, which it never sends."""
        return setup.params

    def client_step(self, sent: Sent, personal: Params, local: Local) -> tuple[Report, Params]:
        """Train towards the global prototypes; report sums of features and counts by class."""
        params = self.fit(local, personal, self._loss(sent.shared, local))

        def by_class(batch: Batch) -> Params:
            features = local.features(params, batch.x).flatten(0, -2)
            weight = batch.weight.flatten().unsqueeze(-1)
            classes = torch.arange(len(sent.shared.known), device=weight.device)
            member = (batch.y.flatten().unsqueeze(-1) == classes) * weight
            labels = weight.sum().clamp(min=1)
            return {"features": member.T @ features / labels, "classes": member.sum(0) / labels}

        total, _ = local.total(by_class, "train")
        return Report(tree.scale(1 / local.size.clamp(min=1), total), local.size), params

    def server_step(self, state: Prototypes, cohort: Tensor, reports: Report) -> Prototypes:
        """Average prototypes by the examples behind them."""
        mean = tree.mean(reports.params, self.weights(reports.size))
        reported = mean["classes"].unsqueeze(-1)
        features = torch.where(
            reported > 0, mean["features"] / reported.clamp(min=1e-12), state.features
        )
        return Prototypes(features, torch.where(reported.squeeze(-1) > 0, 1.0, state.known))

    def reference(self, state: Prototypes, cohort: Tensor) -> Params:
        """Reports are not changes of a state: clipping and robust rules go from zero."""
        return {
            "features": torch.zeros_like(state.features),
            "classes": torch.zeros_like(state.known),
        }

    def deploy(self, sent: Sent, personal: Params, local: Local) -> Classifier:
        """Use the own network with the global prototypes."""
        return Classifier(personal, sent.shared)

    def adapt(self, sent: Sent, personal: Params, local: Local) -> Classifier:
        """A newcomer trains its network towards the prototypes, which stay as they are."""
        rule, loss = self.local_optimiser(local, self.lr), self._loss(sent.shared, local)
        fitted = local.fit(loss, personal, rule, batch=self.batch, epochs=self.newcomer_epochs)
        return Classifier(fitted, sent.shared)

    def models(self, sent: Sent, deployed: Classifier) -> dict[str, Tree]:
        """There is no global model."""
        return {"personal": deployed} if deployed else {}

    def predict(self, model: Classifier, x: Tensor, local: Local) -> Tensor:
        """Return minus the squared distance to each known prototype, or the head's logits."""
        features = local.features(model.params, x)
        if self.predict_by == "head":
            return local.head(model.params, features)
        prototypes, known = model.prototypes
        distance = (features.unsqueeze(-2) - prototypes).square().sum(-1)
        return -distance - _UNKNOWN * (1 - known)

    def _loss(self, prototypes: Prototypes, local: Local) -> Any:
        def loss(params: Params, batch: Batch) -> Tensor:
            given = (batch.training, "main", batch.weight)
            features = local.features(params, batch.x, *given)
            off = (features - prototypes.features[batch.y]).square().mean(-1)
            pull = losses.weighted_mean(off * prototypes.known[batch.y], batch.weight)
            logits = local.head(params, features, *given)
            return losses.cross_entropy(logits, batch.y, batch.weight) + self.pull * pull

        return loss


_UNKNOWN = 1e4  # added to the distance of a class that nobody reported
