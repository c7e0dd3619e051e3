"""CSV as people have it: encodings, delimiters, quotes, and lines named as an editor shows them."""

import gzip

import pytest

from idiolect.data import parquet, read
from idiolect.data.own.csv_files import read_csv
from idiolect.errors import ConfigError, DataError

TEXT = "größe;label\n1,5;ja\n2,25;nein\n"


def cells(path, **options):
    table, source = read_csv(path, **options)
    return table.to_pydict(), source


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("utf-8", "UTF-8"),
        ("utf-8-sig", "UTF-8 with BOM"),
        ("utf-16", "UTF-16"),
        ("utf-16-le", "UTF-16"),
        ("utf-16-be", "UTF-16"),
        ("latin-1", "Windows-1252"),  # of which Latin-1's letters are a part
    ],
)
def test_encodings_are_recognised(tmp_path, encoding, shown):
    path = tmp_path / "a.csv"
    path.write_bytes(TEXT.encode(encoding))
    found, source = cells(path)
    assert found == {"größe": ["1,5", "2,25"], "label": ["ja", "nein"]}
    assert source.form == f"CSV, semicolon between cells, {shown}"
    assert read(path).table.columns["größe"].values.tolist() == [1.5, 2.25]


def test_an_encoding_can_be_given(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes("name,label\nДа,1\n".encode("cp1251"))
    assert cells(path, encoding="cp1251")[0]["name"] == ["Да"]
    with pytest.raises(DataError, match="line 2 is not UTF-8 text; say how"):
        cells(path, encoding="utf-8")
    with pytest.raises(ConfigError, match="encoding 'runes' is unknown"):
        cells(path, encoding="runes")


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_delimiters_are_recognised(tmp_path, delimiter):
    path = tmp_path / "a.csv"
    rows = [["a", "note", "label"], ["1", '"x, y; z | ""w"""', "p"], ["2", "", "q"]]
    path.write_text("\n".join(delimiter.join(row) for row in rows))
    found, source = cells(path)
    assert found == {"a": ["1", "2"], "note": ['x, y; z | "w"', ""], "label": ["p", "q"]}
    assert source.delimiter == delimiter
    with pytest.raises(ConfigError, match="delimiter '#' is unknown"):
        cells(path, delimiter="#")


def test_quoted_newlines_do_not_shift_the_lines_that_are_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('\nage,note,label\n1,"two\nlines",p\n\n2,x,q\nold,y,p\n')
    table, source = read_csv(path)
    assert table["note"].to_pylist() == ["two\nlines", "x", "y"]
    assert [source.place(row) for row in range(3)] == ["line 3", "line 6", "line 7"]
    with pytest.raises(DataError, match=r"line 7: column 'age' is 'old'; expected a number"):
        read(path, columns={"age": "number"})


def test_rows_of_another_length_are_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b,label\n1,2,p\n1,2,3,q\n")
    with pytest.raises(DataError, match="line 3 has 4 cells and there are 3 columns; quote"):
        read(path)
    path.write_text('a,label\n1,"p\n2,q\n')
    with pytest.raises(DataError, match="line 2 opens a quote that is never closed"):
        read(path)
    path.write_text('a,label\n5" pipe,p\n2,q\n')
    assert cells(path)[0]["a"] == ['5" pipe', "2"]


def test_unnamed_columns_and_row_names(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(",age,label\n" + "".join(f"{n},{n % 7},{n % 2}\n" for n in range(30)))
    data = read(path)
    assert list(data.table.columns) == ["age"]
    assert data.table.ignored == {"column 1": "it numbers the rows"}
    path.write_text("age label\n".replace(" ", "\t") + '"1"\t4\tp\n"2"\t5\tq\n')  # as R writes it
    assert cells(path)[0] == {"column 1": ["1", "2"], "age": ["4", "5"], "label": ["p", "q"]}
    path.write_text("1,2,3\n4,5,6\n")
    with pytest.raises(DataError, match="is the line of column names missing"):
        read(path)


def test_packed_text(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "_UNPACKED", 1 << 20)
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"a,label\n1,p\n2,q\n"))
    assert cells(path)[0]["a"] == ["1", "2"]
    path.write_bytes(gzip.compress(b"a,label\n" + b"1,p\n" * (1 << 20)))
    with pytest.raises(DataError, match="unpacks to"):
        cells(path)
    path.write_bytes(b"no gzip")
    with pytest.raises(DataError, match="cannot be unpacked"):
        cells(path)
    (tmp_path / "b.tsv").write_text("a,b\tlabel\n1\tp\n")
    assert cells(tmp_path / "b.tsv")[0] == {"a,b": ["1"], "label": ["p"]}
