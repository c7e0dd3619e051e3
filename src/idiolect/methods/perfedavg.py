"""Per-FedAvg: an initial model that adapts to each client in a step or two.

Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A
Model-Agnostic Meta-Learning Approach", NeurIPS 2020, Algorithm 1. Each step draws one batch and
deals its examples into as many parts as the variant needs. Adaptation uses training data only; the
public code that adapts on labelled test batches has no counterpart here. The server averages
clients alike, as Algorithm 1 prints it; `uniform = false` weighs them by their examples.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.func import grad

from idiolect.core import optim, tree
from idiolect.core.client import Batch, Local
from idiolect.core.method import PLAIN_STEPS, Report, Sent, setting
from idiolect.core.tree import Params, Tree
from idiolect.errors import ConfigError
from idiolect.methods.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(FedAvg):
    """Descend f(w − α∇f(w)) at every client; clients adapt w with a step of size α."""

    title: ClassVar[str] = "Per-FedAvg"
    paper: ClassVar[str] = "Fallah et al. 2020, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "pfllib": {"lr": 0.005, "batch": 10, "adapt_lr": 0.005}
    }
    unused: ClassVar[tuple[str, ...]] = (*PLAIN_STEPS, "weight_decay")

    uniform: bool = setting(True, "weigh clients alike, as printed, instead of by their examples")
    lr: float = setting(0.01, "rate of the meta step (β)", above=0)
    adapt_lr: float = setting(0.01, "rate of the adapting step (α)", above=0)
    adapt_steps: int = setting(1, "adapting steps of a client before use", least=1, deploy=True)
    order: str = setting(
        "first",
        "first-order, Hessian-free, or exact second-order meta gradient",
        choices=("first", "hessian-free", "exact"),
    )
    delta: float = setting(1e-3, "finite-difference step of the Hessian-free form (δ)", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch < self._parts:
            raise ConfigError(
                f"PerFedAvg: batch is {self.batch}, but order = {self.order!r} deals each batch "
                f"into {self._parts} parts; expected at least {self._parts}"
            )

    def client_step(self, sent: Sent, personal: Tree, local: Local) -> tuple[Report, Tree]:
        """Take meta steps from the received model."""

        def step(w: Params, batch: Batch) -> Params:
            moved: Params = tree.axpy(-self.lr, self._meta_gradient(w, batch, local), w)
            return moved

        w = local.scan(step, sent.shared, batch=self.batch, epochs=self.epochs, steps=self.steps)
        return Report(w, local.size), personal

    def deploy(self, sent: Sent, personal: Tree, local: Local) -> Params:
        """Adapt the global model on training batches."""
        sgd = optim.sgd(self.adapt_lr)
        return local.fit(local.loss, sent.shared, sgd, batch=self.batch, steps=self.adapt_steps)

    @property
    def _parts(self) -> int:
        return 3 if self.order == "hessian-free" else 2

    def _meta_gradient(self, w: Params, batch: Batch, local: Local) -> Params:
        """∇F(w) with F(w) = f(w − α∇f(w; first part); second part)."""
        first, second, *third = _deal(batch, self._parts)
        if self.order == "exact":

            def adapted_loss(w: Params, second: Batch) -> Tensor:
                return local.loss(tree.axpy(-self.adapt_lr, grad(local.loss)(w, first), w), second)

            return local.gradient(adapted_loss, w, second)
        adapted = tree.axpy(-self.adapt_lr, local.gradient(local.loss, w, first), w)
        gradient = local.gradient(local.loss, adapted, second)
        if self.order == "first":
            return gradient
        ahead = local.gradient(local.loss, tree.axpy(self.delta, gradient, w), third[0])
        behind = local.gradient(local.loss, tree.axpy(-self.delta, gradient, w), third[0])
        bend = tree.scale(1 / (2 * self.delta), tree.sub(ahead, behind))  # ∇²f · gradient
        corrected: Params = tree.axpy(-self.adapt_lr, bend, gradient)
        return corrected


def _deal(batch: Batch, parts: int) -> list[Batch]:
    """Deal examples out in turn, so that a short batch leaves no part without any."""
    return [
        batch._replace(
            x=batch.x[part::parts],
            y=batch.y[part::parts],
            weight=batch.weight[part::parts],
            row=batch.row[part::parts],
        )
        for part in range(parts)
    ]
