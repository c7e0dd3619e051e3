"""What a label is, what a network's outputs say about it, and how the two are compared.

A dataset has a task, a client knows it (`local.task`), and a method that asks the task for losses
works for all of them. Labels have two forms. A dataset holds them in the user's unit; a batch holds
them as the loss takes them (`encode`): numbers are shifted and scaled by the training rows, times
of a discrete survival are numbers of intervals. Outputs are always in the units of the loss;
`predictions` and `probabilities` bring them back to the user's.

| kind | y of a dataset | outputs | loss |
|---|---|---|---|
| classes | int64 [row], or [row, place] of a sequence | logit of each class | cross-entropy |
| labels | float32 [row, label], 0 or 1 | logit of each label | mean binary cross-entropy |
| number | float32 [row] | 1 | squared error (or Huber's), of scaled numbers |
| survival | float32 [row, 2]: time, event | 1, or a logit an interval | Cox's, or discrete |
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from idiolect.core import losses
from idiolect.errors import DataError

Array: TypeAlias = NDArray[Any]

KINDS = ("classes", "labels", "number", "survival")


@dataclass(frozen=True)
class Task:
    """What every task can do; tensors are batches, arrays are whole sets of rows."""

    kind: ClassVar[str] = ""
    form: ClassVar[str] = ""  # which loss, where a kind has several
    primary: ClassVar[str] = ""  # the metric that is looked at first, see results/metrics.py
    single: ClassVar[bool] = True  # whether a single example has a loss; Cox's compares examples
    softens: ClassVar[bool] = True  # whether outputs are logits, which a temperature softens
    waits: ClassVar[tuple[str, ...]] = ()  # what `fit` takes from training rows, in words

    fitted: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def title(self) -> str:
        """The task in a few words."""
        return f"{self.kind}, {self.form}" if self.form else self.kind

    @property
    def waiting(self) -> bool:
        """Whether it still needs something from training rows."""
        return bool(self.waits) and not self.fitted

    # Whole sets of rows, in NumPy.

    def check(self, y: Array, width: int) -> str:
        """Return what is wrong with labels, or nothing."""
        raise NotImplementedError

    def fit(self, y: Array, width: int) -> Self:
        """Take what the task needs to know from the labels of training rows."""
        return dataclasses.replace(self, fitted=True)

    def encode(self, y: Array) -> Array:
        """Bring labels from the user's unit to that of the loss."""
        return y

    def importance(self, y: Array) -> Array | None:
        """Return how much each row counts in a training loss; None where all count alike."""
        return None

    def same_units(self, other: "Task") -> bool:
        """Say whether both encode labels alike, and weigh them alike."""
        return dataclasses.replace(self, fitted=True) == dataclasses.replace(other, fitted=True)

    def predictions(self, outputs: Array) -> Array:
        """Return what a user is told: class, labels, number in its own unit, or risk."""
        raise NotImplementedError

    def probabilities(self, outputs: Array) -> Array | None:
        """Return probabilities of classes or labels, or of surviving intervals; None without."""
        return None

    # Batches, in torch: under vmap, captured in graphs.

    def loss(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return the mean loss of a batch, padding ignored."""
        raise NotImplementedError

    def score(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return how good a batch's outputs are, higher is better: what choices are made by."""
        raise NotImplementedError

    def distil(
        self, student: Tensor, teacher: Tensor, weight: Tensor, temperature: float | Tensor = 1.0
    ) -> Tensor:
        """Return how far a student's outputs are from a teacher's, which are constants."""
        raise NotImplementedError

    def divergence(self, student: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
        """Do as `distil` does at temperature 1."""
        return self.distil(student, teacher, weight)

    def soften(self, outputs: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
        """Return outputs in the form in which several models' are averaged: shares, or numbers."""
        raise NotImplementedError

    def distil_from(self, student: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        """Return how far outputs, already over their temperature, are from softened targets."""
        raise NotImplementedError

    def mixture(self, outputs: Tensor, log_weight: Tensor) -> Tensor:
        """Mix outputs [model, ..., output] by log weights; return outputs again.

        Weights are [model], or have a value for each row: [model, row, 1].
        """
        raise NotImplementedError

    def evidence(self, outputs: Tensor, y: Tensor, weight: Tensor) -> "Evidence":
        """Say row by row what outputs are worth: what models are mixed and compared by."""
        raise NotImplementedError

    def relative(self, chance: Tensor, count: Tensor) -> Tensor:
        """Make likelihoods [label, model] of the chances in `evidence`, up to a factor a label."""
        return chance

    def surprise(self, lost: Tensor, count: Tensor) -> Tensor:
        """Return minus the log likelihood, up to a constant, of a sum of losses over rows."""
        return lost

    def to_json(self) -> dict[str, Any]:
        """Describe the task by plain values."""
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        lists = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
        return {"kind": self.kind, "form": self.form, **lists}


class Evidence(NamedTuple):
    """What outputs are worth, for each row, or for each of its labels or intervals."""

    chance: Tensor  # likelihood of the truth; of numbers the squared error
    right: Tensor  # from 0 to 1
    counts: Tensor  # how much it counts; 0 for padding


@dataclass(frozen=True)
class Classes(Task):
    """One class of several. `weights` make rare classes count more in training."""

    kind: ClassVar[str] = "classes"
    primary: ClassVar[str] = "accuracy"

    weights: tuple[float, ...] = ()  # of each class; nothing: all count alike
    balanced: bool = False  # take the weights from the training rows of all clients

    @property
    def waiting(self) -> bool:
        """Whether weights are still to be taken from training rows."""
        return self.balanced and not self.fitted

    def check(self, y: Array, width: int) -> str:
        """Expect a whole number for each row (or place of a sequence)."""
        if self.weights and len(self.weights) != width:
            return f"there are {len(self.weights)} class weights for {width} classes"
        return "" if np.issubdtype(y.dtype, np.integer) else f"labels are {y.dtype}, not classes"

    def fit(self, y: Array, width: int) -> Self:
        """Weigh classes by rows / (classes · rows of the class), as scikit-learn's "balanced"."""
        if not self.balanced:
            return super().fit(y, width)
        counts = np.bincount(y[y >= 0].reshape(-1), minlength=width)
        known = max(1, int((counts > 0).sum()))
        weights = np.where(counts > 0, counts.sum() / (known * np.maximum(counts, 1)), 1.0)
        return dataclasses.replace(self, weights=tuple(map(float, weights)), fitted=True)

    def importance(self, y: Array) -> Array | None:
        """Return the weight of each row's class."""
        if not self.weights:
            return None
        return np.asarray(self.weights, np.float32)[np.maximum(y, 0)]

    def predictions(self, outputs: Array) -> Array:
        """Return the number of the likeliest class."""
        return np.asarray(outputs.argmax(-1))

    def probabilities(self, outputs: Array) -> Array:
        """Return the probability of each class."""
        raised = np.exp(outputs - outputs.max(-1, keepdims=True))
        return np.asarray(raised / raised.sum(-1, keepdims=True))

    def loss(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Cross-entropy, in nats a label."""
        return losses.cross_entropy(outputs, y, weight)

    def score(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Accuracy."""
        return losses.accuracy(outputs, y, weight)

    def distil(
        self, student: Tensor, teacher: Tensor, weight: Tensor, temperature: float | Tensor = 1.0
    ) -> Tensor:
        """Hinton's T²·KL(teacher ‖ student)."""
        return losses.distil(student, teacher, weight, temperature)

    def divergence(self, student: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
        """KL(teacher ‖ student)."""
        return losses.divergence(student, teacher, weight)

    def evidence(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Evidence:
        """Give the probability of the true class, and whether it is the highest."""
        chance = outputs.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1).exp()
        return Evidence(chance, losses.right(outputs, y).to(chance.dtype), weight)

    def soften(self, outputs: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
        """Return the share of each class."""
        return (outputs / temperature).softmax(-1)

    def distil_from(self, student: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        """KL(target ‖ student)."""
        return losses.divergence_from(student, target, weight)

    def mixture(self, outputs: Tensor, log_weight: Tensor) -> Tensor:
        """Return the logarithm of mixed probabilities."""
        return (_beside(log_weight, outputs) + outputs.log_softmax(-1)).logsumexp(0)


@dataclass(frozen=True)
class Labels(Task):
    """Any number of labels for a row, each there or not."""

    kind: ClassVar[str] = "labels"
    primary: ClassVar[str] = "auroc"

    def check(self, y: Array, width: int) -> str:
        """Expect 0 or 1 for each row and label."""
        if y.ndim != 2 or y.shape[1] != width:
            return f"labels have shape {y.shape}, expected [row, {width}]"
        return _first(~np.isin(y, (0, 1)), y, "expected 0 or 1")

    def predictions(self, outputs: Array) -> Array:
        """Return whether each label is likelier there than not."""
        return np.asarray(outputs > 0)

    def probabilities(self, outputs: Array) -> Array:
        """Return the probability of each label."""
        return _sigmoid(outputs)

    def loss(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Binary cross-entropy, mean over labels."""
        each = functional.softplus(outputs) - y * outputs
        return losses.weighted_mean(each.mean(-1), weight)

    def score(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Share of labels told rightly."""
        good = ((outputs > 0) == (y > 0.5)) & ~outputs.isnan()
        return losses.weighted_mean(good.to(weight.dtype).mean(-1), weight)

    def distil(
        self, student: Tensor, teacher: Tensor, weight: Tensor, temperature: float | Tensor = 1.0
    ) -> Tensor:
        """T²·KL of each label's two shares, mean over labels."""
        target = self.soften(teacher.detach(), temperature)
        return temperature**2 * self.distil_from(student / temperature, target, weight)

    def soften(self, outputs: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
        """Return the probability of each label."""
        return (outputs / temperature).sigmoid()

    def distil_from(self, student: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        """KL of each label's two shares, mean over labels."""
        return losses.weighted_mean(losses.binary_divergence(student, target).mean(-1), weight)

    def evidence(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Evidence:
        """Give the probability of the truth about each label; all of a row count as one."""
        told = torch.where(y > 0.5, outputs, -outputs)
        right = (told > 0).to(outputs.dtype)
        count = weight.unsqueeze(-1).expand(outputs.shape) / outputs.shape[-1]
        return Evidence(told.sigmoid(), right, count)

    def mixture(self, outputs: Tensor, log_weight: Tensor) -> Tensor:
        """Return the logits of mixed probabilities, label by label."""
        beside = _beside(log_weight, outputs)
        there = (beside + functional.logsigmoid(outputs)).logsumexp(0)
        absent = (beside + functional.logsigmoid(-outputs)).logsumexp(0)
        return there - absent


@dataclass(frozen=True)
class Real(Task):
    """Outputs that are numbers themselves, compared by their squared difference."""

    softens: ClassVar[bool] = False

    def distil(
        self, student: Tensor, teacher: Tensor, weight: Tensor, temperature: float | Tensor = 1.0
    ) -> Tensor:
        """Squared error; a temperature has no meaning here and is not used."""
        return self.distil_from(student, teacher, weight)

    def soften(self, outputs: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
        """Return the numbers themselves."""
        return outputs

    def distil_from(self, student: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        """Squared error."""
        return losses.weighted_mean((student - target.detach()).square().sum(-1), weight)

    def mixture(self, outputs: Tensor, log_weight: Tensor) -> Tensor:
        """Return the mean of the outputs."""
        return (_beside(log_weight.exp(), outputs) * outputs).sum(0)


@dataclass(frozen=True)
class Number(Real):
    """A number, learnt in units of the training rows' mean and deviation."""

    kind: ClassVar[str] = "number"
    primary: ClassVar[str] = "rmse"
    waits: ClassVar[tuple[str, ...]] = ("mean and deviation",)

    shift: float = 0.0  # mean of the training rows of all clients
    scale: float = 1.0  # their deviation
    huber: bool = False  # beyond one deviation the error counts by its size, not its square

    @property
    def title(self) -> str:
        """The task in a few words."""
        return "number, Huber" if self.huber else "number"

    def check(self, y: Array, width: int) -> str:
        """Expect one finite number for each row."""
        if y.ndim != 1 or width != 1:
            return f"numbers have shape {y.shape} and {width} outputs, expected [row] and 1"
        if y.dtype.kind != "f":
            return f"numbers are {y.dtype}, expected floats"
        return _first(~np.isfinite(y), y, "expected a finite number")

    def fit(self, y: Array, width: int) -> Self:
        """Take mean and deviation; numbers that are all equal are only shifted."""
        found = y.astype(np.float64)
        if not len(found):
            raise DataError("there is no training row to take the mean and deviation of y from")
        return self.scaled(float(found.mean()), float(found.std()))

    def scaled(self, mean: float, deviation: float) -> Self:
        """Use a mean and a deviation known from elsewhere."""
        scale = deviation if deviation > 0 and math.isfinite(deviation) else 1.0
        return dataclasses.replace(self, shift=mean, scale=scale, fitted=True)

    def encode(self, y: Array) -> Array:
        """Shift and scale."""
        return ((y.astype(np.float64) - self.shift) / self.scale).astype(np.float32)

    def predictions(self, outputs: Array) -> Array:
        """Return numbers in the user's unit."""
        return np.asarray(outputs[..., 0].astype(np.float64) * self.scale + self.shift)

    def loss(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Squared error, in units of the training rows' variance."""
        off = outputs.squeeze(-1) - y
        if self.huber:  # with the derivative of the square at one deviation
            far = off.abs()
            return losses.weighted_mean(torch.where(far < 1, off.square(), 2 * far - 1), weight)
        return losses.weighted_mean(off.square(), weight)

    def score(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """1 − squared error: 1 is perfect, 0 as good as the mean of all clients' training rows."""
        return 1 - losses.weighted_mean((outputs.squeeze(-1) - y).square(), weight)

    def evidence(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Evidence:
        """Give squared errors; right is 1 − a quarter of them, 0 beyond two deviations."""
        off = (outputs.squeeze(-1) - y).square()
        return Evidence(off, 1 - off.clamp(max=4) / 4, weight)

    def relative(self, chance: Tensor, count: Tensor) -> Tensor:
        """Take errors as normal, with the variance of the best model's."""
        mean = (chance * count.unsqueeze(-1)).sum(0) / count.sum().clamp(min=1e-12)
        known = torch.where(mean.isfinite(), mean, float("inf")).min()
        spread = 2 * torch.where(known.isfinite(), known, 1.0).clamp(min=1e-6)
        least = torch.where(chance.isfinite(), chance, float("inf")).amin(1, keepdim=True)
        return (-(chance - least.nan_to_num(posinf=0.0)) / spread).exp()

    def surprise(self, lost: Tensor, count: Tensor) -> Tensor:
        """Take errors as normal, of the variance that fits best."""
        rows = count.clamp(min=1)
        return rows / 2 * (lost / rows).clamp(min=1e-12).log()


def _beside(values: Tensor, outputs: Tensor) -> Tensor:
    """Let values for each model stand beside its outputs."""
    if values.dim() > 1:
        return values
    return values.reshape(-1, *[1] * (outputs.dim() - 1))


def _sigmoid(outputs: Array) -> Array:
    return np.asarray(np.exp(-np.logaddexp(0, -outputs.astype(np.float64))))


def _first(wrong: Array, y: Array, expected: str) -> str:
    """Name the first wrong label."""
    places = np.argwhere(wrong)
    if not len(places):
        return ""
    return f"row {int(places[0][0])} has {y[tuple(places[0])]}, {expected}"
