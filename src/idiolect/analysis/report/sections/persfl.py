"""PersFL's pictures: teacher rounds (Figure 2), λ and T chosen (Table 5), the grid (3-8)."""

import re
import statistics as plain
from collections.abc import Mapping, Sequence
from typing import Any

from idiolect.analysis.report.chart import Axis, Chart, Mark, Panel
from idiolect.analysis.report.material import Material
from idiolect.analysis.report.section import Block, Section
from idiolect.results.document import per_client

_CELL = re.compile(r"λ=(\S+) T=(\S+)")
_MOST_PANELS = 20  # clients with a panel of their own


def section(material: Material) -> Section | None:
    """Draw what every PersFL of the run tells of its choices."""
    told = {
        label: method
        for label, method in material.methods.items()
        if "teacher_round" in method["seeds"][0]["clients"][0]["facts"]
    }
    if not told:
        return None
    names, _ = per_client(material.content)
    blocks: list[Block] = [_teachers(told, names), _chosen(told, names)]
    for number, (label, method) in enumerate(told.items()):
        if any(_CELL.fullmatch(model) for model in method["headline"]):
            blocks.append(_grid(number, label, method, names))
    return Section(
        "persfl",
        "PersFL's choices",
        "Each client keeps the best global model it has met as its teacher, then distils it with "
        "its own share λ of the soft loss and temperature T, all chosen on validation data.",
        blocks,
        "PersFL",
    )


def _facts(method: Mapping[str, Any], fact: str) -> list[list[float]]:
    """Give a fact as [client][seed]."""
    by_seed = [[client["facts"][fact] for client in seed["clients"]] for seed in method["seeds"]]
    return [list(values) for values in zip(*by_seed, strict=True)]


def _teachers(told: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> Chart:
    marks, rows = [], []
    for label, method in told.items():
        found = _facts(method, "teacher_round")
        means = [plain.fmean(values) for values in found]
        places = list(range(len(names)))
        text = [
            f"{name}, {label}: round {mean:.1f}<br>over seeds: {_listed(values)}"
            for name, mean, values in zip(names, means, found, strict=True)
        ]
        low, high = [min(values) for values in found], [max(values) for values in found]
        marks.append(Mark("span", method=label, y=places, low=low, high=high, faint=True))
        marks.append(Mark("dots", method=label, x=means, y=places, text=text))
        rows += [
            (label, name, seed["seed"], value)
            for name, values in zip(names, found, strict=True)
            for seed, value in zip(method["seeds"], values, strict=True)
        ]
    rounds = max(method["rounds"] for method in told.values())
    return Chart(
        "teachers",
        "The round each client's teacher comes from",
        "The dot is the mean over seeds of the round whose global model suited the client best on "
        "its validation data, the line reaches from the earliest to the latest seed. Rounds that "
        "differ between clients speak for a teacher of one's own (the paper's Figure 2).",
        [
            Panel(
                "",
                Axis("rounds behind the teacher", low=0.0, high=float(rounds)),
                Axis(categories=tuple(names)),
            )
        ],
        marks,
        ("method", "client", "seed", "teacher_round"),
        rows,
        height=_tall(len(names)),
    )


def _chosen(told: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> Chart:
    marks, rows = [], []
    for label, method in told.items():
        for panel, fact in enumerate(("share", "temperature")):
            found = _facts(method, fact)
            means = [plain.fmean(values) for values in found]
            text = [
                f"{name}, {label}: {'λ' if not panel else 'T'} = {mean:.3g}<br>over seeds: "
                f"{_listed(values)}"
                for name, mean, values in zip(names, means, found, strict=True)
            ]
            marks.append(Mark("dots", panel, label, x=means, y=list(range(len(names))), text=text))
            rows += [
                (label, name, seed["seed"], fact, value)
                for name, values in zip(names, found, strict=True)
                for seed, value in zip(method["seeds"], values, strict=True)
            ]
    clients = Axis(categories=tuple(names))
    return Chart(
        "chosen",
        "The λ and T each client chose",
        "Means over seeds of what the search on validation data chose (the paper's Table 5). λ = 0 "
        "is plain fine-tuning of the teacher; the larger λ, the more the client trusts its "
        "teacher's soft labels. T counts only where λ > 0.",
        [
            Panel("Share of the soft loss, λ", Axis("λ", low=0.0, high=1.0), clients),
            Panel("Temperature, T", Axis("T", low=0.0), clients),
        ],
        marks,
        ("method", "client", "seed", "setting", "value"),
        rows,
        height=_tall(len(names)),
    )


def _grid(number: int, label: str, method: Mapping[str, Any], names: Sequence[str]) -> Chart:
    """Draw accuracy over λ, a line per T: a panel per client, or their mean where they are many."""
    cells = sorted(
        (float(found[1]), float(found[2]), model)
        for model in method["headline"]
        if (found := _CELL.fullmatch(model))
    )
    scores = {
        model: [
            _mean([seed["clients"][n][model]["accuracy"] for seed in method["seeds"]])
            for n in range(len(names))
        ]
        for _, _, model in cells
    }
    temperatures = sorted({t for _, t, _ in cells})
    single = [(share, model) for share, _, model in cells if _alone(cells, share)]
    few = len(names) <= _MOST_PANELS
    titles = list(names) if few else ["mean over clients"]
    marks = []
    for panel in range(len(titles)):
        for tone, temperature in enumerate(temperatures):
            line = [(share, model) for share, t, model in cells if t == temperature]
            # At λ = 0 (and 1) T means nothing: one student stands for all temperatures.
            line = sorted({*line, *single})
            values = [scores[m][panel] if few else _mean(scores[m]) for _, m in line]
            marks.append(
                Mark(
                    "line",
                    panel,
                    name=f"T = {temperature:g}",
                    tone=tone,
                    x=[share for share, _ in line],
                    y=values,
                    text=[
                        f"{titles[panel]}, T = {temperature:g}, λ = {share:g}: "
                        + ("no test data" if value is None else f"{100 * value:.1f}%")
                        for (share, _), value in zip(line, values, strict=True)
                    ],
                )
            )
    return Chart(
        f"grid-{number}",
        f"{label}: accuracy over λ and T",
        "Test accuracy of the students distilled at every λ (across) and T (a line each), mean "
        "over seeds: how much the choice matters to each client (the paper's Figures 3-8). The "
        "choice itself is made on validation data.",
        [Panel(title, Axis("λ"), Axis("test accuracy", "%")) for title in titles],
        marks,
        ("client", "share", "temperature", "accuracy"),
        [
            (name, share, temperature, scores[model][n])
            for n, name in enumerate(names)
            for share, temperature, model in cells
        ],
        height=180 if few else 320,
    )


def _alone(cells: Sequence[tuple[float, float, str]], share: float) -> bool:
    return sum(s == share for s, _, _ in cells) == 1


def _mean(values: Sequence[float | None]) -> float | None:
    seen = [value for value in values if value is not None]
    return plain.fmean(seen) if seen else None


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _tall(clients: int) -> int:
    return max(220, min(26, max(5, 1000 // max(clients, 1))) * clients + 70)
