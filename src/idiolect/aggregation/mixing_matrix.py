"""KT-pFL's matrix c: how the server descends on it, and how its rows stay mixtures.

Zhang et al. 2021, Eqs. 3, 4 and 7. Row n is the receiver's: c_nm is what n learns from m. With a
cohort only its block of c is learned; what a row gives to the cohort as a whole stays as it was, so
rows stay on the simplex.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from idiolect.core.method import Method, setting

TINY = 1e-10  # below this a probability is a rounding error


@dataclass(frozen=True, kw_only=True)
class Matrix(Method):
    """The settings of c, and a descent on a cohort's block of it."""

    matrix_lr: float = setting(0.5, "learning rate of c (η₃)", above=0)
    matrix_steps: int = setting(1, "steps on c in a round", least=1)
    transfer: float = setting(
        0.0,
        "weight of the transfer in the objective of c (λ); 0: as many as there are clients, so "
        "that D_n/D does not drown each one's in the pull",
        least=0,
    )
    pull: float = setting(0.7, "strength of the pull of c to equal shares (ρ)", least=0)
    projection: str = setting(
        "simplex",
        "how a row stays a mixture: nearest point of the simplex, softmax, or not at all",
        choices=("simplex", "softmax", "none"),
    )
    sharpness: float = setting(5.0, "factor of a row before its softmax", above=0)
    adaptive: bool = setting(
        False, "scale steps on c by powers of five to a mean of about 0.01, as the released code"
    )

    def descend(self, known: Tensor, share: float, slope: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a cohort's new block of c; `share` is the cohort's part of all clients."""
        mass = known.sum(1, keepdim=True)
        if self.projection == "none":  # rows need not add up, so each present client counts alike
            mass = known.new_full((len(known), 1), share)
        block = known / mass.clamp(min=TINY)  # who takes nothing from the cohort still does not
        for _ in range(self.matrix_steps):
            down = slope(block)
            block = self._projected(block - self._rate(down) * down)
        return mass * block

    def weigh(self, gap: Tensor, block: Tensor, size: Tensor) -> Tensor:
        """Return the slope of Eq. 4: that of the gaps, by size, and that of the pull."""
        weight = (self.transfer or len(size)) * size / size.sum()
        return weight.unsqueeze(1) * gap + 2 * self.pull * (block - 1 / len(block))

    def mix(self, affinity: Tensor) -> Tensor:
        """Renormalise rows over a cohort; unless they are no mixtures, by choice."""
        if self.projection == "none":
            return affinity * (affinity.shape[0] / affinity.shape[1])
        return shares(affinity)

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


def shares(affinity: Tensor) -> Tensor:
    """Let rows add up to one; a row of zeros stays one."""
    total = affinity.sum(1, keepdim=True)
    return torch.where(total > 0, affinity / total.clamp(min=1e-30), torch.zeros_like(affinity))


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
