"""Rounds and bytes it took to come near the last round's figure, told by validation alone."""

from typing import Any

import numpy as np

from idiolect.engine.outcome import Outcome
from idiolect.results import statistics

TOLERANCE = 0.01  # one point of accuracy


def reached(outcome: Outcome, tolerance: float = TOLERANCE) -> dict[str, Any] | None:
    """Find the first evaluated round from which on validation accuracy is near the last round's.

    Accuracy is the mean over clients and seeds, of personal models where they were scored along
    the way, else of the global one. A round sends the same trees to as many clients as any other,
    so bytes grow with rounds. None where no curve was taken.
    """
    for model in outcome.models:
        curve = outcome.curves.get(f"val/{model}/accuracy")
        if curve is not None and not np.isnan(curve[-1]).all():
            break
    else:
        return None
    round = _first(outcome, curve, tolerance)
    share = round / max(outcome.rounds, 1)
    seeds = range(len(outcome.members))
    return {
        "model": model,
        "tolerance": tolerance,
        "round": round,
        "round_of_seeds": [_first(outcome, curve[:, [seed]], tolerance) for seed in seeds],
        "bytes_down": _mean([wire.bytes_down for wire in outcome.wire]) * share,
        "bytes_up": _mean([wire.bytes_up for wire in outcome.wire]) * share,
    }


def _first(outcome: Outcome, curve: np.ndarray, tolerance: float) -> int:
    """Walk back from the end, as long as accuracy is no more than the tolerance below the last."""
    means = [statistics.mean(point.reshape(-1)) for point in curve]
    enough = means[-1] - tolerance - 1e-9  # 0.80 - 0.01 is not 0.79 in binary
    place = len(means) - 1
    while place and means[place - 1] >= enough:
        place -= 1
    return outcome.evaluated[place]


def _mean(values: list[int]) -> float:
    return sum(values) / len(values)
