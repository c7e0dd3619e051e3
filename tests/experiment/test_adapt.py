"""Newcomers: trained on 8 of 10 users, the other two come later with a file of their own."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from torch.nn import functional
from typer.testing import CliRunner

import idiolect
from idiolect.cli import app
from idiolect.cli.model_commands import _print_newcomers
from idiolect.core import checkpoint
from idiolect.core.method import Sent
from idiolect.core.metrics import auroc_of
from idiolect.data import federate, read
from idiolect.data.dataset import normalised
from idiolect.engine.personal_model import fill
from idiolect.errors import CheckpointError, ConfigError, DataError, MethodError
from idiolect.methods import METHODS, FedAvg
from idiolect.results import run_files
from idiolect.results.run_files import load_model

invoke = CliRunner().invoke

TOML = """
name = "eight"
seeds = [3, 4]
rounds = 6

[data]
source = "trained.npz"
normalise = "channel"

[model]
name = "dnn"
hidden = 16

[training]
batch = 20
lr = 0.1

[evaluate]
keep_globals = true

[backend]
width = 4

[[methods]]
name = "fedavg-ft"
tune_epochs = 2
tune_lr = 0.05

[[methods]]
name = "persfl"
shares = [0.0, 0.5]
temperatures = [5.0]
distil_epochs = 2
distil_lr = 0.05

[[methods]]
name = "persfl"
label = "PersFL last"
teacher = "last"
shares = [0.5]
temperatures = [5.0]
distil_epochs = 1

[[methods]]
name = "fedper"
lr = 0.05

[[methods]]
name = "pfedme"
lr = 0.05
inner_lr = 0.05
"""


def users(path, chosen, **changed):
    """Write some of DS-1's ten users, 200 examples of each, to a file."""
    federation = idiolect.federation("embedded", "persfl-ds1", seed=0)
    rows = [
        np.concatenate([getattr(federation, part)[n] for part in ("train", "val", "test")])[::3]
        for n in chosen
    ]
    names = np.repeat([f"user {n}" for n in chosen], [len(own) for own in rows])
    dataset, rows = federation.dataset, np.concatenate(rows)
    arrays = {"x": dataset.x[rows, 0], "y": dataset.y[rows], "client": names, **changed}
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A finished run whose training data is gone, and two newcomers' data beside it."""
    home = tmp_path_factory.mktemp("newcomers")
    users(home / "trained.npz", range(8))
    users(home / "late.npz", [8, 9])
    (home / "eight.toml").write_text(TOML)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IDIOLECT_CACHE", str(home / "cache"))
        done = invoke(app, ["run", str(home / "eight.toml"), "--out", str(home / "run")])
    assert done.exit_code == 0, done.output
    (home / "trained.npz").unlink()
    return home


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path / "cache"))


def adapt(home, label, *more, run="run"):
    arguments = ["adapt", str(home / run), "--data", str(home / "late.npz"), "--method", label]
    done = invoke(app, [*arguments, "--out", "out", "--json", *more])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["result"]


def late(home, seed=3):
    """The newcomers' rows, divided as `adapt` divides them, on the scale of the training data."""
    users("trained.npz", range(8))
    data = normalised(read("trained.npz"), "channel")
    trained = federate(data, "natural", seed, by_name=True).dataset
    dataset = read(home / "late.npz")
    assert dataset.classes == trained.classes
    dataset = dataclasses.replace(dataset, shift=trained.shift, scale=trained.scale)
    return federate(dataset, "natural", seed)


def network(leaves):
    return fill(idiolect.MODELS["dnn"]((1, 28, 28), 10, hidden=16), leaves)


def server(home, label, seed=3):
    named, _ = checkpoint.read(home / "run" / "checkpoints" / f"{label}.safetensors")
    prefix = f"state.server.{(3, 4).index(seed)}."
    return {name.removeprefix(prefix): v for name, v in named.items() if name.startswith(prefix)}


