"""The noise itself: its distribution, its grid, where it comes from, and what one client can move.

What was wrong before: noise came from torch's generator, whose seed has 32 bits of effect, so that
it could be found by trying; and it was drawn as floating-point numbers.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

import worlds
from idiolect.aggregation import Private, noise
from idiolect.aggregation import private_mean as rules
from idiolect.aggregation.aggregator import Aggregated, Shortened, row_norms, shorten
from idiolect.core import tree
from idiolect.core.capabilities import Privacy, has
from idiolect.core.checkpoint import save
from idiolect.core.method import Report, RunPlan, Setup
from idiolect.deploy import secure_sum
from idiolect.deploy.server import apply_reports
from idiolect.errors import CheckpointError, ConfigError
from idiolect.experiment import run_state
from idiolect.methods.fedavg import FedAvg
from test_laws import made

SETUP = Setup({}, {}, torch.ones(10), 3)
SYSTEM = Private(noise=1.0, noise_source="system", cohort=10.0)


def test_the_integers_are_gaussian_to_the_last_bit():
    drawn = noise.from_seed(1, 2).gaussians(400_000)
    assert (drawn == np.rint(drawn)).all()
    assert stats.kstest(drawn / noise.SPREAD, "norm").pvalue > 1e-3
    assert drawn.std() == pytest.approx(noise.SPREAD, rel=4 / math.sqrt(800_000))
    counts = np.bincount(drawn.astype(np.int64) & 63)
    assert stats.chisquare(counts).pvalue > 1e-3


def test_a_small_spread_has_the_discrete_gaussians_probabilities(monkeypatch):
    """With a standard deviation of 2 every integer's share can be counted: ∝ exp(-k²/8)."""
    monkeypatch.setattr(noise, "SPREAD", 2)
    drawn = noise.from_seed(0, 0).gaussians(400_000).astype(int)
    reach = np.arange(-8, 9)
    wanted = np.exp(-(reach**2) / 8)
    counts = np.array([(drawn == k).sum() for k in reach])
    share = wanted / np.exp(-(np.arange(-40, 41) ** 2) / 8).sum()
    assert stats.chisquare(counts, share / share.sum() * counts.sum()).pvalue > 1e-3


def test_every_bit_of_seed_and_round_matters():
    """Torch's generator heeds the lower half of its seed only; a 64-bit seed was found in 2^32."""
    first = noise.from_seed(5, 0).words(4)
    for seed, round in ((5 + 2**32, 0), (5 + 2**62, 0), (5, 1), (6, 0)):
        assert not (noise.from_seed(seed, round).words(4) == first).any()
    assert (noise.from_seed(5, 0).words(4) == first).all()


def test_the_key_has_256_bits_of_the_operating_system(monkeypatch):
    asked = []
    real = noise.secrets.token_bytes
    monkeypatch.setattr(noise.secrets, "token_bytes", lambda n: asked.append(n) or real(n))
    params, reference = {"w": torch.zeros(10, 2000)}, {"w": torch.zeros(2000)}
    memory = SYSTEM.start(SETUP)
    found = [SYSTEM.combine(memory, reference, params, torch.ones(10)) for _ in range(2)]
    assert asked == [32, 32]
    (one, after), (two, _) = found
    assert abs(np.corrcoef(one["w"], two["w"])[0, 1]) < 0.15
    # Nothing that could draw it again is remembered.
    assert after._fields == ("clip", "round", "seed")
    assert (float(after.clip), int(after.round), int(after.seed)) == (1.0, 1, -1)


def test_a_federation_takes_the_system_whatever_the_experiment_says():
    rule = Private(noise=9.0, noise_source="seed")
    assert int(rule.start(SETUP._replace(seed=4)).seed) == 4
    assert int(rule.start(SETUP._replace(seed=4, federated=True)).seed) == -1
    plan = RunPlan(2, 100, 10, "poisson", federated=True)
    ready, _ = rule.settled(plan)
    assert ready.noise_source == "system" and not ready.repeatable
    told = ready.promise(plan)["privacy"]
    assert told["noise_source"] == "system" and "can remove the noise" not in told["statement"]


