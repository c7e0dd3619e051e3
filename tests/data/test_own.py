import inspect
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from idiolect.data import federate, load, read
from idiolect.errors import DataError

TABLE = {
    "age": [1, 2, 3, 4],
    "height": [0.5, 1.5, 2.5, 3.5],
    "label": ["cat", "dog", "cat", "dog"],
    "client": ["zoe", "ann", "zoe", "ann"],
    "split": ["train", "train", "test", "test"],
}


def csv(path, columns):
    lines = [",".join(columns)] + [
        ",".join(map(str, row)) for row in zip(*columns.values(), strict=True)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(params=["csv", "parquet"])
def write(request, tmp_path):
    def one(**changes):
        columns = {key: value for key, value in (TABLE | changes).items() if value is not None}
        path = tmp_path / f"own.{request.param}"
        if request.param == "csv":
            return csv(path, columns)
        pq.write_table(pa.table(columns), path)
        return path

    return one


def test_tables_of_numbers(write):
    data = read(write())
    assert (
        data.x.tolist() == [[1, 0.5], [2, 1.5], [3, 2.5], [4, 3.5]] and data.x.dtype == np.float32
    )
    assert data.classes == ("cat", "dog") and data.y.tolist() == [0, 1, 0, 1]
    assert data.client_names == ("ann", "zoe") and data.clients.tolist() == [1, 0, 1, 0]
    assert data.origin.tolist() == [0, 0, 1, 1]
    federation = federate(data, "natural", split="file", val=0.0)
    assert [rows.tolist() for rows in federation.test] == [[3], [2]]


def test_columns_can_be_renamed_or_absent(write):
    data = read(write(label=None, client=None, split=None, kind=[0, 1, 1, 0]), label="kind")
    assert data.classes == ("0", "1") and data.clients is None and data.origin is None
    # Whole numbers keep their place while most of 0..largest occur, else they are coded.
    assert read(write(label=[0, 1, 3, 0], split=None)).classes == ("0", "1", "2", "3")
    assert read(write(label=[2019, 2020, 2020, 2019])).classes == ("2019", "2020")
    # A class that nobody has below the smallest is none: codes 1 and 2 are two classes.
    coded = read(write(label=[1, 2, 2, 1], split=None))
    assert coded.classes == ("1", "2") and coded.y.tolist() == [0, 1, 1, 0]
    assert read(write(label=[0, 2, 2, 0], split=None)).classes == ("0", "2")
    three = read(write(label=[1, 2, 4, 1], split=None))
    assert three.classes == ("1", "2", "3", "4") and three.y.tolist() == [0, 1, 3, 0]


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        (
            {"label": None},
            {},
            "no column 'label'; it has age, height, client, split: name the label",
        ),
        ({}, {"client": "user"}, "no column 'user' for client"),
        ({"height": [0.5, float("inf"), 1, 2]}, {}, "(row 2|line 3): column 'height' is infinite"),
        ({"label": [0.5, 1, 1, 0]}, {"task": "classes"}, "label 0.5 in row 1 is not a class"),
        ({"label": ["a", "b", "b", "a"]}, {"task": "number"}, "has 'a' in row 1"),
        ({"split": ["train", "test", "train", "val"]}, {}, "split 'val' in (row 4|line 5)"),
        ({"label": ["cat", "cat", "cat", "emu"]}, {}, "label 'emu' occurs only in test rows"),
        ({"age": None, "height": None}, {}, "no feature column"),
        ({"client": ["zoe", "", "zoe", "ann"]}, {}, "column 'client' is empty in (row 2|line 3)"),
    ],
)
def test_faults_in_tables_are_named(write, changes, options, words):
    with pytest.raises(DataError, match=words):
        read(write(**changes), **options)


