"""Lay Portfolio beside the best single methods: `docs/portfolio.md` from run folders.

python scripts/reproduce_portfolio.py collect RUN_DIR...  # keep what the tables need
python scripts/reproduce_portfolio.py write               # write the page from them

A run is known by its experiment's name; runs of one name join. Single methods are the run's own
candidates, the methods beside it, and those of results/ that had the same split, no more rounds and
some of the same seeds. What is called "NAME, refit" was trained on validation rows too, and is laid
beside its like only. The oracle picks each client's best candidate on test data: it chooses
nothing, it measures regret.
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
    "mnist-ds1": "MNIST DS-1",
    "mnist-ds2": "MNIST DS-2",
    "mnist-ds3": "MNIST DS-3",
    "cifar10-ds1": "CIFAR-10 DS-1",
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
REFIT = ", refit"
NEW = ("FedRep", "FedBABU", "FedRoD", "Ditto", "APFL")  # other pages do not have them
Run = dict[str, Any]
Means = dict[int, float]  # seed -> mean over clients, in percent


def collect(folders: list[str]) -> None:
    """Keep every model's accuracy at every client, the weights and the validation accuracies.

    What was kept of a setting before its rows were divided in another way goes.
    """
    named, kept = [], _read("portfolio")
    for folder in folders:
        path = Path(folder) / "result.json"
        if not path.exists():
            print(f"{folder}: no method of it is whole; left out")
            continue
        result = json.loads(path.read_text())
        name = result["name"].removeprefix("portfolio-")
        if kept.get(name, {}).get("federation") != result["data"]["federations"][0]:
            kept.pop(name, None)
        named.append(f"{folder}={name}")
    FIGURES.write_text(json.dumps(kept, sort_keys=True) + "\n")
    keep(FIGURES, named, _method)


def _method(method: dict[str, Any]) -> Run:
    """Keep scores: of all clients where the page needs them, else a seed's mean."""
    seeds = method["seeds"]
    ours, refit = method["method"] == "portfolio", method["settings"].get("refits", False)
    each = set(seeds[0]["models"]) if not refit else {"personal", "local"}
    kept: Run = {
        "rounds": method["rounds"],
        "settings": method["settings"],
        "device": method["device"],
        "seconds": round(method["speed"]["seconds"], 1),
        "accuracy": {
            model: [_scores(seed, model, ours and model in each) for seed in seeds]
            for model in seeds[0]["models"]
        },
    }
    if ours and not refit:
        for name, fact in {
            "weights": "weights",
            "validation": "validation_accuracy_of_candidates",
        }.items():
            kept[name] = [
                [[_short(value) for value in client["facts"][fact]] for client in seed["clients"]]
                for seed in seeds
            ]
    return kept


def _scores(seed: dict[str, Any], model: str, each: bool) -> list[float | None]:
    """Return a model's accuracy at each client, or its mean as if there were one."""
    values = [client[model]["accuracy"] for client in seed["clients"]]
    if each:
        return [_short(value) for value in values]
    return [round(mean(value for value in values if value is not None), 7)]


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


class Setting:
    """One setting's run of Portfolio, with refit or without; who has no test data is left out."""

    def __init__(self, name: str, kept: Run, refit: bool = False) -> None:
        self.name, self.seeds, self.federation = name, kept["seeds"], kept["federation"]
        self.methods: dict[str, Run] = kept["methods"]
        self.refit = refit
        self.own = self.methods["Portfolio" + REFIT * refit]
        given = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in self.own["settings"].items()
        }
        self.candidates = Portfolio(**given).names

    @property
    def title(self) -> str:
        """Its name on the page, which says if the row's data is no longer divided like that."""
        old = "-ds1" in self.name and "kind=" not in self.federation
        return SETTINGS[self.name] + ", before shards" * old

    def means(self, model: str) -> Means:
        return self._means(self.own, model)

    def _means(self, method: Run, model: str = "personal") -> Means:
        return dict(zip(self.seeds, map(_mean, method["accuracy"][model]), strict=True))

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

    def beside(self) -> dict[str, Means]:
        """The methods that were run beside it and saw the same rows."""
        found = {}
        for label, method in self.methods.items():
            name = label.removesuffix(REFIT)
            if name == "FL":
                mixtures = [model for model in method["accuracy"] if model.endswith("MoE")]
                found |= {f"FedAvg + {model}": self._means(method, model) for model in mixtures}
            elif name != "Portfolio" and label.endswith(REFIT) == self.refit:
                found[name] = self._means(method)
        return found

    def singles(self) -> dict[str, Means]:
        """All single methods there are: the run's own candidates first."""
        found = {SINGLES[name]: self.means(name) for name in self.candidates if name in SINGLES}
        found |= self.beside()
        if not self.refit:
            others = _elsewhere(self.name, self.own["rounds"], self.federation)
            for label, means in others.items():
                if set(means) & set(self.seeds):
                    found.setdefault(label, means)
        return found


def _mean(values: list[float | None]) -> float:
    return 100 * mean(value for value in values if value is not None)


