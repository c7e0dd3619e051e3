"""KT-pFL on equal networks: each client starts from its own mixture of everyone's parameters.

Zhang et al. 2021, section 5.2.1 ("Homogeneous FL"): personalised global model of n is Σ_m c_nm w_m.
Their appendix on how c is learned there is not public, so this is our reading, the direct analogue
of Eq. 7: c minimises λ Σ_n D_n/D · ½‖Σ_m c_nm w_m − w_n‖² / s + ρ‖c − 1/N‖². Here s is the mean
squared distance of the models from their mean: so λ and ρ mean the same for every network.

A client's personalised model is its mixture, what it trained from that last, or the mixture tuned
on its own data as FedAvg + FT tunes the global model (`use`).
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect import tree
from idiolect.local import Local
from idiolect.matrix import Matrix
from idiolect.method import Report, Sent, Setup, setting
from idiolect.tree import Params, Tree


class Mixtures(NamedTuple):
    """What the server keeps: c, and the model each client would start from now."""

    affinity: Tensor  # [receiver, sender]
    models: Params  # [client, ...]


@dataclass(frozen=True, kw_only=True)
class KTpFLWeights(Matrix):
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
        return Mixtures(affinity, tree.repeat(setup.params, setup.clients))

    def init_personal(self, setup: Setup) -> Params:
        """A client keeps what it trained last."""
        return setup.params

    def send(self, state: Mixtures, cohort: Tensor) -> Sent:
        """Each client gets its own mixture."""
        return Sent(own=tree.take(state.models, cohort))

    def welcome(self, state: Mixtures, cohort: Tensor) -> Sent:
        """A newcomer starts from the mean of the mixtures."""
        count = len(state.affinity)
        equal = state.affinity.new_full((len(cohort), count), 1 / count)
        return Sent(own=tree.mixed(equal, state.models))

    def client_step(self, sent: Sent, personal: Params, local: Local) -> tuple[Report, Params]:
        """Train from the mixture; report the result and keep it."""
        trained = self.fit(local, sent.own)
        return Report(trained, local.size), trained

    def server_step(self, state: Mixtures, cohort: Tensor, reports: Report) -> Mixtures:
        """Descend on the cohort's block of c; mix everyone's next start from its models."""
        known = state.affinity[cohort][:, cohort]
        learned = self.descend(
            known, len(cohort) / len(state.affinity), lambda block: self.slope(block, reports)
        )
        rows = state.affinity[cohort].index_copy(1, cohort, learned)
        affinity = state.affinity.index_copy(0, cohort, rows)
        weights = self.mix(affinity[:, cohort])
        mixed = tree.mixed(weights, reports.params)
        given = weights.sum(1) != 0  # whoever takes nothing from this cohort keeps what it had

        def chosen(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(given.reshape(-1, *[1] * (new.dim() - 1)), new, old)

        return Mixtures(affinity, tree.map(chosen, mixed, state.models))

    def slope(self, block: Tensor, reports: Report) -> Tensor:
        """Return the gradient of the objective of c at a cohort's block.

        With models taken from their mean, (Σ_m c_nm w_m − w_n)·w_m is (c G − G)_nm for their Gram
        matrix G: two products of a matrix as small as the cohort.
        """
        models = tree.flat(reports.params)
        models = models - models.mean(0)
        gram = models @ models.T
        scale = gram.diagonal().mean().clamp(min=1e-30)
        return self.weigh((block @ gram - gram) / scale, block, reports.size)

    def deploy(self, sent: Sent, personal: Params, local: Local) -> Params:
        """Use the mixture, what was trained last, or the mixture tuned."""
        if self.use == "tuned":
            rule = self.rule(local, self.tune_lr)
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
        return {"weights": self.mix(state.affinity)}
