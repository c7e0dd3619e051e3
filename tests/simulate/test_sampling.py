"""Who takes part: a pure function of the seed and the round."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from idiolect.simulate.sampling import cohort


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 30), st.integers(1, 30))
def test_a_cohort_is_so_many_different_clients(seed, round, clients, size):
    from_these = 3 * np.arange(clients)
    drawn = cohort(seed, round, from_these, size)
    assert len(drawn) == min(size, clients) == len(set(drawn.tolist()))
    assert set(drawn) <= set(from_these) and list(drawn) == sorted(drawn)
    assert np.array_equal(drawn, cohort(seed, round, from_these, size))


def test_rounds_and_seeds_draw_differently_and_everyone_gets_a_turn():
    """Of 5 out of 20 there are 15,504 cohorts, so 40 draws hardly repeat one."""
    draws = [tuple(cohort(0, round, np.arange(20), 5)) for round in range(40)]
    assert len(set(draws)) >= 39
    assert len({client for drawn in draws for client in drawn}) == 20
    assert tuple(cohort(1, 0, np.arange(20), 5)) != draws[0]
