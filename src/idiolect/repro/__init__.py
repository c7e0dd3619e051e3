"""The reproduction index: every table and figure of the papers, its status, and how to run it."""

from idiolect.repro.index import PAPERS, find, items, papers
from idiolect.repro.item import Cell, Claim, Item, Paper, Runnable
from idiolect.repro.measured import Measured, of_result

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
