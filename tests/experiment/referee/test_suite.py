"""The suite: its problems, its baselines, and what is tried for each."""

import json
import re

import numpy as np
import pytest
from judging import SMALL, STORED

from idiolect.cli import referee_commands
from idiolect.errors import ConfigError, DataError
from idiolect.experiment.load import load_experiment
from idiolect.experiment.referee.referee_run import choose_problems
from idiolect.experiment.referee.suite import SIZES, Contestant, baseline_digest, load_suite
from idiolect.experiment.repro.runs import experiments_folder


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


def test_the_suite_is_listed(capsys):
    referee_commands.show_suite("small", json=True)
    told = json.loads(capsys.readouterr().out)["result"]
    assert len(told["baselines"]) == 20 and told["digest"] == SMALL.digest
    referee_commands.show_suite("whole")
    assert "cifar10-dirichlet" in capsys.readouterr().out
