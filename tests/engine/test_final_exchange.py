"""What clients tell each other when training is over: in sum, run by run, and nothing else.

`Teller`'s clients tell a share of their number of training examples (7, 4, 5, 9, 3 and 0), and what
each heard of the others is among its facts.
"""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch

import worlds
from idiolect.aggregation import RULES, Private
from idiolect.aggregation.aggregator import Aggregated
from idiolect.core import tree
from idiolect.core.capabilities import Facts, FinalExchange, has
from idiolect.core.method import Sent, setting
from idiolect.engine import final_exchange, simulation_state
from idiolect.engine.architecture import Architecture
from idiolect.errors import MethodError
from idiolect.methods import FedAvg, Portfolio
from idiolect.methods.personalise import Tuned

SIZES = np.array([7.0, 4.0, 5.0, 9.0, 3.0, 0.0])
OTHER = np.array([2.0, 8.0, 4.0, 1.0, 6.0, 3.0])


class Using(NamedTuple):
    params: dict
    heard: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Teller(Facts, FinalExchange, FedAvg):
    """FedAvg whose clients tell their sizes."""

    most: float = setting(10.0, "what sizes are divided by", deploy=True)

    def deploy(self, sent, personal, local):
        return Using(sent.shared, local.size * float("nan"))

    def tell(self, deployed, local):
        return {"size": local.size / self.most, "both": torch.stack([local.size / 100] * 2)}

    def hear(self, deployed, others, local):
        assert others["both"].shape == (2,) and others["both"].dtype == local.size.dtype
        return deployed._replace(heard=others["size"])

    def models(self, sent, deployed):
        return {"personal": deployed.params} if deployed else {"global": sent.shared}

    def facts(self, deployed):
        return {"heard": deployed.heard}


def judged(method, world=None, exams=None, **options):
    world = world or worlds.federation()
    simulation = worlds.simulation(method, world, **options)
    return simulation, simulation.evaluate(
        [w.test_data for w in ([world] if exams is None else exams)]
    )


def heard(verdict):
    return verdict.facts["heard"]


@pytest.mark.parametrize("kind", ["vectorised", "sequential"])
def test_each_hears_the_sum_of_the_others(kind):
    _, (verdict,) = judged(Teller(), kind=kind, width=4)
    np.testing.assert_allclose(heard(verdict), (SIZES.sum() - SIZES) / 10, atol=1e-6)
    assert verdict.exchange_sums["size"] == pytest.approx(2.8)
    # Two numbers of 8 bytes and one more down; the same in single precision up.
    assert verdict.traffic == (0, 6 * 3 * 8, 6 * 3 * 4, 0)


def test_a_client_alone_hears_nothing_but_that():
    _, (verdict,) = judged(Teller(), worlds.federation((5,), (2,)))
    assert heard(verdict).tolist() == [0.0]


def test_runs_that_are_stacked_do_not_hear_each_other():
    both = [worlds.federation(), worlds.federation((2, 8, 4, 1, 6, 3), seed=5)]
    simulation = worlds.simulation(Teller(), both, seeds=(0, 7))
    first, second = simulation.evaluate([world.test_data for world in both])
    np.testing.assert_allclose(heard(first), (SIZES.sum() - SIZES) / 10, atol=1e-6)
    np.testing.assert_allclose(heard(second), (OTHER.sum() - OTHER) / 10, atol=1e-6)


def test_who_tells_more_than_one_is_left_out():
    """9/8 is no number from −1 to 1, so the fourth is not heard; it hears the others all the same.

    NaN is none either.
    """
    _, (verdict,) = judged(Teller(most=8.0))
    total = SIZES.sum() - 9
    expected = [(total - (0 if size == 9 else size)) / 8 for size in SIZES]
    np.testing.assert_allclose(heard(verdict), expected, atol=1e-6)
    rows = {"x": torch.tensor([[0.5, -1.0], [float("nan"), 0.0], [1.1, 0.0], [1.0, 1.0]])}
    assert final_exchange.fair(rows).tolist() == [True, False, False, True]
    assert final_exchange.added(rows)["x"].tolist() == [1.5, 0.0]
    assert final_exchange.without(final_exchange.added(rows), rows)["x"].tolist() == [
        [1.0, 1.0],
        [1.5, 0.0],
        [1.5, 0.0],
        [0.5, -1.0],
    ]


def test_groups_and_those_who_are_not_scored(monkeypatch):
    """All who are scored hear of each other, however many are scored at a time."""
    monkeypatch.setattr(simulation_state, "_GROUP", 2)
    simulation, (verdict,) = judged(Teller())
    np.testing.assert_allclose(heard(verdict), (SIZES.sum() - SIZES) / 10, atol=1e-6)
    some = np.array([0, 3, 4])
    (verdict,) = simulation.evaluate([worlds.federation().test_data], clients=[some])
    np.testing.assert_allclose(heard(verdict), (19.0 - SIZES[some]) / 10, atol=1e-6)


