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
from idiolect.core.metrics import PRECISION, Metric, fitting, metric
from idiolect.engine.outcome import BASELINE, BY_GROUP, RIGHT, Outcome
from idiolect.errors import DataError
from idiolect.results import attendance, statistics
from idiolect.results.statistics import known_mean
from idiolect.version import VERSION

Document = dict[str, Any]
Row = dict[str, Any]

FILE = "result.json"
METRICS_FILE = "metrics.parquet"
_LATE = 10  # last evaluated rounds, of which some tables print the mean
_BESIDE = ("val_accuracy", "common_accuracy", "attack_success")


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
            **(_metric(outcomes[0]) if outcomes else {}),
            **_baseline(outcomes),
            "methods": {outcome.label: _method(outcome) for outcome in outcomes},
            "fairness": statistics.fairness(
                {one.label: one.final[f"{one.headline}/{one.metric}"] for one in outcomes}
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
        if not Path(folder).exists():
            raise DataError(f"{folder} does not exist; give the folder of a run") from None
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
            model: statistics.over_seeds(outcome.final[f"{model}/{outcome.metric}"])
            for model in outcome.models
        },
        "best_validation_round": _best_round(outcome),
        **_best_test_round(outcome),
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
        name = outcome.metric
        scores = {model: outcome.final[f"{model}/{name}"][place] for model in outcome.models}
        present = np.asarray(outcome.took_part[place], bool)
        if outcome.scored:  # means are of a sample, and so are the counts
            some = outcome.scored[place]
            scores, present = {model: row[some] for model, row in scores.items()}, present[some]
        found["participation"] = statistics.participation_of_seed(scores, present, name)
    if outcome.attendance and outcome.attendance[place]:
        found["attendance"] = attendance.by_site(outcome.attendance[place])
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
        **statistics.over_clients(outcome.final[f"{model}/{outcome.metric}"][place], sizes),
        "loss": float(losses.mean()) if len(losses) else math.nan,
        **{
            name: statistics.mean(outcome.final[f"{model}/{name}"][place])
            for name in (*_BESIDE, f"val_{outcome.metric}")
            if f"{model}/{name}" in outcome.final
        },
        **_metrics(outcome, place, model),
    }


def _metrics(outcome: Outcome, place: int, model: str) -> Document:
    """Return a model's metrics: mean over clients, of how many, and of all rows together."""
    names = [one for one in fitting(outcome.task) if f"{model}/{one}" in outcome.final]
    values = {name: outcome.final[f"{model}/{name}"][place] for name in names}
    pooled = outcome.pooled[place].get(model, {}) if outcome.pooled else {}
    return {
        "metrics": {name: statistics.mean(own) for name, own in values.items()},
        "defined": {name: int((~np.isnan(own)).sum()) for name, own in values.items()},
        "pooled": pooled.get("metrics") or _pooled_from_clients(outcome, place, values),
        **{name: own for name, own in pooled.items() if name != "metrics"},
    }


def _pooled_from_clients(
    outcome: Outcome, place: int, values: Mapping[str, NDArray[Any]]
) -> Document:
    """Pool the metrics that are means over rows, where only clients' values are known."""
    rows = np.asarray(outcome.members[place].test, np.float64)
    found: dict[str, float] = {}
    for name, own in values.items():
        seen = ~np.isnan(own) & (rows > 0)
        if not seen.any():
            continue
        if metric(name).rows is not None:
            found[name] = float((own * rows)[seen].sum() / rows[seen].sum())
        elif name == "rmse":
            found[name] = math.sqrt(float((own**2 * rows)[seen].sum() / rows[seen].sum()))
    return found


def _metric(outcome: Outcome) -> Document:
    """Say by what methods are compared."""
    own = metric(outcome.metric, outcome.task, outcome.precision)
    return {
        "task": outcome.task,
        "metric": {
            "name": own.name,
            "title": own.title,
            "higher": own.higher,
            "percent": own.percent,
            **({"precision": outcome.precision} if own.name == "recall_at_precision" else {}),
        },
    }


