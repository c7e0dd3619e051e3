"""Many combinations at once are each what it is alone, on any method, on every backend."""

import json

import numpy as np
import pytest

import tiny
import worlds
from experiment.small import Told
from idiolect.aggregation.aggregator import Aggregated
from idiolect.aggregation.robust import Median
from idiolect.core import checkpoint, tree
from idiolect.errors import MethodError
from idiolect.experiment.build import build_jobs
from idiolect.experiment.load import parse_experiment
from idiolect.experiment.run import run_experiment, run_jobs
from idiolect.experiment.train import train
from idiolect.methods import METHODS
from idiolect.methods.personalise import TABLE_2, Combined, Mixture, Tuned, spoken
from test_laws import made

TIGHT = 1e-9
SETTINGS = {"tune_epochs": 1, "tune_lr": 0.1, "expert_epochs": 2, "expert_lr": 0.1}
# One that averages, one with a personal part, one that keeps a private network, one that grids.
BASES = ["fedavg", "fedper", "pfml", "persfl", "local"]


def combined(name, **options):
    return Combined(made(name), **SETTINGS, **options)


def outcome(method, world=None, rounds=2, **options):
    world = world or worlds.with_public()
    many = isinstance(world, list)
    simulation = worlds.simulation(method, world, cohort=3, **options)
    for _ in range(rounds):
        simulation.advance()
    exams = [one.test_data for one in world] if many else [world.test_data]
    verdicts = simulation.evaluate(exams, keep=True)
    found = [(v.scores, v.facts, v.deployed[0][1]) for v in verdicts]
    return found if many else found[0]


def unequal(left, right, tolerance=TIGHT):
    """Compare scores and facts by name; NaN (no validation data) in equal places is equal."""
    scores = [m for model in left[0] for m in left[0][model]]
    assert left[0].keys() == right[0].keys() and scores
    bad = [
        (model, metric)
        for model, metrics in left[0].items()
        for metric in metrics
        if not np.allclose(
            metrics[metric], right[0][model][metric], tolerance, tolerance, equal_nan=True
        )
    ]
    bad += [
        k for k in left[1] if not np.allclose(left[1][k], right[1][k], tolerance, equal_nan=True)
    ]
    return bad


@pytest.mark.parametrize("name", BASES)
def test_vectorised_equals_sequential(name, float64):
    left, right = (outcome(combined(name), kind=kind) for kind in ("vectorised", "sequential"))
    assert not unequal(left, right)
    assert not worlds.differing(left[2], right[2], TIGHT)


@pytest.mark.parametrize("gate", ["inputs", "outputs"])
def test_vectorised_equals_sequential_with_a_gate(gate, float64):
    method = combined("fedavg", gate=gate, gate_epochs=2)
    left, right = (outcome(method, kind=kind) for kind in ("vectorised", "sequential"))
    assert not unequal(left, right) and not worlds.differing(left[2], right[2], TIGHT)


def test_seeds_together_are_as_alone(float64):
    """Each seed has its own start, and its experts start there."""
    both = [worlds.federation(), worlds.federation((2, 8, 4, 1, 6, 3), seed=5)]
    together = outcome(combined("fedavg"), both, seeds=(0, 7))
    for run_, seed in enumerate((0, 7)):
        alone = outcome(combined("fedavg"), both[run_], seeds=(seed,))
        assert not unequal(together[run_], alone)
        assert not worlds.differing(together[run_][2], alone[2], TIGHT)


