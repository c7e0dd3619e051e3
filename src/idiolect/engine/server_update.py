"""What the servers make of a round: reports come in, rows or sums of them, and states move on."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from idiolect.core import capabilities, tree
from idiolect.core.capabilities import ArchitectureState, Averaging, Privacy, Tampering, has
from idiolect.core.method import Method, Report
from idiolect.core.tree import Tree
from idiolect.core.wrap import sums
from idiolect.data.federation import TrainData
from idiolect.engine import backend
from idiolect.engine.batch_plan import ClientRows
from idiolect.engine.client_group import ClientGroup, ClientKey, CohortRequest, Fuse, GroupResult
from idiolect.engine.sampling import Attendance
from idiolect.errors import MethodError

Crossing = dict[str, dict[str, list[int]]]
"""What goes `up`, comes `down` and `stays`, for one client in one round: leaves and shapes."""


class Traffic(NamedTuple):
    """What crossed the network in one round of one run."""

    clients: int
    bytes_down: int
    bytes_up: int
    public_bytes: int = 0  # public examples that clients got at their first round, counted apart


class PublicTraffic:
    """What it costs to hand every client the public examples once, in the first round it is in."""

    def __init__(self, method: Method, lessons: Sequence[TrainData]) -> None:
        self._each = [
            len(own.public) * int(np.asarray(own.public.x[:1]).nbytes)
            if own.public is not None and method.public == "clients"
            else 0
            for own in lessons
        ]
        self._had: list[set[int]] = [set() for _ in lessons]
        self._rounds = 0  # those that are counted in `_had`

    def added(
        self,
        traffic: Sequence[Traffic],
        cohorts: Sequence[np.ndarray],
        round: int,
        attendance: Sequence[Attendance],
    ) -> list[Traffic]:
        """Add a round's share to its traffic; who came before tells a resumed run's past."""
        if any(self._each):
            for before in range(self._rounds, round):
                for own, had in zip(attendance, self._had, strict=True):
                    had |= set(own.training(before).tolist())
        self._rounds = round + 1
        told = []
        for run, (one, cohort) in enumerate(zip(traffic, cohorts, strict=True)):
            new = set(cohort.tolist()) - self._had[run]
            self._had[run] |= new
            told.append(one._replace(public_bytes=len(new) * self._each[run]))
        return told


def counted(call: CohortRequest, reports: Tree) -> Traffic:
    """Count exactly what would cross the network: trees down and up, leaf by leaf."""
    clients = len(call.cohort)
    down = clients * tree.nbytes(call.sent.shared) + tree.nbytes(call.sent.own)
    return Traffic(clients, down, tree.nbytes(reports))


def crossed(call: CohortRequest, reports: Tree, personal: Tree, group: Tree = ()) -> Crossing:
    """Name what would cross the network and what would not; of one client, so no client axis."""

    def shapes(held: Tree, stacked: bool) -> dict[str, list[int]]:
        return {name: list(leaf.shape)[stacked:] for name, leaf in tree.named(held).items()}

    return {
        "up": shapes(reports, True),
        "down": {
            **shapes(call.sent.shared, False),
            **shapes(call.sent.own, True),
            **shapes(group, False),
        },
        "stays": shapes(personal, True),
    }


def refuse_unequal(parts: list[Tree]) -> None:
    """Across architectures only equal shapes can be aggregated; name the leaf that differs."""
    if len(parts) < 2:
        return
    named = [tree.named(part) for part in parts]
    for other in named[1:]:
        for name in sorted(set(named[0]) | set(other)):
            shapes = [
                tuple(leaves[name].shape[1:]) if name in leaves else "absent"
                for leaves in (named[0], other)
            ]
            if shapes[0] != shapes[1]:
                raise MethodError(
                    f"report leaf {name!r} is {shapes[0]} for one architecture and {shapes[1]} for "
                    "another; across architectures report only tensors of equal shape, such as "
                    "soft predictions"
                )


def rows_with_nan(parts: Sequence[Tree]) -> Tensor | None:
    """Say of each seat whether its personal state holds NaN; infinity may stand for "not yet"."""
    found = [tree.rows_where(_nan, part) for part in parts]
    told = [rows for rows in found if rows is not None]
    return torch.cat(told) if told else None


def rows_to_leave_out(
    reports: Tree, stale: Tensor | None, rows: int, device: torch.device
) -> Tensor:
    """Say of each row of a cohort whether it must be left out."""
    bad = tree.rows_where(_not_finite, reports)
    told = [flags for flags in (bad, stale) if flags is not None]
    if not told:
        return torch.zeros(rows, dtype=torch.bool, device=device)
    return torch.stack(told).any(0)


def _nan(least: Tensor, most: Tensor) -> Tensor:
    return least.isnan() | most.isnan()


def _not_finite(least: Tensor, most: Tensor) -> Tensor:
    return ~(least.isfinite() & most.isfinite())


def guarded_server_step(
    method: Method, state: Tree, cohort: Tensor, reports: Tree, bad: Tensor
) -> Tree:
    """Take the server's step without the broken rows; with none left, as if nobody had come."""
    if has(method, Averaging) and isinstance(reports, Report):
        new = method.server_step(state, cohort, without_rows(reports, bad))
        # Where noise hides who came, it is in the step on no rows at all as well.
        return new if has(method, Privacy) else tree.where(bad.all(), state, new)
    if not tree.leaves(reports):
        return method.server_step(state, cohort, reports)
    kept = (~bad).nonzero().squeeze(1)
    if not len(kept):
        return capabilities.idle(method, state)
    if len(kept) == len(bad):
        return method.server_step(state, cohort, reports)
    return method.server_step(state, cohort[kept], tree.take(reports, kept))


