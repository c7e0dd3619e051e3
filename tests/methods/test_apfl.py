"""APFL by hand."""

import pytest
import torch

from idiolect.core.method import Sent
from idiolect.methods import APFL, FedAvg
from idiolect.methods.apfl import ApflState
from methods.tiny import (
    LN9,
    ONE,
    Line,
    Pair,
    alike,
    client,
    close,
    line,
    minus,
    pair,
    plus,
    refuses,
    setup,
    slope,
)

TWO = [(2.0, 1), (-1.0, 0)]
V = (0.8 * LN9, 0.4 * LN9)  # half of it, mixed with (0, 0), is HIGH


def own(v: Pair, weight: float) -> ApflState:
    return ApflState(line(v), torch.tensor(weight, dtype=torch.float64), line((5.0, 5.0)))


def mix(weight: float, v: Pair, w: Pair) -> Pair:
    return plus(plus((0.0, 0.0), weight, v), 1 - weight, w)


@pytest.mark.parametrize("stacked", [False, True])
def test_one_step_by_hand(stacked: bool) -> None:
    """W = (0, 0), v = (0.8, 0.4) ln 9, weight 1/2, the example (2, 1), lr = 0.1, weight_lr = 0.5.

    The mixture is (0.4, 0.2) ln 9, so p = 9/10 and its gradient is (−0.2, −0.1).
      w:      p = 1/2 at w itself: w ← 0.1 · (1, 1/2)
      v:      the gradient is weight · (−0.2, −0.1): v ← v + 0.1 · (0.1, 0.05)
      weight: ⟨v − w, (−0.2, −0.1)⟩ = −0.16 ln 9 − 0.04 ln 9: weight ← 1/2 + 0.5 · 0.2 ln 9
    all from the old values. The mixture scored is that of the new ones.
    """
    method = APFL(lr=0.1, weight_lr=0.5)
    report, kept = method.client_step(Sent(line((0, 0))), own(V, 0.5), client(stacked=stacked))
    assert pair(report.params) == close((0.1, 0.05))
    v = plus(V, 0.1, (0.1, 0.05))
    assert pair(kept.v) == close(v)
    weight = 0.5 + 0.1 * LN9
    assert float(kept.weight) == close(weight)
    assert pair(kept.mixture) == close(mix(weight, v, (0.1, 0.05)))
    assert float(report.size) == 1


def test_a_round_with_momentum_against_plain_python() -> None:
    w, v, weight = (0.3, -0.2), (-0.5, 0.4), 0.6
    speed_w = speed_v = (0.0, 0.0)
    for example in TWO * 2:
        batch = [example]
        down = slope(mix(weight, v, w), batch)
        speed_w = plus(slope(w, batch), 0.9, speed_w)
        speed_v = plus(plus((0.0, 0.0), weight, down), 0.9, speed_v)
        away = minus(v, w)
        turn = away[0] * down[0] + away[1] * down[1]
        w, v, weight = plus(w, -0.1, speed_w), plus(v, -0.1, speed_v), weight - 0.05 * turn
        assert 0 < weight < 1  # nothing is clipped on the way
    method = APFL(lr=0.1, weight_lr=0.05, momentum=0.9, batch=1, epochs=2)
    report, kept = method.client_step(Sent(line((0.3, -0.2))), own((-0.5, 0.4), 0.6), client(TWO))
    assert pair(report.params) == close(w)
    assert pair(kept.v) == close(v)
    assert float(kept.weight) == close(weight)
    assert pair(kept.mixture) == close(mix(weight, v, w))


@pytest.mark.parametrize(("label", "end"), [(1, 1.0), (0, 0.0)])
def test_the_weight_stays_between_0_and_1(label: int, end: float) -> None:
    """V predicts class 1: the weight runs to 1 where that is right, and to 0 where it is wrong."""
    method = APFL(lr=0.1, weight_lr=10.0)
    _, kept = method.client_step(Sent(line((0, 0))), own(V, 0.5), client([(2.0, label)]))
    assert float(kept.weight) == end
    assert method.facts(kept) == {"weight": kept.weight}


def test_without_weight_the_mixture_is_fedavgs_model() -> None:
    settings = {"lr": 0.3, "batch": 1, "epochs": 2, "momentum": 0.5}
    method = APFL(weight=0.0, weight_lr=0.0, **settings)
    personal = method.init_personal(setup(Line(*V)))
    sent = Sent(line((0.3, -0.2)))
    report, kept = method.client_step(sent, personal, client(TWO))
    plain, _ = FedAvg(**settings).client_step(sent, (), client(TWO))
    assert alike(report, plain)
    assert pair(kept.mixture) == close(pair(plain.params))
    assert pair(kept.v) == V  # a weight of 0 gives v no gradient
    assert float(kept.weight) == 0


def test_weight_one_is_local_training_of_v() -> None:
    method = APFL(weight=1.0, weight_lr=0.0, lr=0.3)
    _, kept = method.client_step(Sent(line((0.3, -0.2))), own(V, 1.0), client())
    assert pair(kept.v) == close(plus(V, -0.3, slope(V, ONE)))
    assert pair(kept.mixture) == close(pair(kept.v))


def test_v_is_kept_apart_from_the_mixture() -> None:
    """A public port overwrites v by the mixture; here the next round goes on from v."""
    method, sent = APFL(lr=0.1, weight_lr=0.0), Sent(line((0, 0)))
    _, once = method.client_step(sent, own(V, 0.5), client())
    _, twice = method.client_step(sent, once, client())
    down = slope(mix(0.5, pair(once.v), (0.0, 0.0)), ONE)
    assert pair(twice.v) == close(plus(pair(once.v), -0.05, down))


def test_the_mixture_is_personal_and_w_global() -> None:
    method, sent, kept = APFL(), Sent(line((0, 0))), own(V, 0.5)
    models = method.models(sent, method.deploy(sent, kept, client()))
    assert models["personal"] is kept.mixture
    assert models["global"] is sent.shared
    assert list(method.models(sent, ())) == ["global"]
    fresh = APFL(weight=0.25).init_personal(setup(Line(*V)))
    assert (pair(fresh.v), float(fresh.weight), pair(fresh.mixture)) == (V, 0.25, V)


def test_a_newcomer_starts_v_from_the_global_model() -> None:
    """Then v = w, so the first step's weight gradient is nil."""
    method, sent = APFL(lr=0.1, weight_lr=0.5), Sent(line((0.3, -0.2)))
    adapted = method.adapt(sent, own((9.0, 9.0), 0.5), client())
    assert float(adapted.weight) == close(0.5)
    down = slope((0.3, -0.2), ONE)
    assert pair(adapted.v) == close(plus((0.3, -0.2), -0.05, down))


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("weight", 1.5, "at most 1"),
        ("weight", -0.5, "at least 0"),
        ("weight_lr", -0.1, "at least 0"),
    ],
)
def test_settings_out_of_range_are_refused(field: str, value: object, rule: str) -> None:
    refuses(APFL, field, value, rule)
