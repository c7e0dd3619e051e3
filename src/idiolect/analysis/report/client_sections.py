"""Sections about clients: accuracy, choices, fairness, data, PersFL, who learns from whom."""

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from idiolect.analysis.report.figures import (
    Axis,
    Block,
    Chart,
    Mark,
    Panel,
    Section,
    chart,
    section,
    table,
)
from idiolect.analysis.report.report_data import ReportData
from idiolect.core.metrics import Metric
from idiolect.results.document import per_client
from idiolect.results.trace import Trace, similar_order

_MOST_ROWS = 30  # clients that get a row of their own
_MOST_PANELS = 20  # clients with a panel of their own
_MOST_HOLDERS = 200  # clients of the clients × classes chart; more rows than pixels
_MOST_CELLS = 60_000  # of all rounds together, so that the page stays small
_MOST_ROUNDS = 40
_CELL = re.compile(r"λ=(\S+) T=(\S+)")

Method = Mapping[str, Any]
Columns = Sequence[tuple[str, list[float | None]]]


def _mean(values: Sequence[float | None]) -> float | None:
    seen = [value for value in values if value is not None]
    return statistics.fmean(seen) if seen else None


def _told(own: Metric, value: float | None) -> str:
    return "no figure" if value is None else own.written(value)


def _axis(own: Metric, words: str = "test") -> Axis:
    """Return the axis of a metric's values."""
    return Axis(f"{words} {own.title}", "%" if own.percent else "")


