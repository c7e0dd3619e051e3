"""Every method by name. A method joins the laws, the command line and the docs by being listed."""

from idiolect.method import Method
from idiolect.methods.centralised import Centralised
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.fedprox import FedProx
from idiolect.methods.finetuned import FedAvgFT
from idiolect.methods.local import LocalOnly

METHODS: dict[str, type[Method]] = {
    "local": LocalOnly,
    "centralised": Centralised,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fedavg-ft": FedAvgFT,
}

__all__ = ["METHODS", "Centralised", "FedAvg", "FedAvgFT", "FedProx", "LocalOnly"]
