"""SCAFFOLD by hand."""

import pytest
import torch

import worlds
from idiolect.core.method import Sent
from idiolect.methods import FedAvg, FedDyn, Scaffold
from idiolect.methods.scaffold import Controlled, ControlReport
from methods.tiny import Line, alike, client, close, line, minus, pair, plus, setup, slope

TWO = [(2.0, 1), (-1.0, 0)]


def sent(at: tuple[float, float], control: tuple[float, float]) -> Sent:
    return Sent(Controlled(line(at), line(control), torch.tensor(4.0, dtype=torch.float64)))


@pytest.mark.parametrize("stacked", [False, True])
def test_one_step_by_hand(stacked: bool) -> None:
    """X = (0, 0), example (2, 1), lr 0.1, c = (0.3, −0.1), c_i = (0.1, 0.2): g = (−1, −1/2).

    The step goes along g − c_i + c = (−0.8, −0.8). After a single step (x − y) / (K η) is that, so
    c_i becomes g: the change is g − c_i = (−1.1, −0.7).
    """
    local = client(stacked=stacked)
    report, own = Scaffold(lr=0.1).client_step(sent((0, 0), (0.3, -0.1)), line((0.1, 0.2)), local)
    assert pair(report.params) == close((0.08, 0.08))
    assert pair(report.change) == close((-1.1, -0.7))
    assert pair(own) == close((-1.0, -0.5))


def test_after_several_steps_the_control_variate_is_the_mean_gradient() -> None:
    at, control, own, slopes = (0.4, -0.3), (0.3, -0.1), (0.1, 0.2), []
    for example in TWO * 2:
        slopes.append(slope(at, [example]))
        at = plus(at, -0.1, plus(minus(slopes[-1], own), 1, control))
    method = Scaffold(lr=0.1, batch=1, epochs=2)
    report, kept = method.client_step(sent((0.4, -0.3), control), line(own), client(TWO))
    assert pair(report.params) == close(at)
    assert pair(kept) == close((sum(g for g, _ in slopes) / 4, sum(g for _, g in slopes) / 4))


@pytest.mark.parametrize(
    ("uniform", "mean", "control"), [(True, 2.0, 0.7), (False, 2.5, 0.5 + 2 / 9)]
)
def test_the_server_by_hand(uniform: bool, mean: float, control: float) -> None:
    """Two of four clients: x = 1 moves half the way to their mean; c = 0.5 by (0.2 + 0.6) / 4.

    By examples, 1 and 3 of nine, c moves by (1 · 0.2 + 3 · 0.6) / 9 = 2/9.
    """

    def leaf(*values: float) -> dict[str, torch.Tensor]:
        return {"w": torch.tensor(values, dtype=torch.float64)}

    whole = torch.tensor(4.0 if uniform else 9.0)
    state = Controlled({"w": leaf(1.0)["w"][0]}, {"w": leaf(0.5)["w"][0]}, whole)
    reports = ControlReport(leaf(1.0, 3.0), leaf(0.2, 0.6), leaf(1.0, 3.0)["w"])
    method = Scaffold(server_lr=0.5, uniform=uniform)
    new = method.server_step(state, torch.tensor([0, 3]), reports)
    assert float(new.params["w"]) == close(1 + 0.5 * (mean - 1))
    assert float(new.control["w"]) == close(control)
    assert float(new.clients) == whole


def test_the_first_round_of_everyone_is_fedavgs() -> None:
    start = setup(Line(0.4, -0.3), sizes=(2, 0, 5))
    method = Scaffold(lr=0.3, batch=1)
    state = method.init_server(start)
    assert float(state.clients) == 2  # who has nothing to train on never comes
    report, _ = method.client_step(Sent(state), method.init_personal(start), client(TWO))
    plain, _ = FedAvg(lr=0.3, batch=1).client_step(Sent(start.params), (), client(TWO))
    assert alike(report.params, plain.params)
    assert alike(method.models(Sent(state), state.params)["global"], start.params)


@pytest.mark.parametrize("kind", [Scaffold, FedDyn])
@pytest.mark.parametrize("uniform", [True, False])
def test_it_settles_where_the_weights_say(kind, uniform: bool, float64) -> None:
    """Softmax regression with decay is convex: at the minimum the weighed gradients cancel."""
    world = worlds.federation((7, 2, 5), (0, 0, 0))
    method = kind(batch=100, epochs=3, lr=0.5, weight_decay=0.1, uniform=uniform)
    simulation = worlds.simulation(method, world, build=worlds.Plain)
    for _ in range(60):
        simulation.advance()
    found = {n: leaf.requires_grad_() for n, leaf in simulation.states[0].params.items()}
    lost = torch.zeros(())
    for rows in world.train:
        x, y = torch.tensor(world.dataset.x[rows]).double(), torch.tensor(world.dataset.y[rows])
        logits = x @ found["only.weight"].T + found["only.bias"]
        share = 1 / 3 if uniform else len(rows) / 14
        lost = lost + share * torch.nn.functional.cross_entropy(logits, y)
    lost = lost + 0.1 / 2 * sum(leaf.square().sum() for leaf in found.values())
    slopes = torch.autograd.grad(lost, list(found.values()))
    assert max(float(leaf.abs().max()) for leaf in slopes) < 5e-3
