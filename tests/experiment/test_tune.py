"""Tuning: the same budget for all, by validation alone, and all of it on record."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
import small
from small import accuracies, compared

from idiolect.engine.outcome import Members, Outcome, Speed, Wire
from idiolect.engine.rounds import Simulation
from idiolect.errors import CheckpointError, ConfigError, Diverged
from idiolect.experiment import build
from idiolect.experiment.load import parse_experiment
from idiolect.experiment.schema import Range, Tune
from idiolect.experiment.seed_parts import joined_outcome
from idiolect.experiment.tune import OptunaSearch, proposals

TEXT = small.TOML + small.TUNE


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    return folder, *compared(folder, text=TEXT)


def test_all_that_was_tried_is_in_the_result(finished):
    _, content, results, _ = finished
    tuned = content["splits"][0]["tuned"]
    assert results[""]["methods"]["Local"]["tuned"] == tuned["Local"]
    assert {record["budget"] for record in tuned.values()} == {4}  # the largest grid
    assert [len(record["trials"]) for record in tuned.values()] == [2, 2, 4]
    both = tuned["FedAvg + FT"]
    assert both["space"] == {"lr": [0.01, 0.1], "tune_epochs": [1, 3]}
    assert both["trials"][1]["settings"] == {"lr": 0.01, "tune_epochs": 3}


def test_every_seed_chooses_by_its_own_validation(finished):
    _, content, results, _ = finished
    for label, record in content["splits"][0]["tuned"].items():
        for one in record["chosen"]:
            scores = [
                next(own["score"] for own in trial["validation"] if own["seed"] == one["seed"])
                for trial in record["trials"]
            ]
            best = record["trials"][int(np.argmax(scores))]["settings"]
            assert one["settings"] == best, label
    # By what each seed chose, settings are told: one value where all agree, else one a seed.
    chosen = content["splits"][0]["tuned"]["Local"]["chosen"]
    rates = [one["settings"]["lr"] for one in chosen]
    told = results[""]["methods"]["Local"]["settings"]["lr"]
    assert told == (rates[0] if len(set(rates)) == 1 else rates)


def test_the_result_is_that_of_a_run_with_the_settings_chosen(finished, tmp_path):
    """Going on from a trial's rounds is the same as training from the start."""
    _, content, results, rounds = finished
    assert rounds["FedAvg with lr=0.1"] == 2 and rounds["FedAvg"] <= 2 * 2
    tuned = content["splits"][0]["tuned"]
    for seed in (0, 1):
        changes = [
            f"methods.{label}.{key}={value}"
            for label, record in tuned.items()
            for key, value in record["chosen"][seed]["settings"].items()
        ]
        plain = compared(tmp_path / str(seed), *changes, f"seeds=[{seed}]")[1][""]
        for label in tuned:
            expected = accuracies(plain, label)[seed]
            assert accuracies(results[""], label)[seed] == pytest.approx(expected), label


def test_one_choice_for_all_seeds_is_by_the_mean(tmp_path):
    content, results, rounds = compared(tmp_path, "tune.choose=all", text=TEXT)
    record = content["splits"][0]["tuned"]["FedAvg"]
    means = [np.mean([own["score"] for own in one["validation"]]) for one in record["trials"]]
    best = record["trials"][int(np.argmax(means))]["settings"]
    assert [one["settings"] for one in record["chosen"]] == [best, best]
    assert rounds["FedAvg"] == 2
    assert results[""]["methods"]["FedAvg"]["settings"]["lr"] == best["lr"]


def test_trials_know_nothing_of_test_rows(tmp_path, monkeypatch):
    """Poison every test label: what is tried, scored and chosen must not notice."""
    clean, results, _ = compared(tmp_path / "clean", text=TEXT)
    federations = build.build_federations

    def poisoned(*arguments, **options):
        return tuple(_poisoned(one) for one in federations(*arguments, **options))

    monkeypatch.setattr(build, "build_federations", poisoned)
    foul, spoilt, _ = compared(tmp_path / "foul", text=TEXT)
    assert foul["splits"][0]["tuned"] == clean["splits"][0]["tuned"]
    right, wrong = (np.mean(list(accuracies(r[""], "FedAvg").values())) for r in (results, spoilt))
    assert right > wrong + 0.2


def test_trials_are_scored_once_where_the_final_training_takes_curves_of_its_own(
    tmp_path, monkeypatch
):
    """Two settings of one method: each trial is deployed and scored once, by the chosen metric."""
    asked = []
    evaluate = Simulation.evaluate

    def noted(simulation, test_data=None, **options):
        tested = test_data is not None and any(len(own) for one in test_data for own in one.test)
        asked.append((tested, simulation.round, options.get("detail", False)))
        return evaluate(simulation, test_data, **options)

    monkeypatch.setattr(Simulation, "evaluate", noted)
    ahead = ("evaluate.test_curve=true", "evaluate.every=2", "evaluate.personal=always")
    alone = small.TOML.partition("[[methods]]")[0] + '[[methods]]\nname = "fedavg"\n'
    tune = small.TUNE.partition("[tune.methods")[0]
    compared(tmp_path, *ahead, "tune.choose=all", text=alone + tune)
    assert asked == [(False, 2, False)] * 2 + [(True, 2, False), (True, 4, True)]


