"""Personal state on disk: the same as in memory, and never written over while it is needed."""

import gc
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import worlds
from idiolect.core import tree
from idiolect.engine import state_store
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.engine.state_store import DiskStore, MemoryStore
from idiolect.errors import CheckpointError, ConfigError
from idiolect.methods import METHODS

CPU = torch.device("cpu")


class Own(NamedTuple):
    model: torch.Tensor
    count: torch.Tensor  # of another type, and a scalar
    sure: torch.Tensor


def own(value, n=()):
    return Own(
        torch.full((*n, 2, 3), float(value)),
        torch.full(n, int(value), dtype=torch.int64),
        torch.full((*n, 3), value > 1),
    )


def all_of(store):
    return (
        store.take(torch.arange(len(store._slots))) if isinstance(store, DiskStore) else store.rows
    )


moves = st.lists(
    st.tuples(st.lists(st.integers(0, 8), min_size=1, max_size=5, unique=True), st.integers(2, 99)),
    max_size=12,
)


@settings(max_examples=25, deadline=None)
@given(moves, st.integers(0, 300))
def test_it_is_a_store(moves, cache):
    """Any row of puts, with any room for records in memory, from none to all."""
    starts = [(own(0), 4), (own(1), 5)]
    store, disk = MemoryStore(starts, CPU), DiskStore(starts, CPU, cache=cache)
    for rows, value in moves:
        rows = torch.tensor(rows)
        for place in (store, disk):
            place.put(rows, own(value, (len(rows),)))
        disk.fetch(torch.tensor([1, 7]))
        assert not worlds.differing(store.take(rows), disk.take(rows))
    assert not worlds.differing(store.rows, all_of(disk))
    assert disk.take(torch.tensor([2])).model.dtype == torch.float32


def test_a_table_that_is_held_stays_true():
    """Fifty puts of everyone: the records of a table in use are spared, all others used again."""
    disk = DiskStore([(own(0), 6)], CPU)
    everyone = torch.arange(6)
    disk.put(everyone, own(5, (6,)))
    held = disk.rows
    for value in range(50):
        disk.put(everyone, own(value, (6,)))
    assert all_of(disk).count.tolist() == [49] * 6
    assert disk._opened().capacity <= 65 + 18  # not one record for each put
    disk.rows = held
    assert all_of(disk).count.tolist() == [5] * 6
    del held
    gc.collect()


def test_a_file_is_found_again_by_its_key(tmp_path):
    path = tmp_path / "a" / "x.rows"
    first = DiskStore([(own(0), 3)], CPU, path)
    first.put(torch.tensor([1]), own(7, (1,)))
    kept = tree.map(torch.clone, first.rows)  # as a checkpoint would
    first.flush()
    first.put(torch.tensor([1]), own(8, (1,)))  # after the checkpoint, and lost with the process
    again = DiskStore([(own(0), 3)], CPU, path)
    again.rows = kept
    assert all_of(again).count.tolist() == [0, 7, 0]
    other = DiskStore([(own(0), 3)], CPU, tmp_path / "b" / "x.rows")  # another method that goes on
    other.rows = kept
    other.put(torch.tensor([1]), own(9, (1,)))
    again = DiskStore([(own(0), 3)], CPU, path)
    again.rows = kept
    assert all_of(again).count.tolist() == [0, 7, 0]
    path.unlink()
    (tmp_path / "b" / "x.rows").unlink()
    with pytest.raises(CheckpointError, match=r"is not in .*x\.rows any more; put the file back"):
        DiskStore([(own(0), 3)], CPU, path).rows = kept


def test_where_it_is_kept_goes_by_weight_and_by_who_takes_part():
    light, heavy = [(torch.zeros(1000), 100)], [(torch.zeros(1000), 80_000)]  # 320 MB

    def on_disk(starts, cohort, clients, personal="auto"):
        backend = Backend("vectorised", "cpu", personal=personal)
        return state_store.belongs_on_disk(starts, backend, cohort, clients)

    assert not on_disk(light, 10, 100)
    assert on_disk(heavy, 100, 80_000)
    assert not on_disk(heavy, None, 80_000)  # all rows are new in every round anyhow
    assert on_disk(light, None, 100, "disk") and not on_disk(heavy, 100, 80_000, "memory")
    assert not on_disk([((), 80_000)], 100, 80_000, "disk")  # nothing to keep
    with pytest.raises(ConfigError, match="personal is 'tape', expected one of auto, memory, disk"):
        Backend(personal="tape")


