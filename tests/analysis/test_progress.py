"""Progress of a whole run: what is done, how long the rest takes, and how it is shown."""

import io

import pytest
from rich.console import Console

import idiolect
from idiolect.analysis import progress
from idiolect.analysis.progress import NotebookProgress, ProgressLines, RunEstimate, bar_on
from idiolect.engine.outcome import PlannedWork, Silent, Stage, Tick


class Clock:
    """A clock that is set by hand."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def estimate(*works):
    clock = Clock()
    made = RunEstimate(clock)
    made.plan(works)
    return made, clock


def rounds(made, clock, first, last, seconds):
    for number in range(first, last + 1):
        clock.now += seconds
        made.tick(number)


def test_the_first_round_says_nothing_about_the_others():
    """Ten rounds of 2 units, then 4 units: 24. The first takes 9 s, the others 2 s, 1 s a unit.

    So after 3 rounds 7 · 2 + 4 = 18 s are left, and 6 of 24 units are done.
    """
    made, clock = estimate(PlannedWork("a", 10, 2.0, 4.0))
    made.begin("a", 0, 10)
    assert made.share == 0 and made.seconds_left is None
    rounds(made, clock, 1, 1, 9.0)
    assert made.seconds_left is None
    rounds(made, clock, 2, 3, 2.0)
    assert made.seconds_left == pytest.approx(18.0)
    assert made.share == pytest.approx(6 / 24)


def test_a_first_round_that_is_long_says_something():
    made, clock = estimate(PlannedWork("a", 4, 1.0, 0.0))
    made.begin("a", 0, 4)
    rounds(made, clock, 1, 1, 60.0)
    assert made.seconds_left == pytest.approx(180.0)


def test_an_estimate_after_a_resume_is_of_this_session_alone():
    """100 rounds, 90 of them done an hour ago: 10 s a round or less would be nonsense."""
    made, clock = estimate(PlannedWork("a", 100, 1.0, 0.0))
    made.begin("a", 90, 100)
    assert made.share == pytest.approx(0.9) and made.seconds_left is None
    rounds(made, clock, 91, 91, 5.0)
    rounds(made, clock, 92, 93, 0.5)
    assert made.seconds_left == pytest.approx(7 * 0.5)


def test_rounds_taken_over_cost_nothing_and_tell_nothing():
    """Both have 10 units of rounds; the second takes the first one's over, and adapts: 5 units."""
    made, clock = estimate(PlannedWork("a", 10, 1.0, 0.0), PlannedWork("b", 10, 1.0, 5.0))
    made.begin("a", 0, 10)
    rounds(made, clock, 1, 10, 2.0)
    assert made.seconds_left == pytest.approx(2.0 * 15)
    made.end()
    made.begin("b", 10, 10)
    assert made.share == pytest.approx(20 / 25)
    assert made.seconds_left == pytest.approx(2.0 * 5)


def test_a_long_stage_is_weighed_by_work_and_then_by_its_own_pace():
    """Guessed 20 s; at half it has taken 40 s, so that 40 s are left."""
    made, clock = estimate(PlannedWork("a", 5, 1.0, 20.0))
    made.begin("a", 0, 5)
    rounds(made, clock, 1, 5, 1.0)
    assert made.seconds_left == pytest.approx(20.0)
    made.stage(Stage("adapting", "a", 0.0, 0, 10))
    before = made.share
    assert before == pytest.approx(5 / 25)
    clock.now += 40
    made.stage(Stage("adapting", "a", 0.5, 5, 10))
    assert made.seconds_left == pytest.approx(40.0)
    assert made.share == pytest.approx(15 / 25)
    made.stage(Stage("scoring", "a", 0.4, 4, 10))
    assert made.share == pytest.approx(15 / 25)  # never back
    clock.now += 20
    assert made.seconds_left > 0  # a guess that was too short leaves something all the same
    made.end()
    assert made.share == 1.0 and made.seconds_left == 0.0


def test_trials_of_settings_are_planned_as_many():
    made, clock = estimate(
        PlannedWork("a with", 4, 1.0, 0.0, times=2), PlannedWork("a", 12, 1.0, 0.0)
    )
    for number in (1, 2):
        made.plan([PlannedWork(f"a with lr={number}", 4, 1.0, 0.0)])
        made.begin(f"a with lr={number}", 0, 4)
        rounds(made, clock, 1, 4, 1.0)
        made.end()
        assert made.share == pytest.approx(number * 4 / 20)
    made.begin("a", 4, 12)
    assert made.share == pytest.approx(12 / 20) and made.seconds_left == pytest.approx(8.0)
    made.end()
    made.begin("unplanned", 0, 3)
    assert made.share < 1


def tick(label="a", number=1, of=10):
    return Tick(label, number, of, 0.5, 0.75, 1000.0, float("nan"))


