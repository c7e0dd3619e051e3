"""The server update: reports of a round, or their sums, and the servers' new states; traffic.

NaN and infinity never reach a server's state. A client that reports either, or whose new personal
state holds NaN, is left out of the round: its report has no weight and it keeps its old personal
state. Where the server averages, this is a weight of zero on the device, and nothing waits for it
until the round is over.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from idiolect.core import capabilities, tree
from idiolect.core.capabilities import ArchitectureState, Averaging, Privacy, Tampering, has, sums
from idiolect.core.method import Method, Report, Sent
from idiolect.core.tree import Tree
from idiolect.data.federation import TrainData
from idiolect.engine.backend import device_ints
from idiolect.engine.batch_plan import ClientRows
from idiolect.engine.client_group import (
    SERVER,
    ClientGroup,
    ClientKey,
    CohortRequest,
    Fuse,
    GroupResult,
)
from idiolect.engine.sampling import Attendance
from idiolect.errors import MethodError
from idiolect.kernels import row_average
from idiolect.kernels.deferred import computed

Crossing = dict[str, dict[str, list[int]]]
"""What goes `up`, comes `down` and `stays`, for one client in one round: leaves and shapes."""


class Traffic(NamedTuple):
    """What crossed the network in one round of one run."""

    clients: int
    bytes_down: int
    bytes_up: int
    public_bytes: int = 0  # public examples that clients got at their first round, counted apart


class ServerUpdate(NamedTuple):
    """One run's server after a round."""

    state: Tree
    traffic: Traffic
    bad: Tensor  # [client of the cohort] whether it was left out


def update_servers(
    method: Method,
    requests: Sequence[CohortRequest],
    states: Sequence[Tree],
    results: Sequence[GroupResult],
    device: torch.device,
) -> list[ServerUpdate]:
    """Run every run's server step."""
    place = {key: n for n, key in enumerate(key for own in results for key in own.keys)}
    summed = any(own.sums for own in results)
    reports: Tree = () if summed else _joined_reports(method, results)
    broken = rows_with_nan([own.personal for own in results])
    if summed:
        broken = torch.cat([own.broken for own in results if own.broken is not None])
    updates = []
    for run, (request, state) in enumerate(zip(requests, states, strict=True)):
        heard, own_broken = request.counted, None
        if broken is not None:
            rows = [place[ClientKey(run, int(c))] for c in request.cohort]
            own_broken = broken[device_ints(rows, device)]
        if not len(heard):
            flags = _flags(own_broken, request, device)
            updates.append(
                ServerUpdate(capabilities.idle(method, state), count_traffic(request, ()), flags)
            )
            continue
        cohort = device_ints(heard, device)
        among = _heard_places(request, device)
        kept = own_broken if own_broken is None or among is None else own_broken[among]
        if summed and own_broken is not None and kept is not None:
            new, traffic = _step_on_sums(method, run, request, state, cohort, results)
            new = tree.where(kept.all(), capabilities.idle(method, state), new)
            updates.append(ServerUpdate(new, traffic, own_broken))
            continue
        rows = [place[ClientKey(run, int(c))] for c in heard]
        # Where all are in their places nothing has to be moved; a mean keeps none of the rows.
        settled = sums(method) and rows == list(range(len(place)))
        own = reports if settled else tree.take(reports, device_ints(rows, device))
        if has(method, ArchitectureState):
            traffic = _count_architectures(request, run, results)
        else:
            traffic = Traffic(1, 0, 0) if method.pooled else count_traffic(request, own)
        if has(method, Tampering):
            own = method.arrive(state, cohort, own)
        bad = rows_to_leave_out(own, kept, len(rows), device)
        new = guarded_server_step(method, state, cohort, own, bad)
        if among is not None:  # bystanders may be broken too
            bad = _flags(own_broken, request, device).index_copy(0, among, bad)
        updates.append(ServerUpdate(new, traffic, bad))
    return updates


def _flags(broken: Tensor | None, request: CohortRequest, device: torch.device) -> Tensor:
    if broken is None:
        return torch.zeros(len(request.cohort), dtype=torch.bool, device=device)
    return broken


def _heard_places(request: CohortRequest, device: torch.device) -> Tensor | None:
    """Return the places in the cohort of those that are heard; None: they are all."""
    if request.reporting is None:
        return None
    places = {int(client): n for n, client in enumerate(request.cohort)}
    return device_ints([places[int(client)] for client in request.reporting], device)


