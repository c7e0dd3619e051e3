"""What lies between a file and a network: read alike, scaled alike, and refused when malformed."""

import copy
import json

import numpy as np
import pytest
from PIL import Image

from idiolect.core.task import Labels, Number
from idiolect.data import Dataset, federate, read
from idiolect.data.dataset import normalised
from idiolect.data.preprocessing import Preprocessing
from idiolect.errors import DataError


def table(
    tmp_path, text="age,bp,site,sick\n50,120,a,no\n60,130,a,yes\n70,150,b,yes\n40,100,b,no\n"
):
    (tmp_path / "own.csv").write_text(text)
    options = {"label": "sick", "client": "site"}
    dataset = normalised(read(tmp_path / "own.csv", **options), "feature")
    return Preprocessing.of(federate(dataset, "natural", split=(1, 0, 0)).dataset, options)


def images(channels=3):
    pixels = np.random.default_rng(0).integers(0, 256, (4, channels, 6, 5)).astype(np.uint8)
    return Preprocessing.of(Dataset("photos", pixels, np.array([0, 1, 0, 1]), ("cat", "dog")))


def test_json_gives_the_same_back_bit_for_bit(tmp_path):
    for form in (table(tmp_path), images()):
        again = Preprocessing.from_json(json.loads(json.dumps(form.to_json())), "it")
        assert again.to_json() == form.to_json()
        assert np.array_equal(again.shift, form.shift) and again.shift.dtype == np.float32


def test_columns_are_found_by_name_in_any_order_and_labels_are_not_needed(tmp_path):
    form = table(tmp_path)
    assert form.features == ("age", "bp")
    (tmp_path / "new.csv").write_text("name,bp,age\nAnn,130,70\nBob,90,30\n")
    rows = form.rows(tmp_path / "new.csv")
    assert rows.x.tolist() == [[70, 130], [30, 90]] and rows.y is None
    assert rows.names == ("1", "2") and rows.column == "row"
    assert form.rows({"age": 70, "bp": 130}).x.tolist() == [[70, 130]]
    assert form.rows([70.0, 130.0]).x.tolist() == [[70, 130]]
    assert form.rows(tmp_path / "own.csv").y.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("bp\n1\n", "no column 'age', which the model reads"),
        ("age,bp\nold,3\n", "column 'age' is string"),
        ("age,bp\n,3\n", "column 'age' is"),
        ("age,bp,sick\n1,2,maybe\n", "class 'maybe' in row 1"),
        ("age,bp\n", "has no rows"),
    ],
)
def test_rows_that_do_not_fit_are_one_line(tmp_path, content, words):
    form = table(tmp_path)
    (tmp_path / "new.csv").write_text(content)
    with pytest.raises(DataError, match=words):
        form.rows(tmp_path / "new.csv")


def test_a_picture_of_any_size_and_colour_fits(tmp_path):
    form = images()
    grey = Image.fromarray(np.full((12, 10), 90, np.uint8))
    grey.save(tmp_path / "one.png")
    x = form.rows(tmp_path / "one.png").x
    assert x.shape == (1, 3, 6, 5) and (x == 90).all()
    assert np.array_equal(form.rows([grey, grey]).x[:1], x)
    assert np.array_equal(
        form.rows(np.asarray(grey.resize((5, 6)))[None, :, :, None].repeat(3, 3)).x, x
    )
    for name in ("dog", "cat"):
        (tmp_path / "two" / name).mkdir(parents=True)
        grey.save(tmp_path / "two" / name / "it.png")
    rows = form.rows(tmp_path / "two")
    assert rows.column == "file" and rows.names == ("cat/it.png", "dog/it.png")
    assert rows.y.tolist() == [0, 1]
    with pytest.raises(DataError, match="0 to 255, and scales them itself"):
        form.rows(np.full((1, 3, 6, 5), 0.5))


def test_a_colour_picture_is_weighed_for_a_model_of_grey():
    red = Image.new("RGB", (5, 6), (255, 0, 0))
    assert (images(1).rows(red).x == round(0.299 * 255)).all()


