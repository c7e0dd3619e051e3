"""LG-FedAvg: personal first layers, shared last ones; FedPer the other way round.

Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global
Representations", 2020, Algorithm 1. Each client learns a representation of its own data and trains
the global layers on top of it together with it; only those are averaged, by examples. In the
paper's experiments both parts start from a model that FedAvg trained; here, as in PFLlib, they
start as they were drawn. A newcomer fits a representation under the fixed global layers.

Written from notes and released code: the paper's text was not at hand to check equation numbers.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from idiolect.core import tree
from idiolect.core.method import Setup, setting
from idiolect.core.tree import Params
from idiolect.methods.fedper import FedPer


@dataclass(frozen=True, kw_only=True)
class LGFedAvg(FedPer):
    """Clients train everything, upload the last layers, and keep the representation."""

    title: ClassVar[str] = "LG-FedAvg"
    paper: ClassVar[str] = "Liang et al. 2020, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {"pfllib": {"lr": 0.005, "batch": 10}}

    head_layers: int = setting(1, "how many last layers are shared", least=1)
    newcomer_epochs: int = setting(
        10, "passes in which a newcomer trains its representation", least=1, deploy=True
    )

    def init_server(self, setup: Setup) -> Params:
        """The server holds the last layers."""
        return tree.split_layers(setup.params, self.head_layers)[1]

    def init_personal(self, setup: Setup) -> Params:
        """A client holds all before them."""
        return tree.split_layers(setup.params, self.head_layers)[0]
