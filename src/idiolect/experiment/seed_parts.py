"""A method's seeds in parts, each in a folder of its own; seeds added later are a new part."""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from idiolect.core import checkpoint
from idiolect.core.checkpoint import write_whole
from idiolect.engine.outcome import Outcome, Scores, Speed, Watch
from idiolect.errors import Diverged
from idiolect.experiment import run_state
from idiolect.experiment.job import Job
from idiolect.experiment.train import Trained, finished, train
from idiolect.results import trace
from idiolect.results.run_files import PARTS, folder_name

_PART, _FAILED = "part.json", "failed.json"
_LONGEST = 60  # letters of a folder's name

Seeds = tuple[int, ...]
Start = Callable[[Job, Path], None]
"""Puts a checkpoint into a folder from which a job may go on."""


class Part(NamedTuple):
    """A folder, and the seeds that are trained there together."""

    folder: Path
    seeds: Seeds


class PartTrainer:
    """Trains jobs, each in its folder; rounds that an earlier one went through are not repeated."""

    def __init__(self, watch: Watch | None = None) -> None:
        self._watch = watch
        self._done: list[tuple[Job, Path]] = []

    def train(self, job: Job, folder: Path) -> Trained:
        """Resume a job from its folder, or take over the rounds of one trained alike."""
        donors = [] if has_begun(job, folder) else self._donors(job)
        done = train(job, folder, resume=True, watch=self._watch, earlier=donors)
        self._done.append((job, folder))
        return done

    def alike(self, seeds: Sequence[int], make: Callable[[Seeds], Job]) -> list[Seeds]:
        """List groups of the seeds whose rounds are there to be taken over."""
        left, groups = set(seeds), []
        for other, _ in self._done:
            if set(other.seeds) <= left and make(other.seeds).trains_as(other):
                groups.append(other.seeds)
                left -= set(other.seeds)
        return groups

    def _donors(self, job: Job) -> list[Trained]:
        """Read the first job that trained alike from its checkpoint; none is kept in memory."""
        for other, folder in self._done:
            if job.trains_as(other) and (found := finished(other, folder)):
                return [found]
        return []


def train_parts(
    bench: PartTrainer,
    home: Path,
    seeds: Sequence[int],
    make: Callable[[Seeds], Job],
    start: Start | None = None,
    *,
    trial: bool = False,
) -> Outcome:
    """Train a method under some seeds, as far as they are not trained yet; return those seeds'."""
    outcomes: list[Outcome] = []
    for part in plan_parts(home, seeds, lambda left: bench.alike(left, make)):
        job = make(part.seeds)
        if start is not None and not has_begun(job, part.folder):
            start(job, part.folder)
        with _diverging(job, part.folder, trial):
            done = bench.train(job, part.folder)
        wanted = [seed for seed in part.seeds if seed in seeds]
        seen = {members.seed for one in outcomes for members in one.members}
        outcomes.append(
            outcome_of_seeds(done.outcome, [seed for seed in wanted if seed not in seen])
        )
    return joined_outcome(outcomes, seeds)


def plan_parts(
    home: Path, seeds: Sequence[int], groups: Callable[[list[int]], list[Seeds]]
) -> list[Part]:
    """List the parts that hold some of the seeds, and make parts for those that none holds.

    Those are one, to be trained together, but for groups that need no training.
    """
    left, chosen = list(seeds), []
    for part in list_parts(home):
        if any(seed in left for seed in part.seeds):
            chosen.append(part)
            left = [seed for seed in left if seed not in part.seeds]
    for group in groups(left) if left else ():
        chosen.append(_new_part(home, group))
        left = [seed for seed in left if seed not in group]
    if left:
        chosen.append(_new_part(home, tuple(left)))
    return chosen


def _new_part(home: Path, seeds: Seeds) -> Part:
    name = "seeds-" + "-".join(map(str, seeds))
    if len(name) > _LONGEST:
        name = f"seeds-{seeds[0]}-to-{seeds[-1]}-{len(seeds)}"
    while (home / name).exists():
        name += "-"
    (home / name).mkdir(parents=True)
    write_whole(home / name / _PART, json.dumps({"seeds": list(seeds)}).encode())
    return Part(home / name, seeds)