def test_a_simulation_says_that_its_seed_removes_the_noise():
    plan = RunPlan(20, 1000, 50, "poisson")
    told = Private(noise=1.0).promise(plan)["privacy"]
    assert (
        "whoever knows the seed, which stands in the result, can remove the noise"
        in (told["statement"])
    )
    assert 'noise_source = "system"' in told["statement"]
    # With noise that nobody can draw again the cohorts are still known: nothing is gained by them.
    real = Private(noise=1.0, noise_source="system", force=True).promise(plan)["privacy"]
    assert "as if everyone took part in every round" in real["statement"]
    assert real["epsilon"] == real["epsilon_draw_known"] == told["epsilon_draw_known"]
    assert real["epsilon"] > 3 * told["epsilon"]
    hub = Private(noise=1.0, noise_source="system").promise(plan._replace(federated=True))
    assert hub["privacy"]["epsilon"] == told["epsilon"]
    assert f"has e^{told['epsilon_draw_known']:.3g} instead" in hub["privacy"]["statement"]


@pytest.mark.parametrize("way", ["rows", "sum"])
def test_sums_lie_on_one_grid_whatever_the_data(way, monkeypatch):
    """What is released is a whole number of steps, so its low bits tell nothing of the data."""
    seen = []
    real = rules.Private._noised
    monkeypatch.setattr(
        rules.Private, "_noised", lambda self, *a: seen.append((a[2], a[3])) or real(self, *a)
    )
    rule = Private(noise=0.7, clip=0.3, cohort=4.0)
    for scale in (1e-3, 0.1, 7.0):
        params = {"w": scale * torch.randn(4, 33, generator=torch.Generator().manual_seed(1))}
        if way == "rows":
            rule.combine(rule.start(SETUP), {"w": torch.zeros(33)}, params, torch.ones(4))
        else:
            total = Shortened({"w": params["w"].sum(0)}, torch.tensor(2.0))
            rule.combine_sum(rule.start(SETUP), {"w": torch.zeros(33)}, total, 4)
    assert len({step for _, step in seen}) == 1
    for steps, step in seen:
        assert steps["w"].dtype == torch.float64 and (steps["w"] == steps["w"].round()).all()
        assert step == pytest.approx(0.7 * 0.3 / noise.SPREAD, rel=1e-4)


def test_one_client_moves_the_exact_sum_by_the_bound_at_most(monkeypatch):
    """Over all leaves, in steps of the grid, without the rounding of sums in single precision."""
    seen = []
    real = rules.Private._noised
    monkeypatch.setattr(
        rules.Private, "_noised", lambda self, *a: seen.append((a[2], a[3])) or real(self, *a)
    )
    draw = torch.Generator().manual_seed(0)
    shapes = {"a": (40, 30), "b": (40,), "c": (3, 3)}
    reference = {name: torch.randn(s, generator=draw) for name, s in shapes.items()}
    rule = Private(noise=1.0, clip=0.5, cohort=20.0)
    for length in (1e-4, 0.01, 1.0, 1e6):
        params = {n: sent + length * torch.randn(20, *sent.shape) for n, sent in reference.items()}
        weight = torch.ones(20)
        rule.combine(rule.start(SETUP), reference, params, weight)
        weight[7] = 0
        rule.combine(rule.start(SETUP), reference, params, weight)
        (one, step), (two, _) = seen[-2:]
        moved = sum(float(((one[n] - two[n]) * step).square().sum()) for n in shapes)
        assert math.sqrt(moved) <= 0.5 * (1 + rules._ROUNDED)
        if length >= 1:
            assert math.sqrt(moved) == pytest.approx(0.5, rel=1e-3)


def _seen(monkeypatch):
    seen = []
    real = rules.Private._noised
    monkeypatch.setattr(
        rules.Private, "_noised", lambda self, *a: seen.append(a[2]["w"]) or real(self, *a)
    )
    return seen


def _refuse_loud(one, two, z):
    """Exactly, in whole steps: the noise has a spread of 2^28 of them."""
    moved = sum((int(a) - int(b)) ** 2 for a, b in zip(one.tolist(), two.tolist(), strict=True))
    assert moved * Fraction(z) ** 2 <= noise.SPREAD**2


@pytest.mark.parametrize("z", [1e-4, 1000.2])
def test_the_noise_is_z_times_what_one_client_moves_whatever_is_rounded(z, monkeypatch):
    """Coarse steps, of which each number is 2683.8: rounded up they would be longer than S."""
    seen, rule = _seen(monkeypatch), Private(noise=z, clip=0.5, cohort=3.0)
    for trial in range(8):
        draw = torch.Generator().manual_seed(trial)
        row = torch.ones(10_000) if trial == 0 else torch.randn(10_000, generator=draw)
        params = {"w": torch.stack([row, -row])}
        for weight in (torch.ones(2), torch.tensor([0.0, 1.0])):
            rule.combine(rule.start(SETUP), {"w": torch.zeros(10_000)}, params, weight)
        _refuse_loud(*seen[-2:], z)


