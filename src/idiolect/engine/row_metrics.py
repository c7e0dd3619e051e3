"""From what models say about single rows to metrics: of one client, and of all rows together.

Outputs of rows come from `ScoreTask`, and stay where they were made: a node of a federation reports
the metrics alone. What a run keeps of them is in `Pooled`: counts and sums, and a few points.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from idiolect.core import metrics
from idiolect.core.metrics import CLASSES, LABELS, NUMBER, SURVIVAL, Answers, Metric
from idiolect.engine.outcome import BASELINE, EFFECTIVE, RIGHT, THRESHOLD, WITHOUT

GROUPS = 64  # of a client's test rows; results of runs with other numbers cannot be paired
MODELS = ("personal", "global", BASELINE)  # that all metrics are taken of; others the chosen one
VALIDATION = "validation"  # where a threshold is chosen
NATIVE = {  # metrics that need no outputs, since batches of them can be added up
    CLASSES: ("accuracy", "loss", "perplexity"),
    LABELS: ("accuracy", "loss"),
    NUMBER: ("rmse", "mae", "loss"),
    SURVIVAL: ("loss",),
}
_IN_UNITS = ("rmse", "mae")
_POINTS = 400  # of the picture of numbers told and true
_MOST_CLASSES = 50  # of a confusion matrix that is kept
_MOST_CLIENTS = 12  # with a confusion matrix of their own


@dataclass(frozen=True)
class MetricChoice:
    """What is measured, and how rows are called positive."""

    name: str = "accuracy"  # the metric that chooses and gives the verdict
    kind: str = CLASSES  # of the task
    precision: float = metrics.PRECISION  # of "recall_at_precision"
    threshold: float | str | None = None  # None: the likelier answer; or "validation"

    @property
    def metric(self) -> Metric:
        """The metric itself."""
        return metrics.metric(self.name, self.kind, self.precision)

    @property
    def native(self) -> bool:
        """Whether no outputs are needed for it."""
        return self.name in NATIVE[self.kind]

    def natively(self, name: str) -> bool:
        """Say whether another metric needs no outputs either, or is the chosen one."""
        return name == self.name or name in NATIVE[self.kind]

    @property
    def maximised(self) -> str:
        """What a threshold is chosen by on validation rows."""
        return self.name if self.name in ("accuracy", "balanced_accuracy", "f1") else "f1"

    def all(self) -> list[Metric]:
        """Every metric of the task."""
        names = metrics.fitting(self.kind)
        return [metrics.metric(name, self.kind, self.precision) for name in names]


class ClientOutputs(NamedTuple):
    """What one client's models say, by model, and its labels in the user's unit."""

    task: Any  # of the dataset
    test: Mapping[str, NDArray[Any]]  # [row, output]; rows that are scored
    val: Mapping[str, NDArray[Any]]  # empty where validation rows are those scored, or not wanted
    y_test: NDArray[Any]
    y_val: NDArray[Any]
    y_train: NDArray[Any]


def in_users_unit(scores: Mapping[str, Mapping[str, Any]], task: Any) -> dict[str, dict[str, Any]]:
    """Bring errors of numbers, by model and metric, from the unit of the loss to the user's."""
    factor = task.scale if task.kind == NUMBER else 1.0
    return {
        model: {
            name: value * factor if name.removeprefix("val_") in _IN_UNITS else value
            for name, value in own.items()
        }
        for model, own in scores.items()
    }


class ClientMetrics(NamedTuple):
    """One client's metrics by model, and its answers."""

    marks: dict[str, dict[str, Any]]
    answers: dict[str, Answers]


def measure(
    own: ClientOutputs, choice: MetricChoice, *, detail: bool = False, grouped: bool = False
) -> ClientMetrics:
    """Take the metrics of one client.

    `detail`: all metrics of its main models and of the baseline, else the chosen one. `grouped`:
    also without each group of rows in turn, which comparisons of few clients are paired by.
    """
    chosen, every = choice.metric, choice.all()
    said, marks = {}, {}
    outputs = dict(own.test)
    if detail:
        width = next((rows.shape[-1] for rows in own.test.values()), 1)
        outputs[BASELINE] = baseline_outputs(choice.kind, own, width)
    for model, rows in outputs.items():
        found: dict[str, Any] = {}
        cut = choice.threshold if not isinstance(choice.threshold, str) else None
        if own.val and model in own.val:
            valid = read(choice.kind, own.task, own.val[model], own.y_val, cut)
            if choice.threshold == VALIDATION and model != BASELINE:
                cut = metrics.best_threshold(valid, choice.maximised)
                found[THRESHOLD] = cut
                # At the threshold that settings would be used with; it is what tuning compares.
                valid = read(choice.kind, own.task, own.val[model], own.y_val, cut)
            if chosen.name not in NATIVE[choice.kind]:
                found[f"val_{chosen.name}"] = chosen(valid)
        if model == BASELINE:  # in the user's unit already
            said[model] = metrics.answers(choice.kind, rows, own.y_test)
        else:
            said[model] = read(choice.kind, own.task, rows, own.y_test, cut)
        wanted = every if detail and model in MODELS else [chosen]
        moved = choice.threshold is not None or model == BASELINE
        for one in wanted:
            # What the engine has added up itself stays as it is, to the last digit.
            if moved or one.name not in NATIVE[choice.kind]:
                found[one.name] = one(said[model])
        if grouped and model != BASELINE:
            found |= _by_group(said[model], chosen)
        marks[model] = found
    return ClientMetrics(marks, said)


