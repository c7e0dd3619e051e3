import hashlib
import io
import json
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hubserver import serving
from PIL import Image

import idiolect.data
from idiolect.data import SOURCES, federate, load
from idiolect.data.dataset import fitted
from idiolect.errors import ConfigError, DataError


def table(rows: int, start: int = 0, size: int = 6, column: str = "image", label: str = "label"):
    """Make PNG images whose top left pixel is their number, labels 0, 1, 2 in turn."""
    encoded = []
    for number in range(start, start + rows):
        pixels = np.zeros((size, size), np.uint8)
        pixels[0, 0] = number
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        encoded.append({"bytes": buffer.getvalue(), "path": None})
    columns = {column: encoded, label: [number % 3 for number in range(start, start + rows)]}
    names = {"info": {"features": {label: {"names": ["x", "y", "z"]}}}}
    return pa.table(columns).replace_schema_metadata({"huggingface": json.dumps(names)})


def parquet(made) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(made, buffer)
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Make a data directory with a tiny `mnist`: 20 training and 7 test images."""
    monkeypatch.delenv("IDIOLECT_DATA", raising=False)
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data" / "mnist").mkdir(parents=True)
    pq.write_table(table(20), tmp_path / "data" / "mnist" / "train.parquet")
    pq.write_table(table(7, 20), tmp_path / "data" / "mnist" / "test.parquet")
    return tmp_path / "data"


def test_a_folder_is_read_train_first(folder):
    data = load("mnist", folder)
    assert data.x.shape == (27, 1, 6, 6) and isinstance(data.x, np.memmap)
    assert data.x[:, 0, 0, 0].tolist() == list(range(27))
    assert data.origin.tolist() == [0] * 20 + [1] * 7
    assert data.classes == ("x", "y", "z") and "MNIST" in data.provenance


def test_the_environment_names_the_folder(folder, monkeypatch):
    monkeypatch.setenv("IDIOLECT_DATA", str(folder))
    assert len(load("mnist")) == 27


def manifest(folder, digest):
    files = {"mnist/train.parquet": {"sha256": digest}}
    (folder / "MANIFEST.json").write_text(json.dumps({"datasets": {"mnist": {"files": files}}}))


def test_a_manifest_is_believed_only_if_the_files_agree(folder):
    manifest(folder, "0" * 64)
    with pytest.raises(DataError, match=r"train\.parquet does not have the sha256 000000000000"):
        load("mnist", folder)
    manifest(folder, hashlib.sha256((folder / "mnist" / "train.parquet").read_bytes()).hexdigest())
    assert len(load("mnist", folder)) == 27
    (folder / "MANIFEST.json").write_text("[]")
    with pytest.raises(DataError, match="not a manifest"):
        load("mnist", folder)


def test_changed_files_are_decoded_anew(folder):
    assert len(load("mnist", folder)) == 27
    pq.write_table(table(3), folder / "mnist" / "test.parquet")
    assert len(load("mnist", folder)) == 23


def test_some_classes_may_be_kept_and_are_numbered_anew(folder):
    whole, part = load("mnist", folder), load("mnist", folder, only=("z", "x"))
    rows = np.flatnonzero(np.isin(whole.y, [0, 2]))
    assert part.classes == ("z", "x") and np.array_equal(part.x, whole.x[rows])
    assert [part.classes[y] for y in part.y] == [whole.classes[y] for y in whole.y[rows]]
    assert np.array_equal(part.origin, whole.origin[rows])
    assert len(load("mnist", folder)) == 27  # beside it in the cache
    for only in (("x",), ("x", "x"), ("x", "q")):
        with pytest.raises(ConfigError, match="expected two or more of the classes of mnist"):
            load("mnist", folder, only=only)


def test_images_may_be_augmented_once(folder):
    """Each is a window of itself with a border of four, mirrored or not: moved by up to four."""
    whole, moved = load("mnist", folder), load("mnist", folder, augmented="once")
    assert moved.x.shape == whole.x.shape and np.array_equal(moved.y, whole.y)
    assert np.array_equal(moved.x, load("mnist", folder, augmented="once").x)
    same = 0
    for old, new in zip(whole.x, moved.x, strict=True):
        wide = np.pad(old[0], 4)
        windows = [wide[r : r + 6, c : c + 6] for r in range(9) for c in range(9)]
        assert any(np.array_equal(new[0], w) or np.array_equal(new[0], w[:, ::-1]) for w in windows)
        same += np.array_equal(new, old)
    assert same < len(whole) / 2
    with pytest.raises(ConfigError, match="augmented"):
        load("mnist", folder, augmented="twice")


def test_damaged_images_and_tables_are_named(folder, tmp_path):
    broken = table(3).to_pylist()
    broken[1]["image"]["bytes"] = b"no picture"
    pq.write_table(pa.Table.from_pylist(broken), folder / "mnist" / "test.parquet")
    with pytest.raises(DataError, match=r"test\.parquet row 1: the image cannot be decoded"):
        load("mnist", folder)
    pq.write_table(table(3, size=5), folder / "mnist" / "test.parquet")
    with pytest.raises(
        DataError, match=r"row 0: image is \(1, 5, 5\) and the first one is \(1, 6, 6\)"
    ):
        load("mnist", folder)
    (folder / "mnist" / "train.parquet").write_bytes(b"PAR1 cut")
    with pytest.raises(DataError, match=r"train\.parquet cannot be read as Parquet"):
        load("mnist", folder)
    assert not list((tmp_path / "cache").iterdir())
    pq.write_table(pa.table({"text": ["a"]}), folder / "mnist" / "train.parquet")
    with pytest.raises(DataError, match="has columns text; expected image"):
        load("mnist", folder)


def test_download_then_cache_then_no_network(tmp_path, monkeypatch):
    monkeypatch.delenv("IDIOLECT_DATA", raising=False)
    base = "/datasets/uoft-cs/cifar100/resolve/main/cifar100/"
    files = {
        base + "train-00000-of-00001.parquet": parquet(table(9, 0, 6, "img", "fine_label")),
        base + "test-00000-of-00001.parquet": parquet(table(4, 9, 6, "img", "fine_label")),
    }
    with serving(files) as hub:
        monkeypatch.setenv("IDIOLECT_HUB", hub.address)
        hub.fault = "corrupt"
        with pytest.raises(DataError, match="arrived damaged"):
            load("cifar100", cache_dir=tmp_path)
        hub.fault = ""
        data = load("cifar100", cache_dir=tmp_path)
    assert data.x[:, 0, 0, 0].tolist() == list(range(13)) and data.classes == ("x", "y", "z")
    again = load("cifar100", cache_dir=tmp_path, download=False)  # the server is gone
    assert np.array_equal(again.x, data.x)
    with pytest.raises(DataError, match="Without a network, pass --data-dir or set IDIOLECT_DATA"):
        load("cifar10", cache_dir=tmp_path)
    with pytest.raises(DataError, match=r"download is off; .*mnist/train\*\.parquet"):
        load("mnist", cache_dir=tmp_path, download=False)


def test_what_cannot_be_had_is_said(folder, tmp_path):
    with pytest.raises(
        ConfigError, match="dataset 'imagenet' is unknown; expected one of embedded"
    ):
        load("imagenet")
    with pytest.raises(ConfigError, match="'mnist' has no option 'alpha'"):
        load("mnist", alpha=1)
    with pytest.raises(DataError, match="with columns text, label and client"):
        load("cross_sector")
    with pytest.raises(DataError, match=r"'emnist' is not in .*cannot be downloaded"):
        load("emnist", folder)
    with pytest.raises(DataError, match=r"holds tcga_brca/\*\.csv$"):  # a table has no images
        load("tcga_brca", folder)
    with pytest.raises(
        DataError, match=r"holds office_caltech10/train.*, or one \*\.parquet, with"
    ):
        load("office_caltech10", folder)
    with pytest.raises(DataError, match="nowhere does not exist"):
        load("mnist", tmp_path / "nowhere")


def test_generated_sources_take_options():
    data = load("synthetic", alpha=0.0, clients=4, max_size=50, standardise="feature")
    assert data.client_names[3] == "client 3" and len(data) == 200
    rows = np.arange(200)
    assert np.allclose(fitted(data, rows).decoded(rows).mean(0), 0, atol=1e-4)


ROWS = {
    "mnist": (70_000, 10, 10_000),
    "emnist": (42_200, 47, 5_981),
    "cifar100": (2_033, 100, 916),
    "tiny_imagenet32_public": (5_000, 200, 0),
    "office_caltech10": (2_533, 10, 0),
}


@pytest.mark.shared
@pytest.mark.parametrize("name", ROWS)
def test_real_files(name, shared_data, shared_cache):
    data = load(name, shared_data, shared_cache)
    rows, classes, in_test = ROWS[name]
    assert (len(data), len(data.classes)) == (rows, classes)
    assert (0 if data.origin is None else data.origin.sum()) == in_test
    assert data.x[::50].std() > 10 and name in SOURCES
    assert ("Stand-in" in data.provenance) == (name in ("emnist", "cifar100"))


@pytest.mark.shared
def test_real_clients(shared_data, shared_cache):
    federation = federate(load("office_caltech10", shared_data, shared_cache), "natural")
    assert federation.names == ("amazon", "caltech10", "dslr", "webcam")
    assert federation.counts().sum(1).tolist() == [958, 1123, 157, 295]


@pytest.mark.shared
def test_real_mnist_under_the_papers_splits(shared_data, shared_cache):
    mnist = load("mnist", shared_data, shared_cache)
    ds1 = federate(mnist, "persfl-ds1", per_client=600)
    assert ds1.counts().sum(1).tolist() == [600] * 10
    held = np.concatenate(ds1.train + ds1.val + ds1.test)
    assert (mnist.origin[held] == 0).all()
    assert 58_510 <= federate(mnist, "persfl-ds2").counts().sum() <= 58_570
    assert federate(mnist, "pfml-pairs", split=(0.75, 0, 0.25)).counts().sum() == 70_000


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
