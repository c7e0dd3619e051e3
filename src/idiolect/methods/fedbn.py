"""FedBN: normalisation layers stay personal.

Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021,
Algorithm 1. What stays local is the scale and shift of every normalisation layer, and with batch
normalisation (`norm = "batch"`, the paper's) its running statistics too. The rest is averaged by
examples, as PFLlib does; the algorithm and the authors' code weigh clients alike, `uniform = true`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from idiolect.core import tree
from idiolect.core.capabilities import NewcomerModel
from idiolect.core.client import Batch, Local
from idiolect.core.method import Report, Sent, Setup, setting
from idiolect.core.tree import Params, Tree
from idiolect.errors import MethodError
from idiolect.methods.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedBN(NewcomerModel, FedAvg):
    """FedAvg of everything but the normalisation layers, which each client keeps."""

    title: ClassVar[str] = "FedBN"
    paper: ClassVar[str] = "Li et al. 2021, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {"pfllib": {"lr": 0.005, "batch": 10}}

    newcomer_epochs: int = setting(
        10, "passes in which a newcomer fits its normalisation", least=1, deploy=True
    )

    def init_server(self, setup: Setup) -> Params:
        """The server holds all but the normalisation."""
        return self._parts(setup)[1]

    def init_personal(self, setup: Setup) -> Params:
        """A client holds its normalisation."""
        return self._parts(setup)[0]

    def client_step(self, sent: Sent, personal: Params, local: Local) -> tuple[Report, Params]:
        """Train the whole network; keep its normalisation, report the rest."""
        trained = self.fit(local, {**sent.shared, **personal})
        norms, rest = tree.split(trained, personal.__contains__)
        return Report(rest, local.size), norms

    def deploy(self, sent: Sent, personal: Params, local: Local) -> Params:
        """Put the own normalisation into the shared network."""
        return {**sent.shared, **personal}

    def adapt(self, sent: Sent, personal: Params, local: Local) -> Params:
        """A newcomer fits its normalisation to the fixed rest."""

        def loss(norms: Params, batch: Batch) -> Tensor:
            return local.loss({**sent.shared, **norms}, batch)

        norms = self.fit(local, personal, loss, lr=self.lr, epochs=self.newcomer_epochs)
        return {**sent.shared, **norms}

    def models(self, sent: Sent, deployed: Params) -> dict[str, Tree]:
        """Without normalisation there is no whole global model."""
        return {"personal": deployed}

    def _parts(self, setup: Setup) -> tuple[Params, Params]:
        if not setup.norms:
            raise MethodError(
                "the network has no normalisation layer, so FedBN would be FedAvg; add one such as "
                "nn.GroupNorm, or use fedavg"
            )
        return tree.split(setup.params, setup.norms.__contains__)
