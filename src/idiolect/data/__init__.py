"""Data: pools of examples, and how they are divided among clients."""

from idiolect.data.dataset import Dataset, fitted, normalised
from idiolect.data.federate import federate
from idiolect.data.federation import Federation, TestData, TrainData, same_clients, same_test
from idiolect.data.own import read
from idiolect.data.partition import PARTITIONS
from idiolect.data.sources import SOURCES, load

__all__ = [
    "PARTITIONS",
    "SOURCES",
    "Dataset",
    "Federation",
    "TestData",
    "TrainData",
    "federate",
    "fitted",
    "load",
    "normalised",
    "read",
    "same_clients",
    "same_test",
]
