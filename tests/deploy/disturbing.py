"""A run on a real federation that something happens to, and what must hold afterwards."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import federations as fed
from running import ADMIN

from idiolect.core import checkpoint

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
timeout = 60
join = 120
minimum = 3
[[methods]]
name = "fedper"
"""
LIMIT = 420  # seconds until a run must have ended, whatever was done to it
FEWER = ("--set", "deploy.minimum=2")  # who is lost is not waited for


def begun(federation, out, *options):
    """Start the command of a run; return it when the first round is over."""
    words = out.with_suffix(".out")
    command = ["run", "faults.toml", "--on", str(federation.kits / ADMIN), "--out", str(out)]
    with words.open("wb") as file:
        run = subprocess.Popen(
            [sys.executable, "-m", "idiolect", *command, *options],
            stdout=file,
            stderr=file,
            cwd=federation.folder,
        )
    until = time.monotonic() + LIMIT
    while not re.search("FedPer: round [1-9]", words.read_text()):
        assert run.poll() is None and time.monotonic() < until, federation.told()
        time.sleep(0.1)
    return run


def disturbed(federation, name, fault, *options):
    """Start a run, do `fault` amid its rounds, wait for the end; return results and words."""
    (federation.folder / "faults.toml").write_text(TOML)
    out = federation.folder / name
    run = begun(federation, out, *options)
    try:
        fault()
        assert run.poll() is None, "the run was over before the fault"
        assert run.wait(LIMIT) == 0, federation.told()
    finally:
        if run.poll() is None:
            run.kill()
            run.wait()
    return out, out.with_suffix(".out").read_text()


def kill(*pids, sign=signal.SIGKILL):
    """Send processes a signal, at once; at least one must be there."""
    assert pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sign)


def result(out):
    """Read a run's results, which must be complete."""
    found = json.loads((out / "result.json").read_text())
    assert found["complete"]
    return found


def participations(out):
    """Say how many reports were averaged."""
    return result(out)["methods"]["FedPer"]["seeds"][0]["traffic"]["participations"]


def faults(out):
    """Say who was counted with what."""
    path = out / "faults.json"
    return json.loads(path.read_text()) if path.exists() else {}


def check_nothing_lost(out, faultless):
    """Compare with the fault-free run: scores to the bit, the global model to a millionth."""
    content, state = faultless
    assert fed.scores(result(out), "FedPer") == fed.scores(content, "FedPer")
    assert fed.largest_gap(fed.server_state(out, "FedPer"), state) < 1e-6


def personal(federation, out, number, root=Path("/")):
    """Return a node's personal state of a run and its round; no half-written file is beside it."""
    run = json.loads((out / "federation.json").read_text())["run"]
    home = root / (federation.kits / f"site-{number}" / "idiolect").relative_to("/")
    (path,) = home.glob(f"state/test/client-{number}/{run}/*.safetensors")
    named, meta = checkpoint.read(path)
    assert not list(path.parent.glob(".*.part"))
    return {n: leaf for n, leaf in named.items() if n.startswith("personal")}, meta["round"]


def check_state_on_nodes(federation, out):
    """Every node's file is whole and of the last round."""
    for number in range(NODES):
        assert personal(federation, out, number)[1] == ROUNDS
