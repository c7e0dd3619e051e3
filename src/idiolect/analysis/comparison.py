"""Compare the methods of a result: figures, tests of every pair, ranks, costs and a verdict."""

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from idiolect.analysis import fixed_clients, significance
from idiolect.analysis.scores import ComparedScores, Floats, MethodFigures, figures, scores
from idiolect.analysis.significance import Ranks, ranks, sampled
from idiolect.analysis.verdict import Verdict, verdict
from idiolect.core.metrics import METRICS, Metric
from idiolect.errors import ConfigError, DataError
from idiolect.results.document import beside_baseline, plain

_INDEPENDENT = ", counted as if methods erred independently"
ALPHA = 0.05
FEW = 10  # clients: fewer are a fixed set, if they are the same under every seed
UNITS = ("clients", "examples")


@dataclass(frozen=True)
class MethodPair:
    """The difference between two methods, over the same clients and seeds."""

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
    different: bool  # p_holm below alpha, and more than one seed
    models_differ: bool  # with one seed: whether these trained models differ on their test rows


@dataclass(frozen=True)
class RunCost:
    """Cost of a method's whole run."""

    rounds: int
    bytes: float  # down and up, of one seed
    seconds: float  # training and scoring, all seeds together


@dataclass(frozen=True)
class CostToReach:
    """Cost until a method's validation curve first reached the target; None if it never did."""

    model: str  # whose curve: the personal models', or the global one's if only that was scored
    round: int | None
    bytes: float | None
    seconds: float | None


@dataclass(frozen=True)
class Comparison:
    """All statistics of a result; `as_dict` is ready for JSON."""

    alpha: float
    seeds: tuple[int, ...]
    clients: int
    replication: str  # what a verdict is over: "clients" of a population, or "examples" of these
    scope: str  # the same in words
    unit: str  # what is paired: a client, or a client and a seed
    pairs_tested: int  # how many such pairs there are
    methods: dict[str, MethodFigures]  # by label, the best mean first
    pairs: list[MethodPair]
    ranks: Ranks
    target: float | None  # the score on validation data that `reach` is about
    reach: dict[str, CostToReach]
    costs: dict[str, RunCost]
    verdict: Verdict
    metric: str = "accuracy"  # by which methods are compared
    metric_title: str = "accuracy"
    higher: bool = True  # whether more of it is better
    percent: bool = True  # whether it is a share
    baseline: float | None = None  # of guessing without a model; None: not known
    baseline_name: str = ""  # how that guesses
    baseline_line: str = ""  # said where no method is better than that

    def pair(self, one: str, other: str) -> MethodPair:
        """Return the pair of two labels, in either order."""
        return next(pair for pair in self.pairs if {pair.better, pair.worse} == {one, other})

    def as_dict(self) -> dict[str, Any]:
        """Return plain values; NaN becomes None."""
        content: dict[str, Any] = plain(dataclasses.asdict(self))
        return content


