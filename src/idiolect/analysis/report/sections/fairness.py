"""Fairness: how evenly accuracy is spread over clients (PersFL, Eq. 6)."""

from idiolect.analysis import Comparison
from idiolect.analysis.report.chart import Axis, Chart, Mark, Panel
from idiolect.analysis.report.material import Material
from idiolect.analysis.report.section import Block, Section
from idiolect.analysis.report.sheet import Column, Sheet
from idiolect.results.document import per_client


def section(material: Material) -> Section | None:
    """Draw from the worst to the best client, and the spread."""
    found = material.content.get("fairness", {}).get("methods", {})
    if not found:
        return None
    names, columns = per_client(material.content)
    if len(names) < 2:
        return None
    marks, rows = [], []
    for place, (label, values) in enumerate(columns):
        seen = sorted(v for v in values if v is not None)
        spread = found.get(label, {}).get("std")
        if not seen or spread is None:
            continue
        text = [f"{label}: deviation over clients {100 * spread:.2f} points"]
        marks.append(Mark("bars", method=label, x=[spread], y=[place], text=text))
        rows.append((label, spread, found[label]["variance"], seen[0], seen[-1]))
    chart = Chart(
        "fairness",
        "Deviation of accuracy over clients",
        "± clients: the standard deviation over the clients of a seed, averaged over seeds. By "
        "PersFL's Eq. 6 a method is fairer than another when its clients' accuracies vary less: "
        "the shorter, the fairer. Read it beside the accuracy: all clients alike at a low level "
        "is even but no use.",
        [
            Panel(
                "",
                Axis("deviation over clients", "%", low=0.0),
                Axis(categories=tuple(label for label, _ in columns)),
            )
        ],
        marks,
        ("method", "std_over_clients", "variance_over_clients", "worst_client", "best_client"),
        rows,
        height=max(200, 34 * len(columns) + 70),
    )
    blocks: list[Block] = [chart]
    if material.comparison is not None:
        blocks.append(_table(material.comparison))
    return Section(
        "fairness", "Fairness", "Does everyone gain, or do some pay for the others?", blocks
    )


def _table(told: Comparison) -> Sheet:
    rows = [
        (label, own.variance, own.jain, own.worst_decile, own.below_local)
        for label, own in told.methods.items()
    ]
    return Sheet(
        "fairness-table",
        "Measures of fairness",
        "Variance over clients, the square of ± clients (Eq. 6); Jain's index, 1 where all are "
        "alike; the mean of the worst tenth of the clients; and the clients who would do better "
        "with the model they train alone.",
        [
            Column("method"),
            Column("variance", "figure", "The square of ± clients", "low"),
            Column("Jain's index", "index", "1 where all clients are alike", "high"),
            Column("worst tenth, %", "percent", best="high"),
            Column("below Local, %", "percent", best="low"),
        ],
        rows,
        list(told.methods),
    )
