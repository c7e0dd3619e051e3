"""Does a round cost more where there are more clients? Next-word users, 100 a round.

    OMP_NUM_THREADS=2 python benchmarks/population.py [--clients 1000 80000] [--json FILE]

Each population runs in a process of its own, so that its peak memory is its own; the rounds of all
of them are interleaved, so that a busy machine hurts all alike: read the ratios. Personal state is
on disk for every population. Memory is that of the whole run: data, rounds, an evaluation of 500
clients every ten rounds, and the final scores of 8,000, as many as Pye and Yu (2021) score (or of
everyone with --final 0, which takes minutes). It prints a table (docs/performance.md) and ends
with an error where 80,000 clients break what is promised: 4 GiB, and a fifth more time.
"""

import argparse
import json
import multiprocessing
import platform
import resource
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from idiolect.data import federate, load
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend
from idiolect.engine.rounds import Simulation
from idiolect.experiment.job import Evaluate, SimulatedJob
from idiolect.experiment.train import train
from idiolect.methods import METHODS
from idiolect.models import NextWord

COHORT, WORDS, LENGTH, UNITS = 100, 500, 10, 16
MOST_BYTES, MOST_RATIO = 4 << 30, 1.2  # what is promised of 80,000 clients


class Paced(Simulation):
    """A simulation whose rounds wait for their turn and tell how long they took."""

    def begin(self, line: Connection) -> "Paced":
        self.line = line
        return self

    def advance(self):
        self.line.send("ready")
        self.line.recv()
        start = time.perf_counter()
        done = super().advance()
        self.line.send(time.perf_counter() - start)
        return done


class PacedJob(SimulatedJob):
    line: Connection

    def simulation(self, shelf: Path | None = None) -> Simulation:
        made = super().simulation(shelf)
        made.__class__ = Paced
        return made.begin(self.line)


def one(line: Connection, name: str, clients: int, rounds: int, personal: str, final: int) -> None:
    """Run one population from its data to its final scores."""
    start = time.perf_counter()
    data = load("generated_text", users=clients, words=WORDS, length=LENGTH)
    federation = federate(data, "natural", 0, (0.6, 0.2, 0.2), ordered=True)
    del data
    vocabulary = len(federation.dataset.words)
    job = PacedJob(
        label=name,
        name=name,
        method=METHODS[name](batch=10, lr=1.0),
        seeds=(0,),
        federations=(federation,),
        architectures={
            "lstm": Architecture(lambda: NextWord((LENGTH,), vocabulary, UNITS, 1, 0.0))
        },
        rounds=rounds,
        cohort=COHORT,
        backend=Backend("vectorised", "cpu", COHORT, personal=personal, personal_mb=64),
        evaluate=Evaluate(every=10, clients=500, final_clients=final or None),
        checkpoint_every=5,
    )
    object.__setattr__(job, "line", line)
    ready = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        done = train(job, Path(folder))
        disk = sum(file.stat().st_blocks * 512 for file in Path(folder).rglob("*.rows"))
    line.send("done")
    line.send(
        {
            "clients": clients,
            "seconds_to_make_data": ready,
            "seconds_in_all": time.perf_counter() - start,
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "personal_bytes_on_disk": disk,
            "accuracy": float(np.nanmean(done.outcome.final["personal/accuracy"])),
        }
    )


def measured(
    name: str, populations: list[int], rounds: int, personal: str, final: int
) -> list[dict]:
    """Let all populations do their rounds in turn."""
    context = multiprocessing.get_context("spawn")
    lines, running, found = [], [], []
    for clients in populations:
        mine, theirs = context.Pipe()
        process = context.Process(target=one, args=(theirs, name, clients, rounds, personal, final))
        process.start()
        lines.append(mine)
        running.append(process)
    seconds: list[list[float]] = [[] for _ in populations]
    for line in lines:
        assert line.recv() == "ready"
    for _ in range(rounds):
        for line, own in zip(lines, seconds, strict=True):
            line.send("go")
            own.append(line.recv())
            if len(own) < rounds:
                assert line.recv() == "ready"  # evaluated, and saved, where that was due
    for line, own, process in zip(lines, seconds, running, strict=True):
        assert line.recv() == "done"
        told = line.recv()
        process.join()
        # The first rounds make what later ones use again. The best round is the least disturbed.
        told["round_seconds"] = statistics.median(own[2:])
        told["best_seconds"] = min(own)
        told["rounds"] = own
        found.append(told)
    for told in found:
        told["ratio"] = told["round_seconds"] / found[0]["round_seconds"]
        told["best_ratio"] = told["best_seconds"] / found[0]["best_seconds"]
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--clients", type=int, nargs="+", default=[1000, 80_000])
    options.add_argument("--methods", nargs="+", default=["fedavg", "fedper", "ditto"])
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--final", type=int, default=8000)
    options.add_argument("--personal", default="disk", choices=("auto", "memory", "disk"))
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    results, broken = {}, []
    heads = ("ms a round, median", "ratio", "ms, best round", "ratio", "peak memory, GiB")
    print("| method | clients |", *(f"{head} |" for head in (*heads, "on disk, MiB")))
    print("|---" * 8 + "|")
    for name in given.methods:
        results[name] = measured(name, given.clients, given.rounds, given.personal, given.final)
        for told in results[name]:
            figures = (
                METHODS[name].title,
                f"{told['clients']:,}",
                f"{1000 * told['round_seconds']:.0f}",
                f"{told['ratio']:.2f}",
                f"{1000 * told['best_seconds']:.0f}",
                f"{told['best_ratio']:.2f}",
                f"{told['peak_memory_bytes'] / 2**30:.2f}",
                f"{told['personal_bytes_on_disk'] / 2**20:.1f}",
            )
            print("|", *(f"{figure} |" for figure in figures), flush=True)
            if told["peak_memory_bytes"] > MOST_BYTES or told["ratio"] > MOST_RATIO:
                broken.append(f"{name} with {told['clients']:,} clients")
    if given.json is not None:
        about = {
            "torch": torch.__version__,
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
            "cohort": COHORT,
            "words": WORDS,
            "length": LENGTH,
            "units": UNITS,
            "personal": given.personal,
        }
        given.json.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")
    if broken:
        raise SystemExit(f"more memory or time than promised: {', '.join(broken)}")


if __name__ == "__main__":
    main()
