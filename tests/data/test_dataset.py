import dataclasses

import numpy as np
import pytest

from idiolect.data import Dataset, Federation
from idiolect.data.dataset import default_decoding, fitted, moments, normalised
from idiolect.errors import ConfigError, DataError


def test_wrong_lengths_labels_and_gaps_are_named(toy):
    with pytest.raises(DataError, match=r"y has shape \(59,\) and x has 60"):
        toy(y=np.zeros(59, np.int64))
    with pytest.raises(DataError, match=r"label 4 in row 7 is outside 0\.\.3"):
        toy(y=np.where(np.arange(60) == 7, 4, 0))
    with pytest.raises(DataError, match="client code 3 in row 0"):
        toy(clients=np.full(60, 3))
    with pytest.raises(DataError, match="origin 2"):
        toy(origin=np.full(60, 2))
    x = np.zeros((5000, 2), np.float32)
    x[4999, 1] = np.nan
    with pytest.raises(DataError, match=r"row 4999 holds NaN or infinity \(feature 1\)"):
        toy(5000, x=x)
    with pytest.raises(DataError, match="does not broadcast"):
        toy(shift=np.zeros(3, np.float32))
    with pytest.raises(DataError, match="positive"):
        toy(scale=np.zeros(1, np.float32))
    with pytest.raises(DataError, match="no rows"):
        toy(0)


def _images(origin: bool) -> Dataset:
    rng = np.random.default_rng(1)
    x = rng.integers(0, 256, (40, 3, 4, 4)).astype(np.uint8)
    x[:, :, 0, 0] = 7  # a pixel that never varies
    shift, scale = default_decoding(x)
    files = (np.arange(40) >= 30).astype(np.int64) if origin else None
    return Dataset("pictures", x, np.zeros(40, np.int64), ("one",), shift, scale, origin=files)


def test_images_reach_minus_one_to_one_by_default():
    decoded = _images(False).decoded(np.arange(40))
    assert decoded.dtype == np.float32
    assert decoded.min() == -1.0 or decoded.max() == 1.0
    assert np.allclose(decoded[:, :, 0, 0], (7 - 127.5) / 127.5)


def test_channel_statistics_are_of_the_rows_given():
    rows = np.array([4, 1, 30, 7])
    pictures = fitted(normalised(_images(True), "channel"), rows)
    seen = pictures.x[rows]
    assert np.allclose(pictures.shift.ravel(), seen.mean((0, 2, 3)), atol=1e-3)
    assert np.allclose(pictures.scale.ravel(), seen.std((0, 2, 3)), atol=1e-3)


def test_pixel_statistics_survive_a_constant_pixel():
    pictures = fitted(normalised(_images(True), "pixel"), np.arange(30))
    assert np.allclose(pictures.scale, pictures.x[:30].std(0) + 0.255, atol=1e-3)
    assert np.all(pictures.decoded(np.arange(30))[:, :, 0, 0] == 0)


def test_features_are_centred_and_constant_ones_only_that(toy):
    x = np.stack([np.arange(60), np.full(60, 3)], axis=1).astype(np.float32)
    waiting = normalised(toy(x=x, origin=None), "feature")
    centred = fitted(waiting, np.arange(60)).decoded(np.arange(60))
    assert np.allclose(centred.mean(0), 0, atol=1e-5)
    assert np.allclose(centred.std(0), [1, 0], atol=1e-5)


def test_bytes_have_the_moments_that_floats_have():
    """Whole numbers in one pass, and float64 in two: the same, constant pixels included."""
    pictures, rows = _images(False), np.arange(3, 33)
    floats = dataclasses.replace(pictures, x=pictures.x.astype(np.float64))
    for how in ("channel", "pixel"):
        one, other = moments(pictures, how, rows), moments(floats, how, rows)
        assert one.seen == other.seen
        np.testing.assert_allclose(one.mean, other.mean, rtol=1e-12)
        np.testing.assert_allclose(one.squares, other.squares, rtol=1e-12)


def test_what_waits_for_training_rows_cannot_be_decoded_or_trained_on(toy):
    waiting = normalised(toy(), "feature")
    with pytest.raises(DataError, match="fitted on training rows"):
        waiting.decoded(np.arange(3))
    rows = tuple(np.split(np.arange(6), 3))
    with pytest.raises(DataError, match="waits for its normalisation"):
        Federation(waiting, rows[:1], rows[1:2], rows[2:])
    with pytest.raises(DataError, match="no training row"):
        fitted(waiting, np.empty(0, np.int64))


def test_tokens_are_left_alone_and_wrong_requests_named(toy):
    tokens = toy(x=np.ones((60, 8), np.int32))
    assert tokens.decoded(np.arange(3)).dtype == np.int32
    with pytest.raises(DataError, match="tokens"):
        normalised(tokens, "unit")
    with pytest.raises(DataError, match="needs images"):
        normalised(toy(), "channel")
    with pytest.raises(ConfigError, match="'minmax' is unknown"):
        normalised(toy(), "minmax")


def test_data_pools(toy):
    assert len(toy().pool("train")) == 48 and len(toy().pool("test")) == 12
    assert len(toy(origin=None).pool("train")) == 60
    with pytest.raises(DataError, match="no test file"):
        toy(origin=None).pool("test")
    with pytest.raises(ConfigError, match="unknown"):
        toy().pool("val")