def read(
    kind: str, task: Any, outputs: NDArray[Any], y: NDArray[Any], threshold: float | None = None
) -> Answers:
    """Return what outputs say, in the user's unit."""
    outputs = outputs[: len(y)]
    if kind in (NUMBER, SURVIVAL) and len(y):
        outputs = np.asarray(task.predictions(outputs)).reshape(len(y), -1)
    return metrics.answers(kind, outputs, y, threshold=threshold)


def _by_group(own: Answers, chosen: Metric) -> dict[str, NDArray[np.float64]]:
    found: dict[str, NDArray[np.float64]] = {}
    if own.kind == CLASSES:
        place = np.arange(len(own.y)) % GROUPS
        right = np.bincount(place, own.said == own.y, minlength=GROUPS)
        found[RIGHT] = right.astype(np.float64)
    if chosen.name not in ("accuracy", "loss"):
        found[WITHOUT] = metrics.without_groups(own, chosen, GROUPS)
        found[EFFECTIVE] = np.array(float(_effective(own, chosen)))
    return found


def _effective(own: Answers, chosen: Metric) -> int:
    """Return how many rows decide a metric."""
    if chosen.rows is None and len(own.y):
        if own.kind == CLASSES:
            return int(np.unique(own.y, return_counts=True)[1].min())
        if own.kind == SURVIVAL:
            return int((own.y[:, 1] > 0).sum())
    return len(own.y)


def baseline_outputs(kind: str, own: ClientOutputs, width: int) -> NDArray[Any]:
    """Return what is said of every test row without a model, from the client's training rows.

    The shares of classes or labels, each seen once more than it was, so that none is impossible;
    the mean of numbers; of survival the same risk for all.
    """
    rows = len(own.y_test)
    y = own.y_train
    if kind == CLASSES:
        counts = np.bincount(y.astype(np.int64), minlength=width) + 1.0
        return np.tile(np.log(counts / counts.sum()), (rows, 1))
    if kind == LABELS:
        shares = (y.sum(0) + 1) / (len(y) + 2)
        return np.tile(np.log(shares / (1 - shares)), (rows, 1))
    if kind == NUMBER:
        mean = float(y.astype(np.float64).mean()) if len(y) else np.nan
        return np.full((rows, 1), mean)
    return np.zeros((rows, 1))


def baseline_score(own: ClientOutputs, choice: MetricChoice, width: int) -> float:
    """Return how good it is to answer without a model, by the chosen metric."""
    said = metrics.answers(choice.kind, baseline_outputs(choice.kind, own, width), own.y_test)
    return choice.metric(said)


def sequence_baseline(own: ClientOutputs, width: int) -> dict[str, float]:
    """Return how good it is to say of every word how often the client's training text has it."""
    told, seen = own.y_test[own.y_test >= 0], own.y_train[own.y_train >= 0]
    counts = np.bincount(seen.astype(np.int64), minlength=width) + 1.0
    loss = float(-np.log(counts / counts.sum())[told].mean()) if len(told) else np.nan
    right = float((told == counts.argmax()).mean()) if len(told) else np.nan
    return {"accuracy": right, "loss": loss, "perplexity": float(np.exp(loss))}


# All clients' rows together.


def pooled(
    said: Mapping[str, Sequence[tuple[int, Answers]]], choice: MetricChoice
) -> dict[str, dict[str, Any]]:
    """Return by model the metrics of all clients' test rows together, and what pictures need."""
    found: dict[str, dict[str, Any]] = {}
    for model, parts in said.items():
        if model not in MODELS or not parts:
            continue
        together = joined([own for _, own in parts])
        values = {one.name: one(together) for one in choice.all()}
        found[model] = {"metrics": values, **_pictures(together, parts)}
    return found


def joined(parts: Sequence[Answers]) -> Answers:
    """Put answers about several clients' rows one behind the other."""
    first = parts[0]
    columns = zip(*[part[1:] for part in parts], strict=True)
    return Answers(first.kind, *(np.concatenate(column) for column in columns))


def _pictures(whole: Answers, parts: Sequence[tuple[int, Answers]]) -> dict[str, Any]:
    if whole.kind == CLASSES and whole.shares.shape[1] <= _MOST_CLASSES:
        own = {}
        if len(parts) <= _MOST_CLIENTS:
            own = {str(client): metrics.confusion(one).tolist() for client, one in parts}
        return {
            "confusion": metrics.confusion(whole).tolist(),
            "confusion_of_clients": own,
            "reliability": metrics.reliability(whole).tolist(),
        }
    if whole.kind == LABELS:
        return {
            "confusion": metrics.confusion(whole).tolist(),
            "reliability": metrics.reliability(whole).tolist(),
        }
    if whole.kind == NUMBER:
        step = max(1, -(-len(whole.y) // _POINTS))
        points = np.stack([whole.y, whole.value], 1)[::step]
        return {"points": [[float(f"{v:.6g}") for v in row] for row in points]}
    return {}
