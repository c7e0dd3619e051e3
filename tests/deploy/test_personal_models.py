"""A node's own model after the run: it predicts what was scored, and travels in three formats."""

import csv
import importlib.util
import json
import shutil

import federations as fed
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from idiolect.cli import app
from idiolect.core import checkpoint
from idiolect.deploy.personal_models import kept_runs, load_personal_model
from idiolect.experiment.build import build_federations
from idiolect.experiment.stored_models import make_model


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Four nodes after a run of APFL, whose models are mixtures of two."""
    home = tmp_path_factory.mktemp("using")
    wanted = fed.experiment("apfl", sets=("model.name=dnn",))
    content = fed.served(wanted, fed.inside(home), home / "hub")
    held = build_federations(wanted)[0]
    x, y = (column[held.test[2]] for column in (held.dataset.x, held.dataset.y))
    np.savez(home / "test.npz", x=x, y=y)
    np.savez(home / "blind.npz", x=x)
    return home, content["methods"]["APFL"]["seeds"][0]["clients"][2]["personal"], x


def run(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done


def test_predictions_on_the_test_rows_meet_the_score_of_the_run(trained, tmp_path):
    home, score, _ = trained
    out = tmp_path / "out.csv"
    words = ("predict", home / "site-2", "--data", home / "test.npz", "--out", out)
    printed = run(*words, "--probabilities").output
    assert f"{100 * score['accuracy']:.2f} %" in printed
    rows = list(csv.DictReader(out.read_text().splitlines()))
    blind = run("predict", home / "site-2", "--data", home / "blind.npz").stdout
    assert "accuracy" not in blind
    assert [row["predicted"] for row in rows] == [
        line.split(",")[1] for line in blind.splitlines()[1:]
    ]
    shares = np.array([[float(row[str(n)]) for n in range(10)] for row in rows])
    np.testing.assert_allclose(shares.sum(1), 1, atol=1e-5)
    labels = np.load(home / "test.npz")["y"]
    loss = -np.log(shares[np.arange(len(labels)), labels]).mean()
    np.testing.assert_allclose(loss, score["loss"], rtol=1e-3)


def test_exports_give_the_same_logits(trained, tmp_path):
    home, _, x = trained
    rows = torch.from_numpy(x)
    expected = make_model(load_personal_model(home / "site-2"))(rows)
    run("export", home / "site-2", "--out", tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    for count in (len(rows), 1):  # a batch of any size
        assert torch.allclose(program(rows[:count]), expected[:count], atol=1e-6)
    run("export", home / "site-2", "--out", tmp_path / "model.safetensors")
    named, meta = checkpoint.read(tmp_path / "model.safetensors")
    assert meta["form"]["classes"] == [str(n) for n in range(10)]
    assert {name.split(".")[0] for name in named} == {"model", "scaling"}


@pytest.mark.skipif(importlib.util.find_spec("onnxscript") is None, reason="onnxscript is missing")
@pytest.mark.filterwarnings("ignore")  # of the exporter's own
def test_onnx_gives_the_same_logits(trained, tmp_path):
    from onnx.reference import ReferenceEvaluator

    home, _, x = trained
    run("export", home / "site-2", "--out", tmp_path / "model.onnx")
    program = ReferenceEvaluator(str(tmp_path / "model.onnx"))
    (found,) = program.run(None, {program.input_names[0]: x})
    expected = make_model(load_personal_model(home / "site-2"))(torch.from_numpy(x))
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-4)


def test_what_cannot_be_is_told(trained, tmp_path):
    home, _, _ = trained
    for words, said in (
        (("export", home / "site-2", "--out", tmp_path / "m.h5"), "expected one of .safetensors"),
        (("predict", tmp_path, "--data", home / "test.npz"), "holds no personal model"),
        (("export", home / "site-2", "--out", "m.pt2", "--method", "X"), "has models of APFL"),
    ):
        done = CliRunner().invoke(app, [str(word) for word in words])
        assert done.exit_code and said in done.output


def test_a_node_knows_what_it_chose_and_why(tmp_path):
    """Portfolio on four nodes: the words stay with the model, and `predict` says them."""
    sets = ("model.name=mlr", "training.tune_epochs=1")
    wanted = fed.experiment("portfolio", sets=sets)
    content = fed.served(wanted, fed.inside(tmp_path), tmp_path / "hub")
    one = content["methods"]["Portfolio"]["seeds"][0]["clients"][2]
    assert load_personal_model(tmp_path / "site-2").about.reason == one["reason"] != ""
    held = build_federations(wanted)[0]
    x, y = (column[held.test[2]] for column in (held.dataset.x, held.dataset.y))
    np.savez(tmp_path / "test.npz", x=x, y=y)
    words = ("predict", tmp_path / "site-2", "--data", tmp_path / "test.npz")
    printed = run(*words, "--out", tmp_path / "out.csv").output
    assert f"this client's model: {one['reason']}" in printed
    assert f"{100 * one['personal']['accuracy']:.2f} %" in printed
    exported = tmp_path / "model.pt2"
    run("export", tmp_path / "site-2", "--out", exported)
    rows = torch.from_numpy(x)
    expected = make_model(load_personal_model(tmp_path / "site-2"))(rows)
    found = torch.export.load(exported).module()(rows)
    torch.testing.assert_close(found, expected)


def test_a_model_that_version_0_3_wrote_is_still_used(trained, tmp_path):
    home, score, _ = trained
    site = tmp_path / "site"
    shutil.copytree(home / "site-2", site)
    (path,) = site.glob("models/*/APFL/seed-*.safetensors")
    named, meta = checkpoint.read(path)
    form = meta.pop("preprocessing")
    kept = {"shape", "dtype", "classes", "sequential", "words"}
    meta["form"] = {k: v for k, v in form.items() if k in kept}
    meta["form"] |= {"public": None, "public_labels": False}
    scaling = {f"scaling.{key}": torch.tensor(form[key]) for key in ("shift", "scale")}
    old = {"about": meta["about"], "form": meta["form"], "clients": meta["clients"]}
    checkpoint.save(path, {**named, **scaling}, old)
    found = make_model(load_personal_model(site)).predict(home / "test.npz")
    assert found.accuracy == pytest.approx(score["accuracy"])


def test_of_several_runs_one_is_named_or_pinned_and_the_output_says_which(trained, tmp_path):
    """Another lead's newer run changes nothing at the site."""
    home, score, _ = trained
    site = tmp_path / "site"
    shutil.copytree(home / "site-2", site)
    (first,) = kept_runs(site)
    folder = site / "models" / first
    other = site / "models" / "later"
    shutil.copytree(folder, other)
    index = json.loads((other / "index.json").read_text())
    index |= {"run": "later", "written": "2099-01-01T00:00:00+00:00"}
    (other / "index.json").write_text(json.dumps(index))
    words = ["predict", site, "--data", home / "test.npz", "--out", tmp_path / "out.csv"]
    refused = CliRunner().invoke(app, [str(word) for word in words])
    assert refused.exit_code == 2 and "models of several runs" in refused.output
    assert f"--run is 'x'; this node has models of runs {first} | later" in (
        CliRunner().invoke(app, [str(word) for word in (*words, "--run", "x")]).output
    )
    said = f"model: APFL of run {first} (small), seed 3, after round 2"
    good = f"accuracy {100 * score['accuracy']:.1f}% on its 4 test rows"
    printed = run(*words, "--run", first).output
    assert said in printed and good in printed
    assert said in run("pin", site, "--run", first).output
    assert said in run(*words).output
    assert said in run("export", site, "--out", tmp_path / "m.safetensors").output
