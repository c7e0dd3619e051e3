"""The outside tables: run them within a time budget, keep figures, fill docs/reproduction/field.md.

    python scripts/reproduce_field.py run SECONDS OUT [--workers 4] [--set KEY=VALUE]
    python scripts/reproduce_field.py keep OUT   # OUT/tables-*.json, run folders in it -> results/
    python scripts/reproduce_field.py page       # results/ -> tables of the page

`keep` also takes the folder of `idiolect compare experiments/field/survive-fmnist.toml`.

`run` goes through all methods of a table in stages of more and more rounds, so that whenever it is
cut, all methods have about as many; each stage goes on from the checkpoint of the one before.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from reproduction import RESULTS, fill, table

from idiolect.data.sources import load
from idiolect.experiment.load import load_experiment
from idiolect.experiment.repro.index import (
    BEST_TEST_ROUND,
    Cell,
    experiments_folder,
    items,
    name_of,
)
from idiolect.experiment.run import run_experiment

ROOT = Path(__file__).resolve().parent.parent
FIGURES = RESULTS
PAGE = ROOT / "docs" / "reproduction" / "field.md"

# From cheap to dear; methods that train one global model need the most rounds.
GLOBAL = ("FedAvg", "FedProx")
CHEAP = ("Local", "FedPer", "FedRep", "FedProto", "FedRoD", "FedBABU", "FedALA", "FedAMP")
DEAR = ("Per-FedAvg", "FedDBE", "FedCP", "GPFL", "Ditto", "APFL", "pFedMe")
TOGETHER = {"FedAvg": ("FedAvg", "FedAvg + FT")}  # trained once
TUNED_ONCE = ("FedAvg", "FedBABU")  # fine-tuned after the last round only, as in PFLlib
TABLES = {"pfllib": "pfllib-fmnist", "fedala": "fedala-cifar10", "pfedkdh": "pfedkdh"}
SURVIVE = "pfllib-survive-digits"


@dataclass(frozen=True)
class Line:
    """One method of one run, up to so many rounds."""

    run: str
    label: str
    rounds: int

    @property
    def name(self) -> str:
        return f"{self.run}--{self.label.replace(' ', '')}"

    def mark(self, runs: Path, what: str) -> Path:
        return runs / "marks" / f"{self.name}-{self.rounds}.{what}"


def fmnist(kind: str, labels: tuple[str, ...], rounds: int) -> list[Line]:
    """One division of Fashion-MNIST, a method after the other."""
    lines = [Line(f"pfllib-fmnist-{kind}", label, rounds) for label in labels]
    return [*lines, Line(f"pfllib-fmnist-fomo-{kind}", "FedFomo", rounds)]


def whole(run: str, rounds: int) -> list[Line]:
    """Return a line for each method of a run; what is trained with another has none."""
    labels = [one.label_or_name for one in loaded(run, []).methods]
    return [Line(run, label, rounds) for label in labels if label != "FedAvg + FT"]


def plan(cifar: bool, only: list[str]) -> list[Line]:
    """Everything, or the lines named, in the order in which it is worth having."""
    everyone = (*GLOBAL, *CHEAP, *DEAR)
    kinds = ("pat", "dir")
    lines = [
        *fmnist("pat", everyone, 30),
        *whole("pfedkdh-fmnist-0.1", 50),
        *fmnist("dir", everyone, 30),
        *(Line(f"pfllib-fmnist-{kind}", label, 300) for label in GLOBAL for kind in kinds),
        *whole("pfedkdh-fmnist-0.05", 50),
        *whole("pfedkdh-fmnist-0.5", 50),
        *(Line(f"pfllib-fmnist-{kind}", label, 600) for label in GLOBAL for kind in kinds),
    ]
    if cifar:
        lines += [*whole("fedala-cifar10", 30), *whole("fedala-cifar10", 100)]
    for rounds in (100, 300, 1000, 2000):
        lines += [one for kind in kinds for one in fmnist(kind, everyone, rounds)]
    lines = [one for n, one in enumerate(lines) if one not in lines[:n]]
    return [one for one in lines if not only or one.name in only]


def loaded(run: str, changes: list[str]) -> Any:
    named = {name_of(one): one for item in TABLES.values() for one in items()[item][1].experiments}
    return load_experiment(experiments_folder() / named[run].file, [*named[run].set, *changes])


def work(args: argparse.Namespace) -> None:
    """Take the next line that nobody has taken, until the time is over."""
    lines = plan(args.cifar, args.only)
    while time.time() < args.end - 5:
        ready = (one for one in lines if takes(one, lines, args))
        line = next(ready, None)
        if line is None:
            time.sleep(1)
            if all(one.mark(args.runs, "taken").exists() for one in lines):
                return
            continue
        try:
            run_line(line, args)
        except KeyboardInterrupt:
            return
        except Exception as error:  # one method's failure must not cost the others their time
            line.mark(args.runs, "failed").write_text(f"{type(error).__name__}: {error}")
            print(f"{line}: {type(error).__name__}: {error}", flush=True)


def takes(line: Line, lines: list[Line], args: argparse.Namespace) -> bool:
    """Take a line whose stage before is done and whose end is likely within the time."""
    if line.mark(args.runs, "taken").exists():
        return False
    before = [one for one in lines if one.name == line.name and one.rounds < line.rounds]
    if before:
        last = max(before, key=lambda one: one.rounds)
        if not last.mark(args.runs, "done").exists():
            return False
        pace = float(last.mark(args.runs, "done").read_text())
        if time.time() + 1.2 * pace * (line.rounds - last.rounds) + 8 > args.end:
            return False
    try:
        line.mark(args.runs, "taken").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def run_line(line: Line, args: argparse.Namespace) -> None:
    begun = time.time()
    scored = ["evaluate.personal=auto"] if line.label in TUNED_ONCE else []
    experiment = loaded(line.run, [f"rounds={line.rounds}", *scored, *args.set])
    known = [one.label_or_name for one in experiment.methods]
    labels = [one for one in TOGETHER.get(line.label, (line.label,)) if one in known]
    folder = args.runs / line.name
    content, _ = run_experiment(
        experiment, folder, resume=(folder / "experiment.toml").exists(), only=labels
    )
    own = content["methods"][labels[0]]
    kept = {
        "run": line.run,
        "federation": content["data"]["federations"][0],
        "seeds": content["seeds"],
        "versions": content["versions"],
        "methods": {label: summary(content["methods"][label]) for label in labels},
    }
    (args.out / f"tables-{line.name}.json").write_text(json.dumps(kept) + "\n")
    pace = own["speed"]["seconds"] / own["rounds"]
    line.mark(args.runs, "done").write_text(f"{pace:.4f}")
    print(f"{line}: {time.time() - begun:.0f} s, {pace:.3f} s a round", flush=True)


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


def run(args: argparse.Namespace) -> None:
    """Start the workers and wait for them."""
    (args.runs / "marks").mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    for taken in (args.runs / "marks").glob("*.taken"):
        if not taken.with_suffix(".done").exists():  # of a run that was cut
            taken.unlink()
    end = time.time() + args.seconds
    for name in {loaded(one.run, args.set).data.source for one in plan(args.cifar, args.only)}:
        load(name)  # decoded once, before the workers want it
    own = [sys.executable, __file__, "work", str(end), str(args.out)]
    own += ["--runs", str(args.runs), *(["--cifar"] if args.cifar else [])]
    own += [word for one in args.set for word in ("--set", one)]
    own += [word for one in args.only for word in ("--only", one)]
    workers = [subprocess.Popen(own) for _ in range(args.workers)]
    for worker in workers:
        try:
            worker.wait(max(end - time.time(), 1))
        except subprocess.TimeoutExpired:
            worker.terminate()


# Figures and page.


def keep(args: argparse.Namespace) -> None:
    """Put the figures of a budgeted run, of run folders or of a comparison into results/."""
    found: dict[str, dict[str, Any]] = {}
    if (args.out / "result.json").exists():
        found[SURVIVE] = tuned(json.loads((args.out / "result.json").read_text()))
    for path in sorted(args.out.glob("tables-*.json")):
        one = json.loads(path.read_text())
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
    for key in TABLES:
        own = {run: held for run, held in found.items() if run.startswith(key)}
        path = FIGURES / f"{key}.json"
        if own:
            kept = json.loads(path.read_text()) if path.exists() else {}
            for run, held in own.items():  # methods of runs of the same name join
                held["methods"] = kept.get(run, {}).get("methods", {}) | held["methods"]
            path.write_text(json.dumps({**kept, **own}, sort_keys=True) + "\n")


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


def rows_of(item: str, key: str, prefix: str, run: str) -> tuple[list[list[str]], str]:
    """Return a table's rows of one run, and how many cells are within a point."""
    _, found = items()[item]
    mine = [cell for cell in found.cells if cell.what.startswith(prefix)]
    known = {cell.label for cell in mine}
    extra = [
        Cell(f"{prefix}{label} (not in the table)", run, label, f"personal{BEST_TEST_ROUND}", 0.0)
        for label in ("Local", "FedAvg + FT")
        if label not in known
    ]
    held, rows, near, measured = figures(key), [], 0, 0
    for cell in [*mine, *extra]:
        theirs = scores(held, cell, cell.model)
        own = held.get(cell.run, {}).get("methods", {}).get(cell.label, {})
        if theirs and cell.paper:
            measured += 1
            near += 100 * mean(theirs) >= cell.paper - 1
        last = scores(held, cell, cell.model.removesuffix(BEST_TEST_ROUND))
        cells = [shown(theirs), f"{cell.paper:.2f}" if cell.paper else "", shown(last)]
        rows.append([cell.what.removeprefix(prefix), *cells, str(own.get("rounds", "-"))])
    return rows, _within(near, measured)


