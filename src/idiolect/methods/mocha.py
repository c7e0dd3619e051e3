"""MOCHA: every client has its own model, and the server learns how the models are related.

Smith, Chiang, Sanjabi, Talwalkar, "Federated Multi-Task Learning", NeurIPS 2017, Eq. 1: minimise
Σ_t f_t(w_t) + λ/2 tr(W Ω Wᵀ) over the models W = [w_1 … w_m] and the relations Ω, in turn. As in
the released code, Ω⁻¹ is positive and of trace one, which makes the best Ω⁻¹ = (WᵀW)^½ over its
trace, and f_t is a client's mean loss, where the paper has the sum. `weight_decay` is the paper's
second term λ₂ ‖W‖². With relations = "mean", Ω = I − 11ᵀ/m is fixed (section 3.1): mean-regularised
multi-task learning.

The paper solves for W in the dual, which needs linear models. Here clients do so in the primal, so
that any network will do. The others' models are fixed in a round, and client t minimises
f_t(w_t + d) + λ ⟨Σ_s Ω_ts w_s, d⟩ + λ/2 κ_t ‖d‖² with κ_t = Σ_s |Ω_ts|. tr(D Ω Dᵀ) is at most
Σ κ_t ‖d_t‖², so these bounds add up to one on Eq. 1, equal to it at d = 0: whatever subset of
clients takes part, and however far each gets, Eq. 1 does not rise if no client's bound does. That
is what the paper's subproblem with its σ′ does in the dual. Where all stand still,
∇f_t + λ Σ_s Ω_ts w_s = 0 for every t: for convex f_t, logistic or linear regression say, this is
the minimum of Eq. 1 over W. For a network it is a stationary point of the same objective over all
its weights; the paper says nothing of those.

(WᵀW)^½ may be singular, so ε² tr(Ω) is added to the trace, which makes it (WᵀW + ε²)^½; ε is
`floor` times the norm of the initial model, or `floor` where that is zero. The released code lifts
negative eigenvalues to 1e-7. That code goes on from the old W after Ω has changed, so that W no
longer belongs to its dual variables; a primal has no such pair. The rate is lowered to 1/(λ κ_t)
where it is above, for steps on the bound would not end. λ grows in effect with the number of
clients, for the trace is shared. Clients that were not heard yet stand alone, with Ω_tt = m. A
newcomer, whose relations are unknown, trains from the mean of the models with the mean κ as its
pull to it.

Written from notes and released code: the paper's text was not at hand to check equation numbers.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect.core import batchnorm, tree
from idiolect.core.capabilities import NewcomerMessage, NewcomerModel, StateTrace
from idiolect.core.client import Batch, Local
from idiolect.core.method import Method, Report, Sent, Setup, alike, setting
from idiolect.core.tree import Params, Tree


class Tasks(NamedTuple):
    """What the server keeps: every client's last model, who reported one, how many will."""

    models: Params  # [client, ...]
    heard: Tensor  # [client] 1 or 0
    members: Tensor  # clients that have data (m)
    least: Tensor  # ε²


class Bound(NamedTuple):
    """What a client is sent: the regulariser around its own model, from above."""

    gradient: Params  # Σ_s Ω_ts w_s
    curvature: Tensor  # κ_t


