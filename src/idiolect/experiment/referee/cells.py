"""A cell of the referee's table: one method on one problem, trained, and as plain values."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from idiolect.core.metrics import metric
from idiolect.data import Dataset
from idiolect.data.federation import Federation
from idiolect.engine.outcome import (
    EFFECTIVE,
    RIGHT,
    WITHOUT,
    Members,
    Outcome,
    Speed,
    Watch,
    Wire,
)
from idiolect.engine.row_metrics import ClientOutputs, MetricChoice, baseline_score
from idiolect.errors import Diverged
from idiolect.experiment.compare import SplitComparison
from idiolect.experiment.referee.suite import Contestant, SuiteProblem
from idiolect.experiment.run import open_run_folder
from idiolect.experiment.seed_parts import PartTrainer
from idiolect.results.document import build_document, plain, versions
from idiolect.results.statistics import known_mean

Record = dict[str, Any]

_DIGITS = 6  # of a stored score: a row of 10,000 is four
_FEW = 19  # clients that are the same under every seed: rows are kept, as a verdict may need them
BY_ROW = (RIGHT, WITHOUT, EFFECTIVE)


def train_cell(
    problem: SuiteProblem,
    contestant: Contestant,
    folder: Path,
    watch: Watch,
    *,
    device: str | None = None,
    data_dir: Path | None = None,
    datasets: dict[str, Dataset] | None = None,
) -> Record:
    """Tune and train a method on a problem; what an earlier call left in the folder is used."""
    experiment = problem.experiment(contestant, device)
    split = SplitComparison(
        experiment, experiment.tune, folder, data_dir, {} if datasets is None else datasets,
        detail=False,
    )  # fmt: skip
    head = {"problem": problem.digest, "code": contestant.code, "versions": versions()}
    with open_run_folder(folder, resume=True, comparison=True):
        try:
            outcome = split.train(experiment.methods[0], PartTrainer(watch))
        except Diverged as error:
            return {**head, "failed": str(error)}
    data = split.described["data"]
    guesses = [guess(split.federation(seed), outcome.metric) for seed in experiment.seeds]
    return {
        **head,
        "data": {key: data[key] for key in ("source", "clients", "same_clients", "same_test")},
        "rows": split.rows,
        **record_of(outcome, bool(data["same_clients"]), guesses),
    }


def guess(federation: Federation, name: str) -> float | None:
    """Return the mean score of saying each client's majority class, or mean, of every row."""
    dataset = federation.dataset
    choice = MetricChoice(name, dataset.task.kind)
    scores = [
        baseline_score(
            ClientOutputs(dataset.task, {}, {}, *(dataset.y[rows] for rows in held)),
            choice,
            len(dataset.classes),
        )
        for held in zip(federation.test, federation.val, federation.train, strict=True)
    ]
    return known_mean(scores)


def record_of(outcome: Outcome, same_clients: bool, guesses: Sequence[float | None]) -> Record:
    """Return what is kept of an outcome: every client's test score, and what a check needs."""
    own, model = metric(outcome.metric, outcome.task), outcome.headline
    keep_rows = same_clients and len(outcome.members[0].names) <= _FEW
    seeds = []
    for place, members in enumerate(outcome.members):
        wire = outcome.wire[place]
        kept: Record = {
            "seed": members.seed,
            "train": members.train,
            "test": members.test,
            "score": outcome.final[f"{model}/{own.name}"][place],
            "bytes_down": wire.bytes_down,
            "bytes_up": wire.bytes_up,
            "guess": guesses[place],
            "validation_curve": _means(outcome, f"val/{model}/{own.name}", place),
            "test_curve": _weighted(outcome, f"test_curve/{model}/{own.name}", place),
        }
        if outcome.took_part:
            kept["took_part"] = np.asarray(outcome.took_part[place], int)
        for name in BY_ROW if keep_rows else ():
            if f"{model}/{name}" in outcome.final:
                kept[name] = outcome.final[f"{model}/{name}"][place]
        seeds.append(kept)
    speed = outcome.speed
    about = outcome.about
    found: Record = {
        "method": about["method"],
        "title": about["title"],
        "model": model,
        "task": outcome.task,
        "metric": own.name,
        "settings": about["settings"],
        "rounds": outcome.rounds,
        "evaluated": outcome.evaluated,
        "cohort": about["cohort"],
        "names": list(outcome.members[0].names) if same_clients else [],
        "seeds": seeds,
        "seconds": speed.train_seconds + speed.judge_seconds,
        "device": about["device"],
    }
    # What was tuned is kept to the last digit: a choice between close scores must be checkable.
    return {**_rounded(plain(found)), "tuned": plain(about["tuned"])}


