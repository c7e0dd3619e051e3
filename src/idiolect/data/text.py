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
from idiolect.data.tokenisers import SPECIAL as SPECIAL
from idiolect.data.tokenisers import Tokeniser
from idiolect.errors import ConfigError, DataError

PAD, UNK, BOS, EOS = range(len(SPECIAL))
"""Filling behind a text's end; a word outside the vocabulary; where a text begins, and ends."""

# A word is letters or digits, with apostrophes inside it; a mark of punctuation is one too.
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*|[.,!?;:]")

_BLOCK = 65536  # rows counted at a time


class Chat(NamedTuple):
    """A conversation: what is said in turn, and whether a network is to learn to say it."""

    parts: tuple[tuple[str, bool], ...]


Tokens = str | Sequence[str] | Chat
"""A text, words that were parted already, or a conversation."""


class UserText(NamedTuple):
    """What one user wrote, in its order; `origin` 1 says that it is from a test file."""

    user: str
    texts: Iterable[Tokens]
    origin: int = 0


def dealt(user: str) -> str:
    """Deal a user, by name alone: half to pretraining, the others to a study or its newcomers.

    So a base never saw a word of the users whom a study of it is about.
    """
    first, second = hashlib.sha256(user.encode()).digest()[:2]
    return "pretraining" if first % 2 == 0 else "newcomers" if second % 4 == 0 else "study"


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


def padded(codes: Iterable[Sequence[int]], rows: int, length: int, pad: int = PAD) -> AnyArray:
    """Lay out token lists as [row, length]: what is longer is cut, what is shorter filled up."""
    x = np.full((rows, length), pad, np.int32)
    for row, own in enumerate(codes):
        kept = own[:length]
        x[row, : len(kept)] = kept
    return x


def sentences(
    texts: Sequence[Tokens], length: int, vocabulary: int, tokeniser: Tokeniser | None = None
) -> "Coded":
    """Return tokens [text, length]; longer texts are cut, shorter filled up.

    A tokeniser's text stands between its marks of beginning and end; the end is not cut off.
    """
    _check(length, vocabulary)
    if tokeniser is not None:
        held = (_cut(tokeniser.framed(one), length) for one in tokeniser.encode(_plain(texts)))
        return Coded(padded(held, len(texts), length, tokeniser.pad), tokeniser.words, 0, tokeniser)
    lexicon = Lexicon()
    codes = (lexicon.codes(_parted(text)) for text in texts)
    x = padded(codes, len(texts), length)
    return Coded(x, lexicon.words, vocabulary)


class Coded(NamedTuple):
    """Texts as tokens, and what the tokens stand for: fields of a `Dataset`."""

    x: AnyArray
    words: tuple[str, ...]
    vocabulary: int
    tokeniser: Tokeniser | None = None

    def given_to(self, dataset: Dataset) -> Dataset:
        """Return a dataset that says what its tokens, these, stand for."""
        return replace(
            dataset, words=self.words, vocabulary=self.vocabulary, tokeniser=self.tokeniser
        )


def _cut(tokens: list[int], length: int) -> list[int]:
    return tokens if len(tokens) <= length else [*tokens[: length - 1], tokens[-1]]


def _plain(texts: Sequence[Tokens]) -> list[str]:
    return [_whole(text) for text in texts]


def _whole(text: Tokens) -> str:
    if isinstance(text, Chat):
        return "".join(part for part, _ in text.parts)
    return text if isinstance(text, str) else " ".join(text)


class _Stream(NamedTuple):
    """All tokens of one user, and which of them are to be predicted."""

    codes: list[int]
    learnt: list[bool]


def streams(
    name: str,
    users: Iterable[UserText],
    length: int,
    vocabulary: int,
    provenance: str = "",
    tokeniser: Tokeniser | None = None,
) -> Dataset:
    """Lay out what users wrote for next-word prediction, one natural client each.

    A user's texts, each between <bos> and <eos>, are one stream, cut into rows of length + 1 words
    without overlap: x is the first `length`, y the last. So no word of a row, as input or as label,
    is in another one, and dividing rows divides words. The last row is filled up. With a tokeniser
    words are its tokens.
    """
    _check(length, vocabulary)
    lexicon = Lexicon()
    pieces: list[AnyArray] = []
    masks: list[AnyArray] = []
    names: dict[str, int] = {}
    clients: list[int] = []
    origin: list[int] = []
    pad = PAD if tokeniser is None else tokeniser.pad
    for user in users:
        stream = _stream(user.texts, lexicon, tokeniser)
        if len(stream.codes) <= 2 or not any(stream.learnt[1:]):
            continue  # not one word to predict
        rows = -(-len(stream.codes) // (length + 1))
        filled = np.full(rows * (length + 1), pad, np.int32)
        filled[: len(stream.codes)] = stream.codes
        mask = np.zeros(len(filled), bool)
        mask[: len(stream.learnt)] = stream.learnt
        mask = mask.reshape(rows, length + 1)[:, 1:]
        kept = mask.any(1)  # a row such as a last one of a single word has nothing to predict
        pieces.append(filled.reshape(rows, length + 1)[kept])
        masks.append(mask[kept])
        clients += [names.setdefault(user.user, len(names))] * int(kept.sum())
        origin += [user.origin] * int(kept.sum())
    if not pieces:
        raise DataError(f"{name} has no text; expected at least one user who wrote a few words")
    made = next_word_dataset(
        name,
        np.concatenate(pieces),
        lexicon.words if tokeniser is None else tokeniser.words,
        np.array(clients, np.int64),
        tuple(names),
        vocabulary if tokeniser is None else 0,
        np.array(origin, np.int64) if any(origin) else None,
        provenance,
        np.concatenate(masks),
    )
    return replace(made, tokeniser=tokeniser)


def _stream(texts: Iterable[Tokens], lexicon: Lexicon, tokeniser: Tokeniser | None) -> _Stream:
    """Put a user's texts one after the other, each between its marks."""
    codes: list[int] = []
    learnt: list[bool] = []
    for text in texts:
        parts = text.parts if isinstance(text, Chat) else ((text, True),)
        if tokeniser is None:
            coded = [lexicon.codes(_parted(part)) for part, _ in parts]
            before, after = [BOS], [EOS]
        else:
            coded = tokeniser.encode(_plain([part for part, _ in parts]))
            before = [] if tokeniser.begin is None else [tokeniser.begin]
            after = [] if tokeniser.end is None else [tokeniser.end]
        wanted = [own for _, own in parts]
        codes += [*before, *(one for part in coded for one in part), *after]
        # That a text begins after another is no word of the user, and sure: it would make a
        # perplexity look lower. (Of words it has always counted.)
        learnt += [tokeniser is None] * len(before)
        learnt += [own for part, own in zip(coded, wanted, strict=True) for _ in part]
        learnt += [wanted[-1]] * len(after)
    return _Stream(codes, learnt)


def next_word_dataset(
    name: str,
    tokens: AnyArray,
    words: tuple[str, ...],
    clients: Rows,
    names: tuple[str, ...],
    vocabulary: int,
    origin: Rows | None = None,
    provenance: str = "",
    predicted: AnyArray | None = None,
) -> Dataset:
    """Make a next-word dataset of rows [row, length + 1] of tokens: y is x one word later.

    `predicted` [row, length] says which of the y are labels; without it all but <pad>.
    """
    y = tokens[:, 1:].copy()
    y[~predicted if predicted is not None else y == PAD] = -1
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
    return tokenise(_whole(text)) if isinstance(text, str | Chat) else text


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
