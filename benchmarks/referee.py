"""Time the referee's suite for one method, problem by problem.

    python benchmarks/referee.py fedavg-ft --size whole --seconds 240 --json OUT.json
    python benchmarks/referee.py --table OUT.json     # for docs/referee.md

Problems whose twin is like them come last, so that a run that is cut says most. A problem's seconds
are all that a user waits for: dividing the data, four trials, the final training of five seeds,
scoring. Reading the files is apart. What was trained is in the JSON too (`line`).
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from idiolect.data import Dataset
from idiolect.engine.outcome import Silent, Tick
from idiolect.experiment.build import build_federations
from idiolect.experiment.referee.challenger import find_challenger
from idiolect.experiment.referee.referee_run import train_line
from idiolect.experiment.referee.suite import SIZES, load_suite

LAST = ("persfl-ds3", "cifar10-pathological", "fmnist-dirichlet")


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


def table(found: dict[str, Any]) -> str:
    """Lay out a file: seconds of each problem, how many trainings, and what their starts took."""
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
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--table", type=Path, default=None, help="print one of these files")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text())))
        return
    end = time.perf_counter() + args.seconds
    suite = load_suite(args.size)
    who = find_challenger(args.method, suite)
    problems = [one for one in suite.first if not args.problem or one.name in args.problem]
    problems.sort(key=lambda one: one.name in LAST)
    datasets: dict[str, Dataset] = {}
    found: dict[str, Any] = {"method": who.label, "suite": suite.digest, "problems": {}}
    began = time.perf_counter()
    for problem in problems:
        alone = problem.experiment(who).model_copy(update={"seeds": (0,)})
        build_federations(alone, None, datasets)
    found["reading"] = round(time.perf_counter() - began, 1)
    with tempfile.TemporaryDirectory() as folder:
        for problem in problems:
            clock, began = Clock(end), time.perf_counter()
            try:
                line = train_line(
                    suite, who, [problem], Path(folder), clock,
                    device=args.device, datasets=datasets,
                )  # fmt: skip
            except OutOfTime:
                found["cut"] = {"problem": problem.name, "jobs": clock.jobs}
                break
            took = round(time.perf_counter() - began, 1)
            found["problems"][problem.name] = {"seconds": took, "jobs": clock.jobs}
            found.setdefault("line", line)["cells"] |= line["cells"]
            jobs = "; ".join(f"{one['seconds']:.1f} ({one['first']:.1f})" for one in clock.jobs)
            print(f"{problem.name}: {took} s; trainings (first round): {jobs}", flush=True)
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