def scored(model, federation, rows):
    """Accuracy and loss by hand."""
    logits = model(torch.from_numpy(federation.dataset.decoded(rows)))
    labels = torch.from_numpy(federation.dataset.y[rows])
    right = (logits.argmax(1) == labels).float().mean().item()
    return right, functional.cross_entropy(logits, labels).item()


@pytest.mark.parametrize("seed", [3, 4])
def test_newcomers_fine_tune_the_last_global_model_of_the_seed(home, seed):
    content = adapt(home, "FedAvg + FT", "--seed", str(seed))
    assert (content["seed"], content["round"], content["met"]) == (seed, 6, [6])
    federation = late(home, seed)
    received = network(server(home, "FedAvg___FT", seed))
    for place, one in enumerate(content["newcomers"]):
        assert one["client"] == f"user {8 + place}"
        test, val = federation.test[place], federation.val[place]
        assert (one["train"], one["val"], one["test"]) == (120, 40, 40)
        models = one["models"]
        own = network(load_model("out", "FedAvg + FT", seed, one["client"]))
        for model, name in ((received, "global"), (own, "personal")):
            for rows, prefix in ((test, ""), (val, "val_")):
                right, loss = scored(model, federation, rows)
                assert models[name][f"{prefix}accuracy"] == pytest.approx(right, abs=1e-6)
                assert models[name][f"{prefix}loss"] == pytest.approx(loss, rel=1e-4)
        assert models["personal"]["loss"] != models["global"]["loss"]


def test_a_persfl_newcomer_takes_the_best_of_the_kept_global_models(home):
    """The best by hand: the least validation loss over the files of globals/ and the last state."""
    content = adapt(home, "PersFL")
    assert content["met"] == [1, 2, 3, 4, 5, 6]
    federation = late(home)
    states = [
        checkpoint.read(home / "run" / "globals" / "PersFL" / f"round-000{n}.safetensors")[0]
        for n in range(1, 7)
    ]
    received = [
        network({name[2:]: leaf for name, leaf in state.items() if name.startswith("0.")})
        for state in states
    ]
    rounds = []
    for place, one in enumerate(content["newcomers"]):
        losses = [scored(model, federation, federation.val[place])[1] for model in received]
        rounds.append(int(np.argmin(losses)) + 1)
        assert one["facts"]["teacher_round"] == rounds[-1]
        assert one["facts"]["share"] in (0.0, 0.5)
    assert set(rounds) - {6}, "this test says nothing unless a teacher is not the last"


def test_without_kept_globals_the_teacher_is_the_last_and_that_is_told(home, tmp_path):
    shutil.copytree(home / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "globals")
    best = adapt(home, "PersFL")
    shutil.copy(home / "late.npz", tmp_path)
    content = adapt(tmp_path, "PersFL")
    assert content["met"] == [6]
    assert [one["facts"]["teacher_round"] for one in content["newcomers"]] == [6, 6]
    assert "kept 0 global models" in content["notices"][0] and not best["notices"]
    assert content["newcomers"] != best["newcomers"]


def test_a_method_that_shared_rounds_finds_the_globals_of_its_donor(home):
    """`PersFL last` was trained with PersFL's rounds, so globals/ has no folder of its name."""
    assert not (home / "run" / "globals" / "PersFL_last").exists()
    content = adapt(home, "PersFL last")
    assert content["met"] == [1, 2, 3, 4, 5, 6] and not content["notices"]
    assert [one["facts"]["teacher_round"] for one in content["newcomers"]] == [6, 6]


def test_a_fedper_newcomer_trains_only_a_head(home):
    content = adapt(home, "FedPer")
    base = server(home, "FedPer")
    heads = []
    for one in content["newcomers"]:
        own = load_model("out", "FedPer", 3, one["client"])
        assert base and all(torch.equal(own[name], leaf) for name, leaf in base.items())
        heads.append({name: leaf for name, leaf in own.items() if name not in base})
        assert list(one["models"]) == ["personal"]
    assert all(not torch.equal(heads[0][name], heads[1][name]) for name in heads[0])


