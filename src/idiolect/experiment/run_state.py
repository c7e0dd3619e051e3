"""Record what a method's servers say of themselves, round by round, beside the checkpoint."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from idiolect.core import checkpoint
from idiolect.core.capabilities import StateTrace, has
from idiolect.core.tree import Tree
from idiolect.engine.outcome import Scores, Speed, Wire
from idiolect.errors import CheckpointError
from idiolect.experiment.job import Course
from idiolect.results import trace
from idiolect.results.models import folder_name
from idiolect.results.trace import Trace


class TraceRecord(NamedTuple):
    """What all servers said after a round; each array is [seed, ...]."""

    round: int
    values: Mapping[str, NDArray[Any]]


def trace_records(job: Course, round: int, servers: Tree) -> tuple[TraceRecord, ...]:
    """Record a round, where it is due and the method has something to say."""
    method = job.method
    if not has(method, StateTrace) or (round % _trace_every(job) and round != job.rounds):
        return ()
    said = [method.trace(state) for state in servers]
    values = {
        name: np.stack([own[name].detach().cpu().numpy() for own in said]) for name in said[0]
    }
    return (TraceRecord(round, values),)


def write_trace(folder: Path, job: Course, records: tuple[TraceRecord, ...]) -> None:
    """Write all records so far; nothing where there are none."""
    if records:
        values = {name: np.stack([r.values[name] for r in records]) for name in records[0].values}
        rounds = tuple(record.round for record in records)
        trace.write_trace(folder, Trace(job.label, rounds, job.seeds, job.members[0].names, values))


def read_trace(folder: Path, job: Course, round: int) -> tuple[TraceRecord, ...]:
    """Read the records up to a round: the file may be ahead of a checkpoint, never behind."""
    if not trace.trace_path(folder, job.label).is_file():
        return ()
    kept = trace.read_trace(folder, job.label)
    return tuple(
        TraceRecord(number, {name: own[place] for name, own in kept.values.items()})
        for place, number in enumerate(kept.rounds)
        # A last round that is not due any more, since the run goes on, is one like any other.
        if number <= round and (number % _trace_every(job) == 0 or number == job.rounds)
    )


def _trace_every(job: Course) -> int:
    return job.evaluate.trace or job.evaluate.every


# Everything a run is between two rounds, and its form on disk.


PERSONAL = "personal"  # the folder of personal state on disk


class CurvePoint(NamedTuple):
    """Scores after a round, each [seed, client]."""

    round: int
    scores: Scores


class RunState(NamedTuple):
    """A run after some rounds. Never changed, only replaced: any one of them can be saved."""

    round: int
    state: Tree  # servers' and personal; or, read from a file, leaves by name
    wire: tuple[Wire, ...]
    curve: tuple[CurvePoint, ...] = ()
    speed: Speed = Speed()
    widths: Mapping[str, int] = MappingProxyType({})
    padding: float = 0.0
    final: Scores | None = None  # on test data, once training is over
    facts: Mapping[str, NDArray[Any]] = MappingProxyType({})
    notices: tuple[str, ...] = ()
    shared: str = ""  # the method whose rounds were taken over
    trace: tuple[TraceRecord, ...] = ()  # in a file of its own
    left_out: tuple[Mapping[str, int], ...] = ()  # per seed: client -> rounds it was left out of
    crossing: Mapping[str, Mapping[str, list[int]]] = MappingProxyType({})  # what went where
    told: tuple[Mapping[str, torch.Tensor], ...] = ()  # per seed: what clients told, added up
    exchanged: tuple[Wire, ...] = ()  # what crossed the network for it, when training was over

    @property
    def crossed(self) -> tuple[Wire, ...]:
        """All that crossed the network so far."""
        if not self.exchanged:
            return self.wire
        return tuple(one + more for one, more in zip(self.wire, self.exchanged, strict=True))

    def unscored(self) -> "RunState":
        """Return this as it was before it was scored on test data."""
        return self._replace(final=None, facts={}, told=(), exchanged=())


def checkpoint_path(folder: Path, label: str) -> Path:
    """Say where a method's checkpoint stands."""
    return folder / "checkpoints" / f"{folder_name(label)}.safetensors"


def globals_folder(folder: Path, label: str) -> Path:
    """Say where a method's global models of every round stand, if they are kept."""
    return folder / "globals" / folder_name(label)


def personal_folder(folder: Path, label: str) -> Path:
    """Say where a method's personal state stands, if it is kept on disk."""
    return folder / PERSONAL / folder_name(label)


