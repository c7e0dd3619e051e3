"""Portfolio with what the others told: the mixture, the gate, the promise, the words."""

import numpy as np
import pytest
import torch

import worlds
from idiolect.core import tree
from idiolect.core.method import Sent
from idiolect.methods import Portfolio
from idiolect.methods.personalise.choosing import Votes
from idiolect.methods.portfolio import PortfolioState
from methods.tiny import LN9, client, line
from test_laws import TIGHT

UPWARD = [(2.0, 1), (-1.0, 0), (1.0, 1), (-2.0, 0)]
PAIR = {"candidates": ("local", "ft"), "paces": (1.0,), "tune_lr": 1e-9}
NAN = float("nan")


def others(count=5, weights=(0.0, 1.0), gain=0.1, error=1e-4):
    """What so many told who are all alike."""
    one = Votes(*(torch.tensor(v).double() for v in (1.0, weights, gain, gain**2, error)))
    return tree.scale(float(count), one)


def settled(val, heard, at=(LN9, 0.0), alone=(0.0, 0.0), size=UPWARD, **settings):
    """What a client makes of a global model and its own, before and after it hears of others."""
    method = Portfolio(**PAIR | settings)
    local = client(size, val)
    first = method.deploy(Sent(line(at)), PortfolioState((), line(alone)), local)
    return method, first, method.hear(first, heard, local)


def words(method, found):
    return method.reason({name: leaf.numpy() for name, leaf in method.facts(found).items()})


def test_the_others_weights_are_the_prior():
    """Its own model explains no example: w of FT is (4 + c q) / (4 + c).

    Alone q = 1/2 and c = 4: 3/4. With others who gave it 9/10, c = 12: (4 + 10.8) / 16 = 0.925.
    """
    _, first, then = settled(
        UPWARD, others(weights=(0.1, 0.9)), (3.0, 0.0), (-50.0, 0.0), caution=4.0, heed=12.0
    )
    assert first.weights.tolist() == pytest.approx([0.25, 0.75], abs=1e-6)
    assert then.weights.tolist() == pytest.approx([0.075, 0.925], abs=1e-6)


def test_a_client_that_proves_little_leaves_on_the_word_of_others():
    """Each is right about another of two: gains 1 and −1, mean 0, squared error 1. No proof.

    Five others gained a tenth, with τ² = 1/25,000. The posterior mean is 2,500 / 25,001, which is
    15.8 deviations of 1 / √25,001. Their weights leave the local model none.
    """
    val = [(1.0, 1), (1.0, 0)]
    method, first, then = settled(val, others())
    assert first.weights.tolist() == [1.0, 0.0] and not first.proven
    assert then.weights.tolist() == [0.0, 1.0] and not then.proven
    assert words(method, then) == (
        "fine-tuned model: 50.0 % against 50.0 % local; on the word of 5 others, who gained 10.0 "
        "points"
    )
    assert words(method, first) == "local model: 50.0 %; nothing else was surely better"
    for doubtful in (others(count=3), others(gain=0.001), others(gain=-0.1)):
        assert settled(val, doubtful)[2].weights.tolist() == [1.0, 0.0]
    assert settled(val, others(), trust=15.9)[2].weights.tolist() == [1.0, 0.0]
    assert settled(val, others(), trust=15.7)[2].weights.tolist() == [0.0, 1.0]


def test_the_promise_stands_whatever_the_others_say():
    """The mixture misjudges the one example that its own model has right."""
    _, _, then = settled([(1.0, 0), (-1.0, 0)], others(), alone=(0.0, -1.0))
    assert then.accuracies.tolist() == [1.0, 0.5]
    assert then.weights.tolist() == [1.0, 0.0] and float(then.accuracy) == 1.0


