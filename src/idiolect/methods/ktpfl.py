"""KT-pFL: a learned matrix says how much each client learns from each other.

Zhang et al., "Parameterized Knowledge Transfer for Personalized Federated Learning", NeurIPS 2021,
Eqs. 2-7 and Algorithm 1. Row n of c is the receiver's. What the paper leaves open is a setting: how
c is kept a mixture (`projection`), and whether the transfer in its objective is the sum over the
round's public examples, which Eq. 2 put into Eq. 4 prints, or their mean (`reduction`). By the sum,
which the preset `paper` takes, c moves as many times as far as there are examples; by the mean, at
the same rate, it hardly leaves equal shares. The preset `code` is what the released code does:
squared error instead of KL, no weights by size, steps scaled by powers of five, rows put through a
softmax, local epochs that grow by one a round; left out is that it draws some public examples
twice. It runs twice as many rounds as its baselines, whose settings there are their presets
`kt-pfl`. Eq. 7 takes predictions made after the distillation, which would cost a second exchange;
like the code we take those that are mixed.

With a cohort only its block of c is learned; what a row gives to the cohort as a whole stays as it
was, so rows stay on the simplex.

KT-pFL-weights, on equal networks: each client starts from its own mixture of everyone's parameters.

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

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect.core import batchnorm, tree
from idiolect.core.capabilities import NewcomerMessage, NewcomerModel, StateTrace
from idiolect.core.client import Local
from idiolect.core.method import Method, Report, Sent, Setup, setting
from idiolect.core.tree import Params, Tree
from idiolect.methods.distilled import Distilled, SoftReport

TINY = 1e-10  # below this a probability is a rounding error


@dataclass(frozen=True, kw_only=True)
class Matrix(Method):
    """The settings of c, and a descent on a cohort's block of it."""

    matrix_lr: float = setting(0.5, "learning rate of c (η₃)", above=0)
    matrix_steps: int = setting(1, "steps on c in a round", least=1)
    transfer: float = setting(
        0.0,
        "weight of the transfer in the objective of c (λ); 0: as many as there are clients, so "
        "that D_n/D does not drown each one's in the pull",
        least=0,
    )
    pull: float = setting(0.7, "strength of the pull of c to equal shares (ρ)", least=0)
    projection: str = setting(
        "simplex",
        "how a row stays a mixture: nearest point of the simplex, softmax, or not at all",
        choices=("simplex", "softmax", "none"),
    )
    sharpness: float = setting(5.0, "factor of a row before its softmax", above=0)
    adaptive: bool = setting(
        False, "scale steps on c by powers of five to a mean of about 0.01, as the released code"
    )

    def descend(self, known: Tensor, share: float, gradient: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a cohort's new block of c; `share` is the cohort's part of all clients."""
        mass = known.sum(1, keepdim=True)
        if self.projection == "none":  # rows need not add up, so each present client counts alike
            mass = known.new_full((len(known), 1), share)
        block = known / mass.clamp(min=TINY)  # who takes nothing from the cohort still does not
        for _ in range(self.matrix_steps):
            down = gradient(block)
            block = self._projected(block - self._rate(down) * down)
        return mass * block

    def weigh(self, gap: Tensor, block: Tensor, size: Tensor) -> Tensor:
        """Return the gradient of Eq. 4: that of the gaps, by size, and that of the pull."""
        weight = (self.transfer or len(size)) * size / size.sum()
        return weight.unsqueeze(1) * gap + 2 * self.pull * (block - 1 / len(block))

    def mix(self, affinity: Tensor) -> Tensor:
        """Renormalise rows over a cohort; unless they are no mixtures, by choice."""
        if self.projection == "none":
            return affinity * (affinity.shape[0] / affinity.shape[1])
        return tree.shares(affinity)

    def _rate(self, gradient: Tensor) -> float | Tensor:
        if not self.adaptive:
            # Beyond 1/2ρ the pull would overshoot equal shares: however strong, it ends there.
            return min(self.matrix_lr, 0.5 / self.pull) if self.pull else self.matrix_lr
        # The power of five that lifts or lowers a row's mean to [0.01, 0.05), at most five times.
        mean = gradient.abs().mean(1, keepdim=True).clamp(min=1e-12)
        power = ((0.01 / mean).log() / math.log(5)).ceil().clamp(-5, 5)
        return torch.pow(5.0, power)

    def _projected(self, rows: Tensor) -> Tensor:
        if self.projection == "simplex":
            return tree.onto_simplex(rows)
        return (self.sharpness * rows).softmax(1) if self.projection == "softmax" else rows


@dataclass(frozen=True, kw_only=True)
class KTpFL(Matrix, Distilled):
    """Each client's teacher is Σ_m c_nm s_m; the server descends on c as training goes on."""

    title: ClassVar[str] = "KT-pFL"
    paper: ClassVar[str] = "Zhang et al. 2021, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {
            "gain": "paper",
            "temperature": 10.0,
            "pull": 0.7,
            "matrix_lr": 0.01,
            "transfer": 1.0,
            "reduction": "sum",
            "batch": 128,
            "epochs": 20,
            "lr": 0.01,
        },
        "code": {
            "gain": "code",
            "temperature": 10.0,
            "pull": 0.7,
            "objective": "mse",
            "adaptive": True,
            "projection": "softmax",
            "batch": 16,
            "epochs": 10,
            "first_epochs": 1,
            "lr": 0.02,
        },
    }

    pull: float = setting(0.1, "strength of the pull of c to equal shares (ρ)", least=0)
    objective: str = setting(
        "kl",
        "what c minimises: KL weighted by size (Eq. 7), or squared error (released code)",
        choices=("kl", "mse"),
    )

    reduction: str = setting(
        "mean",
        "the transfer in the objective of c: mean over the public examples, or sum (Eqs. 2 and 4)",
        choices=("mean", "sum"),
    )

    def learn(self, known: Tensor, reports: SoftReport, share: float, real: bool = False) -> Tensor:
        """Descend on the cohort's block of c."""
        return self.descend(known, share, lambda block: self.gradient(block, reports, real))

    def gradient(self, block: Tensor, reports: SoftReport, real: bool = False) -> Tensor:
        """Return the gradient of the objective of c at a cohort's block: Eq. 7, or the code's.

        Where predictions are no shares of classes, it is that of the squared error.
        """
        soft, size = reports  # [sender, example, class]
        taught = torch.tensordot(block, soft, dims=1)
        examples, classes = soft.shape[1:]
        if self.objective == "mse" or real:
            gap = torch.einsum("nxk,mxk->nm", taught - soft, soft) / (examples * classes)
            return 2 * gap + 2 * self.pull / len(block) * (block - 1 / len(block))
        ratio = taught.clamp(min=TINY).log() - soft.clamp(min=TINY).log()
        gap = torch.einsum("nxk,mxk->nm", ratio + 1, soft)
        gap = gap / examples if self.reduction == "mean" else gap
        return self.weigh(gap, block, size)


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
            known, len(cohort) / len(state.affinity), lambda block: self.gradient(block, reports)
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
            weights = tree.shares(known)
        nothing = (weights == 0).all(1)
        return torch.where(nothing.unsqueeze(1), torch.eye(len(known)).to(known), weights)

    def gradient(self, block: Tensor, reports: Report) -> Tensor:
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
            return self.fit(local, sent.own, lr=self.tune_lr, epochs=self.tune_epochs)
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
