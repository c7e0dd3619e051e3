"""Reports that come in parts, each added up where it was made, serve as well as their rows."""

from dataclasses import dataclass

import pytest
import torch
from test_broken_clients import poisoner

import worlds
from idiolect.aggregation import RULES
from idiolect.aggregation.aggregator import Aggregated
from idiolect.aggregation.attacks import Attacked, SignFlip
from idiolect.aggregation.private_mean import Private
from idiolect.core import tree
from idiolect.core.capabilities import sums
from idiolect.core.method import Method, Report, mean_report
from idiolect.engine.client_group import GroupResult
from idiolect.engine.server_update import (
    guarded_server_step,
    sum_reports,
    summable,
    without_rows,
)
from idiolect.methods import METHODS, FedAvg, FedPer
from test_laws import made

SUMMING = [name for name, kind in METHODS.items() if sums(kind())]


def in_parts(simulation):
    """Let every team hand in two sums, of its odd and its even keys, instead of its reports."""

    def parted(result, calls):
        def half(first):
            rows = list(range(first, len(result.keys), 2))
            own = tree.take((result.reports, result.personal), torch.tensor(rows))
            keys = [result.keys[row] for row in rows]
            return sum_reports(
                simulation.method, GroupResult(result.group, keys, own[0], (), own[1]), calls
            )

        left, right = half(0), half(1)
        return GroupResult(
            result.group,
            [*left.keys, *right.keys],
            (),
            (),
            tree.concat([left.personal, right.personal]),
            tree.map(lambda *parts: torch.cat(parts), left.sums, right.sums),
            torch.cat([left.broken, right.broken]),
        )

    for group in simulation.groups:
        train = group.train
        group.train = lambda *order, train=train: lambda: parted(train(*order)(), order[1])
    return simulation


def test_most_methods_that_average_come_in_parts():
    assert {"fedavg", "fedprox", "fedper", "ditto", "pfedme", "pfml", "apfl"} <= set(SUMMING)
    assert not {"local", "fedfomo", "fedamp", "ktpfl", "pfedhn", "feddf"} & set(SUMMING)


@pytest.mark.parametrize("name", SUMMING)
@pytest.mark.parametrize("uniform", [False, True])
def test_sums_of_parts_serve_as_well_as_rows(name, uniform, float64):
    """Two seeds of clients unlike in size, so that a wrong weight would show."""
    both = [worlds.with_public(), worlds.with_public((2, 8, 4, 1, 6, 3), seed=5)]
    ends = []
    for change in (lambda whole: whole, in_parts):
        method = made(name, uniform=uniform)
        simulation = change(worlds.simulation(method, both, seeds=(0, 7), cohort=3))
        rounds = [simulation.advance() for _ in range(2)]
        ends.append((simulation.tree, [done._replace(left_out=()) for done in rounds]))
    assert not worlds.differing(ends[0][0], ends[1][0], 1e-9)
    assert ends[0][1] == ends[1][1]  # traffic, examples, what crossed


def test_what_holds_nan_is_in_no_sum(float64):
    """Client 2 trains on a NaN: the others' mean is as if it had stayed away."""

    @dataclass(frozen=True, kw_only=True)
    class Spoilt(FedPer):
        def client_step(self, sent, personal, local):
            report, kept = super().client_step(sent, personal, local)
            ruin = torch.where(local.size == 5, float("nan"), 0.0)
            return report._replace(params=tree.map(lambda p: p + ruin, report.params)), kept

    ends = []
    for change in (lambda whole: whole, in_parts):
        simulation = change(worlds.simulation(Spoilt(batch=3, lr=0.1), worlds.federation()))
        assert [own.tolist() for own in simulation.advance().left_out] == [[2]]
        ends.append(simulation.tree)
    assert not worlds.differing(*ends, 1e-9)


@dataclass(frozen=True, kw_only=True)
class Secretly(FedAvg):
    """Says that it averages, but weighs clients alike without saying so."""

    averages = True

    def server_step(self, state, cohort, reports):
        return mean_report(reports, uniform=True)


@pytest.mark.parametrize("name", SUMMING)
def test_a_method_that_says_so_is_tried_and_believed(name):
    method = made(name)
    assert summable(method, worlds.simulation(method, worlds.with_public()).states[0])


@pytest.mark.parametrize(
    "method",
    [
        Secretly(),
        Aggregated(FedAvg(), RULES["median"]()),
        Attacked(FedAvg(), SignFlip(), attackers=(1,)),
        poisoner("fedavg", [2], float("nan")),
    ],
    ids=["weighs otherwise", "a rule", "attackers", "its own arrival"],
)
def test_who_needs_the_rows_gets_them(method: Method):
    assert not summable(method, worlds.simulation(method, worlds.federation()).states[0])


def test_rows_are_copied_only_to_leave_some_out() -> None:
    reports = Report({"w": torch.tensor([[1.0, 2.0], [float("nan"), 3.0]])}, torch.ones(2))
    none, second = torch.tensor([False, False]), torch.tensor([False, True])
    assert without_rows(reports, none) is reports
    assert without_rows(reports, second).params["w"].tolist() == [[1, 2], [0, 0]]
    assert reports.params["w"].isnan().any()


def test_of_a_cohort_that_is_broken_as_a_whole_only_noise_is_left():
    """A mean keeps the state as it was; a private sum of nobody still has its noise."""
    start = worlds.simulation(FedAvg(), worlds.federation()).states[0]
    spoilt = Report(tree.repeat(tree.map(torch.ones_like, start), 2), torch.ones(2))
    cohort, bad = torch.tensor([0, 3]), torch.tensor([True, True])
    kept = guarded_server_step(FedAvg(), start, cohort, spoilt, bad)
    assert all(torch.equal(kept[name], leaf) for name, leaf in start.items())
    private = Aggregated(FedAvg(), Private(clip=1.0, noise=1.0, cohort=2.0, force=True))
    state = worlds.simulation(private, worlds.federation()).states[0]
    noised = guarded_server_step(private, state, cohort, spoilt, bad)
    assert all((noised.inner[name] != leaf).all() for name, leaf in state.inner.items())