def simulation(method, personal, worlds_, seeds, cohort=3, folder=None):
    runs = [SeededRun(seed, world.train_data) for seed, world in zip(seeds, worlds_, strict=True)]
    backend = Backend("vectorised", "cpu", 64, personal=personal, personal_mb=0)
    architectures = {"main": Architecture(worlds.Normed)}
    return Simulation(
        method, runs, architectures, cohort=cohort, backend=backend, state_folder=folder
    )


PERSONAL = ["fedper", "ditto", "pfedme", "apfl", "persfl", "fedbn", "local"]


@pytest.mark.parametrize("name", PERSONAL)
def test_methods_cannot_tell(name, tmp_path):
    """Two seeds together, three of six clients a round: everything is equal bit for bit."""
    held, seeds = [worlds.federation(seed=n) for n in (0, 1)], (0, 1)
    ends = []
    for personal in ("memory", "disk"):
        there = simulation(METHODS[name](batch=3), personal, held, seeds, folder=tmp_path)
        for _ in range(4):
            there.advance()
        states = [all_of(crew.store) for crew in there.groups]
        assert isinstance(there.groups[0].store, DiskStore) == (personal == "disk")
        verdicts = there.evaluate([world.test_data for world in held], keep=True)
        scores = [verdict.scores["personal"]["loss"].tolist() for verdict in verdicts]
        ends.append((there.states, states, scores))
    assert not worlds.differing(ends[0][:2], ends[1][:2])
    assert str(ends[0][2]) == str(ends[1][2])


def test_the_next_cohort_is_read_ahead():
    held = [worlds.federation()]
    there = simulation(METHODS["fedper"](batch=3), "disk", held, (0,), cohort=2)
    store = there.groups[0].store
    store._room = 100
    there.advance()
    store._cache.clear()
    there.groups[0].prefetch_state([there._request(0, None, 0)])
    store._coming.result()
    slots = store._slots[torch.from_numpy(there.cohort(0))].tolist()
    assert set(slots) <= set(store._cache)
    reads = []
    store._file.read = lambda slots: reads.append(slots)
    store.take(torch.from_numpy(there.cohort(0)))
    assert not reads


def test_clients_are_judged_in_groups_as_all_at_once(monkeypatch):
    from idiolect.engine import simulation_state

    held = [worlds.federation(seed=n) for n in (0, 1)]
    found = []
    for group in (2048, 4, 1):
        monkeypatch.setattr(simulation_state, "_GROUP", group)
        there = simulation(METHODS["ditto"](batch=3), "memory", held, (0, 1))
        there.advance()
        verdicts = there.evaluate([world.test_data for world in held], keep=True)
        found.append(verdicts)
        chosen = [np.array([1, 4]), np.array([0, 5])]
        for one, whole, own in zip(
            there.evaluate(clients=chosen), there.evaluate(), chosen, strict=True
        ):
            seen, wanted = (v.scores["personal"]["loss"] for v in (one, whole))
            assert str(seen) == str(wanted[own])
    for other in found[1:]:
        for left, right in zip(found[0], other, strict=True):
            assert (left.deployed[0][0] == right.deployed[0][0]).all()
            assert not worlds.differing(left.deployed[0][1], right.deployed[0][1], 1e-6)
            assert left.scores.keys() == right.scores.keys()


def test_many_blocks_share_a_few_runners(monkeypatch):
    from idiolect.engine import local_group as crew

    ends = []
    for most in (32, 1):
        monkeypatch.setattr(crew, "_MOST_RUNNERS", most)
        there = worlds.simulation(METHODS["ditto"](batch=3), worlds.federation(), width=1)
        done = [there.advance().examples for _ in range(2)]
        ends.append((there.tree, torch.tensor(done), torch.tensor(there.padding())))
    assert not worlds.differing(*ends)
    assert len(there.groups[0]._runners) == 1


def test_records_are_read_with_any_leaf_between(tmp_path):
    """A leaf that does not fill its place leaves a gap; the next begins at a multiple of 64."""
    layout = state_store.RecordLayout(own(1))
    assert [leaf.start for leaf in layout.leaves] == [0, 64, 128] and layout.record == 192
    again = layout.unpack(layout.pack(own(3, (2,))))
    assert not worlds.differing(again, own(3, (2,)))
