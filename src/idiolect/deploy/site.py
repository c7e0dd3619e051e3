"""A node's settings, and its data: its own file, or one client's share of a partition."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from idiolect.core.task import Classes, Task
from idiolect.data import SOURCES, Dataset, Federation
from idiolect.data.columns import TableEncoder
from idiolect.data.dataset import (
    Moments,
    encoded_by,
    fixed_decoding,
    moments,
    normalised,
    with_classes,
)
from idiolect.data.targets import with_class_weights
from idiolect.deploy.limits import SitePolicy
from idiolect.deploy.protocol import LIMIT, Refused
from idiolect.errors import DataError, DeployError
from idiolect.experiment.build import (
    build_federations,
    divide,
    encode_text,
    load_source,
    public_examples,
    source_options,
)
from idiolect.experiment.portable import import_experiment, parse_untrusted, source_of
from idiolect.experiment.schema import Experiment
from idiolect.experiment.untrusted import OWN, Permissions


@dataclass(frozen=True)
class NodeSettings:
    """A node's own settings; nothing of it leaves the node but its name."""

    name: str
    federation: str
    home: Path  # personal state, models and the log
    data: str  # a path, or the experiment's own source, of which the node takes one client's share
    options: Mapping[str, Any] = field(default_factory=dict)  # of reading own data
    client: int | None = None  # which client of the experiment's own partition; None: own data
    data_dir: Path | None = None
    public: str | None = None  # stands for the experiment's public examples
    device: str = "auto"
    limit: int = LIMIT  # bytes of a message
    secure: bool = False  # take part only where the server sees the sum and no single report
    policy: SitePolicy = field(default_factory=SitePolicy)  # what this site allows
    kit: Path | None = None  # whose key and authority sign and check; None: nobody's (local, tests)
    packages: tuple[str, ...] = ()  # beside the policy's; for tries on one's own machine
    folders: tuple[str, ...] = ()  # where these may lie besides; the same

    @property
    def reach(self) -> Permissions:
        """What an experiment may have imported here; nothing that lies beside this node's files."""
        packages = (*self.policy.packages, *self.packages)
        closed = (str(self.home.resolve().parent),)
        return Permissions(packages=packages, folders=self.folders, closed=closed)

    def to_json(self) -> str:
        """Write the settings for another process of the same machine."""
        plain = dataclasses.asdict(self)
        for key in ("home", "data_dir", "kit"):
            plain[key] = None if plain[key] is None else str(plain[key].resolve())
        return json.dumps(plain)

    @classmethod
    def from_json(cls, text: str) -> "NodeSettings":
        """Read what `to_json` wrote."""
        try:
            plain = json.loads(text)
            policy = SitePolicy.of(plain.pop("policy"))
            lists: Any = {key: tuple(plain.pop(key, ())) for key in ("packages", "folders")}
            for key in ("data_dir", "kit"):
                plain[key] = None if plain.get(key) is None else Path(plain[key])
            return cls(
                policy=policy,
                home=Path(plain.pop("home")),
                **lists,
                **{**plain, "options": {k: _as_tuple(v) for k, v in plain.pop("options").items()}},
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DeployError(
                f"a node's settings cannot be read ({type(error).__name__}); start it again with "
                "`idiolect node KIT --data ...`"
            ) from error


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True, eq=False)
class NodeData:
    """What a node brings: for each seed a federation of one client, itself."""

    experiment: Experiment
    client: int  # its number among all
    federations: tuple[Federation, ...]
    source: str  # the named source it has a share of; empty for own data
    clients: int = 0  # of the experiment's partition, where the node has a share of one
    # Moments of the training rows under each seed, where all nodes' together decide the scaling.
    seen: tuple[Moments, ...] | None = None
    task: Task = field(default_factory=Classes)  # before it was fitted, where all nodes' rows do

    @property
    def dataset(self) -> Dataset:
        """The examples, of the first seed."""
        return self.federations[0].dataset

    def of_seed(self, seed: int) -> Federation:
        """Return the data under a seed of the experiment."""
        seeds = self.experiment.seeds
        if seed not in seeds:
            raise Refused("experiment", f"seed {seed} is none of the experiment's {seeds}")
        return self.federations[seeds.index(seed)]

    @property
    def table(self) -> str:
        """Whether own data is a table, and of numbers to normalise ("plain") or else ("typed")."""
        table = self.dataset.table
        if table is None or self.source:  # a share of a source was encoded with all its rows
            return ""
        return "plain" if table.plain and self.experiment.data.normalise else "typed"

    def agreed(self, encoders: Sequence[TableEncoder], tasks: Sequence[Task]) -> "NodeData":
        """Encode tables, and measure targets, as all nodes agreed to under each seed."""
        made = []
        for place, held in enumerate(self.federations):
            dataset = held.dataset
            if encoders:
                refuse_other_types(dataset, encoders[place])
                dataset = encoded_by(dataset, encoders[place])
            if tasks:
                if type(tasks[place]) is not type(self.task):
                    raise Refused(
                        "format", f"a task {tasks[place].title}, and not {self.task.title}"
                    )
                dataset = dataclasses.replace(dataset, task=tasks[place])
            made.append(dataclasses.replace(held, dataset=dataset))
        return dataclasses.replace(self, federations=tuple(made))

    def scaled(self, shift: np.ndarray, scale: np.ndarray) -> "NodeData":
        """Decode examples as all nodes agreed to; the first axis is of seeds."""
        made = []
        for held, own_shift, own_scale in zip(self.federations, shift, scale, strict=True):
            dataset = dataclasses.replace(held.dataset, shift=own_shift, scale=own_scale)
            made.append(dataclasses.replace(held, dataset=dataset))
        return dataclasses.replace(self, federations=tuple(made))


