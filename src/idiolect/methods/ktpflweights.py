"""KT-pFL on equal networks: each client starts from its own mixture of everyone's parameters.

Zhang et al. 2021, section 5.2.1 ("Homogeneous FL"): personalised global model of n is Σ_m c_nm w_m.
Their appendix on how c is learned there is not public, so this is our reading, the direct analogue
of Eq. 7: c minimises λ Σ_n D_n/D · ½‖Σ_m c_nm w_m − w_n‖² / s + ρ‖c − 1/N‖². Here s is the mean
squared distance of the models from their mean: so λ and ρ mean the same for every network.
Distances are over parameters; running statistics are mixed with the same weights.

The server keeps every client's last report. With cohorts, what a client is sent is mixed from all
that were ever heard, u_n = Σ c_nm w_m / Σ c_nm, whoever was in the last cohort; c is learned on the
cohort's block. Who takes nothing from anyone heard goes on from its own last report.

A client's personalised model is its mixture, what it trained from that last, or the mixture tuned
on its own data as FedAvg + FT tunes the global model (`use`).
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect.aggregation.mixing_matrix import Matrix, shares
from idiolect.core import batchnorm, tree
from idiolect.core.capabilities import NewcomerMessage, NewcomerModel, StateTrace
from idiolect.core.client import Local
from idiolect.core.method import Report, Sent, Setup, setting
from idiolect.core.tree import Params, Tree


class Mixtures(NamedTuple):
    """What the server keeps: c, every client's last report, and who has reported."""

    affinity: Tensor  # [receiver, sender]
    models: Params  # [client, ...]; the initial parameters before the first report
    heard: Tensor  # [client] 1 or 0


@dataclass(frozen=True, kw_only=True)
class KTpFLWeights(NewcomerMessage, NewcomerModel, StateTrace, Matrix):
    """Clients train from mixtures of each other's parameters; the server learns the mixtures."""

    title: ClassVar[str] = "KT-pFL-weights"
    paper: ClassVar[str] = "Zhang et al. 2021, section 5.2.1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"matrix_lr": 0.01, "transfer": 1.0, "lr": 0.005}
    }

    use: str = setting(
        "mixture",
        "what a client uses: its mixture of models, what it trained from that last, or it tuned",
        choices=("mixture", "trained", "tuned"),
        deploy=True,
    )
    tune_epochs: int = setting(
        10, "passes over the client's data where the mixture is tuned", least=1, deploy=True
    )
    tune_lr: float = setting(0.001, "learning rate of that", above=0, deploy=True)

    def init_server(self, setup: Setup) -> Mixtures:
        """Everyone with data counts alike, and starts from the initial parameters."""
        filled = (setup.sizes > 0).to(setup.sizes.dtype)
        affinity = (filled / filled.sum().clamp(min=1)).repeat(setup.clients, 1)
        models = tree.repeat(setup.params, setup.clients)
        return Mixtures(affinity, models, torch.zeros_like(setup.sizes))

    def init_personal(self, setup: Setup) -> Params:
        """A client keeps what it trained last."""
        return setup.params

    def send(self, state: Mixtures, cohort: Tensor) -> Sent:
        """Each client gets its own mixture."""
        return Sent(own=tree.mixed(self.mixture(state)[cohort], state.models))

    def welcome(self, state: Mixtures, cohort: Tensor) -> Sent:
        """A newcomer starts from the mean of the mixtures."""
        equal = self.mixture(state).mean(0, keepdim=True).repeat(len(cohort), 1)
        return Sent(own=tree.mixed(equal, state.models))

    def client_step(self, sent: Sent, personal: Params, local: Local) -> tuple[Report, Params]:
        """Train from the mixture; report the result and keep it."""
        trained = self.fit(local, sent.own)
        return Report(trained, local.size), trained

    def server_step(self, state: Mixtures, cohort: Tensor, reports: Report) -> Mixtures:
        """Descend on the cohort's block of c; keep its reports beside those of the absent."""
        known = state.affinity[cohort][:, cohort]
        learned = self.descend(
            known, len(cohort) / len(state.affinity), lambda block: self.slope(block, reports)
        )
        rows = state.affinity[cohort].index_copy(1, cohort, learned)
        return Mixtures(
            state.affinity.index_copy(0, cohort, rows),
            tree.put(state.models, cohort, reports.params),
            state.heard.index_fill(0, cohort, 1.0),
        )

    def mixture(self, state: Mixtures) -> Tensor:
        """Return what each client takes of everyone's last report: [receiver, sender]."""
        known = state.affinity * state.heard
        if self.projection == "none":  # rows need not add up: each heard client counts alike
            weights = known * (len(known) / state.heard.sum().clamp(min=1))
        else:
            weights = shares(known)
        nothing = (weights == 0).all(1)
        return torch.where(nothing.unsqueeze(1), torch.eye(len(known)).to(known), weights)

    def slope(self, block: Tensor, reports: Report) -> Tensor:
        """Return the gradient of the objective of c at a cohort's block.

        With models taken from their mean, (Σ_m c_nm w_m − w_n)·w_m is (c G − G)_nm for their Gram
        matrix G: two products of a matrix as small as the cohort.
        """
        models = tree.flat(batchnorm.parameters(reports.params))
        models = models - models.mean(0)
        gram = models @ models.T
        scale = gram.diagonal().mean().clamp(min=1e-30)
        return self.weigh((block @ gram - gram) / scale, block, reports.size)

    def deploy(self, sent: Sent, personal: Params, local: Local) -> Params:
        """Use the mixture, what was trained last, or the mixture tuned."""
        if self.use == "tuned":
            rule = self.local_optimiser(local, self.tune_lr)
            return local.fit(local.loss, sent.own, rule, batch=self.batch, epochs=self.tune_epochs)
        chosen: Params = sent.own if self.use == "mixture" else personal
        return chosen

    def adapt(self, sent: Sent, personal: Params, local: Local) -> Params:
        """A newcomer trains for a round from what it was sent."""
        return self.fit(local, sent.own)

    def models(self, sent: Sent, deployed: Params) -> dict[str, Tree]:
        """The client's own model, and the mixture it would start from next."""
        return {"personal": deployed, "mixture": sent.own} if deployed else {}

    def trace(self, state: Mixtures) -> dict[str, Tensor]:
        """Record who learns from whom: [receiver, sender]."""
        return {"weights": self.mixture(state)}
