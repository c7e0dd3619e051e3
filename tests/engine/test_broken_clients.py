"""NaN and infinity never reach a server or a client's state, and the run says whose they were."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import tiny
import worlds
from idiolect.aggregation import RULES
from idiolect.aggregation.aggregator import Aggregated
from idiolect.core import tree
from idiolect.core.capabilities import Tampering
from idiolect.core.method import Method, Report
from idiolect.engine import server_update
from idiolect.errors import Diverged, MethodError
from idiolect.experiment.load import parse_experiment
from idiolect.experiment.run import run_experiment
from idiolect.methods import METHODS, Ditto, FedAvg
from test_laws import choose, made

POISON = (float("nan"), float("inf"), -float("inf"))


def poisoner(name, bad, value):
    """A method of whose clients some report rubbish, as seen by the server."""

    @dataclass(frozen=True, kw_only=True)
    class Poisoned(Tampering, METHODS[name]):
        def arrive(self, state, cohort, reports):
            rows = torch.isin(cohort, torch.tensor(bad))

            def spoilt(leaf):
                flat = leaf.reshape(len(leaf), -1).clone()
                flat[rows, 0] = value  # one number of each leaf is enough
                return flat.reshape(leaf.shape)

            return tree.map(spoilt, reports)

    known = {
        field.name: getattr(made(name), field.name) for field in dataclasses.fields(made(name))
    }
    return Poisoned(**known)


@pytest.mark.parametrize("value", POISON)
@pytest.mark.parametrize("name", ["fedavg", "pfml", "fedper"])
def test_a_round_with_a_poisoner_is_the_round_without_it(name, value, float64):
    """Client 2 reports rubbish: what the server and the others end with is as if it stayed away."""
    world = worlds.federation()
    with_it = choose(worlds.simulation(poisoner(name, [2], value), world), (0, 1, 2), (1, 2, 4))
    without = choose(worlds.simulation(made(name), world), (0, 1), (1, 4))
    for _ in range(2):
        done = with_it.advance()
        without.advance()
        assert [clients.tolist() for clients in done.left_out] == [[2]]
    assert not worlds.differing(with_it.tree, without.tree, 1e-9)


@pytest.mark.parametrize("name", [name for name in RULES if "krum" not in name])
def test_rules_pass_a_poisoner_by(name, float64):
    world, ends = worlds.federation(), []
    for method, cohort in (
        (poisoner("fedavg", [2], float("nan")), (0, 1, 2, 3)),
        (made("fedavg"), (0, 1, 3)),
    ):
        simulation = choose(worlds.simulation(Aggregated(method, RULES[name]()), world), cohort)
        simulation.advance()
        ends.append(simulation.states[0].inner)
    assert not worlds.differing(*ends, 1e-9)


@dataclass(frozen=True, kw_only=True)
class Letters(Tampering, Method):
    """A method that does not average: the server keeps the last letter of every client."""

    def init_server(self, setup):
        return torch.zeros(setup.clients)

    def client_step(self, sent, personal, local):
        return {"letter": local.size}, personal

    def arrive(self, state, cohort, reports):
        return {"letter": torch.where(cohort == 1, float("nan"), reports["letter"])}

    def server_step(self, state, cohort, reports):
        return state.index_copy(0, cohort, reports["letter"])


def test_a_method_that_does_not_average_gets_the_rows_of_the_others():
    simulation = worlds.simulation(Letters(), worlds.federation())
    done = simulation.advance()
    assert done.left_out[0].tolist() == [1]
    assert simulation.states[0].tolist() == [7, 0, 5, 9, 3, 0]


@dataclass(frozen=True, kw_only=True)
class Forgetful(Ditto):
    """Ditto whose third client ruins what it keeps, not what it reports."""

    def client_step(self, sent, personal, local):
        report, kept = super().client_step(sent, personal, local)
        ruined = tree.map(lambda leaf: leaf * float("nan"), kept)
        return report, tree.where(local.size == 5, ruined, kept)


@pytest.mark.parametrize("kind", ["vectorised", "sequential"])
def test_ruined_personal_state_is_not_kept_and_its_report_not_used(kind, float64):
    world = worlds.federation()
    simulation = worlds.simulation(Forgetful(batch=3, lr=0.1), world, kind=kind)
    plain = choose(worlds.simulation(Ditto(batch=3, lr=0.1), world, kind=kind), (0, 1, 3, 4))
    start = tree.map(lambda leaf: leaf[2], simulation.tree["personal"])
    done = simulation.advance()
    plain.advance()
    assert done.left_out[0].tolist() == [2]
    assert not worlds.differing(simulation.tree, plain.tree, 1e-9)
    assert not worlds.differing(start, tree.map(lambda leaf: leaf[2], simulation.tree["personal"]))


def test_seeds_stacked_lose_only_their_own_clients(float64):
    both = [worlds.federation(), worlds.federation((2, 8, 4, 1, 6, 3), seed=5)]
    method = poisoner("fedavg", [4], float("nan"))
    together = worlds.simulation(method, both, seeds=(0, 7), cohort=3)
    for _ in range(3):
        drawn = [together.cohort(run) for run in range(2)]
        done = together.advance()
        assert [(4 in cohort) for cohort in drawn] == [len(out) > 0 for out in done.left_out]
    for run, seed in enumerate((0, 7)):
        alone = worlds.simulation(method, both[run], seeds=(seed,), cohort=3)
        for _ in range(3):
            alone.advance()
        assert not worlds.differing(alone.states[0], together.states[run], 1e-9)


def test_with_nobody_left_the_run_fails_and_the_state_stays():
    method = poisoner("fedavg", [0, 1, 2, 3, 4, 5], float("nan"))
    simulation = worlds.simulation(method, worlds.federation(), cohort=3)
    before = simulation.tree
    with pytest.raises(Diverged, match=r"3 of 3 clients did, so nobody is left"):
        simulation.advance()
    assert not worlds.differing(before, simulation.tree) and simulation.round == 0


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_are_left_out(spoilt):
    every = {"a": torch.randn(5, 300), "b": torch.randn(5, 3, 7), "c": torch.randn(5)}
    every["a"][1, 170] = every["b"][2, 2, 6] = every["c"][4] = spoilt
    every["a"][0, :2] = torch.tensor([-3e38, 3e38])  # large, and finite
    bad = server_update.rows_to_leave_out(every, None, 5, torch.device("cpu"))
    assert bad.tolist() == [False, True, True, False, True]
    nan, stale = spoilt != spoilt, server_update.rows_with_nan([every])
    assert stale.tolist() == [False, nan, nan, False, nan]


def test_weights_of_zero_are_exact():
    """Leaving a row out must not disturb the digits of the others."""
    params = {"w": torch.randn(4, 3)}
    params["w"][2] = float("inf")
    reports = Report(params, torch.tensor([3.0, 4, 5, 6]))
    clean = server_update.without_rows(
        reports, server_update.rows_to_leave_out(reports, None, 4, torch.device("cpu"))
    )
    rest = torch.tensor([0, 1, 3])
    left = FedAvg().server_step({}, torch.arange(4), clean)
    right = FedAvg().server_step({}, rest, tree.take(reports, rest))
    torch.testing.assert_close(left, right)


def test_a_run_tells_who_was_left_out_and_how_often(tmp_path, monkeypatch):
    """One client's features overflow in its own training; the run goes on and names it."""
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path))
    from idiolect.experiment import build

    federate = build.federate

    def spoilt(*arguments, **options):
        made = federate(*arguments, **options)
        x = np.array(made.dataset.x, np.float32)
        x[made.train[3]] = 1e30
        return dataclasses.replace(made, dataset=dataclasses.replace(made.dataset, x=x))

    monkeypatch.setattr(build, "federate", spoilt)
    text = tiny.TOML.replace("cohort = 4\n", "").replace('name = "fedavg-ft"', 'name = "fedper"')
    text = text.replace("tune_epochs = 2", "")
    content, _ = run_experiment(parse_experiment(text, ["rounds=3"]), tmp_path / "run")
    for label in ("FedAvg", "FedPer"):
        for seed in content["methods"][label]["seeds"]:
            assert seed["left_out"] == {"client 3": 3}
        assert any("client 3 (3)" in text for text in content["methods"][label]["notices"])


class InPlace(FedAvg):
    """Shrinks what it was sent, in place: the next client would get it smaller still."""

    def client_step(self, sent, personal, local):
        for leaf in sent.shared.values():
            leaf.mul_(0.9)
        return super().client_step(sent, personal, local)


@pytest.mark.parametrize("kind", ["vectorised", "sequential"])
def test_a_client_step_that_changes_what_it_was_sent_is_refused(kind):
    simulation = worlds.simulation(InPlace(), worlds.federation(), kind=kind)
    with pytest.raises(MethodError, match="in place"):
        simulation.advance()
