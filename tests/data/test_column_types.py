"""Types of columns: what is recognised, what is said, and how a guess is corrected."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import idiolect
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


def test_dots_between_thousands_are_no_decimal_points(tmp_path):
    """1.200 beside 980 is 1200, if the file's other numbers have decimal commas."""
    counts = {"leuko": lambda n: "980" if n % 3 else f"{n % 9 + 1}.200"}
    german = written(tmp_path / "a.csv", ";", bmi=lambda n: f"2{n % 9},5", **counts)
    data = read(german)
    assert data.table.columns["leuko"].values[:4].tolist() == [1200, 980, 980, 4200]
    said = "has dots between thousands: 1.200 is read as 1200, since the file has decimal commas"
    assert said in [one.what for one in data.table.source.remarks]
    # Where a number can only have a decimal point, or none has a comma, a dot is one.
    for x in (lambda n: "0.500", lambda n: f"1{n}.25", lambda n: n):
        other = {"bmi": lambda n: f"2{n % 9},5"} if x(1) != 1 else {}
        mixed = written(tmp_path / "b.csv", ";", **counts, x=x, **other)
        assert read(mixed).table.columns["leuko"].values[:2].tolist() == [1.2, 980]
    assert read(mixed).table.columns["x"].values[1] == 1


def test_dates_of_several_forms_and_years_of_two_digits_are_told(tmp_path):
    path = written(
        tmp_path / "a.csv",
        x=lambda n: n / 7,
        seen=lambda n: f"2020-01-{n % 28 + 1:02d}" if n % 2 else f"{n % 28 + 1:02d}.01.2020",
        born=lambda n: f"{n % 28 + 1:02d}.01.{(60 + n) % 100:02d}",
    )
    table = read(path).table
    assert table.ignored["seen"] == "its dates are of several forms"
    said = {one.column: one.what for one in table.source.remarks}
    assert "such as 01.01.2020 and 2020-01-02, and is ignored" in said["seen"]
    assert "00 to 68 as 2000 to 2068" in said["born"]


def test_names_that_differ_in_case_only_are_told(tmp_path):
    path = written(
        tmp_path / "a.csv",
        sex=lambda n: ["Male", "male", "F"][n % 3],
        client=lambda n: ["a", "A"][n % 2],
        died=lambda n: ["Yes", "yes", "No"][n % 3],
    )
    said = " ".join(one.what for one in inspected(read(path, label="died")).advice)
    assert "'Yes' and 'yes' are two classes" in said and "'A' and 'a' are two clients" in said
    assert "sex holds 'Male' and 'male' as two categories" in said
    assert "two categories" not in " ".join(
        one.what for one in inspected(read(path, label="died", columns={"sex": "ignore"})).advice
    )


@pytest.mark.parametrize("digits", [1, 3])
def test_words_among_numbers_that_are_no_slips_are_told(tmp_path, digits):
    """A laboratory's limits, of which there are too many for a slip of the pen."""
    limits = ["<0.5", "<1", "<5", ">200"]
    value = lambda n: limits[n // 3 % 4] if n % 3 == 0 else f"{n % 29 + n / 900:.{digits}f}"  # noqa: E731
    path = written(tmp_path / "a.csv", crp=value, x=lambda n: n / 7)
    (told,) = [one for one in read(path).table.source.remarks if "not read as a number" in one.what]
    assert told.column == "crp" and "'<0.5', '<1', '<5'" in told.what
    remedy = 'crp = { type = "number", missing = ["<0.5", "<1", "<5", ">200"] }'
    assert told.remedy == remedy
    declared = {"crp": {"type": "number", "missing": limits}}
    assert np.isnan(read(path, columns=declared).table.columns["crp"].values).sum() == ROWS / 3


def test_survival_without_an_event_is_refused(tmp_path):
    path = written(tmp_path / "a.csv", days=lambda n: n + 2, died=lambda n: n // 70, x=lambda n: n)
    with pytest.raises(DataError, match="no row has an event, so there is nothing to learn"):
        idiolect.federation(path, "iid", label=["days", "died"], clients=2)


def test_a_patient_of_several_rows_is_no_feature_and_is_told(tmp_path):
    path = written(
        tmp_path / "a.csv",
        patient_id=lambda n: 7000 + n // 2,
        mrn=lambda n: f"P{n // 2}",
        hospital_id=lambda n: n // 2,
        ward_no=lambda n: n % 6,
        mass_index=lambda n: 20 + n // 2,
        x=lambda n: n / 7,
    )
    table = read(path).table
    ignored = "30 identifiers in 60 rows"
    assert table.ignored == {"patient_id": ignored, "mrn": ignored}
    told = [one for one in table.source.remarks if one.column == "patient_id"]
    assert "Rows of one may be trained and tested on alike" in told[0].what
    assert [one.remedy for one in told] == ["", 'patient_id = "number"']
    assert "mrn" in read(path, columns={"mrn": "category"}).table.columns


def test_whole_numbers_that_may_be_counts_are_told(tmp_path):
    path = written(tmp_path / "a.csv", visits=lambda n: n % 7, stage=lambda n: n % 5)
    data = read(path, label="visits")
    assert data.task.kind == "classes" and data.table.source.remarks[0].remedy == 'task = "number"'
    for label, task in (("stage", None), ("visits", "classes")):
        told = read(path, label=label, task=task, columns={"*": "category"}).table.source.remarks
        assert not [one for one in told if one.column == label]


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
