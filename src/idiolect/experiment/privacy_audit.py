"""Audit the private rule of an experiment: how well attackers can tell that a client took part.

Differential privacy promises that no attacker does better than ε allows. Here one tries its best:
clients ("canaries") report the longest update there may be, each along a direction of its own, some
of them do and some do not, and the attacker, who knows everything but the noise (and, in some of
the tries, the draw of cohorts), guesses who did from the global models. How often it is right and
wrong, with the error of counting at 95 %, bounds ε from below. A bound above what is promised shows
that noise, clipping or draw are not what they should be.

The models are made by the rule as the experiment settles it and by the product's own code: the draw
of cohorts, shortening, noise and the server's step. The network is replaced by a few numbers for
each canary, as what hides a client does not depend on what the numbers mean. Canaries share rounds,
as in Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run" (NeurIPS 2023); their
directions are orthogonal, so the noise in them is independent, and they count as tries of their
own.
"""

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from idiolect.aggregation import Private, accounting, guarantee
from idiolect.aggregation.accounting import PrivacyTerms
from idiolect.aggregation.aggregator import Aggregated
from idiolect.core import capabilities
from idiolect.core.capabilities import Privacy, has
from idiolect.core.method import Method, Report, RunPlan, Setup
from idiolect.core.wrap import Wrapper
from idiolect.engine import sampling, server_update
from idiolect.errors import ConfigError
from idiolect.experiment.build import build_jobs
from idiolect.experiment.schema import Experiment
from idiolect.methods.fedavg import FedAvg

CONFIDENCE = 0.95  # of all bounds together
_LEAVES = 4  # a canary has a number in each; their signs alternate
_CANARIES = 250  # in a round, at most
_ROUNDS = 48  # that are watched, at most
_LOUD = 10.0  # how much longer than allowed a canary's update is


class Row(NamedTuple):
    """One way to attack, what is promised against it, and what it showed."""

    attack: str
    rounds: int
    promised: float  # ε at most
    found: float  # ε at least

    @property
    def broken(self) -> bool:
        """Whether the attack tells more than was promised."""
        return self.found > self.promised


class Audit(NamedTuple):
    """What an audit found."""

    promised: float  # of the whole run, as its result will say
    delta: float
    rows: tuple[Row, ...]
    canaries: int

    @property
    def lower(self) -> float:
        """The bound from below on ε of the whole run."""
        return max(row.found for row in self.rows if row.attack == _UNKNOWN)

    @property
    def passed(self) -> bool:
        """Whether nothing was found that was promised not to be."""
        return not any(row.broken for row in self.rows)

    def plain(self) -> dict[str, Any]:
        """Lay it out as plain values."""
        return {
            "passed": self.passed,
            "promised_epsilon": self.promised if math.isfinite(self.promised) else None,
            "lower_bound": self.lower,
            "delta": self.delta,
            "confidence": CONFIDENCE,
            "canaries": self.canaries,
            "attacks": [{**row._asdict(), "broken": row.broken} for row in self.rows],
        }


_UNKNOWN = "the draw of cohorts is secret"
_KNOWN = "the canary takes part in every round, and it is known"


def private_rule(method: Method) -> Private:
    """Find the private rule of a method, behind whatever is wrapped around it."""
    while isinstance(method, Wrapper):
        if isinstance(method, Aggregated) and isinstance(method.by, Private):
            return method.by
        method = method.base
    raise ConfigError(f"{type(method).__name__} has no private rule to audit")


def audit_experiment(
    experiment: Experiment,
    data_dir: Path | None = None,
    only: Sequence[str] = (),
    trials: int = 20_000,
    seed: int = 0,
) -> dict[str, Audit]:
    """Audit the private methods of an experiment (or the labels in `only`), as they are settled."""
    made, _ = build_jobs(experiment, data_dir, only)
    private = [job for job in made if has(job.method, Privacy)]
    if not private or (only and len(private) < len(made)):
        raise ConfigError(
            f"{', '.join(job.label for job in made if not has(job.method, Privacy))}: no "
            "differential privacy to audit; give the method aggregate = { name = 'dp', ... }, or "
            "choose others with --method"
        )
    return {
        job.label: audited(private_rule(job.method), job.plan(job.rounds), trials, seed)
        for job in private
    }


