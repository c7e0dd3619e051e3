"""The audit passes a rule that is right, and catches those that are not."""

import json
import math

import numpy as np
import pytest
import torch
from scipy import stats
from test_rule import TOML
from typer.testing import CliRunner

import tiny
from idiolect.aggregation import Private, aggregator
from idiolect.aggregation import private_mean as rules
from idiolect.cli import app
from idiolect.core import tree
from idiolect.core.method import RunPlan
from idiolect.errors import ConfigError
from idiolect.experiment import privacy_audit
from idiolect.experiment.privacy_audit import audited

# Everyone takes part; and a tenth does, by coins.
ALL = Private(noise=2.0, clip=0.5), RunPlan(4, 150, None, "poisson")
SOME = Private(noise=1.0, clip=0.5), RunPlan(4, 250, 50, "poisson")


def found(setting, trials=6000):
    rule, plan = setting
    ready, rounds = rule.settled(plan)
    return audited(ready, plan._replace(rounds=rounds), trials)


@pytest.mark.parametrize("setting", [ALL, SOME], ids=["all", "some"])
def test_the_right_rule_passes_and_is_not_far_from_its_bound(setting):
    """Attackers do well, and no better than they may: the gap is not the audit's blindness."""
    told = found(setting)
    assert told.passed and 0 < told.lower < told.promised
    best = told.rows[-1]
    assert 0.4 * best.promised < best.found < best.promised


def halved(monkeypatch):
    real = rules.Private._step
    monkeypatch.setattr(rules.Private, "_step", lambda self, *a: real(self, *a) / 2)


def largest_leaf(monkeypatch):
    def norms(updates):
        squares = [leaf.reshape(len(leaf), -1).square().sum(1) for leaf in tree.leaves(updates)]
        return torch.stack(squares).amax(0).sqrt()

    monkeypatch.setattr(aggregator, "row_norms", norms)


def same_every_round(monkeypatch):
    real = rules.from_seed
    monkeypatch.setattr(rules, "from_seed", lambda seed, round: real(seed, 0))


def same_in_every_leaf(monkeypatch):
    class Stuck(rules.NoiseStream):
        kept = None

        def gaussians(self, count):
            self.kept = super().gaussians(count) if self.kept is None else self.kept
            return self.kept

    monkeypatch.setattr(rules, "from_seed", lambda seed, round: Stuck(seed.to_bytes(32, "big")))


@pytest.mark.parametrize("fault", [halved, largest_leaf, same_every_round, same_in_every_leaf])
def test_a_broken_rule_is_caught(fault, monkeypatch):
    fault(monkeypatch)
    assert not found(ALL).passed


def test_a_draw_of_more_clients_than_accounted_for_is_caught(monkeypatch):
    real = privacy_audit.sampling.DRAWS["poisson"]
    monkeypatch.setitem(
        privacy_audit.sampling.DRAWS, "poisson", lambda s, r, who, size: real(s, r, who, 3 * size)
    )
    assert not found(SOME, 8000).passed


def test_the_bound_is_that_of_clopper_and_pearson():
    """60 of 100 right and 5 of 100 wrong at 90 %: ln((0.5130 - δ) / 0.1023)."""
    score = np.r_[np.ones(60), np.zeros(40), np.ones(5), np.zeros(95)]
    took = np.arange(200) < 100
    (bound,) = privacy_audit._bounds(score, took, np.array([0.5]), 0.01, 0.1)
    least = stats.binomtest(60, 100).proportion_ci(0.9).low
    most = stats.binomtest(5, 100).proportion_ci(0.9).high
    assert bound == pytest.approx(math.log((least - 0.01) / most))
    nothing = privacy_audit._bounds(score[::-1], took, np.array([2.0]), 0.01, 0.1)
    assert nothing[0] == -math.inf


def test_the_command_says_both_bounds_and_its_exit_code_tells(tmp_path, monkeypatch):
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path))
    path = tmp_path / "private.toml"
    path.write_text(TOML.replace("epsilon = 15.0, delta = 1e-3", "noise = 2.0"))
    given = ["privacy", "audit", str(path), "--trials", "1500", "--set", "draw=poisson"]
    given += ["--set", "rounds=1"]
    good = CliRunner().invoke(app, [*given, "--json"])
    assert good.exit_code == 0, good.output
    told = json.loads(good.stdout)["result"]["DP"]
    assert told["passed"] and 0 <= told["lower_bound"] <= told["promised_epsilon"] <= 15
    assert told["attacks"][0]["rounds"] == 1 and told["confidence"] == 0.95
    monkeypatch.setattr(rules, "from_seed", lambda seed, round: rules.NoiseStream(bytes(32)))
    bad = CliRunner().invoke(app, given)
    assert bad.exit_code == 11 and "promise is broken" in bad.output
    assert "publish nothing" in bad.output


def test_what_has_nothing_to_audit_is_refused(tmp_path):
    path = tmp_path / "open.toml"
    path.write_text(tiny.TOML)
    refused = CliRunner().invoke(app, ["privacy", "audit", str(path)])
    assert refused.exit_code == 2 and "no differential privacy to audit" in refused.output
    with pytest.raises(ConfigError, match="nothing to audit"):
        audited(Private(force=True), RunPlan(2, 40, 4, "poisson"))
    with pytest.raises(ConfigError, match="at least 1000"):
        audited(Private(noise=1.0), RunPlan(2, 40, 4, "poisson"), 10)
