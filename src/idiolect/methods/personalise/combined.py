"""Many combinations of the five parts at once, from one federated model.

A combination such as ("ft", "kd", "moe") names what a client does with what it received: train all
layers (ft) or the last (fb), hold on to the federated model by distillation (kd) or by elastic
weights (ewc), mix the result with a local expert (moe). Combinations that train the same layers are
rows of one stack: they see equal batches and differ in the weights of two terms of the loss. The
expert is trained once for all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.core.capabilities import Facts, FinalExchange, JointPrediction, adapt, facts, has
from idiolect.core.client import Batch, Local
from idiolect.core.method import Sent, check_setting, setting
from idiolect.core.tree import Params, Tree
from idiolect.errors import ConfigError
from idiolect.methods.personalise import local_training, mixture
from idiolect.methods.personalise.fine_tuning import LocalTraining
from idiolect.methods.personalise.local_training import FisherHold, LossTerms, StartingPoint
from idiolect.methods.personalise.mixture import LocalExpert, Mixed, MixSettings

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


class CombinedModels(NamedTuple):
    """What the inner method deploys, every combination's model, and the client's choice."""

    inner: Tree
    candidates: dict[str, Tree]
    personal: Tree
    chosen: Tensor  # place in the list
    accuracies: Tensor  # [combination] on validation data
    held: FisherHold | tuple[()] = ()  # what EWC needs in `hear`


@dataclass(frozen=True, kw_only=True)
class Combined(Facts, JointPrediction, LocalTraining, MixSettings):
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
        check_setting(type(self).__name__, _COMBINATIONS, self.combinations)
        for combination in self.combinations:
            refuse_impossible(combination)
        super().__post_init__()
        if len(set(map(frozenset, self.combinations))) < len(self.combinations):
            raise ConfigError("personalise lists a combination twice; name each once")
        if not any("moe" in combination for combination in self.combinations):
            object.__setattr__(self, "starts_over", self.base.starts_over)

    @property
    def chooses(self) -> bool:
        """Validation rows choose among several, and weigh an expert."""
        several = len(self.combinations) > 1 or "moe" in self.combinations[0]
        return several or self.base.chooses

    def titled(self, title: str) -> str:
        """Name the parts of one combination; of several only that there are."""
        if len(self.combinations) == 1:
            return f"{title} + {spoken(self.combinations[0])}"
        return f"{title} + combinations"

    def deploy(self, sent: Sent, personal: Tree, local: Local) -> CombinedModels:
        """Train every branch and the expert from what the inner method deploys."""
        return self._settled(lambda: self.base.deploy(sent, personal, local), sent, local)

    def adapt(self, sent: Sent, personal: Tree, local: Local) -> CombinedModels:
        """Do the same for a newcomer."""
        return self._settled(lambda: adapt(self.base, sent, personal, local), sent, local)

    def models(self, sent: Sent, deployed: CombinedModels) -> dict[str, Tree]:
        """The chosen one, those of the inner method, and each combination where there are many."""
        if not deployed:
            return self.base.models(sent, ())
        scored = {**self.base.models(sent, deployed.inner), "personal": deployed.personal}
        experts = [m.expert for m in deployed.candidates.values() if isinstance(m, Mixed)]
        if experts:
            scored["local"] = LocalExpert(experts[0])
        if len(self.combinations) > 1:
            scored |= deployed.candidates
        return scored

    def predict(self, model: Tree, x: Tensor, local: Local) -> Tensor:
        """Mix, where it is a mixture."""
        return mixture.predict(self.base, model, x, local, self.gate)

    def predict_all(self, models: dict[str, Tree], x: Tensor, local: Local) -> dict[str, Tensor]:
        """Run what the combinations have in common once."""
        return mixture.predict_all(self.base, models, x, local, self.gate)

    def facts(self, deployed: CombinedModels) -> dict[str, Tensor]:
        """What was chosen, and the weight of the federated model in every mixture."""
        known = dict(facts(self.base, deployed.inner))
        found = [m for m in deployed.candidates.values() if isinstance(m, Mixed) and not m.gate]
        if found:
            known["moe_weights"] = torch.stack([one.weight for one in found])
        if len(self.combinations) > 1:
            known["chosen"] = deployed.chosen
            known["validation_accuracy_of_combinations"] = deployed.accuracies
        return known

    @property
    def elastic(self) -> bool:
        """Whether some combination has EWC."""
        return bool(self.ewc_weight) and any("ewc" in one for one in self.combinations)

    @property
    def models_held(self) -> int:
        """With what is held until `hear`."""
        return getattr(self.base, "models_held", 1) + len(self.combinations) + 6

    def hear(self, deployed: CombinedModels, others: Tree, local: Local) -> CombinedModels:
        """Train what elastic weights hold once more, held to what matters to all; choose again."""
        if not deployed.held:
            return deployed
        importance = local_training.of_all(deployed.held, others)
        elastic = [one for one in self.combinations if "ewc" in one]
        models = branches_of(self, elastic, deployed.held.at, importance, local)
        candidates = dict(deployed.candidates)
        for combination in elastic:
            before, branch = candidates[spoken(combination)], branch_of(combination)
            assert branch is not None
            model = models[branch]
            if isinstance(before, Mixed):
                model = mixture.mixed(self.base, model, before.expert, self, local)
            candidates[spoken(combination)] = model
        return self._chosen(deployed.inner, candidates, local)

    def _settled(self, make: Callable[[], Tree], sent: Sent, local: Local) -> CombinedModels:
        found = candidates_of(self, self.combinations, make, sent, local)
        inner, candidates, importance = found
        settled = self._chosen(inner, candidates, local)
        if not has(self, FinalExchange):
            return settled
        return settled._replace(held=local_training.held(self.base, sent, inner, importance, local))

    def _chosen(self, inner: Tree, candidates: dict[str, Tree], local: Local) -> CombinedModels:
        if len(candidates) == 1:
            (only,) = candidates.values()
            nothing = local.numbers([0.0])
            return CombinedModels(inner, candidates, only, nothing[0].long(), nothing)
        accuracies, lost = self._judged(candidates, local)
        # Without validation data nothing can be compared, and the first serves.
        lost = torch.where(lost.isnan(), float("inf"), lost)
        if self.choose == "accuracy":
            lost = torch.where(accuracies == accuracies.max(), lost, float("inf"))
        best = mixture.first_least(lost)
        return CombinedModels(
            inner, candidates, picked(list(candidates.values()), best), best, accuracies
        )

    def _judged(self, models: dict[str, Tree], local: Local) -> tuple[Tensor, Tensor]:
        """Score candidates on validation data, [candidate] each."""

        def score(batch: Batch) -> tuple[Tensor, Tensor]:
            said = self.predict_all(models, batch.x, local).values()
            return (
                torch.stack([local.task.score(own, batch.y, batch.weight) for own in said]),
                torch.stack([local.task.loss(own, batch.y, batch.weight) for own in said]),
            )

        accuracies, lost = local.mean(score, "val")
        return accuracies, lost


_COMBINATIONS = next(spec for spec in fields(Combined) if spec.name == "combinations")


def candidates_of(
    method: Combined,
    combinations: Sequence[Combination],
    make: Callable[[], Tree],
    sent: Sent,
    local: Local,
) -> tuple[Tree, dict[str, Tree], Params]:
    """Train what the combinations need, each thing once, and name the models they amount to.

    `make` deploys the inner method, which may train: the expert sees the batches that it would see
    without. What was deployed is returned too, and the client's own Fisher information beside the
    models; {} where nothing needs it.
    """
    base = method.base
    mixes = any("moe" in combination for combination in combinations)
    trains = any(branch_of(combination) for combination in combinations)

    def branched() -> tuple[Tree, dict[Branch, Tree], Params]:
        inner = make()
        if not trains:
            return inner, {}, {}
        at = local_training.ground(base, sent, inner)
        importance = importance_of(method, combinations, at, local)
        return inner, branches_of(method, combinations, at, importance, local), importance

    (inner, models, importance), own = local.alike(
        branched, lambda: mixture.expert(base, method, local) if mixes else ()
    )
    start = base.models(sent, inner)["personal"]
    candidates: dict[str, Tree] = {}
    for combination in combinations:
        branch = branch_of(combination)
        model = start if branch is None else models[branch]
        if "moe" in combination:
            model = mixture.mixed(base, model, own, method, local)
        candidates[spoken(combination)] = model
    return inner, candidates, importance


def importance_of(
    method: Combined, combinations: Sequence[Combination], at: StartingPoint, local: Local
) -> Params:
    """Return the client's Fisher information of all that elastic weights are to hold."""
    elastic = [branch for one in combinations if (branch := branch_of(one)) and branch.ewc]
    if not elastic:
        return {}
    only_head = all(branch.trains == "fb" for branch in elastic)
    return local_training.fisher(method.base, at, _wanted(method, at, only_head), local)