def _poisoned(federation):
    labels = federation.dataset.y.copy()
    rows = np.concatenate(federation.test)
    labels[rows] = (labels[rows] + 1) % len(federation.dataset.classes)
    dataset = dataclasses.replace(federation.dataset, y=labels)
    return dataclasses.replace(federation, dataset=dataset)


def test_stopped_while_tuning_it_goes_on_where_it_was(finished, tmp_path):
    with pytest.raises(SystemExit):
        compared(tmp_path, text=TEXT, stop="FedAvg + FT with lr=0.1")
    content, results, rounds = compared(tmp_path, text=TEXT)
    assert rounds["Local with lr=0.1"] == rounds["FedAvg with lr=0.1"] == rounds["Local"] == 0
    assert small.untimed(content) == small.untimed(finished[1])
    assert results == finished[2]


def test_a_setting_that_diverges_is_told_and_not_tried_again(tmp_path):
    text = TEXT.replace("lr = [0.01, 0.1]", "lr = [1e38, 0.1]")
    text = text.replace('name = "fedavg-ft"', 'name = "fedavg"\nlabel = "FedAvg + FT"')
    text = text.replace("tune_epochs = 2", "").replace("tune_epochs = [1, 3]", "")
    content, _, _ = compared(tmp_path, text=text)
    record = content["splits"][0]["tuned"]["FedAvg"]
    assert "NaN or infinity" in record["trials"][0]["failed"]
    assert record["trials"][0]["validation"][0]["score"] is None
    assert {one["settings"]["lr"] for one in record["chosen"]} == {0.1}
    again, _, rounds = compared(tmp_path, text=text)
    assert set(rounds.values()) == {0} and again == content
    with pytest.raises(Diverged, match="none of the 1 settings tried came to a finite end"):
        compared(tmp_path / "all", text=text.replace("[1e38, 0.1]", "[1e38]"))


def test_what_failed_with_other_settings_is_tried_again(tmp_path):
    text = small.TOML.split("[[methods]]")[0] + '[[methods]]\nname = "fedavg"\n[tune]\nrounds = 2\n'
    text += "[tune.space]\nlr = [1e38, 0.1]\n"
    compared(tmp_path, text=text)
    with pytest.raises(CheckpointError, match=r"settings.batch was 10 and is now 5"):
        compared(tmp_path, "training.batch=5", text=text)
    (failed,) = tmp_path.rglob("failed.json")
    assert '"batch": 5' in failed.read_text()


def test_time_is_shared_by_the_seeds_that_were_trained_together(tmp_path):
    text = small.TOML.split("[[methods]]")[0] + '[[methods]]\nname = "fedavg"\n'
    compared(tmp_path, "seeds=[0, 1]", text=text)
    speeds = []
    for seeds in ("[0, 1]", "[1]"):
        compared(tmp_path, f"seeds={seeds}", text=text)
        content = json.loads((tmp_path / "result.json").read_text())
        speeds.append(content["methods"]["FedAvg"]["speed"])
    assert speeds[1]["examples"] == speeds[0]["examples"] / 2
    assert speeds[1]["train_seconds"] == pytest.approx(speeds[0]["train_seconds"] / 2)


def test_seeds_that_come_later_are_tuned_too(finished, tmp_path):
    compared(tmp_path, "seeds=[0]", text=TEXT)
    content, results, rounds = compared(tmp_path, text=TEXT)
    assert rounds["Local with lr=0.1"] == 2
    for label, record in content["splits"][0]["tuned"].items():
        assert record["chosen"] == finished[1]["splits"][0]["tuned"][label]["chosen"]
        for seed, row in accuracies(finished[2][""], label).items():
            assert accuracies(results[""], label)[seed] == pytest.approx(row)


def test_random_draws_stay_in_their_space_and_are_the_same_again():
    tune = Tune(search="random", budget=8)
    space = {
        "lr": Range(low=1e-4, high=1.0, log=True),
        "batch": Range(low=4, high=6),
        "optimiser": ("sgd", "adam"),
    }
    drawn = list(proposals(tune, "FedAvg", space))
    assert drawn == list(proposals(tune, "FedAvg", space)) != list(proposals(tune, "Local", space))
    assert len(drawn) == 8 and all(1e-4 <= one["lr"] <= 1 for one in drawn)
    assert {one["batch"] for one in drawn} <= {4, 5, 6}
    assert sum(one["lr"] < 0.01 for one in drawn) >= 2  # half of them, were there many
    few = list(proposals(tune, "FedAvg", {"optimiser": ("sgd", "adam")}))
    assert sorted(one["optimiser"] for one in few) == ["adam", "sgd"]  # and no third


