"""Over FLARE and TLS: a lead tries to extract rows with the stock commands; a server helps it."""

import dataclasses
import importlib.util
import json

import numpy as np
import pytest
import torch
from inverting import exact, inverted, patients
from running import ADMIN, CommandFailed, Running
from test_limits import TOML, joined

from idiolect.core import checkpoint
from idiolect.deploy.limits import UNLIMITED
from idiolect.deploy.node import Node
from idiolect.deploy.site import NodeSettings
from idiolect.experiment.load import parse_experiment

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("nvflare") is None, reason="nvflare is not installed (extra flare)"
    ),
    pytest.mark.faults,
]
ATTACK = (
    TOML.replace("seeds = [0]", "seeds = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]")
    .replace("rounds = 2", "rounds = 1")
    .replace("batch = 16", "batch = 1\nsteps = 1")
)
METHOD = '[[methods]]\nname = "fedavg"\n'


@pytest.fixture
def federation(tmp_path):
    running = Running(tmp_path, 2, policy=None)  # the kits as they are made
    try:
        for number, site in enumerate(running.sites):
            patients(tmp_path / f"{site}.csv", 110, number)
        yield running
    finally:
        running.close()


def start(running, *names):
    running.start("server")
    for site in names:
        running.start(site, "--data", str(running.folder / f"{site}.csv"), "--label", "diagnosis")


def alone(running, *sites):
    """Let the lead's kit name these sites only, as anyone who holds it can."""
    path = running.kits / ADMIN / "idiolect.toml"
    lines = path.read_text().splitlines()
    named = ", ".join(f'"{site}"' for site in sites)
    changed = [f"sites = [{named}]" if line.startswith("sites") else line for line in lines]
    path.write_text("\n".join(changed) + "\n")


def refused(running, text, out):
    path = running.folder / f"{out}.toml"
    path.write_text(text)
    with pytest.raises(CommandFailed) as caught:
        running.run(path, running.folder / out)
    (line,) = [one for one in caught.value.done.stderr.splitlines() if "policy" in one]
    return line


def test_a_leads_extraction_is_refused_in_one_line(federation):
    start(federation, "site-0", "site-1")
    both = refused(federation, ATTACK + METHOD, "both")
    assert "site-0: its site's policy does not allow" in both and "(max_seeds)" in both
    few = ATTACK.replace("[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]", "[0]") + METHOD
    assert "(min_batch)" in refused(federation, few, "few")
    assert "(min_cohort)" in refused(federation, "cohort = 1\n" + TOML + METHOD, "cohort")
    alone(federation, "site-0")
    assert "(min_sites)" in refused(federation, ATTACK + METHOD, "alone")
    log = (federation.kits / "site-0" / "idiolect" / "node.log").read_text()
    assert "a run of 1 sites; min_sites is 2" in log
    # What is ordinary is done, at the limits that kits are made with.
    alone(federation, "site-0", "site-1")
    path = federation.folder / "ordinary.toml"
    path.write_text(TOML + METHOD)
    federation.run(path, federation.folder / "ordinary")
    result = json.loads((federation.folder / "ordinary" / "result.json").read_text())
    assert result["complete"]


OFF = "min_sites = 1\nmin_cohort = 1\nmin_batch = 1\nmin_examples = 1\nmax_seeds = 10\n"


def test_without_limits_the_same_command_shows_the_rows(federation):
    """The control: it is the limits that the test above sees."""
    federation.allow("site-0", OFF)
    start(federation, "site-0")
    alone(federation, "site-0")
    path, out = federation.folder / "attack.toml", federation.folder / "attack"
    path.write_text(ATTACK + METHOD)
    federation.run(path, out)
    data = federation.folder / "site-0.csv"
    rows = torch.from_numpy(np.loadtxt(data, delimiter=",", skiprows=1, usecols=range(12)))
    # What everyone starts from follows from the seed; anyone with the software can compute it.
    site = NodeSettings("any", "test", federation.folder / "any", str(data), {"label": "diagnosis"})
    node = Node(dataclasses.replace(site, policy=UNLIMITED))
    wanted = parse_experiment(ATTACK + METHOD)
    joined(node, wanted, clients=1)
    named, _ = checkpoint.read(out / "checkpoints" / "FedAvg.safetensors")
    # How the columns were scaled is in the lead's folder too.
    encoders = json.loads((out / "encoders.json").read_text())["encoders"]
    shown = 0
    for place, seed in enumerate(wanted.seeds):
        before = node._made_runtime(node._joined, "FedAvg", seed)[0].setup.params
        after = {name: named[f"state.server.{place}.{name}"] for name in before}
        shift, scale = (
            torch.tensor([column[key] for column in encoders[place]["columns"]]).double()
            for key in ("shift", "scale")
        )
        shown += bool(exact(inverted(before, after) * scale + shift, rows).any())
    assert shown == 10
