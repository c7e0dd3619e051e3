"""Named text sources: Parquet tables of reviews with stars, and of what each user wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from idiolect.data.dataset import Dataset, default_decoding
from idiolect.data.parquet import class_names, open_parquet
from idiolect.data.text.corpus import Stream, sentences, streams
from idiolect.errors import ConfigError, DataError


def reviews(
    files: list[Path],
    name: str,
    provenance: str,
    *,
    length: int = 200,
    vocabulary: int = 20_000,
    leave_out: tuple[str, ...] = (),
) -> Dataset:
    """Read texts with a label, one natural client for each source; `leave_out` names clients."""
    tables = [_read(file, ("text", "label", "client")) for file in files]
    columns = [_columns(table, ("text", "label", "client")) for table in tables]
    origins = [int(file.name.startswith("test")) for file in files]
    rows = [
        (text, label, str(client), origin)
        for (texts, labels, clients), origin in zip(columns, origins, strict=True)
        for text, label, client in zip(texts, labels, clients, strict=True)
        if str(client) not in leave_out
    ]
    present = sorted({str(client) for _, _, clients in columns for client in clients})
    for client in leave_out:
        if client not in present:
            raise ConfigError(
                f"leave_out names '{client}', and {name} has the clients {', '.join(present)}"
            )
    if not rows:
        raise DataError(f"{name} has no text left; leave out fewer clients")
    texts, labels, clients, origin = zip(*rows, strict=True)
    x, words = sentences(texts, length, vocabulary)
    found, codes = np.unique(clients, return_inverse=True)
    shift, scale = default_decoding(x)
    y = np.array(labels, np.int64)
    names = class_names(tables[0].schema, "label") or tuple(map(str, range(int(y.max()) + 1)))
    return Dataset(
        name=name,
        x=x,
        y=y,
        classes=names,
        shift=shift,
        scale=scale,
        clients=codes.astype(np.int64),
        client_names=tuple(str(client) for client in found),
        origin=np.array(origin, np.int64) if any(origin) else None,
        provenance=provenance,
        words=words,
        vocabulary=vocabulary,
    )


def products(
    files: list[Path],
    name: str,
    provenance: str,
    *,
    length: int = 200,
    vocabulary: int = 20_000,
    leave_out: tuple[str, ...] = ("phones_in",),
) -> Dataset:
    """Read reviews of the five products of the paper; `leave_out = []` keeps the sixth client."""
    return reviews(
        files, name, provenance, length=length, vocabulary=vocabulary, leave_out=leave_out
    )


def roles(
    files: list[Path],
    name: str,
    provenance: str,
    *,
    length: int = 20,
    vocabulary: int = 50_000,
) -> Dataset:
    """Read what each user wrote, for next-word prediction."""

    def users() -> Iterator[Stream]:
        for file in files:
            texts, clients = _columns(_read(file, ("text", "client")), ("text", "client"))
            held: dict[str, list[str]] = {}
            for text, client in zip(texts, clients, strict=True):
                held.setdefault(str(client), []).append(text)
            for client in sorted(held):
                yield Stream(client, held[client], int(file.name.startswith("test")))

    return streams(name, users(), length, vocabulary, provenance)


def _read(file: Path, wanted: tuple[str, ...]) -> Any:
    opened = open_parquet(file)
    missing = [column for column in wanted if column not in opened.schema_arrow.names]
    if missing:
        raise DataError(
            f"{file} has columns {', '.join(opened.schema_arrow.names)}; expected "
            f"{', '.join(wanted)}"
        )
    return opened.read(columns=list(wanted))


def _columns(table: Any, wanted: tuple[str, ...]) -> tuple[list[Any], ...]:
    return tuple(table[column].to_pylist() for column in wanted)
