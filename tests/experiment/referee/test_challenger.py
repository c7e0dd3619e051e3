"""The method that is judged: what is refused, and what it cannot see."""

import pytest
from judging import BAD, SMALL, faults

from idiolect.engine.outcome import Silent
from idiolect.errors import ConfigError, MethodError
from idiolect.experiment.referee.challenger import find_challenger
from idiolect.experiment.referee.referee_run import referee, train_line

PEEKING = """
from dataclasses import dataclass
from idiolect.methods import FedAvg

@dataclass(frozen=True, kw_only=True)
class Peeker(FedAvg):
    def client_step(self, sent, personal, local):
        local.mean(lambda batch: local.loss(sent.shared, batch), "test")
        return super().client_step(sent, personal, local)
"""


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
