"""The referee: what it trains, what it finds, and that a changed file is found out.

A bad and a better method are judged for real on the four hospitals; the rest is computed.
"""

import copy
import dataclasses
import json
import re
import sys

import numpy as np
import pytest

import tiny
from idiolect.cli import referee_commands
from idiolect.core.metrics import metric
from idiolect.engine.outcome import Silent
from idiolect.errors import ConfigError, DataError, MethodError
from idiolect.experiment.load import load_experiment
from idiolect.experiment.referee.challenger import find_challenger
from idiolect.experiment.referee.judgement import BETTER, NONE, WORSE, judge
from idiolect.experiment.referee.referee_page import gaps, write_page
from idiolect.experiment.referee.referee_run import (
    NOT_ASKED,
    choose_problems,
    read_json,
    read_lines,
    referee,
    stored_folder,
    train_line,
)
from idiolect.experiment.referee.suite import (
    SIZES,
    Contestant,
    baseline_digest,
    digest_of,
    load_suite,
)
from idiolect.experiment.referee.verify import (
    FAULT,
    NOTE,
    OK,
    _beside_stored,
    _seed,
    compare_cells,
    difference,
    rerun,
    verify,
)
from idiolect.experiment.repro.index import experiments_folder

SMALL = load_suite("small")
STORED = read_lines(stored_folder("small"))

BAD = """
from dataclasses import dataclass
from typing import ClassVar
from idiolect.methods import FedAvg

@dataclass(frozen=True, kw_only=True)
class Amnesia(FedAvg):
    title: ClassVar[str] = "Amnesia"
    def server_step(self, state, cohort, reports):
        return state
"""
PEEKING = """
from dataclasses import dataclass
from idiolect.methods import FedAvg

@dataclass(frozen=True, kw_only=True)
class Peeker(FedAvg):
    def client_step(self, sent, personal, local):
        local.mean(lambda batch: local.loss(sent.shared, batch), "test")
        return super().client_step(sent, personal, local)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("referee")
    sys.modules.pop("amnesia_method", None)  # a worker may make this folder more than once
    (folder / "amnesia_method.py").write_text(BAD)
    return folder


@pytest.fixture(scope="module")
def judged(home):
    """A bad method on the hospitals, beside the stored baselines."""
    challenger = find_challenger(str(home / "amnesia_method.py"), SMALL)
    content, path = referee(SMALL, challenger, home / "out", Silent(), only=["heart"], device="cpu")
    assert json.loads(path.read_text()) == content
    return content


def faults(content, **more):
    return [check.text for check in verify(content, **more) if check.kind == FAULT]


def sealed(content):
    bare = {key: value for key, value in content.items() if key != "digest"}
    return {**bare, "digest": digest_of(bare)}


# The suite.


@pytest.mark.parametrize("size", SIZES)
def test_twenty_baselines_try_as_many_settings_as_each_other(size):
    suite = load_suite(size)
    assert len(suite.baselines) == 20 and len(suite.first) == 10
    for problem in suite.problems.values():
        for own in suite.baselines:
            space = problem.space(own)
            cells = int(np.prod([len(values) for values in space.values()]))
            assert cells == problem.budget, (problem.name, own.label)
            experiment = problem.experiment(own)
            assert experiment.tune.methods[own.label]
            assert experiment.seeds == (0, 1, 2, 3, 4)
            assert experiment.evaluate.test_curve and experiment.tune.choose == "seed"


def test_the_problems_are_experiments_that_load_by_themselves():
    for size in SIZES:
        for path in (experiments_folder() / "referee" / size).glob("*.toml"):
            assert load_experiment(path).name == f"referee-{size}-{path.stem}"


def test_the_digest_changes_with_a_problem_and_with_what_is_tried(monkeypatch):
    problem = SMALL.problem("heart")
    for raw in ({**problem.raw, "rounds": 11}, {**problem.raw, "seeds": [0, 1]}):
        changed = type(problem)(problem.name, raw)
        assert changed.digest != problem.digest
        other = {**SMALL.problems, "heart": changed}
        assert type(SMALL)(SMALL.size, 1, other, SMALL.baselines).digest != SMALL.digest
    fewer = type(SMALL)(SMALL.size, 1, SMALL.problems, SMALL.baselines[1:])
    assert fewer.digest != SMALL.digest


METHOD = '''"""A method."""

from typing import ClassVar

class FedFoo(Method):
    """It halves."""

    title: ClassVar[str] = "FedFoo"
    presets: ClassVar[dict] = {
        "a": {"lr": 1.0}
    }

    def server_step(self, state, cohort, reports):
        """Say how."""
        return tree.scale(0.5, state)  # why
'''


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("# why", "# because", True),
        ("Say how.", "Say how it\n        is done.", True),
        ('"lr": 1.0', '"lr": 2.0', True),
        ("import ClassVar", "import Any, ClassVar", True),
        ("\n    presets", "\n\n    presets", True),
        ("0.5", "0.25", False),
        ("state)  # why", "state) + 1  # why", False),
        ("class FedFoo(Method)", "class FedFoo(Other)", False),
    ],
)
def test_a_baselines_digest_is_of_what_decides_numbers(before, after, same):
    changed = METHOD.replace(before, after)
    assert changed != METHOD
    assert (baseline_digest(changed) == baseline_digest(METHOD)) == same


def test_most_stored_results_are_of_the_code_of_this_package():
    """The others' code has changed since; docs/referee.md names them."""
    held = {own.label: own.code for own in SMALL.baselines}
    changed = {label for label, own in STORED.items() if own["code"] != held[label]}
    told = (experiments_folder().parent / "docs" / "referee.md").read_text()
    line = re.search(r"older code: ([^.]*)\.", " ".join(told.split()))
    assert changed == set(line[1].replace(" and ", ", ").split(", ")) if changed else not line


