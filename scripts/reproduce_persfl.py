"""Lay our PersFL runs beside the paper's tables: `docs/reproduction/persfl.md` from run folders.

    python scripts/reproduce_persfl.py collect RUN_DIR[=NAME]...  # keep what the tables need
    python scripts/reproduce_persfl.py write                # write the page from the kept figures

p values are those of `idiolect compare`: seeds are the sample, corrected by Holm's rule over rows.
"""

import json
from pathlib import Path
from statistics import mean
from typing import Any

from paper_persfl import DISTIL, FEDAVG_ARM, GD, ROUNDS, TABLE, TEACHER_GRID
from reproduction import RESULTS, deviation, fill, gains, keep, run, table

from idiolect.data.partition.papers import DS1_USERS

HERE = Path(__file__).resolve().parent.parent / "docs" / "reproduction"
FIGURES = RESULTS / "persfl.json"
PAGE = HERE / "persfl.md"
SPLITS = [f"{data}-{split}" for data in ("cifar10", "mnist") for split in ("ds1", "ds2", "ds3")]
COLUMNS = ("Local", "FedAvg", "FedAvg + FT", "FedPer", "PersFL", "pFedMe", "Per-FedAvg")


def collect(folders: list[str]) -> None:
    """Keep each run's scores per seed and client, and what each client chose."""
    keep(FIGURES, folders, _method)


def _method(method: dict[str, Any]) -> dict[str, Any]:
    seeds = method["seeds"]
    facts = seeds[0]["clients"][0]["facts"]
    return {
        "rounds": method["rounds"],
        "settings": method["settings"],
        "device": method["device"],
        "seconds": round(method["speed"]["seconds"], 1),
        "megabytes": mean(
            (s["traffic"]["bytes_down"] + s["traffic"]["bytes_up"]) / 1e6 for s in seeds
        ),
        "accuracy": {
            model: [[round(c[model]["accuracy"], 5) for c in s["clients"]] for s in seeds]
            for model in method["headline"]
        },
        "validation": {
            model: round(mean(s["models"][model]["val_accuracy"] for s in seeds), 5)
            for model in method["headline"]
        },
        "facts": {
            name: [[c["facts"][name] for c in s["clients"]] for s in seeds]
            for name in facts
            if not isinstance(facts[name], list)
        },
    }


class Run:
    """One collected run: percentages by method and model, of the seeds that all methods have."""

    def __init__(self, kept: dict[str, Any], *, only: tuple[str, ...] = ()) -> None:
        of = [kept["methods"][label] for label in only]
        self.seeds = of[0].get("seeds", kept["seeds"]) if of else kept["seeds"]
        self.methods = {
            label: _of_seeds(own, len(self.seeds))
            for label, own in kept["methods"].items()
            if not only or label in only
        }

    def has(self, label: str) -> bool:
        return label in self.methods

    def per_client(self, label: str, model: str = "personal") -> list[float]:
        """Mean over seeds for each client, %."""
        scores = self.methods[label]["accuracy"][model]
        return [100 * mean(column) for column in zip(*scores, strict=True)]

    def mean(self, label: str, model: str = "personal") -> float:
        return mean(self.per_client(label, model))

    def over_seeds(self, label: str, model: str = "personal") -> float:
        rows = [100 * mean(row) for row in self.methods[label]["accuracy"][model]]
        return deviation(rows)

    def over_means(self, label: str) -> float:
        """Deviation of the users' means over seeds, as the paper prints it."""
        return deviation(self.per_client(label))

    def over_clients(self, label: str, model: str = "personal") -> float:
        """Deviation over users within a seed, mean over seeds: users are drawn anew with each."""
        return mean(
            deviation([100 * v for v in row]) for row in self.methods[label]["accuracy"][model]
        )

    def cell(self, label: str, model: str = "personal") -> str:
        if not self.has(label):
            return "–"
        return f"{self.mean(label, model):.1f} ± {self.over_seeds(label, model):.1f}"

    def paired(self, label: str, other: str) -> list[float]:
        """Differences of two methods' means over users, for each seed that both have."""
        left, right = (
            [100 * mean(row) for row in self.methods[name]["accuracy"]["personal"]]
            for name in (label, other)
        )
        return [a - b for a, b in zip(left, right, strict=False)]

    def picked(self, label: str) -> float | None:
        """Mean accuracy if every user picked λ and T by its own test data; None without a grid."""
        models = self.methods[label]["accuracy"]
        grid = [rows for model, rows in models.items() if model.startswith("λ=")]
        if not grid:
            return None
        seeds = zip(*grid, strict=True)  # for each seed a row of users of each model
        best = [[max(user) for user in zip(*models, strict=True)] for models in seeds]
        return 100 * mean(mean(users) for users in best)

    def picked_share(self, label: str) -> float:
        """Mean λ if every user picked it by its own test data; of equal cells the first."""
        models = self.methods[label]["accuracy"]
        cells = {m: float(m[2:].split()[0]) for m in models if m.startswith("λ=")}
        order = sorted(cells, key=lambda m: (cells[m], float(m.rpartition("=")[2])))
        seeds, users = range(len(self.seeds)), range(len(models["personal"][0]))
        best = [max(order, key=lambda m: models[m][s][u]) for s in seeds for u in users]
        return mean(cells[m] for m in best)


