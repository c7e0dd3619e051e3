"""APPLE by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import worlds
from idiolect.core import tree
from idiolect.core.method import Report, Sent
from idiolect.core.tree import Params
from idiolect.methods import APPLE, FedAvg, LocalOnly
from idiolect.methods.apple import CoreModels, Relations
from methods.tiny import Line, Pair, alike, client, close, line, pair, plus, refuses, setup, slope

LN3 = math.log(3)
UNIT = (0.4, 0.2)  # so that z = s of x = 2 under the parameters s · UNIT
EXAMPLE = [(2.0, 1)]


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def cores(*at: Pair, share: tuple[float, ...]) -> CoreModels:
    return CoreModels(tree.stack([line(one) for one in at]), tensor(share))


def kept(*away: float) -> Relations:
    return Relations(tensor(away), line((9.0, 9.0)))


OTHERS = cores(
    (-2 * LN3 * UNIT[0], -2 * LN3 * UNIT[1]),
    (2 * LN3 * UNIT[0], 2 * LN3 * UNIT[1]),
    share=(0.5, 0.5),
)
FIRST = Sent(OTHERS, tensor([1, 0]))


@pytest.mark.parametrize("stacked", [False, True])
def test_one_round_by_hand(stacked: bool) -> None:
    """Core models say z = −2 ln 3, its own, and 2 ln 3 of (2, 1); p = (1/4, 3/4), p⁰ = (1/2, 1/2).

    The mixture says −ln 3 / 2 + 3 ln 3 / 2 = ln 3, so chance 3/4 and ∇F = −1/4 · (2, 1). The own
    core model goes by −0.1 · p_ii ∇F = 0.1 / 16 · (2, 1). ⟨∇F, w_j⟩ = −z_j / 4 = (ln 3 / 2,
    −ln 3 / 2), and the pull 0.4 · (p − p⁰) = (−0.1, 0.1); both times −0.2 move p. The mixture that
    is kept is of the new p and the new core model.
    """
    method = APPLE(lr=0.1, weight_lr=0.2, pull=0.4)
    report, own = method.client_step(FIRST, kept(-0.25, 0.25), client(stacked=stacked))
    core = plus((-2 * LN3 * UNIT[0], -2 * LN3 * UNIT[1]), 0.1 / 16, (2.0, 1.0))
    p = 0.25 - 0.2 * (LN3 / 2 - 0.1), 0.75 - 0.2 * (-LN3 / 2 + 0.1)
    assert pair(report.params) == close(core) and float(report.size) == 1
    assert own.away.tolist() == close([p[0] - 0.5, p[1] - 0.5])
    other = (2 * LN3 * UNIT[0], 2 * LN3 * UNIT[1])
    mixture = plus((p[0] * core[0], p[0] * core[1]), p[1], other)
    assert pair(own.model) == close(mixture)


@pytest.mark.parametrize("fade", ["exponential", "cosine"])
@pytest.mark.parametrize("round", [0, 1, 3, 4, 9])
def test_the_pull_falls_to_nothing(fade: str, round: int) -> None:
    """By what p moves more than without a pull: −0.2 · 0.4 · λ · (p − p⁰), λ of rounds 0 to 3."""
    if fade == "cosine":
        left = (math.cos(math.pi * round / 4) + 1) / 2 * (round < 4)
    else:
        left = 0.001 ** (round / 4) * (round < 4)
    (_, pulled), (_, free) = (
        APPLE(weight_lr=0.2, pull=pull, pull_rounds=4, fade=fade).client_step(
            FIRST, kept(-0.25, 0.25), client(round=round)
        )
        for pull in (0.4, 0.0)
    )
    moved = (pulled.away - free.away).tolist()
    assert moved == close([0.08 * left * 0.25, -0.08 * left * 0.25])


def test_without_rounds_of_a_pull_there_is_none() -> None:
    (_, off), (_, free) = (
        APPLE(pull=pull, pull_rounds=0).client_step(FIRST, kept(-0.25, 0.25), client())
        for pull in (3.0, 0.0)
    )
    assert alike(off, free)


def test_the_rate_may_grow_with_the_clients() -> None:
    """Two take part: twice the step. One without examples counts for nothing, and has no p."""
    three = cores(*[pair(tree.take(OTHERS.models, torch.tensor(n))) for n in (0, 1)], (5.0, 5.0),
                  share=(0.5, 0.5, 0.0))  # fmt: skip
    sent = Sent(three, tensor([1, 0, 0]))
    ends = [
        APPLE(lr=0.1, scale_lr=scaled).client_step(sent, kept(-0.25, 0.25, 0.0), client())
        for scaled in (False, True)
    ]
    start = pair(tree.take(three.models, torch.tensor(0)))
    once, twice = (pair(report.params) for report, _ in ends)
    assert once == close(plus(start, 0.1 / 16, (2.0, 1.0)))
    assert twice == close(plus(start, 0.2 / 16, (2.0, 1.0)))
    assert float(ends[0][1].away[2]) == 0
    plain = APPLE(lr=0.1).client_step(FIRST, kept(-0.25, 0.25), client())[0]
    assert alike(ends[0][0], plain)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_is_sgd_on_the_mixture(momentum: float) -> None:
    """Three steps beside `torch.optim.SGD` with the core model and p as its two groups."""
    start = [(0.3, -0.2), (1.0, 0.4), (-0.5, 0.1)]
    examples = [(2.0, 1), (-1.0, 0), (0.5, 1)]
    method = APPLE(lr=0.3, weight_lr=0.1, pull=0.5, batch=1, momentum=momentum)
    sent = Sent(cores(*start, share=(0.2, 0.3, 0.5)), tensor([0, 1, 0]))
    report, own = method.client_step(sent, kept(0.1, 0.0, -0.1), client(examples))

    core = tensor(start[1]).requires_grad_()
    p, shares = tensor([0.3, 0.3, 0.4]).requires_grad_(), tensor([0.2, 0.3, 0.5])
    optimiser = torch.optim.SGD(
        [{"params": [core], "lr": 0.3}, {"params": [p], "lr": 0.1}], lr=1.0, momentum=momentum
    )
    for x, y in examples:
        optimiser.zero_grad()
        w, b = p[0] * tensor(start[0]) + p[1] * core + p[2] * tensor(start[2])
        logits = torch.stack([tensor(0.0), w * x + b])
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(y))
        (loss + 0.5 / 2 * (p - shares).square().sum()).backward()
        optimiser.step()
    assert pair(report.params) == close(tuple(core.tolist()))
    assert (own.away + shares).tolist() == close(p.tolist())


def test_a_schedule_is_of_both_rates() -> None:
    """After two rounds a quarter of each: as with a quarter of the rates and no schedule."""
    fading = APPLE(lr=0.4, weight_lr=0.2, schedule="exponential", decay=0.5)
    ends = [
        method.client_step(FIRST, kept(-0.25, 0.25), client(round=2))
        for method in (fading, APPLE(lr=0.1, weight_lr=0.05))
    ]
    assert pair(ends[0][0].params) == close(pair(ends[1][0].params))
    assert ends[0][1].away.tolist() == close(ends[1][1].away.tolist())


def run(method: Any, sizes: tuple[int, ...], rounds: int = 3, **options: Any) -> Any:
    simulation = worlds.simulation(method, worlds.federation(sizes), **options)
    for _ in range(rounds):
        simulation.advance()
    return simulation


def test_a_client_alone_with_a_fixed_weight_trains_alone(float64: None) -> None:
    """Its one weight is 1: the mixture is its core model."""
    same = {"batch": 3, "lr": 0.3, "momentum": 0.5, "epochs": 2}
    one, other = (run(kind, (7,)) for kind in (APPLE(weight_lr=0.0, **same), LocalOnly(**same)))
    (relations,), (plain,) = one.tree["personal"], other.tree["personal"]
    assert not worlds.differing(relations.model, plain, 1e-12)


def test_with_fixed_equal_weights_and_one_step_it_is_fedavg(float64: None) -> None:
    """Each core model goes by −N η (1/N) ∇F_i at the mean of all; their mean by −η mean ∇F_i."""
    same = {"batch": 9, "steps": 1, "lr": 0.3}
    apple = run(APPLE(weight_lr=0.0, scale_lr=True, **same), (6, 6, 6))
    plain = run(FedAvg(**same), (6, 6, 6))
    mean = tree.map(lambda leaf: leaf.mean(0), apple.states[0].models)
    assert not worlds.differing(mean, plain.states[0], 1e-12)


def test_core_models_and_relationships_are_learned(float64: None) -> None:
    """With other clients' models the relationships leave p⁰, unlike one client's from another's."""
    simulation = run(APPLE(batch=3, lr=0.3, weight_lr=0.1), (6, 4, 5), rounds=2)
    away = simulation.tree["personal"][0].away
    assert (away.abs() > 1e-6).all() and (away[0] - away[1]).abs().max() > 1e-6


