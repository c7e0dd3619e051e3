"""Reports as secure aggregation adds them: which methods it can serve, and the fixed point.

The protocol itself is in `secure_aggregation`.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from idiolect.aggregation.aggregator import Aggregated, Shortened, shorten
from idiolect.core import tree
from idiolect.core.method import Method, Report, Sent
from idiolect.core.wrap import Wrapper
from idiolect.deploy.refusals import Refused
from idiolect.deploy.secure_aggregation import FEWEST
from idiolect.errors import DeployError, IdiolectError, MethodError

SCALE = 2.0**32  # steps of a unit: what is rounded away is far below float32
_ROOM = 2.0**62  # what a sum may reach, so that it never wraps


def require() -> Any:
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
    rule = ruled(method)
    if rule is not None and not rule.by.shortens:
        raise MethodError(
            f"{label}: its rule ({rule.by.title}) looks at each report by itself (to sort or "
            "compare them), and under deploy.secure the server sees only their sum; leave out "
            "`aggregate` or deploy.secure"
        )
    if method.aggregates != "mean":
        raise MethodError(
            f"{label} needs more of its nodes than the weighted mean of their parameters, and "
            "under deploy.secure the server sees only that; leave deploy.secure out, or choose a "
            "method such as fedavg, fedper or ditto"
        )


def ruled(method: Method) -> Aggregated | None:
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
    if ruled(method) is None:
        return Report(report.params, method.weights(size).reshape(report.size.shape))
    rows = tree.map(lambda leaf: leaf.unsqueeze(0), report.params)
    cut = shorten(sent.shared, rows, size, size.new_full((), bound))
    return Report(tree.map(lambda leaf: leaf[0], cut), torch.ones_like(report.size))


def contributed(method: Method, form: Report) -> Report:
    """Return the form of a contribution, given that of a report."""
    if ruled(method) is None:
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


def mean(total: np.ndarray, form: Report) -> Report:
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


def length(form: Report) -> int:
    """Return how many integers a report of this form is."""
    return sum(leaf.numel() for leaf in tree.leaves(form.params)) + 1
