"""Files from outside: whatever their bytes, they are read or refused in words."""

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet

from idiolect.data import own
from idiolect.data.parquet import read_parquet
from idiolect.errors import IdiolectError

quick = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

LEAF = {
    "users": ["a", "b"],
    "num_samples": [2, 1],
    "user_data": {"a": {"x": [[1, 2], [3, 4]], "y": [0, 1]}, "b": {"x": [[5, 6]], "y": [1]}},
}


def as_csv() -> bytes:
    return b'age,label,client\n1,yes,a\n2.5,"no",b\n3,yes,a\n'


def as_npz() -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, x=np.eye(3, dtype=np.float32), y=np.array([0, 1, 1]))
    return out.getvalue()


def as_parquet() -> bytes:
    out = io.BytesIO()
    table = {"age": [1.0, 2.0, 3.0], "label": ["y", "n", "y"], "client": ["a", "a", "b"]}
    parquet.write_table(pyarrow.table(table), out)
    return out.getvalue()


def as_png() -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(out, "PNG")
    return out.getvalue()


MAKERS = {
    "table.csv": as_csv,
    "arrays.npz": as_npz,
    "table.parquet": as_parquet,
    "leaf.json": lambda: json.dumps(LEAF).encode(),
    "photos/cat/1.png": as_png,
    "said/anna.jsonl": lambda: b'{"text": "so it goes", "created_utc": 1}\n{"text": "yes"}\n',
    "said/anna.csv": lambda: b"text,created_utc\nso it goes,1\n",
    "said/anna.txt": lambda: b"so it goes\nyes\n",
}


