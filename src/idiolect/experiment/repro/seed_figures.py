"""Figures that were measured: run, then label, then model; a value for each seed in %."""

import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np

from idiolect.errors import ConfigError
from idiolect.results.document import metric_of
from idiolect.results.statistics import over_clients, student_quantile

BEST_TEST_ROUND = ", best test round"
"""Ends the name of a model that is scored as much of the field does, by a choice on test data."""
LAST_ROUNDS, BY_VALIDATION = ", last ten rounds", ", best validation round"
NEWCOMERS, TOOK_PART = ", newcomers", ", took part"
"""End the name of a model that is scored on the clients of no round, and on the others."""


ERROR = 0.05  # of each side of an equivalence, and of all claims of a row together


class Figure(NamedTuple):
    """A figure of each seed, in per cent."""

    seeds: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return mean(self.seeds)

    @property
    def deviation(self) -> float:
        """The sample deviation over seeds; 0 of a single one."""
        return stdev(self.seeds) if len(self.seeds) > 1 else 0.0

    @property
    def bounds(self) -> tuple[float, float]:
        """Between what the mean of ever more seeds lies: each side is wrong in 5 % of cases.

        A single seed says nothing of the spread: whatever it shows may be luck, but not that it
        meets a figure.
        """
        if len(self.seeds) < 2:
            return -math.inf, self.mean
        freedom = len(self.seeds) - 1
        way = student_quantile(2 * ERROR, freedom) * self.deviation / math.sqrt(len(self.seeds))
        return self.mean - way, self.mean + way


Measured = Mapping[str, Mapping[str, Mapping[str, Figure]]]


def figure_of(seeds: Sequence[float]) -> Figure:
    """Return a share given for each seed in per cent."""
    return Figure(tuple(100 * value for value in seeds))


def shipped_figures() -> Measured:
    """Return what came with the package: the figures of docs/reproduction."""
    return {
        run: {
            label: {model: Figure(tuple(seeds)) for model, seeds in own["models"].items()}
            for label, own in labels.items()
        }
        for run, labels in shipped().items()
    }


def shipped() -> dict[str, Any]:
    """Return measured.json: of each run and label the models' figures, and seconds."""
    file = resources.files("idiolect.experiment.repro").joinpath("measured.json")
    return dict(json.loads(file.read_text(encoding="utf-8")))


def figures_of_result(result: Mapping[str, Any], name: str) -> dict[str, dict[str, Figure]]:
    """Return a finished run's figures; `name` is what the paper prints.

    `mean` or `weighted_mean` over clients, or `pooled`: of all clients' test rows together. Where
    clients are scored on a common test set, that is the figure. Beside them, under names of their
    own, the best and the last test rounds of runs that recorded them, and newcomers' scores.
    """
    if not metric_of(result).percent:
        raise ConfigError(
            f"{result['name']} is scored by {metric_of(result).title}, and figures are compared in "
            "per cent: set evaluate.metric to a share, such as accuracy"
        )
    found: dict[str, dict[str, Figure]] = {}
    for label, own in result["methods"].items():
        found[label] = {
            model: figure_of(
                [_score_of(seed["models"][model], name, result) for seed in own["seeds"]]
            )
            for model in own["headline"]
        }
        for model, best in own.get("best_test_round", {}).items():
            found[label][model + BEST_TEST_ROUND] = figure_of(best["weighted_mean"])
        others = {LAST_ROUNDS: "last_test_rounds", BY_VALIDATION: "test_at_best_validation_round"}
        for words, key in others.items():
            for model, figures in own.get(key, {}).items():
                found[label][model + words] = figure_of(figures[_over(name)])
        for model in own["headline"]:
            for words, present in ((NEWCOMERS, False), (TOOK_PART, True)):
                parts = [
                    _part(seed["clients"], model, name, result, present) for seed in own["seeds"]
                ]
                if not any(math.isnan(part) for part in parts):
                    found[label][model + words] = figure_of(parts)
    return found


def _over(name: str) -> str:
    """Return the mean over clients that a figure is; all rows together is clients by rows."""
    return "mean" if name == "mean" else "weighted_mean"


def _part(
    clients: Sequence[Mapping[str, Any]],
    model: str,
    name: str,
    result: Mapping[str, Any],
    present: bool,
) -> float:
    """Return the mean of those clients that took part in some round, or of the newcomers."""
    own = [one for one in clients if one.get("took_part", True) is present]
    scores = np.array([one[model][metric_of(result).name] for one in own], np.float64)
    return over_clients(scores, [one["test"] for one in own])[_over(name)]


def _score_of(scores: Mapping[str, Any], name: str, result: Mapping[str, Any]) -> float:
    if name == "pooled":
        return float(scores["pooled"][result["metric"]["name"]])
    return float(scores["common_accuracy" if "common_accuracy" in scores else name])