def _joined_reports(method: Method, results: Sequence[GroupResult]) -> Tree:
    """Concatenate all groups' reports."""
    parts = [own.read if has(method, ArchitectureState) else own.reports for own in results]
    refuse_unequal(parts)
    return tree.concat(parts) if parts else ()


# Broken reports.


def rows_with_nan(parts: Sequence[Tree]) -> Tensor | None:
    """Say of each row whether it holds NaN; infinity in personal state may mean "not yet"."""
    found = [tree.unsound_rows(part, finite=False) for part in parts]
    flags = [rows for rows in found if rows is not None]
    return torch.cat(flags) if flags else None


def rows_to_leave_out(
    reports: Tree, broken: Tensor | None, rows: int, device: torch.device
) -> Tensor:
    """Say of each row of a cohort whether it must be left out."""
    bad = tree.unsound_rows(reports, finite=True)
    found = [flags for flags in (bad, broken) if flags is not None]
    if not found:
        return torch.zeros(rows, dtype=torch.bool, device=device)
    return found[0] if len(found) == 1 else torch.stack(found).any(0)


def guarded_server_step(
    method: Method, state: Tree, cohort: Tensor, reports: Tree, bad: Tensor
) -> Tree:
    """Run the server step without the broken rows; with none left, the idle step."""
    if has(method, Averaging) and isinstance(reports, Report):
        new = method.server_step(state, cohort, without_rows(reports, bad))
        new = tree.map(computed, new) if bad.is_cuda else new
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
    """Give broken rows no weight, and finite numbers, since 0 times NaN is NaN."""
    if bad.is_cuda:  # not asked whether there are any: a GPU would have to be waited for
        late: Report = tree.map(partial(row_average.without, bad), reports)
        return late
    if not bad.any():
        return reports
    cleaned: Report = tree.map(
        lambda leaf: torch.where(bad.reshape(-1, *[1] * (leaf.dim() - 1)), 0.0, leaf), reports
    )
    return cleaned


# Reports in sums, which workers of a cluster send.


def summable(method: Method, state: Tree) -> bool:
    """Say whether a method's server can use sums, as it claims; two made-up reports try it."""
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


def sum_reports(
    method: Method, result: GroupResult, requests: Sequence[CohortRequest]
) -> GroupResult:
    """Sum a group's reports run by run, without those that hold NaN or infinity.

    Nor are bystanders' reports in it, of whom only the personal state can be broken.
    """
    reports: Report = result.reports
    device = reports.size.device
    stale = rows_with_nan([result.personal])
    heard = torch.tensor(
        [key.client in requests[key.run].counted for key in result.keys], device=device
    )
    bad = rows_to_leave_out(reports, stale, len(result.keys), device)
    clean = without_rows(reports, bad)
    assert has(method, Averaging)
    weight = torch.where(heard, method.weights(clean.size), 0.0)
    found = []
    for run in range(len(requests)):
        mine = torch.tensor([key.run == run for key in result.keys], device=device)
        own = torch.where(mine, weight, 0.0)
        found.append(Report(tree.mixed(own.unsqueeze(0), clean.params), own.sum().reshape(1)))
    broken = bad & heard if stale is None else torch.where(heard, bad, stale)
    return result._replace(reports=(), sums=found, broken=broken)


def _step_on_sums(
    method: Method,
    run: int,
    request: CohortRequest,
    state: Tree,
    cohort: Tensor,
    results: Sequence[GroupResult],
) -> tuple[Tree, Traffic]:
    """Run the server step on the mean of all as on the report of a single client."""
    parts = [own.sums[run] for own in results]
    refuse_unequal(parts)
    total = tree.map(lambda *leaves: torch.cat(leaves).sum(0, keepdim=True), *parts)
    one = Report(tree.scale(1 / total.size, total.params), torch.ones_like(total.size))
    new = method.server_step(state, cohort[:1], one)
    if method.pooled:
        return new, Traffic(1, 0, 0)
    return new, count_traffic(request, ())._replace(bytes_up=len(cohort) * tree.nbytes(one))


# Methods whose server holds a model of each architecture (FedDF): it reads every report with its
# public examples (`read`), joins reports of equal architecture (`group_step`) and trains the result
# (`fuse`). Only the reports themselves cross the network.


