"""The benchmark measures what it says, and says so in JSON."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.metadata import version

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from idiolect.bench import measurements, peers, run_benchmark, workloads
from idiolect.bench.run_benchmark import Options, bench
from idiolect.bench.workloads import PflCNN, Workload
from idiolect.cli import app
from idiolect.engine.backend import Backend
from idiolect.errors import ConfigError
from idiolect.methods import FedAvg

SHAPE = (1, 4, 4)


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, workloads.CLASSES))


TINY = Workload("tiny", network, SHAPE, (12, 12, 7), FedAvg(batch=4, lr=0.1))


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(workloads.WORKLOADS, "tiny", TINY)


def test_every_side_is_told_with_what_it_ran_on(tiny, tmp_path):
    lines = []
    found = bench(Options(device="cpu", only=("tiny", "padding"), seconds=0.01), lines.append)
    (row,) = json.loads(json.dumps(found))["workloads"]
    assert list(row["sides"]) == ["plain loop", "sequential", "vectorised"]
    assert not found["faults"]
    for side in row["sides"].values():
        # 31 examples a round: the pace and the time must tell the same story.
        assert side["samples_per_second"] * side["ms"] == pytest.approx(31 * 1e3)
        assert (
            side["first_seconds"] > 0
        )  # not compared with a later round: other work may slow either
    assert row["sides"]["plain loop"]["ratio"] == 1
    assert row["difference"]["float64"] < 1e-12 < row["difference"]["float32"] < 1e-4
    assert found["about"]["torch"] == torch.__version__
    if not found["about"]["pfl"]:
        assert row["peers"]["pfl"] == {"why": "not installed"}
    assert any("vectorised" in line for line in lines)


def test_a_backend_that_computes_something_else_is_a_fault(tiny, monkeypatch):
    right = measurements.simulation

    def wrong(work, fed, backend, build=None):
        if backend.kind == "vectorised":
            work = replace(work, method=replace(work.method, lr=0.2))
        return right(work, fed, backend, build)

    monkeypatch.setattr(measurements, "simulation", wrong)
    found = bench(Options(device="cpu", only=("tiny",), seconds=0.01, peers=False), str)
    assert "differs from the sequential backend" in found["faults"][0]


def test_one_part_that_fails_leaves_the_others_their_turn(tiny, monkeypatch, tmp_path):
    broken = replace(TINY, build=lambda: nn.Linear(3, 3))
    monkeypatch.setitem(workloads.WORKLOADS, "broken", broken)
    lines, kept = [], tmp_path / "b.json"

    def tell(line):
        lines.append((line, json.loads(kept.read_text()) if kept.exists() else None))

    options = Options(device="cpu", only=("broken", "tiny"), seconds=0.01, check=False)
    found = bench(options, tell, kept)
    assert [row["name"] for row in found["workloads"]] == ["tiny"]
    assert found["faults"][0].startswith("broken: ")
    assert json.loads(kept.read_text()) == json.loads(json.dumps(found))
    told = {line.split(":")[0]: before for line, before in lines}
    assert told["FAULT broken"] is None  # told at once, and kept before the next is begun
    assert told["tiny"]["faults"] == found["faults"] and not told["tiny"]["workloads"]


def test_the_loop_trains_as_the_engine_does():
    """With one batch a client, order is nothing: both must average the same models."""
    work = replace(TINY, sizes=(8, 8), method=FedAvg(batch=8, lr=0.1))
    fed = workloads.federation(work.sizes, SHAPE)
    torch.manual_seed(0)
    start = network()
    work = replace(work, build=lambda: _copy(start))
    sim = workloads.simulation(work, fed, Backend("sequential", "cpu"))
    turn = workloads.plain_loop(work, fed, "cpu")
    for _ in range(2):
        sim.advance()
        turn()
    held = turn.__closure__
    cells = [cell.cell_contents for cell in held if isinstance(cell.cell_contents, dict)]
    (loop,) = [cell for cell in cells if set(cell) == set(sim.states[0])]
    for name, value in sim.states[0].items():
        assert torch.allclose(loop[name], value, atol=1e-6), name
        assert not torch.equal(value, start.state_dict()[name]), name


def _copy(model):
    fresh = network()
    fresh.load_state_dict(model.state_dict())
    return fresh


def test_padding_is_what_a_round_of_such_clients_has(monkeypatch):
    monkeypatch.setattr("idiolect.engine.local_group._TINY", 0)  # cut by length, as larger ones are
    sizes = [40, 37, 21, 20, 9, 9, 5, 3]
    fed = workloads.federation(sizes, SHAPE)
    work = replace(TINY, sizes=tuple(sizes))
    sim = workloads.simulation(work, fed, Backend("vectorised", "cpu", width=len(sizes)))
    sim.advance()
    told = measurements.padded_share(sizes, work.method.batch)
    assert sim.padding() == pytest.approx(told)
    assert 0 < told < measurements.padded_share(sizes, work.method.batch, blocks=False)


def test_ragged_partitions_of_the_papers_waste_less_than_a_tenth():
    rows = {row["name"]: row for row in measurements.padding()}
    for name in ("CIFAR-10 DS-2", "CIFAR-10 DS-3"):
        assert rows[name]["one_block"] > 0.3, "ragged enough to say something"
        assert rows[name]["one_run"] < 0.1
        assert rows[name]["five_runs"] < 0.1


def test_the_peers_network_has_its_number_of_parameters():
    assert sum(leaf.numel() for leaf in PflCNN().parameters()) == 1_626_442
    assert any(isinstance(layer, nn.Dropout) for layer in PflCNN().modules())
    assert not any(isinstance(layer, nn.Dropout) for layer in PflCNN(dropout=False).modules())


def test_loops_take_fewer_clients_where_there_are_many():
    many = replace(TINY, sizes=(4,) * 100, cohort=60)
    assert run_benchmark._fewer(many, 5).sizes == (4,) * 5
    assert run_benchmark._fewer(many, 80).examples == many.examples == 240


def test_an_unknown_workload_is_one_line():
    with pytest.raises(ConfigError, match="workload 'dnn' is unknown, expected one of mlr-20"):
        Options(only=("dnn",))
    told = CliRunner().invoke(app, ["bench", "dnn"])
    assert told.exit_code == 2 and len(told.stderr.splitlines()) == 1


def test_the_command_prints_json_and_writes_it(tmp_path):
    told = CliRunner().invoke(
        app, ["bench", "padding", "--json", "--out", str(tmp_path / "b.json")]
    )
    assert told.exit_code == 0
    assert json.loads(told.stdout)["result"] == json.loads((tmp_path / "b.json").read_text())
    assert "DS-3" in told.stderr


def test_a_folder_that_is_not_there_is_told_before_anything_is_measured(tiny, tmp_path):
    lines = []
    with pytest.raises(ConfigError, match=r"gone is no folder to write b.json to; make it first"):
        bench(Options(device="cpu", only=("tiny",)), lines.append, tmp_path / "gone" / "b.json")
    assert not lines


def test_it_needs_torch_and_numpy_alone(tmp_path):
    absent = ("pydantic", "typer", "rich", "pyarrow", "safetensors", "PIL", "scipy", "pandas")
    code = (
        f"import sys, runpy; sys.modules.update(dict.fromkeys({absent!r}))\n"
        f"sys.argv = ['bench', 'padding', '--out', {str(tmp_path / 'b.json')!r}]\n"
        "runpy.run_module('idiolect.bench', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "b.json").read_text())["padding"]


def test_a_peers_own_trouble_is_told_beside_it(monkeypatch):
    def refuses(work, device, count):
        raise RuntimeError("no room\nat all")

    monkeypatch.setattr(peers, "PEERS", {"torch": refuses, "absent-peer": refuses})
    told = peers.time_peers(TINY, "cpu")
    assert told["torch"]["why"] == f"{version('torch')} failed: RuntimeError: no room"
    assert told["absent-peer"] == {"why": "not installed"}


def test_a_peers_rounds_are_timed_but_for_the_first(monkeypatch):
    monkeypatch.setattr(peers, "PEERS", {"torch": lambda work, device, count: [9.0, 1.0, 2.0, 1.5]})
    told = peers.time_peers(TINY, "cpu")["torch"]
    assert told["ms"] == 1500 and told["samples_per_second"] == pytest.approx(31 / 1.5)


@pytest.mark.parametrize("name", ["gru-20", "vit-20", "resnet10-20", "resnet18-10"])
def test_networks_of_users_are_stacked(name):
    """Two clients of two examples each: no word about falling back, and equal to one by one."""
    work = replace(workloads.WORKLOADS[name], sizes=(2, 2), method=FedAvg(batch=2, lr=0.01))
    if "resnet" in name:
        work = replace(work, build=partial(work.build, width=8))
    fed = workloads.federation(work.sizes, work.shape)
    ends = []
    for kind in ("vectorised", "sequential"):
        torch.manual_seed(0)
        backend = Backend(kind, "cpu", width=2 if kind == "vectorised" else None)
        sim = workloads.simulation(work, fed, backend)
        assert not sim.notices
        sim.advance()
        ends.append(list(sim.states[0].values()))
    for left, right in zip(*ends, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-5)
