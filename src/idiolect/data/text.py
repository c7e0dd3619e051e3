"""Text as tokens: labelled texts, what users wrote for next-word prediction, the vocabulary.

A corpus is first numbered by all of its words, those of test rows too, so no network sees it:
`federate` encodes it by the most frequent words of the training rows.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from idiolect.data.dataset import AnyArray, Dataset, Rows
from idiolect.errors import ConfigError, DataError

SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>")
PAD, UNK, BOS, EOS = range(len(SPECIAL))
"""Filling behind a text's end; a word outside the vocabulary; where a text begins, and ends."""

# A word is letters or digits, with apostrophes inside it; a mark of punctuation is one too.
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*|[.,!?;:]")

_BLOCK = 65536  # rows counted at a time

Tokens = str | Sequence[str]
"""A text, or words that were parted already."""


class UserText(NamedTuple):
    """What one user wrote, in its order; `origin` 1 says that it is from a test file."""

    user: str
    texts: Iterable[Tokens]
    origin: int = 0


def for_pretraining(user: str) -> bool:
    """Say whether a user's text is dealt to pretraining (half are), and not to studies, by name.

    So a base never saw a word of the users whom a study of it is about.
    """
    return hashlib.sha256(user.encode()).digest()[0] % 2 == 0


def tokenise(text: str) -> list[str]:
    """Part a text into lower-case words and marks of punctuation; anything else is dropped."""
    return _WORD.findall(text.lower().replace("’", "'"))


class Lexicon:
    """All words of a corpus, numbered as they come; the special ones first."""

    def __init__(self) -> None:
        self._codes = {word: code for code, word in enumerate(SPECIAL)}

    def codes(self, words: Iterable[str]) -> list[int]:
        """Return the words' numbers, giving new ones to new words."""
        known = self._codes
        return [known.setdefault(word, len(known)) for word in words]

    @property
    def words(self) -> tuple[str, ...]:
        """The words in the order of their numbers."""
        return tuple(self._codes)


def padded(codes: Iterable[list[int]], rows: int, length: int) -> AnyArray:
    """Lay out token lists as [row, length]: what is longer is cut, what is shorter filled up."""
    x = np.full((rows, length), PAD, np.int32)
    for row, own in enumerate(codes):
        kept = own[:length]
        x[row, : len(kept)] = kept
    return x


def sentences(
    texts: Sequence[Tokens], length: int, vocabulary: int
) -> tuple[AnyArray, tuple[str, ...]]:
    """Return tokens [text, length] and the lexicon; longer texts are cut, shorter filled up."""
    _check(length, vocabulary)
    lexicon = Lexicon()
    codes = (lexicon.codes(_parted(text)) for text in texts)
    return padded(codes, len(texts), length), lexicon.words


def streams(
    name: str, users: Iterable[UserText], length: int, vocabulary: int, provenance: str = ""
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
    return next_word_dataset(
        name,
        np.concatenate(pieces),
        lexicon.words,
        np.array(clients, np.int64),
        tuple(names),
        vocabulary,
        np.array(origin, np.int64) if any(origin) else None,
        provenance,
    )


def next_word_dataset(
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
    return Dataset(
        name=name,
        x=tokens[:, :-1],
        y=y,
        classes=words,
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


def encoded(dataset: Dataset, train: Sequence[Rows]) -> Dataset:
    """Code a corpus by the most frequent words of the training rows; all others become <unk>.

    Ties are in the order of the alphabet. The vocabulary has dataset.vocabulary entries, or, where
    the training rows hold fewer words, as many as those, rounded up: so seeds nearly always have
    networks of one shape (`enlarged` sees to the rest). Entries without a word stay unused. Words
    of other rows have no say, not even in the size.
    """
    counts = np.zeros(len(dataset.words), np.int64)
    rows = np.concatenate(train) if len(train) else np.empty(0, np.int64)
    for start in range(0, len(rows), _BLOCK):
        held = _tokens(dataset, rows[start : start + _BLOCK])
        counts += np.bincount(held, minlength=len(counts))
    counts[: len(SPECIAL)] = 0
    size = min(dataset.vocabulary, _rounded(len(SPECIAL) + int(np.count_nonzero(counts))))
    seen = sorted((-int(counts[code]), dataset.words[code]) for code in np.flatnonzero(counts))
    chosen = [word for _, word in seen[: size - len(SPECIAL)]]
    return encoded_as(dataset, _filled((*SPECIAL, *chosen), size))


def enlarged(dataset: Dataset, size: int) -> Dataset:
    """Give a coded corpus a larger vocabulary, of entries that stay unused."""
    if len(dataset.words) >= size:
        return dataset
    words = _filled(tuple(w for w in dataset.words if not w.startswith("<unused ")), size)
    return replace(dataset, words=words, classes=words if dataset.sequential else dataset.classes)


def _filled(words: tuple[str, ...], size: int) -> tuple[str, ...]:
    return (*words, *(f"<unused {n}>" for n in range(size - len(words))))


def _rounded(count: int) -> int:
    """Round up, by an eighth at most; whole eights."""
    step = max(8, 1 << max(count.bit_length() - 4, 0))
    return -(-count // step) * step


def encoded_as(dataset: Dataset, words: tuple[str, ...]) -> Dataset:
    """Code text by a given vocabulary, that of a run say, or one of numbers that words hash to."""
    if words[: len(SPECIAL)] != SPECIAL:
        raise DataError(f"a vocabulary begins with {', '.join(SPECIAL)}; got {words[:4]}")
    if hashed(words):
        spare = len(words) - len(SPECIAL)
        others = [_number(word, spare) for word in dataset.words[len(SPECIAL) :]]
        table = np.array([*range(len(SPECIAL)), *others], np.int32)
    else:
        place = {word: code for code, word in enumerate(words)}
        table = np.array([place.get(word, UNK) for word in dataset.words], np.int32)
    coded = replace(dataset, x=table[dataset.x], words=words, vocabulary=0)
    if not dataset.sequential:
        return coded
    y = np.where(dataset.y < 0, np.int32(-1), table[dataset.y])
    return replace(coded, y=y, classes=words)


def hashed_words(size: int) -> tuple[str, ...]:
    """Return a vocabulary of so many entries that are numbers, not words.

    A word's entry follows from its letters alone, so those who hold different texts number words
    alike without telling each other any. Words that fall on one entry are one to a network.
    """
    return (*SPECIAL, *(f"<#{n}>" for n in range(size - len(SPECIAL))))


def hashed(words: Sequence[str]) -> bool:
    """Say whether a vocabulary is one of numbers."""
    return len(words) > len(SPECIAL) and words[len(SPECIAL)] == "<#0>"


def _number(word: str, spare: int) -> int:
    digest = hashlib.sha256(word.encode()).digest()
    return len(SPECIAL) + int.from_bytes(digest[:8], "big") % spare


def frequent_words(dataset: Dataset, size: int) -> list[str]:
    """List the most frequent words of a whole corpus, for others to number theirs by."""
    whole = replace(dataset, vocabulary=size + len(SPECIAL))
    chosen = encoded(whole, [np.arange(len(dataset))]).words[len(SPECIAL) :]
    return [word for word in chosen if not word.startswith("<unused ")]


def _tokens(dataset: Dataset, rows: Rows) -> AnyArray:
    """All words of some rows, each once: of a sequence y holds the same words but the first."""
    if not dataset.sequential:
        return np.asarray(dataset.x[rows]).reshape(-1)
    y = dataset.y[rows]
    return np.concatenate([np.asarray(dataset.x[rows, 0]), y[y >= 0]])
