"""A node that asks other nodes, and a lead that takes another's run: over the real engine.

Run by `make test-faults`. The same within one process: test_signing.py, test_ownership.py.
"""

import importlib.util
import json
import os
from pathlib import Path

import federations as fed
import peering
import pytest
from running import ADMIN, CommandFailed, Running

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(
        importlib.util.find_spec("nvflare") is None, reason="nvflare is not installed (extra flare)"
    ),
]
SECOND = "second@hub.org"
TOML = """name = "peers"
seeds = [0]
rounds = 3
[data]
partition = { name = "iid", clients = 3, per_client = 60 }
[model]
name = "mlr"
[training]
batch = 10
lr = 0.05
[evaluate]
every = 3
[backend]
kind = "sequential"
checkpoint_every = 1
[deploy]
timeout = 120
join = 120
minimum = 3
[[methods]]
name = "fedper"
"""
FALSE = """
import sys

if any("client_train" in word for word in sys.orig_argv):
    import peering

    peering.install()
"""


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """Three nodes, the second of which has a program of its own; two leads."""
    folder = tmp_path_factory.mktemp("peers")
    running = Running(folder, 3, leads=(ADMIN, SECOND))
    (folder / "false").mkdir()
    (folder / "false" / "sitecustomize.py").write_text(FALSE)
    paths = [str(folder / "false"), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(paths), peering.VARIABLE: str(folder / "notes")}
    try:
        running.start("server")
        for number, site in enumerate(running.sites):
            words = ("--data", "embedded", "--client", str(number))
            running.start(site, *words, environment=own if site == "site-1" else None)
        (folder / "peers.toml").write_text(TOML)
        yield running
    finally:
        running.close()


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("secure", [False, True])
def test_a_node_gets_no_report_of_its_peers(federation, secure):
    """It calls them with the hub's message, its own, and in the server's name."""
    folder, name = federation.folder, "secure" if secure else "open"
    (folder / "notes").unlink(missing_ok=True)
    sets = ("--set", f"deploy.secure={json.dumps(secure)}")
    federation.run(folder / "peers.toml", folder / name, *sets)
    notes = [json.loads(line) for line in (folder / "notes").read_text().splitlines()]
    tried = {(one["peer"], one["way"]) for one in notes}
    ways = ("replayed", "bare", "signed by a node", "forged")
    assert tried == {(peer, way) for peer in ("site-0", "site-2") for way in ways}
    for one in notes:
        assert one["told"] == "identity" or (one["way"] == "forged" and "nothing" in one["told"])
    # Nothing that was asked has disturbed the run.
    found = json.loads((folder / name / "result.json").read_text())
    part = found["methods"]["FedPer"]["seeds"][0]["traffic"]["participations"]
    assert found["complete"] and part == 9 and not (folder / name / "faults.json").exists()
    if not secure:
        content = fed.simulated(fed.experiment(toml=TOML), folder / "simulated")
        assert fed.scores(found, "FedPer") == fed.scores(content, "FedPer")
    log = "\n".join(
        path.read_text(errors="replace") for path in (federation.kits / "site-0").rglob("log.txt")
    )
    assert "called by 'site-1'; only the server is answered" in log
    # In the server's name it gets no further than the engine, which binds names to tokens.
    refused = (federation.kits / "server" / "log.txt").read_text(errors="replace")
    assert "token for client site-1 is bound to origin site-1, not message origin server" in refused


def test_a_lead_gets_nothing_by_the_name_of_anothers_run(federation):
    """It writes the name into its own folder, goes on with the run, adds to it, adapts to it."""
    folder = federation.folder
    path, mine, theirs = folder / "peers.toml", folder / "mine", folder / "theirs"
    federation.run(path, mine)
    run = json.loads((mine / "federation.json").read_text())["run"]
    status = federation.command("status", str(federation.kits / SECOND)).stdout
    assert "nothing is running" in status
    home = federation.kits / "server" / "idiolect"
    nodes = [federation.kits / site / "idiolect" for site in federation.sites]

    def everything():
        found = contents(home / "runs" / run) | contents(home / "owners")
        for node in nodes:
            found |= (
                contents(node / "owners") | contents(node / "state") | contents(node / "models")
            )
        return found

    before = everything()
    assert (
        before and json.loads((home / "owners" / f"{run}.json").read_text())["submitter"] == ADMIN
    )
    more = folder / "more.toml"
    more.write_text(TOML + '[[methods]]\nname = "fedavg"\n')
    for toml in (path, more):
        theirs.mkdir(exist_ok=True)
        (theirs / "federation.json").write_text((mine / "federation.json").read_text())
        with pytest.raises(CommandFailed, match=f"run {run} was not started by {SECOND}"):
            federation.run(toml, theirs, "--resume", kit=SECOND)
    words = ("adapt", str(theirs), "--on", str(federation.kits / SECOND), "--site", "site-0")
    with pytest.raises(CommandFailed, match=f"run {run} was not started by {SECOND}"):
        federation.command(*words)
    assert everything() == before
    assert {file.name for file in contents(theirs)} == {".lock", "federation.json"}
    # The control: the same, by the one whose run it is.
    federation.run(more, mine, "--resume")
    assert list(json.loads((mine / "result.json").read_text())["methods"]) == ["FedPer", "FedAvg"]
