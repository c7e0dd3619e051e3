"""The width of a block is measured; here the work only moves the hands of a clock."""

import json
from types import SimpleNamespace

import pytest

from idiolect.engine import block_runner


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A busy machine must not decide these tests."""
    Clock.now = 0.0
    monkeypatch.setattr(block_runner, "time", SimpleNamespace(perf_counter=Clock()))


class Work:
    """A trial that takes so many milliseconds for each client, depending on the width."""

    def __init__(self, cost):
        self.cost = cost
        self.tried = []

    def __call__(self, wide):
        self.tried.append(wide)
        Clock.now += self.cost(wide) * wide / 1000
        return wide


@pytest.mark.parametrize(
    ("cost", "most", "best"),
    [
        (lambda wide: 8 / wide, 16, 16),  # stacking is free
        (lambda wide: 0.5 * wide, 16, 1),  # stacking hurts
        (lambda wide: 1 + abs(wide - 4), 10, 4),  # a width between
        (lambda wide: 8 / wide, 3, 3),  # never wider than there are clients
    ],
)
def test_the_fastest_per_client_is_chosen(cost, most, best, monkeypatch):
    work = Work(cost)
    assert block_runner.choose_width(work, most, "key", None) == best
    assert max(work.tried) == most and min(work.tried) == 1


class Noise:
    """A cost that is another one in some of the trials of a width, in turn."""

    def __init__(self, cost, spoilt):
        self.cost, self.spoilt, self.count = cost, spoilt, {}

    def __call__(self, wide):
        turn = self.count[wide] = self.count.get(wide, 0) + 1
        return self.spoilt.get((wide, turn), 1) * self.cost(wide)


def stacking_hurts(wide):
    return 1.0 if wide == 1 else 1.4


@pytest.mark.parametrize(
    "spoilt",
    [
        {(1, 1): 3, (1, 2): 2},  # two of three trials of the right one are disturbed
        {(1, 1): 20},  # or one so much that it seems hopeless
        {(1, 1): 1.8, (1, 2): 1.6, (1, 3): 1.5},  # or all of them
    ],
)
def test_a_busy_moment_does_not_choose(spoilt):
    """LeNet-5 on two cores: single clients are the usual form, and stacks 1.4 times slower."""
    noisy = Noise(stacking_hurts, spoilt)
    slow = Work(lambda wide: 10 * noisy(wide))
    assert block_runner.choose_width(slow, 20, "key", None, usual=1) == 1
    assert slow.tried.count(1) >= 3


@pytest.mark.parametrize(("factor", "best"), [(0.8, 16), (0.9, 1)])
def test_the_usual_width_gives_way_to_one_that_is_clearly_faster(factor, best):
    work = Work(lambda wide: {1: 1.0, 16: factor}.get(wide, 1.1))
    assert block_runner.choose_width(work, 16, "key", None, usual=1) == best


@pytest.mark.parametrize(("ms", "turns"), [(1, 5), (50, 3), (100, 2), (1000, 1)])
def test_slow_work_is_tried_a_few_times_too(ms, turns):
    """Unless a turn takes many seconds, which a busy moment does not change much."""
    work = Work(lambda wide: ms)
    block_runner.choose_width(work, 16, "key", None)
    assert [work.tried.count(wide) for wide in (1, 4, 16)] == [turns] * 3


def test_hopeless_widths_are_not_tried_again():
    work = Work(lambda wide: 1 if wide == 1 else 10)
    block_runner.choose_width(work, 4, "key", None)
    assert work.tried.count(4) == 1 < work.tried.count(1)


def test_a_choice_is_kept_on_disk_for_its_key(tmp_path):
    cache = tmp_path / "deep" / "widths.json"
    first = Work(lambda wide: 4 / wide)
    assert block_runner.choose_width(first, 16, "this work", cache) == 16
    again = Work(lambda wide: 4 * wide)
    assert block_runner.choose_width(again, 16, "this work", cache) == 16 and not again.tried
    assert block_runner.choose_width(again, 5, "this work", cache) == 5 and not again.tried
    assert block_runner.choose_width(Work(lambda wide: 0.5 * wide), 4, "other work", cache) == 1
    assert sorted(json.loads(cache.read_text()).values()) == [1, 16]
    assert not list(cache.parent.glob("*.part"))


@pytest.mark.parametrize(
    "damage", ["{ not json", "", "[1, 2]", '{"KEY": "wide"}', '{"KEY": 0}', "\x00"]
)
def test_a_damaged_cache_costs_one_measurement(tmp_path, damage):
    cache = tmp_path / "widths.json"
    work = Work(lambda wide: 2 / wide)
    block_runner.choose_width(work, 4, "key", cache)
    (key,) = json.loads(cache.read_text())
    cache.write_text(damage.replace("KEY", key))
    assert block_runner.choose_width(work, 4, "key", cache) == 4
    assert json.loads(cache.read_text())[key] == 4


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path):
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "x.json"
    assert block_runner.choose_width(Work(lambda wide: 2 / wide), 4, "key", cache) == 4
