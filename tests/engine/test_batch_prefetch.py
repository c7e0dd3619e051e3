"""Batches of the coming round, drawn while a GPU works on this one."""

import pytest
import torch

import worlds
from idiolect.core import tree
from idiolect.engine.batch_plan import BatchPlanner
from idiolect.methods import FedAvg


@pytest.mark.parametrize("settings", [{"cohort": 3}, {}, {"width": 2}])
@pytest.mark.parametrize(("steps", "replays"), [(0, False), (0, True), (2, False)])
def test_batches_drawn_ahead_change_nothing_and_are_used(settings, steps, replays, monkeypatch):
    """As on a GPU, where the host has time: every later round finds all its batches ready."""
    method = FedAvg(batch=4, steps=steps)
    plain, ahead = (worlds.simulation(method, worlds.federation(), **settings) for _ in range(2))
    for group in ahead.groups:
        group._prefetches, group._replays = True, replays
    made = []
    draw = BatchPlanner.prepare

    def prepared(self, *given):
        draw(self, *given)
        made.append(self)

    taken = []
    refill = BatchPlanner._refill

    def refilled(self, request, plan):
        taken.append(request in self._ahead)
        return refill(self, request, plan)

    for _ in range(3):
        plain.advance()
    monkeypatch.setattr(BatchPlanner, "prepare", prepared)
    monkeypatch.setattr(BatchPlanner, "_refill", refilled)
    for _ in range(3):
        ahead.advance()
    for left, right in zip(tree.leaves(plain.states), tree.leaves(ahead.states), strict=True):
        assert torch.equal(left, right)
    assert made and taken and all(taken)
