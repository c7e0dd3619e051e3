"""Train the outside tables within a time; `reproduce_field.py keep OUT` then takes the figures.

    python scripts/run_field.py SECONDS OUT [--workers 6] [--precision tf32] [--only WORD]
        [--set KEY=VALUE]
    python scripts/run_field.py plan             # what would be trained, in order

Every line is one method of one table. It gets a share of the time that is left, weighed by what it
needs, and goes on until that is over or it has all of its rounds. Nothing is resumed, as a machine
may be bare next time: what counts is OUT/tables.json, which is written anew all the time with the
curves up to then. Lines that results/ already has with all their rounds are left out, those it has
with fewer come last.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from reproduce_field import LEAST, MILESTONES, TABLES, figures

from idiolect.data import Dataset, load
from idiolect.engine.evaluation import ClientScores
from idiolect.experiment.build import build_job, build_shared, describe
from idiolect.experiment.job import SimulatedJob
from idiolect.experiment.load import load_experiment
from idiolect.experiment.repro.index import BEST_TEST_ROUND, experiments_folder, items, name_of
from idiolect.experiment.schema import Experiment
from idiolect.experiment.train import planned_work
from idiolect.results.document import versions

# One global network needs many rounds; so does FedDBE, which adds a vector to it.
LONG = ("FedAvg", "FedProx", "FedDBE")
PERSONAL = (
    *("FedRep", "FedPer", "FedALA", "Ditto", "FedCP", "GPFL", "FedRoD", "FedProto", "FedBABU"),
    *("FedAMP", "APFL", "pFedMe", "Per-FedAvg", "Local"),
)
TRAINED_AS = {"FedAvg": "FedAvg + FT"}  # the same rounds, and fine-tuned after the last one
TUNED_ONCE = ("FedAvg + FT", "FedBABU")  # not at every point of the curve, as in PFLlib
SETTLED = 2  # first rounds: kernels are chosen, graphs recorded
EVERY, POINTS = 5, 40  # rounds between points of a curve; points of it that are kept
MERGED = 3.0  # seconds between two writings of the one file
GRACE = 40.0  # seconds that a worker may take over the time before it is ended


@dataclass(frozen=True)
class Line:
    """One method of one table: at most so many rounds, and so large a share of the time.

    Without a share it is trained where time is left, for as long as it takes.
    """

    run: str
    label: str
    rounds: int
    share: float

    @property
    def name(self) -> str:
        return f"{self.run}--{self.label.replace(' ', '')}"


def plan(only: Sequence[str] = (), known: bool = True) -> list[Line]:
    """List everything, or the lines whose names hold one of the words, what is worth most first."""
    lines = [Line(f"pfllib-fmnist-{kind}", "FedAvg", 2000, 15) for kind in ("dir", "pat")]
    for kind, rounds, share in (("dir", 300, 3), ("pat", 100, 1.5)):
        lines += [Line(f"pfllib-fmnist-{kind}", label, rounds, share) for label in PERSONAL]
        lines += [Line(f"pfllib-fmnist-fomo-{kind}", "FedFomo", rounds, share)]
        lines += [Line(f"pfllib-fmnist-{kind}", label, 2000, 5) for label in ("FedDBE", "FedProx")]
    lines += table("fedala-cifar10", 300, 3)
    lines += [Line("fedala-cifar10-fomo", "FedFomo", 300, 3)]
    lines += table("pfedkdh-fmnist-0.1", 50, 6)
    others = [f"cifar10-{alpha}" for alpha in ("0.1", "0.05", "0.5")]
    others += ["mnist-0.1", "fmnist-0.05", "fmnist-0.5", "mnist-0.05", "mnist-0.5"]
    lines += [line for name in others for line in table(f"pfedkdh-{name}", 50, 0)]
    lines = [one for one in lines if not only or any(word in one.name for word in only)]
    if not known:
        return lines
    had = {one: rounds_had(one) for one in lines}
    return sorted((one for one in lines if had[one] < one.rounds), key=lambda one: had[one] > 0)


def table(run: str, rounds: int, share: float) -> list[Line]:
    """Return a line for each method of a run; what is trained with another has none."""
    labels = [one.label_or_name for one in loaded(run, []).methods]
    return [
        Line(run, label, 2000 if label in LONG and rounds > 50 else rounds, share)
        for label in labels
        if label not in TRAINED_AS.values()
    ]


def rounds_had(line: Line) -> int:
    """Return of how many rounds results/ has the curve of a line."""
    key = next(key for key in TABLES if line.run.startswith(key))
    own = figures(key).get(line.run, {}).get("methods", {}).get(line.label, {})
    return int(own["rounds"]) if "curve" in own else 0


def loaded(run: str, changes: Sequence[str]) -> Experiment:
    named = {name_of(one): one for item in TABLES.values() for one in items()[item][1].experiments}
    return load_experiment(experiments_folder() / named[run].file, [*named[run].set, *changes])


# A worker: one process, which trains one line after the other.


def work(args: argparse.Namespace) -> None:
    """Take the next line that nobody has taken, until the time is over."""
    lines, datasets = plan(args.only), {}
    for line in lines:
        left = args.end - time.time()
        if left < 5:
            return
        try:
            (args.runs / f"{line.name}.taken").touch(exist_ok=False)
        except FileExistsError:
            continue
        rest = [one for one in lines if not (args.runs / f"{one.name}.taken").exists()]
        shares = line.share + sum(one.share for one in rest)
        part = line.share / shares if line.share else 1
        stop = time.time() + min(left, left * args.workers * part)
        try:
            train_line(line, stop, args, datasets)
        except Exception as error:  # one method's failure must not cost the others their time
            text = f"{type(error).__name__}: {error}"
            (args.runs / f"{line.name}.failed").write_text(text)
            print(f"{line.name}: {text}", flush=True)
            if "CUDA" in text:  # nothing can be computed in this process any more
                raise


def train_line(
    line: Line, stop: float, args: argparse.Namespace, datasets: dict[str, Dataset]
) -> None:
    """Train until the line's time is over; what is known is written after each scored round."""
    begun = time.time()
    changes = [f"rounds={line.rounds}", f"evaluate.every={EVERY}"]
    if not line.run.startswith("pfedkdh"):
        changes.append("seeds=[0]")
    if args.precision != "fp32":
        changes.append(f"backend.precision={args.precision}")
    label = TRAINED_AS.get(line.label, line.label)
    experiment = loaded(line.run, [*changes, *args.set])
    if label not in [one.label_or_name for one in experiment.methods]:
        label = line.label
    if label in TUNED_ONCE:
        experiment = loaded(line.run, [*changes, "evaluate.personal=auto", *args.set])
    held = build_shared(experiment, None, datasets)
    method = next(one for one in experiment.methods if one.label_or_name == label)
    job = build_job(experiment, method, held, experiment.seeds)
    head = {
        "run": line.run,
        "federation": describe(experiment, held)["data"]["federations"][0],
        "seeds": list(experiment.seeds),
        "versions": versions(),
    }
    how = {"device": job.place, "precision": job.backend.precision, "workers": args.workers}

    def write(found: dict[str, Any]) -> None:
        kept = {**head, "methods": {line.label: {**found, **how}}}
        if label != line.label:  # fine-tuned at the end, if at all
            own = {"personal", "personal" + BEST_TEST_ROUND} & found["models"].keys()
            kept["methods"][line.label] = {**found, **how, "models": without(found["models"], own)}
            if own:
                kept["methods"][label] = {**found, **how}
        path = args.runs / f"{line.name}.part"
        path.write_text(json.dumps(kept))
        path.rename(path.with_suffix(".json"))

    found = train(job, line.rounds, (stop, args.end), write)
    print(
        f"{line.name}: {found['rounds']} rounds in {time.time() - begun:.0f} s, first {SETTLED} "
        f"{found['first']:.1f} s, then {found['pace']:.3f} s a round with scoring",
        flush=True,
    )


