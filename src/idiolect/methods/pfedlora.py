"""pFedLoRA: a shared and a personal adapter side by side, mixed by a weight.

Yi et al., "pFedLoRA: Model-Heterogeneous Personalized Federated Learning with LoRA Tuning", 2023
(arXiv 2310.13283), Algorithm 1, and FDLoRA (Qi et al. 2024, arXiv 2406.07925), which has the same
two parts. In pFedLoRA the personal part is a whole network of each client's own form; here it is a
second adapter on the common base, as in FDLoRA. What is pFedLoRA's is the round: first the
personal part is trained with the shared one fixed, then the shared one with the personal one fixed,
and the shared one is averaged. FDLoRA finds the weight by a search after the rounds; it is a
setting here.

The ranks of the network's LoRA are divided: with A = [Aₛ; Aₚ] and B = [(1 − μ) Bₛ, μ Bₚ] a layer
adds (1 − μ) Bₛ Aₛ + μ Bₚ Aₚ.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from idiolect.core import lora_pairs
from idiolect.core.capabilities import NewcomerModel
from idiolect.core.client import Batch, Local
from idiolect.core.method import Report, Sent, Setup, setting
from idiolect.core.tree import Params, Tree
from idiolect.errors import ConfigError
from idiolect.methods.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class PFedLoRA(NewcomerModel, FedAvg):
    """Train a personal adapter beside the shared one, then the shared one beside it."""

    title: ClassVar[str] = "pFedLoRA"
    paper: ClassVar[str] = "Yi et al. 2023, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {}

    personal_rank: int = setting(4, "ranks of the personal adapter, of those of all", least=1)
    weight: float = setting(0.5, "weight of the personal adapter (μ)", least=0, most=1)
    newcomer_epochs: int = setting(
        10, "passes in which a newcomer trains its adapter", least=1, deploy=True
    )

    def init_server(self, setup: Setup) -> Params:
        """The server holds the shared adapter, and what is trained beside LoRA."""
        lora_pairs.refuse_without(setup.params, self.title)
        rank = lora_pairs.rank_of(setup.params)
        if self.personal_rank >= rank:
            raise ConfigError(
                f"pFedLoRA: the network's LoRA has rank {rank}, of which {self.personal_rank} are "
                "to be personal, and some must be left to share; raise adapter.rank or lower "
                "personal_rank"
            )
        return lora_pairs.ranks(setup.params, 0, rank - self.personal_rank)

    def init_personal(self, setup: Setup) -> Params:
        """A client holds its adapter."""
        rank = lora_pairs.rank_of(setup.params)
        last = lora_pairs.ranks(setup.params, rank - self.personal_rank, rank)
        return {name: last[name] for pair in lora_pairs.pairs(last) for name in pair}

    def client_step(self, sent: Sent, personal: Params, local: Local) -> tuple[Report, Params]:
        """Train the personal adapter, then the shared one; report the latter."""

        def personal_loss(own: Params, batch: Batch) -> Tensor:
            return local.loss(self._mixed(sent.shared, own), batch)

        own = self.fit(local, personal, personal_loss)

        def shared_loss(shared: Params, batch: Batch) -> Tensor:
            return local.loss(self._mixed(shared, own), batch)

        return Report(self.fit(local, sent.shared, shared_loss), local.size), own

    def deploy(self, sent: Sent, personal: Params, local: Local) -> Params:
        """Mix both."""
        return self._mixed(sent.shared, personal)

    def adapt(self, sent: Sent, personal: Params, local: Local) -> Params:
        """A newcomer's adapter adds nothing yet: train it beside the shared one."""

        def loss(own: Params, batch: Batch) -> Tensor:
            return local.loss(self._mixed(sent.shared, own), batch)

        own = self.fit(local, personal, loss, lr=self.lr, epochs=self.newcomer_epochs)
        return self._mixed(sent.shared, own)

    def models(self, sent: Sent, deployed: Params) -> dict[str, Tree]:
        """The mixture, and the shared adapter with nothing beside it."""
        nothing = {}
        for down, up in lora_pairs.pairs(sent.shared):
            a, b = sent.shared[down], sent.shared[up]
            nothing[down] = a.new_zeros(self.personal_rank, *a.shape[1:])
            nothing[up] = b.new_zeros(len(b), self.personal_rank, *b.shape[2:])
        return {"personal": deployed, "global": self._mixed(sent.shared, nothing)}

    def _mixed(self, shared: Params, own: Params) -> Params:
        """Put both adapters side by side."""
        whole = dict(shared)
        for down, up in lora_pairs.pairs(shared):
            whole[down] = torch.cat([shared[down], own[down]])
            whole[up] = torch.cat([(1 - self.weight) * shared[up], self.weight * own[up]], 1)
        return whole
