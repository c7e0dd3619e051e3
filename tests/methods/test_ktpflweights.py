"""KT-pFL on equal networks: mixtures of parameters by hand, and the slope of c."""

import pytest
import torch

from idiolect.core.method import Report, Sent
from idiolect.methods import KTpFLWeights
from idiolect.methods.ktpfl import Mixtures
from methods.tiny import HIGH, Line, client, close, line, pair, plus, setup, slope


def reports(seed=0, clients=3):
    draw = torch.Generator().manual_seed(seed)
    params = {n: torch.randn(clients, 2, generator=draw, dtype=torch.float64) for n in "wb"}
    return Report(params, torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64)[:clients])


def objective(method, c, told):
    """The docstring's formula, client by client; rows of c add up to one."""
    models = torch.cat([told.params["w"], told.params["b"]], 1)
    scale = (models - models.mean(0)).square().sum(1).mean()
    total = method.pull * (c - 1 / len(c)).square().sum()
    for n in range(len(c)):
        gap = 0.5 * ((c[n].unsqueeze(1) * models).sum(0) - models[n]).square().sum() / scale
        total = total + method.transfer * told.size[n] / told.size.sum() * gap
    return float(total)


def test_the_slope_of_c_is_the_finite_difference_of_its_objective():
    """Along directions that keep a row's sum, which are all a mixture can go."""
    method, told = KTpFLWeights(transfer=1.3, pull=0.2), reports()
    c = torch.rand(3, 3, generator=torch.Generator().manual_seed(1)).double().softmax(1)
    found, step = method.gradient(c, told), 1e-6
    for n in range(3):
        for m, other in ((0, 1), (1, 2), (2, 0)):
            move = torch.zeros_like(c)
            move[n, m], move[n, other] = step, -step
            rise = objective(method, c + move, told) - objective(method, c - move, told)
            expected = rise / (2 * step)
            assert float(found[n, m] - found[n, other]) == pytest.approx(expected, rel=1e-5)


def test_a_step_by_hand():
    """Models 0 and 2 (in w): mean 1, s = 1, G = [[1, −1], [−1, 1]]; c = ½, ρ = 0, equal sizes.

    c G = 0, so the slope is ½ · (−G): row 0 is (−½, ½). With η₃ = 0.2 c₀ = (0.6, 0.4), and the
    first mixture is 0.4 · 2.
    """
    method = KTpFLWeights(pull=0.0, matrix_lr=0.2, transfer=1.0)
    state = method.init_server(setup(Line(), sizes=(1.0, 1.0)))
    told = Report(
        {"w": torch.tensor([0.0, 2.0]).double(), "b": torch.zeros(2).double()},
        torch.ones(2).double(),
    )
    new = method.server_step(state, torch.arange(2), told)
    assert new.affinity.flatten().tolist() == close([0.6, 0.4, 0.4, 0.6])
    assert method.send(new, torch.arange(2)).own["w"].tolist() == close([0.8, 1.2])


def test_an_overwhelming_pull_is_plain_averaging():
    method, told = KTpFLWeights(pull=1e9), reports()
    c = torch.eye(3).double()
    state = Mixtures(c, {n: torch.zeros(3, 2).double() for n in "wb"}, torch.zeros(3).double())
    new = method.server_step(state, torch.arange(3), told)
    sent = method.send(new, torch.arange(3)).own["w"]
    assert torch.allclose(sent, told.params["w"].mean(0).expand(3, 2), atol=1e-6)


def test_rows_stay_on_the_simplex_and_who_takes_nothing_keeps_what_it_has():
    """Client 2 learns only from client 0, who has not been heard."""
    method = KTpFLWeights(matrix_lr=2.0, pull=0.1)
    c = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [1.0, 0.0, 0.0]], dtype=torch.float64)
    state = Mixtures(
        c, {n: torch.full((3, 2), 7.0).double() for n in "wb"}, torch.zeros(3).double()
    )
    new = method.server_step(state, torch.tensor([1]), reports(clients=1))
    assert torch.equal(new.affinity.sum(1), torch.ones(3).double())
    sent = method.send(new, torch.arange(3)).own["w"]
    assert sent[2].tolist() == [7.0, 7.0]
    assert torch.equal(sent[0], reports(clients=1).params["w"][0])


def test_the_absent_are_remembered():
    """u_n = Σ over heard m of c_nm w_m / Σ c_nm: 0 and 1 report in turn, 2 never.

    They say w = 3 and w = 9. Client 0 gives itself 0.5 and client 1 0.3: (1.5 + 2.7) / 0.8 = 5.25.
    Of the last cohort alone it would start from 9. When 0 comes again with w = 5 that is replaced.
    """
    method = KTpFLWeights()
    c = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.6, 0.2], [0.3, 0.1, 0.6]], dtype=torch.float64)
    state = Mixtures(c, {"w": torch.zeros(3).double()}, torch.zeros(3).double())
    for client_, w in ((0, 3.0), (1, 9.0)):
        told = Report({"w": torch.tensor([w]).double()}, torch.ones(1).double())
        state = method.server_step(state, torch.tensor([client_]), told)
    sent = method.send(state, torch.arange(3)).own["w"].tolist()
    assert sent == close([(1.5 + 2.7) / 0.8, (0.6 + 5.4) / 0.8, (0.9 + 0.9) / 0.4])
    told = Report({"w": torch.tensor([5.0]).double()}, torch.ones(1).double())
    state = method.server_step(state, torch.tensor([0]), told)
    assert method.send(state, torch.arange(1)).own["w"].tolist() == close([(2.5 + 2.7) / 0.8])


