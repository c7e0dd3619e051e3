"""DataFrames and arrays as data: the same rows as a file with the same columns."""

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import csv

import idiolect
from idiolect.data import Federation, load, read
from idiolect.errors import ConfigError, DataError

pandas = pytest.importorskip("pandas", reason="frames of pandas are not tried: needs pandas")


def columns(rows=60):
    draws = np.random.default_rng(3)
    return {
        "age": draws.integers(20, 80, rows).tolist(),
        "pressure": draws.normal(120, 10, rows).round(1).tolist(),
        "hospital": draws.choice(["Köln", "Ulm", "Ålesund"], rows).tolist(),
        "target": draws.choice(["well", "sick"], rows).tolist(),
    }


class Stream:
    """What polars, DuckDB and others offer: Arrow's C stream, and nothing else."""

    def __init__(self, table):
        self._table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


class Interchange:
    """What older libraries offer."""

    def __init__(self, table):
        self._table = table

    def __dataframe__(self, nan_as_null=False, allow_copy=True):
        return self._table.__dataframe__(nan_as_null, allow_copy)


def test_a_frame_of_any_kind_is_the_file_with_the_same_columns(tmp_path):
    held = columns()
    table = pyarrow.table(held)
    path = tmp_path / "visits.csv"
    csv.write_csv(table, path)
    options = {"client": "hospital", "label": "target", "seed": 4}
    wanted = idiolect.federation(path, **options)
    frame = pandas.DataFrame(held, index=range(100, 160))
    coded = frame.assign(
        hospital=frame["hospital"].astype("category"), target=frame["target"].astype("category")
    )
    rows = [dict(zip(held, row, strict=True)) for row in zip(*held.values(), strict=True)]
    for given in (frame, coded, table, held, rows, Stream(table), Interchange(table)):
        for made in (
            Federation.from_frame(given, **options),
            idiolect.federation(given, **options),
        ):
            assert made.names == wanted.names == ("Köln", "Ulm", "Ålesund")
            assert made.dataset.classes == ("sick", "well")
            assert made.dataset.features == wanted.dataset.features
            assert np.array_equal(made.dataset.x, wanted.dataset.x)
            assert np.array_equal(made.dataset.y, wanted.dataset.y)
            for part in ("train", "val", "test"):
                pairs = zip(getattr(made, part), getattr(wanted, part), strict=True)
                assert all(np.array_equal(one, other) for one, other in pairs)


def parts(made):
    return [rows.tolist() for part in (made.train, made.val, made.test) for rows in part]


def test_a_dataset_is_divided_as_what_it_was_read_from(tmp_path):
    """Own data by its clients' names, a named source by their numbers."""
    path = tmp_path / "visits.csv"
    csv.write_csv(pyarrow.table(columns()), path)
    options = {"client": "hospital", "label": "target"}
    wanted = idiolect.federation(path, seed=4, **options)
    assert parts(idiolect.federation(read(path, **options), seed=4)) == parts(wanted)
    named = idiolect.federation("synthetic", seed=4, options={"clients": 5})
    given = load("synthetic", None, clients=5)
    assert given.clients is not None and parts(idiolect.federation(given, seed=4)) == parts(named)


def test_a_column_may_say_which_rows_are_test_rows():
    held = columns()
    held["part"] = ["train"] * 45 + ["test"] * 15
    made = Federation.from_frame(held, client="hospital", label="target", split="part")
    assert set(np.concatenate(made.test)) == set(range(45, 60))
    assert made.dataset.features == ("age", "pressure")


