"""Buffered rounds: a slow site holds nobody up, and its work counts when it comes."""

import threading

import federations as fed
import pytest
import torch

from idiolect.core.method import Report
from idiolect.deploy import protocol
from idiolect.deploy.buffered import rebased
from idiolect.deploy.messenger import Transport
from idiolect.errors import ConfigError, MethodError

SETS = ("model.name=mlr", "rounds=4", "evaluate.every=4")


def test_a_late_report_counts_as_a_change_of_the_model_it_was_made_from():
    """By hand: sent 1, reported 4, three versions late, the model is at 10: 10 + (4 - 1) / 2."""
    report = Report({"w": torch.tensor([4.0])}, torch.tensor(5.0))
    then, now = {"w": torch.tensor([1.0])}, {"w": torch.tensor([10.0])}
    assert rebased(report, 3, then, now).params["w"].tolist() == [11.5]
    assert rebased(report, 3, then, now).size == 5
    assert rebased(report, 0, then, now) is report


def test_a_late_variance_is_no_change_of_the_one_it_was_made_from():
    """It began at 1 and is 0.2 for everyone now: 0.2 + (0.4 - 1) / 2 would be below zero."""
    report = Report({"norm.running_var": torch.tensor([0.4])}, torch.tensor(5.0))
    then, now = ({"norm.running_var": torch.tensor([value])} for value in (1.0, 0.2))
    found = rebased(report, 3, then, now).params["norm.running_var"]
    assert found.tolist() == pytest.approx([0.3])


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_a_buffer_of_all_sites_gives_the_rounds_of_all_sites(method, tmp_path):
    wanted = fed.experiment(method, sets=(*SETS, "deploy.buffer=4"))
    found = fed.served(wanted, fed.inside(tmp_path / "nodes"), tmp_path / "served")
    content = fed.simulated(fed.experiment(method, sets=SETS), tmp_path / "simulated")
    label = next(iter(content["methods"]))
    assert fed.scores(found, label) == fed.scores(content, label)
    states = [fed.server_state(tmp_path / kind, label) for kind in ("served", "simulated")]
    assert fed.largest_gap(*states) < 1e-6


class Slow(Transport):
    """Nodes, of which one answers its first step only when the others have done three rounds."""

    def __init__(self, inner):
        self._inner, self.sites, self.versions = inner, inner.sites, []
        self._passed = threading.Event()

    def call(self, site, blob, seconds):
        message = protocol.unpack(blob)
        if message.kind == "step":
            self.versions.append((site, message.head["round"]))
            if message.head["round"] == 3 and site == "site-0":
                self._passed.set()
            if site == "site-3" and message.head["round"] == 0:
                assert self._passed.wait(60)
        return self._inner.call(site, blob, seconds)


def test_a_slow_site_holds_nobody_up_and_its_report_counts_when_it_comes(tmp_path):
    """Three of four fill the buffer; the fourth is at work for three rounds, not missing."""
    sets = ("model.name=mlr", "rounds=5", "evaluate.every=5", "deploy.buffer=3")
    transport = Slow(fed.inside(tmp_path / "nodes"))
    found = fed.served(fed.experiment("fedavg", sets=sets), transport, tmp_path / "served")
    own = found["methods"]["FedAvg"]["seeds"][0]["attendance"]
    assert all(own[f"site-{n}"]["reported"] >= 4 for n in range(3))  # the last may be displaced
    late = own["site-3"]
    assert late["missed"] == 0 and late["at_work"] >= 3 and late["reported"] >= 1
    assert late["at_work"] + late["reported"] == 5
    asked = [version for site, version in transport.versions if site == "site-3"]
    assert asked[0] == 0 and len(asked) == len(set(asked)) < 5
    part = found["methods"]["FedAvg"]["seeds"][0]["traffic"]["participations"]
    assert part == sum(one["reported"] for one in own.values())


@pytest.mark.parametrize(
    ("method", "sets", "words"),
    [
        ("pfedme", (), "leave"),
        ("fedavg", ("seeds=[1,2]",), "one seed"),
        ("fedavg", ("cohort=2",), "one seed"),
        ("fedavg", ("deploy.secure=true",), "buffer is for reports that the server sees"),
        ("feddf", (), "does not"),
    ],
)
def test_where_a_late_report_has_no_meaning_buffers_are_refused(method, sets, words, tmp_path):
    if method == "pfedme":  # averages what it is sent: the control
        wanted = fed.experiment(method, sets=(*SETS, "deploy.buffer=4"))
        assert fed.served(wanted, fed.inside(tmp_path / "n"), tmp_path / "s")["complete"]
        return
    with pytest.raises((ConfigError, MethodError), match=words):
        wanted = fed.experiment(method, sets=(*SETS, "deploy.buffer=2", *sets))
        fed.served(wanted, fed.inside(tmp_path / "nodes"), tmp_path / "served")
