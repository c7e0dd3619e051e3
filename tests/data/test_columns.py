"""Encoders of tables: derived by hand, and equal over any division of the rows."""

import json
import math

import numpy as np
import pytest

from idiolect.data.column_sums import ColumnPlan, ColumnSums, RawColumn, RawTable
from idiolect.data.columns import TableEncoder, same_widths
from idiolect.errors import ConfigError, DataError

NAN = math.nan


def number(*values, **plan):
    return RawColumn(ColumnPlan("number", **plan), np.array(values, np.float64))


def category(*values, **plan):
    names = tuple(sorted({one for one in values if one is not None}))
    codes = np.array([-1 if one is None else names.index(one) for one in values], np.int32)
    return RawColumn(ColumnPlan("category", **plan), codes, names)


def table(**columns):
    return RawTable(columns, len(next(iter(columns.values())).values))


def fit(raw, rows=None, **options):
    return TableEncoder.fit(raw.plans, raw.sums(rows), **options)


def test_a_number_is_scaled_and_a_gap_is_the_median_with_a_flag():
    raw = table(age=number(1, 3, NAN, 5, 7))
    encoder = fit(raw)
    assert encoder.features == ("age", "age missing")
    # mean 4, deviation sqrt((9 + 1 + 1 + 9) / 4) = sqrt 5, median 4
    s = math.sqrt(5)
    wanted = [[-3 / s, 0], [-1 / s, 0], [0, 1], [1 / s, 0], [3 / s, 0]]
    np.testing.assert_allclose(encoder.encode(raw), wanted, rtol=1e-6)
    skewed = table(age=number(0, 0, 12, NAN, impute="mean", scale=False))
    assert fit(skewed).encode(skewed).tolist() == [[0, 0], [0, 0], [12, 0], [4, 1]]
    mode = table(age=number(3, 3, 12, NAN, impute="mode", scale=False))
    assert fit(mode).encode(mode)[3].tolist() == [3, 1]


@pytest.mark.parametrize("impute", ["median", "mode"])
def test_a_gap_among_large_numbers_that_hardly_vary_lies_among_them(impute):
    """A bin of the histogram is 0.017 % wide: of values about 1.7e9 it spans 290,000."""
    values = 1.7e9 + np.random.default_rng(0).normal(0, 50, 400)
    raw = table(at=number(NAN, *values, impute=impute))
    assert abs(fit(raw).encode(raw)[0, 0]) < 0.2
    whole = table(year=number(NAN, 2018, 2018, 2019, 2020, 2020, 2020, impute=impute, scale=False))
    assert fit(whole).encode(whole)[0, 0] == {"median": 2019.5, "mode": 2020}[impute]


def test_no_two_features_have_one_name():
    given = {"v": number(1, NAN, 3), "v missing": number(0, 1, 0)}
    given |= {"s": category("m", "f", "m"), "s=f": number(1, 0, 0), "s=f (2)": number(0, 0, 1)}
    raw = table(**given)
    encoder = fit(raw, minimum=1)
    assert encoder.features == (
        *("v", "v missing", "v missing (2)", "s=f", "s=m", "s=f (2)", "s=f (2) (2)"),
    )
    assert TableEncoder.from_json(encoder.to_json()).features == encoder.features


def test_categories_have_a_place_each_rare_ones_share_one():
    raw = table(cp=category("b", "a", "b", None, "a", "c", "d"))
    encoder = fit(raw)  # at least two rows: c and d are pooled
    assert encoder.features == ("cp=a", "cp=b", "cp=(other)", "cp missing")
    wanted = [[0, 1, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0]]
    assert encoder.encode(raw).tolist() == [*wanted, [0, 0, 1, 0], [0, 0, 1, 0]]
    unseen = table(cp=category("new", None, "a"))
    assert encoder.encode(unseen).tolist() == [[0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]]
    whole = table(cp=category("a", "b", "a", "b"))
    assert fit(whole).encode(unseen).tolist() == [[0, 0], [0, 0], [1, 0]]  # nobody was rare
    mode = table(cp=category("b", "a", "b", "a", "b", None, impute="mode"))
    assert fit(mode).encode(mode)[5].tolist() == [0, 1, 1]


