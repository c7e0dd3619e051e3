"""FedEM by hand."""

import math

import pytest
import torch
from torch import nn

from idiolect.core import tree
from idiolect.core.client import Batch
from idiolect.core.method import Report, Sent
from idiolect.methods import FedAvg, FedEM
from idiolect.methods.fedem import Weighted
from methods.tiny import (
    HIGH,
    Chain,
    Examples,
    alike,
    chance,
    client,
    close,
    line,
    pair,
    plus,
    refuses,
    setup,
    sigmoid,
)

LOW = (-HIGH[0], -HIGH[1])  # z = −ln 9 at x = 2
BOTH = Sent(tree.stack([line(HIGH), line(LOW)]))
TWO: Examples = [(2.0, 1), (2.0, 0)]


def tensor(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_round(stacked: bool) -> None:
    """At x = 2 the first model gives the label 1 a chance of 9/10, the second of 1/10.

    With weights ¾ and ¼ the first is likely by (¾ · 9/10) / (¾ · 9/10 + ¼ · 1/10) = 27/28 for the
    example of label 1, and by (¾ · 1/10) / (¾ · 1/10 + ¼ · 9/10) = 1/4 for that of label 0. The new
    weight is the mean. Each model's gradient (p − y) (x, 1) counts as much, over both examples.
    """
    local = client(TWO, stacked=stacked)
    report, weights = FedEM(components=2, lr=0.1).client_step(BOTH, tensor([0.75, 0.25]), local)
    first = [27 / 28, 1 / 4]
    assert weights.tolist() == close([sum(first) / 2, 1 - sum(first) / 2])
    for n, at in enumerate((HIGH, LOW)):
        likely = first if n == 0 else [1 - one for one in first]
        p = chance(at, 2.0)
        slope = (likely[0] * (p - 1) + likely[1] * p) / 2
        trained = tree.map(lambda leaf, n=n: leaf[n], report.params)
        assert pair(trained) == close(plus(at, -0.1 * slope, (2.0, 1.0)))
    assert float(report.size) == 2


def test_examples_keep_their_components_for_the_round() -> None:
    """In the second pass models have moved, but likelihoods are of those that were received."""
    method = FedEM(components=2, lr=0.1, epochs=2)
    report, _ = method.client_step(BOTH, tensor([0.5, 0.5]), client([(2.0, 1)]))
    at = HIGH
    for _ in range(2):
        at = plus(at, -0.1 * 0.9 * (chance(at, 2.0) - 1), (2.0, 1.0))
    assert pair(tree.map(lambda leaf: leaf[0], report.params)) == close(at)


def test_the_server_averages_each_model_by_examples() -> None:
    reports = Report({"w": tensor([[1.0, 2.0], [5.0, 6.0]])}, tensor([1.0, 3.0]))
    new = FedEM(components=2).server_step({"w": tensor([0.0, 0.0])}, torch.arange(2), reports)
    assert new["w"].tolist() == close([4.0, 5.0])


def test_probabilities_are_mixed() -> None:
    """¾ · 9/10 + ¼ · 1/10 = 7/10."""
    method = FedEM(components=2)
    used = method.deploy(BOTH, tensor([0.75, 0.25]), client())
    logits = method.predict(used, tensor([2.0]), client())
    assert logits.softmax(-1)[0].tolist() == close([0.3, 0.7])
    assert method.models(BOTH, used).keys() == {"personal"}
    alone = method.predict(Weighted(BOTH.shared, tensor([1.0, 0.0])), tensor([2.0]), client())
    assert alone.softmax(-1)[0].tolist() == close([0.1, 0.9])


def test_a_newcomer_finds_its_weights() -> None:
    """Of a label 1 alone: odds of the first model grow ninefold in each step."""
    used = FedEM(components=2, newcomer_steps=2).adapt(BOTH, tensor([0.5, 0.5]), client())
    assert used.weights.tolist() == close([81 / 82, 1 / 82])
    assert alike(used.models, BOTH.shared)


def test_without_examples_nothing_is_found() -> None:
    weights = tensor([0.75, 0.25])
    report, kept = FedEM(components=2).client_step(BOTH, weights, client([]))
    assert torch.equal(kept, weights) and alike(report.params, BOTH.shared)


def test_one_component_is_fedavg() -> None:
    start = setup(Chain(0.7, -0.4))
    local = lambda: client(TWO, main=Chain(0, 0))  # noqa: E731
    plain, _ = FedAvg(lr=0.3, epochs=2).client_step(Sent(start.params), (), local())
    method = FedEM(components=1, lr=0.3, epochs=2)
    sent = method.send(method.init_server(start), torch.arange(1))
    report, weights = method.client_step(sent, method.init_personal(start), local())
    assert weights.tolist() == [1.0]
    for name, leaf in plain.params.items():
        assert report.params[name][0].tolist() == close(leaf.tolist())


class Places(nn.Module):
    """Logits [0, z_t + b] at each place t of a sequence of given z."""

    def __init__(self, b: float = 0.0) -> None:
        super().__init__()
        self.b = nn.Parameter(tensor(b))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = x + self.b
        return torch.stack([torch.zeros_like(z), z], -1)


def test_a_sequence_has_one_component() -> None:
    """By the mean of its places' losses; a place without a label does not count."""
    method, z = FedEM(components=2), [1.0, -2.0, 5.0]
    local = client(main=Places())
    batch = Batch(tensor([z]), torch.tensor([[1, 1, 0]]), tensor([[1.0, 1.0, 0.0]]), tensor([0]))
    models = [{"b": tensor(0.5)}, {"b": tensor(-0.5)}]
    found = method._likely(models, tensor([0.5, 0.5]), batch, local)
    odds = [sum(math.log(sigmoid(one + b)) for one in z[:2]) / 2 for b in (0.5, -0.5)]
    first = 1 / (1 + math.exp(odds[1] - odds[0]))
    assert found[:, 0].tolist() == close([first, 1 - first])


def test_models_begin_apart() -> None:
    start = setup(nn.Linear(8, 2, dtype=torch.float64))
    models = FedEM().init_server(start)["weight"]
    assert len(models) == 3 and not torch.equal(models[1], models[2])
    assert FedEM().init_personal(start).tolist() == close([1 / 3] * 3)


def test_settings_out_of_range_are_refused() -> None:
    refuses(FedEM, "components", 0, "at least 1")
    refuses(FedEM, "newcomer_steps", 0, "at least 1")
