"""The hub's side of secure aggregation: relays keys and shares, gathers masked reports, adds up."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from idiolect.core.method import Report
from idiolect.core.tree import Tree
from idiolect.deploy import fixed_point, shamir
from idiolect.deploy import secure_aggregation as secure
from idiolect.deploy.message_fields import rows_in, rows_of
from idiolect.deploy.refusals import Refused
from idiolect.deploy.wire import Message
from idiolect.errors import DeployError


class GivenUp(DeployError):
    """No sum of this round can be had any more: its reports were masked, for another sum."""


class Ask(Protocol):
    """How the hub asks some clients for the round at hand, and reads what they answer."""

    def __call__(
        self,
        kind: str,
        clients: Sequence[int],
        more: Mapping[str, Any],
        read: Callable[[int, Message], Any],
        content: Mapping[int, Tree] | None = None,
    ) -> dict[int, Any]:
        """Return what was read, of each client whose answer was in order."""


def summed(
    ask: Ask, context: Mapping[str, Any], clients: Sequence[int], sites: Sequence[str], form: Report
) -> tuple[list[int], Report]:
    """Return who is in the sum, and the sum as the report of one client.

    `context` names the run, label, seed and round, and what is summed; `sites[client]` is what a
    node goes by.
    """
    head = {"sum": secrets.token_hex(16)}
    found = ask(
        "keys", clients, head, lambda _, message: secure.Keys.read(message.head.get("keys"))
    )
    fixed_point.refuse_small(len(found))
    members = {sites[client]: keys for client, keys in found.items()}
    number = {sites[client]: client for client in found}
    order, needed = sorted(members), secure.threshold(len(members))
    plain = {**head, "members": {name: list(keys) for name, keys in members.items()}}
    boxes = ask("shares", sorted(found), plain, lambda _, m: rows_in(m, order, secure.BOX))
    _refuse_few(boxes, needed, "shared their secrets")
    sharing = sorted(sites[client] for client in boxes)
    try:
        # From here on reports leave their nodes: there is no second sum of them.
        letters = {
            number[name]: rows_of(
                sharing, {source: boxes[number[source]][name] for source in sharing}, secure.BOX
            )
            for name in sharing
        }
        count = fixed_point.length(form)
        reports = ask(
            "mask",
            sorted(boxes),
            {**head, "sharing": sharing},
            lambda _, m: _masked(m, count),
            letters,
        )
        _refuse_few(reports, needed, "sent their reports in time")
        survivors = sorted(sites[client] for client in reports)
        end: dict[str, Any] = {**head, "survivors": survivors}
        if any(keys.signature for keys in members.values()):
            signed = ask("confirm", sorted(reports), end, lambda _, m: str(m.head.get("signature")))
            end["signatures"] = {sites[client]: one for client, one in signed.items()}
        shares = ask("unmask", sorted(reports), end, lambda _, m: rows_in(m, sharing, shamir.SHARE))
        _refuse_few(shares, needed, "were there to take the masks off")
        total = secure.unmasked(
            _context(context, head["sum"]),
            members,
            {sites[client]: own for client, own in reports.items()},
            {sites[client]: own for client, own in shares.items()},
        )
    except GivenUp:
        raise
    except DeployError as error:
        raise GivenUp(str(error)) from error
    return sorted(reports), fixed_point.mean(total, form)


def _context(about: Mapping[str, Any], number: str) -> tuple[Any, ...]:
    """Name the sum as nodes do (`heads.sum_of`)."""
    words = (about[key] for key in ("run", "label", "of"))
    return *words, number, about["seed"], about["round"]


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
