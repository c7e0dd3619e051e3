"""FedDistill by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import worlds
from idiolect.core import tree
from idiolect.core.method import Sent
from idiolect.engine.architecture import Architecture
from idiolect.methods import FedDistill, LocalOnly
from idiolect.methods.feddistill import ClassMeans
from methods.tiny import Line, alike, client, close, line, pair, refuses, setup, sigmoid

LN3 = math.log(3)
START = (0.4 * LN3, 0.2 * LN3)  # z = ln 3 of x = 2


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def teacher(zero: list[float], one: list[float], known: tuple[int, int] = (1, 1)) -> Sent:
    return Sent(own=ClassMeans(tensor([zero, one]), tensor(known)))


NOBODY = teacher([0, 0], [0, 0], (0, 0))
CASES: dict[str, tuple[dict[str, Any], list[float], float, list[float]]] = {
    "shares": ({}, [0.1, 0.9], 3 / 4 - 0.9, [1 / 4, 3 / 4]),
    "softmax of logits": ({"average": "logits"}, [1, 1 + math.log(9)], 3 / 4 - 0.9, [0, LN3]),
    "squared": ({"average": "logits", "distance": "squared"}, [-1, 2], LN3 - 2, [0, LN3]),
}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_one_round_by_hand(case: str, stacked: bool) -> None:
    """Logits (0, ln 3), so p = 3/4; example (2, 1), γ = 1/2, lr = 0.1.

    Cross-entropy with the label has ∂/∂z = p − 1 = −1/4; with the shares (0.1, 0.9), be they means
    themselves or the softmax of mean logits (1, 1 + ln 9), p − 0.9; the squared error to the logits
    (−1, 2), a mean over two, z − 2. The sum, γ before the latter, times (2, 1) is the gradient.
    Reported is the output before the step, for class 1 alone; no parameter is.
    """
    settings, mean, slope, reported = CASES[case]
    sent = teacher([5.0, 5.0], mean)
    method = FedDistill(lr=0.1, pull=0.5, **settings)
    report, kept = method.client_step(sent, line(START), client(stacked=stacked))
    moved = -0.1 * (-1 / 4 + 0.5 * slope)
    assert pair(kept) == close((START[0] + 2 * moved, START[1] + moved))
    assert report.outputs.tolist() == [[0.0, 0.0], close(reported)]
    assert report.known.tolist() == [0.0, 1.0]


def test_outputs_are_averaged_while_the_client_trains() -> None:
    """One example a step: class 1 is seen before the first step and before the second.

    First p = 3/4, then b and w have moved by 0.1 / 4 · (2, 1) and the second example has x = 1.
    """
    local = client([(2.0, 1), (1.0, 1)])
    report, _ = FedDistill(lr=0.1, batch=1).client_step(NOBODY, line(START), local)
    second = sigmoid(START[0] + 0.05 + START[1] + 0.025)
    assert report.outputs[1].tolist() == close([1 - (0.75 + second) / 2, (0.75 + second) / 2])


def test_means_are_by_class() -> None:
    """A tiny rate leaves z = ln 3 · (0.4 x + 0.2): class 0 has x = 2 and −3, class 1 has x = 2."""
    local = client([(2.0, 0), (2.0, 1), (-3.0, 0)])
    method = FedDistill(lr=1e-37, average="logits", epochs=3)
    report, _ = method.client_step(NOBODY, line(START), local)
    assert report.outputs.flatten().tolist() == close([0, LN3 * (1 - 1) / 2, 0, LN3])
    assert report.known.tolist() == [1.0, 1.0]


def shelf() -> ClassMeans:
    """Three clients; class 0 is with the first two, class 1 with the last, nobody has class 2."""
    outputs, known = torch.zeros(3, 3, 3).double(), torch.zeros(3, 3).double()
    outputs[0, 0], outputs[1, 0], outputs[2, 1] = tensor([1, 0, 0]), tensor([0, 1, 0]), 0.5
    known[0, 0] = known[1, 0] = known[2, 1] = 1
    return ClassMeans(outputs, known)


def test_a_client_learns_from_the_others_each_alike() -> None:
    own = FedDistill().send(shelf(), torch.tensor([2, 0])).own
    assert own.known.tolist() == [[1, 0, 0], [1, 1, 0]]
    assert own.outputs[0].tolist() == [[0.5, 0.5, 0], [0, 0, 0], [0, 0, 0]]
    assert own.outputs[1].tolist() == [[0, 1, 0], [0.5, 0.5, 0.5], [0, 0, 0]]


def test_it_may_count_among_them_and_newcomers_learn_from_all() -> None:
    method = FedDistill(leave_out=False)
    for own in (
        method.send(shelf(), torch.tensor([0])).own,
        FedDistill().welcome(shelf(), torch.arange(1)).own,
    ):
        assert own.known.tolist() == [[1, 1, 0]]
        assert own.outputs[0].tolist() == [[0.5, 0.5, 0], [0.5, 0.5, 0.5], [0, 0, 0]]


def test_those_who_are_absent_go_on_teaching() -> None:
    """Client 1 alone reports, now of class 2; what clients 0 and 2 said stays."""
    report = ClassMeans(torch.zeros(1, 3, 3).double(), tensor([[0, 0, 1]]))
    new = FedDistill().server_step(shelf(), torch.tensor([1]), report)
    assert new.known.tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]
    assert new.outputs[0, 0].tolist() == [1, 0, 0]


@pytest.mark.parametrize("distance", ["entropy", "squared"])
def test_a_class_that_nobody_teaches_pulls_at_nothing(distance: str) -> None:
    """Before the first round it is local training, whatever stands in place of the means."""
    sent = teacher([7.0, -3.0], [0.2, 0.8], (1, 0))
    (_, kept), (_, free) = (
        FedDistill(lr=0.1, pull=pull, distance=distance).client_step(sent, line(START), client())
        for pull in (9.0, 0.0)
    )
    assert alike(kept, free)


@pytest.mark.parametrize(("settings", "sizes"), [({"pull": 0.0}, (7, 4, 5)), ({}, (7,))])
def test_without_a_pull_or_others_it_is_training_alone(
    settings: dict[str, float], sizes: tuple[int, ...], float64: None
) -> None:
    ends = []
    for method in (FedDistill(batch=3, lr=0.3, momentum=0.5, **settings),
                   LocalOnly(batch=3, lr=0.3, momentum=0.5)):  # fmt: skip
        simulation = worlds.simulation(method, worlds.federation(sizes))
        for _ in range(3):
            simulation.advance()
        ends.append(simulation.tree["personal"])
    assert not worlds.differing(*ends, 1e-12)


def test_with_others_it_is_not(float64: None) -> None:
    ends = []
    for pull in (0.0, 1.0):
        method = FedDistill(batch=3, lr=0.3, pull=pull)
        simulation = worlds.simulation(method, worlds.federation((7, 4, 5)))
        for _ in range(2):
            simulation.advance()
        ends.append(simulation.tree["personal"])
    assert worlds.differing(*ends, 1e-3)


def test_a_newcomer_trains_its_own_network_towards_the_means() -> None:
    """Two epochs are two steps as in a round of two."""
    sent = teacher([0.7, 0.3], [0.1, 0.9])
    _, kept = FedDistill(lr=0.1, epochs=2).client_step(sent, line(START), client())
    found = FedDistill(lr=0.1, newcomer_epochs=2).adapt(sent, line(START), client())
    assert alike(found, kept)


def test_the_state_has_a_row_for_each_client_and_no_parameter() -> None:
    state = FedDistill().init_server(setup(Line(), sizes=(1, 2, 3)))
    assert [leaf.shape for leaf in tree.leaves(state)] == [(3, 2, 2), (3, 2)]
    sent = FedDistill().send(state, torch.arange(2))
    assert not sent.own.known.any() and FedDistill().models(sent, ()) == {}


@pytest.mark.parametrize("cohort", [None, 3])
def test_networks_may_differ_and_both_backends_agree(cohort: int | None, float64: None) -> None:
    ends = []
    for kind in ("sequential", "vectorised"):
        simulation = worlds.simulation(
            FedDistill(batch=4, lr=0.3), worlds.federation(), kind=kind, cohort=cohort,
            architectures={
                "normed": Architecture(worlds.Normed, clients=(0, 1, 2)),
                "plain": Architecture(worlds.Plain, clients=(3, 4, 5)),
            },
        )  # fmt: skip
        for _ in range(3):
            simulation.advance()
        ends.append(simulation.tree)
    assert not worlds.differing(*ends, 1e-9)


def test_settings_out_of_range_are_refused() -> None:
    refuses(FedDistill, "pull", -1.0, "at least 0")
    refuses(FedDistill, "average", "votes", "one of 'shares', 'logits'")
    refuses(FedDistill, "distance", "kl", "one of 'entropy', 'squared'")
