"""Checking what others send: a changed file is found out."""

import copy
import json

import numpy as np
import pytest
from judging import BAD, SMALL, STORED, faults, moved, sealed

from idiolect.cli import referee_commands
from idiolect.engine.outcome import Silent
from idiolect.errors import ConfigError, DataError
from idiolect.experiment.referee.challenger import find_challenger
from idiolect.experiment.referee.judgement import BETTER, NONE, WORSE, judge
from idiolect.experiment.referee.referee_run import read_json, read_lines, stored_folder
from idiolect.experiment.referee.suite import SIZES
from idiolect.experiment.referee.verify import (
    FAULT,
    NOTE,
    OK,
    _beside_stored,
    _seed,
    difference,
    rerun,
    verify,
)


def test_an_honest_file_passes(judged, home):
    checks = verify(judged)
    assert not faults(judged)
    assert any(check.kind == NOTE and "--method" in check.text for check in checks)
    own = find_challenger(str(home / "amnesia_method.py"), SMALL)
    assert any(check.kind == OK and "file given" in check.text for check in verify(judged, own))


def first_seed(content, label="Amnesia"):
    return content["methods"][label]["cells"]["heart"]["seeds"][0]


def cell(content, label="Amnesia"):
    return content["methods"][label]["cells"]["heart"]


def raise_a_score(content):
    first_seed(content)["score"][0] = 1.0


def raise_a_score_and_its_curve(content):
    """Everything follows from the wrong score but the share of right answers."""
    one = first_seed(content)
    one["score"][0] = 0.777777
    scores, rows = np.array(one["score"]), np.array(one["test"])
    one["test_curve"][-1] = float((scores * rows).sum() / rows.sum())
    again(content)


def again(content):
    cells = {label: own["cells"] for label, own in content["methods"].items()}
    content["findings"] = judge(cells, content["problems"], content["challenger"])


def lower_a_baseline(content):
    lines = {label: {"cells": own["cells"]} for label, own in content["methods"].items()}
    content["methods"]["FedPer"]["cells"] = moved(lines["FedPer"], "heart", 0.5)["cells"]
    again(content)


def lower_a_baseline_as_if_trained_anew(content):
    lower_a_baseline(content)
    content["trained_here"].append("FedPer")


def drop_a_baseline(content):
    del content["methods"]["FedPer"]
    again(content)


def drop_a_seed(content):
    del cell(content)["seeds"][0]


def drop_a_client(content):
    for key in ("score", "train", "test"):
        del first_seed(content)[key][0]


def try_more(content):
    tuned = cell(content)["tuned"]
    tuned["space"]["lr"].append(1.0)
    tuned["trials"].append({**tuned["trials"][0], "settings": {"lr": 1.0}})


def choose_what_is_not_best(content):
    tuned = cell(content)["tuned"]
    tuned["trials"][0]["validation"][0]["score"] = 0.0
    tuned["trials"][1]["validation"][0]["score"] = 0.9


def claim_another_setting(content):
    cell(content)["settings"]["lr"] = 0.5


def tune_on_test_data(content):
    cell(content)["tuned"]["metric"] = "test accuracy"


def take_an_earlier_round(content):
    cell(content)["rounds"] = 5


def report_the_best_round(content):
    one = content["findings"]["problems"]["heart"]["methods"]["Amnesia"]
    one["mean"] = one["best_test_round"]["weighted_mean"]


def change_the_verdict(content):
    content["findings"]["verdict"]["sentence"] = "Amnesia is best."


def change_a_rank(content):
    content["findings"]["problems"]["heart"]["methods"]["Amnesia"]["rank"] = 1.0


def change_a_p(content):
    content["findings"]["problems"]["heart"]["against"]["FedPer"]["p_holm"] = 0.5


def cheaper(content):
    content["findings"]["problems"]["heart"]["methods"]["Amnesia"]["bytes"] = 1.0


def another_suite(content):
    content["suite"]["digest"] = "0" * 64


def another_problem(content):
    cell(content)["problem"] = "0" * 64


def other_rows(content):
    cell(content)["rows"][0] = "0" * 16


def other_code(content):
    cell(content)["code"] = "0" * 64


def no_versions(content):
    cell(content)["versions"] = {}


def hide_a_problem(content):
    del content["left_out"]["school"]


def say_that_a_baseline_failed(content):
    cells = content["methods"]["FedPer"]["cells"]
    cells["heart"] = {key: cells["heart"][key] for key in ("problem", "code", "versions")}
    cells["heart"]["failed"] = "it diverged"
    again(content)


