"""The protocol of server and nodes: messages and the codes of refusals.

A message is named tensors and a little JSON in one safetensors blob: no pickle, nothing inferred.
Both sides know the structure a tree must have (names, shapes, types) from the method itself, and
refuse anything else before it is used. Of a failure one side gets a code only; texts of errors,
paths and data stay in the log of the side where they arose.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.core.tree import Tree
from idiolect.errors import DeployError

POLICY_LIMITS = {
    "min_sites": "a run of so few sites",
    "min_cohort": "rounds with so few sites",
    "min_batch": "gradient steps on so few rows",
    "min_steps": "reports of so few gradient steps",
    "min_examples": "reports with so few training rows behind them",
    "min_scored": "scores of so few validation or test rows",
    "require_privacy": 'a method without differential privacy (aggregate = "dp")',
    "max_epsilon": "a run that spends so much epsilon",
    "methods": "a method of the experiment",
    "max_rounds": "so many rounds",
    "max_seeds": "so many seeds",
    "max_reports": "so many reports or scorings in a run",
    "max_runs": "so many runs in a day",
    "submitters": "runs of whoever submitted it",
    "budget_epsilon": "so much epsilon over all runs",
    "describe": "statistics before training",
    "min_cell": "statistics of so few rows",
}
"""The limits of a site's policy (`site_policy`), and what a run beyond each of them asks for."""

CODES = {
    # What a site allows.
    **{
        name: f"its site's policy does not allow {what} ({name})"
        for name, what in POLICY_LIMITS.items()
    },
    "hours": "its site takes part at other hours (hours)",
    "approval": "a person at its site has not said yes to the run yet (idiolect node approve)",
    "declined": "a person at its site said no to the run",
    "submitter": "the run is not signed by whoever is said to have submitted it",
    # About messages.
    "format": "the message cannot be read",
    "protocol": "the message is of another protocol; install the same idiolect on both sides",
    "size": "the message is larger than the limit (deploy.limit_mb)",
    "structure": "the message lacks a tensor, or has one too many",
    "shape": "a tensor of the message has another shape than the method's",
    "dtype": "a tensor of the message has another type than the method's",
    "nonfinite": "the message holds NaN or infinity",
    "sizes": "its report states other numbers of examples than it stated when joining",
    "statistics": "it sent statistics of its data that cannot be right",
    "round": "the message is of another round, run or sender than the one at hand",
    "identity": "the message is not signed by the expected member, or is not for its receiver",
    "replay": "the message was received before",
    "ahead": "it has done more rounds of this run than the server knows of",
    "revoked": "its certificate, or the lead's, was revoked by whoever made the kits (federation "
    "revoke)",
    "conflict": "another message for the same round was answered before",
    "keys": "keys, shares or survivors of the secure sum do not fit; its log says which",
    "summed": "its report was masked for another sum before, and is not given to a second one",
    "range": "its report is too large for the sum under masks; lower lr or set clip",
    "closed": "the node was started anew and must be sent the experiment again",
    # About joining.
    "version": "it runs a version of idiolect that does not fit; install the same on all sides",
    "method": "its copy of the method differs; install the same idiolect on all sides",
    "experiment": "it cannot run this experiment; its log says why",
    "model": "it cannot build the network; its log says why",
    "data": "its data is missing, cannot be read or not be divided as asked; its log says why",
    "classes": "its labels do not fit the classes that the experiment declares",
    "columns": "a column of its table does not fit the other sites'; its console says which",
    "words": "its data is text, and the experiment has no [data.text] that numbers words alike",
    "open": "its site takes part only under masks (require_secure or --secure); set deploy.secure",
    "newcomer": "it was asked for a report in a run that is over, where only its scores may leave",
    "owner": "it holds state of this run for someone else than who submitted it",
    "busy": "another process is working with its personal state",
    # About work.
    "diverged": "its training produced NaN or infinity",
    "memory": "it ran out of memory",
    "disk": "it cannot write to its disk",
    "state": "its personal state is damaged or belongs to another method",
    "crashed": "its training process ended unexpectedly",
    "failed": "it failed for a reason that its log tells",
    # Found by the side that waits.
    "timeout": "it did not answer in time",
    "unreachable": "it cannot be reached",
    "excluded": "too many of its answers were refused (deploy.patience)",
}
"""Each code with what it means to whoever reads the other side's log."""


class Refused(DeployError):
    """A message or a task that cannot be accepted: a code to send, and words for the own log."""

    def __init__(self, reason: str, words: str = "") -> None:
        if reason not in CODES:
            raise ValueError(f"{reason!r} is no code")
        self.reason = reason
        super().__init__(words or CODES[reason])


PROTOCOL = 1
MOST_EXCHANGED = 100_000  # numbers of a final exchange, which are text in the head
LIMIT = 256 << 20  # bytes of a message by default
_LONGEST_WORDS = 200  # letters of what a person says to a lead
_KEY = "m"  # where the head stands in the safetensors header
_HEAD_LIMIT = 4 << 20  # the experiment's text and one line for each leaf


