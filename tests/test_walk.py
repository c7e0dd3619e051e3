"""The way of a run stays short: how many modules one run and one deployed round enter."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
walk = pytest.importorskip("walk")

# What was reached by 0.4: 59 and 36, with four to spare for a round; 47 and 32 before there were
# tasks, metrics, encoders of tables, early checks and stages of progress. The goal is 45 and 25.
# `make walk` prints the modules. Lower these, never raise: what only a GPU or a table needs is not
# entered by others, and what a CPU does beneath vmap is one module.
RUN, DEPLOYED_ROUND = 59, 40


def modules(calls):
    return sorted({call.module for call in calls})


def test_a_fedavg_run_enters_few_modules():
    found = modules(walk.traced())
    assert "experiment/train.py" in found and "methods/fedavg.py" in found
    assert len(found) <= RUN, found


def test_a_deployed_round_enters_few_modules():
    calls = walk.traced("--on", "local", "--set", f"evaluate.every={walk.ROUNDS}")
    found = modules(walk.one_round(calls))
    assert "deploy/node.py" in found and "methods/fedavg.py" in found
    assert len(found) <= DEPLOYED_ROUND, found
