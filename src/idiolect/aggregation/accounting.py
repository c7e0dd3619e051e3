"""What a number of rounds costs in (ε, δ), by the library dp-accounting.

Two ways to draw a cohort, two notions of neighbours:

- `poisson`: each client takes part by its own coin. Neighbours are federations with and without one
  client; its update has norm S at most.
- `fixed`: as many clients every round, without replacement. Whether someone more is there cannot be
  hidden then: the number of clients is known. Neighbours are federations in which one client is
  replaced by another, and the sum changes by up to 2S, so the noise counts half. What drawing some
  of them hides is bounded by Theorem 27 of Wang, Balle, Kasiviswanathan (2019), the one bound that
  dp-accounting has for it; it is not tight, and where it says more than if everyone took part, the
  latter holds (a mixture of pairs is no easier to tell apart than the worst pair).
"""

import contextlib
import importlib
import logging
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from idiolect.errors import ConfigError

RELATIONS = {"poisson": "one client more or less", "fixed": "one client replaced by another"}


class NoAccountant(ConfigError):
    """The library that computes ε is not installed."""


class PrivacyTerms(NamedTuple):
    """All that ε depends on besides the rounds."""

    noise: float  # standard deviation of the noise in units of S
    clients: int
    cohort: int
    draw: str
    delta: float
    accountant: str


@lru_cache(maxsize=4096)
def epsilon(terms: PrivacyTerms, rounds: int) -> float:
    """Return ε at δ after so many rounds."""
    if terms.noise == 0:
        return float("inf")
    if not rounds:
        return 0.0
    spent = _composed(terms, rounds)
    if terms.draw == "fixed" and terms.cohort < terms.clients:
        spent = min(spent, _composed(terms._replace(cohort=terms.clients), rounds))
    return spent


def _composed(terms: PrivacyTerms, rounds: int) -> float:
    """Let the library compose the rounds."""
    return _composed_all([(terms, rounds)])


def _composed_all(parts: Sequence[tuple[PrivacyTerms, int]]) -> float:
    """Let the library compose the rounds of several releases."""
    library = _library()
    relation = library.NeighboringRelation
    coins = parts[0][0].draw == "poisson"
    tight = all(terms.accountant == "pld" for terms, _ in parts)
    if tight:
        # Without sampling only the ratio of noise to sensitivity counts, whatever the neighbours.
        accountant = library.pld.PLDAccountant(relation.ADD_OR_REMOVE_ONE)
    else:
        neighbours = relation.ADD_OR_REMOVE_ONE if coins else relation.REPLACE_ONE
        accountant = library.rdp.RdpAccountant(neighboring_relation=neighbours)
    with _quiet():
        for terms, rounds in parts:
            accountant.compose(_event(library, terms, tight), rounds)
        return float(accountant.get_epsilon(max(terms.delta for terms, _ in parts)))


def _event(library: Any, terms: PrivacyTerms, tight: bool) -> Any:
    """Describe one round to the library."""
    sampled = terms.cohort < terms.clients
    if terms.draw == "poisson":
        event = library.GaussianDpEvent(terms.noise)
        rate = terms.cohort / terms.clients
        return library.PoissonSampledDpEvent(rate, event) if sampled else event
    event = library.GaussianDpEvent(terms.noise / 2)  # replacing one moves the sum by 2S
    if not sampled:
        return event
    if tight:
        raise ConfigError(
            "accountant = 'pld' has no bound for cohorts of a fixed size; set draw = "
            "'poisson', or accountant = 'rdp'"
        )
    return library.SampledWithoutReplacementDpEvent(
        source_dataset_size=terms.clients, sample_size=terms.cohort, event=event
    )


def solved(terms: PrivacyTerms, rounds: int, target: float) -> float:
    """Return the least noise (to a thousandth, down to 1e-6) whose ε stays within a target."""
    least, most = 0.0, 1.0
    while epsilon(terms._replace(noise=most), rounds) > target:
        least, most = most, 2 * most
        if most > 1e6:
            raise ConfigError(
                f"epsilon = {target:g} cannot be reached at delta = {terms.delta:g} in {rounds} "
                "rounds, however much noise there is; raise epsilon or delta"
            )
    while most - least > 1e-3 * most and most > 1e-6:
        middle = (least + most) / 2
        enough = epsilon(terms._replace(noise=middle), rounds) <= target
        least, most = (least, middle) if enough else (middle, most)
    return most


def affordable(terms: PrivacyTerms, rounds: int, budget: float, releases: int = 1) -> int:
    """Return how many of the rounds fit into a budget, each being done for every release."""
    if epsilon(terms, rounds * releases) <= budget:
        return rounds
    fits, exceeds = 0, rounds
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        enough = epsilon(terms, middle * releases) <= budget
        fits, exceeds = (middle, exceeds) if enough else (fits, middle)
    return fits


def total(parts: Sequence[tuple[PrivacyTerms, int]]) -> float:
    """Return ε of several releases of the same clients' data together, at the largest δ.

    All have one way to draw, as methods of one experiment do. Under `fixed` every part counts as if
    everyone took part where that is less, as in `epsilon`.
    """
    if any(terms.noise == 0 for terms, _ in parts):
        return float("inf")
    if not sum(rounds for _, rounds in parts):
        return 0.0
    least = float("inf")
    for everyone in (False, True) if parts[0][0].draw == "fixed" else (False,):
        own = [(t._replace(cohort=t.clients) if everyone else t, rounds) for t, rounds in parts]
        least = min(least, _composed_all(own))
    return least


def _library() -> Any:
    try:
        library = importlib.import_module("dp_accounting")
        for part in ("rdp", "pld"):
            importlib.import_module(f"dp_accounting.{part}")
    except ImportError as error:
        raise NoAccountant(
            f"aggregate = 'dp' needs the accountant: pip install 'idiolect[privacy]' ({error})"
        ) from None
    return library


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orders at which a series does not converge are left out, which only loosens ε."""
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
