"""Examples of all runs in one pool, and members whose rows point to the right ones."""

import dataclasses

import numpy as np
import pytest
import torch

import worlds
from idiolect.engine.data_pools import DataPools

CPU = torch.device("cpu")


def assert_holds(pool, rows, data, own):
    """Rows of the pool are these examples of the dataset."""
    x, y = pool.examples(torch.from_numpy(rows)), pool.labels(torch.from_numpy(rows))
    assert np.array_equal(y, data.y[own])
    assert np.allclose(x, data.x[own])


def test_distinct_datasets_are_laid_one_behind_the_other():
    """Three runs: the first and the last on one dataset, which is held once."""
    first, second = worlds.federation((3, 2), (1, 1)), worlds.federation((2, 4), (1, 1), seed=4)
    runs = [first, second, first]
    library = DataPools([world.train_data for world in runs], CPU)
    assert len(library.pools["train"].y) == len(first.dataset) + len(second.dataset)
    for run, world in enumerate(runs):
        members = library.members(run, 10 + run, world.train_data)
        exams = library.test_members(run, 10 + run, world.test)
        for client, (member, exam) in enumerate(zip(members, exams, strict=True)):
            assert (member.seed, member.client) == (10 + run, client)
            pools = {**library.pools, **library.test_pools}
            rows = {**member.rows, **exam.rows}
            for stream, own in (("train", world.train), ("val", world.val), ("test", world.test)):
                assert_holds(pools[stream], rows[stream], world.dataset, own[client])
            assert member.rows.keys() == {"train", "val", "labelled"}
            both = np.concatenate([member.rows["train"], member.rows["val"]])
            np.testing.assert_array_equal(member.rows["labelled"], both)
            assert exam.rows.keys() == {"test"}
    assert "test" not in library.pools and "test" not in library.pools


def test_public_data_is_whole_and_the_same_for_every_client_of_a_run():
    data = [worlds.dataset(5, seed=8), worlds.dataset(3, seed=9)]
    runs = [
        dataclasses.replace(worlds.federation((3, 2), (1, 1), seed=n), public=public)
        for n, public in enumerate(data)
    ]
    library = DataPools([world.train_data for world in runs], CPU)
    for run, world in enumerate(runs):
        for member in library.members(run, 0, world.train_data):
            rows = member.rows["public"]
            assert len(rows) == len(data[run])
            assert_holds(library.pools["public"], rows, data[run], slice(None))


def test_there_is_no_public_stream_unless_every_run_has_one():
    runs = [worlds.federation((3, 2), (1, 1), seed=n) for n in range(2)]
    runs[0] = dataclasses.replace(runs[0], public=worlds.dataset(5))
    library = DataPools([world.train_data for world in runs], CPU)
    assert set(library.pools) == {"train", "val", "labelled"}
    assert "public" not in library.members(0, 0, runs[0].train_data)[0].rows


def scaled(world, x, shift, scale):
    data = dataclasses.replace(
        world.dataset, x=x, shift=np.float32([shift]), scale=np.float32([scale])
    )
    return dataclasses.replace(world, dataset=data)


@pytest.mark.parametrize("bytes_held", [0, 1 << 30])
def test_bytes_are_decoded_the_same_at_once_or_batch_by_batch(monkeypatch, bytes_held):
    """(0 − 100) / 50 = −2 and (255 − 100) / 50 = 3.1."""
    monkeypatch.setattr("idiolect.engine.data_pools._DECODED_BYTES", bytes_held)
    world = worlds.federation((3, 2), (1, 1))
    x = np.zeros((len(world.dataset), 4), np.uint8)
    x[1] = 255
    pool = DataPools([scaled(world, x, 100, 50).train_data], CPU).pools["train"]
    assert (pool.x.dtype == torch.uint8) == (bytes_held == 0)
    seen = pool.examples(torch.tensor([0, 1]))
    assert seen.dtype == torch.float32
    assert torch.allclose(seen, torch.tensor([[-2.0] * 4, [3.1] * 4]))


def test_tokens_are_left_as_they_are():
    world = worlds.federation((3, 2), (1, 1))
    x = np.arange(4 * len(world.dataset), dtype=np.int64).reshape(-1, 4)
    pool = DataPools([scaled(world, x, 100, 50).train_data], CPU).pools["train"]
    assert torch.equal(pool.examples(torch.tensor([1])), torch.tensor([[4, 5, 6, 7]]))


@pytest.mark.parametrize("bytes_held", [0, 1 << 30])
@pytest.mark.parametrize("shape", [(1,), (4,)])
def test_runs_that_scale_the_same_examples_differently_share_them(monkeypatch, bytes_held, shape):
    """Three runs, two scalings, one copy; each row is decoded as its run alone would."""
    monkeypatch.setattr("idiolect.engine.data_pools._DECODED_BYTES", bytes_held)
    world = worlds.federation((3, 2), (1, 1))
    x = np.random.default_rng(0).integers(0, 256, (len(world.dataset), 4)).astype(np.uint8)
    base = dataclasses.replace(world.dataset, x=x)
    runs = []
    for number in (1, 2, 1):
        shift = np.full(shape, 10.0 * number, np.float32)
        own = dataclasses.replace(base, shift=shift, scale=shift + 3)
        runs.append(dataclasses.replace(world, dataset=own))
    library = DataPools([run.train_data for run in runs], CPU)
    pool = library.pools["train"]
    assert len(pool.x) == len(x)
    for number, run in enumerate(runs):
        alone = DataPools([run.train_data], CPU)
        for member, single in zip(
            library.members(number, 0, run.train_data),
            alone.members(0, 0, run.train_data),
            strict=True,
        ):
            for stream in ("train", "val"):
                rows, own = (torch.from_numpy(one.rows[stream]) for one in (member, single))
                assert torch.equal(pool.examples(rows), alone.pools[stream].examples(own))
                assert torch.equal(pool.labels(rows), alone.pools[stream].labels(own))
