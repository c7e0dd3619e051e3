"""`result.json`: all that was found, in plain words and figures."""

import io
import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from idiolect.aggregation.guarantee import together
from idiolect.core.checkpoint import write_whole
from idiolect.engine.outcome import RIGHT, Outcome
from idiolect.errors import DataError
from idiolect.results import statistics
from idiolect.results.statistics import fairness, reached
from idiolect.version import VERSION

Document = dict[str, Any]

FILE = "result.json"


def build_document(
    about: Mapping[str, Any], outcomes: Sequence[Outcome], complete: bool
) -> Document:
    """Lay out a run's findings as plain values; all but `speed` is the same in equal runs."""
    content: Document = plain(_laid_out(about, outcomes, complete))
    return content


def _laid_out(about: Mapping[str, Any], outcomes: Sequence[Outcome], complete: bool) -> Document:
    return {
        "name": about.get("name", ""),
        "complete": complete,
        "seeds": [members.seed for members in outcomes[0].members] if outcomes else [],
        "data": about.get("data", {}),
        "methods": {outcome.label: _method(outcome) for outcome in outcomes},
        "fairness": fairness(
            {one.label: one.final[f"{one.headline}/accuracy"] for one in outcomes}
        ),
        **_privacy(outcomes),
        "versions": versions(),
    }


def _privacy(outcomes: Sequence[Outcome]) -> Document:
    """Say what methods that hide clients promise together: they are releases of the same data."""
    found = {one.label: one.about["privacy"] for one in outcomes if one.about.get("privacy")}
    others = [one.label for one in outcomes if one.label not in found]
    return {"privacy": together(found, others)} if found else {}


def versions() -> dict[str, str]:
    """Name the versions that may matter to a figure."""
    return {
        "idiolect": VERSION,
        **{name: metadata.version(name) for name in ("torch", "numpy")},
        "python": platform.python_version(),
    }


def write_document(folder: Path, content: Document) -> None:
    """Write result.json, whole."""
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)
    write_whole(folder / FILE, (text + "\n").encode())


def read_document(folder: str | Path) -> Document:
    """Read the result of a run folder."""
    path = Path(folder) / FILE
    try:
        content: Document = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise DataError(
            f"{folder} holds no {FILE}; give the folder of a run, or finish it with "
            "`idiolect run EXPERIMENT.toml --resume`"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}); run again with --resume") from error
    return content


def _method(outcome: Outcome) -> Document:
    models = outcome.models
    return {
        **outcome.about,
        "rounds": outcome.rounds,
        "notices": list(outcome.notices),
        "headline": {
            model: statistics.over_seeds(outcome.final[f"{model}/accuracy"]) for model in models
        },
        "best_validation_round": _best_round(outcome),
        "reached": reached(outcome),
        "curves": _curves(outcome),
        "seeds": [_seed(outcome, place) for place in range(len(outcome.members))],
        "speed": {
            "seconds": outcome.speed.train_seconds + outcome.speed.judge_seconds,
            "train_seconds": outcome.speed.train_seconds,
            "examples": outcome.speed.examples,
            "examples_per_second": outcome.speed.examples_per_second,
        },
    }


def _seed(outcome: Outcome, place: int) -> Document:
    members, wire = outcome.members[place], outcome.wire[place]
    rounds = max(outcome.rounds, 1)
    return {
        "seed": members.seed,
        "federation": members.description,
        "traffic": {
            "participations": wire.participations,
            "bytes_down": wire.bytes_down,
            "bytes_up": wire.bytes_up,
            "bytes_down_per_round": wire.bytes_down / rounds,
            "bytes_up_per_round": wire.bytes_up / rounds,
            "public_bytes": wire.public_bytes,
        },
        "left_out": dict(outcome.left_out[place]) if outcome.left_out else {},
        **_participation(outcome, place),
        "models": {
            model: {
                **statistics.over_clients(outcome.final[f"{model}/accuracy"][place], members.test),
                "loss": _loss(outcome.final[f"{model}/loss"][place], _tested(outcome, place)),
                "val_accuracy": statistics.mean(outcome.final[f"{model}/val_accuracy"][place]),
                **{
                    metric: statistics.mean(outcome.final[f"{model}/{metric}"][place])
                    for metric in ("common_accuracy", "attack_success")
                    if f"{model}/{metric}" in outcome.final
                },
            }
            for model in outcome.models
        },
        "clients": [_client(outcome, place, client) for client in range(len(members.names))],
    }


def _participation(outcome: Outcome, place: int) -> Document:
    """Say how many clients took part, and what they reached; nothing where that is not known."""
    if not outcome.took_part:
        return {}
    scores = {model: outcome.final[f"{model}/accuracy"][place] for model in outcome.models}
    present = np.asarray(outcome.took_part[place], bool)
    return {"participation": statistics.participation_of_seed(scores, present)}


def _tested(outcome: Outcome, place: int) -> NDArray[np.bool_]:
    """Say of each client whether it was scored and had test data."""
    tested = np.asarray(outcome.members[place].test) > 0
    if outcome.scored:
        tested &= np.isin(np.arange(len(tested)), outcome.scored[place])
    return tested


def _loss(values: NDArray[np.floating], tested: NDArray[np.bool_]) -> float:
    """Average over clients that have test data; one that diverged is not passed over in silence."""
    seen = np.asarray(values, np.float64)[tested]
    return float(seen.mean()) if len(seen) else math.nan


