"""Statistics before training: figures equal to numpy's, pooling, and what is odd about a site."""

import numpy as np
import pytest

from idiolect.data.column_sums import ColumnPlan, ColumnSums, RawColumn
from idiolect.data.dataset import Dataset
from idiolect.data.description import (
    SiteSums,
    ToldColumn,
    column_sums,
    description,
    far_from_others,
    findings,
    site_warnings,
)


def number(values, role="feature"):
    return ToldColumn("number", role, ColumnSums.of(RawColumn(ColumnPlan("number"), values)))


def category(**counts):
    rows = sum(counts.values())
    gaps = counts.pop("gap", 0)
    return ToldColumn("category", "feature", ColumnSums(rows, gaps, counts=counts))


def described(**sites):
    told = [
        SiteSums(name, {"train": next(iter(own.values())).sums.rows}, own)
        for name, own in sites.items()
    ]
    return description("d", "train", told)


def texts(content):
    return [one["text"] for one in content["warnings"]]


def test_figures_of_a_site_and_of_all_are_numpys():
    draw = np.random.default_rng(0)
    parts = [draw.lognormal(3, 0.5, 300), draw.lognormal(3.1, 0.5, 200)]
    parts[0][:10] = np.nan
    content = described(**{f"s{n}": {"x": number(part)} for n, part in enumerate(parts)})
    every = np.concatenate(parts)
    every = every[~np.isnan(every)]
    pooled = content["pooled"]["columns"]["x"]
    assert (pooled["rows"], pooled["count"], pooled["missing"]) == (500, 490, 10)
    assert pooled["mean"] == pytest.approx(every.mean())
    assert pooled["deviation"] == pytest.approx(every.std())
    for share, found in pooled["quantiles"].items():
        assert found == pytest.approx(np.quantile(every, int(share) / 100), rel=5e-4)
    own = content["sites"][1]["columns"]["x"]
    assert own["mean"] == pytest.approx(parts[1].mean())
    assert "minimum" not in str(content) and not content["warnings"]


def test_glucose_in_another_unit_names_the_site_and_the_unit():
    draw = np.random.default_rng(1)
    sites = {
        name: {
            "glucose": number(draw.normal(105, 30, 80) / by),
            "age": number(draw.normal(60, 9, 80)),
        }
        for name, by in (("A", 1), ("B", 1), ("C", 18), ("D", 1))
    }
    (text,) = texts(described(**sites))
    assert text.startswith("glucose: the mean of C is ") and "mmol/L of glucose" in text
    # Of two sites nobody can say which one is wrong, but they differ.
    pair = {name: sites[name] for name in "AC"}
    assert len(texts(described(**pair))) == 1


def test_sites_that_differ_as_sites_do_are_not_warned_of():
    draw = np.random.default_rng(2)
    for _ in range(20):
        means = draw.normal(50, 5, 6)
        spreads = draw.uniform(8, 14, 6)
        sites = {
            f"s{n}": {"x": number(draw.normal(mean, spread, 40))}
            for n, (mean, spread) in enumerate(zip(means, spreads, strict=True))
        }
        assert not texts(described(**sites))


@pytest.mark.parametrize("factor", [1 / 18, 18, 1 / 88.4, 2.54 * 4])
def test_a_factor_is_found_in_skewed_columns_too(factor):
    """Where the deviation is as large as the mean, only both together show the unit."""
    draw = np.random.default_rng(3)
    values = draw.lognormal(1, 1, (5, 200))
    values[2] *= factor
    means, spreads = values.mean(1)[:, None], values.std(1)[:, None]
    assert far_from_others(means, spreads, np.full((5, 1), 200)).ravel().tolist() == [
        False, False, True, False, False,
    ]  # fmt: skip


def test_lacking_columns_lonely_categories_spellings_types_and_gaps_are_named():
    found = texts(
        described(
            A={"sex": category(male=30, female=20), "ward": category(x=25, y=25)},
            B={"sex": category(Male=30, female=20), "ward": category(x=25, z=25)},
            C={"sex": category(male=5, female=5, gap=40)},
        )
    )
    assert "sex: 'Male' of B is spelled 'male' elsewhere; they count as two categories" in found
    assert "sex: 80% of the rows of C have gaps, elsewhere 0%" in found
    assert "ward: only A has 'y'" in found and "ward: only B has 'z'" in found
    assert "C has no column ward" in found
    mixed = texts(
        described(A={"x": category(a=9)}, B={"x": number(np.ones(9))}, C={"x": category(a=9)})
    )
    assert mixed == [
        "x is read as number at B and as category elsewhere; say which in [data.columns]"
    ]


def test_a_site_shown_in_sums_only_is_in_no_figure_of_its_own_and_not_in_a_difference():
    draw = np.random.default_rng(4)
    own = {name: {"x": number(draw.normal(size=50))} for name in "ABC"}

    def told(*pooled):
        return [
            SiteSums(name, {"train": 50}, own[name], "pooled" if name in pooled else "all")
            for name in own
        ]

    one = description("d", "train", told("C"))
    assert one["pooled"]["sites"] == ["A", "B"] and one["pooled"]["columns"]["x"]["rows"] == 100
    assert "C is shown in sums only" in texts(one)[0]
    two = description("d", "train", told("B", "C"))
    assert two["pooled"]["sites"] == ["A", "B", "C"]
    assert [bool(site["columns"]) for site in two["sites"]] == [True, False, False]
    own["B"]["ward"] = category(x=20, y=30)
    own["C"]["ward"] = category(x=25, z=25)  # z is C's alone, as y is B's
    own["C"]["only"] = number(draw.normal(size=50))
    pooled = description("d", "train", told("B", "C"))["pooled"]["columns"]
    assert pooled["ward"]["categories"] == {"x": 45} and pooled["ward"]["other"] == 55
    assert "only" not in pooled
    del own["B"]["ward"]
    own["C"] = {"x": number(draw.normal(100, 1, 50))}
    assert not texts(description("d", "train", told("B", "C")))  # of C nobody else hears
    assert [one["site"] for one in site_warnings(told("B", "C"))] == ["C"]
    assert not texts(description("d", "train", told("A", "C")))  # nor of A's by what C's is beside


def test_columns_of_plain_arrays_and_images_are_described():
    draw = np.random.default_rng(5)
    table = Dataset(
        "t", draw.normal(size=(40, 2)).astype(np.float32), np.arange(40) % 2, ("a", "b")
    )
    told = column_sums(table, np.arange(30))
    assert list(told) == ["feature 1", "feature 2", "label"] and told["label"].role == "target"
    assert told["feature 1"].sums.mean == pytest.approx(table.x[:30, 0].mean(), rel=1e-5)
    assert told["label"].sums.counts == {"a": 15, "b": 15}
    x = draw.integers(0, 256, (40, 3, 4, 4)).astype(np.uint8)
    images = Dataset("i", x, np.arange(40) % 2, ("a", "b"))
    told = column_sums(images, np.arange(40))
    second = told["channel 2"].sums
    assert second.mean == pytest.approx(x[:, 1].mean())
    assert second.deviation == pytest.approx(x[:, 1].std())


def test_no_warning_of_one_site():
    assert findings({"A": {}}, {"x": "feature"}) == []
