"""When training is over: clients tell a few numbers each, and hear the sums of what others told.

The numbers are from −1 to 1, so that one client weighs no more than another whatever it says; who
tells anything else is left out. Sums are all that anyone hears, and a run hears of no other.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.core.capabilities import FinalExchange, has
from idiolect.core.client import Local
from idiolect.core.method import Method, Sent
from idiolect.core.tree import Tree
from idiolect.engine import backend
from idiolect.engine.client_group import ClientGroup, ClientKey, ClientTask, CohortRequest
from idiolect.engine.server_update import Traffic, refuse_unequal
from idiolect.errors import MethodError

Sums = Mapping[str, Tensor]
"""What clients told, added up: leaves by name."""

_ROOM = 1 << 31  # bytes of models that a host holds between telling and hearing


class ExchangeInput(NamedTuple):
    """What a client that hears is sent in place of what the server addressed to it alone."""

    own: Tree  # the latter
    others: Sums
    deployed: Tree  # as it was when the client told; () where it has to come to that again


@dataclass(frozen=True)
class Tell(ClientTask):
    """A client settles what it would use by itself, and tells the others of it."""

    keep: bool = False

    def __call__(self, sent: Sent, personal: Tree, local: Local, exam: Local) -> Tree:
        """Return what leaves, and what stays if it is to be kept."""
        assert has(self.method, FinalExchange)
        deployed = self.method.deploy(sent, personal, local)
        return self.method.tell(deployed, local), deployed if self.keep else ()


def heard(method: Method, deployed: Tree, others: Sums, local: Local) -> Tree:
    """Let a client reconsider what to use."""
    assert has(method, FinalExchange)
    own = method.tell(deployed, local)
    form = {name: tuple(leaf.shape) for name, leaf in tree.named(own).items()}
    if (given := {name: tuple(leaf.shape) for name, leaf in others.items()}) != form:
        raise MethodError(f"clients tell {form}, and {given} came as the sum of what others told")
    sums = tree.map(lambda leaf, total: total.to(leaf.dtype), own, tree.like(own, others))
    local.restart()  # what it deployed may have been kept, or made once more just now
    return method.hear(deployed, sums, local)


def fair(rows: Tree) -> Tensor:
    """Say whose numbers are all from −1 to 1 [client]; NaN is not."""
    checks = [(leaf.abs() <= 1).unsqueeze(-1).flatten(1).all(1) for leaf in tree.leaves(rows)]
    return torch.stack(checks).all(0)


def added(rows: Tree) -> Sums:
    """Add up what clients told, rows in the order of the clients, but for those who are not fair.

    In double precision, so that one can be taken off again.
    """
    good = fair(rows)
    return {name: _only(good, leaf).sum(0) for name, leaf in tree.named(rows).items()}


def without(total: Sums, rows: Tree) -> Sums:
    """Take each client's own numbers off a sum [client, ...] that has them if they are fair."""
    good = fair(rows)
    return {name: total[name] - _only(good, leaf) for name, leaf in tree.named(rows).items()}


def _only(good: Tensor, leaf: Tensor) -> Tensor:
    return torch.where(good.reshape(-1, *[1] * (leaf.dim() - 1)), leaf.double(), 0.0)


def holds(method: Method, sent: Sent, clients: int, device: torch.device) -> bool:
    """Say whether there is room for what all clients deployed, between telling and hearing.

    It is there up to three times while it is dealt out.
    """
    room = _ROOM
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory // 8
    assert has(method, FinalExchange)
    return clients * method.models_held * tree.nbytes(sent.shared) <= room


class _Contributions(NamedTuple):
    """What the clients of one team told, a row for each seat."""

    rows: Mapping[ClientKey, int]
    told: Tree
    deployed: Tree


class Exchange:
    """What everyone told, and what each hears of it."""

    def __init__(self, teams: Sequence[_Contributions], runs: int) -> None:
        self._teams = list(teams)
        self._left = [len(team.rows) for team in teams]  # who has not been called yet
        present = [team for team in teams if team.rows]
        refuse_unequal([team.told for team in present])
        rows = tree.concat([team.told for team in present])
        seats = [seat for team in present for seat in team.rows]
        device = tree.leaves(rows)[0].device
        self.sums: list[Sums] = []
        self.traffic: list[Traffic] = []
        for run in range(runs):
            mine = sorted((seat.client, n) for n, seat in enumerate(seats) if seat.run == run)
            told = tree.take(rows, backend.device_ints([n for _, n in mine], device))
            total = added(told)
            self.sums.append(total)
            down = len(mine) * tree.nbytes(dict(total))
            self.traffic.append(Traffic(0, down, tree.nbytes(told)))

    def handed(self, place: int, calls: Sequence[CohortRequest]) -> list[CohortRequest]:
        """Call those of one team who are called, once, and hand each what it hears."""
        team = self._teams[place]
        made = []
        for run, call in enumerate(calls):
            seats = [ClientKey(run, int(client)) for client in call.cohort]
            known = [n for n, seat in enumerate(seats) if seat in team.rows]
            others: Sums = {}
            deployed: Tree = ()
            if team.rows:  # if not of this run, then rows of the same form, but none
                device = tree.leaves(team.told)[0].device
                rows = backend.device_ints([team.rows[seats[n]] for n in known], device)
                others = without(self.sums[run], tree.take(team.told, rows))
                deployed = tree.take(team.deployed, rows)
            made.append(_handing(call, known, others, deployed))
            self._left[place] -= len(known)
        if not self._left[place]:
            self._teams[place] = team._replace(deployed=())  # it is with the clients
        return made


def _handing(
    call: CohortRequest, known: Sequence[int], others: Sums, deployed: Tree
) -> CohortRequest:
    own = call.sent.own
    for leaf in tree.leaves(own)[:1]:
        own = tree.take(own, backend.device_ints(known, leaf.device))
    handed = ExchangeInput(own, others, deployed)
    return call._replace(cohort=call.cohort[list(known)], sent=call.sent._replace(own=handed))


def held(
    method: Method,
    teams: Sequence[ClientGroup],
    groups: Iterable[list[CohortRequest]],
    round: int,
    keep: bool,
) -> Exchange:
    """Let everyone tell, a group after the other; `keep` what they deployed for it."""
    work, kind = Tell(method, keep), "tell keep" if keep else "tell"
    parts: list[list[tuple[Sequence[ClientKey], Tree]]] = [[] for _ in teams]
    runs = 0
    for calls in groups:
        runs = len(calls)
        begun = [team.begin(kind, work, calls, round) for team in teams]
        for own, wait in zip(parts, begun, strict=True):
            own.append(wait())
    return Exchange([_joined(own) for own in parts], runs)


def _joined(parts: Sequence[tuple[Sequence[ClientKey], Tree]]) -> _Contributions:
    present = [(seats, found) for seats, found in parts if seats]
    if not present:
        return _Contributions({}, (), ())
    told, deployed = tree.concat([found for _, found in present])
    seats = [seat for own, _ in present for seat in own]
    return _Contributions({seat: row for row, seat in enumerate(seats)}, told, deployed)


def welcomed(sums: Sequence[Sums], calls: Sequence[CohortRequest]) -> list[CohortRequest]:
    """Hand newcomers what those told who were there before them."""
    made = []
    for total, call in zip(sums, calls, strict=True):
        count = len(call.cohort)
        others = {name: leaf.expand(count, *leaf.shape) for name, leaf in total.items()}
        made.append(_handing(call, range(count), others, ()))
    return made
