"""The outside tables: keep what was measured, and fill docs/reproduction/field.md with it.

    python scripts/reproduce_field.py keep OUT        # of run_field.py, or a folder of run folders
    python scripts/reproduce_field.py choice RUN ...  # of experiments/field/pfedkdh-open.toml
    python scripts/reproduce_field.py page            # results/ -> tables of the page

`keep` also takes the folder of `idiolect compare experiments/field/survive-fmnist.toml`. Of a
method that is kept already, the figures of more rounds stay.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from reproduction import RESULTS, curves, fill, table

from idiolect.experiment.repro.index import items
from idiolect.experiment.repro.items import Cell
from idiolect.experiment.repro.seed_figures import BEST_TEST_ROUND

ROOT = Path(__file__).resolve().parent.parent
FIGURES = RESULTS
PAGE = ROOT / "docs" / "reproduction" / "field.md"

GLOBAL = ("FedAvg", "FedProx", "FedGen")
KDH_ROUNDS = 50
LEAST = 10  # rounds: a line that was cut before is not kept
MILESTONES = (30, 100, 300, 1000)  # rounds by which the best test round so far is kept
TABLES = {"pfllib": "pfllib-fmnist", "fedala": "fedala-cifar10", "pfedkdh": "pfedkdh"}
PLAIN = "pfedkdh-plain"  # pFedKDH's runs without momentum, each method with its own weights
CHOICE = "pfedkdh-choice"  # validation accuracy of settings that pFedKDH's text leaves open
CHOSEN_BY = range(6, 11)  # rounds
SURVIVE = "pfllib-survive-digits"


def key_of(name: str) -> str:
    """Return the file of results/ that a run, or a table, belongs to."""
    return max((key for key in (*TABLES, PLAIN) if name.startswith(key)), key=len, default="")


def summary(own: dict[str, Any]) -> dict[str, Any]:
    """Return each seed's figures of a method: last round, and best test round."""
    models = {
        model: {
            name: [round(seed["models"][model][name], 5) for seed in own["seeds"]]
            for name in ("mean", "weighted_mean")
        }
        for model in own["headline"]
    }
    for model, best in own.get("best_test_round", {}).items():
        models[model + BEST_TEST_ROUND] = {
            "mean": [round(value, 5) for value in best["weighted_mean"]],
            "round": best["round"],
        }
    return {
        "models": models,
        "rounds": own["rounds"],
        "seconds": round(own["speed"]["seconds"], 1),
    }


# Figures and page.


def keep(args: argparse.Namespace) -> None:
    """Put the figures of a budgeted run, of run folders or of a comparison into results/."""
    found: dict[str, dict[str, Any]] = {}
    if (args.out / "result.json").exists():
        found[SURVIVE] = tuned(json.loads((args.out / "result.json").read_text()))
    path = args.out / "tables.json"
    for one in json.loads(path.read_text())["lines"] if path.exists() else ():
        key = one.pop("run")
        found.setdefault(key, {**one, "methods": {}})["methods"] |= one["methods"]
    for folder in sorted(path.parent for path in args.out.glob("*/result.json")):
        content = json.loads((folder / "result.json").read_text())
        found[folder.name] = {
            "federation": content["data"]["federations"][0],
            "seeds": content["seeds"],
            "versions": content["versions"],
            "methods": {label: summary(own) for label, own in content["methods"].items()},
        }
    for key in (*TABLES, PLAIN):
        own = {run: held for run, held in found.items() if held["methods"] and key_of(run) == key}
        for one in (one for held in own.values() for one in held["methods"].values()):
            one.pop("paces", None)
        path = FIGURES / f"{key}.json"
        if own:
            kept = json.loads(path.read_text()) if path.exists() else {}
            for run, held in own.items():
                held["methods"] = joined(kept.get(run, {}).get("methods", {}), held["methods"])
            path.write_text(json.dumps({**kept, **own}, sort_keys=True) + "\n")


def keep_choice(args: argparse.Namespace) -> None:
    """Keep validation curves of settings that a text leaves open, by data set; no test score."""
    path = FIGURES / f"{CHOICE}.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    for folder in args.runs:
        content = json.loads((folder / "result.json").read_text())
        found = curves(folder / "metrics.parquet", "val")
        kept[content["data"]["source"]] = {
            "federation": content["data"]["federations"][0],
            "seeds": content["seeds"],
            "versions": content["versions"],
            "methods": {label: list(own["global"].values()) for label, own in found.items()},
        }
    path.write_text(json.dumps(kept, sort_keys=True) + "\n")


