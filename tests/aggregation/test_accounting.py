"""ε against closed forms, published values and a second accountant written here."""

import math

import numpy as np
import pytest
from scipy import special, stats

from idiolect.aggregation import Private, accounting
from idiolect.aggregation.accounting import PrivacyTerms, affordable, epsilon, solved, total
from idiolect.core.method import RunPlan
from idiolect.errors import ConfigError

EVERYONE = PrivacyTerms(1.0, 100, 100, "poisson", 1e-5, "rdp")


def exact_gaussian(noise, rounds, delta):
    """Balle and Wang (2018), Theorem 8: δ(ε) of T Gaussian releases, which are one of z/√T.

    δ = Φ(1/(2s) - εs) - e^ε Φ(-1/(2s) - εs) with s = z/√T; solved for ε by bisection.
    """
    spread = noise / math.sqrt(rounds)

    def spent(eps):
        near, far = 1 / (2 * spread) - eps * spread, -1 / (2 * spread) - eps * spread
        return stats.norm.cdf(near) - math.exp(eps + stats.norm.logcdf(far))

    low, high = 0.0, 1e4
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > delta else (low, middle)
    return high


def sampled_gaussian_rdp(rate, noise, order):
    """Return the Rényi divergence of the sampled Gaussian at a whole order α.

    Mironov, Talwar, Zhang (2019): log Σ_k C(α,k) (1-q)^(α-k) q^k exp((k² - k)/(2z²)) / (α - 1).
    """
    k = np.arange(order + 1)
    terms = (
        special.gammaln(order + 1)
        - special.gammaln(k + 1)
        - special.gammaln(order - k + 1)
        + (order - k) * math.log1p(-rate)
        + k * math.log(rate)
        + (k**2 - k) / (2 * noise**2)
    )
    return special.logsumexp(terms) / (order - 1)


def second_accountant(rate, noise, rounds, delta):
    """RDP at whole orders, turned into ε by Canonne, Kamath, Steinke (2020), Proposition 12."""
    return min(
        rounds * sampled_gaussian_rdp(rate, noise, a)
        + math.log1p(-1 / a)
        - math.log(delta * a) / (a - 1)
        for a in range(2, 256)
    )


@pytest.mark.parametrize(("noise", "rounds"), [(1.0, 1), (4.0, 10), (10.0, 100), (30.0, 1000)])
def test_without_sampling_it_is_the_gaussian_mechanism(noise, rounds):
    exact = exact_gaussian(noise, rounds, 1e-5)
    tight = epsilon(EVERYONE._replace(noise=noise, accountant="pld"), rounds)
    loose = epsilon(EVERYONE._replace(noise=noise), rounds)
    assert tight == pytest.approx(exact, rel=2e-3)
    assert exact <= loose <= 1.12 * exact + 0.02


def test_replacing_a_client_counts_twice():
    """Fixed cohorts hide one client behind another: the sum moves by 2S, as half the noise does."""
    fixed = epsilon(EVERYONE._replace(noise=8.0, draw="fixed"), 10)
    assert fixed == epsilon(EVERYONE._replace(noise=4.0), 10)
    assert fixed == pytest.approx(exact_gaussian(4.0, 10, 1e-5), rel=0.12)


@pytest.mark.parametrize(
    ("cohort", "noise", "rounds"), [(1, 1.1, 1000), (10, 1.5, 200), (20, 3.0, 500)]
)
def test_with_sampling_two_accountants_agree(cohort, noise, rounds):
    terms = EVERYONE._replace(cohort=cohort, noise=noise)
    own = second_accountant(cohort / 100, noise, rounds, 1e-5)
    assert epsilon(terms, rounds) == pytest.approx(own, rel=0.02)
    tight = epsilon(terms._replace(accountant="pld"), rounds)
    assert 0.8 * own < tight <= own


@pytest.mark.parametrize(
    ("cohort", "noise", "rounds", "published"),
    [
        (600, 4.0, 10_000, 1.26),  # Abadi et al. (2016), section 5: q = 0.01
        (256, 1.3, 4_688, 1.34),  # Bu et al. (2020), Figure 4: 20 epochs of 60,000
        (256, 0.7, 16_406, 8.68),  # the same, 70 epochs
    ],
)
def test_published_values(cohort, noise, rounds, published):
    """They are of the moments accountant, ε = T · RDP(α) + log(1/δ) / (α - 1), least over α.

    That formula gives them here too (at whole orders, a few per cent above at the last). The
    accountants in use convert more tightly, so what they say lies below, and PLD's lies lowest.
    """
    rate = cohort / 60_000
    moments = min(
        rounds * sampled_gaussian_rdp(rate, noise, a) - math.log(1e-5) / (a - 1)
        for a in range(2, 256)
    )
    assert moments == pytest.approx(published, rel=0.035)
    terms = PrivacyTerms(noise, 60_000, cohort, "poisson", 1e-5, "rdp")
    spent = epsilon(terms, rounds)
    assert 0.8 * published < spent < published
    assert 0.7 * published < epsilon(terms._replace(accountant="pld"), rounds) < spent


