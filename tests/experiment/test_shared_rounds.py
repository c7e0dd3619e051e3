"""Methods that train alike share their rounds: what they find is what each finds alone."""

import dataclasses
import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import tiny
from idiolect.core import checkpoint
from idiolect.core.method import setting
from idiolect.engine.architecture import Architecture
from idiolect.engine.outcome import Silent
from idiolect.experiment.build import build_jobs
from idiolect.experiment.load import parse_experiment
from idiolect.experiment.run import run_jobs
from idiolect.experiment.train import train
from idiolect.methods import FedAvg, FedAvgFT, FedProx

TOML = """
name = "shared"
seeds = [0, 1]
rounds = 4

[data]
partition = { name = "iid", clients = 6, per_client = 30 }

[model]
name = "mlr"

[training]
batch = 10
lr = 0.05

[backend]
device = "cpu"
width = 4

[[methods]]
name = "fedavg"

[[methods]]
name = "fedavg-ft"
tune_epochs = 2

[[methods]]
name = "persfl"
shares = [0.0, 0.5]
temperatures = [5.0]
distil_epochs = 2

[[methods]]
name = "persfl"
label = "PersFL-GD"
preset = "gd"
shares = [0.25, 0.5]
temperatures = [1.0, 5.0]
distil_epochs = 1
"""
DONORS = {"FedAvg + FT": "FedAvg", "PersFL-GD": "PersFL"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path / "cache"))


def made(*overrides):
    return build_jobs(parse_experiment(TOML, overrides))


class Told(Silent):
    """Hears notices, counts the rounds that were done, and stops before a label if asked."""

    def __init__(self, stop=""):
        self.stop, self.notes, self.rounds = stop, [], {}

    def begin(self, label, round, rounds):
        if label == self.stop:
            raise SystemExit("killed")  # nothing is saved on the way out
        self.rounds[label] = 0

    def tick(self, tick):
        self.rounds[tick.label] += 1

    def note(self, text):
        self.notes.append(text)


def test_shared_rounds_give_what_separate_runs_give_bit_for_bit(tmp_path):
    together, about = made()
    watch = Told()
    content = run_jobs(together, tmp_path / "together", about, watch=watch)
    assert watch.rounds == {"FedAvg": 4, "FedAvg + FT": 0, "PersFL": 4, "PersFL-GD": 0}
    for job in together:
        notices = content["methods"][job.label]["notices"]
        told = [text for text in notices if "shares the rounds of" in text]
        donor = DONORS.get(job.label)
        words = f"{job.label} shares the rounds of {donor}, trained alike"
        assert told == ([words] if donor else [])
        assert (words in watch.notes) == bool(donor)
    alone, _ = made()
    for job in alone:
        train(job, tmp_path / "alone")
        files = [
            tmp_path / name / "checkpoints" / f"{job.label.replace(' + ', '___')}.safetensors"
            for name in ("together", "alone")
        ]
        (shared, shared_meta), (own, own_meta) = map(checkpoint.read, files)
        assert shared.keys() == own.keys()
        for name, leaf in own.items():
            np.testing.assert_array_equal(shared[name], leaf, f"{job.label} {name}")
        for key in ("round", "evaluated", "wire", "identity"):
            assert shared_meta[key] == own_meta[key]
    models = [
        {path.relative_to(tmp_path / name): checkpoint.read(path)[0]
         for path in (tmp_path / name / "models").rglob("*.safetensors")}
        for name in ("together", "alone")
    ]  # fmt: skip
    assert models[0].keys() == models[1].keys() and len(models[0]) == 8
    for path, leaves in models[0].items():
        assert all(torch.equal(leaf, models[1][path][name]) for name, leaf in leaves.items())


@pytest.mark.parametrize("stop", DONORS)
def test_killed_between_donor_and_taker_then_resumed_is_the_uninterrupted_run(tmp_path, stop):
    prepared, about = made()
    whole = run_jobs(prepared, tmp_path / "whole", about)
    with pytest.raises(SystemExit):
        run_jobs(made()[0], tmp_path / "cut", about, watch=Told(stop))
    assert not json.loads((tmp_path / "cut" / "result.json").read_text())["complete"]
    watch = Told()
    resumed = run_jobs(made()[0], tmp_path / "cut", about, resume=True, watch=watch)
    assert watch.rounds[DONORS[stop]] == watch.rounds[stop] == 0
    assert resumed["complete"] and resumed.keys() == whole.keys()
    assert tiny.findings(tmp_path / "cut") == tiny.findings(tmp_path / "whole")


@pytest.mark.parametrize(
    "override",
    ["methods.fedavg-ft.lr=0.06", "methods.fedavg-ft.rounds=3", "evaluate.personal=always"],
)
def test_what_is_not_alike_is_trained_apart(tmp_path, override):
    watch = Told()
    prepared, about = made(override)
    run_jobs(prepared[:2], tmp_path, about, watch=watch)
    assert watch.rounds["FedAvg + FT"] == prepared[1].rounds
    assert not any("shares the rounds" in text for text in watch.notes)


def test_a_class_derived_from_one_that_shares_does_not_share():
    """It may train otherwise, with settings that its ancestor's rounds know nothing of."""

    @dataclass(frozen=True, kw_only=True)
    class Near(FedAvgFT):
        pull: float = setting(0.1, "strength of the pull to the received model", least=0)

        def client_step(self, sent, personal, local):
            return FedProx(pull=self.pull).client_step(sent, personal, local)

    assert FedAvgFT().training() == FedAvg().training()
    assert Near().training() != FedAvg().training()
    assert Near(pull=0.2).training() != Near(pull=0.1).training()


def test_jobs_made_by_hand_share_only_on_the_same_data_and_networks():
    """Without a description what they hold tells them apart; labels and rows are equal here."""
    (one, other, *_), _ = made()
    one, other = (dataclasses.replace(job, described={}) for job in (one, other))
    assert other.trains_as(one)
    held = one.federations
    data = dataclasses.replace(held[0].dataset, x=255 - np.asarray(held[0].dataset.x))
    altered = (dataclasses.replace(held[0], dataset=data), *held[1:])
    assert not dataclasses.replace(other, federations=altered).trains_as(one)
    deeper = {"model": Architecture(lambda: torch.nn.Flatten())}
    assert not dataclasses.replace(other, architectures=deeper).trains_as(one)
