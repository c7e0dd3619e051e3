"""Learning curves: accuracy on validation data over the rounds, with bands over seeds."""

from collections.abc import Sequence

from idiolect.analysis.report.chart import Axis, Chart, Mark, Panel
from idiolect.analysis.report.material import Curve, Material
from idiolect.analysis.report.section import Section

_TITLES = {"personal": "Personal models", "global": "Global model"}


def section(material: Material) -> Section | None:
    """Draw personal and global models apart."""
    blocks = [
        chart
        for split in ("val", "test_curve")
        if (chart := _chart([c for c in material.curves if c.split == split], split))
    ]
    if not blocks:
        return None
    return Section(
        "curves",
        "Learning curves",
        "How fast each method learns, and whether it had finished when the rounds ended.",
        blocks,
        "Curves",
    )


def _chart(curves: Sequence[Curve], split: str) -> Chart | None:
    shown = [model for model in _TITLES if any(curve.model == model for curve in curves)]
    if not shown:
        return None
    data = (
        "validation data" if split == "val" else "test data (watched only; nothing is chosen by it)"
    )
    axis = "validation accuracy" if split == "val" else "test accuracy"
    marks: list[Mark] = []
    rows = []
    for curve in curves:
        if curve.model not in shown:
            continue
        alike = [c.method for c in curves if c.model == curve.model and _same(c, curve)]
        marks += _marks(curve, shown.index(curve.model), alike)
        rows += [
            (curve.method, curve.model, round, mean, spread, len(seeds))
            for round, mean, spread, seeds in zip(
                curve.rounds, curve.mean, curve.spread, curve.seeds, strict=True
            )
        ]
    return Chart(
        "curves" if split == "val" else "test-curves",
        f"Accuracy over the rounds, {data}",
        "A line is the mean over clients and seeds, its band one standard deviation over seeds to "
        "either side. A single mark at the end is a method whose personal models are made once, "
        "after the last round.",
        [Panel(_TITLES[model], Axis("round", low=0.0), Axis(axis, "%")) for model in shown],
        marks,
        ("method", "model", "round", "mean_accuracy", "std_over_seeds", "seeds"),
        rows,
        height=340,
    )


def _same(one: Curve, other: Curve) -> bool:
    return one.rounds == other.rounds and one.seeds == other.seeds


def _marks(curve: Curve, panel: int, alike: Sequence[str]) -> list[Mark]:
    """Draw a curve; methods that share their rounds share a band, which would else grow dark."""
    mean, spread, rounds = curve.mean, curve.spread, curve.rounds
    text = [
        f"{', '.join(alike)}, round {round}: {100 * m:.1f}%"
        + (f" ± {100 * s:.1f}" if len(seeds) > 1 else "")
        for round, m, s, seeds in zip(rounds, mean, spread, curve.seeds, strict=True)
    ]
    kind = "line" if len(rounds) > 1 else "dots"
    line = Mark(kind, panel, curve.method, x=rounds, y=mean, text=text, big=kind == "dots")
    if not any(spread) or len(rounds) < 2 or alike[0] != curve.method:
        return [line]
    low = [m - s for m, s in zip(mean, spread, strict=True)]
    high = [m + s for m, s in zip(mean, spread, strict=True)]
    return [Mark("band", panel, curve.method, x=rounds, low=low, high=high), line]
