"""Nodes that come when a run is over get the models that the simulator's newcomers get."""

import federations as fed
import numpy as np
import pytest
import torch

from idiolect.core.capabilities import (
    ArchitectureState,
    FinalExchange,
    NewcomerHistory,
    NewcomerMessage,
    has,
)
from idiolect.deploy.limits import UNLIMITED
from idiolect.deploy.newcomer_nodes import WantedModel, adapt_nodes, find_model
from idiolect.deploy.node import Node
from idiolect.deploy.node_process import InProcess
from idiolect.deploy.personal_models import load_personal_model
from idiolect.deploy.serve_experiment import make_messenger
from idiolect.deploy.site import NodeSettings
from idiolect.errors import ConfigError, DataError, DeployError, MethodError
from idiolect.experiment.adapt import adapt
from idiolect.experiment.build import build_federations
from idiolect.experiment.stored_models import make_model
from idiolect.methods import METHODS
from idiolect.results.run_files import load_model

LATE = ("late-0", "late-1")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Two newcomers' files, and both in one with a column of clients for the simulator."""
    home = tmp_path_factory.mktemp("late")
    held = build_federations(fed.experiment("fedavg", sets=("data.partition.clients=6",)))[
        0
    ].dataset
    rows = np.split(np.arange(500, 570), [40])
    for name, own in zip(LATE, rows, strict=True):
        np.savez(home / f"{name}.npz", x=held.x[own, 0], y=held.y[own])
    both = np.concatenate(rows)
    names = np.repeat(LATE, [len(own) for own in rows])
    np.savez(home / "late.npz", x=held.x[both, 0], y=held.y[both], client=names)
    return home


def guests(home, digits, **changes):
    changes = {"policy": UNLIMITED, "packages": fed.HOST.packages, **changes}
    sites = [NodeSettings(n, "test", home / n, str(digits / f"{n}.npz"), **changes) for n in LATE]
    return InProcess({site.name: Node(site) for site in sites})


def visited(home, digits, transport=None, **wanted):
    found = find_model(home / "served", WantedModel("r1", **wanted), fed.HOST)
    transport, folder = transport or guests(home, digits), home / "visit"
    return adapt_nodes(
        make_messenger(transport, found.text, folder, fed.HOST), found, "v1", folder, host=fed.HOST
    )


def trained(home, *methods, **changes):
    wanted = fed.experiment(*methods, **changes)
    fed.served(wanted, fed.inside(home / "nodes"), home / "served")
    return wanted.methods[0].label


def unlike():
    """One method of each kind that newcomers to it differ in; all others go one of these ways."""
    asked = (NewcomerHistory, ArchitectureState, NewcomerMessage, FinalExchange)
    kinds = {}
    for name, kind in METHODS.items():
        method = kind()
        if not kind.pooled:
            way = (*(has(method, one) for one in asked), kind.starts_over, kind.tunes)
            kinds.setdefault(way, name)
    return [*kinds.values(), "fedfomo", "pfedhn"]  # a server that remembers every client


@pytest.mark.parametrize("name", unlike())
def test_newcomers_get_the_simulators_models(name, digits, tmp_path):
    """Leaf by leaf and score by score."""
    label = trained(tmp_path, name, sets=("evaluate.keep_globals=true",))
    here = str(digits / "late.npz")
    try:
        content = adapt(tmp_path / "served", here, out=tmp_path / "simulated", trust_code=True)
    except MethodError as refusal:
        with pytest.raises(MethodError) as told:
            visited(tmp_path, digits)
        assert str(told.value) == str(refusal)
        return
    found = visited(tmp_path, digits)
    for key in ("label", "seed", "round", "met", "newcomers"):
        assert found[key] == content[key], key
    for name in LATE:
        leaves = load_model(tmp_path / "simulated", label, 3, name)
        own = load_personal_model(tmp_path / name).leaves
        assert own.keys() == leaves.keys()
        assert all(torch.equal(own[leaf], leaves[leaf]) for leaf in own)


def test_a_newcomer_uses_its_model_and_the_run_stays_as_it_was(digits, tmp_path):
    """Under masks too: a newcomer reports nothing, so even a node that insists on them comes."""
    trained(tmp_path, "fedper", sets=("deploy.secure=true", "seeds=[2,3]"))
    before = (tmp_path / "served" / "checkpoints" / "FedPer.safetensors").read_bytes()
    found = visited(tmp_path, digits, guests(tmp_path, digits, secure=True), seed=3)
    assert found["seed"] == 3
    assert (tmp_path / "served" / "checkpoints" / "FedPer.safetensors").read_bytes() == before
    own = load_personal_model(tmp_path / "late-1")
    assert own.about.newcomer and own.clients == 4
    rows = make_model(own, trust=True).predict(digits / "late-1.npz")
    held = np.load(digits / "late-1.npz")
    assert rows.accuracy == np.mean(np.array(rows.predicted, int) == held["y"])
    with pytest.raises(ConfigError, match="--seed is 7, and the run has seeds 2, 3"):
        visited(tmp_path, digits, seed=7)


def test_the_network_of_a_mixed_run_is_chosen(digits, tmp_path):
    toml = fed.TOML.replace('name = "federations:normed"', "each = { mlr = 2, dnn = 2 }")
    trained(tmp_path, "feddf", toml=toml)
    with pytest.raises(ConfigError, match=r"several networks; add --network mlr \| dnn"):
        visited(tmp_path, digits)
    visited(tmp_path, digits, network="dnn")
    groups = fed.fused_models(tmp_path / "served", "FedDF")
    own = load_personal_model(tmp_path / "late-0").leaves
    assert all(torch.equal(own[leaf], groups[f"state.groups.1.0.{leaf}"]) for leaf in own) and own


def test_newcomers_who_do_not_fit_are_told(digits, tmp_path):
    trained(tmp_path, "fedavg")
    np.savez(tmp_path / "late-0.npz", x=np.zeros((9, 20, 20), np.uint8), y=np.arange(9))
    np.savez(tmp_path / "late-1.npz", x=np.zeros((9, 20, 20), np.uint8), y=np.arange(9))
    with pytest.raises(DeployError, match="the run and late-0 differ in the shape of an example"):
        visited(tmp_path, digits, guests(tmp_path / "small", tmp_path))
    with pytest.raises(DeployError, match="site-1: its data is missing, cannot be read"):
        visited(tmp_path, digits, fed.inside(tmp_path / "shares", 2))  # with --client
    with pytest.raises(DataError, match="this server holds no run"):
        find_model(tmp_path / "elsewhere", WantedModel("r9"))
