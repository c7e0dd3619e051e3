"""Laws that every partition obeys, then what each one promises."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from idiolect.data.federate import split_rows
from idiolect.data.partition import DEFAULT_POOL, PARTITIONS, describe
from idiolect.data.partition.general import Candidates
from idiolect.errors import IdiolectError

BY_LABEL = [name for name in PARTITIONS if name != "natural"]
# These may leave a client without rows: they copy a filling order, or their source.
MAY_BE_EMPTY = {"persfl-ds2", "natural", "pfllib"}
COMPLETE = {"iid", "dirichlet", "shards", "ktpfl-all"}

OPTIONS = {
    "iid": {"clients": st.integers(1, 30), "per_client": st.none() | st.integers(1, 40)},
    "dirichlet": {
        "clients": st.integers(1, 30),
        "alpha": st.floats(1e-3, 100),
        "min_size": st.integers(1, 20),
    },
    "shards": {"clients": st.integers(1, 30), "shards_per_client": st.integers(1, 5)},
    "classes": {
        "clients": st.integers(1, 30),
        "classes_per_client": st.integers(1, 6),
        "scheme": st.sampled_from(["pairs", "cyclic", "random"]),
        "even": st.sampled_from([0.0, 0.2, 0.7]),
        "sizes": st.sampled_from(["equal", "lognormal"]),
    },
    "persfl-ds1": {
        "clients": st.sampled_from([10, 20, 30]) | st.integers(1, 9),
        "classes_per_client": st.integers(1, 6),
    },
    "persfl-ds2": {"alpha": st.floats(0.01, 10), "variant": st.sampled_from(["code", "paper"])},
    "persfl-ds3": {
        "kind": st.sampled_from(["cifar", "mnist"]),
        "variant": st.sampled_from(["code", "paper"]),
    },
    "pfml-pairs": {"clients": st.integers(1, 30)},
    "pfml-three": {"clients": st.sampled_from([10, 20, 30])},
    "ktpfl-two": {"clients": st.integers(1, 30), "sizes": st.sampled_from(["equal", "lognormal"])},
    "ktpfl-all": {
        "clients": st.integers(1, 30),
        "sizes": st.sampled_from(["lognormal", "dirichlet"]),
    },
    "pfllib": {
        "clients": st.integers(1, 30),
        "kind": st.sampled_from(["dir", "pat", "exdir", "iid"]),
        "classes_per_client": st.integers(1, 6),
        "alpha": st.floats(0.05, 100),
        "balance": st.booleans(),
    },
}


@pytest.fixture(autouse=True, scope="module")
def impatient():
    """Give up sooner where PFLlib's generator cannot succeed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("idiolect.data.partition.pfllib_generators._TRIES", 20)
        yield


def divided(name, labels, seed, rows=None, **options):
    """Divide some rows, by default all."""
    rows = np.arange(len(labels)) if rows is None else rows
    return PARTITIONS[name](Candidates(labels, rows, (seed,)), **options)


def pool(sizes: list[int]) -> np.ndarray:
    return np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))


