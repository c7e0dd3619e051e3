"""A verdict for few clients: over their test rows and seeds, with planted truths."""

import numpy as np
import pytest
from planted_rows import GROUPS, planted, result

from idiolect.analysis import compare, fixed_clients
from idiolect.analysis.comparison import fitting
from idiolect.analysis.significance import holm
from idiolect.engine.outcome import RIGHT
from idiolect.errors import ConfigError
from idiolect.experiment.build import build_jobs
from idiolect.experiment.load import parse_experiment
from idiolect.experiment.train import train
from idiolect.results import document

FEW = 1000  # resamples


def found(trials, clients, **options):
    """Return the share of planted results in which two methods are called different."""
    values = []
    for trial in range(trials):
        held = planted(np.random.default_rng((7, clients, trial)), clients, **options)
        values.append(fixed_clients.difference(held, "A", "B").p)
    return float(np.mean(np.array(values) < 0.05))


@pytest.mark.parametrize("redrawn", [True, False])
@pytest.mark.parametrize(("clients", "trials"), [(3, 200), (5, 150), (10, 100), (50, 40)])
def test_equal_methods_are_called_different_in_at_most_five_of_a_hundred(clients, trials, redrawn):
    """One more than 5 in a hundred is left to chance; docs/statistics.md has more trials."""
    assert found(trials, clients, redrawn=redrawn) <= 0.05 + 1 / trials


def test_of_six_equal_methods_none_is_found_better_than_another():
    wrong = 0
    for trial in range(40):
        held = planted(np.random.default_rng((8, trial)), 4, methods=6, redrawn=trial % 2 == 0)
        pairs = [(a, b) for a in held.labels for b in held.labels if a < b]
        wrong += min(holm([fixed_clients.difference(held, a, b).p for a, b in pairs])) < 0.05
    assert wrong <= 2


def test_a_difference_is_found_the_sooner_the_larger_it_is():
    """Of +1, +3 and +6 points with 3 clients of 200 test rows; with 10, +3 nearly always."""
    shares = [found(40, 3, gain=gain) for gain in (0.01, 0.03, 0.06)]
    assert shares[0] < shares[1] < shares[2] and shares[1] > 0.4 and shares[2] > 0.9
    assert found(30, 10, gain=0.03) > 0.9
    assert found(30, 10, gain=0.01) > found(30, 3, gain=0.01)


def test_a_large_seed_effect_is_not_taken_for_a_difference():
    """Where training moves a method by three points, test rows alone would call it different."""
    wrong = [0, 0]
    for trial in range(60):
        held = planted(np.random.default_rng((9, trial)), 4, seed_effect=0.03)
        difference = fixed_clients.difference(held, "A", "B")
        wrong[0] += difference.p < 0.05
        wrong[1] += difference._replace(of_seeds=0.0).p < 0.05
    assert wrong[0] <= 4 and wrong[1] > 20


@pytest.mark.parametrize("counts_only", [False, True], ids=["rows", "counts"])
def test_four_clients_with_98_and_50_percent_differ(counts_only):
    draw = np.random.default_rng(1)
    held = planted(draw, 4, gain=0.13)
    content = result(held, counts_only)
    for seed in content["methods"]["B"]["seeds"]:
        for client in seed["clients"]:
            client["personal"]["accuracy"] = 0.505
            client["personal"].pop(RIGHT, None)
    told = compare(content, resamples=FEW)
    assert told.replication == "examples" and told.verdict.found
    assert told.pairs[0].different and told.pairs[0].p_holm < 0.001
    assert "of these 4 clients" in told.verdict.sentence
    assert "as if methods erred independently" in told.verdict.sentence
    # Over clients alone no four of them can ever tell.
    assert not compare(content, resamples=FEW, unit="clients").verdict.found


def test_seven_methods_and_ten_clients_can_differ():
    held = planted(np.random.default_rng(2), 10, methods=7, gain=0.08)
    told = compare(result(held), resamples=FEW)
    assert told.replication == "examples" and told.verdict.best == "A"
    assert set(told.verdict.beats) == set("BCDEFG")


def test_the_unit_fits_the_question_and_can_be_chosen():
    few = planted(np.random.default_rng(3), 4)
    assert fitting(few) == "examples"
    assert fitting(few._replace(same_clients=False)) == "clients"
    many = planted(np.random.default_rng(3), 20, seeds=2, rows=20)
    assert fitting(many) == "clients"
    told = compare(result(many), resamples=FEW)
    assert told.replication == "clients" and "of clients like these 20" in told.verdict.sentence
    chosen = compare(result(many), resamples=FEW, unit="examples")
    assert chosen.replication == "examples" and "of these 20 clients" in chosen.scope
    assert chosen.as_dict()["replication"] == "examples"
    with pytest.raises(ConfigError, match="expected one of clients, examples"):
        compare(result(few), unit="rows")


def test_one_seed_tells_of_models_and_not_of_methods():
    held = planted(np.random.default_rng(4), 4, gain=0.1, seeds=1)
    told = compare(result(held), resamples=FEW)
    assert not told.verdict.found and not told.pairs[0].different
    assert told.pairs[0].models_differ
    assert "one seed cannot tell a method from luck" in told.verdict.sentence
    assert "Of these trained models, that of A does better than that of B" in told.verdict.sentence
    quiet = planted(np.random.default_rng(6), 4, seeds=1, seed_effect=0.0, client_effect=0.0)
    level = compare(result(quiet), resamples=FEW)
    assert not level.pairs[0].models_differ and "trained models" not in level.verdict.sentence


def test_a_handful_of_rows_that_agree_prove_little():
    """Two clients of two test rows each, all in favour of one method, under two seeds."""
    held = planted(np.random.default_rng(5), 2, seeds=2, rows=2, redrawn=False)
    right = np.zeros_like(held.right)
    right[0, :, :, :2] = 1
    accuracy = np.stack([np.ones((2, 2)), np.zeros((2, 2))])
    assert (
        fixed_clients.difference(held._replace(right=right, accuracy=accuracy), "A", "B").p > 0.05
    )


def test_intervals_cover_the_truth():
    inside = 0
    for trial in range(60):
        held = planted(np.random.default_rng((11, trial)), 5, gain=0.02)
        low, high = fixed_clients.difference(held, "A", "B").interval(0.95)
        inside += low <= 0.02 <= high
    assert inside >= 56


TOML = """
name = "few"
seeds = [0, 1]
rounds = 1
[data]
partition = { name = "iid", clients = 3, per_client = 400 }
[model]
name = "mlr"
[training]
batch = 20
lr = 0.05
[[methods]]
name = "fedavg"
[[methods]]
name = "local"
"""


def test_a_run_keeps_right_answers_by_group_of_test_rows(tmp_path, monkeypatch):
    """80 test rows of each client: 16 groups of two and 48 of one; they sum to the accuracy."""
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path / "cache"))
    made, about = build_jobs(parse_experiment(TOML))
    content = document.build_document(about, [train(job).outcome for job in made], complete=True)
    for method in content["methods"].values():
        for seed in method["seeds"]:
            for client in seed["clients"]:
                own = client["personal"]
                counts = [int(count) for count in own[RIGHT].split()]
                assert len(counts) == GROUPS and max(counts[16:]) <= 1 and max(counts) <= 2
                assert sum(counts) == pytest.approx(client["test"] * own["accuracy"], abs=1e-3)
    assert content["data"]["same_test"] is False
    told = compare(content, resamples=FEW, unit="examples")
    assert "independently" not in told.scope and told.pairs[0].examples is not None
