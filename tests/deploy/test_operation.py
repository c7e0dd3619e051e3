"""What an operator sees: lost and returning sites, attendance, restored copies, several runs."""

import base64
import json
import shutil
import time

import federations as fed
import numpy as np
import pytest
from typer.testing import CliRunner

from idiolect.cli import app
from idiolect.deploy import handshake, protocol
from idiolect.deploy.limits import UNLIMITED
from idiolect.deploy.messenger import Transport
from idiolect.deploy.node import Node
from idiolect.deploy.node_process import InProcess
from idiolect.deploy.protocol import Refused
from idiolect.deploy.site import NodeSettings
from idiolect.engine.outcome import Silent
from idiolect.errors import ConfigError
from idiolect.experiment.components import build_method
from idiolect.experiment.portable import export_experiment

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


def test_folders_brought_back_from_a_copy_go_on_as_if_nothing_had_been(tmp_path):
    """As docs/operate.md has it, of the server and of a node, between two rounds of a run."""
    wanted = fed.experiment("fedper", sets=("rounds=4", "evaluate.every=4"))
    half = fed.experiment("fedper", sets=("rounds=2", "evaluate.every=2"))
    home, folder = tmp_path / "nodes", tmp_path / "served"
    fed.served(half, fed.inside(home), folder)
    for one in (folder, home / "site-1"):
        shutil.copytree(one, tmp_path / "backup" / one.name)
        shutil.rmtree(one)
        shutil.copytree(tmp_path / "backup" / one.name, one)
    fed.served(wanted, fed.inside(home), folder)
    fed.simulated(wanted, tmp_path / "simulated")
    states = [fed.server_state(tmp_path / kind, "FedPer") for kind in ("simulated", "served")]
    assert fed.largest_gap(*states) < 1e-6


def test_a_node_from_an_older_copy_takes_part_again(tmp_path):
    """Its personal state is that of the copy; nothing is refused."""
    home, folder = tmp_path / "nodes", tmp_path / "served"
    for rounds in (1, 2, 4):
        wanted = fed.experiment("fedper", sets=(f"rounds={rounds}", f"evaluate.every={rounds}"))
        if rounds == 4:
            shutil.rmtree(home / "site-1")
            shutil.copytree(tmp_path / "backup", home / "site-1")
        found = fed.served(wanted, fed.inside(home), folder)
        if rounds == 1:
            shutil.copytree(home / "site-1", tmp_path / "backup")
    seed = found["methods"]["FedPer"]["seeds"][0]
    assert seed["attendance"]["site-1"]["reported"] == 4 and not seed["left_out"]


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


GLUCOSE = """
name = "glucose"
seeds = [1]
rounds = 1
[data]
normalise = "feature"
classes = ["ill", "well"]
[model]
name = "mlr"
[[methods]]
name = "fedavg"
"""


class Notes(Silent):
    """What the lead is told, and whether a round was done before."""

    def __init__(self):
        self.notes, self.begun = [], False

    def begin(self, label, round, rounds):
        self.begun = True

    def note(self, text):
        if not self.begun:
            self.notes.append(text)


def test_a_site_with_other_units_is_named_before_the_first_round(tmp_path, caplog):
    """Glucose in mmol/L at one of four sites, in mg/dL at the others."""
    nodes = {}
    for place in range(4):
        draw = np.random.default_rng(place)
        glucose, age = draw.normal(110, 25, 60), draw.normal(50, 12, 60)
        told = glucose / 18 if place == 2 else glucose
        words = np.where(glucose > 125, "ill", "well")
        lines = [f"{g:.3f},{a:.2f},{w}" for g, a, w in zip(told, age, words, strict=True)]
        path = tmp_path / f"{place}.csv"
        path.write_text("\n".join(["glucose,age,label", *lines]) + "\n")
        site = NodeSettings(
            f"clinic-{place}", "test", tmp_path / f"clinic-{place}", str(path), policy=UNLIMITED
        )
        nodes[site.name] = Node(site)
    watch = Notes()
    wanted = fed.experiment(toml=GLUCOSE)
    found = fed.served(wanted, InProcess(nodes), tmp_path / "served", watch=watch)
    (note,) = [text for text in watch.notes if "clinic-2" in text]
    assert "units" in note and not any(f"clinic-{n} " in t for t in watch.notes for n in (0, 1, 3))
    assert note in found["methods"]["FedAvg"]["notices"]
    # On the site's own console too, and on no other's.
    shown = [r.getMessage() for r in caplog.records if r.name == "idiolect.node"]
    assert [text for text in shown if "beside the other sites" in text] == [
        f"beside the other sites: {note}"
    ]