def server_request(member: ClientRows, state: Tree, sample: int) -> CohortRequest:
    """Address a run's server, with the public examples of one of its clients."""
    nothing = np.empty(0, np.int64)
    rows = {stream: held if stream == "public" else nothing for stream, held in member.rows.items()}
    own = ClientRows(member.seed, SERVER, {"public": nothing, **rows})
    return CohortRequest(np.array([SERVER]), Sent(state), {SERVER: own}, sample=sample)


def update_architectures(
    method: Method,
    groups: Sequence[ClientGroup],
    results: Sequence[GroupResult],
    left_out: Sequence[ClientKey],
    heard: Sequence[bool],
    servers: Sequence[CohortRequest],
    round: int,
) -> None:
    """Join each architecture's reports, and train the result.

    The state of a run whose server `heard` nobody stays as it was.
    """
    if not any(heard):
        return
    assert has(method, ArchitectureState)
    gone = set(left_out)
    joined = {id(group): [method.unheard(own) for own in group.groups] for group in groups}
    for own in results:
        for run, state in enumerate(own.group.groups):
            rows = [n for n, key in enumerate(own.keys) if key.run == run and key not in gone]
            if rows:
                reports = tree.take(own.reports, torch.tensor(rows, device=own.group.device))
                joined[id(own.group)][run] = method.group_step(state, reports)
    for group in groups:
        old, group.groups = group.groups, joined[id(group)]
        fused = group.serve(Fuse(method), servers, round)
        trios = zip(heard, fused, old, strict=True)
        group.groups = [new if someone else was for someone, new, was in trios]


# Traffic.


class PublicTraffic:
    """The cost of sending every client the public examples once, in its first round."""

    def __init__(self, method: Method, trained: Sequence[TrainData]) -> None:
        self._each = [
            len(own.public) * int(np.asarray(own.public.x[:1]).nbytes)
            if own.public is not None and method.public == "clients"
            else 0
            for own in trained
        ]
        self._had: list[set[int]] = [set() for _ in trained]
        self._rounds = 0  # those that are counted in `_had`

    def add(
        self,
        traffic: Sequence[Traffic],
        requests: Sequence[CohortRequest],
        round: int,
        attendance: Sequence[Attendance],
    ) -> list[Traffic]:
        """Add a round's share to its traffic; `attendance` knows a resumed run's past."""
        if any(self._each):
            for before in range(self._rounds, round):
                for own, had in zip(attendance, self._had, strict=True):
                    had |= set(own.training(before).tolist())
        self._rounds = round + 1
        found = []
        for run, (one, request) in enumerate(zip(traffic, requests, strict=True)):
            new = set(request.cohort.tolist()) - self._had[run]
            self._had[run] |= new
            found.append(one._replace(public_bytes=len(new) * self._each[run]))
        return found


def count_traffic(request: CohortRequest, reports: Tree) -> Traffic:
    """Count exactly what would cross the network: trees down and up, leaf by leaf."""
    clients = len(request.cohort)
    down = clients * tree.nbytes(request.sent.shared) + tree.nbytes(request.sent.own)
    return Traffic(clients, down, tree.nbytes(reports))


def _count_architectures(
    request: CohortRequest, run: int, results: Sequence[GroupResult]
) -> Traffic:
    """Count what crosses where reports differ in form between groups."""
    down, up = count_traffic(request, ()).bytes_down, 0
    for own in results:
        mine = sum(key.run == run for key in own.keys)
        down += mine * tree.nbytes(own.group.groups[run])
        up += mine * tree.nbytes(own.reports) // len(own.keys)
    return Traffic(len(request.cohort), down, up)


def crossed(request: CohortRequest, reports: Tree, personal: Tree, group: Tree = ()) -> Crossing:
    """Name what would cross the network and what would not; of one client, so no client axis."""

    def shapes(held: Tree, stacked: bool) -> dict[str, list[int]]:
        return {name: list(leaf.shape)[stacked:] for name, leaf in tree.named(held).items()}

    down = {**shapes(request.sent.shared, False), **shapes(request.sent.own, True)}
    return {
        "up": shapes(reports, True),
        "down": {**down, **shapes(group, False)},
        "stays": shapes(personal, True),
    }


def refuse_unequal(parts: Sequence[Tree]) -> None:
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
