"""Lay our KT-pFL runs beside the paper's tables: `docs/reproduction/ktpfl.md` from run folders.

    python scripts/reproduce_ktpfl.py collect RUN_DIR[=NAME]...  # keep what the tables need
    python scripts/reproduce_ktpfl.py write                # write the page from the kept figures

A run is known by the name of its experiment file: emnist-two, fmnist-20, cifar10-sweeps, ... The
folders of experiments/ktpfl/gpu.txt, such as kt-fmnist-two-a, tell it; those of cpu.txt, such as
kt-small-fmnist-two, are the same in small. One that is not finished is passed by.
"""

import json
import re
from pathlib import Path
from statistics import mean
from typing import Any

from paper_ktpfl import ANCHOR, DATA, SWEEPS, TABLE_1, TABLE_2, TABLE_5, TITLES
from reproduction import RESULTS, deviation, fill, keep, run, table

HERE = Path(__file__).resolve().parent.parent / "docs" / "reproduction"
FIGURES = RESULTS / "ktpfl.json"
PAGE = HERE / "ktpfl.md"
SMALL = "small-"  # before the names of runs in small
MIXED = [(data, kind) for data in DATA for kind in ("two", "all")]
EQUAL = [(data, clients) for data in DATA for clients in ("20", "100")]
OURS_ALONE = (
    "Local",
    "HeurFedAMP",
    "KT-pFL, mixture",
    "KT-pFL, Eq. 7 as printed",
    "KT-pFL, Eq. 7, sum over D_r",
    "KT-pFL, released code",
)

Kept = dict[str, Any]


def collect(folders: list[str]) -> None:
    """Keep each run's mean score per seed, and what crossed the network."""
    named = []
    for place in folders:
        folder, _, name = place.partition("=")
        if not (Path(folder) / "result.json").exists():
            print(f"{folder} is not finished, and passed by")
            continue
        named.append(f"{folder}={name or re.sub(r'^kt-|-[a-z]$', '', Path(folder).name)}")
    keep(FIGURES, named, _method, curve=("test_curve", "personal"))


def _method(method: dict[str, Any]) -> dict[str, Any]:
    seeds = method["seeds"]
    models = [seed["models"] for seed in seeds]
    mixed = [round(100 * own["mixture"]["mean"], 3) for own in models if "mixture" in own]
    traffic = [seed["traffic"] for seed in seeds]
    return {
        "rounds": method["rounds"],
        "device": method["device"],
        "seconds": round(method["speed"]["seconds"], 1),
        "megabytes": mean((t["bytes_down"] + t["bytes_up"]) / 1e6 for t in traffic),
        "public_megabytes": mean(t.get("public_bytes", 0) / 1e6 for t in traffic),
        "accuracy": [round(100 * seed["models"]["personal"]["mean"], 3) for seed in seeds],
        "spread": [round(100 * seed["models"]["personal"]["std"], 3) for seed in seeds],
        **({"mixture": mixed} if mixed else {}),
        "validation": [round(100 * s["models"]["personal"]["val_accuracy"], 3) for s in seeds],
    }


def write() -> None:
    """Fill the tables between the markers of the page; a run that is missing leaves dashes."""
    kept: Kept = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    fill(
        PAGE,
        {
            "table-1": _compared(kept, MIXED, TABLE_1, ("two classes", "all classes")),
            "table-1-small": _compared(
                kept, [(SMALL + d, k) for d, k in MIXED], TABLE_1, ("two classes", "all classes")
            ),
            "table-2": _compared(kept, EQUAL, TABLE_2, ("20 clients", "100 clients")),
            "table-2-letters": _letters(kept),
            **{name: _sweep(kept, rows) for name, rows in SWEEPS.items()},
            "table-5": _public(kept),
            "figure-1": _curves(kept, [(data, "all") for data in DATA], TABLE_1),
            "figure-2": _curves(kept, [(data, "20") for data in DATA], TABLE_2),
            "figure-3": _traffic(kept),
            "order": _order(kept),
            "choice-mixed": _choice(
                kept, {"choose-two": "two classes", "choose-all": "all classes"}
            ),
            "choice-equal": _choice(kept, {"choose-20": "Fashion-MNIST, 20 clients"}),
            "choice-emnist": _choice(kept, {"choose-emnist": "EMNIST, 20 clients"}),
            "table-2-longer": _longer(kept),
            "cause-images": _images(kept),
            "cause-code": _code(kept),
            "cause-letters": _letter_images(kept),
            "cause-classes": _classes(kept),
            "cause-age": _age(kept),
            "cause-public": _public_sizes(kept),
            "cause-touched": _touched(kept),
            "cause-few": _few(kept),
            "cause-unfused": _unfused(kept),
            "table-1-letters": _letters_in_small(kept),
            "cost": _cost(kept),
        },
    )


