"""The contract: a method is written for ONE client in plain PyTorch, and for the server.

A method is a frozen dataclass of settings with a client step and a server step. Steps are pure:
they take trees and return new ones. What leaves a client is the report its step returns, and
nothing else; personal state never reaches `server_step`.
"""

import dataclasses
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, NamedTuple, get_args, get_origin

import numpy as np
import torch
from torch import Tensor

from idiolect.core import batchnorm, optim, tree
from idiolect.core.client import Local, Loss
from idiolect.core.task import Classes, Task
from idiolect.core.tree import Params, Tree
from idiolect.errors import ConfigError, MethodError, shortened


class Sent(NamedTuple):
    """What reaches one client in a round: the same for everyone, and addressed to this client."""

    shared: Tree = ()
    own: Tree = ()
    group: Tree = ()  # what the server keeps for the client's architecture; the engine adds it


class Setup(NamedTuple):
    """What is known before the first round, for one architecture."""

    params: Params  # initial parameters, equal for all clients of the architecture
    auxiliary: Params  # initial parameters of the auxiliary network; `params` where there is none
    sizes: Tensor  # [client] number of training examples
    classes: int  # outputs of the network: of classes their number, see `core.task`
    norms: frozenset[str] = frozenset()  # names of the parameters of normalisation layers
    statistics: frozenset[str] = frozenset()  # of these, running statistics: carried, not trained
    public: int = 0  # examples that everyone holds
    public_labels: bool = False  # whether their classes are those of the private examples
    seed: int = 0  # of the run; known to all who take part
    federated: bool = False  # a real federation, whose server must not draw secrets from the seed
    features: tuple[int, ...] = ()  # shape of what enters the network's head, for one example
    task: Task = Classes()  # what a label is

    @property
    def clients(self) -> int:
        """Number of clients in the federation."""
        return int(self.sizes.shape[0])


class RunPlan(NamedTuple):
    """Who will take part, and how often; known when a run begins."""

    rounds: int
    clients: int  # that have something to train on
    cohort: int | None  # clients a round; None: everyone
    draw: str = "fixed"  # "poisson": each by its own coin, so that `cohort` is expected only
    releases: int = 1  # how often the same clients' data are trained on: once for each seed
    federated: bool = False  # nodes elsewhere: cohorts and noise that must be secret can be


class Report(NamedTuple):
    """What most methods upload: parameters and the number of examples behind them."""

    params: Params
    size: Tensor


def setting(
    default: Any,
    doc: str,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] = (),
    deploy: bool = False,
    models: bool = False,
) -> Any:
    """Declare a hyper-parameter: default, one-line meaning, and the values that make sense.

    `deploy` marks what matters only after the rounds are over, `models` a number of models that are
    in memory at once.
    """
    bounds = {"above": above, "least": least, "most": most, "below": below}
    rule = {"doc": doc, **bounds, "choices": choices, "deploy": deploy, "models": models}
    return dataclasses.field(default=default, metadata=rule)


class Capability:
    """What a method may offer beside the contract; `core.capabilities` lists what there is.

    A method has a capability by inheriting its class. Ask by `has(method, SomeCapability)`.
    """

    tied_to: ClassVar[tuple[str, ...]] = ()
    """Functions of the contract on which it builds: a wrapper that overrides one of them does not
    pass the capability on."""

    def offers(self, kind: "type[Capability]") -> bool:
        """Say whether this method, with its settings, offers a capability."""
        return isinstance(self, kind)


