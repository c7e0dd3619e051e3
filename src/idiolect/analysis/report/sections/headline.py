"""The headline: one row per method, test data, last round."""

import dataclasses

from idiolect.analysis.report.material import Material
from idiolect.analysis.report.section import Section
from idiolect.analysis.report.sheet import Column, Sheet
from idiolect.results.document import summary
from idiolect.results.statistics import PARTICIPATION, participation_over_seeds

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
    sheets = [sheet, *_participation(material)]
    return Section("results", "Results", "What each method reached.", sheets)


def _participation(material: Material) -> list[Sheet]:
    """Lay out how means are made up, where some clients took part in no round."""
    found = {label: participation_over_seeds(method) for label, method in material.methods.items()}
    found = {label: own for label, own in found.items() if own and own["clients"]["never"]}
    if not found:
        return []
    rows = []
    for label, own in found.items():
        clients, means = own["clients"], next(iter(own["accuracy"].values()))
        pairs = [(clients[kind], means[kind]) for kind in PARTICIPATION]
        rows.append((label, *(value for pair in pairs for value in pair)))
    heads = ("all clients", "took part", "never took part")
    columns = [Column("method")]
    for head in heads:
        columns += [Column(head, "whole"), Column(f"{head}: accuracy, %", "percent")]
    return [
        Sheet(
            "participation",
            "Clients that took part, and clients that never did",
            "A client that took part in no round has no trained state of its own: it got its model "
            "as a newcomer does. Mean accuracy of clients' own models, over seeds.",
            columns,
            rows,
            list(found),
        )
    ]
