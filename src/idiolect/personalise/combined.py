"""Many combinations of the five parts at once, from one federated model.

A combination such as ("ft", "kd", "moe") names what a client does with what it received: train all
layers (ft) or the last (fb), hold on to the federated model by distillation (kd) or by elastic
weights (ewc), mix the result with a local expert (moe). Combinations that train the same layers are
rows of one stack: they see equal batches and differ in the weights of two terms of the loss. The
expert is trained once for all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect import losses, tree
from idiolect.errors import ConfigError
from idiolect.local import Batch, Local
from idiolect.method import Sent, setting
from idiolect.personalise.adapting import Terms, adapted, chosen, fisher, ground, parameters
from idiolect.personalise.mixture import (
    Alone,
    Mixed,
    MixSettings,
    expert,
    first_least,
    mixed,
    predict_all,
)
from idiolect.personalise.mixture import predict as predict_mixed
from idiolect.personalise.tuned import TuneSettings, course_of
from idiolect.tree import Tree
from idiolect.wrapper import Wrapper

NAMES = {"ft": "FT", "fb": "FB", "kd": "KD", "ewc": "EWC", "moe": "MoE"}

Combination = tuple[str, ...]

TABLE_2: tuple[Combination, ...] = (
    ("ft",),
    ("ft", "kd"),
    ("ft", "ewc"),
    ("fb",),
    ("fb", "kd"),
    ("fb", "ewc"),
    ("moe",),
    ("ft", "moe"),
    ("ft", "kd", "moe"),
    ("ft", "ewc", "moe"),
    ("fb", "moe"),
    ("fb", "kd", "moe"),
    ("fb", "ewc", "moe"),
)
"""The thirteen of Pye and Yu (2021)."""


def spoken(combination: Combination) -> str:
    """Name a combination as the paper does."""
    return " + ".join(NAMES[part] for part in combination)


class Branch(NamedTuple):
    """One local training: which layers, and which terms hold it."""

    trains: str  # ft or fb
    kd: bool
    ewc: bool


class Settled(NamedTuple):
    """What the inner method deploys, every combination's model, and the client's choice."""

    inner: Tree
    candidates: dict[str, Tree]
    personal: Tree
    chosen: Tensor  # place in the list
    accuracies: Tensor  # [combination] on validation data


@dataclass(frozen=True, kw_only=True)
class Combined(TuneSettings, MixSettings, Wrapper):
    """Any method, then every listed combination at every client; each is scored, one is chosen."""

    tunes: ClassVar[bool] = True
    starts_over: ClassVar[bool] = True

    combinations: tuple[Combination, ...] = setting(
        TABLE_2, "parts that go together, each a list of ft or fb, kd, ewc, moe"
    )
    kd_weight: float = setting(
        0.5, "share of the distillation where there is any (α)", least=0, most=1
    )
    ewc_weight: float = setting(5.0, "strength of the hold where there is one (λ)", least=0)
    choose: str = setting(
        "accuracy", "what picks a client's own on validation data", choices=("accuracy", "loss")
    )

    def __post_init__(self) -> None:
        for combination in self.combinations:
            refuse_impossible(combination)
        super().__post_init__()
        if len(set(map(frozenset, self.combinations))) < len(self.combinations):
            raise ConfigError("personalise lists a combination twice; name each once")
        if not any("moe" in combination for combination in self.combinations):
            object.__setattr__(self, "starts_over", self.base.starts_over)

    def titled(self, title: str) -> str:
        """Name the parts of one combination; of several only that there are."""
        if len(self.combinations) == 1:
            return f"{title} + {spoken(self.combinations[0])}"
        return f"{title} + combinations"

    def deploy(self, sent: Sent, personal: Tree, local: Local) -> Settled:
        """Train every branch and the expert from what the inner method deploys."""
        return self._settled(self.base.deploy(sent, personal, local), sent, local)

    def adapt(self, sent: Sent, personal: Tree, local: Local) -> Settled:
        """Do the same for a newcomer."""
        return self._settled(self.base.adapt(sent, personal, local), sent, local)

    def models(self, sent: Sent, deployed: Settled) -> dict[str, Tree]:
        """The chosen one, those of the inner method, and each combination where there are many."""
        if not deployed:
            return self.base.models(sent, ())
        scored = {**self.base.models(sent, deployed.inner), "personal": deployed.personal}
        experts = [m.expert for m in deployed.candidates.values() if isinstance(m, Mixed)]
        if experts:
            scored["local"] = Alone(experts[0])
        if len(self.combinations) > 1:
            scored |= deployed.candidates
        return scored

    def predict(self, model: Tree, x: Tensor, local: Local) -> Tensor:
        """Mix, where it is a mixture."""
        return predict_mixed(self.base, model, x, local, self.gate)

    def predict_all(self, models: dict[str, Tree], x: Tensor, local: Local) -> dict[str, Tensor]:
        """Run what the combinations have in common once."""
        return predict_all(self.base, models, x, local, self.gate)

    def facts(self, deployed: Settled) -> dict[str, Tensor]:
        """What was chosen, and the weight of the federated model in every mixture."""
        told = dict(self.base.facts(deployed.inner))
        found = [m for m in deployed.candidates.values() if isinstance(m, Mixed) and not m.gate]
        if found:
            told["moe_weights"] = torch.stack([one.weight for one in found])
        if len(self.combinations) > 1:
            told["chosen"] = deployed.chosen
            told["validation_accuracy_of_combinations"] = deployed.accuracies
        return told

    def _settled(self, inner: Tree, sent: Sent, local: Local) -> Settled:
        candidates = candidates_of(self, self.combinations, inner, sent, local)
        if len(candidates) == 1:
            (only,) = candidates.values()
            nothing = local.numbers([0.0])
            return Settled(inner, candidates, only, nothing[0].long(), nothing)
        accuracies, lost = self._judged(candidates, local)
        # Without validation data nothing can be compared, and the first serves.
        lost = torch.where(lost.isnan(), float("inf"), lost)
        if self.choose == "accuracy":
            lost = torch.where(accuracies == accuracies.max(), lost, float("inf"))
        best = first_least(lost)
        return Settled(inner, candidates, picked(list(candidates.values()), best), best, accuracies)

    def _judged(self, models: dict[str, Tree], local: Local) -> tuple[Tensor, Tensor]:
        """Score candidates on validation data, [candidate] each."""

        def score(batch: Batch) -> tuple[Tensor, Tensor]:
            said = self.predict_all(models, batch.x, local).values()
            return (
                torch.stack([losses.accuracy(own, batch.y, batch.weight) for own in said]),
                torch.stack([losses.cross_entropy(own, batch.y, batch.weight) for own in said]),
            )

        accuracies, lost = local.mean(score, "val")
        return accuracies, lost


def candidates_of(
    method: Combined, combinations: Sequence[Combination], inner: Tree, sent: Sent, local: Local
) -> dict[str, Tree]:
    """Train what the combinations need, each thing once, and name the models they amount to."""
    base, start = method.base, method.base.models(sent, inner)["personal"]
    branches = list(dict.fromkeys(filter(None, map(branch_of, combinations))))
    groups = {trains: [b for b in branches if b.trains == trains] for trains in ("ft", "fb")}
    mixes = any("moe" in combination for combination in combinations)
    *stacks, own = local.alike(
        partial(trained, method, groups["ft"], inner, sent, local),
        partial(trained, method, groups["fb"], inner, sent, local),
        lambda: expert(base, method, local) if mixes else (),
    )
    models = {
        branch: tree.map(lambda leaf, n=n: leaf[n], stack)
        for group, stack in zip(groups.values(), stacks, strict=True)
        for n, branch in enumerate(group)
    }
    candidates: dict[str, Tree] = {}
    for combination in combinations:
        branch = branch_of(combination)
        model = start if branch is None else models[branch]
        if "moe" in combination:
            model = mixed(base, model, own, method, local)
        candidates[spoken(combination)] = model
    return candidates


def trained(
    method: Combined, branches: Sequence[Branch], inner: Tree, sent: Sent, local: Local
) -> Tree:
    """Train branches that concern the same layers as rows of one stack."""
    if not branches:
        return ()
    base, at = method.base, ground(method.base, sent, inner)
    params, only_head = parameters(base, at.start), branches[0].trains == "fb"
    wanted = chosen(params, only_head, method.fb_layers, method.fb_names)
    held = any(branch.ewc for branch in branches)
    importance = fisher(base, at, wanted, local) if held else {}
    taught = any(branch.kd for branch in branches)
    course = course_of(base, local, method)

    def one(kd: Tensor, ewc: Tensor) -> Tree:
        terms = Terms(kd if taught else None, method.kd_temperature, ewc if held else None)
        return adapted(base, at, wanted, terms, importance, course, local)

    return local.each(
        one,
        local.numbers([method.kd_weight * branch.kd for branch in branches]),
        local.numbers([method.ewc_weight * branch.ewc for branch in branches]),
    )


def branch_of(combination: Combination) -> Branch | None:
    """Return the training that a combination needs, if any."""
    trains = "ft" if "ft" in combination else "fb"
    if trains not in combination:
        return None
    return Branch(trains, "kd" in combination, "ewc" in combination)


def picked(models: Sequence[Tree], place: Tensor) -> Tree:
    """Choose one of several models by a number; where any is a mixture, all are made one."""
    mixtures = [model for model in models if isinstance(model, Mixed)]
    if not mixtures:
        return tree.pick(tree.stack(models), place)
    first = mixtures[0]
    whole = first.weight.new_ones(())
    same = [
        model if isinstance(model, Mixed) else first._replace(model=model, weight=whole)
        for model in models
    ]
    return Mixed(
        tree.pick(tree.stack([model.model for model in same]), place),
        first.expert,  # one for all
        tree.pick(torch.stack([model.weight for model in same]), place),
        tree.pick(tree.stack([model.gate for model in same]), place) if first.gate else (),
    )


def refuse_impossible(combination: Combination) -> None:
    """Say what is wrong with a combination of parts."""
    listed = ", ".join(combination) or "nothing"
    for part in combination:
        if part not in NAMES:
            raise ConfigError(f"personalise: unknown part {part!r}; expected {', '.join(NAMES)}")
    if len(set(combination)) < len(combination):
        raise ConfigError(f"personalise: {listed} names a part twice")
    if not combination or {"ft", "fb"} <= set(combination):
        raise ConfigError(f"personalise: {listed}; expected one of ft and fb, or moe")
    if {"kd", "ewc"} & set(combination) and not {"ft", "fb"} & set(combination):
        raise ConfigError(
            f"personalise: {listed} changes the loss of a training that is not there; add ft or fb"
        )


__all__ = ["TABLE_2", "Combined", "candidates_of", "picked", "spoken"]
