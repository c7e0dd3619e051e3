"""KT-pFL: a learned matrix says how much each client learns from each other.

Zhang et al., "Parameterized Knowledge Transfer for Personalized Federated Learning", NeurIPS 2021,
Eqs. 2-7 and Algorithm 1. Row n of c is the receiver's. What the paper leaves open is a setting: how
c is kept a mixture (`projection`), and whether the transfer in its objective is the sum over the
round's public examples, which Eq. 2 put into Eq. 4 prints, or their mean (`reduction`). By the sum,
which the preset `paper` takes, c moves as many times as far as there are examples; by the mean, at
the same rate, it hardly leaves equal shares. The preset `code` is what the released code does:
squared error instead of KL, no weights by size, steps scaled by powers of five, rows put through a
softmax; left out are its growing number of local epochs and public examples drawn twice. Eq. 7
takes predictions made after the distillation, which would cost a second exchange; like the code we
take those that are mixed.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from idiolect.aggregation.mixing_matrix import TINY, Matrix
from idiolect.core.method import setting
from idiolect.methods.distilled import Distilled, Soft


@dataclass(frozen=True, kw_only=True)
class KTpFL(Matrix, Distilled):
    """Each client's teacher is Σ_m c_nm s_m; the server descends on c as training goes on."""

    title: ClassVar[str] = "KT-pFL"
    paper: ClassVar[str] = "Zhang et al. 2021, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {
            "gain": "paper",
            "temperature": 10.0,
            "pull": 0.7,
            "matrix_lr": 0.01,
            "transfer": 1.0,
            "reduction": "sum",
            "batch": 128,
            "epochs": 20,
            "lr": 0.01,
        },
        "code": {
            "gain": "code",
            "temperature": 10.0,
            "pull": 0.7,
            "objective": "mse",
            "adaptive": True,
            "projection": "softmax",
            "batch": 16,
            "epochs": 10,
            "lr": 0.02,
        },
    }

    pull: float = setting(0.1, "strength of the pull of c to equal shares (ρ)", least=0)
    objective: str = setting(
        "kl",
        "what c minimises: KL weighted by size (Eq. 7), or squared error (released code)",
        choices=("kl", "mse"),
    )

    reduction: str = setting(
        "mean",
        "the transfer in the objective of c: mean over the public examples, or sum (Eqs. 2 and 4)",
        choices=("mean", "sum"),
    )

    def learn(self, known: Tensor, reports: Soft, share: float) -> Tensor:
        """Descend on the cohort's block of c."""
        return self.descend(known, share, lambda block: self.slope(block, reports))

    def slope(self, block: Tensor, reports: Soft) -> Tensor:
        """Return the gradient of the objective of c at a cohort's block: Eq. 7, or the code's."""
        soft, size = reports  # [sender, example, class]
        taught = torch.tensordot(block, soft, dims=1)
        examples, classes = soft.shape[1:]
        if self.objective == "mse":
            gap = torch.einsum("nxk,mxk->nm", taught - soft, soft) / (examples * classes)
            return 2 * gap + 2 * self.pull / len(block) * (block - 1 / len(block))
        ratio = taught.clamp(min=TINY).log() - soft.clamp(min=TINY).log()
        gap = torch.einsum("nxk,mxk->nm", ratio + 1, soft)
        gap = gap / examples if self.reduction == "mean" else gap
        return self.weigh(gap, block, size)
