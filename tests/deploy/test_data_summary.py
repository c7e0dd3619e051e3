"""What one site tells when joining, or claims to weigh, moves the others within bounds."""

import json

import numpy as np
import pytest
import torch
from test_limits import FEDAVG, TOML, site

from idiolect.data.dataset import Moments, decoding
from idiolect.deploy import data_summary, handshake, protocol
from idiolect.deploy.data_summary import ExampleForm
from idiolect.deploy.flare.watchdog import node_words
from idiolect.deploy.messenger import Answer
from idiolect.deploy.node import Node
from idiolect.deploy.node_process import InProcess
from idiolect.deploy.protocol import Refused
from idiolect.deploy.serve_experiment import make_messenger, serve
from idiolect.engine.outcome import Silent
from idiolect.experiment.load import parse_experiment
from idiolect.experiment.portable import export_experiment

SETS = ('data.normalise="feature"', "rounds=6", "evaluate.every=6", "training.epochs=2")


class Liar(InProcess):
    """Honest nodes, the answers of one of whom are changed on the way."""

    def __init__(self, nodes, kind, change):
        super().__init__({node._site.name: node for node in nodes})
        self._kind, self._change = kind, change

    def call(self, site, blob, seconds):
        answer = super().call(site, blob, seconds)
        if site != "clinic-0" or protocol.unpack(blob).kind != self._kind:
            return answer
        told = protocol.unpack(answer)
        head, leaves = self._change(dict(told.head), dict(told.leaves))
        return protocol.pack("yes", head, leaves)


def run(folder, kind="open", change=lambda head, leaves: (head, leaves), sets=(), methods=FEDAVG):
    """Run five clinics, the first of which lies; return the result, and who failed in what."""
    folder.mkdir(exist_ok=True)
    nodes = [Node(site(folder, 110, f"clinic-{n}", n)) for n in range(5)]
    text = export_experiment(parse_experiment(TOML + methods, (*SETS, *sets)))
    content = serve(make_messenger(Liar(nodes, kind, change), text, folder), text, "r1", folder)
    faults = folder / "faults.json"
    return content, json.loads(faults.read_text()) if faults.exists() else {}


def far(head, leaves):
    return head, {**leaves, "mean": leaves["mean"] + 1e12}


def wide(head, leaves):
    return head, {**leaves, "squares": leaves["squares"] * 1e12}


MEDIAN = FEDAVG + 'aggregate = "median"\n'


@pytest.mark.parametrize(("lie", "methods"), [(far, FEDAVG), (wide, MEDIAN)], ids=["far", "wide"])
def test_one_sites_statistics_do_not_move_the_others(lie, methods, tmp_path):
    """With the plain merge of all rows, shift or scale is 1e6 and more, and accuracy 51 %."""
    content, counted = run(tmp_path, "open", lie, methods=methods)
    (told,) = json.loads((tmp_path / "scaling.json").read_text())["seeds"]
    assert np.abs(told["shift"]).max() < 0.5  # the honest clinics' columns have mean 0 and spread 1
    assert 0.7 < min(told["scale"]) and max(told["scale"]) < 1.5
    (found,) = content["methods"].values()
    assert "clinic-0 sent means or deviations far" in found["notices"][0] and not counted
    assert np.mean([one["global"]["accuracy"] for one in found["seeds"][0]["clients"][1:]]) > 0.8


IMPOSSIBLE = {
    "infinite count": lambda head, leaves: ({**head, "count": [float("inf")]}, leaves),
    "other count": lambda head, leaves: ({**head, "count": [67.0]}, leaves),
    "no count": lambda head, leaves: ({**head, "count": None}, leaves),
    "negative squares": lambda head, leaves: (head, {**leaves, "squares": -leaves["squares"]}),
    "NaN": lambda head, leaves: (head, {**leaves, "mean": leaves["mean"] * float("nan")}),
    "no measurement": lambda head, leaves: (head, {**leaves, "mean": leaves["mean"] + 1e30}),
    "other shape": lambda head, leaves: (head, {**leaves, "mean": leaves["mean"][:, :3]}),
    "nothing": lambda head, leaves: (head, {}),
}


@pytest.mark.parametrize("lie", ["infinite count", "NaN"])
def test_impossible_statistics_leave_their_site_out_and_the_run_goes_on(lie, tmp_path):
    sets = ("rounds=1", "evaluate.every=1")
    _, counted = run(tmp_path, "open", IMPOSSIBLE[lie], sets=sets)
    assert counted == {"clinic-0": {"statistics": 1}}


@pytest.mark.parametrize("lie", IMPOSSIBLE)
def test_impossible_statistics_are_seen(lie):
    form = ExampleForm([12], "float32", ["a", "b"], False, [], None, False)
    entry = handshake.NodeEntry("x", 0, "x", [[66, 22, 22]], form, "", "", 0, [""])
    leaves = {"mean": torch.zeros(1, 12), "squares": torch.ones(1, 12) * 66}

    def answer(head, leaves):
        return Answer(protocol.Message("yes", head, leaves), 0, 0)

    head = {"count": [66.0]}
    data_summary.refuse_impossible("x", answer(head, leaves), entry, 1)
    with pytest.raises(Refused) as caught:
        data_summary.refuse_impossible("x", answer(*IMPOSSIBLE[lie](head, leaves)), entry, 1)
    assert caught.value.reason == "statistics"


