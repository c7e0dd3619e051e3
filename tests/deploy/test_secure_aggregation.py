"""Laws of secure aggregation: exact sums whoever drops out, and what a server can never work out.

A server that only looks sees every message. Under pairwise masks alone, as they were before, it
subtracts the retried sum from the first one with a late report in it, and has that report.
"""

import itertools

import numpy as np
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from idiolect.deploy import secure_aggregation
from idiolect.deploy.node_records import SumLog
from idiolect.deploy.protocol import Refused
from idiolect.errors import DeployError

CONTEXT = ("run", "FedAvg", "step", "5e", 0, 1)
COUNT = 40


def refused(reason="keys"):
    return pytest.raises(Refused, check=lambda error: error.reason == reason)


class Seal:
    """A node's identity; everyone knows everyone's public key."""

    certificate = "known to all"

    def __init__(self, name, known):
        self._key, self.known = Ed25519PrivateKey.generate(), known
        known[name] = self._key.public_key()

    def sign(self, payload):
        return self._key.sign(payload).hex()

    def verify(self, name, payload, certificate, signature):
        try:
            self.known[name].verify(bytes.fromhex(signature), payload)
        except (InvalidSignature, KeyError):
            return False
        return True


class Sum:
    """A sum with all its messages, as a server that relays them sees it."""

    def __init__(self, count=5, signed=False, context=CONTEXT):
        known = {}
        self.names = [f"site-{n}" for n in range(count)]
        self.nodes = {
            name: secure_aggregation.Participant(
                context, name, Seal(name, known) if signed else None
            )
            for name in self.names
        }
        chance = np.random.default_rng(count)
        draw = chance.integers(0, 1 << 64, (count, COUNT), dtype=np.uint64)
        self.values = dict(zip(self.names, draw, strict=True))
        self.context, self.signed = context, signed
        self.keys = {name: node.keys() for name, node in self.nodes.items()}
        self.boxes, self.masked, self.revealed = {}, {}, {}

    def share(self, lost=()):
        for name in set(self.names) - set(lost):
            self.boxes[name] = self.nodes[name].shares(self.keys)
        return self

    def inbox(self, name):
        return {source: own[name] for source, own in self.boxes.items() if source != name}

    def mask(self, lost=()):
        for name in self.boxes.keys() - set(lost):
            self.masked[name] = self.nodes[name].masked(self.values[name], self.inbox(name))
        return self

    def unmask(self, lost=(), unsigned=()):
        there, signatures = sorted(self.masked), {}
        if self.signed:
            for name in set(there) - set(unsigned):
                signatures[name] = self.nodes[name].confirm(there)
        for name in set(there) - set(lost) - set(unsigned):
            self.revealed[name] = self.nodes[name].unmask(there, signatures)
        return self

    def total(self):
        return secure_aggregation.unmasked(self.context, self.keys, self.masked, self.revealed)

    def expected(self):
        return np.sum([self.values[name] for name in self.masked], axis=0, dtype=np.uint64)


# Shamir's shares.


@given(st.binary(min_size=32, max_size=32), st.integers(1, 7), st.integers(0, 3), st.randoms())
@settings(max_examples=40, deadline=None)
def test_any_threshold_of_shares_gives_the_secret_and_fewer_fit_every_secret(
    secret, threshold, more, chance
):
    count = threshold + more
    shares = dict(enumerate(secure_aggregation.split_secret(secret, threshold, count), 1))
    chosen = chance.sample(sorted(shares), threshold)
    assert secure_aggregation.recover_secret({place: shares[place] for place in chosen}) == secret
    # Whatever secret is guessed, one value of the missing share leads to it: nothing is excluded.
    *few, last = chosen
    other = int.from_bytes(chance.randbytes(32), "big")
    zero, one = (_at_zero({n: shares[n] for n in few}, last, value) for value in (0, 1))
    value = (
        (other - zero) * pow(one - zero, -1, secure_aggregation.PRIME) % secure_aggregation.PRIME
    )
    fitting = {**{n: shares[n] for n in few}, last: value.to_bytes(secure_aggregation.SHARE, "big")}
    assert secure_aggregation.recover_secret(fitting) == other.to_bytes(32, "big")


