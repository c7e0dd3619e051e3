"""Reference rows: what a client would use instead of a federation."""

import dataclasses

import numpy as np
import pytest

from idiolect.data import federate, load
from idiolect.engine.row_metrics import MetricChoice
from idiolect.errors import ConfigError
from idiolect.experiment.references import REFERENCES, references_of, train_reference


@pytest.fixture(scope="module")
def hospitals():
    return federate(load("heart"), "natural", 0)


def test_a_reference_is_what_scikit_learn_makes_of_each_clients_rows(hospitals):
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    found = train_reference("logistic", {0: hospitals}, MetricChoice("auroc"))
    for client in range(hospitals.clients):
        train, test = hospitals.train[client], hospitals.test[client]
        x, y = hospitals.dataset.decoded, hospitals.dataset.y
        alone = LogisticRegression(max_iter=1000).fit(x(train), y[train])
        accuracy = alone.score(x(test), y[test])
        assert found.final["personal/accuracy"][0, client] == pytest.approx(accuracy)
        auroc = roc_auc_score(y[test], alone.predict_proba(x(test))[:, 1])
        assert found.final["personal/auroc"][0, client] == pytest.approx(auroc)
    assert found.about["reference"] and found.wire[0].bytes_up == 0


def test_a_client_of_one_class_is_sure_of_it(hospitals):
    y = hospitals.dataset.y.copy()
    y[hospitals.train[0]] = 1
    one = dataclasses.replace(hospitals, dataset=dataclasses.replace(hospitals.dataset, y=y))
    found = train_reference("boosting", {0: one}, MetricChoice())
    positive = y[one.test[0]].mean()
    assert found.final["personal/accuracy"][0, 0] == pytest.approx(positive)


def test_numbers_are_predicted_in_their_unit(hospitals):
    import pyarrow

    from idiolect.data.own import read

    rng = np.random.default_rng(0)
    x = rng.normal(size=90)
    table = {"x": x, "label": 1000 + 50 * x, "client": [f"c{n % 3}" for n in range(90)]}
    made = federate(read(pyarrow.table(table), task="number"), "natural", 0)
    found = train_reference("logistic", {0: made}, MetricChoice("rmse", "number"))
    assert (found.final["personal/rmse"] < 10).all()
    assert (found.final["baseline/rmse"] > 20).all()


def test_who_gets_references(hospitals):
    assert references_of(None, hospitals, 5) == tuple(REFERENCES)
    assert references_of(None, hospitals, 500) == ()  # 2,000 models nobody asked for
    assert references_of((), hospitals, 5) == ()
    assert references_of(("boosting",), hospitals, 500) == ("boosting",)
    digits = federate(load("embedded"), "iid", 0, clients=3)
    assert references_of(None, digits, 1) == ()
    with pytest.raises(ConfigError, match="are for tables"):
        references_of(("boosting",), digits, 1)
    with pytest.raises(ConfigError, match="expected some of boosting, logistic"):
        references_of(("forest",), hospitals, 1)


def test_references_stand_in_a_comparison(tmp_path):
    from idiolect.experiment.compare import compare

    path = tmp_path / "heart.toml"
    path.write_text(
        'name = "heart"\nseeds = [0, 1]\nrounds = 2\n[data]\nsource = "heart"\n'
        '[model]\nname = "mlr"\n[evaluate]\nreferences = ["logistic"]\n'
        '[[methods]]\nname = "fedavg"\n[[methods]]\nname = "local"\n'
    )
    content = compare(path, out=tmp_path / "out")
    methods = content["splits"][0]["comparison"]["methods"]
    labels = methods if isinstance(methods, dict) else [one["label"] for one in methods]
    assert "Linear model, alone" in labels
    again = compare(path, out=tmp_path / "out")
    assert again["splits"][0]["comparison"]["pairs"] == content["splits"][0]["comparison"]["pairs"]
