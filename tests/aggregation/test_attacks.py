"""Simulated attacks: each does what its name says, breaks the mean, and is survived as promised."""

import dataclasses

import numpy as np
import pytest
import torch

import worlds
from idiolect import api
from idiolect.aggregation import MODEL_ATTACKS, Attacked
from idiolect.aggregation.aggregator import Aggregated
from idiolect.aggregation.attacks import (
    AttackState,
    Broken,
    Gaussian,
    Replace,
    SignFlip,
    _generator,
)
from idiolect.aggregation.robust import Median
from idiolect.data.poison import attackers, backdoor, label_flip
from idiolect.errors import ConfigError, Diverged, MethodError
from idiolect.experiment.build import build_jobs
from idiolect.experiment.load import parse_experiment
from idiolect.experiment.run import run_experiment
from idiolect.methods import FedAvg
from test_laws import choose, made

TIGHT = 1e-9


def arrived(attack, cohort=(0, 1, 2, 4), liars=(1, 4), rounds=1):
    """What reaches the server, honest and attacked, with what was sent; per client."""
    caught = []

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Caught(FedAvg):
        averages = True

        def server_step(self, state, cohort, reports):
            caught.append((state, reports.params))
            return super().server_step(state, cohort, reports)

    for method in (
        Caught(batch=3, lr=0.1),
        Attacked(Caught(batch=3, lr=0.1), attack, attackers=liars),
    ):
        simulation = choose(worlds.simulation(method, worlds.federation()), *[cohort] * rounds)
        for _ in range(rounds):
            simulation.advance()
    (sent, honest), (_, lies) = caught[rounds - 1], caught[2 * rounds - 1]
    return sent, honest, lies


@pytest.mark.parametrize(
    ("attack", "factor"),
    [(SignFlip(), -1.0), (SignFlip(scale=3.0), -3.0), (Replace(scale=7.0), 7.0), (Replace(), 2.0)],
)
def test_attackers_move_as_far_as_they_say_and_others_not_at_all(attack, factor, float64):
    """Replacing without a factor takes cohort / attackers, here 4 / 2."""
    sent, honest, lies = arrived(attack)
    for name, start in sent.items():
        for row, client in enumerate((0, 1, 2, 4)):
            step = honest[name][row] - start
            expected = factor * step if client in (1, 4) else step
            torch.testing.assert_close(lies[name][row] - start, expected)


def test_noise_is_drawn_from_the_seed_and_the_round(float64):
    sent, _, lies = arrived(Gaussian(spread=2.0))
    _, _, again = arrived(Gaussian(spread=2.0))
    noise = torch.cat([(lies[n][[1, 3]] - sent[n]).reshape(-1) for n in sent])
    assert not worlds.differing(lies, again)
    assert 1.5 < noise.std().item() < 2.5 and len(noise) > 100
    draws = [_generator(AttackState(torch.tensor(n), torch.tensor(0))) for n in (0, 0, 1)]
    same, repeated, later = (torch.randn(5, generator=draw) for draw in draws)
    assert torch.equal(same, repeated) and not torch.equal(same, later)


def test_broken_reports_are_left_out_by_the_guard():
    method = Attacked(FedAvg(batch=3, lr=0.1), Broken(), attackers=(1,))
    simulation = choose(worlds.simulation(method, worlds.federation()), (0, 1, 2))
    plain = choose(worlds.simulation(FedAvg(batch=3, lr=0.1), worlds.federation()), (0, 2))
    assert simulation.advance().left_out[0].tolist() == [1]
    plain.advance()
    assert not worlds.differing(simulation.states[0].inner, plain.states[0], 1e-6)
    everyone = Attacked(FedAvg(), Broken(value="inf"), attackers=tuple(range(6)))
    with pytest.raises(Diverged, match="nobody is left"):
        worlds.simulation(everyone, worlds.federation()).advance()


@pytest.mark.parametrize("name", MODEL_ATTACKS)
def test_backends_agree_and_resume_is_exact_under_attack(name, float64):
    method = Attacked(Aggregated(made("fedper"), Median()), MODEL_ATTACKS[name](), attackers=(0, 3))
    ends = []
    for kind in ("vectorised", "sequential"):
        simulation = worlds.simulation(method, worlds.federation(), cohort=4, kind=kind)
        simulation.advance()
        if kind == "sequential":
            later = worlds.simulation(method, worlds.federation(), cohort=4, kind=kind)
            later.tree, later.round = simulation.tree, simulation.round
            simulation = later
        simulation.advance()
        ends.append(simulation.tree)
    assert not worlds.differing(*ends, TIGHT)


