"""The test scores of a result, what they are paired by, and the figures of one method."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from idiolect.core.metrics import METRICS, Metric, metric
from idiolect.engine.outcome import EFFECTIVE, RIGHT, WITHOUT
from idiolect.errors import DataError
from idiolect.results import statistics
from idiolect.results.document import metric_of

Floats = NDArray[np.float64]


class ComparedScores(NamedTuple):
    """A metric of every method, seed and client; NaN where a client's test rows define none."""

    labels: tuple[str, ...]
    accuracy: Floats  # [method, seed, client] of the metric, which is accuracy unless said
    seeds: tuple[int, ...]
    same_clients: bool  # whether client i is the same under every seed
    tested: Floats | None = None  # [seed, client] test rows; None: not known
    train: Floats | None = None  # [seed, client] training rows
    right: Floats | None = None  # [method, seed, client, group] right answers by group of rows
    same_test: bool = True  # whether a client's test rows are the same under every seed
    metric: Metric = METRICS["accuracy"]
    without: Floats | None = (
        None  # [method, seed, client, group] the metric without a group of rows
    )
    effective: Floats | None = None  # [seed, client] rows that decide it, such as the positive ones
    lost: int = 0  # clients left out because not every seed's test rows define the metric

    @property
    def turned(self) -> "ComparedScores":
        """The same with more being better."""
        sign = self.metric.sign
        without = None if self.without is None else sign * self.without
        return self._replace(accuracy=sign * self.accuracy, without=without)

    @property
    def paired(self) -> bool:
        """Whether it is known how methods differ from row to row, or can be guessed."""
        return self.tested is not None and (
            self.metric.name == "accuracy" or self.without is not None
        )

    @property
    def rows(self) -> Floats:
        """Rows that a client's test rows are drawn from, as far as known, [seed, client]."""
        known = [own for own in (self.tested, self.train) if own is not None]
        return np.asarray(sum(known, np.zeros(self.accuracy.shape[1:])))

    @property
    def scored(self) -> int:
        """Number of clients that have a score."""
        return int((~np.isnan(self.accuracy)).any(axis=(0, 1)).sum())

    @property
    def unit(self) -> str:
        """What one pair is: a client, or a client under one seed."""
        return "client" if self.same_clients else "client and seed"

    @property
    def units(self) -> Floats:
        """Scores by unit, [method, unit].

        Clients that are the same under all seeds are averaged over seeds: their scores are
        repeated measures, and counting each as another client would invent evidence.
        """
        held = self.accuracy
        by_unit = held.mean(axis=1) if self.same_clients else held.reshape(len(held), -1)
        return np.asarray(by_unit[:, ~np.isnan(by_unit).any(axis=0)])

    def method(self, label: str) -> Floats:
        """Return one method's scores, [seed, client]."""
        return np.asarray(self.accuracy[self.labels.index(label)])


def scores(
    content: Mapping[str, Any], model: str | None = None, name: str | None = None
) -> ComparedScores:
    """Read the scores of a result's methods, of their headline models or of `model`.

    Where methods were run with different seeds, those that all share are compared. `name` is a
    metric other than the one that the run has chosen.
    """
    chosen = metric_of(content)
    own_metric = chosen if name in (None, chosen.name) else metric(name, content.get("task"))
    models = {
        label: model or next(iter(one["headline"]))
        for label, one in content["methods"].items()
        if one["headline"] and (model is None or model in one["headline"])
    }
    if not models:
        raise DataError(f"the result has no method with a {model or 'scored'} model to compare")
    by_seed = [
        {one["seed"]: one["clients"] for one in content["methods"][label]["seeds"]}
        for label in models
    ]
    seeds = tuple(seed for seed in by_seed[0] if all(seed in own for own in by_seed))
    if not seeds:
        raise DataError("the methods of the result share no seed; run them with the same seeds")
    clients = [[own[seed] for seed in seeds] for own in by_seed]  # [method][seed]
    if len({len(row) for rows in clients for row in rows}) > 1:
        raise DataError("the methods of the result have different clients; nothing can be paired")
    found = [
        [[client[name] for client in row] for row in rows]
        for name, rows in zip(models.values(), clients, strict=True)
    ]
    values = [[[own.get(own_metric.name) for own in row] for row in rows] for rows in found]
    accuracy = np.array(values, np.float64)  # None becomes NaN
    if np.isnan(accuracy).all() and own_metric.name != "accuracy":
        raise DataError(
            f"the result has no {own_metric.title} of clients, or none is defined; run it with "
            f'evaluate.metric = "{own_metric.name}"'
        )
    same, same_clients = own_metric.name == chosen.name, _same_clients(content, seeds)
    lost = _not_of_every_seed(accuracy) if same_clients else np.zeros(0, np.int64)
    accuracy[:, :, lost] = np.nan
    return ComparedScores(
        tuple(models),
        accuracy,
        seeds,
        same_clients,
        _row_counts(clients[0], "test"),
        _row_counts(clients[0], "train"),
        _right_answers(found),
        bool(content.get("data", {}).get("same_test", True)),
        own_metric,
        _without_groups(found) if same else None,
        _effective_rows(found[0]) if same else None,
        len(lost),
    )