@dataclass(frozen=True, kw_only=True)
class Method(Capability):
    """The contract, which all methods share.

    Its defaults send the state to everyone, keep nothing and deploy what was sent.
    """

    title: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    pooled: ClassVar[bool] = False  # trains on the union of all clients' data: a reference only
    single_reports: ClassVar[bool] = False  # a wrapper looks at them, so a mean will not do
    presets: ClassVar[dict[str, dict[str, Any]]] = {}  # named settings, such as the paper's
    unused: ClassVar[tuple[str, ...]] = ()  # settings below that its steps have no use for
    search: ClassVar[dict[str, tuple[Any, ...]]] = {}  # values that the referee tries, by setting
    trained_as: ClassVar["type[Method] | None"] = None  # the method whose rounds these are
    tunes: ClassVar[bool] = False  # deploy trains, so curves of personal models cost a training
    starts_over: ClassVar[bool] = False  # deploy trains a model from `local.initial`
    alone: ClassVar[bool] = False  # needs no server: all clients train in every round
    needs_classes: ClassVar[str] = ""  # what it has for each class, if other tasks make no sense
    public: ClassVar[str] = ""  # who needs the public examples: "clients", "server" or nobody

    batch: int = setting(32, "examples in a step", least=1)
    epochs: int = setting(1, "passes over the client's data in a round", least=1)
    steps: int = setting(0, "steps in a round instead of epochs; 0: use epochs", least=0)
    lr: float = setting(0.01, "local learning rate", above=0)
    optimiser: str = setting("sgd", "local optimiser", choices=("sgd", "adam"))
    momentum: float = setting(0.0, "momentum of sgd", least=0, most=1)
    nesterov: bool = setting(False, "Nesterov's form of momentum")
    weight_decay: float = setting(0.0, "L2 weight decay", least=0)
    clip: float = setting(0.0, "largest norm of a step's gradient; 0: unlimited", least=0)
    schedule: str = setting(
        "constant",
        "how lr changes over the rounds",
        choices=("constant", "exponential", "step", "cosine"),
    )
    decay: float = setting(0.99, "factor of the exponential and step schedules", above=0, most=1)
    decay_rounds: int = setting(
        100, "rounds to a step of the step schedule, or to the cosine's end", least=1
    )
    decay_at: tuple[int, ...] = setting(
        (), "rounds after which the step schedule steps, instead of every decay_rounds", least=1
    )

    def __init_subclass__(cls, **options: Any) -> None:
        """Keep the short `repr` below: a dataclass would write out every setting."""
        super().__init_subclass__(**options)
        if "__repr__" not in vars(cls):
            cls.__repr__ = Method.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        inner = getattr(self, "base", None)  # of a wrapper, whose common settings these are
        values = {spec: getattr(self, spec.name) for spec in dataclasses.fields(self)}
        given = [
            f"{spec.name}={value!r}"
            for spec, value in values.items()
            if value != getattr(inner, spec.name, spec.default)
        ]
        return f"{type(self).__name__}({', '.join(given)})"

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            check_setting(type(self).__name__, spec, value)
            if spec.name in self.unused and value != spec.default:
                raise ConfigError(
                    f"{type(self).__name__}: {spec.name} is {value!r}, but its steps are plain "
                    "gradient steps that do not use it; leave it out"
                )
        if self.decay_at and self.schedule != "step":
            raise ConfigError(
                f"{type(self).__name__}: decay_at is {self.decay_at} and schedule is "
                f"{self.schedule!r}; set schedule = 'step', or leave decay_at out"
            )

    # The contract: what every method is made of.

    def init_server(self, setup: Setup) -> Tree:
        """Return the server's state before the first round."""
        return setup.params

    def init_personal(self, setup: Setup) -> Tree:
        """Return what one client keeps before its first round."""
        return ()

    def send(self, state: Tree, cohort: Tensor) -> Sent:
        """Return what goes out; `own` has one row for each client of the cohort."""
        return Sent(shared=state)

    def client_step(self, sent: Sent, personal: Tree, local: Local) -> tuple[Tree, Tree]:
        """Do one client's round: return its report and its new personal state."""
        raise TypeError(f"{type(self).__name__} has no client_step")

    def server_step(self, state: Tree, cohort: Tensor, reports: Tree) -> Tree:
        """Return the new state from the cohort's reports, stacked on axis 0.

        A state may have a row for each client (a leaf [client, ...]): read the cohort's rows by
        `leaf[cohort]`, write them by `tree.put`. Rows of absent clients must stay as they are.
        """
        return state

    def deploy(self, sent: Sent, personal: Tree, local: Local) -> Tree:
        """Return what this client would use from now on; local training belongs here."""
        return sent.shared

    def models(self, sent: Sent, deployed: Tree) -> dict[str, Tree]:
        """Name what `predict` can score: `personal`, and `global` where there is one.

        `deployed` is () where only the global model is wanted.
        """
        return {"personal": deployed, "global": sent.shared}

    def predict(self, model: Tree, x: Tensor, local: Local) -> Tensor:
        """Return outputs [example, output] of one of `models`: logits of classes."""
        return local.logits(model, x)

    # What most client steps are made of.

    def rate(self, local: Local) -> Tensor:
        """Return this round's learning rate."""
        if self.schedule == "constant":
            return torch.full_like(local.size, self.lr)
        return self.lr * _SCHEDULES[self.schedule](self)(local.round)

    def local_optimiser(self, local: Local, lr: float | Tensor | None = None) -> optim.Optimiser:
        """Return the local optimiser at this round's learning rate, or at a given rate."""
        rate: float | Tensor = self.lr if lr is None else lr
        if lr is None and self.schedule != "constant":
            rate = self.rate(local)
        if self.optimiser == "adam":
            chosen = optim.adam(rate, weight_decay=self.weight_decay)
        else:
            chosen = optim.sgd(rate, self.momentum, self.weight_decay, self.nesterov)
        return optim.clipped(chosen, self.clip) if self.clip else chosen

    def fit(
        self,
        local: Local,
        params: Params,
        loss: Loss | None = None,
        *,
        lr: float | Tensor | None = None,
        epochs: int = 0,
        steps: int = 0,
    ) -> Params:
        """Train on the client's data for a round, or some epochs; on the task's loss by default."""
        return local.fit(
            loss or local.loss,
            params,
            self.local_optimiser(local, lr),
            batch=self.batch,
            epochs=epochs or self.epochs,
            steps=steps or (0 if epochs else self.steps),
        )

    # What a run asks of the settings; only wrappers change it.

    @property
    def chooses(self) -> bool:
        """Whether it looks at validation rows: then they are not to be trained on."""
        return False

    def settings(self) -> dict[str, Any]:
        """Return the hyper-parameters by name."""
        return dataclasses.asdict(self)

    def training(self) -> tuple[Any, ...]:
        """Identify all that happens before `deploy`: methods alike in this are trained once."""
        # Asked of the class itself: one derived from it may well change the rounds.
        kind = vars(type(self)).get("trained_as") or type(self)
        return kind, tuple(
            getattr(self, spec.name)
            for spec in dataclasses.fields(kind)
            if not spec.metadata.get("deploy")
        )


