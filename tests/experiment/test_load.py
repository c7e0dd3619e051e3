"""Experiment files: what they mean, and one clear line for each way to get them wrong."""

import subprocess
import sys
import tomllib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import idiolect
import tiny
from idiolect.errors import ConfigError, DataError, IdiolectError
from idiolect.experiment.build import build_federations, build_jobs
from idiolect.experiment.load import dump_toml, load_experiment, parse_experiment
from idiolect.experiment.run import experiment_toml

values = st.recursive(
    st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
tables = st.dictionaries(st.text(max_size=6), values, max_size=4)


@given(st.dictionaries(st.text(max_size=6), values | tables | st.lists(tables, min_size=1)))
def test_what_is_written_is_read_again(content):
    assert tomllib.loads(dump_toml(content)) == content


def test_a_completed_experiment_is_written_and_read_as_itself():
    experiment = parse_experiment(tiny.TOML)
    assert parse_experiment(experiment_toml(experiment)) == experiment
    assert [table.label for table in experiment.methods] == ["Local", "FedAvg", "FedAvg + FT"]
    assert experiment.methods[1].settings["momentum"] == 0.9
    assert experiment.methods[2].settings["lr"] == 0.05


@pytest.mark.parametrize(("what", "name"), [("digits", "demo"), ("hospitals", "hospitals")])
def test_the_packaged_demo_is_the_one_among_the_experiments(what, name):
    from pathlib import Path

    from idiolect.cli.run_commands import demo_experiment

    shipped = Path(__file__).parents[2] / "experiments" / f"{name}.toml"
    assert load_experiment(shipped) == parse_experiment(demo_experiment(what))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["methods.fedavg.learning_rate=1"], r"methods\[1\].learning_rate: .* mean 'lr'"),
        (["methods.fedavg.momentun=1"], r"methods\[1\].momentun: .* mean 'momentum'"),
        (["training.batches=3"], "training.batches: 'batches'; did you mean 'batch'"),
        (["training.lr=fast"], "training.lr is 'fast', expected a valid number"),
        (["training.batch=2.5"], "training.batch is 2.5, expected a valid integer"),
        (["training.batch=true"], "training.batch is True, expected a valid integer"),
        (["training.lr=-1"], "lr is -1.0, expected above 0"),
        (["seeds=[]"], r"seeds is \[\], expected a list of 1 or more"),
        (["seeds=[1,1]"], "seed twice"),
        (["seeds=3"], "seeds is 3, expected a list"),
        (["rounds=0"], "rounds is 0, expected greater than or equal to 1"),
        (["cohort=0"], "cohort: expected 1 or more clients, or 0 < share < 1, not 0"),
        (["cohort=99"], "cohort is 99, and there are 6 clients"),
        (["round=3"], "unknown key round: 'round'; did you mean 'rounds'"),
        (["data.partition.client=3"], "data.partition.client: 'client'; did you mean 'clients'"),
        (["data.partition.name=persfl"], "unknown partition 'persfl'"),
        (["data.partition.min_size=5"], "min_size stands beside partition, not in it; write data."),
        (["data.partition.clients=ten"], "data.partition.clients is 'ten'"),
        (["data.source=mnits"], "unknown source 'mnits'; did you mean 'mnist'"),
        (["data.split=[0.5, 0.5]"], "data.split"),
        (["data.split=[0.5, 0.6, 0.2]"], "sum to 1"),
        (["model.name=resnet"], "unknown model 'resnet'"),
        (["model.hiden=3", "model.name=dnn"], "model.hiden: 'hiden'; did you mean 'hidden'"),
        (["model.name=nowhere:net"], "cannot be imported"),
        (["evaluate.personal=sometimes"], "evaluate.personal is 'sometimes'"),
        (["backend.device=tpu"], "backend.device is 'tpu'"),
        (["methods.fedavg.name=fedavgg"], "unknown method 'fedavgg'; did you mean 'fedavg'"),
        (["methods.fedprox.lr=1"], "unknown method 'fedprox'"),
        (["methods.fedavg.label=local"], "'local' is too like 'Local'"),
        (["training"], "expected key=value"),
    ],
)
def test_a_wrong_key_is_one_clear_line(overrides, words):
    with pytest.raises(ConfigError, match=words) as caught:
        build_jobs(parse_experiment(tiny.TOML, overrides))
    assert "\n" not in str(caught.value)


