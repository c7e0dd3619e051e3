"""The small suite, a bad method, and what is done to a file of the referee."""

import copy

import numpy as np

from idiolect.core.metrics import metric
from idiolect.experiment.referee.referee_run import read_lines, stored_folder
from idiolect.experiment.referee.suite import digest_of, load_suite
from idiolect.experiment.referee.verify import FAULT, verify

SMALL = load_suite("small")
STORED = read_lines(stored_folder("small"))

BAD = """
from dataclasses import dataclass
from typing import ClassVar
from idiolect.methods import FedAvg

@dataclass(frozen=True, kw_only=True)
class Amnesia(FedAvg):
    title: ClassVar[str] = "Amnesia"
    def server_step(self, state, cohort, reports):
        return state
"""


def faults(content, **more):
    return [check.text for check in verify(content, **more) if check.kind == FAULT]


def sealed(content):
    bare = {key: value for key, value in content.items() if key != "digest"}
    return {**bare, "digest": digest_of(bare)}


def moved(line, problem, factor, noise=0.0):
    """Return a line whose scores on a problem are others, with curves that fit."""
    made = copy.deepcopy(line)
    record = made["cells"][problem]
    own = metric(record["metric"])
    draws = np.random.default_rng(0)
    for one in record["seeds"]:
        scores, rows = np.array(one["score"], float), np.array(one["test"], float)
        scores = scores * factor + noise * draws.normal(size=len(scores))
        if own.name == "accuracy":
            scores = np.round(np.clip(scores, 0, 1) * rows) / rows
        one["score"] = [round(value, 6) for value in scores]
        one["test_curve"][-1] = round(float((scores * rows).sum() / rows.sum()), 6)
    return made
