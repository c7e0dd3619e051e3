"""Every method by name. A method joins the laws, the command line and the docs by being listed."""

from idiolect.core.method import Method
from idiolect.methods.apfl import APFL as APFL
from idiolect.methods.apple import APPLE as APPLE
from idiolect.methods.ditto import Ditto as Ditto
from idiolect.methods.fedala import FedALA as FedALA
from idiolect.methods.fedamp import FedAMP as FedAMP
from idiolect.methods.fedamp import HeurFedAMP as HeurFedAMP
from idiolect.methods.fedavg import FedAvg as FedAvg
from idiolect.methods.fedavg import FedAvgFT as FedAvgFT
from idiolect.methods.fedbabu import FedBABU as FedBABU
from idiolect.methods.fedbe import FedBE as FedBE
from idiolect.methods.fedbn import FedBN as FedBN
from idiolect.methods.fedcp import FedCP as FedCP
from idiolect.methods.feddbe import FedDBE as FedDBE
from idiolect.methods.feddf import FedDF as FedDF
from idiolect.methods.feddf import PFedDF as PFedDF
from idiolect.methods.feddistill import FedDistill as FedDistill
from idiolect.methods.feddyn import FedDyn as FedDyn
from idiolect.methods.fedem import FedEM as FedEM
from idiolect.methods.fedfomo import FedFomo as FedFomo
from idiolect.methods.fedgen import FedGen as FedGen
from idiolect.methods.fedmd import FedMD as FedMD
from idiolect.methods.fedpac import FedPAC as FedPAC
from idiolect.methods.fedper import FedPer as FedPer
from idiolect.methods.fedphp import FedPHP as FedPHP
from idiolect.methods.fedproto import FedProto as FedProto
from idiolect.methods.fedprox import FedProx as FedProx
from idiolect.methods.fedrep import FedRep as FedRep
from idiolect.methods.fedrod import FedRoD as FedRoD
from idiolect.methods.fedrot_lora import FedRotLoRA as FedRotLoRA
from idiolect.methods.fedsa_lora import FedSALoRA as FedSALoRA
from idiolect.methods.ffa_lora import FFALoRA as FFALoRA
from idiolect.methods.flexlora import FlexLoRA as FlexLoRA
from idiolect.methods.fml import FML as FML
from idiolect.methods.gpfl import GPFL as GPFL
from idiolect.methods.heterofl import HeteroFL as HeteroFL
from idiolect.methods.ifca import IFCA as IFCA
from idiolect.methods.knnper import KNNPer as KNNPer
from idiolect.methods.ktpfl import KTpFL as KTpFL
from idiolect.methods.ktpfl import KTpFLWeights as KTpFLWeights
from idiolect.methods.l2sgd import L2SGD as L2SGD
from idiolect.methods.lgfedavg import LGFedAvg as LGFedAvg
from idiolect.methods.local import Centralised as Centralised
from idiolect.methods.local import LocalOnly as LocalOnly
from idiolect.methods.mocha import MOCHA as MOCHA
from idiolect.methods.moon import MOON as MOON
from idiolect.methods.mrmtl import MRMTL as MRMTL
from idiolect.methods.perfedavg import PerFedAvg as PerFedAvg
from idiolect.methods.persfl import PersFL as PersFL
from idiolect.methods.pfedhn import PFedHN as PFedHN
from idiolect.methods.pfedlora import PFedLoRA as PFedLoRA
from idiolect.methods.pfedme import PFedMe as PFedMe
from idiolect.methods.pfml import PFML as PFML
from idiolect.methods.portfolio import Portfolio as Portfolio
from idiolect.methods.scaffold import Scaffold as Scaffold
from idiolect.methods.simpfl import SimPFL as SimPFL
from idiolect.methods.simpfl import TopKPFL as TopKPFL

METHODS: dict[str, type[Method]] = {
    "local": LocalOnly,
    "centralised": Centralised,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "feddyn": FedDyn,
    "moon": MOON,
    "fedavg-ft": FedAvgFT,
    "knn-per": KNNPer,
    "persfl": PersFL,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedbabu": FedBABU,
    "lg-fedavg": LGFedAvg,
    "fedbn": FedBN,
    "fedala": FedALA,
    "fedproto": FedProto,
    "feddistill": FedDistill,
    "fedrod": FedRoD,
    "feddbe": FedDBE,
    "fedcp": FedCP,
    "gpfl": GPFL,
    "fedpac": FedPAC,
    "pfedme": PFedMe,
    "per-fedavg": PerFedAvg,
    "pfml": PFML,
    "fml": FML,
    "ktpfl": KTpFL,
    "fedmd": FedMD,
    "sim-pfl": SimPFL,
    "topk-pfl": TopKPFL,
    "fedgen": FedGen,
    "feddf": FedDF,
    "pfeddf": PFedDF,
    "fedbe": FedBE,
    "ktpfl-weights": KTpFLWeights,
    "fedamp": FedAMP,
    "heurfedamp": HeurFedAMP,
    "fedfomo": FedFomo,
    "pfedhn": PFedHN,
    "ditto": Ditto,
    "mr-mtl": MRMTL,
    "l2sgd": L2SGD,
    "mocha": MOCHA,
    "ifca": IFCA,
    "fedem": FedEM,
    "heterofl": HeteroFL,
    "apfl": APFL,
    "apple": APPLE,
    "fedphp": FedPHP,
    "fedsa-lora": FedSALoRA,
    "ffa-lora": FFALoRA,
    "flexlora": FlexLoRA,
    "pfedlora": PFedLoRA,
    "fedrot-lora": FedRotLoRA,
    "portfolio": Portfolio,
}
