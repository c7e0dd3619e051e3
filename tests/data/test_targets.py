"""Label columns of every task: what is read, what is refused, and in which words."""

import dataclasses

import numpy as np
import pytest

from idiolect.core.survival import Cox, Discrete
from idiolect.core.task import Classes, Labels, Number
from idiolect.data import Dataset, Federation, federate, read
from idiolect.data.preprocessing import Preprocessing
from idiolect.data.targets import make_task, with_class_weights, with_task
from idiolect.errors import ConfigError, DataError

CSV = """age,site,price,days,event,tags,ill,smoker
50,a,1200,10,1,x|y,yes,1
61,a,900,20.5,0,,no,0
44,b,1500,3,true,y,no,1
39,b,700,40,false,x | z,yes,0
"""


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "patients.csv"
    path.write_text(CSV)
    return path


def test_a_number(table):
    data = read(table, client="site", label="price", task="number")
    assert data.task == Number() and data.classes == ("price",)
    assert data.y.dtype == np.float32 and data.y.tolist() == [1200, 900, 1500, 700]


def test_time_and_event(table):
    data = read(table, client="site", label=["days", "event"], task="survival")
    assert data.task == Cox() and data.classes == ("log risk",)
    assert data.y.tolist() == [[10, 1], [20.5, 0], [3, 1], [40, 0]]
    assert data.columns == ("event", "censored") and data.counts().tolist() == [2, 2]
    assert not data.sequential


def test_intervals_name_the_outputs(table):
    form = {"name": "survival", "form": "discrete", "cuts": [5, 15]}
    data = read(table, client="site", label=["days", "event"], task=form)
    assert data.task == Discrete(intervals=3, cuts=(5.0, 15.0)) and len(data.classes) == 3


def test_labels_in_columns_or_in_one_cell(table):
    columns = read(table, client="site", label=["ill", "smoker"], task="labels")
    assert columns.classes == ("ill", "smoker")
    assert columns.y.tolist() == [[1, 1], [0, 0], [0, 1], [1, 0]]
    cells = read(table, client="site", label="tags", task="labels")
    assert cells.task == Labels() and cells.classes == ("x", "y", "z")
    assert cells.y.tolist() == [[1, 1, 0], [0, 0, 0], [0, 1, 0], [1, 0, 1]]


def test_arrays_of_every_task():
    x, clients = np.arange(12.0).reshape(6, 2), [0, 0, 0, 1, 1, 1]
    survival = np.array([[1, 1], [2, 0], [3, 1]] * 2, float)
    world = Federation.from_arrays(x, survival, clients, task="survival")
    assert world.dataset.task.kind == "survival" and world.counts().tolist() == [[2, 1], [2, 1]]
    world = Federation.from_arrays(x, np.arange(6.0), clients, task="number")
    train = np.concatenate(world.train)
    assert world.dataset.task.shift == pytest.approx(world.dataset.y[train].mean())
    assert world.columns == ("rows",) and world.counts().sum() == 6


def test_rows_to_predict_need_no_labels(table):
    table.write_text("age,site\n50,a\n61,b\n")
    data = read(table, client="site", label=["days", "event"], task="survival", labelled=False)
    assert len(data) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"label": "site", "client": "age", "task": "number"}, "'a' in row 1, expected a number"),
        ({"label": "days", "task": "survival"}, "two label columns, time and event"),
        ({"label": ["days", "price"], "task": "survival"}, "'1200' in row 1, expected 1 or 0"),
        ({"label": ["days", "died"], "task": "survival"}, "has no column 'died'"),
        ({"label": ["ill", "age"], "task": "labels"}, "column 'age' has '50' in row 1"),
        ({"label": ["price", "days"], "task": "number"}, "learns one column"),
    ],
)
def test_columns_that_do_not_fit_are_named(table, options, words):
    with pytest.raises(DataError, match=words):
        read(table, **{"client": "site", **options})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("regression", "expected one of classes, labels, number, survival"),
        ({"name": "number", "loss": "l1"}, "expected one of squared, huber"),
        ({"name": "survival", "form": "aft"}, "expected one of cox, discrete"),
        ({"name": "survival", "form": "discrete", "cuts": [3, 1]}, "that ascend"),
        ({"name": "survival", "form": "discrete", "cuts": [1], "intervals": 5}, "leave one"),
        ({"name": "number", "intervals": 3}, "no option 'intervals'"),
    ],
)
def test_tasks_that_do_not_exist_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        make_task(given)


