"""Data: pools of examples, and how they are divided among clients."""

from idiolect.data.dataset import Dataset, normalised
from idiolect.data.embedded import load_embedded
from idiolect.data.federate import federate
from idiolect.data.federation import Exam, Federation, Lessons
from idiolect.data.partition import PARTITIONS

__all__ = [
    "PARTITIONS",
    "Dataset",
    "Exam",
    "Federation",
    "Lessons",
    "federate",
    "load_embedded",
    "normalised",
]