def test_own_values_take_the_middle_rates_and_more_than_the_budget_are_refused():
    problem = SMALL.problem("heart")  # rates 0.01, 0.03, 0.1, 0.3

    def make(search):
        return Contestant("fedavg", "A", "", search=search)

    assert problem.space(make({}))["lr"] == [0.01, 0.03, 0.1, 0.3]
    assert problem.space(make({"momentum": (0.0, 0.9)}))["lr"] == [0.03, 0.1]
    assert problem.space(make({"momentum": (0.0, 0.5, 0.9)}))["lr"] == [0.03]
    assert problem.space(make({"lr": (1.0,)}))["lr"] == [1.0]
    with pytest.raises(ConfigError, match="lists 5 settings and each method of the suite tries at"):
        problem.space(make({"momentum": (0.0, 0.1, 0.2, 0.3, 0.4)}))


def test_without_shared_data_the_digits_stand_in_and_what_is_left_out_is_said(
    tmp_path, monkeypatch
):
    from idiolect.experiment.referee import referee_run

    def missing(experiment, *_, **__):
        if experiment.data.source not in ("embedded", "heart", "synthetic"):
            raise DataError(f"{experiment.data.source} is not here")

    monkeypatch.setattr(referee_run, "build_federations", missing)
    chosen, left_out = choose_problems(SMALL, tmp_path, {})
    names = [one.name for one in chosen]
    assert names == [
        "digits-pathological", "digits-dirichlet", "persfl-ds1", "persfl-ds3", "ktpfl-all",
        "synthetic", "heart",
    ]  # fmt: skip
    assert set(left_out) == {
        "fmnist-pathological", "fmnist-dirichlet", "cifar10-pathological", "cifar10-dirichlet",
        "school",
    }  # fmt: skip
    assert "digits-pathological is run instead" in left_out["fmnist-pathological"]


# The challenger.


def test_a_file_needs_one_method_and_a_name_of_its_own(tmp_path):
    def found(name, text):
        (tmp_path / name).write_text(text)
        return find_challenger(str(tmp_path / name), SMALL)

    with pytest.raises(ConfigError, match="holds no class derived from Method"):
        found("empty_one.py", "x = 1\nclass A: pass\n")
    with pytest.raises(ConfigError, match="holds several methods, Amnesia, Other"):
        found("two_methods.py", BAD + "\nclass Other(Amnesia): pass\n")
    with pytest.raises(ConfigError, match="is no Python file"):
        found("broken_one.py", "def (:\n")
    with pytest.raises(ConfigError, match="cannot be imported by that name"):
        found("my-method.py", BAD)
    with pytest.raises(ConfigError, match="has the name of another module"):
        found("json.py", BAD.replace("Amnesia", "JSONDecoder"))
    with pytest.raises(ConfigError, match="does not exist"):
        find_challenger(str(tmp_path / "nowhere.py"), SMALL)
    with pytest.raises(ConfigError, match="unknown method 'fedavgg'"):
        find_challenger("fedavgg", SMALL)


