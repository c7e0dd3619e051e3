"""Batch plans for a block of clients, drawn from (seed, round, client, call).

A client's batches depend on nothing else: not on the backend, the width of the block, or who else
takes part. Padding is added here and masked in `Local`. NumPy draws them; on CUDA the GPU draws the
same by itself, bit for bit, since a permutation for each of a thousand clients takes the host
longer than a GPU needs to train them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from idiolect.core import randomness
from idiolect.core.client import Plan, Pool, Request
from idiolect.engine.backend import machine_memory
from idiolect.errors import ConfigError, MethodError
from idiolect.kernels import gpu_batches
from idiolect.kernels.compiled import attempt

BATCHES = 11  # keeps these draws apart from other uses of the same seed
_COHORTS = 64  # that are drawn to see how long their clients are
_NARROW = 8  # places of a step that are not worth halving
_WORD = 1 << 32
_LISTS = 4  # of a plan, in memory at once: rows and places, their draws, their copies


class ClientRows(NamedTuple):
    """A client, the rows of the pools that it holds, and the seed of its run."""

    seed: int
    client: int
    rows: Mapping[str, np.ndarray]  # stream -> rows of its pool
    # Above 0: an epoch's last batch of fewer rows, or of under half a batch, is left out.
    least_rows: int = 0


def same(members: Sequence[ClientRows], others: Sequence[ClientRows]) -> bool:
    """Say whether these are the same clients with the same rows."""
    # By identity: a client may be scored on other rows, and comparing rows would be slow.
    return members is others or (
        len(members) == len(others)
        and all(
            (new.seed, new.client) == (old.seed, old.client) and new.rows is old.rows
            for new, old in zip(members, others, strict=True)
        )
    )


class Room(NamedTuple):
    """The most rows that a block's clients may have, so that every cohort gives equal shapes."""

    most: Mapping[str, int]  # stream -> rows of a client that may come
    fewest: Mapping[str, int]
    filled: int  # so many slots have a client; those after them repeat the last one


class Population:
    """The number of rows of every client that a cohort may be drawn from."""

    def __init__(self, counts: Mapping[str, np.ndarray], even: bool = False) -> None:
        """`counts` of each stream are of the same clients; `even`: all take as many steps."""
        order = np.argsort(-counts["train"], kind="stable")
        self._counts = {stream: own[order] for stream, own in counts.items()}
        self._lengths = self._counts["train"]
        self._even = even
        self._typical: dict[int, list[int]] = {}
        self._rooms: dict[int, Room] = {}

    def __len__(self) -> int:
        return len(self._lengths)

    def typical(self, slots: int) -> list[int]:
        """Return the rows of the longest client of a cohort, of the second, ...: means over draws.

        A block takes as many steps as its longest client needs, so a cohort is cut by these.
        """
        if self._even:
            return [1] * slots
        if slots not in self._typical:
            draw = np.random.default_rng(0)
            places = [draw.choice(len(self), slots, replace=False) for _ in range(_COHORTS)]
            lengths = self._lengths[np.sort(places)]
            self._typical[slots] = lengths.mean(0).round().astype(int).tolist()
        return self._typical[slots]

    def room(self, first: int, filled: int) -> Room:
        """Return the room for the clients of a cohort from place `first` on, the longest first.

        None of them is longer than the client that has this place among all clients.
        """
        if first not in self._rooms:
            # Others may be just as long, and hold more of something else.
            since = int(np.searchsorted(-self._lengths, -self._lengths[first]))
            most = {stream: int(own[since:].max()) for stream, own in self._counts.items()}
            fewest = {stream: int(own.min()) for stream, own in self._counts.items()}
            self._rooms[first] = Room(most, fewest, filled)
        return self._rooms[first]._replace(filled=filled)


class BatchLayout(NamedTuple):
    """The sizes of a block's batches; see `Plan`."""

    clients: int
    steps: int
    wide: int  # places of a step
    certain: int
    longest: int
    examples: int  # of all clients, without padding
    needed: int  # of the steps; with room to spare, the others are padding for everyone

    def fits(self, request: Request, plan: Plan) -> bool:
        """Say whether a plan can be filled anew without changing its shape."""
        if plan.rows.shape != (self.clients, self.steps, self.wide) or self.certain < plan.certain:
            return False
        return request.shuffled or self.longest == plan.longest  # `rows` cuts its output there


