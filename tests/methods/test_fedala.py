"""FedALA by hand."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import worlds
from idiolect.core import tree
from idiolect.core.batchnorm import BatchNorm
from idiolect.core.method import Sent
from idiolect.core.tree import Params
from idiolect.methods import FedALA, FedAvg
from idiolect.methods.fedala import Mixing
from methods.tiny import Chain, alike, client, close, refuses, setup, sigmoid

LN3 = math.log(3)


def params(a: float, b: float) -> Params:
    return {name: torch.tensor(v, dtype=torch.float64) for name, v in (("a.w", a), ("b.w", b))}


def weights(w: float) -> Params:
    return {"b.w": torch.tensor(w, dtype=torch.float64)}


@pytest.mark.parametrize("stacked", [False, True])
def test_one_round_by_hand(stacked: bool) -> None:
    """Z = b · a · x; global (a, b) = (1, 0), own (5, ln 3), example (2, 1), W = 1, η = 1/(2 ln 3).

    The mixture has a = 1, whatever the own a is, and b = ln 3 + (0 − ln 3) W = 0, so p = 1/2 and
    ∂f/∂b = (1/2 − 1) · 2 = −1. By Eq. 7, ∂f/∂W = −1 · (0 − ln 3) = ln 3, so W = 1 − 1/2 = 1/2 and
    b = ln 3 / 2. Training from there at lr 0.1: z = ln 3, p = 3/4, ∂f/∂b = −1/4 · 2 = −1/2 and
    ∂f/∂a = −1/4 · (ln 3 / 2) · 2 = −ln 3 / 4.
    """
    method = FedALA(lr=0.1, weight_lr=1 / (2 * LN3))
    report, kept = method.client_step(
        Sent(params(1.0, 0.0)),
        Mixing(params(5.0, LN3), weights(1.0)),
        client(stacked=stacked, main=Chain(1.0, 0.0)),
    )
    assert float(kept.weights["b.w"]) == close(0.5)
    assert float(report.params["b.w"]) == close(LN3 / 2 + 0.05)
    assert float(report.params["a.w"]) == close(1 + 0.025 * LN3)
    assert alike(kept.model, report.params)
    assert float(report.size) == 1


@pytest.mark.parametrize(("shared", "own", "found"), [(0.0, LN3, 0.0), (LN3, 0.0, 1.0)])
def test_weights_stay_from_0_to_1(shared: float, own: float, found: float) -> None:
    """With η = 5 the first step would go to 1 − 5 ln 3; where the global b is better, above 1."""
    method = FedALA(weight_lr=5.0)
    mixed = method.deploy(
        Sent(params(1.0, shared)),
        Mixing(params(1.0, own), weights(1.0)),
        client(main=Chain(1.0, 0.0)),
    )
    assert float(mixed["b.w"]) == (own if found == 0 else shared)


def test_two_last_layers_may_have_weights() -> None:
    kept = FedALA(layers=2).init_personal(setup(Chain(1.0, 2.0, 3.0)))
    assert {name: float(w) for name, w in kept.weights.items()} == {"b.w": 1, "c.w": 1}
    with pytest.raises(Exception, match="4 last layers asked for, but the network has 3"):
        FedALA(layers=4).init_personal(setup(Chain(1.0, 2.0, 3.0)))


def test_in_the_first_round_it_is_fedavg() -> None:
    """The global model is the client's own, so the weights' gradient is zero and they stay 1."""
    model = Chain(0.7, -0.4)
    start = setup(model)
    plain, _ = FedAvg(lr=0.3, epochs=2).client_step(Sent(start.params), (), client(main=model))
    method = FedALA(lr=0.3, epochs=2)
    report, kept = method.client_step(
        Sent(start.params), method.init_personal(start), client(main=model)
    )
    assert float(kept.weights["b.w"]) == 1
    assert alike(report, plain)


def passes(count: int, eta: float) -> list[float]:
    """W after each pass from 1, global (1, 0), own (1, ln 3): W −= η (p − 1) · 2 · (0 − ln 3)."""
    found = [1.0]
    for _ in range(count):
        p = sigmoid(2 * LN3 * (1 - found[-1]))
        found.append(min(1, max(0, found[-1] + eta * (p - 1) * 2 * LN3)))
    return found


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    ("tolerance", "limit", "count"), [(0.0, 4, 4), (1.0, 20, 1), (0.05, 20, 3), (0.05, 2, 2)]
)
def test_at_first_weights_are_learned_until_they_converge(
    tolerance: float, limit: int, count: int, stacked: bool
) -> None:
    """At η = 0.05 the first three passes move W by 0.0549, 0.0516 and 0.0485.

    A pass that moves it by less than the tolerance is the last one, unless the limit is reached.
    """
    track = passes(4, 0.05)
    moves = [before - after for before, after in pairwise(track[:4])]
    assert [round(move, 4) for move in moves] == [0.0549, 0.0516, 0.0485]
    method = FedALA(weight_lr=0.05, tolerance=tolerance, start_epochs=limit)
    kept = method.prepare(
        Sent(params(1.0, 0.0)),
        Mixing(params(1.0, LN3), weights(1.0)),
        client(stacked=stacked, main=Chain(1.0, 0.0)),
    )
    assert float(kept.weights["b.w"]) == close(track[count])
    assert alike(kept.model, params(1.0, LN3))


def test_a_newcomer_trains_the_global_model() -> None:
    model = Chain(0.7, -0.4)
    start = setup(model)
    method = FedALA(lr=0.3)
    report, _ = FedAvg(lr=0.3).client_step(Sent(start.params), (), client(main=model))
    adapted = method.adapt(Sent(start.params), method.init_personal(start), client(main=model))
    assert alike(adapted, report.params)


def test_running_statistics_have_no_weights() -> None:
    model = nn.Sequential(nn.Linear(2, 2), BatchNorm(2))
    kept = FedALA().init_personal(setup(model))
    assert sorted(kept.weights) == ["1.bias", "1.weight"]


@pytest.mark.parametrize("kind", ["sequential", "vectorised"])
def test_weights_are_first_learned_in_the_second_round(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first they stay 1. Each client prepares once, in its first round after that."""
    method = FedALA(batch=4, lr=0.3, weight_lr=5.0, tolerance=0.0, start_epochs=2)
    simulation = worlds.simulation(method, worlds.federation(), kind=kind, cohort=4)
    asked: list[tuple[int, list[int]]] = []
    run_apart = simulation._run_apart

    def noted(task: object, requests: list[Any]) -> None:
        asked.append((simulation.round, sorted(requests[0].cohort.tolist())))
        run_apart(task, requests)

    monkeypatch.setattr(simulation, "_run_apart", noted)
    met: set[int] = set()
    for number in range(5):
        cohort = set(simulation.cohort(0).tolist())
        simulation.advance()
        if number:
            assert asked[-1] == (number, sorted(cohort - met))
            met |= cohort
        store = simulation.groups[0].store.take(torch.arange(6))
        learned = [bool((row != 1).any()) for row in tree.flat(store.weights)]
        assert learned == [client in met for client in range(6)]
    assert len(asked) == 4


def test_settings_out_of_range_are_refused() -> None:
    refuses(FedALA, "layers", 0, "at least 1")
    refuses(FedALA, "share", 0.0, "above 0")
    refuses(FedALA, "share", 1.2, "at most 1")
    refuses(FedALA, "weight_lr", 0.0, "above 0")