ODD = {
    "title: ClassVar[str] = 5": "its title is 5, expected one line of text",
    'title: ClassVar[str] = "a\\nok"': "expected one line of text",
    'search: ClassVar[list] = ["lr"]': "expected values by setting",
    'search: ClassVar[dict] = {"lr": 0.1}': "`search` has 0.1 for lr, expected a tuple",
    'search: ClassVar[dict] = {"lr": (0.1, float("inf"))}': "expected a tuple of numbers",
    'search: ClassVar[dict] = {"lr": (0.1, 0.1)}': "lists a value of lr twice",
    'search: ClassVar[dict] = {"batch": (4, 8)}': "lists batch, which is the problem's",
    'search: ClassVar[dict] = {"epochs": (1, 9)}': "lists epochs, which is the problem's",
}


@pytest.mark.parametrize("line", ODD)
def test_an_odd_title_or_search_is_refused_before_anything_is_trained(tmp_path, line):
    path = tmp_path / f"odd_method_{list(ODD).index(line)}.py"
    path.write_text(BAD.replace('title: ClassVar[str] = "Amnesia"', line))
    with pytest.raises(ConfigError) as told:
        find_challenger(str(path), SMALL)
    assert ODD[line] in str(told.value)


def test_how_long_clients_train_is_the_problems(tmp_path):
    """Whatever a class has for default; one that has no use for epochs need not take them."""
    text = BAD.replace(" def server", " epochs: int = 9\n    steps: int = 4\n    def server")
    (tmp_path / "eager_method.py").write_text(text)
    own = find_challenger(str(tmp_path / "eager_method.py"), SMALL)
    for name, epochs in (("heart", 1), ("synthetic", 2)):
        table = SMALL.problem(name).experiment(own).methods[0]
        used = [table.settings[key] for key in ("batch", "epochs", "steps")]
        assert used == [25, epochs, 0], name
    text = BAD.replace(" def server", ' unused: ClassVar = ("epochs", "steps")\n    def server')
    (tmp_path / "stepless_method.py").write_text(text)
    own = find_challenger(str(tmp_path / "stepless_method.py"), SMALL)
    assert SMALL.problem("heart").experiment(own).methods[0].settings["batch"] == 25


def test_a_baseline_is_judged_with_the_suites_settings_and_others_by_their_class():
    assert find_challenger("ditto", SMALL).search == {"pull": [0.1, 1.0]}
    assert find_challenger("gpfl", SMALL).label == "GPFL"


def test_a_method_cannot_ask_for_test_rows(tmp_path):
    """`local` has training, validation and public rows; nothing else is within its reach."""
    (tmp_path / "peeking_method.py").write_text(PEEKING)
    own = find_challenger(str(tmp_path / "peeking_method.py"), SMALL)
    with pytest.raises(Exception, match="test"):
        train_line(SMALL, own, [SMALL.problem("heart")], tmp_path, Silent(), device="cpu")


WRONG = """
from dataclasses import dataclass
from idiolect.methods import FedAvg

@dataclass(frozen=True, kw_only=True)
class Wrong(FedAvg):
    def predict(self, model, x, local):
        return super().predict(model, x, local) * float("nan")
"""


def test_a_method_that_says_nothing_but_nan_is_right_about_nothing_and_its_file_passes(tmp_path):
    (tmp_path / "wrong_method.py").write_text(WRONG)
    own = find_challenger(str(tmp_path / "wrong_method.py"), SMALL)
    content, _ = referee(SMALL, own, tmp_path, Silent(), only=["heart"], device="cpu")
    record = content["methods"][own.label]["cells"]["heart"]
    for one in record["seeds"]:
        assert set(one["score"]) == {0.0} and one["validation_curve"] == [0.0, 0.0]
    assert not faults(content)