def test_a_pfedme_newcomer_finds_its_theta_near_w(home):
    content = adapt(home, "pFedMe")
    w = server(home, "pFedMe")
    for one in content["newcomers"]:
        theta = load_model("out", "pFedMe", 3, one["client"])
        apart = sum(float((theta[name] - leaf).square().sum()) for name, leaf in w.items())
        assert 0 < apart < 0.5 * sum(float(leaf.square().sum()) for leaf in w.values())


def test_a_table_and_files_are_left_in_the_runs_folder(home, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    shutil.copytree(home / "run", tmp_path / "run")
    arguments = ["adapt", "run", "--data", str(home / "late.npz"), "--method", "PersFL"]
    shown = invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    for word in ("user 8", "personal, val", "global, test", "teacher round", "temperature", "120"):
        assert word in shown.stdout
    folder = tmp_path / "run" / "newcomers" / "late"
    content = json.loads((folder / "PersFL-seed-3.json").read_text())
    assert content["newcomers"] == adapt(home, "PersFL")["newcomers"]
    assert load_model(folder, "PersFL", 3, "user 9")


def test_a_newcomer_without_validation_rows_has_no_figure_of_its_choice(capsys):
    """Portfolio's weighed accuracy, say, which ended the table with a traceback."""
    sizes = {"train": 2, "val": 0, "test": 1, "models": {"personal": {"accuracy": 0.5}}}
    chosen = [
        {"client": name, **sizes, "facts": {"score": score}}
        for name, score in (("large", 0.75), ("small", None))
    ]
    content = {"newcomers": chosen, "notices": [], "label": "P", "run": "r", "seed": 0}
    _print_newcomers(content, "there")
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[-1] for row in rows if "large" in row or "small" in row] == ["0.75", "-"]


def test_newcomers_are_scored_by_what_the_run_measures_and_called_by_its_threshold(tmp_path):
    draws = np.random.default_rng(0)
    x = draws.normal(size=240)
    sick = x + draws.normal(size=240) > 1.2
    lines = [f"{own:.4f},{'yes' if ill else 'no'}" for own, ill in zip(x, sick, strict=True)]
    held = [f"{line},{'ab'[n % 2]}" for n, line in enumerate(lines[:120])]
    (tmp_path / "own.csv").write_text("\n".join(["x,sick,ward", *held]))
    (tmp_path / "late.csv").write_text("\n".join(["x,sick", *lines[120:]]))
    (tmp_path / "own.toml").write_text(
        'name = "own"\nrounds = 2\n[data]\nsource = "own.csv"\n'
        'options = { label = "sick", client = "ward" }\n[model]\nname = "mlr"\n'
        '[evaluate]\nmetric = "auroc"\nthreshold = "validation"\n[[methods]]\nname = "fedavg-ft"\n'
    )
    assert invoke(app, ["run", "own.toml", "--out", "run"]).exit_code == 0
    shown = invoke(app, ["adapt", "run", "--data", "late.csv", "--out", "late", "--json"])
    found = json.loads(shown.stdout)["result"]
    own = found["newcomers"][0]["models"]["personal"]
    model = idiolect.client_model("late", "newcomer")
    data = read("late.csv", label="sick")
    rows = federate(
        dataclasses.replace(data, clients=np.zeros(120, int), client_names=("newcomer",)), "natural"
    )
    said = model.predict(tmp_path / "late.csv")
    chance = said.probabilities[:, 1]
    for part, key in ((rows.test[0], "auroc"), (rows.val[0], "val_auroc")):
        assert own[key] == pytest.approx(auroc_of(chance[part], data.y[part] == 1))
    assert found["metric"] == "auroc" and own["threshold"] != 0.5
    assert [one == "yes" for one in said] == (chance >= own["threshold"]).tolist()


def test_data_without_clients_is_one_newcomer_and_without_test_rows_has_validation_figures(home):
    users("one.npz", [8], client=None)
    content = idiolect.adapt(home / "run", "one.npz", "FedPer", split=(0.8, 0.2, 0), out="out")
    (one,) = content["newcomers"]
    assert (one["client"], one["train"], one["val"], one["test"]) == ("newcomer", 160, 40, 0)
    assert one["models"]["personal"].keys() == {"val_accuracy", "val_loss"}
    assert one["models"]["personal"]["val_accuracy"] > 0.5
    shown = invoke(app, ["adapt", str(home / "run"), "--data", "one.npz", "--method", "FedPer",
                         "--split", "1,0,0"])  # fmt: skip
    assert shown.exit_code == 0, shown.output
    assert "200" in shown.stdout


