"""Sub-word tokenisers of the `tokenizers` library: read from a file, known by a digest, trained.

A tokeniser belongs to a pretrained network: token numbers mean nothing without it. So data that was
coded by one keeps it (`Dataset.tokeniser`), and a network that was pretrained with another one is
refused.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from idiolect.core.vocabulary import END, padding_token
from idiolect.errors import DataError

SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>")
"""The first tokens of every vocabulary that is made here; see `text`."""

EMBEDDED = "embedded"
"""The name of the tokeniser, and of the small pretrained decoder, that come with idiolect."""

FILE = "tokenizer.json"
_LARGEST = 1 << 26  # bytes of a file; those of large public models have some ten million


def embedded_base() -> Path:
    """Return the folder of the pretrained decoder that comes with idiolect."""
    return Path(str(resources.files("idiolect.data").joinpath("embedded/decoder")))


@dataclass(frozen=True)
class Tokeniser:
    """A tokeniser by its `tokenizer.json`."""

    json: str  # the file's content
    source: str = "the tokeniser"  # for messages

    @classmethod
    def load(cls, where: str | Path) -> "Tokeniser":
        """Read a `tokenizer.json`, that of a model's folder, or the embedded one."""
        path = embedded_base() if str(where) == EMBEDDED else Path(where).expanduser()
        file = path / FILE if path.is_dir() else path
        if not file.is_file():
            raise DataError(
                f"tokeniser {file} does not exist; expected a {FILE}, a folder that holds one, or "
                f"'{EMBEDDED}'"
            )
        if file.stat().st_size > _LARGEST:
            raise DataError(f"tokeniser {file} has more than {_LARGEST >> 20} MiB; it is none")
        try:
            found = cls(file.read_text(encoding="utf-8"), str(file))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"tokeniser {file} cannot be read ({error}); fetch it again") from error
        found.model  # noqa: B018  a file that is none is refused here, not at the first text
        return found

    @cached_property
    def model(self) -> Any:
        """The library's tokeniser, without cutting or filling up, which are ours."""
        library = _library()
        try:
            json.loads(self.json)
            made = library.Tokenizer.from_str(self.json)
        except Exception as error:  # the library raises plain `Exception`
            raise DataError(
                f"{self.source} is no tokeniser of the tokenizers library ({error}); expected its "
                f"{FILE}"
            ) from error
        made.no_truncation()
        made.no_padding()
        return made

    @property
    def digest(self) -> str:
        """The sha256 of what it does: its JSON without layout, truncation and padding."""
        held = json.loads(self.json)
        for option in ("truncation", "padding"):
            held.pop(option, None)
        return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The tokens in the order of their numbers."""
        size: int = self.model.get_vocab_size(with_added_tokens=True)
        named = [self.model.id_to_token(place) for place in range(size)]
        return tuple(f"<{n}>" if one is None else str(one) for n, one in enumerate(named))

    def _first(self, *names: str) -> int | None:
        found = (self.model.token_to_id(name) for name in names)
        return next((place for place in found if place is not None), None)

    @cached_property
    def begin(self) -> int | None:
        """The token that stands before a text; None where there is none."""
        return self._first("<bos>", "<s>", "<|begin_of_text|>", "[CLS]", "<|endoftext|>")

    @cached_property
    def end(self) -> int | None:
        """The token that stands behind a text; None where there is none."""
        return self._first(*END)

    @cached_property
    def pad(self) -> int:
        """The token behind a text's end: its own, else that of the end, else the first."""
        return padding_token(self.words)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, without those of beginning and end."""
        found = self.model.encode_batch(list(texts), add_special_tokens=False)
        return [list(one.ids) for one in found]

    def framed(self, text: Sequence[int]) -> list[int]:
        """Put the tokens of a text between those of beginning and end, where there are such."""
        before = [] if self.begin is None else [self.begin]
        after = [] if self.end is None else [self.end]
        return [*before, *text, *after]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self.model.decode(list(tokens)))


def as_tokeniser(given: "str | Tokeniser") -> Tokeniser | None:
    """Return a tokeniser, reading it where its place is given; None for no tokeniser."""
    return given if isinstance(given, Tokeniser) else Tokeniser.load(given) if given else None


def refuse_other_tokeniser(
    own: Tokeniser | None, expected: Tokeniser | None, data: str, whose: str
) -> None:
    """Refuse data that was coded by another tokeniser than a network's: its numbers mean others."""
    digests = ["words" if one is None else one.digest[:12] for one in (own, expected)]
    if digests[0] != digests[1]:
        raise DataError(
            f"the text of {data} was coded by {_said(digests[0])} and {whose} has "
            f"{_said(digests[1])}; read the data with that one (data.options.tokeniser)"
        )


def _said(digest: str) -> str:
    return "a list of words" if digest == "words" else f"the tokeniser with sha256 {digest}..."


def train_tokeniser(texts: Iterable[str], size: int) -> Tokeniser:
    """Train byte-level byte-pair encoding of so many tokens; any text has tokens, none is lost."""
    library = _library()
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return Tokeniser(made.to_str())


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise DataError(
            "sub-word tokens need the tokenizers library; install idiolect with it: "
            "pip install 'idiolect[text]'"
        ) from error
    return tokenizers
