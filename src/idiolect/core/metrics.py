"""Metrics in numpy: what a model said about some rows, beside the truth.

`METRICS` lists every metric with the tasks it is for and which way is better. A value that the rows
do not define, such as the area under a curve where all have one class, is NaN; `undefined` says why
in words.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from idiolect.errors import ConfigError, suggest

Floats = NDArray[np.float64]

CLASSES, LABELS, NUMBER, SURVIVAL = "classes", "labels", "number", "survival"
BINS = 10  # of calibration, equally wide
PRECISION = 0.9  # of "recall_at_precision", unless another is given
_AT_ONCE = 2_000_000  # pairs of rows compared together


class Answers(NamedTuple):
    """What a model said about rows, and the truth.

    classes: y [row] numbers of classes, shares [row, class]. labels: y [row, label] of 0 and 1,
    shares [row, label]. number: y [row], value [row]. survival: y [row, 2] of time and event, value
    [row] the risk, higher for who is expected to live shorter.
    """

    kind: str
    y: NDArray[Any]
    shares: Floats  # probabilities; empty for numbers and survival
    value: Floats
    said: NDArray[np.int64]  # the class, or 0 and 1 for each label; -1 where the model broke

    @property
    def binary(self) -> bool:
        """Whether there are two classes; the second is the positive one."""
        return self.kind == CLASSES and self.shares.shape[1] == 2

    def take(self, rows: NDArray[Any]) -> "Answers":
        """Keep some rows."""
        shares = self.shares[rows] if len(self.shares) else self.shares
        value = self.value[rows] if len(self.value) else self.value
        said = self.said[rows] if len(self.said) else self.said
        return Answers(self.kind, self.y[rows], shares, value, said)


def answers(
    kind: str,
    outputs: NDArray[Any],
    y: NDArray[Any],
    threshold: float | None = None,
) -> Answers:
    """Return what a network's outputs say.

    `threshold` is the probability from which a row is called positive, for two classes and for
    labels; without it the likelier answer is taken.
    """
    outputs, y = np.asarray(outputs, np.float64), np.asarray(y)
    empty = np.zeros(0)
    nothing = np.zeros(0, np.int64)
    if kind == CLASSES:
        shares = _softmax(outputs)
        said = outputs.argmax(-1) if len(outputs) else nothing
        if threshold is not None and shares.shape[1] == 2:
            said = (shares[:, 1] >= threshold).astype(np.int64)
        said = np.where(np.isnan(outputs).any(-1), -1, said)
        return Answers(kind, y.astype(np.int64), shares, empty, said)
    if kind == LABELS:
        shares = _sigmoid(outputs)
        likely = outputs > 0 if threshold is None else shares >= threshold
        said = np.where(np.isnan(outputs), -1, likely.astype(np.int64))
        return Answers(kind, (y > 0.5).astype(np.int64), shares, empty, said)
    flat = outputs if outputs.ndim > 1 else outputs[:, None]
    if kind == NUMBER:
        return Answers(kind, y.astype(np.float64).reshape(-1), empty, flat[:, 0], nothing)
    if kind == SURVIVAL:
        return Answers(kind, y.astype(np.float64), empty, risk(flat), nothing)
    raise ConfigError(f"unknown task {suggest(kind, (CLASSES, LABELS, NUMBER, SURVIVAL))}")


def risk(outputs: Floats) -> Floats:
    """Return one number a row, higher for a shorter life: of Cox's model the output itself.

    Of discrete times, with a hazard's logit for each, it is the time not lived: minus the sum of
    the survival curve.
    """
    if outputs.shape[1] == 1:
        return outputs[:, 0]
    return np.asarray(-np.cumprod(1 - _sigmoid(outputs), axis=1).sum(1))


def _softmax(outputs: Floats) -> Floats:
    if not outputs.size:
        return outputs
    moved = np.exp(outputs - outputs.max(-1, keepdims=True))
    return np.asarray(moved / moved.sum(-1, keepdims=True))


def _sigmoid(outputs: Floats) -> Floats:
    return np.asarray(0.5 * (1 + np.tanh(outputs / 2)))


# Metrics of one curve: a score for each row, and whether the row is positive.


def ranks(values: Floats) -> Floats:
    """Return ranks from 1; ties share their mean."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[place])


