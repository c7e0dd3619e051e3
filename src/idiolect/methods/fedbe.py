"""FedBE: the server draws models around those of its clients, and one model learns from all.

Chen, Chao, "FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning", ICLR 2021,
Algorithm 1. From the received models w_i the server makes a distribution over models and draws M:
Gaussian, N(w̄, diag of the variance of the w_i); or Dirichlet, Σ γ_i n_i w_i / Σ γ_i n_i with γ from
Dirichlet(α). The drawn models, the clients' and the mean w̄ together predict unlabelled examples of
the server by the mean of their softmax, and w̄ learns that by SGD whose rate falls in cycles; the
weights at the ends of cycles are averaged (SWA), and their average is the new global model.

Predictions are averaged over architectures, models are drawn within each, as FedDF does. γ are sums
of α exponential numbers, which clients draw by the run's seed and report: those are a Dirichlet's
up to a factor. Running statistics are not drawn but averaged, and SWA averages them as well, where
others take them anew. Personal is the global model: FedBE is a way to aggregate.

The released code (hongyouc/FedBE) fits its Gaussian to the updates of each tensor scaled to norm
one, clients alike, and scales the noise by 0.1; sharpens the target by a temperature of ½ (preset
`code`); takes a constant rate; and divides the divergence by the number of classes too, which makes
its steps as many times shorter than ours at that rate. Its Dirichlet reads an option (`alpha`) that
its parser has not, as do `is_logit`, `logit_method` and `soft_vote`, so that it stops with an error
as published; and where only a part of the clients comes, it weighs them by the sizes of others, for
the list of sizes is not cut to the cohort.

Written from notes and released code: the paper's text was not at hand to check equation numbers.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect.core import batchnorm, optim, tree
from idiolect.core.capabilities import ArchitectureState
from idiolect.core.client import Batch, Local
from idiolect.core.method import Method, Report, Sent, Setup, alike, mean_report, setting
from idiolect.core.tree import Params, Tree
from idiolect.errors import ConfigError


class Said(NamedTuple):
    """What the clients' models say of the round's public examples, on average."""

    mean: Tensor  # [example, output]
    models: Tensor  # how many


class Drawn(NamedTuple):
    """What a client reports: its model, and its part of the Dirichlet draws."""

    params: Params
    size: Tensor
    gamma: Tensor  # [drawn model]


class Collecting(NamedTuple):
    """How far the server's training has come."""

    params: Params
    memory: Tree
    average: Params  # of those collected
    collected: Tensor
    taken: Tensor  # steps


