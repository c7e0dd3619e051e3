"""Compare the methods of a result: figures, tests of every pair, ranks, costs and a verdict."""

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from idiolect.analysis import bootstrap, paired_tests
from idiolect.analysis import fixed_clients as examples
from idiolect.analysis.cost_to_reach import Cost, Reach, costs, reach
from idiolect.analysis.figures import Figures, figures
from idiolect.analysis.ranks import Ranks, ranks
from idiolect.analysis.sampled_clients import sampled
from idiolect.analysis.scores import Floats, Scores, scores
from idiolect.analysis.verdict import Verdict, verdict
from idiolect.errors import ConfigError, DataError
from idiolect.results.document import plain

ALPHA = 0.05
FEW = 10  # clients: fewer are a fixed set, if they are the same under every seed
UNITS = ("clients", "examples")


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
    examples: float | None  # p for these clients, over test rows and seeds; None: rows not known
    p: float  # over clients the larger of `wilcoxon` and `seeds`, else `examples`: see `unit`
    p_holm: float  # of all pairs
    different: bool  # p_holm below alpha, and more than one seed to say so
    models_differ: bool  # with one seed: whether these trained models differ on their test rows


@dataclass(frozen=True)
class Comparison:
    """All that a result says about its methods; `as_dict` is ready for JSON."""

    alpha: float
    seeds: tuple[int, ...]
    clients: int
    replication: str  # what a verdict is over: "clients" of a population, or "examples" of these
    scope: str  # the same in words
    unit: str  # what is paired: a client, or a client and a seed
    pairs_tested: int  # how many such pairs there are
    methods: dict[str, Figures]  # by label, the best mean first
    pairs: list[Pair]
    ranks: Ranks
    target: float | None  # the accuracy on validation that `reach` is about
    reach: dict[str, Reach]
    costs: dict[str, Cost]  # of the whole run
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
    unit: str | None = None,
) -> Comparison:
    """Compare the methods of a result (what result.json holds) by every client's test accuracy.

    `unit` says what a verdict is over: "clients", which are a sample of those there could be, or
    "examples" of these very clients; without it `fitting` chooses.
    """
    if unit not in (None, *UNITS):
        raise ConfigError(f"unit is {unit!r}; expected one of {', '.join(UNITS)}")
    held = scores(content, model)
    over = unit or fitting(held, alpha)
    if over == "examples" and held.tested is None:
        raise DataError(
            "the result does not say how many test rows clients have, which unit examples needs; "
            "use unit clients"
        )
    means = bootstrap.resampled(held, resamples)
    described = {
        label: figures(
            held, label, _within(_interval(held, label, row, alpha, over)), _local(content, held)
        )
        for label, row in zip(held.labels, means, strict=True)
    }
    order = sorted(held.labels, key=lambda label: -described[label].mean)
    pairs = _pairs(held, means, order, alpha, over)
    found = reach(content, target)
    said = scope(held, over)
    return Comparison(
        alpha,
        held.seeds,
        held.accuracy.shape[2],
        over,
        said,
        held.unit,
        held.units.shape[1],
        {label: described[label] for label in order},
        pairs,
        ranks(held.labels, held.units, alpha),
        *found,
        {label: own for label, own in costs(content).items() if label in described},
        verdict(
            order, {label: described[label].mean for label in order}, pairs, len(held.seeds), said
        ),
    )


def fitting(held: Scores, alpha: float = ALPHA) -> str:
    """Choose what a verdict is over.

    Few clients that are the same under every seed are a fixed set: the question is which method is
    better for them. So they are too where so many methods are compared that no outcome over so few
    clients could be significant, even with one client against all others.
    """
    clients, methods = held.scored, len(held.labels)
    pairs = max(methods * (methods - 1) // 2, 1)
    enough = FEW
    while pairs * 2 * (enough + 1) / 2**enough >= alpha:
        enough += 1
    few = held.same_clients and clients < enough and held.tested is not None
    return "examples" if few else "clients"


def scope(held: Scores, over: str) -> str:
    """Say in words whom a verdict is about, and what it had to stand out against."""
    clients, seeds = held.scored, len(held.seeds)
    many = f"{seeds} seeds" if seeds > 1 else "one seed"
    if over == "clients":
        return f"of clients like these {clients}, over clients and {many}"
    whose = f"these {clients} clients" if clients > 1 else "this client"
    if not held.same_clients:
        whose = f"these data, divided among {clients} clients"
    known = "" if held.right is not None else ", counted as if methods erred independently"
    return f"of {whose}, over their test rows and {many}{known}"


def _interval(
    held: Scores, label: str, means: Floats, alpha: float, over: str
) -> tuple[float, float]:
    if over == "examples":
        return examples.average(held, label).interval(1 - alpha)
    return bootstrap.interval(means, sampled(held.method(label), held.same_clients), 1 - alpha)


def _pairs(held: Scores, means: Floats, order: list[str], alpha: float, over: str) -> list[Pair]:
    units = dict(zip(held.labels, held.units, strict=True))
    rows = dict(zip(held.labels, means, strict=True))
    named = list(itertools.combinations(order, 2))
    moved = [np.round(units[better] - units[worse], 12) for better, worse in named]
    apart = [held.method(better) - held.method(worse) for better, worse in named]
    over_clients = [paired_tests.signed_rank(own) for own in moved]
    over_seeds = [paired_tests.over_seeds(own, held.same_clients) for own in apart]
    fixed = [None if held.tested is None else examples.difference(held, *pair) for pair in named]
    if over == "clients":
        joint = [
            max(clients, 0.0 if seeds is None else seeds)
            for clients, seeds in zip(over_clients, over_seeds, strict=True)
        ]
    else:
        joint = [1.0 if own is None else own.p for own in fixed]
    adjusted, clients_adjusted = paired_tests.holm(joint), paired_tests.holm(over_clients)
    several = len(held.seeds) > 1
    found = []
    for place, (better, worse) in enumerate(named):
        own = fixed[place]
        if over == "examples" and own is not None:
            mean, between = own.mean, own.interval(1 - alpha)
        else:
            found_mean = sampled(apart[place], held.same_clients)
            mean = found_mean.mean
            between = bootstrap.interval(rows[better] - rows[worse], found_mean, 1 - alpha)
        significant = adjusted[place] < alpha
        sure = several and (over == "examples" or over_seeds[place] is not None)
        found.append(
            Pair(
                better,
                worse,
                mean,
                between,
                int((moved[place] > 0).sum()),
                int((moved[place] < 0).sum()),
                int((moved[place] == 0).sum()),
                over_clients[place],
                clients_adjusted[place],
                over_seeds[place],
                None if own is None else own.p,
                joint[place],
                adjusted[place],
                sure and significant,
                not several and over == "examples" and significant,
            )
        )
    return found


def _within(ends: tuple[float, float]) -> tuple[float, float]:
    """Cut an interval of accuracies where there are none: below 0 and above 1."""
    return max(ends[0], 0.0), min(ends[1], 1.0)


def _local(content: Mapping[str, Any], held: Scores) -> str | None:
    """Find the method that every client trains alone."""
    named = (label for label in held.labels if content["methods"][label].get("method") == "local")
    return next(named, None)
