"""How a block's batches lie, and how a GPU draws them by itself.

Drawing a permutation for each of a thousand clients takes the host longer than a GPU needs to train
them. The GPU draws what NumPy would, bit for bit; the first time, that is looked at.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from idiolect.core.batches import Plan, Request
from idiolect.kernels import permutations
from idiolect.kernels.compiled import attempt

BATCHES = 11  # keeps these draws apart from other uses of the same seed
_NARROW = 8  # places of a step that are not worth halving
_WORD = 1 << 32


class Member(NamedTuple):
    """A client in a block, with the seed of the run it belongs to."""

    seed: int
    client: int
    rows: Mapping[str, np.ndarray]  # stream -> rows of its pool
    short_batches: bool = True  # False: an epoch's last batch of under half the rows is left out


def same(members: Sequence[Member], others: Sequence[Member]) -> bool:
    """Say whether these are the same clients with the same rows."""
    # By identity: one client may be examined on other rows, and comparing rows would be slow.
    return members is others or (
        len(members) == len(others)
        and all(
            (new.seed, new.client) == (old.seed, old.client) and new.rows is old.rows
            for new, old in zip(members, others, strict=True)
        )
    )


class Layout(NamedTuple):
    """The sizes of a block's batches; see `Plan`."""

    clients: int
    steps: int
    wide: int  # places of a step
    certain: int
    longest: int
    examples: int  # of all clients, without padding

    def fits(self, request: Request, plan: Plan) -> bool:
        """Say whether a plan can be filled anew without changing its shape."""
        if plan.rows.shape != (self.clients, self.steps, self.wide) or self.certain < plan.certain:
            return False
        return request.shuffled or self.longest == plan.longest  # `rows` cuts its output there


def laid_out(
    counts: Sequence[int], request: Request, limit: int | None = None
) -> tuple[Layout, list[int]]:
    """Return the layout for clients of so many examples, and how many steps each of them takes."""
    held = np.asarray(counts)
    per_epoch = -(-held // request.batch)
    own = np.where(held > 0, request.steps or request.epochs * per_epoch, 0)
    most = max(1, int(own.max()))
    most = most if limit is None else min(limit, most)
    whole, rest = np.divmod(np.minimum(own, most), np.maximum(per_epoch, 1))
    examples = whole * held + np.minimum(rest * request.batch, held)
    longest = int(held.max())
    layout = Layout(
        len(held),
        most,
        narrowed(request.batch, longest),
        min(int(own.min()), most),
        longest,
        int(examples.sum()),
    )
    return layout, own.tolist()


def narrowed(batch: int, longest: int) -> int:
    """Return how many places a step needs: a batch, halved as long as everyone's rows fit.

    Half by half, and not to the exact number, so that a captured graph suits most cohorts.
    """
    while batch > _NARROW and -(-batch // 2) >= longest:
        batch = -(-batch // 2)
    return batch


class _Table(NamedTuple):
    members: Sequence[Member]
    counts: list[int]
    who: Tensor  # see `shuffling.shuffle`
    held: Tensor
    words: bool  # whether every seed and number is one word, as the kernel's hash takes them


class Dealer:
    """Fills plans on a GPU, without the host knowing what is in them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[str, _Table] = {}  # of each stream
        self._trusted = False

    def deals(self, request: Request, plan: Plan, longest: int | None = None) -> bool:
        """Say whether it can: shuffled batches of clients' own examples, a few thousand each."""
        longest = plan.longest if longest is None else longest
        epochs = request.epochs
        if request.steps:
            epochs = -(-request.steps * request.batch // max(longest, 1))
        whole = not request.sample and plan.places is None and request.share == 1
        return (
            request.shuffled and whole and permutations.suits(longest, max(epochs, 1), plan.weight)
        )

    def deal(
        self,
        members: Sequence[Member],
        round: int,
        request: Request,
        plan: Plan,
        copied: Callable[[Request, Plan], Layout | None],
    ) -> Layout | None:
        """Fill a plan for a round; None where it does not fit. `copied` does it from the host."""
        table = self._table(members, request.stream)
        layout, _ = laid_out(table.counts, request)
        if not layout.fits(request, plan):
            return None
        # With steps, whoever comes may have more examples than those before.
        if not table.words or not self.deals(request, plan, layout.longest):
            return copied(request, plan)

        def drawn() -> Layout:
            permutations.shuffle(
                table.who,
                table.held,
                plan.rows,
                plan.weight,
                layout.longest,
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
        self, request: Request, plan: Plan, copied: Callable[[Request, Plan], Layout | None]
    ) -> None:
        """Look once whether NumPy draws the same; another release of it might not."""
        rows, weight = plan.rows.clone(), plan.weight.clone()
        copied(request, plan)
        if not (torch.equal(rows, plan.rows) and torch.equal(weight, plan.weight)):
            raise RuntimeError(f"NumPy {np.__version__} shuffles in another way")
        self._trusted = True

    def _table(self, members: Sequence[Member], stream: str) -> _Table:
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
