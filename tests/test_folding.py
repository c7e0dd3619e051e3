"""Folds that are captured in pieces do what folds step by step do, for every method.

Here a piece is run in place of a graph's replay: it reads and writes the same buffers. That graphs
do the same on CUDA is for `benchmarks/gpu_check.py` to say.
"""

from dataclasses import dataclass

import pytest
import torch

import worlds
from idiolect import folding, tree
from idiolect.local import Local
from idiolect.method import Report
from idiolect.methods import FedAvg
from idiolect.personalise import Combined
from idiolect.simulate import engine
from test_laws import ended, every_method, made

LONGER = {"epochs": 4, "tune_epochs": 3, "distil_epochs": 3, "head_epochs": 3, "expert_epochs": 3}


def repeated(piece, times):
    for _ in range(times):
        piece()


@pytest.fixture
def folded(monkeypatch):
    """Let every fold of four steps or more be done in pieces of two; count them."""
    done = []

    def counted(step, carry, steps, device):
        done.append(steps)
        return fold(step, carry, steps, device)

    fold = folding.fold
    monkeypatch.setattr(folding, "PIECE", 2)
    monkeypatch.setattr(folding, "repeat", repeated)
    monkeypatch.setattr(folding, "fold", counted)
    monkeypatch.setattr(folding, "worth", lambda steps, device: steps >= 4)

    def graphed(networks, book, slot, size, round, stacked, *rest):
        return Local(networks, book, slot, size, round, stacked, *rest[:-1], graph=stacked)

    def switch(on):
        monkeypatch.setattr(engine, "Local", graphed if on else Local)
        return done

    return switch


def both(method, folded, **options):
    """Play a world step by step and in pieces."""
    world, ends = worlds.with_public(), []
    for on in (False, True):
        done = folded(on)
        sim = worlds.simulation(method, world, cohort=3, **options)
        ends.append(ended(sim, [world.exam], rounds=2))
    return ends, done


@every_method
def test_a_fold_in_pieces_is_the_fold(name, folded, float64):
    """Also of clients that are done while others go on, and of one without data."""
    ends, done = both(made(name, **LONGER), folded)
    assert max(done, default=0) >= 5
    assert not worlds.differing(*ends, 1e-12)


@pytest.mark.parametrize("build", [worlds.Normed, worlds.Batched])
def test_it_is_so_after_the_rounds_and_with_any_optimiser(build, folded, float64):
    base = made("fedavg", optimiser="adam", lr=0.02, weight_decay=0.1, clip=0.5)
    ends, done = both(Combined(base, tune_epochs=3, expert_epochs=3), folded, build=build)
    assert len(done) > 8  # the rounds' folds are short
    assert not worlds.differing(*ends, 1e-12)


@dataclass(frozen=True, kw_only=True)
class Through(FedAvg):
    """Takes the gradient through a whole training, as meta-learning does."""

    def client_step(self, sent, personal, local):
        def trained(params, batch):
            inner = local.fit(local.loss, params, self.rule(local), batch=2, steps=6)
            return local.loss(inner, batch)

        def step(params, batch):
            return tree.axpy(-0.1, local.gradient(trained, params, batch), params)

        return Report(local.scan(step, sent.shared, batch=8, epochs=1), local.size), personal


def test_no_gradient_is_taken_through_a_fold_in_pieces(folded, float64):
    ends, done = both(Through(lr=0.1), folded)
    assert not done
    assert not worlds.differing(*ends, 1e-12)


@pytest.mark.parametrize("steps", range(4, 12))
def test_every_step_is_done_once_and_in_turn(steps, monkeypatch):
    monkeypatch.setattr(folding, "PIECE", 3)
    monkeypatch.setattr(folding, "repeat", repeated)

    def step(number, carry):
        last, _ = carry
        return 10 * last + number[0] + 1, last  # what was held moves to the other place

    start = (torch.tensor(0, dtype=torch.int64), torch.tensor(0, dtype=torch.int64))
    last, before = folding.fold(step, start, steps, torch.device("cpu"))
    wanted = 0
    for number in range(steps):
        earlier, wanted = wanted, 10 * wanted + number + 1
    assert (last, before) == (wanted, earlier)


def test_short_folds_and_cpus_are_left_alone():
    assert not folding.worth(10_000, torch.device("cpu"))
    assert not folding.worth(folding.PIECE, torch.device("cuda"))
