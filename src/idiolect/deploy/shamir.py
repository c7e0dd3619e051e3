"""Shamir's secret sharing: any `threshold` shares give the secret, fewer say nothing of it.

Over the integers modulo the least prime above 2^256, so that a key of 32 bytes is one element.
(A. Shamir, "How to share a secret", Communications of the ACM 22, 1979.)
"""

import secrets
from collections.abc import Mapping

PRIME = 2**256 + 297
SECRET, SHARE = 32, 33  # bytes


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Return `count` shares: values at 1, 2, ... of a random polynomial that is the secret at 0."""
    if len(secret) != SECRET or not 1 <= threshold <= count:
        raise ValueError(f"{threshold} of {count} shares of a secret of {len(secret)} bytes")
    polynomial = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    polynomial.append(int.from_bytes(secret, "big"))  # the constant term, last for Horner's rule
    shares = []
    for place in range(1, count + 1):
        value = 0
        for coefficient in polynomial:
            value = (value * place + coefficient) % PRIME
        shares.append(value.to_bytes(SHARE, "big"))
    return shares


def recover(shares: Mapping[int, bytes]) -> bytes | None:
    """Interpolate at 0, given shares by their place from 1 on; None where that is no secret."""
    total = 0
    for place, share in shares.items():
        above = below = 1
        for other in shares:
            if other != place:
                above = above * other % PRIME
                below = below * (other - place) % PRIME
        total += int.from_bytes(share, "big") * above * pow(below, -1, PRIME)
    total %= PRIME
    return total.to_bytes(SECRET, "big") if total < 1 << (8 * SECRET) else None
