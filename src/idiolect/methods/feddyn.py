"""FedDyn: a penalty that changes with the rounds, so that local optima agree with the global one.

Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, Algorithm 1. A client
minimises f(θ) − ⟨g, θ⟩ + α/2 ‖θ − θ_received‖², then g ← g − α (θ − θ_received): at an optimum g is
the gradient of f there. The server keeps h, which falls by α/m times the sum of θ − θ_received over
the cohort, m the number of all clients; the model is the cohort's mean, each alike, less h/α.
Weighed by examples, clients are so in h too: with h the plain mean of g training would settle where
clients that count alike want it.
PFLlib (d832e76) has α/2 ‖θ − θ_received‖ without the square: its pull has the same size however far
the model is, and g is no longer a gradient. Running statistics are averaged, nothing else.

Written from notes and released code: the paper's text was not at hand to check equation numbers.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from idiolect.core import batchnorm, tree
from idiolect.core.client import Batch, Local
from idiolect.core.method import (
    Method,
    Report,
    Sent,
    Setup,
    alike,
    setting,
    towards,
)
from idiolect.core.tree import Params, Tree


class Dynamic(NamedTuple):
    """What the server keeps: the model and h."""

    params: Params
    drift: Params
    clients: Tensor  # how many have examples (m), or what they weigh together


@dataclass(frozen=True, kw_only=True)
class FedDyn(Method):
    """Clients minimise f(θ) − ⟨g, θ⟩ + α/2 · ‖θ − received‖²; the server undoes drifts."""

    title: ClassVar[str] = "FedDyn"
    paper: ClassVar[str] = "Acar et al. 2021, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"lr": 0.1, "batch": 50, "epochs": 5, "weight_decay": 1e-3, "clip": 10.0},
        "pfllib": {"lr": 0.005, "batch": 10, "alpha": 1.0},
    }

    uniform: bool = setting(True, "weigh clients alike, as printed, instead of by their examples")
    server_lr: float = setting(1.0, "how far the server moves towards its new model", above=0)
    alpha: float = setting(0.1, "strength of the penalty (α)", above=0)

    def init_server(self, setup: Setup) -> Dynamic:
        """Nothing has drifted."""
        still = tree.zeros_like(batchnorm.parameters(setup.params))
        return Dynamic(setup.params, still, self._weights(setup.sizes).sum())

    def init_personal(self, setup: Setup) -> Params:
        """The own gradient is taken for zero."""
        zeros: Params = tree.zeros_like(batchnorm.parameters(setup.params))
        return zeros

    def client_step(self, sent: Sent, personal: Params, local: Local) -> tuple[Report, Params]:
        """Minimise the penalised loss, report the model and keep the gradient there."""
        received = {name: sent.shared.params[name] for name in personal}

        def loss(params: Params, batch: Batch) -> Tensor:
            own = {name: params[name] for name in personal}
            pull = self.alpha / 2 * tree.sqdist(own, received)
            return local.loss(params, batch) - tree.dot(personal, own) + pull

        trained = self.fit(local, sent.shared.params, loss)
        moved = {name: trained[name] - old for name, old in received.items()}
        return Report(trained, local.size), tree.axpy(-self.alpha, moved, personal)

    def server_step(self, state: Dynamic, cohort: Tensor, reports: Report) -> Dynamic:
        """Take the cohort's mean, and from it what clients drifted in all rounds."""
        weight = self._weights(reports.size)
        moved = {n: reports.params[n] - state.params[n] for n in state.drift}
        share = -self.alpha * weight.sum() / state.clients
        drift = tree.axpy(share, tree.mean(moved, weight), state.drift)
        mean = tree.mean(reports.params, weight)
        params = {n: v - drift[n] / self.alpha if n in drift else v for n, v in mean.items()}
        return Dynamic(towards(state.params, params, self.server_lr), drift, state.clients)

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
