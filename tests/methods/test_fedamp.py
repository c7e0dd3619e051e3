"""FedAMP and HeurFedAMP by hand."""

import math

import pytest
import torch

from idiolect.core.method import Report, Sent
from idiolect.methods import FedAMP, HeurFedAMP, LocalOnly
from methods.tiny import HIGH, Line, client, close, line, pair, plus, refuses, setup, slope

MODELS = {"w": torch.tensor([0.0, 1.0, 5.0]).double(), "b": torch.tensor([0.0, 0.0, 2.0]).double()}


def told(method, cohort=(0, 1, 2)):
    """Three clients at (0, 0), (1, 0) and (5, 2): squared distances 1, 29 and 20."""
    state = method.init_server(setup(Line(9.0, 9.0), sizes=(1.0, 1.0, 1.0)))
    rows = torch.tensor(cohort)
    reports = Report({n: leaf[rows] for n, leaf in MODELS.items()}, torch.ones(len(rows)).double())
    return method.server_step(state, rows, reports)


@pytest.mark.parametrize("stacked", [False, True])
def test_the_pull_changes_the_gradient(stacked):
    """From (0.3, −0.2) towards u = (1, 1): ∇ = ∇CE + pull · (w − u), once w has left it or not.

    The public port's term had no gradient at all; with pull = 0 ours has none, and only then.
    """
    start, mixture = (0.3, -0.2), (1.0, 1.0)
    for pull in (0.0, 3.0):
        down = plus(slope(start, [(2.0, 1)]), pull, plus(start, -1, mixture))
        method = FedAMP(lr=0.1, pull=pull)
        local = client(stacked=stacked)
        report, kept = method.client_step(Sent(own=line(mixture)), line(start), local)
        assert pair(kept) == close(plus(start, -0.1, down))
        assert pair(report.params) == pair(kept)
    alone = LocalOnly(lr=0.1).client_step(Sent(), line(start), client())[1]
    assert pair(kept) != close(pair(alone))


def test_training_may_start_from_the_mixture():
    """There the pull is zero at first."""
    method = FedAMP(lr=0.1, pull=3.0, start="mixture")
    _, kept = method.client_step(Sent(own=line((1.0, 1.0))), line((0.3, -0.2)), client())
    assert pair(kept) == close(plus((1.0, 1.0), -0.1, slope((1.0, 1.0), [(2.0, 1)])))


def test_attention_by_hand():
    """σ = 20, share = 0.4: ξ_01 = 0.4 e^(−1/20), ξ_02 = 0.4 e^(−29/20), ξ_12 = 0.4 e^(−1)."""
    method = FedAMP(sigma=20.0, share=0.4)
    near, far, middle = (0.4 * math.exp(-d / 20) for d in (1, 29, 20))
    rows = method.attention(told(method)).tolist()
    assert rows[0] == close([1 - near - far, near, far])
    assert rows[1] == close([near, 1 - near - middle, middle])
    assert rows[2] == close([far, middle, 1 - far - middle])
    sent = method.send(told(method), torch.tensor([2, 0])).own
    assert sent["w"].tolist() == close([middle * 1 + rows[2][2] * 5, near * 1 + far * 5])


def test_sigma_is_the_median_distance_unless_given():
    given, found = FedAMP(sigma=20.0), FedAMP()
    assert torch.allclose(given.attention(told(given)), found.attention(told(found)))


def test_how_large_parameters_are_does_not_matter_to_the_median():
    """Distances a millionth of those above: σ shrinks with them."""
    method = FedAMP()
    state = told(method)
    small = state._replace(models={n: leaf / 1000 for n, leaf in state.models.items()})
    assert torch.allclose(method.attention(state), method.attention(small))
    alike = state._replace(models={n: torch.ones(3).double() for n in "wb"})
    assert method.attention(alike)[0].tolist() == close([1 / 3] * 3)  # all alike
    tenth = FedAMP(share=0.1)
    assert tenth.attention(alike)[0].tolist() == close([0.8, 0.1, 0.1])


@pytest.mark.parametrize("count", [2, 30, 100])
def test_a_client_keeps_a_weight_of_its_own_however_many_there_are(count):
    """Of N equal models each weighs 1/N; a share of 0.1 left nothing of its own to anyone."""
    method = FedAMP()
    state = method.init_server(setup(Line(), sizes=(1.0,) * count))
    state = state._replace(heard=torch.ones(count).double())
    assert method.attention(state).diagonal().tolist() == close([1 / count] * count)


