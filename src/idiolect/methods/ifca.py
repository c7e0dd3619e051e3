"""IFCA: several global models; each client trains the one that suits it best.

Ghosh, Chung, Yin, Ramchandran, "An Efficient Framework for Clustered Federated Learning", NeurIPS
2020, Algorithm 1, with model averaging. The server sends all k models; a client takes that with the
least loss on its training data, trains it and reports it with its choice; the server averages each
model over those who chose it, alike as printed. A model that nobody chose stays as it was. The
paper starts from k random models. Here the first is the network as it was drawn, and each other one
has the entries of every leaf in another random order: a draw of the same law where entries are
drawn alike. A newcomer chooses by its training data, without training.

Written from notes and released code: the paper's text was not at hand to check equation numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.core.capabilities import Facts, Reason, StateTrace
from idiolect.core.client import Local
from idiolect.core.method import Method, Sent, Setup, alike, setting
from idiolect.core.tree import Params, Tree


class Clusters(NamedTuple):
    """What the server keeps: k models, and how much of the last cohort chose each."""

    models: Params  # [cluster, ...]
    shares: Tensor  # [cluster]


class Choice(NamedTuple):
    """What a client reports: the model it trained, which one it was, and its examples."""

    params: Params
    cluster: Tensor  # [cluster] one for the chosen, zero for the others
    size: Tensor


class Chosen(NamedTuple):
    """What a client uses, and which one it is."""

    params: Params
    cluster: Tensor


@dataclass(frozen=True, kw_only=True)
class IFCA(Facts, Reason, StateTrace, Method):
    """Clients choose among several global models by their loss, and train the chosen one."""

    title: ClassVar[str] = "IFCA"
    paper: ClassVar[str] = "Ghosh et al. 2020, Algorithm 1"

    clusters: int = setting(2, "number of global models (k)", least=1, models=True)
    uniform: bool = setting(True, "weigh clients alike, as printed, instead of by their examples")

    def init_server(self, setup: Setup) -> Clusters:
        """Begin with different models."""
        models = initial_models(setup, self.clusters)
        return Clusters(models, setup.sizes.new_zeros(self.clusters))

    def send(self, state: Clusters, cohort: Tensor) -> Sent:
        """Send all models."""
        return Sent(state.models)

    def client_step(self, sent: Sent, personal: Tree, local: Local) -> tuple[Choice, Tree]:
        """Train the model of least loss."""
        chosen = self.deploy(sent, personal, local)
        one = torch.arange(self.clusters, device=chosen.cluster.device) == chosen.cluster
        trained = self.fit(local, chosen.params)
        return Choice(trained, one.to(local.size.dtype), local.size), personal

    def server_step(self, state: Clusters, cohort: Tensor, reports: Choice) -> Clusters:
        """Average each model over those who chose it."""
        weight = alike(reports.size) if self.uniform else reports.size
        votes = (weight.unsqueeze(1) * reports.cluster).T  # [cluster, client]
        means, there = tree.mixed(tree.shares(votes), reports.params), votes.sum(1) > 0

        def kept(mean: Tensor, old: Tensor) -> Tensor:
            return torch.where(there.reshape(-1, *[1] * (old.dim() - 1)), mean, old)

        return Clusters(tree.map(kept, means, state.models), votes.sum(1) / weight.sum())

    def deploy(self, sent: Sent, personal: Tree, local: Local) -> Chosen:
        """Choose the model of least loss on the training data."""
        lost = local.each(
            lambda model: local.mean(lambda batch: local.loss(model, batch), "train"), sent.shared
        )
        # Without examples no model has a loss and the first is taken; one that diverged never is.
        cluster = lost.nan_to_num(nan=torch.inf).argmin()
        return Chosen(tree.pick(sent.shared, cluster), cluster)

    def models(self, sent: Sent, deployed: Chosen) -> dict[str, Tree]:
        """There is no single global model."""
        return {"personal": deployed.params} if deployed else {}

    def facts(self, deployed: Chosen) -> dict[str, Tensor]:
        """Say which model was chosen."""
        return {"cluster": deployed.cluster}

    def reason(self, facts: Mapping[str, Any]) -> str:
        """Put the choice in words."""
        return f"cluster {int(facts['cluster']) + 1} of {self.clusters}: least loss on its own data"

    def trace(self, state: Clusters) -> dict[str, Tensor]:
        """Record how much of the cohort chose each model."""
        return {"shares": state.shares}


def initial_models(setup: Setup, count: int) -> Params:
    """Stack different models: the network as drawn, then others with shuffled entries."""
    draw = torch.Generator().manual_seed(setup.seed)
    models: Params = tree.repeat(setup.params, count)
    for one in range(1, count):
        for name, leaf in setup.params.items():
            if name not in setup.statistics:
                order = torch.randperm(leaf.numel(), generator=draw).to(leaf.device)
                models[name][one] = leaf.flatten()[order].reshape(leaf.shape)
    return models
