"""pFedMe: personal models on the Moreau envelope of each client's loss.

Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020,
Algorithm 1. The personal model scored is θ. (The authors' code scores w by an aliasing slip, see
CharlieDinh/pFedMe issues 3 and 5; in PFLlib, d832e76, what is scored has become the received w.)
The server averages clients alike, as Algorithm 1 prints it; their code weighs them by their
examples (`uniform = false`).

The preset `pfllib` leaves `server_lr` as it is here; PFLlib's default β = 0 freezes the
global model.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from idiolect.core import tree
from idiolect.core.capabilities import NewcomerModel
from idiolect.core.client import Batch, Local
from idiolect.core.method import PLAIN_STEPS, Report, Sent, Setup, setting
from idiolect.core.tree import Params, Tree
from idiolect.methods.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class PFedMe(NewcomerModel, FedAvg):
    """θ nearly minimises f(θ) + pull/2 · ‖θ − w‖²; w steps towards θ; the server mixes w."""

    title: ClassVar[str] = "pFedMe"
    paper: ClassVar[str] = "Dinh et al. 2020, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "pfllib": {"lr": 0.005, "batch": 10, "inner_lr": 0.01, "inner_steps": 5, "pull": 1.0}
    }
    unused: ClassVar[tuple[str, ...]] = PLAIN_STEPS

    uniform: bool = setting(True, "weigh clients alike, as printed, instead of by their examples")
    lr: float = setting(0.01, "rate at which w follows θ (η)", above=0)
    inner_lr: float = setting(
        0.01, "learning rate of θ; inner_lr · pull must stay below 2", above=0
    )
    inner_steps: int = setting(5, "steps on θ for each batch (K)", least=1)
    pull: float = setting(15.0, "strength of the pull to w (λ)", least=0)
    server_lr: float = setting(1.0, "how far the server moves towards the average (β)", above=0)
    warm: bool = setting(True, "start θ from the last batch's θ, as the authors do, not from w")

    def init_personal(self, setup: Setup) -> Params:
        """θ starts as the initial model."""
        return setup.params

    def client_step(self, sent: Sent, personal: Params, local: Local) -> tuple[Report, Params]:
        """For each batch find θ near w, then move w towards θ."""

        def step(carry: tuple[Params, Params], batch: Batch) -> tuple[Params, Params]:
            w, theta = carry
            theta = self._nearby(theta if self.warm else w, w, batch, local)
            return tree.axpy(-self.lr * self.pull, tree.sub(w, theta), w), theta

        w, theta = local.scan(
            step, (sent.shared, sent.shared), batch=self.batch, epochs=self.epochs, steps=self.steps
        )
        return Report(w, local.size), theta

    def deploy(self, sent: Sent, personal: Params, local: Local) -> Params:
        """Use θ."""
        return personal

    def adapt(self, sent: Sent, personal: Params, local: Local) -> Params:
        """A newcomer does the client's part of one round to find its θ."""
        return self.client_step(sent, personal, local)[1]

    def models(self, sent: Sent, deployed: Params) -> dict[str, Tree]:
        """θ and w."""
        return {"personal": deployed, "global": sent.shared}

    def _nearby(self, theta: Params, w: Params, batch: Batch, local: Local) -> Params:
        """Do K steps on f(θ) + pull/2 · ‖θ − w‖² with one batch."""

        def objective(theta: Params, batch: Batch) -> Tensor:
            near = local.loss(theta, batch) + self.pull / 2 * tree.sqdist(theta, w)
            if self.weight_decay:
                near = near + self.weight_decay / 2 * tree.dot(theta, theta)
            return near

        for _ in range(self.inner_steps):
            theta = tree.axpy(-self.inner_lr, local.gradient(objective, theta, batch), theta)
        return theta