@pytest.mark.parametrize("name", BY_LABEL)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rows_are_disjoint_seeded_and_never_an_endless_loop(name, data):
    ragged = st.lists(st.integers(0, 120), min_size=1, max_size=10).filter(any)
    even = st.integers(1, 500).map(lambda size: [size] * 10)  # what the papers' partitions need
    sizes = data.draw(even | ragged)
    labels = pool(sizes)
    rows = np.sort(
        np.random.default_rng(1).permutation(len(labels))[: max(1, len(labels) * 3 // 4)]
    )
    options = {key: data.draw(value) for key, value in OPTIONS[name].items()}
    seed = data.draw(st.integers(0, 2**40))
    try:
        held = divided(name, labels, seed, rows, **options)
    except IdiolectError as error:
        assert any(character.isdigit() for character in str(error))  # names the numbers
        return
    flat = np.concatenate(held)
    assert len(np.unique(flat)) == len(flat)
    assert np.isin(flat, rows).all()
    assert len(held) == options.get("clients", 10)
    if name not in MAY_BE_EMPTY:
        assert min(len(mine) for mine in held) >= options.get("min_size", 1)
    if name in COMPLETE and not (name == "iid" and options["per_client"]):
        assert len(flat) == len(rows)
    again = divided(name, labels, seed, rows, **options)
    assert all(np.array_equal(a, b) for a, b in zip(held, again, strict=True))


@pytest.mark.parametrize("name", [name for name in BY_LABEL if name != "pfllib"])
def test_another_seed_deals_other_rows(name):
    labels = pool([600] * 10)
    one, two = (divided(name, labels, seed) for seed in (0, 1))
    assert any(not np.array_equal(np.sort(a), np.sort(b)) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("name", [name for name in BY_LABEL if "clients" in OPTIONS[name]])
def test_more_clients_than_rows_is_an_error_not_a_hang(name):
    with pytest.raises(IdiolectError):
        divided(name, pool([20] * 10), 0, clients=1000)


def test_every_partition_is_described_and_has_a_pool():
    assert all(describe(name) for name in PARTITIONS)
    assert {n for n, which in DEFAULT_POOL.items() if which == "train"} == {
        "persfl-ds1",
        "persfl-ds2",
    }


def counts(held: list[np.ndarray], labels: np.ndarray) -> np.ndarray:
    return np.stack([np.bincount(labels[mine], minlength=labels.max() + 1) for mine in held])


def test_natural_follows_the_codes():
    codes = np.array([2, 0, 2, 0, 3])
    held = divided("natural", codes, 0)
    assert [mine.tolist() for mine in held] == [[1, 3], [], [0, 2], [4]]


def test_dirichlet_raises_small_clients_and_uses_every_row():
    labels = pool([100] * 10)
    held = divided("dirichlet", labels, 3, clients=100, alpha=0.01, min_size=10)
    assert [len(mine) for mine in held] == [10] * 100
    spiky = divided("dirichlet", labels, 3, clients=5, alpha=1e-4)
    assert sum(map(len, spiky)) == 1000


def test_shards_give_few_labels():
    labels = pool([100] * 10)
    held = divided("shards", labels, 0, clients=10, shards_per_client=2)
    assert all(len(mine) == 100 for mine in held)
    assert ((counts(held, labels) > 0).sum(1) <= 4).all()


def test_shards_of_a_given_size_leave_rows_over():
    """Of 100 shards of ten rows, twenty are dealt, each of a single class, none twice."""
    labels = pool([100] * 10)
    held = divided("shards", labels, 0, clients=10, shards_per_client=2, shard_rows=10)
    assert all(len(mine) == len(set(mine)) == 20 for mine in held)
    assert len(set(np.concatenate(held))) == 200
    assert ((counts(held, labels) > 0).sum(1) <= 2).all()
    with pytest.raises(IdiolectError, match="10 clients x 2 shards of 60 rows"):
        divided("shards", labels, 0, clients=10, shards_per_client=2, shard_rows=60)


@pytest.mark.parametrize(("kind", "each", "rows"), [("mnist", 2, 300), ("cifar", 4, 1250)])
def test_ds1_is_label_shards(kind, each, rows):
    labels = pool([5000] * 10)
    held = divided("persfl-ds1", labels, 0, kind=kind)
    assert [len(mine) for mine in held] == [each * rows] * 10
    few = counts(held, labels) > 0
    assert (few.sum(1) <= each + 2 * (kind == "mnist")).all()  # a shard of 300 may span two classes
    with pytest.raises(IdiolectError, match="kind"):
        divided("persfl-ds1", labels, 0, kind="svhn")


@pytest.mark.parametrize("seed", range(8))
def test_ds1s_users_hold_as_many_shards_of_a_class_as_the_papers(seed):
    """Run 0 has two users of three quarters of one class, run 1 has none."""
    labels = pool([5000] * 10)
    held = counts(divided("persfl-ds1", labels, seed, kind="cifar-users"), labels)
    assert (held.sum(0) == 5000).all() and (held.sum(1) == 5000).all() and not (held % 1250).any()
    run = (
        [2, 2, 2, 3, 2, 2, 1, 2, 3, 2],
        [2, 1, 2, 1, 1, 1, 1, 1, 2, 2],
        [2, 2, 3, 2, 2, 1, 2, 1, 2, 3],
        [2, 2, 1, 1, 2, 1, 1, 3, 1, 2],
    )[seed % 4]
    assert (held.max(1) // 1250).tolist() == run
    pairs = ((held == 2500).sum(1) == 2).nonzero()[0].tolist()
    assert pairs == ([9], [], [0], [])[seed % 4]
    other = counts(divided("persfl-ds1", labels, seed + 4, kind="cifar-users"), labels)
    assert (held != other).any(), "the same users' shares, of other classes"
    with pytest.raises(IdiolectError, match="5000 rows of class 0 and there are 4999"):
        divided("persfl-ds1", pool([4999] + [5000] * 9), seed, kind="cifar-users")


@pytest.mark.parametrize(("scheme", "second"), [("pairs", [2, 3]), ("cyclic", [1, 2])])
def test_classes_follow_the_scheme(scheme, second):
    labels = pool([100] * 10)
    held = counts(divided("classes", labels, 0, scheme=scheme, classes_per_client=2), labels)
    assert np.flatnonzero(held[0]).tolist() == [0, 1]
    assert np.flatnonzero(held[1]).tolist() == second


def test_a_share_of_each_class_goes_to_everyone():
    """As FedPAC has it: of 500 rows of a class 10 for each of ten clients, 200 more for its two."""
    labels = pool([500] * 10)
    both = {"scheme": "pairs", "classes_per_client": 2, "clients": 10, "even": 0.2}
    held = counts(divided("classes", labels, 0, **both), labels)
    assert (held.sum(0) == 500).all() and (held.sum(1) == 500).all()
    assert held[0].tolist() == held[5].tolist() == [210, 210, *[10] * 8]


def test_random_classes_are_used_alike():
    labels = pool([100] * 10)
    held = counts(divided("classes", labels, 0, scheme="random", clients=20), labels)
    assert ((held > 0).sum(0) == 4).all() and (held.sum(0) == 100).all()


def test_ds1_is_a_latin_rectangle_of_equal_totals():
    labels = pool([600] * 10)
    held = counts(divided("persfl-ds1", labels, 0), labels)
    assert (held.sum(0) == 600).all() and (held.sum(1) == 600).all()
    # 600 * 0.6**j / (1 + .6 + .36 + .216) = 275.7, 165.4, 99.3, 59.6
    for mine in (*held, *held.T):
        assert sorted(mine[mine > 0]) == [60, 99, 165, 276]
    even = counts(divided("persfl-ds1", labels, 0, imbalance=1.0, clients=20), labels)
    assert set(even.ravel()) == {0, 75}


def test_ds1_refuses_what_it_cannot_balance():
    with pytest.raises(IdiolectError, match="multiple of 10 clients"):
        divided("persfl-ds1", pool([60] * 10), 0, clients=15)
    with pytest.raises(IdiolectError, match=r"asks for 61 rows .* expected 4\.\.60"):
        divided("persfl-ds1", pool([60] * 10), 0, per_client=61)


def test_ds2_code_measures_by_class_zero():
    sizes = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]  # MNIST's training file
    labels = pool(sizes)
    for seed in range(10):
        code = counts(divided("persfl-ds2", labels, seed), labels)
        assert (code.sum(0) <= np.minimum(sizes, 5923)).all()
        assert 58_570 - 60 <= code.sum() <= 58_570  # rounding may leave a few of a class
    paper = counts(divided("persfl-ds2", labels, 0, variant="paper"), labels)
    assert (paper.sum(0) == sizes).all()


def test_ds3_cifar_sizes_are_the_published_ones():
    """Recovered from PersFL's stored accuracies; sizes need only the class counts of CIFAR-10."""
    labels = pool([6000] * 10)
    full = divided("persfl-ds3", labels, 0, keep=1.0)
    totals = [2674, 3738, 4024, 1524, 3616, 2762, 3690, 3684, 2734, 9710]
    assert [len(mine) for mine in full] == totals
    held = counts(full, labels)
    assert ((held > 0).sum(1) == 3).all()
    assert [client for client in range(10) if 10 in held[client]] == [0, 3]
    kept = divided("persfl-ds3", labels, 0)
    _, _, test = split_rows(kept, labels, (0.6, 0.2, 0.2), seed=(0,))
    assert [len(mine) for mine in test] == [401, 561, 604, 229, 543, 415, 554, 553, 410, 1457]


@pytest.mark.parametrize("generator_seed", [7975, 5044, 8858, 3229, 9462])
def test_ds3_mnist_halves_every_class(generator_seed):
    sizes = np.array([6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958])
    labels = pool(list(sizes))
    options = {"kind": "mnist", "generator_seed": generator_seed}
    held = counts(divided("persfl-ds3", labels, 0, keep=1.0, **options), labels)
    assert (held.sum(0) == sizes).all() and ((held > 0).sum(1) == 2).all()
    # The first five users take the cut of each class, the last five what it leaves.
    first = held[:5].sum(0)
    assert (first >= sizes // 3).all() and (first < sizes // 2).all()
    kept = divided("persfl-ds3", labels, 0, **options)
    assert [len(mine) for mine in kept] == [int(0.75 * n) for n in held.sum(1)]


def test_pfml_and_ktpfl_presets():
    labels = pool([6000] * 10)
    pairs = counts(divided("pfml-pairs", labels, 0), labels)
    assert len(pairs) == 20 and (pairs.sum(0) == 6000).all()
    assert all(set(np.flatnonzero(pairs[u])) == {2 * u % 10, (2 * u + 1) % 10} for u in range(20))
    three = counts(divided("pfml-three", labels, 0), labels)
    assert len(three) == 20 and ((three > 0).sum(1) == 3).all() and (three.sum(0) <= 6000).all()
    two = counts(divided("ktpfl-two", labels, 0), labels)
    assert set(two.ravel()) == {0, 1500}
    every = counts(divided("ktpfl-all", labels, 0), labels)
    assert (every > 0).all() and (every.sum(0) == 6000).all()


def test_a_class_nobody_has_is_passed_over():
    labels = pool([60, 0, 60, 60, 60])
    for name in ("iid", "dirichlet", "shards", "classes", "persfl-ds2", "ktpfl-two", "ktpfl-all"):
        held = divided(name, labels, 0)
        assert counts(held, labels)[:, 1].sum() == 0
    held = counts(divided("persfl-ds1", labels, 0, clients=4, classes_per_client=2), labels)
    assert held.sum(0).tolist() == [60, 0, 60, 60, 60]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("iid", {"clients": 0}, "clients is 0"),
        ("dirichlet", {"alpha": -1.0}, "alpha is -1.0"),
        ("dirichlet", {"clients": 50, "min_size": 20}, "need 1000 rows and there are 600"),
        ("classes", {"scheme": "odd"}, "scheme 'odd'"),
        ("classes", {"even": 1.0}, "even is 1.0; expected 0 or more and less than 1"),
        ("classes", {"sizes": "odd"}, "sizes 'odd'"),
        ("classes", {"classes_per_client": 11}, "classes_per_client is 11"),
        ("persfl-ds2", {"variant": "odd"}, "variant 'odd'"),
        ("persfl-ds3", {"kind": "odd"}, "kind 'odd'"),
        ("persfl-ds3", {"keep": 0.0}, "keep is 0.0"),
        ("pfml-three", {"clients": 15}, "multiple of 10"),
    ],
)
def test_wrong_options_are_named(name, options, words):
    with pytest.raises(IdiolectError, match=words):
        divided(name, pool([60] * 10), 0, **options)
