"""The clients of one architecture, trained in blocks in this process."""

import copy
import gc
import operator
import platform
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from idiolect.core import tree
from idiolect.core.capabilities import ArchitectureState, has, sums
from idiolect.core.client import Network, Pool
from idiolect.core.tree import Tree
from idiolect.engine.architecture import BuiltNetworks
from idiolect.engine.backend import Backend, device_ints, multiplying
from idiolect.engine.batch_plan import ClientRows, Population, Room
from idiolect.engine.block_runner import (
    TRIAL_STEPS,
    Block,
    BlockRunner,
    SharedInput,
    choose_width,
    cut_blocks,
)
from idiolect.engine.client_group import (
    SERVER,
    Answer,
    ClientGroup,
    ClientKey,
    ClientTask,
    CohortRequest,
    Members,
    Train,
)
from idiolect.engine.data_pools import LazyClients
from idiolect.engine.state_store import DiskStore, MemoryStore
from idiolect.kernels import autotune, compiled
from idiolect.kernels.cuda_graph import BESIDE, Later, side_by_side

_MOST_RUNNERS = 32  # for each thread
_TINY = 2_000  # parameters of a network whose steps on a CPU take as long for many rows as for few
# The same on CUDA, of networks of vectors: parameters of all clients of a block together, which a
# GPU reads in the time of a launch, and places of a plan that memory has room for.
_LIGHT, _PLACES = 1 << 21, 1 << 23
# On CUDA a block is recorded, which takes the host half a second and more, and saves little where
# it is run a few times: then there are few, at the price of some padding. Unless networks are so
# large that padding takes long.
_FEW_BLOCKS, _FEW_ROUNDS, _LARGE = 3, 20, 1 << 21  # the last in parameters
_SLOTS = "slots"  # of drawn cohorts; kept with the widths of blocks, as rounding depends on it
# What torch says where the host has no room, and what oneDNN does.
_NO_MEMORY = (
    "can't allocate memory",
    "could not execute a primitive",
    "could not create a primitive",
)
_LAYOUT, _CHANNELS_LAST = "layout", 2  # of single clients' images, measured as widths are; 1: torch


class _Ordered(NamedTuple):
    """Clients of all runs, those with most examples first, so that blocks need little padding."""

    keys: list[ClientKey]
    places: list[int]  # in the cohorts, which are counted through from run to run
    members: list[ClientRows]
    lengths: list[int]  # by which blocks are cut

    def filled_up(self, slots: int | None) -> "_Ordered":
        """Repeat the last client in the slots that are left."""
        left = 0 if slots is None else slots - len(self.keys)
        places = [*range(len(self.keys)), *[-1] * left]
        return self.taken(places) if left > 0 else self

    def taken(self, places: Sequence[int]) -> "_Ordered":
        """Return the clients of some places."""
        return _Ordered(
            [self.keys[n] for n in places],
            [self.places[n] for n in places],
            [self.members[n] for n in places],
            [self.lengths[n] for n in places],
        )


def _has_kernels(device: torch.device) -> bool:
    """Say whether there are kernels to choose between rounds."""
    return device.type == "cuda"


