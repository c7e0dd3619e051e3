"""The engine: one client's function, run for a block of clients.

`vectorised` maps the whole function over the block with one vmap; `sequential` calls it client by
client, for debugging and for networks that vmap cannot map. Both give it the same batches.
"""

import hashlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from idiolect.core import randomness, tree
from idiolect.core.client import Local, Network, Pool
from idiolect.core.graph_scan import GraphScan
from idiolect.core.method import Method, Sent, refuse_memory, remembered
from idiolect.core.tree import Params, Tree
from idiolect.engine.backend import device_floats, device_ints
from idiolect.engine.batch_plan import BatchPlanner, ClientRows, Room
from idiolect.errors import MethodError
from idiolect.kernels.autotune import add_to_cache, read_cache, recording
from idiolect.kernels.cuda_graph import GraphSequence, Later
from idiolect.kernels.deferred import alone, anew, computed, settled

if TYPE_CHECKING:
    from idiolect.engine.stage_progress import BlockPulse

_LAYERS = 13  # keeps the layers' own draws apart from other uses of the same seed

ClientFunction = Callable[[Sent, Tree, Local, Local], Tree]
"""fn(sent, personal, local, test): `test` holds what is scored and is never given to training."""


class SharedInput(NamedTuple):
    """What all clients of a run are given alike."""

    shared: Tree
    initial: Params | tuple[()] = ()  # the parameters training started from, where they are needed
    group: Tree = ()  # the server's state for their architecture


class Block(NamedTuple):
    """The clients of a block and their inputs, stacked by client on axis 0."""

    members: Sequence[ClientRows]
    tests: Sequence[ClientRows]
    samples: Sequence[int] | None  # each client's number of the public sample; None: the round's
    shared: SharedInput  # one for all, or `per_client` a row each, where several seeds are stacked
    per_client: bool
    own: Tree
    personal: Tree
    room: Room | None = None  # for whoever may be drawn in place of these; None: for these alone


