"""Every client's accuracy under every method: the figures a mean hides."""

import statistics as plain
from collections.abc import Mapping, Sequence
from typing import Any

from idiolect.analysis.report.chart import Axis, Chart, Mark, Panel
from idiolect.analysis.report.material import Material
from idiolect.analysis.report.section import Section
from idiolect.results.document import per_client

_MOST_ROWS = 30  # clients that get a row of their own


def section(material: Material) -> Section | None:
    """Draw a row per client while they are few, and always a row per method."""
    if not material.methods:
        return None
    names, columns = per_client(material.content)
    blocks = [_by_method(material, names, columns)]
    if len(names) <= _MOST_ROWS:
        blocks.insert(0, _by_client(material, names, columns))
    return Section(
        "clients",
        "Every client",
        "A mean hides who pays for it. Here each client's own test accuracy is shown under every "
        "method, the mean over seeds.",
        blocks,
        "Clients",
    )


Columns = Sequence[tuple[str, list[float | None]]]


def _by_client(material: Material, names: Sequence[str], columns: Columns) -> Chart:
    marks = []
    for rank, (label, values) in enumerate(columns):
        seeds = _of_seeds(material.methods[label])
        text = [
            f"{name}<br>{label}: {_percent(value)}{_seeds(own)}"
            for name, value, own in zip(names, values, seeds, strict=True)
        ]
        # Methods stand a little apart, so that equal figures do not hide each other.
        aside = (rank - (len(columns) - 1) / 2) * min(0.09, 0.6 / len(columns))
        heights = [place + aside for place in range(len(names))]
        marks.append(Mark("dots", method=label, x=values, y=heights, text=text))
    ends = [
        _ends([v for _, values in columns if (v := values[n]) is not None])
        for n in range(len(names))
    ]
    spans = Mark(
        "span",
        y=list(range(len(names))),
        low=[low for low, _ in ends],
        high=[high for _, high in ends],
        faint=True,
    )
    return Chart(
        "by-client",
        "Each client under every method",
        "A row is a client, a dot its test accuracy under one method (mean over seeds); the line "
        "joins its worst and best method. Long lines are clients for whom the choice of method "
        "matters.",
        [Panel("", Axis("test accuracy", "%"), Axis(categories=tuple(names)))],
        [spans, *marks],
        ("client", "method", "seed", "accuracy"),
        _rows(material, names),
        height=max(220, 30 * len(names) + 70),
    )


def _by_method(material: Material, names: Sequence[str], columns: Columns) -> Chart:
    labels = tuple(label for label, _ in columns)
    marks: list[Mark] = []
    for place, (label, values) in enumerate(columns):
        seen = [(name, v) for name, v in zip(names, values, strict=True) if v is not None]
        heights = [place + _nudge(rank, len(seen)) for rank in range(len(seen))]
        text = [f"{name}<br>{label}: {_percent(value)}" for name, value in seen]
        marks.append(
            Mark("dots", method=label, x=[v for _, v in seen], y=heights, text=text, faint=True)
        )
        if seen:
            middle = plain.fmean(v for _, v in seen)
            told = f"{label}: mean over clients {_percent(middle)}"
            marks.append(Mark("dots", method=label, x=[middle], y=[place], text=[told], big=True))
    return Chart(
        "by-method",
        "How clients are spread under each method",
        "A small dot is a client, the large one the mean over clients. A tight cloud to the right "
        "is a method that serves everyone well. Heights within a row only keep dots apart.",
        [Panel("", Axis("test accuracy", "%"), Axis(categories=labels))],
        marks,
        ("client", "method", "accuracy"),
        [
            (name, label, value)
            for label, values in columns
            for name, value in zip(names, values, strict=True)
        ],
        height=max(220, 46 * len(labels) + 70),
    )


def _nudge(rank: int, count: int) -> float:
    """Spread dots over a row evenly and always alike; the golden ratio keeps neighbours apart."""
    return (rank * 0.618034 % 1 - 0.5) * (0.5 if count > 1 else 0.0)


def _rows(material: Material, names: Sequence[str]) -> list[tuple[Any, ...]]:
    return [
        (name, label, seed["seed"], client[next(iter(method["headline"]))]["accuracy"])
        for label, method in material.methods.items()
        for seed in method["seeds"]
        for name, client in zip(names, seed["clients"], strict=True)
    ]


def _of_seeds(method: Mapping[str, Any]) -> list[list[float | None]]:
    model = next(iter(method["headline"]))
    by_seed = [[c[model]["accuracy"] for c in seed["clients"]] for seed in method["seeds"]]
    return [list(values) for values in zip(*by_seed, strict=True)]


def _seeds(values: Sequence[float | None]) -> str:
    seen = [value for value in values if value is not None]
    if len(seen) < 2:
        return ""
    return f"<br>over {len(seen)} seeds: {_percent(min(seen))} to {_percent(max(seen))}"


def _ends(values: Sequence[float]) -> tuple[float | None, float | None]:
    return (min(values), max(values)) if values else (None, None)


def _percent(value: float | None) -> str:
    return "no test data" if value is None else f"{100 * value:.1f}%"
