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
from pathlib import Path
from typing import Any

import torch
from field_lines import FINAL, TRAINED_AS, loaded, plan
from train_field import Cache, train_line

from idiolect.data import load
from idiolect.data.sources import cache_root

MERGED = 3.0  # seconds between two writings of the one file
GRACE = 40.0  # seconds that a worker may take over the time before it is ended
ALONE = 40.0  # seconds that the first process has the GPU for itself at most, to choose kernels
STARTS = 3  # processes in place of each one that broke


def work(args: argparse.Namespace) -> None:
    """Take the next line that nobody has taken, until the time is over."""
    cache = Cache()
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
            train_line(line, args, cache)
        except Exception as error:  # one method's failure must not cost the others their time
            text = f"{type(error).__name__}: {error}"
            (args.runs / f"{line.name}.failed").write_text(text)
            print(f"{line.name}: {text}", flush=True)
            if "CUDA" in text and not isinstance(error, torch.OutOfMemoryError):
                raise  # nothing can be computed in this process any more: another takes its place
        gc.collect()  # graphs and their streams, before the next line wants some
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


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
