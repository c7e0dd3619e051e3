"""What some methods can do beside the contract, each a small class that a method inherits.

The engine asks by type, `has(method, FinalExchange)`, and calls nothing that a method does not
offer. A wrapper passes on what the method inside offers. Override `Capability.offers` where it
depends on settings whether a method has a capability.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import Tensor

from idiolect.core.client import Local
from idiolect.core.method import Capability, Method, RunPlan, Sent, Setup
from idiolect.core.tree import Tree

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Kind = TypeVar("Kind", bound=Capability)


def has(method: Capability, kind: type[Kind]) -> "TypeIs[Kind]":
    """Say whether a method, or the one inside a wrapper, offers a capability."""
    offered = method.offers(kind)
    if not offered and (undeclared := _undeclared(type(method), kind)):
        raise TypeError(
            f"{type(method).__name__} defines {undeclared}, which is a function of the capability "
            f"{kind.__name__}; inherit that, so that it is called"
        )
    return offered


def _undeclared(method: type[Capability], kind: type[Capability]) -> str:
    """Name a function of a capability that a method defines without inheriting the capability."""
    if issubclass(method, kind) or "base" in getattr(method, "__dataclass_fields__", ()):
        return ""  # a wrapper may override single functions of what is inside
    return next((n for n in functions(kind) if callable(getattr(method, n, None))), "")


def functions(kind: type[Capability]) -> list[str]:
    """Return the names of a capability's functions and properties."""
    known = {*vars(Capability), "tied_to"}
    return [name for name in vars(kind) if not name.startswith("_") and name not in known]


# Clients that come after training, or took part in no round.


class NewcomerMessage(Capability):
    """Newcomers are sent something else than clients for whom the state has a row."""

    def welcome(self, state: Tree, cohort: Tensor) -> Sent:
        """Return what is sent to newcomers, in place of `send`."""
        raise NotImplementedError


class NewcomerHistory(Capability):
    """A newcomer gains from looking at the server's states of earlier rounds."""

    def meet(self, sent: Sent, personal: Tree, local: Local) -> Tree:
        """Look at what was sent in an earlier round, without training; return what it keeps."""
        raise NotImplementedError


class NewcomerModel(Capability):
    """A newcomer comes to its model otherwise than a client that took part."""

    def adapt(self, sent: Sent, personal: Tree, local: Local) -> Tree:
        """Return what a newcomer would use, in place of `deploy`.

        `personal` is fresh, but for what `meet` kept.
        """
        raise NotImplementedError


# Before the first round, and after the last.


class Preparation(Capability):
    """Clients do something once, before their first round from `first_preparation` on."""

    first_preparation: ClassVar[int] = 0

    def prepare(self, sent: Sent, personal: Tree, local: Local) -> Tree:
        """Return the personal state with which that round of the client begins."""
        raise NotImplementedError


class FinalExchange(Capability):
    """After the rounds clients exchange sums of a few numbers before they settle what to use.

    Every client calls `deploy`, then `tell`; the server adds up, and every client calls `hear`
    with the sum over the others.
    """

    tied_to: ClassVar[tuple[str, ...]] = ("deploy",)

    def tell(self, deployed: Tree, local: Local) -> Tree:
        """Return a few numbers from −1 to 1, to be added up over clients."""
        raise NotImplementedError

    def hear(self, deployed: Tree, others: Tree, local: Local) -> Tree:
        """Reconsider what to use, given the sums of what the other clients returned."""
        raise NotImplementedError

    @property
    def models_held(self) -> int:
        """How many models' worth of memory a client holds between `tell` and `hear`."""
        return 1


# What the server keeps and does.


class ArchitectureState(Capability):
    """The server keeps a state for each architecture, and trains it on public examples.

    After `client_step`, `read` runs on the server for every report, `server_step` gets what it
    returned, `group_step` the reports of one architecture; `fuse` ends the round. `Sent.group`
    has the state of the client's architecture. What goes from `group_step` to `fuse` may hold more
    than that state, if `unheard` gives it the same form.
    """

    def init_group(self, setup: Setup) -> Tree:
        """Return the state of one architecture before the first round."""
        raise NotImplementedError

    def read(self, report: Tree, local: Local) -> Tree:
        """Return what the server makes of one report with its public examples."""
        raise NotImplementedError

    def group_step(self, group: Tree, reports: Tree) -> Tree:
        """Return the new state of an architecture, from its clients' reports stacked on axis 0."""
        raise NotImplementedError

    def unheard(self, group: Tree) -> Tree:
        """Return what `fuse` gets of an architecture of which no client reported."""
        return group

    def fuse(self, group: Tree, state: Tree, local: Local) -> Tree:
        """Train the same on public examples, once the server's new state is known."""
        raise NotImplementedError


class Averaging(Capability):
    """`server_step` uses nothing of its `Report`s but the mean of the parameters, by `weights`.

    So the engine may add reports up in parts, and another rule of aggregation may take the place
    of the mean. A class that overrides `server_step` no longer averages, unless it says
    `averages = True`.
    """

    averages: ClassVar[bool] = True
    moves: ClassVar[bool] = True  # the mean is where parameters move to, not a figure of examples

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "server_step" in vars(cls) and "averages" not in vars(cls):
            cls.averages = Averaging in cls.__bases__

    def offers(self, kind: type[Capability]) -> bool:
        """Averaging only where no derived class has another server step."""
        return super().offers(kind) and (kind is not Averaging or self.averages)

    def weights(self, size: Tensor) -> Tensor:
        """Return how much each report counts in the mean, from the reported sizes."""
        return size

    def reference(self, state: Tree, cohort: Tensor) -> Tree:
        """Return what a client that changed nothing would report as its parameters."""
        assert isinstance(self, Method)
        return self.send(state, cohort[:1]).shared