def test_a_date_is_days_and_its_place_in_year_and_week():
    days = np.array([0.0, 1.0, 2.0, NAN])  # Thursday, the first of January 1970
    raw = table(day=RawColumn(ColumnPlan("date", scale=False), days))
    x = fit(raw).encode(raw)
    angle = 2 * math.pi * 3 / 7  # Monday is 0
    first = [0, 0, 1, math.sin(angle), math.cos(angle), 0]
    np.testing.assert_allclose(x[0], first, atol=1e-6)
    assert x[3].tolist() == [1, 0, 0, 0, 0, 1]


def test_what_never_varies_in_training_is_left_out():
    raw = table(a=number(0.1, 0.1, 0.1, 5), b=number(1, 2, 3, 4), c=category("x", "x", "x", "y"))
    assert fit(raw, np.array([0, 1, 2])).features == ("b",)
    with pytest.raises(DataError, match="no column varies over the training rows"):
        fit(table(a=number(2, 2)))
    gaps = table(a=number(3, NAN, 3))
    assert fit(gaps).features == ("a missing",)  # a gap is all it can tell


def test_sums_merge_to_those_of_all_rows_together():
    rng = np.random.default_rng(0)
    values = np.where(rng.random(3000) < 0.3, NAN, rng.lognormal(2, 2, 3000))
    whole = np.where(rng.random(3000) < 0.1, NAN, rng.integers(-50, 3000, 3000))
    names = rng.choice(["a", "b", "c", None], 3000)
    raw = table(v=number(*values), w=number(*whole), c=category(*names))
    parts = np.split(rng.permutation(3000), [100, 700])
    for name, together in raw.sums().items():
        merged = ColumnSums(0, 0)
        for rows in parts:
            merged = merged.merged(raw.sums(rows)[name])
        assert (merged.rows, merged.missing) == (together.rows, together.missing)
        assert (dict(merged.bins), merged.counts) == (dict(together.bins), together.counts)
        assert merged.mean == pytest.approx(together.mean, rel=1e-12)
        assert merged.deviation == pytest.approx(together.deviation, rel=1e-12)
        back = ColumnSums.from_json(json.loads(json.dumps(merged.to_json())))
        assert back == merged
    sums = raw.sums()
    assert sums["v"].mean == pytest.approx(np.nanmean(values))
    assert sums["v"].deviation == pytest.approx(np.nanstd(values))
    for share in (0.0, 0.25, 0.5, 0.9, 1.0):
        assert sums["v"].quantile(share) == pytest.approx(np.nanquantile(values, share), rel=2e-4)
        assert sums["w"].quantile(share) == pytest.approx(np.nanquantile(whole, share), abs=1e-9)


def test_masked_sums_tell_no_small_cell():
    rng = np.random.default_rng(1)
    raw = table(v=number(*rng.normal(size=200)), c=category(*rng.choice(["a", "b"], 198), "c", "d"))
    sums = {name: one.masked(10) for name, one in raw.sums().items()}
    assert min(sums["v"].bins.values()) >= 10 and sum(sums["v"].bins.values()) == 200
    assert set(sums["c"].counts) == {"a", "b"}
    assert sums["v"].quantile(0.5) == pytest.approx(raw.sums()["v"].quantile(0.5), abs=0.2)
    encoder = TableEncoder.fit(raw.plans, sums, minimum=10)
    assert encoder.features == ("v", "c=a", "c=b", "c=(other)")


def test_columns_go_by_name():
    raw = table(a=number(1, 2, 3), b=category("x", "y", "x"), c=number(4, NAN, 8))
    encoder = fit(raw, minimum=1)
    other = RawTable({"c": raw.columns["c"], "more": raw.columns["a"], "b": raw.columns["b"]}, 3)
    x = encoder.encode(other)
    np.testing.assert_array_equal(x[:, 1:], encoder.encode(raw)[:, 1:])
    assert encoder.absent(other) == ("a",) and (x[:, 0] == 0).all()  # the median is the mean
    lacking = RawTable({"a": raw.columns["a"]}, 3)
    assert encoder.encode(lacking)[0].tolist()[1:] == [0, 0, 0, 1]
    with pytest.raises(DataError, match="column 'a' is a category here, and a number where"):
        encoder.encode(RawTable({"a": raw.columns["b"]}, 3))