def test_statistics_of_batch_normalisation_are_mixed_and_not_measured():
    """Parameters 0, 1 and 5 in w; running means of 1, 1000 and 50 change no weight."""
    for method in (FedAMP(sigma=20.0, share=0.4), HeurFedAMP(sharpness=1.0)):
        plain = told(method)
        means = torch.tensor([[1.0], [1000.0], [50.0]]).double()
        state = plain._replace(models={**plain.models, "bn.running_mean": means})
        rows = method.attention(state)
        assert torch.equal(rows, method.attention(plain))
        sent = method.send(state, torch.arange(3)).own["bn.running_mean"]
        assert torch.allclose(sent, rows @ means)


def test_a_newcomer_gets_the_mean_of_those_who_were_heard():
    """Clients 0 and 2, at (0, 0) and (5, 2); client 1 has told nothing yet."""
    sent = FedAMP().welcome(told(FedAMP(), (0, 2)), torch.arange(2))
    assert sent.own["w"].tolist() == close([2.5, 2.5]) and sent.own["b"].tolist() == close([1, 1])


def test_a_newcomer_steps_from_what_it_was_sent():
    """At HIGH p = 9/10 and nothing pulls: a step at lr 0.1 goes by 0.1 · 0.1 · (2, 1)."""
    own = FedAMP(lr=0.1).adapt(Sent(own=line(HIGH)), line((9, 9)), client())
    assert pair(own) == close((HIGH[0] + 0.02, HIGH[1] + 0.01))


def test_nobody_owes_itself():
    """Weights of others that would add up to more than one are scaled back."""
    method = FedAMP(sigma=20.0, share=50.0)
    weights = method.attention(told(method))
    assert weights.diagonal().tolist() == close([0.0] * 3)
    assert weights.sum(1).tolist() == close([1.0] * 3) and float(weights.min()) >= 0


def test_who_has_not_reported_takes_no_part():
    """Client 2 is at the initial (9, 9): nobody looks at it, and it only at itself."""
    for method in (FedAMP(sigma=20.0), HeurFedAMP()):
        weights = method.attention(told(method, (0, 1)))
        assert weights[2].tolist() == [0.0, 0.0, 1.0] and weights[:2, 2].tolist() == [0.0, 0.0]
        fresh = method.init_server(setup(Line(9.0, 9.0), sizes=(1.0, 1.0, 1.0)))
        assert torch.equal(method.attention(fresh), torch.eye(3).double())


def test_the_heuristic_by_hand():
    """Models (3, 4), (4, 3), (1, 0): cosines 0.96, 0.6 and 0.8; ξ_ii = 0.25, σ = 2."""
    method = HeurFedAMP(self_share=0.25, sharpness=2.0)
    state = told(method)._replace(
        models={"w": torch.tensor([3.0, 4, 1]).double(), "b": torch.tensor([4.0, 3, 0]).double()}
    )
    a, b = math.exp(1.92), math.exp(1.2)
    row = method.attention(state)[0].tolist()
    assert row == close([0.25, 0.75 * a / (a + b), 0.75 * b / (a + b)])


def test_the_heuristic_is_not_nearly_uniform_for_models_that_began_alike():
    """Two pairs of alike models, all with cosines above 0.99: whose pair it is weighs e⁴ less.

    Cosines are c within a pair and c − d between: their deviation over pairs is d √2/3, so the
    factor 2/σ makes the ratio exp(2 · 3/√2) of d.
    """
    method = HeurFedAMP(self_share=0.0)
    apart = torch.tensor([[1.0, 0.05, 0], [1.0, 0.05, 0], [1.0, -0.05, 0], [1.0, -0.05, 0]])
    state = method.init_server(setup(Line(), sizes=(1.0,) * 4))
    state = state._replace(models={"w": apart.double()}, heard=torch.ones(4).double())
    row = method.attention(state)[0].tolist()
    assert row[1] / row[2] == pytest.approx(math.exp(3 * math.sqrt(2)), rel=1e-6)
    fixed = HeurFedAMP(self_share=0.0, sharpness=5.0).attention(state)[0].tolist()
    assert fixed[1] / fixed[2] < 1.03  # as it was


def test_settings_out_of_range_are_refused():
    refuses(FedAMP, "sigma", -1.0, "at least 0")
    refuses(HeurFedAMP, "self_share", 1.5, "at most 1")
