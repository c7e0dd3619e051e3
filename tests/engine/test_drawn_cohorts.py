"""Cohorts that are drawn among clients of unequal length: rounds are replayed, and nothing changes.

Graphs are the stand-in of `conftest`; the engine replays on CUDA alone, so it is told to here.
"""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import worlds
from idiolect.aggregation import Attacked
from idiolect.aggregation.attacks import Broken, Gaussian, SignFlip
from idiolect.core.batches import Request
from idiolect.engine import block_runner
from idiolect.engine.batch_plan import Population, laid_out
from idiolect.engine.client_group import Train
from idiolect.methods import (
    Centralised,
    Ditto,
    FedALA,
    FedAvg,
    FedDF,
    FedFomo,
    FedRep,
    Scaffold,
)

PIECES, WHOLE = (2, 1), (8, 4)
LONG = (7, 4, 5, 9, 3, 0, 31, 2, 6, 12)  # rows of clients; one of them has none


def world(seed=0):
    return worlds.federation(LONG, [2, 3, 2, 1, 0, 2, 6, 1, 0, 4], seed)


@pytest.fixture
def clients_run(monkeypatch):
    """Count, by round, how often clients' training is run as code: replayed rounds run none."""
    counts, client = Counter(), block_runner.BlockRunner._client

    def counted(self, *given):
        counts[int(self._round)] += isinstance(self._fn, Train)
        return client(self, *given)

    monkeypatch.setattr(block_runner.BlockRunner, "_client", counted)
    return counts


def simulations(method, *federations, **more):
    """Return the same simulation twice: one client after the other, and replayed."""
    held = federations or (world(),)
    sides = [
        worlds.simulation(method, held, seeds=range(len(held)), kind=kind, **more)
        for kind in ("sequential", "vectorised")
    ]
    for group in sides[1].groups:
        group._replays = True
    return sides


def advanced(plain, drawn, rounds):
    """Run both; every round must do the same."""
    for _ in range(rounds):
        one, other = plain.advance(), drawn.advance()
        assert one.traffic == other.traffic and one.examples == other.examples
        assert not worlds.differing(plain.tree, drawn.tree, 1e-10)


@pytest.mark.parametrize(
    ("method", "pieces"),
    [
        (FedAvg(batch=6, epochs=2), WHOLE),
        (FedAvg(batch=2, epochs=2), PIECES),
        (FedAvg(batch=3, steps=4), PIECES),
        (Ditto(batch=2), PIECES),
        (FedRep(batch=4), PIECES),
        (Scaffold(batch=4), PIECES),
        (FedFomo(batch=4), PIECES),
        (FedALA(batch=4), PIECES),
    ],
    ids=lambda given: getattr(given, "title", None),
)
def test_rounds_are_replayed_and_the_same(method, pieces, recorded, float64, clients_run):
    recorded(*pieces)
    plain, drawn = simulations(method, cohort=4)
    clients_run.clear()
    for _ in range(5):
        drawn.advance()
    assert clients_run[0] and not sum(clients_run[n] for n in range(2, 5))
    for _ in range(5):
        plain.advance()
    assert not worlds.differing(plain.tree, drawn.tree, 1e-10)


def test_examples_and_traffic_are_the_cohorts(recorded, float64):
    recorded(*PIECES)
    advanced(*simulations(FedAvg(batch=2), cohort=4), rounds=5)


@pytest.mark.parametrize("attack", [SignFlip(), Gaussian(), Broken()])
def test_attackers_that_were_not_drawn_do_nothing(attack, recorded, float64):
    recorded(*PIECES)
    method = Attacked(FedAvg(batch=3, lr=0.1), attack, attackers=(1, 2))
    advanced(*simulations(method, cohort=3), rounds=5)


@pytest.mark.parametrize("method", [Ditto(batch=6), Scaffold(batch=4)])
def test_runs_side_by_side_with_cohorts_of_any_size(method, recorded, float64, clients_run):
    """Each run draws its own, sometimes nobody; slots are added when more come than before."""
    recorded(*PIECES)
    plain, drawn = simulations(method, world(), world(1), cohort=2, draw="poisson")
    sizes = set()
    for _ in range(12):
        sizes.add(sum(len(drawn.cohort(run)) for run in range(2)))
        advanced(plain, drawn, 1)
    assert len(sizes) > 3
    clients_run.clear()
    for _ in range(4):
        drawn.advance()
    assert not sum(clients_run.values())


def test_clients_of_several_architectures(recorded, float64, clients_run):
    """How many of a cohort have which architecture differs from round to round."""
    recorded(*PIECES)
    method = FedDF(batch=2, sample=4, public_batch=2, fuse_steps=2)
    held = worlds.with_public()
    plain, drawn = simulations(method, held, architectures=worlds.TWO, cohort=3)
    advanced(plain, drawn, 10)


def test_everyone_is_no_drawn_cohort(recorded, float64):
    recorded(*PIECES)
    plain, drawn = simulations(FedAvg(batch=2))
    advanced(plain, drawn, 3)
    assert "slots" not in drawn.groups[0].widths


def test_clients_whose_rows_are_pooled_are_one(recorded, float64):
    recorded(*PIECES)
    advanced(*simulations(Centralised(batch=2), cohort=3), rounds=3)


def test_of_those_who_are_not_drawn_nothing_is_made(recorded):
    recorded(*PIECES)
    _, drawn = simulations(FedAvg(batch=2), cohort=2)
    wanted = set(drawn.cohort(0).tolist()) | set(drawn._attendance[0].reporting(1).tolist())
    drawn.advance()
    assert set(drawn._trained[0]._made) <= wanted


def test_blocks_are_cut_as_all_clients_are_long(recorded, float64):
    """One of 31 rows among clients of 2 to 12 does not make the others wait."""
    recorded(*PIECES)
    _, drawn = simulations(FedAvg(batch=2), cohort=6)
    for _ in range(3):
        drawn.advance()
    assert len(drawn.groups[0]._active["step"]) > 1
    assert drawn.padding() < 0.5


lengths = st.lists(st.integers(1, 40), min_size=2, max_size=12)


@given(lengths, st.data())
def test_whoever_is_drawn_fits(rows, data):
    """Into the block of its rank, in every stream, with the form that all others give it."""
    counts = {"train": np.array(rows)}
    counts["val"] = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(rows),
                                                max_size=len(rows))))  # fmt: skip
    everyone = Population(counts)
    size = data.draw(st.integers(1, len(rows)))
    first = data.draw(st.integers(0, size - 1))
    forms = set()
    for _ in range(3):
        who = data.draw(st.permutations(range(len(rows))))[:size]
        who = sorted(who, key=lambda client: -rows[client])[first:]
        room = everyone.room(first, len(who))
        for stream in counts:
            own = counts[stream][who].tolist()
            layout, _ = laid_out(own, Request(stream, 4, epochs=2), None, room)
            forms.add((stream, layout._replace(examples=0, needed=0)))
            assert layout.steps >= layout.needed >= max(1, layout.certain)
            assert layout.examples == 2 * sum(own)
    assert len(forms) == len(counts)


def test_typical_lengths_are_means_over_cohorts():
    """Of two of {1, 20, 60} the longer has 20, 60 or 60 rows, the shorter 1, 1 or 20."""
    everyone = Population({"train": np.array([1, 60, 20])})
    assert everyone.typical(2) == pytest.approx([140 / 3, 22 / 3], abs=4)
    assert everyone.typical(3) == [60, 20, 1]
    assert Population({"train": np.array([1, 9])}, even=True).typical(2) == [1, 1]
