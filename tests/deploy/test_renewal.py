"""New kits for old members, and the sum under masks over the real engine. `make test-faults`."""

import importlib.util
import json
import shutil

import federations as fed
import pytest
from running import Running

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(
        importlib.util.find_spec("nvflare") is None, reason="nvflare is not installed (extra flare)"
    ),
]
TOML = """name = "renewed"
rounds = 2
[data]
partition = { name = "iid", clients = 3, per_client = 40 }
[model]
name = "dnn"
hidden = 8
[evaluate]
every = 2
[backend]
kind = "sequential"
checkpoint_every = 1
[deploy]
timeout = 60
minimum = 3
secure = true
[[methods]]
name = "fedper"
"""


def test_new_kits_go_on_with_what_the_old_ones_hold(tmp_path):
    """As docs/operate.md has it: new kits of the same name, `idiolect/` copied, --resume."""
    running = Running(tmp_path, 3)
    path, out = tmp_path / "renewed.toml", tmp_path / "out"
    path.write_text(TOML)
    try:
        running.start_all()
        running.run(path, out)
    finally:
        running.close()
    old, running.kits = running.kits, tmp_path / "new-kits"
    words = ("federation", "init", str(tmp_path / "project.toml"), "--out", str(running.kits))
    running.command(*words)
    for name in ("server", *running.sites):
        shutil.copytree(old / name / "idiolect", running.kits / name / "idiolect")
    for site in running.sites:  # new kits have the default policy
        running.allow(site, running.policy)
    shutil.rmtree(old)
    try:
        running.start_all()
        running.run(path, out, "--resume", "--set", "rounds=4")
    finally:
        running.close()
    wanted = fed.experiment(toml=TOML, sets=("rounds=4",))
    fed.simulated(wanted, tmp_path / "simulated")
    states = [fed.server_state(tmp_path / kind, "FedPer") for kind in ("simulated", "out")]
    assert fed.largest_gap(*states) < 1e-6
    found = json.loads((out / "result.json").read_text())
    assert found["methods"]["FedPer"]["seeds"][0]["traffic"]["participations"] == 12


def test_a_renewed_server_certificate_locks_no_running_node_out(tmp_path):
    """As docs/operate.md has it: the server alone is started again; nodes register anew."""
    running = Running(tmp_path, 2)
    path = tmp_path / "short.toml"
    path.write_text(TOML.replace("clients = 3", "clients = 2").replace("secure = true", ""))
    sets = ("--set", "deploy.minimum=2")
    try:
        running.start_all()
        running.run(path, tmp_path / "before", *sets)
        running.provision("renew", "--member", "server")
        running.processes["server"].terminate()
        running.processes["server"].wait(30)
        startup = running.kits / "server" / "startup"
        old = (startup / "server.crt").read_bytes()
        shutil.rmtree(startup)
        shutil.move(running.kits / "renewed" / "server" / "startup", startup)
        assert (startup / "server.crt").read_bytes() != old
        running.start("server")
        running.run(path, tmp_path / "after", *sets)
    finally:
        running.close()
    found = json.loads((tmp_path / "after" / "result.json").read_text())
    assert found["methods"]["FedPer"]["seeds"][0]["traffic"]["participations"] == 4
