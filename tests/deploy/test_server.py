"""The hub: checks every report, passes over who fails, and goes on where it stopped."""

import json
import threading
import time

import federations as fed
import pytest
from meddling import RUBBISH, Meddler, Replay

from idiolect.cli.federation_commands import run_on
from idiolect.deploy import protocol
from idiolect.deploy.messenger import FaultLog, Messenger, WaitPolicy
from idiolect.deploy.node_process import InProcess
from idiolect.deploy.protocol import Refused
from idiolect.errors import DeployError, MethodError


def meddled(tmp_path, change, rounds=(), site="site-2"):
    nodes = fed.inside(tmp_path / "nodes")._nodes
    return Meddler(nodes, site, change, rounds)


@pytest.mark.parametrize("kind", RUBBISH)
def test_rubbish_is_left_out_named_and_counted(kind, tmp_path):
    """The run ends as if the node had not taken part: its three reports reach no average."""
    wanted = fed.experiment("fedavg", sets=("rounds=4", "deploy.limit_mb=1", "evaluate.every=4"))
    reason, change = RUBBISH[kind]
    transport = meddled(tmp_path, change)
    found = fed.served(wanted, transport, tmp_path / "served")
    faults = json.loads((tmp_path / "served" / "faults.json").read_text())
    assert faults == {"site-2": {reason: 3}}
    (missed,) = [n for n in found["methods"]["FedAvg"]["notices"] if "site-2" in n]
    assert missed == (
        f"seed 3: site-2 missed 4 of 4 rounds: 1-3 ({protocol.CODES[reason]}), "
        f"4 ({protocol.CODES['excluded']})"
    )
    assert ("site-2", 2) in transport.asked and ("site-2", 3) not in transport.asked
    silent = meddled(tmp_path / "silent", lambda answer: protocol.refusal("failed"))
    fed.served(wanted, silent, tmp_path / "without")
    states = [fed.server_state(tmp_path / kind, "FedAvg") for kind in ("served", "without")]
    assert fed.largest_gap(*states) == 0
    assert found["methods"]["FedAvg"]["seeds"][0]["traffic"]["participations"] == 12


def test_a_report_that_is_sent_again_in_later_rounds_counts_once(tmp_path):
    """In order, finite, of the right form, and of the first round: no copy reaches an average."""
    wanted = fed.experiment("fedavg", sets=("rounds=4", "evaluate.every=4"))
    found = fed.served(wanted, meddled(tmp_path, Replay()), tmp_path / "served")
    faults = json.loads((tmp_path / "served" / "faults.json").read_text())
    assert faults == {"site-2": {"round": 3}}
    assert found["methods"]["FedAvg"]["seeds"][0]["traffic"]["participations"] == 4 * 4 - 3
    silent = meddled(
        tmp_path / "silent", lambda answer: protocol.refusal("failed"), rounds=(1, 2, 3)
    )
    fed.served(wanted, silent, tmp_path / "without")
    states = [fed.server_state(tmp_path / kind, "FedAvg") for kind in ("served", "without")]
    assert fed.largest_gap(*states) == 0


class Loser(InProcess):
    """Nodes, and a network that loses the letters to one of them for a round or two."""

    def __init__(self, nodes):
        super().__init__(nodes)
        self.knocked = threading.Event()

    def call(self, site, blob, seconds):
        message = protocol.unpack(blob)
        if site == "site-1" and message.kind == "step" and message.head["round"] == 1:
            raise Refused("timeout")
        if message.kind == "knock":
            try:
                return super().call(site, blob, seconds)
            finally:
                self.knocked.set()
        if message.head.get("round") == 3:
            assert self.knocked.wait(60)
        return super().call(site, blob, seconds)


def test_a_node_whose_letter_was_lost_is_asked_again(tmp_path):
    """It is silent for good otherwise: it waits for a letter, and the hub for its answer."""
    wanted = fed.experiment("fedavg", sets=("rounds=8", "evaluate.every=8"))
    found = fed.served(wanted, Loser(fed.inside(tmp_path / "nodes")._nodes), tmp_path / "served")
    faults = json.loads((tmp_path / "served" / "faults.json").read_text())
    assert faults == {"site-1": {"timeout": 1}}
    part = found["methods"]["FedAvg"]["seeds"][0]["traffic"]["participations"]
    assert 8 * 4 - 4 <= part < 8 * 4  # it missed the second round, and was back after the fourth


def test_a_node_that_said_no_is_not_knocked_back_in(tmp_path):
    """Only silence is mended by a sign of life; refusing to join is not."""
    post = Messenger(fed.inside(tmp_path), WaitPolicy(), FaultLog())
    post.lose("site-1", "data")
    for _ in range(2):
        post.ask(dict.fromkeys(post.transport.sites, protocol.pack("step")), 30, lambda *_: None)
    assert post.absent() == ["site-1"]


def test_a_node_that_fails_once_is_back_in_the_next_round(tmp_path):
    wanted = fed.experiment("fedavg", sets=("rounds=3",))
    transport = meddled(tmp_path, lambda answer: protocol.refusal("memory"), rounds=(1,))
    found = fed.served(wanted, transport, tmp_path / "served")
    assert found["methods"]["FedAvg"]["seeds"][0]["traffic"]["participations"] == 11
    assert ("site-2", 2) in transport.asked