class LocalGroup(ClientGroup):
    """Clients that are run in this process, with their networks and block runners."""

    def __init__(
        self,
        clients: np.ndarray,
        built: BuiltNetworks,
        store: MemoryStore | DiskStore,
        pools: Mapping[str, Pool],
        test_pools: Mapping[str, Pool],
        backend: Backend,
        rounds: int | None = None,
    ) -> None:
        """`rounds` are those that are planned; None: many."""
        super().__init__(clients, store, len(built.setups), backend.place)
        self.starts = [setup.params for setup in built.setups]
        self._built, self._pools, self._test_pools = built, pools, test_pools
        self._backend = backend
        self._width = backend.width if built.stacked else 1  # None: measured
        threads = 1 if backend.kind == "sequential" else _threads(self.device, built.networks)
        # functional_call swaps a module's parameters while it runs, so each thread has its own.
        copies = [copy.deepcopy(built.networks) for _ in range(threads - 1)]
        self._networks = [built.networks, *copies]
        if self.device.type == "cuda":
            cache = backend.cache and backend.cache.with_name("kernels.json")
            autotune.set_cache(cache, meanwhile=backend.kernels == "meanwhile")
            compiled.set_cache(backend.cache and backend.cache.with_name("kernels"))
        # On a CPU a step of a tiny network is all overhead: more steps cost more than padding does.
        self._own = sum(leaf.numel() for leaf in tree.leaves(self.starts[0]))
        self._prefetches = self.device.type == "cuda"  # works by itself, so the host has time
        self._runners: dict[tuple[str, int, bool], BlockRunner] = {}
        self._fits: dict[str, int] = {}  # widths that fitted in memory after wider ones did not
        self._active: dict[str, list[BlockRunner]] = {}  # runners of the last task of a kind
        self._last_ordered: tuple[tuple[object, ...], _Ordered] | None = None
        self._replays = self.device.type == "cuda" and backend.graph and built.stacked
        self._short = rounds is not None and rounds <= _FEW_ROUNDS
        self._population: Population | None = None  # of all runs, once it is needed
        self._server: LocalGroup | None = None

    def prefetch_state(self, requests: Sequence[CohortRequest]) -> None:
        """Start to read the personal state of the next cohorts, where it is on disk."""
        if isinstance(self.store, DiskStore):
            self.store.fetch(self.rows(self.keys(requests)))

    def prefetch_batches(self, requests: Sequence[CohortRequest], round: int) -> None:
        """Draw the batches of the next round, while a GPU still works on this one."""
        runners = self._active.get("step", [])
        if not self._prefetches or not runners:
            return
        cohort = self.ordered(requests)
        if not cohort.keys:
            return
        slots = self._slots(requests)
        keys, _, members, _ = cohort.filled_up(slots)
        samples = _samples(requests, keys, round)
        width = self._width or self.widths.get("step", len(members))
        blocks = self._blocks(Train.name, cohort.lengths, width, slots)
        for runner, (first, last, room) in zip(runners, blocks, strict=False):
            runner.prepare(members[first:last], round, samples[first:last], room)

    def ordered(self, requests: Sequence[CohortRequest]) -> _Ordered:
        """Order the clients of this group; very often they are the same as the last time."""
        asked = (*(own.cohort for own in requests), *(own.members for own in requests))
        found = None
        if self._last_ordered is not None:
            before, known = self._last_ordered
            if len(before) == len(asked) and all(map(operator.is_, before, asked)):
                found = known
        if found is None:
            found = _ordered(self._place, requests)
            self._last_ordered = asked, found
        if all(request.even for request in requests):
            return found._replace(lengths=[1] * len(found.lengths))
        return found

    def examples(self, kind: str) -> int:
        """Return how many examples the last tasks of a kind trained on."""
        return sum(runner.examples for runner in self._active.get(kind, []))

    def planned(self, kind: str) -> int:
        """Return the same with padding."""
        return sum(runner.planned for runner in self._active.get(kind, []))

    def begin(self, task: ClientTask, requests: Sequence[CohortRequest], round: int) -> Answer:
        """Return a future that runs the task when it is called."""
        return partial(self.run, task, requests, round)

    def run(
        self, task: ClientTask, requests: Sequence[CohortRequest], round: int
    ) -> tuple[list[ClientKey], Tree]:
        """Run a task for every client of the requests in this group; return (clients, results)."""
        slots = self._slots(requests) if isinstance(task, Train) else None
        cohort = CohortSlice(self, requests, round, slots)
        self._active[task.kind] = []
        if not cohort.keys:
            return [], ()
        if self.stage is not None:
            self.stage.begin(task, cohort.count)
        with multiplying(self._backend.precision, self.device):
            if _has_kernels(self.device):
                autotune.settle(round)
            found = self._run_fitting(task, cohort)
        if cohort.count == len(cohort.keys):
            return cohort.keys, found
        count = cohort.count
        return cohort.keys[:count], tree.map(lambda leaf: leaf[:count], found)

    # A captured round is replayed only where the next one has blocks of the same form. Cohorts that
    # are drawn anew among clients of unequal length would have others every time, and to launch or
    # record their steps takes the host a hundred times longer than a GPU needs. So blocks are laid
    # out for whoever may come: where they are cut follows from the lengths of all clients, a block
    # that begins with the n-th longest of a cohort has room for the n-th longest of all, and of its
    # steps as many are replayed as this cohort needs (`core.graph_scan`). That adds little work:
    # the steps of a piece that is not full, and copies of the last client where fewer came than
    # once before. A client's batches do not depend on its place.

    def _slots(self, requests: Sequence[CohortRequest]) -> int | None:
        """Return how many slots the cohorts' blocks have; None: as many as there are clients."""
        count = len(self.keys(requests)) if self._replays else 0
        if not count:
            return None
        if self._population is None:
            held = [_held(self._place, own.members) for own in requests]
            found = [own for own in held if own is not None]
            if len(found) < len(held):  # on a worker, say, that is sent who was drawn alone
                return None
            every = {stream: np.concatenate([own[stream] for own in found]) for stream in found[0]}
            self._population = Population(every, all(own.even for own in requests))
        known, everyone = self.widths.get(_SLOTS, 0), len(self._population)
        if not known and count == everyone:  # as in every round
            return None
        if count > known:
            known = self.widths[_SLOTS] = min(_rounded_up(count), everyone) if known else count
        return known

    def _blocks(
        self, kind: str, lengths: Sequence[int], width: int, slots: int | None
    ) -> list["_Cut"]:
        """Cut clients into blocks for a task; with `slots` into those that suit every cohort."""
        most = None
        if self._replays and self._own < _LARGE and (self._short or kind != Train.name):
            most = _FEW_BLOCKS
        if slots is None or self._population is None:
            return [(*cut, None) for cut in self._cuts(lengths, width, most)]
        count = len(lengths)
        typical = self._population.typical(slots)
        return [
            (first, last, self._population.room(first, min(last, count) - first))
            for first, last in self._cuts(typical, width, most)
            if first < count
        ]

    def serve(self, task: ClientTask, requests: Sequence[CohortRequest], round: int) -> list[Tree]:
        """Run a task of the servers with this architecture; return each run's result."""
        if self._server is None:
            self._server = server_group(self._built, self._pools, self._backend)
        self._server.groups = self.groups
        _, found = self._server.run(task, requests, round)
        return [tree.map(lambda leaf, n=n: leaf[n], found) for n in range(len(requests))]

    def _run_fitting(self, task: ClientTask, cohort: "CohortSlice") -> Tree:
        """Run all blocks; in narrower ones where memory does not suffice."""
        width = self._choose_width(task, cohort)
        while True:
            try:
                return self._run_blocks(task, cohort, width)
            except (RuntimeError, MemoryError) as error:
                if width == 1 or not _lacks_memory(error):
                    raise
            # Outside of `except`: the error refers to all that the block had made.
            kept = {key: own for key, own in self._runners.items() if key[0] != task.kind}
            self._runners = kept
            gc.collect()  # frames and errors that refer to each other
            torch.cuda.empty_cache()
            width = self._fits[task.kind] = -(-min(width, len(cohort.keys)) // 2)
            if task.kind in self.widths:
                self.widths[task.kind] = width

    def _cuts(
        self, lengths: Sequence[int], width: int, most: int | None = None
    ) -> list[tuple[int, int]]:
        even = width > 1 and self._light(lengths)
        return cut_blocks([1] * len(lengths) if even else lengths, width, most)

    def _light(self, lengths: Sequence[int]) -> bool:
        """Say whether a step takes about as long for all these clients as for one of them."""
        if self.device.type != "cuda":
            return self.device.type == "cpu" and self._own < _TINY
        vectors = self._pools["train"].x.dim() == 2
        padded = len(lengths) * max(lengths, default=0)
        return vectors and self._own * len(lengths) < _LIGHT and padded < _PLACES

    def _run_blocks(self, task: ClientTask, cohort: "CohortSlice", width: int) -> Tree:
        cuts = self._blocks(task.name, cohort.lengths, width, cohort.slots)
        runners = []
        # Past so many blocks they share runners in turn, so that a runner is always of one thread.
        for number in range(min(len(cuts), _MOST_RUNNERS * len(self._networks))):
            key = (task.kind, number, width > 1)
            if key not in self._runners:
                self._runners[key] = self._runner(task, width, number)
            self._runners[key].begin()
            runners.append(self._runners[key])
        self._active[task.kind] = runners
        if width == 1:
            return self._run_threads(runners, cohort, cuts, self._run_block)
        # A mean uses a round's reports up; others may keep them, as scores are kept.
        method = task.method
        used_up = isinstance(task, Train) and sums(method) and not has(method, ArchitectureState)
        lend = used_up and len(cuts) == len(runners)
        works = [
            partial(self._run_block, cohort, runners[n % len(runners)], cut, lend)
            for n, cut in enumerate(cuts)
        ]
        # Blocks of unequal length leave much of a GPU idle one after the other. Side by side the
        # short ones run beside the longest, which is the first. While a block is captured, or is
        # launched kernel by kernel, it has the GPU for itself.
        if len(cuts) == len(runners) > 1 and all(runner.captured for runner in runners):
            return tree.concat(side_by_side(works, BESIDE))
        return tree.concat([work(None) for work in works])

    def _run_block(
        self,
        cohort: "CohortSlice",
        runner: BlockRunner,
        cut: "_Cut",
        lend: bool = False,
        later: Later | None = None,
    ) -> Tree:
        """Run a block; report its progress where a watcher asked for it."""
        if self.stage is None:
            return cohort.run(runner, cut, lend, later)
        with self.stage.block(cut[1] - cut[0]) as pulse:
            runner.pulse = pulse
            try:
                return cohort.run(runner, cut, lend, later)
            finally:
                runner.pulse = None

    def _run_threads(
        self,
        runners: Sequence[BlockRunner],
        cohort: "CohortSlice",
        cuts: Sequence["_Cut"],
        run: Callable[["CohortSlice", BlockRunner, "_Cut"], Tree],
    ) -> Tree:
        """Run single clients, dealt out to threads in turn, one core each."""
        threads, most, count = len(self._networks), len(runners), len(cuts)

        def work(thread: int) -> list[Tree]:
            if threads > 1:
                torch.set_num_threads(1)
            mine = range(thread, count, threads)
            return [run(cohort, runners[n % most], cuts[n]) for n in mine]

        if threads == 1:
            return tree.concat(work(0))
        before = torch.get_num_threads()
        try:
            with ThreadPoolExecutor(threads) as pool:
                done = list(pool.map(work, range(threads)))
        finally:
            torch.set_num_threads(before)
        return tree.concat([done[n % threads][n // threads] for n in range(count)])

    def _runner(
        self, task: ClientTask, width: int, number: int, limit: int | None = None, layout: int = 0
    ) -> BlockRunner:
        return BlockRunner(
            task,
            self._networks[number % len(self._networks)],
            self._pools,
            self._test_pools,
            self.device,
            stacked=self._built.stacked and (width > 1 or self.device.type == "cuda"),
            graph=self._backend.graph,
            channels_last=width == 1 and (layout or self.widths.get(_LAYOUT)) == _CHANNELS_LAST,
            limit=limit,
        )

    def _choose_width(self, task: ClientTask, cohort: "CohortSlice") -> int:
        """Return the block width: as set, all clients on a GPU, or measured once for a kind."""
        kind, most = task.kind, len(cohort.keys)
        if self._width is not None:
            return min(self._width, self._fits.get(kind, self._width))
        if self.device.type == "cuda":
            # Cohorts may hold few of an architecture at first and more of it later.
            wide = max(most, self.widths.get(kind, 1))
            self.widths[kind] = min(wide, self._fits.get(kind, wide))
        elif kind not in self.widths:
            if most == 1:  # says nothing about wider cohorts
                return 1
            about = f"{torch.get_num_threads()} {torch.__version__} {platform.machine()}"
            key = f"{kind} {most} {cohort.form()} {about}"
            cache = self._backend.cache
            trial = partial(self._trial, task, cohort, {})
            images = self._pools["train"].x.dim() == 4
            # Stacked convolutions were slower than single clients on every machine so far.
            self.widths[kind] = choose_width(trial, most, key, cache, 1 if images else most)
            if self.widths[kind] == 1 and kind == "step" and images:
                trial = partial(self._trial, task, cohort, {}, 1)
                chosen = choose_width(trial, _CHANNELS_LAST, f"layout {key}", cache)
                self.widths[_LAYOUT] = chosen
        return self.widths[kind]

    def _trial(
        self,
        task: ClientTask,
        cohort: "CohortSlice",
        known: dict[tuple[int, int], list[BlockRunner]],
        width: int,
        layout: int = 0,
    ) -> int:
        """Run a short piece of a block of the given width; return how many clients took part.

        Runners are kept between repeats, and a thread runs several single clients: what is done
        once in a run should not weigh on a trial of a few steps.
        """
        count = 1 if width > 1 else min(4 * len(self._networks), len(cohort.keys))
        key = width, layout
        if key not in known:
            steps = TRIAL_STEPS
            known[key] = [self._runner(task, width, n, steps, layout) for n in range(count)]
        if width > 1:
            cohort.run(known[key][0], (0, width, None))
            return width
        single = [(n, n + 1, None) for n in range(count)]
        self._run_threads(known[key], cohort, single, CohortSlice.run)
        return count


_Cut = tuple[int, int, Room | None]
"""The first slot of a block, the one after its last, and what it has room for."""


def server_group(built: BuiltNetworks, pools: Mapping[str, Pool], backend: Backend) -> LocalGroup:
    """Make a group of the servers, which have public examples only: one block for all runs."""
    width = len(built.setups) if built.stacked else 1
    place = backend.place
    own = replace(backend, kind="sequential", device=place.type, width=width)
    return LocalGroup(np.array([SERVER]), built, MemoryStore([((), 1)], place), pools, {}, own)


class CohortSlice:
    """The clients of a group in one request, and what each of them is given."""

    def __init__(
        self,
        group: LocalGroup,
        requests: Sequence[CohortRequest],
        round: int,
        slots: int | None = None,
    ) -> None:
        """With `slots` the last client is repeated in those after the first `count`."""
        device, came = group.device, group.ordered(requests)
        self.slots, self.count, self.lengths = slots, len(came.keys), came.lengths
        self.keys, places, self._members, _ = came.filled_up(slots)
        self._round = round
        self._tests = [
            requests[key.run].tests[key.client] for key in self.keys if requests[key.run].tests
        ]
        self._per_client = len(requests) > 1
        given = [
            SharedInput(request.sent.shared, start if request.afresh else (), state)
            for request, start, state in zip(requests, group.starts, group.groups, strict=True)
        ]
        self._shared: SharedInput = tree.stack(given) if self._per_client else given[0]
        self._run = device_ints([key.run for key in self.keys], device)
        sent = tree.concat([request.sent.own for request in requests])
        self._own = tree.take(sent, device_ints(places, device))
        self._store = group.store
        self._rows = group.rows(self.keys)
        self._samples = _samples(requests, self.keys, round)

    def run(
        self,
        runner: BlockRunner,
        block: _Cut,
        lend: bool = False,
        later: Later | None = None,
    ) -> Tree:
        """Run a block of the clients."""
        first, last, room = block
        cut = slice(first, last)
        shared = tree.take(self._shared, self._run[cut]) if self._per_client else self._shared
        given = Block(
            self._members[cut],
            self._tests[cut],
            self._samples[cut],
            shared,
            self._per_client,
            tree.map(lambda leaf: leaf[cut], self._own),
            self._store.take(self._rows[cut]),
            room,
        )
        return runner.run(given, self._round, lend, later)

    def form(self) -> str:
        """Describe the work for the cache of widths: the shapes that decide what is fast."""
        shapes = [tuple(leaf.shape) for leaf in tree.leaves((self._shared, self._store.example))]
        return f"{shapes} {len(self._members[0].rows['train'])}"


def _samples(requests: Sequence[CohortRequest], keys: Sequence[ClientKey], round: int) -> list[int]:
    """Return each client's number of the public sample."""
    numbers = [round if own.sample is None else own.sample for own in requests]
    return [numbers[key.run] for key in keys]


def _ordered(known: Mapping[int, int], requests: Sequence[CohortRequest]) -> _Ordered:
    starts = np.cumsum([0] + [len(request.cohort) for request in requests[:-1]])
    called = [
        (ClientKey(run, int(client)), int(before) + place)
        for run, (before, request) in enumerate(zip(starts, requests, strict=True))
        for place, client in enumerate(request.cohort)
        if int(client) in known
    ]
    who = [requests[key.run].members[key.client] for key, _ in called]
    lengths = [len(member.rows["train"]) for member in who]
    order = np.argsort(-np.array(lengths, int), kind="stable").tolist()
    asked = _Ordered([key for key, _ in called], [place for _, place in called], who, lengths)
    return asked.taken(order)


def _held(known: Mapping[int, int], members: Members) -> dict[str, np.ndarray] | None:
    """Count the rows of a group's clients that have any to train on; None where not known."""
    if not isinstance(members, LazyClients) or members.held is None:
        return None
    counts = members.held()
    able = [client for client in known if client < len(members) and counts["train"][client]]
    return {stream: own[able] for stream, own in counts.items()}


def _rounded_up(count: int) -> int:
    """Round up to three binary digits, so that a little more of something fits next time."""
    step = 1 << max(count.bit_length() - 3, 0)
    return -(-count // step) * step


def _lacks_memory(error: Exception) -> bool:
    """Say whether the device, or the host, had no room; torch has no type for the host's."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or any(words in str(error) for words in _NO_MEMORY)


def _threads(device: torch.device, networks: Mapping[str, Network]) -> int:
    """Return over how many threads single clients are spread.

    Threads share torch's random numbers, so networks that draw some keep to one.
    """
    draws = any(network.draws for network in networks.values())
    return torch.get_num_threads() if device.type == "cpu" and not draws else 1
