"""Fairness by Eq. 6, on numbers one can redo by hand."""

import math

import numpy as np
import pytest

from idiolect.results.statistics import fairness


def test_spread_is_over_the_clients_of_a_seed_averaged_over_seeds():
    """Two seeds of three clients: .1, .4, .7 and .3, .4, .5 deviate by .3 and .1, .2 on average.

    The second seed turned round, as where clients are others under every seed, spreads as much; the
    means of places over seeds would spread less.
    """
    seeds = np.array([[0.1, 0.4, 0.7], [0.3, 0.4, 0.5]])
    turned = np.array([seeds[0], seeds[1][::-1]])
    for accuracy in (seeds, turned):
        found = fairness({"one": accuracy})["methods"]["one"]
        assert found["std"] == pytest.approx(0.2) and found["variance"] == pytest.approx(0.04)
        assert found["variance_of_seeds"] == pytest.approx([0.09, 0.01])


def test_pairs_are_quoted_as_the_paper_does():
    """MNIST DS-3: "the reduction factor for PersFL in SD stands at 1.67x compared to FedPer"."""
    persfl, fedper = np.array([[0.97, 1.0, 1.03]]), np.array([[0.90, 0.95, 1.0]])
    pairs = fairness({"PersFL": persfl, "FedPer": fedper, "again": persfl - 0.5})["pairs"]
    assert pairs["PersFL"]["FedPer"]["verdict"] == "fairer"
    assert round(pairs["PersFL"]["FedPer"]["ratio"], 2) == 1.67
    assert pairs["FedPer"]["PersFL"] == {"verdict": "less fair", "ratio": pytest.approx(0.6)}
    assert pairs["PersFL"]["again"] == {"verdict": "equal", "ratio": 1.0}
    assert "PersFL" not in pairs["PersFL"]


def test_a_client_without_a_score_is_left_out_and_one_client_has_no_spread():
    nan = math.nan
    found = fairness({"a": np.array([[0.2, nan, 0.4]]), "b": np.array([[0.2, nan, nan]])})
    assert found["methods"]["a"]["variance"] == pytest.approx(0.02)
    assert found["pairs"]["a"]["b"] == {"verdict": None, "ratio": None}


def test_equal_accuracies_are_fairer_than_any_others():
    pairs = fairness({"flat": np.full((1, 3), 0.5), "not": np.array([[0.4, 0.5, 0.6]])})["pairs"]
    assert pairs["flat"]["not"] == {"verdict": "fairer", "ratio": math.inf}
    assert pairs["not"]["flat"] == {"verdict": "less fair", "ratio": 0.0}
