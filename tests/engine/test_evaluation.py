"""A test set common to all, weighed by what each client trains on: the paper's evaluation."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import worlds
from idiolect.errors import ConfigError
from idiolect.experiment.build import build_jobs
from idiolect.experiment.load import parse_experiment
from idiolect.methods import Ditto
from test_laws import made

SHARED = Path(os.environ.get("IDIOLECT_DATA", Path(__file__).parents[3] / "shared" / "data"))
TOML = """
name = "common"
rounds = 1
[data]
pool = "train"
common_test = true
partition = { name = "dirichlet", clients = 5, alpha = 0.5 }
[model]
name = "mlr"
[backend]
device = "cpu"
[[methods]]
name = "fedavg"
"""


@pytest.mark.parametrize("kind", ["vectorised", "sequential"])
def test_class_accuracies_are_weighed_by_the_clients_shares(kind, float64):
    """Against a loop over clients and classes in NumPy, for global and personal models."""
    world = worlds.federation((7, 4, 5, 9, 3, 6))
    taken = np.concatenate([*world.train, *world.val])
    common = np.setdiff1d(np.arange(len(world.dataset)), taken)
    common = common[world.dataset.y[common] != 1]  # clients have it: the others share its weight
    world = dataclasses.replace(world, common=common)
    simulation = worlds.simulation(Ditto(batch=3, lr=0.3), world, kind=kind, width=4)
    simulation.advance()
    (verdict,) = simulation.evaluate([world.test_data], keep=True)
    x = torch.from_numpy(world.dataset.x).double()
    network = worlds.Normed()
    for model in ("personal", "global"):
        for client in range(6):
            params = simulation.states[0]
            if model == "personal":
                params = {n: leaf[client] for n, leaf in verdict.deployed[0][1].items()}
            said = torch.func.functional_call(network, params, (x[common],)).argmax(-1).numpy()
            labels, own = world.dataset.y[common], world.dataset.y[world.train[client]]
            expected = total = 0.0
            for one in range(worlds.CLASSES):
                share = np.mean(own == one)
                if (labels == one).any():
                    expected += share * np.mean(said[labels == one] == one)
                    total += share
            got = verdict.scores[model]["common_accuracy"][client]
            assert got == pytest.approx(expected / total)


def test_without_one_nothing_is_measured():
    world = worlds.federation()
    simulation = worlds.simulation(made("fedavg"), world)
    assert "common_accuracy" not in simulation.evaluate([world.test_data])[0].scores["global"]


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no real data in {SHARED}")
def test_an_experiment_scores_on_the_sources_test_file():
    (job,), _ = build_jobs(parse_experiment(TOML, ["data.source=mnist"]), SHARED)
    (held,) = job.federations
    assert len(held.common) == 10_000 and (held.dataset.origin[held.common] == 1).all()
    (job,), _ = build_jobs(
        parse_experiment(TOML, ["data.source=mnist", "data.common_test=700"]), SHARED
    )
    (some,) = job.federations
    assert len(np.unique(some.common)) == 700 and np.isin(some.common, held.common).all()
    assert len(np.unique(held.dataset.y[some.common])) == 10  # from all over the file
    with pytest.raises(ConfigError, match=r"common_test is 10001, but .* has 10000 rows"):
        build_jobs(parse_experiment(TOML, ["data.source=mnist", "data.common_test=10001"]), SHARED)
    with pytest.raises(ConfigError, match="clients hold rows of the test file"):
        build_jobs(parse_experiment(TOML, ["data.source=mnist", "data.pool=all"]), SHARED)


def test_a_source_without_a_test_file_has_no_common_test_set():
    with pytest.raises(ConfigError, match=r"needs a test file .* and embedded has none"):
        build_jobs(parse_experiment(TOML))


@pytest.mark.parametrize("name, models", [("fedavg", 1), ("ditto", 2)])
def test_a_model_that_is_the_global_one_is_run_once(name, models, monkeypatch):
    """Under FedAvg a client uses the global model itself: both names have its scores."""
    world = worlds.federation()
    simulation = worlds.simulation(made(name), world, kind="sequential")
    simulation.advance()
    method, asked = simulation.method, []
    own = type(method).predict

    def predict(self, model, x, local):
        asked.append(id(model))
        return own(self, model, x, local)

    monkeypatch.setattr(type(method), "predict", predict)
    (verdict,) = simulation.evaluate(None)
    assert len(asked) == models * len(world.names)
    losses = [verdict.scores[model]["loss"] for model in ("personal", "global")]
    assert np.array_equal(*losses, equal_nan=True) == (models == 1)