def test_arrays_of_any_kind_are_the_same_federation():
    held = pandas.DataFrame(columns())
    x = held[["age", "pressure"]].to_numpy(np.float32)
    wanted = Federation.from_arrays(x, held["target"].to_numpy(), held["hospital"].to_numpy())
    tensor = Federation.from_arrays(
        torch.from_numpy(x), held["target"].tolist(), held["hospital"], features=["age", "pressure"]
    )
    assert wanted.names == tensor.names
    assert tensor.dataset.features == ("age", "pressure")
    assert np.array_equal(wanted.dataset.x, tensor.dataset.x)
    images = Federation.from_arrays(
        np.zeros((20, 8, 8), np.uint8), [0, 1] * 10, 2, partition="iid", seed=1
    )
    assert images.clients == 2 and images.dataset.x.shape == (20, 1, 8, 8)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda held: Federation.from_frame(held, label="target"), "client is missing: which of"),
        (lambda held: Federation.from_frame(held, label="x", client="age"), "no column 'x'"),
        (lambda held: Federation.from_frame(held, label="target", client="x"), "no column 'x'"),
        (lambda held: Federation.from_frame(7, client="x"), "data is of type int; expected a Data"),
        (
            lambda held: Federation.from_frame(np.zeros((2, 2)), client="x"),
            "Federation.from_arrays",
        ),
        (lambda held: Federation.from_frame({"a": [1], "b": [1, 2]}), "cannot be read as a table"),
        (
            lambda held: Federation.from_frame(
                held, label="target", client="hospital", columns_of="x"
            ),
            "no option 'columns_of'",
        ),
        (
            lambda held: Federation.from_frame(held, label="target", client="hospital", split=0.2),
            "expected three shares",
        ),
        (
            lambda held: Federation.from_frame(held, label="target", client="hospital", seed="a"),
            "seed is 'a'; expected a whole number",
        ),
        (lambda held: Federation.from_frame(held, label=None, client="age"), "label is None"),
        (lambda held: Federation.from_frame(held, label="target", client=["age"]), "client is \\["),
        (lambda held: Federation.from_frame(pandas.Series([1]), client="x"), "of type Series"),
        (lambda held: Federation.from_arrays([[1, 2], [3]], [0, 1], [0, 1]), "and no array"),
        (lambda held: Federation.from_arrays(np.zeros((3, 2)), [0, 1], [0, 1, 2]), "y has shape"),
        (lambda held: Federation.from_arrays(np.zeros((3, 2)), [0, 1, 1]), "whose a row is"),
        (lambda held: idiolect.fit("fedavg", held), "expected a federation, such as"),
        (lambda held: idiolect.fit(3, columns()), "expected a federation"),
    ],
)
def test_what_cannot_be_data_is_one_clear_line(make, words):
    with pytest.raises((ConfigError, DataError), match=words) as found:
        make(columns())
    assert "\n" not in str(found.value)


def test_arrays_of_numbers_are_scaled_and_filled_in_and_predicted_as_they_are():
    draws = np.random.default_rng(5)
    x = draws.normal(50, 20, (120, 3))
    y = np.where(x[:, 0] > 50, "high", "low")
    x[draws.random(x.shape) < 0.1] = np.nan
    made = Federation.from_arrays(x, y, draws.integers(0, 2, 120))
    assert made.dataset.features[:2] == ("x0", "x0 missing")
    seen = made.dataset.decoded(np.concatenate(made.train))[:, 0]
    assert abs(seen.mean()) < 0.1 and abs(seen.std() - 1) < 0.1
    result = idiolect.fit("fedavg", made, "mlr", rounds=10, lr=0.1)
    kept = result.predict(0, x[:6])
    again = result.predict(0, {f"x{n}": x[:6, n].tolist() for n in range(3)})
    assert np.array_equal(kept.probabilities, again.probabilities)
    with pytest.raises(DataError, match="x is infinite in row 1, feature 0"):
        Federation.from_arrays([[1.0], [np.inf]], [0, 1], [0, 1])


def test_a_declared_column_that_is_not_there_is_refused():
    with pytest.raises(DataError, match="no column 'agee'; did you mean 'age'"):
        Federation.from_frame(
            columns(), client="hospital", label="target", columns={"agee": "category"}
        )
    made = Federation.from_frame(
        columns(), client="hospital", label="target", columns={"age": "ignore"}
    )
    assert made.dataset.features == ("pressure",)


def test_the_time_of_a_place_is_kept_and_columns_may_be_called_by_numbers():
    local = pandas.date_range("2020-01-01", periods=60, tz="Europe/Berlin")
    frame = pandas.DataFrame({0: local, 1: [0, 1] * 30, 2: ["a", "b"] * 30})
    made = idiolect.federation(frame, label=1, client=2)
    days = made.dataset.table.columns["0"].values
    assert days[0] == np.datetime64("2020-01-01").astype(int) and made.names == ("a", "b")


def test_a_frame_of_one_class_is_refused_as_a_file_is():
    frame = pandas.DataFrame({"x": range(60), "label": "well", "client": ["a", "b"] * 30})
    with pytest.raises(DataError, match="all 60 labels are 'well'"):
        Federation.from_frame(frame, client="client")
