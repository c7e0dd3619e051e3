"""FlexLoRA: the server averages products B A, and cuts the mean to each client's rank.

Bai et al., "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client
Resources", NeurIPS 2024 (arXiv 2402.11505), Algorithm 1. All clients run a network of the largest
rank, in which the ranks that a client does not have are zero in A and in B; then both gradients are
zero there, and they stay so: the client trains just its own rank. The factor alpha / rank is that
of the network for everyone, so that products can be averaged. Reports are counted in bytes at the
largest rank.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from idiolect.core import lora_pairs, tree
from idiolect.core.capabilities import NewcomerMessage
from idiolect.core.client import Local
from idiolect.core.method import Method, Report, Sent, Setup, alike, setting
from idiolect.core.tree import Params, Tree
from idiolect.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class FlexLoRA(NewcomerMessage, Method):
    """Average B A over clients of unequal rank; give back its best approximation at each rank."""

    title: ClassVar[str] = "FlexLoRA"
    paper: ClassVar[str] = "Bai et al. 2024, Algorithm 1"

    uniform: bool = setting(False, "weigh clients alike instead of by their examples")
    ranks: tuple[int, ...] = setting(
        (), "ranks of clients, dealt in turn by number; empty: all have the network's", least=1
    )

    def init_server(self, setup: Setup) -> Params:
        """The server holds the mean product as a pair of the largest rank."""
        lora_pairs.refuse_without(setup.params, self.title)
        rank = lora_pairs.rank_of(setup.params)
        if self.ranks and max(self.ranks) > rank:
            raise ConfigError(
                f"FlexLoRA: a client is to have rank {max(self.ranks)}, and the network's LoRA has "
                f"{rank}; raise adapter.rank"
            )
        return setup.params

    def send(self, state: Params, cohort: Tensor) -> Sent:
        """Each client gets the first ranks, as many as it has; they are the largest."""
        rank = lora_pairs.rank_of(state)
        dealt = cohort.new_tensor(self.ranks or (rank,))[cohort % len(self.ranks or (rank,))]
        kept = torch.arange(rank, device=cohort.device) < dealt.unsqueeze(-1)
        return Sent(own=lora_pairs.masked(tree.repeat(state, len(cohort)), kept))

    def welcome(self, state: Params, cohort: Tensor) -> Sent:
        """A newcomer has no number, and gets the whole."""
        return Sent(own=tree.repeat(state, len(cohort)))

    def client_step(self, sent: Sent, personal: Tree, local: Local) -> tuple[Report, Tree]:
        """Train the received pair and report it."""
        return Report(self.fit(local, sent.own), local.size), personal

    def server_step(self, state: Params, cohort: Tensor, reports: Report) -> Params:
        """Average products; the largest singular values of the mean make the new pairs."""
        weight = alike(reports.size) if self.uniform else reports.size
        share = weight / weight.sum()
        new: Params = dict(tree.mean(reports.params, share))
        for down, up in lora_pairs.pairs(new):
            a, b = reports.params[down].flatten(2), reports.params[up].flatten(2)
            mean = torch.einsum("n,nor,nri->oi", share.to(a.dtype), b, a)
            new[down], new[up] = _cut(mean, state[down], state[up])
        return new

    def deploy(self, sent: Sent, personal: Tree, local: Local) -> Tree:
        """Use what the rank allows."""
        return sent.own

    def models(self, sent: Sent, deployed: Tree) -> dict[str, Tree]:
        """Clients of one rank have one model; no client is sent a model for all."""
        return {"personal": deployed}


def _cut(mean: Tensor, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return A = Vᵀ and B = U Σ of the largest singular values, in the form of the old pair.

    The sign of a singular vector is free; here A's largest entry is positive. Where the mean has
    fewer singular values than there are ranks, the old A goes on under a B of zero: its direction
    would be noise.
    """
    rank = len(down)
    u, s, v = torch.linalg.svd(mean, full_matrices=False)
    u, s, v = u[:, :rank], s[:rank], v[:rank]
    largest = v.gather(1, v.abs().argmax(1, keepdim=True))
    sign = torch.where(largest < 0, -1.0, 1.0).to(v.dtype)
    real = s > s[0] * max(mean.shape) * torch.finfo(s.dtype).eps
    old = down.flatten(1)
    short = rank - len(s)  # of a layer narrower than the rank
    a = torch.cat([torch.where(real.unsqueeze(1), v * sign, old[: len(s)]), old[len(s) :]])
    b = torch.where(real, u * sign.squeeze(1) * s, 0.0)
    b = torch.cat([b, b.new_zeros(len(b), short)], 1)
    return a.reshape(down.shape), b.reshape(up.shape)
