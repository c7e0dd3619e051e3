"""Client-level differential privacy where reports are joined.

Each client's whole update is shortened to a norm of at most S, the sum of the updates gets Gaussian
noise of standard deviation z · S, and is divided by the number of clients that were to take part.
Clients count alike: were they weighed by their examples, one could weigh more than S. What a method
keeps personal is not reported, so it gets no noise. Updates and noise are whole numbers of steps of
a fine grid (see `noise`), so that rounding cannot tell one from the other.

McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR 2018, Algorithm 1;
with an S that adapts, Andrew et al., "Differentially Private Learning with Adaptive Clipping",
NeurIPS 2021, Algorithm 1.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect.aggregation import guarantee
from idiolect.aggregation.accounting import solved
from idiolect.aggregation.aggregator import Aggregator, Shortened, shorten
from idiolect.aggregation.noise import SPREAD, NoiseStream, from_seed, from_system, require
from idiolect.core import tree
from idiolect.core.method import RunPlan, Setup, setting
from idiolect.core.tree import Params
from idiolect.errors import ConfigError, MethodError

_SYSTEM = -1  # in place of a seed: noise comes from the operating system

# Norms and factors are computed in double precision, a little too large or small; a millionth more
# noise covers that. Where others added up, in single precision, each addend may have cost as much.
_ROUNDED = 2.0**-20
_ADDED = 2.0**-22
_MASKED = 2.0**-32  # the step to which nodes round what they add under masks


class NoiseState(NamedTuple):
    """What the server keeps between rounds; nothing in it is secret."""

    clip: Tensor  # S
    round: Tensor
    seed: Tensor  # of the run, which all know, where noise is drawn from it; else -1


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
    noise_source: str = setting(
        "seed",
        "where noise comes from: the run's seed (repeatable, so no protection) or the system; "
        "a federation's hub always takes the system",
        choices=("seed", "system"),
    )

    @property
    def repeatable(self) -> bool:
        """Whether a round that is done again draws the same noise."""
        return self.noise == 0 or self.noise_source == "seed"

    def start(self, setup: Setup) -> NoiseState:
        """Remember S, and the seed where noise is drawn from it."""
        if setup.statistics:
            raise MethodError(
                "the network keeps running statistics of batches, which noise would ruin and which "
                "would tell of clients without it; use norm = 'group' with aggregate = 'dp'"
            )
        device = setup.sizes.device
        public = self.noise_source == "seed" and not setup.federated
        return NoiseState(
            setup.sizes.new_full((), self.clip),
            torch.zeros((), dtype=torch.int64, device=device),
            torch.full((), setup.seed if public else _SYSTEM, dtype=torch.int64, device=device),
        )

    def combine(
        self, memory: NoiseState, reference: Params, params: Params, weight: Tensor
    ) -> tuple[Params, NoiseState]:
        """Shorten, add up, add noise, divide by the planned number of clients."""
        if self.noise == 0:
            rows = shorten(reference, params, weight, memory.clip)
            total: Shortened = tree.map(lambda leaf: leaf.sum(0), rows)
            return self.combine_sum(memory, reference, total, len(weight))
        clients = self.cohort or len(weight)
        step = self._step(memory, clients, float(memory.clip) * (1 + _ROUNDED))
        cut = shorten(_double(reference), _double(params), weight.double(), memory.clip.double())
        # Towards zero, so that no update gets longer; sums of whole numbers are exact.
        steps = tree.map(lambda leaf: torch.trunc(leaf / step).sum(0), cut.update)
        return self._noised(memory, reference, steps, step, cut.below.sum(0), clients)

    def longest(self, memory: NoiseState) -> Tensor:
        """S, which clients may shorten their updates to themselves."""
        return memory.clip

    def combine_sum(
        self, memory: NoiseState, reference: Params, total: Shortened, rows: int
    ) -> tuple[Params, NoiseState]:
        """Add noise to a sum, and divide it by the planned number of clients."""
        clients = self.cohort or rows
        if self.noise == 0:
            joined: Params = tree.map(
                lambda sent, leaf: sent + leaf / clients, reference, total.update
            )
            return joined, self._after(memory, total.below, clients, None)
        # The sum was rounded when clients hid it and when it was added up, and is rounded here:
        # one client may have moved it by that much more than S.
        width = math.sqrt(sum(leaf.numel() for leaf in tree.leaves(reference)))
        most = float(memory.clip) * (1 + _ROUNDED + rows * _ADDED) + width * _MASKED
        rate = self._update_noise(clients) * width / SPREAD
        step = self._step(memory, clients, most / (1 - min(rate, 0.5)))
        steps = tree.map(lambda leaf: torch.round(leaf.double() / step), total.update)
        return self._noised(memory, reference, steps, step, total.below.double(), clients)

    def idle(self, memory: NoiseState, reference: Params) -> tuple[Params, NoiseState]:
        """Add the noise that hides that nobody came."""
        nothing = tree.map(lambda leaf: torch.zeros_like(leaf), reference)
        return self.combine_sum(memory, reference, Shortened(nothing, memory.clip.new_zeros(())), 1)

    def _step(self, memory: NoiseState, clients: float, most: float) -> float:
        """Return the grid's step, given how far one client moves the sum at most."""
        return self._update_noise(clients) * most / SPREAD

    def _noised(
        self,
        memory: NoiseState,
        reference: Params,
        steps: Params,
        step: float,
        below: Tensor,
        clients: float,
    ) -> tuple[Params, NoiseState]:
        """Add noise to whole numbers of steps; what follows sees nothing but the noisy ones."""
        seed = int(memory.seed)  # the one moment a round waits for the device
        system = seed == _SYSTEM
        draw = from_system() if system else from_seed(seed, int(memory.round))

        def noised(sent: Tensor, leaf: Tensor) -> Tensor:
            drawn = torch.from_numpy(draw.gaussians(leaf.numel())).reshape(leaf.shape)
            update = (leaf + drawn.to(leaf.device)) * (step / clients)
            return (sent.double() + update).to(sent.dtype)

        joined: Params = tree.map(noised, reference, steps)
        return joined, self._after(memory, below, clients, draw)

    def _after(
        self, memory: NoiseState, below: Tensor, clients: float, draw: NoiseStream | None
    ) -> NoiseState:
        """Count the round, and move S towards the quantile by the noisy share of short updates."""
        after = memory._replace(round=memory.round + 1)
        if not self.adaptive:
            return after
        if draw is not None:
            # A client moves the count by a half, and by a step more where that is rounded.
            spread = self._count_noise(clients)
            step = spread * (1 + 4 * spread / SPREAD) / SPREAD
            drawn = float(draw.gaussians(1)[0])
            below = (torch.round(below / step) + drawn) * step
        share = below / clients + 0.5
        moved = memory.clip * torch.exp(-self.clip_lr * (share - self.quantile))
        return after._replace(clip=moved.to(memory.clip.dtype))

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

    def settled(self, plan: RunPlan) -> tuple["Private", int]:
        """Solve for the noise, stop where the budget ends, and refuse what would mean nothing."""
        clients = float(plan.cohort or plan.clients)
        ready = dataclasses.replace(self, cohort=self.cohort or clients)
        if plan.federated:  # all who take part know the seed
            ready = dataclasses.replace(ready, noise_source="system")
        if self.epsilon and not self.noise:
            terms = guarantee.terms(ready, plan)
            found = solved(terms, plan.rounds * plan.releases, self.epsilon)
            ready = dataclasses.replace(ready, noise=found, epsilon=0.0)
        elif self.epsilon:
            raise ConfigError("give noise or epsilon, not both: one follows from the other")
        ready._update_noise(ready.cohort)
        if ready.noise:
            require()
        rounds = guarantee.affordable(guarantee.terms(ready, plan), plan, self.budget)
        guarantee.refuse_meaningless(ready, plan._replace(rounds=rounds))
        return ready, rounds

    def promise(self, plan: RunPlan) -> dict[str, Any]:
        """Return (ε, δ) and what they mean."""
        return {"privacy": guarantee.promise(self, plan)}


def _double(params: Params) -> Params:
    found: Params = tree.map(lambda leaf: leaf.double(), params)
    return found