def metric_of(content: Mapping[str, Any]) -> Metric:
    """Return the metric by which a result compares methods; accuracy in older ones."""
    own = content.get("metric") or {}
    return metric(own.get("name", "accuracy"), None, own.get("precision", PRECISION))


def beside_baseline(
    content: Mapping[str, Any], own: Metric, means: Mapping[str, float]
) -> tuple[float | None, str, str]:
    """Return what guessing scores, how it guesses, and a line where no method is better.

    `means` are the methods' by label. The line is empty where one is better, or it is not known.
    """
    found = content.get("baseline")
    if not found:
        return None, "", ""
    value = known_mean([seed["metrics"].get(own.name) for seed in found["seeds"]])
    known = [mean for mean in means.values() if mean is not None and mean == mean]
    if value is None or not known:
        return value, found["name"], ""
    best = own.sign * max(own.sign * mean for mean in known)
    if own.sign * best > own.sign * value + 1e-9:
        return value, found["name"], ""
    whose = "" if content.get("task") == "survival" else " of each client's training rows"
    line = (
        f"No method is better than guessing the {found['name']}{whose} ({own.title} "
        f"{own.written(value)}; the best method has {own.written(best)})."
    )
    return value, found["name"], line.replace("guessing the the", "guessing the")


def metric_rows(content: Mapping[str, Any]) -> tuple[dict[str, list[float | None]], list[str]]:
    """Return by method, and for guessing, the mean of every metric that is known; their names."""
    held = {
        label: [seed["models"][next(iter(method["headline"]))] for seed in method["seeds"]]
        for label, method in content["methods"].items()
        if method["headline"]
    }
    if guess := content.get("baseline"):
        held[f"guessing: {guess['name']}"] = guess["seeds"]
    seen = {name for seeds in held.values() for seed in seeds for name in seed.get("metrics", {})}
    names = [name for name in fitting(str(content.get("task", "classes"))) if name in seen]
    rows = {
        label: [known_mean([seed.get("metrics", {}).get(name) for seed in seeds]) for name in names]
        for label, seeds in held.items()
    }
    return rows, names


def baseline_line(content: Mapping[str, Any]) -> str:
    """Say that no method of a result is better than guessing; empty where one is."""
    means = {
        label: known_mean([next(iter(method["headline"].values()))["seeds"]["mean"]])
        for label, method in content["methods"].items()
        if method["headline"]
    }
    known = {label: mean for label, mean in means.items() if mean is not None}
    return beside_baseline(content, metric_of(content), known)[2]


_GUESSES = {
    "classes": "majority class",
    "labels": "share of each label",
    "number": "mean",
    "survival": "the same risk for all",
}


def _baseline(outcomes: Sequence[Outcome]) -> Document:
    """Return what guessing scores: from each client's own training rows, without a model."""
    key = f"{BASELINE}/"
    known = [one for one in outcomes if any(name.startswith(key) for name in one.final)]
    if not known or f"{key}{known[0].metric}" not in known[0].final:
        return {}
    one = known[0]
    return {
        "baseline": {
            "name": "share of each word" if f"{key}perplexity" in one.final else _GUESSES[one.task],
            "headline": statistics.over_seeds(one.final[key + one.metric]),
            "seeds": [
                {
                    "seed": members.seed,
                    **_metrics(one, place, BASELINE),
                    "clients": [
                        {
                            "client": name,
                            **{
                                full.removeprefix(key): values[place, client]
                                for full, values in one.final.items()
                                if full.startswith(key)
                            },
                        }
                        for client, name in enumerate(members.names)
                    ],
                }
                for place, members in enumerate(one.members)
            ],
        }
    }


def _client(outcome: Outcome, place: int, client: int) -> Document:
    members = outcome.members[place]
    models: dict[str, dict[str, Any]] = {model: {} for model in outcome.models}
    for key, values in outcome.final.items():
        model, name = key.split("/")
        if model != BASELINE:
            found = values[place, client]
            models[model][name] = _line(found, name) if name in BY_GROUP else found
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


