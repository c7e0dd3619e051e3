"""Differential privacy of clients: noise where reports are joined, and what it guarantees."""

from idiolect.privacy.accounting import Terms, affordable, epsilon, solved
from idiolect.privacy.rule import Private

__all__ = ["Private", "Terms", "affordable", "epsilon", "solved"]