def refuse_other_types(dataset: Dataset, encoder: TableEncoder) -> None:
    """Refuse a table of which a column is of another type than the encoder's."""
    if dataset.table is None:
        raise Refused("columns", "the run is on tables, and this site's data is none")
    numbers = ("number", "boolean")
    for name, plan in encoder.plans.items():
        own = dataset.table.plans.get(name, plan)
        if own.kind != plan.kind and not (own.kind in numbers and plan.kind in numbers):
            raise Refused(
                "columns",
                f"column {name!r} is read as {own.kind} here and is {plan.kind} in the run; "
                "mend the file, or ask the lead to declare it in [data.columns]",
            )


def load_node_data(
    site: NodeSettings, text: str, place: int, newcomer: bool = False, describing: bool = False
) -> NodeData:
    """Read a node's data as an experiment asks; `place` is the node's number among all.

    For a description the experiment need not declare classes: whatever labels there are.
    """
    parse_untrusted(text, site.reach)  # before anything is looked at
    if newcomer and site.client is not None:
        raise DataError(
            "this node was given a client of the experiment's own partition, all of whom took part "
            "in the run; start it without --client, with data of its own, to adapt to it"
        )
    if site.client is not None:
        return _share(site, text)
    return _own(site, text, place, describing, newcomer)


def _share(site: NodeSettings, text: str) -> NodeData:
    """Take one client's share of the experiment's own partition, as a simulation divides it."""
    client, wanted = site.client or 0, source_of(text)
    own_file = wanted == OWN and site.data not in SOURCES  # a path is in no experiment that is sent
    if site.data != wanted and not own_file:
        raise DataError(
            f"the experiment divides {wanted!r}, and this node was given a client of {site.data!r};"
            f" start it with --data {wanted}, or without --client for data of its own"
        )
    experiment = import_experiment(
        text,
        source=site.data,
        options=site.options,
        public=site.public,
        divided=own_file,
        reach=site.reach,
    )
    held = build_federations(experiment, site.data_dir, fetched=_given(site))
    if client >= held[0].clients:
        raise DataError(
            f"--client is {client}, and the experiment's partition has clients "
            f"0..{held[0].clients - 1}"
        )
    own = tuple(_compact(federation, client) for federation in held)
    task = held[0].dataset.task
    return NodeData(experiment, client, own, held[0].dataset.name, held[0].clients, task=task)


