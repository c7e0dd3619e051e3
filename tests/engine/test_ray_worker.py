"""Who is served where, and what travels there: all of a shard's examples, and no others."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import worlds
from idiolect.core import tree
from idiolect.engine.data_pools import DataPools
from idiolect.engine.ray_backend.worker import deal_clients, lifted, lowered, pack_shard

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 5), st.integers(1, 3))
def test_every_client_is_in_one_shard_and_shards_are_alike(loads, count, kinds):
    """The heaviest goes to the lightest, so no shard outweighs another by more than one client."""
    weights = np.array(loads, float)
    groups = [np.arange(kind, len(loads), kinds) for kind in range(kinds)]
    shards = deal_clients(weights, groups, count)
    for kind, clients in enumerate(groups):
        held = np.concatenate([shard[kind] for shard in shards])
        assert sorted(held.tolist()) == clients.tolist()
    if kinds == 1:
        totals = [weights[shard[0]].sum() for shard in shards]
        assert max(totals) - min(totals) <= max(loads)


@pytest.mark.parametrize("pooled", [False, True])
def test_a_pack_holds_what_its_clients_hold_and_nothing_else(pooled):
    """Two seeds with data of their own; the examples a client finds are those it has at home."""
    runs = [worlds.with_public(), worlds.with_public((2, 8, 4, 1, 6, 3), seed=5)]
    library = DataPools([run.train_data for run in runs], CPU)
    lessons = [run.train_data.pooled() if pooled else run.train_data for run in runs]
    rolls = [library.members(n, 10 + n, own) for n, own in enumerate(lessons)]
    clients = np.array([0, 3])
    pack = pack_shard(library, rolls, clients)
    pools = pack.pools(CPU)
    held = 0
    for run, members in enumerate(pack.members()):
        assert list(members) == ([0] if pooled else [0, 3])
        for client, member in members.items():
            home = rolls[run][client]
            assert (member.seed, member.client) == (home.seed, home.client)
            assert member.rows["public"].tolist() == home.rows["public"].tolist()
            for name in ("train", "val"):
                assert same(pools[name], member.rows[name], library.pools[name], home.rows[name])
                held += len(member.rows[name])
    assert len(pack.examples.x) == held and "public" not in pools


def test_runs_that_scale_examples_differently_send_them_once():
    base = worlds.federation()
    other = dataclasses.replace(base.dataset, scale=np.float32([2.0]))
    runs = [base, dataclasses.replace(base, dataset=other)]
    library = DataPools([run.train_data for run in runs], CPU)
    rolls = [library.members(n, n, run.train_data) for n, run in enumerate(runs)]
    pack = pack_shard(library, rolls, np.array([0, 3]))
    pools = pack.pools(CPU)
    assert len(pack.examples.x) == sum(len(base.train[n]) + len(base.val[n]) for n in (0, 3))
    for run, members in enumerate(pack.members()):
        for client, member in members.items():
            here, home = (torch.from_numpy(m.rows["train"]) for m in (member, rolls[run][client]))
            expected = library.pools["train"].examples(home)
            assert torch.equal(pools["train"].examples(here), expected)
            decoded = runs[run].dataset.decoded(runs[run].train[client])
            assert np.allclose(expected, decoded)


def test_rows_that_all_are_scored_on_travel_once():
    world = worlds.federation()
    library = DataPools([world.train_data], CPU)
    common = np.arange(5)
    exams = library.test_members(0, 0, world.test, {"common": (common,) * 6})
    pack = pack_shard(library, [exams], np.arange(6))
    assert len(pack.runs[0].streams["common"].rows) == 5
    here = pack.members()[0][4].rows["common"]
    assert same(pack.pools(CPU)["common"], here, library.pools["train"], common)


def test_clients_without_any_rows_have_something_to_pad_with():
    """Client 4 has no validation data: the pool of its shard is one example of zeros."""
    world = worlds.federation()
    library = DataPools([world.train_data], CPU)
    pack = pack_shard(library, [library.test_members(0, 0, world.val)], np.array([4]))
    assert not pack.members()[0][4].rows["test"].size
    assert pack.pools(CPU)["test"].x.shape[0] == 1 and not pack.examples.x.any()


def same(pool, rows, other, others):
    """Say whether rows of one pool are those of another, examples and labels."""
    return torch.equal(pool.x[rows], other.x[others]) and torch.equal(pool.y[rows], other.y[others])


def test_trees_come_back_as_they_went():
    values = {
        "a": torch.randn(2, 3, dtype=torch.float64),
        "b": (torch.tensor(3), torch.zeros(0, 4), torch.ones(2, dtype=torch.bfloat16)),
        "c": (),
    }
    back = lifted(lowered(values), CPU)
    assert not worlds.differing(values, back)
    assert [leaf.dtype for leaf in tree.leaves(back)] == [
        leaf.dtype for leaf in tree.leaves(values)
    ]
    seen = np.arange(3.0)
    seen.flags.writeable = False  # as what lies in shared memory
    lifted(seen, CPU).add_(1)
    assert seen.tolist() == [0, 1, 2]