def auroc_of(scores: Floats, positive: NDArray[Any]) -> float:
    """Return the chance that a positive row scores above a negative one; ties count half."""
    positive = np.asarray(positive, bool)
    many, rest = int(positive.sum()), int((~positive).sum())
    if not many or not rest or np.isnan(scores).any():
        return np.nan
    return float((ranks(scores)[positive].sum() - many * (many + 1) / 2) / (many * rest))


def _steps(scores: Floats, positive: NDArray[Any]) -> tuple[Floats, Floats]:
    """Return true positives and all called positive at every distinct threshold, highest first."""
    order = np.argsort(-scores, kind="stable")
    scores, positive = scores[order], np.asarray(positive, np.float64)[order]
    last = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)
    return np.cumsum(positive)[last], last + 1.0


def auprc_of(scores: Floats, positive: NDArray[Any]) -> float:
    """Return the average precision: Σ (recall gained) · precision over the thresholds."""
    many = int(np.sum(positive))
    if not many or many == len(positive) or np.isnan(scores).any():
        return np.nan
    right, called = _steps(scores, positive)
    return float((np.diff(right, prepend=0.0) / many * right / called).sum())


def recall_at_of(scores: Floats, positive: NDArray[Any], precision: float) -> float:
    """Return the highest recall of a threshold whose precision is enough; 0 where none is."""
    many = int(np.sum(positive))
    if not many or many == len(positive) or np.isnan(scores).any():
        return np.nan
    right, called = _steps(scores, positive)
    return float(np.where(right / called >= precision - 1e-12, right / many, 0.0).max())


def _averaged(of: Callable[[Floats, NDArray[Any]], float], own: Answers) -> float:
    """Apply to the positive class of two, else to each class or label, and average the defined."""
    if own.binary:
        return of(own.shares[:, 1], own.y == 1)
    width = own.shares.shape[1] if own.shares.ndim == 2 else 0
    truth = own.y.T if own.kind == LABELS else [own.y == one for one in range(width)]
    found = [of(own.shares[:, one], truth[one]) for one in range(width)]
    return _mean_known(found)


def _mean_known(values: Sequence[float]) -> float:
    seen = [value for value in values if value == value]
    return float(np.mean(seen)) if seen else np.nan


def _mean(values: Floats) -> float:
    return float(values.mean()) if values.size else np.nan


# Values of every row, where a metric is their mean.


def _right(own: Answers) -> Floats:
    good = (own.said == own.y).astype(np.float64)
    return np.asarray(good.mean(1)) if own.kind == LABELS else good


def _surprise(own: Answers) -> Floats:
    least = np.finfo(np.float64).eps
    if own.kind == LABELS:
        true = np.where(own.y > 0, own.shares, 1 - own.shares)
        return np.asarray(-np.log(true.clip(least, 1)).mean(1))
    true = own.shares[np.arange(len(own.y)), own.y]
    return np.asarray(-np.log(true.clip(least, 1)))


def _squares(own: Answers) -> Floats:
    """Return Brier's: of two classes the positive one's error, of more the sum over classes."""
    if own.kind == LABELS:
        return np.asarray(np.square(own.shares - own.y).mean(1))
    if own.binary:
        return np.asarray(np.square(own.shares[:, 1] - own.y))
    truth = np.arange(own.shares.shape[1]) == own.y[:, None]
    return np.asarray(np.square(own.shares - truth).sum(1))


def _error(own: Answers) -> Floats:
    return np.asarray(own.value - own.y)


# Metrics of all rows together.


def confusion(own: Answers) -> NDArray[np.int64]:
    """Count rows by truth and answer, [class, class]; of labels [label, 2, 2]."""
    if own.kind == LABELS:
        cells = own.y * 2 + own.said
        return np.stack(
            [_counts(cells[own.said[:, n] >= 0, n], 4).reshape(2, 2) for n in range(own.y.shape[1])]
        )
    width = own.shares.shape[1]
    cells = (own.y * width + own.said)[own.said >= 0]
    return _counts(cells, width * width).reshape(width, width)


