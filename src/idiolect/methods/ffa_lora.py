"""FFA-LoRA: A is frozen at a common random start, B is trained and averaged.

Sun et al., "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024 (arXiv 2403.12313),
section 4. With one A for all, the mean of the products is the product of the mean: Σ pᵢ (Bᵢ A) =
(Σ pᵢ Bᵢ) A, so nothing is lost in averaging, noise enters linearly, and half as much is sent.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from idiolect.core import lora_pairs, tree
from idiolect.core.client import Batch, Local
from idiolect.core.method import Report, Sent, Setup
from idiolect.core.tree import Params, Tree
from idiolect.methods.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FFALoRA(FedAvg):
    """FedAvg of LoRA's B under an A that nobody trains or sends."""

    title: ClassVar[str] = "FFA-LoRA"
    paper: ClassVar[str] = "Sun et al. 2024, section 4"
    presets: ClassVar[dict[str, dict[str, Any]]] = {}

    def init_server(self, setup: Setup) -> Params:
        """The server holds B, and what is trained beside LoRA."""
        lora_pairs.refuse_without(setup.params, self.title)
        return tree.split(setup.params, lora_pairs.is_down)[1]

    def init_personal(self, setup: Setup) -> Params:
        """Every client draws the same A from the run's seed; it never changes."""
        return tree.split(setup.params, lora_pairs.is_down)[0]

    def client_step(self, sent: Sent, personal: Params, local: Local) -> tuple[Report, Params]:
        """Train B with A fixed, and report it."""

        def loss(up: Params, batch: Batch) -> Tensor:
            return local.loss({**up, **personal}, batch)

        return Report(self.fit(local, sent.shared, loss), local.size), personal

    def deploy(self, sent: Sent, personal: Params, local: Local) -> Params:
        """Put the averaged B on A."""
        return {**sent.shared, **personal}

    def models(self, sent: Sent, deployed: Params) -> dict[str, Tree]:
        """All clients deploy the same model, which the server, without A, does not hold."""
        return {"personal": deployed}
