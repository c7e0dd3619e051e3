"""What the servers make of a round: reports come in, rows or sums of them, and states move on."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.core.method import Method, Report
from idiolect.core.tree import Tree
from idiolect.engine import architecture_state, device_lists, finite_reports
from idiolect.engine.client_group import ClientKey, CohortRequest, GroupResult
from idiolect.engine.traffic import Traffic, counted, refuse_unequal


class Gathered(NamedTuple):
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
) -> list[Gathered]:
    """Let every run's server take its step."""
    place = {seat: n for n, seat in enumerate(seat for own in done for seat in own.seats)}
    summed = any(own.sums for own in done)
    reports: Tree = () if summed else _laid_out(method, done)
    stale = finite_reports.broken_personal([own.personal for own in done])
    if summed:
        stale = torch.cat([own.broken for own in done if own.broken is not None])
    found = []
    for run, (call, state) in enumerate(zip(calls, states, strict=True)):
        heard = call.cohort if call.heard is None else call.heard
        told = None
        if stale is not None:
            told = stale[
                device_lists.whole([place[ClientKey(run, int(c))] for c in call.cohort], device)
            ]
        if not len(heard):
            nobody = torch.zeros(len(call.cohort), dtype=torch.bool, device=device)
            traffic = counted(call, ())
            found.append(Gathered(method.idle(state), traffic, nobody if told is None else told))
            continue
        cohort = device_lists.whole(heard, device)
        among = _among(call, device)
        kept = told if told is None or among is None else told[among]
        if summed and told is not None and kept is not None:
            new, traffic = _from_sums(method, run, call, state, cohort, done)
            found.append(Gathered(tree.where(kept.all(), method.idle(state), new), traffic, told))
            continue
        rows = [place[ClientKey(run, int(c))] for c in heard]
        # Where all are in their places nothing has to be moved; a mean keeps none of the rows.
        settled = method.sums and rows == list(range(len(place)))
        own = reports if settled else tree.take(reports, device_lists.whole(rows, device))
        if method.grouped:
            traffic = architecture_state.counted_apart(call, run, done)
        else:
            traffic = Traffic(1, 0, 0) if method.pooled else counted(call, own)
        own = method.arrive(state, cohort, own)
        bad = finite_reports.broken(own, kept, len(rows), device)
        new = finite_reports.guarded_step(method, state, cohort, own, bad)
        if among is not None:  # bystanders may be broken too
            everyone = torch.zeros(len(call.cohort), dtype=torch.bool, device=device)
            bad = (everyone if told is None else told).index_copy(0, among, bad)
        found.append(Gathered(new, traffic, bad))
    return found


def _among(call: CohortRequest, device: torch.device) -> Tensor | None:
    """Return where those that are heard sit among all that train; None: they are all."""
    if call.heard is None:
        return None
    places = {int(client): n for n, client in enumerate(call.cohort)}
    return device_lists.whole([places[int(client)] for client in call.heard], device)


def _laid_out(method: Method, done: Sequence[GroupResult]) -> Tree:
    """Lay all teams' reports one behind the other."""
    parts = [own.read if method.grouped else own.reports for own in done]
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
    if not method.sums:
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
    stale = finite_reports.broken_personal([harvest.personal])
    heard = torch.tensor([_heard(calls[seat.run], seat) for seat in harvest.seats], device=device)
    bad = finite_reports.broken(reports, stale, len(harvest.seats), device)
    clean = finite_reports.without(reports, bad)
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
