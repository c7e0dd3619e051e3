"""FedMD by hand: one teacher for all."""

import pytest
import torch

from idiolect.core.capabilities import Preparation, has
from idiolect.core.method import Sent
from idiolect.errors import ConfigError
from idiolect.methods import FedMD, KTpFL
from idiolect.methods.distilled import SoftReport, TeacherState
from methods.tiny import Line, client, close, line, pair, setup, sigmoid

PUBLIC = [(2.0, 0), (-1.0, 1)]


def test_every_teacher_is_the_mean_of_the_cohort():
    """Also for the client that was not in it; sizes do not matter."""
    method = FedMD(sample=2)
    state = method.init_server(setup(Line(), sizes=(1, 3, 5), public=2))
    reports = SoftReport(torch.rand(2, 2, 2).double(), torch.tensor([1.0, 9.0]).double())
    new = method.server_step(state, torch.tensor([0, 2]), reports)
    assert torch.allclose(new.teachers, reports.prediction.mean(0).expand(3, 2, 2))
    again = method.server_step(new, torch.tensor([1]), SoftReport(*(leaf[:1] for leaf in reports)))
    assert torch.allclose(again.teachers, reports.prediction[:1].expand(3, 2, 2))


def test_it_is_ktpfl_whose_matrix_stands_still():
    """The client's side is the same code: equal settings give equal steps."""
    settings = {"sample": 2, "lr": 0.3, "temperature": 3.0}
    teacher = torch.tensor([[0.1, 0.9], [0.3, 0.7]], dtype=torch.float64)
    ends = [
        kind(**settings).client_step(Sent(own=teacher), line((0.3, -0.2)), client(public=PUBLIC))
        for kind in (FedMD, KTpFL)
    ]
    assert pair(ends[0][1]) == pair(ends[1][1])
    assert torch.equal(ends[0][0].prediction, ends[1][0].prediction)


@pytest.mark.parametrize("stacked", [False, True])
def test_logits_are_exchanged_and_digested_by_absolute_error(stacked):
    """Line at (0, 0), taught z = 3 and z = −5 for x = 2 and −1: the slope is the mean of signs.

    Logits are [0, z]; |·| is averaged over both classes, so ∇ = ½ · mean(−(2, 1), +(−1, 1)) =
    ½ · ½ · (−3, 0) = (−0.75, 0). A step of 0.4 goes to (0.3, 0), where z = 0.6 and −0.3.
    """
    method = FedMD(exchange="logits", sample=2, public_batch=2, lr=0.4)
    local = client(train=[], public=PUBLIC, stacked=stacked)
    teacher = torch.tensor([[0.0, 3.0], [0.0, -5.0]]).double()
    assert pair(method.distil(teacher, line((0, 0)), local)) == close((0.3, 0.0))
    predicted = method.predictions(line((0.3, 0.0)), local)
    assert predicted.flatten().tolist() == close([0.0, 0.6, 0.0, -0.3])


def test_logits_that_add_up_to_nothing_are_still_a_teacher():
    method = FedMD(exchange="logits", sample=2, public_batch=2, lr=0.4)
    teacher = torch.tensor([[0.0, 3.0], [0.0, -3.0]]).double()
    learned = method.distil(teacher, line((0, 0)), client(public=PUBLIC))
    assert pair(learned) == close((0.3, 0.0))


def test_the_mean_is_of_those_who_have_something_to_train_on():
    """An empty client never reports; it is taught all the same, and its column stays empty."""
    state = FedMD(sample=2).init_server(setup(Line(), sizes=(1, 0, 5), public=2))
    assert state.affinity.tolist() == [[0.5, 0.0, 0.5]] * 3
    assert isinstance(state, TeacherState)


@pytest.mark.parametrize("stacked", [False, True])
def test_the_transfer_phase_learns_public_labels_then_private_ones(stacked):
    """From (0, 0) with x = 2 on both sides, public class 0, then private class 1, rate 0.4.

    Public: p = ½, ∇ = ½ · (2, 1), so (−0.4, −0.2) and z = −1. Private: p = σ(−1) and
    ∇ = (p − 1) · (2, 1).
    """
    method = FedMD(sample=1, lr=0.4, transfer_epochs=1, private_epochs=1)
    local = client(train=[(2.0, 1)], public=[(2.0, 0)], stacked=stacked)
    up = 0.4 * (1 - sigmoid(-1.0))
    learned = method.prepare(Sent(), line((0, 0)), local)
    assert pair(learned) == close((-0.4 + 2 * up, -0.2 + up))
    assert has(method, Preparation) and not has(FedMD(sample=1), Preparation)
    alone = FedMD(sample=1, lr=0.4, private_epochs=1)
    assert has(alone, Preparation) and pair(alone.prepare(Sent(), line((0, 0)), local)) == close(
        (0.4, 0.2)
    )


def test_the_preset_is_what_the_code_does():
    code = FedMD(**FedMD.presets["code"])
    assert (code.exchange, code.optimiser, code.lr, code.sample) == ("logits", "adam", 0.001, 5000)
    assert (code.transfer_epochs, code.private_epochs) == (20, 25)
    assert (code.batch, code.epochs, code.public_batch, code.distil_epochs) == (5, 4, 256, 1)


def test_the_transfer_phase_needs_labels_of_the_private_classes():
    with pytest.raises(ConfigError, match="transfer_epochs is 3, but the public examples have"):
        FedMD(sample=2, transfer_epochs=3).init_server(setup(Line(), public=2))
    FedMD(sample=2, private_epochs=3).init_server(setup(Line(), public=2))
