"""A real federation on a frozen base: nodes have it by its digest, and only adapters are sent."""

import federations as fed
import pytest
import torch

from idiolect.core import checkpoint
from idiolect.deploy import protocol
from idiolect.deploy.node import Node
from idiolect.errors import ConfigError
from idiolect.experiment.portable import export_experiment
from idiolect.experiment.stored_models import find_model, make_model
from idiolect.models import MODELS
from idiolect.models.bases import BASES, digest_of
from idiolect.version import VERSION

ADAPTER = """
[adapter]
name = "lora"
rank = 2
"""


@pytest.fixture
def wanted(tmp_path, monkeypatch):
    """An experiment on a small ViT that its author has in a folder."""
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path / "author"))
    model = MODELS["vit"]((1, 28, 28), 10, patch=14, layers=1, width=16, heads=2, inner=24)
    model.save(tmp_path / "bases" / "mine")
    network = f'name = "vit"\npatch = 14\nweights = "{tmp_path / "bases" / "mine"}"'
    toml = fed.TOML.replace('name = "federations:normed"', network)
    toml = toml.replace('auxiliary = { name = "dnn", hidden = 4 }', "") + ADAPTER
    return fed.experiment("ditto", toml=toml)


def test_nodes_with_the_base_give_the_simulators_result_and_send_adapters(
    wanted, tmp_path, monkeypatch
):
    content = fed.simulated(wanted, tmp_path / "simulated")
    text = export_experiment(wanted)
    digest = digest_of(tmp_path / "bases" / "mine")
    assert str(tmp_path) not in text and f'weights = "{digest}"' in text
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path / "operator"))  # another machine
    monkeypatch.setenv(BASES, str(tmp_path / "bases"))
    found = fed.served(wanted, fed.inside(tmp_path / "nodes"), tmp_path / "served")
    assert fed.scores(found, "Ditto") == fed.scores(content, "Ditto")
    # Four projections of 16 × 16 with A and B of rank 2, and a new head of 16 × 10 + 10.
    numbers = 4 * 2 * 2 * 16 + 170
    state = fed.server_state(tmp_path / "served", "Ditto")
    assert sum(leaf.numel() for leaf in state.values()) == numbers
    traffic = content["methods"]["Ditto"]["seeds"][0]["traffic"]
    turns = 2 * 4  # rounds, clients; a report also has a number of examples
    assert (traffic["bytes_down"], traffic["bytes_up"]) == (
        turns * 4 * numbers,
        turns * 4 * (numbers + 1),
    )
    assert max(fed.bytes_beside(found, content, "Ditto"), default=0.0) < 0.2
    # No file of a run holds a weight of the base.
    for file in (tmp_path / "simulated").rglob("*.safetensors"):
        leaves, _ = checkpoint.read(file)
        assert not [name for name in leaves if "norm" in name or "proj.weight" in name], file
    model = make_model(find_model(tmp_path / "simulated", 1))
    assert model(torch.zeros(2, 1, 28, 28, dtype=torch.uint8)).shape == (2, 10)


def test_a_node_without_the_base_refuses_the_experiment(wanted, tmp_path, monkeypatch):
    text = export_experiment(wanted)
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path / "operator"))
    head = {"run": "r1", "version": VERSION, "experiment": text, "methods": {}}
    blob = protocol.pack(
        "open", {**head, "clients": 4, "place": 0, "newcomer": False, "submitter": "lead"}
    )
    node = Node(fed.sites(tmp_path / "nodes")[0])
    assert protocol.unpack(node.answer(blob)).head == {"code": "experiment"}
    with pytest.raises(ConfigError, match="this machine does not have the base sha256:"):
        fed.served(wanted, fed.inside(tmp_path / "nodes"), tmp_path / "served")


def test_from_outside_a_base_is_named_by_its_digest_alone(wanted):
    text = export_experiment(wanted)
    line = next(line for line in text.splitlines() if line.startswith("weights"))
    for other in ("/etc", "../base", "sha256:12"):
        evil = text.replace(line, f'weights = "{other}"')
        with pytest.raises(ConfigError, match="expected a base's digest"):
            fed.make_messenger(fed.InProcess({}), evil, None, fed.HOST)
