"""Over NVIDIA FLARE, real processes and mutual TLS: the simulator's results; who may do what."""

import importlib.util
import json
import shutil
import stat

import federations as fed
import numpy as np
import pytest
from running import ADMIN, MEMBER, CommandFailed, Running

from idiolect.deploy.personal_models import load_personal_model
from idiolect.experiment.adapt import adapt
from idiolect.experiment.build import build_federations
from idiolect.results.run_files import load_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nvflare") is None, reason="nvflare is not installed (extra flare)"
)

COMMON = """
seeds = [0]
rounds = 2
[data]
partition = { name = "iid", clients = 2, per_client = 40 }
public = { source = "embedded", size = 260 }
[training]
batch = 10
lr = 0.05
[evaluate]
every = 2
keep_globals = true
[backend]
kind = "sequential"
checkpoint_every = 1
[deploy]
timeout = 60
"""
PARAMETERS = f"""name = "parameters"
{COMMON}
[model]
name = "mlr"
auxiliary = {{ name = "dnn", hidden = 8 }}
[[methods]]
name = "fedavg"
[[methods]]
name = "persfl"
distil_epochs = 1
shares = [0.0, 0.5]
temperatures = [1.0, 5.0]
[[methods]]
name = "pfml"
[[methods]]
name = "portfolio"
tune_epochs = 1
shares = [0.0, 0.5]
"""
PREDICTIONS = f"""name = "predictions"
{COMMON}
[model]
each = {{ mlr = 1, dnn = 1 }}
[[methods]]
name = "ktpfl"
sample = 240
"""


@pytest.fixture
def federation(tmp_path):
    running = Running(tmp_path, 2)
    try:
        running.start_all()
        yield running
    finally:
        running.close()


def _check_parity(federation, tmp_path, name, toml):
    """Run an experiment on the federation; its results are the simulator's."""
    path = tmp_path / f"{name}.toml"
    path.write_text(toml)
    printed = federation.run(path, tmp_path / name)
    assert "as job" in printed and "Results:" in printed
    content = fed.simulated(fed.experiment(toml=toml), tmp_path / f"{name}-simulated")
    found = json.loads((tmp_path / name / "result.json").read_text())
    assert found["complete"] and found["methods"].keys() == content["methods"].keys()
    for label in content["methods"]:
        assert fed.scores(found, label) == fed.scores(content, label)
        here, there = (
            fed.server_state(tmp_path / folder, label) for folder in (f"{name}-simulated", name)
        )
        assert fed.largest_gap(here, there) < 1e-6
        beside = fed.bytes_beside(found, content, label)
        assert len(beside) == 2 and max(beside) < 0.05


def test_nodes_over_tls_give_the_simulators_result(federation, tmp_path):
    """FedAvg, PersFL, PFML and Portfolio, which has a final exchange, in one job; then a guest."""
    _check_parity(federation, tmp_path, "parameters", PARAMETERS)
    with pytest.raises(CommandFailed, match="may not do this in the federation"):
        federation.run(tmp_path / "parameters.toml", tmp_path / "guest", kit=MEMBER)
    home = federation.kits / "site-1" / "idiolect"
    assert len(list(home.glob("models/*/*/*.safetensors"))) == 4
    assert len(list(home.glob("state/test/client-1/*/*.safetensors"))) == 4
    assert not list((federation.kits / "server").rglob("site-*")), "a node's files on the server"
    status = federation.command("status", str(federation.kits / "lead@hub.org")).stdout
    assert status.count(": connected") == 2 and "nothing is running" in status
    _check_newcomer(federation, tmp_path)
    said = (tmp_path / "site-0.out").read_text()
    assert said.count("a run has started") == said.count("is over; waiting for another") == 1
    told = federation.command("status", str(federation.kits / ADMIN), "--json").stdout
    state = json.loads(told)["result"]
    assert state["runs"] == [] and state["federation"] == "test"
    assert state["sites"] == [{"name": n, "connected": True} for n in federation.sites]


@pytest.mark.faults  # in a process `test_parity` shows the same
def test_two_networks_over_tls_give_the_simulators_result(federation, tmp_path):
    _check_parity(federation, tmp_path, "predictions", PREDICTIONS)


def _check_newcomer(federation, tmp_path):
    """A site is added to the running federation and gets the simulator's newcomer's model.

    PersFL's newcomer looks at every round's global model before it adapts to the last. It joins
    with a certificate that was renewed, of which the server was told nothing.
    """
    digits = build_federations(fed.experiment(toml=PREDICTIONS))[0].dataset
    np.savez(tmp_path / "late.npz", x=digits.x[600:640, 0], y=digits.y[600:640])
    federation.sites.append("late")
    told = federation.provision("add")
    assert "kits/late" in told and "kits/site-0" not in told and f"{ADMIN}/idiolect.toml" in told
    federation.provision("renew", "--member", "late")
    kit, renewed = federation.kits / "late", federation.kits / "renewed" / "late"
    old = (kit / "startup" / "client.crt").read_bytes()
    shutil.rmtree(kit / "startup")
    shutil.move(renewed / "startup", kit / "startup")
    assert (kit / "startup" / "client.crt").read_bytes() != old
    federation.start("late", "--data", str(tmp_path / "late.npz"))
    words = ("--on", str(federation.kits / ADMIN), "--site", "late", "--method", "PersFL", "--json")
    done = federation.command("adapt", str(tmp_path / "parameters"), *words)
    found = json.loads(done.stdout)["result"]
    assert found["met"] == [1, 2]
    content = adapt(
        tmp_path / "parameters", tmp_path / "late.npz", "PersFL", out=tmp_path / "adapted"
    )
    (mine,), (theirs,) = found["newcomers"], content["newcomers"]
    assert {**mine, "client": ""} == {**theirs, "client": ""} and mine["client"] == "late"
    here = load_model(tmp_path / "adapted", "PersFL", 0, "newcomer")
    there = load_personal_model(federation.kits / "late" / "idiolect").leaves
    assert fed.largest_gap(here, there) < 1e-6


def test_kits_are_closed_to_foreign_code(tmp_path):
    running = Running(tmp_path, 1)
    for name in ("server", "site-0"):
        local = running.kits / name / "local"
        rights = json.loads((local / "authorization.json").read_text())["permissions"]
        assert all(own.get("byoc", "none") == "none" for own in rights.values())
        assert all(own.get("shell_commands", "none") == "none" for own in rights.values())
        settings = json.loads((local / "resources.json").read_text())
        assert settings["class_list_enforcement_mode"] == "enforce"
        assert settings["allow_log_streaming"] is False
        assert all(entry.endswith(".") for entry in settings["class_allow_list"])
        assert "idiolect.deploy.flare." in settings["class_allow_list"]
        (key,) = (running.kits / name / "startup").glob("*.key")
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    with pytest.raises(CommandFailed, match="is not empty"):
        running.provision("init")
    root = running.kits / "authority" / "root.json"
    assert stat.S_IMODE(root.stat().st_mode) == 0o600
    assert stat.S_IMODE(root.parent.stat().st_mode) == 0o700
    for key in running.kits.rglob("*.key"):  # members' keys are in their kits and nowhere else
        assert key.read_text().splitlines()[1] not in root.read_text()
    for member, words in (("site-7", "is none of server, site-0"), ("server", "is missing")):
        with pytest.raises(CommandFailed, match=words):
            running.provision("renew", "--member", member)
        shutil.rmtree(running.kits / "authority", ignore_errors=True)  # as an owner may
    with pytest.raises(CommandFailed, match="is the kit of a server, expected one of: node"):
        running.command("node", str(running.kits / "server"), "--data", "embedded")