def adopt_run(
    folder: Path, home: Path, label: str, seeds: Seeds, make: Callable[[Seeds], Job]
) -> None:
    """Make a part of what `idiolect run` left in a folder, if it is of this experiment."""
    path = run_state.checkpoint_path(folder, label)
    if list_parts(home) or not path.exists():
        return
    _, meta = checkpoint.read(path)
    own = tuple(seed for seed in meta["identity"]["seeds"] if seed in seeds)
    if list(own) != meta["identity"]["seeds"]:
        return
    job = make(own)
    same = not run_state.first_difference(meta["identity"], job.identity)
    if same and meta["round"] <= job.rounds:
        part = _new_part(home, own)
        write_whole(run_state.checkpoint_path(part.folder, label), path.read_bytes(), private=True)
        recorded = trace.trace_path(folder, label)
        if recorded.is_file():
            write_whole(trace.trace_path(part.folder, label), recorded.read_bytes())


def list_parts(home: Path) -> list[Part]:
    """List the parts that were begun; a folder whose making was cut short is none."""
    parts = []
    for path in sorted(home.glob(f"*/{_PART}")):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            parts.append(Part(path.parent, tuple(json.loads(path.read_text())["seeds"])))
    return parts


def part_with_seed(folder: Path, label: str, seed: int | None) -> Path | None:
    """Find the part of a comparison that holds a method's seed, by default its first; or None."""
    if run_state.checkpoint_path(folder, label).exists():
        return None
    homes = sorted((folder / PARTS / folder_name(label)).glob("*"))
    parts = [part for home in homes for part in list_parts(home)]
    if not parts:
        return None
    first = min(part.seeds[0] for part in parts) if seed is None else seed
    return next((part.folder for part in parts if first in part.seeds), None)


def joined_trace(homes: Sequence[Path], label: str, seeds: Sequence[int]) -> trace.Trace | None:
    """Join what a method's parts recorded round by round; None where they did not."""
    parts = [part for home in homes for part in list_parts(home)]
    held = [part.folder for part in parts if trace.trace_path(part.folder, label).is_file()]
    return trace.joined_traces([trace.read_trace(folder, label) for folder in held], seeds)


def has_begun(job: Job, folder: Path) -> bool:
    """Return whether a job has a checkpoint."""
    return run_state.checkpoint_path(folder, job.label).exists()


def head_start(trial: Job, kept: Path, job: Job, folder: Path) -> bool:
    """Start a job from the end of a trial of the same settings; return whether it could."""
    if not set(job.seeds) <= set(trial.seeds) or trial.rounds > job.rounds:
        return False
    done = finished(trial, kept)
    if done is None:
        return False
    places = [trial.seeds.index(seed) for seed in job.seeds]
    state = run_state.select_seeds(done.state, places, len(trial.seeds))
    every = job.evaluate.every
    at_end = state.round == job.rounds
    state = state.unscored()._replace(
        notices=(),
        curve=tuple(p for p in state.curve if at_end or p.round % every == 0),
    )
    if trace.trace_path(kept, trial.label).is_file():
        recorded = trace.joined_traces([trace.read_trace(kept, trial.label)], job.seeds)
        if recorded is not None:
            trace.write_trace(folder, dataclasses.replace(recorded, label=job.label))
    path = run_state.checkpoint_path(folder, job.label)
    place = job.backend.whereabouts
    run_state.save(path, state, job.identity, place)
    return True


@contextlib.contextmanager
def _diverging(job: Job, folder: Path, trial: bool) -> Iterator[None]:
    """Record that a trial diverged: it would do so again. Other jobs that diverge are deleted."""
    path = folder / _FAILED
    identity = json.loads(json.dumps(job.identity))
    if path.exists():
        before = json.loads(path.read_text())
        if not run_state.first_difference(before["identity"], identity):
            raise Diverged(before["error"])
    try:
        yield
    except Diverged as error:
        if trial:
            write_whole(path, json.dumps({"error": str(error), "identity": identity}).encode())
        else:
            shutil.rmtree(folder, ignore_errors=True)  # a lower rate may start afresh
        raise


