"""The hub's side of secure aggregation: relays keys and shares, gathers masked reports, adds up."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from idiolect.aggregation.aggregator import Aggregated, Shortened, shorten
from idiolect.core import tree
from idiolect.core.capabilities import Averaging, has
from idiolect.core.method import Method, Report, Sent
from idiolect.core.tree import Tree
from idiolect.core.wrap import Wrapper
from idiolect.deploy import secure_aggregation
from idiolect.deploy.protocol import Message, Refused, read_shares, write_shares
from idiolect.deploy.secure_aggregation import FEWEST
from idiolect.errors import DeployError, IdiolectError, MethodError


class SumFailed(DeployError):
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


def run_secure_sum(
    ask: Ask, context: Mapping[str, Any], clients: Sequence[int], sites: Sequence[str], form: Report
) -> tuple[list[int], Report]:
    """Return who is in the sum, and the sum as the report of one client.

    `context` names the run, label, seed and round, and what is summed; `sites[client]` is what a
    node goes by.
    """
    head = {"sum": secrets.token_hex(16)}
    found = ask(
        "keys",
        clients,
        head,
        lambda _, message: secure_aggregation.Keys.read(message.head.get("keys")),
    )
    refuse_small(len(found))
    members = {sites[client]: keys for client, keys in found.items()}
    number = {sites[client]: client for client in found}
    order, needed = sorted(members), secure_aggregation.threshold(len(members))
    plain = {**head, "members": {name: list(keys) for name, keys in members.items()}}
    boxes = ask(
        "shares", sorted(found), plain, lambda _, m: read_shares(m, order, secure_aggregation.BOX)
    )
    _refuse_few(boxes, needed, "shared their secrets")
    sharing = sorted(sites[client] for client in boxes)
    try:
        # From here on reports leave their nodes: there is no second sum of them.
        letters = {
            number[name]: write_shares(
                sharing,
                {source: boxes[number[source]][name] for source in sharing},
                secure_aggregation.BOX,
            )
            for name in sharing
        }
        count = _length(form)
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
        shares = ask(
            "unmask",
            sorted(reports),
            end,
            lambda _, m: read_shares(m, sharing, secure_aggregation.SHARE),
        )
        _refuse_few(shares, needed, "were there to take the masks off")
        total = secure_aggregation.unmasked(
            _context(context, head["sum"]),
            members,
            {sites[client]: own for client, own in reports.items()},
            {sites[client]: own for client, own in shares.items()},
        )
    except SumFailed:
        raise
    except DeployError as error:
        raise SumFailed(str(error)) from error
    return sorted(reports), _mean(total, form)


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


SCALE = 2.0**32  # steps of a unit: what is rounded away is far below float32
_ROOM = 2.0**62  # what a sum may reach, so that it never wraps


def require_cryptography() -> Any:
    """Return the library of ciphers, or say what to install."""
    try:
        import cryptography
    except ImportError:
        raise DeployError(
            "deploy.secure needs the library `cryptography`, which is not installed here; install "
            "it with `pip install 'idiolect[flare]'`"
        ) from None
    return cryptography


def refuse_unfit(label: str, method: Method) -> None:
    """Refuse methods whose server needs more than a sum of what its nodes tell."""
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
    """Find the rule of aggregation in a method, behind whatever is wrapped around it."""
    while isinstance(method, Wrapper):
        if isinstance(method, Aggregated):
            return method
        method = method.base
    return None


def contribution(method: Method, sent: Sent, report: Report, bound: float) -> Report:
    """Make of a node's report what it adds to the sum: parameters, and how much they weigh.

    Where the server's rule would shorten every update, the node does, and all nodes weigh alike.
    """
    size = report.size.reshape(1)
    if rule_of(method) is None and has(method, Averaging):
        return Report(report.params, method.weights(size).reshape(report.size.shape))
    rows = tree.map(lambda leaf: leaf.unsqueeze(0), report.params)
    cut = shorten(sent.shared, rows, size, size.new_full((), bound))
    return Report(tree.map(lambda leaf: leaf[0], cut), torch.ones_like(report.size))


def contributed(method: Method, form: Report) -> Report:
    """Return the form of a contribution, given that of a report."""
    if rule_of(method) is None:
        return form
    cut: Any = Shortened(form.params, torch.zeros_like(form.size))
    return Report(cut, form.size)


def refuse_small(clients: int, kind: type[IdiolectError] = DeployError) -> None:
    """Refuse cohorts in which a sum would give a member away to another."""
    if clients < FEWEST:
        raise kind(
            f"a round of {clients} nodes under deploy.secure: {FEWEST} needed, as of two each "
            "would know the other's report from the sum"
        )


def fixed(report: Report, nodes: int) -> np.ndarray:
    """Write a report as integers of the ring: its parameters times its size, then its size."""
    if not isinstance(report, Report):
        raise Refused("structure", "a report without parameters and size cannot be summed")
    size = report.size.double().reshape(1)
    parts = [(leaf.double() * size).reshape(-1) for _, leaf in _ordered(report)]
    values = torch.cat([*parts, size]).cpu().numpy() * SCALE
    if not np.all(np.abs(values) < _ROOM / nodes):
        raise Refused("range", "a value of the report is too large for the sum under masks")
    return np.rint(values).astype(np.int64).view(np.uint64)


def _mean(total: np.ndarray, form: Report) -> Report:
    """Read the sum of all as the report of one client: the weighted mean and the whole size."""
    values = torch.from_numpy(total.view(np.int64).astype(np.float64)) / SCALE
    size, place, made = values[-1], 0, {}
    for name, leaf in _ordered(form):
        part = values[place : place + leaf.numel()] / size
        made[name] = part.reshape(leaf.shape).to(leaf.dtype)
        place += leaf.numel()
    return Report(tree.like(form.params, made), size.to(form.size.dtype).reshape(form.size.shape))


def _ordered(report: Report) -> list[tuple[str, Tensor]]:
    """List leaves by name: what came back from a disk may stand in another order."""
    return sorted(tree.named(report.params).items())


def _length(form: Report) -> int:
    """Return how many integers a report of this form is."""
    return sum(leaf.numel() for leaf in tree.leaves(form.params)) + 1
