"""Methods made of methods: a wrapper hands every step on to the method inside, but for its own.

`Mixture(Tuned(FedAvg()))` is FedAvg, fine-tuned at every client, mixed there with a local expert.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from idiolect.core.client import Local
from idiolect.core.method import Method, Plan, Sent, Setup, check_setting
from idiolect.core.tree import Tree
from idiolect.errors import ConfigError

_COMMON = tuple(spec.name for spec in dataclasses.fields(Method))


@dataclass(frozen=True, kw_only=True)
class Wrapper(Method):
    """A method around another; the settings that every method has are those of the inner one."""

    base: Method = dataclasses.field(kw_only=False, metadata={"doc": "the method inside"})

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if spec.name not in _COMMON:
                if spec.name != "base":
                    check_setting(type(self).__name__, spec, value)
                continue
            inner = getattr(self.base, spec.name)
            if value not in (spec.default, inner):
                raise ConfigError(
                    f"{type(self).__name__}: {spec.name} is {value!r}, but training is that of "
                    f"{type(self.base).__name__}; set it there"
                )
            object.__setattr__(self, spec.name, inner)
        for name in ("paper", "pooled", "aggregates", "public", "alone"):
            object.__setattr__(self, name, getattr(self.base, name))
        for name in ("tunes", "starts_over"):
            object.__setattr__(self, name, getattr(type(self), name) or getattr(self.base, name))
        object.__setattr__(self, "title", self.titled(self.base.title))

    def titled(self, title: str) -> str:
        """Return the title, given that of the method inside."""
        return title

    def own_settings(self) -> dict[str, Any]:
        """Return what this wrapper was told, apart from the method inside."""
        names = [spec.name for spec in dataclasses.fields(self)]
        return {n: getattr(self, n) for n in names if n != "base" and n not in _COMMON}

    def settings(self) -> dict[str, Any]:
        """Return the inner settings and, under the wrapper's name, its own."""
        inner = self.base.settings()
        key = type(self).__name__.lower()
        while key in inner:  # the same wrapper twice
            key += "_"
        return {**inner, key: self.own_settings()}

    def training(self) -> tuple[Any, ...]:
        """What happens before `deploy` is the inner method's, unless a wrapper says otherwise."""
        return self.base.training()

    def settled(self, plan: Plan) -> tuple["Wrapper", int]:
        """Fit the method inside."""
        base, rounds = self.base.settled(plan)
        return dataclasses.replace(self, base=base), rounds

    def promise(self, plan: Plan) -> dict[str, Any]:
        """Hand on."""
        return self.base.promise(plan)

    # Every step, handed on.

    def init_server(self, setup: Setup) -> Tree:
        """Hand on."""
        return self.base.init_server(setup)

    def init_group(self, setup: Setup) -> Tree:
        """Hand on."""
        return self.base.init_group(setup)

    def read(self, report: Tree, local: Local) -> Tree:
        """Hand on."""
        return self.base.read(report, local)

    def group_step(self, group: Tree, reports: Tree) -> Tree:
        """Hand on."""
        return self.base.group_step(group, reports)

    def fuse(self, group: Tree, state: Tree, local: Local) -> Tree:
        """Hand on."""
        return self.base.fuse(group, state, local)

    def init_personal(self, setup: Setup) -> Tree:
        """Hand on."""
        return self.base.init_personal(setup)

    def send(self, state: Tree, cohort: Tensor) -> Sent:
        """Hand on."""
        return self.base.send(state, cohort)

    def welcome(self, state: Tree, cohort: Tensor) -> Sent:
        """Hand on."""
        return self.base.welcome(state, cohort)

    def prepare(self, personal: Tree, local: Local) -> Tree:
        """Hand on."""
        return self.base.prepare(personal, local)

    def client_step(self, sent: Sent, personal: Tree, local: Local) -> tuple[Tree, Tree]:
        """Hand on."""
        return self.base.client_step(sent, personal, local)

    def server_step(self, state: Tree, cohort: Tensor, reports: Tree) -> Tree:
        """Hand on."""
        return self.base.server_step(state, cohort, reports)

    def weights(self, size: Tensor) -> Tensor:
        """Hand on."""
        return self.base.weights(size)

    def reference(self, state: Tree, cohort: Tensor) -> Tree:
        """Hand on."""
        return self.base.reference(state, cohort)

    def arrive(self, state: Tree, cohort: Tensor, reports: Tree) -> Tree:
        """Hand on."""
        return self.base.arrive(state, cohort, reports)

    def idle(self, state: Tree) -> Tree:
        """Hand on."""
        return self.base.idle(state)

    def meet(self, sent: Sent, personal: Tree, local: Local) -> Tree:
        """Hand on."""
        return self.base.meet(sent, personal, local)

    def deploy(self, sent: Sent, personal: Tree, local: Local) -> Tree:
        """Hand on."""
        return self.base.deploy(sent, personal, local)

    def adapt(self, sent: Sent, personal: Tree, local: Local) -> Tree:
        """Hand on."""
        return self.base.adapt(sent, personal, local)

    def tell(self, deployed: Tree, local: Local) -> Tree:
        """Hand on."""
        return self.base.tell(deployed, local)

    def hear(self, deployed: Tree, others: Tree, local: Local) -> Tree:
        """Hand on."""
        return self.base.hear(deployed, others, local)

    def models(self, sent: Sent, deployed: Tree) -> dict[str, Tree]:
        """Hand on."""
        return self.base.models(sent, deployed)

    def predict(self, model: Tree, x: Tensor, local: Local) -> Tensor:
        """Hand on."""
        return self.base.predict(model, x, local)

    # Not `predict_all`: its default asks this wrapper's own `predict`.

    def facts(self, deployed: Tree) -> dict[str, Tensor]:
        """Hand on."""
        return self.base.facts(deployed)

    def reason(self, facts: Mapping[str, Any]) -> str:
        """Hand on."""
        return self.base.reason(facts)

    def trace(self, state: Tree) -> dict[str, Tensor]:
        """Hand on."""
        return self.base.trace(state)

    @property
    def grouped(self) -> bool:
        """Hand on."""
        return self.base.grouped

    @property
    def repeatable(self) -> bool:
        """Hand on."""
        return self.base.repeatable

    @property
    def sums(self) -> bool:
        """Hand on, unless this wrapper looks at the reports itself."""
        own = [kind for kind in type(self).__mro__ if kind not in (Stateful, Wrapper, Method)]
        looks = any(name in vars(kind) for kind in own for name in ("server_step", "arrive"))
        return self.base.sums and not looks

    @property
    def hides(self) -> bool:
        """Hand on."""
        return self.base.hides

    @property
    def tells(self) -> bool:
        """Hand on, unless this wrapper deploys something of its own made of what is inside."""
        return self.base.tells and type(self).deploy is Wrapper.deploy

    @property
    def deploys(self) -> int:
        """Hand on."""
        return self.base.deploys

    @property
    def prepares(self) -> bool:
        """Hand on."""
        return self.base.prepares

    @property
    def welcomes(self) -> bool:
        """Hand on."""
        return self.base.welcomes

    @property
    def adapts(self) -> bool:
        """Hand on."""
        return self.base.adapts

    @property
    def looks(self) -> bool:
        """Hand on."""
        return self.base.looks