@pytest.mark.parametrize("name", ["fedavg", "fedper"])
def test_each_combination_is_what_it_is_alone(name, float64):
    """The stack of thirteen against wrappers, one around the other, and against a list of one."""
    # What a mixture around it deploys cannot wait until the others have told: by its own Fisher.
    alone = {"ewc_fisher": "client"}
    whole = outcome(combined(name, **alone))[0]
    terms = {"kd": {"kd_weight": 0.5}, "ewc": {"ewc_weight": 5.0, **alone}}
    tune = {key: SETTINGS[key] for key in ("tune_epochs", "tune_lr")}
    mix = {key: SETTINGS[key] for key in ("expert_epochs", "expert_lr")}
    for combination in TABLE_2:
        method = made(name)
        if "moe" != combination[0]:
            weights = {k: v for part in combination for k, v in terms.get(part, {}).items()}
            trains = "all" if combination[0] == "ft" else "head"
            method = Tuned(method, trains=trains, **weights, **tune)
        if "moe" in combination:
            method = Mixture(method, **mix)
        nested = outcome(method)[0]
        single = outcome(combined(name, combinations=(combination,), **alone))[0]
        for other in (nested, single):
            for metric, values in whole[spoken(combination)].items():
                np.testing.assert_allclose(values, other["personal"][metric], TIGHT)
    everything = {spoken(one) for one in TABLE_2}
    losses = {model: tuple(whole[model]["loss"]) for model in everything}
    assert len(set(losses.values())) == 13  # none is another under a second name


def test_the_chosen_one_is_the_best_on_validation_data(float64):
    world = worlds.federation((7, 4, 5, 9, 3, 6), (5, 5, 5, 5, 5, 5))
    scores, facts, _ = outcome(combined("fedavg"), world)
    names = [spoken(one) for one in TABLE_2]
    accuracy, loss = (
        np.stack([scores[name][f"val_{metric}"] for name in names], 1)
        for metric in ("accuracy", "loss")
    )
    np.testing.assert_allclose(accuracy, facts["validation_accuracy_of_combinations"])
    for client, place in enumerate(facts["chosen"]):
        best = accuracy[client] == accuracy[client].max()
        assert best[place] and loss[client, place] == loss[client][best].min()
        for metric in ("accuracy", "loss"):
            name = names[int(place)]
            np.testing.assert_allclose(
                scores["personal"][metric][client], scores[name][metric][client], TIGHT
            )
    assert len(set(facts["chosen"])) > 1


def test_a_newcomer_gets_it_too(float64):
    simulation = worlds.simulation(combined("fedper"), worlds.federation(), cohort=3)
    simulation.advance()
    (found,) = simulation.evaluate([worlds.federation().test_data], newcomers=True, keep=True)
    assert {spoken(one) for one in TABLE_2} <= set(found.scores)
    assert np.isfinite(found.scores["personal"]["loss"]).all()


MIXES = "portfolio"
SEVERAL = (MIXES, "fedem")  # what they deploy is several models already


@pytest.mark.parametrize("name", [n for n in METHODS if not METHODS[n].pooled and n not in SEVERAL])
def test_every_method_takes_the_parts(name, float64):
    method = combined(name, combinations=(("ft", "kd"), ("fb", "ewc", "moe")))
    scores, _, _ = outcome(method, rounds=1)
    assert np.isfinite(scores["FB + EWC + MoE"]["loss"]).all()


def test_a_mixture_cannot_be_trained_on(float64):
    with pytest.raises(MethodError, match=r"Portfolio deploys is no set of parameters.*\(moe\)"):
        outcome(combined(MIXES, combinations=(("ft",),)), rounds=1)
    scores, _, _ = outcome(combined(MIXES, combinations=(("moe",),)), rounds=1)
    assert np.isfinite(scores["personal"]["loss"]).all()


LIST = json.dumps([list(one) for one in TABLE_2])
TOML = tiny.TOML.split("[[methods]]")[0].replace("rounds = 6", "rounds = 2")
TOML += f"""
[[methods]]
name = "fedavg"

[[methods]]
name = "fedavg"
label = "thirteen"
tune_epochs = 1
expert_epochs = 1
personalise = {LIST}

[[methods]]
name = "fedavg"
label = "robust"
tune_epochs = 1
expert_epochs = 1
aggregate = "median"
personalise = {LIST}

[[methods]]
name = "fedper"
personalise = ["fb", "moe"]
tune_epochs = 1
expert_epochs = 1
"""


