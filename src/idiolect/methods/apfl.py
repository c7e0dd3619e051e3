"""APFL: a learned mixture of a personal and the global model.

Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", 2020, Algorithm 1. The mixture is
αv + (1 − α)w with w the client's own copy of the global model; v keeps its own parameters. We weigh
clients by their examples; `uniform = true` is the mean as printed. The authors' code
(MLOPTPSU/FedTorch ab8068d) weighs them alike, mixes logits rather than parameters, and moves α once
a round, at its first batch, where ours does so at every batch; for ∇f(v̄) it takes the mixture of
the gradients at v and w, to whose product with v − w it adds 0.02 α. PFLlib (d832e76) has that step
at every batch, trains v on its own loss, outside the mixture, and overwrites v by the mixture at
the end of each round.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from idiolect.core import tree
from idiolect.core.capabilities import Facts, NewcomerModel
from idiolect.core.client import Batch, Local
from idiolect.core.method import Report, Sent, Setup, setting
from idiolect.core.tree import Params, Tree
from idiolect.methods.fedavg import FedAvg


class ApflState(NamedTuple):
    """The personal model, its weight, and the mixture at the end of the client's last round."""

    v: Params
    weight: Tensor  # α
    mixture: Params


class ApflCarry(NamedTuple):
    """What a client trains in a round."""

    w: Params
    v: Params
    weight: Tensor
    w_memory: Tree
    v_memory: Tree


@dataclass(frozen=True, kw_only=True)
class APFL(Facts, NewcomerModel, FedAvg):
    """Train w for the server, v inside the mixture, and the weight by its own gradient."""

    title: ClassVar[str] = "APFL"
    paper: ClassVar[str] = "Deng et al. 2020, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "pfllib": {"lr": 0.005, "batch": 10, "weight": 1.0, "weight_lr": 0.005}
    }

    weight: float = setting(0.5, "initial weight of the personal model (α)", least=0, most=1)
    weight_lr: float = setting(0.01, "learning rate of the weight; 0 keeps it", least=0)

    def init_personal(self, setup: Setup) -> ApflState:
        """The personal model v starts as the initial one."""
        return ApflState(setup.params, setup.sizes.new_full((), self.weight), setup.params)

    def client_step(
        self, sent: Sent, personal: ApflState, local: Local
    ) -> tuple[Report, ApflState]:
        """Step w, v and the weight on each batch."""
        optimiser = self.local_optimiser(local)

        def step(now: ApflCarry, batch: Batch) -> ApflCarry:
            w, w_memory = optimiser.step(
                now.w, local.gradient(local.loss, now.w, batch), now.w_memory
            )
            gradient = local.gradient(local.loss, _mix(now.weight, now.v, now.w), batch)
            # d/dv f(αv + (1-α)w) = α ∇f, d/dα = ⟨v - w, ∇f⟩.
            v, v_memory = optimiser.step(now.v, tree.scale(now.weight, gradient), now.v_memory)
            turn = tree.dot(tree.sub(now.v, now.w), gradient)
            weight = (now.weight - self.weight_lr * turn).clamp(0, 1)
            return ApflCarry(w, v, weight, w_memory, v_memory)

        start = ApflCarry(
            sent.shared,
            personal.v,
            personal.weight,
            optimiser.init(sent.shared),
            optimiser.init(personal.v),
        )
        end = local.scan(step, start, batch=self.batch, epochs=self.epochs, steps=self.steps)
        own = ApflState(end.v, end.weight, _mix(end.weight, end.v, end.w))
        return Report(end.w, local.size), own

    def deploy(self, sent: Sent, personal: ApflState, local: Local) -> ApflState:
        """Use the mixture."""
        return personal

    def adapt(self, sent: Sent, personal: ApflState, local: Local) -> ApflState:
        """A newcomer starts v from the global model and does one round."""
        return self.client_step(sent, personal._replace(v=sent.shared), local)[1]

    def models(self, sent: Sent, deployed: ApflState) -> dict[str, Tree]:
        """The mixture and the global model."""
        scored: dict[str, Tree] = {"global": sent.shared}
        return {"personal": deployed.mixture, **scored} if deployed else scored

    def facts(self, deployed: ApflState) -> dict[str, Tensor]:
        """How much of the personal model each client ended with."""
        return {"weight": deployed.weight}


def _mix(weight: Tensor, v: Params, w: Params) -> Params:
    mixed: Params = tree.map(lambda own, common: weight * own + (1 - weight) * common, v, w)
    return mixed
