"""Messages: named tensors and a little JSON in one safetensors blob; no pickle, nothing inferred.

Both sides know the form a tree must have (names, shapes, types) from the method itself, and refuse
anything else before it is used. A `Codec` may stand between a tree and its bytes.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.core.tree import Tree
from idiolect.deploy.refusals import CODES, Refused

PROTOCOL = 1
LIMIT = 256 << 20  # bytes of a message, unless told otherwise

_KEY = "m"  # where the head stands in the safetensors header
_HEAD_LIMIT = 4 << 20  # the experiment's text and one line for each leaf


class Message(NamedTuple):
    """What kind, the head (plain JSON) and the tensors by name."""

    kind: str
    head: dict[str, Any]
    leaves: dict[str, Tensor]


class Codec(Protocol):
    """A reversible change of named tensors on their way: compression, masks."""

    name: str

    def encode(self, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what is put into the message."""

    def decode(self, leaves: dict[str, Tensor], form: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the receiver sees; `form` has the names, shapes and types it expects."""


class Plain:
    """Tensors travel as they are, bit for bit."""

    name = "plain"

    def encode(self, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        """Change nothing."""
        return leaves

    def decode(self, leaves: dict[str, Tensor], form: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Change nothing."""
        return leaves


PLAIN = Plain()


def pack(
    kind: str, head: Mapping[str, Any] | None = None, content: Tree = (), codec: Codec = PLAIN
) -> bytes:
    """Write a message; equal messages are equal bytes."""
    from safetensors.torch import save

    named = tree.named(content)
    if len(named) != len(tree.leaves(content)):
        raise Refused("structure", "two leaves share a name; rename a key with a dot in it")
    leaves = codec.encode(
        {name: leaf.detach().to("cpu").contiguous() for name, leaf in named.items()}
    )
    # Copies, because safetensors refuses tensors that share memory, as views of a stack do.
    leaves = {name: leaf.clone() for name, leaf in leaves.items()}
    text = json.dumps([PROTOCOL, kind, head or {}], separators=(",", ":"), sort_keys=True)
    return bytes(save(leaves, metadata={_KEY: text}))


def unpack(blob: bytes, limit: int = LIMIT) -> Message:
    """Read a message, trusting nothing in it."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    if not isinstance(blob, bytes):
        raise Refused("format", f"expected bytes, got {type(blob).__name__}")
    if len(blob) > limit:
        raise Refused("size", f"a message of {len(blob):,} bytes; the limit is {limit:,}")
    try:
        length = int.from_bytes(blob[:8], "little")
        if not 0 < length <= min(len(blob) - 8, _HEAD_LIMIT):
            raise Refused("format", f"a header of {length} bytes")
        header = json.loads(blob[8 : 8 + length])
        protocol, kind, head = json.loads(header["__metadata__"][_KEY])
        if protocol != PROTOCOL:
            raise Refused("protocol", f"protocol {protocol!r}, expected {PROTOCOL}")
        if not isinstance(kind, str) or not isinstance(head, dict):
            raise Refused("format", "a head of another form")
        return Message(kind, head, load(blob))
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused("format", f"unreadable: {type(error).__name__}") from error


def refusal(reason: str) -> bytes:
    """Write the answer that says no, and why in one word."""
    return pack("no", {"code": reason})


def accepted(message: Message) -> Message:
    """Pass an answer on unless it says no."""
    if message.kind == "no":
        reason = message.head.get("code")
        raise Refused(reason if isinstance(reason, str) and reason in CODES else "format")
    if message.kind != "yes":
        raise Refused("format", "neither yes nor no")
    return message


def fitted(form: Tree, leaves: dict[str, Tensor], codec: Codec = PLAIN) -> Tree:
    """Give named tensors the expected form, or say in which they differ."""
    expected = tree.named(form)
    leaves = codec.decode(leaves, expected)
    if foreign := sorted(set(leaves) ^ set(expected)):
        found = "unexpected" if foreign[0] in leaves else "missing"
        raise Refused("structure", f"tensor {foreign[0]!r} is {found}")
    for name, leaf in expected.items():
        own = leaves[name]
        if own.dtype != leaf.dtype:
            raise Refused("dtype", f"{name} is {own.dtype}, expected {leaf.dtype}")
        if own.shape != leaf.shape:
            raise Refused("shape", f"{name} is {tuple(own.shape)}, expected {tuple(leaf.shape)}")
    return tree.like(form, leaves)


def refuse_nonfinite(content: Tree, form: Tree = None) -> None:
    """Refuse NaN and infinity; where the form itself starts with some, they mean "not yet"."""
    starts = tree.named(form) if form is not None else {}
    for name, leaf in tree.named(content).items():
        if not leaf.is_floating_point() and not leaf.is_complex():
            continue
        if name in starts and not bool(torch.isfinite(starts[name]).all()):
            continue
        if not bool(torch.isfinite(leaf).all()):
            raise Refused("nonfinite", f"{name} holds NaN or infinity")
