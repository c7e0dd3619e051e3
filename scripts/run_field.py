"""Train the outside tables within a time; `reproduce_field.py keep OUT` then takes the figures.

    python scripts/run_field.py SECONDS OUT [--workers 2] [--precision tf32] [--only WORD]
        [--rounds N] [--set KEY=VALUE]
    python scripts/run_field.py plan             # what would be trained, in order
    python scripts/run_field.py costs OUT        # where the seconds of such a run went

A line is one method of one table, on all of the table's splits at once: the splits are runs of one
simulation, as seeds are, each with its own server, so a line's first seconds (choosing kernels,
recording the round) are spent once for all of its cells.

experiments/field/lines.txt lists the lines, what gives most cells for a second first, with the
rounds of each. A line ends earlier when each of its splits has the table's figure, or is flat: its
best test round has not risen by 0.1 point in the second half of the rounds. At the end of the time
all are cut; one of a table of the last round, which cannot have all its rounds any more, is left
out. Both rules look at test data. By the tables' own scoring, which is the best test round, that
can only lower our figure, since more rounds can only raise a maximum; our last-round figure is then
of a round that was not fixed beforehand. The file records how each line ended.

Scoring takes at most a tenth of the time where it can: the more it costs, the fewer rounds are
scored. OUT/tables.json is written anew all the time with the curves up to then. Called again on the
same machine it goes on with the lines that have not ended, each from its first round; on a bare one
with those that results/ does not have with as many rounds.
"""

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from reproduce_field import MILESTONES, TABLES, figures, key_of, method_of

from idiolect.data import Dataset, load
from idiolect.data.sources import cache_root
from idiolect.engine.evaluation import ClientScores
from idiolect.engine.outcome import BASELINE
from idiolect.engine.rounds import Simulation
from idiolect.experiment.build import SharedParts, build_job, build_shared, describe
from idiolect.experiment.job import SimulatedJob
from idiolect.experiment.load import load_experiment
from idiolect.experiment.repro.index import BEST_TEST_ROUND, experiments_folder, items, name_of
from idiolect.experiment.schema import Experiment
from idiolect.experiment.train import planned_work
from idiolect.results.document import versions

# One global network needs many rounds to be flat.
LONG = ("FedAvg", "FedProx")
TRAINED_AS = {"FedAvg": "FedAvg + FT"}  # the same rounds, and fine-tuned after the last one
TUNED_ONCE = ("FedAvg + FT", "FedBABU")  # not at every point of the curve, as in PFLlib
ALPHAS = ("0.05", "0.1", "0.5")
FINAL = "pfedkdh"  # whose figures are of the last round alone
# The splits of a table that one simulation trains together: all that have images of one size, as
# what a line does once, recording a round above all, takes no longer for more of them.
SPLITS = {
    "pfllib-fmnist": ("pfllib-fmnist-pat", "pfllib-fmnist-dir"),
    "pfllib-fmnist-fomo": ("pfllib-fmnist-fomo-pat", "pfllib-fmnist-fomo-dir"),
    "fedala-cifar10": ("fedala-cifar10",),
    "fedala-cifar10-fomo": ("fedala-cifar10-fomo",),
    "pfedkdh-grey": tuple(f"pfedkdh-{own}-{a}" for own in ("mnist", "fmnist") for a in ALPHAS),
    "pfedkdh-cifar10": tuple(f"pfedkdh-cifar10-{a}" for a in ALPHAS),
}
LINES = Path(__file__).resolve().parent.parent / "experiments" / "field" / "lines.txt"
# What a line takes, reckoned: seconds of a round of FedAvg, or of one as long, in one process that
# has an H200 for itself (TF32), and how many of them a round of others takes.
PACES = {"pfllib": 0.2, "fedala": 0.13, "pfedkdh-grey": 0.35, "pfedkdh-cifar10": 0.4}
PASSES = {"FedProx": 1.5, "FedRep": 1.3, "FedCP": 3.2, "GPFL": 4.0, "Ditto": 2.0, "APFL": 3.1,
          "FedBABU": 0.7, "Per-FedAvg": 1.3, "pFedMe": 5.0, "FedFomo": 1.2, "FedAMP": 2.0,
          "FedDBE, no pull": 1.2}  # fmt: skip
