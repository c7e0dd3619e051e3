import numpy as np
import pytest

from idiolect.data import federate, load
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
