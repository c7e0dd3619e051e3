"""How the server makes one model of many reports: a part that can be replaced.

A method whose server step uses only the mean of its clients' parameters (`Averaging`) takes any
other rule in place of the mean: it gets the rule's result as the report of a single client. What a
method keeps personal never comes here.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.core.capabilities import (
    Averaging,
    FinalExchange,
    Privacy,
    has,
    idle,
    promise,
    reference,
)
from idiolect.core.method import Capability, Method, Report, RunPlan, Setup, check_setting
from idiolect.core.tree import Params, Tree
from idiolect.core.wrap import Served, Stateful
from idiolect.errors import MethodError


@dataclass(frozen=True, kw_only=True)
class Aggregator:
    """A rule; frozen, with settings declared as a method's are."""

    title: ClassVar[str] = ""
    source: ClassVar[str] = ""  # where it comes from
    hides: ClassVar[bool] = False  # it hides any one client, so that nothing may pass it by
    mean_only: ClassVar[bool] = False  # it uses the mean by the method's own weights, nothing else
    shortens: ClassVar[bool] = False  # the sum of updates that clients shorten themselves will do

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            check_setting(type(self).__name__, spec, getattr(self, spec.name), infinite=True)

    @property
    def repeatable(self) -> bool:
        """Whether the rule makes the same of the same reports every time."""
        return True

    def start(self, setup: Setup) -> Tree:
        """Return what the rule remembers before the first round."""
        return ()

    def combine(
        self, memory: Tree, reference: Params, params: Params, weight: Tensor
    ) -> tuple[Params, Tree]:
        """Make one set of parameters of the rows of `params`, and the new memory.

        `reference` is what was sent out; rows of weight 0 [row] must not count, whatever they hold.
        """
        raise TypeError(f"{type(self).__name__} has no combine")

    def longest(self, memory: Tree) -> Tensor:
        """Return the norm that clients shorten their updates to, where the rule `shortens`."""
        raise TypeError(f"{type(self).__name__} has no longest")

    def combine_sum(
        self, memory: Tree, reference: Params, total: "Shortened", rows: int
    ) -> tuple[Params, Tree]:
        """Do what `combine` does with the sum of so many clients' shortened updates."""
        raise TypeError(f"{type(self).__name__} has no combine_sum")

    def idle(self, memory: Tree, reference: Params) -> tuple[Params, Tree]:
        """Do the same for a round in which nobody took part."""
        return reference, memory

    def settled(self, plan: RunPlan) -> tuple["Aggregator", int]:
        """Fit the rule to a plan, or refuse it; return it with how many rounds may be done."""
        return self, plan.rounds

    def promise(self, plan: RunPlan) -> dict[str, Any]:
        """Say what is guaranteed to clients after so many rounds, as plain values."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Aggregated(Privacy, Stateful):
    """A method whose server aggregates by another rule than the mean."""

    by: Aggregator = dataclasses.field(kw_only=False, metadata={"doc": "how reports are joined"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not has(self.base, Averaging) or self.base.pooled:
            raise MethodError(refusal(self.base, self.by.title))
        if self.by.mean_only:
            if not getattr(self.base, "moves", True):
                raise MethodError(
                    f"{self.base.title} averages figures of examples, which are no parameters that "
                    f"{self.by.title} could move; leave `aggregate` out"
                )
            object.__setattr__(self, "single_reports", self.base.single_reports)

    def titled(self, title: str) -> str:
        """Name the rule behind the method."""
        return f"{title}, {self.by.title}"

    def own_settings(self) -> dict[str, Any]:
        """Return the rule and its settings."""
        return {"rule": type(self.by).__name__, **dataclasses.asdict(self.by)}

    def training(self) -> tuple[Any, ...]:
        """Rounds with another rule are other rounds."""
        return self.by, self.base.training()

    def offers(self, kind: type[Capability]) -> bool:
        """Privacy is the rule's; no final exchange passes a private rule by."""
        if kind is Privacy:
            return self.by.hides or has(self.base, Privacy)
        return super().offers(kind) and not (kind is FinalExchange and self.by.hides)

    @property
    def repeatable(self) -> bool:
        """Whether the rule draws nothing afresh."""
        return self.by.repeatable and (not has(self.base, Privacy) or self.base.repeatable)

    def memory(self, setup: Setup) -> Tree:
        """Let the rule remember; the parameters it is shown are those that clients report."""
        nobody = torch.zeros(1, dtype=torch.int64, device=setup.sizes.device)
        sent = reference(self.base, self.base.init_server(setup), nobody)
        return self.by.start(setup._replace(params=sent))

    def server_step(self, state: Served, cohort: Tensor, reports: Report) -> Served:
        """Join the reports by the rule; the inner method averages the one that is left."""
        sent = reference(self.base, state.inner, cohort)
        _refuse_unlike(self.base, sent, reports.params)
        weight = reports.size
        if self.by.mean_only and has(self.base, Averaging):
            weight = self.base.weights(weight)
        joined, memory = self.by.combine(state.memory, sent, reports.params, weight)
        return Served(self._inner(state.inner, cohort, joined), memory)

    def sum_step(self, state: Served, cohort: Tensor, total: "Shortened") -> Served:
        """Do the server's step with the sum of what the cohort's clients shortened themselves."""
        sent = reference(self.base, state.inner, cohort)
        joined, memory = self.by.combine_sum(state.memory, sent, total, len(cohort))
        return Served(self._inner(state.inner, cohort, joined), memory)

    def settled(self, plan: RunPlan) -> tuple["Aggregated", int]:
        """Let the rule look at the plan."""
        by, rounds = self.by.settled(plan)
        return dataclasses.replace(self, by=by), rounds

    def promise(self, plan: RunPlan) -> dict[str, Any]:
        """Promise what the rule promises."""
        return {**promise(self.base, plan), **self.by.promise(plan)}

    def idle(self, state: Served) -> Served:
        """Let the rule say what an empty round does: private noise is added all the same."""
        nobody = torch.zeros(1, dtype=torch.int64, device=tree.leaves(state.inner)[0].device)
        sent = reference(self.base, state.inner, nobody)
        joined, memory = self.by.idle(state.memory, sent)
        if joined is sent:
            return Served(idle(self.base, state.inner), memory)
        return Served(self._inner(state.inner, nobody, joined), memory)

    def _inner(self, state: Tree, cohort: Tensor, joined: Params) -> Tree:
        one = tree.map(lambda leaf: leaf.unsqueeze(0), joined)
        size = torch.ones(1, device=cohort.device)
        return self.base.server_step(state, cohort[:1], Report(one, size))


