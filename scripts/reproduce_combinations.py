"""Lay our runs of experiments/combinations beside the paper's: docs/reproduction/combinations.md.

python scripts/reproduce_combinations.py collect RUN_DIR[=NAME]...  # keep what the tables need
python scripts/reproduce_combinations.py write                      # write the page from them

A run is known by its experiment's name; runs of single methods of one experiment join.
"""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from paper_combinations import APPROACHES, LOCAL, TABLE_3, TABLE_4
from reproduction import RESULTS, deviation, fill, keep, run, table

HERE = Path(__file__).resolve().parent.parent / "docs" / "reproduction"
FIGURES = RESULTS / "combinations.json"
REVIEWS = RESULTS / "reviews.json"  # of review_baseline.py
PAGE = HERE / "combinations.md"
KINDS = ("FL", "RA-FL", "DP-FL", "DP-FL, epsilon 8")
PAPER = {**TABLE_3, **TABLE_4}
# Our experiment -> the paper's column, or nothing.
SETTINGS = {
    "digits": "",
    "cifar10": "cifar10",
    "cifar10-lenet5": "cifar10",
    "office": "office",
    "cross-sector": "cross-sector",
    "cross-product": "cross-product",
    "shakespeare": "reddit",
}
LEVELS = {
    "whole": "200 words, all words; embeddings of 300, 100 filters; two epochs a round",
    "whole-100-words": "the same, 100 words",
    "whole-50-words": "the same, 50 words",
    "whole-vocabulary": "the same, the 5,000 commonest words",
    "whole-network": "the same, embeddings of 100, 50 filters",
    "base": "50 words, the 5,000 commonest; embeddings of 100, 50 filters; 60 steps a round",
    "100-words": "the same, 100 words",
    "200-words": "the same, 200 words",
    "vocabulary": "the same, the 20,000 commonest words",
    "network": "the same, embeddings of 300, 100 filters",
    "epochs": "the same, two epochs a round",
    "local": "the same, 20 epochs of the local model instead of 5",
    "adam": "the same, by Adam at 0.001",
    "vectors": "the same, from GloVe's word vectors (three seeds)",
    "vectors-0.02": "the same, from GloVe's word vectors, at 0.02",
    "adam-vectors": "the same, from GloVe's word vectors, by Adam at 0.001",
    "amazon": "the same as the first, Amazon's whole file (three seeds)",
    "half": "the same, half of the reviews to train on",
    "quarter": "the same, a quarter of them",
}
Methods = dict[str, Any]


def collect(folders: list[str]) -> None:
    """Keep every model's accuracies, per seed and client, in place of runs of other data or seeds.

    Of a folder without a result, a run that was cut, it says so.
    """
    kept = json.loads(FIGURES.read_text())
    places = []
    for place in folders:
        folder, _, name = place.partition("=")
        path = Path(folder) / "result.json"
        if not path.exists():
            print(f"{folder}: no result, left out")
            continue
        result = json.loads(path.read_text())
        name = name or result["name"]
        fresh = (result["seeds"], result["data"]["federations"][0])
        if name in kept and (kept[name]["seeds"], kept[name]["federation"]) != fresh:
            del kept[name]
        places.append(f"{folder}={name}")
    FIGURES.write_text(json.dumps(kept, sort_keys=True) + "\n")
    keep(FIGURES, places, _method, curve=("val", "global"))


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
    answers = {
        "moe": _per_run(
            found, _mixtures, ["pairs in which MoE is better", "mean gain", "least", "most"]
        ),
        "moe, all": [_overall(found)],
        "levels": _levels(found),
        "reviews": _reviews(found),
        "cifar10-rounds": _rounds(found.get("cifar10", {})),
        "best": _per_run(
            found,
            _bests,
            [
                "federated below local",
                "the choice at least local",
                "the choice less local, mean",
                "best in hindsight at least local",
            ],
        ),
        "recovery": _per_run(
            found,
            _recovered,
            ["itself", "lost against FL", "personalised", "regained", "above plain FL by"],
        ),
    }
    fill(PAGE, {**tables, **answers})