def compare(
    content: Mapping[str, Any],
    *,
    model: str | None = None,
    alpha: float = ALPHA,
    target: float | None = None,
    resamples: int = significance.RESAMPLES,
    unit: str | None = None,
    metric: str | None = None,
) -> Comparison:
    """Compare the methods of a result (what result.json holds) by every client's test score.

    `unit` says what a verdict is over: "clients", which are a sample of those there could be, or
    "examples" of these very clients; without it `fitting` chooses. `metric` is another than the
    one that the run has chosen.
    """
    if unit not in (None, *UNITS):
        raise ConfigError(f"unit is {unit!r}; expected one of {', '.join(UNITS)}")
    significance.stats()  # whatever the figures, it is missed in the same words
    held = scores(content, model, metric)
    turned, own_metric = held.turned, held.metric
    over = unit or fitting(held, alpha)
    if over == "examples" and held.tested is None:
        raise DataError(
            "the result does not say how many test rows clients have, which unit examples needs; "
            "use unit clients"
        )
    if over == "examples" and not held.paired:
        raise DataError(
            f"the result does not say how {own_metric.title} differs from row to row, which unit "
            f'examples needs; run it with evaluate.metric = "{own_metric.name}", or use unit '
            "clients"
        )
    means = dict(zip(held.labels, significance.resampled(turned, resamples), strict=True))
    methods = content["methods"]
    local = next((one for one in held.labels if methods[one].get("method") == "local"), None)
    described = {}
    for label, row in means.items():
        if over == "examples":
            low, high = fixed_clients.average(held, label).interval(1 - alpha)
        else:
            own = sampled(held.method(label), held.same_clients)
            low, high = significance.interval(own_metric.sign * row, own, 1 - alpha)
        low = low if own_metric.low is None else max(low, own_metric.low)
        high = high if own_metric.high is None else min(high, own_metric.high)
        described[label] = figures(held, label, (low, high), local)
    described = dict(sorted(described.items(), key=lambda item: -own_metric.sign * item[1].mean))
    pairs = _pairs(turned, means, list(described), alpha, over)
    words = scope(held, over)
    by_mean = {label: own.mean for label, own in described.items()}
    baseline, guess, line = beside_baseline(content, own_metric, by_mean)
    return Comparison(
        alpha,
        held.seeds,
        held.accuracy.shape[2],
        over,
        words,
        held.unit,
        held.units.shape[1],
        described,
        pairs,
        ranks(held.labels, turned.units, alpha),
        *costs_to_reach(methods, target, own_metric),
        {label: _cost(own) for label, own in methods.items() if label in described},
        verdict(by_mean, pairs, len(held.seeds), words, own_metric),
        own_metric.name,
        own_metric.title,
        own_metric.higher,
        own_metric.percent,
        baseline,
        guess,
        line,
    )