def _within(near: int, cells: int) -> str:
    if not cells:
        return "Not measured yet."
    return f"{near} of {cells} cells are within one point of the table or above."


def columns_of(key: str) -> tuple[list[list[str]], str]:
    """Return rows of pFedKDH's table, ours and the paper's, and how many are within a point."""
    _, found = items()["pfedkdh"]
    held = figures(key)
    cells = {(cell.label, cell.run): cell for cell in found.cells if cell.run in held}
    runs = list(dict.fromkeys(run for _, run in cells))
    rows, near = [[*runs]], 0
    for label in dict.fromkeys(label for label, _ in cells):
        row = [label]
        for run in runs:
            own = scores(held, cells[label, run], cells[label, run].model)
            near += bool(own) and 100 * mean(own or [0]) >= cells[label, run].paper - 1
            row.append(f"{shown(own)} / {cells[label, run].paper:.2f}")
        rows.append(row)
    return rows, _within(near, len(cells))


def wins(item: str, key: str) -> str:
    """Count the paper's wins, pair by pair, that ours repeat: by its scoring, by the last round."""
    _, found = items()[item]
    held, printed, same, last = figures(key), 0, 0, 0
    for one in found.cells:
        for other in found.cells:
            if one.what.split(",")[0] != other.what.split(",")[0] or one.paper <= other.paper:
                continue
            ours, theirs = (
                [figure(held, cell, by) for by in (True, False)] for cell in (one, other)
            )
            if None not in (*ours, *theirs):
                printed += 1
                same += ours[0] > theirs[0]
                last += ours[1] > theirs[1]
    if not printed:
        return "Not measured yet."
    return (
        f"Of the {printed} wins of one method over another that the table prints, {same} are found "
        f"in ours by the same scoring and {last} in the last round."
    )