def _not_of_every_seed(accuracy: Floats) -> NDArray[np.int64]:
    """Find clients, the same under all seeds, whose test rows define a score under some only.

    Means, intervals and differences are of the others, which are the same under every seed. If
    there are none, nobody is left out.
    """
    defined = ~np.isnan(accuracy).all(axis=0)
    some = defined.any(axis=0) & ~defined.all(axis=0)
    return np.flatnonzero(some) if defined.all(axis=0).any() else np.zeros(0, np.int64)


def _without_groups(found: Sequence[Sequence[Sequence[Mapping[str, Any]]]]) -> Floats | None:
    """Return the metric without each group of rows; None where no client has it."""
    lines = [[[own.get(WITHOUT) for own in row] for row in rows] for rows in found]
    texts = [line.split() for rows in lines for row in rows for line in row if line]
    if not texts:
        return None
    width = max(map(len, texts))
    values = np.full((len(found), len(found[0]), len(found[0][0]), width), np.nan)
    for method, rows in enumerate(lines):
        for seed, row in enumerate(rows):
            for client, line in enumerate(row):
                own = (line or "").split()
                values[method, seed, client, : len(own)] = [float(one) for one in own]
    return values


def _effective_rows(found: Sequence[Sequence[Mapping[str, Any]]]) -> Floats | None:
    rows = np.array([[own.get(EFFECTIVE) for own in row] for row in found], np.float64)
    return None if np.isnan(rows).all() else rows


def _row_counts(clients: Sequence[Sequence[Mapping[str, Any]]], part: str) -> Floats | None:
    """Return how many rows of a part clients have, [seed, client]; None where not known."""
    rows = np.array([[client.get(part) for client in row] for row in clients], np.float64)
    return None if np.isnan(rows).any() else rows


def _right_answers(found: Sequence[Sequence[Sequence[Mapping[str, Any]]]]) -> Floats | None:
    """Return right answers by group of test rows; None where some method or client has none."""
    if any(own.get(RIGHT) is None for rows in found for row in rows for own in row):
        return None
    try:
        return np.array(
            [[[own[RIGHT].split() for own in row] for row in rows] for rows in found], np.float64
        )
    except ValueError:  # groups of another number: of an older run
        return None


def _same_clients(content: Mapping[str, Any], seeds: tuple[int, ...]) -> bool:
    """Return what the run noted, or, in older results, what the partition implies."""
    data = content.get("data", {})
    if len(seeds) == 1:
        return True
    if "same_clients" in data:
        return bool(data["same_clients"])
    held = data.get("federations", ())
    return bool(held) and (len(set(held)) == 1 or all(", natural," in one for one in held))


@dataclass(frozen=True)
class MethodFigures:
    """One method's test scores. Each is computed seed by seed, then averaged over seeds."""

    mean: float  # of the clients' scores, each client alike
    interval: tuple[float, float]  # of the mean, over seeds and clients
    std_clients: float  # sample deviation over a seed's clients: "± clients" everywhere
    std_seeds: float  # sample deviation of the seeds' means
    worst_decile: float  # mean of the worst tenth of the clients, at least one
    below_local: float | None  # share of clients below their own local model
    jain: float  # Jain's index, 1 where all clients are alike
    variance: float  # the square of std_clients: PersFL's Eq. 6


def figures(
    held: ComparedScores, label: str, interval: tuple[float, float], local: str | None
) -> MethodFigures:
    """Describe one method; `local` is the label of the method that trains each client alone."""
    own, sign = held.method(label), held.metric.sign
    spread = statistics.spread_over_clients(own)
    return MethodFigures(
        mean=_over_seeds(own, statistics.mean),
        interval=interval,
        std_clients=spread,
        std_seeds=statistics.deviation(np.array([statistics.mean(row) for row in own])),
        worst_decile=sign * _over_seeds(sign * own, worst_decile),
        below_local=None if local is None else below(sign * own, sign * held.method(local)),
        jain=_over_seeds(own, jain),
        variance=spread**2,
    )


def worst_decile(values: Floats) -> float:
    """Return the mean of the worst tenth of the clients, rounded up to whole clients."""
    seen = np.sort(values[~np.isnan(values)])
    return statistics.mean(seen[: math.ceil(len(seen) / 10)])


def jain(values: Floats) -> float:
    """Return Jain's index (Σx)² / (n Σx²): 1 where all are alike, 1/n where one has it all."""
    seen = values[~np.isnan(values)]
    squares = float((seen**2).sum())
    return float(seen.sum()) ** 2 / (len(seen) * squares) if squares else math.nan


def below(own: Floats, local: Floats) -> float:
    """Return the share of clients, of all seeds together, whose model is worse than the local."""
    seen = ~np.isnan(own) & ~np.isnan(local)
    return statistics.mean((np.round(own, 12) < np.round(local, 12))[seen].astype(np.float64))


def _over_seeds(values: Floats, figure: Callable[[Floats], float]) -> float:
    """Average a figure of each seed over the seeds that have it."""
    return statistics.mean(np.array([figure(row) for row in values]))