def read_or_refused(folder: Path, name: str, content: bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    target = folder / name.split("/")[0]
    try:
        own.read(target, next_word=name.startswith("said/"))
    except IdiolectError as error:
        assert str(error)


@pytest.mark.parametrize("name", MAKERS)
@quick
@given(data=st.data())
def test_a_changed_file_is_read_or_refused(name, data, tmp_path):
    content = bytearray(MAKERS[name]())
    read_or_refused(tmp_path, name, bytes(content))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        how = data.draw(st.sampled_from(["flip", "cut", "insert", "repeat"]))
        if how == "flip":
            content[place] = data.draw(st.integers(0, 255))
        elif how == "cut":
            del content[place : place + data.draw(st.integers(1, 8))]
        elif how == "insert":
            content[place:place] = data.draw(st.binary(max_size=8))
        else:
            content[place:place] = content[place : place + 8]
        if not content:
            break
    read_or_refused(tmp_path, name, bytes(content))


@pytest.mark.parametrize("name", MAKERS)
@quick
@given(noise=st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(name, noise, tmp_path):
    read_or_refused(tmp_path, name, noise)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


@quick
@given(x=st.lists(values, max_size=3), y=st.lists(values, max_size=3))
def test_leaf_with_any_values_is_read_or_refused(x, y, tmp_path):
    users = {"a": LEAF["user_data"]["a"], "b": {"x": x, "y": y}}
    content = {"users": ["a", "b"], "user_data": users}
    read_or_refused(tmp_path, "leaf.json", json.dumps(content).encode())


scalars = [
    pyarrow.array([[1], [2, 3]]),
    pyarrow.array([{"a": 1}, {"a": 2}]),
    pyarrow.array([b"\xff", b"a"]),
    pyarrow.array([1.5, float("nan")]),
    pyarrow.array([2**63, 1], pyarrow.uint64()),
    pyarrow.array([0, 10**6], pyarrow.timestamp("s")),
    pyarrow.array([True, False]),
    pyarrow.array(["", None]),
    pyarrow.array([-1, 2**40]),
    pyarrow.array([None, None]),
    pyarrow.array(["a", "b"]).dictionary_encode(),
    pyarrow.array(["1.5", "2.5"]).cast(pyarrow.decimal128(5, 2)),
]


@pytest.mark.parametrize("column", ["label", "client", "split", "age", "text"])
@pytest.mark.parametrize("place", range(len(scalars)))
def test_a_column_of_any_type_is_read_or_refused(column, place, tmp_path):
    columns = {"age": pyarrow.array([1, 2]), "label": pyarrow.array(["y", "n"])}
    out = io.BytesIO()
    parquet.write_table(pyarrow.table({**columns, column: scalars[place]}), out)
    read_or_refused(tmp_path, "table.parquet", out.getvalue())


def refused(folder: Path, name: str, content: bytes) -> str:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    with pytest.raises(IdiolectError) as caught:
        own.read(folder / name.split("/")[0])
    return str(caught.value)


def test_a_small_image_that_claims_to_be_huge_is_refused(tmp_path):
    out = io.BytesIO()
    Image.new("1", (8_000, 8_000)).save(out, "PNG")
    assert len(out.getvalue()) < 20_000
    assert "8000 x 8000 pixels" in refused(tmp_path, "photos/cat/1.png", out.getvalue())
    bomb = bytearray(out.getvalue())
    bomb[16:24] = (60_000).to_bytes(4) * 2  # what Pillow itself refuses
    assert "cannot be decoded" in refused(tmp_path, "photos/cat/1.png", bytes(bomb))


def test_a_small_npz_that_unpacks_to_gigabytes_is_refused(tmp_path):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("x.npy", "w", force_zip64=True) as file:
            np.lib.format.write_array_header_1_0(
                file, {"descr": "|u1", "fortran_order": False, "shape": (400 << 20,)}
            )
            for _ in range(400):
                file.write(bytes(1 << 20))
    assert "unpacks to" in refused(tmp_path, "bomb.npz", out.getvalue())


@pytest.mark.parametrize("kind", ["numbers", "codes", "words", "prefixes", "images", "lists"])
def test_a_small_parquet_that_unpacks_to_gigabytes_is_refused(kind, tmp_path):
    """A value is stored once and said to stand in many rows; no page is large by itself."""
    rows, long = 100, "x" * (1 << 20)
    codes = pyarrow.array([0] * rows, pyarrow.int32())
    often = pyarrow.DictionaryArray.from_arrays(codes, pyarrow.array([long]))
    blobs = pyarrow.DictionaryArray.from_arrays(codes, pyarrow.array([long.encode()]))
    ends = pyarrow.array(range(rows + 1), pyarrow.int32())
    column, options = {
        "numbers": (pyarrow.array(np.full(4 << 20, 0.5)), {}),
        "codes": (pyarrow.array([b"x" * (1 << 20)] * rows, pyarrow.binary(1 << 20)), {}),
        "words": (often, {}),
        "prefixes": (
            pyarrow.array([long] * rows),
            {"use_dictionary": False, "column_encoding": {"x": "DELTA_BYTE_ARRAY"}},
        ),
        "images": (pyarrow.StructArray.from_arrays([blobs], ["bytes"]), {}),
        "lists": (pyarrow.ListArray.from_arrays(ends, often), {}),
    }[kind]
    table = pyarrow.table({"x": column, "label": np.zeros(len(column), np.int64)})
    out = io.BytesIO()
    with parquet.ParquetWriter(out, table.schema, store_schema=False, **options) as writer:
        for _ in range(5 if kind == "numbers" else 3):
            writer.write_table(table)
    assert len(out.getvalue()) < 200_000
    assert "unpacks to" in refused(tmp_path, "bomb.parquet", out.getvalue())


def test_a_parquet_of_often_repeated_words_is_read(tmp_path):
    """What could be too much is measured, and is not."""
    words = ["usual " * 100, "rare"]
    table = pyarrow.table({"text": words * 40_000, "label": [0, 1] * 40_000})
    parquet.write_table(table, tmp_path / "texts.parquet")
    assert read_parquet(tmp_path / "texts.parquet").equals(table)


def test_an_array_that_claims_more_than_it_has_is_refused(tmp_path):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive, archive.open("x.npy", "w") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f8", "fortran_order": False, "shape": (1 << 40,)}
        )
    assert "claims" in refused(tmp_path, "false.npz", out.getvalue())


def test_deep_json_is_refused(tmp_path):
    assert "LEAF" in refused(tmp_path, "leaf.json", b"[" * 100_000)
    read_or_refused(tmp_path, "said/anna.jsonl", b"[" * 100_000)


def test_ragged_leaf_is_refused_with_the_user(tmp_path):
    users = {"a": {"x": [[1, 2], [3]], "y": [0, 1]}}
    text = json.dumps({"users": ["a"], "user_data": users}).encode()
    assert "user 'a'" in refused(tmp_path, "leaf.json", text)


def test_labels_that_are_lists_are_refused(tmp_path):
    out = io.BytesIO()
    table = {"age": [1.0, 2.0], "label": [[1], [2, 3]]}
    parquet.write_table(pyarrow.table(table), out)
    assert "'label' holds list" in refused(tmp_path, "table.parquet", out.getvalue())


def test_many_columns_are_read_at_once(tmp_path):
    names = [f"f{place}" for place in range(20_000)]
    lines = [",".join([*names, "label"]), *(",".join(["1"] * 20_000 + [c]) for c in "ab")]
    path = tmp_path / "wide.csv"
    path.write_text("\n".join(lines))
    assert own.read(path).x.shape == (2, 20_000)  # by the square, it took half a minute
