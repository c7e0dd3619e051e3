"""The public examples are counted once for each client, apart from what crosses every round."""

import worlds
from idiolect.methods import FedAvg, FedDF, KTpFL

EACH = worlds.PUBLIC * worlds.FEATURES * 4  # float32 features


def counted(method, rounds=4, cohort=2, first=0):
    simulation = worlds.simulation(method, worlds.with_public(), cohort=cohort)
    simulation.round = first
    return [simulation.advance().traffic[0].public_bytes for _ in range(rounds - first)], simulation


def test_every_client_gets_them_in_its_first_round():
    method = KTpFL(sample=5)
    told, simulation = counted(method)
    had, expected = set(), []
    for round in range(4):
        new = set(simulation._attendance[0].reporting(round).tolist()) - had
        had |= new
        expected.append(len(new) * EACH)
    assert told == expected and expected[0] == 2 * EACH
    everyone, _ = counted(method, cohort=None)
    assert everyone == [5 * EACH, 0, 0, 0]


def test_a_resumed_run_does_not_send_them_again():
    method = KTpFL(sample=5)
    assert counted(method, first=2)[0] == counted(method)[0][2:]


def test_a_server_that_holds_them_sends_none():
    assert counted(FedDF(sample=5))[0] == counted(FedAvg())[0] == [0] * 4
