"""Secure aggregation: the server learns the sum of its nodes' reports and nothing else of them.

After Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning"
(CCS 2017). Reports are integers modulo 2^64. A node adds a self mask, grown from a seed of its own,
and for each other member a pairwise mask, grown from a secret of the two, which one adds and the
other subtracts. It shares the seed and its private mask key among all members, so that t of them
can recover either. When the server says whose masked reports arrived (the survivors), each member
reveals of a survivor its share of the seed and of a dropped member its share of the key: never
both, and for one set of survivors only. So a masked report that comes too late stays hidden under
its self mask, and the members that are left need not send theirs again.

The stages of a sum, one message to each member and back:
`keys`, `shares`, `mask`, `confirm` (only where keys are signed) and `unmask`.
"""

import base64
import hashlib
import itertools
import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from idiolect.deploy.identity import NODE, Authority, Identity, Signed
from idiolect.deploy.protocol import Refused
from idiolect.errors import DeployError

PRIME = 2**256 + 297
SECRET, SHARE = 32, 33  # bytes


def split_secret(secret: bytes, threshold: int, count: int) -> list[bytes]:
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


def recover_secret(shares: Mapping[int, bytes]) -> bytes | None:
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


FEWEST = 3  # of two nodes, each would know the other's report from the sum
_TAG = 16  # bytes by which a tampered box is noticed
BOX = 2 * SHARE + _TAG  # bytes of two shares, encrypted
_HEX = 64  # letters of a key
_SIGNED = "secure aggregation"  # begins what is signed here, and nothing else that is signed
_TRIES = 500  # sets of shares from which a secret is sought where some are wrong

Context = Sequence[Any]
"""Which sum it is: run, label, what is summed, seed, round, and the sum's own random number."""


class Keys(NamedTuple):
    """What a member publishes for one sum."""

    encryption: str  # X25519, for shares on their way
    mask: str  # X25519, for pairwise masks
    commitment: str  # SHA-256 of the self mask's seed, by which a wrong one is noticed
    certificate: str = ""  # of the member's kit; empty: unsigned
    signature: str = ""  # of the three keys, the member's name and the sum

    @classmethod
    def read(cls, plain: Any) -> "Keys":
        """Read keys out of a message, trusting nothing."""
        if not isinstance(plain, list) or len(plain) != len(cls._fields):
            raise Refused("format", "keys of another form")
        if not all(isinstance(one, str) for one in plain) or not all(map(_is_hex, plain[:3])):
            raise Refused("format", "a public key that is none")
        return cls(*plain)


class Signer(Protocol):
    """A node's identity, by which it signs and knows others' signatures."""

    @property
    def certificate(self) -> str:
        """The signer's certificate, for those who check."""

    def sign(self, payload: bytes) -> str:
        """Return a signature."""

    def verify(self, name: str, payload: bytes, certificate: str, signature: str) -> bool:
        """Say whether the node of that name signed."""


class KitSigner:
    """Signs with a node's kit; others' certificates must be of the same authority."""

    def __init__(self, identity: Identity, authority: Authority) -> None:
        self._identity, self._authority = identity, authority

    @property
    def certificate(self) -> str:
        """The certificate as it is now, in base64."""
        return base64.b64encode(self._identity.certificate).decode()

    @classmethod
    def of(cls, kit: Path) -> "KitSigner":
        """Read a kit's key, certificate and authority."""
        return cls(Identity.from_kit(kit), Authority.from_kit(kit))

    def sign(self, payload: bytes) -> str:
        """Sign with the kit's key."""
        return base64.b64encode(self._identity.sign(payload).signature).decode()

    def verify(self, name: str, payload: bytes, certificate: str, signature: str) -> bool:
        """Check the certificate, that it is of the node of that name, and the signature."""
        try:
            signed = Signed(
                *(base64.b64decode(one, validate=True) for one in (certificate, signature))
            )
            self._authority.verify(signed, payload, name=name, role=NODE)
        except (ValueError, Refused):
            return False
        return True


