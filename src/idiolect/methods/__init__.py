"""Every method by name. A method joins the laws, the command line and the docs by being listed."""

from idiolect.core.method import Method
from idiolect.methods.apfl import APFL
from idiolect.methods.ditto import Ditto
from idiolect.methods.fedala import FedALA
from idiolect.methods.fedamp import FedAMP, HeurFedAMP
from idiolect.methods.fedavg import FedAvg, FedAvgFT
from idiolect.methods.fedbn import FedBN
from idiolect.methods.feddf import FedDF, PFedDF
from idiolect.methods.fedfomo import FedFomo
from idiolect.methods.fedmd import FedMD
from idiolect.methods.fedper import FedPer
from idiolect.methods.fedproto import FedProto
from idiolect.methods.fedprox import FedProx
from idiolect.methods.fedrep import FedRep
from idiolect.methods.fml import FML
from idiolect.methods.ktpfl import KTpFL, KTpFLWeights
from idiolect.methods.local import Centralised, LocalOnly
from idiolect.methods.perfedavg import PerFedAvg
from idiolect.methods.persfl import PersFL
from idiolect.methods.pfedhn import PFedHN
from idiolect.methods.pfedme import PFedMe
from idiolect.methods.pfml import PFML
from idiolect.methods.portfolio import Portfolio
from idiolect.methods.simpfl import SimPFL, TopKPFL

METHODS: dict[str, type[Method]] = {
    "local": LocalOnly,
    "centralised": Centralised,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fedavg-ft": FedAvgFT,
    "persfl": PersFL,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedbn": FedBN,
    "fedala": FedALA,
    "fedproto": FedProto,
    "pfedme": PFedMe,
    "per-fedavg": PerFedAvg,
    "pfml": PFML,
    "fml": FML,
    "ktpfl": KTpFL,
    "fedmd": FedMD,
    "sim-pfl": SimPFL,
    "topk-pfl": TopKPFL,
    "feddf": FedDF,
    "pfeddf": PFedDF,
    "ktpfl-weights": KTpFLWeights,
    "fedamp": FedAMP,
    "heurfedamp": HeurFedAMP,
    "fedfomo": FedFomo,
    "pfedhn": PFedHN,
    "ditto": Ditto,
    "apfl": APFL,
    "portfolio": Portfolio,
}

__all__ = [
    "APFL",
    "FML",
    "METHODS",
    "PFML",
    "Centralised",
    "Ditto",
    "FedALA",
    "FedAMP",
    "FedAvg",
    "FedAvgFT",
    "FedBN",
    "FedDF",
    "FedFomo",
    "FedMD",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRep",
    "HeurFedAMP",
    "KTpFL",
    "KTpFLWeights",
    "LocalOnly",
    "PFedDF",
    "PFedHN",
    "PFedMe",
    "PerFedAvg",
    "PersFL",
    "Portfolio",
    "SimPFL",
    "TopKPFL",
]
