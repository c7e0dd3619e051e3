"""The rule that makes one model of many candidates, with numbers one can redo by hand."""

import math

import pytest
import torch

from idiolect.methods.personalise import choosing
from idiolect.methods.personalise.choosing import Blend, CandidateScores
from methods.tiny import LN9, client, line

NAN = float("nan")
MIXED = [(2.0, 1), (-1.0, 0), (0.5, 0)]


def scores(chances, counts=None, accuracies=None):
    chances = torch.tensor(chances, dtype=torch.float64)
    counts = torch.ones(len(chances)) if counts is None else torch.tensor(counts)
    right = torch.zeros(chances.shape[1]) if accuracies is None else torch.tensor(accuracies)
    return CandidateScores(chances, counts.double(), right.double())


def all_sound(told):
    return torch.ones(told.chances.shape[1], dtype=torch.bool)


def fitted(told, caution, sound=None):
    prior = choosing.even(all_sound(told) if sound is None else sound)
    return choosing.fitted(told, prior, caution)


# The weights.


def test_examples_are_counted_beside_the_prior():
    """Three examples only the first explains, one only the second: (3 + c/2) / (4 + c), c = 2."""
    told = scores([[1.0, 0.0]] * 3 + [[0.0, 1.0]])
    assert fitted(told, 2.0).tolist() == pytest.approx([2 / 3, 1 / 3], abs=1e-9)


def test_caution_moves_weights_to_an_average_of_all():
    """A thousand examples' worth of prior: (3 + 500) / 1004 and (1 + 500) / 1004."""
    told = scores([[1.0, 0.0]] * 3 + [[0.0, 1.0]])
    assert fitted(told, 1000.0).tolist() == pytest.approx([503 / 1004, 501 / 1004], abs=1e-6)


def test_candidates_that_say_the_same_keep_equal_weights():
    told = scores([[0.3, 0.3, 0.3], [0.9, 0.9, 0.9]])
    assert fitted(told, 5.0).tolist() == pytest.approx([1 / 3] * 3, abs=1e-9)


def test_no_other_weights_have_a_greater_objective(float64):
    """The maximum of Σ log Σ w p + c Σ q log w, against a hundred other points of the simplex."""
    draw = torch.Generator().manual_seed(0)
    told = scores(torch.rand(40, 4, generator=draw).tolist())

    def objective(w):
        return (told.chances @ w).log().sum() + 2.0 * w.log().mean()

    best = objective(fitted(told, 2.0))
    others = torch.distributions.Dirichlet(torch.ones(4)).sample((100,))
    assert best > max(objective(w) for w in others)


def test_padding_and_the_diverged_count_for_nothing():
    """The second row is padding; the third candidate is no number, and gets no weight at all."""
    plain = fitted(scores([[0.8, 0.2], [0.3, 0.6]]), 1.0)
    padded = scores([[0.8, 0.2, NAN], [0.1, 0.9, 0.5], [0.3, 0.6, NAN]], [1.0, 0.0, 1.0])
    found = fitted(padded, 1.0, torch.tensor([True, True, False]))
    assert found.tolist() == pytest.approx([*plain.tolist(), 0.0], abs=1e-9)


def test_without_examples_the_prior_is_left():
    told = scores([[0.9, 0.1]], [0.0])
    assert fitted(told, 3.0).tolist() == pytest.approx([0.5, 0.5])


def test_what_is_no_number_is_not_sound():
    """By its parameters, or by what it says of an example; padding may say anything."""
    candidates = {"w": torch.tensor([[1.0], [float("inf")], [1.0], [1.0]])}
    told = scores([[0.5, 0.5, NAN, 0.5], [0.5, 0.5, 0.5, NAN]], [1.0, 0.0])
    assert choosing.sound(candidates, told).tolist() == [True, False, False, True]


# The members.