@dataclass(frozen=True, kw_only=True)
class FedBE(ArchitectureState, Method):
    """FedAvg whose average learns from an ensemble drawn around the clients' models."""

    title: ClassVar[str] = "FedBE"
    paper: ClassVar[str] = "Chen and Chao 2021, Algorithm 1"
    public: ClassVar[str] = "server"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "code": {
            "lr": 0.01,
            "momentum": 0.9,
            "weight_decay": 2e-4,
            "batch": 40,
            "epochs": 20,
            "sample": 0,
            "public_batch": 128,
            "fuse_epochs": 20,
            "fuse_least_lr": 0.001,
            "first_collected": 500,
            "sharpen": 0.5,
        }
    }

    distribution: str = setting(
        "gaussian", "how models are drawn", choices=("gaussian", "dirichlet")
    )
    drawn: int = setting(10, "models drawn in a round (M)", least=1, models=True)
    alpha: int = setting(1, "concentration of the Dirichlet (α), a whole number", least=1)
    with_clients: bool = setting(True, "let the clients' models predict beside the drawn ones")
    sharpen: float = setting(1.0, "temperature of the target; below 1 it is more certain", above=0)
    sample: int = setting(3000, "public examples of a round; 0: all of them", least=0)
    public_batch: int = setting(128, "public examples in a step of the server", least=1)
    fuse_epochs: int = setting(20, "passes of the server over the round's public examples", least=1)
    fuse_lr: float = setting(0.001, "learning rate of the server at the start of a cycle", above=0)
    fuse_least_lr: float = setting(0.0004, "the same at its end", above=0)
    cycle: int = setting(25, "steps in a cycle, after each of which weights are collected", least=1)
    first_collected: int = setting(0, "steps before the first cycle that counts", least=0)
    uniform: bool = setting(False, "weigh clients alike instead of by their examples")

    def init_server(self, setup: Setup) -> Said:
        """Nobody has said anything."""
        if setup.public < max(1, self.sample):
            raise ConfigError(
                f"{type(self).__name__}: needs {self.sample or 'some'} public examples on the "
                f"server and data.public has {setup.public}; name a larger source there, or lower "
                "sample"
            )
        zeros = setup.sizes.new_zeros
        return Said(zeros(self.sample or setup.public, setup.classes), zeros(()))

    def init_group(self, setup: Setup) -> Params:
        """One model for each architecture."""
        return setup.params

    def send(self, state: Said, cohort: Tensor) -> Sent:
        """Nothing but the model of the client's architecture."""
        return Sent()

    def client_step(self, sent: Sent, personal: Tree, local: Local) -> tuple[Drawn, Tree]:
        """Train the global model on private data."""
        gamma = local.size.new_zeros(0)
        if self.distribution == "dirichlet":
            gamma = -torch.log1p(-local.random.uniform((self.drawn, self.alpha))).sum(1)
        return Drawn(self.fit(local, sent.group), local.size, gamma), personal

    def read(self, report: Drawn, local: Local) -> Tensor:
        """See what a received model says of the round's public examples."""
        return self._says(report.params, local)

    def server_step(self, state: Said, cohort: Tensor, reports: Tensor) -> Said:
        """Average what the clients' models say."""
        return Said(reports.mean(0), torch.full_like(state.models, len(reports)))

    def group_step(self, group: Params, reports: Drawn) -> Params:
        """Stack the mean with the deviation (Gaussian), or with the models drawn (Dirichlet)."""
        weight = alike(reports.size) if self.uniform else reports.size
        mean = mean_report(Report(reports.params, weight))
        if self.distribution == "dirichlet":
            mixed = tree.mixed(tree.shares(reports.gamma.T * weight), reports.params)
            both: Params = tree.concat([tree.repeat(mean, 1), mixed])
            return both
        apart = tree.map(lambda rows, centre: (rows - centre).square(), reports.params, mean)
        stacked: Params = tree.stack([mean, tree.map(torch.sqrt, tree.mean(apart, weight))])
        return stacked

    def unheard(self, group: Params) -> Params:
        """Draw nothing but the model itself, where no client of the architecture came."""
        itself: Params = tree.repeat(group, 1 + self.drawn)
        if self.distribution == "gaussian":
            itself = tree.stack([group, tree.zeros_like(group)])
        return itself

    def fuse(self, group: Params, state: Said, local: Local) -> Params:
        """Let the mean learn what all models say together; average its weights over cycles."""
        mean = tree.map(lambda leaf: leaf[0], group)
        said = local.each(lambda one: self._says(one, local), self._models(group, local)).sum(0)
        clients = state.models if self.with_clients else torch.zeros_like(state.models)
        target = said + self._says(mean, local) + clients * state.mean
        target = target / (1 + self.drawn + clients)
        if self.sharpen != 1 and local.task.kind == "classes":
            target = (target.clamp(min=1e-30).log() / self.sharpen).softmax(-1)

        def loss(params: Params, batch: Batch) -> Tensor:
            logits = local.logits(params, batch.x, batch.training, weight=batch.weight)
            return local.task.distil_from(logits, target[batch.place], batch.weight)

        def step(carry: Collecting, batch: Batch) -> Collecting:
            place = carry.taken % self.cycle
            share = (place + 1) / self.cycle
            rate = (1 - share) * self.fuse_lr + share * self.fuse_least_lr
            descent = optim.sgd(rate, momentum=0.9)
            grads = local.gradient(loss, carry.params, batch)
            params, memory = descent.step(carry.params, grads, carry.memory)
            taken = carry.taken + 1
            ends = (place == self.cycle - 1) & (taken > self.first_collected)
            collected = carry.collected + ends
            part = ends / collected.clamp(min=1)
            average = tree.map(lambda old, new: torch.lerp(old, new, part), carry.average, params)
            return Collecting(params, memory, average, collected, taken)

        none = local.size.new_zeros(())
        start = Collecting(mean, optim.sgd(1.0, momentum=0.9).init(mean), mean, none, none)
        end: Collecting = local.scan(
            step,
            start,
            "public",
            batch=self.public_batch,
            epochs=self.fuse_epochs,
            sample=self.sample,
        )
        fused: Params = tree.where(end.collected > 0, end.average, end.params)
        return fused

    def deploy(self, sent: Sent, personal: Tree, local: Local) -> Params:
        """Use the global model."""
        fused: Params = sent.group
        return fused

    def models(self, sent: Sent, deployed: Params) -> dict[str, Tree]:
        """The client's model, and the global one of its architecture."""
        return {"personal": deployed, "global": sent.group}

    def _models(self, group: Params, local: Local) -> Params:
        """Return the drawn models [model, ...]."""
        if self.distribution == "dirichlet":
            return {name: leaf[1:] for name, leaf in group.items()}

        def around(name: str, leaf: Tensor) -> Tensor:
            noise = local.random.normal((self.drawn, *leaf.shape[1:])).to(leaf.dtype)
            return leaf[0] + noise * (0.0 if batchnorm.is_statistic(name) else leaf[1])

        return {name: around(name, leaf) for name, leaf in group.items()}

    def _says(self, params: Params, local: Local) -> Tensor:
        """Predict the round's public examples: shares of classes, or numbers."""

        def softly(batch: Batch) -> Tensor:
            return local.task.soften(local.logits(params, batch.x))

        return local.rows(softly, "public", sample=self.sample)