def audited(rule: Private, plan: RunPlan, trials: int = 20_000, seed: int = 0) -> Audit:
    """Attack a settled rule as it would be used in a plan, by so many canaries an attack."""
    if rule.noise == 0:
        raise ConfigError("without noise there is nothing to audit: ε is infinite")
    if trials < 1000:
        raise ConfigError(f"--trials is {trials}, expected at least 1000: fewer show nothing")
    terms = guarantee.terms(rule, plan)
    cohort, whole = guarantee.drawn(plan), plan.rounds * plan.releases
    most = min(whole, _ROUNDS)
    views = sorted({1, _even(math.isqrt(most)), _even(most)} & set(range(1, most + 1)) | {1})
    bench = _Bench(rule, plan, trials, seed)
    attacks = [(_UNKNOWN, bench.watched(cohort, max(views)), terms._replace(cohort=cohort), views)]
    # As many rounds as make guessing neither hopeless nor sure. Replacing a client moves twice S.
    alone = rule.noise / (2 if plan.draw == "fixed" else 1)
    known = _even(min(max(round(alone**2), 1), _ROUNDS))
    if cohort < plan.clients or known not in views:
        everyone = terms._replace(cohort=plan.clients)
        attacks.append((_KNOWN, bench.watched(plan.clients, known), everyone, [known]))
    risk = (1 - CONFIDENCE) / sum(len(own) for *_, own in attacks)
    rows = [
        Row(
            attack,
            rounds,
            _promised(own, rounds),
            _least(_scores(seen, own, rule, rounds), seen.took, own.delta, risk),
        )
        for attack, seen, own, ends in attacks
        for rounds in ends
    ]
    spent = rule.promise(plan)["privacy"]["epsilon"]
    return Audit(math.inf if spent is None else spent, terms.delta, tuple(rows), trials)


def _even(rounds: int) -> int:
    """Round up: over an even number of rounds, signs that alternate cancel what stays the same."""
    return rounds if rounds == 1 else rounds + rounds % 2


def _promised(terms: PrivacyTerms, rounds: int) -> float:
    """Return the tightest ε known for so many rounds: a sharp promise is hard to keep."""
    tight = terms._replace(accountant="pld")
    if terms.draw == "fixed" and terms.cohort < terms.clients:
        everyone = accounting.epsilon(tight._replace(cohort=terms.clients), rounds)
        return min(accounting.epsilon(terms._replace(accountant="rdp"), rounds), everyone)
    return accounting.epsilon(tight, rounds)


class _Seen(NamedTuple):
    """What an attacker saw of canaries."""

    along: np.ndarray  # [round, canary] how far the model moved along its direction, in S
    signs: np.ndarray  # [round] which way the canary would have moved it
    took: np.ndarray  # [canary] whether it took part


