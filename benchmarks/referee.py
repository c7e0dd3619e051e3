"""Time the referee's suite for one method, problem by problem.

    python benchmarks/referee.py fedavg-ft --size whole --seconds 240 --json OUT.json
    python benchmarks/referee.py fedavg-ft --size whole --reckon --seconds 100 --json OUT.json
    python benchmarks/referee.py --table OUT.json     # for docs/referee.md

Small problems come first, and problems whose twin is like them last, so that a run that is cut says
most. A problem's seconds are all that a user waits for: dividing the data, four trials, the final
training of five seeds, scoring. Reading the files is apart. What was trained is in the JSON too
(`line`).

`--reckon` measures less: of each problem two short trainings, with all its clients, rows and seeds,
and reckons the problem from them. The first is two rounds alone: what it takes longer than the two
of the second, compiling and choosing kernels, is done once a problem. The second tells what every
training takes: its first two rounds, the pace of the next ones and the end, which is the scoring of
the last round; a scoring along the way is taken to be as long. There are four trials and, since
each seed takes what is best for it, one final training for each setting that was chosen: as many as
this method had on the small problem of the same name. A problem that was not reached in the seconds
given is reckoned from its twin, and marked.
It is a reckoning, and no measurement of the suite. Problems that are named with `--fully` are
trained to their end, and their seconds measured.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from idiolect.data import Dataset
from idiolect.engine.outcome import Silent, Tick
from idiolect.experiment.build import build_federations, build_job, build_shared
from idiolect.experiment.job import Job
from idiolect.experiment.referee.challenger import find_challenger
from idiolect.experiment.referee.referee_run import read_lines, stored_folder, train_line
from idiolect.experiment.referee.suite import (
    SIZES,
    Contestant,
    Suite,
    SuiteProblem,
    load_suite,
)
from idiolect.experiment.train import train
from idiolect.experiment.tune import proposals, search_space, with_settings

COLD, WARM = 2, 5  # rounds of the trainings that are reckoned from: two to record
LIMIT = 600  # seconds that the suite may take one method
USUAL = 2  # settings that five seeds choose, where the small suite does not say
TWINS = {
    "persfl-ds3": "persfl-ds1",
    "cifar10-pathological": "cifar10-dirichlet",
    "fmnist-dirichlet": "fmnist-pathological",
}
ORDER = (  # small ones first
    "heart", "persfl-ds1", "school", "ktpfl-all", "synthetic", "fmnist-pathological",
    "cifar10-dirichlet", *TWINS,
)  # fmt: skip


class OutOfTime(Exception):
    """The time is over."""


class Clock(Silent):
    """Times each training, its first round apart, and ends when the time is over."""

    def __init__(self, end: float) -> None:
        self._end, self._began, self._first = end, 0.0, 0.0
        self.jobs: list[dict[str, Any]] = []

    def begin(self, label: str, round: int, rounds: int) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def tick(self, tick: Tick) -> None:
        """Take the first round's time."""
        if tick.round == 1:
            self._first = time.perf_counter() - self._began
        if time.perf_counter() > self._end:
            raise OutOfTime

    def end(self, label: str, seconds: float) -> None:
        """Keep how long it took, scoring and all."""
        took = time.perf_counter() - self._began
        self.jobs.append({"what": label, "seconds": round(took, 2), "first": round(self._first, 2)})


class Pace(Silent):
    """Notes when each round was over, and ends after so many."""

    def __init__(self, most: int) -> None:
        self.at: list[float] = []
        self._most = most

    def tick(self, tick: Tick) -> None:
        """Take the time."""
        self.at.append(time.perf_counter())
        if len(self.at) == self._most:
            raise OutOfTime


def short_training(job: Job, most: int = 0) -> dict[str, float]:
    """Train for a few rounds, and score; or for at most so many, unscored. Say what that took."""
    evaluate = dataclasses.replace(job.evaluate, every=WARM, detail=False)
    short = dataclasses.replace(job, evaluate=evaluate, rounds=WARM)
    watch, began = Pace(most), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(OutOfTime):
        train(short, Path(folder), watch=watch)
    ended = time.perf_counter()
    took = [after - before for before, after in zip([began, *watch.at], watch.at, strict=False)]
    own = {"first": sum(took[:COLD])}  # making the simulation too
    if most:
        return own
    pace = sum(took[COLD:-1]) / len(took[COLD:-1])
    return {**own, "pace": pace, "end": ended - watch.at[-2] - pace}