def test_comments_and_layout_of_a_method_are_no_other_method(monkeypatch):
    """A node of a version in which a comment was mended joins; one with another step does not."""
    method = build_method(fed.experiment("fedavg").methods[0])
    own, read = handshake.method_fingerprint(method), handshake._source
    changes = {
        "a comment": (lambda text: f"# Mended.\n\n{text}\n", True),
        "a docstring": (lambda text: text.replace('"""', '"""Mended: ', 1), True),
        "a line broken": (lambda text: text.replace("(", "(\n", 1) if "(" in text else text, True),
        "a sign": (lambda text: text.replace(" + ", " - "), False),
        "another default": (lambda text: text.replace("= 0.0", "= 0.5"), False),
    }
    for kind, (change, same) in changes.items():
        monkeypatch.setattr(handshake, "_source", lambda module, c=change: c(read(module)))
        assert (handshake.method_fingerprint(method) == own) is same, kind


def test_show_and_report_have_who_was_there(tmp_path, monkeypatch):
    """The record of each site: in the terminal and on the page, with rounds and cause."""
    monkeypatch.setattr("idiolect.deploy.messenger._LOOK", 0.01)
    monkeypatch.setattr("idiolect.deploy.server._LAST_CALL", 0.0)
    transport = Flaky(fed.inside(tmp_path / "nodes"), {"site-1": (2, 3)})
    fed.served(fed.experiment("fedavg", sets=SETS), transport, tmp_path / "served")
    shown = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["show", str(tmp_path / "served")])
    why = protocol.CODES["unreachable"]
    assert "Who was there" in shown.output and f"2-3 ({why})" in shown.output
    page = tmp_path / "page.html"
    words = ["report", str(tmp_path / "served"), "--out", str(page)]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert f"site-1: 2 rounds; missed 2-3 ({why})" in page.read_text()


class Refusing(Transport):
    """Nodes, one of which has the wrong data; all are there."""

    looks = True

    def __init__(self, inner, code, times=99):
        self._inner, self.sites, self._code, self._left = inner, inner.sites, code, times
        self.opened = 0

    def call(self, site, blob, seconds):
        if protocol.unpack(blob).kind == "open" and site == "site-1":
            self.opened += 1
            self._left -= 1
            if self._left >= 0:
                return protocol.refusal(self._code)
        return self._inner.call(site, blob, seconds)


@pytest.mark.parametrize(("code", "starts"), [("data", 1), ("busy", 3)])
def test_what_a_site_refuses_for_good_is_told_at_once_and_what_passes_is_tried_again(
    code, starts, tmp_path, monkeypatch
):
    """By the server's whole end of a job: wrong data ends the run; a busy site is asked again."""
    pytest.importorskip("nvflare")
    from idiolect.deploy.flare import flare_job

    monkeypatch.setattr(flare_job, "_PAUSE", 0.01)
    sets = ("rounds=1", "evaluate.every=1", "model.name=mlr", "deploy.packages=[]")
    text = export_experiment(fed.experiment("fedavg", sets=sets)).encode()
    transport = Refusing(fed.inside(tmp_path / "nodes"), code, times=2 if code == "busy" else 99)
    side = flare_job.ServerSide("r1", base64.b64encode(text).decode(), list(transport.sites), [])
    (tmp_path / "job").mkdir()
    ended = side.finished(transport, tmp_path / "home", tmp_path / "job", "lead@hub.org")
    assert transport.opened == starts
    if code == "data":
        assert ended["state"] == "error" and "site-1: its data is missing" in ended["text"]
    else:
        assert ended == {"state": "done"}
