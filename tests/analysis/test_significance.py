"""Tests and ranks against published answers, Demšar's tables and scipy."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from idiolect.analysis.significance import (
    cliques,
    critical_difference,
    holm,
    over_seeds,
    ranks,
    sampled,
    signed_rank,
)


def test_wilcoxon_on_darwins_plants():
    """Cross- minus self-fertilised Zea mays, in eighths of an inch (Fisher's 15 pairs).

    The negative ones, -67 and -48, rank 14 and 10 of 15: W = 24. Of the 2^15 choices of signs, 676
    have a sum of ranks of 24 or less.
    """
    darwin = np.array([49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]) / 8
    assert signed_rank(darwin) == pytest.approx(2 * 676 / 2**15)


def test_five_clients_that_all_gain_are_two_chances_in_thirty_two():
    assert signed_rank(np.array([0.01, 0.02, 0.03, 0.04, 0.05])) == pytest.approx(2 / 32)


def test_ties_are_seen_through_the_noise_of_floats():
    """0.9 - 0.8 and 0.7 - 0.6 are a tenth each; untouched they would rank 1, 2, 3."""
    apart = np.array([0.9 - 0.8, 0.7 - 0.6, 0.3 - 0.4])
    assert len(set(np.abs(apart))) > 1
    assert signed_rank(apart) == signed_rank(np.array([1.0, 1.0, -1.0]))


@pytest.mark.parametrize("seed", range(4))
def test_with_ties_and_zeros_it_is_the_permutation_test(seed):
    drawn = np.random.default_rng(seed).integers(-2, 4, 9).astype(float)
    assert len(set(abs(drawn))) < 9
    expected = stats.wilcoxon(drawn, zero_method="pratt", method=stats.PermutationMethod())
    assert signed_rank(drawn) == pytest.approx(expected.pvalue)


def test_exact_and_approximate_agree_on_many():
    drawn = np.round(np.random.default_rng(0).normal(0.1, 0.5, 50), 1)
    approximate = stats.wilcoxon(drawn, zero_method="pratt", method="asymptotic").pvalue
    assert signed_rank(drawn) == pytest.approx(approximate, rel=0.05)


def test_level_methods_are_no_evidence():
    assert signed_rank(np.zeros(8)) == 1.0


def test_holm_on_a_worked_example():
    """0.01, 0.04, 0.03, 0.005 of four: 0.005 x 4, 0.01 x 3, 0.03 x 2, and 0.04 no less than that.

    Holm (1979), the step-down form.
    """
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.7, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_keeps_the_order_and_lies_between_p_and_bonferroni(values):
    adjusted = holm(values)
    assert sorted(adjusted) == [adjusted[place] for place in np.argsort(values, kind="stable")]
    for p, held in zip(values, adjusted, strict=True):
        assert p <= held <= min(1.0, p * len(values)) + 1e-12


def test_over_seeds_with_other_clients_is_the_t_test_of_the_seeds_means():
    differences = np.random.default_rng(0).normal(0.01, 0.02, (5, 8))
    expected = stats.ttest_1samp(differences.mean(axis=1), 0).pvalue
    assert over_seeds(differences, same_clients=False) == pytest.approx(expected)


def test_over_seeds_with_the_same_clients_by_hand():
    """Two seeds, three clients: 0 2 4 and 4 4 10.

    Grand mean 4; seeds' means 2, 6; clients' means 2, 3, 7.
    MS seeds = 3 x ((2-4)^2 + (6-4)^2) / 1 = 24. MS clients = 2 x (4 + 1 + 9) / 2 = 14.
    Rest: 0-2-2+4=0, 2-2-3+4=1, 4-2-7+4=-1 and 4-6-2+4=0, 4-6-3+4=-1, 10-6-7+4=1: 4 / 2 = 2.
    Variance of the mean (24 + 14 - 2) / 6 = 6; freedom 36^2 / (24^2/1 + 14^2/2 + 2^2/2) = 1.917.
    """
    held = np.array([[0.0, 2, 4], [4, 4, 10]])
    assert sampled(held, same_clients=True) == pytest.approx((4, 6, 36**2 / (576 + 98 + 2)))
    expected = 2 * stats.t.sf(4 / np.sqrt(6), 36**2 / 676)
    assert over_seeds(held, same_clients=True) == pytest.approx(expected)


def test_an_effect_that_is_not_there_is_left_out():
    """Both seeds find the same: MS of seeds 0 is below the rest, so only clients are a sample."""
    held = np.array([[1.0, 2, 3, 6], [3, 2, 1, 6]])
    by_client = np.array([2.0, 2, 2, 6])
    assert sampled(held, True) == pytest.approx((3, by_client.var(ddof=1) / 4, 3))


def test_one_seed_says_nothing_of_others_and_no_difference_is_none():
    assert over_seeds(np.array([[0.1, 0.2, 0.3]]), same_clients=True) is None
    assert sampled(np.array([[0.1, 0.2, 0.3]]), True) == pytest.approx((0.2, 0.01 / 3, 2))
    assert over_seeds(np.zeros((3, 4)), same_clients=False) == 1.0
    assert over_seeds(np.full((3, 4), 0.1), same_clients=False) == 0.0


def test_clients_without_a_score_are_left_out():
    nan = np.nan
    held = np.array([[1.0, 3, nan], [5, nan, 7]])
    assert sampled(held, same_clients=False) == pytest.approx((4, 4, 1))
    assert over_seeds(held, same_clients=True) is None  # one client has both
    whole = np.array([[1.0, 3, 9], [5, 4, 7]])
    gap = np.array([[1.0, 3, nan, 9], [5, 4, 7, 7]])
    assert sampled(gap, True) == sampled(whole, True)


def test_without_scipy_the_remedy_is_told():
    code = """
import sys
sys.modules["scipy"] = sys.modules["scipy.stats"] = None
import numpy as np
from idiolect.errors import MissingExtra
from idiolect.analysis.significance import signed_rank
try:
    signed_rank(np.array([0.1, 0.2]))
except MissingExtra as error:
    print(error, error.code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "need scipy; install it with: pip install 'idiolect[stats]' 9" in done.stdout


@pytest.mark.parametrize(
    ("methods", "q"), [(2, 1.960), (3, 2.343), (4, 2.569), (5, 2.728), (6, 2.850), (10, 3.164)]
)
def test_critical_values_are_those_of_demsars_table_5(methods, q):
    assert critical_difference(methods, 1) == pytest.approx(
        q * np.sqrt(methods * (methods + 1) / 6), abs=2e-3
    )


def test_demsars_example():
    """Section 3.2.2: four classifiers on 14 datasets; the critical difference at 0.05 is 1.25."""
    assert critical_difference(4, 14) == pytest.approx(1.25, abs=0.005)
    assert critical_difference(4, 14, alpha=0.10) == pytest.approx(1.12, abs=0.005)


def test_ranks_by_hand():
    """Three methods, two clients: .9 .8 .8 ranks 1, 2.5, 2.5 and .5 .6 .4 ranks 2, 1, 3."""
    found = ranks(("a", "b", "c"), np.array([[0.9, 0.5], [0.8, 0.6], [0.8, 0.4]]))
    assert found.average == {"a": 1.5, "b": 1.75, "c": 2.75}
    assert list(found.average) == ["a", "b", "c"] and found.blocks == 2
    assert found.critical_difference == pytest.approx(2.343, abs=2e-3)  # k(k+1) / 6N = 1
    assert found.cliques == [["a", "b", "c"]]


def test_friedman_of_equal_methods_is_one_and_of_two_is_not_asked():
    assert ranks(("a", "b", "c"), np.full((3, 5), 0.5)).friedman == 1.0
    assert ranks(("a", "b"), np.full((2, 5), 0.5)).friedman is None
    ordered = np.array([[0.3], [0.2], [0.1]]) + np.zeros((3, 12))
    assert ranks(("a", "b", "c"), ordered).friedman == pytest.approx(np.exp(-12))  # χ² = 24, df 2


def test_cliques_are_the_largest_groups_and_may_overlap():
    labels = list("abcde")
    average = [1.0, 1.5, 2.1, 3.6, 3.7]
    assert cliques(labels, average, 1.0) == [["a", "b"], ["b", "c"], ["d", "e"]]
    assert cliques(labels, average, 0.05) == []
    assert cliques(labels, average, 9.0) == [labels]
    assert cliques(labels, [1.0, 2.0, 3.0, 4.0, 5.0], 1.0) == []  # at the difference: apart
