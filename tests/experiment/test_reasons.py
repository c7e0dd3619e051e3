"""What a client chose, in words: in the result, on the screen, in the report, with newcomers."""

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import idiolect
from idiolect.analysis.report.client_sections import choices
from idiolect.analysis.report.report_data import read_run
from idiolect.cli import app
from idiolect.errors import MethodError
from idiolect.methods import Portfolio
from idiolect.results import document

TOML = """
name = "reasons"
seeds = [0, 1]
rounds = 3

[data]
partition = { name = "iid", clients = 3, per_client = 40 }

[model]
name = "mlr"

[training]
batch = 10
lr = 0.05
tune_epochs = 1

[backend]
width = 3

[[methods]]
name = "fedavg"

[[methods]]
name = "portfolio"
"""


def invoke(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run, and what was printed of it."""
    home = tmp_path_factory.mktemp("reasons")
    (home / "reasons.toml").write_text(TOML)
    return home / "run", invoke("run", home / "reasons.toml", "--out", home / "run")


def test_every_client_has_a_reason_made_of_its_facts(finished):
    folder, printed = finished
    methods = document.read_document(folder)["methods"]
    assert not any("reason" in one for one in methods["FedAvg"]["seeds"][0]["clients"])
    first, second = methods["Portfolio"]["seeds"]
    for one in (*first["clients"], *second["clients"]):
        assert one["reason"] == Portfolio().reason(one["facts"])
        assert f"{100 * one['local']['val_accuracy']:.1f} %" in one["reason"]
        assert one["personal"]["val_accuracy"] >= one["local"]["val_accuracy"] - 1e-6
    for one in first["clients"]:  # of the first seed, in the result and when it is shown again
        assert f"  {one['client']}: {one['reason']}" in printed
        assert one["reason"] in invoke("show", folder)


def test_the_report_lists_them_beside_the_test_accuracy(finished):
    folder, _ = finished
    found = read_run(folder)
    (sheet,) = choices(found).blocks
    told = found.content["methods"]["Portfolio"]["seeds"]
    assert [(row[1], row[2], row[3], row[4]) for row in sheet.rows] == [
        (one["client"], seed["seed"], one["reason"], one["personal"]["accuracy"])
        for seed in told
        for one in seed["clients"]
    ]
    assert {row[0] for row in sheet.rows} == {"Portfolio"}


def test_newcomers_are_told_too(finished, tmp_path):
    folder, _ = finished
    held = idiolect.federation("embedded", "iid", seed=9, clients=1, per_client=40)
    rows = np.concatenate([held.train[0], held.val[0], held.test[0]])
    np.savez(tmp_path / "late.npz", x=held.dataset.x[rows], y=held.dataset.y[rows])
    words = ("adapt", folder, "--data", tmp_path / "late.npz", "--out", tmp_path / "out")
    printed = invoke(*words, "--method", "Portfolio")
    (content,) = [
        idiolect.adapt(folder, tmp_path / "late.npz", "Portfolio", out=tmp_path / "again")
    ]
    (one,) = content["newcomers"]
    assert one["reason"] == Portfolio().reason(one["facts"]) and one["reason"] in printed
    plain = idiolect.adapt(folder, tmp_path / "late.npz", "FedAvg", out=tmp_path / "plain")
    assert "reason" not in plain["newcomers"][0]


def test_a_mixture_is_no_single_network():
    held = idiolect.federation("embedded", "iid", seed=0, clients=2, per_client=30)
    result = idiolect.fit("portfolio", held, model="mlr", rounds=1, tune_epochs=1)
    model = result.model(0)
    right = model(torch.from_numpy(held.dataset.x[held.test[0]])).argmax(1).numpy()
    assert (right == held.dataset.y[held.test[0]]).mean() == pytest.approx(result.accuracy[0])
    with pytest.raises(MethodError, match="do not fill a MLR; use the model itself"):
        _ = model.network
