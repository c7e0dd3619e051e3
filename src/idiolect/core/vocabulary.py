"""Tokens that have a meaning of their own, by the names that vocabularies give them."""

from collections.abc import Sequence

PADDING = ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>")
END = ("<eos>", "</s>", "<|end_of_text|>", "[SEP]", "<|endoftext|>")


def padding_token(words: Sequence[str]) -> int:
    """Return the token behind a text's end: its own, else that of the end, else the first."""
    return next((words.index(name) for name in (*PADDING, *END) if name in words), 0)
