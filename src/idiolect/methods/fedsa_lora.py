"""FedSA-LoRA: A is shared, B stays personal.

Guo et al., "Selective Aggregation for Low-Rank Adaptation in Federated Learning", ICLR 2025
(arXiv 2410.01463), equation 4 and figure 1c: both matrices are trained, A is averaged, B never
leaves. A head that is trained beside them stays personal too, as in the authors' code
(`local_param: [lora_B, classifier]`; the paper does not say).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from idiolect.core import lora_pairs, tree
from idiolect.core.capabilities import NewcomerModel
from idiolect.core.client import Batch, Local
from idiolect.core.method import Report, Sent, Setup, setting
from idiolect.core.tree import Params, Tree
from idiolect.methods.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedSALoRA(NewcomerModel, FedAvg):
    """FedAvg of LoRA's A; each client keeps its B, and its head."""

    title: ClassVar[str] = "FedSA-LoRA"
    paper: ClassVar[str] = "Guo et al. 2025, figure 1c"
    presets: ClassVar[dict[str, dict[str, Any]]] = {}

    share_head: bool = setting(False, "average what is trained beside LoRA too, such as a head")
    newcomer_epochs: int = setting(
        10, "passes in which a newcomer trains its B", least=1, deploy=True
    )

    def init_server(self, setup: Setup) -> Params:
        """The server holds A."""
        lora_pairs.refuse_without(setup.params, self.title)
        return tree.split(setup.params, self._shared)[0]

    def init_personal(self, setup: Setup) -> Params:
        """A client holds B."""
        return tree.split(setup.params, self._shared)[1]

    def client_step(self, sent: Sent, personal: Params, local: Local) -> tuple[Report, Params]:
        """Train A and B; report A, keep B."""
        trained = self.fit(local, {**sent.shared, **personal})
        own, shared = tree.split(trained, personal.__contains__)
        return Report(shared, local.size), own

    def deploy(self, sent: Sent, personal: Params, local: Local) -> Params:
        """Use the own B with the shared A."""
        return {**sent.shared, **personal}

    def adapt(self, sent: Sent, personal: Params, local: Local) -> Params:
        """A newcomer's B is zero: train it with A fixed."""

        def loss(own: Params, batch: Batch) -> Tensor:
            return local.loss({**sent.shared, **own}, batch)

        own = self.fit(local, personal, loss, lr=self.lr, epochs=self.newcomer_epochs)
        return {**sent.shared, **own}

    def models(self, sent: Sent, deployed: Params) -> dict[str, Tree]:
        """A alone predicts nothing: there is no global model."""
        return {"personal": deployed}

    def _shared(self, name: str) -> bool:
        return lora_pairs.is_down(name) or (self.share_head and not lora_pairs.is_up(name))
