"""Batch losses against torch's own on the rows that are real."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from idiolect.core import losses

EXACT = 1e-12


def random(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(
    real=st.integers(1, 6),
    padding=st.integers(0, 5),
    classes=st.sampled_from([2, 4, 15, 16, 20]),  # few and many are computed differently
    seed=st.integers(0, 99),
)
def test_losses_equal_torchs_on_the_real_rows(real, padding, classes, seed):
    """Padding holds absurd logits; neither the value nor the gradient may know of it."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randperm(real + padding, generator=draw)[:real]  # padding anywhere
    weight = torch.zeros(real + padding, dtype=torch.float64)
    weight[rows] = 1
    logits = random((real + padding, classes), seed) + 1e3 * (1 - weight).unsqueeze(1)
    teacher = random((real + padding, classes), seed + 1)
    labels = torch.randint(classes, (real + padding,), generator=draw)
    logits.requires_grad_()
    for ours, theirs in (
        (losses.cross_entropy(logits, labels, weight), F.cross_entropy(logits[rows], labels[rows])),
        (
            losses.single_cross_entropy(logits, labels, weight),
            F.cross_entropy(logits[rows], labels[rows]),
        ),
        (
            losses.divergence(logits, teacher, weight),
            F.kl_div(
                logits[rows].log_softmax(-1), teacher[rows].softmax(-1), reduction="batchmean"
            ),
        ),
        (
            losses.soft_cross_entropy(logits, teacher, weight),
            F.cross_entropy(logits[rows], teacher[rows].softmax(-1)),
        ),
    ):
        assert torch.allclose(ours, theirs, EXACT, EXACT)
        slopes = [torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs)]
        assert torch.allclose(*slopes, EXACT, EXACT)
    right = (logits[rows].argmax(-1) == labels[rows]).double().mean()
    assert torch.allclose(losses.accuracy(logits, labels, weight), right)


def test_a_batch_of_padding_costs_nothing():
    """Zero with a zero gradient, not 0/0."""
    logits = random((3, 4)).requires_grad_()
    weight = torch.zeros(3, dtype=torch.float64)
    labels = torch.zeros(3, dtype=torch.int64)
    for loss in (
        losses.cross_entropy(logits, labels, weight),
        losses.divergence(logits, random((3, 4), 1), weight),
        losses.soft_cross_entropy(logits, random((3, 4), 1), weight),
        losses.distil(logits, random((3, 4), 1), weight, 3.0),
    ):
        assert loss.item() == 0
        (slope,) = torch.autograd.grad(loss, logits)
        assert torch.equal(slope, torch.zeros_like(slope))
    assert losses.accuracy(logits, labels, weight).item() == 0


def test_the_divergence_by_hand():
    """Teacher (1/2, 1/2), student (1/4, 3/4): KL = ½ ln(½ / ¼) + ½ ln(½ / ¾) = ½ ln(4/3)."""
    teacher = torch.tensor([[0.5, 0.5]], dtype=torch.float64).log()
    student = torch.tensor([[0.25, 0.75]], dtype=torch.float64).log()
    expected = 0.5 * torch.tensor(4 / 3, dtype=torch.float64).log()
    one = torch.ones(1, dtype=torch.float64)
    assert torch.allclose(losses.divergence(student, teacher, one), expected, EXACT, EXACT)
    assert losses.divergence(teacher, teacher, one).abs() < EXACT


@pytest.mark.parametrize("loss", [losses.divergence, losses.soft_cross_entropy, losses.distil])
def test_no_gradient_flows_into_the_teacher(loss):
    student, teacher = random((2, 3)).requires_grad_(), random((2, 3), 1).requires_grad_()
    value = loss(student, teacher, torch.ones(2, dtype=torch.float64))
    slopes = torch.autograd.grad(value, (student, teacher), allow_unused=True)
    assert slopes[0].abs().max() > 0 and slopes[1] is None


def test_both_soft_losses_have_one_gradient():
    """They differ by the teacher's entropy: PersFL's Eq. 3 and Eq. 7 train alike."""
    student, teacher, one = random((5, 3)).requires_grad_(), random((5, 3), 1), random(5, 2).abs()
    soft = (losses.divergence, losses.soft_cross_entropy)
    values = [loss(student, teacher, one) for loss in soft]
    slopes = [torch.autograd.grad(value, student)[0] for value in values]
    assert torch.allclose(*slopes, EXACT, EXACT)
    share = one / one.sum()
    entropy = -(share * (teacher.softmax(-1) * teacher.log_softmax(-1)).sum(-1)).sum()
    assert torch.allclose(values[1] - values[0], entropy, EXACT, EXACT)


def test_distil_is_t_squared_times_the_softened_divergence():
    student, teacher = random((4, 3)), random((4, 3), 1)
    expected = 25 * F.kl_div(
        (student / 5).log_softmax(-1), (teacher / 5).softmax(-1), reduction="batchmean"
    )
    got = losses.distil(student, teacher, torch.ones(4, dtype=torch.float64), 5.0)
    assert torch.allclose(got, expected, EXACT, EXACT)