GREEDY = """
from dataclasses import dataclass
from idiolect.core import tree
from idiolect.methods import FedAvg

@dataclass(frozen=True, kw_only=True)
class Greedy(FedAvg):
    {more}
    def client_step(self, sent, personal, local):
        {step}
        return super().client_step(sent, personal, local)

    def deploy(self, sent, personal, local):
        {deploy}
        return sent.shared
"""
FIT = 'local.fit(local.loss, sent.shared, self.local_optimiser(local), "val", batch=10)'
MEAN = 'local.mean(lambda b: local.gradient(local.loss, sent.shared, b), "val")'
BOTH = "self.fit(local.with_validation(), sent.shared)"
LOOK = 'local.mean(lambda batch: local.loss(sent.shared, batch), "val")'
STUMBLE = """seen = []
        local.mean(lambda batch: seen.append(batch) or local.loss(sent.shared, batch), "train")
        try:
            local.mean(lambda batch: 1 / 0, "val")
        except ZeroDivisionError:
            pass
        local.gradient(local.loss, sent.shared, seen[0])"""


def greedy(tmp_path, step="pass", deploy="pass", more=""):
    """Train a method that does something with validation rows, in a file of its own."""
    name = f"greedy_{abs(hash((step, deploy, more)))}"
    (tmp_path / f"{name}.py").write_text(GREEDY.format(step=step, deploy=deploy, more=more))
    own = find_challenger(str(tmp_path / f"{name}.py"), SMALL)
    raw = {**SMALL.problem("heart").raw, "rounds": 1, "seeds": [0]}
    short = type(SMALL.problem("heart"))("heart", {**raw, "tune": {**raw["tune"], "rounds": 1}})
    return train_line(SMALL, own, [short], tmp_path, Silent(), device="cpu")


@pytest.mark.parametrize("how", [FIT, MEAN, BOTH], ids=["fit", "gradient", "all rows"])
@pytest.mark.parametrize("where", ["step", "deploy"])
def test_a_method_cannot_train_on_validation_rows_in_silence(tmp_path, where, how):
    with pytest.raises(MethodError, match="trains on validation rows"):
        greedy(tmp_path, **{where: how})


def test_to_look_at_validation_rows_or_to_say_so_is_allowed(tmp_path):
    assert greedy(tmp_path, LOOK, LOOK)["cells"]
    declared = "chooses = property(lambda self: True)"
    assert greedy(tmp_path, FIT, FIT, declared)["cells"]
    assert greedy(tmp_path, STUMBLE)["cells"]  # what failed is over


# What is found.


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


def moved(line, problem, factor, noise=0.0):
    """Return a line whose scores on a problem are others, with curves that fit."""
    made = copy.deepcopy(line)
    record = made["cells"][problem]
    own = metric(record["metric"])
    draws = np.random.default_rng(0)
    for one in record["seeds"]:
        scores, rows = np.array(one["score"], float), np.array(one["test"], float)
        scores = scores * factor + noise * draws.normal(size=len(scores))
        if own.name == "accuracy":
            scores = np.round(np.clip(scores, 0, 1) * rows) / rows
        one["score"] = [round(value, 6) for value in scores]
        one["test_curve"][-1] = round(float((scores * rows).sum() / rows.sum()), 6)
    return made


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


# Checking what others send.


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


# From the command line.


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


def test_what_is_no_file_of_the_referee_is_one_clear_line(home):
    with pytest.raises(DataError, match="is no JSON"):
        read_json(home / "amnesia_method.py")
    with pytest.raises(DataError, match="cannot read"):
        read_json(home / "nowhere.json")
    assert faults({"format": 9}) == ["its format is 9; this version reads 1"]
    assert "has not the form" in faults({"format": 1, "suite": 3})[0]


def test_the_suite_is_listed(capsys):
    referee_commands.show_suite("small", json=True)
    told = json.loads(capsys.readouterr().out)["result"]
    assert len(told["baselines"]) == 20 and told["digest"] == SMALL.digest
    referee_commands.show_suite("whole")
    assert "cifar10-dirichlet" in capsys.readouterr().out
