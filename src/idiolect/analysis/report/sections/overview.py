"""Several runs side by side: a row per method, a column per run."""

from collections.abc import Sequence

from idiolect.analysis.report.material import Material
from idiolect.analysis.report.section import Section
from idiolect.analysis.report.sheet import Column, Sheet


def overview(materials: Sequence[Material]) -> Section:
    """Lay out every run's headline accuracy."""
    labels = list(dict.fromkeys(label for one in materials for label in one.methods))
    names = [one.name for one in materials]
    heads = [
        name if names.count(name) == 1 else one.folder
        for name, one in zip(names, materials, strict=True)
    ]
    rows = [(label, *(_accuracy(one, label) for one in materials)) for label in labels]
    sheet = Sheet(
        "overview-table",
        "Test accuracy in every run",
        "Mean over clients and seeds of each client's own model ± deviation over seeds, in %. Runs "
        "may differ in data, rounds and settings: compare down a column, not across.",
        [Column("method"), *(Column(head, "percent", best="high") for head in heads)],
        rows,
        labels,
    )
    return Section("overview", "All runs", "Each run has its own part below.", [sheet])


def _accuracy(material: Material, label: str) -> tuple[float | None, float | None] | None:
    method = material.methods.get(label)
    if method is None:
        return None
    figures = next(iter(method["headline"].values()))["seeds"]
    return figures["mean"], figures["std"]
