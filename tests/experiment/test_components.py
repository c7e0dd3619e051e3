"""Who runs which network: one line of TOML, one client by name, any module from Python."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

import idiolect
import tiny
import worlds
from idiolect.core import checkpoint
from idiolect.engine.personal_model import fill
from idiolect.errors import ConfigError
from idiolect.experiment.build import build_jobs
from idiolect.experiment.components import assign_networks as networks_of
from idiolect.experiment.components import build_architectures
from idiolect.experiment.load import load_experiment, parse_experiment
from idiolect.experiment.untrusted import CLOSED
from idiolect.models import DNN, MLR, LeNet5, ResNet18
from idiolect.results.run_files import load_model

TOML = """
name = "mixed"
rounds = 3
seeds = [0, 1]
cohort = 3

[data]
partition = { name = "iid", clients = 20, per_client = 15 }

[model]
architectures = ["lenet5", "mlr", { name = "resnet18", width = 2, norm = "batch" }, "dnn"]

[training]
batch = 6

[evaluate]
every = 3

[backend]
width = 3
checkpoint_every = 1

[[methods]]
name = "local"
"""
FOUR = '["lenet5", "alexnet", "resnet18", "shufflenet"]'


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path / "cache"))


def networks(*overrides, toml=TOML):
    """Return the label of each client's network."""
    (job, *_), _ = build_jobs(parse_experiment(toml, overrides))
    return list(job.members[0].networks)


# TOML.


def test_twenty_clients_five_of_each_is_one_line():
    found = networks(f"model.architectures={FOUR}")
    assert Counter(found) == dict.fromkeys(["lenet5", "alexnet", "resnet18", "shufflenet"], 5)
    assert found[:5] == ["lenet5", "alexnet", "resnet18", "shufflenet", "lenet5"]


def test_clients_that_cannot_be_dealt_evenly_are_dealt_as_evenly_as_can_be():
    found = networks('model.architectures=["mlr", "dnn", "lenet5"]')
    assert Counter(found) == {"mlr": 7, "dnn": 7, "lenet5": 6}


def test_counted_out_they_follow_each_other():
    found = networks("model={each={mlr=12, dnn=8}}")
    assert found == ["mlr"] * 12 + ["dnn"] * 8


def test_one_client_can_be_given_its_own_by_name_or_number():
    """Over a deal, over counts, over one network for all; by a label, a name or a whole table."""
    given = '{"client 3" = "mlr", 4 = {name = "dnn", hidden = 7, label = "small"}}'
    dealt = networks(f"model.assign={given}")
    assert dealt[2:6] == ["resnet18", "mlr", "small", "mlr"]
    only = networks('model={name="mlr", assign={0={name="dnn", hidden=3}}}')
    assert only == ["dnn"] + ["mlr"] * 19
    (job,), _ = build_jobs(parse_experiment(TOML, [f"model.assign={given}"]))
    assert job.architectures["small"].main().fc1.out_features == 7
    assert job.architectures["dnn"].main().fc1.out_features == 100
    assert job.architectures["resnet18"].main().fc.in_features == 16


