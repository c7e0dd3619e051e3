"""Newcomers to FedDF: each gets the fused model of the architecture it chooses."""

import numpy as np
import pytest
import torch

import idiolect
from idiolect.core import checkpoint
from idiolect.errors import ConfigError
from idiolect.results.run_files import load_model

TOML = """
name = "fused"
rounds = 2
data.partition = { name = "iid", clients = 4, per_client = 40 }
data.public = { source = "embedded", size = 30 }
model.architectures = ["mlr", { name = "dnn", hidden = 8 }]
training.lr = 0.1
backend.width = 4
methods = [{ name = "feddf", sample = 20 }]
"""


@pytest.mark.parametrize(("network", "place"), [("mlr", 0), ("dnn", 1)])
def test_a_newcomer_uses_the_model_of_its_architecture(tmp_path, monkeypatch, network, place):
    """What it deploys is, leaf by leaf, what the checkpoint holds for that architecture."""
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fused.toml").write_text(TOML)
    idiolect.run("fused.toml", out="run")
    digits = idiolect.federation("embedded", "iid", clients=2, per_client=20).dataset
    np.savez("late.npz", x=digits.x[:20, 0], y=digits.y[:20])
    with pytest.raises(ConfigError, match=r"several networks; add --network mlr \| dnn"):
        idiolect.adapt("run", "late.npz")
    found = idiolect.adapt("run", "late.npz", network=network, out="out")
    named, _ = checkpoint.read(tmp_path / "run" / "checkpoints" / "FedDF.safetensors")
    start = f"state.groups.{place}.0."
    fused = {name.removeprefix(start): own for name, own in named.items() if name.startswith(start)}
    mine = load_model("out", "FedDF", 0, found["newcomers"][0]["client"])
    assert mine.keys() == fused.keys() and fused
    assert all(torch.equal(mine[name], fused[name]) for name in fused)