def test_methods_whose_reports_are_not_averaged_are_refused():
    with pytest.raises(MethodError, match="sign flipping cannot be simulated on it"):
        Attacked(made("local"), SignFlip(), attackers=(0,))


# Attacks on data.


def test_flipped_labels_are_the_attackers_training_labels_only():
    world = worlds.federation()
    before, after = world.dataset.y, label_flip(world, (1, 3))
    for client in range(world.clients):
        mine = world.train[client]
        expected = 2 - before[mine] if client in (1, 3) else before[mine]
        assert np.array_equal(after.dataset.y[mine], expected)
        for part in ("val", "test"):
            rows = getattr(world, part)[client]
            assert np.array_equal(after.dataset.y[rows], before[rows])
            assert len(getattr(after, part)[client]) == (0 if client in (1, 3) else len(rows))
    one = label_flip(world, (1,), source=2, target=0).dataset.y[world.train[1]]
    assert np.array_equal(one, np.where(before[world.train[1]] == 2, 0, before[world.train[1]]))
    assert "client 1, client 3; they are not scored" in after.warnings()[0]
    with pytest.raises(ConfigError, match=r"target is 9, expected a class of 0\.\.2"):
        label_flip(world, (1,), source=0, target=9)


def test_a_backdoor_marks_a_share_and_its_copies_belong_to_nobody():
    world = api.federation("embedded", "iid", 0, clients=5, per_client=40)
    held = backdoor(world, (2,), target=7, share=0.5, patch=4)
    changed = np.flatnonzero(
        (held.dataset.x[: len(world.dataset)] != world.dataset.x).any((1, 2, 3))
    )
    assert set(changed) <= set(world.train[2]) and len(changed) == round(0.5 * len(world.train[2]))
    assert (held.dataset.y[changed] == 7).all()
    assert (held.dataset.x[changed][..., -4:, -4:] == 255).all()
    owned = {int(r) for part in (held.train, held.val, held.test) for rows in part for r in rows}
    for client, rows in enumerate(held.marked):
        own = world.test[client]
        others = own[world.dataset.y[own] != 7]
        assert len(rows) == (0 if client == 2 else len(others))
        assert not owned & set(rows.tolist()) and (held.dataset.y[rows] == 7).all()
        if len(rows):
            copies = held.dataset.x[rows].copy()
            assert (copies[..., -4:, -4:] == 255).all()
            copies[..., -4:, -4:] = world.dataset.x[others][..., -4:, -4:]
            assert np.array_equal(copies, world.dataset.x[others])


def test_attackers_are_named_listed_or_drawn():
    world = worlds.federation()
    assert attackers(world, clients=("client 4", 1)) == (1, 4)
    drawn = attackers(world, fraction=0.34)
    assert len(drawn) == 2 and drawn == attackers(world, fraction=0.34)
    assert len({attackers(world, fraction=0.34, seed=seed) for seed in range(9)}) > 2
    for wrong, words in (
        ({}, "give fraction or clients"),
        ({"clients": (9,)}, "there is no client 9"),
        ({"fraction": 0.99}, "no honest client"),
    ):
        with pytest.raises(ConfigError, match=words):
            attackers(world, **wrong)


# What survives what, on real digits.

TOML = """
name = "attacks"
rounds = 15
[data]
partition = { name = "iid", clients = 10, per_client = 200 }
[model]
name = "mlr"
[training]
batch = 20
lr = 0.02 # no more: at 0.1 steps overshoot, and rounding decides some points of accuracy
[evaluate]
every = 15
save_models = false
[backend]
device = "cpu"
width = 10
"""
SURVIVORS = {
    "median": '"median"',
    "trimmed": '{ name = "trimmed-mean", trim = 0.3 }',
    "geometric": '"geometric-median"',
    "krum": '{ name = "krum", attackers = 3 }',
    "multi-krum": '{ name = "multi-krum", attackers = 3 }',
    "norm-bound": '"norm-bound"',
}


def under(attack, tmp_path, rules):
    text = TOML + (f"[attack]\n{attack}\nfraction = 0.3\n" if attack else "")
    for label, rule in rules.items():
        text += f'[[methods]]\nname = "fedavg"\nlabel = "{label}"\naggregate = {rule}\n'
    content, _ = run_experiment(parse_experiment(text), tmp_path)
    return {k: m["seeds"][0]["models"]["global"] for k, m in content["methods"].items()}