class BlockRunner:
    """Runs one block: has its networks, its batch plans and, on CUDA, its captured graph."""

    def __init__(
        self,
        fn: ClientFunction,
        networks: Mapping[str, Network],
        pools: Mapping[str, Pool],
        test_pools: Mapping[str, Pool],
        device: torch.device,
        *,
        stacked: bool,
        graph: bool = True,
        channels_last: bool = False,
        limit: int | None = None,
    ) -> None:
        self._fn = fn
        self._networks = networks
        self._device = device
        self._stacked = stacked
        self._channels_last = channels_last
        self._train_plans = BatchPlanner(pools, device, limit)
        self._test_plans = BatchPlanner(test_pools, device, limit)
        self._round = torch.zeros((), device=device)
        self._graphs = GraphScan() if graph and stacked and device.type == "cuda" else None
        self._captured: CapturedBlock | None = None
        self._seen: tuple[Any, ...] | None = None
        self._capturable = True
        self._draws = any(network.draws for network in networks.values())
        self.pulse: BlockPulse | None = None  # hears the steps of a long block
        self._inspected = False  # whether client code was watched for draws of its own
        self._method: Method | None = getattr(fn, "method", None)
        self._looks = 2  # at what the method holds; what it makes at first it may keep
        self.begin()

    @property
    def captured(self) -> bool:
        """Whether the next round is replayed, if its clients and inputs have the same form."""
        return self._captured is not None and not self._captured.outdated()

    def begin(self) -> None:
        """Begin to count the examples of a round, which may be several blocks."""
        self.examples = 0  # trained on
        self.planned = 0  # the same with padding

    def prepare(
        self,
        members: Sequence[ClientRows],
        round: int,
        samples: Sequence[int] | None = None,
        room: Room | None = None,
    ) -> None:
        """Draw the batches of a coming round, while a GPU still works on this one."""
        self._train_plans.prepare(members, round, samples, room)

    def run(self, block: Block, round: int, lend: bool = False, later: Later | None = None) -> Tree:
        """Run the function for a block; results are stacked by client on axis 0.

        With `lend` the results are buffers that the runner's next round may overwrite. So they are
        with `later`, and they may be complete only when the work put into it was replayed.
        """
        kept = self._train_plans.turn(block.members, round, block.samples, block.room)
        kept &= self._test_plans.turn(block.tests, round)
        self._round.fill_(round)
        sizes = device_floats([len(m.rows["train"]) for m in block.members], self._device)
        seed = _seed(block.members[0], round) if self._draws else None
        sent = tree.leaves((block.shared, block.own)) if self._device.type == "cpu" else []
        versions = [leaf._version for leaf in sent]
        method = self._method if self._looks else None
        held = remembered(method) if method is not None else {}
        done = self._watched(partial(self._work, sizes, block, kept, lend, later), seed)
        if method is not None:
            refuse_memory(method, held)
            self._looks -= 1
        if versions != [leaf._version for leaf in sent]:
            raise MethodError(
                "a client step changed what it was sent in place, so that other clients and the "
                "server would have it changed too; make new trees, such as "
                "tree.map(lambda leaf: 0.9 * leaf, sent.shared)"
            )
        self.examples += self._train_plans.examples
        self.planned += self._train_plans.planned
        return done

    def _watched(self, work: Callable[[], Tree], seed: int | None) -> Tree:
        """Do the work, and refuse numbers that client code drew by torch or NumPy itself.

        The first time every call of torch is checked, later only the state of the global
        generators; under vmap torch checks. Another thread may draw meanwhile, so the work is
        repeated before it is refused.
        """
        if not self._inspected:
            before = randomness.states()
            with randomness.Refusing(self._running):
                done = self._seeded(work, seed)
            self._inspected = True
        elif self._stacked:
            return self._seeded(work, seed)
        else:
            before = randomness.states()
            done = self._seeded(work, seed)
        if randomness.states() != before:
            before = randomness.states()
            done = self._seeded(work, seed)
            if randomness.states() != before:
                raise randomness.refusal("a global generator of torch or NumPy")
        return done

    def _seeded(self, work: Callable[[], Tree], seed: int | None) -> Tree:
        """Do the work; layers that draw (dropout) do so from a seed of the round."""
        with torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                _seed_layers(seed, self._device)
            return work()

    def _running(self) -> bool:
        """Say whether a network is being run at this moment."""
        return any(network.running for network in self._networks.values())

    def _work(
        self, sizes: Tensor, block: Block, kept: bool, lend: bool, later: Later | None
    ) -> Tree:
        if not self._stacked:
            return self._run_one(sizes, block)
        slots = device_ints(range(len(sizes)), self._device)
        dims = (0, 0, 0 if block.per_client else None, 0, 0)
        inputs = (slots, sizes, block.shared, block.own, block.personal)
        draws = "different" if self._draws else "error"
        mapped = torch.vmap(self._client, in_dims=dims, randomness=draws)
        if self._graphs is not None:
            form = _form(inputs, block.per_client)
            later = None if self._draws else later  # layers draw by the seed set just before
            return self._replay(mapped, inputs, form, kept, lend, later, self._graphs)
        return _explaining(mapped, inputs, lend)

    def _client(
        self, slot: Tensor, size: Tensor, given: SharedInput, own: Tree, personal: Tree
    ) -> Tree:
        pulse = self.pulse
        local, test = (
            Local(
                self._networks,
                plans,
                slot,
                size,
                self._round,
                self._stacked,
                initial,
                self._channels_last,
                self._graphs,
                pulse,
            )
            for plans, initial in (
                (self._train_plans, given.initial or None),
                (self._test_plans, None),
            )
        )
        if pulse is not None:
            test = test.watched(pulse.scores)
        return self._fn(Sent(given.shared, own, given.group), personal, local, test)

    def _run_one(self, sizes: Tensor, block: Block) -> Tree:
        """Run a block of one client as plain code, without vmap."""
        first = tree.map(lambda leaf: leaf[0], (block.own, block.personal))
        shared = block.shared
        if block.per_client:
            shared = tree.map(lambda leaf: leaf[0], shared)
        slot = torch.zeros((), dtype=torch.int64, device=self._device)
        result = self._client(slot, sizes[0], shared, *first)
        return tree.map(lambda leaf: leaf.unsqueeze(0), result)

    def _replay(
        self,
        mapped: Callable[..., Tree],
        inputs: tuple[Tree, ...],
        form: tuple[Any, ...],
        kept: bool,
        lend: bool,
        later: Later | None,
        graphs: GraphScan,
    ) -> Tree:
        """Run eagerly until the plans stand still, then capture once and replay every round.

        The first, eager round is where client code makes its plans; only when they are refilled in
        place (`kept`) does a captured graph see the batches of later rounds. A graph of plain forms
        gives way to an eager round, and another graph, when better ones were chosen.
        """
        if self._captured is not None and self._captured.outdated():
            self._captured = self._seen = None
        if self._captured is not None and kept and self._seen == form:
            return self._captured.replay(inputs, lend, later)
        self._captured = None
        if kept and self._seen == form and self._capturable:
            try:
                self._captured = CapturedBlock(mapped, inputs, graphs)
                return self._captured.replay(inputs, lend, later)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # an operation that waits for the host, say
                self._captured, self._capturable = None, False
                warnings.warn(
                    f"not captured, so slower: {str(error).splitlines()[0]}", stacklevel=2
                )
        self._seen = form
        return _explaining(mapped, inputs, lend)