def without_rows(reports: Report, bad: Tensor) -> Report:
    """Give broken rows no weight, and numbers that a weight of zero makes nothing of."""

    def cleared(leaf: Tensor) -> Tensor:
        return torch.where(bad.reshape(-1, *[1] * (leaf.dim() - 1)), 0.0, leaf)

    cleaned: Report = tree.map(cleared, reports)
    return cleaned


_SERVER = 1 << 40  # its number among the clients, where batches are drawn: nobody else's


def server_member(member: ClientRows) -> ClientRows:
    """Seat the server beside a run's clients, with public examples only."""
    nothing = dict.fromkeys(member.rows, np.empty(0, np.int64))
    public = member.rows.get("public", np.empty(0, np.int64))
    return ClientRows(member.seed, _SERVER, {**nothing, "public": public})


def regroup(
    method: Method,
    teams: Sequence[ClientGroup],
    done: Sequence[GroupResult],
    left_out: Sequence[ClientKey],
    servers: Sequence[ClientRows],
    states: Sequence[Tree],
    round: int,
    heard: Sequence[bool],
    samples: Sequence[int] | None = None,
) -> None:
    """Let the server join each architecture's reports, and train what came of it.

    The groups of a run whose server `heard` nobody stay as they were.
    """
    if not any(heard):
        return
    gone = set(left_out)
    for own in done:
        for run, group in enumerate(own.team.groups):
            rows = [n for n, s in enumerate(own.seats) if s.run == run and s not in gone]
            if rows:
                reports = tree.take(own.reports, torch.tensor(rows, device=own.team.device))
                assert has(method, ArchitectureState)
                own.team.groups[run] = method.group_step(group, reports)
    for team in teams:
        fused = team.serve(Fuse(method), servers, states, round, samples)
        trios = zip(heard, fused, team.groups, strict=True)
        team.groups = [new if someone else old for someone, new, old in trios]


def counted_apart(call: CohortRequest, run: int, done: Sequence[GroupResult]) -> Traffic:
    """Count what crosses where reports differ in form: seat by seat."""
    sent = counted(call, ())
    down, up = sent.bytes_down, 0
    for own in done:
        mine = sum(seat.run == run for seat in own.seats)
        down += mine * tree.nbytes(own.team.groups[run])
        up += mine * tree.nbytes(own.reports) // len(own.seats)
    return Traffic(len(call.cohort), down, up)


class ServerUpdate(NamedTuple):
    """One run's server after a round."""

    state: Tree
    traffic: Traffic
    bad: Tensor  # [client of the cohort] whose NaN or infinity went no further


def gathered(
    method: Method,
    calls: Sequence[CohortRequest],
    states: Sequence[Tree],
    done: Sequence[GroupResult],
    device: torch.device,
) -> list[ServerUpdate]:
    """Let every run's server take its step."""
    place = {seat: n for n, seat in enumerate(seat for own in done for seat in own.seats)}
    summed = any(own.sums for own in done)
    reports: Tree = () if summed else _laid_out(method, done)
    stale = rows_with_nan([own.personal for own in done])
    if summed:
        stale = torch.cat([own.broken for own in done if own.broken is not None])
    found = []
    for run, (call, state) in enumerate(zip(calls, states, strict=True)):
        heard = call.cohort if call.heard is None else call.heard
        told = None
        if stale is not None:
            told = stale[
                backend.device_ints([place[ClientKey(run, int(c))] for c in call.cohort], device)
            ]
        if not len(heard):
            nobody = torch.zeros(len(call.cohort), dtype=torch.bool, device=device)
            traffic = counted(call, ())
            found.append(
                ServerUpdate(
                    capabilities.idle(method, state), traffic, nobody if told is None else told
                )
            )
            continue
        cohort = backend.device_ints(heard, device)
        among = _among(call, device)
        kept = told if told is None or among is None else told[among]
        if summed and told is not None and kept is not None:
            new, traffic = _from_sums(method, run, call, state, cohort, done)
            found.append(
                ServerUpdate(
                    tree.where(kept.all(), capabilities.idle(method, state), new), traffic, told
                )
            )
            continue
        rows = [place[ClientKey(run, int(c))] for c in heard]
        # Where all are in their places nothing has to be moved; a mean keeps none of the rows.
        settled = sums(method) and rows == list(range(len(place)))
        own = reports if settled else tree.take(reports, backend.device_ints(rows, device))
        if has(method, ArchitectureState):
            traffic = counted_apart(call, run, done)
        else:
            traffic = Traffic(1, 0, 0) if method.pooled else counted(call, own)
        if has(method, Tampering):
            own = method.arrive(state, cohort, own)
        bad = rows_to_leave_out(own, kept, len(rows), device)
        new = guarded_server_step(method, state, cohort, own, bad)
        if among is not None:  # bystanders may be broken too
            everyone = torch.zeros(len(call.cohort), dtype=torch.bool, device=device)
            bad = (everyone if told is None else told).index_copy(0, among, bad)
        found.append(ServerUpdate(new, traffic, bad))
    return found


