"""The clients of one architecture over all runs, trained in blocks."""

import copy
import gc
import operator
import platform
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch

from idiolect.core import tree
from idiolect.core.capabilities import ArchitectureState, has
from idiolect.core.client import Network, Pool
from idiolect.core.tree import Params, Tree
from idiolect.core.wrap import sums
from idiolect.engine import backend, blocks
from idiolect.engine.backend import multiplying
from idiolect.engine.batch_plan import ClientRows
from idiolect.engine.block_runner import BlockInput, BlockRunner, ClientFunction
from idiolect.engine.client_group import Answer, ClientGroup, ClientTask, Train
from idiolect.engine.client_group import ClientKey as ClientKey
from idiolect.engine.client_group import CohortRequest as CohortRequest
from idiolect.engine.state_store import DiskStore, MemoryStore
from idiolect.kernels import autotune, compiled

_MOST_DESKS = 32  # for each thread
# What torch says where the host has no room, and what oneDNN does.
_NO_ROOM = (
    "can't allocate memory",
    "could not execute a primitive",
    "could not create a primitive",
)
_LAYOUT, _CHANNELS_LAST = (
    "layout",
    2,
)  # of single clients' images, measured like a width; 1: torch's


_Members = Sequence[ClientRows] | Mapping[int, ClientRows]
_Seated = tuple[list[ClientKey], list[int], list[ClientRows], list[int]]
_Asked = tuple[object, ...]


