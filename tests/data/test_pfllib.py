"""PFLlib's clients, row for row: figures that its own README and its own code give."""

import hashlib

import numpy as np
import pytest

from idiolect.api import federation
from idiolect.data.federate import federate
from idiolect.data.partition.general import Candidates
from idiolect.data.partition.pfllib_generators import _split, pfllib
from idiolect.data.sources import load
from idiolect.errors import IdiolectError

# README of PFLlib d832e76: what `python generate_MNIST.py noniid - dir` prints.
README_TRAIN = [
    *(1972, 374, 1222, 1905, 1437, 4641, 942, 951, 2700, 3004),
    *(2337, 2829, 2709, 1600, 4297, 4086, 2721, 4239, 3949, 4577),
]
README_TEST = [
    *(658, 125, 408, 636, 480, 1548, 314, 318, 900, 1002),
    *(779, 943, 904, 534, 1433, 1362, 907, 1414, 1317, 1526),
]
README_LABELS = {
    0: {0: 140, 1: 890, 4: 1, 5: 319, 7: 29, 8: 1067, 9: 184},
    5: {1: 38, 3: 1, 4: 39, 8: 25, 9: 6086},
    14: {5: 2719, 7: 3011},
    16: {0: 3628},
    19: {0: 310, 1: 1, 2: 1, 3: 1, 4: 5789, 9: 1},
}


def test_mnist_is_the_readmes(shared_data, shared_cache):
    data = load("mnist", shared_data, shared_cache)
    held = federate(data, "pfllib")
    assert [len(rows) for rows in held.train] == README_TRAIN
    assert [len(rows) for rows in held.test] == README_TEST
    assert not any(len(rows) for rows in held.val)
    for client, expected in README_LABELS.items():
        labels = data.y[np.concatenate([held.train[client], held.test[client]])]
        assert dict(zip(*np.unique(labels, return_counts=True), strict=True)) == expected
    # The first pixels of its files test/0.npz and test/19.npz: the rows themselves.
    means = [float(data.x[held.test[client][:50]].mean()) for client in (0, 19)]
    assert means == pytest.approx([29.2734439, 29.7029082], abs=1e-6)


def test_fashion_mnist_is_what_feddbes_authors_released(shared_data, shared_cache):
    """Its repository (TsingZ0/DBE 193f435) has the clients that its tables were made on.

    Sizes of all test files, and pixels of two of them; all twenty were compared row by row once.
    """
    data = load("fashion_mnist", shared_data, shared_cache)
    held = federate(data, "pfllib", kind="dir")
    sizes = (21, 80, 219, 651, 364, 1369, 1097, 1116, 1390, 889)
    more = (1543, 1701, 2138, 157, 332, 49, 735, 1208, 1273, 1175)
    assert [len(rows) for rows in held.test] == [*sizes, *more]
    means = [float(data.x[held.test[client][:50]].mean()) for client in (1, 19)]
    assert means == pytest.approx([66.1944133, 54.5279337], abs=1e-6)


# Rows that PFLlib's separate_data and split_data (d832e76, NumPy seed 1) gave for the labels of
# the embedded digits: sha256 over all clients' rows in order, training and test.
FROM_ITS_CODE = [
    ({"kind": "dir"}, "baa3906019e44de2", "aa68d7fe6a290264"),
    ({"kind": "pat"}, "da6345bc3cb44a0b", "f232a796f8604092"),
    ({"kind": "pat", "balance": True}, "641d74493b37fb20", "d58120bf8d4ce6bb"),
    ({"kind": "pat", "classes_per_client": 3}, "9f6a08c7c2abc210", "e8093fc19f2a372f"),
    ({"kind": "iid"}, "e6eacd68570fe74d", "67980639ea8ea74b"),
    (
        {"kind": "exdir", "alpha": 100.0, "classes_per_client": 3},
        *("d71d65e0c60c724d", "6dd1cf4b0d10d537"),
    ),
    ({"kind": "dir", "alpha": 0.3, "clients": 50}, "7047b21fa53295ed", "899867bf74029a7e"),
    ({"kind": "dir", "alpha": 1.0, "clients": 100}, "12c6029fd7b3a598", "6902f35a5d4fae97"),
    (
        {"kind": "pat", "classes_per_client": 3, "clients": 13},
        *("0c18a6692173ba5e", "ed1651b03f9d5f1c"),
    ),
]