def _counts(cells: NDArray[Any], width: int) -> NDArray[np.int64]:
    return np.bincount(cells, minlength=width).astype(np.int64)


def _balanced(own: Answers) -> float:
    good = own.said == own.y
    if own.kind == LABELS:
        parts = [
            [_mean(g[t == v] * 1.0) for v in (0, 1)] for g, t in zip(good.T, own.y.T, strict=True)
        ]
        return _mean_known([np.nan if np.isnan(p).any() else float(np.mean(p)) for p in parts])
    present = np.unique(own.y)
    if len(present) < 2:
        return np.nan
    return float(np.mean([good[own.y == one].mean() for one in present]))


def _f1(own: Answers) -> float:
    if own.kind == LABELS:
        truth, said = own.y.T == 1, own.said.T == 1
    elif own.binary:
        truth, said = (own.y == 1)[None], (own.said == 1)[None]
    else:  # of the classes that occur, in truth or in answers
        seen = np.unique(np.concatenate([own.y, own.said[own.said >= 0]]))
        if len(np.unique(own.y)) < 2:
            return np.nan
        truth, said = own.y == seen[:, None], own.said == seen[:, None]
        both = (truth & said).sum(1)
        return float((2 * both / (truth.sum(1) + said.sum(1))).mean())
    both, many = (truth & said).sum(1), truth.sum(1)
    total = np.where(many > 0, many + said.sum(1), 1)
    # With all rows positive it is defined, and near 1 for whoever calls all so: left out.
    known = (many > 0) & (many < truth.shape[1])
    return _mean_known([float(v) for v in np.where(known, 2 * both / total, np.nan)])


def reliability(own: Answers) -> Floats:
    """Count rows, add up probabilities and truths in equally wide bins of probability, [bin, 3].

    Of two classes it is the positive one's probability, of more that of the answer and whether it
    was right; labels are put together.
    """
    if own.kind == LABELS:
        chance, truth = own.shares.ravel(), own.y.ravel().astype(np.float64)
    elif own.binary:
        chance, truth = own.shares[:, 1], own.y.astype(np.float64)
    else:
        chance = own.shares.max(1) if own.shares.size else np.zeros(0)
        truth = (own.said == own.y).astype(np.float64)
    seen = ~np.isnan(chance)
    chance, truth = chance[seen], truth[seen]
    place = np.minimum((chance * BINS).astype(np.int64), BINS - 1)
    parts = (None, chance, truth)
    return np.stack([np.bincount(place, part, minlength=BINS) for part in parts], 1).astype(float)


def calibration_error(own: Answers) -> float:
    """Return Σ (rows of a bin / all) · |mean probability − share of positives|."""
    table = reliability(own)
    total = table[:, 0].sum()
    return float(np.abs(table[:, 1] - table[:, 2]).sum() / total) if total else np.nan


def _r2(own: Answers) -> float:
    spread = np.square(own.y - own.y.mean()).sum() if len(own.y) > 1 else 0.0
    return float(1 - np.square(_error(own)).sum() / spread) if spread else np.nan


def _explained(own: Answers) -> float:
    spread = own.y.var() if len(own.y) > 1 else 0.0
    return float(1 - _error(own).var() / spread) if spread else np.nan


