"""Secure aggregation: the server gets the sum, and of one node's report only noise."""

from dataclasses import replace

import federations as fed
import numpy as np
import pytest
import torch
from kitmaking import Maker

from idiolect.core.capabilities import Averaging
from idiolect.core.method import Report
from idiolect.deploy import protocol, secure_aggregation, secure_sum
from idiolect.deploy.node import Node, _report
from idiolect.deploy.node_process import InProcess
from idiolect.deploy.protocol import Refused
from idiolect.errors import ConfigError, DeployError, MethodError
from idiolect.methods import METHODS

MEANS = ["fedavg", "fedbn", "ditto", "fedala", "fedproto"]


def report(seed, size=20.0, scale=1.0):
    chance = torch.Generator().manual_seed(seed)
    draw = {"w": torch.randn(30, 40, generator=chance), "b": torch.randn(7, generator=chance)}
    return Report({name: scale * leaf for name, leaf in draw.items()}, torch.tensor(size))


def test_the_sum_is_the_weighted_mean_to_the_fixed_point():
    """Each of n values is rounded by at most 2^-33, so the mean errs by n 2^-33 / sum of sizes."""
    sizes = [12.0, 5.0, 130.0, 1.0]
    reports = [report(n, size) for n, size in enumerate(sizes)]
    values = [secure_sum.fixed(one, len(sizes)) for one in reports]
    found = secure_sum._mean(np.sum(values, axis=0, dtype=np.uint64), reports[0])
    assert float(found.size) == sum(sizes)
    for name, leaf in found.params.items():
        exact = sum(s * r.params[name].double() for s, r in zip(sizes, reports, strict=True))
        assert (leaf - (exact / sum(sizes)).float()).abs().max() <= 1.2e-7 * exact.abs().max()


def test_values_too_large_for_the_sum_are_refused():
    with pytest.raises(Refused) as caught:
        secure_sum.fixed(report(0, scale=1e9), 3)
    assert caught.value.reason == "range"


SETS = ("deploy.secure=true", "deploy.timeout=5")


@pytest.mark.parametrize("name", MEANS)
def test_a_secure_run_gives_the_plain_runs_result(name, tmp_path):
    assert issubclass(METHODS[name], Averaging)
    label = fed.experiment(name).methods[0].label
    for kind, sets in (("plain", ()), ("secure", SETS)):
        wanted = fed.experiment(name, sets=sets)
        fed.served(wanted, fed.inside(tmp_path / kind / "nodes"), tmp_path / kind)
    states = [fed.server_state(tmp_path / kind, label) for kind in ("plain", "secure")]
    assert fed.largest_gap(*states) < 1e-6


class Listening(InProcess):
    """Nodes whose every message the server writes down; one may answer `mask` too late."""

    late = ""
    rounds = (0,)

    def call(self, site, blob, seconds):
        message = protocol.unpack(blob)
        if message.kind == "close":  # their runs are looked at afterwards
            return protocol.pack("yes")
        answer = super().call(site, blob, seconds)
        told = (message, protocol.unpack(answer))
        self.view = [*getattr(self, "view", []), (site, message.kind, *told)]
        if (site, message.kind) == (self.late, "mask") and message.head["round"] in self.rounds:
            raise Refused("timeout")
        return answer

    def answers(self, kind, round=0):
        """What nodes answered in a round, by site; the last answer of each."""
        return {
            site: told
            for site, own, asked, told in self.view
            if own == kind and asked.head["round"] == round
        }


def test_the_server_never_hears_a_report_unmasked(tmp_path):
    """No float tensor leaves a node in a round, and the masked ones look nothing alike."""
    transport = Listening(fed.inside(tmp_path / "nodes")._nodes)
    fed.served(fed.experiment("fedavg", sets=SETS), transport, tmp_path / "served")
    rounds = [told for _, kind, _, told in transport.view if kind == "step"]
    assert len(rounds) == 8 and all(not message.leaves for message in rounds)
    sent = [told.leaves["masked"] for _, kind, _, told in transport.view if kind == "mask"]
    assert len(sent) == 8 and all(leaf.dtype == torch.int64 for leaf in sent)
    assert all(abs((leaf.double() / 2.0**63).mean()) < 0.05 for leaf in sent)
    types = {
        leaf.dtype
        for *_, kind, _, told in transport.view
        for leaf in told.leaves.values()
        if kind in ("keys", "shares", "mask", "confirm", "unmask")
    }
    assert types == {torch.int64, torch.uint8}


