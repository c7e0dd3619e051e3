"""What a report is drawn from: a run's folder, or a run that is still going on."""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from idiolect.analysis.comparison import ALPHA, Comparison, compare
from idiolect.engine.outcome import Outcome
from idiolect.errors import DataError, MissingExtra
from idiolect.results import data_record, document, statistics, trace
from idiolect.results.data_record import Holdings
from idiolect.results.document import Document
from idiolect.results.trace import Trace

EXPERIMENT = "experiment.toml"
COMPARISON = "comparison.json"


@dataclass(frozen=True)
class Curve:
    """Accuracy of a model over the rounds, each client alike; a value per seed at every point."""

    method: str
    model: str
    split: str  # val, or test_curve where the user asked to watch it
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
class Material:
    """A run's findings, its curves and its settings."""

    content: Document
    curves: Sequence[Curve] = ()
    held: Sequence[Holdings] = ()
    experiment: str = ""  # the TOML as run
    folder: str = ""  # as the user named it
    traces: Sequence[Trace] = ()  # what servers recorded round by round
    comparison: Comparison | None = None  # statistics, once there is a result
    remark: str = ""  # why there are none
    standing: Mapping[str, str] = field(default_factory=dict)  # of a run going on: label -> words

    @property
    def name(self) -> str:
        """What the run is called."""
        return str(self.content["name"] or Path(self.folder).name or "run")

    @property
    def methods(self) -> dict[str, dict[str, Any]]:
        """The methods that are trained and scored, by label."""
        found: dict[str, dict[str, Any]] = self.content["methods"]
        return found

    @property
    def labels(self) -> dict[str, str]:
        """Every label with its method's registered name, in order; those under way too."""
        own = {label: str(method["method"]) for label, method in self.methods.items()}
        return own | {c.method: c.method for c in self.curves if c.method not in own}


def read(folder: str | Path) -> Material:
    """Read a run's folder."""
    path = Path(folder)
    content = document.read_document(path)
    if not content.get("methods"):
        raise DataError(
            f"{folder} holds no finished method yet; let the run go on with --resume, or watch it "
            "with `idiolect run EXPERIMENT.toml --resume --serve`"
        )
    written = path / EXPERIMENT
    order = {label: place for place, label in enumerate(content["methods"])}
    return Material(
        content,
        tuple(sorted(_curves_of_file(path), key=lambda c: order.get(c.method, len(order)))),
        tuple(data_record.read_holdings(path)),
        written.read_text(encoding="utf-8") if written.is_file() else "",
        str(folder),
        tuple(trace.read_trace(path, label) for label in trace.traced_labels(path)),
        *compared(content, _asked(path)),
    )


def _asked(folder: Path) -> dict[str, Any]:
    """Find what a comparison was asked for, here or where this folder is one of its splits."""
    for place in (folder, folder.resolve().parent):
        if (place / COMPARISON).is_file():
            with contextlib.suppress(DataError):  # a damaged one is told of where it is needed
                content = _comparison(place)
                splits = [(place / one["folder"]).resolve() for one in content["splits"]]
                asked = content.get("asked")
                if folder.resolve() in splits and isinstance(asked, dict):
                    return {key: asked.get(key) for key in ("target", "unit")} | {
                        "alpha": asked.get("alpha", ALPHA)
                    }
    return {}


def compared(
    content: Document, asked: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Comparison | None, str]:
    """Compare the methods, or say why they cannot be compared."""
    try:
        return compare(content, **asked), ""
    except (MissingExtra, DataError) as error:
        return None, f"The methods are not compared: {error}."


def folders(folder: str | Path) -> list[Path]:
    """Give the runs in a folder: itself, or one for each split of a comparison."""
    path = Path(folder)
    if (path / document.FILE).exists() or not (path / COMPARISON).exists():
        return [path]
    return [path / one["folder"] for one in _comparison(path)["splits"]]


def overall(folder: str | Path) -> str:
    """Give the verdict over all splits of a comparison; empty where there is none."""
    path = Path(folder)
    if (path / document.FILE).exists() or not (path / COMPARISON).exists():
        return ""
    together = _comparison(path).get("overall")
    return "" if together is None else str(together["sentence"])


def _comparison(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads((path / COMPARISON).read_text(encoding="utf-8"))
        if all("folder" in one for one in content["splits"]):
            return content
    except (ValueError, KeyError, TypeError):
        pass
    raise DataError(
        f"{path / COMPARISON} is damaged; write it again with `idiolect compare EXPERIMENT.toml`"
    )


def curves(outcome: Outcome) -> list[Curve]:
    """Take the curves of a method, finished or not."""
    found = []
    for key, values in sorted(outcome.curves.items()):
        split, model, metric = key.split("/")
        if metric != "accuracy":
            continue
        seeds = tuple(tuple(statistics.mean(row) for row in point) for point in values)
        found.append(Curve(outcome.label, model, split, outcome.evaluated, seeds))
    return found


def _curves_of_file(folder: Path) -> list[Curve]:
    """Average metrics.parquet over clients; the one place that reads it."""
    import pyarrow.compute as pc
    from pyarrow import parquet

    if not (folder / document.METRICS_FILE).is_file():
        return []
    try:
        table = parquet.read_table(folder / document.METRICS_FILE)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder / document.METRICS_FILE} is damaged ({error}); write it again with --resume"
        ) from error
    for name in ("method", "model", "split", "metric"):
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, table[name].cast("string"))
    field = pc.field
    seen = (field("metric") == "accuracy") & (field("split") != "test") & ~field("value").is_nan()
    table = table.filter(seen)
    keys = ["method", "model", "split", "round", "seed"]
    means = table.group_by(keys).aggregate([("value", "mean")])
    lines: dict[tuple[str, str, str], dict[int, dict[int, float]]] = {}
    for row in means.to_pylist():
        line = lines.setdefault((row["method"], row["model"], row["split"]), {})
        line.setdefault(row["round"], {})[row["seed"]] = row["value_mean"]
    return [
        Curve(
            *key,
            tuple(sorted(points)),
            tuple(tuple(v for _, v in sorted(points[r].items())) for r in sorted(points)),
        )
        for key, points in sorted(lines.items())
    ]
