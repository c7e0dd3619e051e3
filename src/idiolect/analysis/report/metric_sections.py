"""Sections about metrics: all of them beside a baseline, confusion, reliability, numbers told."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from idiolect.analysis.report.figures import (
    Axis,
    Block,
    Chart,
    Column,
    Mark,
    Panel,
    Section,
    Table,
    chart,
    paragraph,
    section,
    table,
)
from idiolect.analysis.report.report_data import ReportData
from idiolect.core.metrics import Metric, fitting, metric
from idiolect.results.document import baseline_line
from idiolect.results.statistics import known_mean

_MOST_CLASSES = 25  # of a confusion matrix that is drawn
_SHARE = "below local"  # how headings of columns begin that are shares whatever the metric is
# What is said of a metric of which more is better, and what of the others.
_TURNED = {
    "to the right is a": "at the better end is a",
    "Up and to the left": "Down and to the left",
    "is that high": "is that low",
    "the lowest curve": "the highest curve",
    "below Local": "worse than Local",
}


def all_metrics(data: ReportData) -> Section | None:
    """Show every metric of the task, of every method and of guessing, and what is behind them."""
    if not data.methods:
        return None
    names = [name for name in fitting(data.task) if _known(data, name)]
    if not names:
        return None
    blocks: list[Block] = []
    if line := baseline_line(data.content):
        blocks.append(paragraph(line, "Note."))
    blocks += [_table(data, names, "metrics"), _table(data, names, "pooled")]
    blocks += [
        block
        for block in (
            _confusion(data),
            _confusion_of_clients(data),
            _reliability(data),
            _numbers(data),
            _residuals(data),
        )
        if block is not None
    ]
    return section("metrics", blocks)


def _models(data: ReportData) -> dict[str, list[Mapping[str, Any]]]:
    """Return by label what each seed holds of the headline model."""
    return {
        label: [seed["models"][next(iter(method["headline"]))] for seed in method["seeds"]]
        for label, method in data.methods.items()
        if method["headline"]
    }


def _known(data: ReportData, name: str) -> bool:
    return any(name in seed.get("metrics", {}) for own in _models(data).values() for seed in own)


def _table(data: ReportData, names: Sequence[str], which: str) -> Table:
    """Lay out a row for each method and one for guessing; `which` is metrics or pooled."""
    columns = [Column("method")]
    for name in names:
        own = metric(name)
        head = f"{own.title}, %" if own.percent else own.title
        form = "percent" if own.percent else "figure"
        columns.append(Column(head, form, best="high" if own.higher else "low"))
    rows: list[tuple[Any, ...]] = []
    for label, seeds in _models(data).items():
        rows.append((label, *(_mean(seeds, which, name) for name in names)))
    methods = [str(row[0]) for row in rows]
    if baseline := data.content.get("baseline"):
        values = [_mean(baseline["seeds"], which, name) for name in names]
        rows.append((f"guessing: {baseline['name']}", *values))
        methods.append("")
    return table(f"all-{which}", rows, methods, columns)


def _mean(seeds: Sequence[Mapping[str, Any]], which: str, name: str) -> float | None:
    return known_mean([(seed.get(which) or {}).get(name) for seed in seeds])


def _summed(seeds: Sequence[Mapping[str, Any]], key: str) -> Any:
    """Add an array of every seed up; None where it is not kept."""
    held = [np.asarray(seed[key]) for seed in seeds if seed.get(key)]
    return sum(held[1:], held[0]) if held else None


def _classes(data: ReportData) -> tuple[str, ...]:
    return tuple(map(str, data.content.get("data", {}).get("classes") or ()))


def _confusion(data: ReportData) -> Chart | None:
    """Draw truth against answer, all clients and seeds together, a panel for each method."""
    classes = _classes(data)
    held = {label: _summed(seeds, "confusion") for label, seeds in _models(data).items()}
    held = {label: own for label, own in held.items() if own is not None and own.ndim == 2}
    if data.task != "classes" or not held or not 1 < len(classes) <= _MOST_CLASSES:
        return None
    places = list(range(len(classes)))
    marks, rows = [], []
    for panel, (label, counts) in enumerate(held.items()):
        whole = np.maximum(counts.sum(1, keepdims=True), 1)
        marks.append(
            Mark(
                "heat",
                panel=panel,
                x=places,
                y=places,
                z=[[float(v) for v in row] for row in np.round(100 * counts / whole, 1)],
                says=f"{label}: {{z}} % of {{y}} are called {{x}}",
                top=100.0,
            )
        )
        rows += [(label, classes[a], classes[b], int(counts[a, b])) for a in places for b in places]
    said, true = Axis("called", categories=classes), Axis("truly", categories=classes)
    return chart(
        "confusion",
        [Panel(label, said, true) for label in held],
        marks,
        rows,
        height=max(220, 26 * len(classes) + 150),
    )


def _confusion_of_clients(data: ReportData) -> Table | None:
    """Count right and wrong calls of every client, for two classes and few clients."""
    if data.task != "classes" or len(_classes(data)) != 2:
        return None
    rows: list[tuple[Any, ...]] = []
    for label, seeds in _models(data).items():
        names = [one["client"] for one in data.methods[label]["seeds"][0]["clients"]]
        parts = [[seed.get("confusion") for seed in seeds]]
        for place in range(len(names)):
            parts.append([seed.get("confusion_of_clients", {}).get(str(place)) for seed in seeds])
        for name, held in zip(["all clients", *names], parts, strict=True):
            known = [np.asarray(one) for one in held if one is not None]
            if known:
                (tn, fp), (fn, tp) = sum(known[1:], known[0])
                rows.append((label, name, int(tp), int(fn), int(fp), int(tn)))
                rows[-1] += (
                    tp / (tp + fn) if tp + fn else None,
                    tn / (tn + fp) if tn + fp else None,
                )
    if not rows:
        return None
    positive = _classes(data)[1]
    return table("confusion-clients", rows, [str(row[0]) for row in rows], positive=positive)


def _reliability(data: ReportData) -> Chart | None:
    """Draw how often it was true against how probable it was said to be."""
    held = {label: _summed(seeds, "reliability") for label, seeds in _models(data).items()}
    held = {label: own for label, own in held.items() if own is not None and own[:, 0].sum()}
    if not held:
        return None
    ends: list[float | int | None] = [0.0, 1.0]
    marks = [Mark("line", name="as often as said", x=ends, y=ends, tone=4, faint=True)]
    rows: list[tuple[Any, ...]] = []
    for label, bins in held.items():
        some = bins[bins[:, 0] > 0]
        said, true = (some[:, n] / some[:, 0] for n in (1, 2))
        text = [
            f"{label}: said {100 * p:.0f}%, true {100 * t:.0f}% of {n:.0f} rows"
            for p, t, n in zip(said, true, some[:, 0], strict=True)
        ]
        kind = "line" if len(some) > 1 else "dots"
        marks.append(Mark(kind, method=label, x=said.tolist(), y=true.tolist(), text=text))
        rows += [
            (label, float(p), float(t), int(n))
            for p, t, n in zip(said, true, some[:, 0], strict=True)
        ]
    panel = Panel(
        "",
        Axis("probability that was said", "%", low=0.0, high=1.0),
        Axis("how often it was so", "%", low=0.0, high=1.0),
    )
    return chart("reliability", [panel], marks, rows)


def _points(data: ReportData) -> dict[str, Any]:
    held = {label: seeds[0].get("points") for label, seeds in _models(data).items()}
    return {label: np.asarray(own, np.float64) for label, own in held.items() if own}


def _numbers(data: ReportData) -> Chart | None:
    """Draw numbers told against the true ones, a panel for each method."""
    held = _points(data)
    if not held:
        return None
    low = min(float(own.min()) for own in held.values())
    high = max(float(own.max()) for own in held.values())
    marks: list[Mark] = []
    for panel, (label, own) in enumerate(held.items()):
        marks.append(Mark("line", panel, x=[low, high], y=[low, high], tone=4, faint=True))
        text = [f"{label}: {told:.4g} told, {true:.4g} true" for true, told in own]
        x, y = own[:, 0].tolist(), own[:, 1].tolist()
        marks.append(Mark("dots", panel, label, x=x, y=y, text=text, faint=True))
    panels = [Panel(label, Axis("true"), Axis("told")) for label in held]
    rows = [(label, *map(float, row)) for label, own in held.items() for row in own]
    return chart("numbers", panels, marks, rows, height=300)


def _residuals(data: ReportData) -> Chart | None:
    """Draw errors of numbers over what was told."""
    held = _points(data)
    if not held:
        return None
    marks: list[Mark] = []
    for panel, (label, own) in enumerate(held.items()):
        told, off = own[:, 1], own[:, 1] - own[:, 0]
        ends: list[float | int | None] = [float(told.min()), float(told.max())]
        marks.append(Mark("line", panel, x=ends, y=[0.0, 0.0], tone=4, faint=True))
        text = [f"{label}: {t:.4g} told, {e:+.4g} off" for t, e in zip(told, off, strict=True)]
        x, y = told.tolist(), off.tolist()
        marks.append(Mark("dots", panel, label, x=x, y=y, text=text, faint=True))
    panels = [Panel(label, Axis("told"), Axis("told − true")) for label in held]
    rows = [
        (label, float(told), float(told - true))
        for label, own in held.items()
        for true, told in own
    ]
    return chart("residuals", panels, marks, rows, height=260)


# The words of other sections are those of accuracy; here they become those of another metric.


def reworded(made: Section, own: Metric) -> Section:
    """Write a section about another metric than accuracy."""
    if own.name == "accuracy" or made.id == "metrics":
        return made
    blocks: list[Block] = []
    for block in made.blocks:
        if isinstance(block, Chart):
            header = [_words(head, own) for head in block.header]
            title, caption = _words(block.title, own), _words(block.caption, own)
            block = replace(block, header=header, title=title, caption=caption)
        elif isinstance(block, Table):
            columns = [_column(column, own) for column in block.columns]
            title, caption = _words(block.title, own), _words(block.caption, own)
            block = replace(block, columns=columns, title=title, caption=caption)
        blocks.append(block)
    return replace(made, lead=_words(made.lead, own), blocks=blocks)


def _words(text: str, own: Metric) -> str:
    text = re.sub(r"[Aa]ccurac(y|ies)", own.title, text)
    if not own.higher:
        for words, turned in _TURNED.items():
            text = text.replace(words, turned)
    if own.percent:
        return text
    return (
        text.replace(", in points of", ", in units of").replace(", points", "").replace(", %", "")
    )


def _column(column: Column, own: Metric) -> Column:
    head, form, best = _words(column.head, own), column.form, column.best
    if column.head.lower().startswith(_SHARE):
        head = column.head if own.higher else column.head.replace("below", "worse than")
    elif not own.percent:
        forms = {"percent": "figure", "points": "figure", "interval": "interval of numbers"}
        form = forms.get(form, form)
        head = "difference" if head == "points" else head
    if not own.higher and best == "high" and form != "index":
        best = "low"
    return column._replace(head=head, form=form, help=_words(column.help, own), best=best)