def test_an_architecture_that_everyone_was_taken_from_is_gone():
    given = ", ".join(f'{n}="mlr"' for n in range(0, 20, 2))
    (job,), _ = build_jobs(
        parse_experiment(TOML, [f"model={{each={{dnn=20}}, assign={{{given}}}}}"])
    )
    assert list(job.architectures) == ["dnn", "mlr"]
    every = ", ".join(f'{n}="mlr"' for n in range(20))
    (job,), _ = build_jobs(
        parse_experiment(TOML, [f"model={{each={{dnn=20}}, assign={{{every}}}}}"])
    )
    assert list(job.architectures) == ["mlr"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('model={name="mlr", architectures=["dnn"]}', "give one of name, each and architectures"),
        ("model={architectures=[]}", "model.architectures is [], expected a list of 1 or more"),
        ('model={architectures=["mlr"], hidden=3}', "`architectures` takes options beside each"),
        ('model={architectures=["mlr", "resnet81"]}', "did you mean 'resnet18'"),
        (
            'model={architectures=[{name="dnn", hiden=3}]}',
            "architectures[0].hiden: 'hiden'; did you mean 'hidden'",
        ),
        ('model={architectures=["dnn", {name="dnn", hidden=3}]}', "two 'dnn'; give each a label"),
        ('model={architectures=[{name="resnet18", norm="layer"}]}', "'group' or 'batch'"),
        ('model.assign={"client 77"="mlr"}', "there is no client 'client 77'"),
        ('model.assign={20="mlr"}', "or give a number, 0..19"),
        ('model.assign={0={name="dnn", hidden=3}}', "other options than another has"),
        ('model.assign={0="nmlr"}', "did you mean 'mlr'"),
    ],
)
def test_what_makes_no_sense_is_one_line(change, words):
    with pytest.raises(ConfigError) as error:
        build_jobs(parse_experiment(TOML, [change]))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_clients_are_not_assigned_by_names_that_change_with_the_seed():
    held = worlds.federation((3, 3))
    other = dataclasses.replace(held, names=("client 1", "client 0"))

    def clients(key, *federations):
        experiment = parse_experiment(TOML, [f'model={{name="mlr", assign={{"{key}"="dnn"}}}}'])
        return build_architectures(experiment, federations, CLOSED)["dnn"].clients

    assert clients("client 0", held, held) == (0,)
    assert clients("1", held, other) == (1,)
    with pytest.raises(ConfigError, match="names differ from seed to seed, so 'client 0'"):
        clients("client 0", held, other)


def test_without_names_clients_go_by_number():
    """As at a node of a real federation, which knows no other's name."""
    experiment = parse_experiment(TOML, ['model={name="mlr", assign={3="dnn"}}'])
    assert networks_of(experiment, (4,), 2, 5)["dnn"].clients == (3,)
    with pytest.raises(ConfigError, match=r"'3' is no client's number; expected 0\.\.2"):
        networks_of(experiment, (4,), 2, 3)


# A real run: rounds that leave an architecture out, seeds stacked, saved, resumed, read again.