def _line(groups: NDArray[np.floating], name: str) -> str | None:
    """Write the values of groups in a line; None for a client that was not evaluated."""
    if name == RIGHT:
        whole = np.isfinite(groups).all()
        return " ".join(str(int(count)) for count in groups) if whole else None
    seen = groups[~np.isnan(groups)]  # a group without rows has none
    return " ".join(f"{value:.9g}" for value in seen) if len(seen) else None


def _best_round(outcome: Outcome) -> Document:
    """Return where validation was best, beside the headline, which is always the last round."""
    best = {}
    for model in outcome.models:
        curve = outcome.curves.get(f"val/{model}/{outcome.metric}")
        if curve is None or np.isnan(curve).all():
            continue
        means = [statistics.mean(point.reshape(-1)) for point in curve]
        place = int(np.nanargmax(metric(outcome.metric).sign * np.array(means)))
        best[model] = {"round": outcome.evaluated[place], f"val_{outcome.metric}": means[place]}
    return best


def _best_test_round(outcome: Outcome) -> Document:
    """Return each seed's best round by test rows: of those evaluated, or the last's final score.

    Clients are weighed by their test rows: so much of the field scores. It is chosen on test data,
    so it is too high and is used for nothing; it is there only where the test curve was asked for.
    Beside it what others print, also of clients weighed alike: the mean of the last ten evaluated
    rounds, or of as many as there are, and the round that validation rows would have chosen.
    """
    if not any(key.startswith("test_curve/") for key in outcome.curves):
        return {}
    sign = metric(outcome.metric).sign
    best: dict[str, dict[str, list[float]]] = {}
    late: dict[str, dict[str, list[float]]] = {}
    chosen: dict[str, dict[str, list[float]]] = {}
    for model in outcome.models:
        key = f"{model}/{outcome.metric}"
        curve = outcome.curves.get(f"test_curve/{key}", ())
        best[model] = {"round": [], "weighted_mean": []}
        late[model] = {"from_round": [], "mean": [], "weighted_mean": []}
        for place, members in enumerate(outcome.members):
            seen = outcome.watched[place] if outcome.watched else range(len(members.test))
            sizes = tuple(members.test[client] for client in seen)
            points = [(own[place], sizes) for own in curve]
            points.append((outcome.final[key][place], members.test))
            means = [statistics.over_clients(*own) for own in points]
            signed = [sign * own["weighted_mean"] for own in means]
            top = int(np.nanargmax(signed)) if not np.isnan(signed).all() else -1
            held = [
                sign * statistics.mean(own[place]) for own in outcome.curves.get(f"val/{key}", ())
            ]
            if held and not np.isnan(held).all():
                own = chosen.setdefault(model, {"round": [], "mean": [], "weighted_mean": []})
                by_held = int(np.nanargmax(held))
                own["round"].append(outcome.evaluated[by_held])
                for name in ("mean", "weighted_mean"):
                    own[name].append(means[by_held][name])
            rounds = [*outcome.evaluated[: len(curve)], outcome.rounds]
            best[model]["round"].append(rounds[top])
            best[model]["weighted_mean"].append(sign * signed[top])
            if rounds[-2:-1] == rounds[-1:]:  # the final score is of the same round
                del rounds[-2], means[-2]
            late[model]["from_round"].append(rounds[-_LATE:][0])
            for name in ("mean", "weighted_mean"):
                values = np.array([own[name] for own in means[-_LATE:]])
                late[model][name].append(statistics.mean(values))
    found = {"best_test_round": best, "last_test_rounds": late}
    return {**found, **({"test_at_best_validation_round": chosen} if chosen else {})}


