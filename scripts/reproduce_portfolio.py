"""Lay Portfolio beside the best single methods: `docs/portfolio.md` from run folders.

python scripts/reproduce_portfolio.py collect RUN_DIR...  # keep what the tables need
python scripts/reproduce_portfolio.py write               # write the page from them

A run is known by its experiment's name. Single methods are the run's own candidates, and those of
results/ that had the same split, no more rounds and some of the same seeds. The
oracle picks each client's best candidate on test data: it chooses nothing, it measures regret.
"""

import json
from pathlib import Path
from statistics import mean
from typing import Any

from reproduction import RESULTS, deviation, fill, gains, keep, run, seeds_p, table

from idiolect.analysis.significance import holm
from idiolect.methods import Portfolio

DOCS = Path(__file__).resolve().parent.parent / "docs"
OTHERS = RESULTS
FIGURES = OTHERS / "portfolio.json"
PAGE = DOCS / "portfolio.md"
TIMES = DOCS.parent / "benchmarks" / "results" / "portfolio.json"
SETTINGS = {
    "mnist-ds1": "MNIST DS-1, before shards",
    "mnist-ds2": "MNIST DS-2",
    "mnist-ds3": "MNIST DS-3",
    "cifar10-ds1": "CIFAR-10 DS-1, before shards",
    "cifar10-ds2": "CIFAR-10 DS-2",
    "cifar10-ds3": "CIFAR-10 DS-3",
    "pfml-mnist-dnn": "PFML, MNIST, DNN",
    "pfml-synthetic-mlr": "PFML, Synthetic, MLR",
    "ktpfl-fmnist-20": "KT-pFL, Fashion-MNIST, 20 clients",
    "cross-sector": "reviews, cross-sector",
    "cross-product": "reviews, cross-product",
}
# Candidates that are methods of their own, by the names they have in other tables.
SINGLES = {
    "local": "Local",
    "global": "FedAvg",
    "ft": "FedAvg + FT",
    "ft ×5": "FedAvg + FT at 5 times the rate",
    "ft+kd": "FedAvg + FT + KD",
    "ft+ewc": "FedAvg + FT + EWC",
    "fb": "FedAvg + FB",
    "fb ×5": "FedAvg + FB at 5 times the rate",
    "fb+kd": "FedAvg + FB + KD",
    "fb+ewc": "FedAvg + FB + EWC",
}
Run = dict[str, Any]
Means = dict[int, float]  # seed -> mean over clients, in percent


def collect(folders: list[str]) -> None:
    """Keep every model's accuracy at every client, the weights and the validation accuracies."""
    named = []
    for folder in folders:
        name = json.loads((Path(folder) / "result.json").read_text())["name"]
        named.append(f"{folder}={name.removeprefix('portfolio-')}")
    keep(FIGURES, named, _method)


def _method(method: dict[str, Any]) -> Run:
    seeds = method["seeds"]
    kept: Run = {
        "rounds": method["rounds"],
        "settings": method["settings"],
        "device": method["device"],
        "seconds": round(method["speed"]["seconds"], 1),
        "test": [[client["test"] for client in seed["clients"]] for seed in seeds],
        "accuracy": {
            model: [[_short(client[model]["accuracy"]) for client in s["clients"]] for s in seeds]
            for model in seeds[0]["models"]
        },
    }
    if method["method"] == "portfolio":
        for name, fact in {
            "weights": "weights",
            "validation": "validation_accuracy_of_candidates",
        }.items():
            kept[name] = [
                [[_short(value) for value in client["facts"][fact]] for client in seed["clients"]]
                for seed in seeds
            ]
    return kept


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


