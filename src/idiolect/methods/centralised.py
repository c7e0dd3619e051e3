"""Centralised: one model on everybody's data, the reference that privacy forbids."""

from dataclasses import dataclass
from typing import ClassVar

from idiolect.methods.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class Centralised(FedAvg):
    """Train on the union of all clients' data, as if it could be gathered; score per client."""

    title: ClassVar[str] = "Centralised"
    paper: ClassVar[str] = ""
    pooled: ClassVar[bool] = True