def figure(held: dict[str, Any], cell: Cell, best: bool) -> float | None:
    model = cell.model if best else cell.model.removesuffix(BEST_TEST_ROUND)
    found = scores(held, cell, model)
    return mean(found) if found else None


def page(_: argparse.Namespace) -> None:
    """Fill the tables of the page."""
    heads = ["%", "ours, best test round", "paper", "ours, last round", "rounds"]
    parts = {}
    for kind in ("pat", "dir"):
        rows, near = rows_of("pfllib-fmnist", "pfllib", f"{kind}, ", f"pfllib-fmnist-{kind}")
        parts[f"pfllib {kind}"] = [*table(heads, rows), "", near]
    rows, near = rows_of("fedala-cifar10", "fedala", "", "fedala-cifar10")
    parts["fedala"] = [*table(heads, rows), "", near]
    (runs, *rows), near = columns_of("pfedkdh")
    columns = [run.removeprefix("pfedkdh-").replace("-", ", alpha ") for run in runs]
    parts["pfedkdh"] = [*table(["ours / paper, %", *columns], rows), ""] if rows else []
    parts["pfedkdh"].append(near)
    parts["wins"] = [wins("pfllib-fmnist", "pfllib")]
    parts["survivors"] = survivors()
    fill(PAGE, parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    for name in ("run", "work"):
        one = commands.add_parser(name)
        one.add_argument("seconds" if name == "run" else "end", type=float)
        one.add_argument("out", type=Path)
        one.add_argument("--workers", type=int, default=4)
        one.add_argument("--runs", type=Path, default=Path("/tmp/field-runs"))
        one.add_argument("--cifar", action="store_true", help="FedALA's table too")
        one.add_argument("--set", action="append", default=[])
        one.add_argument("--only", action="append", default=[], help="pfllib-fmnist-pat--FedALA")
    commands.add_parser("keep").add_argument("out", type=Path)
    commands.add_parser("page")
    args = parser.parse_args()
    {"run": run, "work": work, "keep": keep, "page": page}[args.what](args)


if __name__ == "__main__":
    main()
