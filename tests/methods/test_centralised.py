"""Centralised training: one client that holds everything."""

import pytest

from idiolect.engine.architecture import Architecture
from idiolect.methods import Centralised, FedAvg
from methods.tiny import LN9, Line, alike, close, pair, refuses, simulation

CLIENTS = [[(2.0, 1), (1.0, 1)], [(-1.0, 0), (0.5, 0), (3.0, 1)], [(-2.0, 1)]]


def test_it_equals_one_client_with_all_rows() -> None:
    """Several rounds of shuffled batches, to the last bit."""
    settings = {"lr": 0.3, "batch": 2, "epochs": 2, "momentum": 0.5}
    central = simulation(Centralised(**settings), CLIENTS, Architecture(Line))
    alone = simulation(FedAvg(**settings), CLIENTS, Architecture(Line), pooled=True)
    for _ in range(3):
        central.advance()
        alone.advance()
    assert alike(central.states, alone.states)


def test_one_step_by_hand() -> None:
    """All six examples in one batch at (0, 0), p = 1/2 everywhere.

    The errors p − y are −½, −½, ½, ½, −½, −½ at x = 2, 1, −1, ½, 3, −2. Their mean is −1/6; with x,
    the sum is −1 − ½ − ½ + ¼ − 3/2 + 1 = −9/4, the mean −3/8. With lr = 1 the model is (3/8, 1/6).
    """
    world = simulation(Centralised(lr=1.0, batch=6), CLIENTS, Architecture(Line))
    world.advance()
    assert pair(world.states[0]) == close((0.375, 1 / 6), 1e-6)


def test_scores_stay_with_the_clients() -> None:
    """Trained on all, judged on each: three clients, the first of whom sees z = 2w + b, w + b."""
    world = simulation(Centralised(lr=0.5 * LN9), CLIENTS, Architecture(Line))
    traffic = world.advance().traffic[0]
    assert (traffic.bytes_down, traffic.bytes_up) == (0, 0)
    (verdict,) = world.evaluate()
    assert verdict.scores["global"]["accuracy"].tolist() == pytest.approx([1.0, 2 / 3, 0.0])


def test_settings_out_of_range_are_refused() -> None:
    refuses(Centralised, "server_lr", -1.0, "above 0")
