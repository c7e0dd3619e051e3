"""The private mean: what it adds, how much, and that nothing is added where nothing is asked."""

import dataclasses
import math

import numpy as np
import pytest
import torch

import tiny
import worlds
from idiolect.aggregation import Private
from idiolect.aggregation.aggregator import Aggregated
from idiolect.aggregation.robust import Mean
from idiolect.core import tree
from idiolect.core.capabilities import Averaging
from idiolect.core.method import RunPlan, Setup
from idiolect.errors import ConfigError, MethodError
from idiolect.experiment.load import parse_experiment
from idiolect.experiment.run import run_experiment
from idiolect.methods import METHODS
from test_laws import made

SETUP = Setup({}, {}, torch.ones(10), 3)
AVERAGING = [n for n, kind in METHODS.items() if issubclass(kind, Averaging) and not kind.pooled]


def joined(rule, params, reference, weight=None, seed=0, round=0):
    memory = rule.start(SETUP._replace(seed=seed))._replace(round=torch.tensor(round))
    rows = len(next(iter(params.values())))
    weight = torch.ones(rows) if weight is None else weight
    return rule.combine(memory, reference, params, weight)


def updates(*lengths):
    """Clients that moved along one axis each, by so much."""
    params = torch.zeros(len(lengths), len(lengths) + 1)
    for row, length in enumerate(lengths):
        params[row, row] = length
    return {"w": params}, {"w": torch.zeros(len(lengths) + 1)}


@pytest.mark.parametrize("name", AVERAGING)
@pytest.mark.parametrize("clip", [1e30, math.inf])
def test_without_noise_and_bound_it_is_the_uniform_mean(name, clip, float64):
    world, ends = worlds.federation(), []
    for rule in (Mean(), Private(clip=clip, force=True)):
        method = Aggregated(made(name), rule)
        simulation = worlds.simulation(method, world, cohort=3)
        for _ in range(3):
            simulation.advance()
        ends.append((simulation.states[0].inner, simulation.tree["personal"]))
    assert not worlds.differing(*ends, 1e-9)


def test_updates_are_shortened_as_wholes_and_weigh_alike():
    """Lengths 4, 0.5 and 2 with S = 1 along separate axes: each third of 1, 0.5 and 1."""
    params, reference = updates(4.0, 0.5, 2.0)
    weight = torch.tensor([100.0, 1, 7])
    got, _ = joined(Private(clip=1.0), params, reference, weight)
    torch.testing.assert_close(got["w"], torch.tensor([1 / 3, 0.5 / 3, 1 / 3, 0]))


def test_a_client_moves_the_sum_by_the_bound_at_most():
    """Whatever one client reports, infinity included, the mean moves by S / cohort at most."""
    params, reference = updates(0.3, 0.2, 0.1)
    rule = Private(clip=0.5, cohort=3.0)
    without, _ = joined(rule, params, reference, torch.tensor([1.0, 1, 0]))
    for value in (1e38, -1e3, float("inf"), float("nan")):
        params["w"][2] = value
        got, _ = joined(rule, params, reference)
        assert (got["w"] - without["w"]).norm() <= 0.5 / 3 + 1e-6
        assert torch.isfinite(got["w"]).all()


