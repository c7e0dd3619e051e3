"""Results as a few words and as pictures, for a notebook or a file; no library draws them."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from idiolect.analysis.comparison import Comparison
from idiolect.analysis.report.figures import Axis, Chart, Mark, Panel, of_rounds, styles
from idiolect.analysis.report.svg import Styles, svg
from idiolect.core.checkpoint import write_whole
from idiolect.core.metrics import Metric, metric
from idiolect.engine.outcome import BASELINE, Outcome
from idiolect.errors import ConfigError, shortened
from idiolect.results.statistics import mean

_MOST_CLIENTS = 40  # with a bar each; more are drawn in order of their scores
_FRAME = "font:13px/1.4 system-ui,sans-serif;color:#111;background:#fff;padding:8px;max-width:100%"
_CELL = "padding:2px 10px 2px 0;text-align:right"


@dataclass(frozen=True, eq=False)
class Picture:
    """Charts that a notebook shows, and that can be saved as SVG or HTML."""

    charts: Sequence[Chart]
    styles: Styles
    title: str = ""

    def __repr__(self) -> str:
        names = ", ".join(chart.title for chart in self.charts)
        return f"Picture of {shortened(self.title, 60)}: {names}; .save(path) writes it"

    @property
    def svg(self) -> str:
        """The charts as one SVG, one below the other."""
        drawn = [svg(chart, self.styles) for chart in self.charts]
        if len(drawn) == 1:
            return drawn[0]
        heights = [float(_found(r'height="([\d.]+)"', one)) for one in drawn]
        inside, top = [], 0.0
        for one, height in zip(drawn, heights, strict=True):
            inside.append(one.replace("<svg ", f'<svg y="{top:g}" ', 1))
            top += height
        width = _found(r'viewBox="0 0 ([\d.]+) ', drawn[0])
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top:g}" '
            f'width="{width}" height="{top:g}">\n{"".join(inside)}</svg>\n'
        )

    def _repr_html_(self) -> str:
        return f'<div class="idiolect" style="{_FRAME}">{self._scaled()}</div>'

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> Path:
        """Write the picture to a .svg or .html file; return its path."""
        where = Path(path).expanduser()
        if where.suffix not in (".svg", ".html"):
            raise ConfigError(f"{where.name} ends in {where.suffix!r}; expected .svg or .html")
        head = f'<!doctype html><meta charset="utf-8"><title>{escape(self.title)}</title>'
        text = self.svg if where.suffix == ".svg" else head + self._repr_html_()
        try:
            where.parent.mkdir(parents=True, exist_ok=True)
            write_whole(where, text.encode())
        except OSError as error:
            raise ConfigError(f"cannot write {where}: {error.strerror}") from error
        return where

    def _scaled(self) -> str:
        """Return the charts as wide as there is room."""
        drawn = [svg(chart, self.styles) for chart in self.charts]
        style = 'style="width:100%;min-width:560px;max-width:760px;height:auto;display:block"'
        sized = [re.sub(r' width="\d[^"]*" height="[^"]*"', f" {style}", d, count=1) for d in drawn]
        return f'<div style="overflow-x:auto">{"".join(sized)}</div>'


def outcome_text(outcome: Outcome) -> str:
    """Tell a result in a few lines."""
    own, seeds = chosen(outcome), [members.seed for members in outcome.members]
    clients = len(outcome.members[0].names)
    under = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds"
    lines = [
        f"{shortened(outcome.label, 60)}: {clients:,} {'client' if clients == 1 else 'clients'}, "
        f"{outcome.rounds} rounds, {under}",
        f"  test {own.title}, mean over clients:",
    ]
    for name, values in list(_scores(outcome, own).items())[:4]:
        middle, worst = own.written(mean(values)), own.written(_worst(values, own))
        lines.append(f"  {shortened(name, 24):10} {middle}, worst client {worst}")
    return "\n".join(lines)


def outcome_html(outcome: Outcome) -> str:
    """Tell a result in a table and pictures."""
    own = chosen(outcome)
    rows = [
        [name, own.written(mean(values)), own.written(_worst(values, own))]
        for name, values in _scores(outcome, own).items()
    ]
    first = outcome_text(outcome).splitlines()[0]
    table = _table(["model", f"test {own.title}, mean", "worst client"], rows)
    notes = "".join(
        f'<div style="color:#7a4b00">note: {escape(shortened(text, 300))}</div>'
        for text in outcome.notices[:4]
    )
    return (
        f'<div class="idiolect" style="{_FRAME}"><div style="font-weight:600">{escape(first)}</div>'
        f"{table}{notes}{picture_of([outcome])._scaled()}</div>"
    )


def comparison_html(outcomes: Sequence[Outcome], found: Comparison) -> str:
    """Tell a comparison: the verdict, a table and pictures."""
    own = chosen(outcomes[0])
    scored = {one.label: _scores(one, own)[one.headline] for one in outcomes}
    rows = [
        [shortened(label, 60), own.written(mean(values)), own.written(_worst(values, own))]
        for label, values in ((label, scored[label]) for label in found.methods)
    ]
    table = _table(["method", f"test {own.title}, mean", "worst client"], rows)
    return (
        f'<div class="idiolect" style="{_FRAME}">'
        f'<div style="font-weight:600">{escape(found.verdict.sentence)}</div>{table}'
        f"{picture_of(outcomes)._scaled()}</div>"
    )


def picture_of(outcomes: Sequence[Outcome]) -> Picture:
    """Draw each client's score, and the curve over the rounds where there is one."""
    own = chosen(outcomes[0])
    named = styles([(one.label, str(one.about.get("method", ""))) for one in outcomes])
    charts = [_clients(outcomes, own)]
    if (curves := _curves(outcomes, own)) is not None:
        charts.append(curves)
    return Picture(charts, named, ", ".join(one.label for one in outcomes))