CORE = (
    "init_server",
    "init_personal",
    "send",
    "client_step",
    "server_step",
    "deploy",
    "models",
    "predict",
)
"""The functions of the contract."""

_SCHEDULES = {
    "exponential": lambda m: optim.exponential(m.decay),
    "step": lambda m: (
        optim.steps_at(m.decay_at, m.decay)
        if m.decay_at
        else optim.step_decay(m.decay_rounds, m.decay)
    ),
    "cosine": lambda m: optim.cosine(m.decay_rounds),
}


_KINDS: dict[type, tuple[type, str]] = {
    bool: (bool, "true or false"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a word"),
    tuple: (tuple, "a tuple of values"),
}

_LEAST, _MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
"""Beyond these a number is zero or infinite in single precision, in which models are trained."""
_MOST_WHOLE = 2**31 - 1


def check_setting(
    owner: str, spec: "dataclasses.Field[Any]", value: Any, infinite: bool = False
) -> None:
    """Refuse a value outside what the setting declares, in one line that names the rule.

    Only of some settings `infinite` numbers make sense: of a bound, say, that is none.
    """
    of = spec.type if get_origin(spec.type) is tuple else type(spec.default)
    wrong, expected = _wrong(spec.metadata, value, of, spec.default, infinite)
    if expected:
        given = "empty" if wrong == () else shortened(repr(wrong), 60)
        raise ConfigError(f"{owner}: {spec.name} is {given}, expected {expected}")


def _wrong(
    rule: Mapping[str, Any], value: Any, of: Any, default: Any, infinite: bool
) -> tuple[Any, str]:
    """Return what of a value, or of the values in it, is wrong, and what is expected there."""
    expected = _expected(rule, value, get_origin(of) or of, infinite)
    if expected or not isinstance(value, tuple):
        return value, expected
    if not value and default != ():
        return value, "at least one value"
    inner = next(
        iter(get_args(of) or (map(type, default) if isinstance(default, tuple) else ())), object
    )
    for one in value:
        wrong, expected = _wrong(rule, one, inner, (), infinite)
        if expected:
            words = _KINDS.get(inner, ((), ""))[1]
            return wrong, f"{expected} in each place" if expected == words else expected
    return value, ""


def _expected(rule: Mapping[str, Any], one: Any, of: type, infinite: bool) -> str:
    """Say what is expected in place of a value; "" where it is right."""
    kind, words = _KINDS.get(of, (object, ""))
    if not _is(one, kind):
        return words
    if isinstance(one, tuple):
        return ""  # its values are looked at one by one
    if rule.get("choices") and one not in rule["choices"]:
        return "one of " + ", ".join(map(repr, rule["choices"]))
    if rule.get("above") is not None and not one > rule["above"]:
        return f"above {rule['above']}"
    if rule.get("least") is not None and not one >= rule["least"]:
        return f"at least {rule['least']}"
    if rule.get("most") is not None and not one <= rule["most"]:
        return f"at most {rule['most']}"
    if rule.get("below") is not None and not one < rule["below"]:
        return f"below {rule['below']}"
    if not _is(one, Real):
        return ""
    if of is int and abs(one) > _MOST_WHOLE:
        return f"at most {_MOST_WHOLE}"
    if not infinite and not abs(one) <= sys.float_info.max:
        return "a finite number"
    if _MOST < abs(one) < float("inf"):
        return f"at most {_MOST:.1e}, the largest number of single precision"
    if rule.get("above") == 0 and one < _LEAST:
        return f"at least {_LEAST:.1e}, the smallest number of single precision"
    return ""


def _is(value: Any, kind: type) -> bool:
    """Say whether a value is of a kind; True and False are numbers to Python, but not to us."""
    return isinstance(value, kind) and not (isinstance(value, bool) and kind in (Real, Integral))


_VALUES = (bool, int, float, str, bytearray, list, tuple, dict, set, Tensor, np.ndarray, type(None))


def remembered(method: Method) -> dict[str, bytes]:
    """Return what a method holds in itself and in its class, to see whether a step changes it."""
    held: dict[str, Any] = {}
    for owner in reversed(type(method).__mro__):
        found = {n: v for n, v in vars(owner).items() if isinstance(v, _VALUES)}
        held |= {name: own for name, own in found.items() if not name.startswith("__")}
    return {name: _digest(own) for name, own in {**held, **vars(method)}.items()}


def _digest(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception:  # a function made in a function, a tensor that vmap maps
        return repr(value).encode()


def refuse_memory(method: Method, before: Mapping[str, bytes]) -> None:
    """Refuse a client step that changed what its method holds: all clients share that."""
    after = remembered(method)
    for name, held in before.items():
        if after.get(name) != held:
            raise MethodError(
                f"{method.title or type(method).__name__} changes its own {name!r} in client code, "
                "which all clients share, and no checkpoint or node has; return as personal state "
                "what a client keeps, report what the server is to know"
            )


def refuse_task(method: Method, task: Task) -> None:
    """Refuse a task that makes no sense for a method, and name methods for which it does."""
    if method.needs_classes and task.kind != "classes":
        raise ConfigError(
            f"{method.title} has {method.needs_classes} for each class, and task {task.kind} has "
            "no classes; use fedrep, ditto, fedavg-ft or portfolio, which learn every task"
        )


PLAIN_STEPS = (
    *("optimiser", "momentum", "nesterov", "clip"),
    *("schedule", "decay", "decay_rounds", "decay_at"),
)
"""Settings that a method with its own inner steps has no use for."""


def alike(size: Tensor) -> Tensor:
    """Weigh clients alike, but those without examples."""
    return (size > 0).to(size.dtype)


def mean_report(reports: Report, uniform: bool = False) -> Params:
    """Average reported parameters, by examples or each client alike; without examples none."""
    averaged: Params = tree.mean(reports.params, alike(reports.size) if uniform else reports.size)
    return averaged


def towards(state: Tree, average: Tree, rate: float) -> Tree:
    """Move parameters from the server's state to the clients' average, part of the way or past it.

    Running statistics are the average's: past it a variance may be negative, and never settles.
    """
    if rate == 1:
        return average
    moved = tree.axpy(rate, tree.sub(average, state), state)
    named = tree.named(average)
    held = {name: leaf for name, leaf in named.items() if batchnorm.is_statistic(name)}
    return tree.like(moved, {**tree.named(moved), **held}) if held else moved