def test_the_gradient_of_distil_keeps_its_size():
    """As T grows T²·KL tends to |z_s - z_t|² / 2C for centred logits: its gradient is Δz / C."""
    student, teacher = random((1, 3)), random((1, 3), 1)
    student, teacher = student - student.mean(), teacher - teacher.mean()
    student.requires_grad_()
    value = losses.distil(student, teacher, torch.ones(1, dtype=torch.float64), 1e4)
    (slope,) = torch.autograd.grad(value, student)
    assert torch.allclose(slope, (student - teacher) / 3, rtol=1e-2)


def test_no_gradient_reaches_a_teacher():
    weight = torch.ones(3, dtype=torch.float64)
    for loss in (
        losses.divergence,
        losses.soft_cross_entropy,
        lambda student, teacher, w: losses.divergence_from(student, teacher.softmax(-1), w),
        lambda student, teacher, w: losses.distil(student, teacher, w, 2.0),
    ):
        student, teacher = random((3, 4)).requires_grad_(), random((3, 4), 1).requires_grad_()
        loss(student, teacher, weight).backward()
        assert teacher.grad is None and student.grad.abs().sum() > 0


def test_cross_entropy_of_a_single_client_has_the_same_derivatives():
    """Of labels for each place of a sequence too; methods differentiate twice."""
    logits, labels = random((3, 4, 5)), torch.arange(12).reshape(3, 4) % 5
    weight = random((3, 4), 1).abs() * (labels > 0)
    turned = random((3, 4, 5), 2)

    def along(loss, logits):
        at = logits.detach().requires_grad_()
        (slope,) = torch.autograd.grad(loss(at, labels, weight), at, create_graph=True)
        return slope, torch.autograd.grad((slope * turned).sum(), at)[0]

    pairs = zip(
        along(losses.single_cross_entropy, logits), along(losses.cross_entropy, logits), strict=True
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)
    assert losses.single_cross_entropy(logits, labels, 0 * weight) == 0


def test_weights_cut_by_steps_know_their_sum():
    """The last step is padding alone, and the one before has three examples of unequal weight."""
    weight = torch.tensor([[1.0, 1, 1, 1], [2, 1, 3, 0], [0, 0, 0, 0]], dtype=torch.float64)
    logits = torch.randn(3, 4, 5, dtype=torch.float64)
    labels = torch.tensor([0, 4, 2, 2])
    for own, whole, outputs in zip(losses.by_step(weight), weight, logits, strict=True):
        assert torch.equal(own, whole)
        noted = losses.single_cross_entropy(outputs, labels, own)
        alone = losses.single_cross_entropy(outputs, labels, whole)
        assert noted == alone
        torch.testing.assert_close(noted, losses.cross_entropy(outputs, labels, whole))


def test_weights_in_single_precision_take_no_digits_from_logits_in_double():
    """A third that was rounded as weights are would be another share."""
    logits, labels, weight = random((3, 4)), torch.tensor([0, 3, 1]), torch.ones(1, 3)
    for own in (weight[0], losses.by_step(weight)[0]):
        found = losses.single_cross_entropy(logits, labels, own)
        assert torch.allclose(found, F.cross_entropy(logits, labels), EXACT, EXACT)


def test_a_binary_divergence_by_hand():
    """A logit of 0 says 1/2: from 3/4 that is 3/4 log 3/2 + 1/4 log 1/2; from 0 and from 1 log 2.

    Its slope in the logit is share less target, and the target is a constant.
    """
    student = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0.75, 0.0, 1.0], dtype=torch.float64, requires_grad=True)
    found = losses.binary_divergence(student, target)
    expected = [0.75 * math.log(1.5) + 0.25 * math.log(0.5), math.log(2), math.log(2)]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    slopes = torch.autograd.grad(found.sum(), (student, target), allow_unused=True)
    assert slopes[0].tolist() == pytest.approx([-0.25, 0.5, -0.5]) and slopes[1] is None


@pytest.mark.parametrize("classes", [3, 20])
@pytest.mark.parametrize("shape", [(5,), (5, 4)])
def test_mapped_over_clients_it_is_each_clients_cross_entropy(classes, shape):
    """Of few classes and of many, of examples and of sequences' places; slopes as well."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, *shape, classes, generator=draw, dtype=torch.float64)
    labels = torch.randint(classes, (2, *shape), generator=draw)
    weight = torch.randint(3, (2, *shape), generator=draw).double()
    taken = torch.vmap(torch.func.grad_and_value(losses.cross_entropy))(logits, labels, weight)
    for client in range(2):
        at = logits[client].clone().requires_grad_()
        each = -at.log_softmax(-1).gather(-1, labels[client].unsqueeze(-1)).squeeze(-1)
        value = (each * weight[client]).sum() / weight[client].sum()
        (slope,) = torch.autograd.grad(value, at)
        assert float(taken[1][client]) == pytest.approx(value.item(), abs=1e-12)
        assert (taken[0][client] - slope).abs().max() < 1e-12


@pytest.mark.parametrize("shape", [(5, 3), (2, 4, 3), (2, 4, 20)])
def test_log_shares_are_torchs_over_the_last_axis(shape):
    logits = random(shape)
    assert (losses.log_shares(logits) - logits.log_softmax(-1)).abs().max() < EXACT