# Local would train all clients in every round; here only who is drawn does.
DRAWN = TOML.replace("[data]", '[data]\npublic = { source = "embedded", size = 20 }').replace(
    'name = "local"', 'name = "fedmd"\nsample = 10\ntransfer_epochs = 1\nnewcomer_epochs = 1'
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "mixed.toml").write_text(DRAWN)
    done = tiny.idiolect("run", "mixed.toml", "--out", "out", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_some_round_leaves_an_architecture_without_anyone():
    """Three of twenty clients a round and four architectures: the fixture's run is such a case."""
    (job,), _ = build_jobs(parse_experiment(DRAWN))
    simulation = job.simulation()
    for simulation.round in range(3):
        present = {int(c) % 4 for run in range(2) for c in simulation.cohort(run)}
        if len(present) < 4:
            return
    pytest.fail("every architecture took part in every round; choose another seed")


def test_the_result_says_what_each_client_runs(finished):
    content = json.loads((finished / "out" / "result.json").read_text())
    for seed in content["methods"]["FedMD"]["seeds"]:
        found = [client["network"] for client in seed["clients"]]
        assert found == ["lenet5", "mlr", "resnet18", "dnn"] * 5
        assert all(client["personal"]["loss"] > 0 for client in seed["clients"])
    rows = idiolect.table(finished / "out")
    assert rows[2]["network"] == "resnet18" and rows[2]["model"] == "personal"


def test_saved_models_fill_the_networks_they_belong_to(finished):
    shape = (1, 28, 28)
    kinds = [LeNet5(shape, 10), MLR(shape, 10), ResNet18(shape, 10, norm="batch", width=2),
             DNN(shape, 10)]  # fmt: skip
    for client in (0, 1, 2, 3, 18):
        leaves = load_model(finished / "out", "FedMD", 1, client)
        model = fill(kinds[client % 4], leaves)
        assert {*leaves} <= {*model.state_dict()}
        assert model(torch.zeros(1, *shape)).shape == (1, 10)
    assert "norm.running_mean" in load_model(finished / "out", "FedMD", 0, "client 2")


def test_resumed_is_as_uninterrupted(finished):
    """One round, then the other two: the same checkpoint bit for bit, and the same figures."""
    for rounds in (1, 3):
        path, out = finished / "mixed.toml", finished / "again"
        idiolect.run(path, [f"rounds={rounds}"], out=out, resume=rounds == 3)
    (left, _), (right, _) = (
        checkpoint.read(finished / out / "checkpoints" / "FedMD.safetensors")
        for out in ("out", "again")
    )
    assert left.keys() == right.keys()
    for name in left:  # NaN on the curve: those who had not taken part
        assert np.array_equal(left[name].numpy(), right[name].numpy(), equal_nan=True), name
    experiments = [load_experiment(finished / out / "experiment.toml") for out in ("out", "again")]
    assert experiments[0] == experiments[1] == load_experiment(finished / "mixed.toml")


def test_newcomers_choose_among_the_labels(finished):
    x = np.random.default_rng(0).integers(0, 256, (30, 1, 28, 28)).astype(np.uint8)
    np.savez("late.npz", x=x, y=np.arange(30) % 10)
    with pytest.raises(ConfigError, match=r"add --network lenet5 \| mlr \| resnet18 \| dnn"):
        idiolect.adapt(finished / "out", "late.npz")
    idiolect.adapt(finished / "out", "late.npz", network="resnet18", out="out")
    assert load_model("out", "FedMD", 0, 0)["conv.weight"].shape[0] == 2  # its options too


# Python.


def four(**more):
    federation = idiolect.federation("embedded", "iid", clients=4, per_client=30)
    return lambda model: idiolect.fit(
        "local", federation, model, rounds=1, batch=9, device="cpu", **more
    )


class Own(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU())
        self.out = nn.Linear(width, 10)

    def forward(self, x):
        return self.out(self.body(x))


def test_a_list_is_dealt_and_modules_are_given_to_anyone():
    one, fit = Own(5), four()
    result = fit(["mlr", one])
    assert [row["network"] for row in result.table()] == ["mlr", "Own", "mlr", "Own"]
    assert isinstance(result.model(2).network, MLR)
    assert isinstance(result.model("client 3").network, Own)
    assert not torch.equal(result.model(1).network.out.weight, result.model(3).network.out.weight)
    assert not torch.equal(one.out.weight, result.model(1).network.out.weight)
    assert [clients.tolist() for clients, _ in result.deployed] == [[0, 2], [1, 3]]


def test_each_client_gets_its_own_by_number_or_name():
    small, large = Own(2), Own(4)
    result = four()({0: small, "client 1": large, 2: MLR, 3: "dnn"})
    sizes = [getattr(result.model(n).network, "out", None) for n in range(2)]
    assert [layer.in_features for layer in sizes] == [2, 4]
    assert isinstance(result.model(2).network, MLR)
    assert isinstance(result.model(3).network, DNN)
    assert [row["network"] for row in result.table()] == ["Own", "Own 1", "MLR", "dnn"]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ([], "0 networks were given for 4 clients"),
        (["mlr"] * 5, "5 networks were given for 4 clients"),
        ({0: "mlr"}, r"client 1 has no network \(3 of 4 clients\)"),
        ({0: "mlr", "client 0": "dnn"}, "'client 0', who does not exist or has one already"),
        ({9: "mlr"}, "client 9, who does not exist"),
        ({"eve": "mlr"}, "client 'eve', who does not exist"),
    ],
)
def test_networks_that_do_not_fit_the_clients_are_one_line(model, words):
    with pytest.raises(ConfigError, match=words):
        four()(model)


def test_one_network_for_all_has_no_column():
    assert "network" not in four()("mlr").table()[0]
