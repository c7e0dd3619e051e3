"""Client-level differential privacy where reports are joined.

Each client's whole update is shortened to a norm of at most S, the sum of the updates gets Gaussian
noise of standard deviation z · S, and is divided by the number of clients that were to take part.
Clients count alike: were they weighed by their examples, one could weigh more than S. What a method
keeps personal is not reported, so it gets no noise.

McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR 2018, Algorithm 1;
with an S that adapts, Andrew et al., "Differentially Private Learning with Adaptive Clipping",
NeurIPS 2021, Algorithm 1.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from idiolect import tree
from idiolect.aggregate import Aggregator, Shortened, shorten
from idiolect.errors import ConfigError, MethodError
from idiolect.method import Plan, Setup, setting
from idiolect.privacy import guarantee
from idiolect.tree import Params

_NOISE = 17  # keeps the noise apart from other uses of the same seed


class Noise(NamedTuple):
    """What the server keeps between rounds."""

    clip: Tensor  # S
    round: Tensor
    key: Tensor  # the noise is drawn from (key, round), so that a resumed run draws it again


@dataclass(frozen=True, kw_only=True)
class Private(Aggregator):
    """The mean of shortened updates, with noise that hides any one client."""

    title: ClassVar[str] = "private"
    source: ClassVar[str] = "McMahan et al. 2018; Andrew et al. 2021"
    hides: ClassVar[bool] = True
    shortens: ClassVar[bool] = True

    clip: float = setting(
        1.0, "largest norm of a client's update (S); the first one, if it adapts", above=0
    )
    noise: float = setting(0.0, "noise multiplier (z); or give epsilon", least=0)
    epsilon: float = setting(0.0, "the ε to end at, which the noise is solved for", least=0)
    delta: float = setting(0.0, "δ; 0: clients ** -1.1, at most 0.01", least=0, most=1)
    budget: float = setting(0.0, "an ε at which the run ends early; 0: none", least=0)
    adaptive: bool = setting(False, "let S follow a quantile of the updates' norms")
    quantile: float = setting(0.5, "which quantile an adaptive S follows", least=0, most=1)
    clip_lr: float = setting(0.2, "how fast an adaptive S moves", above=0)
    count_noise: float = setting(
        0.0, "noise on the count behind an adaptive S; 0: a twentieth of the cohort, or z", least=0
    )
    accountant: str = setting("rdp", "how ε is computed", choices=("rdp", "pld"))
    force: bool = setting(False, "run although the guarantee would mean nothing")
    cohort: float = setting(0.0, "clients to divide by; 0: as many as are drawn", least=0)

    def start(self, setup: Setup) -> Noise:
        """Remember S, and the seed that noise comes from."""
        if setup.statistics:
            raise MethodError(
                "the network keeps running statistics of batches, which noise would ruin and which "
                "would tell of clients without it; use norm = 'group' with aggregate = 'dp'"
            )
        device = setup.sizes.device
        secret = setup.seed if setup.secret is None else setup.secret
        return Noise(
            setup.sizes.new_full((), self.clip),
            torch.zeros((), dtype=torch.int64, device=device),
            torch.full((), secret, dtype=torch.int64, device=device),
        )

    def combine(
        self, memory: Noise, reference: Params, params: Params, weight: Tensor
    ) -> tuple[Params, Noise]:
        """Shorten, add up, add noise, divide by the planned number of clients."""
        rows = shorten(reference, params, weight, memory.clip)
        total: Shortened = tree.map(lambda leaf: leaf.sum(0), rows)
        return self.combine_sum(memory, reference, total, len(weight))

    def longest(self, memory: Noise) -> Tensor:
        """S, which clients may shorten their updates to themselves."""
        return memory.clip

    def combine_sum(
        self, memory: Noise, reference: Params, total: Shortened, rows: int
    ) -> tuple[Params, Noise]:
        """Add noise to a sum, and divide it by the planned number of clients."""
        return self._private(memory, reference, total.update, total.below, rows)

    def idle(self, memory: Noise, reference: Params) -> tuple[Params, Noise]:
        """Add the noise that hides that nobody came."""
        nothing = tree.map(torch.zeros_like, reference)
        return self._private(memory, reference, nothing, memory.clip.new_zeros(()), 1)

    def _private(
        self, memory: Noise, reference: Params, total: Params, below: Tensor, rows: int
    ) -> tuple[Params, Noise]:
        clients = self.cohort or rows
        draw = _generator(memory)
        spread = self._update_noise(clients) * memory.clip

        def noised(sent: Tensor, leaf: Tensor) -> Tensor:
            if self.noise == 0:
                return sent + leaf / clients
            drawn = torch.randn(leaf.shape, generator=draw, device=leaf.device, dtype=leaf.dtype)
            return sent + (leaf + spread * drawn) / clients

        joined: Params = tree.map(noised, reference, total)
        return joined, Noise(self._clip(memory, below, clients, draw), memory.round + 1, memory.key)

    def _clip(self, memory: Noise, below: Tensor, clients: float, draw: torch.Generator) -> Tensor:
        """Move S towards the quantile by the noisy share of updates that were not shortened."""
        if not self.adaptive:
            return memory.clip
        drawn = torch.randn((), generator=draw, device=below.device, dtype=below.dtype)
        share = (below + self._count_noise(clients) * (self.noise > 0) * drawn) / clients + 0.5
        return memory.clip * torch.exp(-self.clip_lr * (share - self.quantile))

    def _count_noise(self, clients: float) -> float:
        return self.count_noise or max(clients / 20, self.noise)

    def _update_noise(self, clients: float) -> float:
        """Return the multiplier on updates: together with the count's the two leak as z alone.

        Each client moves the count by a half at most, so its multiplier is twice its noise.
        """
        if not self.adaptive or self.noise == 0:
            return self.noise
        left = self.noise**-2 - (2 * self._count_noise(clients)) ** -2
        if left <= 0:
            raise ConfigError(
                f"count_noise is {self.count_noise}, expected more than half the noise multiplier "
                f"({self.noise:g}): less would leak more than the whole"
            )
        return float(left**-0.5)

    # What it guarantees.

    def settled(self, plan: Plan) -> tuple["Private", int]:
        """Solve for the noise, stop where the budget ends, and refuse what would mean nothing."""
        clients = float(plan.cohort or plan.clients)
        ready = dataclasses.replace(self, cohort=self.cohort or clients)
        if self.epsilon and not self.noise:
            terms = guarantee.terms(ready, plan)
            found = guarantee.solved(terms, self.epsilon, plan.rounds)
            ready = dataclasses.replace(ready, noise=found, epsilon=0.0)
        elif self.epsilon:
            raise ConfigError("give noise or epsilon, not both: one follows from the other")
        ready._update_noise(ready.cohort)
        rounds = guarantee.affordable(guarantee.terms(ready, plan), plan.rounds, self.budget)
        guarantee.refuse_meaningless(ready, plan._replace(rounds=rounds))
        return ready, rounds

    def promise(self, plan: Plan) -> dict[str, Any]:
        """Return (ε, δ) and what they mean."""
        return {"privacy": guarantee.promise(self, plan)}


def _generator(memory: Noise) -> torch.Generator:
    """Make this round's generator; the one moment a round waits for the device."""
    key = (int(memory.key), _NOISE, int(memory.round))
    seed = np.random.SeedSequence(key).generate_state(2, np.uint32)
    made = torch.Generator(memory.clip.device)
    made.manual_seed(int(seed[0]) << 32 | int(seed[1]))
    return made
