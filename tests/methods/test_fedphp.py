"""FedPHP by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import worlds
from idiolect.core import tree
from idiolect.core.method import Sent
from idiolect.core.tree import Params
from idiolect.methods import FedAvg, FedPHP
from idiolect.methods.fedphp import Inherited
from methods.tiny import HIGH, Split, alike, client, close, line, pair, plus, refuses, setup, slope

LN3 = math.log(3)


def tensor(value: Any) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def params(a: float, b: float) -> Params:
    return {"a.w": tensor(a), "b.w": tensor(b)}


@pytest.mark.parametrize("stacked", [False, True])
def test_one_round_by_hand_with_outputs(stacked: bool) -> None:
    """From 0, chance 1/2, on (2, 1), taught by one that says z = ln 9: at T = 2, (1/4, 3/4).

    With λ = 0.2 the gradient is (0.8 (1/2 − 1) + 0.2 (1/2 − 3/4)) · (2, 1) = −0.45 · (2, 1), so at
    lr 0.1 the client reports 0.045 · (2, 1). After 5 of 20 rounds a quarter of μ = 0.8 is kept:
    0.2 of what was inherited, 0.8 of the report.
    """
    method = FedPHP(lr=0.1, by="kd", temperature=2.0, share=0.2, keep=0.8, keep_rounds=20)
    personal = Inherited(line(HIGH), tensor(5.0))
    report, kept = method.client_step(Sent(line((0, 0))), personal, client(stacked=stacked))
    assert pair(report.params) == close((0.09, 0.045)) and float(report.size) == 1
    assert pair(kept.model) == close(plus((0.8 * 0.09, 0.8 * 0.045), 0.2, HIGH))
    assert float(kept.rounds) == 6


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", ["scaled", "fixed"])
def test_one_round_by_hand_with_features(name: str, stacked: bool) -> None:
    """Features a x of x = 2 and −1 with a = 1, inherited a = 2: {2, −1} and {4, −2}; b = 0.

    Squared distances: within 9 and 36; across 4 and 16 (of 2), 25 and 1 (of −1). Of the twelve
    ordered pairs of different points the mean is 2 (9 + 36 + 4 + 16 + 25 + 1) / 12 = 91/6, to which
    1e-8 is added. With K(d) = Σ exp(−d / w), what of MMD² moves with a is 2 K(9 a²) / 4 − 2 (K((2 a
    − 4)²) + K((2 a + 2)²) + K((−a − 4)²) + K((−a + 2)²)) / 4; the insides move by 18, −8, 16, 10
    and −2, and K'(d) = −Σ exp(−d / w) / w. The labels have no say in a, as b = 0.
    """
    mean = 91 / 6 + 1e-8
    widths = [s * mean for s in (0.25, 0.5, 1, 2, 4)] if name == "scaled" else [20, 30, 40, 100]

    def steep(d: float) -> float:
        return -sum(math.exp(-d / w) / w for w in widths)

    across = -8 * steep(4) + 16 * steep(16) + 10 * steep(25) - 2 * steep(1)
    moved = 2 * 18 * steep(9) / 4 - 2 * across / 4
    local = client([(2.0, 1), (-1.0, 0)], main=Split(1.0, 0.0), stacked=stacked)
    method = FedPHP(lr=0.1, share=0.25, kernels=name, batch=2)
    personal = Inherited(params(2.0, 7.0), tensor(0.0))
    report, _ = method.client_step(Sent(params(1.0, 0.0)), personal, local)
    assert float(report.params["a.w"]) == close(1 - 0.1 * 0.25 * moved)
    # Of the labels: ((1/2 − 1) · 2 + (1/2 − 0) · (−1)) / 2 = −3/4, three quarters of it.
    assert float(report.params["b.w"]) == close(0.1 * 0.75 * 0.75)


def test_features_of_one_example_have_no_distance_to_measure_by() -> None:
    """As if λ did nothing but weaken the labels; fixed kernels do measure it."""
    local, sent = client(main=Split(1.0, 0.5)), Sent(params(1.0, 0.5))
    personal = Inherited(params(0.9, 0.5), tensor(0.0))
    (scaled, _), (fixed, _), (weaker, _) = (
        FedPHP(**given).client_step(sent, personal, local)
        for given in (
            {"lr": 0.1, "share": 0.5},
            {"lr": 0.1, "share": 0.5, "kernels": "fixed"},
            {"lr": 0.05, "share": 0.0},
        )
    )
    for name in ("a.w", "b.w"):
        assert float(scaled.params[name]) == close(float(weaker.params[name]))
    assert float(fixed.params["a.w"]) < float(scaled.params["a.w"])  # towards 0.9


@pytest.mark.parametrize(
    ("rounds", "kept"), [(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 0.9), (99, 0.9)]
)
def test_more_is_inherited_from_round_to_round(rounds: int, kept: float) -> None:
    method = FedPHP(lr=0.1, by="kd", share=0.0, keep=0.9, keep_rounds=3)
    personal = Inherited(line((5.0, -4.0)), tensor(float(rounds)))
    report, own = method.client_step(Sent(line(HIGH)), personal, client())
    trained = plus(HIGH, -0.1, slope(HIGH, [(2.0, 1)]))
    assert pair(report.params) == close(trained)
    expected = plus((trained[0] * (1 - kept), trained[1] * (1 - kept)), kept, (5.0, -4.0))
    assert pair(own.model) == close(expected)


@pytest.mark.parametrize("cohort", [None, 3])
def test_the_global_model_of_no_share_is_fedavgs(cohort: int | None, float64: None) -> None:
    """And with nothing kept, the personal one is what the client trained last."""
    same: dict[str, Any] = {"batch": 3, "lr": 0.3, "momentum": 0.5}
    ends = []
    for method in (FedPHP(share=0.0, keep=0.0, **same), FedAvg(**same)):
        simulation = worlds.simulation(method, worlds.federation(), cohort=cohort)
        for _ in range(3):
            simulation.advance()
        ends.append(simulation)
    assert not worlds.differing(ends[0].states, ends[1].states, 1e-12)
    if cohort is None:
        (own,) = ends[0].tree["personal"]
        mean = tree.mean(own.model, torch.tensor([7.0, 4, 5, 9, 3, 0]))
        assert not worlds.differing(mean, ends[0].states[0], 1e-12)


def test_only_rounds_of_its_own_count(float64: None) -> None:
    """A client that is absent keeps what it inherited, and its count."""
    simulation = worlds.simulation(FedPHP(batch=3, lr=0.3), worlds.federation((7, 4, 5)), cohort=2)
    came = torch.zeros(3)
    for _ in range(4):
        came[simulation.cohort(0)] += 1
        simulation.advance()
    (own,) = simulation.tree["personal"]
    assert torch.equal(own.rounds, came.to(own.rounds)) and len(set(came.tolist())) > 1


def test_what_is_inherited_teaches(float64: None) -> None:
    """By features and by outputs; each ends elsewhere than without a share."""
    ends = []
    for given in ({"share": 0.0}, {"by": "mmd"}, {"by": "kd"}, {"kernels": "fixed"}):
        method = FedPHP(**{"batch": 4, "lr": 0.3, "share": 0.5, **given})
        simulation = worlds.simulation(method, worlds.federation((7, 4, 5)))
        for _ in range(2):
            simulation.advance()
        ends.append(simulation.states)
    assert all(worlds.differing(ends[n], ends[m], 1e-6) for m in range(4) for n in range(m))


def test_a_newcomer_inherits_the_global_model_and_trains() -> None:
    """It is taught by what it received; nothing is kept, for it is its first round."""
    method = FedPHP(lr=0.1, by="kd", share=0.3, epochs=2)
    sent = Sent(line(HIGH))
    found = method.adapt(sent, Inherited(line((9.0, 9.0)), tensor(0.0)), client())
    report, _ = method.client_step(sent, Inherited(line(HIGH), tensor(0.0)), client())
    assert alike(found, report.params)


def test_both_models_are_scored_and_the_initial_one_is_inherited_first() -> None:
    method = FedPHP()
    fresh = method.init_personal(setup(Split(1.0, 2.0)))
    assert alike(fresh.model, params(1.0, 2.0)) and float(fresh.rounds) == 0
    sent = Sent(params(3.0, 4.0))
    assert alike(method.deploy(sent, fresh, client()), fresh.model)
    assert list(method.models(sent, fresh.model)) == ["personal", "global"]


def test_settings_out_of_range_are_refused() -> None:
    refuses(FedPHP, "share", 1.1, "at most 1")
    refuses(FedPHP, "keep", -0.1, "at least 0")
    refuses(FedPHP, "keep_rounds", 0, "at least 1")
    refuses(FedPHP, "by", "luck", "one of 'mmd', 'kd'")
