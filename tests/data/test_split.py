import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from idiolect.data.federate import part_sizes, split_rows
from idiolect.errors import ConfigError

shares = [(0.6, 0.2, 0.2), (0.75, 0.0, 0.25), (0.9, 0.1, 0.0), (1.0, 0.0, 0.0), (0.34, 0.33, 0.33)]


def test_known_sizes():
    assert part_sizes(600, (0.6, 0.2, 0.2)) == (360, 120, 120)
    assert part_sizes(5000, (0.6, 0.2, 0.2)) == (3000, 1000, 1000)
    assert part_sizes(600, (0.75, 0, 0.25)) == (450, 0, 150)
    assert part_sizes(1, (0.6, 0.2, 0.2)) == (1, 0, 0)
    assert part_sizes(2, (0.6, 0.2, 0.2)) == (1, 0, 1)
    assert part_sizes(0, (0.6, 0.2, 0.2)) == (0, 0, 0)


@given(st.integers(0, 10**6), st.sampled_from(shares))
def test_sizes_are_within_one_of_the_share_and_lose_nothing(total, ratios):
    parts = part_sizes(total, ratios)
    assert sum(parts) == total
    assert all(
        abs(part - total * ratio) <= 1.0001 for part, ratio in zip(parts, ratios, strict=True)
    )
    assert parts[0] > 0 or total == 0


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.sampled_from(shares),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_parts_are_the_rows_divided(counts, ratios, stratify, seed):
    rows = np.split(np.random.default_rng(0).permutation(sum(counts)), np.cumsum(counts)[:-1])
    labels = np.arange(sum(counts)) % 3
    parts = split_rows(rows, labels, ratios, seed=(seed,), stratify=stratify)
    for client, mine in enumerate(rows):
        held = [part[client] for part in parts]
        assert sorted(np.concatenate(held)) == sorted(mine)
        assert tuple(len(h) for h in held) == part_sizes(len(mine), ratios)
    again = split_rows(rows, labels, ratios, seed=(seed,), stratify=stratify)
    assert all(
        np.array_equal(a, b)
        for x, y in zip(parts, again, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def test_a_client_does_not_depend_on_the_others():
    labels = np.zeros(100, np.int64)
    shares = (0.6, 0.2, 0.2)
    few = split_rows([np.arange(30), np.arange(30, 60)], labels, shares, seed=(5,))
    many = split_rows(
        [np.arange(30), np.arange(30, 31), np.arange(60, 100)], labels, shares, seed=(5,)
    )
    for one, other in zip(few, many, strict=True):
        assert np.array_equal(one[0], other[0])
    assert not np.array_equal(few[0][1] - 30, few[0][0])  # equal sizes, yet draws of their own
    other_seed = split_rows([np.arange(30)], labels, (0.6, 0.2, 0.2), seed=(6,))
    assert not np.array_equal(other_seed[0][0], few[0][0])


def test_stratified_parts_hold_each_class_in_its_share():
    labels = np.repeat(np.arange(4), [100, 50, 30, 20])
    parts = split_rows([np.arange(200)], labels, (0.6, 0.2, 0.2), seed=(0,), stratify=True)
    for part, ratio in zip(parts, (0.6, 0.2, 0.2), strict=True):
        held = np.bincount(labels[part[0]], minlength=4)
        assert np.all(np.abs(held - ratio * np.array([100, 50, 30, 20])) <= 2)


@pytest.mark.parametrize("ratios", [(0.6, 0.4), (0.5, 0.2, 0.2), (0, 0.5, 0.5), (1.2, -0.2, 0.0)])
def test_ratios_that_divide_nothing_are_refused(ratios):
    with pytest.raises(ConfigError, match="split"):
        split_rows([np.arange(3)], np.zeros(3, np.int64), ratios, seed=(0,))
