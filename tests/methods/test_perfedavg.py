"""Per-FedAvg by hand."""

import pytest

from idiolect.core import capabilities
from idiolect.core.method import Sent
from idiolect.errors import ConfigError
from idiolect.methods import FedAvg, PerFedAvg
from methods.tiny import (
    LN9,
    ONE,
    Examples,
    Ordered,
    Pair,
    alike,
    chance,
    client,
    close,
    line,
    lost,
    pair,
    plus,
    refuses,
    slope,
)

A = 0.4 * LN9  # adapt_lr α of the hand-computed steps
DEALT = [(2.0, 1), (2.0, 0)]  # the first adapts, the second judges
BATCH = [(2.0, 1), (-1.0, 1), (0.5, 0), (1.5, 0), (-2.0, 1), (1.0, 1)]


def stepped(method: PerFedAvg, start: Pair, batch: Examples, stacked: bool = False) -> Pair:
    report, personal = method.client_step(Sent(line(start)), (), client(batch, stacked=stacked))
    assert personal == ()
    assert float(report.size) == len(batch)
    return pair(report.params)


def bent(at: Pair, batch: Examples, direction: Pair) -> Pair:
    """The Hessian times a direction: the mean of p(1 − p) ⟨(x, 1), d⟩ · (x, 1)."""
    total = (0.0, 0.0)
    for x, _ in batch:
        p = chance(at, x)
        along = p * (1 - p) * (x * direction[0] + direction[1]) / len(batch)
        total = plus(total, along, (x, 1.0))
    return total


@pytest.mark.parametrize("stacked", [False, True])
def test_the_first_order_step_by_hand(stacked: bool) -> None:
    """From (0, 0): the first example (2, 1) adapts with α = 0.4 ln 9, the second (2, 0) judges.

    ∇f₁ = (−1, −1/2), so w̃ = α (1, 1/2) = (0.4, 0.2) ln 9, where z = ln 9 and p = 9/10. There
    ∇f₂ = (9/10 − 0)(2, 1) = (1.8, 0.9), and with lr = 0.1 the model becomes −(0.18, 0.09).
    """
    method = PerFedAvg(lr=0.1, adapt_lr=A, order="first")
    assert stepped(method, (0.0, 0.0), DEALT, stacked) == close((-0.18, -0.09))


@pytest.mark.parametrize("stacked", [False, True])
def test_the_exact_step_by_hand(stacked: bool) -> None:
    """As before, then times I − α∇²f₁(w), where ∇²f₁ = p(1 − p) (2, 1)ᵀ(2, 1) with p = 1/2.

    ∇²f₁ · (1.8, 0.9) = 1/4 · (2 · 1.8 + 0.9) · (2, 1) = 1.125 · (2, 1) = (2.25, 1.125).
    The meta gradient is (1.8 − 2.25 α, 0.9 − 1.125 α).
    """
    method = PerFedAvg(lr=0.1, adapt_lr=A, order="exact")
    expected = (-0.1 * (1.8 - 2.25 * A), -0.1 * (0.9 - 1.125 * A))
    assert stepped(method, (0.0, 0.0), DEALT, stacked) == close(expected)


def test_the_exact_gradient_against_finite_differences() -> None:
    """Central differences of F(w) = f(w − α∇f(w; first); second), all in plain Python."""
    first, second, at, h = BATCH[0::2], BATCH[1::2], (0.3, -0.2), 1e-5

    def meta(w: Pair) -> float:
        return lost(plus(w, -0.7, slope(w, first)), second)

    numeric = tuple(
        (meta(plus(at, h, unit)) - meta(plus(at, -h, unit))) / (2 * h)
        for unit in ((1.0, 0.0), (0.0, 1.0))
    )
    moved = stepped(PerFedAvg(lr=1.0, adapt_lr=0.7, order="exact"), at, BATCH)
    assert (at[0] - moved[0], at[1] - moved[1]) == close(numeric, 1e-8)
    plain = stepped(PerFedAvg(lr=1.0, adapt_lr=0.7, order="first"), at, BATCH)
    assert (at[0] - plain[0], at[1] - plain[1]) != close(numeric, 1e-2)


@pytest.mark.parametrize("stacked", [False, True])
def test_hessian_free_bends_on_the_third_part(stacked: bool) -> None:
    """D = ∇f₂(w̃), and the step is d − α ∇²f₃(w) d, the product by differences: error O(δ²)."""
    at, alpha = (0.3, -0.2), 0.7
    first, second, third = (BATCH[part::3] for part in range(3))
    d = slope(plus(at, -alpha, slope(at, first)), second)
    meta = plus(d, -alpha, bent(at, third, d))
    method = PerFedAvg(lr=1.0, adapt_lr=alpha, order="hessian-free", delta=1e-4)
    assert stepped(method, at, BATCH, stacked) == close(plus(at, -1.0, meta), 1e-8)


