"""What a server keeps for each client outlasts rounds in which that client is absent."""

import pytest
import torch

import worlds
from idiolect.core import tree
from idiolect.methods import METHODS
from test_laws import choose, made

KEPT = {
    "ktpfl-weights": ("affinity", "models", "heard"),
    "fedamp": ("models", "heard"),
    "heurfedamp": ("models", "heard"),
    "mocha": ("models", "heard"),
    "fedfomo": ("models", "heard", "worth"),
    "pfedhn": ("embeddings", "embedding_velocity"),
    "fedpac": ("heads", "weights"),
    "ktpfl": ("affinity",),
    "sim-pfl": ("affinity",),
    "topk-pfl": ("affinity",),
    "fedmd": ("affinity",),
    "feddistill": ("outputs", "known"),
    "apple": ("models", "share"),
}


def row(state, names, client):
    values = [getattr(state, name) for name in names]
    leaves = [leaf for one in values for leaf in (one.values() if isinstance(one, dict) else [one])]
    return torch.cat([leaf[client].reshape(-1) for leaf in leaves])


@pytest.mark.parametrize("name", KEPT)
def test_rounds_of_others_leave_the_rows_of_the_absent(name, float64):
    world = worlds.with_public((7, 4, 5, 9, 3, 4))
    cohorts = ((0, 1, 2), (3, 4, 5), (3, 4, 5))
    simulation = choose(worlds.simulation(made(name), world), *cohorts)
    simulation.advance()
    before = row(simulation.states[0], KEPT[name], 0)
    for _ in range(2):
        simulation.advance()
    assert torch.equal(before, row(simulation.states[0], KEPT[name], 0))


MADE_ANEW = {"teachers"}  # for every client, from the reports of a round


@pytest.mark.parametrize("name", METHODS)
def test_every_state_with_rows_is_under_the_law(name):
    """Fields of the server's state whose leaves all have one row for each of thirteen clients."""
    world = worlds.with_public((3,) * 13, (1,) * 13)
    state = worlds.simulation(made(name), world).states[0]
    rowed = {
        field
        for field in getattr(state, "_fields", ())
        if (leaves := tree.leaves(getattr(state, field)))
        and all(leaf.dim() and len(leaf) == 13 for leaf in leaves)
    }
    assert rowed - MADE_ANEW == set(KEPT.get(name, ()))


@pytest.mark.parametrize("name", ["ktpfl-weights", "fedamp", "heurfedamp"])
def test_mixtures_still_hold_the_absent(name, float64):
    """Whoever comes last, what client 3 is sent depends on what client 0 said two rounds ago."""
    world = worlds.federation((7, 4, 5, 9, 3, 4))
    simulation = choose(worlds.simulation(made(name), world), (0, 1), (2, 3), (2, 3))
    for _ in range(3):
        simulation.advance()
    method, state, first = simulation.method, simulation.states[0], torch.tensor([0])
    other = {n: leaf.index_fill(0, first, 5.0) for n, leaf in state.models.items()}
    sent = [
        method.send(one, torch.tensor([3])).own for one in (state, state._replace(models=other))
    ]
    assert worlds.differing(*sent, 1e-9)
