"""`refit`: train on validation rows too, after they have chosen; none that still chooses."""

import numpy as np
import pytest
import small
from small import compared

import idiolect
from idiolect.deploy.serve_experiment import served_methods
from idiolect.errors import ConfigError
from idiolect.experiment.build import build_jobs
from idiolect.experiment.early_checks import refuse_misfits
from idiolect.experiment.load import parse_experiment

METHODS = """
[[methods]]
name = "fedavg-ft"
label = "twice"
refit = true

[[methods]]
name = "portfolio"
refit = true
tune_epochs = 1
"""


def built(text=METHODS):
    experiment = parse_experiment(small.TOML + text)
    return experiment, {job.label: job for job in build_jobs(experiment)[0]}


def test_a_method_trains_on_both_parts_and_portfolio_keeps_them_apart():
    _, jobs = built()
    plain, both, own = jobs["FedAvg + FT"], jobs["twice"], jobs["Portfolio"]
    for once, twice in zip(plain.federations, both.federations, strict=True):
        assert twice is once.refitted
        assert twice.test is once.test
    assert own.federations == plain.federations and own.method.refits
    assert plain.follows and not both.follows and not own.follows
    assert both.identity["rows"] != plain.identity["rows"]  # no checkpoint of the other goes on


@pytest.mark.parametrize(
    ("table", "allowed"),
    [
        ('name = "persfl"', False),
        ('name = "persfl"\nshares = [0.5]\ntemperatures = [5.0]\nteacher = "last"', True),
        ('name = "fedfomo"', False),
        ('name = "fedavg"\npersonalise = ["ft", "moe"]', False),
        ('name = "fedavg"\npersonalise = ["ft", "kd"]', True),
        ('name = "portfolio"\naggregate = "median"', True),
    ],
)
def test_who_chooses_while_it_trains_is_refused_in_one_line(table, allowed):
    text = f'{small.TOML}\n[[methods]]\n{table}\nlabel = "own"\nrefit = true\n'
    if allowed:
        assert parse_experiment(text).methods[-1].refit
        return
    with pytest.raises(ConfigError, match=r"methods\[3\]: refit: .* chooses by validation rows"):
        parse_experiment(text)


TUNED = """
name = "tuned"
rounds = 2

[data]
partition = { name = "iid", clients = 3, per_client = 30 }

[model]
name = "mlr"

[tune]
rounds = 1

[tune.space]
lr = [0.01, 0.1]

[[methods]]
name = "fedavg-ft"
tune_epochs = 1
refit = true
"""


def test_settings_are_tuned_on_validation_rows_that_trials_do_not_train_on(tmp_path, monkeypatch):
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path / "cache"))
    _, results, rounds = compared(tmp_path / "runs", text=TUNED)
    found = results[""]["methods"]["FedAvg + FT"]
    assert [client["train"] for client in found["seeds"][0]["clients"]] == [24] * 3
    scores = [one["score"] for t in found["tuned"]["trials"] for one in t["validation"]]
    assert len(scores) == 2 and not np.isnan(scores).any()
    assert rounds["FedAvg + FT"] == 2  # no round of a trial was taken over


def test_validation_rows_give_no_threshold_and_no_curve_after_a_refit(tmp_path):
    experiment, jobs = built(METHODS + '\n[evaluate]\nthreshold = "validation"\n')
    with pytest.raises(ConfigError, match=r"twice: evaluate\.threshold = 'validation' needs"):
        refuse_misfits(experiment, [jobs["twice"]], tmp_path)
    with pytest.raises(ConfigError, match="twice: refit is for simulations"):
        served_methods(experiment)


def test_test_rows_choose_nothing():
    """Other test rows, the same models: on both parts, and with Portfolio's second training."""
    held = idiolect.federation("embedded", partition="iid", clients=4, per_client=40, seed=0)
    blind = held.without_test().refitted
    seen = [idiolect.fit("fedavg-ft", one, "mlr", rounds=2) for one in (held.refitted, blind)]
    ours = [
        idiolect.fit("portfolio", one, "mlr", rounds=2, refits=True, tune_epochs=1)
        for one in (held, held.without_test())
    ]
    for one, other in (seen, ours):
        x = held.dataset.x[held.test[1]]
        np.testing.assert_array_equal(*(own.predict(1, x).probabilities for own in (one, other)))
