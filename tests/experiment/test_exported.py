"""From a trained run to someone's hands: predicted, exported, loaded, the same everywhere."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import idiolect
from idiolect.cli import app
from idiolect.errors import ConfigError, DataError
from idiolect.experiment.exported import read_exported, wilson
from idiolect.experiment.stored_models import find_model, make_model, model_names

TOML = """
name = "hands"
rounds = 2
seeds = [0, 1]
[data]
source = "{source}"
{data}
[model]
name = "{model}"
[training]
batch = 10
lr = 0.05
[[methods]]
name = "apfl"
[[methods]]
name = "fedproto"
[[methods]]
name = "fedavg"
personalise = [["ft"]]
"""


def invoke(*words, code=0):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done


def patients(path, rows=120, seed=0):
    draw = np.random.default_rng(seed)
    with path.open("w") as file:
        file.write("age,bp,chol,site,sick\n")
        for n in range(rows):
            age, bp, chol = draw.normal(60, 10), draw.normal(130, 15), draw.normal(240, 40)
            sick = "yes" if age + bp + draw.normal(0, 9) > 190 else "no"
            file.write(f"{age:.1f},{bp:.1f},{chol:.1f},{'abc'[n % 3]},{sick}\n")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A comparison of three methods on an own table, its newcomers, and a run of the same."""
    home = tmp_path_factory.mktemp("hands")
    patients(home / "own.csv")
    patients(home / "late.csv", 60, 1)
    data = 'normalise = "feature"\noptions = { label = "sick", client = "site" }'
    (home / "e.toml").write_text(TOML.format(source="own.csv", data=data, model="dnn"))
    idiolect.compare(home / "e.toml", out=home / "compared")
    idiolect.run(home / "e.toml", out=home / "run")
    idiolect.adapt(home / "run", home / "late.csv", "APFL")
    return home


@pytest.mark.parametrize("label", ["APFL", "FedProto", "FedAvg + FT"])
def test_what_is_predicted_is_what_was_scored(table, label):
    """Every method, mixtures and prototypes too, of a run and of a comparison, under both seeds."""
    from idiolect.experiment.build import build_federations
    from idiolect.experiment.load import load_experiment

    held = build_federations(load_experiment(table / "e.toml"))
    for folder in ("run", "compared"):
        content = json.loads((table / folder / "result.json").read_text())
        for place, seed in enumerate((0, 1)):
            one = content["methods"][label]["seeds"][place]["clients"][2]
            model = make_model(find_model(table / folder, "c", label, seed))
            rows = held[place].test[2]
            raw = read_rows(table / "own.csv", rows)
            found = model.predict(raw)
            assert found.accuracy == pytest.approx(one["personal"]["accuracy"])
            truth = [model.classes.index(row["sick"]) for row in raw]
            shares = found.probabilities[np.arange(len(rows)), truth]
            np.testing.assert_allclose(-np.log(shares).mean(), one["personal"]["loss"], rtol=1e-4)


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """One round of methods whose clients use more than one network's parameters."""
    home = tmp_path_factory.mktemp("forms")
    draw = np.random.default_rng(0)
    x, owner = draw.normal(3, 10, (90, 5)).astype(np.float32), np.arange(90) % 3
    y = (x[:, 0] + x[:, 1] * (owner - 1) > 3).astype(int)
    np.savez(home / "own.npz", x=x, y=y, client=owner)
    head = TOML.format(source="own.npz", data='normalise = "feature"', model="dnn")
    names = ("knn-per", "fedrod", "fedcp", "ifca", "fedem", "pfedhn", "fedbabu")
    tables = "".join(f'[[methods]]\nname = "{name}"\n' for name in names)
    (home / "e.toml").write_text(head.partition("[[methods]]")[0] + tables)
    content = idiolect.run(home / "e.toml", ["rounds=1", "seeds=[0]"], out=home / "run")
    return home, content


def test_models_of_every_form_predict_what_was_scored(forms):
    home, content = forms
    from idiolect.experiment.build import build_federations
    from idiolect.experiment.load import load_experiment

    held = build_federations(load_experiment(home / "e.toml"))[0]
    x, y = held.dataset.x[held.test[1]], held.dataset.y[held.test[1]]
    assert len(content["methods"]) == 7
    for label, method in content["methods"].items():
        found = idiolect.client_model(home / "run", "1", label).predict(x)
        right = np.mean(np.array(found.predicted, int) == y)
        assert right == pytest.approx(method["seeds"][0]["clients"][1]["personal"]["accuracy"])


