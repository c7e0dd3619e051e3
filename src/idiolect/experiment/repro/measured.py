"""Figures that were measured: run, then label, then model; mean and deviation over seeds in %."""

import json
from collections.abc import Mapping
from importlib import resources
from statistics import mean, stdev
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """A mean over seeds and its sample deviation, per cent."""

    mean: float
    deviation: float


Measured = Mapping[str, Mapping[str, Mapping[str, Figure]]]


def figure(seeds: list[float]) -> Figure:
    """Return the mean and deviation, in per cent, of a share given for each seed."""
    values = [100 * value for value in seeds]
    return Figure(mean(values), stdev(values) if len(values) > 1 else 0.0)


def kept() -> Measured:
    """Return what came with the package: the figures of docs/reproduction."""
    text = (
        resources.files("idiolect.experiment.repro")
        .joinpath("measured.json")
        .read_text(encoding="utf-8")
    )
    return {
        run: {
            label: {model: Figure(*pair) for model, pair in own["models"].items()}
            for label, own in labels.items()
        }
        for run, labels in json.loads(text).items()
    }


def of_result(result: Mapping[str, Any], name: str) -> dict[str, dict[str, Figure]]:
    """Return a finished run's figures; `name` is `mean` or `weighted_mean`, as the paper has it."""
    return {
        label: {
            model: figure([seed["models"][model][name] for seed in own["seeds"]])
            for model in own["headline"]
        }
        for label, own in result["methods"].items()
    }
