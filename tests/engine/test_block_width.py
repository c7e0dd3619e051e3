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
