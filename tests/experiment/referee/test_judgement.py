"""What the referee finds: planted differences, and a bad method judged for real."""

import copy
import dataclasses
import re

import numpy as np
import pytest
from judging import BAD, SMALL, STORED, moved

import tiny
from idiolect.engine.outcome import Silent
from idiolect.experiment.referee.challenger import find_challenger
from idiolect.experiment.referee.judgement import BETTER, NONE, WORSE, judge
from idiolect.experiment.referee.referee_page import gaps, write_page
from idiolect.experiment.referee.referee_run import NOT_ASKED, referee
from idiolect.experiment.referee.verify import FAULT, compare_cells


def test_a_bad_method_is_found_worse_than_every_baseline(judged):
    own = judged["findings"]["problems"]["heart"]
    assert {one["outcome"] for one in own["against"].values()} == {WORSE}
    assert len(own["against"]) == 20
    assert "worse on 1" in judged["findings"]["verdict"]["sentence"]
    assert judged["findings"]["verdict"]["beside_best_baseline"][WORSE] == ["heart"]
    assert judged["findings"]["verdict"]["no_better_than_guessing"] == ["heart"]
    assert own["methods"]["Amnesia"]["best_test_round"]["chosen_on"] == "test data"
    assert judged["left_out"]["school"] == NOT_ASKED
    assert any("Left out: " in line and NOT_ASKED in line for line in gaps(judged))


def test_cells_are_not_trained_again_and_training_leaves_nothing(judged, home, monkeypatch):
    from idiolect.experiment.referee import referee_run

    monkeypatch.setattr(referee_run, "train_cell", None)
    challenger = find_challenger(str(home / "amnesia_method.py"), SMALL)
    again, _ = referee(SMALL, challenger, home / "out", Silent(), only=["heart"], device="cpu")
    assert again == judged
    assert not list((home / "out" / "training").rglob("*.safetensors"))


def test_again_trains_the_baselines_too_and_finds_what_is_stored(judged, home):
    """Two of them on the hospitals; other hardware may move single answers."""
    few = dataclasses.replace(SMALL, baselines=SMALL.baselines[:2])
    challenger = find_challenger(str(home / "amnesia_method.py"), few)
    content, _ = referee(
        few, challenger, home / "out", Silent(), again=True, only=["heart"], device="cpu"
    )
    assert content["trained_here"] == ["Amnesia", "Local", "FedAvg"]
    for label in ("Local", "FedAvg"):
        own = content["methods"][label]["cells"]["heart"]
        kept = STORED[label]["cells"]["heart"]
        assert compare_cells(label, kept, own).kind != FAULT
        assert own["tuned"]["space"] == kept["tuned"]["space"]


@pytest.mark.parametrize(
    ("problem", "factor", "outcome"),
    [
        ("synthetic", 0.8, WORSE), ("synthetic", 1.0, NONE),
        ("school", 0.8, BETTER), ("school", 1.25, WORSE), ("school", 1.0, NONE),
    ],
)  # fmt: skip
def test_planted_differences_are_found_and_only_those(problem, factor, outcome):
    """Of RMSE less is better, of accuracy more."""
    lines = {"A": STORED["Local"], "B": moved(STORED["Local"], problem, factor)}
    found = judge({label: own["cells"] for label, own in lines.items()}, [problem], "B")
    assert found["problems"][problem]["against"]["A"]["outcome"] == outcome
    assert found["verdict"]["beside_best_baseline"][outcome] == [problem]
    # The planted losses are as large as that: Local is little better than guessing on both.
    assert bool(found["verdict"]["no_better_than_guessing"]) == (outcome == WORSE)
    ahead = found["problems"][problem]["against"]["A"]["ahead"]
    assert np.sign(ahead) == {BETTER: 1, WORSE: -1, NONE: 0}[outcome]


