"""Lay our PFML runs beside the paper's tables: `docs/reproduction/pfml.md` from run folders.

python scripts/reproduce_pfml.py collect RUN_DIR[=NAME]...  # keep what the tables need
python scripts/reproduce_pfml.py write                      # write the page from them

Needs pandas (the `dev` or `pandas` extra) to read the curves.
"""

import json
from pathlib import Path
from statistics import mean
from typing import Any

from paper_pfml import ACCURACY, SENSITIVITY
from reproduction import RESULTS, curves, deviation, fill, gains, keep, run, table

HERE = Path(__file__).resolve().parent.parent / "docs" / "reproduction"
FIGURES = RESULTS / "pfml.json"
PAGE = HERE / "pfml.md"
ROWS = (
    ("FedAvg", "FedAvg", "global"),
    ("pFedMe-GM", "pFedMe", "global"),
    ("pFedMe-PM", "pFedMe", "personal"),
    ("PFML-GM", "PFML", "global"),
    ("PFML-PM", "PFML", "personal"),
)
TITLES = {
    "pfml-mnist-mlr": "MNIST, MLR",
    "pfml-mnist-dnn": "MNIST, DNN",
    "pfml-synthetic-mlr": "Synthetic, MLR",
    "pfml-synthetic-dnn": "Synthetic, DNN",
    "pfml-cifar10-u5": "CIFAR-10, 5 a round",
    "pfml-cifar10-u10": "CIFAR-10, 10 a round",
}
FIVE = {  # of Figure 3, beside CIFAR-10's
    "pfml-mnist-dnn-u5": "MNIST, DNN, 5 a round",
    "pfml-synthetic-dnn-u5": "Synthetic, DNN, 5 a round",
}


def collect(folders: list[str]) -> None:
    """Keep each method's means per seed, weighted as the paper does and plain, and its curves."""
    keep(FIGURES, folders, _method)
    kept = json.loads(FIGURES.read_text())
    for place in folders:
        folder, _, name = place.partition("=")
        if Path(folder).name.startswith("choose-") or name.endswith("+"):
            continue
        found = curves(Path(folder) / "metrics.parquet", "val")
        for label, curve in found.items():
            kept[name or Path(folder).name]["methods"][label]["curves"] = curve
        for label, curve in curves(Path(folder) / "metrics.parquet", "train_curve", "loss").items():
            kept[name or Path(folder).name]["methods"][label]["losses"] = curve
        for label, tested in _global_on_test(Path(folder)).items():
            kept[name or Path(folder).name]["methods"][label]["global_on_test"] = tested
    FIGURES.write_text(json.dumps(kept, sort_keys=True) + "\n")


