"""`result.json`, `metrics.parquet`, and tables of a result."""

import io
import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from idiolect.aggregation.guarantee import together
from idiolect.core.checkpoint import write_whole
from idiolect.engine.outcome import RIGHT, Outcome
from idiolect.errors import DataError
from idiolect.results import statistics
from idiolect.results.statistics import known_mean
from idiolect.version import VERSION

Document = dict[str, Any]
Row = dict[str, Any]

FILE = "result.json"
METRICS_FILE = "metrics.parquet"


def build_document(
    about: Mapping[str, Any], outcomes: Sequence[Outcome], complete: bool
) -> Document:
    """Return a run's findings as plain values; all but `speed` is the same in equal runs."""
    private = {one.label: one.about["privacy"] for one in outcomes if one.about.get("privacy")}
    others = [one.label for one in outcomes if one.label not in private]
    content: Document = plain(
        {
            "name": about.get("name", ""),
            "complete": complete,
            "seeds": [members.seed for members in outcomes[0].members] if outcomes else [],
            "data": about.get("data", {}),
            "methods": {outcome.label: _method(outcome) for outcome in outcomes},
            "fairness": statistics.fairness(
                {one.label: one.final[f"{one.headline}/accuracy"] for one in outcomes}
            ),
            # Private methods are releases of the same data, so their guarantees add up.
            **({"privacy": together(private, others)} if private else {}),
            "versions": versions(),
        }
    )
    return content


def write_results(
    folder: Path, about: Mapping[str, Any], outcomes: Sequence[Outcome], complete: bool
) -> Document:
    """Write result.json and metrics.parquet; return what result.json holds."""
    content = build_document(about, outcomes, complete)
    write_metrics(folder, outcomes)
    write_json(folder / FILE, content)
    return content


def versions() -> dict[str, str]:
    """Return the versions that may matter to a figure."""
    return {
        "idiolect": VERSION,
        **{name: metadata.version(name) for name in ("torch", "numpy")},
        "python": platform.python_version(),
    }


def write_json(path: Path, content: Document) -> None:
    """Write plain values as JSON, atomically."""
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)
    write_whole(path, (text + "\n").encode())


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


def _method(outcome: Outcome) -> Document:
    speed = outcome.speed
    return {
        **outcome.about,
        "rounds": outcome.rounds,
        "notices": list(outcome.notices),
        "headline": {
            model: statistics.over_seeds(outcome.final[f"{model}/accuracy"])
            for model in outcome.models
        },
        "best_validation_round": _best_round(outcome),
        "reached": statistics.reached(outcome),
        "curves": _curves(outcome),
        "seeds": [_seed(outcome, place) for place in range(len(outcome.members))],
        "speed": {
            "seconds": speed.train_seconds + speed.judge_seconds,
            "train_seconds": speed.train_seconds,
            "examples": speed.examples,
            "examples_per_second": speed.examples_per_second,
        },
    }


def _seed(outcome: Outcome, place: int) -> Document:
    members, wire = outcome.members[place], outcome.wire[place]
    rounds = max(outcome.rounds, 1)
    found: Document = {
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
    }
    if outcome.took_part:
        scores = {model: outcome.final[f"{model}/accuracy"][place] for model in outcome.models}
        present = np.asarray(outcome.took_part[place], bool)
        found["participation"] = statistics.participation_of_seed(scores, present)
    found["models"] = {model: _model(outcome, place, model) for model in outcome.models}
    found["clients"] = [_client(outcome, place, client) for client in range(len(members.names))]
    return found


def _model(outcome: Outcome, place: int, model: str) -> Document:
    sizes = outcome.members[place].test
    tested = np.asarray(sizes) > 0
    if outcome.scored:
        tested &= np.isin(np.arange(len(tested)), outcome.scored[place])
    # Unlike accuracy, the loss of a client that diverged is not left out of the mean.
    losses = np.asarray(outcome.final[f"{model}/loss"][place], np.float64)[tested]
    return {
        **statistics.over_clients(outcome.final[f"{model}/accuracy"][place], sizes),
        "loss": float(losses.mean()) if len(losses) else math.nan,
        **{
            metric: statistics.mean(outcome.final[f"{model}/{metric}"][place])
            for metric in ("val_accuracy", "common_accuracy", "attack_success")
            if metric == "val_accuracy" or f"{model}/{metric}" in outcome.final
        },
    }


def _client(outcome: Outcome, place: int, client: int) -> Document:
    members = outcome.members[place]
    models: dict[str, dict[str, Any]] = {model: {} for model in outcome.models}
    for key, values in outcome.final.items():
        model, metric = key.split("/")
        found = values[place, client]
        models[model][metric] = _counts(found) if metric == RIGHT else found
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


def _counts(groups: NDArray[np.floating]) -> str | None:
    """Write counts of right answers in a line; None for a client that was not evaluated."""
    if not np.isfinite(groups).all():
        return None
    return " ".join(str(int(count)) for count in groups)


def _best_round(outcome: Outcome) -> Document:
    """Return where validation was best, beside the headline, which is always the last round."""
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
    """Return the curves on validation data: mean over clients, [evaluation, seed]."""
    models: dict[str, dict[str, list[list[float]]]] = {}
    for key, curve in outcome.curves.items():
        split, model, metric = key.split("/")
        if split == "val":
            rows = [[statistics.mean(seed) for seed in point] for point in curve]
            models.setdefault(model, {})[metric] = rows
    return {"rounds": list(outcome.evaluated), "val": models}


