"""What clients do with a federated model after the rounds: five parts that go together."""

from idiolect.methods.personalise.combined import NAMES, TABLE_2, Combined, spoken
from idiolect.methods.personalise.fine_tuning import Tuned
from idiolect.methods.personalise.mixture import Mixture

__all__ = ["NAMES", "TABLE_2", "Combined", "Mixture", "Tuned", "spoken"]
