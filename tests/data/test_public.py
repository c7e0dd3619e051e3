"""Public examples: brought to the form of the private ones, and never anybody's own."""

import numpy as np
import pytest

from idiolect.data import Dataset
from idiolect.data.dataset import alike, rows_of, without
from idiolect.errors import DataError
from idiolect.experiment.build import build_jobs
from idiolect.experiment.load import parse_experiment

TOML = """
name = "open"
data.partition = { name = "iid", clients = 3 }
model.name = "mlr"
methods = [{ name = "ktpfl", sample = 10 }]
"""


def images(x):
    x = np.asarray(x, np.uint8)
    one = np.ones(1, np.float32)
    return Dataset("photos", x, np.zeros(len(x), np.int64), ("a",), 0 * one, one)


def test_grey_becomes_colour_and_is_padded_all_round():
    made = alike(images(np.full((2, 1, 28, 28), 7)), (3, 32, 32), "cifar10")
    assert made.x.shape == (2, 3, 32, 32) and made.x.dtype == np.uint8
    assert (made.x[:, :, 2:30, 2:30] == 7).all() and made.x.sum() == 2 * 3 * 28 * 28 * 7
    assert made.provenance == "Images of (1, 28, 28) brought to (3, 32, 32)."


def test_colour_becomes_grey_and_its_middle_is_cut_out():
    """(100, 200, 50) is 0.299 · 100 + 0.587 · 200 + 0.114 · 50 = 153; corners are cut off."""
    x = np.zeros((1, 3, 32, 32))
    x[0, :, 2, 2], x[0, :, 0, 0] = (100, 200, 50), 255
    made = alike(images(x), (1, 28, 28), "mnist")
    assert made.x.shape == (1, 1, 28, 28)
    assert made.x[0, 0, 0, 0] == 153 and made.x.sum() == 153


def test_odd_differences_leave_nothing_out_of_place():
    x = np.arange(9).reshape(1, 1, 3, 3)
    made = alike(images(x), (1, 4, 6), "odd")
    assert made.x.shape == (1, 1, 4, 6) and made.x.sum() == x.sum()
    assert (alike(made, (1, 3, 3), "back").x == x).all()


def test_what_is_no_image_must_fit():
    flat = Dataset(
        "flat",
        np.zeros((2, 5), np.float32),
        np.zeros(2, np.int64),
        ("a",),
        np.zeros(1, np.float32),
        np.ones(1, np.float32),
    )
    with pytest.raises(DataError, match=r"public examples of flat are \(5,\) and the private ones"):
        alike(flat, (4,), "mine")


def test_rows_are_public_or_private_and_never_both():
    data = images(np.arange(6).reshape(6, 1, 1, 1))
    chosen = np.array([1, 4])
    assert rows_of(data, chosen).x.reshape(-1).tolist() == [1, 4]
    assert without(data, chosen).x.reshape(-1).tolist() == [0, 2, 3, 5]
    with pytest.raises(DataError, match="nothing is left of photos"):
        without(data, np.arange(6))


def test_a_source_of_both_is_parted_and_the_result_says_so():
    made, about = build_jobs(
        parse_experiment(TOML + "data.public = { source = 'embedded', size = 50 }")
    )
    (federation,) = made[0].federations
    assert len(federation.public) == 50 and len(federation.dataset) == 6000 - 50
    mine = {image.tobytes() for image in federation.dataset.x}
    assert sum(image.tobytes() in mine for image in federation.public.x) == 0
    assert about["data"]["public"]["examples"] == 50
    assert "MNIST" in about["data"]["public"]["provenance"]


def test_how_many_are_held_out_must_be_said():
    with pytest.raises(DataError, match=r"say how many: data.public.size"):
        build_jobs(parse_experiment(TOML + "data.public = { source = 'embedded' }"))