def test_the_noise_of_the_aggregate_has_the_promised_variance():
    """Z = 1.5, S = 2, ten clients: the mean's noise has standard deviation 1.5 · 2 / 10 = 0.3.

    Over n = 200,000 numbers the estimate is within 4/√(2n) = 0.63 % of that, and the mean within
    4 · 0.3/√n; a factor of 2, a cohort forgotten or a variance for a deviation are far outside.
    """
    size = 200_000
    params, reference = {"w": torch.zeros(10, size)}, {"w": torch.zeros(size)}
    rule = Private(clip=2.0, noise=1.5, cohort=10.0)
    drawn, memory = joined(rule, params, reference)
    assert drawn["w"].std().item() == pytest.approx(0.3, rel=4 / math.sqrt(2 * size))
    assert abs(drawn["w"].mean().item()) < 4 * 0.3 / math.sqrt(size)
    # Another round, another seed, another leaf: other noise; the same round: the same.
    again, _ = joined(rule, params, reference)
    assert torch.equal(drawn["w"], again["w"])
    for other in ({"round": 1}, {"seed": 1}):
        one, _ = joined(rule, params, reference, **other)
        assert abs(np.corrcoef(drawn["w"], one["w"])[0, 1]) < 0.02
    idle, after = rule.idle(rule.start(SETUP), reference)
    assert idle["w"].std().item() == pytest.approx(0.3, rel=4 / math.sqrt(2 * size))
    assert int(memory.round) == int(after.round) == 1
    both, _ = joined(rule, {**params, "v": params["w"]}, {**reference, "v": reference["w"]})
    assert abs(np.corrcoef(both["v"], both["w"])[0, 1]) < 0.02


def test_who_was_left_out_does_not_make_the_others_louder():
    """The sum is divided by the clients that were to come, so that a bound stays a bound."""
    params, reference = updates(0.4, 0.4, 0.4, 0.4)
    got, _ = joined(Private(cohort=4.0), params, reference, torch.tensor([1.0, 1, 0, 0]))
    torch.testing.assert_close(got["w"], torch.tensor([0.1, 0.1, 0, 0, 0]))


def test_an_adaptive_bound_finds_the_quantile():
    """Norms 1 … 20 and a quantile of 0.7: S must come to rest between 14 and 15.

    One step by hand from S = 5: five of twenty are within, so S ← 5 · exp(-0.2 (0.25 - 0.7)).
    """
    params, reference = updates(*map(float, range(1, 21)))
    rule = Private(clip=5.0, adaptive=True, quantile=0.7, clip_lr=0.2)
    memory = rule.start(SETUP)
    _, memory = rule.combine(memory, reference, params, torch.ones(20))
    assert memory.clip.item() == pytest.approx(5 * math.exp(0.09))
    for _ in range(200):
        _, memory = rule.combine(memory, reference, params, torch.ones(20))
    assert 13.5 < memory.clip.item() < 15.5


def test_adaptive_clipping_pays_for_its_count():
    """z⁻² = z_Δ⁻² + (2σ_b)⁻²: with z = 1 and σ_b = 1 the updates get z_Δ = 2/√3."""
    size = 100_000
    params, reference = {"w": torch.zeros(10, size)}, {"w": torch.zeros(size)}
    rule = Private(clip=1.0, noise=1.0, cohort=10.0, adaptive=True, count_noise=1.0)
    drawn, _ = joined(rule, params, reference)
    assert drawn["w"].std().item() == pytest.approx(2 / math.sqrt(3) / 10, rel=0.01)
    assert Private(noise=3.0, adaptive=True)._count_noise(100) == 5.0
    assert Private(noise=3.0, adaptive=True)._count_noise(10) == 3.0
    clips = []
    for seed in range(400):
        _, memory = joined(rule, {"w": torch.zeros(10, 1)}, {"w": torch.zeros(1)}, seed=seed)
        clips.append(-math.log(memory.clip.item()) / rule.clip_lr)
    # All ten are within S, so the share is 1 + N(0, σ_b²)/10, less the quantile of a half.
    assert np.mean(clips) == pytest.approx(0.5, abs=4 * 0.1 / 20)
    assert np.std(clips) == pytest.approx(0.1, rel=4 / math.sqrt(800))
    with pytest.raises(ConfigError, match=r"expected more than half the noise multiplier"):
        joined(dataclasses.replace(rule, count_noise=0.4), params, reference)