def test_lines_say_where_a_long_stage_is():
    clock, said = Clock(), []
    watch = ProgressLines(said.append, clock)
    watch.plan([PlannedWork("a", 10, 1.0, 10.0)])
    watch.begin("a", 0, 10)
    for number in range(1, 11):
        clock.now += 1
        watch.tick(tick(number=number))
    assert len(said) == 10
    assert said[-1] == "a: round 10/10, loss 0.500, validation accuracy 75.0%, 1,000 examples/s, " \
        "10 s left"  # fmt: skip
    for done in range(8):  # 4 s a client, of which the first was never waited for
        clock.now += 4
        watch.stage(Stage("adapting", "a", done / 8, done, 8))
    assert [line for line in said if "adapting" in line] == [
        "a: adapting, 2 of 8 clients, 24 s left",
        "a: adapting, 5 of 8 clients, 12 s left",
    ]
    watch.end("a", 42.0)
    assert said[-1] == "a: done in 42 s"


def test_a_terminal_has_one_bar_for_all_methods():
    screen = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    with bar_on(screen) as watch:
        watch.plan([PlannedWork("a", 2, 1.0, 0.0), PlannedWork("b", 2, 1.0, 0.0)])
        for label in "ab":
            watch.begin(label, 0, 2)
            watch.tick(tick(label, 1, 2))
            watch.tick(tick(label, 2, 2))
            watch.end(label, 1.0)
    text = screen.file.getvalue()
    assert "a: done in 1.0 s" in text and "100%" in text.splitlines()[-2]
    assert all(len(line.split("\r")[-1]) <= 120 for line in text.splitlines())


def test_a_notebook_has_one_display_that_changes_in_place():
    clock, made, changed = Clock(), [], []
    watch = NotebookProgress(lambda *shown: made.append(shown) or (lambda *s: changed.append(s)))
    watch._clock = clock
    watch.plan([PlannedWork("<b>", 10, 1.0, 0.0)])
    watch.begin("<b>", 0, 10)
    for number in range(1, 11):
        clock.now += 1
        watch.tick(tick("<b>", number))
    watch.close("done in 10 s")
    assert len(made) == 1 and len(changed) == 11
    assert "<b>" not in changed[3][0] and "&lt;b&gt;: round 4 of 10" in changed[3][0]
    assert "width:40.0%" in changed[3][0] and changed[3][1].startswith("40%")
    assert changed[-1][1] == "done in 10 s" and "width" not in changed[-1][0]


class Heard(Silent):
    def __init__(self):
        self.stages = []

    def stage(self, stage):
        self.stages.append(stage)


@pytest.mark.parametrize("backend", ["vectorised", "sequential"])
def test_a_long_deploy_says_how_far_it_is(backend, monkeypatch, capsys):
    monkeypatch.setattr("idiolect.engine.stage_progress._PAUSE", 0.0)
    held = idiolect.federation("embedded", "iid", clients=4, per_client=30)
    heard = Heard()
    idiolect.fit(
        "persfl", held, "mlr", rounds=1, distil_epochs=3, watch=heard, backend=backend,
        shares=(0.0, 0.5), temperatures=(1.0,), progress=False,
    )  # fmt: skip
    adapting = [stage for stage in heard.stages if stage.name == "adapting"]
    assert len(adapting) >= 3 and {stage.clients for stage in adapting} == {4}
    shares = [stage.share for stage in heard.stages if stage.label and stage.name != "rounds"]
    assert shares == sorted(shares) and shares[0] == 0.0 and 0 < adapting[-1].share <= 1.0
    names = list(dict.fromkeys(stage.name for stage in heard.stages))
    assert names[-2:] == ["scoring", "writing"]
    assert capsys.readouterr() == ("", "")


def test_an_exchange_is_a_stage_of_its_own(monkeypatch):
    monkeypatch.setattr("idiolect.engine.stage_progress._PAUSE", 0.0)
    from idiolect.methods import METHODS
    from idiolect.methods.personalise.fine_tuning import Tuned

    held = idiolect.federation("embedded", "iid", clients=3, per_client=30)
    heard = Heard()
    method = Tuned(METHODS["fedavg"](), tune_epochs=2, ewc_weight=1.0)
    idiolect.fit(method, held, "mlr", rounds=1, watch=heard, progress=False)
    after = [stage for stage in heard.stages if stage.name != "rounds"]
    names = list(dict.fromkeys(stage.name for stage in after))
    assert names == ["adapting", "exchanging", "scoring", "writing"]
    shares = [stage.share for stage in after]
    assert shares == sorted(shares)
    assert next(stage.share for stage in after if stage.name == "exchanging") >= 0.5


def test_nothing_is_shown_where_nobody_looks(capsys):
    with progress.shown(None) as watch:
        assert isinstance(watch, Silent) and not isinstance(watch, progress.RunProgress)
    with progress.shown(True) as watch:
        assert isinstance(watch, ProgressLines)
    assert capsys.readouterr() == ("", "")
