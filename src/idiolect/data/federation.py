"""Who holds which rows, already divided into training, validation and test rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from idiolect.data.dataset import Dataset, Rows, check_value
from idiolect.errors import ConfigError, DataError

_PARTS = ("train", "val", "test")


@dataclass(frozen=True, eq=False)
class TrainData:
    """What training code is handed: it cannot touch a test row, for it has none."""

    dataset: Dataset
    train: tuple[Rows, ...]
    val: tuple[Rows, ...]
    names: tuple[str, ...]
    public: Dataset | None = None

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
    """What the final metric is handed: the test rows of each client and nothing else."""

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
                "training rows; use federate, or data.fitted(dataset, numpy.concatenate(train))"
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
        order = np.argsort(rows, kind="stable")
        again = np.flatnonzero(rows[order][1:] == rows[order][:-1])
        if len(again):
            one, two = order[again[0]], order[again[0] + 1]
            raise DataError(
                f"row {int(rows[one])} is held twice: by {self.names[owner[one]]} "
                f"({_PARTS[part[one]]}) and by {self.names[owner[two]]} ({_PARTS[part[two]]}); "
                "each row needs one owner and one part"
            )

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
        """What `counts` counts: the classes, or words where each is a class and they are many."""
        return ("words",) if self.dataset.sequential else self.dataset.classes

    def without_test(self) -> Federation:
        """Take every test row out of reach: what is chosen by this knows validation alone."""
        nothing = tuple(rows[:0] for rows in self.test)
        return replace(self, test=nothing, common=None, marked=None)

    def counts(self, part: str = "all") -> Rows:
        """Rows per client and class: [client, class]; of sequences the words to predict."""
        check_value("part", part, (*_PARTS, "all"))
        rows, owner, held = self._flat()
        if part != "all":
            chosen = held == _PARTS.index(part)
            rows, owner = rows[chosen], owner[chosen]
        if self.dataset.sequential:
            labels = (self.dataset.y[rows] >= 0).sum(1)
            words = np.bincount(owner, labels, minlength=self.clients)
            return words.astype(np.int64).reshape(-1, 1)
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
        told = [f"{self.attack}; they are not scored"] * bool(self.attack)
        missing = np.flatnonzero(self.counts().sum(axis=0) == 0)
        if len(missing):
            names = ", ".join(self.columns[i] for i in missing[:8])
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            told.append(f"no client has a row of class {names}{more}")
        for part in _PARTS:
            empty = [
                name
                for name, rows in zip(self.names, getattr(self, part), strict=True)
                if not len(rows)
            ]
            if empty:
                told.append(
                    f"{len(empty)} of {self.clients} clients have no {part} row: {empty[0]}"
                )
        return told


def same_clients(federations: Sequence[Federation]) -> bool:
    """Tell whether every place is one and the same client in all of them: it holds the same rows.

    How its rows are split into train, val and test may differ.
    """
    first = federations[0]
    return all(
        other is first
        or (
            other.names == first.names
            and all(
                np.array_equal(_held(first, place), _held(other, place))
                for place in range(first.clients)
            )
        )
        for other in federations[1:]
    )


def same_test(federations: Sequence[Federation]) -> bool:
    """Tell whether every client's test rows are the same in all of them."""
    first = federations[0]
    return all(
        other is first
        or (
            other.clients == first.clients
            and all(
                np.array_equal(np.sort(one), np.sort(two))
                for one, two in zip(first.test, other.test, strict=True)
            )
        )
        for other in federations[1:]
    )


def _held(federation: Federation, client: int) -> Rows:
    parts = (getattr(federation, part)[client] for part in _PARTS)
    return np.asarray(np.sort(np.concatenate(list(parts))))
