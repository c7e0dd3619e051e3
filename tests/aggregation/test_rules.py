"""Rules of aggregation: what they promise, by coordinates, and where they are the mean."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from idiolect.aggregation import RULES
from idiolect.aggregation.robust import GeometricMedian, Krum, Mean, Median, NormBound, TrimmedMean
from idiolect.core import tree
from idiolect.errors import ConfigError

REFERENCE = {"w": torch.zeros(2, 3), "b": torch.zeros(3)}
SHAPES = {"w": (2, 3), "b": (3,)}


def stacked(rows, seed=0, scale=1.0):
    draw = np.random.default_rng(seed)
    return {
        name: torch.from_numpy(scale * draw.normal(size=(rows, *shape)))
        for name, shape in SHAPES.items()
    }


def joined(rule, params, weight=None, reference=None):
    rows = len(params["b"])
    weight = torch.ones(rows, dtype=torch.float64) if weight is None else weight
    reference = reference or tree.map(lambda leaf: leaf.double(), REFERENCE)
    return rule.combine((), reference, params, weight)[0]


def flat(params):
    return torch.cat([leaf.reshape(-1) for leaf in tree.leaves(params)])


def close(left, right, tolerance=1e-12):
    torch.testing.assert_close(flat(left), flat(right), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", range(1, 8))
def test_the_median_is_numpys(rows):
    params = stacked(rows, rows)
    got = joined(Median(), params)
    for name, leaf in params.items():
        np.testing.assert_allclose(got[name], np.median(leaf.numpy(), 0), rtol=1e-12)
    lower = joined(Median(middle="lower"), params)
    for name, leaf in params.items():
        assert torch.equal(lower[name], leaf.median(0).values)  # torch's is the lower one


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 9),
    st.lists(st.floats(-1e30, 1e30), min_size=9, max_size=9),
    st.integers(0, 10**6),
)
def test_one_arbitrary_client_leaves_the_median_within_the_honest_range(honest, evil, seed):
    """m-1 honest clients and one that says anything: each coordinate stays among the honest."""
    params = stacked(honest, seed)
    bad = torch.tensor(evil, dtype=torch.float64)
    parts = {"w": bad[:6].reshape(1, 2, 3), "b": bad[6:].reshape(1, 3)}
    got = joined(Median(), {name: torch.cat([params[name], parts[name]]) for name in params})
    for name, leaf in params.items():
        # With two honest clients and one liar the middle is still one of, or between, the honest.
        assert (got[name] >= leaf.min(0).values - 1e-12).all()
        assert (got[name] <= leaf.max(0).values + 1e-12).all()


def test_the_trimmed_mean_by_hand():
    """Of 1, 2, 3, 4, 100 a fifth at each end is one value: (2 + 3 + 4) / 3 = 3."""
    column = torch.tensor([100.0, 1, 3, 2, 4], dtype=torch.float64)
    params = {"b": column[:, None].repeat(1, 3), "w": column.reshape(5, 1, 1).repeat(1, 2, 3)}
    close(joined(TrimmedMean(trim=0.2), params), tree.map(lambda leaf: leaf + 3, tiny_zero()))
    close(joined(TrimmedMean(trim=0.4), params), tree.map(lambda leaf: leaf + 3, tiny_zero()))
    got = joined(TrimmedMean(trim=0.1), params)  # a tenth of five is nobody
    close(got, tree.map(lambda leaf: leaf + 22, tiny_zero()))


def test_a_share_is_as_many_clients_whatever_rounding_makes_of_it(float64):
    """0.29 · 100 is 28.999999999999996; cut are 29 at each end of the squares of 0 to 99."""
    squares = torch.arange(100.0).square()
    params = {"b": squares[:, None].repeat(1, 3), "w": squares.reshape(100, 1, 1).repeat(1, 2, 3)}
    mean = sum(n * n for n in range(29, 71)) / 42
    close(joined(TrimmedMean(trim=0.29), params), tree.map(lambda leaf: leaf + mean, tiny_zero()))


def tiny_zero():
    return tree.map(lambda leaf: leaf.double(), REFERENCE)


def test_the_geometric_median_by_hand():
    """Three corners of a wide triangle: the Fermat point sees every side under 120 degrees.

    For (-1, 0), (1, 0) and (0, h) with h large it is (0, 1/√3), whatever h is: moving the third
    client away changes nothing, as no mean could say.
    """
    for height in (3.0, 3000.0):
        points = torch.tensor([[-1.0, 0], [1, 0], [0, height]], dtype=torch.float64)
        params = {"w": torch.zeros(3, 2, 3, dtype=torch.float64), "b": torch.zeros(3, 3).double()}
        params["b"][:, :2] = points
        got = joined(GeometricMedian(iterations=4000), params)["b"]
        torch.testing.assert_close(
            got[:2], torch.tensor([0, 3**-0.5], dtype=torch.float64), rtol=1e-3, atol=1e-3
        )


def test_krum_by_hand():
    """On a line 0, 1, 1.5, 3, 50 with f = 1: scores sum the 5 - 1 - 2 = 2 nearest squares.

    0: 1 + 2.25 = 3.25; 1: 1 + 0.25 = 1.25; 1.5: 0.25 + 2.25 = 2.5; 3: 2.25 + 4 = 6.25; 50: huge.
    So Krum takes 1; Multi-Krum averages all but the worst: (0 + 1 + 1.5 + 3) / 4 = 1.375; keeping
    two averages 1 and 1.5.
    """
    line = torch.tensor([0, 1, 1.5, 3, 50], dtype=torch.float64)
    params = {"b": torch.zeros(5, 3).double(), "w": torch.zeros(5, 2, 3).double()}
    params["b"][:, 0] = line
    for rule, expected in (
        (Krum(attackers=1), 1.0),
        (Krum(attackers=1, keep=2), 1.25),
        (RULES["multi-krum"](attackers=1), 1.375),
    ):
        assert joined(rule, params)["b"][0].item() == expected
    with pytest.raises(ConfigError, match=r"needs a cohort of 7 or more, and this one has 5"):
        joined(Krum(attackers=2), params)
    with pytest.raises(ConfigError, match=r"needs a cohort of 7 or more, and this one has 6"):
        joined(Krum(attackers=2), {n: torch.cat([leaf, leaf[:1]]) for n, leaf in params.items()})


def test_at_the_geometric_median_all_pulls_cancel():
    """Everyone pulls by one, from however far: nobody a thousand medians away is moved in."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(7, 9, generator=draw).double() * 10.0 ** torch.arange(-3, 4).unsqueeze(1)
    params = {"b": rows[:, :3], "w": rows[:, 3:].reshape(7, 2, 3)}
    found = joined(GeometricMedian(iterations=3000), params)
    away = rows - torch.cat([found["b"], found["w"].flatten()])
    assert float((away / away.norm(dim=1, keepdim=True)).sum(0).norm()) < 1e-6