def test_missing_empty_and_strange_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"does not exist; expected a \.parquet"):
        read(tmp_path / "none.csv")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(DataError, match="is empty; expected a line of column names"):
        read(tmp_path / "empty.csv")
    (tmp_path / "head.csv").write_text("age,label\n")
    with pytest.raises(DataError, match="no rows"):
        read(tmp_path / "head.csv")
    (tmp_path / "twice.csv").write_text("age,age,label\n1,2,0\n")
    with pytest.raises(DataError, match="two columns 'age'; rename"):
        read(tmp_path / "twice.csv")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match=r"is a '\.txt' file"):
        read(tmp_path / "notes.txt")
    (tmp_path / "bare").mkdir()
    with pytest.raises(DataError, match="nothing that can be read"):
        read(tmp_path / "bare")
    pq.write_table(
        pa.table({"age": [1.0], "label": pa.array([None], pa.string())}), tmp_path / "n.parquet"
    )
    with pytest.raises(DataError, match="column 'label' is empty in row 1"):
        read(tmp_path / "n.parquet")


def png(value, mode="L", size=(4, 3)):
    buffer = io.BytesIO()
    Image.new(mode, size, value).save(buffer, "PNG")
    return buffer.getvalue()


def test_parquet_of_images(tmp_path):
    images = [{"bytes": png(value), "path": None} for value in (1, 2, 3)]
    pq.write_table(pa.table({"image": images, "label": ["a", "b", "a"]}), tmp_path / "p.parquet")
    data = read(tmp_path / "p.parquet")
    assert data.x.shape == (3, 1, 3, 4) and data.x[:, 0, 0, 0].tolist() == [1, 2, 3]
    assert data.shift == 127.5


def test_npz(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.zeros((4, 8, 8, 3), np.uint8), y=[0, 1, 0, 1], client=["b", "a", "b", "a"])
    data = read(path)
    assert data.x.shape == (4, 3, 8, 8) and data.client_names == ("a", "b")
    np.savez(path, x=np.zeros((4, 8, 8), np.uint8), y=[0, 1, 0, 1])
    assert read(path).x.shape == (4, 1, 8, 8)
    np.savez(path, x=np.arange(8).reshape(4, 2), y=[0, 1, 0, 1])
    assert read(path).x.dtype == np.int32
    for arrays, words in (
        ({"x": np.zeros((4, 2))}, "no array 'y'; it has x"),
        ({"x": np.array([{}], object), "y": [0]}, "plain number arrays"),
        ({"x": np.zeros((4, 2)), "y": [0, 1]}, "2 labels for 4 examples"),
        ({"x": np.full((2, 2), np.nan), "y": [0, 1]}, "row 0 holds NaN"),
        ({"x": np.array(["a", "b"]), "y": [0, 1]}, "expected numbers"),
        ({"x": np.zeros((0, 2)), "y": []}, "no rows"),
    ):
        np.savez(path, **arrays)
        with pytest.raises(DataError, match=words):
            read(path)
    path.write_bytes(b"PK no zip")
    with pytest.raises(DataError, match="cannot be read"):
        read(path)


