"""Aggregation is a replaceable part of every method that averages, and of no other."""

import dataclasses

import numpy as np
import pytest
import torch

import worlds
from idiolect.aggregation.aggregator import Aggregated
from idiolect.aggregation.robust import Krum, Mean, Median
from idiolect.core import tree
from idiolect.core.capabilities import Averaging, Tampering, has
from idiolect.core.method import Report
from idiolect.core.wrap import Served
from idiolect.errors import MethodError
from idiolect.experiment.build import build_jobs
from idiolect.experiment.load import parse_experiment
from idiolect.methods import METHODS, FedAvg, LocalOnly
from test_laws import made

TIGHT = 1e-9
AVERAGING = [n for n, kind in METHODS.items() if issubclass(kind, Averaging) and not kind.pooled]
OTHERS = [name for name in METHODS if name not in AVERAGING]


def reports_of(simulation):
    """Catch one round's reports on their way to the server."""
    caught = []
    method = simulation.method

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Caught(Tampering, type(method)):
        def arrive(self, state, cohort, reports):
            caught.append((state, cohort, reports))
            return reports

    known = {spec.name: getattr(method, spec.name) for spec in dataclasses.fields(method)}
    simulation.method = Caught(**known)
    simulation.advance()
    return caught[0]


@pytest.mark.parametrize("name", AVERAGING)
def test_a_method_that_says_it_averages_heeds_nothing_but_the_mean(name, float64):
    """One client that reports the weighted mean leaves the server where all of them do.

    And one that weighs nothing, with any parameters, changes nothing.
    """
    method = made(name)
    state, cohort, reports = reports_of(worlds.simulation(made(name), worlds.with_public()))
    whole = method.server_step(state, cohort, reports)
    weight = torch.ones_like(reports.size) if getattr(method, "uniform", False) else reports.size
    mean = tree.map(lambda leaf: leaf[None], tree.mean(reports.params, weight))
    one = method.server_step(state, cohort[:1], Report(mean, reports.size.sum()[None]))
    assert not worlds.differing(whole, one, TIGHT)
    padded = Report(
        tree.map(lambda leaf: torch.cat([leaf, 7 + leaf[:1]]), reports.params),
        torch.cat([reports.size, torch.zeros(1)]),
    )
    longer = torch.cat([cohort, cohort[:1]])
    assert not worlds.differing(whole, method.server_step(state, longer, padded), TIGHT)
    reference = method.reference(state, cohort)
    shapes = {name: leaf.shape for name, leaf in tree.named(reference).items()}
    assert shapes == {n: leaf.shape[1:] for n, leaf in tree.named(reports.params).items()}


@pytest.mark.parametrize("name", AVERAGING)
def test_the_uniform_mean_is_the_methods_own(name, float64):
    if "uniform" not in {spec.name for spec in dataclasses.fields(METHODS[name])}:
        pytest.skip("weighs clients in its own way")
    world, ends = worlds.federation(), []
    for method in (made(name, uniform=True), Aggregated(made(name, uniform=True), Mean())):
        simulation = worlds.simulation(method, world, cohort=3)
        for _ in range(3):
            simulation.advance()
        state = simulation.states[0]
        verdict = simulation.evaluate([world.test_data], keep=True)[0]
        state = state.inner if isinstance(state, Served) else state
        ends.append((state, simulation.tree["personal"], verdict.deployed[0][1]))
    assert not worlds.differing(*ends, TIGHT)


@pytest.mark.parametrize("name", AVERAGING)
def test_the_median_changes_what_is_shared_and_the_rounds(name, float64):
    plain, robust = made(name), Aggregated(made(name), Median())
    assert robust.training() != plain.training()
    assert robust.training() == Aggregated(made(name), Median()).training()
    assert robust.training() != Aggregated(made(name), Median(middle="lower")).training()
    ends = []
    for method in (plain, robust):
        simulation = worlds.simulation(method, worlds.federation(), cohort=3)
        simulation.advance()
        state = simulation.states[0]
        ends.append(state.inner if isinstance(state, Served) else state)
    assert worlds.differing(*ends, 1e-3)


