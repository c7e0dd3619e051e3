"""Server optimisers: the mean update of a round as a gradient, for any method that averages.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2 (FedAdagrad, FedYogi,
FedAdam), and Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for
Federated Visual Classification", 2019 (FedAvgM). The update Δ is the mean of reports, by the
method's own weights, less what was sent. Unlike the robust rules these use nothing but that mean,
so secure sums and workers that add up will do. As printed, moments have no correction of their
bias, and v starts at τ². β is below 1: at 1 Adam's m and v take nothing from an update, and
FedAvgM forgets none. Running statistics of batch normalisation are averaged.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect.aggregation.aggregator import Aggregator
from idiolect.core import batchnorm, tree
from idiolect.core.method import Setup, setting
from idiolect.core.tree import Params, Tree
from idiolect.errors import ConfigError


class ServerMoments(NamedTuple):
    """What the server remembers of earlier updates, by the names of parameters."""

    first: Params  # m
    second: Params  # v


@dataclass(frozen=True, kw_only=True)
class FedAvgM(Aggregator):
    """Momentum: m ← β m + Δ, x ← x + η m."""

    title: ClassVar[str] = "FedAvgM"
    source: ClassVar[str] = "Hsu et al. 2019"
    mean_only: ClassVar[bool] = True

    lr: float = setting(1.0, "learning rate of the server (η)", above=0)
    beta1: float = setting(0.9, "how much of earlier updates is kept (β)", least=0, below=1)

    def start(self, setup: Setup) -> Tree:
        """No update is known."""
        return tree.zeros_like(batchnorm.parameters(setup.params))

    def combine(
        self, memory: Tree, reference: Params, params: Params, weight: Tensor
    ) -> tuple[Params, Tree]:
        """Step along the mean update."""
        mean, sent = (tree.named(one) for one in (tree.mean(params, weight), reference))
        step, memory = self.step({n: mean[n] - sent[n] for n in batchnorm.parameters(sent)}, memory)
        moved = {n: sent[n] + self.lr * step[n] if n in step else leaf for n, leaf in mean.items()}
        joined: Params = tree.like(reference, moved)
        return joined, memory

    def step(self, update: Params, memory: Tree) -> tuple[Params, Tree]:
        """Return the direction of the step, and the new memory."""
        kept = tree.axpy(self.beta1, memory, update)
        return kept, kept


@dataclass(frozen=True, kw_only=True)
class FedAdam(FedAvgM):
    """Adam: m ← β₁ m + (1 − β₁) Δ, v ← β₂ v + (1 − β₂) Δ², x ← x + η m / (√v + τ)."""

    title: ClassVar[str] = "FedAdam"
    source: ClassVar[str] = "Reddi et al. 2021, Algorithm 2"

    lr: float = setting(0.01, "learning rate of the server (η)", above=0)
    beta1: float = setting(0.9, "how much of earlier updates is kept (β₁)", least=0, below=1)
    beta2: float = setting(0.99, "how much of earlier squares is kept (β₂)", least=0, below=1)
    tau: float = setting(1e-3, "added to the root of the squares (τ)", above=0)

    def start(self, setup: Setup) -> ServerMoments:
        """No update is known; squares start at τ²."""
        zeros = tree.zeros_like(batchnorm.parameters(setup.params))
        return ServerMoments(zeros, tree.map(lambda leaf: leaf + self.tau**2, zeros))

    def step(self, update: Params, memory: ServerMoments) -> tuple[Params, ServerMoments]:
        """Scale each coordinate by the size of its updates so far."""
        first = tree.map(lambda m, d: self.beta1 * m + (1 - self.beta1) * d, memory.first, update)
        second = tree.map(lambda v, d: self.squares(v, d.square()), memory.second, update)
        step = tree.map(lambda m, v: m / (v.sqrt() + self.tau), first, second)
        return step, ServerMoments(first, second)

    def squares(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the new v."""
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True, kw_only=True)
class FedYogi(FedAdam):
    """Yogi: as Adam, but v ← v − (1 − β₂) Δ² sign(v − Δ²), which falls slowly."""

    title: ClassVar[str] = "FedYogi"

    def squares(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the new v."""
        return v - (1 - self.beta2) * square * torch.sign(v - square)


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(FedAdam):
    """Adagrad: as Adam, but v ← v + Δ² (there is no β₂), and no momentum unless asked for."""

    title: ClassVar[str] = "FedAdagrad"

    beta1: float = setting(0.0, "how much of earlier updates is kept (β₁)", least=0, below=1)
    beta2: float = setting(0.99, "has no say here: squares add up", least=0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta2 != FedAdam.beta2:
            raise ConfigError(
                f"FedAdagrad: beta2 is {self.beta2}, but its squares add up and nothing of them is "
                "forgotten; leave it out, or use fedadam"
            )

    def squares(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the new v."""
        return v + square