def test_encoders_of_several_seeds_get_one_shape():
    raw = table(a=number(1, 1, 3, NAN), b=category("x", "y", "z", "z"))
    one, two = fit(raw, np.array([0, 1, 2]), minimum=1), fit(raw, np.array([2, 3, 1]), minimum=1)
    assert (one.width, two.width) == (4, 4)
    three = fit(raw, np.array([0, 1]), minimum=1)
    assert three.width == 2
    same = same_widths([one, two, three])
    assert [each.width for each in same] == [5, 5, 5]
    np.testing.assert_array_equal(same[2].encode(raw)[:, 2:4], three.encode(raw))
    assert not same[2].encode(raw)[:, [0, 1, 4]].any()
    assert same[2].features[0] == "a unused 1"


def test_an_encoder_is_the_same_after_json():
    raw = table(
        a=number(1, 2.5, NAN), b=category("x, y", 'z"', None, encode="embedding"), c=number(0, 1, 1)
    )
    encoder = fit(raw, minimum=1)
    assert encoder.embedded == ((2, 3),)
    back = TableEncoder.from_json(json.loads(json.dumps(encoder.to_json())))
    np.testing.assert_array_equal(back.encode(raw), encoder.encode(raw))
    assert back.features == encoder.features and back.embedded == encoder.embedded


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 2"),
        ({"columns": 5}, "malformed"),
        ({"columns": []}, "none that is used"),
        ({"more": 1}, "malformed"),
    ],
)
def test_malformed_encoders_are_refused(change, words):
    good = fit(table(a=number(1, 2))).to_json()
    with pytest.raises(DataError, match=words):
        TableEncoder.from_json(good | change)


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 0.0},
        {"scale": NAN},
        {"width": -1},
        {"width": 1 << 40},
        {"width": 1.5},
        {"type": "code"},
        {"categories": ["a", "a"]},
        {"categories": ["a"]},
        {"flag": 1},
        {"name": None},
        {"name": "x" * 9999},
        {"shift": "0"},
        {"unknown": 0},
        {"impute": "none"},
    ],
)
def test_malformed_columns_are_refused(change):
    good = fit(table(a=number(1, 2))).to_json()
    good["columns"][0] |= change
    with pytest.raises(DataError, match="malformed"):
        TableEncoder.from_json(good)
    for other in (None, [1], "{"):
        with pytest.raises(DataError):
            TableEncoder.from_json(other)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"rows": 1, "missing": 2},
        {"rows": 3, "missing": 0, "counts": {"a": 4}},
        {"rows": 3, "missing": 0, "bins": [[1, 4]]},
        {"rows": 3, "missing": 0, "mean": NAN},
        {"rows": 3, "missing": 0, "squares": -1.0},
        {"rows": True, "missing": 0},
        {"rows": 3, "missing": 0, "x": 1},
        [],
    ],
)
def test_impossible_sums_are_refused(given):
    with pytest.raises(DataError):
        ColumnSums.from_json(given)


def test_a_plan_is_a_type_and_its_options():
    assert ColumnPlan.of("date", "age") == ColumnPlan("date")
    plan = ColumnPlan.of({"type": "category", "encode": "embedding", "missing": ["none"]}, "zip")
    assert plan == ColumnPlan("category", "embedding", missing=("none",))
    for wrong, words in (
        ("numbr", "zip: type 'numbr'; did you mean 'number'"),
        ({"typ": "number"}, "unknown key 'typ'; did you mean 'type'"),
        ({"encode": "one-hot"}, "zip: type is missing"),
        ({"type": "number", "impute": "none"}, "'none' is for categories"),
        ({"type": "category", "impute": "median"}, "'median' is for numbers"),
        ({"type": "number", "scale": 1}, "expected true or false"),
    ):
        with pytest.raises(ConfigError, match=words):
            ColumnPlan.of(wrong, "zip")
