"""Data: pools of examples, and how they are divided among clients."""

from idiolect.data.dataset import Dataset
from idiolect.data.federate import federate
from idiolect.data.federation import Federation
from idiolect.data.own import read
from idiolect.data.partition import PARTITIONS
from idiolect.data.sources import SOURCES, load

__all__ = ["PARTITIONS", "SOURCES", "Dataset", "Federation", "federate", "load", "read"]