def test_krum_adds_up_squares():
    """On a line 0, 0, 3, 5, 7 with f = 1: 5 has 4 + 4 = 8 and 0 has 0 + 9, though 0 + 3 < 2 + 2."""
    params = {"b": torch.zeros(5, 3).double(), "w": torch.zeros(5, 2, 3).double()}
    params["b"][:, 0] = torch.tensor([0.0, 0, 3, 5, 7])
    assert joined(Krum(attackers=1), params)["b"][0].item() == 5


def test_the_norm_bound_by_hand():
    """Updates of length 5 and 1 with a bound of 2: the first is shortened to 2/5 of itself."""
    reference = tree.map(lambda leaf: leaf + 1, tiny_zero())
    params = tree.map(lambda leaf: leaf.unsqueeze(0).repeat(2, *[1] * leaf.dim()), reference)
    params["b"][0] += torch.tensor([3.0, 4, 0])
    params["b"][1] += torch.tensor([0.0, 0, 1])
    got = joined(NormBound(bound=2.0), params, reference=reference)
    expected = torch.tensor([1 + 0.6, 1 + 0.8, 1.5], dtype=torch.float64)
    torch.testing.assert_close(got["b"], expected)
    close({"w": got["w"]}, {"w": reference["w"]})
    # Without a bound it is the cohort's (lower) median norm, here 1.
    median = joined(NormBound(), params, reference=reference)["b"]
    torch.testing.assert_close(median[0], torch.tensor(1 + 0.3, dtype=torch.float64))


@pytest.mark.parametrize(
    "rule",
    [
        TrimmedMean(trim=0.0),
        NormBound(bound=1e9),
        Krum(attackers=0, keep=5),
        RULES["multi-krum"](attackers=0),
    ],
)
def test_where_nothing_is_cut_off_it_is_the_mean(rule):
    params = stacked(5)
    close(joined(rule, params), joined(Mean(), params))


@pytest.mark.parametrize("name", RULES)
def test_equal_clients_are_their_own_aggregate(name):
    one = tree.map(lambda leaf: leaf[:1], stacked(1, 4))
    same = tree.map(lambda leaf: leaf.repeat(7, *[1] * (leaf.dim() - 1)), one)
    close(joined(RULES[name](), same), tree.map(lambda leaf: leaf[0], one))


@pytest.mark.parametrize("name", [name for name in RULES if name != "mean"])
def test_it_differs_from_the_mean_where_a_client_stands_apart(name):
    params = stacked(7, 2)
    params["b"][3] += 100
    mean, got = joined(Mean(), params), joined(RULES[name](), params)
    assert (got["b"] - mean["b"]).abs().min() > 5


@pytest.mark.parametrize("name", RULES)
def test_the_order_of_clients_and_absent_rows_change_nothing(name):
    params = stacked(7, 3)
    rule = RULES[name]()
    whole = joined(rule, params)
    order = torch.tensor([4, 0, 6, 2, 1, 5, 3])
    close(whole, joined(rule, tree.take(params, order)))
    rubbish = tree.map(lambda leaf: torch.cat([leaf, 1e6 + leaf[:2]]), params)
    weight = torch.tensor([1.0] * 7 + [0, 0], dtype=torch.float64)
    close(whole, joined(rule, rubbish, weight))


@pytest.mark.parametrize("name", RULES)
def test_what_clients_claim_to_weigh_is_not_heeded(name):
    params = stacked(7, 3)
    claimed = torch.tensor([1e9, 1, 2, 3, 4, 5, 6], dtype=torch.float64)
    close(joined(RULES[name](), params), joined(RULES[name](), params, claimed))


def test_every_setting_is_declared():
    for kind in RULES.values():
        assert kind.title and kind.__doc__
        for field in dataclasses.fields(kind):
            assert field.metadata.get("doc"), field.name
