"""Who takes part: a pure function of the seed and the round."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import worlds
from idiolect.engine.sampling import (
    Attendance,
    SecretCohort,
    cohort,
    eligible,
    kept_out,
    poisson,
    watched,
)
from idiolect.errors import DataError


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


def test_the_rate_of_a_poisson_draw_is_the_cohort_over_the_clients():
    """5 of 20: a quarter. One client more or less in the rate, 5/19, 5/21, 4/20, is 0.012 off.

    Over 200,000 coins six standard deviations are 0.006.
    """
    clients = np.arange(100, 120)
    drawn = [poisson(0, round, clients, 5) for round in range(10_000)]
    secret = [SecretCohort(clients, 5, "poisson", False).reporting(0) for _ in range(10_000)]
    for found in (drawn, secret):
        counts = np.bincount(np.concatenate(found), minlength=120)[100:]
        assert abs(counts.sum() / 200_000 - 0.25) < 0.006
        assert (abs(counts / 10_000 - 0.25) < 0.026).all()  # for each client too
    assert len(SecretCohort(clients, 20, "poisson", False).reporting(0)) == 20


def test_a_secret_cohort_is_not_the_seeds():
    clients = np.arange(1000)
    one, two = (SecretCohort(clients, 10, "fixed", False) for _ in range(2))
    assert len(set(one.reporting(0))) == 10 and (one.reporting(0) == one.reporting(0)).all()
    assert (np.diff(one.reporting(0)) > 0).all()
    assert set(one.reporting(0)) != set(two.reporting(0))
    assert len(SecretCohort(clients, 10, "fixed", True).training(0)) == 1000


def test_those_kept_out_and_those_watched_are_different_clients():
    able = 3 * np.arange(12)
    for seed in range(20):
        out = kept_out(seed, able, 8)
        assert len(set(out.tolist())) == 8 and set(out) <= set(able)
        seen = watched(seed, 12, 8)
        assert len(set(seen.tolist())) == 8 and list(seen) == sorted(seen) and seen.max() < 12
    assert len({tuple(watched(seed, 12, 8)) for seed in range(20)}) > 10


def test_eligible_are_those_with_examples_but_for_the_unseen():
    """The last of six clients has nothing to train on."""
    data = worlds.federation().train_data
    assert eligible(data).tolist() == [0, 1, 2, 3, 4]
    for seed in range(5):
        found = eligible(data, seed, unseen=2)
        assert len(found) == 3 and not set(found) & {5, *kept_out(seed, np.arange(5), 2).tolist()}
    with pytest.raises(DataError, match="no client has a training example"):
        eligible(worlds.federation(train=(0, 0)).train_data)


@pytest.mark.parametrize(("rounds", "since"), [(0, 0), (1, 0), (3, 0), (3, 1), (3, 3)])
def test_strangers_trained_in_no_round_from_one_on(rounds, since):
    """Two of the ten with even numbers come to a round; or all of them train."""
    attendance = Attendance(4, 2 * np.arange(10), 2, "fixed", all_train=False)
    met = {int(client) for round in range(since, rounds) for client in attendance.reporting(round)}
    assert set(attendance.strangers(20, rounds, since)) == set(range(20)) - met
    if rounds == 1:
        assert len(attendance.strangers(20, 1)) == 18
    everyone = Attendance(4, 2 * np.arange(10), 2, "fixed", all_train=True)
    known = set(range(0, 20, 2)) if rounds > since else set()
    assert set(everyone.strangers(20, rounds, since)) == set(range(20)) - known
