"""Robust rules against reports as large as numbers get, against none, and against statistics.

Whatever a minority reports, the result is finite and near the honest reports.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from idiolect.aggregation.robust import (
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    NormBound,
    TrimmedMean,
)

WIDTH = 4
LIES = (1e20, -1e20, 3e38, -3e38, 1e-30, 0.0, 1e6, float("nan"), float("inf"), -float("inf"))


def rules(rows, liars):
    """Each rule as it is set up against so many liars."""
    return {
        "median": Median(),
        "lower median": Median(middle="lower"),
        "trimmed mean": TrimmedMean(trim=min(0.499, liars / rows)),
        "geometric median": GeometricMedian(),
        "norm bound": NormBound(),
    } | (
        {"krum": Krum(attackers=liars), "multi-krum": MultiKrum(attackers=liars)}
        if rows >= 2 * liars + 3
        else {}
    )


def joined(rule, rows, reference=None):
    params = {"w": rows[:, :3], "b": rows[:, 3:]}
    reference = rows.new_zeros(WIDTH) if reference is None else reference
    got = rule.combine((), {"w": reference[:3], "b": reference[3:]}, params, torch.ones(len(rows)))[
        0
    ]
    return torch.cat([got["w"], got["b"]])


def honest_rows(count, size, seed, dtype):
    draw = np.random.default_rng(seed)
    return torch.from_numpy(size * (1 + draw.uniform(-1, 1, (count, WIDTH)))).to(dtype)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_minority_that_reports_anything_leaves_every_rule_near_the_honest(data):
    """Near: within the honest range for rules by coordinate, else within a few honest diameters.

    A geometric median of n points, f of them anything, is within 2(n − f)/(n − 2f) honest radii.
    """
    liars = data.draw(st.integers(1, 4))
    honest = data.draw(st.integers(liars + 1, liars + 5))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    size = data.draw(st.sampled_from([1e-6, 1.0, 1e4]))
    good = honest_rows(honest, size, data.draw(st.integers(0, 99)), dtype)
    lie = st.sampled_from(LIES + ((1.7e308, -1.7e308) if dtype == torch.float64 else ()))
    row = st.one_of(st.lists(lie, min_size=WIDTH, max_size=WIDTH), lie.map(lambda v: [v] * WIDTH))
    bad = [data.draw(row) for _ in range(liars)]
    rows = torch.cat([good, torch.tensor(bad, dtype=dtype)])
    rows = rows[torch.tensor(data.draw(st.permutations(range(len(rows)))))]
    centre, least, most = good.mean(0), good.amin(0), good.amax(0)
    radius = (good - centre).norm(dim=1).max()
    slack = 1e-5 * size
    for name, rule in rules(len(rows), liars).items():
        got = joined(rule, rows)
        assert got.isfinite().all(), name
        if ("median" in name and "geometric" not in name) or name == "trimmed mean":
            assert (got >= least - slack).all() and (got <= most + slack).all(), name
        elif name == "norm bound":  # nobody moves it by more than an honest client could
            assert got.norm() <= good.norm(dim=1).max() + slack
        else:
            times = 2 * len(rows) / (len(rows) - 2 * liars) + 1
            assert (got - centre).norm() <= times * radius + slack, name


@pytest.mark.parametrize("lie", [1e20, 1e38, float("inf"), float("nan")])
def test_one_report_of_1e20_leaves_the_geometric_median(lie):
    """It was NaN: the square of 1e20 is infinite in single precision."""
    good = honest_rows(6, 1.0, 3, torch.float32)
    got = joined(GeometricMedian(), torch.cat([good, torch.full((1, WIDTH), lie)]))
    # One liar of seven shifts it by less than honest clients differ.
    alone = joined(GeometricMedian(), good)
    assert (got - alone).norm() < (good - alone).norm(dim=1).max()


@pytest.mark.parametrize("name", rules(7, 2))
def test_where_no_report_is_a_number_the_model_stays(name):
    reference = torch.arange(4.0)
    rows = torch.full((7, WIDTH), float("nan"))
    assert torch.equal(joined(rules(7, 2)[name], rows, reference), reference)


def with_statistics(weights, means):
    """Reports of one weight and one running mean."""
    return {
        "fc.weight": torch.tensor(weights).unsqueeze(1),
        "bn.running_mean": torch.tensor(means).unsqueeze(1),
    }


def combined(rule, weights, means):
    reports = with_statistics(weights, means)
    reference = {name: torch.zeros(1) for name in reports}
    got = rule.combine((), reference, reports, torch.ones(len(weights)))[0]
    return got["fc.weight"].item(), got["bn.running_mean"].item()


def test_krum_chooses_by_parameters_and_takes_the_statistics_of_whom_it_chose():
    """Weights 0, 1, 1.5, 3, 50 choose the second (see `test_krum_by_hand`).

    By its running mean it would be the farthest of all.
    """
    got = combined(Krum(attackers=1), [0, 1, 1.5, 3, 50], [10.0, 30.0, 11.0, 12.0, 19.0])
    assert got == (1.0, 30.0)


def test_the_geometric_median_weighs_by_parameters_alone():
    """Three equal weights of four hold it there; statistics are averaged by the same shares."""
    weight, mean = combined(GeometricMedian(), [2.0, 2, 2, 9], [1.0, 2.0, 6.0, 3.0])
    assert weight == pytest.approx(2) and mean == pytest.approx(3, abs=1e-4)


def test_the_norm_bound_is_of_parameters_alone():
    """Updates 1, 2 and 6 are cut to the median 2; running means 0, 300 and 600 are not cut."""
    got = combined(NormBound(), [1.0, 2, 6], [0.0, 300.0, 600.0])
    assert got == pytest.approx((5 / 3, 300.0))


@pytest.mark.parametrize("name", ["geometric median", "norm bound", "krum", "multi-krum"])
def test_statistics_beside_harmless_weights_are_held_within_reach(name):
    """Two of seven report the very weights of the others and running means of 1e30."""
    rule = rules(7, 2)[name]
    weights, means = [1.0, 1, 1, 1, 1, 1, 1], [1.0, 2, 3, 4, 5, 1e30, 1e30]
    weight, mean = combined(rule, weights, means)
    assert weight == pytest.approx(1) and -40 < mean < 50  # median 4, deviations of median 2


@pytest.mark.parametrize(("lie", "mean"), [(100.0, 18 / 5), (-100.0, -3 / 5)])
def test_how_far_statistics_may_lie_by_hand(lie, mean):
    """Beside 0, 1, 2 and 3 a lie of 100 counts as 12: median 2, deviations 2, 1, 0, 1 and 98.

    One of −100 counts as −9: median 1, deviations 1, 0, 1, 2 and 101. Reach is ten times the 1.
    """
    got = combined(NormBound(), [1.0] * 5, [0.0, 1.0, 2.0, 3.0, lie])
    assert got == pytest.approx((1.0, mean))
