"""Survival tasks: a time, and whether the event was seen then or the patient only until then.

Cox's form learns one number, the log of the risk relative to others. The discrete form learns the
chance of the event in each of some intervals, and so a curve of survival.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from idiolect.core import losses
from idiolect.core.task import Array, Classes, Evidence, Labels, Number, Real, Task
from idiolect.errors import ConfigError, DataError

INTERVALS = 10  # of the discrete form, unless told
_NEVER = -1e30  # log of a weight of zero, finite so that no gradient is NaN


def check_times(y: Array) -> str:
    """Return what is wrong with times and events, or nothing."""
    if y.ndim != 2 or y.shape[1] != 2 or y.dtype.kind != "f":
        return f"survival has {y.dtype} of shape {y.shape}, expected floats [row, 2]: time, event"
    wrong = np.flatnonzero(~(np.isfinite(y[:, 0]) & (y[:, 0] >= 0)))
    if len(wrong):
        return f"row {int(wrong[0])} has time {y[wrong[0], 0]}, expected 0 or more"
    wrong = np.flatnonzero(~np.isin(y[:, 1], (0, 1)))
    if len(wrong):
        return f"row {int(wrong[0])} has event {y[wrong[0], 1]}, expected 1 (seen) or 0 (censored)"
    return ""


def concordance(risk: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return the share of comparable pairs of a batch that are in the right order (Harrell's C).

    A pair is comparable where the one with the earlier time had the event; equal risks count half.
    Without comparable pairs it is one half.
    """
    time, event = y[..., 0], y[..., 1]
    both = weight.unsqueeze(-1) * weight.unsqueeze(-2)
    sooner = time.unsqueeze(-1) < time.unsqueeze(-2)
    # Of equal times, the one whose event was seen came before the one censored then.
    tied = (time.unsqueeze(-1) == time.unsqueeze(-2)) & (event.unsqueeze(-2) < 0.5)
    pairs = both * event.unsqueeze(-1) * (sooner | tied)
    above = (risk.unsqueeze(-1) > risk.unsqueeze(-2)).to(pairs.dtype)
    equal = (risk.unsqueeze(-1) == risk.unsqueeze(-2)).to(pairs.dtype)
    total = pairs.sum()
    share = (pairs * (above + equal / 2)).sum() / total.clamp(min=1e-12)
    return torch.where(total > 0, share, torch.full_like(share, 0.5))


