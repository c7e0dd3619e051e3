import time
from pathlib import Path

import numpy as np
import pytest

import idiolect.data
from idiolect.data import load


def test_six_hundred_of_each_digit_in_under_a_second():
    start = time.perf_counter()
    digits = load()
    assert time.perf_counter() - start < 1
    assert digits.counts().tolist() == [600] * 10
    assert digits.x.shape == (6000, 1, 28, 28) and digits.x.dtype == np.uint8
    assert "CC BY-SA 3.0" in digits.provenance


def test_attribution_travels_with_the_file():
    folder = Path(idiolect.data.__file__).parent / "embedded"
    assert (folder / "digits.xz").stat().st_size < 1_000_000
    assert "LeCun" in (folder / "ATTRIBUTION.md").read_text()


@pytest.mark.shared
def test_pixels_are_those_of_the_training_file(shared_data, shared_cache):
    mnist = load("mnist", shared_data, shared_cache)
    train = mnist.pool("train")
    first = [train[np.flatnonzero(mnist.y[train] == digit)[:600]] for digit in range(10)]
    rows = np.sort(np.concatenate(first))
    digits = load()
    assert np.array_equal(digits.x, mnist.x[rows]) and np.array_equal(digits.y, mnist.y[rows])