class _Bench:
    """Runs the rule with canaries, over and over."""

    def __init__(self, rule: Private, plan: RunPlan, trials: int, seed: int) -> None:
        self._rule, self._plan, self._trials = rule, plan, trials
        self._draw = np.random.default_rng((seed, 23))
        self._method = Aggregated(FedAvg(), rule)

    def watched(self, cohort: int, rounds: int) -> _Seen:
        """Run canaries that take part, or not, in cohorts of a size; return what is observed."""
        found: list[_Seen] = []
        count = min(self._plan.clients, _CANARIES)
        while count * len(found) < self._trials:
            found.append(self._run(count, cohort, rounds))
        return _Seen(
            np.concatenate([one.along for one in found], 1),
            found[0].signs,
            np.concatenate([one.took for one in found]),
        )

    def _run(self, count: int, cohort: int, rounds: int) -> _Seen:
        """Do some rounds with so many canaries, each tossed a coin whether it takes part."""
        method, seed = self._method, int(self._draw.integers(1 << 62))
        clients = np.arange(self._plan.clients)
        took = self._draw.random(count) < 0.5
        names = [f"leaf{n}" for n in range(_LEAVES)]
        nothing = {name: torch.zeros(count) for name in names}
        state = method.init_server(Setup(nothing, nothing, torch.ones(len(clients)), 2, seed=seed))
        signs = np.array([1.0 if round % 2 == 0 else -1.0 for round in range(rounds)])
        along = np.empty((rounds, count))
        for round in range(rounds):
            heard = sampling.DRAWS[self._plan.draw](seed, round, clients, cohort)
            # Other clients change nothing: the attacker knows them, and takes them off.
            rows = heard[heard < count]
            # Who does not take part is absent; or, with cohorts of a fixed size, does the opposite.
            size = np.where(took[rows], 1.0, 0.0 if self._plan.draw == "poisson" else -1.0)
            clip = float(state.memory.clip)
            params = {name: torch.zeros(max(len(rows), 1), count) for name in names}
            for place, name in enumerate(names):
                length = torch.from_numpy(size * signs[round] * (-1) ** place * _LOUD * clip)
                params[name][range(len(rows)), rows] = length.float()
            before = state.inner
            if len(rows):
                cohort_of = torch.from_numpy(rows)
                reports = Report(params, torch.ones(len(rows)))
                bad = server_update.rows_to_leave_out(reports, None, len(rows), torch.device("cpu"))
                state = server_update.guarded_server_step(method, state, cohort_of, reports, bad)
            else:
                state = capabilities.idle(method, state)
            moved = [
                (-1) ** place * (state.inner[name] - before[name]).double().numpy()
                for place, name in enumerate(names)
            ]
            along[round] = np.sum(moved, 0) * self._rule.cohort / (clip * math.sqrt(_LEAVES))
        return _Seen(along, signs, took)


def _scores(seen: _Seen, terms: PrivacyTerms, rule: Private, rounds: int) -> list[np.ndarray]:
    """Score how much each canary looks as if it had taken part, in two ways.

    By the likelihood ratio, which is best if all is as it should be; and by the plain sum, in which
    noise that is the same in every round cancels.
    """
    along = seen.along[:rounds] * seen.signs[:rounds, None]
    rate = terms.cohort / terms.clients
    spread = rule._update_noise(rule.cohort) ** 2

    def weighed(value: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):
            odds: np.ndarray = np.logaddexp(np.log(1 - rate), np.log(rate) + (value - 0.5) / spread)
        return odds

    ratio = weighed(along)
    if terms.draw == "fixed":
        ratio = ratio - weighed(-along)
    return [ratio.sum(0), along.sum(0)]


def _least(scores: Sequence[np.ndarray], took: np.ndarray, delta: float, risk: float) -> float:
    """Bound ε from below: choose how to guess on one half of the canaries, count on the other.

    Of an (ε, δ) promise, P(guessed | took part) ≤ e^ε P(guessed | did not) + δ, either way round.
    """
    half = len(took) // 2
    best, found = -math.inf, 0.0
    for score in scores:
        for sign in (1.0, -1.0):
            own, mine = sign * score, took if sign > 0 else ~took
            cuts = np.unique(np.quantile(own[:half], np.linspace(0, 1, 200)))
            bounds = _bounds(own[:half], mine[:half], cuts, delta, risk)
            place = int(bounds.argmax())
            if bounds[place] > best:
                best = float(bounds[place])
                cut = cuts[place : place + 1]
                found = float(_bounds(own[half:], mine[half:], cut, delta, risk)[0])
    return max(found, 0.0)


def _bounds(
    score: np.ndarray, took: np.ndarray, cuts: np.ndarray, delta: float, risk: float
) -> np.ndarray:
    """Return the ε that guessing by each cut shows, by the bounds of Clopper and Pearson."""
    beta = importlib.import_module("scipy.stats").beta
    yes, no = np.sort(score[took]), np.sort(score[~took])
    right, wrong = (len(one) - np.searchsorted(one, cuts) for one in (yes, no))
    least = np.where(right > 0, beta.ppf(risk / 2, np.maximum(right, 1), len(yes) - right + 1), 0)
    some = np.maximum(len(no) - wrong, 1)
    most = np.where(wrong < len(no), beta.ppf(1 - risk / 2, wrong + 1, some), 1)
    shown = least > delta
    bounds: np.ndarray = np.where(
        shown, np.log(np.where(shown, least - delta, 1.0) / most), -math.inf
    )
    return bounds