# metrics.parquet: every score of every client, one row each.


def write_metrics(folder: Path, outcomes: Sequence[Outcome]) -> None:
    """Write all curves and final scores, one row for each client that was evaluated."""
    import pyarrow as pa
    from pyarrow import parquet

    word = pa.dictionary(pa.int32(), pa.string())
    schema = pa.schema(
        {
            "seed": pa.int64(),
            "method": word,
            "round": pa.int32(),
            "client": pa.string(),
            "model": word,
            "metric": word,
            "value": pa.float64(),
            "split": word,
        }
    )

    def column(kind: Any, value: Any, rows: int) -> Any:
        """Make a column without a Python object for each of its rows."""
        if kind == word:
            return pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), pa.array([value]))
        return pa.array(np.full(rows, value) if isinstance(value, int) else value, kind)

    tables = [
        pa.table({one.name: column(one.type, own[one.name], len(own["client"])) for one in schema})
        for outcome in outcomes
        for own in _score_columns(outcome)
    ]
    # Words are the same few in all tables, but each table has numbered them for itself.
    table = pa.concat_tables(tables or [schema.empty_table()]).unify_dictionaries()
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, compression="zstd")
    write_whole(folder / METRICS_FILE, buffer.getvalue())


def _score_columns(outcome: Outcome) -> Iterator[dict[str, Any]]:
    """Yield the columns of one seed, round and score at a time, in a fixed order."""
    for place, members in enumerate(outcome.members):
        names: Sequence[str] = members.names
        both = {"seed": members.seed, "method": outcome.label}
        chosen = outcome.watched[place] if outcome.watched else None
        clients = names if chosen is None else [names[client] for client in chosen]
        for point, round in enumerate(outcome.evaluated):
            for key in sorted(outcome.curves):
                split, model, metric = key.split("/")
                values = np.asarray(outcome.curves[key][point, place], np.float64)
                found = {"model": model, "metric": metric, "value": values, "split": split}
                yield {**both, "round": round, "client": clients, **found}
        chosen = outcome.scored[place] if outcome.scored else None
        clients = names if chosen is None else [names[client] for client in chosen]
        for key in sorted(outcome.final):
            model, metric = key.split("/")
            if metric == RIGHT:
                continue
            values = np.asarray(outcome.final[key][place], np.float64)
            values = values if chosen is None else values[chosen]
            split = "val" if metric.startswith("val_") else "test"
            metric = metric.removeprefix("val_")
            found = {"model": model, "metric": metric, "value": values, "split": split}
            yield {**both, "round": outcome.rounds, "client": clients, **found}


# Tables of a result.


def table(result: str | Path | Document) -> list[Row]:
    """Return one row per method, seed, client and model; `pandas.DataFrame(table(...))` works."""
    content = result if isinstance(result, dict) else read_document(result)
    return [
        {
            "method": label,
            "seed": seed["seed"],
            "client": client["client"],
            **({"network": client["network"]} if "network" in client else {}),
            "model": model,
            **client[model],
            "train": client["train"],
            "test": client["test"],
            **({"took_part": client["took_part"]} if "took_part" in client else {}),
            **client["facts"],
        }
        for label, method in content["methods"].items()
        for seed in method["seeds"]
        for client in seed["clients"]
        for model in seed["models"]
    ]


def summary(content: Document) -> list[Row]:
    """Return one row per method and model: the figures of a paper's table."""
    rows = []
    for label, method in content["methods"].items():
        traffic = [seed["traffic"] for seed in method["seeds"]]
        megabytes = known_mean([(own["bytes_down"] + own["bytes_up"]) for own in traffic])
        for model, figures in method["headline"].items():
            per_seed = [seed["models"][model] for seed in method["seeds"]]
            means = [value for value in _client_means(method, model) if value is not None]
            rows.append(
                {
                    "method": label,
                    "model": model,
                    "mean": figures["seeds"]["mean"],
                    "std_seeds": figures["seeds"]["std"],
                    "std_clients": figures["clients"]["std"],
                    "weighted_mean": known_mean([seed["weighted_mean"] for seed in per_seed]),
                    "worst_client": min(means, default=None),
                    "rounds": method["rounds"],
                    "megabytes": None if megabytes is None else megabytes / 1e6,
                    "seconds": method["speed"]["seconds"],
                }
            )
    return rows


def per_client(content: Document) -> tuple[list[str], list[tuple[str, list[float | None]]]]:
    """Return the clients' names, and per method their personal accuracy, mean over seeds.

    Where names differ from seed to seed, clients are numbered.
    """
    columns = []
    names: list[str] = []
    for label, method in content["methods"].items():
        listed = [[client["client"] for client in seed["clients"]] for seed in method["seeds"]]
        same = all(one == listed[0] for one in listed)
        names = listed[0] if same else [f"client {place}" for place in range(len(listed[0]))]
        columns.append((label, _client_means(method, next(iter(method["headline"])))))
    return names, columns


def _client_means(method: Mapping[str, Any], model: str) -> list[float | None]:
    scores = [[c[model]["accuracy"] for c in seed["clients"]] for seed in method["seeds"]]
    return [known_mean(values) for values in zip(*scores, strict=True)]
