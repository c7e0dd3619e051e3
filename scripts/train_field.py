"""Train one line of the outside tables: one method on all splits of a table at once."""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
from field_lines import FINAL, TRAINED_AS, Line, loaded
from reproduce_field import MILESTONES, TABLES, key_of, method_of

from idiolect.data import Dataset
from idiolect.engine.evaluation import ClientScores
from idiolect.engine.outcome import BASELINE
from idiolect.engine.rounds import Simulation
from idiolect.experiment.build import SharedParts, build_job, build_shared, describe
from idiolect.experiment.job import SimulatedJob
from idiolect.experiment.repro.index import items
from idiolect.experiment.repro.seed_figures import BEST_TEST_ROUND
from idiolect.experiment.schema import Experiment
from idiolect.experiment.train import planned_work
from idiolect.results.document import versions

# One global network needs many rounds to be flat.
LONG = ("FedAvg", "FedProx", "FedGen")
TUNED_ONCE = ("FedAvg + FT", "FedBABU")  # not at every point of the curve, as in PFLlib
SETTLED = 2  # first rounds: kernels are chosen, graphs recorded
EVERY, POINTS = 5, 40  # rounds between points of a curve, at least; points of it that are kept
SCORING = 0.1  # share of the time that scoring may take
FLAT, FLAT_FROM = 0.001, 60  # rise in the second half below which a line ends; rounds before that

Curve = list[tuple[int, dict[str, tuple[float, float]]]]
"""Of one split: scored rounds, and each model's accuracy over test rows and mean over clients."""


class Cache:
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


def train_line(line: Line, args: argparse.Namespace, cache: Cache) -> None:
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
    job = stacked(experiments, label, cache)
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
        about = describe(experiment, cache.parts(run, experiment))["data"]["federations"][0]
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


def stacked(experiments: Mapping[str, Experiment], label: str, cache: Cache) -> SimulatedJob:
    """Make one job of a method on several splits, each with a server of its own."""
    jobs = []
    for run, experiment in experiments.items():
        method = next(one for one in experiment.methods if one.label_or_name == label)
        parts = cache.parts(run, experiment)
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
