"""Secure aggregation: the server gets the sum, and of one node's report only noise."""

import federations as fed
import numpy as np
import pytest
import torch

from idiolect.deploy import masks, wire
from idiolect.deploy.codes import Refused
from idiolect.deploy.transport import Inside
from idiolect.errors import ConfigError, DeployError, MethodError
from idiolect.method import Report
from idiolect.methods import METHODS

MEANS = ["fedavg", "fedbn", "ditto"]


def report(seed, size=20.0, scale=1.0):
    chance = torch.Generator().manual_seed(seed)
    draw = {"w": torch.randn(30, 40, generator=chance), "b": torch.randn(7, generator=chance)}
    return Report({name: scale * leaf for name, leaf in draw.items()}, torch.tensor(size))


def hidden(reports, context=("run", 0)):
    keys = [masks.Key(context) for _ in reports]
    public = [key.public for key in keys]
    values = [masks.fixed(one, len(reports)) for one in reports]
    return [key.masked(value, public) for key, value in zip(keys, values, strict=True)]


def added(parts):
    return masks.added({n: torch.from_numpy(p.view(np.int64)) for n, p in enumerate(parts)})


def test_the_sum_is_the_weighted_mean_to_the_fixed_point():
    """Each of n values is rounded by at most 2^-33, so the mean errs by n 2^-33 / sum of sizes."""
    sizes = [12.0, 5.0, 130.0, 1.0]
    reports = [report(n, size) for n, size in enumerate(sizes)]
    found = masks.mean(added(hidden(reports)), reports[0])
    assert float(found.size) == sum(sizes)
    for name, leaf in found.params.items():
        exact = sum(s * r.params[name].double() for s, r in zip(sizes, reports, strict=True))
        assert (leaf - (exact / sum(sizes)).float()).abs().max() <= 1.2e-7 * exact.abs().max()
    total = added(hidden(reports)).view(np.int64) / masks.SCALE
    values = [masks.fixed(r, 4).view(np.int64) / masks.SCALE for r in reports]
    assert np.abs(total - np.sum(values, axis=0)).max() < 1e-9


def test_what_one_node_sends_is_uniform_noise_whatever_it_hides():
    """Chi-squared over the 256 values of every byte, of a report of zeros.

    The 99.9 % point of 255 degrees of freedom is 330.5; unmasked, the figure is in the millions.
    """
    zeros = [Report({"w": torch.zeros(20_000)}, torch.tensor(0.0)) for _ in range(3)]
    (sent, *_), plain = hidden(zeros), masks.fixed(zeros[0], 3)
    for place in range(8):
        counts = np.bincount(sent.view(np.uint8).reshape(-1, 8)[:, place], minlength=256)
        expected = len(sent) / 256
        # Eight looks at 99.9 % each would fail once in 125 runs; at 420 once in millions.
        assert ((counts - expected) ** 2 / expected).sum() < 420
    flat = np.bincount(plain.view(np.uint8), minlength=256)
    assert ((flat - flat.mean()) ** 2 / flat.mean()).sum() > 1e6
    ones = [Report({"w": torch.ones(20_000)}, torch.tensor(1.0)) for _ in range(3)]
    both = [part.view(np.int64) / 2.0**63 for part in (sent, hidden(ones)[0])]
    assert abs(np.corrcoef(*both)[0, 1]) < 0.05 and abs(both[1].mean()) < 0.03


def test_without_one_of_them_the_others_add_up_to_noise():
    parts = hidden([report(n) for n in range(4)])
    for left_out in range(4):
        some = [part for n, part in enumerate(parts) if n != left_out]
        assert np.abs(added(some).view(np.int64) / 2.0**63).mean() > 0.4  # uniform: 0.5
    assert np.abs(added(parts).view(np.int64) / 2.0**63).mean() < 1e-6


def test_another_round_or_cohort_has_other_masks():
    keys = [masks.Key(("run", 0)) for _ in range(4)]
    public, value = [key.public for key in keys], np.zeros(50, np.uint64)
    once, fewer = keys[0].masked(value, public[:3]), keys[0].masked(value, public)
    # Were masks those of the pairs alone, the difference would be one pair's, and no secret.
    pair = keys[0].masked(value, [public[0], public[3], public[1]])
    assert not (once == fewer).any() and not (once == pair).any()
    again = masks.Key(("run", 1))
    again._private = keys[0]._private
    assert not (again.masked(value, public[:3]) == once).any()


def test_keys_and_values_that_do_not_fit_are_refused():
    key, value = masks.Key(("run", 0)), np.zeros(5, np.uint64)
    others = [masks.Key(("run", 0)).public for _ in range(2)]
    for keys in (
        [key.public, others[0]],
        [key.public, others[0], others[0]],
        [*others, masks.Key(("run", 0)).public],
        [key.public, others[0], "00" * 32],  # a point of small order: the secret would be zero
        [key.public, others[0], "zz"],
    ):
        with pytest.raises(Refused) as caught:
            key.masked(value, keys)
        assert caught.value.reason == "keys"
    with pytest.raises(Refused) as caught:
        masks.fixed(report(0, scale=1e9), 3)
    assert caught.value.reason == "range"


SETS = ("deploy.secure=true", "deploy.timeout=5")


