"""Figures over clients and seeds. A client without test data has no score and is left out."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from idiolect.engine.outcome import Outcome

Figures = dict[str, float]


def over_clients(scores: NDArray[np.floating], sizes: Sequence[int]) -> Figures:
    """Summarise one seed: plain mean, mean by test examples, sample deviation and variance."""
    values, weights = np.asarray(scores, np.float64), np.asarray(sizes, np.float64)
    seen = ~np.isnan(values)
    values, weights = values[seen], weights[seen]
    total = float(weights.sum())
    weighted = float((values * weights).sum()) / total if total else math.nan
    return {
        "mean": mean(values),
        "weighted_mean": weighted,
        "std": deviation(values),
        "variance": deviation(values) ** 2,
    }


def over_seeds(scores: NDArray[np.floating]) -> dict[str, Figures]:
    """Summarise [seed, client] by two spreads.

    `seeds`: the mean of each seed, then mean and deviation over seeds. `clients`: the mean of each
    client, and `spread_over_clients`.
    """
    values = np.asarray(scores, np.float64)
    by_seed = np.array([mean(row) for row in values])
    by_client = np.array([mean(column) for column in values.T])
    return {
        "seeds": {"mean": mean(by_seed), "std": deviation(by_seed)},
        "clients": {"mean": mean(by_client), "std": spread_over_clients(values)},
    }


def spread_over_clients(scores: NDArray[np.floating]) -> float:
    """Say how uneven clients are, of [seed, client]: "± clients" wherever it stands.

    The sample deviation over the clients of one seed, averaged over seeds. It means the same where
    a client is the same person under every seed and where it is another one. A deviation of the
    clients' means over seeds would shrink with every seed that divides the data anew.
    """
    values = np.asarray(scores, np.float64)
    return mean(np.array([deviation(row) for row in values]))


def mean(values: NDArray[np.floating]) -> float:
    """Return the mean of what is there; NaN of nothing."""
    seen = values[~np.isnan(values)]
    return float(seen.mean()) if len(seen) else math.nan


def deviation(values: NDArray[np.floating]) -> float:
    """Return the sample standard deviation (n - 1); NaN for fewer than two values."""
    seen = values[~np.isnan(values)]
    return float(seen.std(ddof=1)) if len(seen) > 1 else math.nan


# Fairness as PersFL defines it (Eq. 6): a method is fairer whose clients' accuracies vary less.


FAIRER, LESS, EQUAL = "fairer", "less fair", "equal"


def fairness(accuracies: Mapping[str, NDArray[np.floating]]) -> dict[str, Any]:
    """Compare methods by the spread of accuracy over clients; each is [seed, client].

    `pairs[t][t']` says how t stands beside t', and by which factor its deviation is smaller.
    """
    spreads = {label: _spread(np.asarray(own, np.float64)) for label, own in accuracies.items()}
    return {
        "methods": spreads,
        "pairs": {
            label: {
                other: _pair(own["std"], spreads[other]["std"])
                for other in spreads
                if other != label
            }
            for label, own in spreads.items()
        },
    }


def _spread(accuracy: NDArray[np.float64]) -> dict[str, Any]:
    """Give the spread over clients, "± clients", and the variance of each seed's clients."""
    std = spread_over_clients(accuracy)
    return {
        "variance": std**2,
        "std": std,
        "variance_of_seeds": [deviation(row) ** 2 for row in accuracy],
    }


def _pair(own: float, other: float) -> dict[str, Any]:
    if math.isnan(own) or math.isnan(other):
        return {"verdict": None, "ratio": None}
    # Sums in another order differ in the last digits; that is no difference between methods.
    if math.isclose(own, other, rel_tol=1e-9, abs_tol=1e-12):
        return {"verdict": EQUAL, "ratio": 1.0}
    verdict = FAIRER if own < other else LESS
    return {"verdict": verdict, "ratio": other / own if own else math.inf}


# Who took part in a run: means over all clients, over those that did, over those that never did.


PARTICIPATION = ("all", "took_part", "never")


def participation_of_seed(
    scores: Mapping[str, NDArray[np.floating]], took_part: NDArray[np.bool_]
) -> dict[str, Any]:
    """Count the clients of one seed, and average each model's accuracy over all and both parts."""
    parts = dict(zip(PARTICIPATION, (np.ones_like(took_part), took_part, ~took_part), strict=True))
    return {
        "clients": {kind: int(chosen.sum()) for kind, chosen in parts.items()},
        "accuracy": {
            model: {kind: mean(values[chosen]) for kind, chosen in parts.items()}
            for model, values in scores.items()
        },
    }


def participation_over_seeds(method: Mapping[str, Any]) -> dict[str, Any]:
    """Average the same over the seeds of a method in a result; {} where it does not say."""
    seeds = [seed["participation"] for seed in method["seeds"] if "participation" in seed]
    if not seeds:
        return {}
    return {
        "clients": {
            kind: _known_mean([own["clients"][kind] for own in seeds]) for kind in PARTICIPATION
        },
        "accuracy": {
            model: {
                kind: _known_mean([own["accuracy"][model][kind] for own in seeds])
                for kind in PARTICIPATION
            }
            for model in seeds[0]["accuracy"]
        },
    }


def participation_lines(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Say in a line for each method how its mean is made up, where some clients never took part."""
    told = []
    for label, method in methods.items():
        found = participation_over_seeds(method)
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


def _known_mean(values: Sequence[float | None]) -> float | None:
    seen = [value for value in values if value is not None and value == value]
    return sum(seen) / len(seen) if seen else None


# Rounds and bytes it took to come near the last round's figure, told by validation alone.


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
        "bytes_down": _plain_mean([wire.bytes_down for wire in outcome.wire]) * share,
        "bytes_up": _plain_mean([wire.bytes_up for wire in outcome.wire]) * share,
    }


def _first(outcome: Outcome, curve: np.ndarray, tolerance: float) -> int:
    """Walk back from the end, as long as accuracy is no more than the tolerance below the last."""
    means = [mean(point.reshape(-1)) for point in curve]
    enough = means[-1] - tolerance - 1e-9  # 0.80 - 0.01 is not 0.79 in binary
    place = len(means) - 1
    while place and means[place - 1] >= enough:
        place -= 1
    return outcome.evaluated[place]


def _plain_mean(values: list[int]) -> float:
    return sum(values) / len(values)