def test_who_has_no_validation_data_goes_by_the_others():
    method, first, then = settled([], others(weights=(0.25, 0.75)))
    assert first.weights.tolist() == [1.0, 0.0]
    assert then.weights.tolist() == pytest.approx([0.25, 0.75])
    assert words(method, then) == (
        "MoE of fine-tuned model, weight 0.75; there was no validation data to choose by; on the "
        "word of 5 others, who gained 10.0 points"
    )


@pytest.mark.parametrize(("label", "leaves"), [(1, True), (0, False)])
def test_one_example_is_no_evidence_but_the_promise_holds_on_it(label, leaves):
    """The global model says class 1, its own class 0; the others speak for the global one."""
    _, first, then = settled([(1.0, label)], others())
    assert first.weights.tolist() == [1.0, 0.0]
    assert then.weights.tolist() == ([0.0, 1.0] if leaves else [1.0, 0.0])


def test_a_local_model_that_diverged_is_left_with_or_without_others():
    for heard in (others(0), others(), others(gain=-0.5)):
        _, first, then = settled(UPWARD, heard, alone=(NAN, 0.0))
        assert first.weights.tolist() == then.weights.tolist() == [0.0, 1.0]


def test_what_is_told():
    """The whole mixture's weights, FT right about four of four, its own model about two.

    Gains 1, 0, 1, 0 (z = 0 is class 0): mean 1/2, (1/2 − 1/4) / 3 = 1/12.
    """
    method, first, then = settled(UPWARD, others(), caution=4.0)
    told = method.tell(first, client())
    assert [float(leaf) for leaf in (told.voices, told.gain, told.square, told.error)] == (
        pytest.approx([1.0, 0.5, 0.25, 1 / 12])
    )
    assert float(told.weights.sum()) == pytest.approx(1.0) and 0.5 < told.weights[1] < 1
    assert tree.equal(method.tell(then, client()), told)  # not what it heard, told again
    for silent in (settled([(1.0, 1)], others())[1], settled(UPWARD, others(), size=[])[1]):
        assert all(not leaf.any() for leaf in tree.leaves(silent.votes))
    # Two validation examples, and one to train on, are something to tell of.
    for heard in (settled(UPWARD[:2], others())[1], settled(UPWARD, others(), size=UPWARD[:1])[1]):
        assert float(heard.votes.voices) == 1.0


def test_everyone_alone_chooses_as_before(float64):
    """One client, or none who could tell: what is deployed is what `deploy` returns."""
    method = Portfolio(batch=3, lr=0.1, tune_epochs=2, tune_lr=0.1)
    world = worlds.federation((7,), (5,))
    simulation = worlds.simulation(method, world)
    simulation.advance()
    (verdict,) = simulation.evaluate([world.test_data], keep=True)
    local = worlds.local(world, 0, round=1)
    personal = tree.map(lambda leaf: leaf[0], simulation.tree["personal"][0])
    alone = method.deploy(Sent(simulation.states[0]), personal, local)
    own = tree.map(lambda leaf: leaf[0], verdict.deployed[0][1])
    assert not worlds.differing(own, alone.personal, TIGHT)


@pytest.mark.parametrize("seed", range(3))
def test_no_client_that_hears_is_below_its_local_model(seed):
    """Any evidence of others will do (`trust` = 0); still none is below on validation data."""
    world = worlds.federation((7, 4, 5, 9, 3, 2), (9, 5, 7, 6, 8, 4), seed=seed)
    method = Portfolio(batch=3, lr=0.1, tune_epochs=3, tune_lr=0.3, margin=9.0, trust=0.0)
    simulation = worlds.simulation(method, world)
    for _ in range(3):
        simulation.advance()
    (verdict,) = simulation.evaluate([world.test_data])
    own, alone = (verdict.scores[name]["val_accuracy"] for name in ("personal", "local"))
    assert (own >= alone - 1e-6).all()
    assert verdict.facts["others"].tolist() == [5.0] * 6
    gains = verdict.exchange_sums["gain"]
    assert np.allclose(verdict.facts["others_gain"].mean(), gains / 6, atol=1e-6)