def laid_out(
    counts: Sequence[int], request: Request, limit: int | None = None, room: Room | None = None
) -> tuple[BatchLayout, list[int]]:
    """Return the layout for clients of so many examples, and how many steps each of them takes."""
    held = np.asarray(counts)
    per_epoch = -(-held // request.batch)
    own = _steps(held, request)
    longest, certain, needed = int(held.max()), int(own.min()), max(1, int(own.max()))
    most = needed = needed if limit is None else min(limit, needed)
    if room is not None and request.stream in room.most:
        ends = [room.most[request.stream], room.fewest[request.stream]]
        ends = [request.subset(count) for count in ends]
        longest = max(longest, ends[0])
        most, least = _steps(np.array([longest, ends[1]]), request).tolist()
        most, certain = max(most, needed), min(certain, least)
    whole, rest = np.divmod(np.minimum(own, most), np.maximum(per_epoch, 1))
    examples = whole * held + np.minimum(rest * request.batch, held)
    layout = BatchLayout(
        len(held),
        most,
        narrowed(request.batch, longest),
        min(certain, most),
        longest,
        int(examples[: None if room is None else room.filled].sum()),
        needed,
    )
    return layout, own.tolist()


def _steps(held: np.ndarray, request: Request) -> np.ndarray:
    """Return how many steps clients of so many examples take."""
    per_epoch = -(-held // request.batch)
    return np.where(held > 0, request.steps or request.epochs * per_epoch, 0)


def narrowed(batch: int, longest: int) -> int:
    """Return how many places a step needs: a batch, halved as long as everyone's rows fit.

    Half by half, and not to the exact number, so that a captured graph suits most cohorts.
    """
    while batch > _NARROW and -(-batch // 2) >= longest:
        batch = -(-batch // 2)
    return batch


class _Table(NamedTuple):
    members: Sequence[ClientRows]
    counts: list[int]
    who: Tensor  # see `shuffling.shuffle`
    held: Tensor
    words: bool  # whether every seed and number is one word, as the kernel's hash takes them


class DeviceShuffler:
    """Fills plans on a GPU, without the host knowing their contents."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[str, _Table] = {}  # of each stream
        self._trusted = False

    def supports(self, request: Request, plan: Plan, longest: int) -> bool:
        """Say whether it can fill a plan: shuffled batches of a few thousand examples each."""
        epochs = request.epochs
        if request.steps:
            epochs = -(-request.steps * request.batch // max(longest, 1))
        whole = not request.sample and plan.places is None and request.share == 1
        return (
            request.shuffled
            and whole
            and gpu_batches.suits_shuffle(longest, max(epochs, 1), plan.weight)
        )

    def fill(
        self,
        members: Sequence[ClientRows],
        round: int,
        request: Request,
        plan: Plan,
        copied: Callable[[Request, Plan], BatchLayout | None],
        room: Room | None = None,
    ) -> BatchLayout | None:
        """Fill a plan for a round; None where it does not fit. `copied` does it from the host."""
        table = self._table(members, request.stream)
        layout, _ = laid_out(table.counts, request, None, room)
        if not layout.fits(request, plan):
            return None
        longest = max(table.counts)  # whoever comes may have more examples than those before
        if not table.words or not self.supports(request, plan, longest):
            return copied(request, plan)

        def drawn() -> BatchLayout:
            gpu_batches.shuffle(
                table.who,
                table.held,
                plan.rows,
                plan.weight,
                longest,
                (BATCHES, round, request.call),
                request.batch,
                request.steps,
                request.epochs,
            )
            if not self._trusted:
                self._compare(request, plan, copied)
            return layout

        return attempt("batches", drawn, lambda: copied(request, plan))

    def _compare(
        self, request: Request, plan: Plan, copied: Callable[[Request, Plan], BatchLayout | None]
    ) -> None:
        """Check once that NumPy draws the same; another release of it might not."""
        rows, weight = plan.rows.clone(), plan.weight.clone()
        copied(request, plan)
        if not (torch.equal(rows, plan.rows) and torch.equal(weight, plan.weight)):
            raise RuntimeError(f"NumPy {np.__version__} shuffles in another way")
        self._trusted = True

    def _table(self, members: Sequence[ClientRows], stream: str) -> _Table:
        known = self._tables.get(stream)
        if known is not None and same(members, known.members):
            return known
        rows = [own.rows[stream] for own in members]
        counts = [len(own) for own in rows]
        starts = np.cumsum([0, *counts[:-1]])
        who = np.array(
            [(own.seed, own.client, count, start)
             for own, count, start in zip(members, counts, starts, strict=True)], np.int64
        )  # fmt: skip
        held = np.concatenate([*rows, np.zeros(1, np.int64)]).astype(np.int64, copy=False)
        words = bool(((who[:, :2] >= 0) & (who[:, :2] < _WORD)).all())
        self._tables[stream] = _Table(members, counts, self._sent(who), self._sent(held), words)
        return self._tables[stream]

    def _sent(self, array: np.ndarray) -> Tensor:
        here = torch.from_numpy(array)
        if self._device.type == "cuda":
            here = here.pin_memory()
        return here.to(self._device, non_blocking=True)


_PUBLIC = 17  # keeps these draws apart from other uses of the same seed
_SUBSET = 29


class HostBatches(NamedTuple):
    """What a plan is filled with, made on the host; see `Plan`."""

    rows: Tensor
    real: Tensor  # [client, step, example] whether it is one
    places: Tensor  # those of padding are 0
    layout: BatchLayout


class BatchPlanner:
    """The plans a block asks for, round after round.

    A plan keeps its tensors from round to round and is refilled in place, so that a captured graph
    sees the new batches; where a block's clients need another shape, the plan is made anew and
    `turn` says so. `limit` cuts every plan to a few steps, for trials.
    """

    def __init__(
        self, pools: Mapping[str, Pool], device: torch.device, limit: int | None = None
    ) -> None:
        self._pools = pools
        self._device = device
        self._limit = limit
        self._members: Sequence[ClientRows] = ()
        self._round = 0
        self._samples: Sequence[int] = ()
        self._room: Room | None = None
        self._needed: dict[Request, int] = {}  # steps of this round
        self._keys: Tensor | None = None  # for random numbers, once client code draws some
        self._plans: dict[Request, Plan] = {}
        self._ahead: dict[Request, HostBatches] = {}  # made before its round has come
        self._ahead_of: tuple[Sequence[ClientRows], int, Sequence[int]] = ((), -1, ())
        self._shuffler = DeviceShuffler(device) if device.type == "cuda" and limit is None else None
        self.examples = 0  # trained on in this round
        self.planned = 0  # the same with padding

    @property
    def clients(self) -> int:
        """How many clients the block has."""
        return len(self._members)

    def turn(
        self,
        members: Sequence[ClientRows],
        round: int,
        samples: Sequence[int] | None = None,
        room: Room | None = None,
    ) -> bool:
        """Fill the plans for a round; return whether every plan kept its place and shape.

        `samples` gives each member's number of the public sample, where that is not the round's.
        With `room` plans are laid out for it.
        """
        alike = same(members, self._members)
        self._members, self._round, self._room = members, round, room
        self._samples = _numbers(members, round, samples)
        known, then, theirs = self._ahead_of
        if round != then or list(self._samples) != list(theirs) or not same(members, known):
            self._ahead = {}
        self.examples = self.planned = 0
        kept = True
        for request, plan in list(self._plans.items()):
            if alike and not request.shuffled and not request.sample:
                continue
            if not self._refill(request, plan):
                del self._plans[request]
                kept = False
        self._ahead = {}
        if self._keys is not None:
            new = self._new_keys()
            if new.shape == self._keys.shape:
                self._keys.copy_(new)
            else:
                self._keys, kept = new.to(self._device), False
        return kept

    def keys(self) -> Tensor:
        """Return each client's key for random numbers, made on first use, then filled anew."""
        if self._keys is None:
            self._keys = self._new_keys().to(self._device)
        return self._keys

    def _new_keys(self) -> Tensor:
        seeds, clients = zip(*((own.seed, own.client) for own in self._members), strict=True)
        return torch.from_numpy(randomness.keys(seeds, clients, self._round))

    def prepare(
        self,
        members: Sequence[ClientRows],
        round: int,
        samples: Sequence[int] | None = None,
        room: Room | None = None,
    ) -> None:
        """Draw a coming round's batches now, while a GPU works on this one."""
        numbered = _numbers(members, round, samples)
        self._ahead_of = (members, round, numbered)
        self._ahead = {
            request: self._pinned(_drawn(members, round, request, self._limit, numbered, room))
            for request, plan in self._plans.items()
            if request.shuffled and not self._shuffled_there(members, request, plan)
        }

    def ask(self, request: Request) -> Plan:
        """Return the plan for a request, making it on first use."""
        if request not in self._plans:
            if request.stream not in self._pools:
                raise MethodError(
                    f"client code asked for {request.stream!r} data; a client holds "
                    f"{', '.join(sorted(self._pools)) or 'none'} here"
                )
            self._plans[request] = self._make(request)
        return self._plans[request]

    def _make(self, request: Request) -> Plan:
        new = self._drawn_now(request)
        self._count(request, new.layout)
        plan = Plan(
            self._pools[request.stream],
            new.rows.to(self._device),
            new.real.to(self._device, torch.get_default_dtype()),
            new.layout.certain,
            new.layout.longest,
        )
        if self._room is not None and new.layout.certain < new.layout.steps:
            plan = plan._replace(needed=lambda: self._needed[request])
        if request.stream == "public":
            plan = plan._replace(places=new.places.to(self._device))
        return plan

    def _refill(self, request: Request, plan: Plan) -> bool:
        whole = not any(member.least_rows for member in self._members)
        if (
            whole
            and self._shuffler is not None
            and self._shuffled_there(self._members, request, plan)
        ):
            layout = self._shuffler.fill(
                self._members, self._round, request, plan, self._copied, self._room
            )
        else:
            layout = self._copied(request, plan)
        if layout is None:
            return False
        self._count(request, layout)
        return True

    def _shuffled_there(self, members: Sequence[ClientRows], request: Request, plan: Plan) -> bool:
        """Say whether the GPU draws the batches by itself."""
        longest = max(len(own.rows[request.stream]) for own in members)
        return self._shuffler is not None and self._shuffler.supports(request, plan, longest)

    def _drawn_now(self, request: Request) -> HostBatches:
        return _drawn(self._members, self._round, request, self._limit, self._samples, self._room)

    def _copied(self, request: Request, plan: Plan) -> BatchLayout | None:
        """Fill a plan with what was drawn on the host; None where it does not fit."""
        new = self._ahead.get(request)
        if new is None:
            new = self._drawn_now(request)
        if not new.layout.fits(request, plan):
            return None
        plan.rows.copy_(new.rows, non_blocking=True)
        plan.weight.copy_(new.real, non_blocking=True)
        if plan.places is not None:
            plan.places.copy_(new.places, non_blocking=True)
        return new.layout

    def _count(self, request: Request, layout: BatchLayout) -> None:
        self._needed[request] = layout.needed
        if request.shuffled:
            self.examples += layout.examples
            self.planned += layout.clients * layout.needed * layout.wide

    def _pinned(self, new: HostBatches) -> HostBatches:
        """Put it into pinned memory, from which a GPU copies by itself."""
        if self._device.type != "cuda":
            return new
        rows, real, places = (t.pin_memory() for t in (new.rows, new.real, new.places))
        return new._replace(rows=rows, real=real, places=places)


def _numbers(
    members: Sequence[ClientRows], round: int, samples: Sequence[int] | None
) -> Sequence[int]:
    """Return each member's number of the public sample: the round's by default."""
    return [round] * len(members) if samples is None else samples


def _drawn(
    members: Sequence[ClientRows],
    round: int,
    request: Request,
    limit: int | None,
    samples: Sequence[int],
    room: Room | None,
) -> HostBatches:
    """Lay out rows and places as [client, step, example]."""
    held = [
        _held(own, number, request, round) for own, number in zip(members, samples, strict=True)
    ]
    layout, own_steps = laid_out([len(own) for own in held], request, limit, room)
    _refuse_endless(layout, max(own_steps, default=0))
    places = np.full((layout.clients, layout.steps, layout.wide), -1, np.int64)
    rows = np.zeros_like(places)
    orders = _orders(members, round, request, layout.wide, [len(own) for own in held], own_steps)
    for client, (order, own) in enumerate(zip(orders, held, strict=True)):
        places[client, : len(order)] = order[: layout.steps, : layout.wide]
        if len(own):
            rows[client] = own[np.maximum(places[client], 0)]
    real = places >= 0
    if any(left_out(one, request, len(own)) for one, own in zip(members, held, strict=True)):
        layout = layout._replace(certain=0)  # some step has no row, and must change nothing
    return HostBatches(
        torch.from_numpy(rows),
        torch.from_numpy(real),
        torch.from_numpy(np.maximum(places, 0, out=places)),
        layout,
    )


def _refuse_endless(layout: BatchLayout, steps: int) -> None:
    """Refuse so many steps that the list of their batches does not fit into memory."""
    needed, memory = _LISTS * 8 * layout.clients * steps * layout.wide, machine_memory()
    if needed > memory:
        raise ConfigError(
            f"the list of {steps:,} steps in one call, for {layout.clients} clients at once, needs "
            f"{needed / 1e9:,.0f} GB, and this machine has {memory / 1e9:.0f}; lower the epochs or "
            "steps that were set so high"
        )


def _held(member: ClientRows, number: int, request: Request, round: int) -> np.ndarray:
    """List the pool's rows of a request: all of a stream, a random share, or a public sample."""
    rows = member.rows[request.stream]
    if (count := request.subset(len(rows))) < len(rows):
        key = (member.seed, _SUBSET, round, member.client, request.call)
        rows = rows[np.random.default_rng(key).permutation(len(rows))[:count]]
    if not request.sample:
        return rows
    chosen: np.ndarray = rows[sample(member.seed, number - request.ago, len(rows), request.sample)]
    return chosen


def _orders(
    members: Sequence[ClientRows],
    round: int,
    request: Request,
    wide: int,
    counts: Sequence[int],
    steps: Sequence[int],
) -> Iterator[np.ndarray]:
    """Lay out each client's batches [step, example]: epochs of a fresh shuffle each.

    The last batch of an epoch may be short; a client without data has no step.
    """
    keys = [(own.seed, BATCHES, round, own.client, request.call) for own in members]
    draws: Iterator[Any] = (
        randomness.generators(keys) if request.shuffled else iter([None] * len(keys))
    )
    for own, draw, count, wanted in zip(members, draws, counts, steps, strict=True):
        per_epoch = -(-count // request.batch)
        batch = request.batch if per_epoch > 1 else wide  # no more places than rows could fill
        order = np.full((-(-wanted // max(per_epoch, 1)), per_epoch * batch), -1, np.int64)
        for epoch in order:
            epoch[:count] = draw.permutation(count) if draw else np.arange(count)
            if left_out(own, request, count):
                epoch[count - count % request.batch :] = -1
        yield order.reshape(-1, batch)[:wanted]


def left_out(member: ClientRows, request: Request, count: int) -> bool:
    """Say whether a client leaves out the last batch of an epoch, as too small beside the others.

    Its rows would weigh more in the result than any others, a single one most of all.
    """
    rest, least = count % request.batch, member.least_rows
    private = request.shuffled and request.stream != "public"
    few = 2 * rest < request.batch or rest < least
    return private and count > request.batch and rest > 0 < least and few


@lru_cache(maxsize=16)
def sample(seed: int, number: int, held: int, size: int) -> np.ndarray:
    """Draw public examples without replacement: no client's number is in the seed.

    A sample's number is that of earlier rounds in which the server received a report. So after a
    round without reports the teachers still belong to the sample they were computed on. Numbers
    below zero, before the first report, stand for the first sample.
    """
    draw = np.random.default_rng((seed, _PUBLIC, max(number, 0)))
    chosen: np.ndarray = draw.permutation(held)[:size]
    return chosen