def test_methods_are_set_by_the_label_that_tables_show():
    experiment = parse_experiment(tiny.TOML, ["methods.FedAvg + FT.rounds=7", "methods.Local.lr=1"])
    assert experiment.methods[2].rounds == 7 and experiment.methods[0].settings["lr"] == 1
    assert experiment.methods[1].rounds != 7


def test_a_split_that_leaves_nothing_to_score_is_refused():
    with pytest.raises(DataError, match="no client has a test row"):
        build_jobs(parse_experiment(tiny.TOML, ["data.split=[0.8, 0.2, 0.0]"]))


PRESET = """
name = "preset"
rounds = 1
data.partition = { name = "iid", clients = 2, per_client = 30 }
model.name = "mlr"
training = { batch = 10 }

[[methods]]
name = "persfl"
shares = [0.5]
temperatures = [5.0]
preset = "gd"
"""


def test_a_preset_reaches_the_method_and_is_named_in_the_result(tmp_path, monkeypatch):
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path / "cache"))
    (job,), _ = build_jobs(parse_experiment(PRESET))
    assert (job.method.soft_loss, job.method.shares, job.preset) == ("cross-entropy", (0.5,), "gd")
    (bare,), _ = build_jobs(parse_experiment(PRESET.replace('preset = "gd"', "")))
    assert (bare.method.soft_loss, bare.preset) == ("kl", "")
    # What the file says itself goes before the preset, which goes before [training].
    (own,), _ = build_jobs(parse_experiment(PRESET, ["methods.persfl.soft_loss=kl"]))
    assert own.method.soft_loss == "kl"
    (under,), _ = build_jobs(parse_experiment(PRESET, ["training.soft_loss=kl"]))
    assert under.method.soft_loss == "cross-entropy"
    content = idiolect.run(tiny.write(tmp_path, PRESET), out=tmp_path / "out")
    assert content["methods"]["PersFL"]["preset"] == "gd"
    assert content["methods"]["PersFL"]["settings"]["soft_loss"] == "cross-entropy"
    again = load_experiment(tmp_path / "out" / "experiment.toml")
    assert again == parse_experiment(PRESET)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "methods.persfl.preset=gdd",
            r"methods\[0\].preset: unknown preset 'gdd'; did you mean 'gd'",
        ),
        ("methods.persfl.preset=code1", "expected one of gd, paper"),
        ("methods.persfl.preset=3", r"methods\[0\].preset is 3, expected a valid string"),
    ],
)
def test_an_unknown_preset_is_one_clear_line(override, words):
    with pytest.raises(ConfigError, match=words) as caught:
        parse_experiment(PRESET, [override])
    assert "\n" not in str(caught.value)


def test_a_method_without_presets_says_so():
    without = tiny.TOML.replace('name = "fedavg"', 'name = "mr-mtl"')
    with pytest.raises(ConfigError, match="unknown preset 'gd'; mr-mtl has none: leave it out"):
        parse_experiment(without, ["methods.mr-mtl.preset=gd"])


def test_a_slip_of_syntax_has_its_line_and_column(tmp_path):
    path = tiny.write(tmp_path, 'name = "x"\nrounds = \n')
    with pytest.raises(ConfigError, match=r"tiny.toml:2:10: "):
        load_experiment(path)


def test_missing_data_is_told(tmp_path):
    path = tiny.write(tmp_path)
    with pytest.raises(DataError, match=r"data.source: .*absent.csv does not exist"):
        load_experiment(path, ["data.source=./absent.csv"])


def test_a_class_that_nobody_has_is_noted(tmp_path):
    (job, *_), _ = build_jobs(
        parse_experiment(
            tiny.TOML,
            [
                "data.partition={name='classes', clients=6, classes_per_client=1}",
                "cohort=6",
                "rounds=1",
            ],
        )
    )
    assert any("no client has a row of class" in w for w in job.federations[0].warnings())


