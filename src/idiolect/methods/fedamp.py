"""FedAMP and HeurFedAMP: clients with like models draw together.

Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021, Algorithm 1.
The server holds every client's model and sends client i the mixture u_i = Σ_j ξ_ij w_j; the client
minimises f_i(w) + pull/2 · ‖w − u_i‖², starting from its own model.

FedAMP: ξ_ij = share · exp(−‖w_i − w_j‖² / σ), and the rest for itself. HeurFedAMP: a fixed share
for itself, and for the others a softmax of the cosines of their models.

In the paper's letters pull is λ/α and share is α/σ, to be chosen so that nobody's own weight falls
below zero. share = 0 takes 1/N of the N clients heard so far, which leaves everyone at least that;
with a fixed share, such as the 0.1 that was the default before, it is 0 from some thirty clients
on. σ = 0 takes the median squared distance of two models, for with a fixed one the
exponential of a deep network's distance is zero or one. Models that have not been reported yet take
no part. Distances and cosines are over parameters; running statistics are mixed along with them.
PFLlib, since 45ae9f5 of March 2023, takes ‖w − u‖, without the square, of `p.data`, through which
no gradient flows: its clients train alone, and its FedAMP (d832e76) equals our Local to rounding:
compare_with_pfllib.py. Before, the square was there, and its gradient.

HeurFedAMP's factor of the cosines is a hyper-parameter of the paper; its default is ours. Networks
that began alike have cosines near one, which a fixed factor such as 5 leaves nearly equal;
sharpness = 0 divides by their standard deviation over all pairs and multiplies by two: two
deviations nearer weigh e⁴ as much.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from idiolect.core import batchnorm, tree
from idiolect.core.capabilities import NewcomerMessage, NewcomerModel, StateTrace
from idiolect.core.client import Batch, Local
from idiolect.core.method import Method, Report, Sent, Setup, setting
from idiolect.core.tree import Params, Tree


class ClientModels(NamedTuple):
    """What the server keeps: every client's last model, and who has reported one."""

    models: Params  # [client, ...]
    heard: Tensor  # [client] 1 or 0