@pytest.mark.parametrize(
    ("attack", "broken", "survived"),
    [
        ('name = "label-flip"', 0.75, ("median", "trimmed", "multi-krum")),
        ('name = "replace"', 0.5, tuple(SURVIVORS)[:-1]),
        ('name = "sign-flip"\nscale = 5.0', 0.3, ("median", "trimmed", "krum", "multi-krum")),
        ('name = "gaussian"', 0.6, tuple(SURVIVORS)),
    ],
)
def test_an_attack_breaks_the_mean_and_not_what_promises_to_survive(
    attack, broken, survived, tmp_path, monkeypatch
):
    """Unattacked all are at 0.78 to 0.83; three of ten clients attack.

    The norm bound makes the loud as loud as others; it survives noise, not a shared direction.
    Krum takes one client's model, which is at 0.74 whoever attacks: not much above a mean that
    flipped labels have drawn down to 0.73.
    """
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path))
    rules = {"mean": '"mean"', **{name: SURVIVORS[name] for name in survived}}
    found = under(attack, tmp_path / "run", rules)
    assert found["mean"]["mean"] < broken
    for name in survived:
        assert found[name]["mean"] > max(0.71, found["mean"]["mean"] + 0.03), name


def test_a_backdoor_is_found_in_the_mean_and_not_behind_the_median(tmp_path, monkeypatch):
    """Accuracy does not tell: what is marked becomes a seven, all else is classified as ever."""
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path))
    safe = ("median", "trimmed", "krum", "multi-krum")
    rules = {"mean": '"mean"', **{k: SURVIVORS[k] for k in safe}}
    found = under('name = "backdoor"\ntarget = 7\nscale = 4.0', tmp_path / "run", rules)
    assert found["mean"]["attack_success"] > 0.9 and found["mean"]["mean"] > 0.75
    for name in safe:
        assert found[name]["attack_success"] < 0.3, name
        assert found[name]["mean"] > 0.71, name


def test_a_method_that_sends_nothing_is_not_attacked_and_local_scores_are_the_honest(tmp_path):
    text = TOML + '[attack]\nname = "sign-flip"\nclients = ["client 2", 5]\n'
    text += '[[methods]]\nname = "local"\n[[methods]]\nname = "fedavg"\naggregate = "median"\n'
    experiment = parse_experiment(text)
    local, fedavg = build_jobs(experiment)[0]
    assert local.method.title == "Local" and fedavg.method.attackers == (2, 5)
    assert [len(rows) == 0 for rows in local.federations[0].test] == [
        n in (2, 5) for n in range(10)
    ]
    assert fedavg.identity["attack"]["name"] == "sign-flip"


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ('name = "sign-flop"\nfraction = 0.2', "did you mean 'sign-flip'"),
        ('name = "sign-flip"', "give fraction or clients"),
        ('name = "sign-flip"\nfraction = 0.2\nscal = 2.0', "did you mean 'scale'"),
        ('name = "backdoor"\nfraction = 0.2\ntarget = 12', "target is 12, expected a class"),
        ('name = "backdoor"\nfraction = 0.2\npatch = 99', "patch is 99, expected 1..28"),
        ('name = "gaussian"\nfraction = 0.2\nspread = -1.0', "spread"),
    ],
)
def test_a_wrong_attack_is_one_line(table, words):
    text = TOML + f'[attack]\n{table}\n[[methods]]\nname = "fedavg"\n'
    with pytest.raises(ConfigError, match=words) as told:
        build_jobs(parse_experiment(text))
    assert "\n" not in str(told.value)


def test_the_noise_of_two_rounds_differs_in_a_run(float64):
    """Without training both rounds' honest reports are what was sent: what moves is noise."""
    method = Attacked(FedAvg(batch=3, lr=1e-37), Gaussian(), attackers=(0, 1))
    simulation = choose(worlds.simulation(method, worlds.federation()), (0, 1), (0, 1))
    moved, before = [], simulation.states[0].inner
    for _ in range(2):
        simulation.advance()
        moved.append(simulation.states[0].inner["fc1.weight"] - before["fc1.weight"])
        before = simulation.states[0].inner
    assert moved[0].abs().min() > 0 and worlds.differing(*moved, 0.1)
