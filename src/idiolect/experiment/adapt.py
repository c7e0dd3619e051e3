"""Clients that were not in training: their personal models, from what a finished run kept."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from idiolect.core import capabilities, checkpoint, tree
from idiolect.core.capabilities import NewcomerHistory, NewcomerMessage, has
from idiolect.core.client import Network
from idiolect.core.method import Method, Setup
from idiolect.core.task import Task
from idiolect.core.tree import Tree
from idiolect.data import SOURCES, Dataset, federate
from idiolect.data.federation import Federation, TestData
from idiolect.data.own.column_types import EVERY_OTHER
from idiolect.data.own.csv_files import is_csv
from idiolect.data.own.tables import read_columns
from idiolect.data.preprocessing import Preprocessing
from idiolect.engine.architecture import Architecture, blank
from idiolect.engine.backend import Backend
from idiolect.engine.evaluation import ClientScores
from idiolect.engine.final_exchange import Sums
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.engine.row_metrics import MetricChoice
from idiolect.errors import ConfigError, DataError, MethodError
from idiolect.experiment.build import build_backend, load_source
from idiolect.experiment.components import build_architectures, build_method, networks_by_label
from idiolect.experiment.job import Evaluate
from idiolect.experiment.run_state import checkpoint_path, globals_folder, seed_leaves
from idiolect.experiment.schema import Experiment, MethodTable
from idiolect.experiment.seed_parts import part_with_seed
from idiolect.experiment.stored_models import (
    alone,
    choose_label,
    choose_method,
    read_content,
    read_experiment,
    with_one_network,
)
from idiolect.experiment.untrusted import CLOSED, Permissions
from idiolect.results import run_files
from idiolect.results.document import Document, plain, versions, write_json
from idiolect.results.run_files import folder_name, save_models

_CPU = torch.device("cpu")


class FinishedRun(NamedTuple):
    """What a finished method left for newcomers, of one seed."""

    label: str
    seed: int
    round: int
    last: dict[str, Tensor]  # the server's state after the last round, by name
    path: Path  # where it was read
    earlier: tuple[tuple[int, Path], ...]  # rounds before, in order, where the run kept them
    groups: tuple[dict[str, Tensor], ...] = ()  # what the server kept for each architecture
    exchange_sums: Sums = MappingProxyType({})  # sums of the final exchange


class Adapted(NamedTuple):
    """Newcomers' scores and models, and the rounds whose global model they met."""

    verdict: ClientScores
    met: tuple[int, ...]
    notices: tuple[str, ...]
    metric: str | None = None  # what they are scored by


def load_finished(folder: Path, label: str, seed: int | None = None) -> FinishedRun:
    """Find what a finished method left; by default of the run's first seed."""
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
    sums = seed_leaves(named, f"told.{seeds.index(seed)}.")
    return FinishedRun(label, seed, meta["round"], last, path, earlier, groups, sums)


def adapt_newcomers(
    method: Method,
    run: FinishedRun,
    federation: Federation,
    architectures: Mapping[str, Architecture],
    backend: Backend,
    place: int = 0,
    choice: MetricChoice | None = None,
) -> Adapted:
    """Show newcomers the kept global models, adapt to the last one, and evaluate.

    Their architecture was the run's, in this place; the metric of a `choice` is among the scores.
    """
    refuse_per_client_state(method, architectures, federation.dataset, federation.clients)
    runs = [SeededRun(run.seed, federation.train_data)]
    simulation = Simulation(method, runs, architectures, backend=backend, newcomers=True)
    test_data = [federation.test_data] if any(len(rows) for rows in federation.test) else None
    return catch_up(simulation, method, run, test_data, place, backend.place, choice)


class NewcomerRounds(Protocol):
    """Newcomers, wherever they are: a simulation of them, or the hub of a real federation."""

    round: int
    states: list[Tree]
    tree: Tree
    exchange_sums: Sequence[Sums]  # of the clients of the run

    @property
    def notices(self) -> Sequence[str]:
        """What is worth knowing of them."""

    def meet(self) -> None:
        """Show the current server state to all newcomers, without training."""

    def evaluate(
        self,
        test_data: Sequence[TestData] | None = None,
        *,
        keep: bool = False,
        newcomers: bool = False,
        choice: MetricChoice | None = None,
    ) -> list[ClientScores]:
        """Adapt all newcomers to the current server state, and evaluate them."""


