"""PersFL: the best teacher of each client over the rounds, then distillation from it.

Divi, Farrukh, Celik, "Unifying Distillation with Personalization in Federated Learning", 2021,
Algorithm 1. Readings where the paper is silent or contradicts itself:

- the teacher is chosen by validation loss (Eq. 2) over the global models as received, the final
  one included; a model is numbered by the rounds behind it, 0 for the initial one;
- the soft loss is T² · KL(teacher ‖ student), summed over classes and averaged over examples;
- λ and T are searched on validation data for each client: accuracy, then loss, then grid order
  (so λ = 0 keeps the first T, as all such cells of Table 5 do);
- the teacher is a constant in evaluation mode; every student starts from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect.core import losses, tree
from idiolect.core.capabilities import Facts, NewcomerHistory
from idiolect.core.client import Batch, Local
from idiolect.core.method import Report, Sent, Setup, setting
from idiolect.core.tree import Params, Tree
from idiolect.methods.fedavg import FedAvg


class Teacher(NamedTuple):
    """The best global model a client has met."""

    params: Params
    loss: Tensor  # on its validation data
    round: Tensor  # rounds behind the model


class Student(NamedTuple):
    """The chosen personal model, and what the search found."""

    params: Params
    share: Tensor
    temperature: Tensor
    teacher_round: Tensor
    accuracies: Tensor  # [cell] on validation data
    cells: Tree  # every student [cell, ...] where the grid is kept


@dataclass(frozen=True, kw_only=True)
class PersFL(Facts, NewcomerHistory, FedAvg):
    """FedAvg in which each client keeps its best teacher, then distils it with its own λ and T."""

    title: ClassVar[str] = "PersFL"
    paper: ClassVar[str] = "Divi et al. 2021, Algorithm 1"
    tunes: ClassVar[bool] = True
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {},
        "gd": {"soft_loss": "cross-entropy"},
    }

    shares: tuple[float, ...] = setting(
        (0.0, 0.25, 0.5, 0.75, 1.0), "shares of the soft loss (λ)", least=0, most=1, deploy=True
    )
    temperatures: tuple[float, ...] = setting(
        (1.0, 5.0, 25.0), "temperatures to search (T)", above=0, deploy=True
    )
    distil_epochs: int = setting(10, "passes over the data in stage 2 (E)", least=1, deploy=True)
    distil_lr: float = setting(0.01, "learning rate of stage 2", above=0, deploy=True)
    soft_loss: str = setting(
        "kl",
        "Eq. 3, or Eq. 7 (PersFL-GD), whose gradient is equal",
        choices=("kl", "cross-entropy"),
        deploy=True,
    )
    soft_weight: float = setting(
        1.0, "of the soft loss; one over the classes: PyTorch's mean", above=0, deploy=True
    )
    teacher: str = setting(
        "best",
        "the best global model, or the last (Table 4's ablation)",
        choices=("best", "last"),
        deploy=True,
    )
    select: str = setting(
        "accuracy", "what picks λ and T on validation", choices=("accuracy", "loss"), deploy=True
    )
    keep_grid: bool = setting(
        False, "score every cell of the grid at the end (Figures 3-8)", deploy=True
    )

    @property
    def cells(self) -> list[tuple[float, float]]:
        """The grid in order, without cells that rounding alone would tell apart.

        At λ = 0 there is no soft loss; at λ = 1 the student starts where the soft loss is least and
        stays, unless weight decay moves it. T means nothing there; its first value stands for all.
        """
        idle = (0.0,) if self.weight_decay else (0.0, 1.0)
        return grid(self.shares, self.temperatures, idle)

    @property
    def chooses(self) -> bool:
        """One cell and the last teacher leave nothing to choose."""
        return self.teacher == "best" or len(self.cells) > 1

    def init_personal(self, setup: Setup) -> Teacher:
        """Start with no teacher."""
        return no_teacher(setup)

    def client_step(self, sent: Sent, personal: Teacher, local: Local) -> tuple[Report, Teacher]:
        """Stage 1: judge the received model, then train it as FedAvg does."""
        teacher = self.meet(sent, personal, local)
        report, _ = super().client_step(sent, (), local)
        return report, teacher

    def meet(self, sent: Sent, personal: Teacher, local: Local) -> Teacher:
        """Keep the received model if its validation loss is lower than any before."""
        return better(sent.shared, personal, local)

    def deploy(self, sent: Sent, personal: Teacher, local: Local) -> Student:
        """Stage 2: distil the teacher at every λ and T, keep the best on validation data."""
        last = Teacher(sent.shared, personal.loss, local.round)
        teacher = last if self.teacher == "last" else self.meet(sent, personal, local)
        shares = local.numbers([share for share, _ in self.cells])
        temperatures = local.numbers([temperature for _, temperature in self.cells])

        def cell(share: Tensor, temperature: Tensor) -> tuple[Params, Tensor, Tensor]:
            student = self._distil(teacher.params, share, temperature, local)
            accuracy = local.mean(lambda batch: local.score(student, batch))
            return student, accuracy, local.mean(lambda batch: local.loss(student, batch))

        students, accuracies, lost = local.each(cell, shares, temperatures)
        best = self._choose(accuracies, lost)
        return Student(
            tree.pick(students, best),
            tree.pick(shares, best),
            tree.pick(temperatures, best),
            teacher.round,
            accuracies,
            students if self.keep_grid else (),
        )

    def models(self, sent: Sent, deployed: Student) -> dict[str, Tree]:
        """The chosen student, the global model, and the grid where it is kept."""
        if not deployed:
            return {"global": sent.shared}
        named: dict[str, Tree] = {"personal": deployed.params, "global": sent.shared}
        if self.keep_grid:
            for number, (share, temperature) in enumerate(self.cells):
                one = tree.map(lambda leaf, n=number: leaf[n], deployed.cells)
                named[f"λ={share:g} T={temperature:g}"] = one
        return named

    def facts(self, deployed: Student) -> dict[str, Tensor]:
        """What each client chose."""
        return {
            "share": deployed.share,
            "temperature": deployed.temperature,
            "teacher_round": deployed.teacher_round,
            "validation_accuracy_of_cells": deployed.accuracies,
        }

    def _distil(self, teacher: Params, share: Tensor, temperature: Tensor, local: Local) -> Params:
        """Train a student from the teacher on (1 - λ) · hard + λ T² · soft, which has a weight."""
        soft = losses.divergence if self.soft_loss == "kl" else losses.soft_cross_entropy
        task = local.task

        def loss(student: Params, batch: Batch) -> Tensor:
            logits = local.logits(student, batch.x, batch.training)
            taught = local.logits(teacher, batch.x).detach()
            hard = task.loss(logits, batch.y, batch.weight)
            if task.kind != "classes":
                near = task.distil(logits, taught, batch.weight, temperature)
                return (1 - share) * hard + share * self.soft_weight * near
            softened = soft(logits / temperature, taught / temperature, batch.weight)
            return (1 - share) * hard + share * self.soft_weight * temperature**2 * softened

        return self.fit(local, teacher, loss, lr=self.distil_lr, epochs=self.distil_epochs)

    def _choose(self, accuracies: Tensor, lost: Tensor) -> Tensor:
        """Return the best cell; ties go to the lower loss, then to the first in the grid."""
        # A student that diverged has no loss and comes last; without validation data all do.
        accuracies = torch.where(lost.isnan(), float("-inf"), accuracies)
        lost = torch.where(lost.isnan(), float("inf"), lost)
        if self.select == "accuracy":
            lost = torch.where(accuracies == accuracies.max(), lost, float("inf"))
        order = torch.arange(lost.shape[0], device=lost.device)
        none = torch.full_like(order, lost.shape[0])
        return torch.where(lost == lost.min(), order, none).min()


def grid(
    shares: Sequence[float], temperatures: Sequence[float], idle: Sequence[float]
) -> list[tuple[float, float]]:
    """Return the cells in order; at `idle` shares T means nothing, and its first stands for all."""
    return [
        (share, temperature)
        for share, temperature in product(shares, temperatures)
        if share not in idle or temperature == temperatures[0]
    ]


def no_teacher(setup: Setup) -> Teacher:
    """Return the initial model, which any other is better than."""
    nothing = setup.sizes.new_full((), float("inf"))
    return Teacher(setup.params, nothing, torch.zeros_like(nothing))


def better(received: Params, teacher: Teacher, local: Local) -> Teacher:
    """Return the received model as the teacher if its validation loss is lower, else the old."""
    loss = local.mean(lambda batch: local.loss(received, batch))
    # Without validation data the loss is NaN and nothing can be judged: the newest serves.
    blind = loss.isnan()
    met = Teacher(received, torch.where(blind, teacher.loss, loss), local.round)
    kept: Teacher = tree.where(blind | (loss < teacher.loss), met, teacher)
    return kept
