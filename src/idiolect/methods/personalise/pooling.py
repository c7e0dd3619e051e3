"""What the other clients know: a prior for a client's mixture, and whether such mixtures help.

After they have trained their candidates, clients tell a few numbers each, and hear the sums of what
the others told. Both uses are empirical Bayes. The prior q of `choosing` is the mean of the others'
weights. And where a client's own few examples cannot tell whether its mixture is more accurate than
its local model, the others' gains are a prior for its own: with n others whose gains g have the
mean μ, the variance v and squared standard errors of e in the mean,

    gain ~ N(μ, τ²),    τ² = (v − e) + (v / n) (n − 1) / (n − 3)

is what they differ by beyond chance, and what μ itself is uncertain by (Student's t). Together with
the gain on its own validation data that makes a posterior, normal again.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from idiolect.methods.personalise import choosing
from idiolect.methods.personalise.choosing import Compared

_FEWEST = 4  # others; of three the mean's variance is not known
_TINY = 1e-12


class Told(NamedTuple):
    """What a client tells, each number from −1 to 1; or the sum of what several told."""

    voices: Tensor  # 1 for a client that has something to tell; all is 0 for others
    weights: Tensor  # [candidate] of its mixture, chosen without the others
    gain: Tensor  # of accuracy on validation data, over its local model
    square: Tensor  # of the gain
    error: Tensor  # the gain's standard error, squared


def told(weights: Tensor, compared: Compared, evident: Tensor) -> Told:
    """Make what a client tells; nothing unless it is evident, by examples of its own."""
    gain, error = compared.gain, compared.error
    whole = Told(torch.ones_like(gain), weights, gain, gain.square(), error)
    return Told(*(torch.where(evident, leaf, 0.0) for leaf in whole))


def prior(others: Told, sound: Tensor, caution: float, heed: float) -> tuple[Tensor, Tensor]:
    """Return q, and the examples that it counts as: `heed`, or `caution` where nobody told."""
    weights = torch.where(sound, others.weights, 0.0)
    total = weights.sum()  # 0 without any voice
    heard = total > 0
    q = torch.where(heard, weights / total.clamp(min=_TINY), choosing.even(sound).to(weights.dtype))
    return q, torch.where(heard, total.new_full((), heed), total.new_full((), caution))


def mean_gain(others: Told) -> Tensor:
    """Return μ, by how much more accurate the others' mixtures are; NaN where nobody told."""
    return others.gain / others.voices


def surely_gains(compared: Compared, evident: Tensor, others: Told, trust: float) -> Tensor:
    """Say whether the posterior mean of a client's gain is above `trust` posterior deviations.

    Who has no evidence of its own goes by the others' alone. An own standard error below theirs may
    be luck (no example on which the two models differ), so theirs is the least.
    """
    n = others.voices
    mean, error = others.gain / n, others.error / n
    variance = ((others.square - n * mean.square()) / (n - 1)).maximum(error)
    spread = variance - error + variance / n * (n - 1) / (n - 3)
    theirs = 1 / spread.clamp(min=_TINY)
    ours = torch.where(evident, 1 / compared.error.maximum(error).clamp(min=_TINY), 0.0)
    gain = torch.where(evident, compared.gain, 0.0)
    posterior = (gain * ours + mean * theirs) / (ours + theirs)
    sure = posterior > trust * (ours + theirs).rsqrt()
    return sure & (n > _FEWEST - 0.5)
