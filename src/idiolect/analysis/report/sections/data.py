"""Who holds what: clients × classes."""

from idiolect.analysis.report.chart import Axis, Chart, Mark, Panel
from idiolect.analysis.report.material import Material
from idiolect.analysis.report.section import Section

_MOST_CLIENTS = 200  # more rows than pixels


def section(material: Material) -> Section | None:
    """Draw the division of the first seed."""
    if not material.held:
        return None
    held = material.held[0]
    counts = held.counts.sum(axis=0)[:_MOST_CLIENTS]
    names = held.names[:_MOST_CLIENTS]
    shown = [[int(n) or None for n in row] for row in counts]
    parts = held.counts[:, :_MOST_CLIENTS]
    mark = Mark(
        "heat",
        x=list(range(len(held.classes))),
        y=list(range(len(names))),
        z=shown,
        says="{y}, class {x}: {z}",
        top=float(counts.max()),
    )
    more = len(held.names) - len(names)
    cut = f" The first {len(names)} of {len(held.names)} clients are drawn." if more else ""
    chart = Chart(
        "holdings",
        "Clients × classes",
        "A row is a client, a column a class; the stronger the colour, the more examples (train, "
        "validation and test together), and an empty cell is a class the client has never seen. "
        f"Seed {held.seed}.{cut}",
        [Panel("", Axis("class", categories=held.classes), Axis(categories=tuple(names)))],
        [mark],
        ("client", "class", "train", "val", "test"),
        [
            (name, label, *(int(part[row, column]) for part in parts))
            for row, name in enumerate(names)
            for column, label in enumerate(held.classes)
        ],
        height=max(220, min(22, max(4, 1600 // max(len(names), 1))) * len(names) + 70),
    )
    about = material.content.get("data", {})
    source = about.get("provenance") or about.get("source", "")
    return Section(
        "data", "The data", f"How examples are divided among the clients. {source}", [chart]
    )
