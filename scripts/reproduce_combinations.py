"""Lay our runs of experiments/combinations beside the paper's: docs/reproduction/combinations.md.

python scripts/reproduce_combinations.py collect RUN_DIR[=NAME]...  # keep what the tables need
python scripts/reproduce_combinations.py write                      # write the page from them

A run is known by its experiment: cifar10, office, cross-sector, cross-product, shakespeare, digits.
"""

import json
from pathlib import Path
from statistics import mean
from typing import Any

from paper_combinations import APPROACHES, LOCAL, TABLE_3, TABLE_4
from reproduction import deviation, fill, keep, run, table

HERE = Path(__file__).resolve().parent.parent / "docs" / "reproduction"
FIGURES = HERE / "figures" / "combinations.json"
PAGE = HERE / "combinations.md"
KINDS = ("FL", "RA-FL", "DP-FL")
PAPER = {**TABLE_3, **TABLE_4}
SETTINGS = ("digits", "cifar10", "office", "cross-sector", "cross-product", "shakespeare")
STAND_INS = {"shakespeare": "reddit"}


def collect(folders: list[str]) -> None:
    """Keep every model's accuracies, per seed and client."""
    keep(FIGURES, folders, _method)


def _method(method: dict[str, Any]) -> dict[str, Any]:
    seeds = method["seeds"]
    names = list(seeds[0]["models"])
    return {
        "rounds": method["rounds"],
        "settings": method["settings"],
        "privacy": method.get("privacy"),
        **{
            metric: {
                model: [[_rounded(c[model][metric]) for c in s["clients"]] for s in seeds]
                for model in names
            }
            for metric in ("accuracy", "common_accuracy")
            if metric in seeds[0]["clients"][0][names[0]]
        },
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def write() -> None:
    """Write the tables that can be written from what was collected."""
    kept = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    found = {name.removeprefix("combinations-"): own["methods"] for name, own in kept.items()}
    tables = {setting: _setting(setting, found.get(setting, {})) for setting in SETTINGS}
    fill(PAGE, {**tables, "targets": _targets(found)})


def _setting(setting: str, methods: dict[str, Any]) -> list[str]:
    if not methods:
        return ["Not run yet."]
    metric = "common_accuracy" if setting == "cifar10" else "accuracy"
    kinds = [kind for kind in KINDS if kind in methods]
    data = STAND_INS.get(setting, setting)
    header = ["approach"]
    for kind in kinds:
        header += [kind] + ["paper"] * ((data, kind) in PAPER)
    rows = []
    for approach in ("local", *APPROACHES):
        row = [{"local": "Local model", "FL": "the model itself"}.get(approach, f"+ {approach}")]
        for kind in kinds:
            row.append(_mean(methods[kind], approach, metric))
            if (data, kind) in PAPER:
                told = LOCAL[data] if approach == "local" else PAPER[data, kind][approach]
                row.append(f"{told:.2f}")
        rows.append(row)
    chosen = ["the client's choice on validation data"]
    for kind in kinds:
        chosen += [_mean(methods[kind], "personal", metric)] + ["–"] * ((data, kind) in PAPER)
    lines = table(header, [*rows, chosen])
    if metric == "common_accuracy":
        own = [
            [f"{a}", *(_mean(methods[kind], a, "accuracy") for kind in kinds)]
            for a in ("local", *APPROACHES, "personal")
        ]
        lines += ["", "On each client's own test rows:", "", *table(["approach", *kinds], own)]
    return lines


def _scores(method: dict[str, Any], approach: str, metric: str = "accuracy") -> list[list[float]]:
    """Give [seed][client], %; clients without test rows are left out."""
    kept = method[metric]["global" if approach == "FL" else approach]
    return [[100 * value for value in seed if value is not None] for seed in kept]


def _mean(method: dict[str, Any], approach: str, metric: str) -> str:
    seeds = [mean(seed) for seed in _scores(method, approach, metric)]
    return f"{mean(seeds):.2f} ± {deviation(seeds):.2f}"


def _targets(found: dict[str, Any]) -> list[str]:
    """Answer the questions of the page for every setting and kind that was run."""
    rows = []
    for setting in SETTINGS:
        methods = found.get(setting, {})
        for kind in (kind for kind in KINDS if kind in methods):
            rows.append([setting, kind, *_answers(methods, kind)])
    if not rows:
        return ["Not run yet."]
    header = [
        "setting",
        "model",
        "MoE beats its part, mean gain",
        "clients whose best is at least local",
        "lost against FL",
        "regained by personalising",
    ]
    return table(header, rows)


def _answers(methods: dict[str, Any], kind: str) -> list[str]:
    method = methods[kind]
    means = {a: mean(map(mean, _scores(method, a))) for a in (*APPROACHES, "local", "personal")}
    gains = [
        means[a] - means[a.removesuffix("MoE").removesuffix(" + ") or "FL"]
        for a in APPROACHES
        if a.endswith("MoE")
    ]
    pairs = [
        (max(values), alone)
        for seed, own in enumerate(_scores(method, "local"))
        for values, alone in zip(
            zip(*(_scores(method, a)[seed] for a in APPROACHES[1:]), strict=True), own, strict=True
        )
    ]
    better = mean(best >= alone for best, alone in pairs)
    plain = mean(map(mean, _scores(methods["FL"], "FL"))) if "FL" in methods else float("nan")
    return [
        f"{sum(gain > 0 for gain in gains)} of {len(gains)}, {mean(gains):+.2f}",
        f"{100 * better:.0f} %",
        f"{plain - means['FL']:.2f}",
        f"{means['personal'] - means['FL']:.2f}",
    ]


if __name__ == "__main__":
    run(__doc__, collect, write)
