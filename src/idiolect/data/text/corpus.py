"""A corpus as tokens of its own lexicon: sentences with a label, or streams of words by user.

What is made here holds every word of the corpus, those of test rows too, so no network sees it:
`federate` codes it anew by the vocabulary of the training rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from idiolect.data.arrays import AnyArray, Rows
from idiolect.data.dataset import Dataset, default_decoding
from idiolect.data.text.words import BOS, EOS, PAD, SPECIAL, Lexicon, padded, tokenise
from idiolect.errors import ConfigError, DataError

Tokens = str | Sequence[str]
"""A text, or words that were parted already."""


class Stream(NamedTuple):
    """What one user wrote, in its order; `origin` 1 says that it is from a test file."""

    user: str
    texts: Iterable[Tokens]
    origin: int = 0


def sentences(
    texts: Sequence[Tokens], length: int, vocabulary: int
) -> tuple[AnyArray, tuple[str, ...]]:
    """Return tokens [text, length] and the lexicon; longer texts are cut, shorter filled up."""
    _check(length, vocabulary)
    lexicon = Lexicon()
    codes = (lexicon.codes(_parted(text)) for text in texts)
    return padded(codes, len(texts), length), lexicon.words


def streams(
    name: str, users: Iterable[Stream], length: int, vocabulary: int, provenance: str = ""
) -> Dataset:
    """Lay out what users wrote for next-word prediction, one natural client each.

    A user's texts, each between <bos> and <eos>, are one stream, cut into rows of length + 1 words
    without overlap: x is the first `length`, y the last. So no word of a row, as input or as label,
    is in another one, and dividing rows divides words. The last row is filled up.
    """
    _check(length, vocabulary)
    lexicon = Lexicon()
    pieces: list[AnyArray] = []
    names: dict[str, int] = {}
    clients: list[int] = []
    origin: list[int] = []
    for stream in users:
        codes: list[int] = []
        for text in stream.texts:
            codes += [BOS, *lexicon.codes(_parted(text)), EOS]
        if len(codes) <= 2:
            continue  # not one word to predict
        rows = -(-len(codes) // (length + 1))
        filled = np.full(rows * (length + 1), PAD, np.int32)
        filled[: len(codes)] = codes
        own = filled.reshape(rows, length + 1)
        # A last row of a single word has nothing to predict.
        own = own[: rows - 1] if rows > 1 and own[-1, 1] == PAD else own
        pieces.append(own)
        clients += [names.setdefault(stream.user, len(names))] * len(own)
        origin += [stream.origin] * len(own)
    if not pieces:
        raise DataError(f"{name} has no text; expected at least one user who wrote a few words")
    return pooled(
        name,
        np.concatenate(pieces),
        lexicon.words,
        np.array(clients, np.int64),
        tuple(names),
        vocabulary,
        np.array(origin, np.int64) if any(origin) else None,
        provenance,
    )


def pooled(
    name: str,
    tokens: AnyArray,
    words: tuple[str, ...],
    clients: Rows,
    names: tuple[str, ...],
    vocabulary: int,
    origin: Rows | None = None,
    provenance: str = "",
) -> Dataset:
    """Make a next-word dataset of rows [row, length + 1] of tokens: y is x one word later."""
    y = tokens[:, 1:].copy()
    y[y == PAD] = -1
    shift, scale = default_decoding(tokens)
    return Dataset(
        name=name,
        x=tokens[:, :-1],
        y=y,
        classes=words,
        shift=shift,
        scale=scale,
        clients=clients,
        client_names=names,
        origin=origin,
        provenance=provenance,
        words=words,
        vocabulary=vocabulary,
    )


def _parted(text: Tokens) -> Sequence[str]:
    return tokenise(text) if isinstance(text, str) else text


def _check(length: int, vocabulary: int) -> None:
    if length < 1:
        raise ConfigError(f"length is {length}, expected 1 or more words in an example")
    if vocabulary <= len(SPECIAL):
        raise ConfigError(
            f"vocabulary is {vocabulary}, expected more than the {len(SPECIAL)} of "
            f"{', '.join(SPECIAL)}"
        )
