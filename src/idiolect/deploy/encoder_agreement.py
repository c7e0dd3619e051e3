"""How sites come to one encoder of their tables, and one scale of their target: by sums.

Nodes tell sums of their columns (`disclosure`); the server merges them, fits the encoder and the
task, and sends both to all. No row leaves, and no count of few rows.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from idiolect.core.checkpoint import write_whole
from idiolect.core.survival import task_from_json
from idiolect.core.task import Task
from idiolect.data.column_sums import ColumnPlan, ColumnSums
from idiolect.data.columns import TableEncoder, same_widths
from idiolect.data.dataset import Moments
from idiolect.data.description import SiteSums, ToldColumn, site_warnings
from idiolect.data.target_sums import target_sums, task_from_sums
from idiolect.deploy.data_summary import is_list, joined
from idiolect.deploy.disclosure import pack_columns, protected, too_large, unpack_columns
from idiolect.deploy.protocol import Message, Refused
from idiolect.deploy.site import NodeData
from idiolect.errors import ConfigError, DataError, DeployError

AGREED = "encoders.json"  # in a run's folder
TARGET = "the target"
_NUMBERS = ("number", "boolean")  # a boolean of one site may be a number of another

Told = Mapping[str, ToldColumn]


@dataclass(frozen=True)
class Agreement:
    """What all sites use under each seed: encoders of tables, and tasks; empty where not needed."""

    encoders: tuple[TableEncoder, ...] = ()
    tasks: tuple[Task, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "encoders": [one.to_json() for one in self.encoders],
            "tasks": [one.to_json() for one in self.tasks],
        }

    @classmethod
    def from_json(cls, given: Any, seeds: int) -> "Agreement":
        """Read what `to_json` gave, trusting nothing in it."""
        good = isinstance(given, dict) and set(given) == {"encoders", "tasks"}
        if not good or not all(
            isinstance(own, list) and len(own) in (0, seeds) for own in given.values()
        ):
            raise Refused("format", "an agreement on encoders of another form")
        try:
            encoders = tuple(TableEncoder.from_json(one) for one in given["encoders"])
            tasks = tuple(task_from_json(one) for one in given["tasks"])
        except (DataError, ConfigError, TypeError, ValueError, AttributeError) as error:
            raise Refused("format", f"an agreement on encoders that cannot be: {error}") from error
        return cls(encoders, tasks)

    def leaf(self) -> torch.Tensor:
        """Return it as bytes: names of categories may be longer than a message's head."""
        return torch.frombuffer(bytearray(json.dumps(self.to_json()).encode()), dtype=torch.uint8)

    @classmethod
    def read(cls, leaf: torch.Tensor, seeds: int) -> "Agreement":
        """Read what `leaf` wrote."""
        if leaf.dtype != torch.uint8 or leaf.dim() != 1:
            raise Refused("format", "an agreement that is no text")
        try:
            return cls.from_json(json.loads(leaf.numpy().tobytes()), seeds)
        except (ValueError, RecursionError) as error:
            raise Refused("format", f"an agreement that cannot be read: {error}") from error

    @classmethod
    def load(cls, folder: Path, seeds: int) -> "Agreement":
        """Read what a run's folder has; nothing where it has none."""
        path = folder / AGREED
        return cls.from_json(json.loads(path.read_text()), seeds) if path.exists() else cls()

    def save(self, folder: Path) -> None:
        """Write it into a run's folder."""
        write_whole(folder / AGREED, (json.dumps(self.to_json()) + "\n").encode())


# A node's part.


def told_columns(data: NodeData, table: bool, least: int) -> dict[str, torch.Tensor]:
    """Return a node's sums under each seed: of its table's columns where asked, and its target."""
    found = {}
    for place, held in enumerate(data.federations):
        rows, told = held.train[0], dict[str, ToldColumn]()
        if table:
            if held.dataset.table is None:
                raise Refused("columns", "the run is on tables, and this site's data is none")
            kinds = {name: plan.kind for name, plan in held.dataset.table.plans.items()}
            sums = held.dataset.table.sums(rows)
            told = {name: ToldColumn(kinds[name], "feature", own) for name, own in sums.items()}
        if data.task.waiting:
            own = target_sums(held.dataset, data.task, rows)
            kind = "category" if own.counts else "number"
            told[_free(told)] = ToldColumn(kind, "target", own)
        for name, column in told.items():
            if too_large(column.sums):
                raise Refused(
                    "data",
                    f"column {name!r} holds numbers around 1e15 or more, of which a server takes "
                    "no sums; give them in a larger unit, or ignore the column",
                )
        told = {name: protected(column, least) for name, column in told.items()}
        found[f"columns{place}"] = pack_columns(told)["columns"]
    return found


def _free(told: Told) -> str:
    name = TARGET
    while name in told:
        name += " "
    return name