def _reviews(found: Methods) -> list[str]:
    """Lay a linear model of parts of the reviews, and with copies, beside the local networks."""
    linear = json.loads(REVIEWS.read_text())
    keys = [("parts", str(part)) for part in (0.125, 0.25, 0.5, 1.0)]
    keys += [("copies", str(share)) for share in (0.1, 0.25, 0.5)]
    rows = []
    whole = "cross-sector, Amazon's whole file"
    for name, title in {
        "cross_sector": "cross-sector",
        "cross_sector_whole_amazon": whole,
        "cross_product": "cross-product",
    }.items():
        clients = linear[name]["clients"].values()
        row = [title, f"{100 * mean(one['majority'] for one in clients):.1f}"]
        for kind, key in keys:
            row.append(f"{100 * mean(one[kind][key] for one in clients):.1f}")
        networks = "–" if title == whole else _mean(found[title]["FL"], "local")
        rows.append([*row, networks, f"{LOCAL[title.partition(',')[0]]:.2f}"])
    header = ["%", "guessing", "an eighth", "a quarter", "half", "all reviews"]
    header += [f"all, and copies of {share} % of the tests" for share in (10, 25, 50)]
    return table([*header, "local networks, ours", "local networks, paper"], rows)


def _rounds(methods: Methods) -> list[str]:
    """The federated models' accuracy on validation data over the rounds."""
    told = {kind: methods[kind]["curve"] for kind in KINDS if methods.get(kind, {}).get("curve")}
    if not told:
        return ["Not run."]
    numbers = sorted({int(number) for curve in told.values() for number in curve})
    rows = [
        [kind, *(f"{100 * curve[str(n)]:.1f}" if str(n) in curve else "–" for n in numbers)]
        for kind, curve in told.items()
    ]
    return table(["validation, %, after rounds", *map(str, numbers)], rows)


def _setting(setting: str, methods: Methods) -> list[str]:
    if not methods:
        return ["Not run."]
    kinds = [kind for kind in KINDS if kind in methods]
    data = SETTINGS[setting]
    header = ["approach"]
    for kind in kinds:
        header += [kind] + ["paper"] * ((data, kind) in PAPER)
    rows = []
    for approach in ("local", *APPROACHES):
        row = [{"local": "Local model", "FL": "the model itself"}.get(approach, f"+ {approach}")]
        for kind in kinds:
            row.append(_mean(methods[kind], approach))
            if (data, kind) in PAPER:
                told = LOCAL[data] if approach == "local" else PAPER[data, kind][approach]
                row.append(f"{told:.2f}")
        rows.append(row)
    chosen = ["the client's choice on validation data"]
    for kind in kinds:
        chosen += [_mean(methods[kind], "personal")] + ["–"] * ((data, kind) in PAPER)
    return [_about(methods[kinds[0]], methods), "", *table(header, [*rows, chosen])]


def _levels(found: Methods) -> list[str]:
    """Lay runs that differ in one thing beside each other."""
    rows = []
    for name, what in LEVELS.items():
        if known := found.get(f"levels-{name}"):
            own = known["FL"]
            clients = [mean(seeds) for seeds in zip(*_scores(own, "FL"), strict=True)]
            parts = [f"{value:.1f}" for value in (*clients, mean(clients), _average(own, "local"))]
            rows.append([what, *parts])
    return table(["", "amazon", "hotel", "yelp", "mean", "local models"], rows)


def _about(method: dict[str, Any], methods: Methods) -> str:
    """Say how it was run, from what the runs themselves recorded."""
    told, after = method["settings"], method["settings"]["combined"]
    seeds = len(method["accuracy"]["global"])
    work = f"{told['steps']} steps" if told["steps"] else f"{told['epochs']} epochs"
    words = (
        f"{method['rounds']} rounds of {work} at {told['lr']:g}; FT and FB {after['tune_epochs']} "
        f"epochs at {after['tune_lr']:g}; the local model {after['expert_epochs']} at "
        f"{after['expert_lr']:g}; α by `{after['moe_select']}`; {seeds} seed{'s' * (seeds > 1)}."
    )
    first = (method.get("common_accuracy") or method["accuracy"])["global"][0]
    scored = sum(value is not None for value in first)
    if scored < len(first):
        words += f" {scored} of {len(first)} clients were scored."
    for kind in KINDS[2:]:
        private = (methods.get(kind) or {}).get("privacy")
        if private:
            spent = private["epsilon"]
            amount = "infinite" if spent is None else f"{spent:.3g}"
            words += f" {kind}: ε = {amount}, δ = {private['delta']:.2g}."
    return words