def _of_seeds(method: dict[str, Any], many: int) -> dict[str, Any]:
    """Return a method's figures for the first seeds."""
    cut = {
        part: {name: rows[:many] for name, rows in method[part].items()}
        for part in ("accuracy", "facts")
    }
    return {**method, **cut}


def write() -> None:
    """Fill the tables between the markers of the page; the words around them are kept."""
    runs = json.loads(FIGURES.read_text())
    kept = {name: Run(run) for name, run in runs.items()}
    tables = {
        "table-2": _accuracy(kept, "cifar10"),
        "table-3": _accuracy(kept, "mnist"),
        "table-4": _teachers(kept),
        "table-5": _choices(kept),
        "table-6": _objectives(kept, Run(runs["cifar10-ds1"], only=("PersFL", "PersFL-GD"))),
        "table-7": _traffic(kept),
        "augmented": _augmented(kept),
        "picked": _picked(kept),
        "noise": _noise(kept),
        "raw": _raw(kept),
        "users": _users(kept),
        "distillation": _distillation(kept),
        "fairness": _fairness(kept),
        "grid": _grid(kept),
        "choice": _settings(kept),
        "epochs": _epochs(kept),
        "rounds": _rounds(kept),
    }
    fill(PAGE, tables)


def _title(split: str) -> str:
    return split.replace("cifar10-ds", "CIFAR-10 DS-").replace("mnist-ds", "MNIST DS-")


def _accuracy(kept: dict[str, Run], data: str) -> list[str]:
    rows = []
    for split in (name for name in SPLITS if name.startswith(data) and name in kept):
        run, paper = kept[split], TABLE[split]
        ours = [run.cell(label) for label in COLUMNS]
        rows.append([f"{_title(split)}, ours", *ours])
        spread = [f"{run.over_means(label):.1f}" if run.has(label) else "–" for label in COLUMNS]
        rows.append(["spread of users' means, ours", *spread])
        rows.append(["paper", *[f"{paper[c][0]}" if c in paper else "–" for c in COLUMNS]])
        rows.append(
            [
                "spread of users' means, paper",
                *[f"{paper[c][1]}" if c in paper else "–" for c in COLUMNS],
            ]
        )
    return table(["%", *COLUMNS], rows)


def _there(kept: dict[str, Run]) -> list[str]:
    return [split for split in SPLITS if split in kept]


