"""What it costs to come to a given accuracy: rounds, bytes and seconds, by validation alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reach:
    """When a method's validation curve first came to the target; None where it never did."""

    model: str  # whose curve: the personal models', or the global one's where only that was scored
    round: int | None
    bytes: float | None  # down and up, of one seed
    seconds: float | None  # of training and scoring, all seeds together


@dataclass(frozen=True)
class Cost:
    """What the whole run of a method took."""

    rounds: int
    bytes: float  # down and up, of one seed
    seconds: float  # training and scoring, all seeds together


def costs(content: Mapping[str, Any]) -> dict[str, Cost]:
    """Say what each method's whole run took, by label."""
    return {
        label: Cost(method["rounds"], _sent(method), _seconds(method))
        for label, method in content["methods"].items()
    }


def _sent(method: Mapping[str, Any]) -> float:
    sent = [seed["traffic"]["bytes_down"] + seed["traffic"]["bytes_up"] for seed in method["seeds"]]
    return float(sum(sent) / len(sent))


def _seconds(method: Mapping[str, Any]) -> float:
    return float(method["speed"].get("seconds", method["speed"]["train_seconds"]))


def reach(content: Mapping[str, Any], target: float | None = None) -> tuple[float | None, Any]:
    """Return the target and, by label, what each method needed to come to it.

    Curves are means over clients and seeds of validation accuracy. Without a target it is where
    the lowest curve ends, so that every method gets there. Bytes and seconds grow evenly with
    rounds: a round sends the same trees to as many clients as any other.
    """
    curves = {
        label: curve
        for label, method in content["methods"].items()
        if (curve := _curve(method)) is not None
    }
    if target is None and curves:
        target = min(points[-1][1] for _, points in curves.values())
    if target is None:
        return None, {}
    found = {}
    for label, (model, points) in curves.items():
        method = content["methods"][label]
        # 0.8 summed in another order is not 0.8 in binary.
        round = next((r for r, accuracy in points if accuracy >= target - 1e-9), None)
        found[label] = _cost(method, model, round)
    return target, found


def _cost(method: Mapping[str, Any], model: str, round: int | None) -> Reach:
    if round is None:
        return Reach(model, None, None, None)
    share = round / max(method["rounds"], 1)
    return Reach(model, round, _sent(method) * share, _seconds(method) * share)


def _curve(method: Mapping[str, Any]) -> tuple[str, list[tuple[int, float]]] | None:
    """Give the mean validation curve of the first model that was scored along the way."""
    held = method.get("curves")
    if not held:
        return None
    for model in method["headline"]:
        rows = held["val"].get(model, {}).get("accuracy", [])
        points = [
            (round, sum(seen) / len(seen))
            for round, row in zip(held["rounds"], rows, strict=False)
            if (seen := [value for value in row if value is not None])
        ]
        if points:
            return model, points
    return None