def digest(parts):
    return hashlib.sha256(np.concatenate(parts).astype(np.int64).tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("options, train, test", FROM_ITS_CODE)
def test_the_rows_of_its_own_code(options, train, test):
    held = federate(load("embedded"), "pfllib", seed=7, **options)
    assert (digest(held.train), digest(held.test)) == (train, test)
    # Validation rows are the end of the training rows; test rows stay.
    other = federate(load("embedded"), "pfllib", split=(0.6, 0.15, 0.25), **options)
    both = [np.concatenate(parts) for parts in zip(other.train, other.val, strict=True)]
    assert (digest(both), digest(other.test)) == (train, test)
    shares = [len(v) / len(t) for v, t in zip(other.val, both, strict=True) if len(t) > 100]
    assert shares == pytest.approx([0.2] * len(shares), abs=0.01)


def test_a_folder_of_its_generators_gives_the_same_clients(tmp_path):
    """Files as its save_file writes them: a pickled dictionary of float images and labels."""
    data = load("embedded")
    made = federate(data, "pfllib", kind="pat")
    for part, held in (("train", made.train), ("test", made.test)):
        (tmp_path / part).mkdir()
        for client, rows in enumerate(held):
            x = (data.x[rows] / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
            np.savez_compressed(tmp_path / part / f"{client}.npz", data={"x": x, "y": data.y[rows]})
    found = federation(tmp_path, split="file", val=0.0, ordered=True)
    assert found.names == made.names and not any(map(len, found.val))
    for own, part in ((found.train, made.train), (found.test, made.test)):
        for there, here in zip(own, part, strict=True):
            assert np.array_equal(found.dataset.y[there], data.y[here])
            theirs, ours = found.dataset.decoded(there), data.decoded(here)
            assert np.allclose(theirs, ours, atol=1e-6)


def test_a_client_that_has_its_part_gets_no_more():
    """Four classes of ten rows for four clients, by its code: client 1 has just N / 4 = 10."""
    held = pfllib(
        Candidates(np.repeat(np.arange(4), 10), np.arange(40), (0,)), clients=4, alpha=0.01
    )
    assert np.sort(held[1]).tolist() == list(range(10))
    assert [len(mine) for mine in held] == [9, 10, 16, 5]


@pytest.mark.parametrize("size", [1, 2, 3, 41, 1000])
def test_a_split_is_scikit_learns(size):
    model_selection = pytest.importorskip("sklearn.model_selection")
    ours = _split(np.random.RandomState(3), size)
    if size == 1:  # which it refuses
        return
    theirs = model_selection.train_test_split(
        np.arange(size), train_size=0.75, random_state=np.random.RandomState(3)
    )
    assert ours.tolist() == np.concatenate(theirs).tolist()


def test_clients_have_forty_rows_and_the_generators_seed_decides():
    held = federate(load("embedded"), "pfllib", clients=25)  # not in the first draw
    assert min(len(a) + len(b) for a, b in zip(held.train, held.test, strict=True)) >= 40
    other = federate(load("embedded"), "pfllib", clients=25, generator_seed=2)
    assert digest(held.train) != digest(other.train)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"kind": "odd"}, "kind 'odd'"),
        ({"classes_per_client": 11}, "classes_per_client is 11 and the data has 10"),
        ({"generator_seed": -1}, "generator_seed is -1"),
        ({"kind": "pat", "clients": 6000}, "class 0 has 600 rows for 1200 clients"),
        ({"stratify": True}, "drop stratify"),
    ],
)
def test_wrong_options_are_named(options, words):
    with pytest.raises(IdiolectError, match=words):
        federate(load("embedded"), "pfllib", **options)