def _of(kept: Kept, name: str, label: str) -> dict[str, Any] | None:
    """Find a method of a run; its mixtures, before anyone tunes them, are named as its own."""
    own, mixture = label.removesuffix(", mixture"), label.endswith(", mixture")
    found: dict[str, Any] | None = kept.get(name, {}).get("methods", {}).get(own)
    if not mixture or found is None:
        return found
    return {**found, "accuracy": found["mixture"]} if "mixture" in found else None


def _cell(method: dict[str, Any] | None) -> str:
    if method is None:
        return "–"
    spread = f" ± {deviation(method['accuracy']):.1f}" if len(method["accuracy"]) > 1 else ""
    return f"{mean(method['accuracy']):.1f}{spread}"


def _letters(kept: Kept) -> list[str]:
    """Table 2's first two columns with 47 classes and with ten letters."""
    header = ["20 clients: 47 classes, 20 rounds", "ten letters, 60 rounds", "paper"]
    header += ["100 clients: 47 classes, 60 rounds", "ten letters, 60 rounds", "paper"]
    pairs = [(f"emnist-{clients}", f"emnist-letters-{clients}") for clients in ("20", "100")]
    return _beside_letters(kept, TABLE_2, pairs, header)


def _letters_in_small(kept: Kept) -> list[str]:
    """Table 1's EMNIST in small, with 47 classes and with ten letters."""
    header = ["two classes a client: of 47", "of ten letters", "paper"]
    header += ["all classes: 47", "ten letters", "paper"]
    pairs = [(f"{SMALL}emnist-{kind}", f"{SMALL}letters-{kind}") for kind in ("two", "all")]
    return _beside_letters(kept, TABLE_1, pairs, header)


def _beside_letters(
    kept: Kept, paper: dict[str, tuple[float, ...]], pairs: list[tuple[str, str]], header: list[str]
) -> list[str]:
    """Write runs in pairs, each beside the paper's column of EMNIST."""
    rows = []
    for label in (*paper, "Local"):
        row = [label]
        for column, names in enumerate(pairs):
            row += [_cell(_of(kept, name, label)) for name in names]
            row.append(f"{paper[label][column]:.1f}" if label in paper else "–")
        rows.append(row)
    return table(["%", *header], rows)


def _compared(
    kept: Kept,
    columns: list[tuple[str, str]],
    paper: dict[str, tuple[float, ...]],
    kinds: tuple[str, str],
) -> list[str]:
    rows = []
    for label in (*paper, *OURS_ALONE):
        cells = [_of(kept, "-".join(column), label) for column in columns]
        if label in paper:
            told = zip(cells, paper[label], strict=True)
            rows.append([label, *[f"{_cell(cell)} ({theirs:.1f})" for cell, theirs in told]])
        elif any(cells):
            rows.append([label, *map(_cell, cells)])
    heads = [f"{TITLES[data]}, {kind}" for data in DATA for kind in kinds]
    return table(["%, ours (paper)", *heads], rows)


def _sweep(kept: Kept, paper: dict[str, tuple[float, ...]]) -> list[str]:
    """Lay a sweep's three settings beside the paper, data set by data set."""
    rows = []
    for label, theirs in paper.items():
        name = "anchor" if label in ANCHOR else label
        row = [label.replace("D_r", "\\|D_r\\|")]
        for data, other in zip(DATA, theirs, strict=True):
            found = [_of(kept, f"{run}-sweeps", name) for run in (data, f"{SMALL}{data}")]
            found.append(_of(kept, f"{data}-sweeps-30", name))
            if data == "fmnist" and name == "anchor":  # the same settings under another name
                found[-1] = _of(kept, "fmnist-public-mnist", "KT-pFL")
            row += [*map(_cell, found), f"{other:.1f}"]
        rows.append(row)
    titles = [[f"{title}, few images", "in small", "all", "paper"] for title in TITLES.values()]
    return table(["%", *(cell for title in titles for cell in title)], rows)