def stated_plans(data: NodeData) -> list[list[Any]]:
    """Return how this site would encode each column, in its order, as the experiment declares."""
    table = data.dataset.table
    keys = {"type": "kind", "encode": "encode", "scale": "scale"}
    return [
        [name, {key: getattr(plan, own) for key, own in keys.items()} | {"impute": plan.imputation}]
        for name, plan in (table.plans if table is not None else {}).items()
    ]


# The server's part.


@dataclass(frozen=True)
class SiteColumns:
    """What one site told: its plans, and its columns under each seed."""

    plans: Mapping[str, ColumnPlan]
    seeds: Sequence[Told]

    @classmethod
    def read(cls, site: str, message: Message, sizes: Sequence[Sequence[int]]) -> "SiteColumns":
        """Read a site's answer, trusting nothing in it; `sizes` are the rows it stated."""
        if set(message.leaves) != {f"columns{n}" for n in range(len(sizes))}:
            raise Refused("statistics", f"{site} told of other seeds than there are")
        each = []
        for n, (train, *_) in enumerate(sizes):
            leaf = message.leaves[f"columns{n}"]
            told = unpack_columns(Message("yes", {}, {"columns": leaf}))
            for name, column in told.items():
                if column.role == "feature" and column.sums.rows != train:
                    raise Refused("statistics", f"{site}: {name[:40]!r} has other rows than stated")
            each.append(told)
        plans: Any = message.head.get("plans")
        try:
            if not is_list(plans, list) or not all(
                len(one) == 2 and isinstance(one[0], str) and isinstance(one[1], dict)
                for one in plans
            ):
                raise ConfigError("plans of another form")
            read = {name: ColumnPlan.of(own, "a column") for name, own in plans}
        except (ConfigError, TypeError, ValueError) as error:
            raise Refused("statistics", f"{site}: {error}") from error
        features = {name for name, own in each[0].items() if own.role == "feature"}
        if features and features != set(read):
            raise Refused("statistics", f"{site} told of other columns than it plans for")
        return cls(read, each)


def agree(
    told: Mapping[str, SiteColumns],
    task: Task,
    classes: Sequence[str],
    seeds: int,
    robust: bool,
) -> Agreement:
    """Fit encoders and tasks to what all sites told, in the order of the sites given."""
    first = next(iter(told.values()))
    encoders: list[TableEncoder] = []
    if any(column.role == "feature" for column in first.seeds[0].values()):
        plans = _plans(told)
        for seed in range(seeds):
            sums = {
                name: _merged(
                    {
                        s: own.seeds[seed][name]
                        for s, own in told.items()
                        if name in own.seeds[seed]
                    },
                    robust,
                )
                for name in plans
            }
            encoders.append(TableEncoder.fit(plans, sums))
        encoders = same_widths(encoders) if seeds > 1 else encoders
    tasks: list[Task] = []
    if task.waiting:
        for seed in range(seeds):
            own = {
                site: next(c for c in one.seeds[seed].values() if c.role == "target")
                for site, one in told.items()
                if any(c.role == "target" for c in one.seeds[seed].values())
            }
            if len(own) < len(told):
                raise DeployError("a site told nothing of its target; install the same idiolect")
            tasks.append(task_from_sums(task, _merged(own, robust), tuple(classes)))
    return Agreement(tuple(encoders), tuple(tasks))


def _plans(told: Mapping[str, SiteColumns]) -> dict[str, ColumnPlan]:
    """Return the plan of every column that some site has, the first site's order first."""
    found: dict[str, ColumnPlan] = {}
    for site, own in told.items():
        for name, plan in own.plans.items():
            known = found.setdefault(name, plan)
            if known.kind == plan.kind:
                continue
            if known.kind in _NUMBERS and plan.kind in _NUMBERS:
                found[name] = known if known.kind == "number" else plan
                continue
            other = next(s for s, one in told.items() if name in one.plans)
            raise ConfigError(
                f"column {name!r} is read as {plan.kind} at {site} and as {known.kind} at {other}; "
                "say which it is in [data.columns] of the experiment, or mend the file of the one "
                "that is wrong"
            )
    return found


def _merged(own: Mapping[str, ToldColumn], robust: bool) -> ColumnSums:
    """Merge sums; where a site is far from the others, its mean and deviation do not count."""
    columns = list(own.values())
    total = columns[0].sums
    for other in columns[1:]:
        total = total.merged(other.sums)
    moments = {
        site: Moments(one.sums.present, np.array([one.sums.mean]), np.array([one.sums.squares]))
        for site, one in own.items()
        if one.sums.present and not one.sums.counts
    }
    if len(moments) < 2:
        return total
    safe, far = joined(moments, robust)
    if not far and not robust:
        return total
    return replace(total, mean=float(safe.mean[0]), squares=float(safe.squares[0]))


def odd_sites(told: Mapping[str, SiteColumns], shown: Collection[str]) -> list[tuple[str, str]]:
    """Return each site that is unlike those that are shown, with words on it, by the first seed."""
    sites = [
        SiteSums(site, {}, one.seeds[0], "all" if site in shown else "pooled")
        for site, one in told.items()
    ]
    return [(one["site"], one["text"]) for one in site_warnings(sites)]
