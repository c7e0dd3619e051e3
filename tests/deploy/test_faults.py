"""What dies in a real federation, killed for real: the run ends with the fault-free result.

Run by `make test-faults`. A node's training process that dies, and rubbish on the wire, are tested
with every run of the tests: see test_processes.py, test_hub_rounds.py and test_node.py.
"""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import federations as fed
import pytest
from running import ADMIN, Running

from idiolect import checkpoint

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(
        importlib.util.find_spec("nvflare") is None, reason="nvflare is not installed (extra flare)"
    ),
]
ROUNDS, NODES = 12, 3
TOML = f"""name = "faults"
seeds = [0]
rounds = {ROUNDS}
[data]
partition = {{ name = "iid", clients = {NODES}, per_client = 60 }}
[model]
name = "dnn"
hidden = 16
[training]
batch = 4
epochs = 20
lr = 0.01
[evaluate]
every = {ROUNDS}
[backend]
kind = "sequential"
checkpoint_every = 1
[deploy]
timeout = 30
join = 60
minimum = 3
[[methods]]
name = "fedper"
"""
LIMIT = 420  # seconds until a run must have ended, whatever was killed


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    running = Running(folder, NODES)
    (folder / "faults.toml").write_text(TOML)
    try:
        running.start_all()
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def faultless(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulated")
    content = fed.simulated(fed.experiment(toml=TOML), folder)
    return content, fed.server_state(folder, "FedPer")


def disturbed(federation, name, fault, *options):
    """Start a run, do `fault` amid its rounds, wait for the end; return the folder of results."""
    out, words = federation.folder / name, federation.folder / f"{name}.out"
    command = [
        "run",
        "faults.toml",
        "--on",
        str(federation.kits / ADMIN),
        "--out",
        str(out),
        *options,
    ]
    with words.open("wb") as file:
        run = subprocess.Popen(
            [sys.executable, "-m", "idiolect", *command],
            stdout=file,
            stderr=file,
            cwd=federation.folder,
        )
    try:
        until = time.monotonic() + LIMIT
        while "FedPer: round " not in words.read_text() and time.monotonic() < until:
            assert run.poll() is None, federation.told()
            time.sleep(0.1)
        fault()
        assert run.wait(until - time.monotonic()) == 0, federation.told()
    finally:
        if run.poll() is None:
            run.kill()
            run.wait()
    printed = words.read_text()
    assert "round 11 of" in printed or "round 12 of" in printed or "starts again" in printed
    return out, printed


def kill(*pids):
    assert pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def check_nothing_lost(out, faultless):
    content, state = faultless
    found = json.loads((out / "result.json").read_text())
    assert found["complete"]
    assert fed.scores(found, "FedPer") == fed.scores(content, "FedPer")
    assert fed.largest_gap(fed.server_state(out, "FedPer"), state) < 1e-6


def check_state_on_nodes(federation, out):
    """Every node's file is whole and of the last round."""
    run = json.loads((out / "federation.json").read_text())["run"]
    for number, site in enumerate(federation.sites):
        home = federation.kits / site / "idiolect"
        (path,) = home.glob(f"state/test/client-{number}/{run}/*.safetensors")
        _, meta = checkpoint.read(path)
        assert meta["round"] == ROUNDS
        assert not list(path.parent.glob("*.part"))


def test_a_nodes_job_process_is_killed(federation, faultless):
    """FLARE ends the whole job of it; as all must report (minimum), the round is done again."""

    def fault():
        _, *jobs = federation.engine("site-1")
        kill(*jobs)

    out, printed = disturbed(federation, "job", fault)
    assert "starts again from the last whole round" in printed
    check_nothing_lost(out, faultless)
    check_state_on_nodes(federation, out)


def test_the_server_is_killed(federation, faultless):
    out, printed = disturbed(federation, "server", lambda: kill(*federation.engine("server")))
    assert "starts again from the last whole round" in printed
    check_nothing_lost(out, faultless)
    check_state_on_nodes(federation, out)


def test_everything_is_killed_at_once(federation, faultless):
    def fault():
        names = ("server", *federation.sites)
        kill(*(pid for name in names for pid in federation.engine(name)))

    out, printed = disturbed(federation, "all", fault)
    assert "starts again from the last whole round" in printed
    check_nothing_lost(out, faultless)
    check_state_on_nodes(federation, out)


def test_a_nodes_machine_is_lost_and_comes_back(federation, faultless):
    """All processes of a node: the others go on, and it is let in again when it is back."""
    fault, enough = lambda: kill(*federation.engine("site-2")), ("--set", "deploy.minimum=2")
    out, _ = disturbed(federation, "node", fault, *enough)
    found = json.loads((out / "result.json").read_text())
    assert found["complete"]
    traffic = found["methods"]["FedPer"]["seeds"][0]["traffic"]
    assert (NODES - 1) * ROUNDS <= traffic["participations"] <= NODES * ROUNDS
    if traffic["participations"] == NODES * ROUNDS:
        check_nothing_lost(out, faultless)
    run = json.loads((out / "federation.json").read_text())["run"]
    (path,) = (federation.kits / "site-2").glob(f"idiolect/state/test/*/{run}/*.safetensors")
    _, meta = checkpoint.read(path)
    assert 1 <= meta["round"] <= ROUNDS