def branches_of(
    method: Combined,
    combinations: Sequence[Combination],
    at: StartingPoint,
    importance: Params,
    local: Local,
) -> dict[Branch, Tree]:
    """Train every branch that some combinations need, those of the same layers as one stack."""
    branches = list(dict.fromkeys(filter(None, map(branch_of, combinations))))
    groups = [[b for b in branches if b.trains == trains] for trains in ("ft", "fb")]
    stacks = local.alike(
        *(partial(trained, method, group, at, importance, local) for group in groups)
    )
    return {
        branch: tree.map(lambda leaf, n=n: leaf[n], stack)
        for group, stack in zip(groups, stacks, strict=True)
        for n, branch in enumerate(group)
    }


def trained(
    method: Combined,
    branches: Sequence[Branch],
    at: StartingPoint,
    importance: Params,
    local: Local,
) -> Tree:
    """Train branches that concern the same layers as rows of one stack."""
    if not branches:
        return ()
    base, only_head = method.base, branches[0].trains == "fb"
    wanted = _wanted(method, at, only_head)
    holds = any(branch.ewc for branch in branches)
    taught = any(branch.kd for branch in branches)

    def one(kd: Tensor, ewc: Tensor) -> Tree:
        terms = LossTerms(kd if taught else None, method.kd_temperature, ewc if holds else None)
        rate, epochs = method.tune_lr, method.tune_epochs
        return local_training.adapted(base, at, wanted, terms, importance, local, rate, epochs)

    return local.each(
        one,
        local.numbers([method.kd_weight * branch.kd for branch in branches]),
        local.numbers([method.ewc_weight * branch.ewc for branch in branches]),
    )


def _wanted(method: Combined, at: StartingPoint, only_head: bool) -> Callable[[str], bool]:
    params = local_training.parameters(method.base, at.start)
    return local_training.chosen(params, only_head, method.fb_layers, method.fb_names)


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
