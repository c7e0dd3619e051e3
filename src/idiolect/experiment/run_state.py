"""The state of a run between two rounds, its checkpoints, and the outcome it amounts to."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from idiolect.core import capabilities, checkpoint
from idiolect.core.capabilities import Privacy, StateTrace, has
from idiolect.core.tree import Tree
from idiolect.engine.outcome import Outcome, Scores, Speed, Wire
from idiolect.engine.rounds import Simulation
from idiolect.engine.sampling import watched
from idiolect.errors import CheckpointError
from idiolect.experiment.job import Job, Rounds
from idiolect.results import trace
from idiolect.results.run_files import folder_name
from idiolect.results.trace import Trace

PERSONAL = "personal"  # the folder of personal state on disk

# A checkpoint costs milliseconds to seconds; losing this much work to a crash is harmless.
_SECONDS_BETWEEN = 5.0

Clients = list[NDArray[np.int64]]
"""The clients that are evaluated under each seed, in order."""


class TraceRecord(NamedTuple):
    """What the servers of all seeds recorded after a round; each array is [seed, ...]."""

    round: int
    values: Mapping[str, NDArray[Any]]


class CurvePoint(NamedTuple):
    """Scores after a round, each [seed, client]."""

    round: int
    scores: Scores


class RunState(NamedTuple):
    """A run after some rounds. Immutable, so that any of them can be saved at any time."""

    round: int
    tree: Tree  # servers' and personal state; or, read from a file, leaves by name
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
    exchange_sums: tuple[
        Mapping[str, torch.Tensor], ...
    ] = ()  # per seed: sums of the final exchange
    exchanged: tuple[Wire, ...] = ()  # traffic of the final exchange
    pooled: tuple[Mapping[str, Any], ...] = ()  # per seed, by model: all clients' rows together

    def unscored(self) -> "RunState":
        """Return the state before it was evaluated on test data."""
        return self._replace(final=None, facts={}, exchange_sums=(), exchanged=(), pooled=())


# Paths in a run folder.


def checkpoint_path(folder: Path, label: str) -> Path:
    """Return the path of a method's checkpoint."""
    return folder / "checkpoints" / f"{folder_name(label)}.safetensors"


def globals_folder(folder: Path, label: str) -> Path:
    """Return the folder of a method's global models of every round, if they are kept."""
    return folder / "globals" / folder_name(label)


def personal_folder(folder: Path, label: str) -> Path:
    """Return the folder of a method's personal state, if it is kept on disk."""
    return folder / PERSONAL / folder_name(label)


# Checkpoints.


class Checkpointer:
    """Saves checkpoints of a job when they are due; does nothing without a folder."""

    def __init__(self, job: Job, folder: Path | None) -> None:
        self._job = job
        self._folder = folder
        self._path = folder and checkpoint_path(folder, job.label)
        self._identity = job.identity
        self._place = job.backend.whereabouts
        self._saved_at = time.monotonic()
        self._saved_round = -1
        # Holding the saved tree keeps the file of personal state from reusing its rows.
        self._saved: Tree = ()
        self._simulation: Simulation | None = None

    def start(self, simulation: Rounds, state: RunState) -> None:
        """Remember the simulation, and the state on disk that it starts from."""
        self._saved = state.tree
        if isinstance(simulation, Simulation):
            self._simulation = simulation

    def load(self) -> RunState | None:
        """Read the checkpoint, if there is one."""
        if self._folder is None or self._path is None or not self._path.exists():
            return None
        job, state = self._job, load(self._path, self._identity, self._place)
        if state.round > job.rounds:
            raise CheckpointError(
                f"{self._path} is at round {state.round}, beyond the {job.rounds} asked for; raise "
                "rounds, or use another --out"
            )
        if state.round < job.rounds:
            # The earlier run ended here; for the longer one this is a round like any other.
            curve = tuple(p for p in state.curve if p.round % job.evaluate.every == 0)
            state = state.unscored()._replace(curve=curve)
        return state._replace(trace=_read_trace(self._folder, job, state.round))

    def save_if_due(self, state: RunState) -> None:
        """Save after so many rounds, or so many seconds."""
        every = self._job.checkpoint_every
        if every:
            due = state.round % every == 0
        else:
            due = time.monotonic() - self._saved_at >= _SECONDS_BETWEEN
        if due:
            self.save(state)

    def save_last(self, state: RunState) -> None:
        """Save what is not saved yet: the run may end here."""
        if state.round > max(self._saved_round, 0):
            self.save(state)

    def save_before_release(self, state: RunState) -> None:
        """Save a round that cannot be repeated, before anyone sees any of its outcome.

        Were it lost after it was seen, it would be repeated with other noise, and the two outcomes
        together would reveal more than one may.
        """
        if has(self._job.method, Privacy) and not self._job.method.repeatable:
            self.save(state)

    def keep_globals(self, state: RunState) -> None:
        """Keep the servers' states of a round, where the user asked for all of them."""
        if self._folder is not None and self._job.evaluate.keep_globals:
            own = globals_folder(self._folder, self._job.label)
            meta = {"seeds": list(self._job.seeds), "round": state.round}
            path = own / f"round-{state.round:04d}.safetensors"
            checkpoint.save(path, state.tree["server"], meta)

    def save(self, state: RunState) -> None:
        """Save now; the trace first, so that it is never behind the checkpoint."""
        if self._folder is not None and self._path is not None:
            _write_trace(self._folder, self._job, state.trace)
            if self._simulation is not None:
                self._simulation.flush()
            save(self._path, state, self._identity, self._place)
            self._saved = state.tree
            self._saved_at, self._saved_round = time.monotonic(), state.round