def chosen(outcome: Outcome) -> Metric:
    """Return the metric that a result is told by."""
    return metric(outcome.metric, None, outcome.precision)


def _scores(outcome: Outcome, own: Metric) -> dict[str, np.ndarray]:
    """Return each model's scores, mean over seeds [client]; the baseline's too."""
    held = {}
    for name in [*outcome.models, BASELINE]:
        values = outcome.final.get(f"{name}/{own.name}")
        if values is not None:
            held[name] = np.array([mean(column) for column in np.asarray(values, float).T])
    return held


def _worst(values: np.ndarray, own: Metric) -> float:
    known = values[~np.isnan(values)]
    if not len(known):
        return math.nan
    return float(known.min() if own.higher else known.max())


def _axis(own: Metric, words: str) -> Axis:
    return Axis(
        f"{words} {own.title}", "%" if own.percent else "", low=0.0 if own.percent else None
    )


def _plain(values: np.ndarray) -> list[float | None]:
    return [None if math.isnan(value) else float(value) for value in values]


def _clients(outcomes: Sequence[Outcome], own: Metric) -> Chart:
    """Draw every client's own model: bars of one method, dots of several."""
    names = [shortened(name, 28) for name in outcomes[0].members[0].names]
    axis, rows = _axis(own, "test"), []
    for outcome in outcomes:
        values = _plain(_scores(outcome, own)[outcome.headline])
        rows += [(outcome.label, name, v) for name, v in zip(names, values, strict=False)]
    if len(names) > _MOST_CLIENTS:
        marks = [
            Mark("line", method=one.label, x=list(range(1, len(ordered) + 1)), y=ordered)
            for one in outcomes
            if (ordered := _ordered(_scores(one, own)[one.headline]))
        ]
        panel = Panel("", Axis("clients, from the lowest score", low=0.0), axis)
    else:
        places = list(range(len(names)))
        marks = []
        for one in outcomes:
            values = _plain(_scores(one, own)[one.headline])
            single = len(outcomes) == 1
            kind = "bars" if single else "dots"
            marks.append(Mark(kind, method=one.label, x=values, y=places, text=_said(one, values)))
            for name in ("global", BASELINE) if single else ():
                beside = _scores(one, own).get(name)
                if beside is not None and name != one.headline:
                    tone = 3 if name == "global" else 2
                    held = _plain(beside)
                    marks.append(
                        Mark("dots", name=name, tone=tone, x=held, y=places, text=_said(one, held))
                    )
        panel = Panel("", axis, Axis(categories=tuple(names)))
    height = 90 + (260 if len(names) > _MOST_CLIENTS else 22 * max(len(names), 3))
    title = f"Test {own.title} of each client's own model"
    return Chart("clients", title, "", [panel], marks, ("method", "client", own.name), rows, height)


def _ordered(values: np.ndarray) -> list[float]:
    return sorted(float(value) for value in values if not math.isnan(value))


def _said(outcome: Outcome, values: Sequence[float | None]) -> list[str]:
    names = outcome.members[0].names
    own = chosen(outcome)
    return [f"{n}: {own.written(value)}" for n, value in zip(names, values, strict=False)]


def _curves(outcomes: Sequence[Outcome], own: Metric) -> Chart | None:
    """Draw the validation curves, mean over clients and seeds."""
    marks, rows = [], []
    shown = own if any(f"/{own.name}" in key for one in outcomes for key in one.curves) else None
    name = shown.name if shown else "loss"
    for outcome in outcomes:
        models = [m for m in ("personal", "global") if f"val/{m}/{name}" in outcome.curves]
        for model in models[:1]:
            values = outcome.curves[f"val/{model}/{name}"]
            ys = [mean(np.asarray(point).reshape(-1)) for point in values]
            line = _plain(np.array(ys))
            marks.append(Mark("line", method=outcome.label, x=list(outcome.evaluated), y=line))
            rows += [
                (outcome.label, model, r, y) for r, y in zip(outcome.evaluated, ys, strict=True)
            ]
    if not marks or not any(len(mark.x) > 1 for mark in marks):
        return None
    axis = Axis(
        f"validation {shown.title if shown else 'loss'}", "%" if own.percent and shown else ""
    )
    title = f"Validation {shown.title if shown else 'loss'} over the rounds, mean over clients"
    panel = Panel("", of_rounds(max(round for _, _, round, _ in rows)), axis)
    return Chart("curve", title, "", [panel], marks, ("method", "model", "round", name), rows, 260)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    heads = "".join(
        f'<th style="{_CELL}{";text-align:left" if not n else ""}">{escape(one)}</th>'
        for n, one in enumerate(head)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td style="{_CELL}{";text-align:left" if not n else ""}">{escape(str(one))}</td>'
            for n, one in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div style="overflow-x:auto"><table style="border-collapse:collapse;margin:4px 0">'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None
    return match[1]