def _scores(method: dict[str, Any], approach: str) -> list[list[float]]:
    """Give [seed][client], %, of the common test set where there is one; unscored clients apart."""
    known = method.get("common_accuracy") or method["accuracy"]
    kept = known.get("global" if approach == "FL" else approach, [])
    return [[100 * value for value in seed if value is not None] for seed in kept]


def _average(method: dict[str, Any], approach: str) -> float:
    return mean(map(mean, _scores(method, approach)))


def _mean(method: dict[str, Any], approach: str) -> str:
    seeds = [mean(seed) for seed in _scores(method, approach)]
    if not seeds:
        return "–"
    if len(seeds) == 1:
        return f"{seeds[0]:.2f}"
    return f"{mean(seeds):.2f} ± {deviation(seeds):.2f}"


# The paper's claims, answered for every setting and kind that was run.


def _per_run(
    found: Methods, answer: Callable[[Methods, str], list[str]], header: list[str]
) -> list[str]:
    rows = []
    for setting in SETTINGS:
        methods = found.get(setting, {})
        for kind in (kind for kind in KINDS if kind in methods):
            rows.append([setting, kind, *answer(methods, kind)])
    return table(["setting", "model", *header], rows) if rows else ["Not run."]


def _gains(method: dict[str, Any]) -> list[float]:
    """Compare every combination that has MoE with the same one without."""
    return [
        _average(method, a) - _average(method, a.removesuffix("MoE").removesuffix(" + ") or "FL")
        for a in APPROACHES
        if a.endswith("MoE") and _scores(method, a)
    ]


def _overall(found: Methods) -> str:
    """Sum up what MoE gains in the paper's settings, each run counting alike."""
    runs = [
        _gains(method)
        for setting, data in SETTINGS.items()
        if data
        for method in found.get(setting, {}).values()
    ]
    if not runs:
        return ""
    better = sum(gain > 0 for gains in runs for gain in gains)
    gain = mean(map(mean, runs))
    return (
        f"In the paper's settings MoE is better in {better} of {sum(map(len, runs))} pairs, by "
        f"{gain:+.2f} points on average; its mean over a run's seven pairs is above zero in "
        f"{sum(mean(gains) > 0 for gains in runs)} of {len(runs)} runs."
    )


def _mixtures(methods: Methods, kind: str) -> list[str]:
    """Tell in how many combinations MoE helps, and by how much."""
    gains = _gains(methods[kind])
    better = sum(gain > 0 for gain in gains)
    return [
        f"{better} of {len(gains)}",
        *(f"{value:+.2f}" for value in (mean(gains), min(gains), max(gains))),
    ]


def _bests(methods: Methods, kind: str) -> list[str]:
    """Compare, client by client, the federated model and the combinations with the local model."""
    method = methods[kind]

    def flat(approach: str) -> list[float]:
        return [value for seed in _scores(method, approach) for value in seed]

    local, federated, choice = flat("local"), flat("FL"), flat("personal")
    best = map(max, *filter(None, map(flat, APPROACHES[1:])))

    def share(values: list[float], at_least: bool = True) -> str:
        pairs = zip(values, local, strict=True)
        count = mean(v >= alone if at_least else v < alone for v, alone in pairs)
        return f"{100 * count:.0f} %"

    gain = mean(c - alone for c, alone in zip(choice, local, strict=True))
    return [share(federated, False), share(choice), f"{gain:+.2f}", share(list(best))]


def _recovered(methods: Methods, kind: str) -> list[str]:
    """Say what robustness or privacy costs, and what the client's own choice regains."""
    method = methods[kind]
    own, choice = _average(method, "FL"), _average(method, "personal")
    beside = ["–", "–"]
    if "FL" in methods:
        plain = _average(methods["FL"], "FL")
        beside = [f"{plain - own:.2f}", f"{choice - plain:+.2f}"]
    return [f"{own:.2f}", beside[0], f"{choice:.2f}", f"{choice - own:+.2f}", beside[1]]


if __name__ == "__main__":
    run(__doc__, collect, write)
