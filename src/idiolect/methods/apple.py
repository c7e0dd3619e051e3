"""APPLE: each client mixes everybody's core models, and learns by how much.

Luo and Wu, "Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning", IJCAI
2022, Algorithm 1. Client i downloads all core models w_j and uses Σ_j p_ij w_j. In every step it
moves its own core model along p_ii ∇F, and the relationships p_i, which never leave it, along
⟨∇F, w_j⟩ + λ(r) μ (p_ij − p⁰_j), with ∇F the gradient at the mixture and p⁰ the shares of examples,
where p_i begins. λ falls from 1, exponentially to 0.001 or as a cosine, and is 0 from round
`pull_rounds` on. Then it uploads its core model. Both steps are simultaneous, with one momentum.

**Traffic**: of N clients each downloads N models a round and uploads one, where FedAvg's downloads
one: N² + N models a round instead of 2 N, and a client holds N models. The paper means it for a few
institutions; its form that downloads some of the models is not here. The simulator holds the N core
models once for all clients.

Kept and scored is the mixture at the end of a client's last round, with the others' models as they
were at its start, as the released code scores it. Core models of absent clients stay, and go on
counting. Running statistics are the client's own. All core models begin alike; in the released code
each has its own random start, and its μ has no half before the square, so that its 0.1 is 0.2 here.
A newcomer has no core model: it trains the mean of all, by p⁰, for a round.

PFLlib (d832e76) does otherwise: it uploads the mixture, as it was before the last step, in place of
the core model, which it throws away; later clients of a round find the earlier ones' trained models
instead of those that were sent; ⟨∇F, w_j⟩ is a mean over each tensor's numbers and then over
tensors; p begins at 1/N; its rates of p and μ are 0 by default, so that p stays there. The rate of
core models is times N (`scale_lr`), which makes up for p_ii near 1/N. The preset `pfllib` has that,
its rate and its batch, and leaves p's rate as it is here.

Written from notes and the released code: the paper's text was not at hand to check equation
numbers.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect.core import batchnorm, optim, tree
from idiolect.core.capabilities import NewcomerMessage, NewcomerModel
from idiolect.core.client import Batch, Local
from idiolect.core.method import Method, Report, Sent, Setup, setting
from idiolect.core.tree import Params, Tree

_LEFT = 0.001  # of the pull, where it falls exponentially, when it is left off


class CoreModels(NamedTuple):
    """What the server keeps, and sends to everyone."""

    models: Params  # [client, ...]
    share: Tensor  # [client] of all examples (p⁰); 0 of those that take no part


class Relations(NamedTuple):
    """What a client keeps: how far its relationships are from p⁰, and its mixture."""

    away: Tensor  # [client] p_i − p⁰
    model: Params


class AppleCarry(NamedTuple):
    """What a client trains in a round."""

    core: Params
    away: Tensor
    core_memory: Tree
    away_memory: Tree


@dataclass(frozen=True, kw_only=True)
class APPLE(NewcomerMessage, NewcomerModel, Method):
    """Clients learn how much of everybody's core model, their own among them, they take."""

    title: ClassVar[str] = "APPLE"
    paper: ClassVar[str] = "Luo and Wu 2022, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "code": {
            "lr": 0.01,
            "momentum": 0.9,
            "batch": 256,
            "epochs": 5,
            "weight_lr": 0.001,
            "pull": 0.2,
            "pull_rounds": 16,
        },
        "pfllib": {"lr": 0.005, "batch": 10, "scale_lr": True, "pull": 0.0},
    }

    weight_lr: float = setting(0.001, "learning rate of the relationships (η₂)", least=0)
    pull: float = setting(0.2, "strength of the pull to the shares of examples (μ)", least=0)
    pull_rounds: int = setting(16, "rounds in which the pull falls to nothing (L)", least=0)
    fade: str = setting("exponential", "how the pull falls (λ)", choices=("exponential", "cosine"))
    scale_lr: bool = setting(False, "multiply the rate of core models by the number of clients")

    def init_server(self, setup: Setup) -> CoreModels:
        """All core models begin alike."""
        share = setup.sizes / setup.sizes.sum().clamp(min=1)
        return CoreModels(tree.repeat(setup.params, setup.clients), share)

    def init_personal(self, setup: Setup) -> Relations:
        """Relationships begin as the shares of examples, which the server knows."""
        return Relations(torch.zeros_like(setup.sizes), setup.params)

    def send(self, state: CoreModels, cohort: Tensor) -> Sent:
        """Send all core models to everyone, and to each which is its own."""
        return Sent(state, self._nobody(state, cohort).scatter(1, cohort.unsqueeze(1), 1.0))

    def welcome(self, state: CoreModels, cohort: Tensor) -> Sent:
        """None of the core models is a newcomer's."""
        return Sent(state, self._nobody(state, cohort))

    def client_step(
        self, sent: Sent, personal: Relations, local: Local
    ) -> tuple[Report, Relations]:
        """Step the own core model and the relationships on each batch; report the former."""
        cores, own = sent.shared, sent.own
        rate, takes_part = self.rate(local), cores.share > 0
        if self.scale_lr:
            optimiser = self.local_optimiser(local, rate * takes_part.sum())
        else:
            optimiser = self.local_optimiser(local)
        turning = optim.sgd(self.weight_lr * rate / self.lr, self.momentum)
        pull = self.pull * self._left(local.round)

        def step(now: AppleCarry, batch: Batch) -> AppleCarry:
            weights = cores.share + now.away
            gradient = local.gradient(
                local.loss, _mixture(cores.models, own, now.core, weights), batch
            )
            slopes = _slopes(cores.models, own, now.core, gradient) * takes_part
            core = optimiser.step(
                now.core, tree.scale((own * weights).sum(), gradient), now.core_memory
            )
            away = turning.step({"p": now.away}, {"p": slopes + pull * now.away}, now.away_memory)
            return AppleCarry(core[0], away[0]["p"], core[1], away[1])

        core = tree.map(lambda leaf: torch.tensordot(own.to(leaf), leaf, dims=1), cores.models)
        memory = optimiser.init(core), turning.init({"p": personal.away})
        end: AppleCarry = local.scan(
            step,
            AppleCarry(core, personal.away, *memory),
            batch=self.batch,
            epochs=self.epochs,
            steps=self.steps,
        )
        mixture = _mixture(cores.models, own, end.core, cores.share + end.away)
        return Report(end.core, local.size), Relations(end.away, mixture)

    def server_step(self, state: CoreModels, cohort: Tensor, reports: Report) -> CoreModels:
        """Take the cohort's core models in."""
        return state._replace(models=tree.put(state.models, cohort, reports.params))

    def deploy(self, sent: Sent, personal: Relations, local: Local) -> Params:
        """Use the mixture."""
        return personal.model

    def adapt(self, sent: Sent, personal: Relations, local: Local) -> Params:
        """A newcomer trains the mean of the core models for a round."""
        share = sent.shared.share
        mean = tree.map(
            lambda leaf: torch.tensordot(share.to(leaf), leaf, dims=1), sent.shared.models
        )
        return self.fit(local, mean)

    def models(self, sent: Sent, deployed: Params) -> dict[str, Tree]:
        """There are only the clients' mixtures."""
        return {"personal": deployed} if deployed else {}

    def _left(self, round: Tensor) -> Tensor:
        """Return how much of the pull is left after so many rounds (λ)."""
        part = round / max(1, self.pull_rounds)
        if self.fade == "cosine":
            left = (torch.cos(math.pi * part) + 1) / 2
        else:
            left = torch.exp(math.log(_LEFT) * part)
        return torch.where(round < self.pull_rounds, left, torch.zeros_like(left))

    def _nobody(self, state: CoreModels, cohort: Tensor) -> Tensor:
        return torch.zeros(len(cohort), len(state.share)).to(state.share)


def _mixture(models: Params, own: Tensor, core: Params, weights: Tensor) -> Params:
    """Return Σ_j p_j w_j with `core` in the own place; running statistics are the core's."""
    others, mine = weights * (1 - own), (weights * own).sum()
    mixed = {
        name: torch.tensordot(others.to(leaf), models[name], dims=1) + mine * leaf
        for name, leaf in batchnorm.parameters(core).items()
    }
    return {**core, **mixed}


def _slopes(models: Params, own: Tensor, core: Params, gradient: Params) -> Tensor:
    """Return ⟨gradient, w_j⟩ for each core model [client]."""
    names = list(batchnorm.parameters(core))
    found = sum(models[n].reshape(len(own), -1) @ gradient[n].flatten() for n in names)
    mine = sum((core[n] * gradient[n]).sum() for n in names)
    return torch.where(own > 0, mine, found)