@dataclass(frozen=True)
class Cox(Real):
    """Survival by Cox's partial likelihood among the patients of a batch; ties as Breslow's."""

    kind: ClassVar[str] = "survival"
    form: ClassVar[str] = "cox"
    primary: ClassVar[str] = "concordance"
    single: ClassVar[bool] = False

    def check(self, y: Array, width: int) -> str:
        """Expect times and events."""
        return check_times(y) if width == 1 else f"there are {width} outputs, expected 1"

    def predictions(self, outputs: Array) -> Array:
        """Return the log of the relative risk: the higher, the sooner."""
        return np.asarray(outputs[..., 0])

    def loss(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return minus the log partial likelihood, over the number of patients.

        −Σ_i event_i (η_i − log Σ_{j: t_j ≥ t_i} exp η_j) / Σ_i 1. A batch without events has no
        loss. Divided by patients, not events, so that means over batches weigh events alike.
        """
        risk, time, event = outputs.squeeze(-1), y[..., 0], y[..., 1]
        counted = torch.where(weight > 0, risk + weight.clamp(min=1e-12).log(), _NEVER)
        at_risk = time.unsqueeze(-2) >= time.unsqueeze(-1)  # [of patient, other]
        others = torch.where(at_risk, counted.unsqueeze(-2), _NEVER).logsumexp(-1)
        return losses.weighted_mean(event * (others - risk), weight)

    def score(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Concordance within the batch."""
        return concordance(outputs.squeeze(-1), y, weight)

    def evidence(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Evidence:
        """Give for each event its share of the risk of all at risk, and of pairs told rightly."""
        risk, time, event = outputs.squeeze(-1), y[..., 0], y[..., 1]
        at_risk = (time.unsqueeze(-2) >= time.unsqueeze(-1)) & (weight > 0).unsqueeze(-2)
        others = torch.where(at_risk, risk.unsqueeze(-2), _NEVER).logsumexp(-1)
        later = at_risk & (time.unsqueeze(-2) > time.unsqueeze(-1))
        below = (risk.unsqueeze(-1) > risk.unsqueeze(-2)).to(risk.dtype)
        even = (risk.unsqueeze(-1) == risk.unsqueeze(-2)).to(risk.dtype) / 2
        pairs = later.to(risk.dtype)
        right = ((below + even) * pairs).sum(-1) / pairs.sum(-1).clamp(min=1)
        return Evidence((risk - others).exp(), right, weight * event)


@dataclass(frozen=True)
class Discrete(Labels):
    """Survival by intervals of time, with a logit of the hazard for each.

    A patient with the event in interval k has passed the intervals before and not k. One censored
    in k has passed those before; k itself counts half, as in a life table.

    Intervals are cut at quantiles of the times of seen events among the training rows of all
    clients, or at `cuts` given: the first begins at 0, the last has no end.
    """

    kind: ClassVar[str] = "survival"
    form: ClassVar[str] = "discrete"
    primary: ClassVar[str] = "concordance"
    waits: ClassVar[tuple[str, ...]] = ("cut points",)

    intervals: int = INTERVALS
    cuts: tuple[float, ...] = ()  # where intervals meet, ascending; at most intervals − 1

    @property
    def waiting(self) -> bool:
        """Whether cut points are still to be taken from training rows."""
        return not (self.cuts or self.fitted)

    def check(self, y: Array, width: int) -> str:
        """Expect times and events."""
        if width != self.intervals:
            return f"there are {width} outputs for {self.intervals} intervals"
        return check_times(y)

    def fit(self, y: Array, width: int) -> Self:
        """Cut at quantiles of the times of events; cut points that are given stay."""
        if self.cuts:
            return dataclasses.replace(self, fitted=True)
        times = y[y[:, 1] > 0, 0]
        if not len(times):
            raise DataError(
                "no training row has an event, so there are no times to cut intervals by; give "
                "cut points, such as task = {name = 'survival', form = 'discrete', cuts = [1, 2]}"
            )
        shares = np.arange(1, self.intervals) / self.intervals
        cuts = np.unique(np.quantile(times.astype(np.float64), shares))
        return dataclasses.replace(self, cuts=tuple(map(float, cuts[cuts > 0])), fitted=True)

    def encode(self, y: Array) -> Array:
        """Turn times into numbers of intervals."""
        place = np.searchsorted(np.asarray(self.cuts), y[:, 0].astype(np.float64), side="right")
        return np.stack([place, y[:, 1]], 1).astype(np.float32)

    def predictions(self, outputs: Array) -> Array:
        """Return a risk: minus the number of intervals that are expected to be survived."""
        return np.asarray(-self.probabilities(outputs).sum(-1))

    def probabilities(self, outputs: Array) -> Array:
        """Return the probability of surviving each interval to its end."""
        passed = -np.logaddexp(0, outputs.astype(np.float64))  # log(1 − hazard)
        return np.asarray(np.exp(np.cumsum(passed, -1)))

    def loss(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return minus the log likelihood of a patient."""
        last, event = y[..., :1], y[..., 1:]
        place = torch.arange(outputs.shape[-1], device=y.device).to(y.dtype)
        before, here = (place < last).to(outputs.dtype), (place == last).to(outputs.dtype)
        passed = before + here * (1 - event) / 2
        each = passed * functional.softplus(outputs)
        each = each + here * event * functional.softplus(-outputs)
        return losses.weighted_mean(each.sum(-1), weight)

    def evidence(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Evidence:
        """Give the probability of what was seen in each interval; right is 1 − Brier's score."""
        last, event = y[..., :1], y[..., 1:]
        place = torch.arange(outputs.shape[-1], device=y.device).to(y.dtype)
        before, here = (place < last).to(outputs.dtype), (place == last).to(outputs.dtype)
        seen = here * event > 0
        chance = torch.where(seen, outputs, -outputs).sigmoid()
        count = before + here * (1 + event) / 2
        return Evidence(chance, 1 - (1 - chance).square(), weight.unsqueeze(-1) * count)

    def score(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Concordance within the batch, of whole intervals."""
        curve = (-functional.softplus(outputs)).cumsum(-1).exp()
        return concordance(-curve.sum(-1), y, weight)


TASKS: dict[str, type[Task]] = {
    "classes": Classes,
    "labels": Labels,
    "number": Number,
    "survival": Cox,
    "survival, cox": Cox,
    "survival, discrete": Discrete,
}
"""Tasks by kind, and by kind and form."""


def task_from_json(values: Mapping[str, Any]) -> Task:
    """Read what `to_json` wrote; anything else is refused."""
    given = dict(values)
    kind, form = given.pop("kind", None), given.pop("form", "")
    made = TASKS.get(f"{kind}, {form}" if form else str(kind))
    if made is None:
        raise ConfigError(f"task {kind!r} {form!r} is unknown; expected one of {', '.join(TASKS)}")
    known = {one.name: one for one in dataclasses.fields(made)}
    for name, value in given.items():
        default = known[name].default if name in known else None
        right = (
            isinstance(value, list) and all(_finite(one) for one in value)
            if isinstance(default, tuple)
            else isinstance(value, bool)
            if isinstance(default, bool)
            else _finite(value)
        )
        if name not in known or not right:
            raise ConfigError(f"task {kind}: {name} is {value!r}, which it does not have")
    read: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in given.items()
    }
    return made(**read)


def _finite(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and abs(value) < float("inf")