def fitting(held: ComparedScores, alpha: float = ALPHA) -> str:
    """Choose what a verdict is over.

    Few clients that are the same under every seed are a fixed set: the question is which method is
    better for them. So they are too where so many methods are compared that no outcome over so few
    clients could be significant, even with one client against all others.
    """
    methods = len(held.labels)
    pairs = max(methods * (methods - 1) // 2, 1)
    enough = FEW
    while pairs * 2 * (enough + 1) / 2**enough >= alpha:
        enough += 1
    few = held.same_clients and held.scored < enough and held.paired
    return "examples" if few else "clients"


def scope(held: ComparedScores, over: str) -> str:
    """Say in words which clients a verdict is about, and over what it was tested."""
    clients, seeds = held.scored, len(held.seeds)
    many = f"{seeds} seeds" if seeds > 1 else "one seed"
    rest = ""
    if held.lost:
        do = "does" if held.lost == 1 else "do"
        rest = f" ({held.lost} more {do} not define {held.metric.title} under every seed)"
    if over == "clients":
        return f"of clients like these {clients}{rest}, over clients and {many}"
    whose = f"these {clients} clients{rest}" if clients > 1 else f"this client{rest}"
    if not held.same_clients:
        whose = f"these data, divided among {clients} clients"
    accuracy = held.metric.name == "accuracy"
    known = "" if held.right is not None or not accuracy else _INDEPENDENT
    return f"of {whose}, over their test rows and {many}{known}"


def _pairs(
    held: ComparedScores, means: Mapping[str, Floats], order: list[str], alpha: float, over: str
) -> list[MethodPair]:
    """Test every pair; `means` are resampled by label, `order` is by mean, best first."""
    units = dict(zip(held.labels, held.units, strict=True))
    found = []
    for better, worse in itertools.combinations(order, 2):
        moved = np.round(units[better] - units[worse], 12)
        apart = held.method(better) - held.method(worse)
        wilcoxon = significance.signed_rank(moved)
        seeds = significance.over_seeds(apart, held.same_clients)
        fixed = fixed_clients.difference(held, better, worse) if held.paired else None
        if over == "examples" and fixed is not None:
            p, mean, between = fixed.p, fixed.mean, fixed.interval(1 - alpha)
        else:
            own = sampled(apart, held.same_clients)
            p, mean = max(wilcoxon, seeds or 0.0), own.mean
            between = significance.interval(means[better] - means[worse], own, 1 - alpha)
        if held.metric.percent:  # no two shares are further apart
            between = (max(between[0], -1.0), min(between[1], 1.0))
        found.append(
            MethodPair(
                better,
                worse,
                mean,
                between,
                wins=int((moved > 0).sum()),
                losses=int((moved < 0).sum()),
                ties=int((moved == 0).sum()),
                wilcoxon=wilcoxon,
                wilcoxon_holm=1.0,
                seeds=seeds,
                examples=None if fixed is None else fixed.p,
                p=p,
                p_holm=1.0,
                different=len(held.seeds) > 1 and (over == "examples" or seeds is not None),
                models_differ=len(held.seeds) == 1 and over == "examples",
            )
        )
    return _adjusted(found, alpha)


def _adjusted(pairs: list[MethodPair], alpha: float) -> list[MethodPair]:
    """Adjust p by Holm over all pairs, and drop the differences that are not significant."""
    joint = significance.holm([pair.p for pair in pairs])
    clients = significance.holm([pair.wilcoxon for pair in pairs])
    return [
        dataclasses.replace(
            pair,
            wilcoxon_holm=of_clients,
            p_holm=p,
            different=pair.different and p < alpha,
            models_differ=pair.models_differ and p < alpha,
        )
        for pair, p, of_clients in zip(pairs, joint, clients, strict=True)
    ]


def _cost(method: Mapping[str, Any]) -> RunCost:
    sent = [seed["traffic"]["bytes_down"] + seed["traffic"]["bytes_up"] for seed in method["seeds"]]
    seconds = method["speed"].get("seconds", method["speed"]["train_seconds"])
    return RunCost(method["rounds"], float(sum(sent) / len(sent)), float(seconds))


def costs_to_reach(
    methods: Mapping[str, Any], target: float | None = None, metric: Metric = METRICS["accuracy"]
) -> tuple[float | None, dict[str, CostToReach]]:
    """Return the target and, by label, what each method needed to reach it.

    Curves are means over clients and seeds on validation data. Without a target it is where
    the worst curve ends, so that every method gets there. Bytes and seconds grow evenly with
    rounds: a round sends the same trees to as many clients as any other.
    """
    found_curves = {label: _curve(own, metric.name) for label, own in methods.items()}
    curves = {label: curve for label, curve in found_curves.items() if curve is not None}
    if target is None:
        worst = min if metric.higher else max
        target = worst((points[-1][1] for _, points in curves.values()), default=None)
    if target is None:
        return None, {}
    found = {}
    for label, (model, points) in curves.items():
        # 0.8 summed in another order is not 0.8 in binary.
        sign = metric.sign
        round = next((r for r, value in points if sign * value >= sign * target - 1e-9), None)
        found[label] = CostToReach(model, None, None, None)
        if round is not None:
            cost = _cost(methods[label])
            share = round / max(cost.rounds, 1)
            found[label] = CostToReach(model, round, cost.bytes * share, cost.seconds * share)
    return target, found


def _curve(method: Mapping[str, Any], name: str) -> tuple[str, list[tuple[int, float]]] | None:
    """Return the mean validation curve of the first model that was scored in the rounds."""
    held = method.get("curves") or {"val": {}, "rounds": ()}
    for model in method["headline"]:
        rows = held["val"].get(model, {}).get(name, [])
        points = [
            (round, sum(seen) / len(seen))
            for round, row in zip(held["rounds"], rows, strict=False)
            if (seen := [value for value in row if value is not None])
        ]
        if points:
            return model, points
    return None
