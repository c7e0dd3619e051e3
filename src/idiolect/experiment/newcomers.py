"""Clients that were not in training: their personal models, from what a finished run kept."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from idiolect.core import checkpoint, tree
from idiolect.core.client import Network
from idiolect.core.method import Method, Setup
from idiolect.core.tree import Tree
from idiolect.data.federation import Federation, TestData
from idiolect.engine.architecture import Architecture, blank
from idiolect.engine.backend import Backend
from idiolect.engine.final_exchange import Sums
from idiolect.engine.rounds import Run, Simulation, Verdict
from idiolect.errors import ConfigError, DataError, MethodError
from idiolect.experiment.run_state import checkpoint_path, globals_folder, of_place

_CPU = torch.device("cpu")


class Kept(NamedTuple):
    """What a finished method left for newcomers, of one seed."""

    label: str
    seed: int
    round: int
    last: dict[str, Tensor]  # the server's state after the last round, by name
    path: Path  # where it was read
    earlier: tuple[tuple[int, Path], ...]  # rounds before, in order, where the run kept them
    groups: tuple[dict[str, Tensor], ...] = ()  # what the server kept for each architecture
    told: Sums = MappingProxyType({})  # what its clients told, added up


class Adapted(NamedTuple):
    """Newcomers' scores and models, and the rounds whose global model they met."""

    verdict: Verdict
    met: tuple[int, ...]
    notices: tuple[str, ...]


def kept(folder: Path, label: str, seed: int | None = None) -> Kept:
    """Find what a finished method left; the run's first seed unless told otherwise."""
    path = checkpoint_path(folder, label)
    again = "finish it with `idiolect run EXPERIMENT.toml --resume`"
    if not path.is_file():
        raise DataError(f"{folder} holds no checkpoint of {label}; {again}")
    named, meta = checkpoint.read(path)
    if not meta["finished"]:
        raise DataError(
            f"{label} in {folder} is not finished, but at round {meta['round']}; {again}"
        )
    seeds = meta["identity"]["seeds"]
    seed = seeds[0] if seed is None else seed
    if seed not in seeds:
        raise ConfigError(
            f"--seed is {seed}, and the run has seeds {', '.join(map(str, seeds))}; choose one"
        )
    last = _server(named, "state.server.", seeds.index(seed))
    earlier = tuple(
        (round, path) for round, path in _globals(folder, label, meta) if round < meta["round"]
    )
    kinds = sorted({int(n.split(".")[2]) for n in named if n.startswith("state.groups.")})
    groups = tuple(_server(named, f"state.groups.{n}.", seeds.index(seed)) for n in kinds)
    told = {n.removeprefix("told."): leaf for n, leaf in named.items() if n.startswith("told.")}
    sums = of_place(told, seeds.index(seed))
    return Kept(label, seed, meta["round"], last, path, earlier, groups, sums)


def adapted(
    method: Method,
    run: Kept,
    federation: Federation,
    architectures: Mapping[str, Architecture],
    backend: Backend,
    place: int = 0,
) -> Adapted:
    """Let newcomers meet the kept global models, then adapt, and score what they adapted to.

    Their architecture was the run's, in this place.
    """
    refuse_counted(method, architectures, len(federation.dataset.classes), federation.clients)
    runs = [Run(run.seed, federation.lessons)]
    simulation = Simulation(method, runs, architectures, backend=backend, newcomers=True)
    exams = [federation.exam] if any(len(rows) for rows in federation.test) else None
    return caught_up(simulation, method, run, exams, place, backend.place)


class Guests(Protocol):
    """Newcomers, wherever they are: a simulation of them, or the hub of a real federation."""

    round: int
    states: list[Tree]
    tree: Tree
    told: Sequence[Sums]  # by those who were there before them

    @property
    def notices(self) -> Sequence[str]:
        """What is worth knowing of them."""

    def meet(self) -> None:
        """Let everyone look at the present state without training."""

    def judge(
        self,
        exams: Sequence[TestData] | None = None,
        *,
        keep: bool = False,
        newcomers: bool = False,
    ) -> list[Verdict]:
        """Let everyone adapt to the present state, and score what came of it."""