def picture(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_image_folders(tmp_path):
    picture(tmp_path / "two" / "cat" / "1.png", png(5))
    picture(tmp_path / "two" / "dog" / "1.png", png(9, size=(8, 6)))
    data = read(tmp_path / "two")
    assert data.x.shape == (2, 1, 3, 4) and data.classes == ("cat", "dog") and data.clients is None
    assert read(tmp_path / "two", size=(10, 5)).x.shape == (2, 1, 5, 10)
    picture(tmp_path / "three" / "ann" / "cat" / "1.png", png(5))
    picture(tmp_path / "three" / "bob" / "dog" / "1.png", png((9, 8, 7), "RGB"))
    data = read(tmp_path / "three")
    assert data.client_names == ("ann", "bob")
    assert data.x[:, :, 0, 0].tolist() == [[5, 5, 5], [9, 8, 7]]  # one in colour makes all RGB
    picture(tmp_path / "two" / "ann" / "cat" / "1.png", png(5))
    with pytest.raises(DataError, match="expected class/image or client/class/image"):
        read(tmp_path / "two")
    picture(tmp_path / "bad" / "cat" / "1.png", b"no picture")
    with pytest.raises(DataError, match=r"images cannot be decoded: cat/1\.png"):
        read(tmp_path / "bad")


def pfllib(folder, part, client, x, y):
    (folder / part).mkdir(parents=True, exist_ok=True)
    np.savez(folder / part / f"{client}.npz", x=x, y=y)


def pickled(folder, **held):
    (folder / "train").mkdir(exist_ok=True)
    np.savez_compressed(folder / "train" / "0.npz", data=held)


def test_pfllibs_pickled_arrays_are_read(tmp_path):
    columns_first = np.asfortranarray(np.arange(6, dtype=">f4").reshape(3, 2))
    pickled(tmp_path, x=columns_first, y=np.array([2, 0, 1]))
    data = read(tmp_path)
    assert data.x.tolist() == [[0, 1], [2, 3], [4, 5]] and data.y.tolist() == [2, 0, 1]
    pickled(tmp_path, x=[[1.0, 2.0], [3.0, 4.0]], y=[np.int64(1), np.int64(0)])
    data = read(tmp_path)
    assert data.x.tolist() == [[1, 2], [3, 4]] and data.y.tolist() == [1, 0]


class Touch:
    """A pickle of this touches a file when Python loads it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_pickle_runs_nothing(tmp_path):
    x, y = np.zeros((3, 2), np.float32), np.arange(3)
    touched = tmp_path / "touched"
    for held in (
        {"x": Touch(touched), "y": y},
        {"x": np.array([Touch(touched)] * 3), "y": y},
        {"x": x, "y": y, "z": Touch(touched)},
        {"x": x, "y": np.array([{1: Touch(touched)}] * 3)},
    ):
        pickled(tmp_path, **held)
        with pytest.raises(DataError, match=r"names .*open.* numpy\.savez\(file, x=data"):
            read(tmp_path)
    for held in ({"x": x}, {"x": x, "y": {1, 2}}, {"x": np.array(["2020"], "M8[s]"), "y": y[:1]}):
        pickled(tmp_path, **held)
        with pytest.raises(DataError):
            read(tmp_path)
    assert not touched.exists()
    for call in (read, load):
        assert "allow_pickle" not in inspect.signature(call).parameters


def test_pfllibs_layout_has_a_file_for_each_client(tmp_path):
    for client in range(11):
        pfllib(tmp_path, "train", client, np.full((3, 2), client, np.float32), np.array([0, 1, 2]))
        pfllib(
            tmp_path, "test", client, np.full((1, 2), -client, np.float32), np.array([client % 3])
        )
    data = read(tmp_path)
    assert len(data) == 44 and len(data.client_names) == 11
    assert data.client_names[2] == "client 2" and data.client_names[10] == "client 10"
    federation = federate(data, "natural", split="file")
    for client, name in enumerate(federation.names):
        number = int(name.split()[1])
        assert (data.x[federation.test[client]] == -number).all()
        assert (data.x[federation.train[client]] == number).all()
    np.savez(tmp_path / "train" / "3.npz", other=[1])
    with pytest.raises(DataError, match=r"3\.npz cannot be read"):
        read(tmp_path)


def leaf(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    held = {user: {"x": x, "y": y} for user, (x, y) in data.items()}
    sizes = [len(y) for _, y in data.values()]
    path.write_text(json.dumps({"users": list(data), "num_samples": sizes, "user_data": held}))


def test_leaf(tmp_path):
    leaf(tmp_path / "d" / "train" / "a.json", {"u2": ([[1.0, 2], [3, 4]], [0, 1])})
    leaf(tmp_path / "d" / "train" / "b.json", {"u1": ([[5.0, 6]], [1]), "u0": ([], [])})
    leaf(tmp_path / "d" / "test" / "a.json", {"u1": ([[7.0, 8]], [0])})
    data = read(tmp_path / "d")
    assert data.x.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert data.client_names == ("u1", "u2") and data.clients.tolist() == [1, 1, 0, 0]
    assert data.origin.tolist() == [0, 0, 0, 1]
    assert len(read(tmp_path / "d" / "train" / "a.json")) == 2
    for content, words in (
        ({"u": ([[1.0]], [0, 1])}, "1 x and 2 y"),
        ({"u": ([[1.0]], [0]), "v": ([[1.0, 2]], [0])}, "expected one shape"),
        ({}, "no rows"),
    ):
        leaf(tmp_path / "one.json", content)
        with pytest.raises(DataError, match=words):
            read(tmp_path / "one.json")
    (tmp_path / "one.json").write_text("{}")
    with pytest.raises(DataError, match="not LEAF's JSON"):
        read(tmp_path / "one.json")
