"""pFedHN: the server's step against autograd and by hand."""

import pytest
import torch

from idiolect.core.method import Sent
from idiolect.methods import PFedHN
from idiolect.methods.pfedhn import Change, Hyper, Writer, written
from methods.tiny import HIGH, Line, client, close, line, pair, plus, refuses, setup, slope


def hyper(**settings):
    plain = {"server_momentum": 0.0, "server_decay": 0.0, "server_clip": 0.0}
    return PFedHN(**{"hidden": 4, "layers": 2, **plain, **settings})


def started(method, clients=3):
    return method.init_server(setup(Line(0.5, -0.5), sizes=(1.0,) * clients))


def changes(seed=0, clients=2):
    draw = torch.Generator().manual_seed(seed)
    change = {n: torch.randn(clients, generator=draw, dtype=torch.float64) for n in "wb"}
    return Change(change, {}, torch.ones(clients).double())


def test_by_hand():
    """One hidden unit, weight 2, bias 1; v = 3 gives 7. Heads 1 and 0.5, biases 0 and 10.

    θ = (7, 13.5). For Δ = (0.4, −0.2): ∂/∂heads = 7 Δ, ∂/∂biases = Δ, and through the unit
    s = 0.4 · 1 − 0.2 · 0.5 = 0.3: ∂/∂weight = 3 s, ∂/∂bias = s, ∂/∂v = 2 s.
    """

    def number(*values):
        return torch.tensor(values, dtype=torch.float64)

    network = Hyper(
        ((number(2.0).reshape(1, 1), number(1.0)),),
        {"w": number(1.0), "b": number(0.5)},
        {"w": number(0.0).squeeze(), "b": number(10.0).squeeze()},
    )
    state = Writer(
        network,
        number(9.0, 3.0).reshape(2, 1),
        torch.utils._pytree.tree_map(torch.zeros_like, network),
        torch.zeros(2, 1).double(),
        {},
    )
    method = hyper(hidden=1, layers=1, server_lr=0.1)
    cohort = torch.tensor([1])
    sent = method.send(state, cohort)
    assert (float(sent.own["w"]), float(sent.own["b"])) == close((7.0, 13.5))
    report = Change({"w": number(0.4), "b": number(-0.2)}, {}, number(1.0))
    new = method.server_step(state, cohort, report)
    assert float(new.network.body[0][0]) == close(2 - 0.1 * 0.9)
    assert float(new.network.body[0][1]) == close(1 - 0.1 * 0.3)
    assert float(new.network.heads["w"]) == close(1 - 0.1 * 2.8)
    assert float(new.network.heads["b"]) == close(0.5 + 0.1 * 1.4)
    assert float(new.network.biases["w"]) == close(-0.04)
    assert new.embeddings.flatten().tolist() == close([9.0, 3 - 0.1 * 0.6])


def test_the_product_is_autograds():
    """The step along Jᵀ Δ is the gradient of ⟨θ(φ, v), Δ⟩, its mean over the cohort for φ."""
    method = hyper(server_lr=1.0, server_steps="cohort")
    state, cohort, reports = started(method), torch.tensor([2, 0]), changes()
    new = method.server_step(state, cohort, reports)
    leaves, form = torch.utils._pytree.tree_flatten((state.network, state.embeddings))
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    network, embeddings = torch.utils._pytree.tree_unflatten(leaves, form)
    models = written(network, embeddings[cohort])
    total = sum((models[n] * reports.change[n]).sum() for n in "wb")
    *slopes, own = torch.autograd.grad(total, leaves)
    after = torch.utils._pytree.tree_leaves(new.network)
    for before, slope_, now in zip(leaves, slopes, after, strict=False):
        assert torch.allclose(before.detach() - slope_ / 2, now)
    assert torch.allclose(state.embeddings - own, new.embeddings)
    assert torch.equal(state.embeddings[1], new.embeddings[1])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_cohort_is_as_many_rounds_of_one_client(order):
    """Algorithm 1 has a step for a client: two reports are two steps, in the clients' order.

    The second client's Δ is what is left of its way after the first step. Momentum, decay and
    clipping are in it. Along the mean it would be one step.
    """
    method = hyper(server_lr=0.1, server_momentum=0.9, server_decay=1e-3, server_clip=0.5)
    state, reports, rows = started(method), changes(), torch.tensor(order)
    shuffled = Change({n: leaf[rows] for n, leaf in reports.change.items()}, {}, reports.size)
    cohort = torch.tensor([0, 2])
    new = method.server_step(state, cohort[rows], shuffled)
    first = method.send(state, cohort).own
    for place in (0, 1):
        one = cohort[place : place + 1]
        now = method.send(state, one).own
        trained = {n: first[n][place] - reports.change[n][place] for n in "wb"}
        left = Change({n: now[n] - trained[n] for n in "wb"}, {}, reports.size[:1])
        state = method.server_step(state, one, left)
    pairs = zip(*map(torch.utils._pytree.tree_leaves, (new, state)), strict=True)
    assert all(torch.allclose(left, right, atol=1e-12) for left, right in pairs)


