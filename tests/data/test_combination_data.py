"""The blocks of experiments/combinations/data.md: each is read, divided and fits its network."""

import re
import tomllib
from pathlib import Path

import pytest
import torch

from idiolect.experiment.build import build_federations
from idiolect.experiment.components import build_architectures
from idiolect.experiment.load import parse_experiment
from idiolect.experiment.untrusted import CLOSED

TEXT = (Path(__file__).parents[2] / "experiments" / "combinations" / "data.md").read_text()
BLOCKS = re.findall(r"```toml\n(.*?)```", TEXT, re.S)
SMALL = {"generated_text": ["data.options.users=50"], "shakespeare": []}
CLIENTS = {"office_caltech10": 4, "cross_sector": 3, "cross_product": 5, "generated_text": 50}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda text: tomllib.loads(text)["data"]["source"])
def test_a_block_runs(block, shared_data, shared_cache, monkeypatch):
    monkeypatch.setenv("IDIOLECT_CACHE", str(shared_cache))
    source = tomllib.loads(block)["data"]["source"]
    text = f'name = "x"\n{block}\n[[methods]]\nname = "fedavg"\n'
    overrides = SMALL.get(source, [])
    if "cohort" in block:
        overrides = [*overrides, "cohort=10"]
    experiment = parse_experiment(text, overrides)
    (held,) = build_federations(experiment, shared_data)
    assert held.clients == CLIENTS.get(source, held.clients)
    assert all(map(len, held.train)) and all(map(len, held.test)) and any(map(len, held.val))
    ((_, architecture),) = build_architectures(experiment, [held], CLOSED).items()
    x = torch.from_numpy(held.dataset.decoded(held.train[0][:2]))
    logits = architecture.main().eval()(x)
    assert logits.shape == (2, *held.dataset.y.shape[1:], len(held.dataset.classes))