SIZES = {"1e30": 1e30, "negative": -66.0, "one more": 67.0}


@pytest.mark.parametrize("told", SIZES)
def test_a_report_that_claims_other_sizes_is_refused_and_counted(told, tmp_path):
    def claim(head, leaves):
        return head, {**leaves, "size": torch.full_like(leaves["size"], SIZES[told])}

    _, counted = run(tmp_path, "step", claim, sets=("rounds=2", "evaluate.every=2"))
    assert counted == {"clinic-0": {"sizes": 2}}


@pytest.mark.parametrize("compress", ["fp16", "topk"])
def test_true_sizes_pass_compressed(compress, tmp_path):
    sets = ("rounds=1", "evaluate.every=1", f"deploy.compress={compress}")
    assert run(tmp_path, sets=sets)[-1] == {}


def told(mean, deviation, count=100):
    mean, deviation = np.array(mean, float), np.array(deviation, float)
    return Moments(float(count), mean, deviation**2 * count)


def test_sites_that_differ_honestly_are_joined_as_if_their_rows_lay_in_one_place():
    sites = {
        "a": told([0.0, 5.0, 0.0], [1.0, 2.0, 0.0]),
        "b": told([3.0, 9.0, 0.0], [2.0, 1.0, 0.0], 50),
        "c": told([-4.0, 0.0, 0.1], [1.0, 3.0, 0.3], 20),  # only here the last column varies
    }
    found, far = data_summary.joined(sites, robust=False)
    plain = sites["a"].merged(sites["b"]).merged(sites["c"])
    assert far == []
    assert np.array_equal(found.mean, plain.mean) and np.array_equal(found.squares, plain.squares)


@pytest.mark.parametrize("liars", [1, 2])
def test_fewer_than_half_move_a_robust_scaling_within_what_the_others_have(liars):
    draw = np.random.default_rng(0)
    honest = {f"h{n}": told(draw.normal(size=4), 1 + draw.random(4)) for n in range(liars + 1)}
    lies = {f"l{n}": told(np.full(4, 1e9), np.full(4, 1e9)) for n in range(liars)}
    found, _ = data_summary.joined({**honest, **lies}, robust=True)
    shift, scale = decoding(found, "feature", as_bytes=False)
    means = np.stack([one.mean for one in honest.values()])
    assert np.all(shift <= means.max(0) + 1e-6) and np.all(shift >= means.min(0) - 1e-6)
    assert np.all(scale < 10)


def test_bytes_have_bounds():
    form = ExampleForm([1, 2, 2], "uint8", ["a", "b"], False, [], None, False)
    flat = np.full((1, 2, 2), 100.0)
    data_summary._refuse_impossible("x", Moments(10.0, flat, flat * 10), 10, form)
    data_summary._refuse_impossible("x", Moments(40.0, flat[:, :1, :1], flat[:, :1, :1]), 10, form)
    for mean, squares in ((flat * 3, flat), (flat, flat * 1e7), (-flat, flat)):
        with pytest.raises(Refused):
            data_summary._refuse_impossible("x", Moments(10.0, mean, squares), 10, form)


def test_a_unit_mix_up_is_named_to_the_lead_and_to_the_site_before_round_1(tmp_path, caplog):
    """Glucose of one site in mmol/L: 18 times less, well within ten spreads."""
    tmp_path.mkdir(exist_ok=True)
    nodes = []
    for n in range(4):
        own = site(tmp_path, 110, f"clinic-{n}", n)
        path = tmp_path / f"clinic-{n}.csv"
        head, *lines = path.read_text().splitlines()
        by = 18 if n == 2 else 1
        cells = [one.split(",", 1) for one in lines]
        changed = [f"{(105 + 25 * float(one)) / by:.4f},{rest}" for one, rest in cells]
        path.write_text("\n".join([head, *changed]) + "\n")
        nodes.append(Node(own))
    text = export_experiment(parse_experiment(TOML + FEDAVG, (*SETS, "rounds=1")))
    said = []

    class Heard(Silent):
        def note(self, text):
            said.append(text)

        def tick(self, tick):
            said.append("round 1")

    transport = InProcess({node._site.name: node for node in nodes})
    serve(make_messenger(transport, text, tmp_path), text, "r1", tmp_path, watch=Heard())
    first = said[: said.index("round 1")]
    assert len([one for one in first if "the mean of clinic-2" in one and "mmol/L" in one]) == 1
    assert not [one for one in said if "the mean of clinic-0" in one]
    told = [record for record in caplog.records if "beside the other sites: " in record.message]
    assert len(told) == 1 and "clinic-2" in told[0].message


def test_the_console_of_a_node_shows_remarks_and_refusals_only():
    kept = "2026 WARNING beside the other sites: x: check its units"
    assert node_words(kept) == "beside the other sites: x: check its units"
    assert node_words("2026 ERROR refused with 'data': no column") == "refused 'data': no column"
    assert node_words("2026 ERROR refused with 'closed': a message") == ""
    assert node_words("2026 INFO round 3 of fedavg is done") == ""
