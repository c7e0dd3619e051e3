"""Server optimisers by hand, and around methods that average."""

import math
from typing import Any

import pytest
import torch

import worlds
from idiolect.aggregation import SERVER_OPTIMISERS
from idiolect.aggregation.aggregator import Aggregated, Aggregator
from idiolect.aggregation.server_optimisers import FedAdagrad, FedAdam, FedAvgM, FedYogi
from idiolect.core import tree
from idiolect.core.capabilities import sums
from idiolect.core.method import Report, Setup
from idiolect.engine.server_update import summable
from idiolect.errors import ConfigError, MethodError
from idiolect.experiment.load import parse_experiment
from idiolect.methods import FedAvg, FedProto
from test_laws import made


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(value: float) -> Any:
    return pytest.approx(value, rel=1e-12)


def two_rounds(rule: Aggregator, uniform: bool = False) -> list[float]:
    """From x = 1, reports whose mean by examples is x + 2 in the first round and x − 1 then."""
    method = Aggregated(FedAvg(uniform=uniform), rule)
    start = _setup({"w": tensor(1.0)})
    state, found = method.init_server(start), []
    for update in (2.0, -1.0):
        x = float(state.inner["w"])
        reports = Report({"w": tensor([x + update - 3, x + update + 1])}, tensor([1.0, 3.0]))
        state = method.server_step(state, torch.arange(2), reports)
        found.append(float(state.inner["w"]))
    return found


def _setup(params: Any) -> Setup:
    return Setup(params, params, tensor([1.0, 3.0]), 2)


def test_momentum_by_hand() -> None:
    """M = 2, then 0.5 · 2 − 1 = 0: x = 1 + 0.1 · 2 and stays."""
    assert two_rounds(FedAvgM(lr=0.1, beta1=0.5)) == [close(1.2), close(1.2)]


def test_adam_by_hand() -> None:
    """V: 0.01 → 0.75 · 0.01 + 0.25 · 4 = 1.0075 → 0.75 v + 0.25; m: 1 → −0, with β₁ = 1/2."""
    first = 0.75 * 0.01 + 0.25 * 4
    x = 1 + 0.1 * 1 / (math.sqrt(first) + 0.1)
    rule = FedAdam(lr=0.1, beta1=0.5, beta2=0.75, tau=0.1)
    assert two_rounds(rule) == [close(x), close(x)]  # m = 1/2 · 1 + 1/2 · (−1) = 0
    second = 0.75 * first + 0.25
    y = 1 + 0.1 * 2 / (math.sqrt(first) + 0.1)
    rule = FedAdam(lr=0.1, beta1=0.0, beta2=0.75, tau=0.1)
    assert two_rounds(rule) == [close(y), close(y - 0.1 / (math.sqrt(second) + 0.1))]


def test_yogi_by_hand() -> None:
    """V rises by 1/4 of the square where that is larger, and falls by as much where it is not."""
    first = 0.01 + 0.25 * 4
    second = first - 0.25 * 1
    y = 1 + 0.1 * 2 / (math.sqrt(first) + 0.1)
    rule = FedYogi(lr=0.1, beta1=0.0, beta2=0.75, tau=0.1)
    assert two_rounds(rule) == [close(y), close(y - 0.1 / (math.sqrt(second) + 0.1))]


def test_adagrad_by_hand() -> None:
    y = 1 + 0.1 * 2 / (math.sqrt(4.01) + 0.1)
    rule = FedAdagrad(lr=0.1, tau=0.1)
    assert two_rounds(rule) == [close(y), close(y - 0.1 / (math.sqrt(5.01) + 0.1))]


def test_the_mean_is_the_methods_own() -> None:
    """Clients alike: the updates are 1 smaller."""
    assert two_rounds(FedAvgM(lr=0.1, beta1=0.0), uniform=True) == [close(1.1), close(0.9)]