def concordance(times: Floats, events: Floats, risk: Floats) -> float:
    """Return Harrell's C: of pairs whose order is known, the share in which risk agrees.

    A pair is known if one died before the other's time, or at the time at which the other was last
    seen alive. Equal risks count half.
    """
    if np.isnan(risk).any():
        return np.nan
    died = np.flatnonzero(events > 0)
    pairs = agree = 0.0
    step = max(1, _AT_ONCE // max(len(times), 1))
    for first in range(0, len(died), step):
        one = died[first : first + step]
        at, own = times[one][:, None], risk[one][:, None]
        known = (times > at) | ((times == at) & (events <= 0))
        pairs += known.sum()
        agree += (known & (own > risk)).sum() + 0.5 * (known & (own == risk)).sum()
    return float(agree / pairs) if pairs else np.nan


# The registry.


@dataclass(frozen=True)
class Metric:
    """A metric: what it is called, for which tasks, and which way is better."""

    name: str
    title: str  # as it stands in a sentence
    kinds: tuple[str, ...]
    of: Callable[[Answers], float]
    higher: bool = True  # whether more is better
    percent: bool = False  # whether it is a share, written as per cent
    rows: Callable[[Answers], Floats] | None = None  # of which it is the mean; None: of no rows
    decides: bool = False  # whether it depends on the threshold
    low: float | None = None  # its bounds, where it has some
    high: float | None = None

    @property
    def sign(self) -> float:
        """What a value is multiplied with so that more is better."""
        return 1.0 if self.higher else -1.0

    def __call__(self, own: Answers) -> float:
        """Return the value; NaN where the rows do not define it."""
        return self.of(own) if len(own.y) else np.nan

    def written(self, value: float | None, digits: int = 1) -> str:
        """Write a value: a share as per cent; a dash where there is none."""
        if value is None or value != value:
            return "-"
        if self.percent:
            return f"{100 * value:.{digits}f}%"
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"

    def cell(self, value: float | None) -> str:
        """Write a value for a table: shares in per cent, without the sign."""
        return self.written(value).removesuffix("%")


def _by_rows(name: str, title: str, kinds: tuple[str, ...], rows: Any, **more: Any) -> Metric:
    return Metric(name, title, kinds, lambda own: _mean(rows(own)), rows=rows, **more)


_DECIDING = (CLASSES, LABELS)
_SHARE: dict[str, Any] = {"percent": True, "low": 0.0, "high": 1.0}

METRICS: dict[str, Metric] = {
    one.name: one
    for one in (
        _by_rows("accuracy", "accuracy", _DECIDING, _right, decides=True, **_SHARE),
        Metric(
            "balanced_accuracy", "balanced accuracy", _DECIDING, _balanced, decides=True, **_SHARE
        ),
        Metric("auroc", "AUROC", _DECIDING, lambda own: _averaged(auroc_of, own), **_SHARE),
        Metric("auprc", "AUPRC", _DECIDING, lambda own: _averaged(auprc_of, own), **_SHARE),
        Metric("f1", "F1", _DECIDING, _f1, decides=True, **_SHARE),
        Metric(
            "recall_at_precision",
            f"recall at precision {PRECISION:g}",
            _DECIDING,
            lambda own: _averaged(lambda s, p: recall_at_of(s, p, PRECISION), own),
            **_SHARE,
        ),
        _by_rows("log_loss", "log loss", _DECIDING, _surprise, higher=False, low=0.0),
        _by_rows("brier", "Brier score", _DECIDING, _squares, higher=False, low=0.0),
        Metric(
            "calibration_error",
            "calibration error",
            _DECIDING,
            calibration_error,
            higher=False,
            **_SHARE,
        ),
        _by_rows("mae", "MAE", (NUMBER,), lambda o: np.abs(_error(o)), higher=False, low=0.0),
        Metric(
            "rmse",
            "RMSE",
            (NUMBER,),
            lambda own: float(np.sqrt(_mean(np.square(_error(own))))),
            higher=False,
            low=0.0,
        ),
        Metric("r2", "R²", (NUMBER,), _r2, high=1.0),
        Metric("explained_variance", "explained variance", (NUMBER,), _explained, high=1.0),
        Metric(
            "concordance",
            "concordance",
            (SURVIVAL,),
            lambda own: concordance(own.y[:, 0], own.y[:, 1], own.value),
            **_SHARE,
        ),
    )
}
LOSS = Metric("loss", "loss", (CLASSES, LABELS, NUMBER, SURVIVAL), lambda own: np.nan, higher=False)
"""The loss that is trained on, which the engine takes itself."""
PERPLEXITY = Metric(
    "perplexity", "perplexity", (CLASSES,), lambda own: np.nan, higher=False, low=1.0
)
"""Of next words, e to the mean loss of a word, which the engine takes itself."""

PRIMARY = {CLASSES: "accuracy", LABELS: "auroc", NUMBER: "rmse", SURVIVAL: "concordance"}


def metric(name: str, kind: str | None = None, precision: float = PRECISION) -> Metric:
    """Return a metric by name, of a kind of task; the task's own where no name is given."""
    if not name:
        name = PRIMARY[kind or CLASSES]
    if name == "loss":
        return LOSS
    if name not in METRICS and name != PERPLEXITY.name:
        raise ConfigError(f"unknown metric {suggest(name, (*METRICS, 'loss', PERPLEXITY.name))}")
    found = METRICS.get(name, PERPLEXITY)
    if kind is not None and kind not in found.kinds:
        fitting = ", ".join(own.name for own in METRICS.values() if kind in own.kinds)
        raise ConfigError(f"metric {name} is not for the task {kind}; expected one of {fitting}")
    if name == "recall_at_precision" and precision != PRECISION:
        return replace(
            found,
            title=f"recall at precision {precision:g}",
            of=lambda own: _averaged(lambda s, p: recall_at_of(s, p, precision), own),
        )
    return found


def fitting(kind: str) -> list[str]:
    """Name the metrics of a kind of task."""
    return [own.name for own in METRICS.values() if kind in own.kinds]


def undefined(own: Answers, name: str) -> str:
    """Say why a metric has no value for these rows; empty where that is not known."""
    if not len(own.y):
        return "not defined: no rows"
    if own.kind == CLASSES and len(np.unique(own.y)) < 2:
        return "not defined: one class"
    if own.kind == LABELS:
        return "not defined: one class of every label"
    if own.kind == NUMBER:
        return "not defined: all values are equal"
    if own.kind == SURVIVAL:
        return "not defined: no two rows whose order is known"
    return ""


# What is chosen on validation rows, and what is guessed without a model.


def best_threshold(own: Answers, name: str) -> float:
    """Return the probability from which calling a row positive is best on these rows; else 0.5.

    `name` is accuracy, balanced_accuracy or f1. Thresholds lie halfway between neighbouring
    probabilities; of equally good ones the nearest to 0.5 is taken.
    """
    if not own.binary or len(np.unique(own.y)) < 2 or np.isnan(own.shares).any():
        return 0.5
    chance, truth = own.shares[:, 1], own.y == 1
    seen = np.unique(chance)
    cuts = np.concatenate([[seen[0] / 2], (seen[1:] + seen[:-1]) / 2, [(1 + seen[-1]) / 2], [0.5]])
    called = len(chance) - np.searchsorted(np.sort(chance), cuts, side="left")
    many, rest = truth.sum(), (~truth).sum()
    hits = many - np.searchsorted(np.sort(chance[truth]), cuts, side="left")
    false = called - hits
    if name == "accuracy":
        score = (hits + rest - false) / len(truth)
    elif name == "balanced_accuracy":
        score = (hits / many + (rest - false) / rest) / 2
    else:
        score = 2 * hits / (many + called)
    best = np.flatnonzero(score >= score.max() - 1e-12)
    return float(cuts[best[np.argmin(np.abs(cuts[best] - 0.5))]])


def without_groups(own: Answers, metric: Metric, groups: int) -> Floats:
    """Return the metric without each group of rows in turn, [group]; row n is in n % groups.

    Where a group is all that defines the metric, the value of all rows stands for it. A group
    without rows has NaN.
    """
    place = np.arange(len(own.y)) % groups
    whole = metric(own)
    found = np.full(groups, np.nan)
    if metric.rows is not None and len(own.y):
        values = metric.rows(own)
        sums = np.bincount(place, values, minlength=groups)
        counts = np.bincount(place, minlength=groups)
        rest = len(values) - counts
        some = (counts > 0) & (rest > 0)
        found[some] = (values.sum() - sums[some]) / rest[some]
        return found
    for group in range(min(groups, len(own.y))):
        value = metric(own.take(place != group))
        found[group] = whole if value != value else value
    return found
