"""PFML: regularised mutual learning of two models at each client.

Yang, Tian, Zhang, "Regularized Mutual Learning for Personalized Federated Learning", ACML 2021,
Algorithm 1. Readings:

- m_prev is the client's auxiliary model of its last round (the text); the line of Algorithm 1 that
  resets it to the global model is `aux_init = "reset"`. The first time it is the global model, or
  random where the architectures differ;
- the personalisation steps are pulled to m_prev and w^t, where the round began; pFedMe, whose code
  the authors built on, pulls to where the batch began: `home = "batch"`;
- Eq. 8's sign is wrong: the gradient of λ/2 · ‖m_prev − m‖² is λ(m − m_prev), as used here;
- each model learns KL(peer ‖ self) at T = 1 with the peer constant; both step from the same old
  values;
- the personal model is θ*, the result of the K personalisation steps; m is scored beside it.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from idiolect.core import tree
from idiolect.core.capabilities import NewcomerModel
from idiolect.core.client import Batch, Local
from idiolect.core.method import PLAIN_STEPS, Report, Sent, Setup, setting
from idiolect.core.tree import Params, Tree
from idiolect.errors import MethodError
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.fml import GlobalModel, Peer, PrivateModel, logits_of, mutual_gradients


class PfmlState(NamedTuple):
    """What never leaves a client: its auxiliary and personal models."""

    auxiliary: Params  # m
    personal: Params  # θ*
    started: Tensor  # 1 after the first round


class PfmlCarry(NamedTuple):
    """A client's models while it trains: w with the global architecture, m and θ* with its own."""

    w: Params
    m: Params
    theta: Params


@dataclass(frozen=True, kw_only=True)
class PFML(NewcomerModel, FedAvg):
    """A local and an auxiliary model teach each other; the local one is averaged."""

    title: ClassVar[str] = "PFML"
    paper: ClassVar[str] = "Yang et al. 2021, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    unused: ClassVar[tuple[str, ...]] = PLAIN_STEPS

    lr: float = setting(0.01, "rate of the outer updates (η)", above=0)
    inner_lr: float = setting(
        0.01, "rate of the personalisation steps; inner_lr · pull must stay below 2", above=0
    )
    inner_steps: int = setting(3, "personalisation steps for each batch (K)", least=1)
    pull: float = setting(15.0, "strength of the pulls to w and to m_prev (λ)", least=0)
    share: float = setting(1.0, "weight of the mutual KL; 0: none", least=0)
    server_lr: float = setting(1.0, "how far the server moves towards the average (β)", above=0)
    uniform: bool = setting(True, "weigh clients alike instead of by their examples")
    home: str = setting(
        "round",
        "where the personalisation steps are pulled to: the models with which the round or the "
        "batch began",
        choices=("round", "batch"),
    )
    aux_init: str = setting(
        "persist", "keep m between rounds, or reset it to w", choices=("persist", "reset")
    )

    def init_personal(self, setup: Setup) -> PfmlState:
        """The auxiliary starts with its own architecture."""
        if self.aux_init == "reset" and not _alike(setup.auxiliary, setup.params):
            raise MethodError(
                "aux_init = 'reset' copies the global model into the auxiliary one, but their "
                "architectures differ; use aux_init = 'persist'"
            )
        return PfmlState(setup.auxiliary, setup.auxiliary, setup.sizes.new_zeros(()))

    def client_step(
        self, sent: Sent, personal: PfmlState, local: Local
    ) -> tuple[Report, PfmlState]:
        """Train both models on the same batches; report the local one."""
        start = self._start(sent, personal)

        def step(now: PfmlCarry, batch: Batch) -> PfmlCarry:
            # Personalisation steps on copies, each pulled home; the first has the outer gradients.
            home = start if self.home == "round" else now
            theta, w_hat = now.m, now.w
            first = self._gradients(theta, w_hat, batch, local)
            for k in range(self.inner_steps):
                gradient_m, gradient_w = self._gradients(theta, w_hat, batch, local) if k else first
                theta = self._moved(theta, self.inner_lr, gradient_m, home.m)
                w_hat = self._moved(w_hat, self.inner_lr, gradient_w, home.w)
            gradient_m, gradient_w = first
            return PfmlCarry(
                self._moved(now.w, self.lr, gradient_w, w_hat),
                self._moved(now.m, self.lr, gradient_m, theta),
                theta,
            )

        end = local.scan(step, start, batch=self.batch, epochs=self.epochs, steps=self.steps)
        own = PfmlState(end.m, end.theta, personal.started.new_ones(()))
        return Report(end.w, local.size), own

    def deploy(self, sent: Sent, personal: PfmlState, local: Local) -> PfmlState:
        """Use θ*."""
        return personal

    def adapt(self, sent: Sent, personal: PfmlState, local: Local) -> PfmlState:
        """A newcomer does the client's part of one round."""
        return self.client_step(sent, personal, local)[1]

    def models(self, sent: Sent, deployed: PfmlState) -> dict[str, Tree]:
        """θ*, m and w."""
        scored: dict[str, Tree] = {"global": GlobalModel(sent.shared)}
        if deployed:
            scored |= {"personal": PrivateModel(deployed.personal)}
            scored |= {"auxiliary": PrivateModel(deployed.auxiliary)}
        return scored

    def predict(self, model: Tree, x: Tensor, local: Local) -> Tensor:
        """Run a model on the architecture it belongs to."""
        return logits_of(model, x, local)

    def _start(self, sent: Sent, personal: PfmlState) -> PfmlCarry:
        w, m = sent.shared, personal.auxiliary
        if self.aux_init == "reset":
            m = w
        elif _alike(m, w):
            m = tree.where(personal.started > 0, m, w)
        return PfmlCarry(w, m, m)

    def _gradients(self, m: Params, w: Params, batch: Batch, local: Local) -> tuple[Params, Params]:
        """Gradients of f(own) + share · KL(peer ‖ own), of both models at the same values."""

        def loss(own: Params, logits: Tensor, taught: Tensor) -> Tensor:
            total = local.task.loss(logits, batch.y, batch.weight)
            if self.share:
                total = total + self.share * local.task.divergence(logits, taught, batch.weight)
            if self.weight_decay:
                total = total + self.weight_decay / 2 * tree.dot(own, own)
            return total

        return mutual_gradients(Peer(m, "auxiliary", loss), Peer(w, "main", loss), batch, local)

    def _moved(self, model: Params, rate: float, gradient: Params, target: Params) -> Params:
        """Model − rate · (gradient + λ(model − target))."""
        pulled = tree.axpy(self.pull, tree.sub(model, target), gradient) if self.pull else gradient
        moved: Params = tree.axpy(-rate, pulled, model)
        return moved


def _alike(left: Params, right: Params) -> bool:
    return {name: leaf.shape for name, leaf in left.items()} == {
        name: leaf.shape for name, leaf in right.items()
    }