def refusal(method: Method, rule: str) -> str:
    """Say why a method cannot take another rule."""
    name = method.title or type(method).__name__
    if method.pooled:
        return f"{name} has no clients whose reports could be joined by {rule}; leave it out"
    if method.alone:
        return f"{name} sends nothing to a server, so there is nothing to aggregate by {rule}"
    return (
        f"{name} does not average its clients' parameters, so its server cannot use {rule} instead "
        "of a mean; leave `aggregate` out, or choose a method such as fedavg, fedper or ditto"
    )


def _refuse_unlike(method: Method, reference: Tree, params: Params) -> None:
    """An update is a difference from what was sent, so both must be trees of one form."""
    sent = {name: tuple(leaf.shape) for name, leaf in tree.named(reference).items()}
    got = {name: tuple(leaf.shape[1:]) for name, leaf in tree.named(params).items()}
    if sent != got:
        name = sorted(set(sent.items()) ^ set(got.items()))[0][0]
        raise MethodError(
            f"{type(method).__name__} reports another tree than it sends, first in {name!r}; its "
            "`reference` must return what a client that changed nothing would report"
        )


# What rules are made of.


class Shortened(NamedTuple):
    """A client's update, shortened to a bound, and by how much it is above the middle of two.

    `below` is a half where the update was not longer than the bound, and minus a half where it was:
    the sum over clients tells how many were not.
    """

    update: Params
    below: Tensor


def shorten(reference: Params, params: Params, weight: Tensor, bound: Tensor) -> Shortened:
    """Shorten the update of every row to a bound; rows of weight 0 are nothing."""
    present = (weight > 0).to(weight.dtype)
    updates = tree.map(lambda leaf, sent: leaf - sent, params, reference)
    norms = row_norms(updates)
    cut = shortened(updates, norms, bound)
    update = tree.map(lambda leaf: beside(present.to(leaf.dtype), leaf) * leaf, cut)
    return Shortened(update, ((norms <= bound).to(weight.dtype) - 0.5) * present)


def beside(values: Tensor, leaf: Tensor) -> Tensor:
    """Lay one value per row beside a leaf's rows."""
    return values.reshape(-1, *[1] * (leaf.dim() - 1))


def shortened(updates: Params, norms: Tensor, bound: float | Tensor) -> Params:
    """Scale the rows that are longer than a bound down to it; the others stay exactly as they are.

    A row of infinite or undefined length becomes zero: no factor would mend it.
    """
    factor = torch.where(norms > bound, bound / norms, torch.ones_like(norms))

    def scaled(leaf: Tensor) -> Tensor:
        column = beside(factor, leaf)
        return torch.where(beside(torch.isfinite(norms), leaf), column * leaf, 0.0)

    cut: Params = tree.map(scaled, updates)
    return cut


def row_norms(updates: Params) -> Tensor:
    """Return the Euclidean norm of every row over all leaves."""
    squares = [leaf.reshape(len(leaf), -1).square().sum(1) for leaf in tree.leaves(updates)]
    return torch.stack(squares).sum(0).sqrt()