def test_labels_of_other_tasks(tmp_path):
    form = table(tmp_path)
    (tmp_path / "new.csv").write_text("age,bp,price,a,b\n1,2,3.5,yes,no\n")
    classes = dict(features=form.features, shape=(2,), dtype="float32")
    scaling = dict(shift=form.shift, scale=form.scale)
    number = Preprocessing(
        **classes, **scaling, classes=("price",), columns={"label": "price"}, task=Number()
    )
    assert number.rows(tmp_path / "new.csv").y.tolist() == [3.5]
    both = {"label": ("a", "b")}
    labels = Preprocessing(**classes, **scaling, classes=("a", "b"), columns=both, task=Labels())
    assert labels.rows(tmp_path / "new.csv").y.tolist() == [[1, 0]]
    again = Preprocessing.from_json(json.loads(json.dumps(labels.to_json())), "it")
    assert again.columns == both and again.task == Labels()


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"shape": [0]},
        {"shape": [1 << 40]},
        {"shape": "2"},
        {"dtype": "object"},
        {"classes": []},
        {"classes": ["a", "a"]},
        {"classes": [1, 2]},
        {"scale": [0.0, 1.0]},
        {"scale": [float("nan"), 1.0]},
        {"shift": [[1.0], [2.0], [3.0]]},
        {"shift": ["a", "b"]},
        {"features": ["age"]},
        {"kind": "images"},
        {"columns": {"path": "/etc/passwd"}},
        {"columns": {"label": 3}},
        {"task": {"kind": "magic"}},
        {"task": None},
        {"words": "abc"},
        {"sequential": 1},
    ],
)
def test_malformed_json_is_refused(tmp_path, change):
    good = table(tmp_path).to_json()
    with pytest.raises(DataError, match="it is no preprocessing of idiolect"):
        Preprocessing.from_json({**copy.deepcopy(good), **change}, "it")
    for key in good:
        with pytest.raises(DataError, match="is no preprocessing"):
            Preprocessing.from_json({k: v for k, v in good.items() if k != key}, "it")


SPELLINGS = {
    "R": ("TRUE", "FALSE"),
    "fractions": ("1.0", "0.0"),
    "blanks": (" yes", "no "),
    "codes": ("01", "02"),
}


@pytest.mark.parametrize("spelled", SPELLINGS)
def test_the_table_that_was_learned_from_can_be_predicted(tmp_path, spelled):
    """A class is written in new rows as in training: what reading made of it there, it is here."""
    text = "age;sick\n" + "".join(
        f"{age},5;{SPELLINGS[spelled][age % 3 == 0]}\n" for age in range(30)
    )
    (tmp_path / "own.csv").write_text(text)
    dataset = read(tmp_path / "own.csv", label="sick")
    form = Preprocessing.of(federate(dataset, "iid", clients=2).dataset)
    assert form.columns["label"] == "sick"  # nobody named it again
    assert np.array_equal(form.rows(tmp_path / "own.csv").y, dataset.y)
    for gap in ("", "NA"):
        lines = text.splitlines()
        (tmp_path / "gap.csv").write_text("\n".join([*lines[:-1], f"29,5;{gap}", ""]))
        assert form.rows(tmp_path / "gap.csv").y.tolist() == [*dataset.y[:-1], -1]


def test_a_number_is_no_class_for_its_whole_part(tmp_path):
    form = table(tmp_path, "age,site,sick\n50,a,0\n60,a,1\n70,b,1\n40,b,0\n")
    assert form.rows({"age": [1, 2, 3], "sick": [1.0, 0.0, np.nan]}).y.tolist() == [1, 0, -1]
    with pytest.raises(DataError, match=r"class '1.7' in row 2"):
        form.rows({"age": [1, 2], "sick": [1.0, 1.7]})


@pytest.mark.parametrize(
    ("label", "task", "cells"),
    [
        ("score", "number", "1,25"),
        (["days", "dead"], "survival", "1.000,5;yes"),
        (["a", "b"], "labels", "true;0"),
    ],
)
def test_labels_of_other_tasks_are_read_as_in_training(tmp_path, label, task, cells):
    names = ";".join([label] if isinstance(label, str) else label)
    rows = "".join(f"{age};{cells.replace('1', str(age % 9 + 1), 1)}\n" for age in range(30))
    if task == "labels":
        rows = "".join(f"{age};{cells if age % 3 else 'false;1'}\n" for age in range(30))
    (tmp_path / "own.csv").write_text(f"age;{names}\n{rows}")
    dataset = read(tmp_path / "own.csv", label=label, task=task)
    form = Preprocessing.of(federate(dataset, "iid", clients=2).dataset)
    assert np.array_equal(form.rows(tmp_path / "own.csv").y, dataset.y)
    # One that is missing says that the rows are to be predicted, not scored.
    (tmp_path / "own.csv").write_text(f"age;{names}\n3;{';' * cells.count(';')}\n{rows}")
    assert form.rows(tmp_path / "own.csv").y is None