def read_rows(path, rows):
    held = list(csv.DictReader(path.read_text().splitlines()))
    plain = [{k: v if k in ("site", "sick") else float(v) for k, v in r.items()} for r in held]
    return [plain[row] for row in rows]


def test_a_new_patient_is_predicted_from_the_command_line(table, tmp_path):
    (tmp_path / "new.csv").write_text("bp,name,age,chol\n180,Ann,80,240\n100,Bob,40,240\n")
    words = ("predict", table / "compared", "--data", tmp_path / "new.csv")
    said = invoke(*words, "--client", "a", "--method", "best", "--out", tmp_path / "out.csv").output
    assert "2 predictions" in said and "model of a" in said
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert [row["predicted"] for row in rows] == ["yes", "no"] and rows[0]["row"] == "1"
    for more, code, expected in (
        ((), 2, "several methods; add --method APFL | FedProto | FedAvg + FT, or --method best"),
        (("--method", "apfl"), 2, "add --client a | b | c"),
        (("--method", "apfl", "--client", "q"), 3, "no client 'q'"),
        (("--method", "apfl", "--client", "a", "--seed", "7"), 2, "models of seeds 0, 1"),
    ):
        assert expected in invoke(*words, *more, code=code).output
    assert "no personal model" in invoke("predict", tmp_path, "--data", "x.csv", code=3).output


def test_best_is_by_validation_and_never_by_test(table):
    content = json.loads((table / "compared" / "result.json").read_text())
    labels = list(content["methods"])
    for label in labels:
        for seed in content["methods"][label]["seeds"]:
            seed["models"]["personal"]["val_accuracy"] = float(label == labels[1])
            seed["models"]["personal"]["mean"] = float(label == labels[2])
    from idiolect.experiment.stored_models import best_method

    assert best_method(content, labels, table) == labels[1]


def test_newcomers_are_predicted_and_exported_as_others_are(table, tmp_path):
    assert model_names(table / "run") == ["a", "b", "c"]
    folder = table / "run" / "newcomers" / "late"
    outs = []
    for where in (table / "run", folder):
        out = tmp_path / f"{where.name}.csv"
        words = ("predict", where, "--client", "b", "--method", "APFL", "--data")
        invoke(*words, table / "late.csv", "--out", out)
        outs.append(out.read_text())
    assert outs[0] != outs[1]  # b of the run is another than b of the newcomers
    invoke("export", folder, "--client", "b", "--method", "APFL", "--out", tmp_path / "card")
    invoke("predict", tmp_path / "card", "--data", table / "late.csv", "--out", tmp_path / "2.csv")
    assert (tmp_path / "2.csv").read_text() == outs[1]
    assert "joined after training" in (tmp_path / "card" / "README.md").read_text()


