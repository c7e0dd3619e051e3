"""The words a network knows: the most frequent ones of the training rows, and of no others."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from idiolect.data.arrays import AnyArray, Rows
from idiolect.data.dataset import Dataset
from idiolect.data.text.words import SPECIAL, UNK
from idiolect.errors import DataError

_BLOCK = 65536  # rows counted at a time


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
    """Return a vocabulary of so many entries that nobody has to know a word for.

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
