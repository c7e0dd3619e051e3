"""What the server keeps for each architecture, and what it does with public examples of its own.

A method whose server holds a model of each architecture (FedDF) reads every report with the public
examples at hand (`Method.read`), joins reports of equal architecture (`group_step`) and trains the
result (`fuse`). Only the reports themselves cross the network.
"""

from collections.abc import Sequence

import numpy as np
import torch

from idiolect.core import tree
from idiolect.core.method import Method
from idiolect.core.tree import Tree
from idiolect.engine.batch_layout import Member
from idiolect.engine.client_group import ClientGroup, ClientKey, CohortRequest, GroupResult
from idiolect.engine.client_tasks import Fuse
from idiolect.engine.traffic import Traffic, counted

_SERVER = 1 << 40  # its number among the clients, where batches are drawn: nobody else's


def server_member(member: Member) -> Member:
    """Seat the server beside a run's clients, with public examples only."""
    nothing = dict.fromkeys(member.rows, np.empty(0, np.int64))
    public = member.rows.get("public", np.empty(0, np.int64))
    return Member(member.seed, _SERVER, {**nothing, "public": public})


def regroup(
    method: Method,
    teams: Sequence[ClientGroup],
    done: Sequence[GroupResult],
    left_out: Sequence[ClientKey],
    servers: Sequence[Member],
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
