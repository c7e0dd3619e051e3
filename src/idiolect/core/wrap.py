"""Methods made of methods: a wrapper passes every step on to the method inside, but for its own.

`Mixture(Tuned(FedAvg()))` is FedAvg, fine-tuned at every client, mixed there with a local
expert. Functions of the contract are passed on by generated functions, those of capabilities by
attribute look-up, so that neither is named here.
"""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from idiolect.core.capabilities import idle
from idiolect.core.method import CORE, Capability, Method, Sent, Setup, check_setting
from idiolect.core.tree import Tree
from idiolect.errors import ConfigError

_COMMON = tuple(spec.name for spec in dataclasses.fields(Method))


@dataclass(frozen=True, kw_only=True)
class Wrapper(Method):
    """A method around another; the settings that every method has are those of the inner one.

    A subclass overrides what it changes, of the contract and of the capabilities alike. It inherits
    a capability only if it has it whatever is inside.
    """

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
        for name in ("paper", "pooled", "public", "alone", "needs_classes"):
            object.__setattr__(self, name, getattr(self.base, name))
        for name in ("tunes", "starts_over"):
            object.__setattr__(self, name, getattr(type(self), name) or getattr(self.base, name))
        looks = type(self).server_step not in (Wrapper.server_step, Stateful.server_step)
        object.__setattr__(self, "single_reports", looks or self.base.single_reports)
        object.__setattr__(self, "title", self.titled(self.base.title))

    if not TYPE_CHECKING:  # who asks `has` first knows the type

        def __getattr__(self, name: str) -> Any:
            """Look up what this class lacks, such as functions of capabilities, in the base."""
            if name.startswith("_") or name == "base":  # while it is being unpickled
                raise AttributeError(name)
            return getattr(self.base, name)

    def offers(self, kind: type[Capability]) -> bool:
        """Offer what the method inside does, unless this class changes what that builds on."""
        if isinstance(self, kind):
            return True
        changed = [n for n in kind.tied_to if getattr(type(self), n) is not getattr(Wrapper, n)]
        return not changed and self.base.offers(kind)

    @property
    def chooses(self) -> bool:
        """Whether the method inside looks at validation rows."""
        return self.base.chooses

    def titled(self, title: str) -> str:
        """Return the title, given that of the method inside."""
        return title

    def own_settings(self) -> dict[str, Any]:
        """Return this wrapper's settings, without those of the method inside."""
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


def _passed_on(name: str) -> Any:
    def pass_on(self: Wrapper, *arguments: Any) -> Any:
        return getattr(self.base, name)(*arguments)

    return pass_on


for _name in CORE:
    setattr(Wrapper, _name, _passed_on(_name))


class Served(NamedTuple):
    """The inner method's state, and what the wrapper remembers."""

    inner: Tree
    memory: Tree


@dataclass(frozen=True, kw_only=True)
class Stateful(Wrapper):
    """A wrapper whose server remembers something beside the inner method's state."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Give functions of the inner method's capabilities its part of the state."""
            found = super().__getattr__(name)
            if not callable(found):
                return found

            def inside(*given: Any) -> Any:
                return found(*(one.inner if isinstance(one, Served) else one for one in given))

            return inside

    def memory(self, setup: Setup) -> Tree:
        """Return what is remembered before the first round."""
        return ()

    def init_server(self, setup: Setup) -> Served:
        """Put the memory beside the state."""
        return Served(self.base.init_server(setup), self.memory(setup))

    def send(self, state: Served, cohort: Tensor) -> Sent:
        """Send what the inner method sends."""
        return self.base.send(state.inner, cohort)

    def server_step(self, state: Served, cohort: Tensor, reports: Tree) -> Served:
        """Let the inner method do its step."""
        return state._replace(inner=self.base.server_step(state.inner, cohort, reports))

    def idle(self, state: Served) -> Served:
        """Let the inner method add its noise."""
        return state._replace(inner=idle(self.base, state.inner))