def test_labels_are_matched_by_name_not_by_number(home):
    """A file with two digits as text, whose codes are 0 and 1, against the digits' own codes."""
    dataset = read(home / "late.npz")
    rows = np.flatnonzero(np.isin(dataset.y, np.unique(dataset.y)[-2:]))
    np.savez("words.npz", x=dataset.x[rows], y=dataset.y[rows].astype(str))
    assert read("words.npz").y.max() == 1 < dataset.y[rows].min()
    whole = dataclasses.replace(
        dataset, x=dataset.x[rows], y=dataset.y[rows], clients=None, client_names=()
    )
    one, other = (
        idiolect.adapt(home / "run", data, "FedPer", out="out")["newcomers"]
        for data in ("words.npz", whole)
    )
    assert one == other


def test_columns_may_have_other_names_and_data_may_be_a_source(home):
    with np.load(home / "late.npz") as late:
        np.savez("named.npz", x=late["x"], digit=late["y"], who=late["client"])
    arguments = ["--data", "named.npz", "--label", "digit", "--client", "who"]
    named = adapt(home, "FedPer", *arguments)
    assert named["newcomers"] == adapt(home, "FedPer")["newcomers"]
    content = idiolect.adapt(home / "run", "embedded", "FedPer", out="out")
    (one,) = content["newcomers"]
    assert (one["client"], one["train"], one["test"]) == ("newcomer", 3600, 1200)
    with pytest.raises(ConfigError, match="'embedded' has no option 'label'"):
        idiolect.adapt(home / "run", "embedded", "FedPer", options={"label": "digit"})


def test_where_clients_had_several_networks_the_newcomer_says_which(home, tmp_path):
    (tmp_path / "two.toml").write_text(
        'name = "two"\nrounds = 1\nmodel.each = { mlr = 1, dnn = 1 }\n'
        'data.partition = { name = "iid", clients = 2, per_client = 40 }\n'
        '[[methods]]\nname = "local"\n'
    )
    idiolect.run("two.toml", out="two")
    with pytest.raises(ConfigError, match=r"several networks; add --network mlr \| dnn"):
        idiolect.adapt("two", home / "late.npz")
    idiolect.adapt("two", home / "late.npz", network="mlr", out="out")
    assert load_model("out", "Local", 0, "user 8").keys() == {"fc.weight", "fc.bias"}


