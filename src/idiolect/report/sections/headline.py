"""The headline: one row per method, test data, last round."""

from idiolect.report.material import Material
from idiolect.report.section import Section
from idiolect.report.sheet import Column, Sheet
from idiolect.results.tables import summary

_COLUMNS = (
    Column("method"),
    Column("accuracy, %", "percent", "Mean over clients and seeds ± deviation over seeds", "high"),
    Column("± clients", "percent", "Deviation over clients of their mean over seeds", "low"),
    Column("worst client, %", "percent", "The client that fares worst, mean over seeds", "high"),
    Column("by samples, %", "percent", "Mean weighted by each client's test examples", "high"),
    Column("global model, %", "percent", "The model that all clients share, where there is one"),
    Column("rounds", "whole"),
    Column("MB", "mega", "Sent and received in the whole run, mean over seeds", "low"),
    Column("seconds", "seconds", "Training and scoring, all seeds together"),
)


def section(material: Material) -> Section | None:
    """Lay out the methods' figures."""
    rows, methods = [], []
    by_model = {(row["method"], row["model"]): row for row in summary(material.content)}
    for label, method in material.methods.items():
        own = by_model[label, next(iter(method["headline"]))]
        shared = by_model.get((label, "global"))
        rows.append(
            (
                label,
                (own["mean"], own["std_seeds"]),
                own["std_clients"],
                own["worst_client"],
                own["weighted_mean"],
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
        _COLUMNS,
        rows,
        methods,
    )
    return Section("results", "Results", "What each method reached.", [sheet])