def test_resume_draws_the_same_noise(float64):
    method = Aggregated(made("fedavg"), Private(noise=1.0, adaptive=True))
    whole = worlds.simulation(method, worlds.federation(), cohort=3, draw="poisson")
    for _ in range(4):
        whole.advance()
    cut = worlds.simulation(method, worlds.federation(), cohort=3, draw="poisson")
    for _ in range(2):
        cut.advance()
    later = worlds.simulation(method, worlds.federation(), cohort=3, draw="poisson")
    later.tree, later.round = cut.tree, cut.round
    for _ in range(2):
        later.advance()
    assert not worlds.differing(whole.tree, later.tree)


def test_seeds_together_draw_what_they_draw_alone(float64):
    both = [worlds.federation(), worlds.federation((2, 8, 4, 1, 6, 3), seed=5)]
    method = Aggregated(made("fedper"), Private(noise=1.0, cohort=3.0))
    together = worlds.simulation(method, both, seeds=(0, 7), cohort=3)
    together.advance()
    states = []
    for run, seed in enumerate((0, 7)):
        alone = worlds.simulation(method, both[run], seeds=(seed,), cohort=3)
        alone.advance()
        assert not worlds.differing(alone.states[0], together.states[run], 1e-9)
        states.append(alone.states[0].inner)
    assert worlds.differing(*states, 1e-3)


def test_noise_falls_on_what_is_shared_only(float64):
    """FedPer's heads after one round are the same with and without noise: they never leave."""
    ends = []
    for rule in (Private(), Private(noise=5.0)):
        simulation = worlds.simulation(Aggregated(made("fedper"), rule), worlds.federation())
        simulation.advance()
        ends.append(simulation)
    personal, shared = ([end.tree["personal"] for end in ends], [e.states[0].inner for e in ends])
    assert not worlds.differing(*personal) and worlds.differing(*shared, 0.1)
    assert not any("fc2" in name for name in tree.named(shared[0]))


def test_running_statistics_are_refused():
    with pytest.raises(MethodError, match="use norm = 'group'"):
        Private().start(SETUP._replace(statistics=frozenset({"norm.running_mean"})))


TOML = tiny.TOML.split("[[methods]]")[0].replace("clients = 6", "clients = 40")
TOML += """
[[methods]]
name = "fedavg"
label = "DP"
aggregate = { name = "dp", clip = 0.5, epsilon = 15.0, delta = 1e-3 }
"""


def test_a_run_says_what_it_promises(tmp_path, monkeypatch):
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path))
    overrides = ["draw=poisson", "rounds=3"]
    beside = '[[methods]]\nname = "fedavg"\nlabel = "open"\n'
    content, _ = run_experiment(parse_experiment(TOML + beside, overrides), tmp_path / "run")
    method = content["methods"]["DP"]
    told = method["privacy"]
    whole = content["privacy"]
    assert whole["epsilon"] == told["epsilon"] and whole["unprotected"] == ["open"]
    assert "Not protected: what open made of the same data" in whole["statement"]
    assert told["releases"] == 2 and told["epsilon_per_release"] < 0.8 * told["epsilon"]
    assert 14.9 < told["epsilon"] <= 15.0 and told["delta"] == 1e-3 and told["meaningful"]
    assert told["noise_multiplier"] == method["settings"]["aggregated"]["noise"] > 0
    assert "against the server" in told["statement"] and told["statement"] in method["notices"]
    # Cut and resumed it is the same run; with more rounds the noise is another, so it is refused.
    run_experiment(parse_experiment(TOML + beside, overrides), tmp_path / "run", resume=True)
    with pytest.raises(Exception, match=r"noise was"):
        run_experiment(
            parse_experiment(TOML, ["draw=poisson", "rounds=4"]), tmp_path / "run", resume=True
        )


