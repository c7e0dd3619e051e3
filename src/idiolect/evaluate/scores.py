"""The accuracies to compare, and what they are paired by."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from idiolect.errors import DataError

Floats = NDArray[np.float64]


class Scores(NamedTuple):
    """Test accuracy of every method, seed and client; NaN where a client has no test data."""

    labels: tuple[str, ...]
    accuracy: Floats  # [method, seed, client]
    seeds: tuple[int, ...]
    same_clients: bool  # whether a client's place means the same person under every seed

    @property
    def unit(self) -> str:
        """What one pair is: a client, or a client under one seed."""
        return "client" if self.same_clients else "client and seed"

    @property
    def units(self) -> Floats:
        """Scores by unit, [method, unit]; a client met under several seeds counts once.

        Persons who stay the same over seeds are averaged over seeds: their accuracies are repeated
        measures, and counting each as a person of its own would invent evidence.
        """
        held = self.accuracy
        by_unit = held.mean(axis=1) if self.same_clients else held.reshape(len(held), -1)
        whole = ~np.isnan(by_unit).any(axis=0)
        return np.asarray(by_unit[:, whole])

    def method(self, label: str) -> Floats:
        """Give one method's scores, [seed, client]."""
        return np.asarray(self.accuracy[self.labels.index(label)])


def scores(content: Mapping[str, Any], model: str | None = None) -> Scores:
    """Take the scores of a result's methods, of their headline models or of `model`.

    Where methods were run with different seeds, those that all share are compared.
    """
    methods = {label: one for label, one in content["methods"].items() if _has(one, model)}
    if not methods:
        raise DataError(f"the result has no method with a {model or 'scored'} model to compare")
    seeds = _shared_seeds(methods)
    accuracy = [
        [_row(one, seed, model or next(iter(one["headline"]))) for seed in seeds]
        for one in methods.values()
    ]
    if len({len(row) for rows in accuracy for row in rows}) > 1:
        raise DataError("the methods of the result have different clients; nothing can be paired")
    return Scores(
        tuple(methods), np.array(accuracy, np.float64), seeds, _same_clients(content, seeds)
    )


def _has(method: Mapping[str, Any], model: str | None) -> bool:
    return bool(method["headline"]) and (model is None or model in method["headline"])


def _shared_seeds(methods: Mapping[str, Any]) -> tuple[int, ...]:
    held = [[seed["seed"] for seed in one["seeds"]] for one in methods.values()]
    shared = tuple(seed for seed in held[0] if all(seed in own for own in held))
    if not shared:
        raise DataError("the methods of the result share no seed; run them with the same seeds")
    return shared


def _row(method: Mapping[str, Any], seed: int, model: str) -> list[float]:
    found = next(one for one in method["seeds"] if one["seed"] == seed)
    values = [client[model]["accuracy"] for client in found["clients"]]
    return [np.nan if value is None else float(value) for value in values]


def _same_clients(content: Mapping[str, Any], seeds: tuple[int, ...]) -> bool:
    """Tell from what the run noted, or, in older results, from how the data was divided."""
    data = content.get("data", {})
    if len(seeds) == 1:
        return True
    if "same_clients" in data:
        return bool(data["same_clients"])
    held = data.get("federations", ())
    return bool(held) and (len(set(held)) == 1 or all(", natural," in one for one in held))