# Outcomes of one method by seed: part of one taken, and several joined into one.


def outcome_of_seeds(outcome: Outcome, seeds: Sequence[int]) -> Outcome:
    """Keep some seeds of an outcome, in the order asked for, and their share of the time."""
    held = [members.seed for members in outcome.members]
    places = [held.index(seed) for seed in seeds]
    if places == list(range(len(held))):
        return outcome
    return dataclasses.replace(
        outcome,
        members=tuple(outcome.members[place] for place in places),
        wire=tuple(outcome.wire[place] for place in places),
        left_out=tuple(outcome.left_out[place] for place in places) if outcome.left_out else (),
        took_part=tuple(outcome.took_part[n] for n in places) if outcome.took_part else (),
        curves={key: values[:, places] for key, values in outcome.curves.items()},
        final={key: values[places] for key, values in outcome.final.items()},
        facts={key: values[places] for key, values in outcome.facts.items()},
        reasons=tuple(outcome.reasons[place] for place in places) if outcome.reasons else (),
        pooled=tuple(outcome.pooled[place] for place in places) if outcome.pooled else (),
        speed=outcome.speed.share(len(places) / len(held)),
    )


def joined_outcome(outcomes: Sequence[Outcome], seeds: Sequence[int]) -> Outcome:
    """Join outcomes of different seeds, in the order of `seeds`; settings may differ by seed."""
    first = outcomes[0]
    if len(outcomes) == 1:
        return outcome_of_seeds(first, seeds)
    whole = dataclasses.replace(
        first,
        about={**first.about, "settings": _settings(outcomes, seeds)},
        members=tuple(members for one in outcomes for members in one.members),
        wire=tuple(wire for one in outcomes for wire in one.wire),
        left_out=tuple(own for one in outcomes for own in one.left_out),
        took_part=tuple(own for one in outcomes for own in one.took_part),
        curves=_together(outcomes, lambda one: one.curves, axis=1),
        final=_together(outcomes, lambda one: one.final, axis=0),
        facts=_together(outcomes, lambda one: one.facts, axis=0),
        reasons=tuple(own for one in outcomes for own in one.reasons),
        pooled=tuple(own for one in outcomes for own in one.pooled)
        if all(one.pooled for one in outcomes)
        else (),
        speed=Speed(
            sum(one.speed.examples for one in outcomes),
            sum(one.speed.train_seconds for one in outcomes),
            sum(one.speed.judge_seconds for one in outcomes),
        ),
        notices=tuple(dict.fromkeys(text for one in outcomes for text in one.notices)),
    )
    return outcome_of_seeds(whole, seeds)


def _settings(outcomes: Sequence[Outcome], seeds: Sequence[int]) -> dict[str, Any]:
    """Return settings that all share as they are, and others as a list, one for each seed."""
    by_seed = {own.seed: one.about["settings"] for one in outcomes for own in one.members}
    held = [by_seed[seed] for seed in seeds]
    return {
        key: value if all(own.get(key) == value for own in held) else [own[key] for own in held]
        for key, value in held[0].items()
    }


def _together(outcomes: Sequence[Outcome], part: Callable[[Outcome], Scores], axis: int) -> Scores:
    """Stack arrays that all have in the same form; a fact of some settings only is left out."""
    held = [part(one) for one in outcomes]
    return {
        key: np.concatenate([own[key] for own in held], axis=axis)
        for key, values in held[0].items()
        if all(key in own and _form(own[key], axis) == _form(values, axis) for own in held)
    }


def _form(values: np.ndarray, axis: int) -> tuple[int, ...]:
    return tuple(size for place, size in enumerate(values.shape) if place != axis)