class Setting:
    """One setting's run of Portfolio; clients without test data are left out."""

    def __init__(self, name: str, kept: Run) -> None:
        self.name, self.seeds, self.federation = name, kept["seeds"], kept["federation"]
        self.own: Run = kept["methods"]["Portfolio"]
        self.mixtures: Run = kept["methods"].get("FL", {"accuracy": {}})
        given = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in self.own["settings"].items()
        }
        self.candidates = Portfolio(**given).names

    def means(self, model: str) -> Means:
        rows = self.own["accuracy"][model]
        return {seed: _mean(row) for seed, row in zip(self.seeds, rows, strict=True)}

    def clients(self) -> list[tuple[int, int]]:
        """Every client of every seed that has test data."""
        return [
            (seed, client)
            for seed, row in enumerate(self.own["accuracy"]["personal"])
            for client, value in enumerate(row)
            if value is not None
        ]

    def at(self, model: str, place: tuple[int, int]) -> float:
        value: float = self.own["accuracy"][model][place[0]][place[1]]
        return value

    def singles(self) -> dict[str, Means]:
        """All single methods there are: the run's own candidates first."""
        found = {SINGLES[name]: self.means(name) for name in self.candidates if name in SINGLES}
        for model, rows in self.mixtures["accuracy"].items():
            if model.endswith("MoE"):
                found[f"FedAvg + {model}"] = dict(zip(self.seeds, map(_mean, rows), strict=True))
        for label, means in _elsewhere(self.name, self.own["rounds"], self.federation).items():
            if set(means) & set(self.seeds):
                found.setdefault(label, means)
        return found


def _mean(values: list[float | None]) -> float:
    return 100 * mean(value for value in values if value is not None)


def _elsewhere(name: str, rounds: int, federation: str) -> dict[str, Means]:
    """Read single methods of the same split and no more rounds from other pages' figures."""
    page, where = "combinations", f"combinations-{name}"
    if name.startswith(("mnist", "cifar10")):
        page, where = "persfl", name.replace("-ds1", "-ds1-classes")  # before it was shards
    elif name.startswith("pfml"):
        page, where = "pfml", name
    elif name.startswith("ktpfl"):
        page, where = "ktpfl", name.removeprefix("ktpfl-")
    kept = _read(page).get(where)
    if kept is None or kept["federation"] != federation:
        return {}
    own = {label: run for label, run in kept["methods"].items() if run["rounds"] <= rounds}
    found: dict[str, Means] = {}
    if page == "persfl":
        for label in [name for name in ("FedPer", "PersFL", "pFedMe", "Per-FedAvg") if name in own]:
            rows = zip(kept["seeds"], own[label]["accuracy"]["personal"], strict=True)
            found[label] = {seed: _mean(row) for seed, row in rows}
    elif page == "pfml":
        for label in [name for name in ("pFedMe", "PFML") if name in own]:
            means = zip(kept["seeds"], own[label]["models"]["personal"]["mean"], strict=True)
            found[label] = {seed: 100 * value for seed, value in means}
    elif page == "ktpfl":
        for label, run in own.items():
            found[label] = dict(zip(kept["seeds"], run["accuracy"], strict=True))
    else:
        for model, clients in own.get("FL", {}).get("accuracy", {}).items():
            if model not in ("personal", "global", "local"):
                rows = zip(kept["seeds"], clients, strict=True)
                found[f"FedAvg + {model}"] = {seed: _mean(row) for seed, row in rows}
    return found


def _read(name: str) -> dict[str, Any]:
    path = OTHERS / f"{name}.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return known


def write() -> None:
    """Fill the tables; settings that were not run are left out of them."""
    kept = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    ran = [name for name in SETTINGS if "Portfolio" in kept.get(name, {"methods": {}})["methods"]]
    found = [Setting(name, kept[name]) for name in ran]
    missing = [title for name, title in SETTINGS.items() if name not in ran]
    rest = [] if not missing else ["", f"Not run yet: {'; '.join(missing)}."]
    fill(
        PAGE,
        {
            "accuracy": _accuracy(found) + rest,
            "verdict": _verdict(found),
            "regret": _regret(found),
            "choices": _choices(found),
            "cost": _cost(),
        },
    )


def _against_best(one: Setting) -> tuple[str, Means, list[float]]:
    """Return the best single method by its mean, and how far we are above it on common seeds."""
    singles = one.singles()
    label = max(singles, key=lambda name: mean(singles[name].values()))
    ours, theirs = one.means("personal"), singles[label]
    return label, theirs, [ours[s] - theirs[s] for s in ours if s in theirs]


def _below(one: Setting, points: float = 0.0) -> float:
    """Return the share of clients that are below their local model by more than some points."""
    gaps = [one.at("local", place) - one.at("personal", place) for place in one.clients()]
    return 100 * mean(gap > points / 100 + 1e-9 for gap in gaps)


