"""The final exchange: clients contribute a few numbers each and receive the sums of the others'.

The numbers are from −1 to 1, so that no client weighs more than another; contributions outside of
that are left out. Sums are all that a client receives, and of its own run only.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.core.capabilities import FinalExchange, given, has
from idiolect.core.client import Local
from idiolect.core.method import Method, Sent
from idiolect.core.tree import Tree
from idiolect.engine.backend import device_ints
from idiolect.engine.client_group import ClientGroup, ClientKey, ClientTask, CohortRequest
from idiolect.engine.server_update import Traffic, refuse_unequal
from idiolect.errors import MethodError

Sums = Mapping[str, Tensor]
"""Clients' contributions, summed: leaves by name."""

_ROOM = 1 << 31  # bytes of deployed models that a host holds during the exchange


class ExchangeInput(NamedTuple):
    """What a client receives in the exchange, in place of `Sent.own`."""

    own: Tree  # the latter
    others: Sums
    deployed: Tree  # what it deployed before; () where `deploy` runs a second time


@dataclass(frozen=True)
class Tell(ClientTask):
    """A client deploys by itself and returns what the others may know of it."""

    keep: bool = False

    @property
    def kind(self) -> str:
        """Name what is done."""
        return "tell keep" if self.keep else "tell"

    def __call__(self, sent: Sent, personal: Tree, local: Local, test: Local) -> Tree:
        """Return what leaves, and what stays if it is to be kept."""
        assert has(self.method, FinalExchange)
        local = given(self.method, local)
        deployed = self.method.deploy(sent, personal, local)
        return self.method.tell(deployed, local), deployed if self.keep else ()


def heard(method: Method, deployed: Tree, others: Sums, local: Local) -> Tree:
    """Return what a client deploys when it knows the others' sums."""
    assert has(method, FinalExchange)
    own = method.tell(deployed, local)
    form = {name: tuple(leaf.shape) for name, leaf in tree.named(own).items()}
    if (given := {name: tuple(leaf.shape) for name, leaf in others.items()}) != form:
        raise MethodError(f"clients tell {form}, and {given} came as the sum over the others")
    sums = tree.map(lambda leaf, total: total.to(leaf.dtype), own, tree.like(own, others))
    local.restart()  # what it deployed may have been kept, or made once more just now
    return method.hear(deployed, sums, local)


def fair(rows: Tree) -> Tensor:
    """Say whose numbers are all from −1 to 1 [client]; NaN is not."""
    checks = [(leaf.abs() <= 1).unsqueeze(-1).flatten(1).all(1) for leaf in tree.leaves(rows)]
    return torch.stack(checks).all(0)


def added(rows: Tree) -> Sums:
    """Sum contributions, rows in the order of the clients, without those that are not fair.

    In double precision, so that one can be subtracted again.
    """
    good = fair(rows)
    return {name: _only(good, leaf).sum(0) for name, leaf in tree.named(rows).items()}


def without(total: Sums, rows: Tree) -> Sums:
    """Subtract each client's own numbers from a sum [client, ...], which has them if fair."""
    good = fair(rows)
    return {name: total[name] - _only(good, leaf) for name, leaf in tree.named(rows).items()}


def _only(good: Tensor, leaf: Tensor) -> Tensor:
    return torch.where(good.reshape(-1, *[1] * (leaf.dim() - 1)), tree.double(leaf), 0.0)


def holds(method: Method, sent: Sent, clients: int, device: torch.device) -> bool:
    """Say whether all clients' deployed models, up to three copies, fit in memory together."""
    room = _ROOM
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory // 8
    assert has(method, FinalExchange)
    return clients * method.models_held * tree.nbytes(sent.shared) <= room


class _Contributions(NamedTuple):
    """What the clients of one group contributed, a row for each key."""

    rows: Mapping[ClientKey, int]
    numbers: Tree
    deployed: Tree


class Exchange:
    """The sums of all clients' contributions, and what each client receives of them."""

    def __init__(self, groups: Sequence[_Contributions], runs: int) -> None:
        self._groups = list(groups)
        self._left = [len(group.rows) for group in groups]  # clients that were not addressed yet
        present = [group for group in groups if group.rows]
        refuse_unequal([group.numbers for group in present])
        rows = tree.concat([group.numbers for group in present])
        keys = [key for group in present for key in group.rows]
        device = tree.leaves(rows)[0].device
        self.sums: list[Sums] = []
        self.traffic: list[Traffic] = []
        for run in range(runs):
            mine = sorted((key.client, n) for n, key in enumerate(keys) if key.run == run)
            numbers = tree.take(rows, device_ints([n for _, n in mine], device))
            total = added(numbers)
            self.sums.append(total)
            down = len(mine) * tree.nbytes(dict(total))
            self.traffic.append(Traffic(0, down, tree.nbytes(numbers)))

    def handed(self, place: int, requests: Sequence[CohortRequest]) -> list[CohortRequest]:
        """Address the clients of one group, each with the sums of the others."""
        group = self._groups[place]
        made = []
        for run, request in enumerate(requests):
            keys = [ClientKey(run, int(client)) for client in request.cohort]
            known = [n for n, key in enumerate(keys) if key in group.rows]
            others: Sums = {}
            deployed: Tree = ()
            if group.rows:  # if not of this run, then rows of the same form, but none
                device = tree.leaves(group.numbers)[0].device
                rows = device_ints([group.rows[keys[n]] for n in known], device)
                others = without(self.sums[run], tree.take(group.numbers, rows))
                deployed = tree.take(group.deployed, rows)
            made.append(_handing(request, known, others, deployed))
            self._left[place] -= len(known)
        if not self._left[place]:
            self._groups[place] = group._replace(deployed=())  # no longer needed
        return made


def _handing(
    request: CohortRequest, known: Sequence[int], others: Sums, deployed: Tree
) -> CohortRequest:
    own = request.sent.own
    for leaf in tree.leaves(own)[:1]:
        own = tree.take(own, device_ints(known, leaf.device))
    sent = request.sent._replace(own=ExchangeInput(own, others, deployed))
    return request._replace(cohort=request.cohort[list(known)], sent=sent)


def exchange(
    task: Tell, groups: Sequence[ClientGroup], parts: Iterable[list[CohortRequest]], round: int
) -> Exchange:
    """Collect the contributions of all clients, a part after the other."""
    found: list[list[tuple[Sequence[ClientKey], Tree]]] = [[] for _ in groups]
    runs = 0
    for requests in parts:
        runs = len(requests)
        started = [group.begin(task, requests, round) for group in groups]
        for own, wait in zip(found, started, strict=True):
            own.append(wait())
    return Exchange([_joined(own) for own in found], runs)


def _joined(parts: Sequence[tuple[Sequence[ClientKey], Tree]]) -> _Contributions:
    present = [(keys, found) for keys, found in parts if keys]
    if not present:
        return _Contributions({}, (), ())
    numbers, deployed = tree.concat([found for _, found in present])
    keys = [key for own, _ in present for key in own]
    return _Contributions({key: row for row, key in enumerate(keys)}, numbers, deployed)


def welcomed(sums: Sequence[Sums], requests: Sequence[CohortRequest]) -> list[CohortRequest]:
    """Address newcomers with the sums of the clients that took part."""
    made = []
    for total, request in zip(sums, requests, strict=True):
        count = len(request.cohort)
        others = {name: leaf.expand(count, *leaf.shape) for name, leaf in total.items()}
        made.append(_handing(request, range(count), others, ()))
    return made
