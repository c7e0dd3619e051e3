"""Everything a run is between two rounds, and its form on disk."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from idiolect.core import checkpoint
from idiolect.core.tree import Tree
from idiolect.engine.outcome import Scores, Speed, Wire
from idiolect.errors import CheckpointError
from idiolect.experiment.tracing import Record
from idiolect.results.models import folder_name

SHELF = "personal"  # the folder of personal state on disk


class Point(NamedTuple):
    """Scores after a round, each [seed, client]."""

    round: int
    scores: Scores


class Memory(NamedTuple):
    """A run after some rounds. Never changed, only replaced: any one of them can be saved."""

    round: int
    state: Tree  # servers' and personal; or, read from a file, leaves by name
    wire: tuple[Wire, ...]
    curve: tuple[Point, ...] = ()
    speed: Speed = Speed()
    widths: Mapping[str, int] = MappingProxyType({})
    padding: float = 0.0
    final: Scores | None = None  # on test data, once training is over
    facts: Mapping[str, NDArray[Any]] = MappingProxyType({})
    notices: tuple[str, ...] = ()
    shared: str = ""  # the method whose rounds were taken over
    trace: tuple[Record, ...] = ()  # in a file of its own
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

    def unscored(self) -> "Memory":
        """Return this as it was before it was scored on test data."""
        return self._replace(final=None, facts={}, told=(), exchanged=())


def checkpoint_path(folder: Path, label: str) -> Path:
    """Say where a method's checkpoint stands."""
    return folder / "checkpoints" / f"{folder_name(label)}.safetensors"


def globals_folder(folder: Path, label: str) -> Path:
    """Say where a method's global models of every round stand, if they are kept."""
    return folder / "globals" / folder_name(label)


def shelf_folder(folder: Path, label: str) -> Path:
    """Say where a method's personal state stands, if it is kept on disk."""
    return folder / SHELF / folder_name(label)


def save(
    path: Path,
    memory: Memory,
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


def load(path: Path, identity: Mapping[str, Any], place: str) -> Memory:
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
    return Memory(
        round=meta["round"],
        state=parts["state"],
        wire=tuple(Wire(**wire) for wire in meta["wire"]),
        curve=tuple(
            Point(round, {key: curve[place] for key, curve in curves.items()})
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
            of_place(parts["told"], place) for place in range(len(meta.get("exchanged", ())))
        ),
        exchanged=tuple(Wire(**wire) for wire in meta.get("exchanged", ())),
    )


def of_place(named: Mapping[str, torch.Tensor], place: int) -> dict[str, torch.Tensor]:
    """Pick the leaves of one seed out of those that are named by seeds."""
    start = f"{place}."
    return {
        name.removeprefix(start): leaf for name, leaf in named.items() if name.startswith(start)
    }


def of_seeds(memory: Memory, places: Sequence[int], count: int) -> Memory:
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
            Point(p.round, {key: values[list(places)] for key, values in p.scores.items()})
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