def test_two_label_columns_are_no_class(table):
    with pytest.raises(ConfigError, match="task = 'labels'"):
        read(table, client="site", label=["ill", "smoker"], task="classes")


def classes(rows=40):
    y = (np.arange(rows) % 10 == 0).astype(np.int64)
    return Dataset("table", np.zeros((rows, 2), np.float32), y, ("no", "yes"))


def test_class_weights_by_name_or_balanced_by_training_rows():
    named = with_class_weights(classes(), {"yes": 9.0})
    assert named.task == Classes(weights=(1.0, 9.0))
    balanced = with_class_weights(classes(), "balanced")
    world = federate(balanced, "iid", clients=2, split=(0.5, 0.25, 0.25))
    counts = np.bincount(world.dataset.y[np.concatenate(world.train)], minlength=2)
    assert world.dataset.task.weights == pytest.approx(tuple(counts.sum() / (2 * counts)))


@pytest.mark.parametrize("given", [{"maybe": 1.0}, {"yes": 0.0}, "even"])
def test_class_weights_that_make_no_sense_are_refused(given):
    with pytest.raises(ConfigError, match="class_weights"):
        with_class_weights(classes(), given)


def test_class_weights_are_for_classes():
    data = dataclasses.replace(
        classes(), y=np.zeros(40, np.float32), classes=("price",), task=Number()
    )
    with pytest.raises(ConfigError, match="task number"):
        with_class_weights(data, "balanced")
    with pytest.raises(ConfigError, match="holds labels for task number"):
        with_task(data, Cox())


def test_rows_of_numbers_are_not_divided_by_class(table):
    data = read(table, client="site", label="price", task="number")
    for options in ({"partition": "dirichlet", "clients": 2}, {"stratify": True}):
        with pytest.raises(ConfigError, match="numbers as labels"):
            federate(data, **{"partition": "natural", **options})
    survival = read(table, client="site", label=["days", "event"], task="survival")
    with pytest.raises(ConfigError, match="divides rows by class"):
        federate(survival, "dirichlet", clients=2)


@pytest.mark.parametrize(
    ("y", "task", "words"),
    [
        (np.array([1.0, np.nan], np.float32), Number(), "row 1 has nan"),
        (np.array([[1, 2], [1, 0]], np.float32), Cox(), "event 2.0"),
        (np.array([[-1, 1], [1, 0]], np.float32), Cox(), "time -1.0"),
        (np.array([[0.5], [1]], np.float32), Labels(), "expected 0 or 1"),
        (np.array([1, 2]), Number(), "expected floats"),
    ],
)
def test_a_dataset_refuses_labels_of_another_task(y, task, words):
    with pytest.raises(DataError, match=words):
        Dataset("t", np.zeros((2, 1), np.float32), y, ("one",), task=task)


def test_a_comma_in_the_name_of_a_label_beside_bars(tmp_path):
    path = tmp_path / "tags.csv"
    path.write_text(
        'site,x,tags\na,1,"left, late"\na,2,"left, late|mild"\nb,3,"left, late"\nb,4,\n'
    )
    data = read(path, client="site", label="tags")
    assert data.classes == ("left, late", "mild")
    assert data.y.tolist() == [[1, 0], [1, 1], [1, 0], [0, 0]]
    path.write_text('site,x,tags\na,1,"left, late"\n')  # without a bar, but the labels are known
    encoded = federate(data, "natural", split=(0.5, 0, 0.5)).dataset
    assert Preprocessing.of(encoded).rows(path, {"label": "tags"}).y.tolist() == [[1, 0]]


def test_numbers_that_single_precision_cannot_tell_apart_are_refused(tmp_path):
    rows = [f"{n},{1_700_000_000 + n % 30}" for n in range(60)]
    (tmp_path / "own.csv").write_text("\n".join(["x,label", *rows]))
    with pytest.raises(DataError, match=r"'label' varies by 8.66 about 1.7e\+09, which is lost"):
        read(tmp_path / "own.csv")
    (tmp_path / "own.csv").write_text("\n".join(["x,label", *(row[:-9] for row in rows)]))
    read(tmp_path / "own.csv", task="number")