def _teachers(kept: dict[str, Run]) -> list[str]:
    last, best = "PersFL, last teacher", "PersFL"
    found = gains([kept[split].paired(best, last) for split in _there(kept)])
    rows = [
        [
            _title(split),
            kept[split].cell(last),
            kept[split].cell(best),
            gain,
            f"{FEDAVG_ARM[split]}",
            f"{TABLE[split]['PersFL'][0]}",
            f"{TABLE[split]['PersFL'][0] - FEDAVG_ARM[split]:+.1f}",
        ]
        for split, gain in zip(_there(kept), found, strict=True)
    ]
    return table(
        ["", "last, ours", "best, ours", "gain, ours", "last, paper", "best, paper", "gain, paper"],
        rows,
    )


def _picked(kept: dict[str, Run]) -> list[str]:
    """Table 4 as it would be if λ and T were picked on test data, as the paper's appendix does."""
    rows = []
    for split in _there(kept):
        last, best = (kept[split].picked(label) for label in ("PersFL, last teacher", "PersFL"))
        cells = [f"{value:.1f}" if value is not None else "–" for value in (last, best)]
        gain = f"{best - last:+.2f}" if last is not None and best is not None else "–"
        paper = f"{TABLE[split]['PersFL'][0] - FEDAVG_ARM[split]:+.1f}"
        rows.append([_title(split), *cells, gain, paper])
    head = ["picked on **test** data", "last teacher", "best teacher", "gain", "gain, paper"]
    return table(head, rows)


def _augmented(kept: dict[str, Run]) -> list[str]:
    rows = []
    for split in ("cifar10-ds2", "mnist-ds2"):
        for name, what in ((split, "as they are"), (f"{split}-augmented", "augmented once")):
            if name in kept:
                cells = [kept[name].cell(label) for label in COLUMNS]
                rows.append([f"{_title(split)}, {what}", *cells])
        paper = TABLE[split]
        rows.append(["paper", *[f"{paper[c][0]}" if c in paper else "–" for c in COLUMNS]])
    return table(["%", *COLUMNS], rows)


def _noise(kept: dict[str, Run]) -> list[str]:
    """The paper's gains of Table 4 beside its gaps between equal objectives, and our spread."""
    rows = []
    for split in _there(kept):
        paper, over_seeds = TABLE[split]["PersFL"][0], kept[split].over_seeds("PersFL")
        rows.append(
            [
                _title(split),
                f"{paper - FEDAVG_ARM[split]:+.1f}",
                f"{paper - GD[split]:+.1f}",
                f"{over_seeds:.1f}",
                f"{over_seeds * (2 / 5) ** 0.5:.1f}",
            ]
        )
    head = ["points", "best over last teacher, paper", "PersFL over PersFL-GD, paper"]
    head += ["deviation over seeds, ours", "of a difference of two means of five runs each"]
    return table(head, rows)


def _raw(kept: dict[str, Run]) -> list[str]:
    """DS-1 with pixels of 0 to 255, at several rates."""
    runs = (
        ("MNIST DS-1, −1 to 1", "mnist-ds1", "0.01"),
        ("MNIST DS-1, 0 to 255", "mnist-ds1-raw", "0.01"),
        ("MNIST DS-1, 0 to 255", "mnist-ds1-raw-0.001", "0.001"),
        ("MNIST DS-1, 0 to 255", "mnist-ds1-raw-0.0003", "0.0003"),
        ("CIFAR-10 DS-1, −1 to 1, two epochs", "cifar10-ds1-e2", "0.01"),
        ("CIFAR-10 DS-1, 0 to 255, two epochs", "cifar10-ds1-raw", "0.001"),
    )
    labels = ("Local", "FedAvg", "FedAvg + FT")
    rows = []
    for title, name, rate in runs:
        own = kept.get(name)
        rows.append([title, rate, *(own.cell(label) if own else "–" for label in labels)])
    return table(["%", "rate", *labels], rows)