def test_everyone_is_sent_all_core_models_and_which_is_its_own() -> None:
    """That is what crosses the network: three models for each of two clients."""
    method = APPLE()
    state = method.init_server(setup(Line(0.5), sizes=(1, 3, 0)))
    sent = method.send(state, torch.tensor([2, 0]))
    assert sent.shared.models["w"].tolist() == [0.5] * 3
    assert sent.shared.share.tolist() == [0.25, 0.75, 0.0]
    assert sent.own.tolist() == [[0, 0, 1], [1, 0, 0]]
    assert method.welcome(state, torch.arange(2)).own.tolist() == [[0, 0, 0]] * 2
    assert method.models(sent, ()) == {}


def test_the_server_takes_core_models_in_and_nothing_else() -> None:
    report = Report({name: leaf[None] for name, leaf in line((7.0, 8.0)).items()}, tensor([1.0]))
    new = APPLE().server_step(OTHERS, torch.tensor([1]), report)
    assert new.models["w"].tolist() == [close(-0.8 * LN3), 7.0]
    assert alike(new.share, OTHERS.share)


def test_relationships_do_not_leave_the_client() -> None:
    report, _ = APPLE(lr=0.1).client_step(FIRST, kept(-0.25, 0.25), client())
    assert sorted(report.params) == ["b", "w"] and report.params["w"].shape == ()