def _height(rows: int, total: int, most: int, least: int) -> int:
    """Return a chart's height in pixels: rows share `total` within bounds."""
    return min(most, max(least, total // max(rows, 1))) * rows


def _by_client(method: Method, read: Callable[[Method], Any]) -> list[list[Any]]:
    """Return a figure of every client as [client][seed]."""
    by_seed = [[read(client) for client in seed["clients"]] for seed in method["seeds"]]
    return [list(values) for values in zip(*by_seed, strict=True)]


def _scores(method: Method, own: Metric, model: str = "") -> list[list[float | None]]:
    name = model or next(iter(method["headline"]))
    return _by_client(method, lambda client: client[name][own.name])


def clients(data: ReportData) -> Section | None:
    """Draw a row per client while they are few, and always a row per method."""
    if not data.methods:
        return None
    names, columns = per_client(data.content)
    charts = [_rows_of_methods(data.metric, names, columns)]
    if len(names) <= _MOST_ROWS:
        charts.insert(0, _rows_of_clients(data, names, columns))
    return section("clients", charts)


def _rows_of_clients(data: ReportData, names: Sequence[str], columns: Columns) -> Chart:
    metric = data.metric
    known = [
        [v for v in row if v is not None] for row in zip(*(c for _, c in columns), strict=True)
    ]
    marks = [
        Mark(
            "span",
            y=list(range(len(names))),
            low=[min(row, default=None) for row in known],
            high=[max(row, default=None) for row in known],
            faint=True,
        )
    ]
    for rank, (label, values) in enumerate(columns):
        text = [
            f"{name}<br>{label}: {_told(metric, value)}{_over_seeds(metric, own)}"
            for name, value, own in zip(
                names, values, _scores(data.methods[label], metric), strict=True
            )
        ]
        # Methods stand a little apart, so that equal figures do not hide each other.
        aside = (rank - (len(columns) - 1) / 2) * min(0.09, 0.6 / len(columns))
        heights = [place + aside for place in range(len(names))]
        marks.append(Mark("dots", method=label, x=values, y=heights, text=text))
    return chart(
        "by-client",
        [Panel("", _axis(metric), Axis(categories=tuple(names)))],
        marks,
        [
            (name, label, seed["seed"], client[next(iter(method["headline"]))][metric.name])
            for label, method in data.methods.items()
            for seed in method["seeds"]
            for name, client in zip(names, seed["clients"], strict=True)
        ],
        height=max(220, 30 * len(names) + 70),
    )


def _over_seeds(own: Metric, values: Sequence[float | None]) -> str:
    seen = [value for value in values if value is not None]
    if len(seen) < 2:
        return ""
    return f"<br>over {len(seen)} seeds: {_told(own, min(seen))} to {_told(own, max(seen))}"


def _rows_of_methods(metric: Metric, names: Sequence[str], columns: Columns) -> Chart:
    marks: list[Mark] = []
    for place, (label, values) in enumerate(columns):
        seen = [(name, v) for name, v in zip(names, values, strict=True) if v is not None]
        # The golden ratio spreads dots evenly over a row and keeps neighbours apart.
        wide = 0.5 if len(seen) > 1 else 0.0
        heights = [place + (rank * 0.618034 % 1 - 0.5) * wide for rank in range(len(seen))]
        text = [f"{name}<br>{label}: {_told(metric, value)}" for name, value in seen]
        dots = [value for _, value in seen]
        marks.append(Mark("dots", method=label, x=dots, y=heights, text=text, faint=True))
        if seen:
            middle = statistics.fmean(dots)
            text = [f"{label}: mean over clients {_told(metric, middle)}"]
            marks.append(Mark("dots", method=label, x=[middle], y=[place], text=text, big=True))
    labels = tuple(label for label, _ in columns)
    return chart(
        "by-method",
        [Panel("", _axis(metric), Axis(categories=labels))],
        marks,
        [
            (name, label, value)
            for label, values in columns
            for name, value in zip(names, values, strict=True)
        ],
        height=max(220, 46 * len(labels) + 70),
    )


def choices(data: ReportData) -> Section | None:
    """List the clients of methods that give a reason for what each client chose."""
    rows = [
        (
            label,
            client["client"],
            seed["seed"],
            client["reason"],
            client["personal"][data.metric.name],
        )
        for label, method in data.methods.items()
        for seed in method["seeds"]
        for client in seed["clients"]
        if client.get("reason")
    ]
    found = table("choices", rows, [str(row[0]) for row in rows])
    return section("choices", [found]) if rows else None


def fairness(data: ReportData) -> Section | None:
    """Draw how evenly accuracy is spread over clients (PersFL, Eq. 6)."""
    found = data.content.get("fairness", {}).get("methods", {})
    names, columns = per_client(data.content)
    if not found or len(names) < 2:
        return None
    marks, rows = [], []
    for place, (label, values) in enumerate(columns):
        seen = sorted(v for v in values if v is not None)
        spread = found.get(label, {}).get("std")
        if seen and spread is not None:
            shown = f"{100 * spread:.2f} points" if data.metric.percent else f"{spread:.3g}"
            text = [f"{label}: deviation over clients {shown}"]
            marks.append(Mark("bars", method=label, x=[spread], y=[place], text=text))
            rows.append((label, spread, found[label]["variance"], seen[0], seen[-1]))
    axis = Axis("deviation over clients", "%" if data.metric.percent else "", low=0.0)
    panel = Panel("", axis, Axis(categories=tuple(label for label, _ in columns)))
    height = max(200, 34 * len(columns) + 70)
    blocks: list[Block] = [chart("fairness", [panel], marks, rows, height=height)]
    if data.comparison is not None:
        methods = data.comparison.methods
        measures = [
            (label, own.variance, own.jain, own.worst_decile, own.below_local)
            for label, own in methods.items()
        ]
        blocks.append(table("fairness-table", measures, methods))
    return section("fairness", blocks)


def held_data(data: ReportData) -> Section | None:
    """Draw clients × classes, the division of the first seed."""
    if not data.holdings:
        return None
    held = data.holdings[0]
    names = held.names[:_MOST_HOLDERS]
    parts = held.counts[:, :_MOST_HOLDERS]
    counts = parts.sum(axis=0)
    mark = Mark(
        "heat",
        x=list(range(len(held.classes))),
        y=list(range(len(names))),
        z=[[int(n) or None for n in row] for row in counts],
        says="{y}, class {x}: {z}",
        top=float(counts.max()),
    )
    more = len(held.names) > len(names)
    drawn = chart(
        "holdings",
        [Panel("", Axis("class", categories=held.classes), Axis(categories=tuple(names)))],
        [mark],
        [
            (name, label, *(int(part[row, column]) for part in parts))
            for row, name in enumerate(names)
            for column, label in enumerate(held.classes)
        ],
        height=max(220, _height(len(names), 1600, 22, 4) + 70),
        seed=held.seed,
        cut=f" The first {len(names)} of {len(held.names)} clients are drawn." if more else "",
    )
    about = data.content.get("data", {})
    source = about.get("provenance") or about.get("source", "")
    return section("data", [drawn], source=source)


def persfl(data: ReportData) -> Section | None:
    """Draw teacher rounds (PersFL's Figure 2), λ and T chosen (Table 5) and the grid (3-8)."""
    found = {
        label: method
        for label, method in data.methods.items()
        if "teacher_round" in method["seeds"][0]["clients"][0]["facts"]
    }
    if not found:
        return None
    names, _ = per_client(data.content)
    charts = [_teachers(found, names), _chosen(found, names)]
    for number, (label, method) in enumerate(found.items()):
        if any(_CELL.fullmatch(model) for model in method["headline"]):
            charts.append(_grid(number, label, method, names, data.metric))
    return section("persfl", charts)


def _fact(method: Method, name: str) -> list[list[float]]:
    return _by_client(method, lambda client: client["facts"][name])


def _fact_dots(
    label: str,
    name: str,
    method: Method,
    clients: Sequence[str],
    panel: int,
    words: str,
    grid: bool = False,
) -> tuple[Mark, list[tuple[Any, ...]]]:
    """Draw a fact of every client, mean over seeds; return the mark and a row a client and seed.

    Of a setting chosen from a `grid`, what most seeds chose.
    """
    found = _fact(method, name)
    # A setting of a grid is chosen, not measured: between 1 and 25 there is nothing to choose.
    means = [
        min(statistics.multimode(values)) if grid else statistics.fmean(values) for values in found
    ]
    text = [
        f"{client}, {label}: {words.format(mean)}<br>over seeds: "
        + ", ".join(f"{value:g}" for value in values)
        for client, mean, values in zip(clients, means, found, strict=True)
    ]
    rows = [
        (label, client, seed["seed"], value)
        for client, values in zip(clients, found, strict=True)
        for seed, value in zip(method["seeds"], values, strict=True)
    ]
    return Mark("dots", panel, label, x=means, y=list(range(len(clients))), text=text), rows


def _teachers(found: Mapping[str, Method], names: Sequence[str]) -> Chart:
    marks: list[Mark] = []
    rows: list[tuple[Any, ...]] = []
    for label, method in found.items():
        rounds = _fact(method, "teacher_round")
        low, high = [min(values) for values in rounds], [max(values) for values in rounds]
        dots, own = _fact_dots(label, "teacher_round", method, names, 0, "round {:.1f}")
        marks += [Mark("span", method=label, y=dots.y, low=low, high=high, faint=True), dots]
        rows += own
    last = float(max(method["rounds"] for method in found.values()))
    axis = Axis("rounds behind the teacher", low=0.0, high=last)
    panel = Panel("", axis, Axis(categories=tuple(names)))
    height = max(220, _height(len(names), 1000, 26, 5) + 70)
    return chart("teachers", [panel], marks, rows, height=height)


def _chosen(found: Mapping[str, Method], names: Sequence[str]) -> Chart:
    marks, rows = [], []
    for label, method in found.items():
        for panel, (fact, words) in enumerate(
            (("share", "λ = {:.3g}"), ("temperature", "T = {:.3g}"))
        ):
            dots, own = _fact_dots(label, fact, method, names, panel, words, grid=True)
            marks.append(dots)
            rows += [(*row[:3], fact, row[3]) for row in own]
    clients = Axis(categories=tuple(names))
    panels = [
        Panel("Share of the soft loss, λ", Axis("λ", low=0.0, high=1.0), clients),
        Panel("Temperature, T", Axis("T", low=0.0), clients),
    ]
    height = max(220, _height(len(names), 1000, 26, 5) + 70)
    return chart("chosen", panels, marks, rows, height=height)


def _grid(number: int, label: str, method: Method, names: Sequence[str], metric: Metric) -> Chart:
    """Draw accuracy over λ, a line per T: a panel per client, or their mean where they are many."""
    cells = sorted(
        (float(found[1]), float(found[2]), model)
        for model in method["headline"]
        if (found := _CELL.fullmatch(model))
    )
    scores = {model: list(map(_mean, _scores(method, metric, model))) for _, _, model in cells}
    shares = [share for share, _, _ in cells]
    few = len(names) <= _MOST_PANELS
    titles = list(names) if few else ["mean over clients"]
    marks = []
    for panel, title in enumerate(titles):
        for tone, temperature in enumerate(sorted({t for _, t, _ in cells})):
            # At λ = 0 (and 1) T means nothing: one student stands for all temperatures.
            line = [
                (share, scores[model][panel] if few else _mean(scores[model]))
                for share, t, model in cells
                if t == temperature or shares.count(share) == 1
            ]
            name = f"T = {temperature:g}"
            x, y = [share for share, _ in line], [value for _, value in line]
            text = [
                f"{title}, {name}, λ = {share:g}: {_told(metric, value)}" for share, value in line
            ]
            marks.append(Mark("line", panel, name=name, tone=tone, x=x, y=y, text=text))
    return chart(
        "grid",
        [Panel(title, Axis("λ"), _axis(metric)) for title in titles],
        marks,
        [
            (name, share, temperature, scores[model][n])
            for n, name in enumerate(names)
            for share, temperature, model in cells
        ],
        height=180 if few else 320,
        suffix=f"-{number}",
        label=label,
    )


def coefficients(data: ReportData) -> Section | None:
    """Draw the server's matrix over clients, round by round, of every method that recorded one."""
    charts = [
        _matrices(number, trace)
        for number, trace in enumerate(data.traces)
        if any(own.shape[2:] == (len(trace.clients),) * 2 for own in trace.values.values())
    ]
    return section("coefficients", charts) if charts else None


def _matrices(number: int, trace: Trace) -> Chart:
    count = len(trace.clients)
    name, course = trace.matrix(trace.seeds[0])
    order = similar_order(course[-1])
    # Rounds are chosen evenly, with the first and the last, as many as the page can hold.
    most = max(2, min(_MOST_ROUNDS, _MOST_CELLS // max(count * count, 1), len(trace.rounds)))
    last = len(trace.rounds) - 1
    shown = sorted({round(step * last / (most - 1)) for step in range(most)})
    names = tuple(trace.clients[place] for place in order)
    places = list(range(count))
    marks = [
        Mark(
            "heat",
            panel=frame,
            x=places,
            y=places,
            z=[[float(course[record][a, b]) for b in order] for a in order],
            says="{y} takes from {x}: {z}",
            bottom=float(course[shown].min()),
            top=float(course[shown].max()),
        )
        for frame, record in enumerate(shown)
    ]
    return chart(
        "coefficients",
        [Panel("", Axis("learns from", categories=names), Axis(categories=names))],
        marks,
        [
            (trace.rounds[record], trace.clients[a], trace.clients[b], float(course[record][a, b]))
            for record in shown
            for a in order
            for b in order
        ],
        height=max(260, _height(count, 1200, 24, 5) + 90),
        square=True,
        frames=tuple(f"round {trace.rounds[record]}" for record in shown),
        suffix=f"-{number}",
        label=trace.label,
        name=name,
        seed=trace.seeds[0],
    )
