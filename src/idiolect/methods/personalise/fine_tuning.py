"""Fine-tuning after the federation, of all layers or some, with a hold on what was learnt."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from idiolect.core.capabilities import FinalExchange, Privacy, adapt, facts, has
from idiolect.core.client import Local
from idiolect.core.method import Capability, Sent, setting
from idiolect.core.tree import Params, Tree
from idiolect.core.wrap import Wrapper
from idiolect.methods.personalise import local_training
from idiolect.methods.personalise.local_training import FisherHold, LossTerms, StartingPoint


@dataclass(frozen=True, kw_only=True)
class LocalTraining(FinalExchange, Wrapper):
    """How a client trains what it received, and EWC's exchange of Fisher information."""

    tune_epochs: int = setting(10, "passes over the client's data after the rounds", least=1)
    tune_lr: float = setting(0.01, "learning rate of that training", above=0)
    fb_layers: int = setting(1, "how many last layers freeze-base (FB) trains", least=1)
    fb_names: tuple[str, ...] = setting(
        (), "what FB trains instead, by patterns of parameters such as 'fc2.*'"
    )
    ewc_fisher: str = setting(
        "federation",
        "whose examples say what matters to EWC: everyone's, told in sum, or the client's own",
        choices=("federation", "client"),
    )
    kd_temperature: float = setting(6.0, "temperature of the distillation (T)", above=0)

    def offers(self, kind: type[Capability]) -> bool:
        """Exchange only for EWC with everyone's Fisher information.

        Never where a private rule hides clients: nothing may leave them beside what it hides.
        """
        if kind is FinalExchange:
            wanted = self.elastic and self.ewc_fisher == "federation"
            return wanted and not has(self.base, Privacy)
        return super().offers(kind)

    @property
    def elastic(self) -> bool:
        """Whether some training is held by EWC."""
        raise NotImplementedError

    def tell(self, deployed: Any, local: Local) -> Tree:
        """Return what matters to the federated task, by the client's own examples."""
        return local_training.contribution(deployed.held) if deployed.held else ()


class Tuning(NamedTuple):
    """What the inner method deploys, that model trained further, and what EWC waits with."""

    inner: Tree
    model: Tree
    held: FisherHold | tuple[()] = ()


@dataclass(frozen=True, kw_only=True)
class Tuned(LocalTraining):
    """Any method, then local training of what it deploys."""

    tunes: ClassVar[bool] = True

    trains: str = setting("all", "all layers (FT), or the last (FB)", choices=("all", "head"))
    kd_weight: float = setting(
        0.0, "share of the distillation from the federated model (α)", least=0, most=1
    )
    ewc_weight: float = setting(
        0.0, "strength of the hold on weights that matter to the federation (λ)", least=0
    )

    def titled(self, title: str) -> str:
        """Name the parts."""
        parts = ["FT" if self.trains == "all" else "FB"]
        parts += ["KD"] * bool(self.kd_weight) + ["EWC"] * bool(self.ewc_weight)
        return " + ".join([title, *parts])

    def deploy(self, sent: Sent, personal: Tree, local: Local) -> Tuning:
        """Train what the inner method deploys."""
        return self._tuned(self.base.deploy(sent, personal, local), sent, local)

    def adapt(self, sent: Sent, personal: Tree, local: Local) -> Tuning:
        """Do the same for a newcomer."""
        return self._tuned(adapt(self.base, sent, personal, local), sent, local)

    def models(self, sent: Sent, deployed: Tuning) -> dict[str, Tree]:
        """The trained model in place of the inner one's personal model."""
        if not deployed:
            return self.base.models(sent, ())
        return {**self.base.models(sent, deployed.inner), "personal": deployed.model}

    def facts(self, deployed: Tuning) -> dict[str, Tensor]:
        """The facts of the inner method."""
        return facts(self.base, deployed.inner)

    @property
    def elastic(self) -> bool:
        """Whether there is a hold at all."""
        return bool(self.ewc_weight)

    @property
    def models_held(self) -> int:
        """With what is held until `hear`."""
        return getattr(self.base, "models_held", 1) + 5

    def hear(self, deployed: Tuning, others: Tree, local: Local) -> Tuning:
        """Train once more, held to what matters to all."""
        if not deployed.held:
            return deployed
        importance = local_training.of_all(deployed.held, others)
        model = self._trained(deployed.held.at, importance, local)
        return deployed._replace(model=model, held=())

    def _tuned(self, inner: Tree, sent: Sent, local: Local) -> Tuning:
        at = local_training.ground(self.base, sent, inner)
        importance = (
            local_training.fisher(self.base, at, self._chosen(at), local) if self.ewc_weight else {}
        )
        model = self._trained(at, importance, local)
        kept = (
            local_training.held(self.base, sent, inner, importance, local)
            if has(self, FinalExchange)
            else ()
        )
        return Tuning(inner, model, kept)

    def _chosen(self, at: StartingPoint) -> Callable[[str], bool]:
        params = local_training.parameters(self.base, at.start)
        return local_training.chosen(params, self.trains == "head", self.fb_layers, self.fb_names)

    def _trained(self, at: StartingPoint, importance: Params, local: Local) -> Tree:
        terms = LossTerms(self.kd_weight or None, self.kd_temperature, self.ewc_weight or None)
        rate, epochs = self.tune_lr, self.tune_epochs
        wanted = self._chosen(at)
        return local_training.adapted(self.base, at, wanted, terms, importance, local, rate, epochs)
