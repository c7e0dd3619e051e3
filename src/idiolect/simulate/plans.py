"""Batch plans for a block of clients, made in NumPy from (seed, round, client, call).

A client's batches depend on nothing else: not on the backend, the width of the block, or who else
takes part. Padding is added here and masked in `Local`.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from idiolect.errors import MethodError
from idiolect.local import Plan, Pool, Request

_BATCHES, _PUBLIC = 11, 17  # keep these draws apart from other uses of the same seed
_NARROW = 8  # places of a step that are not worth halving


class Member(NamedTuple):
    """A client in a block, with the seed of the run it belongs to."""

    seed: int
    client: int
    rows: Mapping[str, np.ndarray]  # stream -> rows of its pool


class Book:
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
        self._members: Sequence[Member] = ()
        self._round = 0
        self._plans: dict[Request, Plan] = {}
        self.examples = 0  # trained on in this round
        self.planned = 0  # the same with padding

    @property
    def clients(self) -> int:
        """How many clients the block has."""
        return len(self._members)

    def turn(self, members: Sequence[Member], round: int) -> bool:
        """Open the book for a round; True where every plan kept its place and shape."""
        # By identity: one client may be examined on other rows, and comparing rows would be slow.
        same = len(members) == len(self._members) and all(
            (new.seed, new.client) == (old.seed, old.client) and new.rows is old.rows
            for new, old in zip(members, self._members, strict=True)
        )
        self._members, self._round = members, round
        self.examples = self.planned = 0
        kept = True
        for request, plan in list(self._plans.items()):
            if same and not request.shuffled and not request.sample:
                continue
            if not self._refill(request, plan):
                del self._plans[request]
                kept = False
        return kept

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
        rows, places, certain, longest = self._draw(request)
        index = torch.from_numpy(rows).to(self._device)
        weight = torch.from_numpy(places >= 0).to(self._device, torch.get_default_dtype())
        self._count(request, places)
        plan = Plan(self._pools[request.stream], index, weight, certain, longest)
        if request.stream == "public":
            plan = plan._replace(places=torch.from_numpy(np.maximum(places, 0)).to(self._device))
        return plan

    def _refill(self, request: Request, plan: Plan) -> bool:
        rows, places, certain, longest = self._draw(request)
        if rows.shape != plan.rows.shape or certain < plan.certain:
            return False
        if longest != plan.longest and not request.shuffled:  # `rows` cuts its output there
            return False
        plan.rows.copy_(torch.from_numpy(rows))
        plan.weight.copy_(torch.from_numpy(places >= 0))
        if plan.places is not None:
            plan.places.copy_(torch.from_numpy(np.maximum(places, 0)))
        self._count(request, places)
        return True

    def _count(self, request: Request, places: np.ndarray) -> None:
        if request.shuffled:
            self.examples += int((places >= 0).sum())
            self.planned += places.size

    def _draw(self, request: Request) -> tuple[np.ndarray, np.ndarray, int, int]:
        """Lay out rows and places as [client, step, example]; a place is -1 for padding.

        See `Plan` for the numbers.
        """
        held = [self._held(member, request) for member in self._members]
        orders = [
            self._order(member, request, len(rows))
            for member, rows in zip(self._members, held, strict=True)
        ]
        steps = [len(order) for order in orders]
        most = max(1, *steps) if self._limit is None else min(self._limit, max(1, *steps))
        longest = max(len(own) for own in held)
        wide = narrowed(request.batch, longest)
        places = np.full((len(orders), most, wide), -1, np.int64)
        rows = np.zeros_like(places)
        for client, (order, own) in enumerate(zip(orders, held, strict=True)):
            places[client, : len(order)] = order[:most, :wide]
            if len(own):
                rows[client] = own[np.maximum(places[client], 0)]
        return rows, places, min(*steps, most), longest

    def _held(self, member: Member, request: Request) -> np.ndarray:
        """List the pool's rows that a request is about: all of a stream, or a round's sample."""
        rows = member.rows[request.stream]
        if not request.sample:
            return rows
        chosen: np.ndarray = rows[
            sample(member.seed, self._round - request.ago, len(rows), request.sample)
        ]
        return chosen

    def _order(self, member: Member, request: Request, count: int) -> np.ndarray:
        """Lay out one client's batches [step, example]: epochs of a fresh shuffle each.

        The last batch of an epoch may be short; a client without data has no step.
        """
        batch = request.batch
        per_epoch = -(-count // batch)
        steps = request.steps or request.epochs * per_epoch
        key = (member.seed, _BATCHES, self._round, member.client, request.call)
        draw = np.random.default_rng(key) if request.shuffled else None
        order = np.full((-(-steps // max(per_epoch, 1)), per_epoch * batch), -1, np.int64)
        for epoch in order:
            epoch[:count] = draw.permutation(count) if draw else np.arange(count)
        return order.reshape(-1, batch)[:steps]


def narrowed(batch: int, longest: int) -> int:
    """Return how many places a step needs: a batch, halved as long as everyone's rows fit.

    Half by half, and not to the exact number, so that a captured graph suits most cohorts.
    """
    while batch > _NARROW and -(-batch // 2) >= longest:
        batch = -(-batch // 2)
    return batch


@lru_cache(maxsize=16)
def sample(seed: int, round: int, held: int, size: int) -> np.ndarray:
    """Draw a round's public examples without replacement: no client's number is in the seed.

    Before the first round there is nothing to look back at, so its own sample stands in.
    """
    draw = np.random.default_rng((seed, _PUBLIC, max(round, 0)))
    chosen: np.ndarray = draw.permutation(held)[:size]
    return chosen
