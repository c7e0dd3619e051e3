"""What a server learned, recorded round by round, resumable, ordered and drawn."""

import dataclasses
import json
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

import idiolect
from idiolect.cli import app
from idiolect.errors import DataError
from idiolect.results import trace
from idiolect.results.trace import Trace, similar_order

invoke = CliRunner().invoke

TOML = """
name = "traced"
seeds = [0, 1]
rounds = 5
data.partition = { name = "iid", clients = 4, per_client = 30 }
data.public = { source = "embedded", size = 40 }
model.name = "mlr"
evaluate.every = 2
backend.width = 4
backend.checkpoint_every = 1

[[methods]]
name = "ktpfl"
sample = 20
lr = 0.1

[[methods]]
name = "fedavg"
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("traced")
    (home / "traced.toml").write_text(TOML)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IDIOLECT_CACHE", str(home / "cache"))
        idiolect.run(home / "traced.toml", out=home / "run")
    return home


def test_the_matrix_is_recorded_at_the_evaluated_rounds_and_the_last(home):
    """Every second round of five, and the fifth; only methods with something to say have a file."""
    found = trace.read_trace(home / "run", "KT-pFL")
    assert (found.rounds, found.seeds) == ((2, 4, 5), (0, 1))
    assert found.clients == tuple(f"client {n}" for n in range(4))
    assert found.values["weights"].shape == (3, 2, 4, 4)
    np.testing.assert_allclose(found.values["weights"].sum(-1), 1, atol=1e-5)
    assert not np.array_equal(found.values["weights"][0], found.values["weights"][1])
    assert trace.traced_labels(home / "run") == ["KT-pFL"]
    name, course = found.matrix(1)
    assert name == "weights" and np.array_equal(course, found.values["weights"][:, 1])
    assert np.array_equal(found.matrix()[1], found.values["weights"].mean(1))


def test_a_resumed_run_has_the_trace_of_an_uninterrupted_one(home):
    """Three rounds, then five: the third, which was a last one, is not among the records."""
    for rounds in (3, 5):
        change = [f"rounds={rounds}"]
        idiolect.run(home / "traced.toml", change, out=home / "again", resume=rounds == 5)
        if rounds == 3:
            assert trace.read_trace(home / "again", "KT-pFL").rounds == (2, 3)
    once, twice = (trace.read_trace(home / run, "KT-pFL") for run in ("run", "again"))
    assert once.rounds == twice.rounds
    assert np.array_equal(once.values["weights"], twice.values["weights"])


def test_records_can_be_asked_for_more_often(home):
    change = ["evaluate.trace=1", "methods.FedAvg.rounds=1"]
    idiolect.run(home / "traced.toml", change, out=home / "often")
    assert trace.read_trace(home / "often", "KT-pFL").rounds == (1, 2, 3, 4, 5)


def test_what_is_not_there_is_one_line(home):
    with pytest.raises(DataError, match=r"no trace of 'FedAvg'; it holds those of KT-pFL"):
        trace.read_trace(home / "run", "FedAvg")
    found = trace.read_trace(home / "run", "KT-pFL")
    with pytest.raises(DataError, match="there is no seed 9; the run has 0, 1"):
        found.matrix(9)
    scalar = Trace("other", (1,), (0,), ("a", "b"), {"drift": np.zeros((1, 1))})
    with pytest.raises(DataError, match="other recorded drift, and no matrix over its 2 clients"):
        scalar.matrix()


def test_clients_of_a_group_stand_together():
    """Three groups, dealt out in turn and shuffled: the walk leaves none before it is done."""
    draw = np.random.default_rng(3)
    group = draw.permutation(np.arange(12) % 3)
    same = group[:, None] == group
    matrix = np.where(same, 0.2, 0.02) + draw.uniform(0, 0.01, (12, 12))
    order = similar_order(matrix)
    assert sorted(order) == list(range(12))
    assert (np.diff(group[order]) != 0).sum() == 2


@pytest.mark.parametrize("count", [1, 2])
def test_few_clients_can_be_ordered(count):
    assert sorted(similar_order(np.ones((count, count)))) == list(range(count))


def test_the_picture_shows_every_pair_once_and_in_order(home, tmp_path):
    """Read the SVG back: a titled cell for each pair that is not zero, darker for more."""
    course = np.array([[[0.5, 0.5], [0.5, 0.5]], [[0.8, 0.2], [0.0, 1.0]]])
    text = trace.matrix_svg("KT-pFL <c>", ["a", "b & c"], [1, 9], course)
    svg = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    cells = {
        cell.find(f"{space}title").text: float(cell.get("fill-opacity"))
        for cell in svg.iter(f"{space}rect")
        if cell.find(f"{space}title") is not None
    }
    assert cells == {
        "a from a: 0.8000": 0.8,
        "a from b & c: 0.2000": 0.2,
        "b & c from b & c: 1.0000": 1.0,
    }
    words = [node.text for node in svg.iter(f"{space}text")]
    assert "KT-pFL <c>" in words and "round 1" in words


def test_the_command_draws_and_prints(home, tmp_path):
    run = str(home / "run")
    drawn = invoke(app, ["trace", run, "--svg", str(tmp_path / "c.svg")])
    assert drawn.exit_code == 0, drawn.output
    ElementTree.parse(tmp_path / "c.svg")
    shown = invoke(app, ["trace", run, "--seed", "1"])
    assert "KT-pFL: weights, seed 1, round 5" in shown.output
    told = json.loads(invoke(app, ["trace", run, "--json"]).output)["result"]
    assert told["rounds"] == [2, 4, 5] and sorted(told["order"]) == [0, 1, 2, 3]
    wrong = invoke(app, ["trace", str(tmp_path)])
    assert wrong.exit_code == 3 and wrong.stderr.count("\n") == 1


def test_a_trace_ahead_of_its_checkpoint_is_cut_when_the_run_goes_on(home, tmp_path):
    """Killed between the two files: rounds after the checkpoint are recorded anew, once."""
    change = ["evaluate.trace=1", "rounds=3"]
    idiolect.run(home / "traced.toml", change, out=tmp_path)
    ahead = trace.read_trace(tmp_path, "KT-pFL")
    later = {name: np.concatenate([own, 9 + own[-1:]]) for name, own in ahead.values.items()}
    trace.write_trace(tmp_path, dataclasses.replace(ahead, rounds=(1, 2, 3, 4), values=later))
    change = ["evaluate.trace=1", "rounds=5"]
    idiolect.run(home / "traced.toml", change, out=tmp_path, resume=True)
    found = trace.read_trace(tmp_path, "KT-pFL")
    assert found.rounds == (1, 2, 3, 4, 5)
    np.testing.assert_allclose(found.values["weights"].sum(-1), 1, atol=1e-5)
