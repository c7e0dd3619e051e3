"""A run that is stopped by command goes on where it was. Run by `make test-faults`."""

import importlib.util
import json
import subprocess
import sys
import time

import federations as fed
import pytest
from running import ADMIN, MEMBER, CommandFailed, Running

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(
        importlib.util.find_spec("nvflare") is None, reason="nvflare is not installed (extra flare)"
    ),
]
ROUNDS = 80  # enough for two commands to be given before the run is over
TOML = f"""name = "stopped"
rounds = {ROUNDS}
[data]
partition = {{ name = "iid", clients = 2, per_client = 60 }}
[model]
name = "dnn"
hidden = 16
[training]
batch = 2
epochs = 120
[evaluate]
every = {ROUNDS}
[backend]
kind = "sequential"
checkpoint_every = 1
[deploy]
timeout = 60
[[methods]]
name = "fedper"
"""
LIMIT = 300  # seconds for anything that is waited for


def test_a_stopped_run_goes_on_with_resume(tmp_path):
    """Who may stop it does, the command that watches it says so, and nothing that was done is lost.

    Meanwhile `status --json` tells who is there and how far the run is.
    """
    running = Running(tmp_path, 2)
    path, out, words = tmp_path / "stopped.toml", tmp_path / "out", tmp_path / "run.out"
    path.write_text(TOML)
    kit = str(running.kits / ADMIN)
    command = ["run", str(path), "--on", kit, "--out", str(out)]
    watched = None
    try:
        running.start_all()
        with words.open("wb") as file:
            watched = subprocess.Popen(
                [sys.executable, "-m", "idiolect", *command], stdout=file, stderr=file, cwd=tmp_path
            )
        until = time.monotonic() + LIMIT
        while "FedPer: round " not in words.read_text():
            assert watched.poll() is None and time.monotonic() < until, running.told()
            time.sleep(0.1)
        told = json.loads(running.command("status", kit, "--json").stdout)["result"]
        (run,) = told["runs"]
        assert [site["connected"] for site in told["sites"]] == [True, True]
        assert run["label"] == "FedPer" and 0 < run["round"] <= run["rounds"] == ROUNDS
        with pytest.raises(CommandFailed, match="may not do this in the federation"):
            running.command("stop", str(running.kits / MEMBER))
        assert f"stopped {run['run']}" in running.command("stop", kit).stdout
        assert watched.wait(LIMIT) == 8
        assert "the run was stopped; what was trained is kept: go on with --resume" in (
            words.read_text()
        )
        assert json.loads(running.command("status", kit, "--json").stdout)["result"]["runs"] == []
        assert "nothing is running" in running.command("stop", kit).stdout
        printed = running.run(path, out, "--resume")
        assert "FedPer: round 1 of" not in printed
    finally:
        if watched is not None and watched.poll() is None:
            watched.kill()
            watched.wait()
        running.close()
    content = fed.simulated(fed.experiment(toml=TOML), tmp_path / "simulated")
    found = json.loads((out / "result.json").read_text())
    assert fed.scores(found, "FedPer") == fed.scores(content, "FedPer")
    states = [fed.server_state(tmp_path / kind, "FedPer") for kind in ("simulated", "out")]
    assert fed.largest_gap(*states) < 1e-6
    traffic = found["methods"]["FedPer"]["seeds"][0]["traffic"]
    assert traffic["participations"] == 2 * ROUNDS
