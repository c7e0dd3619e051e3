"""What a node reads in the head of a message, trusting nothing in it."""

import math
from typing import Any

from idiolect.deploy.codes import Refused
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
    """Name the sum that a key is for."""
    head = message.head
    words = (get(head, key, str) for key in ("run", "label", "of"))
    return *words, *(get(head, key, int) for key in ("seed", "round", "attempt"))


def bound_of(message: Message) -> float:
    """Read to which norm updates are to be shortened before they are hidden; 0: none is."""
    bound = message.head.get("bound", 0.0)
    if type(bound) is not float or not math.isfinite(bound) or bound < 0:
        raise Refused("format", f"updates cannot be shortened to {bound}")
    return bound