def threshold(members: int) -> int:
    """Return how many members must be left to the end, and can together undo a mask.

    More than two thirds: the paper's choice against a server that cheats. It could tell some
    members that a node survived and others that it did not, and ask each for a share; to get t of
    both kinds it would need 2t - n > n/3 members on its side.
    """
    return max(FEWEST, 2 * members // 3 + 1)


class Participant:
    """One member's part in one sum. Each stage is answered once."""

    def __init__(self, context: Context, name: str, signer: Signer | None = None) -> None:
        self.context, self.name = tuple(context), name
        self._signer = signer
        self._encryption, self._mask = secrets.token_bytes(32), secrets.token_bytes(32)
        self._seed = secrets.token_bytes(SECRET)
        self._keys: Keys | None = None
        self._members: Mapping[str, Keys] = {}
        self._own: tuple[bytes, bytes] = (b"", b"")  # this member's shares of its own secrets
        self._held: dict[str, tuple[bytes, bytes]] = {}  # owner: shares of its seed and its key
        self._survivors: frozenset[str] | None = None
        self._revealed = False

    def keys(self) -> Keys:
        """Publish keys, signed if this node has an identity."""
        if self._keys is None:
            plain = Keys(_public(self._encryption), _public(self._mask), _commitment(self._seed))
            if self._signer is not None:
                signature = self._signer.sign(_signed_keys(self.context, self.name, plain))
                plain = plain._replace(certificate=self._signer.certificate, signature=signature)
            self._keys = plain
        return self._keys

    def shares(self, members: Mapping[str, Keys]) -> dict[str, bytes]:
        """Share this member's secrets among all; each other member's part is encrypted for it."""
        if self._members:
            raise Refused("keys", "the members of this sum were settled before")
        self._check(members)
        self._members = dict(members)
        count, roster = len(members), roster_digest(self.context, members)
        seeds = split_secret(self._seed, threshold(count), count)
        keys = split_secret(self._mask, threshold(count), count)
        boxes = {}
        for name, seed, key in zip(sorted(members), seeds, keys, strict=True):
            if name == self.name:
                self._own = seed, key
                continue
            secret = self._box_key(members[name], roster, self.name, name)
            boxes[name] = _cipher(secret).encrypt(bytes(12), seed + key, None)
        return boxes

    def _check(self, members: Mapping[str, Keys]) -> None:
        if len(members) < FEWEST:
            raise Refused("keys", f"{len(members)} members of a sum, {FEWEST} needed")
        published = [key for keys in members.values() for key in keys[:2]]
        if len(set(published)) != len(published):
            raise Refused("keys", "two members with the same key")
        mine = members.get(self.name)
        if mine is None or mine[:3] != self.keys()[:3]:
            raise Refused("keys", f"{self.name} is not among the members, or with other keys")
        if self._signer is None:
            return
        for name, keys in members.items():
            payload = _signed_keys(self.context, name, keys)
            if name != self.name and not self._signer.verify(name, payload, *keys[3:]):
                raise Refused("identity", f"the keys of {name} are not signed by it")

    def _box_key(self, keys: Keys, roster: str, source: str, target: str) -> bytes:
        about = ["shares", roster, source, target]
        return _derived(_shared_secret(self._encryption, keys.encryption), about)

    def masked(self, values: np.ndarray, boxes: Mapping[str, bytes]) -> np.ndarray:
        """Hide values under all masks; `boxes` are the shares of all who shared theirs.

        They are opened now: who has another idea of the members, or did not make its box for this
        very sum, is noticed before anything leaves.
        """
        if not self._members or self._held:
            raise Refused("keys", "masks of a sum that this node is not at")
        sharing = set(boxes) | {self.name}
        if not sharing <= set(self._members) or self.name in boxes:
            raise Refused("keys", "shares of someone who is no member")
        if len(sharing) < threshold(len(self._members)):
            raise Refused("keys", f"{len(sharing)} of {len(self._members)} members shared secrets")
        roster = roster_digest(self.context, self._members)
        held = {self.name: self._own}
        for name, box in boxes.items():
            secret = self._box_key(self._members[name], roster, name, self.name)
            held[name] = _opened(secret, box, name)
        self._held = held
        hidden: np.ndarray = values + _grown(_self_seed(self._seed, roster, self.name), len(values))
        for name in boxes:
            seed = pair_seed(self._mask, self._members[name].mask, roster, self.name, name)
            mask = _grown(seed, len(values))
            hidden = hidden + mask if self.name < name else hidden - mask
        return hidden

    def confirm(self, survivors: Collection[str]) -> str:
        """Settle who survived, once and for all, and sign it for the others."""
        self._settle(survivors)
        if self._signer is None:
            raise Refused("keys", "this node has no identity to sign with")
        return self._signer.sign(self._signed_survivors())

    def unmask(
        self, survivors: Collection[str], signatures: Mapping[str, str] | None = None
    ) -> dict[str, bytes]:
        """Reveal one share of every member that shared: of its seed or, if it dropped, its key."""
        if self._revealed:
            raise Refused("keys", "the shares of this sum were revealed before")
        self._settle(survivors)
        if self._signer is not None:
            self._check_signatures(signatures or {})
        self._revealed = True
        chosen = self._survivors or frozenset()
        return {name: seed if name in chosen else key for name, (seed, key) in self._held.items()}

    def _settle(self, survivors: Collection[str]) -> None:
        """Accept a set of survivors; from then on no other."""
        chosen = frozenset(survivors)
        if self._survivors is not None and chosen != self._survivors:
            raise Refused("keys", "the survivors of this sum were others before")
        if not chosen <= set(self._held) or self.name not in chosen:
            raise Refused("keys", "survivors that shared nothing, or without this node")
        if len(chosen) < threshold(len(self._members)):
            raise Refused("keys", f"{len(chosen)} survivors of {len(self._members)} members")
        self._survivors = chosen

    def _check_signatures(self, signatures: Mapping[str, str]) -> None:
        """See that enough members were told of the same survivors."""
        assert self._signer is not None
        payload, good = self._signed_survivors(), 1  # this member itself
        for name in (self._survivors or frozenset()) - {self.name}:
            certificate, signature = self._members[name].certificate, signatures.get(name, "")
            good += self._signer.verify(name, payload, certificate, signature)
        if good < threshold(len(self._members)):
            raise Refused("identity", f"{good} members confirmed the survivors")

    def _signed_survivors(self) -> bytes:
        roster = roster_digest(self.context, self._members)
        return _plain([_SIGNED, "survivors", roster, sorted(self._survivors or ())])


def unmasked(
    context: Context,
    members: Mapping[str, Keys],
    reports: Mapping[str, np.ndarray],
    revealed: Mapping[str, Mapping[str, bytes]],
) -> np.ndarray:
    """Add the survivors' masked reports and take all masks off; `revealed[holder][owner]`.

    A secret that does not fit what its owner published is not used.
    """
    names, roster = sorted(members), roster_digest(context, members)
    sharing = {owner for shares in revealed.values() for owner in shares}
    secret = {}
    for owner in sorted(sharing):
        shares = {names.index(h) + 1: own[owner] for h, own in revealed.items() if owner in own}
        secret[owner] = _recovered(shares, owner, members, owner in reports)
    total = np.zeros_like(next(iter(reports.values())))
    for name, report in reports.items():
        mask = _grown(_self_seed(secret[name], roster, name), len(report))
        total = total + report - mask
    for dropped in sharing - set(reports):
        for name in reports:
            seed = pair_seed(secret[dropped], members[name].mask, roster, dropped, name)
            mask = _grown(seed, len(total))
            total = total - mask if name < dropped else total + mask
    return total


def _recovered(
    shares: Mapping[int, bytes], owner: str, members: Mapping[str, Keys], survived: bool
) -> bytes:
    """Find a secret from its shares; where some are wrong, from those that are not."""
    needed = threshold(len(members))
    for chosen in itertools.islice(itertools.combinations(sorted(shares), needed), _TRIES):
        found = recover_secret({place: shares[place] for place in chosen})
        if found is None:
            continue
        own = members[owner]
        if survived and _commitment(found) == own.commitment:
            return found
        if not survived and _public(found) == own.mask:
            return found
    raise DeployError(
        f"{len(shares)} shares of {owner}'s secret were revealed, {needed} that fit are needed: "
        "some node was lost, or sent wrong shares"
    )


def roster_digest(context: Context, members: Mapping[str, Keys]) -> str:
    """Name a sum and all its members' keys; whoever sees other ones cannot open a box."""
    listed = [[name, *members[name][:3]] for name in sorted(members)]
    return hashlib.sha256(_plain([list(context), listed])).hexdigest()


def pair_seed(private: bytes, public: str, roster: str, one: str, other: str) -> bytes:
    """Return the seed of the mask that two members have in common."""
    return _derived(_shared_secret(private, public), ["mask", roster, *sorted((one, other))])


def _self_seed(seed: bytes, roster: str, name: str) -> bytes:
    return _derived(seed, ["self", roster, name])


def _signed_keys(context: Context, name: str, keys: Keys) -> bytes:
    return _plain([_SIGNED, "keys", list(context), name, *keys[:3]])


def _plain(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True).encode()


def _is_hex(text: str) -> bool:
    return len(text) == _HEX and set(text) <= set("0123456789abcdef")


def _commitment(seed: bytes) -> str:
    return hashlib.sha256(b"idiolect self mask" + seed).hexdigest()


def _public(private: bytes) -> str:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw().hex()


def _shared_secret(private: bytes, public: str) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    try:
        key = X25519PublicKey.from_public_bytes(bytes.fromhex(public))
        return X25519PrivateKey.from_private_bytes(private).exchange(key)
    except ValueError as error:  # not a key, or one that makes every secret the same
        raise Refused("keys", "a public key that is none") from error


def _derived(secret: bytes, about: Sequence[str]) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), 32, salt=None, info=_plain(list(about))).derive(secret)


def _cipher(key: bytes) -> Any:
    """Make a cipher for one message: its key is of one sum, one sender and one addressee."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(key)


def _opened(key: bytes, box: bytes, name: str) -> tuple[bytes, bytes]:
    from cryptography.exceptions import InvalidTag

    try:
        plain = _cipher(key).decrypt(bytes(12), box, None)
    except (InvalidTag, ValueError) as error:
        raise Refused("keys", f"the shares of {name} were not made for this sum") from error
    return plain[:SHARE], plain[SHARE:]


def _grown(seed: bytes, count: int) -> np.ndarray:
    """Grow a mask of integers modulo 2^64."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * count)), dtype="<u8").astype(np.uint64)
