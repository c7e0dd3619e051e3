import dataclasses
import time

import numpy as np
import pytest

from idiolect.data import Federation, federation
from idiolect.data.federation import TrainData, same_clients
from idiolect.errors import ConfigError, DataError


def rows(*lists):
    return tuple(np.array(one, np.int64) for one in lists)


@pytest.fixture
def two(toy):
    return Federation(toy(), rows([0, 1, 2], [3]), rows([4], []), rows([5, 6], [7]))


def test_counts_and_names(two):
    assert two.clients == 2 and two.names == ("client 0", "client 1")
    assert two.counts("train").tolist() == [[1, 1, 1, 0], [0, 0, 0, 1]]
    assert two.counts().tolist() == [[2, 2, 2, 0], [0, 0, 0, 2]]
    assert (two.counts() == sum(two.counts(part) for part in ("train", "val", "test"))).all()
    with pytest.raises(ConfigError, match="part 'exam'"):
        two.counts("exam")


def test_lessons_hold_no_test_row(two):
    held = two.train_data
    assert isinstance(held, TrainData) and isinstance(two.test_data, federation.TestData)
    assert not hasattr(held, "test") and not hasattr(held, "exam")
    assert not hasattr(two.test_data, "train")
    seen = set(np.concatenate(held.train + held.val).tolist())
    assert seen.isdisjoint(np.concatenate(two.test_data.test).tolist())


def test_pooled_is_the_union(two):
    together = two.train_data.pooled()
    assert together.names == ("all clients",) and together.clients == 1
    assert together.train[0].tolist() == [0, 1, 2, 3] and together.val[0].tolist() == [4]


def test_subset_keeps_names_and_order(two):
    one = two.subset([1])
    assert one.names == ("client 1",) and one.test[0].tolist() == [7]
    with pytest.raises(ConfigError, match=r"client 2 is unknown; expected 0\.\.1"):
        two.subset([2])


def test_a_row_held_twice_names_both_holders(toy):
    with pytest.raises(DataError, match=r"row 2 is held twice: by client 0 \(train\).*client 1"):
        Federation(toy(), rows([0, 2], [1]), rows([], []), rows([], [2]))
    with pytest.raises(DataError, match=r"row 0 .* client 0 \(train\) and by client 0 \(val\)"):
        Federation(toy(), rows([0], [1]), rows([0], []), rows([], []))


def test_empty_and_impossible_clients_are_refused(toy):
    with pytest.raises(DataError, match=r"client 1 holds no rows .*min_size"):
        Federation(toy(), rows([0], []), rows([], []), rows([], []))
    with pytest.raises(
        DataError, match=r"client 0 holds row 60, but dataset 'toy' has rows 0\.\.59"
    ):
        Federation(toy(), rows([60]), rows([]), rows([]))
    with pytest.raises(DataError, match="one entry per client"):
        Federation(toy(), rows([1], [2]), rows([]), rows([]))
    with pytest.raises(DataError, match="no client"):
        Federation(toy(), (), (), ())


def test_warnings_tell_what_is_legal_but_odd(two):
    told = "; ".join(two.warnings())
    assert "1 of 2 clients have no val row: client 1" in told
    only = two.subset([0])
    assert "no client has a row of class d" in "; ".join(only.warnings())


def test_eighty_thousand_clients_are_checked_in_seconds(toy):
    many = toy(240_000)
    held = np.arange(240_000).reshape(80_000, 3)
    start = time.perf_counter()
    parts = [tuple(held[:, part : part + 1]) for part in range(3)]
    federation = Federation(many, *parts)
    assert federation.counts().sum() == 240_000
    assert time.perf_counter() - start < 5


def test_clients_are_the_same_who_hold_the_same_rows_however_split(two, toy):
    resplit = Federation(two.dataset, rows([5, 1, 2], [7]), rows([4], []), rows([0, 6], [3]))
    swapped = Federation(two.dataset, rows([0, 1, 2], [4]), rows([3], []), rows([5, 6], [7]))
    renamed = Federation(two.dataset, two.train, two.val, two.test, ("a", "b"))
    assert same_clients([two]) and same_clients([two, two]) and same_clients([two, resplit])
    assert not same_clients([two, resplit, swapped]) and not same_clients([two, renamed])


def test_without_test_data_none_is_left_in_any_form(two):
    bare = dataclasses.replace(two, common=np.array([8, 9]), marked=rows([5], [7])).without_test()
    assert [len(held) for held in bare.test] == [0, 0]
    assert bare.common is None and bare.marked is None
    assert [held.tolist() for held in (*bare.train, *bare.val)] == [[0, 1, 2], [3], [4], []]


def test_refitted_trains_on_validation_rows_and_on_no_test_row(two):
    both = two.refitted
    assert [rows.tolist() for rows in both.train] == [[0, 1, 2, 4], [3]]
    assert [len(rows) for rows in both.val] == [0, 0] and both.test == two.test
    assert both.dataset is two.dataset  # scaled by the training rows alone
    assert both is two.refitted  # methods that are trained alike are trained once