def _longer(kept: Kept) -> list[str]:
    """Table 2's 20 clients with 60 rounds."""
    runs = {
        "Fashion-MNIST, 20 clients": ("fmnist-20", "fmnist-20-60", 2),
        "CIFAR-10, 20 clients": ("cifar10-20", "cifar10-20-60", 4),
    }
    rows = []
    for title, (shorter, longer, place) in runs.items():
        for label in ("FedAvg + FT", "KT-pFL"):
            cells = [_cell(_of(kept, name, label)) for name in (shorter, longer)]
            rows.append([title, label, *cells, f"{TABLE_2[label][place]:.1f}"])
    return table(["%", "", "20 rounds", "60 rounds", "paper"], rows)


def _images(kept: Kept) -> list[str]:
    """Table 1's level over the images that a client trains on."""
    sizes, labels = (325, 100, 50, 25), ("Local", "FedMD", "pFedDF", "TopK-pFL", "KT-pFL")
    rows = [
        [
            f"Fashion-MNIST, {label}",
            *(_cell(_of(kept, f"images-{size}", label)) for size in sizes),
            f"{TABLE_1[label][3]:.1f}" if label in TABLE_1 else "–",
        ]
        for label in labels
    ]
    rows += [
        [
            f"CIFAR-10, {label}",
            *(_cell(_of(kept, f"images-cifar10-{size}", label)) for size in sizes),
            f"{TABLE_1[label][5]:.1f}" if label in TABLE_1 else "–",
        ]
        for label in ("Local", "KT-pFL")
    ]
    return table(["%, images a client trains on", *map(str, sizes), "paper"], rows)


def _code(kept: Kept) -> list[str]:
    """Table 1 as the released code runs it."""
    rows = []
    for label in ("FedMD", "Sim-pFL", "TopK-pFL", "KT-pFL", "KT-pFL, 30 rounds"):
        own = _of(kept, "code-50", label)
        rounds = str(own["rounds"]) if own else "–"
        paper = f"{TABLE_1[label][3]:.1f}" if label in TABLE_1 else "–"
        rows.append([label.partition(",")[0], rounds, _cell(own), paper])
    own = _of(kept, "code-50", "FedMD, 60 rounds")
    rows.append(["FedMD", "60", _cell(own), "–"])
    return table(["%", "rounds", "ours", "paper"], rows)


def _letter_images(kept: Kept) -> list[str]:
    """EMNIST's level over the share of its training images that clients train on."""
    shares = ("100", "50", "25")
    cells = [_cell(_of(kept, f"letters-{share}", "anchor")) for share in shares]
    large = _cell(_of(kept, "emnist-sweeps-30", "anchor"))
    head = ["ten letters, %; images that are trained on", *(f"{share} %" for share in shares)]
    return table([*head, "paper"], [["in small", *cells, "91.8"], ["large", large, "–", "–", ""]])


def _classes(kept: Kept) -> list[str]:
    """EMNIST in Table 2: its classes and its rounds taken apart."""
    rows = [
        [label, *(_cell(_of(kept, f"classes-{c}-{r}", label)) for c in (47, 10) for r in (20, 60))]
        for label in ("FedAvg + FT", "KT-pFL")
    ]
    kinds = [f"{c} classes, {r} rounds" for c in (47, 10) for r in (20, 60)]
    return table(["EMNIST, a DNN, %", *kinds], rows)


def _age(kept: Kept) -> list[str]:
    """Table 2 with 100 clients: old reports or none."""
    titles = {
        "age-10": "ten of 100 a round, 60 rounds",
        "age-100": "all 100 a round, 6 rounds",
    }
    labels = ("FedAvg + FT", "KT-pFL", "KT-pFL, mixture")
    rows = [
        [title, *(_cell(_of(kept, n, label)) for label in labels)] for n, title in titles.items()
    ]
    return table(["%", *labels], rows)