def _given(site: NodeSettings) -> tuple[str, ...]:
    """Return the data that the operator named: no other is downloaded because a run names it."""
    return tuple(name for name in (site.data, site.public) if name is not None)


def _compact(federation: Federation, client: int) -> Federation:
    """Keep one client and its rows only: a node needs no one else's examples in memory."""
    one = federation.subset([client])
    parts = [part[0] for part in (one.train, one.val, one.test)]
    rows, ends = np.concatenate(parts), np.cumsum([len(part) for part in parts])
    dataset = dataclasses.replace(
        one.dataset,
        x=np.asarray(one.dataset.x[rows]),
        y=one.dataset.y[rows],
        clients=None,
        client_names=(),
        origin=None,
        table=None if one.dataset.table is None else one.dataset.table.taken(rows),
    )
    train, val, test = np.split(np.arange(len(rows)), ends[:-1])
    return dataclasses.replace(
        one,
        dataset=dataset,
        train=(train,),
        val=(val,),
        test=(test,),
        description=federation.description,
    )


def _own(
    site: NodeSettings, text: str, place: int, describing: bool = False, newcomer: bool = False
) -> NodeData:
    """Read the node's own file; classes are the experiment's, so that labels mean the same."""
    if site.data in SOURCES:
        raise DataError(
            f"{site.data!r} is a dataset that everyone can have; add --client to take one client's "
            "share of it, or give the path of this node's own data"
        )
    path = str(Path(site.data).expanduser().resolve())
    own: dict[str, Any] = {"options": site.options, "public": site.public, "reach": site.reach}
    experiment = import_experiment(text, source=path, **own)
    data = experiment.data
    dataset = load_source(data.source, source_options(data), site.data_dir)
    numbered = dataset.tokeniser is not None or data.text is not None
    if dataset.words and not numbered and not describing:
        raise Refused(
            "words",
            "the experiment does not say how words are numbered, so every node would number its "
            "own; add [data.text] with words to the experiment",
        )
    dataset = encode_text(dataset, data.text)
    if dataset.sequential or describing:
        return _held(site, experiment, dataset, place, newcomer)
    if data.classes is None and dataset.task.kind == "classes":
        raise Refused(
            "classes",
            "the experiment declares no classes, so labels could be numbered differently on "
            "every node; add data.classes = [...] to the experiment",
        )
    try:
        if data.classes is not None:
            dataset = with_classes(dataset, data.classes, "the experiment")
        if data.class_weights is not None:
            dataset = with_class_weights(dataset, data.class_weights)
    except DataError as error:
        raise Refused("classes", str(error)) from error
    task, how = dataset.task, data.normalise
    if task.waiting:  # all nodes' rows decide
        dataset = dataclasses.replace(dataset, task=dataclasses.replace(task, fitted=True))
    if dataset.table is not None:
        plain = dataset.table.plain and how is not None
        dataset = dataset if plain or how is None else normalised(dataset, how)
        dataset = dataclasses.replace(dataset, unfitted="")  # until there is a common encoder
        if not plain:
            return dataclasses.replace(_held(site, experiment, dataset, place, newcomer), task=task)
    fixed = dataset if how is None else fixed_decoding(dataset, how)
    found = _held(site, experiment, dataset if fixed is None else fixed, place, newcomer)
    found = dataclasses.replace(found, task=task)
    if fixed is not None or how is None:
        return found
    # Statistics are of the training rows alone, which depend on the seed.
    seen = tuple(moments(own.dataset, how, own.train[0]) for own in found.federations)
    return dataclasses.replace(found, seen=seen)


def _held(
    site: NodeSettings, experiment: Experiment, dataset: Dataset, place: int, newcomer: bool = False
) -> NodeData:
    """Make one client of all rows, with the public examples beside them."""
    data, public = experiment.data, None
    if data.public is not None:
        public = public_examples(data.public, data, dataset, site.data_dir, _given(site))
    one = np.zeros(len(dataset), np.int64)
    dataset = dataclasses.replace(dataset, clients=one, client_names=(site.name,))
    held = divide(experiment, dataset, public, place, newcomer)
    return NodeData(experiment, place, held, "")
