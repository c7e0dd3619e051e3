"""Sim-pFL and TopK-pFL: whoever predicts alike teaches each other; nothing about that is learned.

Zhang et al. 2021 (KT-pFL), section 5.1: its two plain variants. Likeness is the cosine of soft
predictions on the round's public examples. Sim-pFL weighs by it, less that of the least alike (as
the released code does); TopK-pFL takes the K most alike, the client itself among them, each alike.
Before two clients have met they count as alike.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from idiolect.core.method import Setup, setting
from idiolect.methods.distilled import KT_PFL_BASELINE, Distilled, SoftReport, TeacherState


@dataclass(frozen=True, kw_only=True)
class SimPFL(Distilled):
    """Teachers weigh the others' predictions by how alike they are to the client's own."""

    title: ClassVar[str] = "Sim-pFL"
    paper: ClassVar[str] = "Zhang et al. 2021, section 5.1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {"kt-pfl": KT_PFL_BASELINE}

    def init_server(self, setup: Setup) -> TeacherState:
        """Nobody is a stranger before the first predictions."""
        state = super().init_server(setup)
        return state._replace(affinity=torch.ones_like(state.affinity))

    def learn(self, known: Tensor, reports: SoftReport, share: float, real: bool = False) -> Tensor:
        """Compare all pairs of the cohort anew."""
        flat = normalize(reports.prediction.flatten(1), dim=1)
        alike = flat @ flat.T
        return alike + torch.diag(1 - alike.diagonal())  # a client is exactly like itself

    def mix(self, affinity: Tensor) -> Tensor:
        """Weigh by likeness above the least; where all are alike, equally."""
        above = affinity - affinity.amin(1, keepdim=True)
        total = above.sum(1, keepdim=True)
        equal = torch.full_like(affinity, 1 / affinity.shape[1])
        return torch.where(total > 0, above / total.clamp(min=1e-30), equal)


@dataclass(frozen=True, kw_only=True)
class TopKPFL(SimPFL):
    """Teachers are the mean of the few clients whose predictions are most alike."""

    title: ClassVar[str] = "TopK-pFL"
    presets: ClassVar[dict[str, dict[str, Any]]] = {"kt-pfl": KT_PFL_BASELINE | {"most": 10}}

    most: int = setting(5, "how many clients teach each, itself included (K)", least=1)

    def mix(self, affinity: Tensor) -> Tensor:
        """Take the most alike, each alike; those who tie with the last are in."""
        kept = min(self.most, affinity.shape[1])
        least = affinity.topk(kept, dim=1).values[:, -1:]
        chosen = (affinity >= least).to(affinity.dtype)
        return chosen / chosen.sum(1, keepdim=True)