def test_clients_of_several_architectures_hear_each_other(monkeypatch):
    """One group has none of the first network, and one client's run none of the second."""
    networks = {
        "small": Architecture(worlds.Normed, clients=(0, 2, 5)),
        "large": Architecture(lambda: worlds.Normed(8), clients=(1, 3, 4)),
    }
    monkeypatch.setattr(FedAvg, "send", lambda self, state, cohort: Sent())
    monkeypatch.setattr(FedAvg, "init_server", lambda self, setup: ())
    monkeypatch.setattr(simulation_state, "_GROUP", 1)

    def deploy(self, sent, personal, local):
        return Using(local.initial, local.size * float("nan"))

    monkeypatch.setattr(Teller, "deploy", deploy)
    monkeypatch.setattr(Teller, "starts_over", True)
    world = worlds.federation()
    simulation = worlds.simulation(Teller(), world, architectures=networks)
    (verdict,) = simulation.evaluate([world.test_data])
    np.testing.assert_allclose(heard(verdict), (SIZES.sum() - SIZES) / 10, atol=1e-6)


def test_candidates_that_are_not_held_are_trained_again(monkeypatch, float64):
    """Where there is no room between telling and hearing; the choice is the same, bit for bit."""
    method = Portfolio(batch=3, lr=0.1, tune_epochs=2, tune_lr=0.1)
    ends, trainings = [], []
    plain = Portfolio._candidates

    def counted(*arguments):
        trainings[-1] += 1
        return plain(*arguments)

    monkeypatch.setattr(Portfolio, "_candidates", counted)
    # Twenty models (15 candidates, 5 in a mixture), of 8 bytes a number, for 5 clients that took
    # part. The last has nothing to train on: it tells nothing, so nothing of it is held.
    weight = 20 * 8 * sum(leaf.numel() for leaf in worlds.Normed().parameters()) * 5
    for room in (weight, weight - 1):
        monkeypatch.setattr(final_exchange, "_ROOM", room)
        world = worlds.federation()
        simulation = worlds.simulation(method, world)
        simulation.advance()
        trainings.append(0)
        (verdict,) = simulation.evaluate([world.test_data], keep=True)
        ends.append(([models for _, models in verdict.deployed], dict(verdict.exchange_sums)))
    assert trainings[1] - 1 == 2 * (trainings[0] - 1) > 0  # the last client's is one, in both
    assert tree.equal(*ends)


def test_newcomers_hear_those_who_were_there():
    """The whole sum, as nothing of theirs is in it; nothing where none was kept."""
    world = worlds.federation()
    simulation = worlds.simulation(Teller(), world)
    (verdict,) = simulation.evaluate([world.test_data], newcomers=True)
    assert np.isnan(heard(verdict)).all() and not verdict.exchange_sums
    sums = {"size": torch.tensor(3.5).double(), "both": torch.zeros(2).double()}
    simulation.exchange_sums = [sums]
    (verdict,) = simulation.evaluate([world.test_data], newcomers=True)
    assert heard(verdict).tolist() == [3.5] * 6
    simulation.exchange_sums = [{"size": torch.zeros(3).double()}]
    with pytest.raises(MethodError, match="came as the sum over the others"):
        simulation.evaluate([world.test_data], newcomers=True)


def test_only_global_models_need_no_telling(monkeypatch):
    monkeypatch.setattr(Teller, "tell", lambda *_: 1 / 0)
    simulation = worlds.simulation(Teller(), worlds.federation())
    (verdict,) = simulation.evaluate(only_global=True)
    assert set(verdict.scores) == {"global"}


def test_wrappers_hand_on_but_not_past_what_hides_clients():
    """A robust rule leaves the exchange as it is; a private one lets nothing pass it by."""
    base = Portfolio()
    assert has(base, FinalExchange) and not has(FedAvg(), FinalExchange)
    assert has(Aggregated(base, RULES["median"]()), FinalExchange)
    assert not has(Aggregated(base, Private(noise=1.0)), FinalExchange)
    assert not has(Tuned(FedAvg()), FinalExchange) and not has(Tuned(Teller()), FinalExchange)
    rule = Aggregated(Teller(), RULES["median"]())
    _, (verdict,) = judged(rule)
    np.testing.assert_allclose(heard(verdict), (SIZES.sum() - SIZES) / 10, atol=1e-6)
    method = Aggregated(Teller(), Private(noise=1.0))
    _, (verdict,) = judged(dataclasses.replace(method))
    assert np.isnan(heard(verdict)).all() and not verdict.exchange_sums
