"""A method's seeds in parts, each in a folder of its own: seeds that come later are a new part."""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from idiolect.core import checkpoint
from idiolect.core.checkpoint import write_whole
from idiolect.engine.callbacks import Watch
from idiolect.engine.outcome import Outcome
from idiolect.errors import Diverged
from idiolect.experiment import run_state as memories
from idiolect.experiment.job import Job
from idiolect.experiment.train import Trained, finished, train
from idiolect.results import trace
from idiolect.results.joining import joined, of_seeds
from idiolect.results.models import PARTS, folder_name

_PART, _FAILED = "part.json", "failed.json"
_LONGEST = 60  # letters of a folder's name

Seeds = tuple[int, ...]
Start = Callable[[Job, Path], None]
"""Puts a checkpoint into a folder from which a job may go on."""


class Part(NamedTuple):
    """A folder, and the seeds that are trained there together."""

    folder: Path
    seeds: Seeds


class Bench:
    """Trains jobs, each in its folder; rounds that an earlier one went through are not repeated."""

    def __init__(self, watch: Watch | None = None) -> None:
        self._watch = watch
        self._done: list[tuple[Job, Path]] = []

    def train(self, job: Job, folder: Path) -> Trained:
        """Go on with a job where its folder left off; take over the rounds of one trained alike."""
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
        """Read the first job that trained alike from its checkpoint; memory holds none of them."""
        for other, folder in self._done:
            if job.trains_as(other) and (found := finished(other, folder)):
                return [found]
        return []


def trained(
    bench: Bench,
    home: Path,
    seeds: Sequence[int],
    make: Callable[[Seeds], Job],
    start: Start | None = None,
    *,
    trial: bool = False,
) -> Outcome:
    """Train a method under some seeds, as far as they are not trained yet; return those seeds'."""
    outcomes: list[Outcome] = []
    for part in planned(home, seeds, lambda left: bench.alike(left, make)):
        job = make(part.seeds)
        if start is not None and not has_begun(job, part.folder):
            start(job, part.folder)
        with _diverging(job, part.folder, trial):
            done = bench.train(job, part.folder)
        wanted = [seed for seed in part.seeds if seed in seeds]
        seen = {members.seed for one in outcomes for members in one.members}
        outcomes.append(of_seeds(done.outcome, [seed for seed in wanted if seed not in seen]))
    return joined(outcomes, seeds)


def planned(
    home: Path, seeds: Sequence[int], groups: Callable[[list[int]], list[Seeds]]
) -> list[Part]:
    """List the parts that hold some of the seeds, and make parts for those that none holds.

    Those are one, to be trained together, but for groups that need no training.
    """
    left, chosen = list(seeds), []
    for part in found(home):
        if any(seed in left for seed in part.seeds):
            chosen.append(part)
            left = [seed for seed in left if seed not in part.seeds]
    for group in groups(left) if left else ():
        chosen.append(_begun(home, group))
        left = [seed for seed in left if seed not in group]
    if left:
        chosen.append(_begun(home, tuple(left)))
    return chosen


def _begun(home: Path, seeds: Seeds) -> Part:
    name = "seeds-" + "-".join(map(str, seeds))
    if len(name) > _LONGEST:
        name = f"seeds-{seeds[0]}-to-{seeds[-1]}-{len(seeds)}"
    while (home / name).exists():
        name += "-"
    (home / name).mkdir(parents=True)
    write_whole(home / name / _PART, json.dumps({"seeds": list(seeds)}).encode())
    return Part(home / name, seeds)


def adopted(
    folder: Path, home: Path, label: str, seeds: Seeds, make: Callable[[Seeds], Job]
) -> None:
    """Let what `idiolect run` left in a folder count as a part, if it is of this experiment."""
    path = memories.checkpoint_path(folder, label)
    if found(home) or not path.exists():
        return
    _, meta = checkpoint.read(path)
    own = tuple(seed for seed in meta["identity"]["seeds"] if seed in seeds)
    if list(own) != meta["identity"]["seeds"]:
        return
    job = make(own)
    same = not memories.first_difference(meta["identity"], job.identity)
    if same and meta["round"] <= job.rounds:
        part = _begun(home, own)
        write_whole(memories.checkpoint_path(part.folder, label), path.read_bytes(), private=True)
        recorded = trace.path_of(folder, label)
        if recorded.is_file():
            write_whole(trace.path_of(part.folder, label), recorded.read_bytes())


def found(home: Path) -> list[Part]:
    """List the parts that were begun; a folder whose making was cut short is none."""
    parts = []
    for path in sorted(home.glob(f"*/{_PART}")):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            parts.append(Part(path.parent, tuple(json.loads(path.read_text())["seeds"])))
    return parts


def holding(folder: Path, label: str, seed: int | None) -> Path | None:
    """Find the part of a comparison that holds a method's seed, its first unless told; or None."""
    if memories.checkpoint_path(folder, label).exists():
        return None
    homes = sorted((folder / PARTS / folder_name(label)).glob("*"))
    parts = [part for home in homes for part in found(home)]
    if not parts:
        return None
    first = min(part.seeds[0] for part in parts) if seed is None else seed
    return next((part.folder for part in parts if first in part.seeds), None)


def recorded(homes: Sequence[Path], label: str, seeds: Sequence[int]) -> trace.Trace | None:
    """Join what a method's parts recorded round by round; None where they did not."""
    parts = [part for home in homes for part in found(home)]
    held = [part.folder for part in parts if trace.path_of(part.folder, label).is_file()]
    return trace.joined([trace.read(folder, label) for folder in held], seeds)


def has_begun(job: Job, folder: Path) -> bool:
    """Say whether a job has a checkpoint."""
    return memories.checkpoint_path(folder, job.label).exists()


def head_start(trial: Job, kept: Path, job: Job, folder: Path) -> bool:
    """Let a job go on from where a trial of the same settings ended; say whether it could."""
    if not set(job.seeds) <= set(trial.seeds) or trial.rounds > job.rounds:
        return False
    done = finished(trial, kept)
    if done is None:
        return False
    places = [trial.seeds.index(seed) for seed in job.seeds]
    memory = memories.of_seeds(done.memory, places, len(trial.seeds))
    every = job.evaluate.every
    at_end = memory.round == job.rounds
    memory = memory.unscored()._replace(
        notices=(),
        curve=tuple(p for p in memory.curve if at_end or p.round % every == 0),
    )
    if trace.path_of(kept, trial.label).is_file():
        recorded = trace.joined([trace.read(kept, trial.label)], job.seeds)
        if recorded is not None:
            trace.write(folder, dataclasses.replace(recorded, label=job.label))
    path = memories.checkpoint_path(folder, job.label)
    place = job.backend.whereabouts
    memories.save(path, memory, job.identity, place)
    return True


@contextlib.contextmanager
def _diverging(job: Job, folder: Path, trial: bool) -> Iterator[None]:
    """Remember that a trial diverged: it would do so again. Of others nothing is worth keeping."""
    path = folder / _FAILED
    identity = json.loads(json.dumps(job.identity))
    if path.exists():
        before = json.loads(path.read_text())
        if not memories.first_difference(before["identity"], identity):
            raise Diverged(before["error"])
    try:
        yield
    except Diverged as error:
        if trial:
            write_whole(path, json.dumps({"error": str(error), "identity": identity}).encode())
        else:
            shutil.rmtree(folder, ignore_errors=True)  # a lower rate may start afresh
        raise
