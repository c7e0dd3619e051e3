"""Who took part in a run: means over all clients, over those that did, over those that never did.

A client that took part in no round has no trained state of its own. It gets its model as a newcomer
does, and a mean over all clients is never given without saying how many of them these are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from idiolect.results import statistics

KINDS = ("all", "took_part", "never")


def of_seed(
    scores: Mapping[str, NDArray[np.floating]], took_part: NDArray[np.bool_]
) -> dict[str, Any]:
    """Count the clients of one seed, and average each model's accuracy over all and both parts."""
    parts = dict(zip(KINDS, (np.ones_like(took_part), took_part, ~took_part), strict=True))
    return {
        "clients": {kind: int(chosen.sum()) for kind, chosen in parts.items()},
        "accuracy": {
            model: {kind: statistics.mean(values[chosen]) for kind, chosen in parts.items()}
            for model, values in scores.items()
        },
    }


def over_seeds(method: Mapping[str, Any]) -> dict[str, Any]:
    """Average the same over the seeds of a method in a result; {} where it does not say."""
    seeds = [seed["participation"] for seed in method["seeds"] if "participation" in seed]
    if not seeds:
        return {}
    return {
        "clients": {kind: _mean([own["clients"][kind] for own in seeds]) for kind in KINDS},
        "accuracy": {
            model: {kind: _mean([own["accuracy"][model][kind] for own in seeds]) for kind in KINDS}
            for model in seeds[0]["accuracy"]
        },
    }


def lines(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Say in a line for each method how its mean is made up, where some clients never took part."""
    told = []
    for label, method in methods.items():
        found = over_seeds(method)
        if not found or not found["clients"]["never"]:
            continue
        clients = found["clients"]
        first = next(iter(found["accuracy"].values()))
        told.append(
            f"{label}: {_percent(first['all'])} over all {clients['all']:g} clients; "
            f"{_percent(first['took_part'])} over the {clients['took_part']:g} that took part; "
            f"{_percent(first['never'])} over the {clients['never']:g} that never did, with models "
            "as newcomers get them"
        )
    return told


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def _mean(values: Sequence[float | None]) -> float | None:
    seen = [value for value in values if value is not None and value == value]
    return sum(seen) / len(seen) if seen else None