def _at_zero(few, last, value):
    """The polynomial's value at 0, where it may be no secret."""
    shares = {**{n: int.from_bytes(one, "big") for n, one in few.items()}, last: value}
    total = 0
    for place, own in shares.items():
        for other in shares.keys() - {place}:
            own = (
                own
                * other
                * pow(other - place, -1, secure_aggregation.PRIME)
                % secure_aggregation.PRIME
            )
        total += own
    return total % secure_aggregation.PRIME


def test_what_is_no_secret_is_none():
    share = (secure_aggregation.PRIME - 1).to_bytes(secure_aggregation.SHARE, "big")
    assert secure_aggregation.recover_secret({1: share}) is None
    with pytest.raises(ValueError, match="3 of 2 shares"):
        secure_aggregation.split_secret(bytes(32), 3, 2)


# The sum.


@given(st.integers(3, 8), st.booleans(), st.data())
@settings(max_examples=40, deadline=None)
def test_the_sum_is_exact_whoever_drops_out_up_to_n_minus_t(count, signed, data):
    """Each of the n - t that may be lost is lost at any stage, or not at all."""
    summed = Sum(count, signed)
    stages = ("shares", "mask", "confirm", "unmask", "never")
    losable = data.draw(st.permutations(summed.names))[
        : count - secure_aggregation.threshold(count)
    ]
    lost = {stage: set() for stage in stages}
    for name in losable:
        lost[data.draw(st.sampled_from(stages))].add(name)
    summed.share(lost["shares"]).mask(lost["mask"])
    summed.unmask(lost["unmask"], lost["confirm"])
    assert set(summed.masked) == set(summed.names) - lost["shares"] - lost["mask"]
    assert (summed.total() == summed.expected()).all()


def test_the_threshold_is_more_than_two_thirds_and_at_least_three():
    assert [secure_aggregation.threshold(n) for n in (3, 4, 5, 6, 9, 10, 20)] == [
        3,
        3,
        4,
        5,
        7,
        7,
        14,
    ]


def test_with_fewer_than_the_threshold_there_is_no_sum():
    summed = Sum(6).share().mask().unmask(lost=["site-0", "site-1"])
    with pytest.raises(DeployError, match=r"4 shares of site-0's secret .* 5 that fit are needed"):
        summed.total()


# What a server can work out.


def pairwise_only(values, keys, roster):
    """The scheme as it was: masks of pairs, no self mask."""
    hidden = {}
    for name, own in values.items():
        hidden[name] = own.copy()
        for other in values.keys() - {name}:
            seed = secure_aggregation.pair_seed(
                keys[name], secure_aggregation._public(keys[other]), roster, name, other
            )
            mask = secure_aggregation._grown(seed, COUNT)
            hidden[name] = hidden[name] + mask if name < other else hidden[name] - mask
    return hidden


def test_the_attack_that_undid_pairwise_masks_gives_noise():
    """First sum, the report of `late` coming after the timeout, less the sum without it."""
    summed = Sum(6)
    late = "site-3"
    # As it was: all reports under the first sum's masks, then the others' sum under new ones.
    keys = {name: bytes([n + 1] * 32) for n, name in enumerate(summed.names)}
    view = pairwise_only(summed.values, keys, "first")
    others = {name: own for name, own in summed.values.items() if name != late}
    again = pairwise_only(others, keys, "second")
    found = sum(view.values()) - sum(again.values())
    assert (found == summed.values[late]).all()

    # As it is: the server has the late report too, the sum without it, and all revealed shares.
    summed.share().mask(lost=[late]).unmask()
    total = summed.total()
    assert (total == summed.expected()).all()
    masked = summed.nodes[late].masked(summed.values[late], summed.inbox(late))
    found = sum(summed.masked.values()) + masked - total
    assert not (found == summed.values[late]).any()
    # It knows the late node's mask key, and can take all pairwise masks off ...
    key = secure_aggregation._recovered(_shares_of(summed, late), late, summed.keys, False)
    roster = secure_aggregation.roster_digest(CONTEXT, summed.keys)
    for name in others:
        seed = secure_aggregation.pair_seed(key, summed.keys[name].mask, roster, late, name)
        mask = secure_aggregation._grown(seed, COUNT)
        masked = masked - mask if late < name else masked + mask
    left = masked - summed.values[late]
    own = secure_aggregation._self_seed(summed.nodes[late]._seed, roster, late)
    assert (left == secure_aggregation._grown(own, COUNT)).all()  # ... but the self mask
    # of whose seed no member has revealed a share, nor will.
    for name in others:
        with refused():
            summed.nodes[name].unmask(summed.names)