def test_many_reports_of_one_mind_do_not_overshoot():
    """Twenty clients trained to one model, at the authors' rates: nine tenths of the way."""
    method = PFedHN(server_decay=0.0)
    state = started(method, clients=20)
    cohort, goal = torch.arange(20), {"w": 1.0, "b": 0.0}
    for _ in range(30):
        sent = method.send(state, cohort).own
        change = {n: sent[n] - goal[n] for n in "wb"}
        state = method.server_step(state, cohort, Change(change, {}, torch.ones(20).double()))
    sent = method.send(state, cohort).own
    assert all(float((sent[n] - goal[n]).abs().max()) < 0.05 for n in "wb")


@pytest.mark.parametrize("stacked", [False, True])
def test_a_client_reports_how_far_its_model_moved(stacked):
    start = (0.3, -0.2)
    end = plus(start, -0.5, slope(start, [(2.0, 1)]))
    sent = Sent({}, line(start))
    report, kept = hyper(lr=0.5).client_step(sent, (), client(stacked=stacked))
    assert pair(report.change) == close(plus(start, -1, end))
    assert kept == () and report.statistics == {}
    assert pair(hyper().deploy(sent, (), client())) == start


def test_momentum_decay_and_clipping():
    """Two steps with the same report at lr = 1 against the formulas, leaf by leaf."""
    method = hyper(
        server_lr=0.1,
        server_momentum=0.5,
        server_decay=0.2,
        server_clip=1e-3,
        server_steps="cohort",
    )
    state, cohort, reports = started(method), torch.tensor([0, 1]), changes()
    product = torch.func.vjp(written, state.network, state.embeddings[cohort])[1]
    raw = product(reports.change)[0]
    length = sum((leaf / 2).square().sum() for leaf in torch.utils._pytree.tree_leaves(raw)).sqrt()
    clipped = raw.biases["w"] / 2 * (1e-3 / length)
    velocity = clipped + 0.2 * state.network.biases["w"]
    new = method.server_step(state, cohort, reports)
    assert torch.allclose(new.velocity.biases["w"], velocity)
    assert torch.allclose(new.network.biases["w"], state.network.biases["w"] - 0.1 * velocity)
    again = method.server_step(new, cohort, reports)
    drift = again.velocity.biases["w"] - 0.5 * velocity - 0.2 * new.network.biases["w"]
    assert float(drift.abs()) <= 1e-3 * 1.001  # what is left is a clipped gradient
    assert float(drift.abs()) > 0
    assert torch.equal(again.embeddings[2], state.embeddings[2])
    own = product(reports.change)[1]  # each embedding's gradient is clipped by itself
    own = own * (1e-3 / own.norm(dim=1, keepdim=True)).clamp(max=1)
    speed = new.embedding_velocity[:2] - 0.2 * state.embeddings[:2]
    assert torch.allclose(speed, own, atol=1e-12) and float(own[0].norm()) == pytest.approx(1e-3)


def test_first_models_are_near_the_networks_own_start_and_differ():
    method = PFedHN()
    state = started(method, clients=20)
    models = method.send(state, torch.arange(20)).own
    assert state.embeddings.shape == (20, 6)
    assert bool(((models["w"] - 0.5).abs() < 0.2).all())
    assert len(set(models["w"].tolist())) == 20


def test_heads_have_a_tenth_of_the_spread_of_what_they_add_to():
    """Uniform within ± 0.1 / √100, times the root mean square of the leaf: 0.5 here."""
    state = started(PFedHN(), clients=4)
    most = float(state.network.heads["w"].abs().max())
    assert 0.9 * 0.005 < most <= 0.005
    assert [tuple(weight.shape) for weight, _ in state.network.body] == [
        (2, 100),
        *[(100, 100)] * 2,
    ]
    assert float(state.network.body[1][0].abs().max()) <= 0.1  # 1 / √100


def test_a_newcomer_is_written_the_model_of_the_mean_embedding():
    state = started(PFedHN(), clients=4)
    found = PFedHN().welcome(state, torch.arange(2)).own["w"].tolist()
    middle = written(state.network, state.embeddings.mean(0).reshape(1, -1))["w"].tolist()
    assert found == close(middle * 2)
    own = PFedHN(lr=0.1).adapt(Sent({}, line(HIGH)), (), client())
    assert pair(own) == close((HIGH[0] + 0.02, HIGH[1] + 0.01))  # p = 9/10 there


def test_what_is_no_variable_is_averaged_by_size():
    """Running statistics, where there are any; then nobody's model lacks them."""
    state = started(PFedHN())._replace(statistics={"mean": torch.zeros(()).double()})
    told = changes()._replace(
        statistics={"mean": torch.tensor([1.0, 5.0]).double()},
        size=torch.tensor([3.0, 1.0]).double(),
    )
    new = PFedHN().server_step(state, torch.tensor([2, 0]), told)
    assert float(new.statistics["mean"]) == 2.0
    sent = PFedHN().send(new, torch.arange(1))
    assert set(PFedHN().deploy(sent, (), client())) == {"w", "b", "mean"}
    assert list(PFedHN().models(sent, {"w": 1})) == ["personal"]
    assert not PFedHN().models(sent, {})


def test_the_preset_is_what_the_code_does():
    code = PFedHN(**PFedHN.presets["code"])
    assert (code.steps, code.batch, code.lr, code.momentum) == (50, 64, 0.005, 0.9)
    assert (code.weight_decay, code.clip, code.server_lr) == (5e-5, 50.0, 0.01)


def test_settings_out_of_range_are_refused():
    refuses(PFedHN, "layers", 0, "at least 1")
    refuses(PFedHN, "server_momentum", 1.5, "at most 1")
