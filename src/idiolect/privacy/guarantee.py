"""What a private run promises, in figures and in words, and when it would promise nothing."""

import math
from typing import Any, Protocol

from idiolect.errors import ConfigError
from idiolect.method import Plan
from idiolect.privacy import accounting
from idiolect.privacy.accounting import RELATIONS, Terms

LEAST_CLIENTS = 30  # to hide among
MOST_EPSILON = 20.0  # beyond it odds may change by a factor of hundreds of millions
MOST_DELTA = 0.01  # the chance that nothing is promised at all


class Settings(Protocol):
    """The settings of the private rule that a promise depends on."""

    @property
    def noise(self) -> float:
        """The noise multiplier."""

    @property
    def delta(self) -> float:
        """δ, or 0."""

    @property
    def budget(self) -> float:
        """The ε at which the run ends, or 0."""

    @property
    def clip(self) -> float:
        """The first S."""

    @property
    def adaptive(self) -> bool:
        """Whether S moves."""

    @property
    def accountant(self) -> str:
        """How ε is computed."""

    @property
    def force(self) -> bool:
        """Whether a meaningless promise is welcome."""


def terms(rule: Settings, plan: Plan) -> Terms:
    """Gather what ε depends on."""
    delta = rule.delta or _most_delta(plan.clients)
    cohort = min(plan.cohort or plan.clients, plan.clients)
    return Terms(rule.noise, plan.clients, cohort, plan.draw, delta, rule.accountant)


def solved(given: Terms, target: float, rounds: int) -> float:
    """Return the noise for a target."""
    return accounting.solved(given, rounds, target)


def affordable(given: Terms, rounds: int, budget: float) -> int:
    """Return how many rounds a budget allows; the first one must fit."""
    if not budget:
        return rounds
    allowed = accounting.affordable(given, rounds, budget)
    if not allowed:
        first = accounting.epsilon(given, 1)
        raise ConfigError(
            f"budget = {budget:g} is spent before the first round, which costs ε = {first:.3g}; "
            "raise budget, the noise, or the number of clients"
        )
    return allowed


def refuse_meaningless(rule: Settings, plan: Plan) -> None:
    """Say why a guarantee would mean nothing, unless the user wants to see it all the same."""
    if rule.force:
        return
    given = terms(rule, plan)
    again = "or set force = true to run without a guarantee worth the name"
    if plan.clients < LEAST_CLIENTS:
        raise ConfigError(
            f"differential privacy hides one client among others, and there are {plan.clients}: "
            f"with fewer than {LEAST_CLIENTS} the noise would drown the model or hide nobody; use "
            f"another aggregate, {again}"
        )
    if given.delta > _most_delta(plan.clients) * (1 + 1e-9):
        raise ConfigError(
            f"delta = {given.delta:g} is a chance for each of {plan.clients} clients to be laid "
            f"open altogether; give at most {_most_delta(plan.clients):.2g} (clients ** -1.1, and "
            f"never above {MOST_DELTA:g}), {again}"
        )
    if given.noise == 0:
        raise ConfigError(f"without noise there is no privacy (ε is infinite); give noise, {again}")
    spent = accounting.epsilon(given, plan.rounds)
    if spent > MOST_EPSILON:
        remedy = "draw = 'poisson', " if plan.draw == "fixed" else ""
        raise ConfigError(
            f"{plan.rounds} rounds with noise = {given.noise:g} and {given.cohort} of "
            f"{plan.clients} clients a round end at ε = {spent:.4g}: odds may change by a factor "
            f"of {_factor(spent)}, which protects nobody; use {remedy}more noise, fewer rounds or "
            f"more clients, {again}"
        )


def _most_delta(clients: int) -> float:
    """Return the largest δ at which not even one of all clients is to be expected laid open."""
    return min(math.pow(clients, -1.1), MOST_DELTA)


def _spent(rule: Settings, given: Terms, rounds: int) -> float:
    """Return ε; a forced run promises nothing, so it also runs where nothing can be computed."""
    try:
        return accounting.epsilon(given, rounds)
    except accounting.NoAccountant:
        if rule.force and not rule.budget:
            return math.nan
        raise


def _worth(given: Terms, plan: Plan, spent: float) -> bool:
    return (
        spent <= MOST_EPSILON
        and plan.clients >= LEAST_CLIENTS
        and given.delta <= _most_delta(plan.clients) * (1 + 1e-9)
    )


def promise(rule: Settings, plan: Plan) -> dict[str, Any]:
    """Lay out (ε, δ), all they depend on, and a statement."""
    given = terms(rule, plan)
    spent = _spent(rule, given, plan.rounds)
    ended = bool(rule.budget) and accounting.epsilon(given, plan.rounds + 1) > rule.budget
    meaningful = _worth(given, plan, spent)
    return {
        "epsilon": spent if math.isfinite(spent) else None,
        "delta": given.delta,
        "noise_multiplier": given.noise,
        "clip": rule.clip,
        "adaptive_clip": rule.adaptive,
        "rounds": plan.rounds,
        "clients": plan.clients,
        "cohort": given.cohort,
        "draw": plan.draw,
        "neighbours": RELATIONS[plan.draw],
        "accountant": given.accountant,
        "budget": rule.budget or None,
        "ended_by_budget": ended,
        "meaningful": meaningful,
        "statement": _statement(given, plan, spent, meaningful, ended),
    }


def _statement(given: Terms, plan: Plan, spent: float, meaningful: bool, ended: bool) -> str:
    """Say what is protected, against whom, and what is not."""
    words = []
    if meaningful:
        words.append(
            f"For whoever sees every global model of the {plan.rounds} rounds, and knows "
            f"everything of the other clients: the odds of any conclusion on whether one client "
            f"took part, or on what its data were, change by a factor of at most e^{spent:.3g} "
            f"(about {_factor(spent)}), but for a chance of δ = {given.delta:.2g}; "
            f"{_strength(spent)}. Neighbours: {RELATIONS[plan.draw]}."
        )
    else:
        amount = f"ε = {spent:.4g}" if math.isfinite(spent) else "no noise, so ε is infinite"
        if math.isnan(spent):
            amount = "ε was not computed, as the accountant is not installed"
        words.append(
            f"There is no guarantee worth the name ({amount}, δ = {given.delta:.2g}, "
            f"{plan.clients} clients); the run was forced."
        )
    if ended:
        words.append(f"The run ended after {plan.rounds} rounds: one more would exceed the budget.")
    words.append(
        "Protected is what is shared: the global model and all made of it. Not protected: "
        "against the server, which sees each client's update before noise is added; a client's own "
        "personal model, which carries no noise because it never leaves, should the client publish "
        "it; the figures of this report, computed on clients' data without noise; statistics taken "
        "of the data beforehand, such as scaling or a vocabulary; several runs together, such as a "
        "search for settings, each of which spends its own ε. In a simulation the noise comes from "
        "the run's seed; the hub of a federation draws a secret one of its own."
    )
    return " ".join(words)


def _strength(epsilon: float) -> str:
    if epsilon <= 1:
        return "a strong guarantee"
    return "a fair one" if epsilon <= 4 else "in the worst case a weak one"


def _factor(epsilon: float) -> str:
    return f"{math.exp(epsilon):.3g}" if epsilon < 700 else f"10^{epsilon / math.log(10):.0f}"
