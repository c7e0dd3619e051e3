"""Reading CSV text as it comes: encoding, delimiter and header recognised, all cells as strings."""

import csv
import gzip
import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from idiolect.data.parquet import refuse_bomb
from idiolect.errors import ConfigError, DataError

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "pipe"}
SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")

_ENCODINGS = {
    "utf-8": "UTF-8",
    "utf-8-sig": "UTF-8 with BOM",
    "utf-16": "UTF-16",
    "utf-16-le": "UTF-16",
    "utf-16-be": "UTF-16",
    "cp1252": "Windows-1252",
    "latin-1": "Latin-1",
}
PLAIN = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
COMMAS = r"[+-]?([1-9]\d{0,2}(\.\d{3})+|\d*)(,\d+)?([eE][+-]?\d+)?"
"""A number as English text has it, and with a decimal comma and dots between thousands."""
_SAMPLE = 1 << 16  # characters that a delimiter is recognised by
_CHUNK = 1 << 24


def is_csv(path: Path) -> bool:
    """Return whether a file's name says that it is delimited text."""
    return path.name.lower().endswith(SUFFIXES)


@dataclass(frozen=True)
class TableSource:
    """Where a table comes from, to name its rows as the user sees them."""

    path: Path
    delimiter: str = ""  # empty: no text
    encoding: str = ""
    commas: bool = False  # whether numbers have decimal commas, and dots between thousands

    @property
    def form(self) -> str:
        """The delimiter and encoding in words."""
        if not self.delimiter:
            return "Parquet" if self.path.suffix == ".parquet" else "table"
        named = DELIMITERS.get(self.delimiter, repr(self.delimiter))
        return f"CSV, {named} between cells, {_ENCODINGS.get(self.encoding, self.encoding)}"

    def place(self, row: int) -> str:
        """Name a row, counted from 0: the line of a text file, else the row counted from 1."""
        if not self.delimiter:
            return f"row {row + 1}"
        try:
            for place, (line, _) in enumerate(_records(_utf8(self.path, self.encoding)[0], self)):
                if place == row + 1:  # after the header
                    return f"line {line}"
        except (OSError, csv.Error, DataError):  # the file has changed meanwhile
            pass
        return f"row {row + 1}"


def read_csv(path: Path, delimiter: str = "", encoding: str = "") -> tuple[Any, TableSource]:
    """Read delimited text as an Arrow table of strings, and say how it was written."""
    import pyarrow
    from pyarrow import csv as arrow_csv

    arrow: Any = arrow_csv  # its stubs know files only

    text, encoding = _utf8(path, encoding)
    if not text[:_SAMPLE].strip() and not text.strip():
        raise DataError(f"{path} is empty; expected a line of column names and a line for each row")
    end = 0
    for _ in range(4):  # lines may be long; the first are needed whole
        end = text.find(b"\n", end) + 1 or len(text)
    end = max(end, _SAMPLE)
    sample = text[:end].decode("utf-8", "ignore")
    if delimiter and delimiter not in DELIMITERS:
        shown = ", ".join(repr(one) for one in DELIMITERS)
        raise ConfigError(f"delimiter {delimiter!r} is unknown; expected one of {shown}")
    delimiter = delimiter or _delimiter(path, sample)
    source = TableSource(path, delimiter, encoding, _decimal_commas(sample, delimiter))
    names = _names(path, sample, len(text) > end, delimiter)
    places = [str(place) for place in range(len(names))]
    try:
        table = arrow.read_csv(
            pyarrow.BufferReader(text.lstrip(b"\r\n") if text[:1] in b"\r\n" else text),
            read_options=arrow.ReadOptions(
                column_names=places, skip_rows_after_names=1, block_size=1 << 22
            ),
            parse_options=arrow.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=arrow.ConvertOptions(
                column_types=dict.fromkeys(places, pyarrow.string()), strings_can_be_null=False
            ),
        )
    except (pyarrow.ArrowException, ValueError) as error:
        raise DataError(_uneven(text, source, len(names)) or _unreadable(path, error)) from error
    if text.count(b'"') % 2 and (line := _unclosed(text, source)):
        raise DataError(f"{path}: line {line} opens a quote that is never closed; mend the line")
    return table.rename_columns(names), source


def _unreadable(path: Path, error: Exception) -> str:
    return f"{path} cannot be read as CSV ({str(error).splitlines()[0]}); mend the file"


def _utf8(path: Path, encoding: str) -> tuple[bytes, str]:
    """Return the text of a file as UTF-8, and how it was encoded."""
    raw = _unpacked(path)
    given = encoding
    encoding = encoding or _encoding(raw)
    if encoding == "utf-8" and _is_utf8(raw):
        return raw, encoding
    try:
        text = raw.decode(encoding)
    except LookupError:
        shown = ", ".join(_ENCODINGS)
        raise ConfigError(f"encoding {given!r} is unknown; expected one of {shown}") from None
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise DataError(
            f"{path}: line {line} is not {_ENCODINGS.get(encoding, encoding)} text; say how the "
            "file is encoded with the option encoding, or save it as UTF-8"
        ) from None
    if "\0" in text[:_SAMPLE]:
        raise DataError(f"{path} is no text; expected CSV: a line for each row")
    return text.encode(), encoding