class Message(NamedTuple):
    """A kind, the head (plain JSON) and the tensors by name; nothing in it is trusted."""

    kind: str
    head: dict[str, Any]
    leaves: dict[str, Tensor]

    def field(self, key: str, kind: type[Any]) -> Any:
        """Return a field of the expected type; a bool is no int here."""
        value: Any = self.head.get(key)
        if type(value) is not kind or (type(value) is int and not 0 <= value < 1 << 62):
            raise Refused("format", f"{key} is {type(value).__name__}, expected {kind.__name__}")
        return value

    def about(self) -> tuple[str, int, int]:
        """Return the label, the seed and the round."""
        return self.field("label", str), self.field("seed", int), self.field("round", int)

    def sum_id(self) -> tuple[Any, ...]:
        """Return the name of the secure sum."""
        words = (self.field(key, str) for key in ("run", "label", "of", "sum"))
        return *words, *(self.field(key, int) for key in ("seed", "round"))

    def names(self, key: str) -> list[str]:
        """Return a list of different names, in order."""
        names = self.field(key, list)
        if not all(isinstance(one, str) for one in names) or names != sorted(set(names)):
            raise Refused("format", f"{key} is no list of different names")
        return list(names)

    def sample(self) -> int:
        """Return the number of the public sample: the round's, unless stated."""
        return int(self.field("sample" if "sample" in self.head else "round", int))

    def bound(self) -> float:
        """Return the norm to which updates are clipped before a secure sum; 0: none are."""
        bound = self.head.get("bound", 0.0)
        if type(bound) is not float or not math.isfinite(bound) or bound < 0:
            raise Refused("format", f"updates cannot be shortened to {bound}")
        return bound


class Codec(Protocol):
    """A reversible change of named tensors on their way: compression, masks."""

    name: str

    def encode(self, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what is put into the message."""

    def decode(self, leaves: dict[str, Tensor], form: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the receiver sees; `form` has the names, shapes and types it expects."""


class Uncompressed:
    """Tensors travel as they are, bit for bit."""

    name = "plain"

    def encode(self, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        """Change nothing."""
        return leaves

    def decode(self, leaves: dict[str, Tensor], form: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Change nothing."""
        return leaves


UNCOMPRESSED = Uncompressed()


def pack(
    kind: str,
    head: Mapping[str, Any] | None = None,
    content: Tree = (),
    codec: Codec = UNCOMPRESSED,
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


def peek(blob: bytes) -> tuple[str, dict[str, Any]]:
    """Return kind and head of a message without reading its tensors; empty where it has none."""
    try:
        length = int.from_bytes(blob[:8], "little")
        if not 0 < length <= min(len(blob) - 8, _HEAD_LIMIT):
            return "", {}
        _, kind, head = json.loads(json.loads(blob[8 : 8 + length])["__metadata__"][_KEY])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "", {}
    return (kind, head) if isinstance(kind, str) and isinstance(head, dict) else ("", {})


def refusal(reason: str, words: str = "") -> bytes:
    """Pack the answer "no" with a code; with words only where a person wrote them to be told."""
    return pack("no", {"code": reason, **({"words": words[:_LONGEST_WORDS]} if words else {})})


def accepted(message: Message) -> Message:
    """Return an answer unless it is a refusal, which is raised."""
    if message.kind == "no":
        reason, words = message.head.get("code"), message.head.get("words")
        reason = reason if isinstance(reason, str) and reason in CODES else "format"
        if reason == "declined" and isinstance(words, str):
            said = "".join(c for c in words[:_LONGEST_WORDS] if c.isprintable())
            raise Refused(reason, f"{CODES[reason]}: {said}")
        raise Refused(reason)
    if message.kind != "yes":
        raise Refused("format", "neither yes nor no")
    return message


def fitted(form: Tree, leaves: dict[str, Tensor], codec: Codec = UNCOMPRESSED) -> Tree:
    """Return named tensors as a tree of the expected structure; refuse any other."""
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


def read_shares(message: Message, names: Sequence[str], width: int) -> dict[str, bytes]:
    """Read bytes for every name: the rows of the tensor `shares`, in the order of the names."""
    found = message.leaves.get("shares")
    if found is None or len(message.leaves) != 1 or found.dtype != torch.uint8:
        raise Refused("structure", "expected shares and nothing else")
    if found.shape != (len(names), width):
        raise Refused("shape", f"{tuple(found.shape)} shares, expected {(len(names), width)}")
    return {name: row.numpy().tobytes() for name, row in zip(names, found, strict=True)}


def write_shares(
    names: Sequence[str], content: Mapping[str, bytes], width: int
) -> dict[str, Tensor]:
    """Write bytes for every name as `rows_in` reads them; zeros where there are none."""
    whole = b"".join(content.get(name, bytes(width)) for name in names)
    return {"shares": torch.frombuffer(bytearray(whole), dtype=torch.uint8).view(-1, width)}


def digest(*parts: bytes) -> str:
    """Shorten bytes to a digest."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:32]