def test_hessian_free_is_exact_where_the_third_part_is_the_first() -> None:
    """Equal data in the first and third parts: within 1e-6 of exact at δ = 1e-3.

    First-order lies farther off by more than a thousand times that.
    """
    at, settings = (0.3, -0.2), {"lr": 1.0, "adapt_lr": 0.7}
    one, two = BATCH[0], BATCH[3]
    exact = stepped(PerFedAvg(order="exact", **settings), at, [one, two])
    free = stepped(PerFedAvg(order="hessian-free", **settings), at, [one, two, one])
    first = stepped(PerFedAvg(order="first", **settings), at, [one, two])
    assert free == close(exact, 1e-6)
    assert first != close(exact, 1e-3)


def test_delta_is_the_width_of_the_difference() -> None:
    """A wide difference is off by its third-order term, which falls as δ²: by 100 from 1 to 0.1."""
    at, settings = (0.3, -0.2), {"lr": 1.0, "adapt_lr": 0.7, "order": "hessian-free"}
    exact = stepped(PerFedAvg(delta=1e-4, **settings), at, BATCH)
    off = [
        abs(stepped(PerFedAvg(delta=delta, **settings), at, BATCH)[0] - exact[0])
        for delta in (1.0, 0.1)
    ]
    assert 50 < off[0] / off[1] < 200


def test_several_steps_go_on_from_each_other() -> None:
    at = (0.3, -0.2)
    for one, two in ((BATCH[0], BATCH[1]), (BATCH[2], BATCH[3]), (BATCH[4], BATCH[5])):
        at = plus(at, -0.5, slope(plus(at, -0.7, slope(at, [one])), [two]))
    method = PerFedAvg(lr=0.5, adapt_lr=0.7, batch=2)
    assert stepped(method, (0.3, -0.2), BATCH) == close(at)


def test_examples_are_dealt_in_turn_even_from_a_short_batch() -> None:
    """Batches of 4 from 6 examples: the second holds two and padding, and each part gets one."""
    at = (0.3, -0.2)
    for one, two in ((BATCH[0:4:2], BATCH[1:4:2]), (BATCH[4:5], BATCH[5:6])):
        at = plus(at, -0.5, slope(plus(at, -0.7, slope(at, one)), two))
    assert stepped(PerFedAvg(lr=0.5, adapt_lr=0.7, batch=4), (0.3, -0.2), BATCH) == close(at)


def test_a_step_of_nothing_makes_it_fedavg_on_the_judging_half() -> None:
    """α → 0: every variant is plain descent on the second part."""
    at = (0.3, -0.2)
    for order, parts in (("first", 2), ("exact", 2), ("hessian-free", 3)):
        method = PerFedAvg(lr=0.5, adapt_lr=1e-15, order=order)
        plain, _ = FedAvg(lr=0.5).client_step(Sent(line(at)), (), client(BATCH[1::parts]))
        assert stepped(method, at, BATCH) == close(pair(plain.params))


def test_clients_adapt_on_training_data_only() -> None:
    """Two steps of size α: from (0, 0) with (2, 1), α = 0.4 ln 9: HIGH, then 1.2 HIGH.

    A client with other data than `train` is not even asked for it.
    """
    method = PerFedAvg(lr=7.0, adapt_lr=A, adapt_steps=2)
    plans = Ordered({"train": ONE})
    adapted = method.deploy(Sent(line((0, 0))), (), client(plans=plans))
    assert pair(adapted) == close((1.2 * 0.4 * LN9, 1.2 * 0.2 * LN9))
    assert plans.asked == ["train"]
    newcomer = capabilities.adapt(method, Sent(line((0, 0))), (), client())
    assert alike(newcomer, adapted)


def test_models_and_key() -> None:
    """Adapting steps come after the rounds; the order of the gradient belongs to them."""
    assert PerFedAvg(adapt_steps=5).training() == PerFedAvg().training()
    assert PerFedAvg(order="exact").training() != PerFedAvg().training()
    assert PerFedAvg(adapt_lr=0.5).training() != PerFedAvg().training()
    sent, deployed = Sent(line((0, 0))), line((1, 1))
    assert PerFedAvg().models(sent, deployed) == {"personal": deployed, "global": sent.shared}


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("adapt_lr", 0.0, "above 0"),
        ("adapt_steps", 0, "at least 1"),
        ("delta", 0.0, "above 0"),
        ("order", "second", "one of 'first', 'hessian-free', 'exact'"),
    ],
)
def test_settings_out_of_range_are_refused(field: str, value: object, rule: str) -> None:
    refuses(PerFedAvg, field, value, rule)


@pytest.mark.parametrize(("order", "parts"), [("first", 2), ("exact", 2), ("hessian-free", 3)])
def test_a_batch_too_small_to_be_dealt_is_refused(order: str, parts: int) -> None:
    """A part without examples has no slope: the model would never move, or never be corrected."""
    PerFedAvg(order=order, batch=parts)
    with pytest.raises(ConfigError, match=f"batch is {parts - 1}, .*expected at least {parts}"):
        PerFedAvg(order=order, batch=parts - 1)
