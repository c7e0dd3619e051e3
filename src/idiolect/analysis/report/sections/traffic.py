"""What crossed the network, beside what it bought."""

from idiolect.analysis import Comparison
from idiolect.analysis.report.chart import Axis, Chart, Mark, Panel
from idiolect.analysis.report.material import Curve, Material
from idiolect.analysis.report.section import Block, Section
from idiolect.analysis.report.sheet import Column, Sheet


def section(material: Material) -> Section | None:
    """Draw accuracy over all that was sent, and the way there."""
    if not material.methods:
        return None
    blocks: list[Block] = [_points(material)]
    if (chart := _way(material)) is not None:
        blocks.append(chart)
    if material.comparison is not None and material.comparison.reach:
        blocks.append(_reach(material.comparison))
    return Section(
        "traffic",
        "Communication",
        "Bytes are counted leaf by leaf, both ways, as they would cross the network.",
        blocks,
    )


def _reach(told: Comparison) -> Sheet:
    rows = [
        (label, own.model, own.round, own.bytes, own.seconds) for label, own in told.reach.items()
    ]
    target = f"{100 * (told.target or 0):.1f}%"
    return Sheet(
        "reach",
        f"What it took to reach {target} on validation data",
        "The first evaluated round whose mean validation accuracy is that high, and what had been "
        "sent and computed by then; – where it never was. The mark is the comparison's `--target`, "
        "or where the lowest curve ends.",
        [
            Column("method"),
            Column("model watched"),
            Column(f"rounds to {target}", "whole", best="low"),
            Column(f"MB to {target}", "mega", "Both ways, mean over seeds", "low"),
            Column(f"seconds to {target}", "seconds", "All seeds together"),
        ],
        rows,
        list(told.reach),
    )


def _points(material: Material) -> Chart:
    marks, rows = [], []
    for label, method in material.methods.items():
        model, figures = next(iter(method["headline"].items()))
        sent = [
            seed["traffic"]["bytes_down"] + seed["traffic"]["bytes_up"] for seed in method["seeds"]
        ]
        mega = sum(sent) / len(sent) / 1e6
        mean, spread = figures["seeds"]["mean"], figures["seeds"]["std"]
        told = "" if spread is None else f" ± {100 * spread:.1f}"
        shown = "no figure" if mean is None else f"{100 * mean:.1f}%{told}"
        text = f"{label}: {shown}<br>{mega:,.1f} MB in {method['rounds']} rounds"
        marks.append(Mark("dots", method=label, x=[mega], y=[mean], text=[text], big=True))
        rows.append((label, model, method["rounds"], mega, mean, spread))
    return Chart(
        "traffic",
        "Accuracy against all that was sent",
        "Test accuracy of the personal models over the megabytes sent and received in the whole "
        "run, all clients together, the mean over seeds. Up and to the left is better.",
        [Panel("", Axis("MB in all, both ways", low=0.0), Axis("test accuracy", "%"))],
        marks,
        ("method", "model", "rounds", "megabytes", "accuracy", "std_over_seeds"),
        rows,
    )


def _way(material: Material) -> Chart | None:
    marks, rows = [], []
    for curve in material.curves:
        if curve.split != "val" or curve.method not in material.methods:
            continue
        if curve.model != _watched(material, curve.method) or len(curve.rounds) < 2:
            continue
        per_round = _per_round(material, curve.method)
        if not per_round:
            continue
        mega = [round * per_round for round in curve.rounds]
        mean = curve.mean
        text = [
            f"{curve.method}, {m:,.1f} MB (round {r}): {100 * v:.1f}%"
            for m, r, v in zip(mega, curve.rounds, mean, strict=True)
        ]
        marks.append(Mark("line", method=curve.method, x=mega, y=mean, text=text))
        rows += [
            (curve.method, curve.model, r, m, v)
            for r, m, v in zip(curve.rounds, mega, mean, strict=True)
        ]
    if not marks:
        return None
    return Chart(
        "traffic-way",
        "What each megabyte bought",
        "Validation accuracy over the megabytes sent so far: of personal models where they are "
        "scored along the way, else of the global model. The steeper, the thriftier.",
        [Panel("", Axis("MB so far, both ways", low=0.0), Axis("validation accuracy", "%"))],
        marks,
        ("method", "model", "round", "megabytes", "accuracy"),
        rows,
    )


def _watched(material: Material, label: str) -> str:
    """Say which model was scored along the way: the personal one where there is a choice."""

    def long(curve: Curve) -> bool:
        return curve.method == label and curve.split == "val" and len(curve.rounds) > 1

    models = {curve.model for curve in material.curves if long(curve)}
    return "personal" if "personal" in models else "global"


def _per_round(material: Material, label: str) -> float:
    method = material.methods[label]
    both: list[float] = [
        seed["traffic"]["bytes_down_per_round"] + seed["traffic"]["bytes_up_per_round"]
        for seed in method["seeds"]
    ]
    return sum(both) / len(both) / 1e6