def leave_out_the_worst_client(content):
    """The curve, and all that follows, without it."""
    one = first_seed(content)
    worst = int(np.argmin(one["score"]))
    one["score"][worst] = None
    scores, rows = np.array(one["score"], float), np.array(one["test"])
    one["test_curve"][-1] = float(np.nansum(scores * rows) / rows[~np.isnan(scores)].sum())


def right_answers_of_others(content):
    """What the test on few hospitals is paired by."""
    groups = first_seed(content)["right_by_group"][0]
    groups[0], groups[1] = groups[0] + groups[1] + 1, 0


def right_answers_moved_to_another_row(content):
    """Their sum stays; there are fewer rows in the group than are right."""
    groups = first_seed(content)["right_by_group"][0]
    groups[:] = [sum(groups), *[0.0 for _ in groups[1:]]]
    again(content)


def list_a_problem_twice(content):
    """So that "better on 1 of 1" would be 2 of 2."""
    content["problems"].append("heart")
    again(content)


def withhold_the_validation_curve(content):
    """With which a trial that was made up would be seen."""
    del first_seed(content)["validation_curve"][0]


def draw_more_clients(content):
    cell(content)["cohort"] = 4


def not_a_number(content):
    cell(content)["seconds"] = float("nan")


def too_large_a_number(content):
    first_seed(content)["score"][0] = 10**400


def no_such_metric(content):
    cell(content)["metric"] = "luck"


def train_with_another_batch(content):
    cell(content)["settings"]["batch"] = 1


def train_longer(content):
    cell(content)["settings"]["epochs"] = 9


def weigh_other_units(content):
    """With clients for units, and not their rows, other pairs would differ."""
    cell(content)["data"]["same_clients"] = False
    again(content)


def a_perfect_round(content):
    """Which the best test round would be."""
    for one in cell(content)["seeds"]:
        one["test_curve"][0] = 7.0
    again(content)


def score_more_rounds(content):
    cell(content)["evaluated"].insert(0, 1)
    for one in cell(content)["seeds"]:
        one["test_curve"].insert(0, 0.9)
        one["validation_curve"].insert(0, 0.9)
    again(content)


def a_weak_method_among_the_baselines(content):
    content["methods"]["Straw"] = copy.deepcopy(content["methods"]["FedPer"])
    content["methods"]["Straw"]["name"] = "straw"
    again(content)


def judge_a_baseline_by_other_scores(content):
    lower_a_baseline(content)
    del content["methods"]["Amnesia"]
    content["challenger"], content["trained_here"] = "FedPer", ["FedPer"]
    again(content)


def all_took_part(content):
    first_seed(content)["took_part"] = [2]


def take_the_name_of_the_best_baseline(content):
    """Beside which it would not stand then."""
    content["methods"]["FedPer"] = content["methods"].pop("Amnesia")
    content["challenger"], content["trained_here"] = "FedPer", ["FedPer"]
    again(content)


def leave_a_problem_out_of_the_findings(content):
    lost = copy.deepcopy(STORED["Local"]["cells"]["school"])
    content["methods"]["Amnesia"]["cells"]["school"] = {**lost, "code": cell(content)["code"]}


def score_by_another_metric(content):
    cell(content)["metric"] = "balanced_accuracy"


def score_other_rounds(content):
    for own in content["methods"].values():
        own["cells"]["heart"]["evaluated"] = [4, 10]


def withhold_answers_by_row(content):
    """Of four hospitals nothing can be said without them, so that a bad method would be level."""
    for one in cell(content)["seeds"]:
        del one["right_by_group"]
    again(content)


def make_up_a_trial(content):
    """Choose by test data, and tell of validation scores that would have chosen so."""
    tuned = cell(content)["tuned"]
    chosen = tuned["chosen"][0]["settings"]
    other = next(one for one in tuned["trials"] if one["settings"] != chosen)
    tuned["chosen"][0]["settings"] = other["settings"]
    other["validation"][0]["score"] = 0.99
    for key, value in other["settings"].items():
        held = cell(content)["settings"][key]
        held = held if isinstance(held, list) else [held] * 5
        cell(content)["settings"][key] = [value, *held[1:]]


def nonsense(content):
    content["methods"] = 3