class Tampering(Capability):
    """Reports change on their way to the server: simulated attackers."""

    def arrive(self, state: Tree, cohort: Tensor, reports: Tree) -> Tree:
        """Return the cohort's reports as they reach the server."""
        raise NotImplementedError


class Privacy(Capability):
    """The server adds noise that hides any one client, also in a round in which nobody came."""

    def settled(self, plan: RunPlan) -> tuple[Method, int]:
        """Fit the method to a plan, or refuse it; return it with how many rounds may be done."""
        raise NotImplementedError

    def promise(self, plan: RunPlan) -> dict[str, Any]:
        """Return what is guaranteed to clients after so many rounds, as plain values."""
        raise NotImplementedError

    def idle(self, state: Tree) -> Tree:
        """Return the new state after a round in which nobody took part."""
        raise NotImplementedError

    @property
    def repeatable(self) -> bool:
        """Whether a round that is done again, after a crash, ends with the very same state."""
        return True


# What a run shows of a method.


class Facts(Capability):
    """There is something to know about each client's outcome, such as what it chose."""

    def facts(self, deployed: Tree) -> dict[str, Tensor]:
        """Return tensors by name, from what one client deployed."""
        raise NotImplementedError


class Reason(Capability):
    """One client's facts can be put in words."""

    def reason(self, facts: Mapping[str, Any]) -> str:
        """Say what one client's facts, as plain numbers, amount to: what, and why."""
        raise NotImplementedError


class StateTrace(Capability):
    """The server's state has something worth recording over the rounds."""

    def trace(self, state: Tree) -> dict[str, Tensor]:
        """Return what is recorded of the state after a round, by name."""
        raise NotImplementedError


class Refit(Capability):
    """It chooses by validation rows, and can then train what it chose on them too."""

    def refitted(self) -> Method:
        """Return the same method, with that second training."""
        raise NotImplementedError


class JointPrediction(Capability):
    """A client's models share parts that need to run only once."""

    tied_to: ClassVar[tuple[str, ...]] = ("predict",)

    def predict_all(self, models: dict[str, Tree], x: Tensor, local: Local) -> dict[str, Tensor]:
        """Return the logits of several models, as `predict` would one by one."""
        raise NotImplementedError


# What is done where a method lacks a capability.


def trains_on_validation(method: Method) -> bool:
    """Say whether a method trains on validation rows, so that no score on them means anything."""
    return has(method, Refit) and not method.chooses


def given(method: Method, local: Local) -> Local:
    """Return the data for client code: validation rows are for methods that declare to use them."""
    return local if method.chooses or has(method, Refit) else local.sparing_validation()


def settled(method: Method, plan: RunPlan) -> tuple[Method, int]:
    """Fit a method to a plan, the inner one first; return it with how many rounds may be done."""
    if isinstance(base := getattr(method, "base", None), Method):
        inner: dict[str, Any] = {}
        inner["base"], rounds = settled(base, plan)
        method, plan = dataclasses.replace(method, **inner), plan._replace(rounds=rounds)
    return method.settled(plan) if isinstance(method, Privacy) else (method, plan.rounds)


def sums(method: Method) -> bool:
    """Say whether the server needs only the mean of the reports, which can be added up in parts."""
    return has(method, Averaging) and not (has(method, Tampering) or method.single_reports)


def welcome(method: Method, state: Tree, cohort: Tensor) -> Sent:
    """Return what newcomers are sent."""
    return (method.welcome if has(method, NewcomerMessage) else method.send)(state, cohort)


def adapts(method: Method) -> bool:
    """Say whether newcomers come to their models otherwise than clients that took part."""
    return has(method, NewcomerMessage) or has(method, NewcomerModel)


def init_group(method: Method, setup: Setup) -> Tree:
    """Return the server's state of one architecture; () where it keeps none."""
    return method.init_group(setup) if has(method, ArchitectureState) else ()


def adapt(method: Method, sent: Sent, personal: Tree, local: Local) -> Tree:
    """Return what a newcomer would use."""
    settle = method.adapt if has(method, NewcomerModel) else method.deploy
    return settle(sent, personal, local)


def predict_all(
    method: Method, models: dict[str, Tree], x: Tensor, local: Local
) -> dict[str, Tensor]:
    """Return the logits of several models."""
    if has(method, JointPrediction):
        return method.predict_all(models, x, local)
    found: dict[str, Tensor] = {}
    for name, model in models.items():
        # Often a client's model is the global one itself.
        same = next((other for other in found if models[other] is model), None)
        found[name] = found[same] if same else method.predict(model, x, local)
    return found


def reference(method: Method, state: Tree, cohort: Tensor) -> Tree:
    """Return what a client that changed nothing would report to a server that averages."""
    if not has(method, Averaging):
        raise TypeError(f"{type(method).__name__} does not average its clients' parameters")
    return method.reference(state, cohort)


def idle(method: Method, state: Tree) -> Tree:
    """Return the server's state after a round in which nobody took part."""
    return method.idle(state) if has(method, Privacy) else state


def promise(method: Method, plan: RunPlan) -> dict[str, Any]:
    """Return what is guaranteed to clients; {} where nothing is."""
    return method.promise(plan) if has(method, Privacy) else {}


def facts(method: Method, deployed: Tree) -> dict[str, Tensor]:
    """Return what there is to know about one client's outcome."""
    return method.facts(deployed) if has(method, Facts) else {}


def reason(method: Method, facts: Mapping[str, Any]) -> str:
    """Put one client's facts in words; "" where there are none."""
    return method.reason(facts) if has(method, Reason) else ""