ONE = ("rounds=1", "evaluate.every=1")


def values_of(nodes, site):
    """What a node's kept report is in the ring: what the server must not find out."""
    ((_, drawer),) = nodes[site]._joined.runtimes.values()
    return secure_sum.fixed(_report(drawer.kept.report), 3)


def found_by_difference(transport, late, total, round=0):
    """The passive server's attack: all masked reports with the late one, less the sum without."""
    sent = [told.leaves["masked"].numpy() for told in transport.answers("mask", round).values()]
    return np.sum(sent, axis=0).view(np.uint64) - total


def test_a_report_that_comes_too_late_is_left_out_and_stays_hidden(tmp_path):
    """The round ends as if that node had not reported in it; nobody masks a report twice."""
    transport = Listening(fed.inside(tmp_path / "nodes")._nodes)
    transport.late = late = "site-2"
    found = fed.served(fed.experiment("fedavg", sets=(*SETS, *ONE)), transport, tmp_path / "late")
    assert found["methods"]["FedAvg"]["seeds"][0]["traffic"]["participations"] == 3

    class Mute(InProcess):
        def call(self, site, blob, seconds):
            if site == late and protocol.unpack(blob).kind == "step":
                return protocol.refusal("failed")
            return super().call(site, blob, seconds)

    plain = fed.experiment("fedavg", sets=ONE)
    fed.served(plain, Mute(fed.inside(tmp_path / "others")._nodes), tmp_path / "without")
    states = [fed.server_state(tmp_path / kind, "FedAvg") for kind in ("late", "without")]
    assert fed.largest_gap(*states) < 1e-6

    nodes = transport._nodes
    assert sum(kind == "mask" for _, kind, *_ in transport.view) == 4
    total = sum(values_of(nodes, site) for site in nodes if site != late)
    attacked = found_by_difference(transport, late, total)
    assert not (attacked == values_of(nodes, late)).any()
    # Of the late node its key was revealed, and of the others their seeds; never both.
    shares = {site: told.leaves["shares"] for site, told in transport.answers("unmask").items()}
    assert shares.keys() == nodes.keys() - {late}
    assert all(own.shape == (4, secure_aggregation.SHARE) for own in shares.values())
    key = secure_aggregation.recover_secret(
        {n + 1: bytes(shares[f"site-{n}"][2].tolist()) for n in (0, 1, 3)}
    )
    published = secure_aggregation.Keys.read(transport.answers("keys")[late].head["keys"])
    assert secure_aggregation._public(key) == published.mask
    assert secure_aggregation._commitment(key) != published.commitment


def test_nodes_lost_at_any_other_stage_cost_at_most_their_own_report(tmp_path):
    """Before their masked report leaves they are not in the sum; after that they are."""

    class Failing(InProcess):
        def __init__(self, home, *failures):
            super().__init__(fed.inside(home)._nodes)
            self._failures = failures

        def call(self, site, blob, seconds):
            message = protocol.unpack(blob)
            if (site, message.kind, message.head.get("round")) in self._failures:
                return protocol.refusal("failed")
            return super().call(site, blob, seconds)

    sets = ("rounds=3", "evaluate.every=3")
    lost = (("site-2", "keys", 0), ("site-1", "shares", 1), ("site-0", "unmask", 2))
    secure = Failing(tmp_path / "nodes", *lost)
    found = fed.served(fed.experiment("fedavg", sets=(*SETS, *sets)), secure, tmp_path / "secure")
    assert found["methods"]["FedAvg"]["seeds"][0]["traffic"]["participations"] == 3 + 3 + 4
    plain = Failing(tmp_path / "others", ("site-2", "step", 0), ("site-1", "step", 1))
    fed.served(fed.experiment("fedavg", sets=sets), plain, tmp_path / "plain")
    states = [fed.server_state(tmp_path / kind, "FedAvg") for kind in ("secure", "plain")]
    assert fed.largest_gap(*states) < 1e-6


