"""Text: words, the corpus as tokens, and the vocabulary that the training rows give."""

from idiolect.data.text.corpus import sentences, streams
from idiolect.data.text.vocabulary import (
    encoded,
    encoded_as,
    enlarged,
    frequent_words,
    hashed_words,
)
from idiolect.data.text.words import BOS, EOS, PAD, SPECIAL, UNK, tokenise

__all__ = [
    "BOS",
    "EOS",
    "PAD",
    "SPECIAL",
    "UNK",
    "encoded",
    "encoded_as",
    "enlarged",
    "frequent_words",
    "hashed_words",
    "sentences",
    "streams",
    "tokenise",
]
