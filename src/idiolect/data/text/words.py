"""From text to words, and the four words that are none."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from idiolect.data.arrays import AnyArray

SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>")
PAD, UNK, BOS, EOS = range(len(SPECIAL))
"""Filling behind a text's end; a word outside the vocabulary; where a text begins, and ends."""

# A word is letters or digits, with apostrophes inside it; a mark of punctuation is one too.
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*|[.,!?;:]")


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
