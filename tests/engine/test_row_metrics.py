"""Metrics of clients and of all rows together: by hand, and in runs of every task."""

import numpy as np
import pytest

import idiolect
from idiolect.core.metrics import METRICS, answers
from idiolect.core.task import Classes, Number
from idiolect.data.dataset import Dataset
from idiolect.engine import row_metrics
from idiolect.engine.outcome import BASELINE, RIGHT, THRESHOLD, WITHOUT
from idiolect.engine.row_metrics import ClientOutputs, MetricChoice, measure
from idiolect.errors import ConfigError
from idiolect.results.document import baseline_line, build_document


def logits(p):
    """Outputs of two classes that give the second these probabilities."""
    p = np.asarray(p, np.float64)
    return np.stack([np.log(1 - p), np.log(p)], 1)


def client(p_test, y_test, p_val=(), y_val=(), y_train=(0, 0, 1)):
    val = {"personal": logits(p_val)} if len(p_val) else {}
    return ClientOutputs(
        Classes(),
        {"personal": logits(p_test)},
        val,
        np.array(y_test),
        np.array(y_val, int),
        np.array(y_train),
    )


def test_baseline_is_the_majority_of_the_clients_own_training_rows():
    own = client([0.9, 0.2, 0.4], [1, 0, 0], y_train=[1, 1, 0])
    found = measure(own, MetricChoice(), detail=True).marks
    assert found[BASELINE]["accuracy"] == pytest.approx(1 / 3)  # it says 1 of every row
    # Shares are (1 + 1) / 5 and (2 + 1) / 5.
    expected = -(np.log(3 / 5) + 2 * np.log(2 / 5)) / 3
    assert found[BASELINE]["log_loss"] == pytest.approx(expected)
    assert found[BASELINE]["auroc"] == 0.5
    assert found["personal"]["auroc"] == 1.0
    assert "accuracy" not in found["personal"]  # the engine's own stays as it is


def test_the_threshold_is_chosen_on_validation_rows_and_used_on_test_rows():
    own = client([0.3, 0.25, 0.1], [1, 0, 1], p_val=[0.3, 0.28, 0.1, 0.05], y_val=[1, 1, 0, 0])
    choice = MetricChoice("f1", threshold="validation")
    found = measure(own, choice, detail=True, grouped=True).marks["personal"]
    assert found[THRESHOLD] == pytest.approx(0.19)  # halfway between 0.1 and 0.28
    assert found["accuracy"] == pytest.approx(1 / 3)
    assert found["f1"] == pytest.approx(0.5)
    assert found["val_f1"] == 1.0  # settings are tuned with the threshold they would be used with
    assert found[RIGHT][:3].tolist() == [1, 0, 0]
    # The same labels turned round on the test rows do not move the threshold.
    turned = measure(own._replace(y_test=np.array([0, 1, 0])), choice).marks["personal"]
    assert turned[THRESHOLD] == found[THRESHOLD]


def test_pooled_ranks_rows_of_different_clients_against_each_other():
    choice = MetricChoice("auroc")
    one = measure(client([0.9, 0.8], [1, 0]), choice, detail=True).answers["personal"]
    two = measure(client([0.2, 0.1], [1, 0]), choice, detail=True).answers["personal"]
    found = row_metrics.pooled({"personal": [(0, one), (1, two)]}, choice)["personal"]
    assert found["metrics"]["auroc"] == 0.75  # of four pairs 0.2 is below 0.8
    assert found["confusion"] == [[1, 1], [1, 1]]
    assert found["confusion_of_clients"] == {"0": [[0, 1], [0, 1]], "1": [[1, 0], [1, 0]]}


def table(kind, clients=4, rows=60, seed=0):
    """A federation of one's own with a signal in the first feature."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(clients * rows, 3)).astype(np.float32)
    who = np.repeat(np.arange(clients), rows)
    signal = 2 * x[:, 0] + 0.5 * draw.normal(size=len(x))
    y = {
        "classes": (signal > 1).astype(np.int64),
        "number": (40 + 10 * signal).astype(np.float32),
    }[kind]
    own = {"classes": Classes(), "number": Number()}[kind]
    names = ("no", "yes") if kind == "classes" else ("y",)
    sites = tuple(f"site {n}" for n in range(clients))
    return Dataset("own", x, y, names, clients=who, client_names=sites, task=own)


@pytest.mark.parametrize(("kind", "name"), [("classes", "auroc"), ("number", "rmse")])
def test_a_run_has_every_metric_of_its_task_per_client_and_pooled(kind, name):
    data = table(kind)
    held = idiolect.federation(data)
    result = idiolect.fit(
        "fedavg", held, "mlr", rounds=3, lr=0.1, batch=10, metric=name, device="cpu"
    )
    outcome = result.outcome
    rows = held.test[1]
    said = result.predict(1, data.x[rows])
    truth = data.y[rows]
    final = {key: values[0, 1] for key, values in outcome.final.items() if values.ndim == 2}
    if kind == "classes":
        sk = pytest.importorskip("sklearn.metrics")
        chance = np.asarray(said.probabilities)[:, 1]
        assert final["personal/auroc"] == pytest.approx(sk.roc_auc_score(truth, chance), abs=1e-6)
        assert final["personal/brier"] == pytest.approx(
            sk.brier_score_loss(truth, chance), abs=1e-5
        )
        assert outcome.curves["val/global/auroc"].shape == (3, 1, 4)
    else:
        off = np.asarray(said.outputs, np.float64).reshape(-1) - truth
        assert final["personal/rmse"] == pytest.approx(np.sqrt((off**2).mean()), rel=1e-4)
        assert final["personal/mae"] == pytest.approx(np.abs(off).mean(), rel=1e-4)
    assert outcome.final[f"personal/{WITHOUT}"].shape == (1, 4, row_metrics.GROUPS)
    content = build_document({"data": {}}, [outcome], True)
    seed = content["methods"][outcome.label]["seeds"][0]["models"]["personal"]
    assert set(seed["metrics"]) == set(seed["pooled"])
    assert content["metric"]["name"] == name and content["baseline"]["seeds"][0]["pooled"]
    assert baseline_line(content) == ""


def test_where_no_method_is_better_than_guessing_a_line_says_so():
    held = idiolect.federation(table("classes"))
    result = idiolect.fit("fedavg", held, "mlr", rounds=1, lr=1e-9, batch=10, device="cpu")
    content = build_document({"data": {}}, [result.outcome], True)
    guess = content["baseline"]["headline"]["seeds"]["mean"]
    own = content["methods"]["FedAvg"]["headline"]["personal"]["seeds"]
    own["mean"] = guess  # a tie is not better
    assert baseline_line(content).startswith("No method is better than guessing the majority class")
    own["mean"] = guess + 0.01
    assert baseline_line(content) == ""


def test_a_metric_of_another_task_is_refused_in_one_line():
    held = idiolect.federation(table("number"))
    with pytest.raises(ConfigError, match="auroc is not for the task number"):
        idiolect.fit("fedavg", held, "mlr", rounds=1, metric="auroc", device="cpu")


def test_leaving_out_groups_is_what_it_says():
    draw = np.random.default_rng(0)
    y = draw.integers(0, 2, 90)
    own = client(draw.uniform(0.01, 0.99, 90), y)
    found = measure(own, MetricChoice("auroc"), grouped=True).marks["personal"][WITHOUT]
    kept = np.arange(90) % 64 != 5
    part = answers("classes", own.test["personal"][kept], y[kept])
    assert found[5] == METRICS["auroc"](part)
