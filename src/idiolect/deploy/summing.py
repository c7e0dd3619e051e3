"""The hub's side of secure aggregation: relays keys, gathers masked reports, adds them up."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from idiolect.deploy import masks
from idiolect.deploy.codes import Refused
from idiolect.deploy.wire import Message
from idiolect.errors import DeployError
from idiolect.method import Report

_ATTEMPTS = 3  # at a sum, each without the nodes that were lost in the one before


class Ask(Protocol):
    """How the hub asks some clients for the round at hand, and reads what they answer."""

    def __call__(
        self,
        kind: str,
        clients: Sequence[int],
        more: Mapping[str, Any],
        read: Callable[[int, Message], Any],
    ) -> dict[int, Any]:
        """Return what was read, of each client whose answer was in order."""


def summed(ask: Ask, clients: Sequence[int], form: Report) -> tuple[list[int], Report]:
    """Return who is in the sum, and the sum as the report of one client."""
    count = masks.length(form)

    def masked(client: int, message: Message) -> Tensor:
        found = message.leaves.get("masked")
        if found is None or len(message.leaves) != 1:
            raise Refused("structure", "expected masked numbers and nothing else")
        if found.dtype != torch.int64:
            raise Refused("dtype", f"masked numbers are {found.dtype}, expected int64")
        if found.shape != (count,):
            raise Refused("shape", f"{tuple(found.shape)} masked numbers, expected {count}")
        return found

    for attempt in range(_ATTEMPTS):
        keys = ask("keys", clients, {"attempt": attempt}, _key)
        masks.refuse_small(len(keys))
        everyone = sorted(keys.values())
        parts = ask("mask", sorted(keys), {"attempt": attempt, "keys": everyone}, masked)
        if parts.keys() == keys.keys():
            return sorted(parts), masks.mean(masks.added(parts), form)
    raise DeployError(f"{_ATTEMPTS} sums under masks in a row each lost a node")


def _key(client: int, message: Message) -> str:
    key = message.head.get("key")
    if not isinstance(key, str) or len(key) != 64 or not set(key) <= set("0123456789abcdef"):
        raise Refused("format", "no public key")
    return key