def test_statistics_of_batch_normalisation_are_mixed_and_not_measured():
    """A Gram matrix of parameters 0 and 2 whatever their running means are: see a step by hand."""
    method = KTpFLWeights(pull=0.0, matrix_lr=0.2, transfer=1.0)
    parts = {"w": [0.0, 2.0], "bn.running_mean": [100.0, 700.0]}
    told = Report({n: torch.tensor(v).double() for n, v in parts.items()}, torch.ones(2).double())
    found = method.gradient(torch.full((2, 2), 0.5).double(), told)
    assert found.flatten().tolist() == close([-0.5, 0.5, 0.5, -0.5])


def test_who_has_no_data_counts_for_nothing_at_first():
    state = KTpFLWeights().init_server(setup(Line(), sizes=(2.0, 0.0, 1.0)))
    assert state.affinity.tolist() == [[0.5, 0.0, 0.5]] * 3
    nobody = KTpFLWeights().init_server(setup(Line(), sizes=(0.0, 0.0)))
    assert nobody.affinity.tolist() == [[0.0, 0.0]] * 2
    one = KTpFLWeights().init_server(setup(Line(), sizes=(0.0, 4.0)))
    assert one.affinity.tolist() == [[0.0, 1.0]] * 2


def test_a_newcomer_starts_from_the_mean_of_the_mixtures():
    heard = torch.ones(2).double()
    state = Mixtures(torch.eye(2).double(), {"w": torch.tensor([1.0, 4.0]).double()}, heard)
    sent = KTpFLWeights().welcome(state, torch.arange(3))
    assert sent.own["w"].tolist() == close([2.5, 2.5, 2.5])
    own = KTpFLWeights(lr=0.1).adapt(Sent(own=line(HIGH)), line((9, 9)), client())
    assert pair(own) == close((HIGH[0] + 0.02, HIGH[1] + 0.01))  # p = 9/10 there


def test_without_projection_a_cohort_stands_for_all():
    """Of four, two come: each counts double, in the slope of c and in the mixtures."""
    method, told = KTpFLWeights(projection="none", matrix_lr=0.1), reports(clients=2)
    c = torch.rand(4, 4, generator=torch.Generator().manual_seed(1)).double().softmax(1)
    state = Mixtures(c, {n: torch.zeros(4, 2).double() for n in "wb"}, torch.zeros(4).double())
    cohort = torch.tensor([0, 2])
    new = method.server_step(state, cohort, told)
    block = 2 * c[cohort][:, cohort]
    learned = (block - 0.1 * method.gradient(block, told)) / 2
    assert torch.allclose(new.affinity[cohort][:, cohort], learned)
    sent = method.send(new, torch.arange(4)).own["w"]
    assert torch.allclose(sent, 2 * new.affinity[:, cohort] @ told.params["w"])


def test_the_preset_is_the_papers():
    paper = KTpFLWeights(**KTpFLWeights.presets["paper"])
    assert (paper.lr, paper.matrix_lr, paper.transfer) == (0.005, 0.01, 1.0)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_client_trains_from_its_mixture_and_keeps_the_result(stacked):
    method, start = KTpFLWeights(lr=0.5), (0.3, -0.2)
    sent = Sent(own=line(start))
    report, kept = method.client_step(sent, line((9.0, 9.0)), client(stacked=stacked))
    assert pair(kept) == close(plus(start, -0.5, slope(start, [(2.0, 1)])))
    assert pair(report.params) == pair(kept) and float(report.size) == 1
    assert pair(method.deploy(sent, kept, client())) == start
    trained = KTpFLWeights(lr=0.5, use="trained")
    models = trained.models(sent, trained.deploy(sent, kept, client()))
    assert pair(models["personal"]) == pair(kept) and pair(models["mixture"]) == start
    assert trained.training() == method.training()  # rounds are shared


@pytest.mark.parametrize("stacked", [False, True])
def test_the_mixture_may_be_tuned(stacked):
    """Two passes over the one example, at their own rate; what was trained before is no part."""
    method, start = KTpFLWeights(lr=0.5, use="tuned", tune_epochs=2, tune_lr=0.1), (0.3, -0.2)
    once = plus(start, -0.1, slope(start, [(2.0, 1)]))
    tuned = method.deploy(Sent(own=line(start)), line((9.0, 9.0)), client(stacked=stacked))
    assert pair(tuned) == close(plus(once, -0.1, slope(once, [(2.0, 1)])))
