"""KT-pFL: a learned matrix says how much each client learns from each other.

Zhang et al., "Parameterized Knowledge Transfer for Personalized Federated Learning", NeurIPS 2021,
Eqs. 2-7 and Algorithm 1. Row n of c is the receiver's. What the paper leaves open is a setting:
how c is kept a mixture (`projection`). The preset `code` is what the released code does: squared
error instead of KL, no weights by size, steps scaled by powers of five, rows put through a softmax;
left out are its growing number of local epochs and public examples drawn twice. Eq. 7 takes
predictions made after the distillation, which would cost a second exchange; like the code we take
those that are mixed.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from idiolect.method import setting
from idiolect.methods.distilled import Distilled, Soft

_TINY = 1e-10  # below this a probability is a rounding error


@dataclass(frozen=True, kw_only=True)
class KTpFL(Distilled):
    """Each client's teacher is Σ_m c_nm s_m; the server descends on c as training goes on."""

    title: ClassVar[str] = "KT-pFL"
    paper: ClassVar[str] = "Zhang et al. 2021, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"gain": "paper", "matrix_lr": 0.01, "batch": 128, "epochs": 20, "lr": 0.01},
        "code": {
            "gain": "code",
            "objective": "mse",
            "adaptive": True,
            "projection": "softmax",
            "batch": 16,
            "epochs": 10,
            "lr": 0.02,
        },
    }

    matrix_lr: float = setting(0.5, "learning rate of c (η₃)", above=0)
    matrix_steps: int = setting(1, "steps on c in a round", least=1)
    transfer: float = setting(1.0, "weight of the transfer in the objective of c (λ)", least=0)
    pull: float = setting(0.7, "strength of the pull of c to equal shares (ρ)", least=0)
    projection: str = setting(
        "simplex",
        "how a row stays a mixture: nearest point of the simplex, softmax, or not at all",
        choices=("simplex", "softmax", "none"),
    )
    sharpness: float = setting(5.0, "factor of a row before its softmax", above=0)
    objective: str = setting(
        "kl",
        "what c minimises: KL weighted by size (Eq. 7), or squared error (released code)",
        choices=("kl", "mse"),
    )
    adaptive: bool = setting(
        False, "scale steps on c by powers of five to a mean of about 0.01, as the released code"
    )

    def learn(self, known: Tensor, reports: Soft, share: float) -> Tensor:
        """Descend on the cohort's part of c; what a row gives to the cohort stays as it was."""
        mass = known.sum(1, keepdim=True)
        if self.projection == "none":  # rows need not add up, so each present client counts alike
            mass = known.new_full((len(known), 1), share)
        equal = known.new_full((), 1 / len(known))
        block = torch.where(mass > 0, known / mass.clamp(min=_TINY), equal)
        for _ in range(self.matrix_steps):
            slope = self.slope(block, reports)
            block = self._projected(block - self._rate(slope) * slope)
        return mass * block

    def slope(self, block: Tensor, reports: Soft) -> Tensor:
        """Return the gradient of the objective of c at a cohort's block: Eq. 7, or the code's."""
        soft, size = reports  # [sender, example, class]
        taught = torch.tensordot(block, soft, dims=1)
        examples, classes = soft.shape[1:]
        away = block - 1 / len(block)
        if self.objective == "mse":
            gap = torch.einsum("nxk,mxk->nm", taught - soft, soft) / (examples * classes)
            return 2 * gap + 2 * self.pull / len(block) * away
        ratio = taught.clamp(min=_TINY).log() - soft.clamp(min=_TINY).log()
        gap = torch.einsum("nxk,mxk->nm", ratio + 1, soft) / examples
        weight = self.transfer * size / size.sum()
        return weight.unsqueeze(1) * gap + 2 * self.pull * away

    def mix(self, affinity: Tensor) -> Tensor:
        """Rows are renormalised over the cohort; unless they are no mixtures by choice."""
        if self.projection == "none":
            return affinity * (affinity.shape[0] / affinity.shape[1])
        return super().mix(affinity)

    def _rate(self, slope: Tensor) -> float | Tensor:
        if not self.adaptive:
            # Beyond 1/2ρ the pull would overshoot equal shares: however strong, it ends there.
            return min(self.matrix_lr, 0.5 / self.pull) if self.pull else self.matrix_lr
        # The power of five that lifts or lowers a row's mean to [0.01, 0.05), at most five times.
        mean = slope.abs().mean(1, keepdim=True).clamp(min=1e-12)
        power = ((0.01 / mean).log() / math.log(5)).ceil().clamp(-5, 5)
        return torch.pow(5.0, power)

    def _projected(self, rows: Tensor) -> Tensor:
        if self.projection == "simplex":
            return onto_simplex(rows)
        return (self.sharpness * rows).softmax(1) if self.projection == "softmax" else rows


def onto_simplex(rows: Tensor) -> Tensor:
    """Return the nearest point of the simplex to each row.

    It is (row − τ)₊ with the τ that makes it add up to one: of the k largest entries, for the
    largest k whose smallest entry stays positive.
    """
    ordered = rows.sort(1, descending=True).values
    place = torch.arange(1, rows.shape[1] + 1, device=rows.device, dtype=rows.dtype)
    excess = (ordered.cumsum(1) - 1) / place
    kept = (ordered > excess).sum(1, keepdim=True)
    return (rows - excess.gather(1, kept - 1)).clamp(min=0)
