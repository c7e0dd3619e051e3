"""Simulated attackers that lie about what they trained; never part of a real federation.

An attack changes the reports of its clients on their way to the server, before anything there looks
at them. Attacks on what clients train on are in `data.poison`.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from idiolect.aggregation.aggregator import beside
from idiolect.core import tree
from idiolect.core.capabilities import Averaging, Tampering, has, reference
from idiolect.core.method import Report, Setup, check_setting, setting
from idiolect.core.tree import Params, Tree
from idiolect.core.wrap import Served, Stateful
from idiolect.errors import MethodError

_LIES = 19  # keeps what attackers draw apart from other uses of the same seed


@dataclass(frozen=True, kw_only=True)
class Attack:
    """What attackers do to the parameters they report."""

    title: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            check_setting(type(self).__name__, spec, getattr(self, spec.name))

    def lie(self, honest: Params, sent: Params, liars: Tensor, draw: torch.Generator) -> Params:
        """Return what every client would report if it were an attacker; liars [row] says who is."""
        raise TypeError(f"{type(self).__name__} has no lie")


@dataclass(frozen=True, kw_only=True)
class SignFlip(Attack):
    """Attackers report the opposite of what they learnt."""

    title: ClassVar[str] = "sign flipping"

    scale: float = setting(1.0, "how many times as far", above=0)

    def lie(self, honest: Params, sent: Params, liars: Tensor, draw: torch.Generator) -> Params:
        """Go the other way."""
        turned: Params = tree.map(lambda new, old: old - self.scale * (new - old), honest, sent)
        return turned


@dataclass(frozen=True, kw_only=True)
class Replace(Attack):
    """Attackers enlarge their updates until the mean is theirs (Bagdasaryan et al. 2020)."""

    title: ClassVar[str] = "model replacement"

    scale: float = setting(0.0, "how many times as far; 0: cohort / attackers in it", least=0)

    def lie(self, honest: Params, sent: Params, liars: Tensor, draw: torch.Generator) -> Params:
        """Outweigh everyone else."""
        factor: float | Tensor = self.scale
        if not self.scale:
            factor = len(liars) / liars.sum().clamp(min=1)
        grown: Params = tree.map(lambda new, old: old + factor * (new - old), honest, sent)
        return grown


@dataclass(frozen=True, kw_only=True)
class Gaussian(Attack):
    """Attackers report noise around what they received."""

    title: ClassVar[str] = "Gaussian noise"

    spread: float = setting(1.0, "standard deviation of each number", above=0)

    def lie(self, honest: Params, sent: Params, liars: Tensor, draw: torch.Generator) -> Params:
        """Report noise."""

        def noise(new: Tensor, old: Tensor) -> Tensor:
            drawn = torch.randn(new.shape, generator=draw, device=new.device, dtype=new.dtype)
            return old + self.spread * drawn

        noisy: Params = tree.map(noise, honest, sent)
        return noisy


@dataclass(frozen=True, kw_only=True)
class Broken(Attack):
    """Attackers report NaN, or infinity: a crash, or the crudest sabotage."""

    title: ClassVar[str] = "broken reports"

    value: str = setting("nan", "what they report", choices=("nan", "inf"))

    def lie(self, honest: Params, sent: Params, liars: Tensor, draw: torch.Generator) -> Params:
        """Report no number."""
        ruined: Params = tree.map(lambda new: torch.full_like(new, float(self.value)), honest)
        return ruined


class AttackState(NamedTuple):
    """What a simulated attack remembers between rounds."""

    round: Tensor
    key: Tensor


@dataclass(frozen=True, kw_only=True)
class Attacked(Tampering, Stateful):
    """A method in whose simulation some clients attack."""

    attack: Attack = dataclasses.field(kw_only=False, metadata={"doc": "what attackers do"})
    attackers: tuple[int, ...] = setting((), "which clients attack, by number")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not has(self.base, Averaging) or self.base.pooled:
            raise MethodError(
                f"{self.base.title or type(self.base).__name__} does not send parameters that are "
                f"averaged, so {self.attack.title} cannot be simulated on it; leave one of them out"
            )

    def own_settings(self) -> dict[str, Any]:
        """Return the attack, its settings and who attacks."""
        named = {"attack": type(self.attack).__name__, **dataclasses.asdict(self.attack)}
        return {**named, "attackers": list(self.attackers)}

    def training(self) -> tuple[Any, ...]:
        """Rounds under attack are other rounds."""
        return self.attack, self.attackers, self.base.training()

    def memory(self, setup: Setup) -> AttackState:
        """Remember where the attackers' draws come from."""
        zero = torch.zeros((), dtype=torch.int64, device=setup.sizes.device)
        return AttackState(zero, zero + setup.seed)

    def server_step(self, state: Served, cohort: Tensor, reports: Tree) -> Served:
        """Count the round."""
        inner, lies = state
        later = lies._replace(round=lies.round + 1)
        return Served(self.base.server_step(inner, cohort, reports), later)

    def arrive(self, state: Served, cohort: Tensor, reports: Report) -> Report:
        """Replace the attackers' parameters by their lies."""
        if has(self.base, Tampering):
            reports = self.base.arrive(state.inner, cohort, reports)
        liars = torch.isin(cohort, torch.tensor(self.attackers, device=cohort.device))
        sent = reference(self.base, state.inner, cohort)
        lies = self.attack.lie(reports.params, sent, liars, _generator(state.memory))

        def swapped(lie: Tensor, honest: Tensor) -> Tensor:
            return torch.where(beside(liars, honest), lie, honest)

        return reports._replace(params=tree.map(swapped, lies, reports.params))


def _generator(lies: AttackState) -> torch.Generator:
    key = (int(lies.key), _LIES, int(lies.round))
    seed = np.random.SeedSequence(key).generate_state(2, np.uint32)
    made = torch.Generator(lies.round.device)
    made.manual_seed(int(seed[0]) << 32 | int(seed[1]))
    return made


MODEL_ATTACKS: dict[str, type[Attack]] = {
    "sign-flip": SignFlip,
    "replace": Replace,
    "gaussian": Gaussian,
    "broken": Broken,
}
