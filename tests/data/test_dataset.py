import dataclasses

import numpy as np
import pytest

from idiolect.data import Dataset, Federation, federate, read
from idiolect.data.dataset import (
    alike,
    default_decoding,
    fitted,
    moments,
    normalised,
    rows_of,
    without,
)
from idiolect.errors import ConfigError, DataError
from idiolect.experiment.build import build_jobs
from idiolect.experiment.load import parse_experiment


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


def test_pools(toy):
    assert len(toy().pool("train")) == 48 and len(toy().pool("test")) == 12
    assert len(toy(origin=None).pool("train")) == 60
    with pytest.raises(DataError, match="no test file"):
        toy(origin=None).pool("test")
    with pytest.raises(ConfigError, match="unknown"):
        toy().pool("val")


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


def test_columns_that_single_precision_cannot_tell_apart_are_scaled_as_read_or_refused(tmp_path):
    """Of 1.7e9 ± 50 three values would be left; the encoder of a table scales before it rounds."""
    at = 1.7e9 + np.random.default_rng(0).normal(0, 50, 200)
    rows = [f"{one:.2f},{n},{'ab'[n % 2]}" for n, one in enumerate(at)]
    (tmp_path / "own.csv").write_text("\n".join(["at,x,label", *rows]))
    data = read(tmp_path / "own.csv")
    plain = federate(data, clients=1, split=(1, 0, 0)).dataset
    assert np.corrcoef(plain.decoded(np.arange(200))[:, 0], at)[0, 1] > 0.9999
    with pytest.raises(DataError, match=r"column 'at' varies by 4\d\.\d about 1.7e\+09"):
        federate(normalised(data, "feature"), clients=1, split=(1, 0, 0))
    (tmp_path / "own.csv").write_text("\n".join(["at,x,label", *(row[6:] for row in rows)]))
    federate(normalised(read(tmp_path / "own.csv"), "feature"), clients=1, split=(1, 0, 0))
