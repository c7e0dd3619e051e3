"""The server's step with what nodes reported: each report, or their sum."""

from collections.abc import Sequence

import torch

from idiolect.core import tree
from idiolect.core.method import Method, Report
from idiolect.core.tree import Tree
from idiolect.deploy import fixed_point
from idiolect.engine import server_update
from idiolect.engine.deployment_runtime import ServerRuntime
from idiolect.engine.server_update import refuse_unequal

_CPU = torch.device("cpu")


def stepped(method: Method, state: Tree, present: Sequence[int], reports: Tree) -> Tree:
    """Take the server's step with reports of those present, guarded as the simulation's is."""
    cohort = torch.tensor(present)
    arrived = method.arrive(state, cohort, reports)
    bad = server_update.rows_to_leave_out(arrived, None, len(cohort), _CPU)
    return server_update.guarded_server_step(method, state, cohort, arrived, bad)


def stepped_by_sum(method: Method, state: Tree, present: Sequence[int], mean: Report) -> Tree:
    """Take the server's step with what a sum told: its mean, as one client's report."""
    rule = fixed_point.ruled(method)
    if rule is None:
        return stepped(method, state, present[:1], tree.stack([mean]))
    total = tree.scale(float(len(present)), mean.params)
    return rule.sum_step(state, torch.tensor(present), total)


def stepped_by_kind(
    method: Method,
    state: Tree,
    present: Sequence[int],
    reports: Sequence[Tree],
    servings: Sequence[ServerRuntime],
    kinds: Sequence[int],
    round: int,
    sample: int | None = None,
) -> Tree:
    """Let the server read reports with its own examples, join each architecture's, and train.

    Reports may differ in form from architecture to architecture; what is read in them does not.
    `sample` is the number of the public sample. Without a report that can be used nothing is joined
    or trained.
    """
    pairs = zip(kinds, reports, strict=True)
    read = [servings[kind].read(report, round, sample) for kind, report in pairs]
    refuse_unequal([tree.stack([one]) for one in read])
    new = stepped(method, state, present, tree.stack(read))
    good = (~server_update.rows_to_leave_out(tree.stack(read), None, len(read), _CPU)).tolist()
    for place, serving in enumerate(servings if any(good) else ()):
        rows = zip(kinds, reports, good, strict=True)
        own = [one for kind, one, fine in rows if kind == place and fine]
        if own:
            serving.join(tree.stack(own))
        serving.fuse(new, round, sample)
    return new