def test_no_second_sum_of_a_round_with_other_members_is_to_be_had(tmp_path):
    """Not by the late node, not by the others, not when all were started anew."""
    transport = Listening(fed.inside(tmp_path / "nodes")._nodes)
    transport.late = late = "site-2"
    wanted = fed.experiment("fedavg", sets=(*SETS, *ONE))
    fed.served(wanted, transport, tmp_path / "late")
    opening = {
        site: [b for s, kind, b, _ in transport.view if s == site and kind in ("open", "agree")]
        for site in transport.sites
    }
    about = {"run": "r1", "label": "FedAvg", "seed": 3, "round": 0, "of": "step", "sum": "ab"}
    for nodes in (transport._nodes, fed.inside(tmp_path / "nodes")._nodes):

        def ask(site, kind, head=about, content=(), nodes=nodes):
            return protocol.unpack(nodes[site].answer(protocol.pack(kind, head, content)))

        if nodes is not transport._nodes:
            for site in nodes:
                for message in opening[site]:
                    ask(site, message.kind, message.head, message.leaves)
        assert ask(late, "keys").head == {"code": "summed"}
        others = [site for site in nodes if site != late]
        keys = {site: ask(site, "keys").head["keys"] for site in others}
        fourth = secure_aggregation.Participant(
            ("r1", "FedAvg", "step", "ab", 3, 0), "site-9"
        ).keys()
        two = dict(list(keys.items())[:2])
        for members in ({**keys, "site-9": list(fourth)}, {**two, "site-9": list(fourth)}):
            for site in others:
                expected = "summed" if site in members else "keys"
                found = ask(site, "shares", {**about, "members": members})
                assert found.head["code"] in ("summed", expected)
        # The same members once more may have the same sum once more.
        assert all(ask(s, "shares", {**about, "members": keys}).kind == "yes" for s in others)


@pytest.mark.parametrize("gone", ["", "site-1"])
def test_a_server_that_dies_between_the_sum_and_its_checkpoint_gets_no_other_sum(
    gone, tmp_path, monkeypatch
):
    """With the same nodes the sum is the same; with fewer, the round is given up."""
    wanted = fed.experiment("fedavg", sets=(*SETS, "rounds=2"))
    fed.served(wanted, fed.inside(tmp_path / "whole" / "nodes"), tmp_path / "whole")

    def dies(*arguments):
        raise KeyboardInterrupt

    home = tmp_path / "nodes"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("idiolect.deploy.server.apply_sum", dies)
        fed.served(wanted, fed.inside(home), tmp_path / "died")

    transport = Listening(fed.inside(home)._nodes)
    if gone:
        plain = transport.call

        def call(site, blob, seconds):
            if site == gone:
                raise Refused("unreachable")
            return plain(site, blob, seconds)

        transport.call = call
    found = fed.served(wanted, transport, tmp_path / "died")["methods"]["FedAvg"]
    heard = [transport.answers(kind, 0) for kind in ("mask", "unmask")]
    taken = found["seeds"][0]["traffic"]["participations"]
    if not gone:
        states = [fed.server_state(tmp_path / kind, "FedAvg") for kind in ("whole", "died")]
        assert fed.largest_gap(*states) < 1e-6 and taken == 8
    else:
        assert heard == [{}, {}] and taken == 3
        assert any("round 1 was given up" in text for text in found["notices"])


def test_the_same_run_again_without_one_node_does_not_give_its_report_away(tmp_path):
    """Another run of the same experiment: the reports of its first round are the same."""
    wanted = fed.experiment("fedavg", sets=(*SETS, *ONE))
    home = tmp_path / "nodes"
    fed.served(wanted, fed.inside(home), tmp_path / "first", run="r1")
    again = Listening(fed.inside(home)._nodes)
    fed.served(wanted, again, tmp_path / "same", run="r2")
    assert len(again.answers("unmask")) == 4
    fewer = Listening(fed.inside(home)._nodes)
    plain = fewer.call
    fewer.call = lambda site, *more: (
        protocol.refusal("failed")
        if (site == "site-3" and protocol.unpack(more[0]).kind == "step")
        else plain(site, *more)
    )
    found = fed.served(wanted, fewer, tmp_path / "fewer", run="r3")
    assert not fewer.answers("mask") and not fewer.answers("unmask")
    assert any("round 1 was given up" in n for n in found["methods"]["FedAvg"]["notices"])


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    maker = Maker(tmp_path_factory.mktemp("kits"))
    lead = {"lead": maker.kit("lead@hub.org", "admin")}
    return lead | {f"site-{n}": maker.kit(f"site-{n}") for n in range(4)}