def test_a_budget_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path))
    text = TOML.replace("epsilon = 15.0", "noise = 1.0, budget = 4.0")
    experiment = parse_experiment(text, ["draw=poisson", "rounds=50"])
    content, _ = run_experiment(experiment, tmp_path / "run")
    method = content["methods"]["DP"]
    assert 1 <= method["rounds"] < 50 and method["privacy"]["epsilon"] <= 4.0
    assert method["privacy"]["ended_by_budget"]
    rule = Private(noise=1.0, delta=1e-3, budget=4.0, clip=0.5)
    plan = RunPlan(method["rounds"] + 1, 40, 4, "poisson", releases=2)
    assert rule.settled(plan)[1] == method["rounds"]
    assert rule.promise(plan)["privacy"]["epsilon"] > 4.0


@pytest.mark.parametrize(
    ("change", "overrides", "words"),
    [
        ("", ["data.partition.clients=3", "cohort=3"], "hides one client among others, and there"),
        ("epsilon = 15.0, noise = 1.0", [], "give noise or epsilon, not both"),
        ("noise = 0.3", ["rounds=200"], "which protects nobody"),
        ("clip = 1.0", [], "without noise there is no privacy"),
        ("", ["data.partition.clients=10"], "there are 10: with fewer than 30"),
        ("noise = 2.0, delta = 0.1", [], "a chance for each of 40 clients to be laid open"),
        ("noise = 2.0, delta = 0.011", [], "at most 0.01 "),  # below 40 ** -1.1, still a lot
        ("noise = 1.0, budget = 0.1", [], "spent before the first round"),
        ("noise = 3.0, accountant = 'pld'", [], "no bound for cohorts of a fixed size"),
        ("epsilom = 1.0", [], "did you mean 'epsilon'"),
    ],
)
def test_what_would_mean_nothing_is_refused_in_one_line(change, overrides, words, tmp_path):
    text = TOML
    if change:
        text = TOML.replace("clip = 0.5, epsilon = 15.0, delta = 1e-3", change)
    with pytest.raises((ConfigError, MethodError), match=words) as told:
        run_experiment(parse_experiment(text, overrides), tmp_path)
    assert "\n" not in str(told.value) and not (tmp_path / "result.json").exists()


def test_delta_shrinks_with_the_clients_and_is_never_large():
    """40^-1.1 = 0.0173 is cut to 0.01; 1000^-1.1 = 5.0e-4 holds, and 1 / 1000 would be too much."""
    found = [
        Private(noise=9.0).promise(RunPlan(5, clients, 8, "poisson"))["privacy"]
        for clients in (40, 1000)
    ]
    assert [told["delta"] for told in found] == [0.01, pytest.approx(5.012e-4, rel=1e-3)]
    assert all(told["meaningful"] for told in found)
    plan = RunPlan(5, 1000, 8, "poisson")
    with pytest.raises(ConfigError, match=r"give at most 0\.0005"):
        Private(noise=9.0, delta=1e-3).settled(plan)
    forced = Private(noise=9.0, delta=1e-3, force=True)
    assert not forced.settled(plan)[0].promise(plan)["privacy"]["meaningful"]


def test_a_forced_run_needs_no_accountant_and_says_that_it_had_none(monkeypatch):
    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", absent)
    plan = RunPlan(3, 57, 11, "poisson")
    rule, _ = Private(noise=1.25, force=True).settled(plan)
    told = rule.promise(plan)["privacy"]
    assert told["epsilon"] is None and not told["meaningful"]
    assert "ε was not computed, as the accountant is not installed" in told["statement"]
    for strict in (Private(noise=1.25), Private(epsilon=8.0, force=True)):
        with pytest.raises(ConfigError, match=r"pip install 'idiolect\[privacy\]'"):
            strict.settled(plan)


def test_force_runs_and_says_that_it_means_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path))
    text = TOML.replace("epsilon = 15.0, delta = 1e-3", "noise = 0.01, force = true")
    content, _ = run_experiment(parse_experiment(text, ["rounds=2"]), tmp_path / "run")
    told = content["methods"]["DP"]["privacy"]
    assert not told["meaningful"] and "no guarantee worth the name" in told["statement"]