def test_thirteen_in_one_list_share_the_rounds_and_have_a_row_each(tmp_path, monkeypatch):
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path))
    experiment = parse_experiment(TOML)
    made_jobs, about = build_jobs(experiment)
    assert isinstance(made_jobs[2].method.base, Aggregated)
    assert made_jobs[2].method.base.by == Median()
    watch = Told()
    content = run_jobs(made_jobs, tmp_path / "run", about, watch=watch)
    assert watch.rounds == {"FedAvg": 2, "thirteen": 0, "robust": 2, "FedPer + FB + MoE": 2}
    for label in ("thirteen", "robust"):
        (first, _) = content["methods"][label]["seeds"]
        for one in TABLE_2:
            assert 0 <= first["models"][spoken(one)]["mean"] <= 1
            assert all(0 <= c[spoken(one)]["accuracy"] <= 1 for c in first["clients"])
        assert {"personal", "global", "local"} <= set(first["models"])
    settings = content["methods"]["robust"]["settings"]
    assert settings["aggregated"]["rule"] == "Median"
    assert settings["combined"]["ewc_weight"] == 5.0
    again = parse_experiment(execute_written(experiment))
    assert again.methods == experiment.methods


def execute_written(experiment):
    from idiolect.experiment.run import experiment_toml

    return experiment_toml(experiment)


def test_a_run_goes_on_where_it_was_cut(tmp_path, monkeypatch):
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path))
    text = TOML.replace('name = "fedavg"\n\n', 'name = "fedavg"\nlabel = "x"\n\n', 1)
    short, long = (parse_experiment(text, [f"rounds={n}"]) for n in (1, 3))
    run_experiment(short, tmp_path / "cut", only=["robust"])
    run_experiment(long, tmp_path / "cut", resume=True, only=["robust"])
    run_experiment(long, tmp_path / "whole", only=["robust"])
    assert tiny.findings(tmp_path / "cut") == tiny.findings(tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('personalise = ["ft", "kdd"]', "unknown part 'kdd'"),
        ('personalise = ["ft"]\ntune_lrr = 1.0', "did you mean 'tune_lr'"),
        ("kd_weight = 0.5", "unknown key methods\\[0\\].kd_weight"),
        ('personalise = [["ft"], ["ft"]]', "lists a combination twice"),
        ("personalise = 3", "personalise"),
    ],
)
def test_a_wrong_list_is_one_line(change, words):
    text = TOML.split("[[methods]]")[0] + f'[[methods]]\nname = "fedavg"\n{change}\n'
    with pytest.raises(Exception, match=words) as told:
        parse_experiment(text)
    assert "\n" not in str(told.value) and type(told.value).__name__ == "ConfigError"


def test_what_a_method_and_a_part_both_call_the_same_is_refused():
    text = TOML.split("[[methods]]")[0] + '[[methods]]\nname = "fedavg-ft"\npersonalise = ["ft"]\n'
    with pytest.raises(Exception, match=r"fedavg-ft has a tune_epochs of its own"):
        parse_experiment(text)


def test_what_is_saved_is_the_chosen_model(tmp_path, monkeypatch):
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path))
    (_, job, *_), _ = build_jobs(parse_experiment(TOML))
    train(job, tmp_path)
    (path, *_) = sorted((tmp_path / "models").rglob("*.safetensors"))
    named, _ = checkpoint.read(path)
    assert any(".expert." in name for name in named) and any(".model." in name for name in named)
    assert tree.nbytes(named) > 0


@pytest.mark.parametrize("gate", ["inputs", "outputs"])
def test_what_is_deployed_scores_as_what_was_chosen(gate, float64):
    """The law: on validation and on test data the chosen model has the loss it was chosen by.

    Among the four only two are mixtures, and clients choose of both kinds.
    """
    combinations = (("ft", "moe"), ("ft",), ("fb",), ("fb", "moe"))
    method = combined(
        "fedavg", gate=gate, choose="loss", gate_epochs=4, gate_lr=0.3, combinations=combinations
    )
    names = [spoken(one) for one in combinations]
    seen = set()
    for seed in range(2):
        world = worlds.federation(val=[4, 3, 4, 5, 3, 2], seed=seed)
        scores, facts, _ = outcome(method, world, rounds=1)
        for client, place in enumerate(facts["chosen"].astype(int)):
            seen.add("MoE" in names[place])
            for metric, values in scores["personal"].items():
                chosen = scores[names[place]][metric][client]
                np.testing.assert_allclose(values[client], chosen, rtol=1e-9, err_msg=metric)
    assert seen == {True, False}
