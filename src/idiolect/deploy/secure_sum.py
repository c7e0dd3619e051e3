"""Secure sums of reports: the server's stages, a node's answers, and reports as integers.

The cryptographic protocol is in `secure_aggregation`.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from idiolect.aggregation.aggregator import Aggregated, Shortened, shorten
from idiolect.core import tree
from idiolect.core.capabilities import Averaging, has
from idiolect.core.method import Method, Report, Sent
from idiolect.core.tree import Tree
from idiolect.core.wrap import Wrapper
from idiolect.deploy.node_records import SumLog, report_digest
from idiolect.deploy.protocol import Message, Refused, read_shares, write_shares
from idiolect.deploy.secure_aggregation import (
    BOX,
    FEWEST,
    SHARE,
    Keys,
    Participant,
    Signer,
    threshold,
    unmasked,
)
from idiolect.engine.final_exchange import fair
from idiolect.errors import DeployError, IdiolectError, MethodError

SCALE = 2.0**32  # steps of a unit: the rounding error is far below float32's
_ROOM = 2.0**62  # bound of a sum, so that it never wraps


class SumFailed(DeployError):
    """A round without a sum: its reports were masked, for another sum."""


# The server's side.


class Ask(Protocol):
    """How the server asks some clients, and reads their answers."""

    def __call__(
        self,
        kind: str,
        clients: Sequence[int],
        more: Mapping[str, Any],
        read: Callable[[int, Message], Any],
        content: Mapping[int, Tree] | None = None,
    ) -> dict[int, Any]:
        """Return what was read, of each client whose answer was in order."""


def run_secure_sum(
    ask: Ask, context: Mapping[str, Any], clients: Sequence[int], sites: Sequence[str], form: Report
) -> tuple[list[int], Report]:
    """Return who is in the sum, and the sum as the report of one client.

    `context` names the run, label, seed and round, and what is summed; `sites[client]` is the name
    of a client's node.
    """
    head = {"sum": secrets.token_hex(16)}
    found = ask("keys", clients, head, lambda _, m: Keys.read(m.head.get("keys")))
    refuse_small(len(found))
    members = {sites[client]: keys for client, keys in found.items()}
    number = {sites[client]: client for client in found}
    order, needed = sorted(members), threshold(len(members))
    plain = {**head, "members": {name: list(keys) for name, keys in members.items()}}
    boxes = ask("shares", sorted(found), plain, lambda _, m: read_shares(m, order, BOX))
    _refuse_few(boxes, needed, "shared their secrets")
    sharing = sorted(sites[client] for client in boxes)
    try:
        # From here on reports leave their nodes: there is no second sum of them.
        own_boxes = {
            number[name]: write_shares(
                sharing, {source: boxes[number[source]][name] for source in sharing}, BOX
            )
            for name in sharing
        }
        count = _length(form)
        mask = {**head, "sharing": sharing}
        reports = ask("mask", sorted(boxes), mask, lambda _, m: _masked(m, count), own_boxes)
        _refuse_few(reports, needed, "sent their reports in time")
        survivors = sorted(sites[client] for client in reports)
        end: dict[str, Any] = {**head, "survivors": survivors}
        if any(keys.signature for keys in members.values()):
            signed = ask("confirm", sorted(reports), end, lambda _, m: str(m.head.get("signature")))
            end["signatures"] = {sites[client]: one for client, one in signed.items()}
        shares = ask("unmask", sorted(reports), end, lambda _, m: read_shares(m, sharing, SHARE))
        _refuse_few(shares, needed, "were there to take the masks off")
        # Named as nodes name it (`Message.sum_id`).
        words = [context[key] for key in ("run", "label", "of")]
        total = unmasked(
            (*words, head["sum"], context["seed"], context["round"]),
            members,
            {sites[client]: own for client, own in reports.items()},
            {sites[client]: own for client, own in shares.items()},
        )
    except SumFailed:
        raise
    except DeployError as error:
        raise SumFailed(str(error)) from error
    return sorted(reports), _mean(total, form)


def _refuse_few(found: Mapping[int, Any], needed: int, what: str) -> None:
    if len(found) < needed:
        raise DeployError(f"{len(found)} nodes {what}, {needed} needed for a secure sum")


def _masked(message: Message, count: int) -> np.ndarray:
    found = message.leaves.get("masked")
    if found is None or len(message.leaves) != 1:
        raise Refused("structure", "expected masked numbers and nothing else")
    if found.dtype != torch.int64:
        raise Refused("dtype", f"masked numbers are {found.dtype}, expected int64")
    if found.shape != (count,):
        raise Refused("shape", f"{tuple(found.shape)} masked numbers, expected {count}")
    return found.numpy().view(np.uint64)


# A node's side.


class _Sum(NamedTuple):
    participant: Participant
    report: Report
    digest: str


class NodeSums:
    """A node's part in secure sums: one at a time, and a report in one sum only."""

    def __init__(self, name: str, signer: Signer | None, home: Path, least: int) -> None:
        """`least`: members that the site's policy asks for."""
        self._name, self._signer = name, signer
        self._path, self._least = home / "sums.log", least
        self._log: SumLog | None = None
        self._sum: _Sum | None = None

    @property
    def log(self) -> SumLog:
        """The record of reports that were in sums, of this run and of others."""
        if self._log is None:
            self._log = SumLog(self._path)
        return self._log

    def begin(self, message: Message, report: Report) -> list[str]:
        """Begin the sum that a message names; return the keys for it."""
        self._sum = None
        # The same numbers, however many nodes there will be.
        digest = report_digest(fixed(report, FEWEST))
        self.log.check(digest)
        participant = Participant(message.sum_id(), self._name, self._signer)
        self._sum = _Sum(participant, report, digest)
        return list(participant.keys())

    def stage(self, message: Message) -> tuple[Tree, dict[str, Any]]:
        """Do a later stage of the sum; return the answer's content and fields."""
        at = self._sum
        if at is None or at.participant.context != message.sum_id():
            raise Refused("keys", "a message of a sum that this node has no part in")
        stages = {
            "shares": self._shares,
            "mask": self._mask,
            "confirm": self._confirm,
            "unmask": self._unmask,
        }
        return stages[message.kind](at, message)

    def _shares(self, at: _Sum, message: Message) -> tuple[Tree, dict[str, Any]]:
        """Share the secrets of this node's masks among the members of the sum."""
        plain = message.field("members", dict)
        members = {name: Keys.read(keys) for name, keys in plain.items()}
        self._refuse_small(len(members))
        self.log.check(at.digest, members)
        return write_shares(sorted(members), at.participant.shares(members), BOX), {}

    def _mask(self, at: _Sum, message: Message) -> tuple[Tree, dict[str, Any]]:
        """Return the report under masks, in one sum only."""
        sharing = message.names("sharing")
        self.log.check(at.digest, sharing)
        boxes = read_shares(message, sharing, BOX)
        boxes.pop(self._name, None)
        hidden = at.participant.masked(fixed(at.report, len(sharing)), boxes)
        self.log.masked(at.digest)
        return {"masked": torch.from_numpy(hidden.view("int64"))}, {}

    def _confirm(self, at: _Sum, message: Message) -> tuple[Tree, dict[str, Any]]:
        """Sign the survivors, so that the others see that all got the same list."""
        survivors = message.names("survivors")
        self._refuse_small(len(survivors))
        signature = at.participant.confirm(survivors)
        self.log.survived(at.digest, survivors)
        return (), {"signature": signature}

    def _unmask(self, at: _Sum, message: Message) -> tuple[Tree, dict[str, Any]]:
        """Reveal what takes the masks off the sum of the survivors, and off no other."""
        survivors = message.names("survivors")
        signatures = message.head.get("signatures", {})
        if not isinstance(signatures, dict) or not all(
            isinstance(one, str) for one in signatures.values()
        ):
            raise Refused("format", "signatures of another form")
        self._refuse_small(len(survivors))
        shares = at.participant.unmask(survivors, signatures)
        self.log.survived(at.digest, survivors)
        self._sum = None
        return write_shares(sorted(shares), shares, SHARE), {}

    def _refuse_small(self, members: int) -> None:
        """Refuse a sum of fewer sites than the site allows: their keys prove how many there are."""
        if members < self._least:
            words = f"a sum over {members} sites; min_cohort is {self._least}"
            raise Refused("min_cohort", words)