def catch_up(
    guests: NewcomerRounds,
    method: Method,
    run: FinishedRun,
    test_data: Sequence[TestData] | None,
    place: int = 0,
    device: torch.device = _CPU,
    choice: MetricChoice | None = None,
) -> Adapted:
    """Show newcomers the earlier states that a run kept, and adapt them to the last."""
    template = tuple(guests.states)
    notices = list(guests.notices)
    met: list[int] = []
    if has(method, NewcomerHistory):
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
    if run.exchange_sums:
        guests.exchange_sums = [{name: leaf.to(device) for name, leaf in run.exchange_sums.items()}]
    (verdict,) = guests.evaluate(test_data, keep=True, newcomers=True, choice=choice)
    if test_data is None:  # then the scores are those on validation data
        scores = {
            model: {f"val_{metric}": values for metric, values in metrics.items()}
            for model, metrics in verdict.scores.items()
        }
        verdict = verdict._replace(scores=scores)
    name = None if choice is None else choice.name
    return Adapted(verdict, (*met, run.round), tuple(notices), name)


def _put(
    guests: NewcomerRounds,
    method: Method,
    named: Mapping[str, Tensor],
    template: Tree,
    path: Path,
    round: int,
    device: torch.device,
) -> None:
    """Make a kept server state the present one."""
    if has(method, NewcomerMessage):
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


def refuse_per_client_state(
    method: Method, architectures: Mapping[str, Architecture], like: Dataset, clients: int
) -> None:
    """A server state with a place for each client has none for a newcomer, unless one is made.

    `like` shows the form of an example.
    """
    for architecture in () if has(method, NewcomerMessage) else architectures.values():
        _refuse_architecture(method, architecture, like, clients)


def _refuse_architecture(
    method: Method, architecture: Architecture, like: Dataset, clients: int
) -> None:
    with torch.random.fork_rng(devices=[]):
        main = Network(architecture.main(), task=like.task)
        second = Network(architecture.auxiliary()) if architecture.auxiliary else main
    main.find_head(torch.from_numpy(np.asarray(like.decoded(np.zeros(2, np.int64)))))
    setup = Setup(
        main.params,
        second.params,
        torch.ones(1),
        len(like.classes),
        main.norms,
        main.statistics,
        features=main.features,
        task=like.task,
    )
    one, two = (
        tree.named(method.init_server(blank(setup._replace(sizes=torch.ones(n)))))
        for n in (clients, clients + 1)
    )
    for name in sorted(set(one) | set(two)):
        if name not in one or name not in two or one[name].shape != two[name].shape:
            raise MethodError(
                f"{method.title or type(method).__name__} keeps {name!r} for each client on the "
                "server, which has nothing for newcomers; train again with them in the federation"
            )


def adapt(
    run_dir: str | Path,
    data: str | Path | Dataset,
    method: str | None = None,
    seed: int | None = None,
    *,
    out: str | Path | None = None,
    split: Sequence[float] | str = (0.6, 0.2, 0.2),
    network: str | None = None,
    device: str | None = None,
    data_dir: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    trust_code: bool = False,
) -> Document:
    """Give every client in `data` a personal model, as `idiolect adapt` does; return the findings.

    `data` is a path, a source or a dataset, read with `options`; without a client column it is one
    newcomer's. `network` picks one where the run's clients had several. The training data is not
    needed. A folder whose networks are somebody's code (`module:factory`) needs `trust_code`: it
    is imported and run.
    """
    folder = Path(run_dir)
    experiment = read_experiment(folder, trust_code, device)
    label = choose_label(experiment, read_content(folder), method, folder)
    table = choose_method(experiment, label)
    if (part := part_with_seed(folder, label, seed)) is not None:  # of a comparison
        experiment = read_experiment(part, trust_code, device)
        table, folder = choose_method(experiment, label), part
    run = load_finished(folder, label, seed)
    fitting = run_files.read_scaling(folder, run.seed)
    if not isinstance(data, Dataset):
        own = {**_readable(str(data), fitting, options or {}), **(options or {})}
        data = load_source(str(data), own, Path(data_dir) if data_dir else None)
    federation = _federation(fitting.matched(data), run.seed, split)
    reach = Permissions(Path.cwd()) if trust_code else CLOSED
    networks = build_architectures(with_one_network(experiment, network), [federation], reach)
    settled = build_method(table)
    place = network_index(experiment, network)
    choice = metric_choice(experiment, fitting.task)
    backend = build_backend(experiment)
    found = adapt_newcomers(settled, run, federation, networks, backend, place, choice)
    target = Path(out) if out else Path(run_dir) / "newcomers" / folder_name(data.name)
    about = {"source": federation.dataset.name, "federation": federation.description}
    parts = (federation.train, federation.val, federation.test)
    sizes = [[len(part[place]) for part in parts] for place in range(federation.clients)]
    content = adaptation_document(experiment, table, run, about, federation.names, sizes, found)
    save_models(target, label, run.seed, federation.names, found.verdict.deployed)
    # What `idiolect predict` and `export` need, wherever the folder goes.
    beside = {
        "experiment": alone(experiment, table, network, trust_code),
        "preprocessing": fitting.to_json(),
        "public": run_files.read_public(folder),
    }
    write_adaptation(target, {**content, **beside})
    return {**content, "folder": str(target)}