FIRST = 8.0  # seconds of a line's first two rounds and its scorings
SLOWED = 0.5  # by which part each further process slows the others down
SETTLED = 2  # first rounds: kernels are chosen, graphs recorded
EVERY, POINTS = 5, 40  # rounds between points of a curve, at least; points of it that are kept
SCORING = 0.1  # share of the time that scoring may take
FLAT, FLAT_FROM = 0.001, 60  # rise in the second half below which a line ends; rounds before that
MERGED = 3.0  # seconds between two writings of the one file
GRACE = 40.0  # seconds that a worker may take over the time before it is ended
ALONE = 40.0  # seconds that the first process has the GPU for itself at most, to choose kernels
STARTS = 3  # processes in place of each one that broke


@dataclass(frozen=True)
class Line:
    """One method of one table, for so many rounds at most."""

    table: str
    label: str
    rounds: int

    @property
    def name(self) -> str:
        return f"{self.table}--{self.label.replace(' ', '')}"

    @property
    def runs(self) -> tuple[str, ...]:
        return SPLITS.get(self.table, (self.table,))

    def seconds(self, workers: int) -> float:
        """Return the seconds that it is reckoned to take in a process beside the others."""
        pace = next(own for key, own in PACES.items() if self.table.startswith(key))
        alone = FIRST + self.rounds * pace * PASSES.get(self.label, 1.0)
        return alone * (1 + SLOWED * (workers - 1))


def plan(only: Sequence[str] = ()) -> list[Line]:
    """List the lines, or those whose names hold one of the words, without what results/ has."""
    lines = []
    for text in LINES.read_text().splitlines():
        if text and not text.startswith("#"):
            table, label, rounds = (part.strip() for part in text.split("|"))
            lines.append(Line(table, label, int(rounds)))
    asked = [one for one in lines if not only or any(word in one.name for word in only)]
    return [one for one in asked if rounds_had(one) < one.rounds]


def rounds_had(line: Line) -> int:
    """Return of how many rounds results/ has a line."""
    held = figures(key_of(line.table))
    own = [held.get(run, {}).get("methods", {}).get(line.label, {}) for run in line.runs]
    return min(int(one["rounds"]) if "curve" in one else 0 for one in own)


def loaded(run: str, changes: Sequence[str]) -> Experiment:
    named = {name_of(one): one for item in TABLES.values() for one in items()[item][1].experiments}
    return load_experiment(experiments_folder() / named[run].file, [*named[run].set, *changes])


# A worker: one process, which trains one line after the other.

Curve = list[tuple[int, dict[str, tuple[float, float]]]]
"""Of one split: scored rounds, and each model's accuracy over test rows and mean over clients."""


class Shelf:
    """What a process keeps for the lines to come: datasets, and divided data by run."""

    def __init__(self) -> None:
        self._datasets: dict[str, Dataset] = {}
        self._parts: dict[str, SharedParts] = {}

    def parts(self, run: str, experiment: Experiment) -> SharedParts:
        """Return a run's federation and networks, made once."""
        if run not in self._parts:
            self._parts[run] = build_shared(experiment, None, self._datasets)
        return self._parts[run]


@dataclass(frozen=True)
class Goal:
    """The model of a split that the table has a figure of, and the figure, if it has one."""

    model: str
    paper: float | None

    def met(self, curve: Curve, since: int) -> str:
        """Say how a split's best test round ends its line; empty: it goes on."""
        done, last = curve[-1]
        model = self.model if self.model in last else "global"  # of what is tuned once, at the end
        points = [(number, own[model][0]) for number, own in curve]
        best = max(value for _, value in points)
        if self.paper is not None and model == self.model and 100 * best >= self.paper:
            return "has the table's figure"
        early = [value for number, value in points if 2 * number <= done]
        if done >= since and early and best - max(early) < FLAT:
            return "flat"
        return ""