# Reports as integers.


def summand(numbers: Tree) -> Report:
    """Return what a node adds to the sum of a final exchange; zeros if out of range."""
    rows = tree.map(lambda leaf: leaf.unsqueeze(0), numbers)
    named = {name: leaf.double() for name, leaf in tree.named(numbers).items()}
    if not bool(fair(rows)):
        named = tree.zeros_like(named)
    return Report(named, torch.ones((), dtype=torch.float64))


def require_cryptography() -> Any:
    """Return the cryptography library, or say what to install."""
    try:
        import cryptography
    except ImportError:
        raise DeployError(
            "deploy.secure needs the library `cryptography`, which is not installed here; install "
            "it with `pip install 'idiolect[flare]'`"
        ) from None
    return cryptography


def refuse_unfit(label: str, method: Method) -> None:
    """Refuse methods whose server needs more than the sum of reports."""
    rule = rule_of(method)
    if rule is not None and not rule.by.shortens:
        raise MethodError(
            f"{label}: its rule ({rule.by.title}) looks at each report by itself (to sort or "
            "compare them), and under deploy.secure the server sees only their sum; leave out "
            "`aggregate` or deploy.secure"
        )
    if not has(method, Averaging):
        raise MethodError(
            f"{label} needs more of its nodes than the weighted mean of their parameters, and "
            "under deploy.secure the server sees only that; leave deploy.secure out, or choose a "
            "method such as fedavg, fedper or ditto"
        )