def test_without_replacement_is_never_cheaper_than_by_coins_and_never_dearer_than_everyone():
    for noise in (4.0, 8.0, 16.0):
        terms = PrivacyTerms(noise, 1000, 20, "fixed", 1e-5, "rdp")
        coins = epsilon(terms._replace(draw="poisson"), 100)
        assert coins < epsilon(terms, 100)
        assert epsilon(terms, 100) < epsilon(terms._replace(cohort=1000), 100)


def test_drawing_nearly_everyone_is_no_dearer_than_everyone():
    """The bound for drawing without replacement is not tight: 99 of 100 it calls dearer."""
    terms = PrivacyTerms(8.0, 100, 99, "fixed", 1e-5, "rdp")
    everyone = epsilon(terms._replace(cohort=100), 10)
    assert accounting._composed(terms, 10) > 1.2 * everyone
    assert epsilon(terms, 10) == everyone
    few = terms._replace(cohort=2)
    assert epsilon(few, 10) == accounting._composed(few, 10) < 0.5 * everyone


@pytest.mark.parametrize("target", [math.inf, 1e300])
def test_noise_for_no_bound_at_all_is_found(target):
    """Halving for ever towards zero was no answer."""
    terms = PrivacyTerms(0.0, 50, 5, "poisson", 1e-3, "rdp")
    assert 0 < solved(terms, 3, target) <= 1e-6


def test_the_noise_is_solved_for_and_a_budget_divided():
    terms = PrivacyTerms(0.0, 500, 25, "poisson", 1e-4, "rdp")
    noise = solved(terms, 200, 4.0)
    ready = terms._replace(noise=noise)
    assert 3.9 < epsilon(ready, 200) <= 4.0
    rounds = affordable(ready, 1000, 4.0)
    assert epsilon(ready, rounds) <= 4.0 < epsilon(ready, rounds + 1)
    assert 200 <= rounds < 220
    assert affordable(ready, 50, 4.0) == 50


def test_more_noise_fewer_rounds_and_more_clients_cost_less():
    base = PrivacyTerms(2.0, 200, 20, "poisson", 1e-4, "rdp")
    spent = epsilon(base, 50)
    assert epsilon(base._replace(noise=2.5), 50) < spent
    assert epsilon(base, 40) < spent
    assert epsilon(base._replace(clients=400), 50) < spent
    assert epsilon(base._replace(delta=1e-3), 50) < spent
    assert epsilon(base._replace(noise=0.0), 1) == math.inf and epsilon(base, 0) == 0


def test_releases_compose_like_rounds_and_several_methods_in_one():
    one = PrivacyTerms(2.0, 200, 20, "poisson", 1e-4, "rdp")
    for terms in (one, one._replace(accountant="pld"), one._replace(draw="fixed", noise=16.0)):
        assert total([(terms, 30)]) == epsilon(terms, 30)
        assert total([(terms, 30), (terms, 70)]) == pytest.approx(epsilon(terms, 100), rel=1e-9)
    other = one._replace(noise=4.0)
    both = total([(one, 50), (other, 50)])
    assert max(epsilon(one, 50), epsilon(other, 50)) < both
    assert both < epsilon(one, 50) + epsilon(other, 50)
    assert total([(one, 50), (other._replace(noise=0.0), 1)]) == math.inf
    assert total([(one, 0)]) == 0
    # By hand at whole orders: Rényi divergences add up.
    own = min(
        50 * sampled_gaussian_rdp(0.1, 2.0, a)
        + 50 * sampled_gaussian_rdp(0.1, 4.0, a)
        + math.log1p(-1 / a)
        - math.log(1e-4 * a) / (a - 1)
        for a in range(2, 256)
    )
    assert both == pytest.approx(own, rel=0.02)


def test_a_budget_and_a_target_are_of_all_seeds_together():
    """Five seeds of 20 rounds cost as much as one of 100; what was said of one was too little."""
    plan = RunPlan(20, 500, 25, "poisson", releases=5)
    ready, _ = Private(epsilon=4.0).settled(plan)
    told = ready.promise(plan)["privacy"]
    terms = PrivacyTerms(ready.noise, 500, 25, "poisson", told["delta"], "rdp")
    assert 3.9 < told["epsilon"] == epsilon(terms, 100) <= 4.0
    assert told["epsilon_per_release"] == epsilon(terms, 20) < 0.6 * told["epsilon"]
    assert told["releases"] == 5 and "under all 5 seeds" in told["statement"]
    capped = Private(noise=ready.noise, budget=4.0)
    rounds = capped.settled(plan._replace(rounds=1000))[1]
    assert epsilon(terms, 5 * rounds) <= 4.0 < epsilon(terms, 5 * (rounds + 1))
    alone = plan._replace(releases=1)
    assert capped.settled(alone._replace(rounds=1000))[1] > 4 * rounds
    with pytest.raises(ConfigError, match="under 5 seeds"):
        Private(noise=0.5).settled(plan._replace(rounds=100))


def test_what_several_releases_cost_is_at_the_largest_delta():
    loose = PrivacyTerms(2.0, 100, 10, "poisson", 1e-3, "rdp")
    strict = loose._replace(delta=1e-6)
    both = total([(loose, 20), (loose, 30)])
    assert total([(strict, 20), (loose, 30)]) == total([(loose, 20), (strict, 30)]) == both
    assert total([(strict, 20), (strict, 30)]) > both
