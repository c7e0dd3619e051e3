"""Scoring some of very many clients: which ones, and what the others' figures are."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from idiolect.core import tree
from idiolect.data.federation import TestData
from idiolect.engine import sampling
from idiolect.engine.outcome import Scores
from idiolect.engine.rounds import Simulation, Verdict
from idiolect.errors import ConfigError
from idiolect.experiment.protocols import Course, Rounds

_KEPT_BYTES = 1 << 31  # of personal models that are kept after the last round

Clients = list[NDArray[np.int64]]
"""Who is scored under each seed, in order."""


def watched(job: Course) -> Clients | None:
    """Draw whom curves are about, the same at every evaluation; None: everyone."""
    return _drawn(job, job.evaluate.clients)


def tested(job: Course) -> Clients | None:
    """Draw whom the final scores are about; None: everyone."""
    return _drawn(job, job.evaluate.final_clients)


def _drawn(job: Course, count: int | None) -> Clients | None:
    clients = len(job.members[0].names)
    if count is None or count >= clients:
        return None
    return [sampling.watched(seed, clients, count) for seed in job.seeds]


def judged(
    simulation: Rounds,
    exams: Sequence[TestData] | None,
    clients: Clients | None,
    *,
    only_global: bool = False,
    keep: bool = False,
    adapt: bool = True,
    grouped: bool = False,
) -> list[Verdict]:
    """Score some clients, or all; `adapt` and `grouped` as in `Simulation.judge`."""
    if isinstance(simulation, Simulation) and grouped:
        return simulation.judge(
            exams, only_global=only_global, keep=keep, clients=clients, adapt=adapt, grouped=True
        )
    if clients is None:
        return simulation.judge(exams, only_global=only_global, keep=keep, adapt=adapt)
    if not isinstance(simulation, Simulation):
        raise ConfigError(
            "evaluate.clients and evaluate.final_clients choose among simulated clients; leave "
            "them out where clients are nodes of their own"
        )
    return simulation.judge(exams, only_global=only_global, keep=keep, clients=clients, adapt=adapt)


def light(job: Course, simulation: Rounds) -> bool:
    """Say whether the personal models of all who are scored can be kept."""
    scored = len(job.members[0].names)
    if job.evaluate.final_clients is not None:
        scored = min(scored, job.evaluate.final_clients)
    return tree.nbytes(simulation.tree["server"]) * scored <= _KEPT_BYTES


def spread(scores: Scores, clients: Clients | None, everyone: int) -> Scores:
    """Give figures of some clients [seed, scored] a place for each; NaN for those not scored."""
    if clients is None:
        return scores
    return {name: _spread(values, clients, everyone) for name, values in scores.items()}


def _spread(values: NDArray[Any], clients: Clients, everyone: int) -> NDArray[Any]:
    whole = np.full((len(values), everyone, *values.shape[2:]), np.nan)
    for own, places, found in zip(whole, clients, values, strict=True):
        own[places] = found
    return whole
