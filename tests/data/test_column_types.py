"""Types of columns: what is recognised, what is said, and how a guess is corrected."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from idiolect.data import federate, read
from idiolect.data.inspection import inspected
from idiolect.errors import ConfigError, DataError
from idiolect.experiment.build import build_federations
from idiolect.experiment.load import parse_experiment
from idiolect.experiment.untrusted import refuse_untrusted

ROWS = 60


def written(path, sep=",", **columns):
    """Write columns, each a function of the row, with a label."""
    columns["label"] = lambda n: "pq"[n % 2]
    lines = [sep.join(columns)]
    lines += [sep.join(str(own(n)) for own in columns.values()) for n in range(ROWS)]
    path.write_text("\n".join(lines))
    return path


def kinds(data):
    return {name: column.plan.kind for name, column in data.table.columns.items()}


def test_types_are_recognised(tmp_path):
    path = written(
        tmp_path / "a.csv",
        age=lambda n: ["", 20 + n % 30][n % 3 > 0],
        ward=lambda n: ["A", "B", "NA"][n % 3],
        smokes=lambda n: ["yes", "No", ""][n % 3],
        seen=lambda n: f"2020-01-{n % 28 + 1:02d}",
        zip=lambda n: f"{n % 9:05d}",
        rhesus=lambda n: "+-"[n % 2],
        patient=lambda n: f"P{n:04d}",
        row_id=lambda n: n,
        note=lambda n: f"the patient came in for number {n}",
        nothing=lambda n: ["", "?", "."][n % 3],
        part=lambda n: ["train", "test"][n % 2],
        grade=lambda n: n % 4,
    )
    data = read(path)
    assert kinds(data) == {
        "age": "number",
        "ward": "category",
        "smokes": "boolean",
        "seen": "date",
        "zip": "category",
        "rhesus": "category",
        "grade": "number",
    }
    assert set(data.table.ignored) == {"patient", "row_id", "note", "nothing", "part"}
    columns = data.table.columns
    assert np.isnan(columns["age"].values[::3]).all()
    assert columns["ward"].names == ("A", "B") and columns["ward"].values[2] == -1
    assert columns["smokes"].values[:2].tolist() == [1, 0]
    assert columns["seen"].values[0] == 18262  # days from 1970 to 2020
    assert columns["zip"].names[0] == "00000"
    assert columns["rhesus"].names == ("+", "-")  # no gap beside a plus
    said = {one.column: one for one in data.table.source.remarks}
    assert said["grade"].remedy == 'grade = "category"' and "0, 1, 2, 3" in said["grade"].what
    assert said["patient"].remedy == 'patient = "category"'
    assert said["part"].remedy == 'options = { split = "part" }'
    assert said["note"].remedy == 'options = { text = "note" }'


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        ("2021-03-04", 18690),
        ("2021/03/04", 18690),
        ("04.03.2021", 18690),
        ("4 Mar 2021", 18690),
        ("Mar 4, 2021", 18690),
        ("2021-03-04T12:00:00Z", 18690.5),
        ("2021-03-04 06:00", 18690.25),
        ("2021-03-04 06:00:00.123+01:00", 18690.25),
    ],
)
def test_dates_of_common_forms(tmp_path, form, wanted):
    path = written(tmp_path / "a.csv", day=lambda n: f'"{form}"', x=lambda n: n % 5)
    assert read(path).table.columns["day"].values[0] == wanted


def test_days_and_months_are_told_apart_or_remarked_on(tmp_path):
    month_first = written(tmp_path / "a.csv", day=lambda n: f"03/{n % 28 + 1:02d}/2021")
    assert read(month_first).table.columns["day"].plan.format == "%m/%d/%Y"
    either = written(tmp_path / "b.csv", day=lambda n: f"03/{n % 12 + 1:02d}/2021")
    data = read(either)
    assert data.table.columns["day"].plan.format == "%d/%m/%Y"
    remedy = data.table.source.remarks[0].remedy
    assert remedy == 'day = { type = "date", format = "%m/%d/%Y" }'
    declared = {"day": {"type": "date", "format": "%m/%d/%Y"}}
    assert read(either, columns=declared).table.columns["day"].values[0] == 18687
    # A row to predict is read as the training rows were.
    encoder = federate(data, "iid", clients=2).dataset.encoder
    assert encoder.plans["day"].format == "%d/%m/%Y"


def test_numbers_of_other_habits(tmp_path):
    comma = written(tmp_path / "a.csv", ";", x=lambda n: f"1.234,{n:02d}", y=lambda n: f"{n},5")
    held = read(comma).table.columns
    assert held["x"].values[7] == 1234.07 and held["y"].values[3] == 3.5
    thousands = written(tmp_path / "b.csv", x=lambda n: f'"{n % 9 + 1},000.5"')
    assert read(thousands).table.columns["x"].values[0] == 1000.5


def test_a_word_among_numbers_is_named_with_its_line(tmp_path):
    path = written(tmp_path / "a.csv", age=lambda n: "unknown" if n == 40 else n)
    with pytest.raises(DataError, match=r"line 42: column 'age' is 'unknown'.*missing = \[") as e:
        read(path)
    assert 'age = "category"' in str(e.value)
    fixed = read(path, columns={"age": {"type": "number", "missing": ["unknown"]}})
    assert np.isnan(fixed.table.columns["age"].values[40])
    with pytest.raises(DataError, match="line 42: column 'age' is 'unknown'; expected a number"):
        read(path, columns={"age": "number"})


def test_guesses_are_corrected(tmp_path):
    path = written(
        tmp_path / "a.csv",
        code=lambda n: ["1", "1.0", "2"][n % 3],
        day=lambda n: 20210301 + n % 20,
        patient=lambda n: f"P{n:04d}",
        flag=lambda n: n % 2,
        x=lambda n: n / 7,
    )
    data = read(
        path,
        columns={"code": "category", "day": "date", "x": "ignore", "patient": "category"}
        | {"flag": "boolean"},
    )
    assert kinds(data) == {
        "code": "category",
        "day": "date",
        "patient": "category",
        "flag": "boolean",
    }
    assert data.table.columns["code"].names == ("1", "2")  # 1.0 is 1
    assert data.table.ignored == {"x": "declared so"}
    assert list(read(path, columns={"*": "ignore", "x": "number"}).table.columns) == ["x"]
    with pytest.raises(ConfigError, match=r"columns\.x: type 'numbr'; did you mean 'number'"):
        read(path, columns={"x": "numbr"})
    with pytest.raises(DataError, match=r"line 2: column 'patient' is 'P0000'; expected a date"):
        read(path, columns={"patient": "date"})


def test_parquet_has_types_of_its_own(tmp_path):
    columns = {
        "when": pa.array([86_400_000_000, None, 0], pa.timestamp("us")),
        "day": pa.array([1, 2, 3], pa.date32()),
        "ward": pa.array(["a", "b", "a"]).dictionary_encode(),
        "on": pa.array([True, None, False]),
        "n": pa.array([1, 2, None], pa.int32()),
        "label": [0, 1, 0],
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    data = read(tmp_path / "a.parquet")
    assert list(kinds(data).values()) == ["date", "date", "category", "boolean", "number"]
    assert data.table.columns["when"].values[0] == 1 and np.isnan(data.table.columns["n"].values[2])
    nested = pa.table({"x": [[1], [2]], "label": [0, 1]})
    pq.write_table(nested, tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"column 'x' holds list.*x = \"ignore\""):
        read(tmp_path / "b.parquet")


def test_class_names_of_the_hub_are_used(tmp_path):
    features = {"label": {"names": ["cat", "dog", "emu"], "_type": "ClassLabel"}}
    hub = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    table = pa.table({"x": [1.0, 2.0, 3.0], "label": [1, 0, 1]}).replace_schema_metadata(hub)
    pq.write_table(table, tmp_path / "a.parquet")
    data = read(tmp_path / "a.parquet")
    assert data.classes == ("cat", "dog", "emu") and data.y.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("label", "task", "classes"),
    [
        (lambda n: n % 5, "classes", ("0", "1", "2", "3", "4")),
        (lambda n: 1000 + 10 * n, "number", ("target",)),
        (lambda n: n + 0.5, "number", ("target",)),
        (lambda n: ["a", "b|a", "", "c"][n % 4], "labels", ("a", "b", "c")),
        (lambda n: ["+", "-"][n % 2], "classes", ("+", "-")),
        (lambda n: ["True", "False"][n % 2], "classes", ("False", "True")),
    ],
)
def test_the_label_decides_the_task_and_says_so(tmp_path, label, task, classes):
    path = written(tmp_path / "a.csv", x=lambda n: n % 7, target=label)
    data = read(path, label="target", columns={"label": "ignore"})
    assert (data.task.kind, data.classes) == (task, classes)
    said = [one.what for one in inspected(data).advice]
    assert any("task" in one for one in said) == (task != "classes")
    if task == "number":
        with_classes = label(0) == int(label(0))
        if with_classes:
            assert len(read(path, label="target", task="classes").classes) == ROWS
        else:
            with pytest.raises(DataError, match="is not a class"):
                read(path, label="target", task="classes")


def test_what_is_odd_is_seen_with_its_remedy(tmp_path):
    path = written(
        tmp_path / "a.csv",
        hospital=lambda n: f"H{n % 3}",
        age=lambda n: ["NA", "", n][n % 3],
        same=lambda n: "x",
        died=lambda n: "yes" if n == 5 else "no",
    )
    seen = inspected(read(path, label="died", columns={"label": "ignore"}))
    views = {one.name: one for one in seen.columns}
    assert seen.form == "CSV, comma between cells, UTF-8" and seen.rows == ROWS
    assert views["age"].missing == pytest.approx(2 / 3) and "median" in views["age"].done
    assert views["same"].done == "left out: it is constant"
    assert views["died"].holds == "no 98%, yes 1.7%"
    advice = {one.remedy: one for one in seen.advice}
    assert advice['client = "hospital"'].where == "data.options"
    assert advice['metric = "auroc"'].where == "evaluate"
    assert "98%" in advice['metric = "auroc"'].what
    assert advice['age = "ignore"'].where == "data.columns"
    assert any("NA (20)" in one.what and "empty (20)" in one.what for one in seen.advice)


TOML = """
name = "typed"
rounds = 1
[data]
source = "{path}"
{more}
[model]
name = "mlr"
[[methods]]
name = "fedavg"
"""


def test_an_experiment_declares_columns(tmp_path):
    path = written(
        tmp_path / "a.csv", grade=lambda n: n % 4, site=lambda n: f"S{n % 3}", x=lambda n: n / 9
    )

    def held(more):
        experiment = parse_experiment(TOML.format(path=path.as_posix(), more=more), [], "typed")
        return build_federations(experiment)[0]

    clients = 'options = { client = "site" }\n'
    columns = '[data.columns]\ngrade = "category"\nx = { type = "number", scale = false }'
    found = held(clients + columns)
    assert found.names == ("S0", "S1", "S2")
    assert found.dataset.features == ("grade=0", "grade=1", "grade=2", "grade=3", "x")
    assert found.dataset.x[9, 4] == 1.0
    with pytest.raises(DataError, match=r"'site' looks like the client.*client = \"site\""):
        held(columns)
    iid = held('partition = { name = "iid", clients = 2 }\n' + columns)  # asked for: no objection
    assert iid.clients == 2
    with pytest.raises(ConfigError, match=r"data\.columns\.grade"):
        held(clients + '[data.columns]\ngrade = "categry"')
    one = written(tmp_path / "b.csv", x=lambda n: n, y=lambda n: "same")
    experiment = TOML.format(path=one.as_posix(), more='options = { label = "y" }')
    with pytest.raises(DataError, match="all 60 labels are 'same'; expected at least two"):
        build_federations(parse_experiment(experiment, [], "typed"))
    refuse_untrusted({"data": {"columns": {"an age": {"type": "number", "scale": False}}}}, "job")
    with pytest.raises(ConfigError, match="columns"):
        refuse_untrusted({"data": {"columns": {"age": "/etc/passwd"}}}, "job")