def test_the_verdict_names_problems_that_the_challenger_refused():
    line = STORED["Local"]["cells"]
    cells = {"A": line, "B": {"heart": line["heart"]}}
    sentence = judge(cells, ["heart", "school"], "B")["verdict"]["sentence"]
    assert "each of 1 problems" in sentence and "It refused school" in sentence
    assert "refused" not in judge(cells, ["heart"], "B")["verdict"]["sentence"]


def test_the_challengers_pairs_are_corrected_together():
    """Holm: the smallest p counts as often as there are baselines."""
    cells = {label: {"heart": own["cells"]["heart"]} for label, own in STORED.items()}
    against = judge(cells, ["heart"], "Local")["problems"]["heart"]["against"].values()
    least = min(one["p"] for one in against)
    assert 0 < least and len(against) == len(cells) - 1
    assert min(one["p_holm"] for one in against) == min(1.0, len(against) * least)


def test_ranks_turn_where_less_is_better_and_take_problems_that_all_have():
    problems = ["heart", "synthetic", "school"]
    good = STORED["Local"]
    bad = moved(moved(moved(good, "heart", 0.5), "synthetic", 0.5), "school", 2.0)
    found = judge({"bad": bad["cells"], "good": good["cells"]}, problems)
    assert found["overall"]["problems"] == problems
    assert found["overall"]["ranks"]["average"] == {"good": 1.0, "bad": 2.0}
    less = {name: one for name, one in bad["cells"].items() if name != "school"}
    found = judge({"bad": less, "good": good["cells"]}, problems)
    assert found["overall"]["problems"] == ["heart", "synthetic"]
    assert found["overall"]["ranks"] is None  # of two problems nothing follows


def test_the_best_test_round_is_the_best_of_a_curve_and_no_result():
    line = copy.deepcopy(STORED["Local"])
    record = line["cells"]["school"]
    before = judge({"A": line["cells"]}, ["school"])["problems"]["school"]["methods"]["A"]
    for one in record["seeds"]:
        one["test_curve"][0] = 1.0
    after = judge({"A": line["cells"]}, ["school"])["problems"]["school"]["methods"]["A"]
    assert after["best_test_round"]["weighted_mean"] == 1.0
    assert after["best_test_round"]["rounds"] == [record["evaluated"][0]] * 5
    assert after["mean"] == before["mean"]


def test_newcomers_are_the_clients_that_took_part_in_no_round():
    record = STORED["FedAvg"]["cells"]["school"]
    found = judge({"A": {"school": record}}, ["school"])["problems"]["school"]["methods"]["A"]
    never = [
        np.mean([s for s, there in zip(one["score"], one["took_part"], strict=True) if not there])
        for one in record["seeds"]
    ]
    assert found["participation"]["rmse"]["personal"]["never"] == pytest.approx(np.mean(never))


def test_the_page_opens_with_the_verdict(judged, tmp_path):
    text = write_page(judged, tmp_path, "idiolect referee amnesia_method.py").read_text()
    assert "What the referee found" in text and "Amnesia" in text
    assert judged["findings"]["verdict"]["sentence"].split(":")[0] in text


def test_the_command_line_judges_and_checks(home):
    (home / "cli").mkdir()
    (home / "cli" / "forgetful.py").write_text(BAD.replace("Amnesia", "Forgetful"))
    run = tiny.idiolect(
        "referee", "forgetful.py", "--problem", "heart", "--device", "cpu", cwd=home / "cli"
    )
    assert run.returncode == 0, run.stderr
    assert "Verdict: Forgetful beside the best baseline of each of 1 problem" in run.stdout
    path = "runs/referee/Forgetful-small/referee.json"
    done = tiny.here("referee", "verify", path, "--method", "forgetful.py", cwd=home / "cli")
    assert done.returncode == 0 and "No fault was found." in done.stdout, done.stdout
    file = home / "cli" / path
    file.write_text(re.sub("Forgetful beside", "Lovely beside", file.read_text()))
    done = tiny.here("referee", "verify", path, cwd=home / "cli")
    assert done.returncode == 13 and "fault the file was changed" in done.stdout
