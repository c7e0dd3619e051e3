"""Average ranks and critical differences, against Demšar's tables."""

import numpy as np
import pytest

from idiolect.analysis.ranks import cliques, critical_difference, ranks


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