def _elsewhere(name: str, rounds: int, federation: str) -> dict[str, Means]:
    """Read single methods of the same split and no more rounds from other pages' figures."""
    page, where = "combinations", f"combinations-{name}"
    if name.startswith(("mnist", "cifar10")):
        page, where = "persfl", name
    elif name.startswith("pfml"):
        page, where = "pfml", name
    elif name.startswith("ktpfl"):
        page, where = "ktpfl", name.removeprefix("ktpfl-")
    places = (where, f"{where}-classes")  # DS-1 as it was before shards
    alike = [own for place in places if (own := _read(page).get(place))]
    kept = next((own for own in alike if own["federation"] == federation), None)
    if kept is None:
        return {}
    own = {label: run for label, run in kept["methods"].items() if run["rounds"] <= rounds}
    found: dict[str, Means] = {}
    if page == "persfl":
        for label in [name for name in ("FedPer", "PersFL", "pFedMe", "Per-FedAvg") if name in own]:
            rows = zip(_seeds(kept, label), own[label]["accuracy"]["personal"], strict=True)
            found[label] = {seed: _mean(row) for seed, row in rows}
    elif page == "pfml":
        for label in [name for name in ("pFedMe", "PFML") if name in own]:
            values = own[label]["models"]["personal"]["mean"]
            means = zip(_seeds(kept, label), values, strict=True)
            found[label] = {seed: 100 * value for seed, value in means}
    elif page == "ktpfl":
        for label, run in own.items():
            found[label] = dict(zip(_seeds(kept, label), run["accuracy"], strict=True))
    else:
        for model, clients in own.get("FL", {}).get("accuracy", {}).items():
            if model not in ("personal", "global", "local"):
                rows = zip(kept["seeds"], clients, strict=True)
                found[f"FedAvg + {model}"] = {seed: _mean(row) for seed, row in rows}
    return found


def _seeds(kept: dict[str, Any], label: str) -> list[int]:
    """Return a method's seeds: the run's, or its own where it has more."""
    seeds: list[int] = kept["methods"][label].get("seeds", kept["seeds"])
    return seeds


def _read(name: str) -> dict[str, Any]:
    path = OTHERS / f"{name}.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return known


def write() -> None:
    """Fill the tables; settings that were not run are left out of them."""
    kept = _read("portfolio")
    ran = {name: kept.get(name, {"methods": {}}) for name in SETTINGS}
    found = [Setting(name, own) for name, own in ran.items() if "Portfolio" in own["methods"]]
    again = [
        Setting(name, own, refit=True)
        for name, own in ran.items()
        if "Portfolio" + REFIT in own["methods"]
    ]
    fill(
        PAGE,
        {
            "below": _below_line(found),
            "accuracy": _accuracy(found) + _who_ran(found),
            "verdict": _verdict(found),
            "refit": _accuracy(again) + _who_ran(again) + ["", *_verdict(again)],
            "regret": _regret(found),
            "choices": _choices(found),
            "cost": _cost(),
        },
    )


def _who_ran(found: list[Setting]) -> list[str]:
    """Say which rows have the methods that no other page has."""
    if not found:
        return []
    groups: dict[str, list[str]] = {}
    for one in found:
        beside = one.beside()
        names = [name for name in NEW if name in beside]
        words = "all" if len(names) == len(NEW) else ", ".join(names) or "none"
        groups.setdefault(words, []).append(one.title)
    told = ". ".join(f"{words}: {'; '.join(titles)}" for words, titles in groups.items())
    return ["", f"Which of {', '.join(NEW)} were run beside it: {told}."]


def _below_line(found: list[Setting]) -> list[str]:
    """Say how often test data break what holds on validation data."""
    pairs = [(one.at("local", p), one.at("personal", p)) for one in found for p in one.clients()]
    if not pairs:
        return ["On test data this is no promise."]
    whole = 100 * mean(own < alone - 1e-9 for alone, own in pairs)
    worst = max(_below(one) for one in found)
    return [
        f"On test data this is no promise: there {whole:.1f} % of clients are below it over all "
        f"settings of the table at the end, {worst:.0f} % in the worst."
    ]


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
                one.title,
                _cell(one.means("local")),
                _cell(one.means("global")),
                f"{label}: {_cell(theirs)}",
                f"**{_cell(ours)}**",
                gain,
                f"{_below(one):.1f}",
                f"{_below(one, 1.0):.1f}",
            ]
        )
    if not found:
        return ["Not run yet."]
    heads = ["%", "Local", "FedAvg", "best single method", "Portfolio", "above it"]
    return table([*heads, "clients below Local", "by over a point"], rows)


def _cell(means: Means) -> str:
    values = list(means.values())
    return f"{mean(values):.2f} ± {deviation(values):.2f}"


def _verdict(found: list[Setting]) -> list[str]:
    if not found:
        return []
    differences = [_against_best(one)[2] for one in found]
    surely = holm([seeds_p(own) for own in differences])
    gaps = {one.title: mean(own) for one, own in zip(found, differences, strict=True)}
    sure = {title: gap for (title, gap), p in zip(gaps.items(), surely, strict=True) if p < 0.05}
    won = sum(gap > 0 for gap in sure.values())
    lost = [title for title, gap in sure.items() if gap < 0]
    above = sum(gap >= 0 for gap in gaps.values())
    worst = min(gaps, key=lambda name: gaps[name])
    few = sum(_below(one) <= 2 for one in found)
    pairs = [(one.at("local", p), one.at("personal", p)) for one in found for p in one.clients()]
    whole = 100 * mean(own < alone - 1e-9 for alone, own in pairs)
    return [
        f"At or above the best single method in {above} of {len(found)} settings; furthest from "
        f"it: {gaps[worst]:+.2f} points ({worst}). Beyond noise, by seeds and Holm's rule over the "
        f"rows, it is above it in {won} and below it in {len(lost)}"
        f"{' (' + '; '.join(lost) + ')' if lost else ''}. Clients below their local model "
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
                one.title,
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
        rows.append([one.title, f"{100 * stays / len(places):.0f}", *shares])
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