def test_optuna_searches_each_seed_and_proposes_the_same_again(tmp_path):
    text = small.TOML.split("[[methods]]")[0] + '[[methods]]\nname = "fedavg"\n' + small.TUNE
    text = text.split("[tune.methods")[0].replace("[tune]", '[tune]\nsearch = "optuna"\nbudget = 3')
    text = text.replace("lr = [0.01, 0.1]", "lr = { low = 0.001, high = 0.5, log = true }")
    content, _, rounds = compared(tmp_path, text=text)
    trials = content["splits"][0]["tuned"]["FedAvg"]["trials"]
    assert len(trials) == 6 and [len(one["validation"]) for one in trials] == [1] * 6
    assert sum(rounds.values()) == 6 * 2 + 2 * 2
    again, _, none = compared(tmp_path, text=text)
    assert set(none.values()) == {0} and again == content


def test_optuna_finds_the_top_of_a_hill():
    search = OptunaSearch(Tune(budget=25), "x", {"lr": Range(low=0.0, high=1.0), "batch": (4, 8)})
    best = max(_climbed(search), key=lambda pair: pair[1])
    assert abs(best[0]["lr"] - 0.3) < 0.1 and best[0]["batch"] == 8


def _climbed(search):
    while (settings := search.ask()) is not None:
        score = -abs(settings["lr"] - 0.3) + (settings["batch"] == 8)
        search.tell(score)
        yield settings, score


def test_without_optuna_the_remedy_is_told():
    code = """
import sys
sys.modules["optuna"] = None
from idiolect.experiment.schema import Tune
from idiolect.experiment.tune import make_search
from idiolect.errors import MissingExtra
try:
    make_search(Tune(search="optuna", budget=1), "x", {"lr": (0.1,)})
except MissingExtra as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "needs Optuna; install it with: pip install 'idiolect[tune]'" in done.stdout


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("lr = [", "lrr = ["), "tune.space.lrr: .*did you mean 'lr'"),
        (("lr = [0.01, 0.1]", "lr = 0.1"), "tune.space.lr is 0.1; expected a list of values"),
        (("lr = [0.01, 0.1]", "lr = [-1.0]"), "tune of Local: .*lr is -1.0, expected above 0"),
        (("lr = [0.01, 0.1]", 'lr = ["fast"]'), "tune of Local: lr is 'fast'"),
        (("lr = [0.01, 0.1]", "lr = { low = 0.1, high = 1.0 }"), "lr is a range, which a grid"),
        (("lr = [0.01, 0.1]", "lr = { low = 1.0, high = 0.1 }"), "expected low < high"),
        (("rounds = 2", "rounds = 9"), "tune.rounds is 9, more than the 4 of Local"),
        (("rounds = 2", "rounds = 2\nbudget = 3"), r"grid of FedAvg \+ FT has 4 cells and .* 3"),
        (("rounds = 2", 'search = "gird"'), "tune.search is 'gird'"),
        (("FedAvg + FT", "FedAvg + TF"), "did you mean 'FedAvg . FT'"),
        (("tune_epochs = [1", "tune_epoch = [1"), "did you mean 'tune_epochs'"),
    ],
)
def test_a_wrong_key_is_one_clear_line(change, words):
    with pytest.raises(ConfigError, match=words) as caught:
        parse_experiment(small.TOML + small.TUNE.replace(*change))
    assert "\n" not in str(caught.value)


def test_a_tuned_experiment_is_written_and_read_as_itself():
    from idiolect.experiment.run import experiment_toml

    experiment = parse_experiment(TEXT)
    assert parse_experiment(experiment_toml(experiment)) == experiment


def test_settings_stand_in_the_order_of_the_seeds():
    """Seeds 0 and 2 chose alike and were trained together, before seed 1."""
    empty = {"curves": {}, "final": {}, "facts": {}, "evaluated": (), "rounds": 1}

    def part(rate, *seeds):
        members = tuple(Members(seed, (), (), ()) for seed in seeds)
        about = {"settings": {"lr": rate, "batch": 5}}
        wire = (Wire(),) * len(seeds)
        return Outcome("A", about, members, wire=wire, speed=Speed(), **empty)

    joined = joined_outcome([part(0.1, 0, 2), part(0.3, 1)], (0, 1, 2))
    assert [own.seed for own in joined.members] == [0, 1, 2]
    assert joined.about["settings"] == {"lr": [0.1, 0.3, 0.1], "batch": 5}