def caught_up(
    guests: Guests,
    method: Method,
    run: Kept,
    exams: Sequence[TestData] | None,
    place: int = 0,
    device: torch.device = _CPU,
) -> Adapted:
    """Lead newcomers through what a run kept: earlier states to look at, the last to adapt to."""
    template = tuple(guests.states)
    notices = list(guests.notices)
    met: list[int] = []
    if method.looks:
        for round, path in run.earlier:
            named, meta = checkpoint.read(path)
            own = _server(named, "", meta["seeds"].index(run.seed))
            _put(guests, method, own, template, path, round, device)
            guests.meet()
            met.append(round)
        if len(met) < run.round - 1:
            notices.append(
                f"of {run.round - 1} rounds before the last the run kept {len(met)} global models "
                "to choose from; evaluate.keep_globals = true keeps them all"
            )
    _put(guests, method, run.last, template, run.path, run.round, device)
    if run.groups:
        kept = guests.tree
        there = checkpoint.fitted(kept["groups"][0], run.groups[place], run.path)
        guests.tree = {**kept, "groups": (there,)}
    if run.told:
        guests.told = [{name: leaf.to(device) for name, leaf in run.told.items()}]
    (verdict,) = guests.judge(exams, keep=True, newcomers=True)
    if exams is None:  # then the scores are those on validation data
        scores = {
            model: {f"val_{metric}": values for metric, values in metrics.items()}
            for model, metrics in verdict.scores.items()
        }
        verdict = verdict._replace(scores=scores)
    return Adapted(verdict, (*met, run.round), tuple(notices))


def _put(
    guests: Guests,
    method: Method,
    named: Mapping[str, Tensor],
    template: Tree,
    path: Path,
    round: int,
    device: torch.device,
) -> None:
    """Make a kept server state the present one."""
    if method.welcomes:
        # It has rows for those who were there, and the newcomers may be more or fewer.
        template = tree.like(template, named)
    guests.states = list(tree.to(checkpoint.fitted(template, named, path), device))
    guests.round = round


def _server(named: Mapping[str, Tensor], prefix: str, place: int) -> dict[str, Tensor]:
    """Pick one seed's server state out of a file, as the first and only one."""
    start = f"{prefix}{place}"
    return {
        "0" + name.removeprefix(start): leaf
        for name, leaf in named.items()
        if name == start or name.startswith(f"{start}.")
    }


def _globals(folder: Path, label: str, meta: checkpoint.Meta) -> Iterator[tuple[int, Path]]:
    """List kept global models; a method that shared another's rounds finds them with that one."""
    while not globals_folder(folder, label).is_dir() and meta["shared"]:
        label = meta["shared"]
        path = checkpoint_path(folder, label)
        if not path.is_file():
            return
        _, meta = checkpoint.read(path)
    found = globals_folder(folder, label).glob("round-*.safetensors")
    yield from sorted((int(path.stem.removeprefix("round-")), path) for path in found)


def refuse_counted(
    method: Method, architectures: Mapping[str, Architecture], classes: int, clients: int
) -> None:
    """A server state with a place for each client has none for a newcomer, unless one is made."""
    for architecture in () if method.welcomes else architectures.values():
        _refuse_counted(method, architecture, classes, clients)


def _refuse_counted(method: Method, architecture: Architecture, classes: int, clients: int) -> None:
    with torch.random.fork_rng(devices=[]):
        main = Network(architecture.main())
        second = Network(architecture.auxiliary()) if architecture.auxiliary else main
    told = Setup(main.params, second.params, torch.ones(1), classes, main.norms, main.statistics)
    one, two = (
        tree.named(method.init_server(blank(told._replace(sizes=torch.ones(n)))))
        for n in (clients, clients + 1)
    )
    for name in sorted(set(one) | set(two)):
        if name not in one or name not in two or one[name].shape != two[name].shape:
            raise MethodError(
                f"{method.title or type(method).__name__} keeps {name!r} for each client on the "
                "server, which has nothing for newcomers; train again with them in the federation"
            )
