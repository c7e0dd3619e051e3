"""Scans over many batches on CUDA: some steps are captured as a graph, and replayed for the others.

The kernels of a small step take longer to launch than to run. A round that is repeated is captured
whole (`engine.block_runner`), but for its scans of many steps: of those a piece is captured, some
steps in a row from and to buffers that hold the carry, and replayed as often as needed. To record
hundreds of steps takes the host seconds, to launch a piece some microseconds. Scans that are done
once, such as adapting after the last round, are captured in pieces as well. Where the host needs
long for a single step, as for deep networks, a piece is four steps, if it is replayed three times
or more: a carry is copied before the first piece and after each, which takes a GPU as long as half
a step of a wide layer, and copies of weights in bfloat16 that steps leave are lost. Where client
code does the same scans again and again, they are recorded once.

Where rounds are not all of the same length, because clients are drawn, only as many pieces are
replayed as the round's clients need. Then short scans are cut into pieces too.
"""

import time
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.core.tree import Tree
from idiolect.kernels import second_stream
from idiolect.kernels.cuda_graph import GraphSequence, Times, release_cached_memory
from idiolect.kernels.deferred import computed

PIECE = 8  # steps of a graph, at least
_EAGER = 2  # first steps: they create handles, plans and tuning choices, and the form of the carry
_WORTH = 4  # pieces from which on capturing pays
_SHORT = 2  # steps of a piece, at least, where not all pieces are needed in every round
_SLOW = 0.03  # seconds of the host for a step from which on few of them are a piece
_SLOWLY = 4  # of those: after each piece all that steps change is copied
_THRICE = 3  # so many of those are worth it: fewer copy more than they save
_ONCE = 2  # passes up to which recording one costs as much as doing it

Fold = Callable[[Tensor, Tree, int], Tree]
"""fold(number, carry, count): do so many steps. The number of the first is a tensor [1], which a
graph can count up."""


