"""Means and spreads of clients' scores, by hand."""

import math

import pytest

from idiolect.results.statistics import over_clients, over_seeds

NAN = math.nan


def test_one_seed_by_hand():
    """Of 1/2 and 1 with 1 and 3 test examples: deviations of 1/4, squared and over one, 1/8."""
    assert over_clients([0.5, NAN, 1.0], [1, 7, 3]) == pytest.approx(
        {"mean": 0.75, "weighted_mean": 3.5 / 4, "std": math.sqrt(1 / 8), "variance": 1 / 8}
    )


def test_without_test_examples_there_is_no_weighted_mean():
    assert math.isnan(over_clients([0.5, 1.0], [0, 0])["weighted_mean"])


def test_seeds_by_hand():
    """Seeds of 0.75 and 0.65; deviations over the clients of each are √(1/8) and √(1/200)."""
    found = over_seeds([[0.5, 1.0], [0.6, 0.7]])
    assert found["seeds"] == pytest.approx({"mean": 0.7, "std": math.sqrt(0.005)})
    spread = (math.sqrt(1 / 8) + math.sqrt(1 / 200)) / 2
    assert found["clients"] == pytest.approx({"mean": 0.7, "std": spread})
