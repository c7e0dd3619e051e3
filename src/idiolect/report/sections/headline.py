"""The headline: one row per method, test data, last round."""

import dataclasses

from idiolect.report.material import Material
from idiolect.report.section import Section
from idiolect.report.sheet import Column, Sheet
from idiolect.results.tables import summary

_COLUMNS = (
    Column("method"),
    Column("accuracy, %", "percent", "Mean over clients and seeds ± deviation over seeds", "high"),
    Column("95% interval", "interval", "Of the mean, over what the verdict is over"),
    Column("± clients", "percent", "Deviation over the clients of a seed, mean over seeds", "low"),
    Column("worst tenth", "percent", "Mean of the worst tenth of the clients, %", "high"),
    Column("below Local", "percent", "Clients whose model is worse than their local one, %", "low"),
    Column("global", "percent", "The model that all clients share, where there is one, %"),
    Column("rounds", "whole"),
    Column("MB in all", "mega", "Sent and received in the whole run, mean over seeds", "low"),
    Column("seconds in all", "seconds", "Training and scoring, all seeds together"),
)


def _columns(material: Material) -> tuple[Column, ...]:
    """Name the interval by its confidence."""
    told = material.comparison
    name = "95% interval" if told is None else f"{100 * (1 - told.alpha):g}% interval"
    return tuple(dataclasses.replace(c, head=name) if c.form == "interval" else c for c in _COLUMNS)


def section(material: Material) -> Section | None:
    """Lay out the methods' figures."""
    rows, methods = [], []
    by_model = {(row["method"], row["model"]): row for row in summary(material.content)}
    for label, method in material.methods.items():
        own = by_model[label, next(iter(method["headline"]))]
        shared = by_model.get((label, "global"))
        figures = material.comparison.methods.get(label) if material.comparison else None
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
        methods.append(label)
    if not rows:
        return None
    seeds = len(material.content["seeds"])
    sheet = Sheet(
        "headline",
        "Test accuracy of each client's own model",
        "Scored once, on test data nobody trained on, after the last round; never the best round. "
        f"Means over {seeds} seed{'s' if seeds != 1 else ''}. The best value of a column is bold, "
        "which alone does not make a difference significant.",
        _columns(material),
        rows,
        methods,
    )
    return Section("results", "Results", "What each method reached.", [sheet])
