"""kNN-Per: the global model, mixed at each client with the labels of its nearest own examples.

Marfoq, Neglia, Vidal, Kameni, "Personalized Federated Learning through Local Memorization", ICML
2022. After FedAvg every client remembers the features (what enters the head of the global model) of
its training examples with their labels; a new example's k nearest by Euclidean distance d vote with
weights e^{−d/scale}, and the vote is mixed with the global model's probabilities (Eq. 8). How much
of it is taken, λ, the client chooses among `shares` by validation accuracy, the least of equals;
without validation data it takes `share`. Nothing is trained after the rounds, so a newcomer does
the same. At most `store` examples, drawn at random, are remembered. Features of a client's examples
are part of its personal model: they stay where the data are. Classification only. The released code
(omarfoq/knn-per 43f66e4) has e^{−d²/(scale · features)}: its index returns squared distances, which
it divides by the number of features.

Written from notes and released code: the paper's text was not at hand to check equation numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect.core import losses
from idiolect.core.capabilities import Facts, Reason
from idiolect.core.client import Batch, Local
from idiolect.core.method import Method, Sent, setting
from idiolect.core.tree import Params, Tree
from idiolect.methods.fedavg import FedAvg


class Memory(NamedTuple):
    """What a client uses: the global model, its examples' features and labels, and λ."""

    params: Params
    features: Tensor  # [example, feature]
    labels: Tensor  # [example] as numbers
    there: Tensor  # [example] 0 where there is none
    share: Tensor


@dataclass(frozen=True, kw_only=True)
class KNNPer(Facts, Reason, FedAvg):
    """FedAvg, mixed at every client with a vote of its own examples of nearest features."""

    title: ClassVar[str] = "kNN-Per"
    paper: ClassVar[str] = "Marfoq et al. 2022, Eq. 8"
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    trained_as: ClassVar[type[Method] | None] = FedAvg
    needs_classes: ClassVar[str] = "votes of neighbours"

    neighbours: int = setting(10, "examples that vote (k)", least=1, deploy=True)
    scale: float = setting(1.0, "distance at which a vote falls to 1/e", above=0, deploy=True)
    shares: tuple[float, ...] = setting(
        (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
        "shares of the vote to choose from (λ)",
        least=0,
        most=1,
        deploy=True,
    )
    share: float = setting(
        0.4, "share of the vote without validation data", least=0, most=1, deploy=True
    )
    store: int = setting(1000, "examples that a client remembers at most", least=1, deploy=True)

    @property
    def chooses(self) -> bool:
        """Validation rows choose the share of the vote."""
        return True

    def deploy(self, sent: Sent, personal: Tree, local: Local) -> Memory:
        """Remember the own examples, and choose how much they count."""

        def remembered(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
            return local.features(sent.shared, batch.x), batch.y, batch.weight

        features, labels, there = local.own_rows(remembered, self.store)
        choices = local.numbers((*sorted(self.shares), self.share))
        memory = Memory(
            sent.shared, features.flatten(0, -2), labels.flatten(), there.flatten(), choices[0]
        )

        def right(batch: Batch, share: Tensor) -> Tensor:
            outputs = self.predict(memory._replace(share=share), batch.x, local)
            return losses.accuracy(outputs, batch.y, batch.weight)

        def score(share: Tensor) -> Tensor:
            found: Tensor = local.mean(lambda batch: right(batch, share), "val")
            return found

        scores = local.each(score, choices[:-1])
        best = choices.index_select(0, scores.nan_to_num().argmax().reshape(1))[0]
        chosen = torch.where(scores.isnan().any(), choices[-1], best)
        return memory._replace(share=chosen * (memory.there.sum() > 0))  # no example, no vote

    def models(self, sent: Sent, deployed: Memory) -> dict[str, Tree]:
        """The mixture, and the global model."""
        return {"personal": deployed, "global": sent.shared}

    def predict(self, model: Memory | Params, x: Tensor, local: Local) -> Tensor:
        """Return logits, or the log of the mixed probabilities."""
        if not isinstance(model, Memory):
            return local.logits(model, x)
        features = local.features(model.params, x)
        logits = local.head(model.params, features)
        apart = (
            features.square().sum(-1, keepdim=True)
            + model.features.square().sum(-1)
            - 2 * features @ model.features.mT
        )
        distance = (apart.clamp(min=0) + 1e-24).sqrt() + 1e9 * (1 - model.there)
        near = distance.topk(min(self.neighbours, len(model.there)), dim=-1, largest=False)
        weight = (-near.values / self.scale).softmax(-1).unsqueeze(-1)
        classes = torch.arange(logits.shape[-1], device=logits.device)
        vote = (weight * (model.labels[near.indices].unsqueeze(-1) == classes)).sum(-2)
        mixed = model.share * vote + (1 - model.share) * logits.softmax(-1)
        return mixed.clamp(min=1e-30).log()

    def facts(self, deployed: Memory) -> dict[str, Tensor]:
        """Say how much the vote counts, and how many examples have one."""
        return {"share": deployed.share, "examples": deployed.there.sum()}

    def reason(self, facts: Mapping[str, Any]) -> str:
        """Put the choice in words."""
        return f"{float(facts['share']):.0%} its own nearest examples, the rest the global model"