def work(args: argparse.Namespace) -> None:
    """Take the next line that nobody has taken, until the time is over."""
    shelf = Shelf()
    for line in plan(args.only):
        left = args.end - time.time()
        if left < 5:
            return
        if FINAL in line.table and line.seconds(args.workers) > left:
            continue  # of all its rounds or of none
        try:
            with (args.runs / f"{line.name}.taken").open("x") as mine:
                mine.write(str(os.getpid()))
        except FileExistsError:
            continue
        try:
            train_line(line, args, shelf)
        except Exception as error:  # one method's failure must not cost the others their time
            text = f"{type(error).__name__}: {error}"
            (args.runs / f"{line.name}.failed").write_text(text)
            print(f"{line.name}: {text}", flush=True)
            if "CUDA" in text and not isinstance(error, torch.OutOfMemoryError):
                raise  # nothing can be computed in this process any more: another takes its place
        gc.collect()  # graphs and their streams, before the next line wants some
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def train_line(line: Line, args: argparse.Namespace, shelf: Shelf) -> None:
    """Train a line; what is known is written after each scored round."""
    begun = time.time()
    rounds = min(line.rounds, args.rounds or line.rounds)
    # A line is short: forms that are chosen while it runs would have it recorded twice.
    changes = [f"rounds={rounds}", "seeds=[0]", "backend.kernels=first"]
    if args.precision != "fp32":
        changes.append(f"backend.precision={args.precision}")
    label = TRAINED_AS.get(line.label, line.label)
    if label not in [one.label_or_name for one in loaded(line.runs[0], []).methods]:
        label = line.label
    if label in TUNED_ONCE:
        changes.append("evaluate.personal=auto")
    experiments = {run: loaded(run, [*changes, *args.set]) for run in line.runs}
    job = stacked(experiments, label, shelf)
    built = time.time() - begun
    how = {"device": job.place, "precision": job.backend.precision, "workers": args.workers}

    def write(found: dict[str, Any]) -> None:
        path = args.runs / f"{line.name}.part"
        path.write_text(json.dumps([of_split(n, run, found) for n, run in enumerate(line.runs)]))
        path.rename(path.with_suffix(".json"))

    def of_split(split: int, run: str, found: dict[str, Any]) -> dict[str, Any]:
        own = {key: value for key, value in found.items() if key != "splits"}
        own |= {**found["splits"][split], **how, "built": round(built, 2)}
        kept = {line.label: own}
        if label != line.label:  # fine-tuned at the end, if at all
            personal = {"personal", "personal" + BEST_TEST_ROUND} & own["models"].keys()
            kept = {line.label: {**own, "models": without(own["models"], personal)}}
            if personal:
                kept[label] = own
        experiment = experiments[run]
        about = describe(experiment, shelf.parts(run, experiment))["data"]["federations"][0]
        head = {"run": run, "federation": about, "seeds": list(experiment.seeds)}
        return {**head, "versions": versions(), "methods": kept}

    def settle() -> None:
        (args.runs / f"{line.name}.settled").touch()

    found = train(job, rounds, args.end, write, settle, goals(line), FINAL in line.table)
    print(
        f"{line.name}: {found['rounds']} rounds in {time.time() - begun:.0f} s, first {SETTLED} "
        f"{found['first']:.1f} s, then {found['pace']:.3f} s a round; scoring took "
        f"{found['scoring']:.1f} s; ended: {found['ended']}",
        flush=True,
    )