def joined(kept: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Join the methods of two runs of the same name; of one that both have, the longer."""
    longer = {
        label: own
        for label, own in new.items()
        if own["rounds"] >= (kept[label]["rounds"] if label in kept else LEAST)
    }
    return {**kept, **longer}


def tuned(content: dict[str, Any]) -> dict[str, Any]:
    """Return what a comparison with equal tuning found: figures, rates, and every pair's p."""
    from idiolect.analysis.comparison import compare

    return {
        "federation": content["data"]["federations"][0],
        "seeds": content["seeds"],
        "versions": content["versions"],
        "methods": {
            label: {**summary(own), "lr": own["settings"]["lr"]}
            for label, own in content["methods"].items()
        },
        "pairs": [[one.better, one.worse, one.p_holm] for one in compare(content).pairs],
    }


def survivors() -> list[str]:
    """Lay out the comparison with equal tuning, and count what is left of the table's wins."""
    held = figures("pfllib").get(SURVIVE)
    if held is None:
        return []
    cells = items()["pfllib-fmnist"][1].cells
    printed = {cell.label: cell for cell in cells if cell.what.startswith("pat")}
    last: dict[str, float] = {}
    rows = []
    for label, own in held["methods"].items():
        cell = printed.get(label)
        model = cell.model.removesuffix(BEST_TEST_ROUND) if cell else "personal"
        last[label] = mean(own["models"][model]["mean"])
        best = own["models"][model + BEST_TEST_ROUND]["mean"]
        paper = f"{cell.paper:.2f}" if cell else ""
        rows.append([label, f"{own['lr']:g}", shown([last[label]]), shown(best), paper])
    rows.sort(key=lambda row: -last[row[0]])
    pairs = [
        (one, other)
        for one in last
        for other in last
        if one in printed and other in printed and printed[one].paper > printed[other].paper
    ]
    clear = {(better, worse) for better, worse, p in held["pairs"] if p is not None and p < 0.05}
    personal = [pair for pair in pairs if not {*GLOBAL} & {*pair}]

    def left(some: list[tuple[str, str]]) -> str:
        same = sum(last[one] > last[other] for one, other in some)
        sure = sum(pair in clear for pair in some)
        turned = sum((other, one) in clear for one, other in some)
        return f"{same} have the same sign, {sure} beyond chance, and {turned} are reversed so"

    heads = ["%", "rate chosen", "last round", "best test round", "printed for Fashion-MNIST"]
    return [
        *table(heads, rows),
        "",
        f"Of the {len(pairs)} wins that the table prints between these methods, {left(pairs)} "
        f"(Holm's p < 0.05, paired over clients). Of the {len(personal)} between personal methods, "
        f"{left(personal)}.",
    ]


def figures(key: str) -> dict[str, Any]:
    path = FIGURES / f"{key}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def shown(values: list[float] | None, digits: int = 2) -> str:
    if not values:
        return "-"
    percent = [100 * value for value in values]
    spread = f" ± {stdev(percent):.{digits}f}" if len(percent) > 1 else ""
    return f"{mean(percent):.{digits}f}{spread}"


def scores(held: dict[str, Any], cell: Cell, model: str) -> list[float] | None:
    own = held.get(cell.run, {}).get("methods", {}).get(cell.label)
    return own["models"].get(model, {}).get("mean") if own else None


def rows_of(item: str, key: str, prefix: str, run: str) -> list[str]:
    """Lay out a table's rows of one run, and say how near they are and who is not."""
    _, found = items()[item]
    mine = [cell for cell in found.cells if cell.what.startswith(prefix)]
    known = {cell.label for cell in mine}
    extra = [
        Cell(f"{prefix}{label} (not in the table)", run, label, f"personal{BEST_TEST_ROUND}", 0.0)
        for label in ("Local", "FedAvg + FT")
        if label not in known
    ]
    held, rows, far, measured = figures(key), [], [], 0
    for cell in [*mine, *extra]:
        best = scores(held, cell, cell.model)
        own = held.get(cell.run, {}).get("methods", {}).get(cell.label, {})
        what, model = cell.what.removeprefix(prefix), cell.model.removesuffix(BEST_TEST_ROUND)
        if best and cell.paper:
            measured += 1
            if (gap := 100 * mean(best) - cell.paper) < -1:
                far.append(f"{what} {gap:.1f}{_rise(own, model)}")
        last = scores(held, cell, model)
        by = own.get("curve", {}).get(model, {}).get("best_by", {})
        cells = [shown(best), f"{cell.paper:.2f}" if cell.paper else "", shown(last)]
        rows.append(
            [what, *cells, str(own.get("rounds", "-"))]
            + [shown(by.get(str(most))) for most in MILESTONES]
            + [own.get("ended", "-")]
        )
    heads = ["%", "ours, best test round", "paper", "ours, last round", "rounds"]
    used = [n for n in range(len(rows[0])) if n < len(heads) or any(row[n] != "-" for row in rows)]
    heads += [*(f"best by round {most}" for most in MILESTONES), "ended"]
    words = [_within(measured - len(far), measured)]
    if far:
        words += [f"The others, in points: {'; '.join(far)}."]
    words += _beside_local(held, [cell for cell in mine if cell.label not in GLOBAL], run)
    rows = [[row[n] for n in used] for row in rows]
    return [*table([heads[n] for n in used], rows), "", " ".join(words), *_made(held, run)]


def _beside_local(held: dict[str, Any], cells: list[Cell], run: str) -> list[str]:
    """Count the personal methods above training alone, after as many rounds as both have."""
    alone = Cell("Local", run, "Local", f"personal{BEST_TEST_ROUND}", 0.0)
    above = []
    for best in (True, False):
        pairs = [
            [figure(held, one, best, min(rounds_of(held, cell), rounds_of(held, alone)))
             for one in (cell, alone)] for cell in cells if rounds_of(held, cell)
        ]  # fmt: skip
        known = [(own, local) for own, local in pairs if own is not None and local is not None]
        above.append(f"{sum(own > local for own, local in known)} of {len(known)}")
    if not known:
        return []
    return [
        f"Above Local after as many rounds are {above[0]} personal methods by best test round and "
        f"{above[1]} by the last."
    ]


def _rise(own: dict[str, Any], model: str) -> str:
    """Say by how much the best test round rose in the second half of the rounds."""
    curve = own.get("curve", {}).get(model)
    if not curve:
        return f" after {own['rounds']} rounds"
    if own.get("ended") == "flat":
        return f" after {own['rounds']} rounds, flat"
    half = [n for n, number in enumerate(curve["round"]) if 2 * number <= own["rounds"]]
    line = curve["weighted_mean"]
    rise = 100 * (max(line) - max(line[n] for n in half)) if half else 0
    return f" after {own['rounds']} rounds, of which the second half brought {rise:.1f}"


def _made(held: dict[str, Any], run: str) -> list[str]:
    """Say on what the curves were made."""
    own = [one for one in held.get(run, {}).get("methods", {}).values() if "pace" in one]
    if not own:
        return []
    places = sorted({f"{one['device']}, {one['precision']}" for one in own})
    paces, firsts = sorted(one["pace"] for one in own), sorted(one["first"] for one in own)
    return [
        "",
        f"Made on {'; '.join(places)}, {own[0]['workers']} lines at a time: {paces[0]:.2g} to "
        f"{paces[-1]:.2g} s a round of all splits of a line, in the second half of its rounds; the "
        f"first two took {firsts[0]:.0f} to {firsts[-1]:.0f} s.",
    ]


def _within(near: int, cells: int) -> str:
    if not cells:
        return "Not measured yet."
    return f"{near} of {cells} cells are within one point of the table or above."


def columns_of(key: str) -> list[str]:
    """Lay out pFedKDH's table, ours and the paper's; only cells of all 50 rounds are counted."""
    _, found = items()["pfedkdh"]
    held = figures(key)
    cells = {(cell.label, cell.run): cell for cell in found.cells if cell.run in held}
    runs = list(dict.fromkeys(run for _, run in cells))
    rows, far, near, whole = [], [], 0, 0
    for label in dict.fromkeys(label for label, _ in cells):
        row = [label]
        for run in runs:
            cell = cells[label, run]
            if label not in held[run]["methods"]:
                row.append(f"- / {cell.paper:.2f}")
                continue
            own = scores(held, cell, cell.model) or []
            rounds = held[run]["methods"].get(label, {}).get("rounds", KDH_ROUNDS)
            short = f" ({rounds} rounds)" if rounds < KDH_ROUNDS else ""
            if own and not short:
                whole += 1
                gap = 100 * mean(own) - cell.paper
                near += gap >= -1
                far += [f"{cell.what} {gap:.1f}"] if gap < -1 else []
            row.append(f"{shown(own)}{short} / {cell.paper:.2f}")
        rows.append(row)
    if not rows:
        return [_within(0, 0)]
    known = [label for run in runs for label in held[run]["methods"]]
    for label in dict.fromkeys(one for one in known if (one, runs[0]) not in cells):
        like = [replace(cells[method_of(label), run], label=label) for run in runs]
        row = [shown(scores(held, cell, cell.model)) for cell in like]
        place = next(n for n, own in enumerate(rows, 1) if own[0] == method_of(label))
        rows.insert(place, [f"{label} (not in the table)", *row])
    columns = [run.removeprefix("pfedkdh-").replace("-", ", alpha ") for run in runs]
    made = [line for run in runs[:1] for line in _made(held, run)]
    words = [_within(near, whole)]
    if far:
        words.append(f"The others, in points: {'; '.join(far)}.")
    return [*table(["ours / paper, %", *columns], rows), "", " ".join(words), *made]


def choice() -> list[str]:
    """Lay out the validation accuracy by which the settings that a text leaves open were chosen."""
    held = figures(CHOICE)
    rows: dict[str, list[float]] = {}
    for own in held.values():
        for label, line in own["methods"].items():
            rows.setdefault(label, []).append(mean(line[n - 1] for n in CHOSEN_BY))
    if not rows:
        return [_within(0, 0)]
    best = max(rows, key=lambda label: mean(rows[label]))
    lines = []
    for label, own in sorted(rows.items()):
        setting = label.removeprefix("FedAvg, ").replace("FedAvg", "neither")
        told = f"{shown([mean(own)])}{', chosen' if label == best else ''}"
        lines.append([setting, *(shown([one]) for one in own), told])
    return table(["validation accuracy, %", *held, "mean"], lines)


def plainly() -> list[str]:
    """Lay out pFedKDH's runs without momentum beside how many cells are near with it."""
    cells = {(cell.label, cell.run): cell for cell in items()["pfedkdh"][1].cells}
    chosen, held = figures("pfedkdh"), figures(PLAIN)
    runs = [run for run in dict.fromkeys(run for _, run in cells) if plain_run(run) in held]
    if not runs:
        return [_within(0, 0)]
    known = dict.fromkeys(label for run in runs for label in held[plain_run(run)]["methods"])
    printed = list(dict.fromkeys(label for label, _ in cells))
    rows, sums = [], [0, 0, 0]
    for label in sorted(known, key=lambda one: (printed.index(method_of(one)), one)):
        row, near = [label], [0, 0, 0]  # plain, chosen, of how many that have both figures
        for run in runs:
            cell = replace(cells[method_of(label), run], label=label)
            own = scores(held, replace(cell, run=plain_run(run)), cell.model)
            row.append(shown(own))
            pair = [one for one in (own, scores(chosen, cell, cell.model)) if one]
            if len(pair) == 2:
                within = [100 * mean(one) >= cell.paper - 1 for one in pair]
                near = [n + more for n, more in zip(near, (*within, 1), strict=True)]
        rows.append([*row, "{}; {} of {}".format(*near) if near[2] else "-"])
        sums = [n + more for n, more in zip(sums, near, strict=True)]
    columns = [run.removeprefix("pfedkdh-").replace("-", ", alpha ") for run in runs]
    heads = ["without momentum, %", *columns, "near; as chosen"]
    words = (
        f"Of these {sums[2]} cells that have both figures {sums[0]} are within one point of the "
        f"table or above without momentum, {sums[1]} as chosen."
    )
    return [*table(heads, rows), "", words, *_made(held, plain_run(runs[0]))]


def plain_run(run: str) -> str:
    """Return the run without momentum that one of pFedKDH's is to be compared with."""
    return run.replace("pfedkdh", PLAIN)


def method_of(label: str) -> str:
    """Return the printed method that a label is a form of: "FedAvg, clients alike"."""
    return label.partition(",")[0]


def wins() -> list[str]:
    """Count each paper's wins, pair by pair, that ours repeat: by its scoring, by the last round.

    Only cells that ours have; each pair after as many rounds as both have.
    """
    rows = []
    for key, item in TABLES.items():
        _, found = items()[item]
        held, final = figures(key), key == "pfedkdh"
        whole = printed_wins(found.cells)
        for told, pairs in (("all", whole), ("between personal methods", personal(whole))):
            same = last = measured = 0
            for one, other in pairs:
                most = min(rounds_of(held, cell) for cell in (one, other))
                if final and most < KDH_ROUNDS:
                    continue
                ours, theirs = (
                    [figure(held, cell, by, most) for by in (True, False)] for cell in (one, other)
                )
                if None not in (*ours, *theirs):
                    measured += 1
                    same += ours[0] > theirs[0]
                    last += ours[1] > theirs[1]
            counts = [str(len(pairs)), str(measured), str(same), "the same" if final else str(last)]
            rows.append([f"{item}, {told}", *(counts if measured else [counts[0], "0", "-", "-"])])
    heads = ["wins of one method over another", "printed", "of which ours have both",
             "found by their scoring", "found in the last round"]  # fmt: skip
    return table(heads, rows)


def printed_wins(cells: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    """List the pairs of one split of which the table has the first higher."""

    def split(cell: Cell) -> str:
        return cell.what.rpartition(",")[0]

    return [
        (one, other)
        for one in cells
        for other in cells
        if split(one) == split(other) and one.paper > other.paper
    ]


def personal(pairs: Sequence[tuple[Cell, Cell]]) -> list[tuple[Cell, Cell]]:
    return [pair for pair in pairs if not {*GLOBAL} & {cell.label for cell in pair}]


def together() -> list[str]:
    """Count the cells of all tables: within a point or above, further off, not measured."""
    rows, sums = [], [0, 0, 0]
    for key, item in TABLES.items():
        held, cells = figures(key), items()[item][1].cells
        counts = [0, 0, 0]
        for cell in cells:
            own = scores(held, cell, cell.model)
            if not own or (key == "pfedkdh" and rounds_of(held, cell) < KDH_ROUNDS):
                counts[2] += 1
            else:
                counts[100 * mean(own) < cell.paper - 1] += 1
        sums = [a + b for a, b in zip(sums, counts, strict=True)]
        rows.append([f"`{item}`", *map(str, counts)])
    rows.append(["all", *map(str, sums)])
    heads = ["cells", "within one point of the table or above", "further below", "not measured"]
    words = []
    if measured := sums[0] + sums[1]:
        words = [
            "",
            f"That is {100 * sums[0] / measured:.0f} % of the {measured} cells that ours have.",
        ]
    return [*table(heads, rows), *words]


def rounds_of(held: dict[str, Any], cell: Cell) -> int:
    own = held.get(cell.run, {}).get("methods", {}).get(cell.label, {})
    return int(own.get("rounds", 0))


def figure(held: dict[str, Any], cell: Cell, best: bool, most: int) -> float | None:
    """Return a cell's figure after so many rounds, as far as its curve tells."""
    model = cell.model.removesuffix(BEST_TEST_ROUND)
    found = scores(held, cell, cell.model if best else model)
    own = held.get(cell.run, {}).get("methods", {}).get(cell.label, {})
    curve = own.get("curve", {}).get(model)
    if not found or not curve or most >= own["rounds"]:
        return mean(found) if found else None
    until = [n for n, number in enumerate(curve["round"]) if number <= most] or [0]
    return max(curve["weighted_mean"][n] for n in until) if best else curve["mean"][until[-1]]


def page(_: argparse.Namespace) -> None:
    """Fill the tables of the page."""
    parts = {
        f"pfllib {kind}": rows_of("pfllib-fmnist", "pfllib", f"{kind}, ", f"pfllib-fmnist-{kind}")
        for kind in ("pat", "dir")
    }
    parts["fedala"] = rows_of("fedala-cifar10", "fedala", "", "fedala-cifar10")
    parts["pfedkdh"] = columns_of("pfedkdh")
    parts["pfedkdh choice"] = choice()
    parts["pfedkdh plain"] = plainly()
    parts["together"] = together()
    parts["wins"] = wins()
    parts["survivors"] = survivors()
    fill(PAGE, parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("keep").add_argument("out", type=Path)
    commands.add_parser("choice").add_argument("runs", nargs="+", type=Path)
    commands.add_parser("page")
    args = parser.parse_args()
    {"keep": keep, "choice": keep_choice, "page": page}[args.what](args)


if __name__ == "__main__":
    main()