TAMPERING = {
    raise_a_score: "curve is not its score",
    raise_a_score_and_its_curve: "no share of the client's test rows",
    lower_a_baseline: "FedPer is not as this package has it stored",
    lower_a_baseline_as_if_trained_anew: "heart/FedPer: trained on cpu and on cpu, the mean",
    drop_a_baseline: "the baseline FedPer is not in the file",
    drop_a_seed: "seeds are not the suite's",
    drop_a_client: "3 scores of 4 clients",
    try_more: "more than the 4 of others",
    choose_what_is_not_best: "best on validation data",
    claim_another_setting: "it was trained with lr = 0.5",
    tune_on_test_data: "not on validation data",
    take_an_earlier_round: "not that of round 10, the last",
    report_the_best_round: "methods.Amnesia.mean",
    change_the_verdict: "verdict.sentence",
    change_a_rank: "Amnesia.rank",
    change_a_p: "p_holm",
    cheaper: "Amnesia.bytes",
    another_suite: "not that of this package",
    another_problem: "another version of the problem",
    other_rows: "other clients or rows",
    other_code: "different versions of its code",
    no_versions: "with which versions",
    hide_a_problem: "no result on school",
    say_that_a_baseline_failed: "FedPer is not as this package has it stored",
    leave_out_the_worst_client: "a client with test rows has no score",
    right_answers_of_others: "do not add up to its scores",
    right_answers_moved_to_another_row: "do not add up to its scores",
    list_a_problem_twice: "heart is listed twice",
    withhold_the_validation_curve: "validation curve has not a point for each",
    draw_more_clients: "(cohort)",
    not_a_number: "a number that is not finite",
    too_large_a_number: "has not the form",
    no_such_metric: "unknown metric 'luck'",
    train_with_another_batch: "trained with batch = 1",
    train_longer: "trained with epochs = 9 and not with the problem's 1",
    weigh_other_units: "had other clients or rows than the stored APFL (data.same_clients)",
    a_perfect_round: "beyond what accuracy can be",
    score_more_rounds: "(evaluated)",
    a_weak_method_among_the_baselines: "Straw is neither the challenger nor a baseline",
    judge_a_baseline_by_other_scores: "heart/FedPer: trained on cpu and on cpu, the mean",
    all_took_part: "of each client whether it took part",
    take_the_name_of_the_best_baseline: "is called FedPer, which is a baseline it is not",
    leave_a_problem_out_of_the_findings: "on school, which the findings leave out",
    score_by_another_metric: "scored by balanced_accuracy and not by accuracy",
    score_other_rounds: "not scored every 5 rounds",
    withhold_answers_by_row: "(seeds[0].right_by_group)",
    make_up_a_trial: "a trial of what it chose scored 0.99 on validation data after 5 rounds",
    nonsense: "has not the form",
}


@pytest.mark.parametrize("change", TAMPERING, ids=lambda one: one.__name__)
def test_a_changed_file_is_found_out(judged, change):
    """Even where whoever changed it has computed the digest again."""
    content = copy.deepcopy(judged)
    change(content)
    found = faults(sealed(content))
    assert any(TAMPERING[change] in text for text in found), found


@pytest.mark.parametrize(
    ("metric", "score", "groups", "fits"),
    [
        ("accuracy", [0.5, None], [[1, 1], [0, 0]], True),  # the second has no test rows
        ("accuracy", [0.5, None], [[2, 1], [0, 0]], False),
        ("accuracy", [0.5, None], [[1, 1], [1, 0]], False),
        ("accuracy", [0.5, 0.5], [[1, 1]], False),
        ("balanced_accuracy", [0.4, None], [[1, 2], [0, 0]], True),  # 3 of 4, in unequal classes
        ("balanced_accuracy", [0.4, None], [[3, 2], [0, 0]], False),
    ],
)
def test_right_answers_by_row(metric, score, groups, fits):
    record = {"metric": metric, "task": None, "data": {"clients": 2}, "evaluated": [1]}
    tests = [4, 0 if score[1] is None else 4]
    one = {"seed": 0, "score": score, "test": tests, "train": [4, 4], "right_by_group": groups}
    one |= {"validation_curve": [0.5], "test_curve": [score[0]], "bytes_up": 0}
    one["bytes_down"] = 0
    found = [*_seed(record | {"seconds": 1}, one)]
    assert not found if fits else any("do not add up" in text for text in found)


def test_a_line_of_the_board_is_of_the_same_clients_as_those_stored():
    line = copy.deepcopy(read_lines(stored_folder("small"))["Ditto"])
    line["label"] = line["name"] = "Other"
    assert not faults(line)
    line["cells"]["synthetic"]["seeds"][0]["train"][0] += 1
    assert any("had other clients or rows than the stored" in text for text in faults(line))


def test_newcomers_cannot_be_hidden():
    """Who is drawn depends on the seed alone; Local, which needs no server, trains everyone."""
    line = copy.deepcopy(STORED["FedPer"])
    assert not [one for one in faults(line) if "drawn" in one]
    assert not [one for one in faults(STORED["Local"]) if "drawn" in one]
    for one in line["cells"]["synthetic"]["seeds"]:
        one["took_part"] = [1] * len(one["took_part"])
    assert "drawn in no round" in " ".join(faults(line))


