"""A round in which no report reaches the server changes nothing but the round's number."""

import numpy as np
import pytest
import torch

import worlds
from idiolect.aggregation.aggregator import Aggregated
from idiolect.aggregation.private_mean import Private
from idiolect.core import losses
from idiolect.core.method import Report
from idiolect.engine import server_update
from idiolect.errors import Diverged
from idiolect.methods import METHODS, FedAvg, KTpFL
from test_laws import choose, every_federated_method, made

PUBLIC = [name for name, kind in METHODS.items() if kind.public]


def begun(name, *cohorts, seeds=(0,), **settings):
    """Make a simulation whose rounds have these cohorts."""
    plain = [worlds.with_public() for _ in seeds]
    simulation = worlds.simulation(made(name), plain, seeds=seeds, draw="poisson", **settings)
    choose(simulation, *cohorts)
    return simulation


def state_of(simulation):
    return {key: own for key, own in simulation.tree.items() if key != "attended"}


@every_federated_method
def test_an_empty_round_changes_nothing(name, float64):
    simulation = begun(name, [0, 2, 3], [], cohort=3)
    simulation.advance()
    before = state_of(simulation)
    simulation.advance()
    assert simulation.round == 2
    assert not worlds.differing(before, state_of(simulation))


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize("cohorts", [([0, 2, 3], [], [], [0, 1, 3]), ([], [0, 2], [], [0, 1])])
def test_teachers_are_read_on_the_examples_they_were_made_on(name, cohorts, monkeypatch, float64):
    """Nobody's network moves, so what all say of an example is what they are taught: no gap."""
    gaps = []

    def noted(apart):
        def gap(logits, target, weight, *more):
            soft = target.softmax(-1) if bool((target < 0).any()) else target
            far = ((logits.detach().softmax(-1) - soft).abs() * weight.unsqueeze(-1)).amax()
            gaps.append(float(far) if bool((target != 0).any()) else 0.0)
            return apart(logits, target, weight, *more)

        return gap

    monkeypatch.setattr(losses, "divergence_from", noted(losses.divergence_from))
    names = ("lr", "tune_lr", "distil_lr", "fuse_lr")
    method = made(name, **dict.fromkeys(names, 1e-30), transfer_epochs=0, private_epochs=0)
    simulation = worlds.simulation(
        method, worlds.with_public(), cohort=3, draw="poisson", kind="sequential"
    )
    choose(simulation, *cohorts)
    for _ in cohorts:
        simulation.advance()
    assert len(gaps) > 3
    assert max(gaps) < 1e-12


@pytest.mark.parametrize("name", ["ktpfl", "feddf"])
def test_an_empty_round_is_the_same_in_every_backend_and_after_a_resume(name, float64):
    cohorts = [[0, 2, 3], [], [0, 1, 3], [1, 2]]
    ends = []
    for kind in ("vectorised", "sequential"):
        simulation = begun(name, *cohorts, cohort=3, kind=kind)
        for _ in cohorts:
            simulation.advance()
        ends.append(state_of(simulation))
    first = begun(name, *cohorts, cohort=3)
    first.advance()
    first.advance()
    again = begun(name, *cohorts, cohort=3)
    again.tree, again.round = first.tree, first.round
    again.advance()
    again.advance()
    ends.append(state_of(again))
    for end in ends[1:]:
        assert not worlds.differing(ends[0], end, 1e-9)


@pytest.mark.parametrize("name", ["ktpfl", "feddf"])
def test_a_seed_whose_round_is_empty_does_not_disturb_another(name, float64):
    """Together: seed 1 rests in the second round and seed 4 does not."""
    cohorts = {1: [[0, 2], [], [0, 3]], 4: [[1, 2], [0, 3], [2, 3]]}
    together = begun(name, seeds=(1, 4), cohort=3)
    drawn = [[np.array(own, np.int64) for own in rounds] for rounds in cohorts.values()]
    together.cohort = lambda run: drawn[run][together.round]
    alone = {}
    for seed, own in cohorts.items():
        alone[seed] = begun(name, *own, seeds=(seed,), cohort=3)
        for _ in own:
            alone[seed].advance()
    for _ in range(3):
        together.advance()
    for place, seed in enumerate(cohorts):
        assert not worlds.differing(together.states[place], alone[seed].states[0], 1e-9)
        groups = (simulation.tree.get("groups", ()) for simulation in (together, alone[seed]))
        ours, theirs = (own[0] if own else () for own in groups)
        if ours:
            assert not worlds.differing(ours[place], theirs[0], 1e-9)


# All reports are broken: the same as none.


class Breaking(FedAvg):
    """Everyone's report is NaN in the second round."""

    def client_step(self, sent, personal, local):
        report, kept = super().client_step(sent, personal, local)
        return report._replace(size=torch.where(local.round == 1, torch.nan, report.size)), kept


def test_a_round_in_which_all_are_broken_is_an_empty_one(float64):
    simulation = worlds.simulation(Breaking(batch=3), worlds.federation(), cohort=2, draw="poisson")
    choose(simulation, [0, 1], [2, 3], [0, 1])
    simulation.advance()
    before = state_of(simulation)
    done = simulation.advance()
    assert done.left_out[0].tolist() == [2, 3]
    assert not worlds.differing(before, state_of(simulation))
    simulation.advance()
    assert worlds.differing(before, state_of(simulation))


def test_where_everyone_there_is_is_broken_the_run_ends():
    simulation = worlds.simulation(Breaking(batch=3), worlds.federation(), draw="poisson")
    simulation.advance()
    with pytest.raises(Diverged, match="nobody is left"):
        simulation.advance()


def broken_reports(method, state, params):
    rows = torch.arange(2)
    rows_of = {name: torch.stack([leaf, leaf]) for name, leaf in params.items()}
    reports = Report(rows_of, torch.full((2,), torch.nan))
    bad = server_update.rows_to_leave_out(reports, None, 2, torch.device("cpu"))
    assert bad.all()
    return server_update.guarded_server_step(method, state, rows, reports, bad)


def test_noise_hides_that_all_reports_were_broken():
    """The state moves by noise alone, as it does where nobody came."""
    world = worlds.federation()
    for noise in (1.0, 0.0):
        method = Aggregated(FedAvg(), Private(noise=noise, clip=0.5, cohort=2))
        simulation = worlds.simulation(method, world)
        alone = worlds.simulation(FedAvg(), world).states[0]
        (state,) = simulation.states
        new = broken_reports(method, state, alone)
        moved = worlds.differing(new.inner, state.inner)
        assert bool(moved) == (noise > 0)
        assert all(torch.isfinite(leaf).all() for leaf in new.inner.values())


def test_a_server_that_does_not_average_stays_where_it_was():
    method = KTpFL(sample=5)
    (state,) = worlds.simulation(method, worlds.with_public()).states
    params = worlds.simulation(FedAvg(), worlds.federation()).states[0]
    assert not worlds.differing(broken_reports(method, state, params), state)