def _form(inputs: Tree, per_client: bool) -> tuple[Any, ...]:
    """Return shapes and types of inputs; a captured graph would broadcast others unnoticed."""
    return per_client, [(leaf.shape, leaf.dtype) for leaf in tree.leaves(inputs)]


def _seed(member: ClientRows, round: int) -> int:
    """Return a seed for what layers draw themselves (dropout), so that a run can be repeated."""
    entropy = np.random.SeedSequence((member.seed, _LAYERS, round, member.client))
    return int(entropy.generate_state(1)[0])


def _seed_layers(seed: int, device: torch.device) -> None:
    """Seed what layers on a device draw from.

    torch.manual_seed does so for every kind of device that torch knows, and for each kind that was
    not used yet writes down who called: a millisecond or two, in every round.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        kind = getattr(torch, device.type)
        getattr(kind, "manual_seed_all", kind.manual_seed)(seed)  # it may not be the first of them


def _explaining(mapped: Callable[..., Tree], inputs: tuple[Tree, ...], lend: bool) -> Tree:
    try:
        made = mapped(*inputs)
        # On a GPU tensors may wait to be computed; what of is there now.
        return tree.map(settled if lend else _own, made) if inputs[0].is_cuda else made
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise _explained(error) from error


def _own(leaf: Tensor) -> Tensor:
    """Return a tensor computed, in memory that holds nothing else.

    Behind stepped weights lies a copy in bfloat16, which torch.save would write and not read again.
    """
    leaf = computed(leaf)
    return leaf if alone(leaf) else leaf.clone()


def _explained(error: RuntimeError) -> Exception:
    """Turn torch's words about vmap into ours; other errors stay as they are."""
    text = str(error)
    if "called random operation while in randomness error mode" in text:
        return randomness.refusal("torch itself")
    if (
        "vmap" in text
        or "Batching rule" in text
        or "data-dependent control flow" in text
        or "item()" in text
    ):
        return MethodError(
            f"a client step cannot be vectorised: {text.splitlines()[0]} Choose with tree.where "
            "instead of `if`, or run with backend='sequential' to inspect one client at a time."
        )
    return error


class CapturedBlock:
    """CUDA graphs of a round, with static buffers for its inputs and results."""

    def __init__(
        self, fn: Callable[..., Tree], inputs: tuple[Tree, ...], graphs: GraphScan
    ) -> None:
        self._inputs = tree.map(torch.clone, inputs)
        self._given: list[tuple[Tensor, int]] = []  # what the buffers hold, to be known again
        self._tape = GraphSequence()
        # The eager round before has made handles and workspaces.
        recorded = recording()
        self._outputs = graphs.record(
            self._tape, lambda: tree.map(settled, fn(*self._inputs))
        )  # what is computed later would not be recorded
        self.outdated = recorded()

    def replay(
        self, inputs: tuple[Tree, ...], lend: bool = False, later: Later | None = None
    ) -> Tree:
        """Run on new inputs; return a copy, or with `lend` what the next replay overwrites."""
        given = [(leaf, leaf._version) for leaf in tree.leaves(inputs)]
        changed: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for place, (static, now) in enumerate(zip(tree.leaves(self._inputs), given, strict=True)):
            if not self._given or not _same(self._given[place], now):
                changed.setdefault(static.dtype, []).append((static, now[0]))
        for pairs in changed.values():  # of each type of numbers in one launch
            torch._foreach_copy_([old for old, _ in pairs], [new for _, new in pairs])
        self._given = given
        made = tree.map(anew, self._outputs)
        if later is not None:
            later.append(self._tape)
            return made
        self._tape.replay()
        return made if lend else tree.map(torch.clone, made)