@pytest.mark.parametrize(
    ("change", "arguments", "code", "words"),
    [
        ({"y": np.array(["seven"] * 400)}, [], 3, "has class 'seven', which the run does not know"),
        ({"x": np.zeros((400, 20, 20), np.uint8)}, [], 3, "shape (1, 20, 20) and the run's (1, 28"),
        ({"x": np.zeros((400, 1, 28, 28))}, [], 3, "are float32 and the run's uint8"),
        ({}, ["--seed", "5"], 2, "--seed is 5, and the run has seeds 3, 4"),
        ({}, ["--method", "PersFl"], 2, "did you mean 'PersFL'"),
        ({}, ["--split", "0.5,0.5"], 2, "expected 3 numbers"),
        ({}, ["--split", "0.5,0.6,0.2"], 2, "sum to 1"),
        ({}, ["--device", "tpu"], 2, "backend.device is 'tpu'"),
        ({}, ["--network", "mlr"], 2, "unknown network 'mlr'"),
        ({}, ["--data", "absent.npz"], 3, "absent.npz does not exist"),
    ],
)
def test_what_does_not_fit_is_one_line(home, change, arguments, code, words):
    users("odd.npz", [8, 9], **change)
    done = invoke(
        app,
        ["adapt", str(home / "run"), "--data", "odd.npz", "--method", "FedPer", *arguments],
    )
    assert done.exit_code == code, done.output
    assert words in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_run_that_is_absent_unfinished_or_of_many_methods_is_one_line(home, tmp_path):
    late = home / "late.npz"
    with pytest.raises(DataError, match=r"nowhere holds no experiment.toml; give the folder"):
        idiolect.adapt("nowhere", late)
    with pytest.raises(ConfigError, match=r"several methods; add --method FedAvg \+ FT \| PersFL"):
        idiolect.adapt(home / "run", late)
    path = tmp_path / "run" / "checkpoints" / "FedPer.safetensors"
    shutil.copytree(home / "run", tmp_path / "run")
    named, meta = checkpoint.read(path)
    checkpoint.save(path, named, {**meta, "finished": False, "round": 2})
    with pytest.raises(DataError, match="FedPer in run is not finished, but at round 2; finish"):
        idiolect.adapt("run", late, "FedPer")
    path.unlink()
    with pytest.raises(DataError, match="no checkpoint of FedPer; finish it"):
        idiolect.adapt("run", late, "FedPer")
    (tmp_path / "run" / run_files.SCALING_FILE).unlink()
    with pytest.raises(DataError, match=r"no scaling.safetensors.*--resume"):
        idiolect.adapt("run", late, "pFedMe")
    shutil.copy(home / "run" / run_files.SCALING_FILE, "run")
    path = path.with_name("pFedMe.safetensors")
    named, meta = checkpoint.read(path)
    checkpoint.save(path, {n: v for n, v in named.items() if "bias" not in n}, meta)
    with pytest.raises(CheckpointError, match="no value for"):
        idiolect.adapt("run", late, "pFedMe")


class Counted(FedAvg):
    """Keeps a number for every client on the server."""

    title = "Counted"

    def init_server(self, setup):
        return {"model": setup.params, "seen": setup.sizes}

    def send(self, state, cohort):
        return Sent(shared=state["model"])

    def server_step(self, state, cohort, reports):
        return {**state, "model": super().server_step(state["model"], cohort, reports)}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Train methods for a round on a network with normalisation, and no more."""

    def train(*names, clients=2):
        (tmp_path / "normalised_net.py").write_text(
            "from torch import nn\n"
            "from idiolect.models.adapters import LoRA\n"
            "def make(shape, classes):\n"
            "    made = nn.Sequential(nn.Flatten(), nn.Linear(784, 6), nn.LayerNorm(6),\n"
            "                         nn.ReLU(), nn.Linear(6, classes))\n"
            "    made[1].requires_grad_(False)\n"
            "    LoRA(targets=('1',)).attach(made)\n"
            "    return made\n"
        )
        text = f"""
name = "small"
rounds = 1
data.partition = {{ name = "iid", clients = {clients}, per_client = 40 }}
model.name = "normalised_net:make"
data.public = {{ source = "embedded", size = 20 }}
training.batch = 20
backend.width = 4
"""
        tables = [f'[[methods]]\nname = "{name}"\nlabel = "{name}"\n' for name in names]
        text += "training.sample = 10\n" * any(METHODS[name].public for name in names)
        (tmp_path / "small.toml").write_text(text + "\n".join(tables))
        return idiolect.run("small.toml", out="small")

    return train


def test_every_method_gives_a_newcomer_a_model(home, small):
    small(*METHODS)
    for name in METHODS:
        content = idiolect.adapt("small", home / "late.npz", name, out="out", trust_code=True)
        for one in content["newcomers"]:
            assert 0 <= one["models"]["personal"]["accuracy"] <= 1, name
            assert load_model("out", name, 0, one["client"]), name


def test_a_server_that_keeps_something_for_each_client_is_refused(home, small, monkeypatch):
    """Even where there happen to be as many newcomers as there were clients."""
    monkeypatch.setitem(METHODS, "counted", Counted)
    small("counted", clients=2)
    with pytest.raises(MethodError, match="Counted keeps 'seen' for each client on the server"):
        idiolect.adapt("small", home / "late.npz", trust_code=True)