def _global_on_test(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return label -> round -> a seed's global model, clients weighed by their test rows."""
    import pandas

    methods = json.loads((folder / "result.json").read_text())["methods"]
    rows = pandas.read_parquet(folder / "metrics.parquet")
    rows = rows[(rows["split"] == "test_curve") & (rows["metric"] == "accuracy")]
    found: dict[str, dict[str, list[float]]] = {}
    for (label, number), own in rows[rows["model"] == "global"].groupby(["method", "round"]):
        for seed in methods[label]["seeds"]:
            scored = own[own["seed"] == seed["seed"]].set_index("client")["value"]
            tests = {str(one["client"]): one["test"] for one in seed["clients"]}
            total = sum(scored[name] * number for name, number in tests.items() if number)
            score = round(float(total) / sum(tests.values()), 5)
            found.setdefault(label, {}).setdefault(str(number), []).append(score)
    return found


def _method(method: dict[str, Any]) -> dict[str, Any]:
    seeds = method["seeds"]
    figures = {
        model: {
            name: [round(seed["models"][model][name], 5) for seed in seeds]
            for name in ("weighted_mean", "mean", "val_accuracy")
        }
        for model in method["headline"]
    }
    best = {  # chosen on test data: no result, but what much of the field prints
        model: [round(value, 5) for value in own["weighted_mean"]]
        for model, own in method.get("best_test_round", {}).items()
    }
    return {
        "rounds": method["rounds"],
        "settings": method["settings"],
        "device": method["device"],
        "seconds": round(method["speed"]["seconds"], 1),
        "models": figures,
        **({"best_test_round": best} if best else {}),
    }


class Kept:
    """The collected figures, in percent."""

    def __init__(self) -> None:
        self.runs = json.loads(FIGURES.read_text())

    def has(self, name: str, label: str) -> bool:
        return label in self.runs.get(name, {}).get("methods", {})

    def cell(self, name: str, label: str, model: str, figure: str = "weighted_mean") -> str:
        values = [100 * v for v in self.runs[name]["methods"][label]["models"][model][figure]]
        return f"{mean(values):.2f} ± {deviation(values):.2f}"

    def curve(self, name: str, label: str, model: str) -> dict[str, float]:
        found: dict[str, float] = self.runs[name]["methods"][label]["curves"][model]
        return found


def write() -> None:
    """Fill the tables between the markers of the page."""
    kept = Kept()
    tables = {
        "table-1": _accuracy(kept, [name for name in ACCURACY if "cifar10" not in name]),
        "table-2": _accuracy(kept, [name for name in ACCURACY if "cifar10" in name]),
        "table-2-rest": [_resting(kept)],
        "curves": _learning(kept),
        "best-round": _best_rounds(kept),
        "losses": _losses(kept),
        "server-rest": _server_rates(kept, "pfml-synthetic-server-dnn-rest"),
        "chosen": _chosen(kept),
    }
    for number, names in {
        3: ["pfml-synthetic-unequal"],
        4: ["pfml-mnist-steps-dnn", "pfml-mnist-steps-mlr"],
        5: ["pfml-synthetic-pull-mlr", "pfml-synthetic-pull-dnn"],
        6: ["pfml-synthetic-server-dnn", "pfml-synthetic-server-mlr"],
    }.items():
        tables[f"table-{number}"] = _sensitivity(kept, names)
    fill(PAGE, tables)


def _accuracy(kept: Kept, names: list[str]) -> list[str]:
    rows = []
    for place, (title, label, model) in enumerate(ROWS):
        cells = []
        for name in names:
            cells += [kept.cell(name, label, model), f"{ACCURACY[name][place]:.2f}"]
        rows.append([title, *cells])
    for title, label, model in ROWS[2::2]:
        cells = []
        for name in names:
            cells += [kept.cell(name, label, model, "mean"), ""]
        rows.append([f"{title}, each client alike", *cells])
    for title, label, model in ROWS[3:]:  # the other reading of who trains
        if not all(kept.has(f"{name}-rest", label) for name in names):
            continue
        cells = []
        for name in names:
            cells += [kept.cell(f"{name}-rest", label, model), ""]
        rows.append([f"{title}, only the cohort trains", *cells])
    header = [text for name in names for text in (TITLES[name], "paper")]
    return table(["%", *header], rows)


def _resting(kept: Kept) -> str:
    """Say which columns of Table 2 are still of clients that rest outside the cohort."""
    rest = [
        f"{label} with {name.rpartition('u')[2]}"
        for name in ACCURACY
        if "cifar10" in name
        for label in ("pFedMe", "PFML")
        if kept.runs[name]["methods"][label]["models"]
        == kept.runs[f"{name}-rest"]["methods"][label]["models"]
    ]
    if not rest:
        return "Every client trains."
    return (
        f"Of clients that rest outside the cohort, as a run is missing: {', '.join(rest)} a round."
    )


def _chosen(kept: Kept) -> list[str]:
    """Return the validation accuracy of every setting that was tried, and Table 1's."""
    tried = {name: kept.runs.get(name.replace("pfml-", "choose-"), {}) for name in TITLES}
    tried = {name: run["methods"] for name, run in tried.items() if run}
    labels = list(dict.fromkeys(label for own in tried.values() for label in own))
    labels.sort(key=lambda label: (label.startswith("share"), label.startswith("batch"), label))
    rows = []
    for name, own in tried.items():
        figures = {
            label: 100 * mean(found["models"]["personal"]["val_accuracy"])
            for label, found in own.items()
        }
        cells = [f"{figures[label]:.2f}" if label in figures else "" for label in labels]
        rows.append([TITLES[name], *cells, _taken(kept.runs[name]["methods"]["PFML"]["settings"])])
    return table(["validation accuracy of θ, %", *labels, "taken"], rows)


def _taken(settings: dict[str, Any]) -> str:
    """Name a setting as the choosing experiments do."""
    home = ", batch" if settings.get("home") == "batch" else ""
    share = f", share {settings['share']:g}" if settings.get("share", 1) != 1 else ""
    return f"{settings['inner_lr']:g}{home}{share}"


def _sensitivity(kept: Kept, names: list[str]) -> list[str]:
    rows = []
    for name in names:
        for label, (global_model, personal) in SENSITIVITY[name].items():
            cells = [kept.cell(name, label, model) for model in ("global", "personal", "auxiliary")]
            where = name.removeprefix("pfml-").replace("-", " ")
            paper = [f"{global_model:.2f}", f"{personal:.2f}"]
            rows.append([where, label, cells[0], paper[0], cells[1], paper[1], cells[2]])
    return table(["", "setting", "GM", "paper", "PM (θ)", "paper", "auxiliary (m)"], rows)


def _server_rates(kept: Kept, name: str) -> list[str]:
    """Compare β = 4 with 2 after half of the rounds and after all, on test data of each seed."""
    methods = kept.runs[name]["methods"]
    two, four = (methods[f"beta {beta}"]["global_on_test"] for beta in (2, 4))
    rows, differences = [], []
    for mark in ("600", "1200"):
        low, high = ([100 * value for value in own[mark]] for own in (two, four))
        rows.append([mark, *(f"{mean(own):.2f} ± {deviation(own):.2f}" for own in (low, high))])
        differences.append([b - a for a, b in zip(low, high, strict=True)])
    rows = [[*row, gain] for row, gain in zip(rows, gains(differences), strict=True)]
    return table(["GM, only the cohort trains, after rounds", "β = 2", "β = 4", "4 above 2"], rows)


def _learning(kept: Kept) -> list[str]:
    rows, marks = [], ["100", "200", "300", "400", "500", "600", "700", "800"]
    for name, title in (TITLES | FIVE).items():
        for row, label, model in ROWS:
            curve = kept.curve(name, label, model)
            cells = [f"{100 * curve[mark]:.1f}" if mark in curve else "" for mark in marks]
            rows.append([title, row, *cells])
    return table(["validation accuracy, %", "", *marks], rows)


def _best_rounds(kept: Kept) -> list[str]:
    """Lay the last round beside each seed's best by test data, where that was recorded."""
    rows = []
    for name in (name for name in ACCURACY if "cifar10" in name):
        for place, (title, label, model) in enumerate(ROWS):
            own = kept.runs[name]["methods"][label].get("best_test_round", {}).get(model)
            if own is None:
                continue
            best = [100 * value for value in own]
            cells = [kept.cell(name, label, model), f"{mean(best):.2f} ± {deviation(best):.2f}"]
            rows.append([f"{TITLES[name]}: {title}", *cells, f"{ACCURACY[name][place]:.2f}"])
    header = ["%", "last round", "best round by **test** data", "paper"]
    return table(header, rows or [["–"] * len(header)])


def _losses(kept: Kept) -> list[str]:
    """Show the loss on training rows over the rounds: Figure 2's other panels."""
    known = {
        (TITLES[name], row): kept.runs[f"{name}-loss"]["methods"][label]["losses"][model]
        for name in TITLES
        if f"{name}-loss" in kept.runs
        for row, label, model in ROWS
        if model in kept.runs[f"{name}-loss"]["methods"].get(label, {}).get("losses", {})
    }
    marks = sorted({int(mark) for curve in known.values() for mark in curve})
    rows = [
        [*place, *(f"{curve[str(mark)]:.3f}" if str(mark) in curve else "" for mark in marks)]
        for place, curve in known.items()
    ]
    header = ["training loss, nats", "", *map(str, marks)]
    return table(header, rows or [["–"] * len(header)])


if __name__ == "__main__":
    run(__doc__, collect, write)