@pytest.mark.filterwarnings("ignore")  # of the exporter's own
def test_a_table_network_gives_equal_outputs_in_every_form(table, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    out = tmp_path / "all"
    words = ("export", table / "compared", "--method", "APFL")
    invoke(*words, "--all", "--out", out)
    assert sorted(path.name for path in out.iterdir()) == ["a", "b", "c"]
    invoke(*words, "--client", "b", "--out", out / "b", "--format", "onnx", "--format", "pt2")
    model = make_model(find_model(table / "compared", "b", "APFL"))
    x = np.array([[60, 130, 240], [80, 170, 200.5]], np.float32)
    expected = model(torch.from_numpy(x)).numpy()
    loaded = idiolect.load_exported(out / "b")
    np.testing.assert_array_equal(loaded(torch.from_numpy(x)).numpy(), expected)
    session = onnxruntime.InferenceSession(str(out / "b" / "model.onnx"))
    np.testing.assert_allclose(session.run(None, {"examples": x})[0], expected, atol=1e-5)
    program = torch.export.load(out / "b" / "model.pt2").module()
    np.testing.assert_allclose(program(torch.from_numpy(x)).numpy(), expected, atol=1e-5)
    card = (out / "b" / "README.md").read_text()
    for words in ("b: APFL", "age, bp, chol", "no, yes", "own.csv", "95 % interval", "privacy"):
        assert words in card
    about = json.loads((out / "b" / "model.json").read_text())
    assert str(table) not in json.dumps(about)  # no path leaves the machine
    assert about["method"]["settings"]["lr"] == 0.05 and about["privacy"] == "none"


@pytest.mark.filterwarnings("ignore")
def test_a_card_tells_scores_and_how_many_rows_they_are_of(tmp_path):
    """A site of one row has none to test; the share of right labels is of rows and labels both."""
    draws = np.random.default_rng(1)
    lines = [f"{x:.3f},{int(x > 0)},{int(x < 1)},a" for x in draws.normal(size=60)]
    (tmp_path / "own.csv").write_text("\n".join(["x,ill,well,client", *lines, "0.5,1,1,b", ""]))
    (tmp_path / "own.toml").write_text(
        'name = "own"\nrounds = 1\n[data]\nsource = "own.csv"\ntask = "labels"\n'
        'options = { label = ["ill", "well"] }\n[model]\nname = "mlr"\n'
        '[evaluate]\nmetric = "f1"\n[[methods]]\nname = "local"\n'
    )
    invoke("run", tmp_path / "own.toml", "--out", tmp_path / "run")
    invoke("export", tmp_path / "run", "--all", "--out", tmp_path / "out")
    one, many = ((tmp_path / "out" / name / "README.md").read_text() for name in "ba")
    assert "| rows of this client | 1 trained, 0 test |" in one
    assert "this client, accuracy" in many and "Wilson" not in many
    assert "effective_rows" not in one + many and "this client, threshold" not in one + many


def test_numbers_of_a_table_are_made_as_the_docs_say(tmp_path):
    """By preprocessing.json alone, for whoever has ONNX and no idiolect."""
    draws = np.random.default_rng(4)
    lines = ["age,ward,client,sick"]
    for n, age in enumerate(draws.normal(60, 9, 80).round(1)):
        ward = ["A", "B", "", "rare"][min(n % 11, 3) if n % 11 < 3 or n == 7 else n % 2]
        lines.append(f"{age if n % 9 else ''},{ward},{'ab'[n % 2]},{int(age > 60)}")
    (tmp_path / "own.csv").write_text("\n".join(lines))
    world = idiolect.federation(tmp_path / "own.csv", label="sick")
    idiolect.fit("local", world, "mlr", rounds=1).export("a", tmp_path / "out")
    told = json.loads((tmp_path / "out" / "preprocessing.json").read_text())["encoder"]["columns"]
    for cells in (
        {"age": "51.5", "ward": "B"},
        {"age": "", "ward": ""},
        {"age": "9", "ward": "?x"},
    ):
        made = []
        for one in told:
            cell, gap = cells[one["name"]], not cells[one["name"]]
            value = one["fill"] if gap else cell
            own = [(float(value) - one["shift"]) / one["scale"]] if one["value"] else []
            own += [float(cell == name) for name in one["categories"]]
            own += [float(not gap and cell not in one["categories"])] * one["other"]
            own += [float(gap)] * one["flag"]
            made += own + [0.0] * (one["width"] - len(own))
        (tmp_path / "new.csv").write_text(f"age,ward\n{cells['age']},{cells['ward']}\n")
        x = idiolect.load_exported(tmp_path / "out").preprocessing.rows(tmp_path / "new.csv").x
        np.testing.assert_allclose(x[0], made, rtol=1e-6)


def test_photographs_to_onnx(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    draw = np.random.default_rng(0)
    for n in range(48):
        kind = ("dark", "light")[n % 2]
        folder = tmp_path / "photos" / f"user{n % 3}" / kind
        folder.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 120, (16, 16, 3)) + 120 * (n % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{n}.png")
    toml = TOML.format(source="photos", data="", model="lenet5").replace("[0, 1]", "[0]")
    (tmp_path / "e.toml").write_text(toml.partition("[[methods]]")[0] + '[[methods]]\nname="apfl"')
    idiolect.run(tmp_path / "e.toml", out=tmp_path / "run")
    one = next((tmp_path / "photos" / "user1" / "light").iterdir())
    out = tmp_path / "model.onnx"
    invoke("export", tmp_path / "run", "--client", "user1", "--out", out)
    model = make_model(find_model(tmp_path / "run", "user1"))
    pixels = np.array(Image.open(one)).transpose(2, 0, 1)[None]
    (found,) = onnxruntime.InferenceSession(str(out)).run(None, {"examples": pixels})
    np.testing.assert_allclose(found, model(torch.from_numpy(pixels)).numpy(), atol=1e-5)
    said = invoke("predict", tmp_path / "run", "--client", "user1", "--data", one).stdout
    assert said.splitlines()[1].startswith(f"{one.name},{model.classes[int(found.argmax())]},")


def test_a_result_takes_raw_examples_and_tells_names():
    federation = idiolect.federation("embedded", "iid", clients=3, per_client=40)
    result = idiolect.fit("fedavg", federation, "mlr", rounds=2, lr=0.05, batch=10)
    rows = federation.test[1]
    x = federation.dataset.x[rows]
    found = result.predict(1, x)
    assert found.predicted == result.predict("client 1", list(x.astype(float))[0:]).predicted[:]
    right = (
        np.array(found.predicted)
        == np.array(federation.dataset.classes)[federation.dataset.y[rows]]
    )
    assert right.mean() == pytest.approx(result.accuracy[1])
    model = result.model(1)
    assert model.classes == federation.dataset.classes
    decoded = torch.from_numpy(federation.dataset.decoded(rows))
    torch.testing.assert_close(
        model(torch.from_numpy(x)), model.network(decoded), rtol=1e-4, atol=1e-4
    )
    frame = found.to_pandas()
    assert list(frame.columns[:3]) == ["row", "predicted", "probability"] and len(frame) == len(x)
    assert "Predictions of 8 rows" in repr(found)


def test_a_result_is_exported_from_python(tmp_path):
    federation = idiolect.federation("embedded", "iid", clients=3, per_client=40)
    result = idiolect.fit("apfl", federation, "mlr", rounds=1, lr=0.05, batch=10)
    x = torch.from_numpy(federation.dataset.x[:4].copy())
    again = idiolect.load_exported(result.export(1, tmp_path / "one"))
    torch.testing.assert_close(again(x), result.model(1)(x), rtol=0, atol=0)
    assert "CC BY-SA 3.0" in (tmp_path / "one" / "README.md").read_text()
    own = idiolect.fit(
        "local", federation, nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), rounds=1
    )
    with pytest.raises(ConfigError, match=r"export it to a \.onnx or \.pt2 file"):
        own.export(1, tmp_path / "own")
    assert not (tmp_path / "own").exists()


def test_typed_columns_go_from_file_to_export_and_newcomer(tmp_path):
    """Categories, gaps, a date and Latin-1: raw rows in, the same answers from the export."""
    draw = np.random.default_rng(0)
    lines = ["Alter;Stadt;Aufnahme;klinik;krank"]
    for n in range(150):
        age = "" if n % 5 == 0 else str(int(draw.integers(20, 90)))
        town = ("Zürich", '"Genf; See"', "Bern")[int(draw.integers(3))]
        sick = "ja" if age and int(age) > 55 else "nein"
        lines.append(f"{age};{town};2024-0{1 + n % 9}-11;{'abc'[n % 3]};{sick}")
    (tmp_path / "own.csv").write_text("\n".join(lines), encoding="latin-1")
    data = 'options = { label = "krank", client = "klinik" }'
    toml = TOML.format(source="own.csv", data=data, model="dnn").partition("[[methods]]")[0]
    (tmp_path / "e.toml").write_text(toml + '[[methods]]\nname = "ditto"\n')
    idiolect.run(tmp_path / "e.toml", out=tmp_path / "run")
    (tmp_path / "new.csv").write_text("Stadt,Alter\nParis,80\nBern,\n")
    for out, folder in (("1", tmp_path / "run"), ("2", tmp_path / "card")):
        words = ("predict", folder, "--client", "b", "--data", tmp_path / "new.csv")
        said = invoke(*words, "--out", tmp_path / out).output
        assert "no column Aufnahme; its cells count as missing" in said
        words = ("export", tmp_path / "run", "--client", "b", "--out")
        invoke(*words, tmp_path / "card", "--format", "onnx")
    card = (tmp_path / "card" / "README.md").read_text()
    assert 'preprocessing.rows("new.csv").x' in card and "np.zeros" not in card
    assert (
        "scaled and encoded numbers, not its columns" in invoke(*words, tmp_path / "b.pt2").output
    )
    assert (tmp_path / "1").read_text() == (tmp_path / "2").read_text()
    late = [
        line.replace(";a;", ";").replace(";b;", ";").replace(";c;", ";") for line in lines[1:60]
    ]
    (tmp_path / "late.csv").write_text("\n".join(["Alter;Stadt;Aufnahme;krank", *late]))
    found = idiolect.adapt(tmp_path / "run", tmp_path / "late.csv", "best")
    model = idiolect.client_model(found["folder"], "newcomer")
    assert model.predict(tmp_path / "late.csv").accuracy > 0.6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 9}, "no description of a model"),
        ({"clients": 10**12}, "no description of a model"),
        ({"public": {"size": 10**12, "labels": False}}, "no description of a model"),
        ({"client": {"name": "x", "number": -1}}, "no description of a model"),
        ({"experiment": "name = 3"}, "name"),
    ],
)
def test_a_folder_of_someone_else_is_refused_when_malformed(table, tmp_path, change, words):
    invoke("export", table / "run", "--client", "a", "--method", "APFL", "--out", tmp_path / "x")
    path = tmp_path / "x" / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises((DataError, ConfigError), match=words):
        idiolect.load_exported(tmp_path / "x")
    with pytest.raises(DataError, match="a folder that `idiolect export` wrote"):
        read_exported(tmp_path)


