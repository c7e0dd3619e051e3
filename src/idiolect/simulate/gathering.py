"""What the servers make of a round: reports come in, rows or sums of them, and states move on."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from idiolect import tree
from idiolect.method import Method, Report
from idiolect.simulate import groups, guard
from idiolect.simulate.team import Call, Harvest, Seat
from idiolect.simulate.traffic import Traffic, counted, refuse_unequal
from idiolect.tree import Tree


class Gathered(NamedTuple):
    """One run's server after a round."""

    state: Tree
    traffic: Traffic
    bad: Tensor  # [client of the cohort] whose NaN or infinity went no further


def gathered(
    method: Method,
    calls: Sequence[Call],
    states: Sequence[Tree],
    done: Sequence[Harvest],
    device: torch.device,
) -> list[Gathered]:
    """Let every run's server take its step."""
    place = {seat: n for n, seat in enumerate(seat for own in done for seat in own.seats)}
    summed = any(own.sums for own in done)
    reports: Tree = () if summed else _laid_out(method, done)
    stale = guard.broken_personal([own.personal for own in done])
    if summed:
        stale = torch.cat([own.broken for own in done if own.broken is not None])
    found = []
    for run, (call, state) in enumerate(zip(calls, states, strict=True)):
        if not len(call.cohort):
            nobody = torch.zeros(0, dtype=torch.bool, device=device)
            found.append(Gathered(method.idle(state), Traffic(0, 0, 0), nobody))
            continue
        cohort = _numbers(call.cohort, device)
        rows = _numbers([place[Seat(run, int(c))] for c in call.cohort], device)
        told = None if stale is None else stale[rows]
        if summed and told is not None:
            found.append(_from_sums(method, run, call, state, cohort, told, done))
            continue
        own = tree.take(reports, rows)
        if method.grouped:
            traffic = groups.counted_apart(call, run, done)
        else:
            traffic = Traffic(1, 0, 0) if method.pooled else counted(call, own)
        own = method.arrive(state, cohort, own)
        bad = guard.broken(own, told, len(rows), device)
        found.append(Gathered(guard.guarded_step(method, state, cohort, own, bad), traffic, bad))
    return found


def _laid_out(method: Method, done: Sequence[Harvest]) -> Tree:
    """Lay all teams' reports one behind the other."""
    parts = [own.read if method.grouped else own.reports for own in done]
    refuse_unequal(parts)
    return tree.concat(parts) if parts else ()


def _from_sums(
    method: Method,
    run: int,
    call: Call,
    state: Tree,
    cohort: Tensor,
    bad: Tensor,
    done: Sequence[Harvest],
) -> Gathered:
    """Step on the mean of all as on the report of a single client."""
    sums = [own.sums[run] for own in done]
    refuse_unequal(sums)
    total = tree.map(lambda *parts: torch.cat(parts).sum(0, keepdim=True), *sums)
    one = Report(tree.scale(1 / total.size, total.params), torch.ones_like(total.size))
    new = method.server_step(state, cohort[:1], one)
    traffic = counted(call, ())._replace(bytes_up=len(cohort) * tree.nbytes(one))
    traffic = Traffic(1, 0, 0) if method.pooled else traffic
    return Gathered(tree.where(bad.all(), state, new), traffic, bad)


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


def summed(method: Method, harvest: Harvest) -> Harvest:
    """Add a team's reports up, run by run; what holds NaN or infinity is in no sum."""
    reports: Report = harvest.reports
    device = reports.size.device
    stale = guard.broken_personal([harvest.personal])
    bad = guard.broken(reports, stale, len(harvest.seats), device)
    clean = guard.without(reports, bad)
    weight = method.weights(clean.size)
    sums = []
    for run in range(len(harvest.team.groups)):
        mine = torch.tensor([seat.run == run for seat in harvest.seats], device=device)
        own = torch.where(mine, weight, 0.0)
        sums.append(Report(tree.mixed(own.unsqueeze(0), clean.params), own.sum().reshape(1)))
    return harvest._replace(reports=(), sums=sums, broken=bad)


def _numbers(values: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.asarray(values, np.int64)).to(device)