def _client(outcome: Outcome, place: int, client: int) -> Document:
    members = outcome.members[place]
    models: dict[str, dict[str, Any]] = {model: {} for model in outcome.models}
    for key, values in outcome.final.items():
        model, metric = key.split("/")
        found = values[place, client]
        models[model][metric] = _counted(found) if metric == RIGHT else found
    return {
        "client": members.names[client],
        **({"network": members.networks[client]} if members.networks else {}),
        "train": members.train[client],
        "test": members.test[client],
        **({"took_part": bool(outcome.took_part[place][client])} if outcome.took_part else {}),
        **models,
        "facts": {name: values[place, client] for name, values in outcome.facts.items()},
        **({"reason": outcome.reasons[place][client]} if outcome.reasons else {}),
    }


def _counted(groups: NDArray[np.floating]) -> str | None:
    """Write counts of right answers in a line; None for a client that was not scored."""
    if not np.isfinite(groups).all():
        return None
    return " ".join(str(int(count)) for count in groups)


def _best_round(outcome: Outcome) -> Document:
    """Say where validation was best: beside the headline, which is always the last round."""
    best = {}
    for model in outcome.models:
        curve = outcome.curves.get(f"val/{model}/accuracy")
        if curve is None or np.isnan(curve).all():
            continue
        means = [statistics.mean(point.reshape(-1)) for point in curve]
        place = int(np.nanargmax(means))
        best[model] = {"round": outcome.evaluated[place], "val_accuracy": means[place]}
    return best


def _curves(outcome: Outcome) -> Document:
    """Give the curves on validation data: mean over clients, [evaluation, seed]."""
    models: dict[str, dict[str, list[list[float]]]] = {}
    for key, curve in outcome.curves.items():
        split, model, metric = key.split("/")
        if split == "val":
            rows = [[statistics.mean(seed) for seed in point] for point in curve]
            models.setdefault(model, {})[metric] = rows
    return {"rounds": list(outcome.evaluated), "val": models}


def plain(value: Any) -> Any:
    """Turn arrays into lists, and NaN and infinity, which JSON lacks, into null."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# `metrics.parquet`: every score of every client, one row each.


METRICS_FILE = "metrics.parquet"


class _Part(NamedTuple):
    """One score of many clients."""

    seed: int
    method: str
    round: int
    clients: Sequence[str]
    model: str
    metric: str
    values: NDArray[Any]  # [client]
    split: str


def write_metrics(folder: Path, outcomes: Sequence[Outcome]) -> None:
    """Write all curves and final scores, one row for each client that was scored."""
    import pyarrow as pa
    from pyarrow import parquet

    word = pa.dictionary(pa.int32(), pa.string())
    kinds: tuple[Any, ...] = (
        pa.int64(),
        word,
        pa.int32(),
        pa.string(),
        word,
        word,
        pa.float64(),
        word,
    )
    names = ("seed", "method", "round", "client", "model", "metric", "value", "split")
    tables = [
        pa.table(dict(zip(names, _columns(part, kinds), strict=True)))
        for outcome in outcomes
        for part in _parts(outcome)
    ]
    schema = pa.schema(list(zip(names, kinds, strict=True)))
    # Words are the same few in all tables, but each table has numbered them for itself.
    table = pa.concat_tables(tables or [schema.empty_table()]).unify_dictionaries()
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, compression="zstd")
    write_whole(folder / METRICS_FILE, buffer.getvalue())


def _columns(part: _Part, kinds: Sequence[Any]) -> list[Any]:
    """Lay out a part without a Python object for each of its rows."""
    import pyarrow as pa

    rows = len(part.clients)

    def repeated(value: str) -> Any:
        return pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), pa.array([value]))

    return [
        pa.array(np.full(rows, part.seed), kinds[0]),
        repeated(part.method),
        pa.array(np.full(rows, part.round, np.int32), kinds[2]),
        pa.array(part.clients, kinds[3]),
        repeated(part.model),
        repeated(part.metric),
        pa.array(np.asarray(part.values, np.float64), kinds[6]),
        repeated(part.split),
    ]


def _parts(outcome: Outcome) -> Iterator[_Part]:
    """Give one seed, round and score at a time, in a fixed order."""
    for place, members in enumerate(outcome.members):
        watched: Sequence[str] = members.names
        if outcome.watched:
            watched = [members.names[client] for client in outcome.watched[place]]
        for point, round in enumerate(outcome.evaluated):
            for key in sorted(outcome.curves):
                split, model, metric = key.split("/")
                values = outcome.curves[key][point, place]
                yield _Part(
                    members.seed, outcome.label, round, watched, model, metric, values, split
                )
        scored: Sequence[str] = members.names
        if outcome.scored:
            scored = [members.names[client] for client in outcome.scored[place]]
        for key in sorted(outcome.final):
            model, metric = key.split("/")
            values = outcome.final[key][place]
            if metric == RIGHT:
                continue
            if outcome.scored:
                values = values[outcome.scored[place]]
            split = "val" if metric.startswith("val_") else "test"
            metric = metric.removeprefix("val_")
            yield _Part(
                members.seed, outcome.label, outcome.rounds, scored, model, metric, values, split
            )