class Served(NamedTuple):
    """The inner method's state, and what the wrapper remembers."""

    inner: Tree
    memory: Tree


@dataclass(frozen=True, kw_only=True)
class Stateful(Wrapper):
    """A wrapper whose server remembers something beside the inner method's state."""

    def memory(self, setup: Setup) -> Tree:
        """Return what is remembered before the first round."""
        return ()

    def init_server(self, setup: Setup) -> Served:
        """Put the memory beside the state."""
        return Served(self.base.init_server(setup), self.memory(setup))

    def send(self, state: Served, cohort: Tensor) -> Sent:
        """Send what the inner method sends."""
        return self.base.send(state.inner, cohort)

    def welcome(self, state: Served, cohort: Tensor) -> Sent:
        """Send what the inner method sends."""
        return self.base.welcome(state.inner, cohort)

    def server_step(self, state: Served, cohort: Tensor, reports: Tree) -> Served:
        """Let the inner method do its step."""
        return state._replace(inner=self.base.server_step(state.inner, cohort, reports))

    def reference(self, state: Served, cohort: Tensor) -> Tree:
        """Hand on."""
        return self.base.reference(state.inner, cohort)

    def arrive(self, state: Served, cohort: Tensor, reports: Tree) -> Tree:
        """Hand on."""
        return self.base.arrive(state.inner, cohort, reports)

    def idle(self, state: Served) -> Served:
        """Hand on."""
        return state._replace(inner=self.base.idle(state.inner))

    def trace(self, state: Served) -> dict[str, Tensor]:
        """Hand on."""
        return self.base.trace(state.inner)
