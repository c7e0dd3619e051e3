"""Put the examples of all runs on the device once; clients are rows of these pools."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from idiolect.data.dataset import Dataset
from idiolect.data.federation import Lessons
from idiolect.errors import DataError
from idiolect.local import Pool
from idiolect.simulate.dealing import Member

_MEMBERS = 8192  # whose rows are kept at hand
_DECODED_BYTES = 1 << 30  # on a CPU decoding every batch costs more than holding floats


class Roll(Sequence[Member]):
    """Members made when they are called; the last ones stay the same, for books know them again."""

    def __init__(self, make: Callable[[int], Member], count: int) -> None:
        self._make = make
        self._count = count
        self._made: dict[int, Member] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, client: Any) -> Any:
        """Return a member by its number."""
        if not 0 <= client < self._count:
            raise IndexError(client)
        if client not in self._made:
            if len(self._made) >= _MEMBERS:
                self._made.clear()
            self._made[client] = self._make(client)
        return self._made[client]


class Library:
    """The pools of several runs, and each run's clients as members that point into them.

    Runs on the same dataset share its examples; other datasets are laid behind them.
    """

    def __init__(self, lessons: Sequence[Lessons], device: torch.device) -> None:
        self._device = device
        self._private = Joint([one.dataset for one in lessons])
        self._public: Joint | None = None
        self._examined: dict[tuple[int, int], tuple[Sequence[np.ndarray], Sequence[Member]]] = {}
        if all(one.public is not None for one in lessons):
            self._public = Joint([one.public for one in lessons if one.public])

    @cached_property
    def pools(self) -> dict[str, Pool]:
        """What clients learn from, by stream; on the device from when it is first asked for."""
        private = self._private.whole().pool(self._device)
        public = {} if self._public is None else {"public": self.public().pool(self._device)}
        return {"train": private, "val": private, **public}

    @property
    def exam_pools(self) -> dict[str, Pool]:
        """What clients are scored on, by stream."""
        return dict.fromkeys(("exam", "common", "marked"), self.pools["train"])

    def public(self) -> "Excerpt":
        """Return the public examples of all runs, as they are stored."""
        if self._public is None:
            raise DataError("there are no public examples; set data.public")
        return self._public.whole()

    @property
    def has_public(self) -> bool:
        """Whether there are public examples."""
        return self._public is not None

    def excerpt(self, rows: np.ndarray) -> "Excerpt":
        """Return some rows of the private pool, in ascending order, as they are stored."""
        return self._private.excerpt(rows)

    def examples(self, count: int = 2) -> torch.Tensor:
        """Return a few decoded examples, to try a network on."""
        pool = self.excerpt(np.arange(count)).pool(self._device)
        return pool.decode(pool.x)

    def members(self, run: int, seed: int, lessons: Lessons) -> Sequence[Member]:
        """Return a run's clients with what they may learn from."""
        offset = self._private.offsets[run]
        shared: dict[str, np.ndarray] = {}
        if self._public is not None and lessons.public is not None:
            shared["public"] = np.arange(len(lessons.public.y)) + self._public.offsets[run]

        def member(client: int) -> Member:
            train, val = lessons.train[client] + offset, lessons.val[client] + offset
            return Member(seed, client, {"train": train, "val": val, **shared})

        return Roll(member, len(lessons.train))

    def examined(
        self,
        run: int,
        seed: int,
        rows: Sequence[np.ndarray],
        extras: Mapping[str, Sequence[np.ndarray]] | None = None,
    ) -> Sequence[Member]:
        """Return a run's clients with what they are scored on; the same members for the same rows.

        Books know members again by identity, and then keep their plans.
        """
        key = (run, id(rows))  # the rows are kept beside it, so that no others can take their id
        if key not in self._examined:
            offset, more = self._private.offsets[run], extras or {}
            # What is the same for all clients stays one array.
            moved = {id(own): own + offset for held in more.values() for own in held}

            def member(client: int) -> Member:
                beside = {stream: moved[id(held[client])] for stream, held in more.items()}
                return Member(seed, client, {"exam": rows[client] + offset, **beside})

            members = Roll(member, len(rows))
            self._examined[key] = (rows, members)
        return self._examined[key][1]


class Excerpt(NamedTuple):
    """Examples as they are stored, and how to decode them."""

    x: np.ndarray
    y: np.ndarray
    shift: np.ndarray
    scale: np.ndarray

    def pool(self, device: torch.device) -> Pool:
        """Put them on a device."""
        pool = Pool(_tensor(self.x, device), _tensor(self.y, device))
        kind = self.x.dtype
        if kind == np.uint8 or np.issubdtype(kind, np.floating):  # other whole numbers are tokens
            real = torch.get_default_dtype()
            shift = torch.from_numpy(np.array(self.shift)).to(device, real)
            inverse_scale = 1 / torch.from_numpy(np.array(self.scale)).to(device, real)
            pool = pool._replace(shift=shift, inverse_scale=inverse_scale)
            if device.type == "cpu" and self.x.size * 4 <= _DECODED_BYTES:
                pool = Pool(pool.decode(pool.x), pool.y)
        return pool


class Joint:
    """Distinct datasets, laid one behind the other; `offsets` are each run's first row."""

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self._distinct: list[Dataset] = []
        for dataset in datasets:
            if not any(dataset is known for known in self._distinct):
                self._distinct.append(dataset)
        first = self._distinct[0]
        for other in self._distinct[1:]:
            if not (_same(first.shift, other.shift) and _same(first.scale, other.scale)):
                raise DataError(
                    f"{first.name} and {other.name} are scaled differently, so their runs cannot "
                    "be trained together; run the seeds one by one"
                )
        self._starts = np.cumsum([0] + [len(dataset.y) for dataset in self._distinct])
        place = {id(d): int(n) for d, n in zip(self._distinct, self._starts, strict=False)}
        self.offsets = [place[id(dataset)] for dataset in datasets]

    def whole(self) -> Excerpt:
        """Return all examples."""
        first = self._distinct[0]
        if len(self._distinct) == 1:
            return Excerpt(first.x, first.y, first.shift, first.scale)
        return self.excerpt(np.arange(self._starts[-1]))

    def excerpt(self, rows: np.ndarray) -> Excerpt:
        """Return some rows, which ascend."""
        cuts = np.searchsorted(rows, self._starts)
        parts = [
            (dataset, rows[low:high] - start)
            for dataset, start, low, high in zip(
                self._distinct, self._starts, cuts, cuts[1:], strict=False
            )
        ]
        x = np.concatenate([np.asarray(dataset.x[own]) for dataset, own in parts])
        y = np.concatenate([dataset.y[own] for dataset, own in parts])
        return Excerpt(x, y, self._distinct[0].shift, self._distinct[0].scale)


def _same(left: np.ndarray, right: np.ndarray) -> bool:
    return left.shape == right.shape and bool(np.array_equal(left, right))


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array (a read-only memory map too) to the device."""
    return torch.from_numpy(np.array(array)).to(device)
