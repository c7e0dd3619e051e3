"""What is addressed to one client reaches that client and no other, and so does its answer.

A method here numbers its messages: the server sends client c the number 100 · run + c, plus 1,000
for every round behind it. The client reports what it got beside who it is, told by its own data,
and keeps a tally of all it ever got.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import worlds
from idiolect.core.capabilities import Facts
from idiolect.core.method import Method, Sent
from idiolect.engine.architecture import Architecture
from idiolect.methods import Centralised, FedAvg

SIZES = ((7, 4, 5, 9, 3, 6), (4, 9, 3, 5, 7, 8))  # of two runs: no two clients of a run alike
CLIENTS = len(SIZES[0])


class State(NamedTuple):
    rounds: torch.Tensor
    letter: torch.Tensor  # what tells the runs apart
    heard: torch.Tensor  # [client] the number it last reported
    held: torch.Tensor  # [client] the examples it reported with it


class Heard(NamedTuple):
    number: torch.Tensor
    size: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Post(Facts, Method):
    """Send each client a number of its own; report it back; keep the sum of all."""

    title = "Post"

    def init_server(self, setup):
        # The sizes are all that differs between runs before the first round.
        run = (setup.sizes[0] == SIZES[1][0]).to(setup.sizes.dtype)
        nobody = setup.sizes.new_full((setup.clients,), -1.0)
        return State(setup.sizes.new_zeros(()), 100 * run, nobody, nobody)

    def init_personal(self, setup):
        return setup.sizes.new_zeros(())

    def send(self, state, cohort):
        return Sent(own={"number": cohort + state.letter + 1000 * state.rounds})

    def client_step(self, sent, personal, local):
        # A scan, so that ragged clients are cut into blocks as they are in earnest.
        number = local.scan(lambda now, batch: now, sent.own["number"], batch=2)
        return Heard(number, local.size), personal + number

    def server_step(self, state, cohort, reports):
        heard = state.heard.index_copy(0, cohort, reports.number)
        held = state.held.index_copy(0, cohort, reports.size)
        return State(state.rounds + 1, state.letter, heard, held)

    def deploy(self, sent, personal, local):
        return {"tally": personal, "number": sent.own["number"]}

    def models(self, sent, deployed):
        return {"personal": deployed} if deployed else {}

    def predict(self, model, x, local):
        return x[:, : worlds.CLASSES] + 0 * model["tally"]

    def facts(self, deployed):
        return deployed


class Wide(nn.Module):
    """Another network, so that its clients are a crew of their own."""

    def __init__(self):
        super().__init__()
        self.only = nn.Linear(worlds.FEATURES, worlds.CLASSES)

    def forward(self, x):
        return self.only(x)


ONE = {"all": Architecture(worlds.Normed)}
TWO = {
    "some": Architecture(worlds.Normed, clients=(4, 1, 2)),
    "others": Architecture(Wide, clients=(5, 0, 3)),
}


@pytest.mark.parametrize(
    "kind, width", [("vectorised", n) for n in (1, 2, 64)] + [("sequential", 1)]
)
@pytest.mark.parametrize("architectures", [ONE, TWO], ids=["one", "two"])
@pytest.mark.parametrize("cohort", [None, 1, 3], ids=["all", "one", "three"])
@pytest.mark.parametrize("runs", [1, 2])
def test_every_client_gets_its_own_message_and_is_heard_as_itself(
    kind, width, architectures, cohort, runs
):
    seen = [worlds.federation(sizes, [1] * CLIENTS, seed) for seed, sizes in enumerate(SIZES)]
    simulation = worlds.simulation(
        Post(),
        seen[:runs],
        seeds=range(runs),
        architectures=architectures,
        cohort=cohort,
        kind=kind,
        width=width,
    )
    tally = np.zeros((runs, CLIENTS))
    heard = np.full((runs, CLIENTS), -1.0)
    for round in range(3):
        for run in range(runs):
            present = simulation.cohort(run)
            heard[run, present] = present + 100 * run + 1000 * round
            tally[run, present] += heard[run, present]
        done = simulation.advance()
        assert [traffic.bytes_down for traffic in done.traffic] == [4 * (cohort or CLIENTS)] * runs
        for run, state in enumerate(simulation.states):
            np.testing.assert_array_equal(state.heard, heard[run])
            sizes = np.where(heard[run] < 0, -1, SIZES[run])
            np.testing.assert_array_equal(state.held, sizes)
    verdicts = simulation.evaluate([world.test_data for world in seen[:runs]], keep=True)
    for run, verdict in enumerate(verdicts):
        np.testing.assert_array_equal(verdict.facts["tally"], tally[run])
        numbers = np.arange(CLIENTS) + 100 * run + 3000
        np.testing.assert_array_equal(verdict.facts["number"], numbers)
        for clients, models in verdict.deployed:
            np.testing.assert_array_equal(models["number"], numbers[clients])


def test_clients_spread_over_threads_keep_their_messages():
    """Six clients dealt out to four threads come back in the order they were called in."""
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        world = worlds.federation(SIZES[0], [1] * CLIENTS)
        simulation = worlds.simulation(Post(), world, width=1)
        simulation.advance()
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(threads)
    (state,) = simulation.states
    np.testing.assert_array_equal(state.heard, np.arange(CLIENTS))
    np.testing.assert_array_equal(state.held, SIZES[0])


@pytest.mark.parametrize(("cohort", "rounds"), [(None, 1), (1, 2), (2, 2), (2, 30)])
def test_strangers_are_those_whom_no_round_called(cohort, rounds):
    """The last client has nothing to train on, so no round ever calls it."""
    sizes = (7, 4, 5, 9, 3, 0)
    simulation = worlds.simulation(Post(), worlds.federation(sizes), cohort=cohort)
    for _ in range(rounds):
        simulation.advance()
    (state,) = simulation.states
    np.testing.assert_array_equal(simulation.strangers(0), np.flatnonzero(state.heard < 0))


def test_before_the_first_round_all_are_strangers_and_where_data_is_pooled_nobody():
    """Whether or not a method keeps anything at its clients."""
    for method, count in ((Post(), 6), (FedAvg(), 6), (Centralised(), 0)):
        simulation = worlds.simulation(method, worlds.federation())
        assert len(simulation.strangers(0)) == count