def _users(kept: dict[str, Run]) -> list[str]:
    """DS-1 of CIFAR-10: shards dealt at random, and as the paper's users have them."""
    deals = (("at random", "cifar10-ds1"), ("as the paper's users", "cifar10-ds1-users"))
    rows = []
    for title, name in deals:
        run = kept[name]
        places = ("PersFL", "global"), ("PersFL", "λ=0 T=1"), ("PersFL", "personal")
        cells = [run.cell(*place) for place in places]
        spread = f"{run.over_means('PersFL'):.1f}"
        rows.append([f"{title}, {len(run.seeds)} seeds", *cells, spread])
    paper = TABLE["cifar10-ds1"]
    rows.append(["paper", f"{paper['FedAvg'][0]}", "–", *map(str, paper["PersFL"])])
    head = ["shards dealt", "global model, round 50", "fine-tuned (λ = 0)", "PersFL"]
    by_classes: dict[int, list[float]] = {4: [], 3: [], 2: []}
    own = kept[deals[1][1]]
    for seed, scores in zip(own.seeds, own.methods["PersFL"]["accuracy"]["personal"], strict=True):
        for user, score in zip(DS1_USERS[seed % len(DS1_USERS)].split(), scores, strict=True):
            by_classes[len(user)].append(100 * score)
    told = (f"of {n} classes {mean(own):.1f} ({len(own)})" for n, own in by_classes.items())
    lines = table([*head, "its spread of users' means"], rows)
    return [*lines, "", f"PersFL's users as the paper's: {', '.join(told)}."]


def _choices(kept: dict[str, Run]) -> list[str]:
    """Table 5; beside it λ picked on test data, of a smaller soft loss, of a stronger stage 2."""
    rows = []
    for split in _there(kept):
        share, temperature = DISTIL[split]
        ours = _chosen(kept[split])
        others = [
            f"{_chosen(kept[name])['share']:.2f}" if name in kept else "–"
            for name in (f"{split}-mean", f"{split}-long", f"{split}-rate")
        ]
        rows.append(
            [
                _title(split),
                f"{ours['share']:.2f}",
                f"{kept[split].picked_share('PersFL'):.2f}",
                *others,
                f"{share:.2f}",
                f"{ours['temperature']:.1f}",
                f"{temperature:.1f}",
                f"{ours['teacher_round']:.1f} of {kept[split].methods['PersFL']['rounds']}",
            ]
        )
    header = ["mean over users", "λ, ours", "λ, picked on **test**", "λ, a tenth of the soft loss"]
    header += ["λ, stage 2 thrice as long", "λ, at thrice its rate", "λ, paper", "T, ours"]
    header += ["T, paper", "teacher's round"]
    return table(header, rows)


def _rounds(kept: dict[str, Run]) -> list[str]:
    """MNIST DS-2: PersFL with its 25 rounds and with FedAvg's 50, beside FedAvg."""
    base = kept["mnist-ds2"]
    rows = [["FedAvg", "50", base.cell("FedAvg"), "–"]]
    for rounds, name in (("25", "mnist-ds2"), ("50", "mnist-ds2-50")):
        if name not in kept:
            rows.append(["PersFL", rounds, "–", "–"])
            continue
        joined = Run({"methods": {**base.methods, **kept[name].methods}, "seeds": base.seeds})
        (gain,) = gains([joined.paired("PersFL", "FedAvg")])
        rows.append(["PersFL", rounds, joined.cell("PersFL"), gain])
    return table(["MNIST DS-2, %", "rounds", "accuracy", "above FedAvg"], rows)


def _chosen(run: Run) -> dict[str, float]:
    facts = run.methods["PersFL"]["facts"]
    return {name: mean(v for row in facts[name] for v in row) for name in facts}


def _objectives(kept: dict[str, Run], longer: Run) -> list[str]:
    first = SPLITS[0]
    runs = [(first, f"{_title(first)}, {len(longer.seeds)} seeds", longer)]
    runs += [(split, _title(split), kept[split]) for split in _there(kept)]
    rows = [
        [
            title,
            run.cell("PersFL"),
            run.cell("PersFL-GD"),
            f"{TABLE[split]['PersFL'][0]}",
            f"{GD[split]}",
        ]
        for split, title, run in runs
    ]
    return table(["", "PersFL, ours", "PersFL-GD, ours", "PersFL, paper", "GD, paper"], rows)