def without(models: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: own for name, own in models.items() if name not in names}


def train(
    job: SimulatedJob,
    rounds: int,
    until: tuple[float, float],
    write: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Run rounds and score them; return what was found up to the last one.

    `until` says when the line's time is over, and when everybody's is. The pace is that of the
    second half of the rounds; time for what comes after the last one is kept back.
    """
    work = planned_work(job)
    after = (work.final_work / work.round_work if job.only_global else 0) + 1
    simulation = job.simulation(None)
    began = time.time()
    curve: list[tuple[int, list[ClientScores]]] = []
    ends: list[float] = []  # of rounds, each with its scoring
    found: dict[str, Any] = {}
    while not found or not found["ended"]:
        simulation.advance()
        done, now = simulation.round, time.time()
        ends.append(now)
        since = max(SETTLED, done // 2)
        pace = (now - ends[since - 1]) / (done - since) if done > since else 0.0
        stop = until[done < LEAST]
        ended = done == rounds or now + (after + 1) * pace > stop
        if ended or done % EVERY == 0:
            scored = simulation.evaluate(
                job.test_data, only_global=job.only_global, choice=job.choice
            )
            curve.append((done, scored))
            if not ended and time.time() + (after + EVERY) * pace > stop:
                ended = True
            if ended and job.only_global:
                curve.append((done, simulation.evaluate(job.test_data, choice=job.choice)))
            found = summary(job, curve)
            first = ends[:SETTLED][-1] - began
            found |= {"ended": ended, "first": round(first, 2), "pace": round(pace, 4)}
            found |= {"rounds": done, "seconds": round(time.time() - began, 1)}
            write({key: value for key, value in found.items() if key != "ended"})
    return found


def summary(job: SimulatedJob, curve: list[tuple[int, list[ClientScores]]]) -> dict[str, Any]:
    """Return the last round's figures of each seed, the best test round's, and the curve."""
    rows = [np.array(own.test, np.float64) for own in job.members]
    models: dict[str, Any] = {}
    curves: dict[str, Any] = {}
    for model in curve[-1][1][0].scores:
        if "accuracy" not in curve[-1][1][0].scores[model] or model == "baseline":
            continue
        points = [
            (number, [one.scores[model]["accuracy"] for one in scored])
            for number, scored in curve
            if model in scored[0].scores
        ]
        mean = [[float(np.nanmean(own)) for own in seeds] for _, seeds in points]
        weighted = [
            [float(np.nansum(own * held) / held[~np.isnan(own)].sum())
             for own, held in zip(seeds, rows, strict=True)] for _, seeds in points
        ]  # fmt: skip
        numbers = [number for number, _ in points]
        best = np.argmax(weighted, axis=0)
        models[model] = {"mean": rounded(mean[-1]), "weighted_mean": rounded(weighted[-1])}
        models[model + BEST_TEST_ROUND] = {
            "mean": rounded(np.max(weighted, axis=0)),
            "round": [numbers[place] for place in best],
        }
        if len(numbers) > 1:
            kept = range(len(numbers) - 1, -1, -len(numbers) // POINTS)[::-1]
            curves[model] = {
                "round": [numbers[place] for place in kept],
                "weighted_mean": rounded(fmean(weighted[place]) for place in kept),
                "mean": rounded(fmean(mean[place]) for place in kept),
                "best_by": {
                    str(most): rounded(
                        np.max([w for n, w in zip(numbers, weighted, strict=True) if n <= most], 0)
                    )
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
    shutil.rmtree(args.runs, ignore_errors=True)
    args.runs.mkdir(parents=True)
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.time() + args.seconds
    first, *others = dict.fromkeys(
        loaded(run, args.set).data.source for run in dict.fromkeys(o.run for o in plan(args.only))
    )
    load(first)  # decoded once, before the workers want it
    if os.environ.get("MPS") == "1":  # one interrupted process may end the others: gpu_queue.sh
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False)
    own = [sys.executable, __file__, "work", str(end), str(args.out), "--runs", str(args.runs)]
    own += ["--workers", str(args.workers), "--precision", args.precision]
    own += [word for one in args.set for word in ("--set", one)]
    own += [word for one in args.only for word in ("--only", one)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    workers = [subprocess.Popen(own, env=environment) for _ in range(args.workers)]
    for source in others:
        load(source)
    while any(worker.poll() is None for worker in workers) and time.time() < end + GRACE:
        time.sleep(MERGED)
        merge(args.runs, args.out)
    for worker in workers:  # the last resort: under MPS others may fall with a process
        worker.terminate()
        worker.wait()
    merge(args.runs, args.out)


def merge(runs: Path, out: Path) -> None:
    """Write one file of all lines."""
    found = [json.loads(path.read_text()) for path in sorted(runs.glob("*.json"))]
    failed = {path.stem: path.read_text() for path in sorted(runs.glob("*.failed"))}
    part = out / "tables.part"
    part.write_text(json.dumps({"lines": found, "failed": failed}) + "\n")
    part.rename(out / "tables.json")


def main() -> None:
    if sys.argv[1:2] == ["plan"]:
        for line in plan(sys.argv[2:]):
            print(f"{line.name}: {line.rounds} rounds at most, share {line.share:g}")
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
    parser.add_argument("--only", action="append", default=[], help="a word of a line's name")
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    work(args) if working else run(args)


if __name__ == "__main__":
    main()
