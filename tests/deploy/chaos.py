"""A run with a random fault every few seconds, for real; its attendance must fit the faults.

Usage: python chaos.py [--rounds 40] [--every 4] [--seed 0]: prints what was done and was found.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from running import ADMIN, Running

NODES = 4
TOML = """name = "chaos"
seeds = [0]
rounds = {rounds}
[data]
partition = {{ name = "iid", clients = 4, per_client = 60 }}
[model]
name = "dnn"
hidden = 16
[training]
batch = 2
epochs = 60
lr = 0.01
[evaluate]
every = {rounds}
[deploy]
timeout = 60
join = 60
minimum = 2
[[methods]]
name = "fedper"
"""
KINDS = ("node", "node", "pause", "pause", "wrapper", "server", "job", "terminal", "away")
PAUSE = 12.0  # seconds that processes are stopped, or a node is switched off: longer than a round
LONG = ("pause", "away")  # noted when they begin and when they end
SLACK = 45.0  # seconds in which a site that was hit may still be missing: it has to start anew


class Chaos:
    """A federation, its run, and what was done to it."""

    def __init__(self, folder, rounds, seed, kinds=KINDS):
        self.draw, self.kinds = random.Random(seed), kinds
        self.out, self.toml = folder / "out", folder / "chaos.toml"
        self.toml.write_text(TOML.format(rounds=rounds))
        self.federation = Running(folder, NODES)
        self.done = []  # faults: when, what, of whom
        self.watch = None

    def watched(self):
        """Watch the run: submit it, or come back to it."""
        words = ["run", str(self.toml), "--on", str(self.federation.kits / ADMIN)]
        resume = ["--resume"] if self.out.exists() else []
        with (self.federation.folder / "chaos.out").open("ab") as file:
            self.watch = subprocess.Popen(
                [sys.executable, "-m", "idiolect", *words, "--out", str(self.out), *resume],
                stdout=file,
                stderr=file,
            )

    def node(self, site):
        """Start a site's node."""
        number = self.federation.sites.index(site)
        self.federation.start(site, "--data", "embedded", "--client", str(number))

    def fault(self):
        """Do one thing to someone."""
        kind = self.draw.choice(self.kinds)
        site = self.draw.choice(self.federation.sites)
        if kind == "terminal":
            self.watch.kill()
            self.watch.wait()
            self.watched()
        elif kind == "wrapper":
            self.federation.processes[site].kill()
            self.federation.processes[site].wait()
            self.node(site)
        elif kind == "pause":
            own = [*self.federation.engine(site), *self.federation.training(site)]
            kill(own, signal.SIGSTOP)
            self.note(kind, site)
            time.sleep(PAUSE)
            kill(own, signal.SIGCONT)
        elif kind == "away":
            self.federation.processes[site].kill()
            self.federation.processes[site].wait()
            kill(self.federation.engine(site), signal.SIGKILL)
            self.note(kind, site)
            time.sleep(PAUSE)
            self.node(site)
        else:
            own = self.federation.engine(site if kind == "node" else "server")
            kill(own[1:] if kind == "job" else own, signal.SIGKILL)
        self.note(kind, "" if kind in ("terminal", "server", "job") else site)

    def note(self, kind, site):
        """Write down what was done."""
        self.done.append((time.time(), kind, site))
        print(f"{time.strftime('%H:%M:%S')} {kind} {site}", flush=True)

    def run(self, every, limit):
        """Start everyone, do faults until the run is over; return its result."""
        self.federation.start_all()
        self.watched()
        runs = self.federation.kits / "server" / "idiolect" / "runs"
        until = time.time() + limit
        while not list(runs.glob("*/attendance.jsonl")):
            assert time.time() < until, self.federation.told()
            time.sleep(0.2)
        while not (self.out / "result.json").exists():
            assert time.time() < until, self.federation.told()
            time.sleep(self.draw.uniform(0.5, 1.5) * every)
            if self.watch.poll() is not None:
                if (self.out / "result.json").exists():
                    break
                self.watched()  # it gave up, which the run does not
            self.fault()
        return json.loads((self.out / "result.json").read_text())


def kill(pids, sign):
    """Send processes a signal."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sign)


def unexplained(record, faults):
    """Return the missed rounds of sites to whom nothing was done at the time.

    A server that was hit loses sight of everyone.
    """
    found, before = [], 0.0
    for line in record:
        for site, did in line["seeds"][0].items():
            near = [
                when
                for when, _, whom in faults
                if whom in (site, "") and before - SLACK <= when <= line["at"]
            ]
            if did != "reported" and not near:
                found.append((line["round"], site, did))
        before = line["at"]
    return found


def unnoticed(record, faults):
    """Return rounds that a site is said to have reported in though it was gone all the time."""
    begun, found = {}, []
    for when, kind, site in faults:
        if kind in LONG:
            start = begun.pop(site, None)
            if start is None:
                begun[site] = when
                continue
            for earlier, line in itertools.pairwise(record):
                within = start <= earlier["at"] and line["at"] <= when
                if within and line["seeds"][0].get(site) == "reported":
                    found.append((line["round"], site))
    return found


def judged(chaos, result):
    """Compare the attendance with the faults; return the facts."""
    lines = (chaos.out / "attendance.jsonl").read_text().splitlines()
    by_round = {}
    for line in filter(None, lines):
        with contextlib.suppress(ValueError):
            told = json.loads(line)
            by_round[told["round"]] = told
    record = [by_round[round] for round in sorted(by_round)]
    seed = result["methods"]["FedPer"]["seeds"][0]
    sites = seed["attendance"].values()
    return {
        "rounds": result["methods"]["FedPer"]["rounds"],
        "recorded": len(record),
        "faults": len(chaos.done),
        "reported": sum(own["reported"] for own in sites),
        "missed": sum(own["missed"] for own in sites),
        "participations": seed["traffic"]["participations"],
        "unexplained": unexplained(record, chaos.done),
        "unnoticed": unnoticed(record, chaos.done),
        "by_site": {site: own["spans"] for site, own in seed["attendance"].items()},
    }


def main():
    """Do it, and print what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--every", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=1500.0)
    parser.add_argument("--only", choices=sorted({*KINDS}), help="this kind of fault alone")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        kinds = (given.only,) if given.only else KINDS
        chaos = Chaos(Path(scratch), given.rounds, given.seed, kinds)
        began = time.time()
        try:
            result = chaos.run(given.every, given.limit)
            print(json.dumps({"seconds": time.time() - began, **judged(chaos, result)}, indent=1))
        finally:
            kill([chaos.watch.pid] if chaos.watch else [], signal.SIGKILL)
            chaos.federation.close()


if __name__ == "__main__":
    main()