class Cheating(InProcess):
    """Nodes with kits, and a server that changes what it relays."""

    def __init__(self, home, kits, change=lambda site, message: None):
        sites = [replace(site, kit=kits[site.name]) for site in fed.sites(home)]
        super().__init__({site.name: Node(site) for site in sites})
        self._change, self.codes, self.kinds = change, {}, set()
        self.lead = kits["lead"]

    def call(self, site, blob, seconds):
        message = protocol.unpack(blob)
        if message.kind in ("shares", "mask", "confirm", "unmask"):
            self._change(site, message)
            blob = protocol.pack(*message)
        answer = super().call(site, blob, seconds)
        self.kinds.add(message.kind)
        if protocol.unpack(answer).kind == "no":
            self.codes[site, message.kind] = protocol.unpack(answer).head["code"]
        return answer


def test_nodes_with_kits_sign_their_keys_and_who_survived(kits, tmp_path):
    honest = Cheating(tmp_path / "nodes", kits)
    fed.served(fed.experiment("fedavg", sets=(*SETS, *ONE)), honest, tmp_path / "signed")
    assert not honest.codes and "confirm" in honest.kinds
    plain = fed.experiment("fedavg", sets=ONE)
    fed.served(plain, fed.inside(tmp_path / "others"), tmp_path / "plain")
    states = [fed.server_state(tmp_path / kind, "FedAvg") for kind in ("signed", "plain")]
    assert fed.largest_gap(*states) < 1e-6


def test_a_server_that_relays_keys_of_its_own_gets_nothing(kits, tmp_path):
    """It takes the place of all others, and would read the one that is left."""
    own, names = {}, [f"site-{n}" for n in range(4)]

    def swap(site, message):
        if message.kind == "shares":
            context = message.sum_id()
            for name in set(names) - {site}:
                own[site, name] = secure_aggregation.Participant(context, name)
                found = [*own[site, name].keys()[:3], *message.head["members"][name][3:]]
                message.head["members"][name] = found

    cheat = Cheating(tmp_path / "nodes", kits, swap)
    with pytest.raises(DeployError, match=r"0 of 4 nodes reported"):
        fed.served(fed.experiment("fedavg", sets=(*SETS, *ONE)), cheat, tmp_path / "served")
    assert cheat.codes == dict.fromkeys(((name, "shares") for name in names), "identity")
    assert "mask" not in cheat.kinds


def test_a_server_that_tells_nodes_of_different_survivors_gets_no_sum(kits, tmp_path):
    def split(site, message):
        if site in ("site-0", "site-1") and message.kind in ("confirm", "unmask"):
            message.head["survivors"].remove("site-3")

    cheat = Cheating(tmp_path / "nodes", kits, split)
    sets = (*SETS, *ONE, "deploy.minimum=1")
    found = fed.served(fed.experiment("fedavg", sets=sets), cheat, tmp_path / "served")
    asked = {(name, "unmask"): "identity" for name in kits if name != "lead"}
    assert cheat.codes == asked
    assert any("round 1 was given up" in n for n in found["methods"]["FedAvg"]["notices"])


def test_rounds_given_up_again_and_again_end_the_run(tmp_path):
    class Silent(InProcess):
        def call(self, site, blob, seconds):
            if protocol.unpack(blob).kind == "unmask":
                return protocol.refusal("failed")
            return super().call(site, blob, seconds)

    wanted = fed.experiment("fedavg", sets=(*SETS, "rounds=6", "evaluate.every=6"))
    with pytest.raises(DeployError, match="4 secure sums in a row could not be had"):
        fed.served(wanted, Silent(fed.inside(tmp_path / "nodes")._nodes), tmp_path / "served")


class Restarting(InProcess):
    """Nodes that are all started anew in every round, after training and before the sum."""

    def __init__(self, home):
        super().__init__(fed.inside(home)._nodes)
        self._home, self._new = home, set()

    def call(self, site, blob, seconds):
        message = protocol.unpack(blob)
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
    with pytest.raises(DeployError, match=r"site-0: its site takes part only .* deploy.secure"):
        fed.served(fed.experiment("fedavg"), nodes, tmp_path / "open")
    fed.served(fed.experiment("fedavg", sets=SETS), nodes, tmp_path / "served")