def rule_of(method: Method) -> Aggregated | None:
    """Return the aggregation rule of a method, behind other wrappers; None without one."""
    while isinstance(method, Wrapper):
        if isinstance(method, Aggregated):
            return method
        method = method.base
    return None


def contribution(method: Method, sent: Sent, report: Report, bound: float) -> Report:
    """Return what a node adds to the sum for its report: parameters and their weight.

    Where the server's rule would clip every update, the node does, and all weights are equal.
    """
    size = report.size.reshape(1)
    if rule_of(method) is None and has(method, Averaging):
        return Report(report.params, method.weights(size).reshape(report.size.shape))
    rows = tree.map(lambda leaf: leaf.unsqueeze(0), report.params)
    cut = shorten(sent.shared, rows, size, size.new_full((), bound))
    return Report(tree.map(lambda leaf: leaf[0], cut), torch.ones_like(report.size))


def contribution_form(method: Method, form: Report) -> Report:
    """Return the form of a contribution, given that of a report."""
    if rule_of(method) is None:
        return form
    cut: Any = Shortened(form.params, torch.zeros_like(form.size))
    return Report(cut, form.size)


def refuse_small(clients: int, kind: type[IdiolectError] = DeployError) -> None:
    """Refuse cohorts in which a member could compute another's report from the sum."""
    if clients < FEWEST:
        raise kind(
            f"a round of {clients} nodes under deploy.secure: {FEWEST} needed, as of two each "
            "would know the other's report from the sum"
        )


def fixed(report: Report, nodes: int) -> np.ndarray:
    """Return a report as integers modulo 2^64: its parameters times its size, then its size."""
    if not isinstance(report, Report):
        raise Refused("structure", "a report without parameters and size cannot be summed")
    size = report.size.double().reshape(1)
    parts = [(leaf.double() * size).reshape(-1) for _, leaf in _ordered(report)]
    values = torch.cat([*parts, size]).cpu().numpy() * SCALE
    if not np.all(np.abs(values) < _ROOM / nodes):
        raise Refused("range", "a value of the report is too large for the sum under masks")
    return np.rint(values).astype(np.int64).view(np.uint64)


def _mean(total: np.ndarray, form: Report) -> Report:
    """Return a sum as the report of one client: the weighted mean and the total size."""
    values = torch.from_numpy(total.view(np.int64).astype(np.float64)) / SCALE
    size, place, made = values[-1], 0, {}
    for name, leaf in _ordered(form):
        part = values[place : place + leaf.numel()] / size
        made[name] = part.reshape(leaf.shape).to(leaf.dtype)
        place += leaf.numel()
    return Report(tree.like(form.params, made), size.to(form.size.dtype).reshape(form.size.shape))


def _ordered(report: Report) -> list[tuple[str, Tensor]]:
    """Return leaves by name; a report read from disk may have another order."""
    return sorted(tree.named(report.params).items())


def _length(form: Report) -> int:
    """Return how many integers a report of this form is."""
    return sum(leaf.numel() for leaf in tree.leaves(form.params)) + 1