def test_a_name_in_a_file_cannot_look_like_a_check(judged, tmp_path, capsys):
    content = copy.deepcopy(judged)
    content["left_out"]["school"] = "gone\nok    all is well"
    (tmp_path / "sent.json").write_text(json.dumps(sealed(content)))
    referee_commands.verify_file(tmp_path / "sent.json")
    told = capsys.readouterr().out.splitlines()
    assert any("gone ok all is well" in line for line in told)
    assert not any(line.startswith("ok    all is well") for line in told)


def test_baselines_that_the_sender_trained_do_not_turn_the_verdict_in_silence(judged):
    """Each may be close to the stored one, and all of them a little worse."""
    same = list(STORED.values())
    cells = judged["methods"]["Amnesia"]["cells"]

    def told(content):
        return [one.text for one in _beside_stored(content, cells, ["heart"], "Amnesia", same)]

    assert judged["findings"]["verdict"]["beside_best_baseline"][WORSE] == ["heart"]
    level = {BETTER: [], NONE: ["heart"], WORSE: []}
    turned = {"trained_here": [*STORED], "findings": {"verdict": {"beside_best_baseline": level}}}
    assert "worse on 1" in told(turned)[0] and not told({**judged, "trained_here": [*STORED]})
    assert not told({**turned, "trained_here": ["Amnesia"]})


def test_a_file_that_was_changed_and_not_sealed_again_is_found_out(judged):
    content = copy.deepcopy(judged)
    content["versions"]["torch"] = "0"
    assert faults(content) == ["the file was changed: its digest differs"]


def test_another_file_than_the_one_judged_is_named(judged, tmp_path):
    (tmp_path / "amnesia_other.py").write_text(BAD + "\n# changed\n")
    own = find_challenger(str(tmp_path / "amnesia_other.py"), SMALL)
    assert "the code of Amnesia is not that of the file given" in faults(judged, challenger=own)


def test_a_cell_trained_again_is_the_same_and_a_made_up_one_is_not(judged, home, tmp_path):
    own = find_challenger(str(home / "amnesia_method.py"), SMALL)
    check = rerun(judged, "heart/Amnesia", tmp_path / "a", Silent(), own, device="cpu")
    assert check.kind == OK, check
    made_up = copy.deepcopy(judged)
    line = {"cells": judged["methods"]["Amnesia"]["cells"]}
    made_up["methods"]["Amnesia"]["cells"] = moved(line, "heart", 1.5)["cells"]
    check = rerun(made_up, "heart/Amnesia", tmp_path / "b", Silent(), own, device="cpu")
    assert check.kind == FAULT and "the mean differs by" in check.text
    for key, value in (("bytes_up", 8), ("test_curve", [0.99, 0.99])):
        lied = copy.deepcopy(judged)
        for one in lied["methods"]["Amnesia"]["cells"]["heart"]["seeds"]:
            one[key] = value
        check = rerun(lied, "heart/Amnesia", tmp_path / key, Silent(), own, device="cpu")
        assert check.kind == FAULT and check.text.endswith(f"its {key} is another")
    with pytest.raises(ConfigError, match="no baseline; give the file"):
        rerun(judged, "heart/Amnesia", tmp_path, Silent())
    with pytest.raises(ConfigError, match="no cell 'heart/None'"):
        rerun(judged, "heart/None", tmp_path, Silent(), own)


def test_numbers_may_differ_in_their_last_digits_only():
    assert not difference({"a": [1.0, None]}, {"a": [1.0 + 1e-10, None]}, "x")
    assert "x.a[0]" in difference({"a": [1.0]}, {"a": [1.001]}, "x")
    assert "missing" in difference({}, {"a": 1}, "x") and "too much" in difference(
        {"a": 1}, {}, "x"
    )
    assert difference(True, 1, "x") and difference("1", 1, "x")


@pytest.mark.parametrize("size", SIZES)
def test_every_stored_result_is_without_fault(size):
    for path in stored_folder(size).glob("*.json"):
        line = read_json(path)
        missing = [text for text in faults(line) if "has no result on" not in text]
        assert not missing, (path.name, missing)


def test_what_is_no_file_of_the_referee_is_one_clear_line(home):
    with pytest.raises(DataError, match="is no JSON"):
        read_json(home / "amnesia_method.py")
    with pytest.raises(DataError, match="cannot read"):
        read_json(home / "nowhere.json")
    assert faults({"format": 9}) == ["its format is 9; this version reads 1"]
    assert "has not the form" in faults({"format": 1, "suite": 3})[0]
