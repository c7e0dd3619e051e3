"""Nodes as processes: what kills one is its own affair, and costs nothing where it comes back."""

import subprocess
import sys
import time
from pathlib import Path

import federations as fed
import pytest
from typer.testing import CliRunner

import tiny
from idiolect.cli import app
from idiolect.deploy import protocol, serve_experiment
from idiolect.deploy.node import Node
from idiolect.deploy.node_process import InProcess, NodeProcess
from idiolect.deploy.processes import locked
from idiolect.experiment.load import load_experiment
from idiolect.results import document


def test_a_node_ends_with_its_parent(tmp_path):
    """The parent is killed hard; no orphan stays."""
    code = f"""
import sys, time
sys.path[:0] = [{str(Path(__file__).parent)!r}]
from pathlib import Path
import federations as fed
from idiolect.deploy.node_process import NodeProcess
from idiolect.deploy import protocol
child = NodeProcess(fed.sites(Path({str(tmp_path)!r}), 1)[0])
child.answer(protocol.pack("dance"))
print(child.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    until = time.monotonic() + 10
    while time.monotonic() < until and Path(f"/proc/{pid}").exists():
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        if state == "Z":
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{pid}").exists()


def test_one_process_at_a_time_works_with_a_nodes_state(tmp_path):
    with locked(tmp_path) as free, locked(tmp_path, 0.2) as second:
        assert free and not second
    with locked(tmp_path, 0.2) as free:
        assert free


def test_a_child_answers_and_can_be_closed(tmp_path):
    child = NodeProcess(fed.sites(tmp_path, 1)[0])
    assert protocol.unpack(child.answer(b"noise")).head == {"code": "format"}
    assert child.pid
    child.close()
    assert child.pid is None


def test_a_federation_on_one_machine_from_the_command_line(tmp_path, monkeypatch):
    """Run, be refused, go on for another round, and use a node's model; as the simulator scores.

    Only the first run starts processes: what they left is all that the rest goes on from.
    """
    (tmp_path / "e.toml").write_text(fed.TOML.replace("federations:normed", "mine:net") + FEDPER)
    (tmp_path / "mine.py").write_text("from idiolect.models import MODELS\nnet = MODELS['mlr']\n")
    two = "data.partition.clients=2"
    run = ["run", "e.toml", "--on", "local", "--out", "out", "--set", two]
    printed = command(tmp_path, *run)
    assert "2 nodes start" in printed.stdout and "round 2 of 2" in printed.stdout
    again = tiny.here(*run, cwd=tmp_path)
    assert again.returncode == 7 and "already holds a run" in again.stderr
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # another test's
    monkeypatch.setattr(serve_experiment, "Processes", _Inside)
    more = tiny.here(*run, "--resume", "--set", "rounds=3", cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    wanted = fed.experiment(
        "fedper", sets=("model.name=mlr", "rounds=3", "data.partition.clients=2")
    )
    content = fed.simulated(wanted, tmp_path / "simulated")
    found = document.read_document(tmp_path / "out")
    assert fed.scores(found, "FedPer") == fed.scores(content, "FedPer")
    export = ("export", "out/nodes/node-1", "--out", "model.pt2")
    refused = tiny.here(*export, cwd=tmp_path)
    assert refused.returncode == 2 and "--trust-code" in refused.stderr
    exported = tiny.here(*export, "--trust-code", cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    sys.modules.pop("mine")


FEDPER = '[[methods]]\nname = "fedper"\n'


def command(folder, *words):
    done = subprocess.run(
        [sys.executable, "-m", "idiolect", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


class _Inside(InProcess):
    def __init__(self, sites):
        super().__init__({site.name: Node(site) for site in sites})

    def close(self):
        pass


def test_ones_own_file_is_divided_among_local_nodes(tmp_path, monkeypatch):
    """The path is in no experiment that is sent; every node takes its client's rows of the file."""
    monkeypatch.chdir(tmp_path)
    lines = [f"{n % 7},{n % 5},{'abc'[n % 3]},{'yes' if n % 2 else 'no'}" for n in range(60)]
    (tmp_path / "own.csv").write_text("\n".join(["age,dose,site,ill", *lines]))
    toml = fed.TOML.partition("[data]")[0] + (
        '[data]\nsource = "own.csv"\nnormalise = "feature"\n'
        'options = { label = "ill", client = "site" }\n'
        '[model]\nname = "mlr"\n[[methods]]\nname = "fedper"\n'
    )
    (tmp_path / "e.toml").write_text(toml)
    # The same nodes, but in this process: three torches take as long as all else.
    monkeypatch.setattr(serve_experiment, "Processes", _Inside)
    done = CliRunner().invoke(app, ["run", "e.toml", "--on", "local", "--out", "out"])
    assert done.exit_code == 0 and "3 nodes start" in done.output, done.output
    content = fed.simulated(load_experiment("e.toml"), tmp_path / "simulated")
    found = document.read_document(tmp_path / "out")
    first, second = (
        [(c["client"], c["personal"]["accuracy"], c["personal"]["loss"]) for c in own["clients"]]
        for own in (fed.scores(found, "FedPer")[0], fed.scores(content, "FedPer")[0])
    )
    assert [name for name, _, _ in first] == [name for name, _, _ in second] == ["a", "b", "c"]
    for (_, right, loss), (_, other, simulated) in zip(first, second, strict=True):
        assert right == other and loss == pytest.approx(simulated, rel=1e-6)
    for folder in ("out", "simulated"):
        words = ["predict", folder, "--client", "b", "--data", "own.csv", "--out", f"{folder}.csv"]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    assert (tmp_path / "out.csv").read_text() == (tmp_path / "simulated.csv").read_text()
