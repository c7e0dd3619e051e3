"""What a method or network needs is refused before any method of the file has trained."""

import numpy as np
import pytest

from idiolect.engine.rounds import Simulation
from idiolect.errors import IdiolectError, MissingExtra
from idiolect.experiment import early_checks
from idiolect.experiment.compare import compare
from idiolect.experiment.run import run
from idiolect.methods import METHODS

NEEDS_PUBLIC = [name for name, method in METHODS.items() if method.public]
SMALL = {"ktpfl": {"sample": 20}, "feddf": {"sample": 20}}


@pytest.fixture(autouse=True)
def nothing_trains(monkeypatch):
    """Fail where a round begins."""

    def begun(*_):
        raise AssertionError("a round began")

    monkeypatch.setattr(Simulation, "advance", begun)


@pytest.fixture
def table(tmp_path):
    """A table of four numbers."""
    rows = np.random.default_rng(0).normal(size=(60, 4))
    lines = ["a,b,c,d,label,client"]
    lines += [",".join(f"{v:.3f}" for v in row) + f",{n % 2},{n % 3}" for n, row in enumerate(rows)]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(lines))
    return path


def experiment(tmp_path, methods, data='partition = { name = "iid", clients = 3 }', model="mlr",
               more="", head=""):  # fmt: skip
    text = f'name = "x"\nrounds = 2\n{head}\n[data]\n{data}\n[model]\nname = "{model}"\n{more}\n'
    for name in methods:
        text += f'[[methods]]\nname = "{name}"\n'
    path = tmp_path / "e.toml"
    path.write_text(text)
    return path


def refused(path, tmp_path, command=run):
    out = tmp_path / "out"
    with pytest.raises(IdiolectError) as caught:
        command(path, out=out)
    assert not (out / "result.json").exists() and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", NEEDS_PUBLIC)
def test_public_examples_are_asked_for_before_the_first_method_trains(name, tmp_path):
    path = experiment(tmp_path, ["fedavg", name])
    assert "data.public" in refused(path, tmp_path)
    assert "data.public" in refused(path, tmp_path, compare)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_meets_a_network_that_does_not_fit_in_one_line(name, tmp_path, table):
    path = experiment(tmp_path, ["local", name] if name != "local" else [name],
                      f'source = "{table}"', "lenet5")  # fmt: skip
    said = refused(path, tmp_path)
    assert said.startswith(
        "network 'lenet5' does not fit examples of 4 numbers; these do: mlr, dnn"
    )


def test_labels_of_other_classes_are_not_learned(tmp_path):
    data = 'partition = { name = "iid", clients = 3 }\npublic = { source = "embedded", size = 50 }'
    path = experiment(tmp_path, ["local"], data)
    text = path.read_text() + '[[methods]]\nname = "ktpfl"\nsample = 60\n'
    path.write_text(text)
    assert "needs 60 public examples and data.public has 50" in refused(path, tmp_path)


def test_a_network_without_norms_is_no_network_for_fedbn(tmp_path):
    assert "no normalisation layer" in refused(experiment(tmp_path, ["local", "fedbn"]), tmp_path)


def test_unequal_networks_are_refused_for_methods_that_average(tmp_path):
    path = experiment(tmp_path, ["local", "fedavg"])
    path.write_text(path.read_text().replace('name = "mlr"', 'architectures = ["mlr", "dnn"]'))
    assert "FedAvg shares" in refused(path, tmp_path)


def test_own_labels_and_devices(tmp_path, monkeypatch):
    path = experiment(tmp_path, ["fedavg"], more='[backend]\ndevice = "cuda"')
    assert "no CUDA device" in refused(path, tmp_path)
    path = experiment(
        tmp_path, ["fedavg"], more='[tune]\nsearch = "optuna"\nspace = { lr = [0.1] }'
    )
    real = early_checks.import_module

    def missing(name):
        if name == "optuna":
            raise ImportError(name)
        return real(name)

    monkeypatch.setattr(early_checks, "import_module", missing)
    with pytest.raises(MissingExtra, match=r"idiolect\[tune\]"):
        compare(path, out=tmp_path / "out")


def test_a_full_disk_is_known_before(tmp_path, monkeypatch):
    usage = early_checks.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(early_checks.shutil, "disk_usage", lambda path: usage)
    said = refused(experiment(tmp_path, ["fedavg"]), tmp_path)
    assert "personal models need 1 MB" in said and "save_models = false" in said


def test_a_network_too_large_for_the_machine_is_not_made(tmp_path, monkeypatch):
    monkeypatch.setattr(early_checks, "machine_memory", lambda: 1e4)
    said = refused(experiment(tmp_path, ["fedavg"]), tmp_path)
    assert "more than this machine's memory" in said


def test_batches_of_one_with_batch_normalisation_are_noted(tmp_path):
    from idiolect.experiment.build import build_jobs
    from idiolect.experiment.load import load_experiment

    path = experiment(tmp_path, ["fedavg"], 'partition = { name = "iid", clients = 3 }',
                      "resnet18", 'norm = "batch"\nwidth = 4\n[training]\nbatch = 1')  # fmt: skip
    loaded = load_experiment(path)
    jobs, _ = build_jobs(loaded)
    (note,) = early_checks.refuse_misfits(loaded, jobs, tmp_path)
    assert note.startswith("FedAvg: batch is 1 and the network has batch normalisation")


def test_who_chooses_by_validation_rows_that_are_not_there_is_noted(tmp_path):
    from idiolect.experiment.build import build_jobs
    from idiolect.experiment.load import load_experiment

    path = experiment(
        tmp_path, ["fedavg", "fedfomo"], 'partition = { name = "pfllib", clients = 3 }'
    )
    for changes, notes in (([], 1), (["data.split=[0.6, 0.15, 0.25]"], 0)):
        loaded = load_experiment(path, changes)
        jobs, _ = build_jobs(loaded)
        told = early_checks.refuse_misfits(loaded, jobs, tmp_path)
        assert len(told) == notes
    assert not notes


def test_settings_of_training_that_a_preset_overrules_are_noted():
    from idiolect.experiment.load import parse_experiment

    text = """name = "preset"
    training = { lr = 0.1, batch = 10, epochs = 2 }
    methods = [
        { name = "fedavg", preset = "pfllib" },
        { name = "fedavg", label = "own", preset = "pfllib", lr = 0.1 },
        { name = "fedavg", label = "none" },
    ]"""
    (note,) = parse_experiment(text).notes
    assert note.startswith("FedAvg: its preset 'pfllib' comes before [training], so lr = 0.005;")
