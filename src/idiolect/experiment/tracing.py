"""Record what a method's servers say of themselves, round by round, beside the checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from idiolect.core.tree import Tree
from idiolect.experiment.protocols import Course
from idiolect.results import trace
from idiolect.results.trace import Trace


class Record(NamedTuple):
    """What all servers said after a round; each array is [seed, ...]."""

    round: int
    values: Mapping[str, NDArray[Any]]


def recorded(job: Course, round: int, servers: Tree) -> tuple[Record, ...]:
    """Record a round, where it is due and the method has something to say."""
    if round % _every(job) and round != job.rounds:
        return ()
    said = [job.method.trace(state) for state in servers]
    if not said[0]:
        return ()
    values = {
        name: np.stack([own[name].detach().cpu().numpy() for own in said]) for name in said[0]
    }
    return (Record(round, values),)


def write(folder: Path, job: Course, records: tuple[Record, ...]) -> None:
    """Write all records so far; nothing where there are none."""
    if records:
        values = {name: np.stack([r.values[name] for r in records]) for name in records[0].values}
        rounds = tuple(record.round for record in records)
        trace.write(folder, Trace(job.label, rounds, job.seeds, job.members[0].names, values))


def read(folder: Path, job: Course, round: int) -> tuple[Record, ...]:
    """Read the records up to a round: the file may be ahead of a checkpoint, never behind."""
    if not trace.path_of(folder, job.label).is_file():
        return ()
    kept = trace.read(folder, job.label)
    return tuple(
        Record(number, {name: own[place] for name, own in kept.values.items()})
        for place, number in enumerate(kept.rounds)
        # A last round that is not due any more, since the run goes on, is one like any other.
        if number <= round and (number % _every(job) == 0 or number == job.rounds)
    )


def _every(job: Course) -> int:
    return job.evaluate.trace or job.evaluate.every
