"""What a method chose for each client, in its own words."""

from idiolect.analysis.report.material import Material
from idiolect.analysis.report.section import Section
from idiolect.analysis.report.sheet import Column, Sheet

_COLUMNS = (
    Column("method"),
    Column("client"),
    Column("seed", "whole"),
    Column("chosen on validation data"),
    Column("test", "percent", "Accuracy of the client's model on its test data, %"),
)


def section(material: Material) -> Section | None:
    """List clients of methods that give a reason."""
    rows = [
        (label, client["client"], seed["seed"], client["reason"], client["personal"]["accuracy"])
        for label, method in material.methods.items()
        for seed in method["seeds"]
        for client in seed["clients"]
        if client.get("reason")
    ]
    if not rows:
        return None
    sheet = Sheet(
        "choices",
        "Each client's choice",
        "Chosen on the client's validation data; the test accuracy beside it chose nothing.",
        _COLUMNS,
        rows,
        [str(row[0]) for row in rows],
    )
    return Section(
        "choices",
        "What each client chose",
        "Some methods offer every client several models. Which it took, and what its local model "
        "would have given.",
        [sheet],
        "Choices",
    )
