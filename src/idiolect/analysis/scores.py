"""The accuracies to compare, and what they are paired by."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from idiolect.engine.outcome import RIGHT
from idiolect.errors import DataError

Floats = NDArray[np.float64]


class Scores(NamedTuple):
    """Test accuracy of every method, seed and client; NaN where a client has no test data."""

    labels: tuple[str, ...]
    accuracy: Floats  # [method, seed, client]
    seeds: tuple[int, ...]
    same_clients: bool  # whether a client's place means the same person under every seed
    tested: Floats | None = None  # [seed, client] test rows; None: not known
    train: Floats | None = None  # [seed, client] training rows
    right: Floats | None = None  # [method, seed, client, group] right answers; see `examples`
    same_test: bool = True  # whether a client's test rows are the same under every seed

    @property
    def rows(self) -> Floats:
        """Rows that a client's test rows are drawn from, as far as known, [seed, client]."""
        shape = self.accuracy.shape[1:]
        known = [own for own in (self.tested, self.train) if own is not None]
        return np.asarray(sum(known, np.zeros(shape)))

    @property
    def scored(self) -> int:
        """How many clients have a score."""
        return int((~np.isnan(self.accuracy)).any(axis=(0, 1)).sum())

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
        tuple(methods),
        np.array(accuracy, np.float64),
        seeds,
        _same_clients(content, seeds),
        _counted(methods, seeds, "test"),
        _counted(methods, seeds, "train"),
        _right(methods, seeds, model),
        bool(content.get("data", {}).get("same_test", True)),
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
    values = [client[model]["accuracy"] for client in _of(method, seed)["clients"]]
    return [np.nan if value is None else float(value) for value in values]


def _counted(methods: Mapping[str, Any], seeds: tuple[int, ...], part: str) -> Floats | None:
    """Read how many rows of a part clients have, which is the same for all methods."""
    one = next(iter(methods.values()))
    rows = [[client.get(part) for client in _of(one, seed)["clients"]] for seed in seeds]
    if any(count is None for row in rows for count in row):
        return None
    return np.array(rows, np.float64)


def _right(methods: Mapping[str, Any], seeds: tuple[int, ...], model: str | None) -> Floats | None:
    """Read right answers by group of test rows; None where some method or client has none."""
    found = [
        [
            [client[model or next(iter(one["headline"]))].get(RIGHT) for client in own["clients"]]
            for own in (_of(one, seed) for seed in seeds)
        ]
        for one in methods.values()
    ]
    if any(text is None for rows in found for row in rows for text in row):
        return None
    try:
        return np.array(
            [[[[int(n) for n in text.split()] for text in row] for row in rows] for rows in found],
            np.float64,
        )
    except ValueError:  # groups of another number: of an older run
        return None


def _of(method: Mapping[str, Any], seed: int) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(one for one in method["seeds"] if one["seed"] == seed)
    return found


def _same_clients(content: Mapping[str, Any], seeds: tuple[int, ...]) -> bool:
    """Tell from what the run noted, or, in older results, from how the data was divided."""
    data = content.get("data", {})
    if len(seeds) == 1:
        return True
    if "same_clients" in data:
        return bool(data["same_clients"])
    held = data.get("federations", ())
    return bool(held) and (len(set(held)) == 1 or all(", natural," in one for one in held))