def _shares_of(summed, owner):
    return {summed.names.index(h) + 1: own[owner] for h, own in summed.revealed.items()}


def test_what_one_node_sends_is_uniform_noise_whatever_it_hides():
    """Chi-squared over the 256 values of every byte, of a report of zeros.

    The 99.9 % point of 255 degrees of freedom is 330.5; eight looks would fail once in 125 runs,
    at 420 once in millions.
    """
    summed = Sum(3).share()
    sent = summed.nodes["site-0"].masked(np.zeros(20_000, np.uint64), summed.inbox("site-0"))
    for place in range(8):
        counts = np.bincount(sent.view(np.uint8).reshape(-1, 8)[:, place], minlength=256)
        expected = len(sent) / 256
        assert ((counts - expected) ** 2 / expected).sum() < 420


def test_what_arrived_adds_up_to_noise_until_it_is_unmasked():
    summed = Sum(4).share().mask()
    for some in itertools.chain.from_iterable(
        itertools.combinations(summed.names, n) for n in (1, 2, 3, 4)
    ):
        found = sum(summed.masked[name] for name in some)
        assert not (found == sum(summed.values[name] for name in some)).any()


# What a node refuses.


def test_a_node_reveals_one_share_of_each_member_for_one_set_of_survivors():
    summed = Sum(6).share().mask()
    node, (first, *_) = summed.nodes["site-5"], summed.names
    some = summed.names[1:]
    told = node.unmask(some)
    seed, key = (summed.nodes[first]._seed, summed.nodes[first]._mask)
    assert told.keys() == set(summed.names)
    assert told[first] == node._held[first][1] and told["site-1"] == node._held["site-1"][0]
    assert seed not in told.values() and key not in told.values()
    for survivors in (some, summed.names):
        with refused():
            node.unmask(survivors)
    other = summed.nodes["site-4"]
    for survivors in (summed.names[:4], summed.names[:5] * 2, ["site-4", "x", *summed.names[:3]]):
        with refused():
            other.unmask([one for one in survivors if one != "site-4"])
        with refused():
            other.unmask(["site-4", *summed.names[:3]])  # too few
    other.unmask(summed.names)


def test_a_node_settles_survivors_once_also_where_it_confirms_them():
    summed = Sum(6, signed=True).share().mask()
    node, some = summed.nodes["site-5"], summed.names[1:]
    node.confirm(some)
    for ask in (node.confirm, lambda s: node.unmask(s, {})):
        with refused():
            ask(summed.names)


def test_nothing_is_revealed_unless_enough_members_signed_the_same_survivors():
    """The server tells site-1 to site-3 that site-0 was lost, and site-4 and 5 that it was not."""
    summed = Sum(6, signed=True).share().mask()
    without, everyone = summed.names[1:], summed.names
    signatures = {name: summed.nodes[name].confirm(without) for name in summed.names[1:4]}
    signatures |= {name: summed.nodes[name].confirm(everyone) for name in summed.names[4:]}
    for name, survivors in (("site-1", without), ("site-5", everyone)):
        with refused("identity"):
            summed.nodes[name].unmask(survivors, signatures)


def test_a_node_masks_once():
    summed = Sum(4).share().mask()
    with refused():
        summed.nodes["site-0"].masked(summed.values["site-0"], summed.inbox("site-0"))
    with refused():
        summed.nodes["site-0"].shares(summed.keys)


