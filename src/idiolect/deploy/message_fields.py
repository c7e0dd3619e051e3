"""What a node reads in the head of a message, trusting nothing in it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from idiolect.deploy.refusals import Refused
from idiolect.deploy.wire import Message


def get(head: dict[str, Any], key: str, kind: type[Any]) -> Any:
    """Take a value of the expected kind out of a head; a bool is no int here."""
    value: Any = head.get(key)
    if type(value) is not kind or (type(value) is int and not 0 <= value < 1 << 62):
        raise Refused("format", f"{key} is {type(value).__name__}, expected {kind.__name__}")
    return value


def about(message: Message) -> tuple[str, int, int]:
    """Name the method, the seed and the round that a message is about."""
    head = message.head
    return get(head, "label", str), get(head, "seed", int), get(head, "round", int)


def sum_of(message: Message) -> tuple[Any, ...]:
    """Name the secure sum that a message is about."""
    head = message.head
    words = (get(head, key, str) for key in ("run", "label", "of", "sum"))
    return *words, *(get(head, key, int) for key in ("seed", "round"))


def names_in(message: Message, key: str) -> list[str]:
    """Read a list of different names, in order."""
    names = get(message.head, key, list)
    if not all(isinstance(one, str) for one in names) or names != sorted(set(names)):
        raise Refused("format", f"{key} is no list of different names")
    return list(names)


def rows_in(message: Message, names: Sequence[str], width: int) -> dict[str, bytes]:
    """Read bytes for every name: the rows of the tensor `shares`, in the order of the names."""
    found = message.leaves.get("shares")
    if found is None or len(message.leaves) != 1 or found.dtype != torch.uint8:
        raise Refused("structure", "expected shares and nothing else")
    if found.shape != (len(names), width):
        raise Refused("shape", f"{tuple(found.shape)} shares, expected {(len(names), width)}")
    return {name: row.numpy().tobytes() for name, row in zip(names, found, strict=True)}


def rows_of(names: Sequence[str], content: Mapping[str, bytes], width: int) -> dict[str, Tensor]:
    """Write bytes for every name as `rows_in` reads them; zeros where there are none."""
    whole = b"".join(content.get(name, bytes(width)) for name in names)
    return {"shares": torch.frombuffer(bytearray(whole), dtype=torch.uint8).view(-1, width)}


def sample_of(message: Message) -> int:
    """Read the number of the public sample: the round's, where nothing else is said."""
    return int(get(message.head, "sample" if "sample" in message.head else "round", int))


def bound_of(message: Message) -> float:
    """Read to which norm updates are to be shortened before they are hidden; 0: none is."""
    bound = message.head.get("bound", 0.0)
    if type(bound) is not float or not math.isfinite(bound) or bound < 0:
        raise Refused("format", f"updates cannot be shortened to {bound}")
    return bound
