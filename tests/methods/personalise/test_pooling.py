"""What the others know, with numbers one can redo by hand."""

import pytest
import torch

from idiolect.core import tree
from idiolect.methods.personalise import choosing
from idiolect.methods.personalise.choosing import Blend, CandidateScores, Compared, Votes
from methods.tiny import client, line


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def spoken(weights, gain=0.0, error=0.0):
    """What one client tells."""
    return choosing.votes(
        number(weights), Compared(number(0.5), number(gain), number(error)), number(1.0) > 0
    )


def summed(*told):
    return tree.map(lambda *leaves: torch.stack(leaves).sum(0), *told)


def seen(gain=0.0, error=0.0):
    return Compared(number(0.5), number(gain), number(error))


def sure(others, compared, trust, evident=True):
    return bool(choosing.surely_gains(compared, number(float(evident)) > 0, others, trust))


TWO = number([1.0, 1.0]) > 0


# The prior.


def test_three_clients_and_two_candidates(float64):
    """A tells (1/2, 1/2), B (3/4, 1/4), C (1/4, 3/4); each hears the sum of the other two.

    A hears (1, 1): q = (1/2, 1/2). B hears (3/4, 5/4), so q = (3/8, 5/8). C hears (5/4, 3/4), so
    q = (5/8, 3/8). C has three examples that only the first candidate explains and one that only
    the second does; q counts as four examples: w = (3 + 4 · 5/8, 1 + 4 · 3/8) / (4 + 4).
    """
    a, b, c = spoken([0.5, 0.5]), spoken([0.75, 0.25]), spoken([0.25, 0.75])
    priors = [
        choosing.prior(summed(*others), TWO, 10.0, 4.0) for others in ((b, c), (a, c), (a, b))
    ]
    assert [q.tolist() for q, _ in priors] == [[0.5, 0.5], [0.375, 0.625], [0.625, 0.375]]
    assert [float(strength) for _, strength in priors] == [4.0] * 3
    chances = number([[1.0, 0.0]] * 3 + [[0.0, 1.0]])
    scores = CandidateScores(chances, torch.ones(4).double(), torch.zeros(2).double())
    found = choosing.fitted(scores, *priors[2])
    assert found.tolist() == pytest.approx([5.5 / 8, 2.5 / 8], abs=1e-9)


def test_a_client_alone_goes_by_an_average_of_all(float64):
    q, strength = choosing.prior(tree.zeros_like(spoken([0.9, 0.1])), TWO, 10.0, 30.0)
    assert (q.tolist(), float(strength)) == ([0.5, 0.5], 10.0)


def test_a_candidate_that_diverged_has_no_prior(float64):
    """What the others gave it goes to the rest; if they gave all to it, the rest is even."""
    sound = number([1.0, 1.0, 0.0]) > 0
    q, _ = choosing.prior(spoken([0.2, 0.3, 0.5]), sound, 10.0, 30.0)
    assert q.tolist() == pytest.approx([0.4, 0.6, 0.0])
    q, strength = choosing.prior(spoken([0.0, 0.0, 1.0]), sound, 10.0, 30.0)
    assert (q.tolist(), float(strength)) == ([0.5, 0.5, 0.0], 10.0)


# The gate.


def test_equal_gains_of_others_are_worth_what_their_mean_is():
    """Five others gain 1/10, each with a squared standard error of 1/10,000.

    They differ by less than chance, so τ² is what their mean is uncertain by: (1e-4 / 5) · 4/2 =
    1/25,000. The client gains nothing, by luck with no error at all, so theirs counts: 1/10,000.
    Posterior precision 35,000, mean 2,500 / 35,000: 2,500 / √35,000 = 13.36 deviations.
    """
    others = summed(*[spoken([1.0], 0.1, 1e-4)] * 5)
    assert sure(others, seen(), 13.3) and not sure(others, seen(), 13.4)


def test_others_who_differ_are_worth_less():
    """Gains of 0, 2/10 and thrice 1/10: mean 1/10, variance 1/200; squared errors of 1/1000.

    τ² = (0.005 − 0.001) + (0.005 / 5) · 4/2 = 0.006. A loss of 1/20 with a squared error of 0.003
    is twice as precise as that and half as large: the posterior mean is 0. With a loss of 0.04 it
    is (0.1 · 1/0.006 − 0.04 · 1/0.003) / 500 = 1/150, or 0.149 of the deviation 1/√500. Without
    evidence it is 0.1 / √0.006 = 1.29099 deviations.
    """
    others = summed(*[spoken([1.0], gain, 1e-3) for gain in (0.0, 0.2, 0.1, 0.1, 0.1)])
    assert float(choosing.mean_gain(others)) == pytest.approx(0.1)
    assert sure(others, seen(-0.0499, 0.003), 0.0) and not sure(others, seen(-0.0501, 0.003), 0.0)
    assert sure(others, seen(-0.04, 0.003), 0.14) and not sure(others, seen(-0.04, 0.003), 0.16)
    blind = seen(float("nan"), float("nan"))
    assert sure(others, blind, 1.2909, evident=False)
    assert not sure(others, blind, 1.2911, evident=False)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_few_others_prove_nothing(count):
    others = summed(*[spoken([1.0], 0.5, 1e-6)] * count) if count else tree.zeros_like(spoken([1]))
    assert not sure(others, seen(0.5, 1e-6), 0.0)
    assert sure(summed(*[spoken([1.0], 0.5, 1e-6)] * 4), seen(0.5, 1e-6), 0.0)


# What is told.


def test_who_has_no_evidence_tells_nothing():
    nothing = number(float("nan"))
    silent = choosing.votes(number([0.5, 0.5]), Compared(*[nothing] * 3), number(0.0) > 0)
    assert all(float(leaf.abs().sum()) == 0.0 for leaf in tree.leaves(silent))
    assert spoken([1.0], -0.3, 0.2)._asdict() == {
        **Votes(*map(number, (1.0, [1.0], -0.3, 0.09, 0.2)))._asdict(),
        "square": pytest.approx(0.09),
    }


@pytest.mark.parametrize("stacked", [False, True])
def test_models_are_compared_label_by_label(stacked):
    """Of five, the mixture (x > 0) is right about four, the other (always class 1) about two.

    Gains 0, 1, 1, 1 and −1: mean 2/5, mean square 4/5; (4/5 − 4/25) / 4 = 4/25.
    """
    val = [(2.0, 1), (-1.0, 0), (-2.0, 0), (-0.5, 0), (-1.5, 1)]
    members = {name: leaf.unsqueeze(0) for name, leaf in line((3.0, 0.0)).items()}
    blend = Blend(members, torch.ones(1).double())
    found = choosing.compared(blend, line((0.0, 1.0)), client(val=val, stacked=stacked))
    assert [float(leaf) for leaf in found] == pytest.approx([0.8, 0.4, 0.16])
    one = choosing.compared(blend, line((0.0, 1.0)), client(val=val[1:2], stacked=stacked))
    assert [float(leaf) for leaf in one] == pytest.approx([1.0, 1.0, 0.0])
    none = choosing.compared(blend, line((0.0, 1.0)), client(val=[], stacked=stacked))
    assert bool(none.accuracy.isnan()) and bool(none.gain.isnan())