@dataclass(frozen=True, kw_only=True)
class MOCHA(NewcomerMessage, NewcomerModel, StateTrace, Method):
    """Clients train their own models under a penalty by relations that the server learns."""

    title: ClassVar[str] = "MOCHA"
    paper: ClassVar[str] = "Smith et al. 2017, Eq. 1"

    pull: float = setting(0.001, "strength of the penalty (λ)", least=0)
    relations: str = setting(
        "learned",
        "how models are related: learned, or all near their mean",
        choices=("learned", "mean"),
    )
    floor: float = setting(
        0.1, "what keeps relations apart from zero (ε), in norms of the initial model", above=0
    )

    def init_server(self, setup: Setup) -> Tasks:
        """Nobody has reported a model yet."""
        square = tree.norm(batchnorm.parameters(setup.params)).square()
        return Tasks(
            tree.repeat(setup.params, setup.clients),
            torch.zeros_like(setup.sizes),
            alike(setup.sizes).sum(),
            self.floor**2 * torch.where(square > 0, square, 1.0),
        )

    def init_personal(self, setup: Setup) -> Params:
        """A client keeps its model."""
        return setup.params

    def send(self, state: Tasks, cohort: Tensor) -> Sent:
        """Send each client the gradient and the curvature of its bound."""
        rows = self.precision(state)[cohort]
        gradient = tree.mixed(rows, batchnorm.parameters(state.models))
        return Sent(own=Bound(gradient, rows.abs().sum(1)))

    def welcome(self, state: Tasks, cohort: Tensor) -> Sent:
        """Send newcomers the mean of the models; its pull is that of the others, on average."""
        there = state.heard + (state.heard.sum() == 0)  # before the first round: the initial model
        curvature = tree.mean(self.precision(state).abs().sum(1), there)
        mean = tree.mean(state.models, there)
        flat = tree.zeros_like(batchnorm.parameters(mean))
        return Sent(mean, tree.repeat(Bound(flat, curvature), len(cohort)))

    def client_step(self, sent: Sent, personal: Params, local: Local) -> tuple[Report, Params]:
        """Lower the bound from the own model; report it and keep it."""
        bound: Bound = sent.own
        own = batchnorm.parameters(personal)

        def loss(w: Params, batch: Batch) -> Tensor:
            now = batchnorm.parameters(w)
            along = tree.dot(bound.gradient, tree.sub(now, own))
            return local.loss(w, batch) + self.pull * (
                along + bound.curvature / 2 * tree.sqdist(now, own)
            )

        most = 1 / (self.pull * bound.curvature).clamp(min=1e-30)
        trained = self.fit(local, personal, loss, lr=most.clamp(max=self.rate(local)))
        return Report(trained, local.size), trained

    def server_step(self, state: Tasks, cohort: Tensor, reports: Report) -> Tasks:
        """Take the cohort's models in."""
        heard = state.heard.index_fill(0, cohort, 1.0)
        return state._replace(models=tree.put(state.models, cohort, reports.params), heard=heard)

    def deploy(self, sent: Sent, personal: Params, local: Local) -> Params:
        """Use the own model."""
        return personal

    def adapt(self, sent: Sent, personal: Params, local: Local) -> Params:
        """A newcomer trains for a round from the mean, near it."""
        return self.client_step(sent, sent.shared, local)[1]

    def models(self, sent: Sent, deployed: Params) -> dict[str, Tree]:
        """There is no global model."""
        return {"personal": deployed} if deployed else {}

    def trace(self, state: Tasks) -> dict[str, Tensor]:
        """Record how models are related: correlations [client, other]."""
        if self.relations == "mean":
            return {}
        covariance = self.covariance(state)
        scale = covariance.diagonal().rsqrt()
        return {"relations": scale.unsqueeze(1) * covariance * scale}

    def precision(self, state: Tasks) -> Tensor:
        """Return Ω [client, other]."""
        if self.relations == "learned":
            inverse: Tensor = torch.linalg.inv(tree.double(self.covariance(state)))
            return inverse.to(state.heard)
        there = state.heard
        return torch.diag(there) - torch.outer(there, there) / there.sum().clamp(min=1)

    def covariance(self, state: Tasks) -> Tensor:
        """Return the best Ω⁻¹: (WᵀW)^½ over its trace; 1/m for those who were not heard."""
        there = tree.double(state.heard)
        known = tree.double(tree.flat(batchnorm.parameters(state.models))) * there.unsqueeze(1)
        products = known @ known.T
        # The same ε² for those who were not heard: a zero would be rounded, and its root is larger.
        values, vectors = torch.linalg.eigh(products + torch.diag(state.least.expand_as(there)))
        root = vectors * values.clamp(min=0).sqrt() @ vectors.T * torch.outer(there, there)
        share = root / root.diagonal().sum().clamp(min=1e-30) * there.sum()
        best: Tensor = (share + torch.diag(1 - there)) / tree.double(state.members)
        return best.to(state.heard)