class Own(nn.Module):
    """A network of one's own, given as `test_exported:Own`."""

    def __init__(self, shape, classes):
        super().__init__()
        self.out = nn.Linear(int(np.prod(shape)), classes)

    def forward(self, x):
        return self.out(x.flatten(1))


def test_an_own_network_is_code_and_needs_trust(table, tmp_path):
    text = (table / "e.toml").read_text().replace('"dnn"', '"test_exported:Own"')
    text = text.replace('"own.csv"', f'"{table / "own.csv"}"').partition("[[methods]]")[0]
    (tmp_path / "e.toml").write_text(text + '[[methods]]\nname = "local"\n')
    idiolect.run(tmp_path / "e.toml", out=tmp_path / "run")
    words = ("predict", tmp_path / "run", "--client", "a", "--data", table / "own.csv")
    assert "add --trust-code" in invoke(*words, code=2).output
    expected = invoke(*words, "--trust-code").stdout
    words = ("export", tmp_path / "run", "--client", "a", "--out", tmp_path / "x")
    assert "add --trust-code" in invoke(*words, code=2).output
    invoke(*words, "--trust-code")
    words = ("predict", tmp_path / "x", "--data", table / "own.csv")
    assert "add --trust-code" in invoke(*words, code=2).output
    assert invoke(*words, "--trust-code").stdout == expected


