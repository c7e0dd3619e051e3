"""What a private run promises, in figures and in words, and when it would promise nothing."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from idiolect.aggregation import accounting
from idiolect.aggregation.accounting import RELATIONS, PrivacyTerms
from idiolect.core.method import RunPlan
from idiolect.errors import ConfigError

if TYPE_CHECKING:
    from idiolect.aggregation.private_mean import Private

LEAST_CLIENTS = 30  # to hide among
MOST_EPSILON = 20.0  # beyond it odds may change by a factor of hundreds of millions
MOST_DELTA = 0.01  # the chance that nothing is promised at all


def terms(rule: "Private", plan: RunPlan) -> PrivacyTerms:
    """Gather what ε depends on.

    That a cohort is drawn hides clients only while nobody knows who was drawn. A hub draws it in
    secret. A simulation draws it from its seed: with noise from the seed too the whole is a
    measurement of what a federation would promise; with noise of the system the noise protects and
    the draw does not, so everyone is taken to take part.
    """
    delta = rule.delta or _most_delta(plan.clients)
    cohort = drawn(plan)
    if rule.noise_source == "system" and not plan.federated:
        cohort = plan.clients
    return PrivacyTerms(rule.noise, plan.clients, cohort, plan.draw, delta, rule.accountant)


def drawn(plan: RunPlan) -> int:
    """Return how many clients a round has, or is expected to have."""
    return min(plan.cohort or plan.clients, plan.clients)


def affordable(given: PrivacyTerms, plan: RunPlan, budget: float) -> int:
    """Return how many rounds of every release a budget allows; the first one must fit."""
    if not budget:
        return plan.rounds
    allowed = accounting.affordable(given, plan.rounds, budget, plan.releases)
    if not allowed:
        first = accounting.epsilon(given, plan.releases)
        raise ConfigError(
            f"budget = {budget:g} is spent before the first round, which costs ε = {first:.3g}"
            f"{_together(plan)}; raise budget, the noise, or the number of clients"
        )
    return allowed


def _together(plan: RunPlan) -> str:
    return f" under {plan.releases} seeds" if plan.releases > 1 else ""


def refuse_meaningless(rule: "Private", plan: RunPlan) -> None:
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
    spent = accounting.epsilon(given, plan.rounds * plan.releases)
    if spent > MOST_EPSILON:
        remedy = "draw = 'poisson', " if plan.draw == "fixed" else ""
        remedy += "one seed, " if plan.releases > 1 else ""
        raise ConfigError(
            f"{plan.rounds} rounds{_together(plan)} with noise = {given.noise:g} and "
            f"{drawn(plan)} of {plan.clients} clients a round end at ε = {spent:.4g}: odds may "
            f"change by a factor of {_factor(spent)}, which protects nobody; use {remedy}more "
            f"noise, fewer rounds or more clients, {again}"
        )


def _most_delta(clients: int) -> float:
    """Return the largest δ at which not even one of all clients is to be expected laid open."""
    return min(math.pow(clients, -1.1), MOST_DELTA)


def _spent(rule: "Private", given: PrivacyTerms, rounds: int) -> float:
    """Return ε; a forced run promises nothing, so it also runs where nothing can be computed."""
    try:
        return accounting.epsilon(given, rounds)
    except accounting.NoAccountant:
        if rule.force and not rule.budget:
            return math.nan
        raise


def _worth(given: PrivacyTerms, plan: RunPlan, spent: float) -> bool:
    return (
        spent <= MOST_EPSILON
        and plan.clients >= LEAST_CLIENTS
        and given.delta <= _most_delta(plan.clients) * (1 + 1e-9)
    )


def promise(rule: "Private", plan: RunPlan) -> dict[str, Any]:
    """Lay out (ε, δ), all they depend on, and a statement.

    Every seed is a release of its own of what was learnt from the same clients, so ε is of all of
    them together.
    """
    given = terms(rule, plan)
    steps = plan.rounds * plan.releases
    spent = _spent(rule, given, steps)
    more = plan.releases * (plan.rounds + 1)
    ended = bool(rule.budget) and accounting.epsilon(given, more) > rule.budget
    meaningful = _worth(given, plan, spent)
    known = _spent(rule, given._replace(cohort=plan.clients), steps)
    return {
        "epsilon": _finite(spent),
        "delta": given.delta,
        "releases": plan.releases,
        "epsilon_per_release": _finite(_spent(rule, given, plan.rounds)),
        "epsilon_draw_known": _finite(known),
        "noise_multiplier": given.noise,
        "noise_source": rule.noise_source,
        "clip": rule.clip,
        "adaptive_clip": rule.adaptive,
        "rounds": plan.rounds,
        "clients": plan.clients,
        "cohort": drawn(plan),
        "amplified": given.cohort < plan.clients,
        "draw": plan.draw,
        "neighbours": RELATIONS[plan.draw],
        "accountant": given.accountant,
        "budget": rule.budget or None,
        "ended_by_budget": ended,
        "meaningful": meaningful,
        "statement": _statement(rule, given, plan, spent, known, meaningful, ended),
    }


def together(found: Mapping[str, Mapping[str, Any]], others: Sequence[str]) -> dict[str, Any]:
    """Lay out what methods on the same data promise together, from the promise of each.

    `others` are the methods beside them that promise nothing.
    """
    parts = [
        (
            PrivacyTerms(
                own["noise_multiplier"],
                own["clients"],
                own["cohort"] if own["amplified"] else own["clients"],
                own["draw"],
                own["delta"],
                own["accountant"],
            ),
            own["rounds"] * own["releases"],
        )
        for own in found.values()
    ]
    try:
        spent = accounting.total(parts)
    except accounting.NoAccountant:
        spent = math.nan
    delta = max(terms.delta for terms, _ in parts)
    each = ", ".join(
        f"{label} ε = {'unknown' if own['epsilon'] is None else format(own['epsilon'], '.3g')}"
        for label, own in found.items()
    )
    words = f"{each}, each by itself"
    if math.isfinite(spent):
        words += f"; published together, ε = {spent:.3g} at δ = {delta:.2g}"
    words += "."
    if others:
        words += (
            f" Not protected: what {', '.join(others)} made of the same data, without noise; "
            "publish none of it beside them."
        )
    return {
        "epsilon": _finite(spent),
        "delta": delta,
        "methods": list(found),
        "unprotected": list(others),
        "statement": words,
    }


def _finite(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None


def _statement(
    rule: "Private",
    given: PrivacyTerms,
    plan: RunPlan,
    spent: float,
    known: float,
    meaningful: bool,
    ended: bool,
) -> str:
    """Say what is protected, against whom, and what is not."""
    words = []
    measured = rule.noise_source == "seed" and given.noise > 0
    if measured:
        words.append(
            "This is a measurement, not a release: noise and cohorts were drawn from the run's "
            "seed, and whoever knows the seed, which stands in the result, can remove the noise. "
            "What follows would hold for a federation with these settings, whose hub draws both "
            'in secret; to publish models of a simulation, set noise_source = "system".'
        )
    if meaningful:
        all_of = f" under all {plan.releases} seeds" if plan.releases > 1 else ""
        words.append(
            f"For whoever sees every global model of the {plan.rounds} rounds{all_of}, and knows "
            f"everything of the other clients: the odds of any conclusion on what one client "
            f"reported, or whether it did, change by a factor of at most e^{spent:.3g} "
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
    if plan.releases > 1 and math.isfinite(spent):
        one = accounting.epsilon(given, plan.rounds)
        words.append(f"Of one seed alone, were it the only one, it would be e^{one:.3g}.")
    words.append(_draw(rule, plan, known))
    if ended:
        words.append(f"The run ended after {plan.rounds} rounds: one more would exceed the budget.")
    words.append(
        "Protected is what is shared: the global model and all made of it. Not protected: "
        "that a client is a member, as results name all; "
        "against the server, which sees each client's update before noise is added; a client's own "
        "personal model, which carries no noise because it never leaves, should the client publish "
        "it; the figures of this report, computed on clients' data without noise; statistics taken "
        "of the data beforehand, such as scaling or a vocabulary; several runs together, such as a "
        "search for settings, each of which spends its own ε."
    )
    return " ".join(word for word in words if word)


def _draw(rule: "Private", plan: RunPlan, known: float) -> str:
    """Say what becomes of the promise where it is known who took part in which round."""
    if drawn(plan) == plan.clients or not math.isfinite(known):
        return ""
    if rule.noise_source == "system" and not plan.federated:
        return (
            "Cohorts were drawn from the run's seed, which is no secret, so ε is as if everyone "
            "took part in every round."
        )
    return (
        "This counts on nobody knowing who took part in which round. Whoever does, by watching "
        "the network or from how each client's own figures move from round to round, has "
        f"e^{known:.3g} instead."
    )


def _strength(epsilon: float) -> str:
    if epsilon <= 1:
        return "a strong guarantee"
    return "a fair one" if epsilon <= 4 else "in the worst case a weak one"


def _factor(epsilon: float) -> str:
    return f"{math.exp(epsilon):.3g}" if epsilon < 700 else f"10^{epsilon / math.log(10):.0f}"