def _public_sizes(kept: Kept) -> list[str]:
    """Table 6's dependence, where clients train less or are scored elsewhere."""
    titles = {
        "small-fmnist-sweeps": "as in Table 6 in small",
        "public-steps-5": "five steps of local training a round",
        "public-steps-1": "one step",
        "public-settled": "scored after the distillation",
        "public-settled-strong": "so, five passes at ten times the rate",
    }
    labels = ("D_r = 10", "D_r = 100", "anchor", "D_r = 1000")
    rows = [
        [title, *(_cell(_of(kept, name, label)) for label in labels)]
        for name, title in titles.items()
    ]
    paper = SWEEPS["table-6"]
    told = [paper["D_r = 500" if label == "anchor" else label][1] for label in labels]
    rows.append(["paper", *(f"{value:.1f}" for value in told)])
    return table(["Fashion-MNIST, %; \\|D_r\\| =", "10", "100", "500", "1000"], rows)


def _touched(kept: Kept) -> list[str]:
    """Table 6 where a round takes as many private images as public ones."""
    sizes, rows = (10, 100, 500, 1000, 3000), []
    for place, data in enumerate(DATA):
        title = TITLES[data] + (", ten letters" if data == "emnist" else "")
        cells = [_cell(_of(kept, f"touched-{data}-{size}", "anchor")) for size in sizes]
        paper = [f"{SWEEPS['table-6'][f'D_r = {size}'][place]:.1f}" for size in sizes]
        rows += [[title, *cells], ["paper", *paper]]
    return table(["%; \\|D_r\\| =", *map(str, sizes)], rows)


def _few(kept: Kept) -> list[str]:
    """Table 6 where clients have few images and the public ones are of their kind."""
    sizes = (10, 500, 3000)
    cells = [_cell(_of(kept, f"few-own-{size}", "KT-pFL")) for size in sizes]
    head = ["Fashion-MNIST, %; \\|D_r\\| =", *map(str, sizes)]
    return table(head, [["53 images a client, public ones of Fashion-MNIST", *cells]])


def _unfused(kept: Kept) -> list[str]:
    """Table 1 in small: what pFedDF owes to averages, and what to predictions."""
    rows = [
        [
            f"{TITLES[data]}, all classes",
            *(_cell(_of(kept, f"{SMALL}{data}-all", label)) for label in ("Local", "KT-pFL")),
            _cell(_of(kept, f"unfused-{data}", "pFedDF")),
            _cell(_of(kept, f"{SMALL}{data}-all", "pFedDF")),
        ]
        for data in DATA
    ]
    return table(["%", "Local", "KT-pFL", "averages alone", "pFedDF"], rows)


def _public(kept: Kept) -> list[str]:
    words = {"mnist": "MNIST", "emnist": "EMNIST", "own": "Fashion-MNIST, held out"}
    rows = []
    for name, (figure, spread) in TABLE_5.items():
        large, small = (_of(kept, f"{size}fmnist-public-{name}", "KT-pFL") for size in ("", SMALL))
        rows.append([words[name], _cell(large), _cell(small), f"{figure} ± {spread}"])
    shorter = _cell(_of(kept, "fmnist-public-mnist-8", "KT-pFL"))
    rows.append(["MNIST, images of the test file, eight rounds", shorter, "–", "–"])
    return table(["public examples", "ours, %", "ours in small, %", "paper, %"], rows)


def _traffic(kept: Kept) -> list[str]:
    """Soft predictions against the parameters that FedDF exchanges between the same networks."""
    rows = []
    for data, kind in MIXED:
        soft, whole = (_of(kept, f"{data}-{kind}", label) for label in ("KT-pFL", "FedDF"))
        if soft is None or whole is None:
            rows.append([f"{TITLES[data]}, {kind}", "–", "–", "–", "–"])
            continue
        rounds = soft["rounds"], whole["rounds"]
        small, large = soft["megabytes"] / rounds[0], whole["megabytes"] / rounds[1]
        rows.append(
            [
                f"{TITLES[data]}, {kind}",
                f"{small:,.2f}",
                f"{soft['public_megabytes']:,.0f}",
                f"{large:,.0f}",
                f"{large / small:,.0f}×",
            ]
        )
    header = ["MB a round", "soft predictions", "public examples, once", "parameters", "ratio"]
    return table(header, rows)