def test_a_run_does_not_overwrite_a_comparison(table):
    before = (table / "compared" / "result.json").read_bytes()
    words = ("run", table / "e.toml", "--out", table / "compared", "--set", "rounds=5")
    for more in ((), ("--resume",)):
        assert "holds a comparison" in invoke(*words, *more, code=7).output
    assert (table / "compared" / "result.json").read_bytes() == before


def test_a_run_folder_runs_again_on_another_machine(table, tmp_path):
    """The data lies elsewhere there; everything else comes from the folder."""
    import shutil

    shutil.copytree(table / "run", tmp_path / "received")
    path = tmp_path / "received" / "experiment.toml"
    path.write_text(path.read_text().replace(str(table / "own.csv"), "/nowhere/own.csv"))
    words = ("run", tmp_path / "received", "--out", tmp_path / "again", "--method", "APFL")
    assert "not on this machine; give your copy with --set" in invoke(*words, code=2).output
    invoke(*words, "--set", f"data.source={table / 'own.csv'}")
    first, second = (
        json.loads((folder / "result.json").read_text())["methods"]["APFL"]["headline"]
        for folder in (table / "run", tmp_path / "again")
    )
    assert first == second


def test_wilsons_interval_by_hand():
    """10 of 10: [n / (n + z²), 1]; 5 of 10 is symmetric about one half."""
    low, high = wilson(1.0, 10)
    assert low == pytest.approx(10 / (10 + 1.959964**2))
    assert high == pytest.approx(1)
    low, high = wilson(0.5, 10)
    assert low + high == pytest.approx(1) and low == pytest.approx(0.2366, abs=1e-4)
