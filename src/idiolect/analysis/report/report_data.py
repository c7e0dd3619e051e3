"""What a report shows: read from a run's folder, or taken from a run that is still training."""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from idiolect.analysis.comparison import Comparison, compare
from idiolect.core.metrics import Metric
from idiolect.engine.outcome import Outcome
from idiolect.errors import DataError, MissingExtra
from idiolect.results import document, run_files, statistics, trace
from idiolect.results.document import Document
from idiolect.results.run_files import Holdings
from idiolect.results.trace import Trace

EXPERIMENT = "experiment.toml"
COMPARISON = "comparison.json"


@dataclass(frozen=True)
class Curve:
    """A model's metric over the rounds, each client alike; a value per seed at every point."""

    method: str
    model: str
    split: str  # val, or test_curve and train_curve where the user asked to watch them
    rounds: tuple[int, ...]
    seeds: tuple[tuple[float, ...], ...]  # [point][seed]

    @property
    def mean(self) -> list[float]:
        """Mean over seeds at every point."""
        return [statistics.mean(np.array(values)) for values in self.seeds]

    @property
    def spread(self) -> list[float]:
        """Sample deviation over seeds; zero where there is one seed."""
        found = [statistics.deviation(np.array(values)) for values in self.seeds]
        return [0.0 if math.isnan(value) else value for value in found]


@dataclass(frozen=True)
class ReportData:
    """A run's results, its curves and its settings."""

    content: Document
    curves: Sequence[Curve] = ()
    holdings: Sequence[Holdings] = ()  # who holds what, of every seed
    experiment: str = ""  # the TOML as run
    folder: str = ""  # as the user named it
    traces: Sequence[Trace] = ()  # what servers recorded round by round
    comparison: Comparison | None = None  # statistics, once there is a result
    not_compared: str = ""  # why there are none
    status: Mapping[str, str] = field(default_factory=dict)  # while training: label -> progress

    @property
    def name(self) -> str:
        """The run's name."""
        return str(self.content["name"] or Path(self.folder).name or "run")

    @property
    def methods(self) -> dict[str, dict[str, Any]]:
        """The methods that are trained and scored, by label."""
        found: dict[str, dict[str, Any]] = self.content["methods"]
        return found

    @property
    def task(self) -> str:
        """The kind of task; of older results classes."""
        return str(self.content.get("task", "classes"))

    @property
    def metric(self) -> Metric:
        """The metric by which methods are compared."""
        return document.metric_of(self.content)

    @property
    def labels(self) -> dict[str, str]:
        """Every label with its method's registered name, in order; those in training too."""
        own = {label: str(method["method"]) for label, method in self.methods.items()}
        return own | {c.method: c.method for c in self.curves if c.method not in own}


def read_run(folder: str | Path) -> ReportData:
    """Read a run's folder and compare its methods."""
    path = Path(folder)
    content = document.read_document(path)
    if not content.get("methods"):
        raise DataError(
            f"{folder} holds no finished method yet; let the run go on with --resume, or watch it "
            "with `idiolect run EXPERIMENT.toml --resume --serve`"
        )
    comparison, why_not = None, ""
    try:
        comparison = compare(content, **_compare_options(path))
    except (MissingExtra, DataError) as error:
        why_not = f"The methods are not compared: {error}."
    curves = _curves_of_file(path, document.metric_of(content).name)
    order = {label: place for place, label in enumerate(content["methods"])}
    return ReportData(
        content,
        sorted(curves, key=lambda curve: order.get(curve.method, len(order))),
        run_files.read_holdings(path),
        experiment_text(path),
        str(folder),
        [trace.read_trace(path, label) for label in trace.traced_labels(path)],
        comparison,
        why_not,
    )


def experiment_text(folder: Path) -> str:
    """Return the experiment file that a run keeps in its folder; empty where there is none."""
    path = folder / EXPERIMENT
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _compare_options(folder: Path) -> dict[str, Any]:
    """Return the options of `compare`, where this folder is a comparison or one of its splits."""
    for place in (folder, folder.resolve().parent):
        if (place / COMPARISON).is_file():
            with contextlib.suppress(DataError):  # a damaged one is reported where it is needed
                content = _comparison(place)
                splits = [(place / one["folder"]).resolve() for one in content["splits"]]
                asked = content.get("asked")
                if folder.resolve() in splits and isinstance(asked, dict):
                    return {k: asked[k] for k in ("alpha", "target", "unit") if k in asked}
    return {}


def read_runs(folder: str | Path) -> tuple[list[ReportData], str]:
    """Read a run, or every split of a comparison and the verdict over all of them."""
    path = Path(folder)
    if (path / document.FILE).exists() or not (path / COMPARISON).exists():
        return [read_run(folder)], ""
    content = _comparison(path)
    overall = content.get("overall") or {"sentence": ""}
    return [read_run(path / one["folder"]) for one in content["splits"]], overall["sentence"]


def _comparison(path: Path) -> dict[str, Any]:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        content: dict[str, Any] = json.loads((path / COMPARISON).read_text(encoding="utf-8"))
        if all("folder" in one for one in content["splits"]):
            return content
    raise DataError(
        f"{path / COMPARISON} is damaged; write it again with `idiolect compare EXPERIMENT.toml`"
    )


def curves_of(outcome: Outcome) -> list[Curve]:
    """Return the curves of a method, finished or not."""
    found = []
    for key, values in sorted(outcome.curves.items()):
        split, model, metric = key.split("/")
        if metric == outcome.metric:
            seeds = tuple(tuple(statistics.mean(row) for row in point) for point in values)
            found.append(Curve(outcome.label, model, split, outcome.evaluated, seeds))
    return found


def _curves_of_file(folder: Path, metric: str) -> list[Curve]:
    """Average metrics.parquet over clients."""
    import pyarrow.compute as pc
    from pyarrow import parquet

    path = folder / document.METRICS_FILE
    if not path.is_file():
        return []
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is damaged ({error}); write it again with --resume") from error
    for name in ("method", "model", "split", "metric"):
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, table[name].cast("string"))
    field = pc.field
    seen = (field("metric") == metric) & (field("split") != "test") & ~field("value").is_nan()
    keys = ["method", "model", "split", "round", "seed"]
    means = table.filter(seen).group_by(keys).aggregate([("value", "mean")])
    lines: dict[tuple[str, str, str], dict[int, list[float]]] = {}
    for row in means.sort_by([(key, "ascending") for key in keys]).to_pylist():
        line = lines.setdefault((row["method"], row["model"], row["split"]), {})
        line.setdefault(row["round"], []).append(row["value_mean"])
    return [
        Curve(*key, tuple(points), tuple(map(tuple, points.values())))
        for key, points in lines.items()
    ]
