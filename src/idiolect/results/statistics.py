"""Figures over clients and seeds. A client without test data has no score and is left out."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from idiolect.core.metrics import metric
from idiolect.engine.outcome import Outcome

Figures = dict[str, float]
Scores = NDArray[np.floating]

FAIRER, LESS, EQUAL = "fairer", "less fair", "equal"
PARTICIPATION = ("all", "took_part", "never")
TOLERANCE = 0.01  # one point of accuracy


def mean(values: Scores) -> float:
    """Return the mean, ignoring NaN; NaN if nothing is left."""
    seen = values[~np.isnan(values)]
    return float(seen.mean()) if len(seen) else math.nan


def deviation(values: Scores) -> float:
    """Return the sample standard deviation (n - 1); NaN for fewer than two values."""
    seen = values[~np.isnan(values)]
    return float(seen.std(ddof=1)) if len(seen) > 1 else math.nan


def known_mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of values of a result, ignoring None and NaN; None if nothing is left."""
    seen = [value for value in values if value is not None and value == value]
    return sum(seen) / len(seen) if seen else None


def over_clients(scores: Scores, sizes: Sequence[int]) -> Figures:
    """Summarise one seed: plain mean, mean by test examples, sample deviation and variance."""
    values, weights = np.asarray(scores, np.float64), np.asarray(sizes, np.float64)
    seen = ~np.isnan(values)
    values, weights = values[seen], weights[seen]
    total = float(weights.sum())
    return {
        "mean": mean(values),
        "weighted_mean": float((values * weights).sum()) / total if total else math.nan,
        "std": deviation(values),
        "variance": deviation(values) ** 2,
    }


def over_seeds(scores: Scores) -> dict[str, Figures]:
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


def spread_over_clients(scores: Scores) -> float:
    """Return how uneven clients are, of [seed, client]: "± clients" wherever it is printed.

    The sample deviation over the clients of one seed, averaged over seeds. It means the same where
    a client is the same person under every seed and where it is another one. A deviation of the
    clients' means over seeds would shrink with every seed that divides the data anew.
    """
    values = np.asarray(scores, np.float64)
    return mean(np.array([deviation(row) for row in values]))


def fairness(accuracies: Mapping[str, Scores]) -> dict[str, Any]:
    """Compare methods by the spread of accuracy over clients; each is [seed, client].

    PersFL's definition (Eq. 6): a method is fairer if its clients' accuracies vary less.
    `pairs[t][t']` compares t with t': the verdict, and by which factor t's deviation is smaller.
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


# Participation: a client that took part in no round gets its model as a newcomer does, and a mean
# over all clients is never printed without the number of such clients.


def participation_of_seed(
    scores: Mapping[str, Scores], took_part: NDArray[np.bool_], name: str = "accuracy"
) -> dict[str, Any]:
    """Count the clients of one seed, and average each model's metric over all and both parts."""
    masks = (np.ones_like(took_part), took_part, ~took_part)
    parts = dict(zip(PARTICIPATION, masks, strict=True))
    return {
        "clients": {kind: int(chosen.sum()) for kind, chosen in parts.items()},
        name: {
            model: {kind: mean(values[chosen]) for kind, chosen in parts.items()}
            for model, values in scores.items()
        },
    }


def participation_over_seeds(method: Mapping[str, Any]) -> dict[str, Any]:
    """Average the same over the seeds of a method in a result; {} where it is not recorded."""
    seeds = [seed["participation"] for seed in method["seeds"] if "participation" in seed]
    if not seeds:
        return {}
    name = next(key for key in seeds[0] if key != "clients")
    return {
        "clients": {
            kind: known_mean([own["clients"][kind] for own in seeds]) for kind in PARTICIPATION
        },
        name: {
            model: {
                kind: known_mean([own[name][model][kind] for own in seeds])
                for kind in PARTICIPATION
            }
            for model in seeds[0][name]
        },
    }


def participation_lines(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Describe in a line for each method its mean, where some clients never took part."""
    lines = []
    for label, method in methods.items():
        found = participation_over_seeds(method)
        if not found or not found["clients"]["never"]:
            continue
        clients = found["clients"]
        name = next(key for key in found if key != "clients")
        first = next(iter(found[name].values()))
        lines.append(
            f"{label}: {_written(name, first['all'])} over all {clients['all']:g} clients; "
            f"{_written(name, first['took_part'])} over the {clients['took_part']:g} that took "
            f"part; {_written(name, first['never'])} over the {clients['never']:g} that never did, "
            "with models as newcomers get them"
        )
    return lines


def _written(name: str, value: float | None) -> str:
    own = metric(name)
    if value is None or not own.percent:
        return own.written(value)
    return f"{100 * value:.2f} %"


# Rounds and bytes until the last round's validation accuracy was nearly reached.


def reached(outcome: Outcome, tolerance: float = TOLERANCE) -> dict[str, Any] | None:
    """Find the first evaluated round from which the metric stays near the last round's.

    It is taken on validation data, the mean over clients and seeds, of personal models where they
    were evaluated during training, else of the global one. A round sends the same trees to as many
    clients as any other, so bytes grow with rounds. None where there is no curve.
    """
    for model in outcome.models:
        curve = outcome.curves.get(f"val/{model}/{outcome.metric}")
        if curve is not None and not np.isnan(curve[-1]).all():
            break
    else:
        return None
    round = _first_near(outcome, curve, tolerance)
    share = round / max(outcome.rounds, 1)
    seeds = len(outcome.members)
    return {
        "model": model,
        **({} if outcome.metric == "accuracy" else {"metric": outcome.metric}),
        "tolerance": tolerance,
        "round": round,
        "round_of_seeds": [_first_near(outcome, curve[:, [n]], tolerance) for n in range(seeds)],
        "bytes_down": sum(wire.bytes_down for wire in outcome.wire) / seeds * share,
        "bytes_up": sum(wire.bytes_up for wire in outcome.wire) / seeds * share,
    }


def _first_near(outcome: Outcome, curve: np.ndarray, tolerance: float) -> int:
    """Go back from the end while the metric is at most the tolerance worse than the last.

    Of a metric that is no share, the tolerance is a share of the last value.
    """
    own = metric(outcome.metric)
    means = [own.sign * mean(point.reshape(-1)) for point in curve]
    tolerance *= 1 if own.percent else abs(means[-1])
    enough = means[-1] - tolerance - 1e-9  # 0.80 - 0.01 is not 0.79 in binary
    place = len(means) - 1
    while place and means[place - 1] >= enough:
        place -= 1
    return outcome.evaluated[place]


# Student's distribution for whole degrees of freedom, by its finite sums: no scipy is needed.


def student_p(t: float, freedom: int) -> float:
    """Return the two-sided p of a value of Student's t."""
    angle = math.atan(abs(t) / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term = total = cosine if odd else 1.0
    for place in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine**2 * (place - 1) / place
        total += term
    inside = 2 / math.pi * (angle + (sine * total if freedom > 1 else 0.0)) if odd else sine * total
    return max(1 - inside, 0.0)  # rounding may put it below nothing


def student_quantile(p: float, freedom: int) -> float:
    """Return the t of which so much probability is outside, on both sides together."""
    low, high = 0.0, 1.0
    while student_p(high, freedom) > p:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_p(middle, freedom) > p else (low, middle)
    return high
