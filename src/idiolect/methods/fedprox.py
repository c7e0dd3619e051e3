"""FedProx: FedAvg whose clients are held near the model they received.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, Algorithm 2. The inexact
solution of the paper is the given number of epochs or steps.

The preset `pfllib` has the rate and batch of PFLlib; its default μ = 0 would make this FedAvg.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from idiolect.core import tree
from idiolect.core.client import Batch, Local
from idiolect.core.method import Report, Sent, setting
from idiolect.core.tree import Params, Tree
from idiolect.methods.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """FedAvg with a proximal term pull/2 · ‖w − w_received‖² in the local loss."""

    title: ClassVar[str] = "FedProx"
    paper: ClassVar[str] = "Li et al. 2020, Algorithm 2"
    presets: ClassVar[dict[str, dict[str, Any]]] = {"pfllib": {"lr": 0.005, "batch": 10}}

    pull: float = setting(0.1, "strength of the pull to the received model (μ)", least=0)

    def client_step(self, sent: Sent, personal: Tree, local: Local) -> tuple[Report, Tree]:
        """Train near the received model and report the result."""

        def loss(params: Params, batch: Batch) -> Tensor:
            return local.loss(params, batch) + self.pull / 2 * tree.sqdist(params, sent.shared)

        return Report(self.fit(local, sent.shared, loss), local.size), personal
