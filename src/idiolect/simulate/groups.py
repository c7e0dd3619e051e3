"""What the server keeps for each architecture, and what it does with public examples of its own.

A method whose server holds a model of each architecture (FedDF) reads every report with the public
examples at hand (`Method.read`), joins reports of equal architecture (`group_step`) and trains the
result (`fuse`). Only the reports themselves cross the network.
"""

from collections.abc import Sequence

import numpy as np
import torch

from idiolect import tree
from idiolect.local import Local
from idiolect.method import Method, Sent
from idiolect.simulate.crew import Call, Crew, Seat
from idiolect.simulate.plans import Member
from idiolect.simulate.traffic import Traffic, counted
from idiolect.tree import Tree

Done = tuple[Crew, list[Seat], Tree, Tree]
"""A crew, who of it was there, what they reported, and what the server read in that."""


_SERVER = 1 << 40  # its number among the clients, where batches are drawn: nobody else's


def server_member(member: Member) -> Member:
    """Seat the server beside a run's clients, with public examples only."""
    nothing = dict.fromkeys(member.rows, np.empty(0, np.int64))
    return Member(member.seed, _SERVER, {**nothing, "public": member.rows["public"]})


def regroup(
    method: Method,
    crews: Sequence[Crew],
    done: Sequence[Done],
    left_out: Sequence[np.ndarray],
    servers: Sequence[Member],
    states: Sequence[Tree],
    round: int,
) -> None:
    """Let the server join each architecture's reports, and train what came of it."""
    gone = {Seat(run, int(c)) for run, clients in enumerate(left_out) for c in clients}
    for crew, present, reports, _ in done:
        for run in range(len(crew.groups)):
            rows = [n for n, s in enumerate(present) if s.run == run and s not in gone]
            if rows:
                own = tree.take(reports, torch.tensor(rows, device=crew.device))
                crew.groups[run] = method.group_step(crew.groups[run], own)

    def fuse(sent: Sent, personal: Tree, local: Local, exam: Local) -> Tree:
        return method.fuse(sent.group, sent.shared, local)

    for crew in crews:
        crew.groups = crew.serve(fuse, servers, states, round)


def counted_apart(call: Call, run: int, done: Sequence[Done]) -> Traffic:
    """Count what crosses where reports differ in form: seat by seat."""
    sent = counted(call, ())
    down, up = sent.bytes_down, 0
    for crew, present, reports, _ in done:
        mine = sum(seat.run == run for seat in present)
        down += mine * tree.nbytes(crew.groups[run])
        up += mine * tree.nbytes(reports) // len(present)
    return Traffic(len(call.cohort), down, up)