def test_texts_and_data_do_not_reach_the_hub(tmp_path):
    """A node that answers no with words of its own is only told by a code."""
    wanted = fed.experiment("fedavg")
    transport = meddled(tmp_path, lambda answer: protocol.pack("no", {"code": "patient Smith"}))
    found = fed.served(wanted, transport, tmp_path / "served")
    assert "Smith" not in json.dumps(found)
    assert "Smith" not in (tmp_path / "served" / "faults.json").read_text()


def test_too_few_reports_stop_the_run_and_a_new_start_goes_on(tmp_path):
    """The second start ends as one that was never stopped: nothing is trained twice."""
    wanted = fed.experiment("fedper", sets=("rounds=4", "deploy.minimum=1.0"))
    transport = meddled(tmp_path, lambda answer: protocol.refusal("crashed"), rounds=(2,))
    with pytest.raises(DeployError, match=r"round 3: 3 of 4 nodes reported, 4 needed.*site-2"):
        fed.served(wanted, transport, tmp_path / "served")
    fed.served(wanted, fed.inside(tmp_path / "nodes"), tmp_path / "served")
    fed.served(wanted, fed.inside(tmp_path / "others"), tmp_path / "whole")
    states = [fed.server_state(tmp_path / kind, "FedPer") for kind in ("served", "whole")]
    assert fed.largest_gap(*states) == 0


class Sleeper(InProcess):
    """Nodes, one of which answers its first round only when the others are some rounds ahead."""

    def __init__(self, nodes):
        super().__init__(nodes)
        self._ahead = threading.Event()

    def call(self, site, blob, seconds):
        message = protocol.unpack(blob)
        if message.kind == "step" and message.head["round"] == 5:
            self._ahead.set()
        if site == "site-1" and message.kind == "step" and message.head["round"] == 0:
            assert self._ahead.wait(120)
        return super().call(site, blob, seconds)


def test_a_straggler_costs_one_timeout_and_comes_back(tmp_path):
    wanted = fed.experiment("fedavg", sets=("rounds=40", "deploy.timeout=10", "evaluate.every=40"))
    transport = Sleeper(fed.inside(tmp_path / "nodes")._nodes)
    found = fed.served(wanted, transport, tmp_path / "served")
    faults = json.loads((tmp_path / "served" / "faults.json").read_text())
    assert faults == {"site-1": {"timeout": 1}}
    part = found["methods"]["FedAvg"]["seeds"][0]["traffic"]["participations"]
    assert 3 * 40 < part < 4 * 40


def test_nodes_that_do_not_fit_are_named_when_they_join(tmp_path):
    wanted = fed.experiment("fedavg")
    nodes = fed.inside(tmp_path / "nodes")._nodes
    twice = {**nodes, "site-3": nodes["site-2"]}
    with pytest.raises(DeployError, match=r"clients \[0, 1, 2, 2\], expected different ones"):
        fed.served(wanted, InProcess(twice), tmp_path / "a")
    with pytest.raises(DeployError, match="has 4 clients and the federation 3 sites"):
        fed.served(wanted, fed.inside(tmp_path / "three", 3), tmp_path / "b")

    class Old(InProcess):
        def call(self, site, blob, seconds):
            return (
                protocol.refusal("version")
                if site == "site-1"
                else super().call(site, blob, seconds)
            )

    with pytest.raises(DeployError, match="site-1: it runs a version of idiolect that"):
        fed.served(wanted, Old(nodes), tmp_path / "c")


def test_pooled_methods_are_refused_before_anyone_is_asked(tmp_path):
    with pytest.raises(MethodError, match="everyone's data in one place"):
        fed.served(fed.experiment("centralised"), fed.inside(tmp_path), tmp_path / "served")
    with pytest.raises(MethodError, match="everyone's data in one place"):
        run_on("no kit", fed.experiment("centralised"), tmp_path / "out", False, [])


def test_how_many_must_report():
    assert [WaitPolicy(minimum=0.5).needed(n) for n in (1, 2, 3, 4, 5)] == [1, 1, 2, 2, 3]
    assert [WaitPolicy(minimum=3).needed(n) for n in (2, 3, 9)] == [2, 3, 3]
    assert WaitPolicy(minimum=1.0).needed(7) == 7


def test_whoever_has_not_answered_is_named(tmp_path):
    """The slow one asks, while it is waited for, who that is; afterwards it is nobody."""
    seen = []

    class Slow(InProcess):
        def call(self, site, blob, seconds):
            if site == "fast":
                done.set()
            elif done.wait(30):
                while post.waiting() != ["slow"]:
                    time.sleep(0.01)
                seen.extend(post.waiting())
            return protocol.pack("yes")

    done = threading.Event()
    post = Messenger(Slow({"fast": None, "slow": None}), WaitPolicy(), FaultLog())
    letters = dict.fromkeys(("slow", "fast"), protocol.pack("step"))
    assert post.ask(letters, 30, lambda site, answer: None) == {}
    assert seen == ["slow"] and post.waiting() == []


def test_what_an_engine_raises_is_a_site_that_cannot_be_reached(tmp_path):
    class Broken(InProcess):
        def call(self, site, blob, seconds):
            raise RuntimeError("cable cut at patient Smith's")

    post = Messenger(Broken({"a": None}), WaitPolicy(), FaultLog(tmp_path / "faults.json"))
    failed = post.ask({"a": protocol.pack("step")}, 5, lambda site, answer: None)
    assert failed["a"].reason == "unreachable" and "Smith" not in str(failed["a"])
    assert post.absent() == ["a"]
    assert FaultLog(tmp_path / "faults.json").faults == {"a": {"unreachable": 1}}
    assert isinstance(failed["a"], Refused)
