"""Fine-tuning after the federation, of all layers or some, with a hold on what was learnt."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from idiolect.local import Local
from idiolect.method import Method, Sent, setting
from idiolect.personalise.adapting import (
    Course,
    Terms,
    adapted,
    chosen,
    fisher,
    ground,
    parameters,
)
from idiolect.tree import Tree
from idiolect.wrapper import Wrapper


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """How a client trains what it received."""

    tune_epochs: int = setting(10, "passes over the client's data after the rounds", least=1)
    tune_lr: float = setting(0.01, "learning rate of that training", above=0)
    fb_layers: int = setting(1, "how many last layers freeze-base (FB) trains", least=1)
    fb_names: tuple[str, ...] = setting(
        (), "what FB trains instead, by patterns of parameters such as 'fc2.*'"
    )
    kd_temperature: float = setting(6.0, "temperature of the distillation (T)", above=0)


class Tuning(NamedTuple):
    """What the inner method deploys, and that model trained further."""

    inner: Tree
    model: Tree


@dataclass(frozen=True, kw_only=True)
class Tuned(TuneSettings, Wrapper):
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
        return self._tuned(self.base.adapt(sent, personal, local), sent, local)

    def models(self, sent: Sent, deployed: Tuning) -> dict[str, Tree]:
        """The trained model in place of the inner one's personal model."""
        if not deployed:
            return self.base.models(sent, ())
        return {**self.base.models(sent, deployed.inner), "personal": deployed.model}

    def facts(self, deployed: Tuning) -> dict[str, Tensor]:
        """Hand on."""
        return self.base.facts(deployed.inner)

    def _tuned(self, inner: Tree, sent: Sent, local: Local) -> Tuning:
        at = ground(self.base, sent, inner)
        params, only_head = parameters(self.base, at.start), self.trains == "head"
        trained = chosen(params, only_head, self.fb_layers, self.fb_names)
        importance = fisher(self.base, at, trained, local) if self.ewc_weight else {}
        terms = Terms(self.kd_weight or None, self.kd_temperature, self.ewc_weight or None)
        course = course_of(self.base, local, self)
        model = adapted(self.base, at, trained, terms, importance, course, local)
        return Tuning(inner, model)


def course_of(base: Method, local: Local, settings: TuneSettings) -> Course:
    """Train as the inner method does, at a rate and for a time of its own."""
    return Course(base.rule(local, settings.tune_lr), base.batch, settings.tune_epochs)
