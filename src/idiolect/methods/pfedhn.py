"""pFedHN: the server's hypernetwork writes every client's model.

Shamsian et al., "Personalized Federated Learning using Hypernetworks", ICML 2021, Algorithm 1: the
model θ_i = h(v_i; φ) is made of a learned embedding v_i. The client trains θ_i to θ_i' and reports
Δ = θ_i − θ_i'; the server takes a step along (∂θ_i/∂φ)ᵀ Δ, and v_i along its own. Algorithm 1 has
one client in a round, and the rates below are the authors' for that. Where a round has a cohort,
the server takes such a step for every report in turn, by the number of the client, with Δ the way
from what it would write for that client by now to what the client trained: the steps before have
gone a part of it, and to go the whole of it again for everyone overshoots. One step along the mean
of the cohort is server_steps = "cohort", the default before: at the same rate it is as many times
slower as there are clients in a round, and wants a rate that many times as large.

The last layers of h start with the network's initial parameters as their bias, so that the first
models are sound ones. Running statistics of batch normalisation are averaged, not written.

In Algorithm 1 a step changes v_i alone. In the released code φ and all embeddings share one
optimiser: at every step of whomever all the other embeddings decay too and go on by their momentum,
and φ and v_i are clipped by their joint norm. Here, as printed, nothing of an absent client
changes; its velocity waits for its next step, and each embedding is clipped by itself.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.core.capabilities import NewcomerMessage, NewcomerModel, StateTrace
from idiolect.core.client import Local
from idiolect.core.method import Method, Sent, Setup, setting
from idiolect.core.tree import Params, Tree


class Hyper(NamedTuple):
    """φ: hidden layers, and for each leaf of the clients' network a last layer."""

    body: tuple[tuple[Tensor, Tensor], ...]  # weight [in, out], bias [out]
    heads: Params  # [hidden, ...]
    biases: Params  # [...]


class Writer(NamedTuple):
    """What the server keeps: hypernetwork and embeddings, their velocities, running statistics."""

    network: Hyper
    embeddings: Tensor  # [client, number]
    velocity: Hyper
    embedding_velocity: Tensor
    statistics: Params


class Change(NamedTuple):
    """What a client uploads: how far training moved its model, θ − θ', and running statistics."""

    change: Params
    statistics: Params
    size: Tensor


