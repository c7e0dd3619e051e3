"""Masks under which the server sees the sum of its nodes' reports and nothing else of them.

Every two nodes of a round agree on a secret (X25519, HKDF) that the server only relays the public
halves of. One adds the noise that grows from it (ChaCha20), the other subtracts it, in the ring of
64-bit integers, where a report under masks is uniform noise whatever it holds and where the masks
of all cancel exactly. After Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving
Machine Learning" (CCS 2017), without its recovery from drop-outs: when a node is lost between the
keys and the masks, the round's sum is asked for anew, of the others, under new keys.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from idiolect import tree
from idiolect.aggregate import Aggregated, Shortened, shorten
from idiolect.deploy.codes import Refused
from idiolect.errors import DeployError, IdiolectError, MethodError
from idiolect.method import Method, Report, Sent
from idiolect.wrapper import Wrapper

FEWEST = 3  # of two nodes, each would know the other's report from the sum
SCALE = 2.0**32  # steps of a unit: what is rounded away is far below float32
_ROOM = 2.0**62  # what a sum may reach, so that it never wraps
_BYTES = 32  # of a public key


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


class Key:
    """A node's secret for one sum; used once."""

    def __init__(self, context: Sequence[Any]) -> None:
        """`context` says of what sum: run, method, seed, round and attempt."""
        require()
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self.context = tuple(context)
        self._private = X25519PrivateKey.from_private_bytes(secrets.token_bytes(_BYTES))

    @property
    def public(self) -> str:
        """What the others are told."""
        return self._private.public_key().public_bytes_raw().hex()

    def masked(self, values: np.ndarray, keys: Sequence[str]) -> np.ndarray:
        """Hide integers under the masks of all pairs this key is of; `keys` is everyone's."""
        if len(set(keys)) != len(keys) or len(keys) < FEWEST or self.public not in keys:
            raise Refused("keys", f"{len(keys)} keys of a sum, {FEWEST} different ones needed")
        hidden = values.copy()
        for other in keys:
            if other != self.public:
                noise = self._noise(other, sorted(keys), len(values))
                # In the ring this is exact; the other side of the pair does the opposite.
                hidden = hidden + noise if self.public < other else hidden - noise
        return hidden

    def _noise(self, other: str, keys: Sequence[str], count: int) -> np.ndarray:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        try:
            public = X25519PublicKey.from_public_bytes(bytes.fromhex(other))
            shared = self._private.exchange(public)
        except ValueError as error:  # not a key, or one that makes every secret the same
            raise Refused("keys", "a public key that is none") from error
        # Bound to the sum and to all of its members: another cohort gets other masks.
        about = repr((self.context, list(keys), sorted((self.public, other)))).encode()
        seed = HKDF(SHA256(), 32, salt=None, info=about).derive(shared)
        stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
        return np.frombuffer(stream.update(bytes(8 * count)), dtype="<u8").astype(np.uint64)


def added(parts: Mapping[int, Tensor]) -> np.ndarray:
    """Add what all nodes of a sum sent; if one is missing, the result is noise."""
    total = np.zeros_like(next(iter(parts.values())).numpy().view(np.uint64))
    for part in parts.values():
        total = total + part.numpy().view(np.uint64)
    return total