def _same(was: tuple[Tensor, int], now: tuple[Tensor, int]) -> bool:
    """Say whether a tensor is the same object as last time, and was not written to since."""
    return was[0] is now[0] and was[1] == now[1]


# Blocks are cut by the number of their clients' examples, as wide as was measured to be fastest.
# Stacking wins for small networks and loses for convolutions on a CPU, and by how much depends on
# the machine. So a few widths are tried for a few steps each and the fastest per client is taken.
# The choice is kept on disk: results agree between widths only up to rounding, so a run that is
# resumed, or repeated, should not choose again.

PADDING = 0.05  # share of padded work that is not worth another block; last batches add to it
_MOST_STARTS = 512  # of more distinct lengths some are taken together
MOST_BLOCKS = 8  # each block is a round of its own; past this many, padding is cheaper


def cut_blocks(lengths: Sequence[int], span: int, most: int | None = None) -> list[tuple[int, int]]:
    """Return (first, last) of each block of at most `span` clients, given lengths, longest first.

    Each span is cut into the fewest pieces that keep its padding low, or into the `most`.
    """
    cuts = []
    for first in range(0, len(lengths), span):
        piece = tuple(max(1, length) for length in lengths[first : first + span])
        pieces = _pieces(piece, most or MOST_BLOCKS)
        cuts += [(first + low, first + high) for low, high in pieces]
    return cuts


@lru_cache(maxsize=64)
def _pieces(lengths: tuple[int, ...], most: int) -> tuple[tuple[int, int], ...]:
    """Cut one span, longest first, by dynamic programming over its distinct lengths."""
    line = np.array(lengths)
    starts = np.flatnonzero(np.append(True, line[1:] != line[:-1]))
    starts = starts[:: -(-len(starts) // _MOST_STARTS)]  # a block may begin at any of these
    ends = np.append(starts[1:], len(line))
    # work[low, high] = what a piece from starts[low] to ends[high] takes, padding and all
    span = ends - starts[:, None]
    work = np.where(span > 0, line[starts][:, None] * span, np.inf)
    best, history = work[0], [np.zeros(len(starts), int)]
    while best[-1] * (1 - PADDING) > line.sum() and len(history) < min(most, len(starts)):
        whole = np.append(np.inf, best[:-1])[:, None] + work  # one piece more, which begins at low
        history.append(whole.argmin(0))
        best = whole.min(0)
    pieces, high = [], len(starts) - 1
    for choice in reversed(history):
        low = int(choice[high])
        pieces.append((int(starts[low]), int(ends[high])))
        high = low - 1
    return tuple(reversed(pieces))


TRIAL_STEPS = 6
_WIDTHS = (1, 4, 16, 64, 256)
_REPEATS, _LEAST = 5, 3
_SECONDS, _LONG = 1.0, 4.0  # enough of measuring after a few turns; and after fewer
_HOPELESS = 3.0  # times slower than the best so far: not tried again
_SLOW = 1.5  # the same in all but the first turn
_MARGIN = 0.85  # of the time of the usual width: what is to take its place must not take longer


def choose_width(
    trial: Callable[[int], int], most: int, key: str, cache: Path | None, usual: int | None = None
) -> int:
    """Return the width with the least time per client; `trial(width)` says how many it ran.

    Other work on the machine may slow any trial. So each width's best of several turns counts, and
    the `usual` one is taken unless another is clearly faster.
    """
    known = read_cache(cache)
    digest = hashlib.sha256(key.encode()).hexdigest()[:24]
    if isinstance(known.get(digest), int) and known[digest] > 0:
        return int(min(known[digest], most))
    seconds = {min(width, most): float("inf") for width in (*_WIDTHS, most)}
    began = time.perf_counter()
    for repeat in range(_REPEATS):
        if repeat and time.perf_counter() - began > (_SECONDS if repeat >= _LEAST else _LONG):
            break
        for width in list(seconds):
            seconds[width] = min(seconds[width], _seconds_per_client(trial, width))
            slow = _SLOW if repeat else _HOPELESS
            if width != usual and seconds[width] > slow * min(seconds.values()):
                del seconds[width]
    best = min(seconds, key=lambda width: seconds[width])
    if usual in seconds and seconds[best] > _MARGIN * seconds[usual]:
        best = usual
    add_to_cache(cache, {digest: best})
    return best


def _seconds_per_client(trial: Callable[[int], int], width: int) -> float:
    start = time.perf_counter()
    clients = trial(width)
    return (time.perf_counter() - start) / clients