def _means(outcome: Outcome, key: str, place: int) -> list[float]:
    points = outcome.curves.get(key, ())
    means = [known_mean(list(point[place])) for point in points]
    return [math.nan if mean is None else mean for mean in means]


def _weighted(outcome: Outcome, key: str, place: int) -> list[float]:
    """Return a curve of means weighed by test rows, as the field scores rounds."""
    curve = outcome.curves.get(key)
    rows = np.asarray(outcome.members[place].test, np.float64)
    return [] if curve is None else [weighted(point[place], rows) for point in curve]


def weighted(scores: NDArray[Any], rows: NDArray[Any]) -> float:
    """Average scores by test rows; clients without a score are left out."""
    seen = ~np.isnan(scores)
    return float((scores * rows)[seen].sum() / rows[seen].sum()) if seen.any() else math.nan


def _rounded(value: Any) -> Any:
    """Round floats to what is stored; what is computed later is computed from that."""
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return round(value, _DIGITS) if isinstance(value, float) else value


# Back from plain values to what the statistics and the report take.


def outcome_of(label: str, record: Record) -> Outcome:
    """Return a cell as an outcome: of curves the means alone."""
    model, name = record["model"], record["metric"]
    seeds = record["seeds"]
    key = f"{model}/{name}"
    final = {
        key: np.array([one["score"] for one in seeds], np.float64),
        f"{model}/loss": np.full((len(seeds), len(seeds[0]["score"])), np.nan),
    }
    for extra in BY_ROW:
        if extra in seeds[0]:
            final[f"{model}/{extra}"] = np.array([one[extra] for one in seeds], np.float64)
    clients = range(len(seeds[0]["score"]))
    curves = {}
    for split, part in (("val", "validation"), ("test_curve", "test")):
        points = np.array([one[f"{part}_curve"] for one in seeds], np.float64).T
        curves[f"{split}/{key}"] = np.repeat(points[..., None], len(clients), axis=2)
    names = tuple(record["names"]) or tuple(f"client {n}" for n in clients)
    return Outcome(
        label=label,
        about={key: record[key] for key in ("method", "title", "settings", "tuned", "device")},
        members=tuple(
            Members(one["seed"], names, tuple(one["train"]), tuple(one["test"])) for one in seeds
        ),
        rounds=record["rounds"],
        evaluated=tuple(record["evaluated"]),
        curves=curves,
        final=final,
        facts={},
        wire=tuple(Wire(0, one["bytes_down"], one["bytes_up"]) for one in seeds),
        speed=Speed(0, record["seconds"]),
        took_part=tuple(np.array(one["took_part"], bool) for one in seeds)
        if "took_part" in seeds[0]
        else (),
        metric=name,
        task=record["task"],
    )


def document_of(problem: str, records: Mapping[str, Record]) -> Record:
    """Return a problem's cells as the result of one comparison, as `compare` would write it."""
    first = next(iter(records.values()))
    outcomes = [outcome_of(label, record) for label, record in records.items()]
    content = build_document({"name": problem, "data": first["data"]}, outcomes, True)
    guesses = [{"metrics": {first["metric"]: one["guess"]}} for one in first["seeds"]]
    if all(one["guess"] is not None for one in first["seeds"]):
        whose = "mean" if first["task"] == "number" else "majority class"
        content["baseline"] = {"name": whose, "seeds": guesses}
    return content