@pytest.mark.parametrize("name", MEANS)
def test_a_secure_run_gives_the_plain_runs_result(name, tmp_path):
    assert METHODS[name].aggregates == "mean"
    label = fed.experiment(name).methods[0].label
    for kind, sets in (("plain", ()), ("secure", SETS)):
        wanted = fed.experiment(name, sets=sets)
        fed.served(wanted, fed.inside(tmp_path / kind / "nodes"), tmp_path / kind)
    states = [fed.server_state(tmp_path / kind, label) for kind in ("plain", "secure")]
    assert fed.largest_gap(*states) < 1e-6


class Listening(Inside):
    """Nodes whose every answer the server writes down; one may be lost before it sends its sum."""

    lost = ""

    def call(self, site, blob, seconds):
        kind = wire.unpack(blob).kind
        if site == self.lost and kind == "mask":
            raise Refused("unreachable")
        answer = super().call(site, blob, seconds)
        self.heard = [*getattr(self, "heard", []), (site, kind, answer)]
        return answer


def test_the_server_never_hears_a_report_unmasked(tmp_path):
    """No float tensor leaves a node in a round, and the masked ones look nothing alike."""
    transport = Listening(fed.inside(tmp_path / "nodes")._nodes)
    fed.served(fed.experiment("fedavg", sets=SETS), transport, tmp_path / "served")
    rounds = [wire.unpack(answer) for _, kind, answer in transport.heard if kind == "step"]
    assert len(rounds) == 8 and all(not message.leaves for message in rounds)
    sent = [wire.unpack(a).leaves["masked"] for _, kind, a in transport.heard if kind == "mask"]
    assert len(sent) == 8 and all(leaf.dtype == torch.int64 for leaf in sent)
    assert all(abs((leaf.double() / 2.0**63).mean()) < 0.05 for leaf in sent)
    # A hub that asks again for the same round gets no second sum out of the old keys.
    letter = {"run": "r1", "label": "FedAvg", "seed": 3, "round": 1, "attempt": 0, "keys": []}
    answer = wire.unpack(transport.call("site-0", wire.pack("mask", letter), 1))
    assert answer.head == {"code": "keys"}


def test_a_node_lost_between_keys_and_masks_is_left_out_of_the_sum(tmp_path):
    """The round ends as if that node had not reported in it."""
    transport = Listening(fed.inside(tmp_path / "nodes")._nodes)
    transport.lost = "site-2"
    wanted = fed.experiment("fedavg", sets=(*SETS, "rounds=1", "evaluate.every=1"))
    found = fed.served(wanted, transport, tmp_path / "lost")
    assert found["methods"]["FedAvg"]["seeds"][0]["traffic"]["participations"] == 3

    class Mute(Inside):
        def call(self, site, blob, seconds):
            if site == "site-2" and wire.unpack(blob).kind == "step":
                return wire.refusal("failed")
            return super().call(site, blob, seconds)

    plain = fed.experiment("fedavg", sets=("rounds=1", "evaluate.every=1"))
    fed.served(plain, Mute(fed.inside(tmp_path / "others")._nodes), tmp_path / "without")
    states = [fed.server_state(tmp_path / kind, "FedAvg") for kind in ("lost", "without")]
    assert fed.largest_gap(*states) < 1e-6


class Restarting(Inside):
    """Nodes that are all started anew in every round, after training and before the sum."""

    def __init__(self, home):
        super().__init__(fed.inside(home)._nodes)
        self._home, self._new = home, set()

    def call(self, site, blob, seconds):
        message = wire.unpack(blob)
        if message.kind == "keys" and (site, message.head["round"]) not in self._new:
            self._new.add((site, message.head["round"]))
            self._nodes = {**self._nodes, site: fed.inside(self._home)._nodes[site]}
        return super().call(site, blob, seconds)


def test_a_node_started_anew_sums_what_it_kept_on_disk(tmp_path):
    transport = Restarting(tmp_path / "nodes")
    fed.served(fed.experiment("fedper", sets=SETS), transport, tmp_path / "secure")
    assert len(transport._new) == 8
    fed.served(fed.experiment("fedper"), fed.inside(tmp_path / "others"), tmp_path / "plain")
    states = [fed.server_state(tmp_path / kind, "FedPer") for kind in ("plain", "secure")]
    assert fed.largest_gap(*states) < 1e-6


def test_what_cannot_be_summed_is_refused_before_the_first_round(tmp_path):
    def serve(*methods, sets=()):
        wanted = fed.experiment(*methods, sets=(*SETS, *sets))
        fed.served(wanted, fed.inside(tmp_path / "nodes"), tmp_path / "served")

    with pytest.raises(MethodError, match=r"KT-pFL.*sees only that"):
        serve("ktpfl")
    with pytest.raises(MethodError, match="looks at each report by itself"):
        serve("fedavg", sets=("aggregate=median",))
    with pytest.raises(ConfigError, match="which may draw fewer than 3"):
        serve("fedavg", sets=("draw=poisson",))
    with pytest.raises(ConfigError, match=r"a round of 2 nodes under deploy.secure: 3 needed"):
        serve("fedavg", sets=("cohort=2",))


def test_a_node_can_insist_on_masks(tmp_path):
    nodes = fed.inside(tmp_path / "nodes", secure=True)
    with pytest.raises(DeployError, match=r"site-0: it takes part only .* deploy.secure"):
        fed.served(fed.experiment("fedavg"), nodes, tmp_path / "open")
    fed.served(fed.experiment("fedavg", sets=SETS), nodes, tmp_path / "served")
