"""What an operator sees: lost and returning sites, attendance, restored copies, several runs."""

import json
import shutil
import time

import federations as fed
import pytest

from idiolect.deploy import protocol
from idiolect.deploy.messenger import Transport
from idiolect.deploy.protocol import Refused
from idiolect.errors import ConfigError

SETS = ("model.name=mlr", "rounds=4", "evaluate.every=4")


class Flaky(Transport):
    """Nodes, some of which cannot be reached in some rounds; it can say who is there."""

    looks = True

    def __init__(self, inner, gone):
        self._inner, self.sites = inner, inner.sites
        self._gone, self.round = gone, 0
        self.asked = []

    def call(self, site, blob, seconds):
        message = protocol.unpack(blob)
        if message.kind == "step":
            self.round = message.head["round"] + 1
            self.asked.append((site, self.round))
        if not self.present(site):
            raise Refused("unreachable")
        answer = self._inner.call(site, blob, seconds)
        if message.kind == "step" and site == self.sites[-1]:
            self.round += 0.5  # the round is over
            time.sleep(0.1)
        return answer

    def present(self, site):
        first, last = self._gone.get(site, (0, 0))
        return not first <= self.round <= last or not self.round


def attendance(found):
    (seed,) = found["methods"]["FedAvg"]["seeds"]
    return seed["attendance"]


def test_a_site_that_returns_takes_part_in_the_next_round_and_each_round_is_recorded(
    tmp_path, monkeypatch
):
    """Gone in rounds 2 and 3: it is looked for, and is back in the fourth."""
    monkeypatch.setattr("idiolect.deploy.messenger._LOOK", 0.01)
    transport = Flaky(fed.inside(tmp_path / "nodes"), {"site-1": (2, 3)})
    found = fed.served(fed.experiment("fedavg", sets=SETS), transport, tmp_path / "served")
    own = attendance(found)
    why = protocol.CODES["unreachable"]
    assert own["site-1"]["spans"] == [{"from": 2, "to": 3, "why": why}]
    assert (own["site-1"]["reported"], own["site-1"]["missed"]) == (2, 2)
    assert all(own[site]["reported"] == 4 for site in ("site-0", "site-2", "site-3"))
    assert ("site-1", 3) not in transport.asked  # passed over at once
    assert (
        f"seed 3: site-1 missed 2 of 4 rounds: 2-3 ({why})"
        in (found["methods"]["FedAvg"]["notices"])
    )


def test_a_site_that_is_not_scored_is_named_and_has_not_diverged(tmp_path, monkeypatch):
    monkeypatch.setattr("idiolect.deploy.server._LAST_CALL", 0.0)
    transport = Flaky(fed.inside(tmp_path / "nodes"), {"site-1": (4, 9)})
    found = fed.served(fed.experiment("fedavg", sets=SETS), transport, tmp_path / "served")
    notices = " ".join(found["methods"]["FedAvg"]["notices"])
    assert "client 1 was not there when models were scored" in notices
    assert "diverged" not in notices


def test_a_server_folder_from_an_older_copy_is_recognised(tmp_path):
    """Brought back to round 1 when the nodes are at 4: said, with what to do; nobody is blamed."""
    nodes, folder, copy = fed.inside(tmp_path / "nodes"), tmp_path / "served", tmp_path / "copy"
    fed.served(fed.experiment("fedavg", sets=(*SETS[:1], "rounds=1")), nodes, folder)
    shutil.copytree(folder, copy)
    wanted = fed.experiment("fedavg", sets=SETS)
    fed.served(wanted, nodes, folder)
    state = sorted((tmp_path / "nodes").rglob("state/**/*.safetensors"))
    before = [path.read_bytes() for path in state]
    with pytest.raises(ConfigError, match="its folder is an older copy"):
        fed.served(wanted, nodes, copy)
    assert state and [path.read_bytes() for path in state] == before
    faults = json.loads((copy / "faults.json").read_text())
    assert all(set(own) == {"ahead"} for own in faults.values())


def test_two_runs_side_by_side_do_not_get_in_each_others_way(tmp_path):
    """A node keeps several runs open, and forgets those that are over."""
    nodes = fed.inside(tmp_path / "nodes")
    alone = fed.served(
        fed.experiment("fedper", sets=SETS), fed.inside(tmp_path / "alone"), tmp_path / "a"
    )
    first = Interrupting(nodes, tmp_path)
    both = fed.served(fed.experiment("fedper", sets=SETS), first, tmp_path / "b")
    assert first.other is not None and fed.scores(both, "FedPer") == fed.scores(alone, "FedPer")
    assert fed.scores(first.other, "FedPer") == fed.scores(alone, "FedPer")
    assert all(not node._runs for node in nodes._nodes.values())


class Interrupting(Transport):
    """In the second round, before a first step is passed on, does a whole other run."""

    def __init__(self, inner, folder):
        self._inner, self.sites, self._folder, self.other = inner, inner.sites, folder, None

    def call(self, site, blob, seconds):
        message = protocol.unpack(blob)
        if message.kind == "step" and message.head["round"] == 1 and site == "site-0":
            if self.other is None:
                wanted = fed.experiment("fedper", sets=SETS)
                self.other = fed.served(wanted, self._inner, self._folder / "o", run="r9")
        return self._inner.call(site, blob, seconds)
