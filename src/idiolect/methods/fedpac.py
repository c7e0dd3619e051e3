"""FedPAC: features aligned by class centroids, heads combined for each client by the server.

Xu, Tong, Huang, "Personalized Federated Learning with Feature Alignment and Classifier
Collaboration", ICLR 2023, Algorithm 1. With the received body φ and head h_i a client (1) takes, by
class, the means of its features times the class's share, H_i, and their spread V_i; (2) trains the
head with the body fixed; (3) trains the body with the head fixed and λ times the mean squared
distance of each example's features to the global centroid of its class; (4) takes its centroids
anew. The server averages bodies by examples and centroids by the examples behind them, and combines
for each client of the cohort the heads of the cohort by the α that minimise Σ_j α_j² V_j + ‖H_i −
Σ_j α_j H_j‖² over mixtures (Eq. 9), by projected gradient steps in place of a solver. Deployed is
the combined head on the averaged body, before training.

V_i is (mean ‖φ(x)‖² − ‖H_i‖²) / n_i, as in the released code. That code drops α below 0.001;
PFLlib's copy (d832e76) does so without making the rest add up to one again, averages centroids by
client, and deals the mixtures wrongly: V and H stand in the order in which clients were drawn, the
heads in that of a second draw (`receive_models`), so most clients get the mixture of another, of
other heads than it was found for, even where everyone takes part. A client that is absent keeps its
head on the server. A newcomer gets the mean head of those that came so far and trains it on the
fixed body. Classification only.

Written from notes and released code: the paper's text was not at hand to check equation numbers.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect.core import losses, tree
from idiolect.core.capabilities import NewcomerMessage, NewcomerModel, StateTrace
from idiolect.core.client import Batch, Local
from idiolect.core.method import Method, Report, Sent, Setup, alike, mean_report, setting
from idiolect.core.tree import Params, Tree


class Collaboration(NamedTuple):
    """What the server keeps."""

    body: Params
    centroids: Tensor  # [class, feature]
    known: Tensor  # [class] 1 where a client has reported the class
    heads: Params  # [client, ...]
    weights: Tensor  # [client, client] α, whose heads the last combination took


class Common(NamedTuple):
    """What everyone is sent."""

    body: Params
    centroids: Tensor
    known: Tensor


class PACReport(NamedTuple):
    """What a client uploads."""

    body: Params
    head: Params
    centroids: Tensor  # [class, feature] sums over its examples, over their number
    classes: Tensor  # [class] shares of its examples
    means: Tensor  # [class, feature] H: the same sums under the received body
    spread: Tensor  # V
    size: Tensor


@dataclass(frozen=True, kw_only=True)
class FedPAC(NewcomerMessage, NewcomerModel, StateTrace, Method):
    """Clients align features with global class centroids; the server mixes each a head."""

    title: ClassVar[str] = "FedPAC"
    needs_classes: ClassVar[str] = "a centroid"
    paper: ClassVar[str] = "Xu et al. 2023, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {
            "lr": 0.01, "head_lr": 0.1, "momentum": 0.5, "weight_decay": 5e-4, "batch": 50,
            "epochs": 5,
        },
        "pfllib": {"lr": 0.005, "head_lr": 0.005, "batch": 10},
    }  # fmt: skip

    head_layers: int = setting(1, "how many last layers the head has", least=1)
    pull: float = setting(1.0, "weight of the distance to the centroids (λ)", least=0)
    head_lr: float = setting(0.1, "learning rate of the head", above=0)
    head_epochs: int = setting(1, "passes over the data for the head in a round", least=1)
    solver_steps: int = setting(300, "steps in which the server finds a mixture", least=1)
    newcomer_epochs: int = setting(
        10, "passes in which a newcomer trains its head", least=1, deploy=True
    )

    def init_server(self, setup: Setup) -> Collaboration:
        """Everyone has the initial head; no centroid is known."""
        body, head = tree.split_layers(setup.params, self.head_layers)
        zeros, clients = setup.sizes.new_zeros, setup.clients
        centroids = zeros(setup.classes, *setup.features[-1:])
        weights = zeros(clients, clients)
        heads = tree.repeat(head, clients)
        return Collaboration(body, centroids, zeros(setup.classes), heads, weights)

    def send(self, state: Collaboration, cohort: Tensor) -> Sent:
        """Send body and centroids, and to each its head."""
        common = Common(state.body, state.centroids, state.known)
        return Sent(common, tree.take(state.heads, cohort))

    def welcome(self, state: Collaboration, cohort: Tensor) -> Sent:
        """Send newcomers the mean of the heads that were combined; at first of all."""
        came = state.weights.sum(1)  # 1, or 0 for a client that never came
        mean = tree.mean(state.heads, came + (came.sum() == 0))
        return Sent(
            Common(state.body, state.centroids, state.known), tree.repeat(mean, len(cohort))
        )

    def client_step(self, sent: Sent, personal: Tree, local: Local) -> tuple[PACReport, Tree]:
        """Take statistics, train head, then body, and take centroids."""
        common, classes = sent.shared, len(sent.shared.known)
        means, _, square = self._moments({**common.body, **sent.own}, classes, local)
        spread = (square - means.square().sum()) / local.size.clamp(min=1)
        head = self._head(sent, local, self.head_epochs)

        def loss(body: Params, batch: Batch) -> Tensor:
            given: dict[str, Any] = {"training": batch.training, "weight": batch.weight}
            params = {**body, **head}
            features = local.features(params, batch.x, **given)
            logits = local.head(params, features, **given)
            off = (features - common.centroids[batch.y]).square().mean(-1) * common.known[batch.y]
            wanted = losses.cross_entropy(logits, batch.y, batch.weight)
            return wanted + self.pull * losses.weighted_mean(off, batch.weight)

        body = self.fit(local, common.body, loss)
        centroids, shares, _ = self._moments({**body, **head}, classes, local)
        return PACReport(body, head, centroids, shares, means, spread, local.size), personal

    def server_step(
        self, state: Collaboration, cohort: Tensor, reports: PACReport
    ) -> Collaboration:
        """Average bodies and centroids; combine each client of the cohort a head."""
        body = mean_report(Report(reports.body, reports.size))
        sums, count = tree.mean((reports.centroids, reports.classes), reports.size)
        there = count > 0
        new = sums / count.clamp(min=1e-12).unsqueeze(-1)
        centroids = torch.where(there.unsqueeze(-1), new, state.centroids)
        known = torch.where(there, torch.ones_like(count), state.known)
        alpha = self.combine(reports.means.flatten(1), reports.spread, alike(reports.size))
        heads = tree.put(state.heads, cohort, tree.mixed(alpha, reports.head))
        rows = torch.zeros_like(state.weights[cohort]).index_copy(1, cohort, alpha)
        return Collaboration(
            body, centroids, known, heads, state.weights.index_copy(0, cohort, rows)
        )

    def combine(self, means: Tensor, spread: Tensor, there: Tensor) -> Tensor:
        """Return α [receiver, sender] of Eq. 9: α·V·α + ‖H_i − Σ α_j H_j‖² least on the simplex.

        Half its gradient in row i is (diag V + H Hᵀ) α_i − H H_iᵀ: one matrix serves all rows.
        Steps are Nesterov's, of the length that the largest row sum allows.
        """
        products = means @ means.T
        curve = products + torch.diag(spread)
        rate = 1 / curve.abs().sum(1).max().clamp(min=1e-12)
        absent = 1e9 * (1 - there)  # far below what the projection keeps
        alpha = ahead = tree.onto_simplex(there.expand_as(products) / there.sum() - absent)
        for step in range(self.solver_steps):
            new = tree.onto_simplex(ahead - rate * (ahead @ curve - products) - absent)
            ahead = new + step / (step + 3) * (new - alpha)
            alpha = new
        return alpha

    def deploy(self, sent: Sent, personal: Tree, local: Local) -> Params:
        """Put the combined head on the averaged body."""
        return {**sent.shared.body, **sent.own}

    def adapt(self, sent: Sent, personal: Tree, local: Local) -> Params:
        """A newcomer trains the mean head on the fixed body."""
        return {**sent.shared.body, **self._head(sent, local, self.newcomer_epochs)}

    def models(self, sent: Sent, deployed: Params) -> dict[str, Tree]:
        """Heads are personal: there is no global model."""
        return {"personal": deployed} if deployed else {}

    def trace(self, state: Collaboration) -> dict[str, Tensor]:
        """Record whose heads each client's was combined of: [receiver, sender]."""
        return {"weights": state.weights}

    def _head(self, sent: Sent, local: Local, epochs: int) -> Params:
        """Train the received head on the received body."""

        def loss(head: Params, batch: Batch) -> Tensor:
            return local.loss({**sent.shared.body, **head}, batch)

        return self.fit(local, sent.own, loss, lr=self.head_lr, epochs=epochs)

    def _moments(self, params: Params, classes: int, local: Local) -> tuple[Tensor, Tensor, Tensor]:
        """Return by class sums of features and labels, and the sum of squares, over the labels."""

        def moments(batch: Batch) -> Tree:
            features = local.features(params, batch.x).flatten(0, -2)
            member = losses.by_class(batch.y, batch.weight, classes)
            square = (features.square().sum(-1) * batch.weight.reshape(-1)).sum()
            sums = (member.T @ features, member.sum(0), square)
            return tree.scale(1 / batch.weight.sum().clamp(min=1), sums)

        total, labels = local.total(moments, "train")
        found: tuple[Tensor, Tensor, Tensor] = tree.scale(1 / labels.clamp(min=1), total)
        return found
