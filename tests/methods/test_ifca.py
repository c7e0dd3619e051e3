"""IFCA by hand."""

import math

import pytest
import torch

from idiolect.core import tree
from idiolect.core.method import Sent
from idiolect.methods import IFCA, FedAvg
from idiolect.methods.ifca import Choice, Chosen, Clusters
from methods.tiny import HIGH, Chain, Line, alike, client, close, line, pair, refuses, setup


def tensor(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


LOW = (-HIGH[0], -HIGH[1])  # z = −ln 9 at x = 2


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(("label", "cluster"), [(1, 1), (0, 0)])
def test_the_model_of_least_loss_is_trained(label: int, cluster: int, stacked: bool) -> None:
    """At x = 2 the first model says class 0 with 9/10, the second class 1; what is left is FedAvg.

    Either is wrong by 1/10: the step is 0.1 · 0.1 · (2, 1) further the way it says.
    """
    sent = Sent(tree.stack([line(LOW), line(HIGH)]))
    local = client([(2.0, label)], stacked=stacked)
    report, kept = IFCA(lr=0.1).client_step(sent, (), local)
    assert report.cluster.tolist() == [1 - cluster, cluster] and kept == ()
    way = 1 if label else -1
    assert pair(report.params) == close((way * (HIGH[0] + 0.02), way * (HIGH[1] + 0.01)))
    chosen = IFCA().deploy(sent, (), client([(2.0, label)], stacked=stacked))
    assert int(chosen.cluster) == cluster
    assert pair(chosen.params) == close((HIGH, LOW)[1 - label])


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_a_model_that_diverged_is_not_chosen(lost: float) -> None:
    """Its loss is NaN, which compares with nothing; without examples every loss is."""
    sent = Sent(tree.stack([line((lost, lost)), line(LOW)]))
    assert int(IFCA().deploy(sent, (), client([(2.0, 1)])).cluster) == 1
    nobody = IFCA().deploy(Sent(tree.stack([line(LOW), line(HIGH)])), (), client([]))
    assert int(nobody.cluster) == 0


@pytest.mark.parametrize(("uniform", "mean"), [(True, 3.0), (False, 4.0)])
def test_each_model_is_the_mean_of_those_who_chose_it(uniform: bool, mean: float) -> None:
    """Clients 0 and 1 (1 and 3 examples) chose the second, client 2 the third, the first nobody."""
    state = Clusters({"w": tensor([7.0, 8.0, 9.0])}, torch.zeros(3))
    reports = Choice(
        {"w": tensor([1.0, 5.0, 6.0])},
        tensor([[0, 1, 0], [0, 1, 0], [0, 0, 1]]),
        tensor([1.0, 3.0, 4.0]),
    )
    new = IFCA(clusters=3, uniform=uniform).server_step(state, torch.arange(3), reports)
    assert new.models["w"].tolist() == close([7.0, mean, 6.0])
    assert new.shares.tolist() == close([0, 2 / 3, 1 / 3] if uniform else [0, 0.5, 0.5])


def test_models_start_as_shuffles_of_the_network() -> None:
    start = setup(torch.nn.Linear(8, 2, dtype=torch.float64))
    state = IFCA(clusters=3).init_server(start)
    first, second, third = state.models["weight"].unbind(0)
    assert torch.equal(first, start.params["weight"])
    assert not torch.equal(second, first) and not torch.equal(second, third)
    assert torch.equal(second.flatten().sort().values, first.flatten().sort().values)
    again = IFCA(clusters=3).init_server(start)
    other = IFCA(clusters=3).init_server(start._replace(seed=1))
    assert alike(again, state) and not alike(other, state)


def test_one_cluster_is_fedavg_with_clients_alike() -> None:
    start = setup(Chain(0.7, -0.4))
    plain, _ = FedAvg(lr=0.3).client_step(Sent(start.params), (), client(main=Chain(0, 0)))
    method = IFCA(clusters=1, lr=0.3)
    sent = method.send(method.init_server(start), torch.arange(1))
    report, _ = method.client_step(sent, (), client(main=Chain(0, 0)))
    assert alike(report.params, plain.params)


def test_without_examples_the_first_is_taken() -> None:
    sent = Sent(tree.stack([line(LOW), line(HIGH)]))
    chosen = IFCA().deploy(sent, (), client([], main=Line()))
    assert int(chosen.cluster) == 0


def test_the_choice_is_told() -> None:
    facts = IFCA().facts(Chosen(line((0, 0)), torch.tensor(1)))
    assert IFCA().reason(facts) == "cluster 2 of 2: least loss on its own data"


def test_settings_out_of_range_are_refused() -> None:
    refuses(IFCA, "clusters", 0, "at least 1")