@pytest.mark.parametrize("inner", ["fedavg", "ditto", "fedper", "fedbabu", "feddbe", "fedbn"])
def test_momentum_of_nothing_at_rate_one_is_the_method_itself(inner: str, float64: None) -> None:
    """Whatever it averages: parts of the network, or trees of several."""
    states = []
    for method in (made(inner), Aggregated(made(inner), FedAvgM(lr=1.0, beta1=0.0))):
        simulation = worlds.simulation(method, worlds.with_public(), cohort=3)
        for _ in range(2):
            simulation.advance()
        states.append(simulation.states[0])
    assert not worlds.differing(states[0], states[1].inner, 1e-9)


@pytest.mark.parametrize("name", SERVER_OPTIMISERS)
def test_backends_agree_and_sums_will_do(name: str, float64: None) -> None:
    ends = []
    for kind in ("vectorised", "sequential"):
        method = Aggregated(made("ditto"), SERVER_OPTIMISERS[name]())
        simulation = worlds.simulation(
            method, worlds.federation(), cohort=3, kind=kind, build=worlds.Batched
        )
        for _ in range(2):
            simulation.advance()
        ends.append(simulation.tree)
    assert not worlds.differing(*ends, 1e-9)
    assert sums(method) and summable(method, simulation.states[0])


def test_running_statistics_are_averaged() -> None:
    """Momentum of rate 0.5 moves a weight half the way, a running mean the whole."""
    method = Aggregated(FedAvg(), FedAvgM(lr=0.5, beta1=0.0))
    params = {"norm.weight": tensor([0.0]), "norm.running_mean": tensor([0.0])}
    state = method.init_server(_setup(params))
    reports = Report(tree.map(lambda leaf: tensor([[4.0], [4.0]]), params), tensor([1.0, 1.0]))
    new = method.server_step(state, torch.arange(2), reports).inner
    assert {name: leaf.tolist() for name, leaf in new.items()} == {
        "norm.weight": [2.0], "norm.running_mean": [4.0],
    }  # fmt: skip


def test_the_mean_of_features_is_no_parameter(float64: None) -> None:
    """FedDBE's mean of the first round is the clients' own, at whatever rate the server steps."""
    plain, stepped = (
        worlds.simulation(method, worlds.federation(), cohort=3)
        for method in (made("feddbe"), Aggregated(made("feddbe"), FedAdam()))
    )
    for _ in range(2):
        plain.advance()
        stepped.advance()
    assert torch.equal(plain.states[0].mean, stepped.states[0].inner.mean)
    assert worlds.differing(plain.states[0].params, stepped.states[0].inner.params, 1e-3)


@pytest.mark.parametrize("name", SERVER_OPTIMISERS)
def test_figures_of_examples_are_not_stepped_along(name: str) -> None:
    with pytest.raises(MethodError, match="FedProto averages figures of examples"):
        Aggregated(FedProto(), SERVER_OPTIMISERS[name]())


def test_adagrad_forgets_nothing() -> None:
    with pytest.raises(ConfigError, match=r"FedAdagrad: beta2 is 0\.5, but its squares add up"):
        FedAdagrad(beta2=0.5)


TOML = """
name = "small"
[data]
partition = { name = "iid", clients = 4 }
[model]
name = "mlr"
[[methods]]
"""


@pytest.mark.parametrize("rule", [FedAvgM, FedAdam, FedYogi, FedAdagrad])
def test_what_forgets_nothing_is_refused(rule: type[FedAvgM]) -> None:
    """With β₁ = 1 Adam's m stays at zero and nothing is ever learned; FedAvgM's has no bound."""
    with pytest.raises(ConfigError, match=f"{rule.__name__}: beta1 is 1.0, expected below 1"):
        rule(beta1=1.0)
    if issubclass(rule, FedAdam):
        with pytest.raises(ConfigError, match=f"{rule.__name__}: beta2 is 1.0, expected below 1"):
            rule(beta2=1.0)


def test_a_file_names_it_as_a_rule_and_never_as_a_method() -> None:
    given = 'name = "fedavg"\naggregate = { name = "fedadam", lr = 0.1 }'
    (table,) = parse_experiment(TOML + given).methods
    assert table.aggregate is not None and table.aggregate.options["lr"] == 0.1
    with pytest.raises(ConfigError, match=r"no method but a rule .* aggregate = 'fedadam'"):
        parse_experiment(TOML + 'name = "fedadam"')