@pytest.mark.parametrize("name", OTHERS)
def test_other_methods_refuse_with_the_reason(name):
    with pytest.raises(MethodError, match=r"nothing to aggregate|does not average|no clients"):
        Aggregated(made(name), Median())


def test_a_new_server_step_must_say_again_that_it_averages():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Odd(FedAvg):
        def server_step(self, state, cohort, reports):
            return tree.map(lambda leaf: leaf[0], reports.params)

    assert not has(Odd(), Averaging) and has(FedAvg(), Averaging)
    with pytest.raises(MethodError, match="does not average"):
        Aggregated(Odd(), Median())
    assert not has(LocalOnly(), Averaging)


def test_krum_with_too_small_a_cohort_is_told(float64):
    simulation = worlds.simulation(
        Aggregated(made("fedavg"), Krum(attackers=2)), worlds.federation(), cohort=3
    )
    with pytest.raises(Exception, match="needs a cohort of 7 or more, and this one has 3"):
        simulation.advance()


TOML = """
name = "robust"
rounds = 2
[data]
partition = { name = "iid", clients = 6, per_client = 30 }
[model]
name = "mlr"
[backend]
device = "cpu"
width = 4
"""


def test_an_experiment_names_the_rule_for_all_or_for_one(tmp_path, monkeypatch):
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path))
    text = TOML + '[aggregate]\nname = "trimmed-mean"\ntrim = 0.3\n'
    text += '[[methods]]\nname = "local"\n[[methods]]\nname = "fedavg"\n'
    text += '[[methods]]\nname = "fedper"\naggregate = "median"\n'
    experiment = parse_experiment(text)
    methods = [job.method for job in build_jobs(experiment)[0]]
    assert [method.title for method in methods] == [
        "Local",
        "FedAvg, trimmed mean",
        "FedPer, median",
    ]
    assert methods[1].by.trim == 0.3
    from idiolect.experiment.run import experiment_toml

    again = parse_experiment(experiment_toml(experiment))
    assert again.methods == experiment.methods


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ('[aggregate]\nname = "medain"\n[[methods]]\nname = "fedavg"', "did you mean 'median'"),
        (
            '[aggregate]\nname = "krum"\nattacker = 1\n[[methods]]\nname = "fedavg"',
            "unknown key aggregate.attacker: 'attacker'; did you mean 'attackers'",
        ),
        ('[[methods]]\nname = "local"\naggregate = "median"', "sends nothing to a server"),
        ('[[methods]]\nname = "fedavg"\naggregate = {name = "trimmed-mean", trim = 0.5}', "most"),
    ],
)
def test_a_wrong_rule_is_one_line(added, words):
    with pytest.raises(Exception, match=words) as told:
        parse_experiment(TOML + added)
    assert "\n" not in str(told.value)


def test_who_draws_by_coins_may_draw_nobody(float64):
    """With one client a round expected of six, rounds without anyone come, and change nothing.

    They are counted all the same, and nobody took part in them.
    """
    simulation = worlds.simulation(made("fedavg"), worlds.federation(), cohort=1, draw="poisson")
    sizes = []
    for _ in range(12):
        before, sizes = simulation.tree, [*sizes, len(simulation.cohort(0))]
        done = simulation.advance()
        assert done.traffic[0].clients == sizes[-1]
        after = simulation.tree
        was, now = before.pop("attended"), after.pop("attended")
        assert bool(worlds.differing(before, after)) == (sizes[-1] > 0)
        assert now["idle"].tolist() == [sizes.count(0)]
        assert sizes[-1] > 0 or torch.equal(was["clients"], now["clients"])
    assert 0 in sizes and max(sizes) > 1
    assert len(np.unique(sizes)) > 2


def is_property(value):
    return isinstance(value, property)
