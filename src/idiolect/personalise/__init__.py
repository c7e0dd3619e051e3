"""What clients do with a federated model after the rounds: five parts that go together."""

from idiolect.personalise.combined import NAMES, TABLE_2, Combined, spoken
from idiolect.personalise.mixture import Mixture
from idiolect.personalise.tuned import Tuned

__all__ = ["NAMES", "TABLE_2", "Combined", "Mixture", "Tuned", "spoken"]
