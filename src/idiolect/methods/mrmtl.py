"""MR-MTL: every client has its own model, held near the mean of all.

Liu, Hu, Wu, Smith, "On Privacy and Personalization in Cross-Silo Federated Learning", NeurIPS 2022,
Algorithm 1: client k minimises f_k(w_k) + λ/2 ‖w_k − w̄‖² from its own w_k, and reports it; the
server takes the mean, each client alike. λ = 0 is local training; a large λ comes near FedAvg. It
is Ditto without the second, global training: half the work, and the mean is of personal models. A
newcomer starts from the mean.

Written from notes and released code: the paper's text was not at hand to check equation numbers.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from idiolect.core import tree
from idiolect.core.capabilities import NewcomerModel
from idiolect.core.client import Batch, Local
from idiolect.core.method import Report, Sent, Setup, setting
from idiolect.core.tree import Params
from idiolect.methods.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class MRMTL(NewcomerModel, FedAvg):
    """Clients train their own models with a pull/2 · ‖w − mean‖² towards the mean of all."""

    title: ClassVar[str] = "MR-MTL"
    paper: ClassVar[str] = "Liu et al. 2022, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {}

    uniform: bool = setting(True, "weigh clients alike, as printed, instead of by their examples")
    pull: float = setting(1.0, "strength of the pull to the mean (λ)", least=0)

    def init_personal(self, setup: Setup) -> Params:
        """The own model starts as the initial one."""
        return setup.params

    def client_step(self, sent: Sent, personal: Params, local: Local) -> tuple[Report, Params]:
        """Train the own model near the mean, report it and keep it."""

        def loss(own: Params, batch: Batch) -> Tensor:
            return local.loss(own, batch) + self.pull / 2 * tree.sqdist(own, sent.shared)

        own = self.fit(local, personal, loss)
        return Report(own, local.size), own

    def deploy(self, sent: Sent, personal: Params, local: Local) -> Params:
        """Use the own model."""
        return personal

    def adapt(self, sent: Sent, personal: Params, local: Local) -> Params:
        """A newcomer trains for a round from the mean."""
        return self.client_step(sent, sent.shared, local)[1]
