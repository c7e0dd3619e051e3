"""Who holds which rows, already divided into training, validation and test rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from idiolect.data import display
from idiolect.data.dataset import Dataset, Rows, check_value
from idiolect.data.target_sums import target_sums, task_from_sums
from idiolect.errors import ConfigError, DataError

_PARTS = ("train", "val", "test")


@dataclass(frozen=True, eq=False)
class TrainData:
    """The rows that training code may use: no test row is among them."""

    dataset: Dataset
    train: tuple[Rows, ...]
    val: tuple[Rows, ...]
    names: tuple[str, ...]
    public: Dataset | None = None

    def __repr__(self) -> str:
        return display.part_text(self)

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.names)

    def pooled(self) -> TrainData:
        """All clients as one: what a central server would train on."""
        return replace(
            self,
            train=(np.concatenate(self.train),),
            val=(np.concatenate(self.val),),
            names=("all clients",),
        )


@dataclass(frozen=True, eq=False)
class TestData:
    """The test rows of each client, for the final evaluation alone."""

    dataset: Dataset
    test: tuple[Rows, ...]
    names: tuple[str, ...]
    common: Rows | None = None  # a test set that is the same for everyone, where there is one
    marked: tuple[Rows, ...] | None = None  # test rows with a backdoor's mark, labelled its target

    @property
    def extras(self) -> dict[str, Sequence[Rows]]:
        """Rows of each client that are scored beside its own test rows, by what is measured."""
        found: dict[str, Sequence[Rows]] = {}
        if self.common is not None:
            found["common"] = (self.common,) * self.clients
        if self.marked is not None:
            found["marked"] = self.marked
        return found

    def __repr__(self) -> str:
        return display.part_text(self)

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.names)


@dataclass(frozen=True, eq=False)
class Federation:
    """A dataset divided: no row has two owners, none is in two parts."""

    dataset: Dataset
    train: tuple[Rows, ...]
    val: tuple[Rows, ...]
    test: tuple[Rows, ...]
    names: tuple[str, ...] = ()
    description: str = ""
    public: Dataset | None = None
    common: Rows | None = None
    marked: tuple[Rows, ...] | None = None
    attack: str = ""  # a simulated one, in words

    def __post_init__(self) -> None:
        if not self.names:
            object.__setattr__(self, "names", tuple(f"client {i}" for i in range(len(self.train))))
        sizes = {"names": len(self.names), **{part: len(getattr(self, part)) for part in _PARTS}}
        if len(set(sizes.values())) != 1:
            raise DataError(f"a federation needs one entry per client in each field; got {sizes}")
        if not self.names:
            raise DataError("a federation has no client; expected at least one")
        if self.dataset.unfitted or (self.public is not None and self.public.unfitted):
            raise DataError(
                f"dataset '{self.dataset.name}' waits for its normalisation, which is fitted on "
                "training rows; use federate, or dataset.fitted(dataset, numpy.concatenate(train))"
            )
        rows, owner, part = self._flat()
        self._check_rows(rows, owner)
        held = np.bincount(owner, minlength=self.clients)
        if not held.all():
            empty = int(np.flatnonzero(held == 0)[0])
            raise DataError(
                f"{self.names[empty]} holds no rows (and {int((held == 0).sum()) - 1} more clients "
                "like it); use fewer clients, or federate(min_size=1, drop=True) to leave them out"
            )
        self._fit_task()
        order = np.argsort(rows, kind="stable")
        again = np.flatnonzero(rows[order][1:] == rows[order][:-1])
        if len(again):
            one, two = order[again[0]], order[again[0] + 1]
            raise DataError(
                f"row {int(rows[one])} is held twice: by {self.names[owner[one]]} "
                f"({_PARTS[part[one]]}) and by {self.names[owner[two]]} ({_PARTS[part[two]]}); "
                "each row needs one owner and one part"
            )

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        *,
        label: Any = "label",
        client: Any = None,
        partition: str | None = None,
        split: Sequence[float] | str | None = None,
        seed: int = 0,
        normalise: str | None = None,
        **more: Any,
    ) -> Federation:
        """Divide a DataFrame (pandas, polars, Arrow, a dict of columns) by its clients.

        `client` names the column that says whose a row is, `label` what is predicted. Without a
        client column, a `partition` divides the rows. `split` is the shares of train, val and test,
        or a column that says train or test. Further arguments are those of `data.read`, such as
        `task` and `columns`, and those of `federate`, such as `stratify`.
        """
        from idiolect.data.federate import federate_by_clients
        from idiolect.data.inspection import refuse_unclear
        from idiolect.data.own import read, reading_options
        from idiolect.data.own.frames import column_name, frame_table

        table = frame_table(frame)
        if client is None and partition is None and "client" not in table.column_names:
            raise ConfigError(
                f"client is missing: which of the columns {listed(table.column_names)} says "
                'whose a row is? Or divide the rows yourself, such as partition="iid", clients=5'
            )
        several = isinstance(label, list | tuple) and len(label) > 0
        named = [column_name("label", one) for one in (label if several else [label])]
        reading: dict[str, Any] = {"label": named if several else named[0]}
        if client is not None:
            reading["client"] = column_name("client", client)
        reading |= reading_options(more)
        if isinstance(split, str) and split != "file":
            reading["split"], split = split, "file"
        dataset = read(table, **reading)
        refuse_unclear(dataset, partition)
        return federate_by_clients(dataset, partition, seed, split, normalise, **more)

    @classmethod
    def from_arrays(
        cls,
        x: Any,
        y: Any,
        clients: Any = None,
        *,
        features: Sequence[str] = (),
        task: str | Mapping[str, Any] | None = None,
        partition: str | None = None,
        split: Sequence[float] | None = None,
        seed: int = 0,
        normalise: str | None = None,
        **more: Any,
    ) -> Federation:
        """Divide arrays: x [row, ...], y [row], and whose each row is, [row] of names or numbers.

        Where x is [row, feature], features are scaled by the training rows, and filled in where
        they are NaN, unless `normalise` says otherwise. `task` says what y is, if not a class: see
        `data.read`. With a `partition` such as "dirichlet", `clients` is how many there are to be.
        """
        from idiolect.data.federate import federate_by_clients
        from idiolect.data.own.frames import read_arrays

        if isinstance(clients, int) and partition is not None:  # how many a partition makes
            more["clients"], clients = clients, None
        dataset = read_arrays(x, y, clients, features, task, normalise is None)
        return federate_by_clients(dataset, partition, seed, split, normalise, **more)

    def __repr__(self) -> str:
        return display.federation_text(self)

    def _repr_html_(self) -> str:
        return display.federation_html(self)

    def _fit_task(self) -> None:
        """Let the task take what it needs from the training rows of all clients, and no others."""
        dataset = self.dataset
        if dataset.task.waiting:
            # From sums, as sites of a real federation do, whose rows never meet.
            sums = target_sums(dataset, dataset.task, np.concatenate(self.train))
            task = task_from_sums(dataset.task, sums, dataset.classes)
            object.__setattr__(self, "dataset", replace(dataset, task=task))
        if self.public is not None and self.public.task.waiting:
            same = type(self.public.task) is type(self.dataset.task)
            task = self.dataset.task if same else self.public.task
            object.__setattr__(self, "public", replace(self.public, task=task))

    def _check_rows(self, rows: Rows, owner: Rows) -> None:
        if not np.issubdtype(rows.dtype, np.integer):
            raise DataError(f"row numbers must be int64; got {rows.dtype}")
        outside = np.flatnonzero((rows < 0) | (rows >= len(self.dataset)))
        if len(outside):
            first = outside[0]
            raise DataError(
                f"{self.names[owner[first]]} holds row {int(rows[first])}, but dataset "
                f"'{self.dataset.name}' has rows 0..{len(self.dataset) - 1}"
            )

    def _flat(self) -> tuple[Rows, Rows, Rows]:
        """Every row held, with its client and its part, as three long arrays."""
        held = [getattr(self, part) for part in _PARTS]
        rows = np.concatenate([rows for part in held for rows in part])
        sizes = np.array([len(rows) for part in held for rows in part])
        cells = np.repeat(np.arange(len(sizes)), sizes)
        return rows, cells % len(self.names), cells // len(self.names)

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.names)

    @property
    def train_data(self) -> TrainData:
        """The part that training may see."""
        return TrainData(self.dataset, self.train, self.val, self.names, self.public)

    @property
    def test_data(self) -> TestData:
        """The part that only the final metric may see."""
        return TestData(self.dataset, self.test, self.names, self.common, self.marked)

    @property
    def columns(self) -> tuple[str, ...]:
        """What `counts` counts: classes, or words where they are many; see `Dataset.columns`."""
        return self.dataset.columns

    def without_test(self) -> Federation:
        """Take every test row out of reach: what is chosen by this knows validation alone."""
        nothing = tuple(rows[:0] for rows in self.test)
        return replace(self, test=nothing, common=None, marked=None)

    @cached_property
    def refitted(self) -> Federation:
        """Train on validation rows too: what is left knows no validation row, and can choose none.

        Scaling and vocabularies stay those of the training rows.
        """
        both = tuple(np.concatenate(rows) for rows in zip(self.train, self.val, strict=True))
        nothing = tuple(rows[:0] for rows in self.val)
        words = f"{self.description}; trained on validation rows too"
        return replace(self, train=both, val=nothing, description=words)

    def counts(self, part: str = "all") -> Rows:
        """Rows per client and class: [client, class]; of sequences the words to predict.

        Of other tasks: rows with each label, rows, or events and censored rows (see `columns`).
        """
        check_value("part", part, (*_PARTS, "all"))
        rows, owner, held = self._flat()
        if part != "all":
            chosen = held == _PARTS.index(part)
            rows, owner = rows[chosen], owner[chosen]
        if self.dataset.sequential:
            labels = (self.dataset.y[rows] >= 0).sum(1)
            words = np.bincount(owner, labels, minlength=self.clients)
            return words.astype(np.int64).reshape(-1, 1)
        if self.dataset.task.kind != "classes":
            total = np.zeros((self.clients, len(self.columns)), np.int64)
            np.add.at(total, owner, self.dataset.tally(rows))
            return total
        width = len(self.dataset.classes)
        cells = np.bincount(owner * width + self.dataset.y[rows], minlength=self.clients * width)
        return cells.reshape(self.clients, width).astype(np.int64)

    def subset(self, clients: Sequence[int]) -> Federation:
        """Keep these clients only, in this order."""
        wrong = [client for client in clients if not 0 <= client < self.clients]
        if wrong:
            raise ConfigError(f"client {wrong[0]} is unknown; expected 0..{self.clients - 1}")
        return replace(
            self,
            train=tuple(self.train[i] for i in clients),
            val=tuple(self.val[i] for i in clients),
            test=tuple(self.test[i] for i in clients),
            names=tuple(self.names[i] for i in clients),
            marked=self.marked and tuple(self.marked[i] for i in clients),
            description=f"{self.description}; {len(clients)} of {self.clients} clients",
        )

    def warnings(self) -> list[str]:
        """List what is legal but worth knowing before a number is quoted."""
        found = [f"{self.attack}; they are not scored"] * bool(self.attack)
        found += self.dataset.remarks
        missing = np.flatnonzero(self.counts().sum(axis=0) == 0)
        if len(missing):
            names = listed([self.columns[i] for i in missing])
            what = "class" if self.dataset.task.kind == "classes" else "kind"
            found.append(f"no client has a row of {what} {names}")
        for part in _PARTS:
            held = zip(self.names, getattr(self, part), strict=True)
            empty = [name for name, rows in held if not len(rows)]
            # Where nobody has test rows they were taken out on purpose: settings are being tuned.
            if empty and not (part == "test" and len(empty) == self.clients):
                found.append(
                    f"{len(empty)} of {self.clients} clients have no {part} row: {empty[0]}"
                )
        return found


def listed(names: Sequence[str]) -> str:
    """List the first eight names, and say how many more there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def same_clients(federations: Sequence[Federation]) -> bool:
    """Return whether all federations have the same clients, holding the same rows.

    How its rows are split into train, val and test may differ.
    """
    same_names = all(other.names == federations[0].names for other in federations)
    return same_names and _same_rows(federations, _PARTS)


def same_test(federations: Sequence[Federation]) -> bool:
    """Return whether every client's test rows are the same in all of them."""
    return _same_rows(federations, ("test",))


def _same_rows(federations: Sequence[Federation], parts: Sequence[str]) -> bool:
    def held(federation: Federation, client: int) -> Rows:
        return np.sort(np.concatenate([getattr(federation, part)[client] for part in parts]))

    first = federations[0]
    return all(
        other.clients == first.clients
        and all(np.array_equal(held(first, n), held(other, n)) for n in range(first.clients))
        for other in federations
        if other is not first
    )