def test_tampered_shares_are_noticed():
    summed = Sum(4).share()
    box = summed.boxes["site-1"]["site-0"]
    for wrong in (bytes([box[0] ^ 1]) + box[1:], box[:-1], b"", summed.boxes["site-1"]["site-2"]):
        with refused():
            inbox = {**summed.inbox("site-0"), "site-1": wrong}
            summed.nodes["site-0"].masked(summed.values["site-0"], inbox)
    summed.mask().unmask()
    honest = {name: dict(own) for name, own in summed.revealed.items()}
    summed.revealed["site-2"]["site-1"] = bytes(secure_aggregation.SHARE)
    assert (summed.total() == summed.expected()).all()  # three others' are enough
    summed.revealed["site-3"]["site-1"] = honest["site-3"]["site-0"]
    with pytest.raises(DeployError, match="sent wrong shares"):
        summed.total()


def test_keys_that_the_server_swapped_are_noticed():
    """Signed by nobody, by another member, or by the member itself for another sum."""
    summed = Sum(4, signed=True)
    node, keys = summed.nodes["site-0"], summed.keys
    own = secure_aggregation.Participant(CONTEXT, "site-1").keys()  # the server's own
    elsewhere = secure_aggregation.Participant(
        ("run", "FedAvg", "step", "5f", 0, 1), "site-1", summed.nodes["site-1"]._signer
    ).keys()
    another = secure_aggregation.Participant(
        CONTEXT, "site-1", summed.nodes["site-2"]._signer
    ).keys()
    for wrong in (own, own._replace(signature=keys["site-1"].signature), elsewhere, another):
        with refused("identity"):
            node.shares({**keys, "site-1": wrong})
    node.shares(keys)


def test_members_who_were_shown_different_keys_cannot_open_each_others_boxes():
    """Without signatures too, as long as some of the members are honest to each other."""
    summed = Sum(4)
    swapped = {**summed.keys, "site-3": secure_aggregation.Participant(CONTEXT, "site-3").keys()}
    summed.boxes["site-0"] = summed.nodes["site-0"].shares(swapped)
    for name in summed.names[1:]:
        summed.boxes[name] = summed.nodes[name].shares(summed.keys)
    for name in summed.names:
        with refused():
            summed.nodes[name].masked(summed.values[name], summed.inbox(name))


@pytest.mark.parametrize(
    "change",
    [
        lambda keys: {name: keys[name] for name in ("site-0", "site-1")},
        lambda keys: {**keys, "site-2": keys["site-1"]},
        lambda keys: {name: own for name, own in keys.items() if name != "site-0"},
        lambda keys: {**keys, "site-0": secure_aggregation.Participant(CONTEXT, "site-0").keys()},
        lambda keys: {**keys, "site-1": keys["site-1"]._replace(encryption="00" * 32)},
    ],
    ids=["two", "twice the same", "without me", "not mine", "of small order"],
)
def test_members_that_do_not_fit_are_refused(change):
    summed = Sum(4)
    with refused():
        summed.nodes["site-0"].shares(change(summed.keys))


@pytest.mark.parametrize(
    "plain", [None, [], list("abcde"), ["00" * 32] * 3, [1, 2, 3, 4, 5], [*["00" * 32] * 3, 4, 5]]
)
def test_what_are_no_keys_is_refused(plain):
    with refused("format"):
        secure_aggregation.Keys.read(plain)


# A report is in sums of one set of members only.


def test_the_record_of_sums_outlives_the_process_and_a_torn_line(tmp_path):
    path, here = tmp_path / "sums.log", ["a", "b", "c"]
    log = SumLog(path)
    log.check("one", here)
    log.masked("one")
    for _ in range(2):
        with refused("summed"):
            log.check("one")
        log = SumLog(path)
    log.survived("one", here)
    log.masked("two")
    assert path.stat().st_mode & 0o777 == 0o600
    for one in (log, SumLog(path)):
        one.check("one", reversed(here))
        for members in (["a", "b"], [*here, "d"]):
            with refused("summed"):
                one.check("one", members)
            with refused("summed"):
                one.survived("one", members)
        with refused("summed"):
            one.check("two", here)
    whole = path.read_bytes()
    for end in range(1, 70):  # a power cut amid the last line, and another report after it
        path.write_bytes(whole[:-end])
        log = SumLog(path)
        log.masked("three")
        assert SumLog(path)._known.get("three") == "-"
        with refused("summed"):
            SumLog(path).check("one", ["a", "b"])