@pytest.mark.parametrize(("z", "clip"), [(1.0, 1.3009e-5), (1000.2, 0.5)])
def test_under_masks_too_where_nodes_round_before_they_are_added_up(z, clip, monkeypatch):
    """To 2^-32, of which each number is 558.7 here; what the server adds is rounded once more."""
    seen, rule = _seen(monkeypatch), Private(noise=z, clip=clip, cohort=3.0)
    sent = {"w": torch.zeros(10_000)}

    def report(value):
        rows = {"w": torch.full((1, 10_000), float(value))}
        cut = shorten(sent, rows, torch.ones(1), torch.tensor(clip))
        return Report(tree.map(lambda leaf: leaf[0], cut), torch.ones(()))

    step = z * clip / noise.SPREAD
    for other in (0.0, 0.3 * step, 0.49 * step, 1.0):
        for mine in (report(1.0), report(0.0)):
            rest = [report(other), report(0.0)]
            total = sum(secure_sum.fixed(one, 3) for one in (mine, *rest))
            mean = secure_sum._mean(total, mine)
            rule.combine_sum(rule.start(SETUP), sent, tree.scale(3.0, mean.params), 3)
        _refuse_loud(*seen[-2:], z)


def test_the_norm_of_a_report_is_over_all_leaves():
    """3, 4 and 12 in three leaves: 13; the largest leaf's alone would be 12."""
    updates = {"a": torch.tensor([[3.0]]), "b": torch.tensor([[4.0]]), "c": torch.tensor([[12.0]])}
    assert row_norms(updates).item() == 13
    reference = tree.map(lambda leaf: torch.zeros(1), updates)
    rule = Private(clip=1.0)
    got, _ = rule.combine(rule.start(SETUP), reference, updates, torch.ones(1))
    torch.testing.assert_close(got["c"], torch.tensor([12 / 13]))


class Sick(FedAvg):
    """Every client reports NaN."""

    def client_step(self, sent, personal, local):
        report, kept = super().client_step(sent, personal, local)
        return report._replace(params=tree.map(lambda leaf: leaf * math.nan, report.params)), kept


def test_a_round_in_which_every_report_is_bad_is_noised_all_the_same():
    """Without noise it would say so; an end of the run would, too."""
    rule = Private(noise=2.0, clip=0.1, cohort=5.0, force=True)
    method = Aggregated(Sick(lr=0.1), rule)
    simulation = worlds.simulation(method, worlds.federation())
    before = simulation.states[0]
    done = simulation.advance()
    assert len(done.left_out[0]) == 5
    after = simulation.states[0]
    moved = torch.cat(
        [
            (one - two).reshape(-1)
            for one, two in zip(tree.leaves(after.inner), tree.leaves(before.inner), strict=True)
        ]
    )
    assert moved.std().item() == pytest.approx(2 * 0.1 / 5, rel=4 / math.sqrt(2 * len(moved)))
    assert int(after.memory.round) == 1
    # The hub's step is guarded by the same rule.
    rows = tree.map(lambda leaf: torch.full((3, *leaf.shape), math.nan), before.inner)
    new = apply_reports(method, before, [0, 1, 2], Report(rows, torch.ones(3)))
    assert tree.leaves(new.inner)[0].isfinite().all()
    assert worlds.differing(new.inner, before.inner, 1e-3)


def test_what_repeats_and_what_hides_is_said_through_wrappers():
    plain = made("fedavg")
    assert not has(plain, Privacy)
    for source, repeats in (("seed", True), ("system", False)):
        method = Aggregated(plain, Private(noise=1.0, noise_source=source))
        assert has(method, Privacy) and method.repeatable is repeats


def test_an_old_checkpoint_with_a_key_is_refused(tmp_path):
    kept = {"state": {"server": ({"inner": torch.ones(1), "memory": {"key": torch.tensor(7)}},)}}
    save(tmp_path / "DP.safetensors", kept, {"identity": {}})
    with pytest.raises(CheckpointError, match=r"holds the key of a private run's noise.*start"):
        run_state.load(tmp_path / "DP.safetensors", {}, "cpu")


def test_without_the_cipher_it_is_said_before_anything_is_trained(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"pip install 'idiolect\[privacy\]'"):
        Private(noise=9.0).settled(RunPlan(2, 100, 10, "poisson"))