def measured(
    problem: SuiteProblem, who: Contestant, device: str | None, datasets: dict[str, Dataset]
) -> dict[str, float]:
    """Train two of a problem's settings for a few rounds; return what every training takes."""
    began = time.perf_counter()
    experiment = problem.experiment(who, device)
    held = build_shared(experiment, None, datasets)
    (method,), tune = experiment.methods, experiment.tune
    assert tune is not None
    tried = list(proposals(tune, method.label_or_name, search_space(tune, method)))[:2]
    jobs = [build_job(experiment, with_settings(method, s), held, experiment.seeds) for s in tried]
    built = time.perf_counter() - began
    # Blocks are cut by the rounds that are planned; the suite's trainings are all short, as these.
    cold, warm = short_training(jobs[0], COLD), short_training(jobs[-1])
    once = built + max(cold["first"] - warm["first"], 0.0)
    return {**warm, "building": built, "once": once, "seconds": time.perf_counter() - began}


def reckoned(problem: SuiteProblem, took: Mapping[str, float], choices: int) -> dict[str, float]:
    """Return what a problem takes by its number of trials, rounds, scorings and choices."""
    rounds, every = problem.raw["rounds"], problem.raw["evaluate"]["every"]
    tried = problem.raw["tune"].get("rounds", rounds)

    def training(count: int, scorings: int) -> float:
        return took["first"] + (count - 2) * took["pace"] + scorings * took["end"]

    trials = problem.budget * training(tried, 1)
    final = training(rounds, -(-rounds // every))  # of which the last one is the end
    whole = took["once"] + trials + choices * final
    return {"trials": trials, "final": final, "choices": choices, "whole": whole}


def reckon(args: argparse.Namespace) -> None:
    """Measure short trainings of each problem, and lay out what the suite would take."""
    suite = load_suite(args.size)
    who = find_challenger(args.method, suite)
    small = read_lines(stored_folder("small")).get(who.label, {}).get("cells", {})
    problems = listed(suite, args.problem)
    datasets: dict[str, Dataset] = {}
    found: dict[str, Any] = {"method": who.label, "suite": suite.digest, "reckoned": {}}
    found["reading"] = read(problems, who, datasets)
    end = time.perf_counter() + args.seconds
    known: dict[str, dict[str, float]] = {}
    for problem in problems:
        name = problem.name
        chosen = small.get(name, {}).get("tuned", {}).get("chosen", [])
        choices = len({json.dumps(one["settings"], sort_keys=True) for one in chosen}) or USUAL
        twin, late = known.get(TWINS.get(name, "")), time.perf_counter() > end
        if late and twin is None:
            found.setdefault("not measured", []).append(name)
            continue
        try:
            if name in args.fully:
                clock = Clock(end)
                own = fully(suite, who, problem, clock, args.device, datasets, found)
            elif late and twin is not None:
                found.setdefault("as their twins", []).append(name)
                own = {**twin, "seconds": 0.0, **reckoned(problem, twin, choices)}
            else:
                took = measured(problem, who, args.device, datasets)
                known[name] = took
                own = {**took, **reckoned(problem, took, choices)}
        except OutOfTime:
            found.setdefault("not measured", []).append(name)
            found.setdefault("cut", {})[name] = clock.jobs
            continue
        except Exception as error:  # one problem must not cost the others
            found.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"
            print(f"{name}: {found['failed'][name]}", flush=True)
            continue
        found["reckoned"][name] = {key: round(value, 3) for key, value in own.items()}
        print(f"{name}: {found['reckoned'][name]}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(found) + "\n")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    print(table(found))
    if args.json:
        args.json.write_text(json.dumps(found) + "\n")


def listed(suite: Suite, only: Sequence[str]) -> list[SuiteProblem]:
    """Return the problems in the order they are measured in."""
    problems = [one for one in suite.first if not only or one.name in only]
    return sorted(problems, key=lambda one: [*ORDER, one.name].index(one.name))


def read(problems: Sequence[SuiteProblem], who: Contestant, datasets: dict[str, Dataset]) -> float:
    """Read the files of all problems; return the seconds that took."""
    began = time.perf_counter()
    for problem in problems:
        alone = problem.experiment(who).model_copy(update={"seeds": (0,)})
        build_federations(alone, None, datasets)
    return round(time.perf_counter() - began, 1)


def fully(
    suite: Suite,
    who: Contestant,
    problem: SuiteProblem,
    clock: Clock,
    device: str | None,
    datasets: dict[str, Dataset],
    found: dict[str, Any],
) -> dict[str, float]:
    """Train a problem to its end; its seconds are measured, and what was trained is kept."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        line = train_line(
            suite, who, [problem], Path(folder), clock, device=device, datasets=datasets
        )
    took = time.perf_counter() - began
    found.setdefault("line", line)["cells"] |= line["cells"]
    found.setdefault("fully", {})[problem.name] = clock.jobs
    return {"seconds": took, "whole": took}


def reckoned_table(found: dict[str, Any]) -> str:
    """Lay out a reckoning, problem by problem, and tell the sum."""
    rows = [
        f"| {found['method']}, seconds | once | first two rounds | a round | a scoring "
        "| four trials | a final training | times | **estimate** |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, own in found["reckoned"].items():
        if "once" not in own:
            rows.append(f"| `{name}`, measured {'| ' * 7}| {own['whole']:.0f} |")
            continue
        parts = [f"{own['once']:.1f}", f"{own['first']:.1f}", f"{own['pace']:.3f}"]
        parts += [f"{own['end']:.2f}", f"{own['trials']:.0f}", f"{own['final']:.0f}"]
        rows.append(f"| `{name}` | {' | '.join(parts)} | {own['choices']:g} | {own['whole']:.0f} |")
    total = sum(own["whole"] for own in found["reckoned"].values())
    spent = sum(own["seconds"] for own in found["reckoned"].values())
    alike = found.get("as their twins", [])
    missing = [*found.get("not measured", []), *found.get("failed", {})]
    count = len(found["reckoned"])
    words = [f"{total:.0f} s for {count} problems, of {LIMIT}; reckoned from {spent:.0f} s"]
    words += [f"as their twins: {', '.join(alike)}"] if alike else []
    words += [f"without {', '.join(missing)}"] if missing else []
    return "\n".join([*rows, "", f"{'; '.join(words)}; reading took {found['reading']} s."])


def table(found: dict[str, Any]) -> str:
    """Lay out a file: seconds of each problem, how many trainings, and what their starts took."""
    if "reckoned" in found:
        return reckoned_table(found)
    rows = [
        f"| {found['method']} | seconds | trainings | of it their first rounds |",
        "|---|---|---|---|",
    ]
    totals = [0.0, 0.0]
    for name, own in found["problems"].items():
        first = sum(one["first"] for one in own["jobs"])
        totals = [totals[0] + own["seconds"], totals[1] + first]
        rows.append(f"| `{name}` | {own['seconds']:.0f} | {len(own['jobs'])} | {first:.0f} |")
    rows.append(f"| {len(found['problems'])} problems | {totals[0]:.0f} | | {totals[1]:.0f} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", nargs="?", default="fedavg-ft")
    parser.add_argument("--size", default="whole", choices=SIZES)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--device", default=None)
    parser.add_argument("--problem", action="append", default=[])
    parser.add_argument("--reckon", action="store_true", help="from a short training of each")
    parser.add_argument("--fully", action="append", default=[], help="train this one to its end")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--table", type=Path, default=None, help="print one of these files")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text())))
        return
    if args.reckon:
        reckon(args)
        return
    suite = load_suite(args.size)
    who = find_challenger(args.method, suite)
    problems = listed(suite, args.problem)
    datasets: dict[str, Dataset] = {}
    found: dict[str, Any] = {"method": who.label, "suite": suite.digest, "problems": {}}
    found["reading"] = read(problems, who, datasets)
    end = time.perf_counter() + args.seconds
    for problem in problems:
        clock = Clock(end)
        try:
            took = fully(suite, who, problem, clock, args.device, datasets, found)["seconds"]
        except OutOfTime:
            found["cut"] = {"problem": problem.name, "jobs": clock.jobs}
            break
        found["problems"][problem.name] = {"seconds": round(took, 1), "jobs": clock.jobs}
        jobs = "; ".join(f"{one['seconds']:.1f} ({one['first']:.1f})" for one in clock.jobs)
        print(f"{problem.name}: {took:.1f} s; trainings (first round): {jobs}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(found) + "\n")
    total = sum(one["seconds"] for one in found["problems"].values())
    left = [one.name for one in problems if one.name not in found["problems"]]
    print(f"{total:.1f} s for {len(found['problems'])} problems, reading {found['reading']} s")
    if left:
        print(f"not measured: {', '.join(left)}")
    if args.json:
        args.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
