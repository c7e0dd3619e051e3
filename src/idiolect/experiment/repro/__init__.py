"""The reproduction index: every table and figure of the papers, its status, and how to run it."""

from idiolect.experiment.repro.index import PAPERS, find, items, papers
from idiolect.experiment.repro.item import Cell, Claim, Item, Paper, Runnable
from idiolect.experiment.repro.measured import Measured, of_result

__all__ = [
    "PAPERS",
    "Cell",
    "Claim",
    "Item",
    "Measured",
    "Paper",
    "Runnable",
    "find",
    "items",
    "of_result",
    "papers",
]
