"""KT-pFL's experiment files: the small one runs whole; the big ones say what would cross."""

from pathlib import Path

import pytest

import idiolect
from idiolect.core import tree
from idiolect.core.client import Network
from idiolect.experiment.components import networks_by_label
from idiolect.experiment.load import load_experiment
from idiolect.methods import METHODS
from idiolect.models import MODELS
from idiolect.results import trace

HOME = Path(__file__).resolve().parents[2] / "experiments" / "ktpfl"
MIXED = ("local", "fedmd", "feddf", "pfeddf", "sim-pfl", "topk-pfl", "ktpfl")


def test_the_small_experiment_runs_all_methods_and_leaves_a_trace(tmp_path):
    """Eight clients, two networks: everyone is scored, matrices are recorded, traffic is told."""
    result = idiolect.run(HOME / "small.toml", ["rounds=2", "training.epochs=1"], out=tmp_path)
    assert [method["method"] for method in result["methods"].values()] == list(MIXED)
    assert result["data"]["public"]["examples"] == 400
    traffic = {label: method["seeds"][0]["traffic"] for label, method in result["methods"].items()}
    for label in ("FedMD", "Sim-pFL", "TopK-pFL", "KT-pFL"):
        # 8 clients × 2 rounds × 200 examples × 10 classes × 4 bytes each way, and sizes up.
        assert traffic[label]["bytes_down"] == 8 * 2 * 200 * 10 * 4
        assert traffic[label]["bytes_up"] == traffic[label]["bytes_down"] + 8 * 2 * 4
        assert traffic[label]["public_bytes"] == 8 * 400 * 28 * 28
    # 4 × 7,850 and 4 × 25,450 parameters, down and up; the server keeps the public examples.
    assert traffic["FedDF"]["bytes_down"] == 2 * 4 * (7_850 + 25_450) * 4
    assert traffic["FedDF"]["public_bytes"] == 0
    assert trace.traced_labels(tmp_path) == ["FedMD", "KT-pFL", "Sim-pFL", "TopK-pFL"]
    mean = trace.read_trace(tmp_path, "FedMD").matrix()[1]
    assert mean.min() == pytest.approx(1 / 8) and mean.max() == pytest.approx(1 / 8)


@pytest.mark.parametrize("data", ["emnist", "fmnist", "cifar10"])
def test_soft_predictions_weigh_less_than_a_tenth_of_the_parameters(data):
    """The networks of Table 1 as they are, against 3,000 predictions: a round of 20 clients."""
    experiment = load_experiment(HOME / f"{data}-all.toml")
    shape = (3, 32, 32) if data == "cifar10" else (1, 28, 28)
    classes = 47 if data == "emnist" else 10
    weights = [
        tree.nbytes(Network(MODELS[one.name](shape, classes, **one.options)).params)
        for one in networks_by_label(experiment.model).values()
    ]
    assert len(weights) == 4
    parameters = sum(5 * weight for weight in weights)
    sample = next(table for table in experiment.methods if table.label == "KT-pFL")
    soft = 20 * sample.settings["sample"] * classes * 4
    assert parameters > 10 * soft


@pytest.mark.parametrize("path", sorted(HOME.glob("*.toml")), ids=lambda path: path.stem)
def test_the_tables_compare_what_the_paper_compares(path):
    """All methods of a table have the same steps, batch and rounds, and the same rate.

    Those that take plain steps, where the others have momentum 0.9, have up to ten times the rate.
    """
    experiment = load_experiment(path)
    if path.stem != "fmnist-code":  # a marked variant: the released code's rounds differ
        assert len({table.rounds for table in experiment.methods}) == 1
    if path.stem.endswith(("-two", "-all", "-20", "-100")) and "choose" not in path.stem:
        for key in ("steps", "batch"):
            assert len({table.settings[key] for table in experiment.methods}) == 1, key
        rates = {True: set(), False: set()}
        for table in experiment.methods:
            rates["momentum" in METHODS[table.name].unused].add(table.settings["lr"])
        (rate,) = rates[False]
        assert rates[True] <= {10 * rate}
    if any(METHODS[table.name].public for table in experiment.methods):
        assert experiment.data.public is not None