def _curves(
    kept: Kept, columns: list[tuple[str, str]], paper: dict[str, tuple[float, ...]]
) -> list[str]:
    """Show test accuracy over the rounds; what is tuned at the end has no curve."""
    runs = {TITLES[data]: kept.get(f"{data}-{kind}", {"methods": {}}) for data, kind in columns}
    known = {
        (title, label): run["methods"][label]["curve"]
        for label in paper
        for title, run in runs.items()
        if run["methods"].get(label, {}).get("curve")
    }
    marks = sorted({int(mark) for curve in known.values() for mark in curve})
    rows = []
    for (title, label), curve in sorted(known.items(), key=lambda one: list(runs).index(one[0][0])):
        told = [f"{100 * curve[str(m)]:.1f}" if str(m) in curve else "" for m in marks]
        rows.append([title, label, *told])
    header = ["%", "after rounds", *map(str, marks)]
    return table(header, rows or [["–"] * len(header)])


def _order(kept: Kept) -> list[str]:
    """Say in each column which of the paper's methods is best, by ours and by theirs."""
    rows = []
    for title, columns, paper in (("Table 1", MIXED, TABLE_1), ("Table 2", EQUAL, TABLE_2)):
        for place, column in enumerate(columns):
            found = {label: _of(kept, "-".join(column), label) for label in paper}
            ours = {label: mean(own["accuracy"]) for label, own in found.items() if own}
            best = max(ours, key=lambda label: ours[label]) if len(ours) == len(paper) else "–"
            rest = [value for label, value in ours.items() if label != "KT-pFL"]
            gap = f"{ours['KT-pFL'] - max(rest):+.1f}" if best != "–" else "–"
            theirs = max(paper, key=lambda label: paper[label][place])
            rows.append([f"{title}: {TITLES[column[0]]}, {column[1]}", best, gap, theirs])
    return table(["column", "best, ours", "KT-pFL above the best other", "best, paper"], rows)


def _choice(kept: Kept, runs: dict[str, str]) -> list[str]:
    """Show what was tried of each method, on validation data; its best mean is bold."""
    means = _validated({run: kept.get(run, {"methods": {}})["methods"] for run in runs})
    best = _best(means)
    rows: dict[str, list[str]] = {}
    for label, values in sorted(means.items()):
        method, _, setting = label.partition(", ")
        told = f"{setting}: " * bool(setting) + " / ".join(f"{value:.2f}" for value in values)
        mark = "**" * (label == best[method] and bool(setting))
        rows.setdefault(method, []).append(f"{mark}{told}{mark}")
    columns = " / ".join(runs.values())
    return table(
        ["method", f"validation, %: {columns}"],
        [[method, "; ".join(tried)] for method, tried in rows.items()],
    )


def _validated(found: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    """Return every setting's validation accuracy in each run that tried it."""
    labels = dict.fromkeys(label for own in found.values() for label in own)
    return {
        label: [mean(own[label]["validation"]) for own in found.values() if label in own]
        for label in labels
    }


def _best(means: dict[str, list[float]]) -> dict[str, str]:
    """Name each method's best setting; a method is what stands before the first comma."""
    best: dict[str, str] = {}
    for label, values in means.items():
        known = best.setdefault(label.partition(",")[0], label)
        if mean(values) > mean(means[known]):
            best[label.partition(",")[0]] = label
    return best


def _cost(kept: Kept) -> list[str]:
    """Tell each run of a GPU, and all that two cores did in one row."""
    rows, cores = [], []
    for name in sorted(kept):
        methods = kept[name]["methods"].values()
        minutes = sum(method["seconds"] for method in methods) / 60
        devices = ", ".join(sorted({method["device"] for method in methods}))
        if devices == "cpu":
            cores.append(minutes)
        else:
            rows.append([f"`{name}`", str(len(kept[name]["seeds"])), f"{minutes:.1f}", devices])
    rows.append([f"{len(cores)} others, together", "2 or 3", f"{sum(cores):.0f}", "cpu"])
    return table(["run", "seeds", "minutes", "device"], rows)


if __name__ == "__main__":
    run(__doc__, collect, write)