def _curves(outcome: Outcome) -> Document:
    """Return the curves on validation data: mean over clients, [evaluation, seed]."""
    models: dict[str, dict[str, list[list[float]]]] = {}
    for key, curve in outcome.curves.items():
        split, model, name = key.split("/")
        if split == "val":
            rows = [[statistics.mean(seed) for seed in point] for point in curve]
            models.setdefault(model, {})[name] = rows
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

    def numbers(kind: Any, values: Any) -> Any:
        """Take numbers as they lie in memory: `pa.array` would import pandas, where it is."""
        held: Any = np.ascontiguousarray(values, str(kind).replace("double", "float64"))
        return pa.Array.from_buffers(kind, len(held), [None, pa.py_buffer(held)])

    def texts(values: Sequence[str]) -> Any:
        """Do the same for texts, which lie one after the other."""
        coded = [value.encode() for value in values]
        ends: Any = np.cumsum([0, *map(len, coded)], dtype=np.int32)
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(coded))]
        return pa.Array.from_buffers(pa.string(), len(coded), buffers)

    def column(kind: Any, value: Any, rows: int) -> Any:
        """Make a column without a Python object for each of its rows."""
        if kind == word:
            here = numbers(pa.int32(), np.zeros(rows))
            return pa.DictionaryArray.from_arrays(here, texts([value]))
        if kind == pa.string():
            return texts(value)
        return numbers(kind, np.full(rows, value) if isinstance(value, int) else value)

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
                split, model, name = key.split("/")
                values = np.asarray(outcome.curves[key][point, place], np.float64)
                found = {"model": model, "metric": name, "value": values, "split": split}
                yield {**both, "round": round, "client": clients, **found}
        chosen = outcome.scored[place] if outcome.scored else None
        clients = names if chosen is None else [names[client] for client in chosen]
        for key in sorted(outcome.final):
            model, name = key.split("/")
            if name in BY_GROUP:
                continue
            values = np.asarray(outcome.final[key][place], np.float64)
            values = values if chosen is None else values[chosen]
            split = "val" if name.startswith("val_") else "test"
            name = name.removeprefix("val_")
            found = {"model": model, "metric": name, "value": values, "split": split}
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
    own = metric_of(content)
    for label, method in content["methods"].items():
        traffic = [seed["traffic"] for seed in method["seeds"]]
        megabytes = known_mean([(own["bytes_down"] + own["bytes_up"]) for own in traffic])
        for model, figures in method["headline"].items():
            per_seed = [seed["models"][model] for seed in method["seeds"]]
            means = [v for v in _client_means(method, model, own.name) if v is not None]
            rows.append(
                {
                    "method": label,
                    "model": model,
                    "mean": figures["seeds"]["mean"],
                    "std_seeds": figures["seeds"]["std"],
                    "std_clients": figures["clients"]["std"],
                    "weighted_mean": known_mean([seed["weighted_mean"] for seed in per_seed]),
                    "worst_client": (min if own.higher else max)(means, default=None),
                    "rounds": method["rounds"],
                    "megabytes": None if megabytes is None else megabytes / 1e6,
                    "seconds": method["speed"]["seconds"],
                }
            )
    return rows


def per_client(content: Document) -> tuple[list[str], list[tuple[str, list[float | None]]]]:
    """Return the clients' names, and per method their personal score, mean over seeds.

    Where names differ from seed to seed, clients are numbered.
    """
    columns = []
    names: list[str] = []
    own = metric_of(content).name
    for label, method in content["methods"].items():
        listed = [[client["client"] for client in seed["clients"]] for seed in method["seeds"]]
        same = all(one == listed[0] for one in listed)
        names = listed[0] if same else [f"client {place}" for place in range(len(listed[0]))]
        columns.append((label, _client_means(method, next(iter(method["headline"])), own)))
    return names, columns


def _client_means(method: Mapping[str, Any], model: str, name: str) -> list[float | None]:
    scores = [[c[model][name] for c in seed["clients"]] for seed in method["seeds"]]
    return [known_mean(values) for values in zip(*scores, strict=True)]