def _accuracy(found: list[Setting]) -> list[str]:
    rows = []
    above = gains([_against_best(one)[2] for one in found])
    for one, gain in zip(found, above, strict=True):
        label, theirs, _ = _against_best(one)
        ours = one.means("personal")
        rows.append(
            [
                SETTINGS[one.name],
                _cell(one.means("local")),
                _cell(one.means("global")),
                f"{label}: {_cell(theirs)}",
                f"**{_cell(ours)}**",
                gain,
                f"{_below(one):.1f}",
                f"{_below(one, 1.0):.1f}",
            ]
        )
    heads = ["%", "Local", "FedAvg", "best single method", "Portfolio", "above it"]
    return table([*heads, "clients below Local", "by over a point"], rows)


def _cell(means: Means) -> str:
    values = list(means.values())
    return f"{mean(values):.2f} ± {deviation(values):.2f}"


def _verdict(found: list[Setting]) -> list[str]:
    if not found:
        return ["Nothing was run yet."]
    differences = [_against_best(one)[2] for one in found]
    surely = holm([seeds_p(own) for own in differences])
    gaps = {SETTINGS[one.name]: mean(own) for one, own in zip(found, differences, strict=True)}
    lost = sum(p < 0.05 and mean(own) < 0 for own, p in zip(differences, surely, strict=True))
    won = sum(p < 0.05 and mean(own) > 0 for own, p in zip(differences, surely, strict=True))
    above = sum(gap >= 0 for gap in gaps.values())
    worst = min(gaps, key=lambda name: gaps[name])
    shares = {SETTINGS[one.name]: _below(one) for one in found}
    few = sum(share <= 2 for share in shares.values())
    pairs = [(one.at("local", p), one.at("personal", p)) for one in found for p in one.clients()]
    whole = 100 * mean(own < alone - 1e-9 for alone, own in pairs)
    return [
        f"At or above the best single method in {above} of {len(found)} settings; furthest from "
        f"it: {gaps[worst]:+.2f} points ({worst}). Beyond noise, by seeds and Holm's rule over the "
        f"rows, it is above it in {won} and below it in {lost}. Clients below their local model "
        f"on test data: {whole:.1f} % of all {len(pairs)}; at most 2 % in {few} of {len(found)} "
        "settings."
    ]


def _regret(found: list[Setting]) -> list[str]:
    rows = []
    for one in found:
        places = one.clients()
        best, picked, own = [], [], []
        for place in places:
            tested = {name: one.at(name, place) for name in one.candidates}
            seen = one.own["validation"][place[0]][place[1]]
            top = max(range(len(seen)), key=lambda n: -1.0 if seen[n] is None else seen[n])
            best.append(max(tested.values()))
            picked.append(tested[one.candidates[top]])
            own.append(one.at("personal", place))
        oracle = mean(best)
        rows.append(
            [
                SETTINGS[one.name],
                f"{100 * oracle:.2f}",
                f"{100 * (oracle - mean(picked)):.2f}",
                f"{100 * (oracle - mean(own)):.2f}",
            ]
        )
    heads = ["%", "oracle's single candidate", "regret of the best on validation"]
    return table([*heads, "regret of Portfolio"], rows)


def _choices(found: list[Setting]) -> list[str]:
    kinds = ("local", "global or teacher", "PersFL", "FT", "FB")
    rows = []
    for one in found:
        total, stays, places = dict.fromkeys(kinds, 0.0), 0, one.clients()
        for seed, client in places:
            weights = one.own["weights"][seed][client]
            stays += weights[0] == 1
            for name, weight in zip(one.candidates, weights, strict=True):
                total[_kind(name)] += weight
        shares = [f"{total[kind] / len(places):.2f}" for kind in kinds]
        rows.append([SETTINGS[one.name], f"{100 * stays / len(places):.0f}", *shares])
    return table(["", "stay with their local model, %", *kinds], rows)


def _kind(name: str) -> str:
    if name in ("global", "teacher"):
        return "global or teacher"
    return {"l": "local", "f": name[:2].upper(), "λ": "PersFL"}[name[0]]


def _cost() -> list[str]:
    if not TIMES.exists():
        return ["Not measured yet."]
    rows = [
        [one["name"], one["device"], f"{one['plain']:.1f}", f"{one['ours']:.1f}", f"{ratio:.2f}"]
        for one in json.loads(TIMES.read_text())
        for ratio in [one["ours"] / one["plain"]]
    ]
    return table(["", "device", "FedAvg + FT, s", "Portfolio, s", "ratio"], rows)


if __name__ == "__main__":
    run(__doc__, collect, write)
