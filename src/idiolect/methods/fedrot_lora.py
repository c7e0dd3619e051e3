"""FedRot-LoRA: clients turn their A and B towards the common ones before these are averaged.

Zhang et al., "FedRot-LoRA: Mitigating Rotational Misalignment in Federated LoRA", ICML 2026 (arXiv
2602.23638), section 4. For any orthogonal R, (B R)(Rᵀ A) = B A: equal products can have factors
that cancel when they are averaged. Each client takes the R that brings its A (in even rounds) or
its B (in odd ones) nearest to what it received, an orthogonal Procrustes problem of rank × rank.
Of the two ways to average without that error this one fits a frozen base; FLoRA's stacking (Wang et
al. 2024, arXiv 2409.05976) adds the sum of all products to the base in every round, and a base that
is shared and never sent cannot change.

The authors' code turns a reflection (det R = −1) back into a rotation before it is used; a
reflection keeps the product as well, and the turned one is no longer the nearest, so it is left
here.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from idiolect.core import lora_pairs
from idiolect.core.client import Local
from idiolect.core.method import Report, Sent, Setup, setting
from idiolect.core.tree import Params, Tree
from idiolect.methods.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedRotLoRA(FedAvg):
    """FedAvg of LoRA whose factors each client first aligns with those it received."""

    title: ClassVar[str] = "FedRot-LoRA"
    paper: ClassVar[str] = "Zhang et al. 2026, section 4"
    presets: ClassVar[dict[str, dict[str, Any]]] = {}

    strength: float = setting(1.0, "how far factors are turned (λ); 0: not at all", least=0, most=1)

    def init_server(self, setup: Setup) -> Params:
        """The server holds both matrices."""
        lora_pairs.refuse_without(setup.params, self.title)
        return setup.params

    def client_step(self, sent: Sent, personal: Tree, local: Local) -> tuple[Report, Tree]:
        """Train, align, report."""
        trained = dict(self.fit(local, sent.shared))
        for down, up in lora_pairs.pairs(trained):
            a, b = (trained[name].flatten(1) for name in (down, up))
            common_a, common_b = (sent.shared[name].flatten(1) for name in (down, up))
            # R with the least ‖Rᵀ A − A₀‖, or the least ‖B R − B₀‖, is the orthogonal one next to:
            near = torch.where(local.round % 2 == 0, a @ common_a.T, b.T @ common_b)
            turn = self._turn(lora_pairs.orthogonal(near))
            trained[down] = (turn.T @ a).reshape(trained[down].shape)
            trained[up] = (b @ turn).reshape(trained[up].shape)
        return Report(trained, local.size), personal

    def _turn(self, whole: Tensor) -> Tensor:
        """Go only a part of the way, and be orthogonal there."""
        if self.strength == 1:
            return whole
        still = torch.eye(len(whole), dtype=whole.dtype, device=whole.device)
        return lora_pairs.orthogonal(still + self.strength * (whole - still))
