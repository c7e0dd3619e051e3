"""What nodes tell each other by way of the hub: in sum, in the clear or under masks."""

import federations as fed
import numpy as np
import pytest
import torch
from test_newcomer_nodes import digits, trained, visited  # noqa: F401  (a fixture)
from test_node import code, opening

from idiolect.core import checkpoint, tree
from idiolect.deploy import protocol, secure_sum
from idiolect.deploy.node import Node
from idiolect.deploy.node_process import InProcess
from idiolect.deploy.protocol import Refused
from idiolect.engine.deployment_runtime import ClientRuntime
from idiolect.methods.personalise.choosing import Votes

SMALL = ("methods.Portfolio.tune_epochs=1", "methods.Portfolio.shares=[0.5]", "model.name=mlr")


class Between(InProcess):
    """Nodes, and someone who may do something to a letter before it is delivered."""

    def __init__(self, nodes, meddle):
        super().__init__(nodes)
        self._meddle = meddle
        self.told = []

    def call(self, site, blob, seconds):
        message = protocol.unpack(blob)
        self._meddle(self._nodes[site], site, message)
        answer = super().call(site, blob, seconds)
        if message.kind == "tell":
            self.told.append(protocol.unpack(answer).leaves)
        return answer


def served(tmp_path, meddle=lambda *_: None, name="served", sets=()):
    wanted = fed.experiment("portfolio", sets=(*SMALL, *sets))
    transport = Between(fed.inside(tmp_path / f"{name}-nodes")._nodes, meddle)
    return transport, fed.served(wanted, transport, tmp_path / name)


def facts(content, key):
    return [
        client["facts"][key] for client in content["methods"]["Portfolio"]["seeds"][0]["clients"]
    ]


def test_a_node_that_cannot_tell_is_left_out_and_hears_the_others(tmp_path):
    def silent(node, site, message):
        if (site, message.kind) == ("site-1", "tell"):
            raise Refused("failed")

    _, found = served(tmp_path, silent)
    assert facts(found, "others") == [2.0, 3.0, 2.0, 2.0]
    _, whole = served(tmp_path, name="whole")
    assert facts(whole, "others") == [3.0] * 4


def test_a_node_that_was_started_anew_comes_to_the_same(tmp_path):
    """What it told is forgotten when it is to hear: it trains its candidates again."""

    def forget(node, site, message):
        if message.kind == "judge":
            node._joined.reported = None

    ends = [served(tmp_path, *more)[1] for more in ((), (forget, "again"))]
    assert fed.scores(ends[0], "Portfolio") == fed.scores(ends[1], "Portfolio")


def test_under_masks_the_hub_gets_the_sum_alone(tmp_path):
    """To the fixed point of the masks it is the sum; no node's answer has a number in it."""
    plain, found = served(tmp_path)
    hidden, secure = served(tmp_path, name="secure", sets=("deploy.secure=true",))
    assert [set(leaves) for leaves in plain.told] == [set(Votes._fields)] * 4
    assert hidden.told == [{}] * 4
    for key in ("others", "others_gain", "weights"):
        np.testing.assert_allclose(facts(secure, key), facts(found, key), atol=1e-5)
    sums = []
    for name in ("served", "secure"):
        named, _ = checkpoint.read(tmp_path / name / "checkpoints" / "Portfolio.safetensors")
        sums.append({key: leaf for key, leaf in named.items() if key.startswith("told.0.")})
    assert float(sums[0]["told.0.voices"]) == 4.0 and fed.largest_gap(*sums) < 1e-6


def test_where_no_sum_can_be_formed_each_node_chooses_alone(tmp_path):
    def lost(node, site, message):
        if message.kind == "mask" and message.head["of"] == "tell":
            raise Refused("failed")

    _, found = served(tmp_path, lost, sets=("deploy.secure=true",))
    assert facts(found, "others") == [0.0] * 4
    notices = found["methods"]["Portfolio"]["notices"]
    assert any("nodes heard nothing of each other, so each chose alone" in n for n in notices)


def test_newcomers_hear_those_who_were_there(digits, tmp_path):  # noqa: F811
    trained(tmp_path, "portfolio", sets=SMALL)
    found = visited(tmp_path, digits)
    assert [one["facts"]["others"] for one in found["newcomers"]] == [4.0, 4.0]


class Asked:
    """A node of Portfolio that has joined, and what a server sends it."""

    def __init__(self, home):
        wanted = fed.experiment("portfolio", sets=SMALL)
        self.node = Node(fed.sites(home, 1)[0])
        told = self("open", opening(wanted))
        form = {"run": "r1", "classes": told.head["form"]["classes"]}
        self("agree", form, told.leaves)
        self.sent = self.node._made_runtime(self.node._joined, "Portfolio", 3)[0].form
        self.head = {"run": "r1", "label": "Portfolio", "seed": 3, "round": 0}

    def __call__(self, kind, head, content=()):
        return protocol.unpack(self.node.answer(protocol.pack(kind, head, content)))


@pytest.mark.parametrize(
    ("sums", "reason"),
    [
        ("many", "format"),
        ({"voices": "many"}, "format"),
        ({"voices": [[1.0], [2.0, 3.0]]}, "format"),
        ({"voices": float("nan")}, "nonfinite"),
        ({"voices": 1.0}, "structure"),
        ({**dict.fromkeys(Votes._fields, 1.0)}, "structure"),
    ],
)
def test_sums_that_are_none_are_refused(sums, reason, tmp_path):
    ask = Asked(tmp_path)
    head = {**ask.head, "tested": True, "only_global": False, "keep": False, "newcomers": False}
    answer = ask("judge", {**head, "counted": True, "sums": sums}, ask.sent)
    assert code(answer) == reason


def test_a_node_trains_its_candidates_once_for_what_it_is_sent(tmp_path, monkeypatch):
    """Asked again it remembers; for another model, or after another round, it does not."""
    ask, told = Asked(tmp_path), []
    plain = ClientRuntime.tell

    def counted(*arguments):
        told.append(1)
        return plain(*arguments)

    monkeypatch.setattr(ClientRuntime, "tell", counted)
    first, second = (ask("tell", ask.head, ask.sent).leaves for _ in range(2))
    assert len(told) == 1 and all(first[name].equal(second[name]) for name in Votes._fields)
    other = tree.map(lambda leaf: leaf + 0.5, ask.sent)
    third = ask("tell", ask.head, other).leaves
    assert len(told) == 2 and not third["weights"].equal(first["weights"])
    ask("tell", {**ask.head, "round": 1}, other)
    assert len(told) == 3


def test_a_node_whose_numbers_are_none_adds_nothing_under_masks():
    good = {"a": torch.tensor([0.5, -1.0]), "b": torch.tensor(0.25)}
    assert secure_sum.summand(good).params["a"].tolist() == [0.5, -1.0]
    bad = {**good, "b": torch.tensor(1.5)}
    assert all(not leaf.any() for leaf in secure_sum.summand(bad).params.values())
