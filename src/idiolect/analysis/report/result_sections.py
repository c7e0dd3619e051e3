"""Sections about methods: headline, several runs side by side, tests, curves, communication."""

from collections.abc import Sequence
from typing import Any

from idiolect.analysis.comparison import Comparison
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
    of_rounds,
    paragraph,
    section,
    table,
)
from idiolect.analysis.report.report_data import Curve, ReportData
from idiolect.core.metrics import Metric
from idiolect.results.document import summary
from idiolect.results.statistics import PARTICIPATION, participation_over_seeds

_MODELS = {"personal": "Personal models", "global": "Global model"}
_SPLITS = {  # id of the chart, the data in its title, the first word of its axis
    "val": ("", "validation data", "validation"),
    "train_curve": ("train-", "training data", "training"),
    "test_curve": ("test-", "test data (watched only; nothing is chosen by it)", "test"),
}


def results(data: ReportData) -> Section | None:
    """Show one row per method: test data, last round."""
    if not data.methods:
        return None
    rows: list[tuple[Any, ...]] = []
    by_model = {(row["method"], row["model"]): row for row in summary(data.content)}
    for label, method in data.methods.items():
        own = by_model[label, next(iter(method["headline"]))]
        shared = by_model.get((label, "global"))
        figures = data.comparison.methods.get(label) if data.comparison else None
        rows.append(
            (
                label,
                (own["mean"], own["std_seeds"]),
                figures and figures.interval,
                own["std_clients"],
                figures and figures.worst_decile,
                None if figures is None or method["method"] == "local" else figures.below_local,
                (shared["mean"], shared["std_seeds"]) if shared else None,
                own["rounds"],
                None if own["megabytes"] is None else 1e6 * own["megabytes"],
                own["seconds"],
            )
        )
    confidence = 100 * (1 - data.comparison.alpha) if data.comparison else 95
    seeds = _seeds(data.content["seeds"])
    tables = [table("headline", rows, data.methods, confidence=confidence, seeds=seeds)]
    found = {label: participation_over_seeds(method) for label, method in data.methods.items()}
    found = {label: own for label, own in found.items() if own and own["clients"]["never"]}
    if found:  # some clients took part in no round
        tables.append(table("participation", _participation(found), found))
    return section("results", tables)


def _seeds(seeds: Sequence[int]) -> str:
    return f"{len(seeds)} seed{'s' if len(seeds) != 1 else ''}"


def _participation(found: dict[str, Any]) -> list[list[Any]]:
    rows = []
    for label, own in found.items():
        means = next(iter(next(own[key] for key in own if key != "clients").values()))
        pairs = [(own["clients"][kind], means[kind]) for kind in PARTICIPATION]
        rows.append([label, *(value for pair in pairs for value in pair)])
    return rows


def overview(runs: Sequence[ReportData]) -> Section:
    """Show several runs side by side: a row per method, a column per run."""
    labels = list(dict.fromkeys(label for one in runs for label in one.methods))
    names = [one.name for one in runs]
    heads = [one.name if names.count(one.name) == 1 else one.folder for one in runs]
    columns = [Column("method")]
    for head, one in zip(heads, runs, strict=True):
        form, best = "percent" if one.metric.percent else "figure", one.metric.higher
        title = head if one.metric.name == "accuracy" else f"{head}: {one.metric.title}"
        columns.append(Column(title, form, best="high" if best else "low"))
    rows = [(label, *(_accuracy(one, label) for one in runs)) for label in labels]
    return section("overview", [table("overview-table", rows, labels, columns)])


def _accuracy(data: ReportData, label: str) -> tuple[float | None, float | None] | None:
    if label not in data.methods:
        return None
    figures = next(iter(data.methods[label]["headline"].values()))["seeds"]
    return figures["mean"], figures["std"]


def differences(data: ReportData) -> Section | None:
    """Show ranks with their critical difference and every pair tested, or why there are none."""
    found = data.comparison
    blocks: list[Block] = []
    if found is None:
        blocks = [paragraph(data.not_compared)] if data.not_compared else []
    elif len(found.methods) > 1:
        blocks = [] if found.ranks.critical_difference is None else [_ranks(found)]
        blocks.append(_pairs(found))
    return section("differences", blocks) if blocks else None


def _ranks(found: Comparison) -> Chart:
    average, cliques = found.ranks.average, found.ranks.cliques
    marks = []
    for place, group in enumerate(cliques, start=len(average)):
        own = [average[label] for label in group]
        marks.append(Mark("span", y=[place], low=[min(own)], high=[max(own)]))
    for place, (label, rank) in enumerate(average.items()):
        text = [f"{label}: average rank {rank:.2f}"]
        marks.append(Mark("dots", method=label, x=[rank], y=[place], text=text, big=True))
    axis = Axis("average rank, 1 is best", low=1.0, high=float(len(average)))
    rows = (*average, *("not told apart" for _ in cliques))
    return chart(
        "ranks",
        [Panel("", axis, Axis(categories=rows))],
        marks,
        list(average.items()),
        height=max(200, 32 * len(rows) + 70),
        unit=found.unit,
        blocks=found.ranks.blocks,
        critical=found.ranks.critical_difference,
    )


def _pairs(found: Comparison) -> Table:
    rows = [
        (
            pair.better,
            pair.worse,
            pair.difference,
            pair.interval,
            pair.wins,
            pair.losses,
            pair.ties,
            pair.p_holm,
            "different" if pair.different else "no difference found",
        )
        for pair in found.pairs
    ]
    return table(
        "pairs",
        rows,
        unit=found.unit,
        pairs=found.pairs_tested,
        seeds=_seeds(found.seeds),
        alpha=found.alpha,
        scope=found.scope,
    )


