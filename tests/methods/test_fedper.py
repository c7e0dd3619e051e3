"""FedPer by hand."""

import math

import pytest
import torch

from idiolect.core import capabilities, tree
from idiolect.core.method import Sent
from idiolect.errors import ConfigError
from idiolect.methods import FedAvg, FedPer
from methods.tiny import Chain, Ordered, alike, client, close, refuses, setup

LN3 = math.log(3)
EXAMPLES = [(2.0, 1), (-1.0, 0)]


def tensor(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def numbers(params: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in params.items()}


@pytest.mark.parametrize("stacked", [False, True])
def test_one_step_by_hand(stacked: bool) -> None:
    """Z = b · a · x with base a = 1, head b = ln 3 / 2, example (2, 1): z = ln 3, p = 3/4.

    With p − y = −1/4: ∂/∂a = −(1/4) b x = −ln 3 / 4, ∂/∂b = −(1/4) a x = −1/2. At lr = 0.1 the base
    becomes 1 + ln 3 / 40, which is reported, and the head ln 3 / 2 + 1/20, which is kept.
    """
    local = client(main=Chain(1.0, LN3 / 2), stacked=stacked)
    sent, head = Sent({"a.w": tensor(1.0)}), {"b.w": tensor(LN3 / 2)}
    report, kept = FedPer(lr=0.1).client_step(sent, head, local)
    assert numbers(report.params) == close({"a.w": 1 + LN3 / 40})
    assert numbers(kept) == close({"b.w": LN3 / 2 + 0.05})
    assert float(report.size) == 1


def test_the_head_persists_and_never_leaves() -> None:
    """Two rounds: the second starts from the first one's head, on whatever base then arrives."""
    model = Chain(1.0, 0.5)
    method = FedPer(lr=0.1)
    head = method.init_personal(setup(model))
    a, b = 1.0, 0.5
    for base in (1.0, 3.0):  # the server's base, round by round
        report, head = method.client_step(Sent({"a.w": tensor(base)}), head, client(main=model))
        error = 1 / (1 + math.exp(-2 * base * b)) - 1
        a, b = base - 0.1 * error * b * 2, b - 0.1 * error * base * 2
        assert list(report.params) == ["a.w"]
        assert numbers(report.params) == close({"a.w": a})
        assert numbers(head) == close({"b.w": b})
    deployed = method.deploy(Sent({"a.w": tensor(9.0)}), head, client(main=model))
    assert numbers(deployed) == close({"a.w": 9.0, "b.w": b})


@pytest.mark.parametrize(
    ("layers", "base"), [(0, ["a.w", "b.w", "c.w"]), (1, ["a.w", "b.w"]), (2, ["a.w"]), (3, [])]
)
def test_the_last_layers_are_the_head(layers: int, base: list[str]) -> None:
    told = setup(Chain(1.0, 2.0, 3.0))
    method = FedPer(head_layers=layers)
    assert list(method.init_server(told)) == base
    assert list(method.init_personal(told)) == [n for n in ("a.w", "b.w", "c.w") if n not in base]


def test_a_layers_weight_and_bias_stay_together() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
    method = FedPer(head_layers=1)
    assert list(method.init_personal(setup(model))) == ["2.weight", "2.bias"]
    assert list(method.init_server(setup(model))) == ["0.weight", "0.bias"]


def test_more_layers_than_there_are_is_an_error() -> None:
    with pytest.raises(ConfigError, match="3 last layers asked for, but the network has 2"):
        FedPer(head_layers=3).init_server(setup(Chain(1.0, 2.0)))


def test_without_a_head_it_is_fedavg() -> None:
    """What is sent, and what the server makes of two reports, to the last bit."""
    model = Chain(0.7, -0.4)
    settings = {"lr": 0.3, "epochs": 3, "batch": 1, "momentum": 0.5, "server_lr": 0.5}
    states = []
    for method in (FedPer(head_layers=0, **settings), FedAvg(**settings)):
        told = setup(model)
        state, personal = method.init_server(told), method.init_personal(told)
        reports = [
            method.client_step(Sent(state), personal, client(examples, main=model))[0]
            for examples in (EXAMPLES, EXAMPLES[:1])
        ]
        state = method.server_step(state, torch.tensor([0, 1]), tree.stack(reports))
        states.append((reports, state))
        assert alike(capabilities.adapt(method, Sent(state), personal, client(main=model)), state)
    assert alike(*states)


def test_a_newcomer_trains_the_head_alone() -> None:
    """On the base a = 2 the head follows b ← b − lr (p − 1) · 2 · 2 for two passes over (2, 1).

    The rounds' own `epochs` and `steps` play no part, and only training data are asked for.
    """
    b = 0.5
    for _ in range(2):
        b -= 0.1 * (1 / (1 + math.exp(-4 * b)) - 1) * 4
    method = FedPer(lr=0.1, newcomer_epochs=2, epochs=7, steps=9)
    plans = Ordered({"train": [(2.0, 1)]})
    local = client(main=Chain(1.0, 0.5), plans=plans)
    adapted = method.adapt(Sent({"a.w": tensor(2.0)}), {"b.w": tensor(0.5)}, local)
    assert numbers(adapted) == close({"a.w": 2.0, "b.w": b})
    assert plans.asked == ["train"]


def test_a_newcomers_head_has_momentum_and_weight_decay() -> None:
    """Nesterov's form: u = 0.9 u + g and b ← b − lr (g + 0.9 u), with g = (p − 1) · 4 + 0.1 b."""
    b, velocity = 0.5, 0.0
    for _ in range(3):
        gradient = (1 / (1 + math.exp(-4 * b)) - 1) * 4 + 0.1 * b
        velocity = gradient + 0.9 * velocity
        b -= 0.1 * (gradient + 0.9 * velocity)
    method = FedPer(lr=0.1, newcomer_epochs=3, momentum=0.9, nesterov=True, weight_decay=0.1)
    local = client(main=Chain(1.0, 0.5))
    adapted = method.adapt(Sent({"a.w": tensor(2.0)}), {"b.w": tensor(0.5)}, local)
    assert numbers(adapted) == close({"a.w": 2.0, "b.w": b})


def test_there_is_no_global_model() -> None:
    whole = {"a.w": tensor(2.0), "b.w": tensor(0.5)}
    assert FedPer().models(Sent({"a.w": tensor(2.0)}), whole) == {"personal": whole}


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [("head_layers", -1, "at least 0"), ("newcomer_epochs", 0, "at least 1")],
)
def test_settings_out_of_range_are_refused(field: str, value: object, rule: str) -> None:
    refuses(FedPer, field, value, rule)
