"""FedFomo: clients download a few models and weigh them by what they are worth to them.

Zhang et al., "Personalized Federated Learning with First Order Model Optimization", ICLR 2021,
Eqs. 3-4. With θ the client's model before its last training, a downloaded model θ_n, or its own
trained one, weighs max(0, L(θ) − L(θ_n)) / ‖θ_n − θ‖, with L the loss on the client's validation
data; weights are brought to sum one and θ moves to θ + Σ w_n (θ_n − θ). A client without validation
data, or to whom no model is worth anything, goes on with its own.

The server remembers in P what models were worth to whom, and sends the best; now and then it sends
others (ε-greedy: one coin for an offer, in the released code one for each model of it). To P is
added each weight as Eq. 3 has it (our reading: the paper's text was not at hand to check), below
zero where a model is worse than the client's own, so that such a model is sent no more; the
released code divides these by the size of their sum first ("normalised"). "clipped" adds the
weights of Eq. 4 instead, which are never below zero: then what was harmful stands beside what was
never tried, and may be sent for ever. Lengths are over parameters; running statistics move along.
The round is turned by one step: mix what was downloaded, train, upload.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect.core import batchnorm, tree
from idiolect.core.capabilities import NewcomerMessage, NewcomerModel, StateTrace
from idiolect.core.client import Local
from idiolect.core.method import Method, Sent, Setup, setting
from idiolect.core.tree import Params, Tree


class FomoServer(NamedTuple):
    """What the server keeps: models, who has reported one, and what they were worth to whom."""

    models: Params  # [client, ...]
    heard: Tensor  # [client] 1 or 0
    worth: Tensor  # [client, other] (P)
    round: Tensor
    seed: Tensor


class OfferedModels(NamedTuple):
    """What one client downloads: models, and whether each is one."""

    models: Params  # [model, ...]
    real: Tensor  # [model] 1; 0 where there were not enough


class Weighed(NamedTuple):
    """What a client uploads: its model, and what those it was offered add to its row of P."""

    params: Params
    size: Tensor
    weights: Tensor  # [model]


class FomoState(NamedTuple):
    """What a client keeps: its model before and after its last training."""

    before: Params
    after: Params


@dataclass(frozen=True, kw_only=True)
class FedFomo(NewcomerMessage, NewcomerModel, StateTrace, Method):
    """Each client moves towards the models that lower its own validation loss."""

    title: ClassVar[str] = "FedFomo"
    paper: ClassVar[str] = "Zhang et al. 2021 (FedFomo), Eqs. 3-4"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "code": {
            "norm": "l1",
            "credit": "normalised",
            "lr": 0.1,
            "schedule": "exponential",
            "decay": 0.99,
            "batch": 50,
            "epochs": 5,
            "weight_decay": 1e-4,
        },
        "pfllib": {"lr": 0.005, "batch": 10, "most": 5, "explore": 0.0},
    }

    most: int = setting(5, "models a client weighs, its own among them (M)", least=2)
    explore: float = setting(0.3, "chance that an offer is drawn at random (ε)", least=0, most=1)
    explore_less: float = setting(0.05, "how much that chance falls in a round", least=0, most=1)
    norm: str = setting("l2", "length of the way to a model", choices=("l2", "l1"))
    credit: str = setting(
        "printed",
        "what is added to P: Eq. 3's weights, these over the size of their sum, or Eq. 4's",
        choices=("printed", "normalised", "clipped"),
    )

    @property
    def chooses(self) -> bool:
        """Validation rows weigh the others' models."""
        return True

    def init_server(self, setup: Setup) -> FomoServer:
        """Nobody has reported a model yet."""
        count = setup.clients
        return FomoServer(
            tree.repeat(setup.params, count),
            torch.zeros_like(setup.sizes),
            setup.sizes.new_zeros(count, count),
            setup.sizes.new_zeros((), dtype=torch.int64),
            setup.sizes.new_full((), setup.seed, dtype=torch.int64),
        )

    def init_personal(self, setup: Setup) -> FomoState:
        """Before the first training there is only the initial model."""
        return FomoState(setup.params, setup.params)

    def send(self, state: FomoServer, cohort: Tensor) -> Sent:
        """Offer each client some models of others."""
        chosen, real = self._chosen(state)
        return Sent(own=OfferedModels(tree.take(state.models, chosen[cohort]), real[cohort]))

    def welcome(self, state: FomoServer, cohort: Tensor) -> Sent:
        """Offer newcomers the models that were worth most to all others together."""
        value = state.worth.sum(0).masked_fill(state.heard == 0, -torch.inf)
        best = value.topk(self._offered(state)).indices
        chosen = best.repeat(len(cohort), 1)
        return Sent(own=OfferedModels(tree.take(state.models, chosen), state.heard[chosen]))

    def client_step(
        self, sent: Sent, personal: FomoState, local: Local
    ) -> tuple[Weighed, FomoState]:
        """Move towards what is worth something, train from there, report."""
        before, weights, worth = self._moved(sent.own, personal, local)
        after = self.fit(local, before)
        credit = weights if self.credit == "clipped" else worth
        if self.credit == "normalised":
            credit = worth / worth.sum().abs().clamp(min=1e-9)
        return Weighed(after, local.size, credit[:-1]), FomoState(before, after)

    def server_step(self, state: FomoServer, cohort: Tensor, reports: Weighed) -> FomoServer:
        """Take the models in, and remember what those offered were worth."""
        chosen, _ = self._chosen(state)  # the state is as it was when they were sent
        gained = torch.zeros_like(state.worth[cohort]).scatter_add(
            1, chosen[cohort], reports.weights.to(state.worth.dtype)
        )
        return FomoServer(
            tree.put(state.models, cohort, reports.params),
            state.heard.index_fill(0, cohort, 1.0),
            state.worth.index_add(0, cohort, gained),
            state.round + 1,
            state.seed,
        )

    def deploy(self, sent: Sent, personal: FomoState, local: Local) -> Params:
        """Use the mixture the client would train from next."""
        return self._moved(sent.own, personal, local)[0]

    def adapt(self, sent: Sent, personal: FomoState, local: Local) -> Params:
        """A newcomer moves towards what it is offered and trains for a round."""
        return self.fit(local, self._moved(sent.own, personal, local)[0])

    def models(self, sent: Sent, deployed: Params) -> dict[str, Tree]:
        """There are only the clients' own models."""
        return {"personal": deployed} if deployed else {}

    def trace(self, state: FomoServer) -> dict[str, Tensor]:
        """Record what was worth something to whom so far: [client, other]."""
        return {"worth": state.worth}

    def _moved(
        self, offer: OfferedModels, personal: FomoState, local: Local
    ) -> tuple[Params, Tensor, Tensor]:
        """Return θ + Σ w_n (θ_n − θ), the weights, the own model's last, and these as of Eq. 3."""
        start = personal.before
        slots = range(offer.real.shape[0])
        others = [tree.map(lambda leaf, n=n: leaf[n], offer.models) for n in slots]
        ways = [tree.sub(model, start) for model in (*others, personal.after)]
        here = self._loss(start, local)
        gains = [
            (here - self._loss(model, local)) / self._length(way)
            for model, way in zip((*others, personal.after), ways, strict=True)
        ]
        worth = torch.stack(gains) * torch.cat([offer.real, offer.real.new_ones(1)])
        worth = torch.where(worth.isfinite(), worth, torch.zeros_like(worth))
        gained = worth.clamp(min=0)
        weights = gained / gained.sum().clamp(min=1e-30)
        moved = start
        for weight, way in zip(weights.unbind(), ways, strict=True):
            moved = tree.add(moved, tree.scale(weight, way))
        return tree.where(gained.sum() > 0, moved, personal.after), weights, worth

    def _loss(self, params: Params, local: Local) -> Tensor:
        value: Tensor = local.mean(lambda batch: local.loss(params, batch), "val")
        return value

    def _length(self, way: Params) -> Tensor:
        trained = batchnorm.parameters(way)
        if self.norm == "l2":
            return tree.norm(trained).clamp(min=1e-12)
        total = torch.stack([leaf.abs().sum() for leaf in trained.values()]).sum()
        return total.clamp(min=1e-12)

    def _offered(self, state: FomoServer) -> int:
        return max(1, min(self.most, len(state.heard)) - 1)

    def _chosen(self, state: FomoServer) -> tuple[Tensor, Tensor]:
        """Choose whom each client is offered: [client, model], and which of them have reported.

        Drawn from the seed and the round for all clients at once, whoever comes.
        """
        count = len(state.heard)
        draw = torch.Generator().manual_seed(int(state.seed) * 1_000_003 + int(state.round))
        noise, dice = torch.rand(count, count, generator=draw), torch.rand(count, generator=draw)
        noise, dice = (values.to(state.worth) for values in (noise, dice))
        chance = (self.explore - self.explore_less * state.round).clamp(min=0)
        # The noise also breaks ties, of which there are only such before anything is known.
        known = state.worth + 1e-9 * noise
        score = torch.where((dice < chance).unsqueeze(1), noise, known)
        absent = (state.heard == 0).expand(count, count)
        itself = torch.eye(count, dtype=torch.bool, device=score.device)
        # Who has not reported, and the client itself, come last: the latter is never offered.
        score = score.masked_fill(absent, -torch.finfo(score.dtype).max)
        score = score.masked_fill(itself, -torch.inf)
        best = score.topk(self._offered(state), dim=1).indices
        real = (state.heard > 0).expand(count, count) & ~itself
        return best, real.gather(1, best).to(state.heard.dtype)
