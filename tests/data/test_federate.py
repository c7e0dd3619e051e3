import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from idiolect.data import Dataset, federate, load
from idiolect.data.federate import part_sizes, split_rows
from idiolect.errors import ConfigError, DataError


def test_same_seed_same_federation(toy):
    one, two, other = (federate(toy(), "iid", seed, clients=4) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one.train, two.train, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one.train, other.train, strict=True))
    assert one.description == "toy, iid, clients=4, split=0.6/0.2/0.2, pool=all, seed=1"


def test_the_default_federation_is_the_papers_ds1():
    federation = federate(load(), "persfl-ds1")
    assert [len(rows) for rows in federation.train] == [360] * 10
    assert [len(rows) for rows in federation.val] == [120] * 10
    assert [len(rows) for rows in federation.test] == [120] * 10


def test_pools_choose_files(toy):
    assert federate(toy(), "iid", clients=4).counts().sum() == 60
    trained = federate(toy(), "iid", clients=4, pool="train")
    assert trained.counts().sum() == 48
    assert federate(toy(), "persfl-ds2", clients=2).counts().sum() <= 48


def test_natural_clients_keep_their_names_and_files(toy):
    federation = federate(toy(), "natural", split="file", val=0.25)
    assert federation.names == ("ann", "bob", "cy")
    data = federation.dataset
    for client in range(3):
        assert (data.clients[federation.train[client]] == client).all()
        assert (data.origin[federation.test[client]] == 1).all()
        assert (data.origin[federation.train[client]] == 0).all()
        assert (len(federation.train[client]), len(federation.val[client])) == (12, 4)
    assert sum(map(len, federation.test)) == 12


def test_a_client_without_rows_is_named_or_dropped(toy):
    silent = toy(client_names=("ann", "bob", "cy", "dee"))
    with pytest.raises(DataError, match=r"dee has 0 rows .*drop=True"):
        federate(silent, "natural")
    federation = federate(silent, "natural", drop=True)
    assert (
        federation.names == ("ann", "bob", "cy") and "1 clients left out" in federation.description
    )
    with pytest.raises(DataError, match="no client has min_size=100"):
        federate(silent, "natural", min_size=100, drop=True)


def test_min_size_reaches_the_dirichlet_partition(toy):
    federation = federate(toy(), "dirichlet", clients=10, alpha=0.01, min_size=5)
    assert federation.counts().sum(1).min() >= 5 and "min_size=5" in federation.description


def test_a_class_nobody_has_is_reported(toy):
    sparse = toy(y=np.arange(60) % 3)
    for partition in ("iid", "dirichlet", "shards", "natural", "classes", "ktpfl-all"):
        options = {} if partition == "natural" else {"clients": 3}
        federation = federate(sparse, partition, **options)
        assert "no client has a row of class d" in federation.warnings()


def test_public_data_travels_with_the_lessons(toy):
    public = toy(name="public")
    federation = federate(toy(), clients=2, public=public)
    assert federation.train_data.public is public
    assert federation.train_data.pooled().public is public


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"partition": "even"}, ConfigError, "partition 'even' is unknown; expected one of iid"),
        ({"alpha": 1.0}, ConfigError, "'iid' has no option 'alpha'; it has clients, per_client"),
        ({"partition": "natural", "clients": 3}, ConfigError, "no option 'clients'; it has none"),
        ({"split": "random"}, ConfigError, "split 'random'"),
        ({"split": (0.5, 0.5)}, ConfigError, "three shares"),
        ({"seed": -1}, ConfigError, "seed is -1"),
        ({"pool": "both"}, ConfigError, "pool 'both'"),
    ],
)
def test_wrong_settings_are_named(toy, settings, error, words):
    with pytest.raises(error, match=words):
        federate(toy(), **settings)


def test_what_the_data_lacks_is_named(toy):
    with pytest.raises(DataError, match="no client column"):
        federate(toy(clients=None, client_names=()), "natural")
    with pytest.raises(DataError, match="no test file of its own"):
        federate(toy(origin=None), "natural", split="file")


shares = [(0.6, 0.2, 0.2), (0.75, 0.0, 0.25), (0.9, 0.1, 0.0), (1.0, 0.0, 0.0), (0.34, 0.33, 0.33)]


