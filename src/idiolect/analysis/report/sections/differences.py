"""Are the differences real? Ranks with their critical difference, and every pair tested."""

from html import escape

from idiolect.analysis import Comparison
from idiolect.analysis.report.chart import Axis, Chart, Mark, Panel
from idiolect.analysis.report.material import Material
from idiolect.analysis.report.section import Block, Section, Words
from idiolect.analysis.report.sheet import Column, Sheet

_PAIRS = (
    Column("ahead"),
    Column("behind"),
    Column("points", "points", "Difference of the means, in points of accuracy"),
    Column("interval", "interval", "Of the difference, over what the verdict is over, points"),
    Column("won", "whole", "Pairs in which the first is ahead"),
    Column("lost", "whole"),
    Column("level", "whole"),
    Column(
        "p",
        "p",
        "By Holm over all pairs of methods; over clients (Wilcoxon) and over seeds both, or, for "
        "few clients that are always the same, over their test rows and seeds",
    ),
    Column("verdict"),
)


def section(material: Material) -> Section | None:
    """Test what can be tested; say so where it cannot."""
    told = material.comparison
    if told is None:
        if not material.remark:
            return None
        return _section([Words(f"<p>{escape(material.remark)}</p>")])
    if len(told.methods) < 2:
        return None
    blocks: list[Block] = []
    if told.ranks.critical_difference is not None:
        blocks.append(_ranks(told))
    blocks.append(_pairs(told))
    return _section(blocks)


def _section(blocks: list[Block]) -> Section:
    return Section(
        "differences",
        "Are the differences real?",
        "Methods are compared on the same clients and seeds, and corrected for how many pairs are "
        "looked at. A difference that is not found may still exist.",
        blocks,
        "Differences",
    )


def _ranks(told: Comparison) -> Chart:
    average, cliques = told.ranks.average, told.ranks.cliques
    labels = tuple(average)
    marks = [
        Mark(
            "dots",
            method=label,
            x=[rank],
            y=[place],
            text=[f"{label}: average rank {rank:.2f}"],
            big=True,
        )
        for place, (label, rank) in enumerate(average.items())
    ]
    bars = [
        Mark(
            "span",
            y=[len(labels) + place],
            low=[min(average[label] for label in group)],
            high=[max(average[label] for label in group)],
        )
        for place, group in enumerate(cliques)
    ]
    rows = [*labels, *("not told apart" for _ in cliques)]
    wide = told.ranks.critical_difference or 0.0
    return Chart(
        "ranks",
        "Average ranks and the critical difference",
        f"Every {told.unit} ranks the methods, 1 the best; the dots are average ranks over "
        f"{told.ranks.blocks}. Two methods differ by rank when they lie more than {wide:.2f} apart "
        "(Nemenyi); a grey bar joins those that do not.",
        [
            Panel(
                "",
                Axis("average rank, 1 is best", low=1.0, high=float(len(labels))),
                Axis(categories=tuple(rows)),
            )
        ],
        [*bars, *marks],
        ("method", "average_rank"),
        list(average.items()),
        height=max(200, 32 * len(rows) + 70),
    )


def _pairs(told: Comparison) -> Sheet:
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
        for pair in told.pairs
    ]
    many = f"{len(told.seeds)} seed{'s' if len(told.seeds) != 1 else ''}"
    return Sheet(
        "pairs",
        "Every pair of methods",
        f"Paired by {told.unit}: {told.pairs_tested} pairs, {many}. Different means p below "
        f"{told.alpha:g} after Holm's correction, {told.scope}; one seed alone cannot say so.",
        _PAIRS,
        rows,
    )
