"""SCAFFOLD: local steps corrected by control variates.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
Algorithm 1, option II. A client's step goes along g − c_i + c, where c_i is an estimate of its own
gradient and c of everyone's; after K steps from x to y it keeps c_i − c + (x − y) / (K η). The
server moves x by the mean of y − x, each client alike, and c by the sum of the changes of c_i over
the number N of all clients. Weighed by examples, they are so in both: with c the plain mean of c_i
training would settle where clients that count alike want it. Steps are plain: momentum would make
(x − y) / (K η) no mean of gradients. Running statistics of batch normalisation have no control
variate.

Written from notes and released code: the paper's text was not at hand to check equation numbers.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from idiolect.core import batchnorm, optim, tree
from idiolect.core.client import Batch, Local
from idiolect.core.method import (
    PLAIN_STEPS,
    Method,
    Sent,
    Setup,
    alike,
    setting,
    towards,
)
from idiolect.core.tree import Params, Tree


class Controlled(NamedTuple):
    """What the server keeps and sends: the model x and the control variate c."""

    params: Params
    control: Params
    clients: Tensor  # how many have examples (N), or what they weigh together


class ControlReport(NamedTuple):
    """What a client uploads: its model y, how its control variate changed, its examples."""

    params: Params
    change: Params
    size: Tensor


@dataclass(frozen=True, kw_only=True)
class Scaffold(Method):
    """FedAvg whose clients correct every step by how their gradients differ from everyone's."""

    title: ClassVar[str] = "SCAFFOLD"
    paper: ClassVar[str] = "Karimireddy et al. 2020, Algorithm 1"
    unused: ClassVar[tuple[str, ...]] = PLAIN_STEPS
    presets: ClassVar[dict[str, dict[str, Any]]] = {"pfllib": {"lr": 0.005, "batch": 10}}

    uniform: bool = setting(True, "weigh clients alike, as printed, instead of by their examples")
    server_lr: float = setting(1.0, "how far the server moves towards the average (η_g)", above=0)

    def init_server(self, setup: Setup) -> Controlled:
        """Nothing is corrected at first."""
        control = tree.zeros_like(batchnorm.parameters(setup.params))
        return Controlled(setup.params, control, self._weights(setup.sizes).sum())

    def init_personal(self, setup: Setup) -> Params:
        """The own control variate starts at zero."""
        zeros: Params = tree.zeros_like(batchnorm.parameters(setup.params))
        return zeros

    def client_step(self, sent: Sent, personal: Params, local: Local) -> tuple[Tree, Params]:
        """Take corrected steps; report the model and how the own control variate changed."""
        correction = tree.sub(sent.shared.control, personal)
        plain = optim.sgd(self.lr, weight_decay=self.weight_decay)

        def step(carry: tuple[Params, Tensor], batch: Batch) -> tuple[Params, Tensor]:
            params, taken = carry
            grads = local.gradient(local.loss, params, batch)
            corrected = {n: g + correction[n] if n in correction else g for n, g in grads.items()}
            return plain.step(params, corrected, ())[0], taken + 1

        trained, taken = local.scan(
            step,
            (sent.shared.params, local.size * 0),
            batch=self.batch,
            epochs=self.epochs,
            steps=self.steps,
        )
        pace = 1 / (taken.clamp(min=1) * self.lr)
        change = {
            name: pace * (sent.shared.params[name] - trained[name]) - all_of
            for name, all_of in sent.shared.control.items()
        }
        return ControlReport(trained, change, local.size), tree.add(personal, change)

    def server_step(self, state: Controlled, cohort: Tensor, reports: ControlReport) -> Controlled:
        """Move the model by the mean over the cohort, the control variate by that over all."""
        weight = self._weights(reports.size)
        params = towards(state.params, tree.mean(reports.params, weight), self.server_lr)
        shares = weight.unsqueeze(0) / state.clients
        moved = tree.map(lambda leaf: leaf[0], tree.mixed(shares, reports.change))
        return Controlled(params, tree.add(state.control, moved), state.clients)

    def deploy(self, sent: Sent, personal: Params, local: Local) -> Params:
        """Use the global model."""
        params: Params = sent.shared.params
        return params

    def models(self, sent: Sent, deployed: Params) -> dict[str, Tree]:
        """One model for all."""
        return {"personal": deployed, "global": sent.shared.params}

    def _weights(self, size: Tensor) -> Tensor:
        """Weigh clients alike, or by their examples."""
        return alike(size) if self.uniform else size