class GraphScan:
    """Does the scans of a block's rounds, and remembers whether its steps are slow to launch."""

    def __init__(self) -> None:
        self._slow: bool | None = None  # unknown as yet
        self._tape: GraphSequence | None = None  # that records a whole round

    def worth(self, steps: int, device: torch.device, varies: bool = False) -> bool:
        """Say whether a scan of so many steps is worth capturing, and can be captured now.

        `varies` says that not every round needs all of them.
        """
        if device.type != "cuda":
            return False
        slow = self._slow
        if torch.cuda.is_current_stream_capturing():
            if self._tape is None:  # within a piece
                return False
            slow = bool(slow)
        least = _EAGER + _WORTH * (_SHORT if varies else PIECE)
        slowly = _EAGER + (1 if varies else _THRICE * _SLOWLY)
        return steps >= least or (slow is not False and steps >= slowly)

    def record(self, tape: GraphSequence, work: Callable[[], Tree]) -> Tree:
        """Record a whole round; of scans with many steps, or slow ones, a piece."""
        release_cached_memory()
        self._tape = tape
        try:
            return tape.record(work)
        finally:
            self._tape = None

    def passes(
        self, work: Callable[[Tree], Tree], carry: Tree, times: int, device: torch.device
    ) -> Tree:
        """Do something so many times: once as it comes, then recorded with its scans, and replayed.

        Within what is recorded already it is done as it comes.
        """
        able = self._tape is None and self.worth(_EAGER + _WORTH * PIECE, device)
        if times <= _ONCE or not able:
            for _ in range(times):
                carry = work(carry)
            return carry
        held = tree.map(torch.clone, work(carry))

        def once() -> None:
            overwrite(tree.leaves(held), tree.leaves(work(held)))

        repeat(once, times - 1, self.record)
        return held

    def scan(
        self,
        fold: Fold,
        carry: Tree,
        steps: int,
        device: torch.device,
        needed: Callable[[], int] | None = None,
    ) -> Tree:
        """Do all steps; the first ones, and those that fill no piece, as they come.

        `needed` tells how many of them a round needs, where that varies. Steps beyond that must
        change nothing: a few are done all the same.
        """
        number = torch.zeros(1, dtype=torch.int64, device=device)
        tape, took = self._tape if self._tape and self._tape.recording else None, []
        for _ in range(_EAGER + (self._slow is None)):
            began = time.perf_counter()
            carry, number = fold(number, carry, 1), number + 1
            took.append(time.perf_counter() - began)
        if self._slow is None:  # the first step compiles and chooses, another may have had to wait
            self._slow = min(took[1:]) > _SLOW
        left = steps - len(took)
        long = self._piece(left, needed is not None)
        few = left % long if long else left
        if few:
            carry, number = fold(number, carry, few), number + few
        if left == few:
            return carry
        held = tree.map(torch.clone, carry)

        def piece() -> None:
            overwrite(tree.leaves(held), tree.leaves(fold(number, held, long)))
            number.add_(long)

        most, before = (left - few) // long, steps - left + few

        def some() -> int:
            return most if needed is None else max(0, min(most, -(-(needed() - before) // long)))

        outer, self._tape = self._tape, None  # a scan within a step is not captured
        try:
            (tape.repeat if tape else repeat)(piece, most if needed is None else some)
        finally:
            self._tape = outer
        return held

    def _piece(self, left: int, varies: bool) -> int:
        """Return how many of the steps that are left make a piece; 0: they are too few for any."""
        if self._slow and varies:
            return min(left, _SHORT)
        if self._slow:
            return _SLOWLY if left >= _THRICE * _SLOWLY else 0
        if left >= _WORTH * PIECE:
            return piece_length(left)
        return left // _WORTH if varies and left >= _WORTH * _SHORT else 0


def overwrite(held: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Copy what is new to where it is held: in one launch, unless some of it lies there already."""
    olds, news = [*map(_stacked, held)], [*map(_stacked, new)]
    if olds:
        second_stream.before_change(olds[0][0])
    forms = [[(dims, one.shape, one.dtype) for one, dims in side] for side in (olds, news)]
    places = {_place(one) for one, _ in olds if one.numel()}
    kept = [bool(one.numel()) and _place(one) in places for one, _ in news]
    if forms[0] == forms[1] and not any(kept):
        torch._foreach_copy_([one for one, _ in olds], [one for one, _ in news])
        return
    # Copied twice: what is new may be what was held in another place.
    fresh = [leaf.clone() if there else leaf for leaf, there in zip(new, kept, strict=True)]
    for old, leaf in zip(held, fresh, strict=True):
        old.copy_(leaf)


def _place(leaf: Tensor) -> int:
    return leaf.untyped_storage().data_ptr()


def _stacked(leaf: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return what a leaf is under vmap: that of all clients, and where their axes are."""
    dims: tuple[int, ...] = ()
    while torch._C._functorch.is_batchedtensor(leaf):
        dims += (torch._C._functorch.maybe_get_bdim(leaf),)
        leaf = torch._C._functorch.get_unwrapped(leaf)
    return computed(leaf, laid=True), dims


def piece_length(steps: int) -> int:
    """Return how many steps make a piece: such that few have to be recorded, with the rest."""
    return min(range(PIECE, 2 * PIECE), key=lambda long: long + steps % long)


def repeat(
    piece: Callable[[], None],
    times: Times,
    record: Callable[[GraphSequence, Callable[[], None]], Tree] = GraphSequence.record,
) -> None:
    """Repeat something that changes its buffers: recorded, then replayed.

    What cannot be captured is run step by step, with a warning.
    """
    tape, again = GraphSequence(), piece
    release_cached_memory()
    try:
        record(tape, piece)
        again = tape.replay
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # an operation that waits for the host, say
        warnings.warn(f"not captured, so slower: {str(error).splitlines()[0]}", stacklevel=2)
    for _ in range((times if isinstance(times, int) else times()) - tape.warmed):
        again()