def _readable(source: str, fitting: Preprocessing, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that make a source, or own data, fit the run: its columns, its text."""
    if source in SOURCES:
        known = SOURCES[source].options()
        return {name: value for name, value in fitting.reading.items() if name in known}
    path = Path(source).expanduser()
    table = is_csv(path) or path.suffix == ".parquet"
    names = set(read_columns(path).column_names) if table else set()
    own = {key: name for key, name in fitting.columns.items() if key not in given}
    # One newcomer's file need not say who it is.
    columns = {key: name for key, name in own.items() if name in names or key == "label"}
    task = {} if fitting.task.kind == "classes" else {"task": fitting.task}
    reading = {**columns, **task, **fitting.reading}
    if "columns" in reading:  # one that the newcomer lacks counts as missing
        plans = reading["columns"].items()
        reading["columns"] = {k: plan for k, plan in plans if k in names or k == EVERY_OTHER}
    return reading


def _federation(dataset: Dataset, seed: int, split: Sequence[float] | str) -> Federation:
    """Divide by clients; data that names none is one newcomer's."""
    if dataset.clients is None:
        one = np.zeros(len(dataset), np.int64)
        dataset = dataclasses.replace(dataset, clients=one, client_names=("newcomer",))
    return federate(dataset, "natural", seed, split, drop=True)


def metric_choice(experiment: Experiment, task: Task) -> MetricChoice:
    """Return what a run measures, and from which probability it calls a row positive."""
    return Evaluate(**experiment.evaluate.of_job()).choice(task.kind)


def network_index(experiment: Experiment, label: str | None) -> int:
    """Return a network's place among the run's."""
    return 0 if label is None else list(networks_by_label(experiment.model)).index(label)


def adaptation_document(
    experiment: Experiment,
    table: MethodTable,
    run: FinishedRun,
    about: Mapping[str, str],
    names: Sequence[str],
    sizes: Sequence[Sequence[int]],
    found: Adapted,
) -> Document:
    """Lay out what was found; `sizes` are each newcomer's training, validation and test rows."""
    method = build_method(table)
    content: Document = {
        "run": experiment.name,
        "method": table.name,
        "label": run.label,
        "settings": table.settings,
        "seed": run.seed,
        "round": run.round,
        "met": found.met,
        "metric": found.metric,
        "notices": found.notices,
        "data": dict(about),
        "newcomers": [
            _newcomer(names[place], sizes[place], found, place, method)
            for place in range(len(names))
        ],
        "versions": versions(),
    }
    laid: Document = plain(content)
    return laid


def write_adaptation(folder: Path, content: Document) -> None:
    """Write what was found into a folder."""
    name = f"{folder_name(content['label'])}-seed-{content['seed']}.json"
    write_json(folder / name, content)


def _newcomer(
    name: str, sizes: Sequence[int], found: Adapted, place: int, method: Method
) -> Document:
    verdict = found.verdict
    facts = {fact: values[place] for fact, values in verdict.facts.items()}
    reason = capabilities.reason(method, facts)
    return {
        "client": name,
        "train": sizes[0],
        "val": sizes[1],
        "test": sizes[2],
        "models": {
            model: {metric: values[place] for metric, values in metrics.items()}
            for model, metrics in verdict.scores.items()
        },
        "facts": facts,
        **({"reason": reason} if reason else {}),
    }