def save(
    path: Path,
    memory: RunState,
    identity: Mapping[str, Any],
    place: str,
) -> None:
    """Write a checkpoint."""
    keys = sorted({key for point in memory.curve for key in point.scores})
    curves = {key: _tensor(np.stack([p.scores[key] for p in memory.curve])) for key in keys}
    kept = {
        "state": memory.state,
        "curve": curves,
        "final": {key: _tensor(values) for key, values in (memory.final or {}).items()},
        "facts": {key: _tensor(values) for key, values in memory.facts.items()},
        "told": {str(place): dict(sums) for place, sums in enumerate(memory.told)},
    }
    meta = {
        "identity": identity,
        "place": place,
        "round": memory.round,
        "finished": memory.final is not None,
        "evaluated": [point.round for point in memory.curve],
        "wire": [dataclasses.asdict(wire) for wire in memory.wire],
        "speed": dataclasses.asdict(memory.speed),
        "widths": dict(memory.widths),
        "padding": memory.padding,
        "notices": list(memory.notices),
        "shared": memory.shared,
        "left_out": [dict(counts) for counts in memory.left_out],
        "crossing": dict(memory.crossing),
        "exchanged": [dataclasses.asdict(wire) for wire in memory.exchanged],
    }
    checkpoint.save(path, kept, meta)


def load(path: Path, identity: Mapping[str, Any], place: str) -> RunState:
    """Read a checkpoint of the same experiment; `state` stays leaves by name until it is needed.

    Widths measured on another device are forgotten: there they would be slow or not fit.
    """
    named, meta = checkpoint.read(path)
    if any(name.endswith(".memory.key") for name in named):
        raise CheckpointError(
            f"{path} holds the key of a private run's noise, as earlier versions of idiolect did: "
            "whoever has read the file can remove the noise of every round, past and to come; "
            "delete it and start the run anew"
        )
    if difference := first_difference(meta.get("identity", {}), identity):
        raise CheckpointError(
            f"{path} belongs to another experiment: {difference}; use another --out, or undo the "
            "change"
        )
    sections = ("state", "curve", "final", "facts", "told")
    parts: dict[str, dict[str, torch.Tensor]] = {section: {} for section in sections}
    for name, leaf in named.items():
        part, rest = name.split(".", 1)
        parts[part][rest] = leaf
    curves, final, facts = (
        {name: leaf.numpy() for name, leaf in parts[part].items()}
        for part in ("curve", "final", "facts")
    )
    return RunState(
        round=meta["round"],
        state=parts["state"],
        wire=tuple(Wire(**wire) for wire in meta["wire"]),
        curve=tuple(
            CurvePoint(round, {key: curve[place] for key, curve in curves.items()})
            for place, round in enumerate(meta["evaluated"])
        ),
        speed=Speed(**meta["speed"]),
        widths=meta["widths"] if meta["place"] == place else {},
        padding=meta["padding"],
        final=final if meta["finished"] else None,
        facts=facts,
        notices=tuple(meta["notices"]),
        shared=meta["shared"],
        left_out=tuple(meta.get("left_out", ())),
        crossing=meta.get("crossing", {}),
        told=tuple(
            seed_leaves(parts["told"], place) for place in range(len(meta.get("exchanged", ())))
        ),
        exchanged=tuple(Wire(**wire) for wire in meta.get("exchanged", ())),
    )


def seed_leaves(named: Mapping[str, torch.Tensor], place: int) -> dict[str, torch.Tensor]:
    """Pick the leaves of one seed out of those that are named by seeds."""
    start = f"{place}."
    return {
        name.removeprefix(start): leaf for name, leaf in named.items() if name.startswith(start)
    }


def select_seeds(memory: RunState, places: Sequence[int], count: int) -> RunState:
    """Keep some of the `count` seeds that a memory read from a file is of.

    The servers' states stand one after the other, and so do the seeds' blocks of personal rows.
    """
    state = {}
    for name, leaf in memory.state.items():
        part, rest = name.split(".", 1)
        if part == "server":
            place, dot, inner = rest.partition(".")
            if int(place) in places:
                state[f"server.{places.index(int(place))}{dot}{inner}"] = leaf
        else:
            blocks = leaf.reshape(count, -1, *leaf.shape[1:])
            state[name] = blocks[list(places)].reshape(-1, *leaf.shape[1:])
    return memory._replace(
        state=state,
        wire=tuple(memory.wire[place] for place in places),
        curve=tuple(
            CurvePoint(p.round, {key: values[list(places)] for key, values in p.scores.items()})
            for p in memory.curve
        ),
        left_out=tuple(memory.left_out[place] for place in places) if memory.left_out else (),
        speed=memory.speed.share(len(places) / count),
    )


def first_difference(kept: Any, wanted: Any, key: str = "") -> str:
    """Name the first key that two nested descriptions differ in; empty where they agree."""
    if isinstance(kept, Mapping) and isinstance(wanted, Mapping):
        for name in [*wanted, *(name for name in kept if name not in wanted)]:
            inner = first_difference(kept.get(name), wanted.get(name), f"{key}.{name}".strip("."))
            if inner:
                return inner
        return ""
    # JSON knows no tuples, so what was one comes back as a list.
    if _listed(kept) == _listed(wanted):
        return ""
    return f"{key} was {kept!r} and is now {wanted!r}"


def _listed(value: Any) -> Any:
    return [_listed(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