def test_own_data_and_own_network_beside_the_file(tmp_path):
    rows = [f"{n % 7},{n % 3 / 2},{n % 5 / 4},{'ab'[n % 2]}" for n in range(60)]
    (tmp_path / "own.csv").write_text("\n".join(["label,u,v,client", *rows]) + "\n")
    (tmp_path / "mynet.py").write_text(
        "from torch import nn\n"
        "def make(shape, classes, width: int = 4):\n"
        "    return nn.Sequential(nn.Linear(shape[0], width), nn.Linear(width, classes))\n"
    )
    path = tiny.write(
        tmp_path,
        'name = "own"\nrounds = 2\n[data]\nsource = "own.csv"\n'
        '[model]\nname = "mynet:make"\nwidth = 3\n[[methods]]\nname = "fedavg"\n',
    )
    content = idiolect.run(path, out=tmp_path / "out")
    assert [c["client"] for c in content["methods"]["FedAvg"]["seeds"][0]["clients"]] == ["a", "b"]
    again = load_experiment(tmp_path / "out" / "experiment.toml")
    assert again == load_experiment(path)


def test_different_networks_for_different_clients_must_add_up():
    overrides = ["model={each={mlr=2, dnn=3}}"]
    with pytest.raises(ConfigError, match="5 clients a network and there are 6"):
        build_jobs(parse_experiment(tiny.TOML, overrides))


def test_python_is_as_short_as_the_command_line():
    federation = idiolect.federation("embedded", "iid", clients=4, per_client=40)
    result = idiolect.fit("fedavg", federation, "mlr", rounds=3, lr=0.05, batch=10)
    rows = result.table()
    assert len(rows) == 8 and rows[0]["test"] == 8
    assert result.mean == pytest.approx(sum(result.accuracy) / 4)
    assert list(result.curve()) == [1, 2, 3]
    by_name, by_number = result.model("client 2").state_dict(), result.model(2).state_dict()
    assert all(by_name[key].equal(by_number[key]) for key in by_number)
    with pytest.raises(DataError, match="no client 'eve'; the clients are client 0"):
        result.model("eve")
    with pytest.raises(ConfigError, match="cohort is 9, and there are 4 clients"):
        idiolect.fit("fedavg", federation, "mlr", cohort=9)
    # The client's own model, by hand on its own test rows, scores what the table says.
    import torch

    dataset = federation.dataset
    own = federation.test[2]
    logits = result.model(2)(torch.from_numpy(dataset.x[own]))
    right = (logits.argmax(1).numpy() == dataset.y[own]).mean()
    assert right == pytest.approx(result.accuracy[2])
    for wrong in ({"learning": 1}, {"lr": -1}):
        with pytest.raises(IdiolectError):
            idiolect.fit("fedavg", federation, rounds=1, **wrong)


def test_importing_the_package_is_nearly_free():
    """Both in one process and after torch, so that only our own share is measured."""
    code = (
        "import time, torch; start = time.perf_counter(); import idiolect; "
        "print(time.perf_counter() - start); import sys; "
        "print([m for m in ('pydantic', 'typer', 'rich', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, heavy = done.stdout.splitlines()
    assert float(seconds) < 0.5
    assert heavy == "[]"


@pytest.mark.parametrize("source", ["school", "tcga_brca"])
def test_a_table_that_is_read_as_it_is_has_no_options(source):
    text = f'name = "a"\n[data]\nsource = "{source}"\n[[methods]]\nname = "local"\n'
    assert parse_experiment(text).data.options == {}
    with pytest.raises(ConfigError, match="has no options"):
        parse_experiment(text.replace("[[", "options = { only = ['a'] }\n[[", 1))


def test_own_data_is_divided_alike_from_a_file_and_from_python(tmp_path):
    """Else rows that trained in the one would test in the other."""
    rows = "".join(f"{'ab'[n % 2]},{n},{'xy'[n % 3 % 2]}\n" for n in range(40))
    (tmp_path / "own.csv").write_text("site,x,label\n" + rows)
    raw = {"name": "own", "data": {"source": str(tmp_path / "own.csv"), "options": {}}}
    raw["data"]["options"] = {"client": "site"}
    (tmp_path / "own.toml").write_text(dump_toml({**raw, "methods": [{"name": "fedavg"}]}))
    (run,) = build_federations(load_experiment(tmp_path / "own.toml"))
    for seed, alike in ((0, True), (1, False)):
        own = idiolect.federation(tmp_path / "own.csv", client="site", seed=seed)
        assert all(map(np.array_equal, run.test, own.test)) == alike
