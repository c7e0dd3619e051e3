"""`[data.text]`: words that are numbered alike wherever text is, without anyone showing theirs."""

from collections import Counter
from pathlib import Path
from typing import Any

from idiolect.data import SOURCES, Dataset
from idiolect.data.text import SPECIAL, encoded_as, hashed_words
from idiolect.errors import ConfigError, DataError
from idiolect.experiment.schema import Data, Text


def listed(path: Path, where: str) -> tuple[str, ...]:
    """Read a list of words, one a line; those that stand for none (<pad>, ...) are left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{where}.words: {path} cannot be read ({type(error).__name__}); give a file with a "
            "word a line, or a number to hash words to"
        ) from error
    words = [line.strip() for line in lines if line.strip() and line.strip() not in SPECIAL]
    if not words:
        raise DataError(f"{where}.words: {path} holds no word")
    word, count = Counter(words).most_common(1)[0]
    if count > 1:
        raise DataError(f"{where}.words: {path} has {word!r} twice; each word needs one number")
    return tuple(words)


def vocabulary(text: Text) -> tuple[str, ...]:
    """Return what the numbers stand for."""
    if isinstance(text.words, int):
        return hashed_words(text.words)
    return (*SPECIAL, *text.words)


def reading(data: Data) -> dict[str, Any]:
    """Return the options that a source is read with: what [data.text] says goes first."""
    if data.text is None:
        return dict(data.options)
    own = {"length": data.text.length, "next_word": data.text.next_word}
    if data.source not in SOURCES:
        return {**data.options, **own}
    if any(own.values()):
        raise ConfigError(
            f"data.text has a length or next_word, which are for own text, and data.source is "
            f"{data.source!r}; give them in data.options, as far as the source has them"
        )
    return dict(data.options)


def coded(dataset: Dataset, text: Text | None) -> Dataset:
    """Number a corpus's words as was agreed; without an agreement they are numbered later."""
    if text is None:
        return dataset
    if not dataset.words:
        raise DataError(f"{dataset.name} holds no text, and data.text says how words are numbered")
    return encoded_as(dataset, vocabulary(text))