def stacked(experiments: Mapping[str, Experiment], label: str, shelf: Shelf) -> SimulatedJob:
    """Make one job of a method on several splits, each with a server of its own."""
    jobs = []
    for run, experiment in experiments.items():
        method = next(one for one in experiment.methods if one.label_or_name == label)
        parts = shelf.parts(run, experiment)
        jobs.append(build_job(experiment, method, parts, experiment.seeds))
    first = jobs[0]
    if any((one.method, one.cohort) != (first.method, first.cohort) for one in jobs):
        raise ValueError(f"{label}: {', '.join(experiments)} differ in more than their data")
    return replace(
        first,
        seeds=tuple(seed for one in jobs for seed in one.seeds),
        federations=tuple(own for one in jobs for own in one.federations),
    )


def goals(line: Line) -> list[Goal]:
    """Return what the table has of each split of a line."""
    cells = {(one.run, one.label): one for one in items()[TABLES[key_of(line.table)]][1].cells}
    found = []
    for run in line.runs:
        cell = cells.get((run, method_of(line.label)))
        model = cell.model.removesuffix(BEST_TEST_ROUND) if cell else "personal"
        found.append(Goal(model, cell.paper if cell else None))
    return found


def without(models: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: own for name, own in models.items() if name not in names}


def train(
    job: SimulatedJob,
    rounds: int,
    end: float,
    write: Callable[[dict[str, Any]], None],
    settle: Callable[[], None],
    wanted: Sequence[Goal],
    final: bool,
) -> dict[str, Any]:
    """Run rounds and score them; return what was found up to the last one.

    `settle` is called when kernels are chosen and the round is recorded. The pace is that of the
    second half of the rounds; before the `end` of the time, time for what comes after the last one
    is kept back. Where a table is of the `final` round, only that is scored, and a line that cannot
    have it ends early.
    """
    work = planned_work(job)
    after = (work.final_work / work.round_work if job.only_global else 0) + 1
    since = FLAT_FROM if job.label not in (*LONG, *TRAINED_AS.values()) else 10 * FLAT_FROM
    simulation = job.simulation(None)
    began = time.time()
    curves: list[Curve] = [[] for _ in wanted]
    took: list[float] = []  # seconds of rounds
    costs: list[float] = []  # of scorings
    due = rounds if final else EVERY
    found: dict[str, Any] = {}
    ended = ""
    while not ended:
        start = time.time()
        simulation.advance()
        done, now = simulation.round, time.time()
        took.append(now - start)
        if done == SETTLED:
            settle()
        later = took[max(SETTLED, done // 2) :]
        pace = fmean(later) if later else 0.0
        cost = min(costs[-2:]) if len(costs) > 1 else 0.0
        if done == rounds:
            ended = "all rounds"
        elif final:
            ahead = (rounds - done + after) * pace if done > 2 * SETTLED else 0.0
            if now + ahead > end:
                raise TimeoutError(f"{rounds} rounds do not fit into the time that is left")
        elif now + (after + 1) * pace + cost > end:
            ended = "time"
        if not ended and done < due and done not in MILESTONES:
            continue
        if final and not ended:
            continue
        costs.append(score(job, simulation, curves, job.only_global))
        cost = min(costs[-2:]) if len(costs) > 1 else 0.0
        due = done + max(EVERY, round(cost / (SCORING * pace)) if pace else EVERY)
        met = [goal.met(own, since) for goal, own in zip(wanted, curves, strict=True)]
        if not ended and done >= FLAT_FROM and all(met):
            ended = "; ".join(dict.fromkeys(met))
        if not ended and time.time() + (after + EVERY) * pace + cost > end:
            ended = "time"
        if ended and job.only_global:
            costs.append(score(job, simulation, curves, False))
        found = {
            "splits": [
                {**summary(own), "ended": how or ended or "not yet"}
                for own, how in zip(curves, met, strict=True)
            ],
            "ended": ended or "not yet",
            "first": round(sum(took[:SETTLED]), 2),
            "pace": round(pace, 4),
            "scoring": round(sum(costs), 2),
            "paces": rounded(fmean(took[n : n + EVERY]) for n in range(SETTLED, done, EVERY)),
            "rounds": done,
            "seconds": round(time.time() - began, 1),
        }
        write(found)
    return found


def score(
    job: SimulatedJob, simulation: Simulation, curves: Sequence[Curve], only_global: bool
) -> float:
    """Add a point to the curve of each split; return the seconds that it took."""
    begun = time.time()
    scored = simulation.evaluate(job.test_data, only_global=only_global, choice=job.choice)
    for curve, own, members in zip(curves, scored, job.members, strict=True):
        curve.append((simulation.round, figures_of(own, members.test)))
    return time.time() - begun


def figures_of(scored: ClientScores, rows: Sequence[int]) -> dict[str, tuple[float, float]]:
    """Return each model's accuracy over all test rows, and its mean over clients."""
    held, found = np.array(rows, np.float64), {}
    for model, own in scored.scores.items():
        if "accuracy" in own and model != BASELINE:
            right = own["accuracy"]
            over_rows = float(np.nansum(right * held) / held[~np.isnan(right)].sum())
            found[model] = (over_rows, float(np.nanmean(right)))
    return found


def summary(curve: Curve) -> dict[str, Any]:
    """Return the last round's figures of a split, the best test round's, and the curve."""
    models: dict[str, Any] = {}
    curves: dict[str, Any] = {}
    for model in curve[-1][1]:
        points = [(number, *own[model]) for number, own in curve if model in own]
        numbers, weighted, mean = (list(part) for part in zip(*points, strict=True))
        best = int(np.argmax(weighted))
        models[model] = {"mean": rounded(mean[-1:]), "weighted_mean": rounded(weighted[-1:])}
        models[model + BEST_TEST_ROUND] = {
            "mean": rounded(weighted[best : best + 1]),
            "round": [numbers[best]],
        }
        if len(numbers) > 1:
            kept = range(len(numbers) - 1, -1, -len(numbers) // POINTS)[::-1]
            curves[model] = {
                "round": [numbers[place] for place in kept],
                "weighted_mean": rounded(weighted[place] for place in kept),
                "mean": rounded(mean[place] for place in kept),
                "best_by": {
                    str(most): rounded([max(w for n, w, _ in points if n <= most)])
                    for most in MILESTONES
                    if numbers[0] <= most <= numbers[-1]
                },
            }
    return {"models": models, "curve": curves}


def rounded(values: Any) -> list[float]:
    return [round(float(value), 5) for value in values]


# The run: workers, and the one file.


def run(args: argparse.Namespace) -> None:
    """Start the workers, write what they have found all the time, and wait for them."""
    args.runs.mkdir(parents=True, exist_ok=True)
    begin_again(args.runs)
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.time() + args.seconds
    first, *others = dict.fromkeys(
        loaded(run, args.set).data.source for one in plan(args.only) for run in one.runs
    )
    load(first)  # decoded once, before the workers want it
    if os.environ.get("MPS") == "1":  # one interrupted process may end the others: gpu_queue.sh
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False)
    own = [sys.executable, __file__, "work", str(end), str(args.out), "--runs", str(args.runs)]
    own += ["--workers", str(args.workers), "--precision", args.precision]
    own += ["--rounds", str(args.rounds)]
    own += [word for one in args.set for word in ("--set", one)]
    own += [word for one in args.only for word in ("--only", one)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    workers = [subprocess.Popen(own, env=environment)]
    begun = time.time()
    for source in others:
        load(source)
    spare = STARTS * args.workers
    while any(worker.poll() is None for worker in workers) and time.time() < end + GRACE:
        time.sleep(min(MERGED, args.seconds / 20))
        merge(args.runs, args.out)
        if len(workers) < args.workers and (
            time.time() - begun > ALONE or any(args.runs.glob("*.settled"))
        ):
            workers += [subprocess.Popen(own, env=environment) for _ in range(args.workers - 1)]
        for place, worker in enumerate(workers):
            if worker.poll() and spare and end - time.time() > 2 * GRACE:  # it broke
                give_back(args.runs, worker.pid)
                workers[place] = subprocess.Popen(own, env=environment)
                spare -= 1
    for worker in workers:  # the last resort: under MPS others may fall with a process
        worker.terminate()
        worker.wait()
    merge(args.runs, args.out)
    chosen = cache_root(None) / "kernels.json"  # for scripts/ship_choices.py
    if chosen.exists():
        shutil.copy(chosen, args.out)


def begin_again(runs: Path) -> None:
    """Forget what an earlier call on this machine did not bring to its end."""
    for path in [*runs.glob("*.settled"), *runs.glob("*.failed")]:
        path.unlink()
    for path in runs.glob("*.taken"):
        known = path.with_suffix(".json")
        found = json.loads(known.read_text()) if known.exists() else []
        ends = {own["ended"] for one in found for own in one["methods"].values()}
        if not ends or ends & {"not yet", "time"}:
            path.unlink()


def give_back(runs: Path, worker: int) -> None:
    """Let others take the line that a process was ended in, unless it was the line that failed."""
    for path in runs.glob("*.taken"):
        known = [path.with_suffix(kind).exists() for kind in (".json", ".failed")]
        if path.read_text() == str(worker) and not any(known):
            path.unlink()


def merge(runs: Path, out: Path) -> None:
    """Write one file of all lines."""
    found = [one for path in sorted(runs.glob("*.json")) for one in json.loads(path.read_text())]
    failed = {path.stem: path.read_text() for path in sorted(runs.glob("*.failed"))}
    part = out / "tables.part"
    part.write_text(json.dumps({"lines": found, "failed": failed}) + "\n")
    part.rename(out / "tables.json")


def costs(content: dict[str, Any]) -> str:
    """Lay out where a run's seconds went, line by line, and of all together."""
    rows, totals, seen = [], [0.0] * 5, set()
    for one in content["lines"]:
        for label, own in one["methods"].items():
            key = (label, own["seconds"], own["first"])
            if key in seen or label in TRAINED_AS.values():
                continue
            seen.add(key)
            rest = own["seconds"] - own["first"] - own["scoring"]
            parts = [own["built"], own["first"], rest, own["scoring"], own["seconds"]]
            totals = [a + b for a, b in zip(totals, parts, strict=True)]
            told = " ".join(f"{part:7.1f}" for part in parts)
            name = f"{one['run']}, {label}"
            rows.append(f"{name:44}{told} {own['rounds']:6} {own['pace']:8.3f}  {own['ended']}")
            rows.append(f"    fives of rounds: {' '.join(f'{one:.3f}' for one in own['paces'])}")
    heads = ("built", "first 2", "rounds", "scoring", "all")
    head = f"{'seconds':44}{' '.join(f'{one:>7}' for one in heads)} rounds  a round  ended"
    last = f"{'together':44}" + " ".join(f"{part:7.1f}" for part in totals)
    failed = [f"failed: {name}: {why}" for name, why in content["failed"].items()]
    return "\n".join([head, *rows, last, *failed])


def main() -> None:
    if sys.argv[1:2] == ["plan"]:
        seconds = 0.0
        for line in plan(sys.argv[2:]):
            seconds += line.seconds(1)
            print(
                f"{line.name}: {line.rounds} rounds, {line.seconds(1):.0f} s, so far {seconds:.0f}"
            )
        return
    if sys.argv[1:2] == ["costs"]:
        print(costs(json.loads((Path(sys.argv[2]) / "tables.json").read_text())))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    working = sys.argv[1:2] == ["work"]
    if working:
        parser.add_argument("work")
    parser.add_argument("end" if working else "seconds", type=float)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", type=int, default=1, help="processes; more share a GPU")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "tf32", "bf16"))
    parser.add_argument("--runs", type=Path, default=Path("/tmp/field-runs"))
    parser.add_argument("--rounds", type=int, default=0, help="at most so many of each line")
    parser.add_argument("--only", action="append", default=[], help="a word of a line's name")
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    work(args) if working else run(args)


if __name__ == "__main__":
    main()