def _unpacked(path: Path) -> bytes:
    """Return the bytes of a file, unpacked if need be."""
    if path.suffix.lower() != ".gz":
        return path.read_bytes()
    parts, size, packed = [], 0, path.stat().st_size
    try:
        with gzip.open(path) as file:
            while part := file.read(_CHUNK):
                parts.append(part)
                size += len(part)
                refuse_bomb(path, packed, size)
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{path} cannot be unpacked ({error}); pack it again with gzip") from error
    except Exception as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} cannot be unpacked ({error}); pack it again") from error
    return b"".join(parts)


def _encoding(raw: bytes) -> str:
    """Recognise an encoding: by its mark, by zero bytes, then UTF-8 where it fits."""
    if raw.startswith(b"\xef\xbb\xbf"):
        return "utf-8-sig"
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    head = raw[:1024]
    if head.count(0) > len(head) // 5:
        return "utf-16-le" if head[1::2].count(0) > head[::2].count(0) else "utf-16-be"
    if _is_utf8(raw):
        return "utf-8"
    undefined = bytes((0x81, 0x8D, 0x8F, 0x90, 0x9D))  # in Windows-1252
    return "latin-1" if any(one in raw for one in undefined) else "cp1252"


def _is_utf8(raw: bytes) -> bool:
    if 0 in raw[:_SAMPLE]:
        return False
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _delimiter(path: Path, sample: str) -> str:
    """Choose the delimiter that gives rows of one length, and of the most cells."""
    first = sample.lstrip("\r\n").split("\n", 1)[0]
    if ".tsv" in path.name.lower() and "\t" in first:
        return "\t"
    scored = []
    for delimiter in DELIMITERS:
        try:
            rows = [len(row) for row in csv.reader(io.StringIO(sample), delimiter=delimiter) if row]
        except csv.Error:
            continue
        rows = rows[:-1] if len(rows) > 20 else rows  # the last may be cut
        if rows and rows[0] > 1:
            scored.append((rows.count(rows[0]) / len(rows), rows[0], delimiter))
    return max(scored, key=lambda one: one[:2])[2] if scored else ","


def _decimal_commas(sample: str, delimiter: str) -> bool:
    """Return whether a column has decimal commas, and none has what can only be decimal dots."""
    if delimiter == ",":
        return False
    rows = [row for row in csv.reader(io.StringIO(sample), delimiter=delimiter) if row][1:]
    columns = [[cell.strip() for cell in cells] for cells in zip(*rows, strict=False)]
    told = [[one for one in cells if any(c.isdigit() for c in one)] for cells in columns]
    commas = any(_all(COMMAS, cells) and "," in "".join(cells) for cells in told)
    return commas and not any(_all(PLAIN, cells) and not _all(COMMAS, cells) for cells in told)


def _all(pattern: str, cells: Sequence[str]) -> bool:
    return bool(cells) and all(re.fullmatch(pattern, one) for one in cells)


def _names(path: Path, sample: str, cut: bool, delimiter: str) -> list[str]:
    """Read the names of columns; an unnamed one is called by its place."""
    try:
        rows = [row for row in csv.reader(io.StringIO(sample), delimiter=delimiter) if row]
    except csv.Error as error:
        raise DataError(_unreadable(path, error)) from error
    names = [name.strip() for name in rows[0]]
    below = {len(row) for row in (rows[1:-1] if cut else rows[1:])}
    if below == {len(names) + 1}:  # as R writes row names
        names = ["", *names]
    names = [name or f"column {place}" for place, name in enumerate(names, 1)]
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise DataError(f"{path} has two columns '{twice[0]}'; rename or remove one")
    return names


def _records(text: bytes, source: TableSource) -> Iterator[tuple[int, list[str]]]:
    """Yield every row that is not empty, with the line that it begins at, counted from 1."""
    csv.field_size_limit(1 << 27)
    reader = csv.reader(io.StringIO(text.decode(), newline=""), delimiter=source.delimiter)
    line = 1
    for row in reader:
        if row:
            yield line, row
        line = reader.line_num + 1


def _unclosed(text: bytes, source: TableSource) -> int:
    """Return the line where the last row begins, if it ends within a quote; else 0."""
    lines = io.StringIO(text.decode(), newline="")
    reader = csv.reader(lines, delimiter=source.delimiter, strict=True)
    line = 1
    try:
        for _ in reader:
            line = reader.line_num + 1
    except csv.Error as error:
        return line if "end of data" in str(error) else 0
    return 0


def _uneven(text: bytes, source: TableSource, width: int) -> str:
    """Describe the first row that has more or fewer cells than there are columns."""
    try:
        for place, (line, row) in enumerate(_records(text, source)):
            if place and len(row) != width:
                named = DELIMITERS[source.delimiter]
                return (
                    f"{source.path}: line {line} has {len(row)} cells and there are {width} "
                    f"columns; quote cells that hold a {named}, or mend the line"
                )
    except csv.Error as error:
        return _unreadable(source.path, error)
    return ""