def test_a_newcomer_trains_the_mean_by_shares() -> None:
    """1/4 of (1, 0) and 3/4 of (0, 2) are (1/4, 3/2)."""
    method = APPLE(lr=0.1)
    state = cores((1.0, 0.0), (0.0, 2.0), share=(0.25, 0.75))
    sent = method.welcome(state, torch.arange(1))
    fresh = Relations(tensor([0.0]), line((9.0, 9.0)))  # of a federation of its own
    found = method.adapt(Sent(sent.shared, sent.own[0]), fresh, client())
    assert pair(found) == close(plus((0.25, 1.5), -0.1, slope((0.25, 1.5), EXAMPLE)))


@pytest.mark.parametrize("kind", ["sequential", "vectorised"])
def test_running_statistics_are_the_clients_own(kind: str, float64: None) -> None:
    """The mixture has those of the core model that the client reports, not a mean of all."""
    simulation = run(
        APPLE(batch=4, lr=0.1), (6, 4, 5), rounds=2, kind=kind, build=worlds.Batched
    )  # fmt: skip
    (relations,), state = simulation.tree["personal"], simulation.states[0]
    for name in ("norm.running_mean", "norm.running_var"):
        found: Params = relations.model
        assert torch.equal(found[name], state.models[name])
        assert (found[name][0] - found[name][1]).abs().max() > 1e-3
    assert (state.models["norm.running_var"] > 0).all()


def test_settings_out_of_range_are_refused() -> None:
    refuses(APPLE, "weight_lr", -0.1, "at least 0")
    refuses(APPLE, "pull_rounds", -1, "at least 0")
    refuses(APPLE, "fade", "linear", "one of 'exponential', 'cosine'")