@dataclass(frozen=True, kw_only=True)
class PFedHN(NewcomerMessage, NewcomerModel, StateTrace, Method):
    """Clients train what a shared hypernetwork wrote for them; it learns from the difference."""

    title: ClassVar[str] = "pFedHN"
    paper: ClassVar[str] = "Shamsian et al. 2021, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "code": {
            "steps": 50,
            "batch": 64,
            "lr": 0.005,
            "momentum": 0.9,
            "weight_decay": 5e-5,
            "clip": 50.0,
        }
    }

    server_lr: float = setting(0.01, "learning rate of the hypernetwork and embeddings", above=0)
    server_momentum: float = setting(0.9, "momentum of the same", least=0, most=1)
    server_decay: float = setting(1e-3, "L2 weight decay of the same", least=0)
    server_clip: float = setting(50.0, "largest norm of its gradient; 0: unlimited", least=0)
    server_steps: str = setting(
        "report",
        "steps of the server in a round: one for each report, or one along the cohort's mean",
        choices=("report", "cohort"),
    )
    embedding: int = setting(0, "length of an embedding; 0: 1 + clients / 4", least=0)
    hidden: int = setting(100, "width of the hypernetwork's hidden layers", least=1, models=True)
    layers: int = setting(3, "number of its hidden layers", least=1)

    def init_server(self, setup: Setup) -> Writer:
        """Draw hypernetwork and embeddings from the run's seed."""
        draw = torch.Generator().manual_seed(setup.seed)
        like = setup.sizes
        statistics, trained = tree.split(setup.params, setup.statistics.__contains__)
        width = self.embedding or 1 + setup.clients // 4
        first, body = width, []
        for _ in range(self.layers):
            bound = 1 / math.sqrt(width)
            weight = _uniform((width, self.hidden), bound, draw).to(like)
            body.append((weight, _uniform((self.hidden,), bound, draw).to(like)))
            width = self.hidden
        # A tenth of the spread of what they add to: clients differ, but all start near the bias.
        heads = {
            name: _uniform((width, *leaf.shape), 0.1 / math.sqrt(width), draw).to(like)
            * leaf.square().mean().sqrt()
            for name, leaf in trained.items()
        }
        network = Hyper(tuple(body), heads, trained)
        # One by one, so that a client's does not depend on how many there are.
        drawn = [torch.randn(first, generator=draw) for _ in range(setup.clients)]
        embeddings = torch.stack(drawn).to(like)
        return Writer(
            network, embeddings, tree.zeros_like(network), torch.zeros_like(embeddings), statistics
        )

    def send(self, state: Writer, cohort: Tensor) -> Sent:
        """Write the cohort's models."""
        return Sent(state.statistics, written(state.network, state.embeddings[cohort]))

    def welcome(self, state: Writer, cohort: Tensor) -> Sent:
        """Write newcomers the model of the mean embedding."""
        middle = state.embeddings.mean(0, keepdim=True).repeat(len(cohort), 1)
        return Sent(state.statistics, written(state.network, middle))

    def client_step(self, sent: Sent, personal: Tree, local: Local) -> tuple[Change, Tree]:
        """Train what was written; report how far it moved."""
        trained = self.fit(local, {**sent.own, **sent.shared})
        statistics, rest = tree.split(trained, sent.shared.__contains__)
        return Change(tree.sub(sent.own, rest), statistics, local.size), personal

    def server_step(self, state: Writer, cohort: Tensor, reports: Change) -> Writer:
        """Step along the vector-Jacobian product of what the clients found, report by report."""
        before = state.statistics
        if self.server_steps == "cohort":
            state = self._moved(state, cohort, reports.change)
        else:
            trained = tree.sub(written(state.network, state.embeddings[cohort]), reports.change)
            for place in cohort.argsort().reshape(-1, 1).unbind():
                now = written(state.network, state.embeddings[cohort[place]])
                left = tree.sub(now, tree.take(trained, place))
                state = self._moved(state, cohort[place], left)
        statistics = tree.mean(reports.statistics, reports.size) if before else {}
        return state._replace(statistics=statistics)

    def _moved(self, state: Writer, cohort: Tensor, change: Params) -> Writer:
        """Take one step along the mean over some clients; each embedding takes its own."""
        rows = state.embeddings[cohort]
        product = torch.func.vjp(written, state.network, rows)[1]
        gradient, own = product(change)
        gradient = self._clipped(tree.scale(1 / len(cohort), gradient))
        own = torch.stack([self._clipped(row) for row in own])
        network, velocity = self._stepped(state.network, gradient, state.velocity)
        rows, speed = self._stepped(rows, own, state.embedding_velocity[cohort])
        return state._replace(
            network=network,
            embeddings=state.embeddings.index_copy(0, cohort, rows),
            velocity=velocity,
            embedding_velocity=state.embedding_velocity.index_copy(0, cohort, speed),
        )

    def deploy(self, sent: Sent, personal: Tree, local: Local) -> Params:
        """Use what was written, as it is."""
        return {**sent.own, **sent.shared}

    def adapt(self, sent: Sent, personal: Tree, local: Local) -> Params:
        """A newcomer trains for a round what was written for nobody in particular."""
        return self.fit(local, {**sent.own, **sent.shared})

    def models(self, sent: Sent, deployed: Params) -> dict[str, Tree]:
        """There are only the clients' own models."""
        return {"personal": deployed} if deployed else {}

    def trace(self, state: Writer) -> dict[str, Tensor]:
        """Record where clients stand: [client, number]."""
        return {"embeddings": state.embeddings}

    def _stepped(self, params: Tree, gradient: Tree, velocity: Tree) -> tuple[Tree, Tree]:
        gradient = tree.axpy(self.server_decay, params, gradient)
        velocity = tree.axpy(self.server_momentum, velocity, gradient)
        return tree.axpy(-self.server_lr, velocity, params), velocity

    def _clipped(self, gradient: Tree) -> Tree:
        if not self.server_clip:
            return gradient
        return tree.scale(
            (self.server_clip / tree.norm(gradient).clamp(min=1e-12)).clamp(max=1), gradient
        )


def written(network: Hyper, embeddings: Tensor) -> Params:
    """Return h(v; φ) for a stack of embeddings: a stack of models."""
    now = embeddings
    for weight, bias in network.body:
        now = (now @ weight + bias).relu()
    return {
        name: torch.tensordot(now, head, dims=1) + network.biases[name]
        for name, head in network.heads.items()
    }


def _uniform(shape: tuple[int, ...], bound: float, draw: torch.Generator) -> Tensor:
    return (2 * torch.rand(shape, generator=draw) - 1) * bound