def _among(call: CohortRequest, device: torch.device) -> Tensor | None:
    """Return where those that are heard sit among all that train; None: they are all."""
    if call.heard is None:
        return None
    places = {int(client): n for n, client in enumerate(call.cohort)}
    return backend.device_ints([places[int(client)] for client in call.heard], device)


def _laid_out(method: Method, done: Sequence[GroupResult]) -> Tree:
    """Lay all teams' reports one behind the other."""
    parts = [own.read if has(method, ArchitectureState) else own.reports for own in done]
    refuse_unequal(parts)
    return tree.concat(parts) if parts else ()


def _from_sums(
    method: Method,
    run: int,
    call: CohortRequest,
    state: Tree,
    cohort: Tensor,
    done: Sequence[GroupResult],
) -> tuple[Tree, Traffic]:
    """Step on the mean of all as on the report of a single client."""
    sums = [own.sums[run] for own in done]
    refuse_unequal(sums)
    total = tree.map(lambda *parts: torch.cat(parts).sum(0, keepdim=True), *sums)
    one = Report(tree.scale(1 / total.size, total.params), torch.ones_like(total.size))
    new = method.server_step(state, cohort[:1], one)
    traffic = counted(call, ())._replace(bytes_up=len(cohort) * tree.nbytes(one))
    return new, Traffic(1, 0, 0) if method.pooled else traffic


def summable(method: Method, state: Tree) -> bool:
    """Say whether a method's server gets by with sums, as it says; two made-up reports try it."""
    if not (sums(method) and has(method, Averaging)):
        return False
    cohort = torch.zeros(1, dtype=torch.int64, device=tree.leaves(state)[0].device)
    sent = method.reference(state, cohort)
    size = tree.leaves(sent)[0].new_tensor([1.0, 3.0])
    rows = tree.map(lambda leaf: torch.stack([leaf, 1 - leaf]), sent)
    weight = method.weights(size)
    mean = tree.map(lambda leaf: leaf.unsqueeze(0), tree.mean(rows, weight))
    one = method.server_step(state, cohort, Report(mean, torch.ones_like(size[:1])))
    both = method.server_step(state, cohort.repeat(2), Report(rows, size))
    pairs = zip(tree.leaves(one), tree.leaves(both), strict=True)
    return all(torch.allclose(left, right, 1e-4, 1e-5, equal_nan=True) for left, right in pairs)


def summed(method: Method, harvest: GroupResult, calls: Sequence[CohortRequest]) -> GroupResult:
    """Add a team's reports up, run by run; what holds NaN or infinity is in no sum.

    Nor are bystanders' reports, of whom only what they keep can be broken.
    """
    reports: Report = harvest.reports
    device = reports.size.device
    stale = rows_with_nan([harvest.personal])
    heard = torch.tensor([_heard(calls[seat.run], seat) for seat in harvest.seats], device=device)
    bad = rows_to_leave_out(reports, stale, len(harvest.seats), device)
    clean = without_rows(reports, bad)
    assert has(method, Averaging)
    weight = torch.where(heard, method.weights(clean.size), 0.0)
    sums = []
    for run in range(len(calls)):
        mine = torch.tensor([seat.run == run for seat in harvest.seats], device=device)
        own = torch.where(mine, weight, 0.0)
        sums.append(Report(tree.mixed(own.unsqueeze(0), clean.params), own.sum().reshape(1)))
    broken = bad & heard if stale is None else torch.where(heard, bad, stale)
    return harvest._replace(reports=(), sums=sums, broken=broken)


def _heard(call: CohortRequest, seat: ClientKey) -> bool:
    return call.heard is None or seat.client in call.heard