@dataclass(frozen=True, kw_only=True)
class FedAMP(NewcomerMessage, NewcomerModel, StateTrace, Method):
    """Each client is pulled to a mixture of all models, the nearer ones weighing more."""

    title: ClassVar[str] = "FedAMP"
    paper: ClassVar[str] = "Huang et al. 2021, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "pfllib": {"lr": 0.005, "batch": 10, "pull": 1.0, "sigma": 1.0}
    }

    pull: float = setting(1.0, "strength of the pull to the mixture (λ/α)", least=0)
    share: float = setting(
        0.0, "most that one other client weighs (α/σ); 0: one over the clients heard", least=0
    )
    sigma: float = setting(
        0.0, "squared distance at which weight has fallen to 1/e (σ); 0: the median", least=0
    )
    start: str = setting("own", "what training starts from", choices=("own", "mixture"))

    def init_server(self, setup: Setup) -> ClientModels:
        """Nobody has reported a model yet."""
        return ClientModels(tree.repeat(setup.params, setup.clients), torch.zeros_like(setup.sizes))

    def init_personal(self, setup: Setup) -> Params:
        """A client keeps its model."""
        return setup.params

    def send(self, state: ClientModels, cohort: Tensor) -> Sent:
        """Each client gets its mixture."""
        return Sent(own=tree.mixed(self.attention(state)[cohort], state.models))

    def welcome(self, state: ClientModels, cohort: Tensor) -> Sent:
        """A newcomer, like to nobody yet, gets the mean of the models."""
        weights = tree.shares(state.heard.repeat(len(cohort), 1))
        return Sent(own=tree.mixed(weights, state.models))

    def client_step(self, sent: Sent, personal: Params, local: Local) -> tuple[Report, Params]:
        """Train the own model near the mixture; report it and keep it."""

        def loss(w: Params, batch: Batch) -> Tensor:
            return local.loss(w, batch) + self.pull / 2 * tree.sqdist(w, sent.own)

        trained = self.fit(local, personal if self.start == "own" else sent.own, loss)
        return Report(trained, local.size), trained

    def server_step(self, state: ClientModels, cohort: Tensor, reports: Report) -> ClientModels:
        """Take the cohort's models in."""
        heard = state.heard.index_fill(0, cohort, 1.0)
        return ClientModels(tree.put(state.models, cohort, reports.params), heard)

    def attention(self, state: ClientModels) -> Tensor:
        """Return ξ [client, other]: rows add up to one."""
        pairs = self._pairs(state.heard)
        distance = self._distances(state)
        sigma = distance.new_full((), self.sigma)
        if self.sigma == 0:
            sigma = distance[pairs > 0].median() if bool(pairs.any()) else sigma + 1
        share: float | Tensor = self.share or 1 / state.heard.sum().clamp(min=1)
        others = pairs * share * (-distance / sigma.clamp(min=1e-30)).exp()
        others = others / others.sum(1, keepdim=True).clamp(min=1.0)  # weights of others: at most 1
        return others + torch.diag(1 - others.sum(1))

    def deploy(self, sent: Sent, personal: Params, local: Local) -> Params:
        """Use the own model."""
        return personal

    def adapt(self, sent: Sent, personal: Params, local: Local) -> Params:
        """A newcomer starts from the mean and trains for a round near it."""
        return self.client_step(sent, sent.own, local)[1]

    def models(self, sent: Sent, deployed: Params) -> dict[str, Tree]:
        """The client's own model, and the mixture it is pulled to."""
        return {"personal": deployed, "mixture": sent.own} if deployed else {}

    def trace(self, state: ClientModels) -> dict[str, Tensor]:
        """Record who is drawn to whom: [client, other]."""
        return {"weights": self.attention(state)}

    def _pairs(self, heard: Tensor) -> Tensor:
        """Return 1 for two different clients that have both reported."""
        both = torch.outer(heard, heard)
        return both - torch.diag(both.diagonal())

    def _distances(self, state: ClientModels) -> Tensor:
        models = tree.flat(batchnorm.parameters(state.models))
        models = models - models.mean(0)  # distances stay, and rounding is that of the spread
        squares = models.square().sum(1)
        return (squares.unsqueeze(1) + squares - 2 * models @ models.T).clamp(min=0)


@dataclass(frozen=True, kw_only=True)
class HeurFedAMP(FedAMP):
    """FedAMP with a fixed weight for the own model and cosines for the others."""

    title: ClassVar[str] = "HeurFedAMP"
    paper: ClassVar[str] = "Huang et al. 2021, section 5"
    presets: ClassVar[dict[str, dict[str, Any]]] = {}

    self_share: float = setting(0.5, "weight of the client's own model (ξ_ii)", least=0, most=1)
    sharpness: float = setting(
        0.0,
        "factor of the cosines in their softmax (σ); 0: two over their standard deviation",
        least=0,
    )

    def attention(self, state: ClientModels) -> Tensor:
        """Return ξ [client, other]: whoever has nobody to look at keeps to itself."""
        pairs = self._pairs(state.heard)
        flat = normalize(tree.flat(batchnorm.parameters(state.models)), dim=1)
        cosines = flat @ flat.T
        factor = self.sharpness or 2 / _deviation(cosines, pairs).clamp(min=1e-6)
        # Taken from the largest of a row, which changes no share, so that nothing overflows.
        most = torch.where(pairs > 0, cosines, -1.0).amax(1, keepdim=True)
        others = tree.shares(pairs * (factor * (cosines - most).clamp(max=0)).exp())
        others = (1 - self.self_share) * others
        return others + torch.diag(1 - others.sum(1))


def _deviation(values: Tensor, pairs: Tensor) -> Tensor:
    """Return the standard deviation over some pairs."""
    count = pairs.sum().clamp(min=1)
    mean = (values * pairs).sum() / count
    return (((values - mean).square() * pairs).sum() / count).sqrt()