def test_the_heaviest_are_kept_the_first_of_equal_ones():
    candidates = {"w": torch.tensor([10.0, 11.0, 12.0, 13.0])}
    blend, left = choosing.blended(candidates, torch.tensor([0.2, 0.3, 0.2, 0.3]), 3)
    assert blend.members["w"].tolist() == [11.0, 13.0, 10.0]
    assert blend.weights.tolist() == pytest.approx([0.375, 0.375, 0.25])
    assert left.tolist() == pytest.approx([0.25, 0.375, 0.0, 0.375])


@pytest.mark.parametrize(
    ("accuracies", "likely", "best"),
    [
        ([0.5, 0.9, 0.7], [0.9, 0.1, 0.5], 1),  # accuracy first
        ([0.9, 0.9, 0.7], [0.2, 0.4, 0.9], 1),  # then likelihood
        ([0.9, 0.9, 0.9], [0.4, 0.4, 0.3], 0),  # then order
    ],
)
def test_the_single_best(accuracies, likely, best):
    told = scores([likely], accuracies=accuracies)
    assert int(choosing.best_of(told, all_sound(told))) == best
    others = torch.arange(3) != best
    assert int(choosing.best_of(told, others)) != best


# The evidence.


@pytest.mark.parametrize(("margin", "better"), [(1.9, True), (2.1, False)])
def test_the_gain_is_measured_in_standard_errors(margin, better):
    """Gains of 1 and 3 nats: mean 2, deviation √2, standard error √2 / √2 = 1. Padding is none."""
    chances = [[0.01, 0.01 * math.e], [0.01, 0.01 * math.e**3], [0.5, 0.1]]
    told = scores(chances, [1.0, 1.0, 0.0])
    assert bool(choosing.surely_better(told, torch.tensor([0.0, 1.0]), margin)) is better


def test_a_loss_is_no_gain_and_one_example_no_evidence():
    worse = scores([[0.5, 0.4], [0.5, 0.3]])
    assert not choosing.surely_better(worse, torch.tensor([0.0, 1.0]), 0.0)
    for counts in ([1.0, 0.0], [0.0, 0.0]):
        lucky = scores([[0.1, 0.9], [0.1, 0.9]], counts)
        assert not choosing.surely_better(lucky, torch.tensor([0.0, 1.0]), 0.0)


# What candidates say, and what a mixture says.


@pytest.mark.parametrize("stacked", [False, True])
def test_probabilities_are_averaged(stacked):
    """At x = 1 the members say 9/10 and 1/2: a quarter and three quarters of them are 3/5."""
    members = {n: torch.stack([line((LN9, 0.0))[n], line((0.0, 0.0))[n]]) for n in ("w", "b")}
    blend = Blend(members, torch.tensor([0.25, 0.75], dtype=torch.float64))
    x = torch.tensor([1.0], dtype=torch.float64)
    said = choosing.predict(blend, x, client(stacked=stacked))
    assert said.exp()[0].tolist() == pytest.approx([0.4, 0.6])
    broken = {n: torch.stack([leaf[0], leaf[1] * NAN]) for n, leaf in members.items()}
    alone = Blend(broken, torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert choosing.predict(alone, x, client(stacked=stacked)).exp()[0, 1] == pytest.approx(0.9)


@pytest.mark.parametrize("stacked", [False, True])
def test_every_candidate_is_asked_about_every_example(stacked):
    """(1, 0) says 1 / (1 + e^-x) of class 1; (0, ln 9) says 9/10 whatever x."""
    candidates = {n: torch.stack([line((1.0, 0.0))[n], line((0.0, LN9))[n]]) for n in ("w", "b")}
    local = client(val=MIXED, stacked=stacked)
    told = choosing.scored(candidates, local)
    assert told.counts.tolist() == [1.0] * len(MIXED)
    for (x, y), own in zip(MIXED, told.chances.tolist(), strict=True):
        up = 1 / (1 + math.exp(-x))
        assert own == pytest.approx([up if y else 1 - up, 0.9 if y else 0.1])
    right = [sum((x > 0) == y for x, y in MIXED), sum(y for _, y in MIXED)]
    assert told.accuracies.tolist() == pytest.approx([n / len(MIXED) for n in right])