class LocalGroup(ClientGroup):
    """Clients who work in this process, with their networks and workplaces."""

    def __init__(
        self,
        clients: np.ndarray,
        networks: Mapping[str, Network],
        store: MemoryStore | DiskStore,
        starts: Sequence[Params],
        pools: Mapping[str, Pool],
        exam_pools: Mapping[str, Pool],
        device: torch.device,
        span: int | None,
        hands: int,
        stack: bool,
        cache: Path | None,
        precision: str = "fp32",
        graph: bool = True,
    ) -> None:
        """Blocks are `span` clients wide (None: measured); single clients go to `hands` threads.

        `starts` are the initial parameters of each run. `stack` lets vmap run a block; on CUDA then
        even one client, so that it is captured, where `graph` says so.
        """
        super().__init__(clients, store, len(starts), device)
        self._stack = stack
        self.starts = starts
        # functional_call swaps a module's parameters while it runs, so each thread has its own.
        self._networks = [networks] + [copy.deepcopy(networks) for _ in range(hands - 1)]
        self._pools = pools
        self._exam_pools = exam_pools
        self._device = device
        self._span = span
        if device.type == "cuda":
            autotune.set_cache(cache and cache.with_name("kernels.json"))
            compiled.set_cache(cache and cache.with_name("kernels"))
        self._ahead = device.type == "cuda"  # works by itself, so that the host has time
        self._cache = cache
        self._precision, self._graph = precision, graph
        self._desks: dict[tuple[str, int, bool], BlockRunner] = {}
        self._fits: dict[str, int] = {}  # what was left of a width that took too much memory
        self._busy: dict[str, list[BlockRunner]] = {}  # those of the last round; others may be idle
        self._last_seated: tuple[_Asked, _Seated] | None = None

    def look_ahead(self, cohorts: Sequence[np.ndarray]) -> None:
        """Have the personal state of the next cohorts read, where that takes its time."""
        if isinstance(self.store, DiskStore):
            self.store.fetch(self.rows(self.called(cohorts)))

    def prepare(
        self,
        cohorts: Sequence[np.ndarray],
        members: Sequence[Sequence[ClientRows]],
        even: bool,
        round: int,
        samples: Sequence[int] | None = None,
    ) -> None:
        """Draw the batches of a coming round: on a GPU this one is still being worked on."""
        desks = self._busy.get("step", [])
        if not self._ahead or not desks:
            return
        seats, _, who, lengths = self.seated(cohorts, members)
        if even:
            lengths = [1] * len(lengths)
        span = self._span or self.widths.get("step", len(who))
        cuts = blocks.cut(lengths, span) if who else []
        for desk, (first, last) in zip(desks, cuts, strict=False):
            own = samples and [samples[seat.run] for seat in seats[first:last]]
            desk.prepare(who[first:last], round, own)

    def seated(self, cohorts: Sequence[np.ndarray], members: Sequence[_Members]) -> _Seated:
        """Seat those who work here; very often they are the same as the last time."""
        asked = (*cohorts, *members)
        if self._last_seated is not None:
            before, found = self._last_seated
            if len(before) == len(asked) and all(map(operator.is_, before, asked)):
                return found
        found = _seated(self._place, cohorts, members)
        self._last_seated = asked, found
        return found

    def examples(self, kind: str) -> int:
        """Return how many examples the last round of a kind trained on."""
        return sum(desk.examples for desk in self._busy.get(kind, []))

    def planned(self, kind: str) -> int:
        """Return the same with padding."""
        return sum(desk.planned for desk in self._busy.get(kind, []))

    def padding(self, kind: str) -> float:
        """Return the share of a round's examples that were padding."""
        planned = self.planned(kind)
        return 1 - self.examples(kind) / planned if planned else 0.0

    def begin(
        self, kind: str, work: ClientTask, calls: Sequence[CohortRequest], round: int
    ) -> Answer:
        """Have work done when it is asked for: in one process nothing is gained by earlier."""
        return partial(self.run, kind, work, calls, round)

    def run(
        self, kind: str, fn: ClientFunction, calls: Sequence[CohortRequest], round: int
    ) -> tuple[list[ClientKey], Tree]:
        """Run fn for every called client of this architecture; return who, and the results."""
        shift = CohortSlice(self, calls, round, self._device)
        self._busy[kind] = []
        if not shift.seats:
            return [], ()
        with multiplying(self._precision, self._device):
            return shift.seats, self._fitting(kind, fn, shift)

    def _fitting(self, kind: str, fn: ClientFunction, shift: "CohortSlice") -> Tree:
        """Run all blocks; narrower ones where the memory does not suffice."""
        span = self._choose(kind, fn, shift)
        while True:
            try:
                return self._blocks(kind, fn, shift, span)
            except (RuntimeError, MemoryError) as error:
                if span == 1 or not _lacks_memory(error):
                    raise
            # Only now: the error held on to all that the block had made.
            self._forget(kind)
            span = self._fits[kind] = -(-min(span, len(shift.seats)) // 2)
            if kind in self.widths:
                self.widths[kind] = span

    def serve(
        self,
        fn: ClientFunction,
        servers: Sequence[ClientRows],
        states: Sequence[Tree],
        round: int,
        samples: Sequence[int] | None = None,
    ) -> list[Tree]:
        """Run fn for the servers, on this architecture: all runs at once, or one by one."""
        wide = len(servers) if self._stack else 1
        made: list[Tree] = []
        for number, first in enumerate(range(0, len(servers), wide)):
            block = slice(first, first + wide)
            key = ("serve", number, wide > 1)
            if key not in self._desks:
                self._desks[key] = self._desk(fn, wide, number)
            pairs = zip(states[block], self.groups[block], strict=True)
            given = tree.stack([BlockInput(state, (), group) for state, group in pairs])
            own = samples and samples[block]
            found = self._desks[key].run(
                servers[block], [], round, given, True, (), (), samples=own
            )
            made += [tree.map(lambda leaf, n=n: leaf[n], found) for n in range(len(servers[block]))]
        return made

    def _blocks(self, kind: str, fn: ClientFunction, shift: "CohortSlice", span: int) -> Tree:
        cuts = blocks.cut(shift.lengths, span)
        desks = []
        # Past so many blocks they share desks in turn, so that a desk is always of one thread.
        for number in range(min(len(cuts), _MOST_DESKS * len(self._networks))):
            key = (kind, number, span > 1)
            if key not in self._desks:
                self._desks[key] = self._desk(fn, span, number)
            self._desks[key].begin()
            desks.append(self._desks[key])
        self._busy[kind] = desks
        if span == 1:
            return self._spread(desks, shift, len(cuts))
        # A mean uses a round's reports up; others may keep them, as verdicts are kept.
        used_up = (
            isinstance(fn, Train) and sums(fn.method) and not has(fn.method, ArchitectureState)
        )
        lend = used_up and len(cuts) == len(desks)
        return tree.concat(
            [shift.run(desks[n % len(desks)], *cut, lend) for n, cut in enumerate(cuts)]
        )

    def _spread(self, desks: Sequence[BlockRunner], shift: "CohortSlice", count: int) -> Tree:
        """Run single clients, dealt out to the hands in turn, one core each."""
        hands, most = len(self._networks), len(desks)

        def work(hand: int) -> list[Tree]:
            if hands > 1:
                torch.set_num_threads(1)
            return [shift.run(desks[n % most], n, n + 1) for n in range(hand, count, hands)]

        if hands == 1:
            return tree.concat(work(0))
        threads = torch.get_num_threads()
        try:
            with ThreadPoolExecutor(hands) as pool:
                done = list(pool.map(work, range(hands)))
        finally:
            torch.set_num_threads(threads)
        return tree.concat([done[n % hands][n // hands] for n in range(count)])

    def _desk(
        self,
        fn: ClientFunction,
        span: int,
        number: int,
        limit: int | None = None,
        layout: int = 0,
    ) -> BlockRunner:
        return BlockRunner(
            fn,
            self._networks[number % len(self._networks)],
            self._pools,
            self._exam_pools,
            self._device,
            stacked=self._stack and (span > 1 or self._device.type == "cuda"),
            graph=self._graph,
            channels_last=span == 1 and (layout or self.widths.get(_LAYOUT)) == _CHANNELS_LAST,
            limit=limit,
        )

    def _forget(self, kind: str) -> None:
        self._desks = {key: desk for key, desk in self._desks.items() if key[0] != kind}
        gc.collect()  # frames and errors that point at each other
        torch.cuda.empty_cache()

    def _choose(self, kind: str, fn: ClientFunction, shift: "CohortSlice") -> int:
        """Return the block width: as told, all on a GPU, or measured once per kind of work."""
        if self._span is not None:
            return min(self._span, self._fits.get(kind, self._span))
        most = len(shift.seats)
        if self._device.type == "cuda":
            # Cohorts may hold few of an architecture at first and more of it later.
            wide = max(most, self.widths.get(kind, 1))
            self.widths[kind] = min(wide, self._fits.get(kind, wide))
        elif kind not in self.widths:
            if most == 1:  # says nothing about wider cohorts
                return 1
            about = f"{torch.get_num_threads()} {torch.__version__} {platform.machine()}"
            key = f"{kind} {most} {shift.form()} {about}"
            trial = partial(self._trial, fn, shift, {})
            self.widths[kind] = blocks.choose_width(trial, most, key, self._cache)
            if self.widths[kind] == 1 and kind == "step" and self._pools["train"].x.dim() == 4:
                trial = partial(self._trial, fn, shift, {}, 1)
                chosen = blocks.choose_width(trial, _CHANNELS_LAST, f"layout {key}", self._cache)
                self.widths[_LAYOUT] = chosen
        return self.widths[kind]

    def _trial(
        self,
        fn: ClientFunction,
        shift: "CohortSlice",
        desks: dict[tuple[int, int], list[BlockRunner]],
        span: int,
        layout: int = 0,
    ) -> int:
        """Run a short piece of a block of the given width; return how many clients took part.

        Desks are kept between repeats, and single clients are several to a thread: what is done
        once in a run should not weigh on a trial of a few steps.
        """
        count = 1 if span > 1 else min(4 * len(self._networks), len(shift.seats))
        key = span, layout
        if key not in desks:
            steps = blocks.TRIAL_STEPS
            desks[key] = [self._desk(fn, span, n, steps, layout) for n in range(count)]
        if span > 1:
            shift.run(desks[key][0], 0, span)
            return span
        self._spread(desks[key], shift, count)
        return count


class CohortSlice:
    """The seats of one call of a crew, longest first so that little is padded in a block."""

    def __init__(
        self, crew: LocalGroup, calls: Sequence[CohortRequest], round: int, device: torch.device
    ) -> None:
        cohorts, own = [call.cohort for call in calls], [call.members for call in calls]
        self.seats, places, self._members, lengths = crew.seated(cohorts, own)
        self.lengths = [1] * len(lengths) if all(call.even for call in calls) else lengths
        self._round = round
        self._exams = [calls[s.run].exams[s.client] for s in self.seats if calls[s.run].exams]
        self._stacked = len(calls) > 1
        given = [
            BlockInput(call.sent.shared, start if call.afresh else (), group)
            for call, start, group in zip(calls, crew.starts, crew.groups, strict=True)
        ]
        self._shared: BlockInput = tree.stack(given) if self._stacked else given[0]
        self._run = backend.device_ints([seat.run for seat in self.seats], device)
        sent = tree.concat([call.sent.own for call in calls])
        self._own = tree.take(sent, backend.device_ints(places, device))
        self._store = crew.store
        self._rows = crew.rows(self.seats)
        own_samples = [round if call.sample is None else call.sample for call in calls]
        self._samples = [own_samples[seat.run] for seat in self.seats]

    def run(self, desk: BlockRunner, first: int, last: int, lend: bool = False) -> Tree:
        """Let a desk do the block of seats from first to last."""
        block = slice(first, last)
        shared = tree.take(self._shared, self._run[block]) if self._stacked else self._shared
        return desk.run(
            self._members[block],
            self._exams[block],
            self._round,
            shared,
            self._stacked,
            tree.map(lambda leaf: leaf[block], self._own),
            self._store.take(self._rows[block]),
            lend,
            self._samples[block],
        )

    def form(self) -> str:
        """Describe the work for the width cache: the shapes that decide what is fast."""
        shapes = [tuple(leaf.shape) for leaf in tree.leaves((self._shared, self._store.example))]
        return f"{shapes} {len(self._members[0].rows['train'])}"


def _seated(
    known: Mapping[int, int],
    cohorts: Sequence[np.ndarray],
    members: Sequence[_Members],
) -> _Seated:
    """Seat those who are known here, longest first: seats, places in the cohorts, who, lengths.

    Places count on from one run's cohort to the next.
    """
    starts = np.cumsum([0] + [len(cohort) for cohort in cohorts[:-1]])
    called = [
        (ClientKey(run, int(client)), int(before) + place)
        for run, (before, cohort) in enumerate(zip(starts, cohorts, strict=True))
        for place, client in enumerate(cohort)
        if int(client) in known
    ]
    who = [members[seat.run][seat.client] for seat, _ in called]
    lengths = [len(member.rows["train"]) for member in who]
    order = np.argsort(-np.array(lengths, int), kind="stable").tolist()
    return (
        [called[n][0] for n in order],
        [called[n][1] for n in order],
        [who[n] for n in order],
        [lengths[n] for n in order],
    )


def _lacks_memory(error: Exception) -> bool:
    """Say whether the device, or the host, had no room; torch has no type for the host's."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or any(words in str(error) for words in _NO_ROOM)


def hands(device: torch.device, networks: Mapping[str, Network]) -> int:
    """Return over how many threads single clients are spread.

    Threads share torch's random numbers, so networks that draw some keep to one.
    """
    draws = any(network.draws for network in networks.values())
    return torch.get_num_threads() if device.type == "cpu" and not draws else 1