def learning_curves(data: ReportData) -> Section | None:
    """Draw accuracy over the rounds with bands over seeds, personal and global models apart."""
    charts = []
    for split in _SPLITS:
        curves = [c for c in data.curves if c.split == split and c.model in _MODELS]
        if curves:
            charts.append(_curve_chart(curves, data.metric, *_SPLITS[split]))
    return section("curves", charts) if charts else None


def _axis(own: Metric, words: str) -> Axis:
    """Return the axis of a metric's values."""
    return Axis(f"{words} {own.title}", "%" if own.percent else "")


def _curve_chart(
    curves: Sequence[Curve], own: Metric, prefix: str, source: str, words: str
) -> Chart:
    models = [model for model in _MODELS if any(curve.model == model for curve in curves)]
    marks: list[Mark] = []
    for curve in curves:
        same = [c for c in curves if c.model == curve.model and c.rounds == curve.rounds]
        alike = [c.method for c in same if c.seeds == curve.seeds]
        marks += _curve_marks(curve, models.index(curve.model), alike, own)
    rounds = of_rounds(max(round for curve in curves for round in curve.rounds))
    return chart(
        "curves",
        [Panel(_MODELS[model], rounds, _axis(own, words)) for model in models],
        marks,
        [
            (curve.method, curve.model, round, mean, spread, len(seeds))
            for curve in curves
            for round, mean, spread, seeds in zip(
                curve.rounds, curve.mean, curve.spread, curve.seeds, strict=True
            )
        ],
        height=340,
        prefix=prefix,
        source=source,
    )


def _curve_marks(curve: Curve, panel: int, alike: Sequence[str], own: Metric) -> list[Mark]:
    """Draw a curve; methods that share their rounds share a band, which would else grow dark."""
    mean, spread, rounds = curve.mean, curve.spread, curve.rounds
    text = [
        f"{', '.join(alike)}, round {round}: {own.written(m)}"
        + (f" ± {_spread(own, s)}" if len(seeds) > 1 else "")
        for round, m, s, seeds in zip(rounds, mean, spread, curve.seeds, strict=True)
    ]
    kind = "line" if len(rounds) > 1 else "dots"
    line = Mark(kind, panel, curve.method, x=rounds, y=mean, text=text, big=kind == "dots")
    if not any(spread) or len(rounds) < 2 or alike[0] != curve.method:
        return [line]
    low = [m - s for m, s in zip(mean, spread, strict=True)]
    high = [m + s for m, s in zip(mean, spread, strict=True)]
    return [Mark("band", panel, curve.method, x=rounds, low=low, high=high), line]


def _spread(own: Metric, value: float) -> str:
    return f"{100 * value:.1f}" if own.percent else f"{value:.3g}"


def communication(data: ReportData) -> Section | None:
    """Draw accuracy over all that was sent, in the end and round by round."""
    if not data.methods:
        return None
    blocks: list[Block] = [_accuracy_by_traffic(data), *_curves_by_traffic(data)]
    if data.comparison is not None and data.comparison.reach:
        reach = data.comparison.reach
        rows = [(label, r.model, r.round, r.bytes, r.seconds) for label, r in reach.items()]
        target = data.metric.written(data.comparison.target or 0.0)
        blocks.append(table("reach", rows, reach, target=target))
    return section("traffic", blocks)


def _megabytes(data: ReportData, label: str, per: str = "") -> float:
    """Return the megabytes of a method both ways, mean over seeds."""
    traffic = [seed["traffic"] for seed in data.methods[label]["seeds"]]
    both = [own[f"bytes_down{per}"] + own[f"bytes_up{per}"] for own in traffic]
    return float(sum(both) / len(both) / 1e6)


def _accuracy_by_traffic(data: ReportData) -> Chart:
    marks, rows = [], []
    for label, method in data.methods.items():
        model, figures = next(iter(method["headline"].items()))
        mega = _megabytes(data, label)
        mean, spread = figures["seeds"]["mean"], figures["seeds"]["std"]
        around = "" if spread is None else f" ± {_spread(data.metric, spread)}"
        shown = "no figure" if mean is None else f"{data.metric.written(mean)}{around}"
        text = f"{label}: {shown}<br>{mega:,.1f} MB in {method['rounds']} rounds"
        marks.append(Mark("dots", method=label, x=[mega], y=[mean], text=[text], big=True))
        rows.append((label, model, method["rounds"], mega, mean, spread))
    panel = Panel("", Axis("MB in all, both ways", low=0.0), _axis(data.metric, "test"))
    return chart("traffic", [panel], marks, rows)


def _curves_by_traffic(data: ReportData) -> list[Chart]:
    """Draw the personal models' curves, or the global one's where only that was scored."""
    curves = [
        c
        for c in data.curves
        if c.split == "val" and c.method in data.methods and len(c.rounds) > 1
    ]
    personal = {curve.method for curve in curves if curve.model == "personal"}
    marks: list[Mark] = []
    rows: list[tuple[Any, ...]] = []
    for curve in curves:
        per_round = _megabytes(data, curve.method, "_per_round")
        watched = "personal" if curve.method in personal else "global"
        if curve.model == watched and per_round:
            mega = [round * per_round for round in curve.rounds]
            points = list(zip(curve.rounds, mega, curve.mean, strict=True))
            text = [
                f"{curve.method}, {m:,.1f} MB (round {r}): {data.metric.written(v)}"
                for r, m, v in points
            ]
            marks.append(Mark("line", method=curve.method, x=mega, y=curve.mean, text=text))
            rows += [(curve.method, curve.model, *point) for point in points]
    panel = Panel("", Axis("MB so far, both ways", low=0.0), _axis(data.metric, "validation"))
    return [chart("traffic-way", [panel], marks, rows)] if marks else []
