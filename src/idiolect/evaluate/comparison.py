"""Compare the methods of a result: figures, tests of every pair, ranks, costs and a verdict."""

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from idiolect.evaluate import bootstrap, tests
from idiolect.evaluate.figures import Figures, figures
from idiolect.evaluate.ranks import Ranks, ranks
from idiolect.evaluate.reach import Reach, reach
from idiolect.evaluate.sampling import sampled
from idiolect.evaluate.scores import Floats, Scores, scores
from idiolect.evaluate.verdict import Verdict, verdict
from idiolect.results.document import plain
from idiolect.results.fairness import fairness

ALPHA = 0.05


@dataclass(frozen=True)
class Pair:
    """How one method stands to another, over the same clients and seeds."""

    better: str  # the one with the higher mean
    worse: str
    difference: float  # of the means, never negative
    interval: tuple[float, float]  # of the difference, over seeds and clients
    wins: int  # pairs in which `better` is ahead, is behind, and is level
    losses: int
    ties: int
    wilcoxon: float  # p over clients
    wilcoxon_holm: float
    seeds: float | None  # p of the mean difference where seeds are a sample too; None with one
    p: float  # the larger of the two: a difference has to show both ways
    p_holm: float  # of all pairs
    different: bool  # p_holm below alpha, and more than one seed to say so


@dataclass(frozen=True)
class Comparison:
    """All that a result says about its methods; `as_dict` is ready for JSON."""

    alpha: float
    seeds: tuple[int, ...]
    clients: int
    unit: str  # what is paired: a client, or a client and a seed
    pairs_tested: int  # how many such pairs there are
    methods: dict[str, Figures]  # by label, the best mean first
    pairs: list[Pair]
    ranks: Ranks
    target: float | None  # the accuracy on validation that `reach` is about
    reach: dict[str, Reach]
    verdict: Verdict

    def pair(self, one: str, other: str) -> Pair:
        """Find the pair of two labels, in either order."""
        return next(pair for pair in self.pairs if {pair.better, pair.worse} == {one, other})

    def as_dict(self) -> dict[str, Any]:
        """Give plain values; NaN becomes None."""
        content: dict[str, Any] = plain(dataclasses.asdict(self))
        return content


def compare(
    content: Mapping[str, Any],
    *,
    model: str | None = None,
    alpha: float = ALPHA,
    target: float | None = None,
    resamples: int = bootstrap.RESAMPLES,
) -> Comparison:
    """Compare the methods of a result (what result.json holds) by every client's test accuracy."""
    held = scores(content, model)
    means = bootstrap.resampled(held, resamples)
    spread = fairness({label: held.method(label) for label in held.labels})["methods"]
    described = {
        label: figures(
            held,
            label,
            _within(
                bootstrap.interval(row, sampled(held.method(label), held.same_clients), 1 - alpha)
            ),
            spread[label]["variance"],
            _local(content, held),
        )
        for label, row in zip(held.labels, means, strict=True)
    }
    order = sorted(held.labels, key=lambda label: -described[label].mean)
    pairs = _pairs(held, means, order, alpha)
    found = reach(content, target)
    return Comparison(
        alpha,
        held.seeds,
        held.accuracy.shape[2],
        held.unit,
        held.units.shape[1],
        {label: described[label] for label in order},
        pairs,
        ranks(held.labels, held.units, alpha),
        *found,
        verdict(order, {label: described[label].mean for label in order}, pairs, len(held.seeds)),
    )


def _pairs(held: Scores, means: Floats, order: list[str], alpha: float) -> list[Pair]:
    units = dict(zip(held.labels, held.units, strict=True))
    rows = dict(zip(held.labels, means, strict=True))
    raw = []
    for better, worse in itertools.combinations(order, 2):
        moved = np.round(units[better] - units[worse], 12)
        apart = held.method(better) - held.method(worse)
        over_clients = tests.signed_rank(moved)
        over_seeds = tests.over_seeds(apart, held.same_clients)
        raw.append((better, worse, moved, apart, over_clients, over_seeds))
    joint = [max(clients, seeds if seeds is not None else 0.0) for *_, clients, seeds in raw]
    adjusted = tests.holm(joint)
    over_clients_adjusted = tests.holm([clients for *_, clients, _ in raw])
    return [
        Pair(
            better,
            worse,
            (mean := sampled(apart, held.same_clients)).mean,
            bootstrap.interval(rows[better] - rows[worse], mean, 1 - alpha),
            int((moved > 0).sum()),
            int((moved < 0).sum()),
            int((moved == 0).sum()),
            clients,
            over_clients_adjusted[place],
            seeds,
            joint[place],
            adjusted[place],
            seeds is not None and adjusted[place] < alpha,
        )
        for place, (better, worse, moved, apart, clients, seeds) in enumerate(raw)
    ]


def _within(ends: tuple[float, float]) -> tuple[float, float]:
    """Cut an interval of accuracies where there are none: below 0 and above 1."""
    return max(ends[0], 0.0), min(ends[1], 1.0)


def _local(content: Mapping[str, Any], held: Scores) -> str | None:
    """Find the method that every client trains alone."""
    named = (label for label in held.labels if content["methods"][label].get("method") == "local")
    return next(named, None)