def test_known_sizes():
    assert part_sizes(600, (0.6, 0.2, 0.2)) == (360, 120, 120)
    assert part_sizes(5000, (0.6, 0.2, 0.2)) == (3000, 1000, 1000)
    assert part_sizes(600, (0.75, 0, 0.25)) == (450, 0, 150)
    assert part_sizes(1, (0.6, 0.2, 0.2)) == (1, 0, 0)
    assert part_sizes(2, (0.6, 0.2, 0.2)) == (1, 0, 1)
    assert part_sizes(0, (0.6, 0.2, 0.2)) == (0, 0, 0)


@given(st.integers(0, 10**6), st.sampled_from(shares))
def test_sizes_are_within_one_of_the_share_and_lose_nothing(total, ratios):
    parts = part_sizes(total, ratios)
    assert sum(parts) == total
    assert all(
        abs(part - total * ratio) <= 1.0001 for part, ratio in zip(parts, ratios, strict=True)
    )
    assert parts[0] > 0 or total == 0


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.sampled_from(shares),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_parts_are_the_rows_divided(counts, ratios, stratify, seed):
    rows = np.split(np.random.default_rng(0).permutation(sum(counts)), np.cumsum(counts)[:-1])
    labels = np.arange(sum(counts)) % 3
    parts = split_rows(rows, labels, ratios, seed=(seed,), stratify=stratify)
    for client, mine in enumerate(rows):
        held = [part[client] for part in parts]
        assert sorted(np.concatenate(held)) == sorted(mine)
        assert tuple(len(h) for h in held) == part_sizes(len(mine), ratios)
    again = split_rows(rows, labels, ratios, seed=(seed,), stratify=stratify)
    assert all(
        np.array_equal(a, b)
        for x, y in zip(parts, again, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def test_a_client_does_not_depend_on_the_others():
    labels = np.zeros(100, np.int64)
    shares = (0.6, 0.2, 0.2)
    few = split_rows([np.arange(30), np.arange(30, 60)], labels, shares, seed=(5,))
    many = split_rows(
        [np.arange(30), np.arange(30, 31), np.arange(60, 100)], labels, shares, seed=(5,)
    )
    for one, other in zip(few, many, strict=True):
        assert np.array_equal(one[0], other[0])
    assert not np.array_equal(few[0][1] - 30, few[0][0])  # equal sizes, yet draws of their own
    other_seed = split_rows([np.arange(30)], labels, (0.6, 0.2, 0.2), seed=(6,))
    assert not np.array_equal(other_seed[0][0], few[0][0])


def test_stratified_parts_hold_each_class_in_its_share():
    labels = np.repeat(np.arange(4), [100, 50, 30, 20])
    parts = split_rows([np.arange(200)], labels, (0.6, 0.2, 0.2), seed=(0,), stratify=True)
    for part, ratio in zip(parts, (0.6, 0.2, 0.2), strict=True):
        held = np.bincount(labels[part[0]], minlength=4)
        assert np.all(np.abs(held - ratio * np.array([100, 50, 30, 20])) <= 2)


@pytest.mark.parametrize("ratios", [(0.6, 0.4), (0.5, 0.2, 0.2), (0, 0.5, 0.5), (1.2, -0.2, 0.0)])
def test_ratios_that_divide_nothing_are_refused(ratios):
    with pytest.raises(ConfigError, match="split"):
        split_rows([np.arange(3)], np.zeros(3, np.int64), ratios, seed=(0,))


def test_rows_drawn_by_name_do_not_depend_on_who_else_is_there():
    """Neither on the order of clients nor on others; by number they do."""

    def train(names, by_name):
        codes = np.repeat(np.arange(len(names)), 30)
        x = np.zeros((len(codes), 1), np.float32)
        own = Dataset("own", x, codes % 2, ("a", "b"), clients=codes, client_names=names)
        found = federate(own, "natural", 0, by_name=by_name)
        return {name: found.train[n] - 30 * n for n, name in enumerate(found.names)}

    for by_name in (True, False):
        few, more = train(("lab", "ward"), by_name), train(("clinic", "lab", "ward"), by_name)
        same = [np.array_equal(few[name], more[name]) for name in ("lab", "ward")]
        assert same == [by_name, by_name]
