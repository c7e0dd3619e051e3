"""GPFL against plain torch, and its parts by hand."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from idiolect.core.client import Plan, Pool, Request
from idiolect.core.method import Sent
from idiolect.methods import GPFL
from idiolect.methods.gpfl import Guided, GuidedHead, valve
from methods.tiny import Split, client, close, refuses, setup

X = torch.tensor([[1.0, -2.0], [0.5, 1.0], [-1.0, 0.3]], dtype=torch.float64)
Y = torch.tensor([0, 2, 2])


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


class OneBatch:
    """A plan of one batch: the three examples above."""

    def ask(self, request: Request) -> Plan:
        rows, weight = torch.arange(3).reshape(1, 1, 3), torch.ones(1, 1, 3, dtype=torch.float64)
        return Plan(Pool(X, Y), rows, weight, 1, 3)


class Small(nn.Module):
    """Two features in, four to the head, three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 4, dtype=torch.float64)
        self.out = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.body(x).tanh())


def conditional() -> nn.Sequential:
    norm = nn.LayerNorm(4, dtype=torch.float64)
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    return nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.ReLU(), norm)


@pytest.mark.parametrize(
    ("stacked", "released"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_one_step_against_plain_torch(stacked: bool, released: bool) -> None:
    """Autograd on the loss, written with torch's own layers: every leaf moves alike.

    The paper's, and the released code's: c of other embeddings, one norm over the batch.
    """
    torch.manual_seed(3)
    model, gamma, beta = Small(), conditional(), conditional()
    embeddings = nn.Embedding(3, 4, dtype=torch.float64)
    received, prior = embeddings.weight.detach().clone(), tensor([1 / 3, 0.0, 2 / 3])
    made_of = torch.randn(3, 4, dtype=torch.float64) if released else received
    general, own = made_of.mean(0), made_of[0] / 3 + 2 * made_of[2] / 3
    state = {n: p.detach().clone() for n, p in model.named_parameters()}
    head = {n: state.pop(n) for n in ("out.weight", "out.bias")}
    state["gpfl.embeddings"] = received
    for part, made in (("gamma", gamma), ("beta", beta)):
        names = ("weight", "bias", "scale", "shift")
        for name, leaf in zip(names, made.parameters(), strict=True):
            state[f"gpfl.{part}.{name}"] = leaf.detach().clone()

    features = model.body(X).tanh()
    mine = (features * (gamma(own) + 1) + beta(own)).relu()
    guided = (features * (gamma(general) + 1) + beta(general)).relu()
    cosines = functional.cosine_similarity(guided.unsqueeze(1), embeddings.weight, dim=-1)
    extra = [embeddings.weight, *gamma.parameters(), *beta.parameters()]
    off = (guided - received[Y]).norm(dim=1)
    loss = (
        functional.cross_entropy(model.out(mine), Y)
        + functional.cross_entropy(cosines, Y)
        + 0.3 * ((guided - received[Y]).norm() if released else off.mean())
        + 0.2 / 2 * sum(leaf.square().sum() for leaf in extra)
    )
    loss.backward()

    how = {"conditions": "trained", "distance": "batch"} if released else {}
    method = GPFL(lr=0.1, guide=0.3, extra_decay=0.2, **how)
    local = client(main=model, plans=OneBatch(), stacked=stacked)
    held = GuidedHead(head, prior, {"embeddings": made_of} if released else {})
    report, kept = method.client_step(Sent(state), held, local)
    stepped = {
        n: p.detach() - 0.1 * p.grad for n, p in model.named_parameters() if p.grad is not None
    }
    for name in ("out.weight", "out.bias"):
        assert torch.allclose(kept.head[name], stepped[name])
    for name in ("body.weight", "body.bias"):
        assert torch.allclose(report.params[name], stepped[name])
    named = dict(zip([n for n in state if n.startswith("gpfl.")], extra, strict=True))
    for name, leaf in named.items():
        assert leaf.grad is not None
        assert torch.allclose(report.params[name], leaf.detach() - 0.1 * leaf.grad), name
    assert not set(kept.head) & set(report.params)
    if released:  # what it has just trained makes c from now on, in use as well
        assert torch.equal(kept.conditions["embeddings"], report.params["gpfl.embeddings"])
        mean = prior @ kept.conditions["embeddings"]
        extra_of = {n: leaf for n, leaf in state.items() if n.startswith("gpfl.")}
        personal = valve(extra_of, model.body(X).tanh().detach(), mean)
        found = method.predict(method.deploy(Sent(state), kept, local), X, local)
        expected = functional.linear(personal, kept.head["out.weight"], kept.head["out.bias"])
        assert torch.allclose(found, expected)
    else:
        assert kept.conditions == {}


def test_the_valve_by_hand() -> None:
    """Where γ is 1 and β is −3, features 1 and 2 become ReLU(2 · 1 − 3) = 0 and 2 · 2 − 3 = 1."""
    extra = {
        f"gpfl.{part}.{name}": tensor(value)
        for part, shift in (("gamma", 1.0), ("beta", -3.0))
        for name, value in {
            "weight": [[0.0, 0.0]] * 2, "bias": [0.0] * 2, "scale": [0.0] * 2, "shift": [shift] * 2,
        }.items()
    }  # fmt: skip
    assert valve(extra, tensor([[1.0, 2.0]]), tensor([5.0, 5.0])).tolist() == [[0.0, 1.0]]


def test_classes_are_counted_and_the_state_has_no_head() -> None:
    start = setup(Split(1.0, 0.5))._replace(features=(4,))
    state = GPFL().init_server(start)
    assert state["gpfl.embeddings"].shape == (2, 4) and "b.w" not in state
    own = GPFL().init_personal(start)
    local = client([(1.0, 0), (4.0, 1), (2.0, 0), (5.0, 0)], main=Split(1.0, 0.0))
    assert GPFL().prepare(Sent(), own, local).prior.tolist() == close([0.75, 0.25])
    released = GPFL(conditions="trained").init_personal(start).conditions
    assert own.conditions == {} and released["embeddings"].tolist() == [[0.0] * 4] * 2


def test_a_newcomer_counts_its_classes_and_trains_a_head() -> None:
    torch.manual_seed(0)
    start = setup(Small())._replace(features=(4,), classes=3)
    method = GPFL(lr=0.1, newcomer_epochs=1)
    state = method.init_server(start)
    local = client(main=Small(), plans=OneBatch())
    found = method.adapt(Sent(state), method.init_personal(start), local)
    assert found.prior.tolist() == close([1 / 3, 0, 2 / 3])
    before = Guided(state, method.init_personal(start).head, found.prior, {})
    losses = [
        float(functional.cross_entropy(method.predict(model, X, local), Y))
        for model in (before, found)
    ]
    assert losses[1] < losses[0]
    assert found.params is state


def test_settings_out_of_range_are_refused() -> None:
    refuses(GPFL, "guide", -1.0, "at least 0")
    refuses(GPFL, "extra_decay", -1.0, "at least 0")
