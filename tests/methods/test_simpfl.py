"""Sim-pFL and TopK-pFL by hand: three clients, one public example, predictions on a plane."""

import pytest
import torch

from idiolect.methods import SimPFL, TopKPFL
from idiolect.methods.distilled import SoftReport
from methods.tiny import Line, close, refuses, setup

# cos(a, b) = 24/25, cos(a, c) = 0, cos(b, c) = 7/25: vectors need not be on the simplex here.
A, B, C = (1.0, 0.0), (0.96, 0.28), (0.0, 1.0)


def reports(*vectors):
    soft = torch.tensor([[vector] for vector in vectors], dtype=torch.float64)
    return SoftReport(soft, torch.ones(len(vectors)).double())


def started(method, clients=3):
    return method.init_server(setup(Line(), sizes=(1.0,) * clients, public=1))


def test_weights_are_cosines_above_the_least():
    """Client a: (1, 0.96, 0) over 1.96; c: (0, 0.28, 1) over 1.28.

    Client b: (0.96, 1, 0.28) less 0.28, that is (0.68, 0.72, 0), over 1.4.
    """
    method = SimPFL(sample=1)
    state = method.server_step(started(method), torch.arange(3), reports(A, B, C))
    weights = method.trace(state)["weights"]
    assert weights[0].tolist() == close([1 / 1.96, 0.96 / 1.96, 0])
    assert weights[1].tolist() == close([0.68 / 1.4, 0.72 / 1.4, 0])
    assert weights[2].tolist() == close([0, 0.28 / 1.28, 1 / 1.28])
    first = (1 / 1.96 * A[0] + 0.96 / 1.96 * B[0], 0.96 / 1.96 * B[1])
    assert state.teachers[0, 0].tolist() == close(list(first))


def test_where_all_are_alike_everyone_counts_alike():
    method = SimPFL(sample=1)
    state = method.server_step(started(method), torch.arange(3), reports(B, B, B))
    assert state.teachers.flatten().tolist() == close([*B] * 3)


def test_a_client_is_exactly_like_itself_and_little_likeness_is_shared_out_whole():
    """In single precision a vector's product with itself is 1 but for rounding.

    Three that are all alike but for a thousandth: what is above the least adds up to one.
    """
    soft = torch.rand(50, 1, 7, generator=torch.Generator().manual_seed(0))
    found = SimPFL(sample=1).learn(torch.ones(50, 50), SoftReport(soft, torch.ones(50)), 1.0)
    assert found.diagonal().tolist() == [1.0] * 50
    near = torch.tensor([[1.0, 0.999, 0.998], [0.999, 1.0, 0.999], [0.998, 0.999, 1.0]]).double()
    weights = SimPFL(sample=1).mix(near)
    assert weights.flatten().tolist() == close([2 / 3, 1 / 3, 0, 0, 1, 0, 0, 1 / 3, 2 / 3])


def test_an_old_likeness_is_kept_until_the_two_meet_again():
    """Then only a and c come, with swapped predictions; b is taught by what it knows of them."""
    method = SimPFL(sample=1)
    state = method.server_step(started(method), torch.arange(3), reports(A, B, C))
    state = method.server_step(state, torch.tensor([0, 2]), reports(C, A))
    # b: cosines 0.96 and 0.28, less the least: all to client a, who now predicts C.
    assert state.teachers[1, 0].tolist() == close(list(C))
    assert float(state.affinity[0, 1]) == pytest.approx(0.96)


def test_the_few_most_alike_teach_each_alike():
    """K = 2: a and b have each other, c has b."""
    method = TopKPFL(sample=1, most=2)
    state = method.server_step(started(method), torch.arange(3), reports(A, B, C))
    weights = method.trace(state)["weights"].tolist()
    assert weights == [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]


def test_one_is_itself_and_more_than_there_are_is_everyone():
    for most, expected in ((1, torch.eye(3).double()), (9, torch.full((3, 3), 1 / 3).double())):
        method = TopKPFL(sample=1, most=most)
        state = method.server_step(started(method), torch.arange(3), reports(A, B, C))
        assert torch.allclose(method.trace(state)["weights"], expected)


def test_settings_out_of_range_are_refused():
    refuses(TopKPFL, "most", 0, "at least 1")