def _traffic(kept: dict[str, Run]) -> list[str]:
    labels = [label for label in COLUMNS if label in ROUNDS]
    rows = []
    for split in _there(kept):
        run = kept[split]
        cells = []
        for label in labels:
            paper = ROUNDS[label][SPLITS.index(split)]
            if not run.has(label):
                cells.append(f"– ({paper})")
                continue
            own = run.methods[label]
            cells.append(f"{own['rounds']} ({paper}), {own['megabytes']:,.0f} MB")
        rows.append([_title(split), *cells])
    return table(["rounds ours (paper), MB a run", *labels], rows)


def _distillation(kept: dict[str, Run]) -> list[str]:
    tuned = "PersFL, fine-tuning only"
    found = gains([kept[split].paired("PersFL", tuned) for split in _there(kept)])
    rows = [
        [_title(split), kept[split].cell(tuned), kept[split].cell("PersFL"), gain]
        for split, gain in zip(_there(kept), found, strict=True)
    ]
    return table(["", "fine-tuning (λ = 0)", "λ and T searched", "gain"], rows)


def _fairness(kept: dict[str, Run]) -> list[str]:
    labels = ("FedAvg", "FedPer", "PersFL", "pFedMe", "Per-FedAvg")
    rows = []
    for split in _there(kept):
        run = kept[split]
        spread = {label: run.over_clients(label) for label in labels if run.has(label)}
        fairest = min(spread, key=lambda label: spread[label])
        cells = [f"{spread[label]:.1f}" if label in spread else "–" for label in labels]
        paper = {label: TABLE[split][label][1] for label in labels}
        rows.append([_title(split), *cells, fairest, min(paper, key=lambda label: paper[label])])
    return table(["deviation over users", *labels, "least, ours", "least, paper"], rows)


def _grid(kept: dict[str, Run]) -> list[str]:
    rows = []
    for split in _there(kept):
        run = kept[split]
        cells = []
        for share, temperature in TEACHER_GRID:
            cells.append(f"{run.mean('PersFL', f'λ={share:g} T={temperature:g}'):.1f}")
        rows.append([_title(split), *cells])
    header = [f"λ {share:g}, T {temperature:g}" for share, temperature in TEACHER_GRID]
    return table(["test accuracy, mean over users", *header], rows)


def _settings(kept: dict[str, Run]) -> list[str]:
    rows = []
    for label, method in kept["choose"].methods.items():
        personal = (
            "–" if label.startswith("FedAvg") else f"{100 * method['validation']['personal']:.1f}"
        )
        rows.append([label, f"{100 * method['validation']['global']:.1f}", personal])
    return table(["candidate", "validation, global model", "validation, personal"], rows)


def _epochs(kept: dict[str, Run]) -> list[str]:
    rows = []
    named = [f"cifar10-{split}{more}" for split in ("ds1", "ds3") for more in ("", "-e2", "-e4")]
    there = [name for name in named if name in kept and kept[name].has("PersFL")]
    taken = {name: int(kept[name].methods["PersFL"]["settings"]["epochs"]) for name in there}
    for name in sorted(there, key=lambda name: (name[:11], taken[name])):
        run, own = kept[name], "PersFL, fine-tuning only"
        tuned = (own, "personal") if run.has(own) else ("PersFL", "λ=0 T=1")
        places = tuned, ("PersFL", "personal")
        seen = [f"{100 * run.methods[label]['validation'][m]:.1f}" for label, m in places]
        cells = [run.cell(tuned[0], "global"), *(run.cell(*place) for place in places), *seen]
        rows.append([_title(name[:11]), f"{taken[name]}", *cells])
    return table(
        ["", "local epochs", "global model, round 50", "fine-tuned", "PersFL",
         "fine-tuned, validation", "PersFL, validation"], rows,
    )  # fmt: skip


if __name__ == "__main__":
    run(__doc__, collect, write)