def save(path: Path, state: RunState, identity: Mapping[str, Any], place: str) -> None:
    """Write a checkpoint."""
    keys = sorted({key for point in state.curve for key in point.scores})
    kept = {
        "state": state.tree,
        "curve": {key: _tensor(np.stack([p.scores[key] for p in state.curve])) for key in keys},
        "final": {key: _tensor(values) for key, values in (state.final or {}).items()},
        "facts": {key: _tensor(values) for key, values in state.facts.items()},
        "told": {str(place): dict(sums) for place, sums in enumerate(state.exchange_sums)},
    }
    meta = {
        "identity": identity,
        "place": place,
        "round": state.round,
        "finished": state.final is not None,
        "evaluated": [point.round for point in state.curve],
        "wire": [dataclasses.asdict(wire) for wire in state.wire],
        "speed": dataclasses.asdict(state.speed),
        "widths": dict(state.widths),
        "padding": state.padding,
        "notices": list(state.notices),
        "shared": state.shared,
        "left_out": [dict(counts) for counts in state.left_out],
        "crossing": dict(state.crossing),
        "exchanged": [dataclasses.asdict(wire) for wire in state.exchanged],
        "pooled": list(state.pooled),
    }
    checkpoint.save(path, kept, meta)


def load(path: Path, identity: Mapping[str, Any], place: str) -> RunState:
    """Read a checkpoint of the same experiment; `tree` stays leaves by name.

    Widths measured on another device are dropped: there they would be slow or not fit.
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
    exchanged = tuple(Wire(**wire) for wire in meta.get("exchanged", ()))
    return RunState(
        round=meta["round"],
        tree=parts["state"],
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
        exchange_sums=tuple(
            seed_leaves(parts["told"], f"{place}.") for place in range(len(exchanged))
        ),
        exchanged=exchanged,
        pooled=tuple(meta.get("pooled", ())),
    )


def seed_leaves(named: Mapping[str, torch.Tensor], start: str) -> dict[str, torch.Tensor]:
    """Return the leaves whose names start with this, such as those of one seed, without it."""
    return {
        name.removeprefix(start): leaf for name, leaf in named.items() if name.startswith(start)
    }


def select_seeds(state: RunState, places: Sequence[int], count: int) -> RunState:
    """Keep some of the `count` seeds of a state that was read from a file.

    The servers' states are listed by seed, and the personal rows are one block a seed.
    """
    kept = {}
    for name, leaf in state.tree.items():
        part, rest = name.split(".", 1)
        if part == "server":
            place, dot, inner = rest.partition(".")
            if int(place) in places:
                kept[f"server.{places.index(int(place))}{dot}{inner}"] = leaf
        else:
            blocks = leaf.reshape(count, -1, *leaf.shape[1:])
            kept[name] = blocks[list(places)].reshape(-1, *leaf.shape[1:])
    return state._replace(
        tree=kept,
        wire=tuple(state.wire[place] for place in places),
        curve=tuple(
            CurvePoint(p.round, {key: values[list(places)] for key, values in p.scores.items()})
            for p in state.curve
        ),
        left_out=tuple(state.left_out[place] for place in places) if state.left_out else (),
        speed=state.speed.share(len(places) / count),
    )


def first_difference(kept: Any, wanted: Any, key: str = "") -> str:
    """Name the first key in which two nested descriptions differ; empty where they agree."""
    if isinstance(kept, Mapping) and isinstance(wanted, Mapping):
        for name in [*wanted, *(name for name in kept if name not in wanted)]:
            inner = first_difference(kept.get(name), wanted.get(name), f"{key}.{name}".strip("."))
            if inner:
                return inner
        return ""
    # JSON has no tuples: one comes back as a list. A setting that is newer than the run and has
    # no values is no change.
    if _listed(kept) == _listed(wanted) or (kept is None and _listed(wanted) == []):
        return ""
    return f"{key} was {kept!r} and is now {wanted!r}"


def _listed(value: Any) -> Any:
    return [_listed(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


# The server's trace: a method's own records, in a file beside the checkpoint.


def trace_records(job: Job, round: int, servers: Tree) -> tuple[TraceRecord, ...]:
    """Record a round, where it is due and the method records anything."""
    method = job.method
    if not has(method, StateTrace) or (round % _trace_every(job) and round != job.rounds):
        return ()
    recorded = [method.trace(state) for state in servers]
    values = {
        name: np.stack([own[name].detach().cpu().numpy() for own in recorded])
        for name in recorded[0]
    }
    return (TraceRecord(round, values),)


def _write_trace(folder: Path, job: Job, records: tuple[TraceRecord, ...]) -> None:
    if records:
        values = {name: np.stack([r.values[name] for r in records]) for name in records[0].values}
        rounds = tuple(record.round for record in records)
        trace.write_trace(folder, Trace(job.label, rounds, job.seeds, job.members[0].names, values))


def _read_trace(folder: Path, job: Job, round: int) -> tuple[TraceRecord, ...]:
    """Read the records up to a round: the file may be ahead of a checkpoint, never behind."""
    if not trace.trace_path(folder, job.label).is_file():
        return ()
    kept = trace.read_trace(folder, job.label)
    return tuple(
        TraceRecord(number, {name: own[place] for name, own in kept.values.items()})
        for place, number in enumerate(kept.rounds)
        # A last round that is not due any more, since the run goes on, is dropped.
        if number <= round and (number % _trace_every(job) == 0 or number == job.rounds)
    )


def _trace_every(job: Job) -> int:
    return job.evaluate.trace or job.evaluate.every


# The outcome.


def sampled_clients(job: Job, count: int | None) -> Clients | None:
    """Draw the clients that are evaluated, the same at every call; None: all."""
    clients = len(job.members[0].names)
    if count is None or count >= clients:
        return None
    return [watched(seed, clients, count) for seed in job.seeds]


def outcome_of(job: Job, state: RunState) -> Outcome:
    """Return what a run has found so far."""
    keys = sorted(state.curve[0].scores) if state.curve else []
    about = {
        "method": job.name,
        "title": job.method.title,
        "paper": job.method.paper,
        "settings": job.settings,
        "preset": job.preset,
        **{key: value for key, value in job.described.items() if key == "model"},
        "clients": len(job.members[0].names),
        "cohort": job.cohort,
        **capabilities.promise(job.method, job.plan(state.round)),
        "backend": job.backend.kind,
        "device": job.place,
        "widths": dict(state.widths),
        "padding": state.padding,
        "crossing": state.crossing,
    }
    traffic = zip(state.wire, state.exchanged, strict=True) if state.exchanged else ()
    return Outcome(
        label=job.label,
        about=about,
        members=job.members,
        rounds=state.round,
        evaluated=tuple(point.round for point in state.curve),
        curves={key: np.stack([point.scores[key] for point in state.curve]) for key in keys},
        final=state.final or {},
        watched=tuple(sampled_clients(job, job.evaluate.clients) or ()),
        scored=tuple(sampled_clients(job, job.evaluate.final_clients) or ()),
        facts=dict(state.facts),
        reasons=_reasons(job, state.facts),
        wire=tuple(one + more for one, more in traffic) or state.wire,
        speed=state.speed,
        notices=state.notices,
        left_out=state.left_out,
        took_part=_took_part(job, state),
        metric=job.choice.name,
        task=job.task,
        precision=job.evaluate.precision,
        pooled=state.pooled,
        attendance=job.attendance(state.round),
    )


def _reasons(job: Job, facts: Mapping[str, NDArray[Any]]) -> tuple[tuple[str, ...], ...]:
    """Return every client's facts in words; () where the method has none."""
    reasons = tuple(
        tuple(
            capabilities.reason(
                job.method, {name: values[place, client] for name, values in facts.items()}
            )
            for client in range(len(own.names))
        )
        for place, own in enumerate(job.members)
    )
    return reasons if facts and any(map(any, reasons)) else ()


def _took_part(job: Job, state: RunState) -> tuple[NDArray[Any], ...]:
    """Return for every seed's clients whether they took part in some round; (): all of them."""
    attended = state.tree.get("attended")
    present = state.tree.get("attended.clients") if attended is None else attended["clients"]
    if present is None or job.method.pooled:
        return ()
    return tuple(np.asarray(own) for own in present.numpy())
