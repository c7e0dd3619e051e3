"""One client's trained model as a module: examples as they were read in, answers with names."""

import copy
import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from idiolect.core import batchnorm, tree
from idiolect.core.client import Local
from idiolect.core.method import Method
from idiolect.core.metrics import answers, metric
from idiolect.core.network import Network
from idiolect.core.survival import Discrete
from idiolect.core.task import Number, Task
from idiolect.core.tree import Tree
from idiolect.data.preprocessing import NewRows, Preprocessing
from idiolect.data.text import PAD
from idiolect.engine.batch_plan import BatchPlanner
from idiolect.errors import ConfigError, MethodError

_ROWS = 512  # examples that are predicted at once
_FEW = 20  # classes: a table has a column for each


def predict_alone(
    method: Method, networks: Mapping[str, Network], model: Tree, x: Tensor
) -> Tensor:
    """Return the outputs of one client's deployed model on decoded examples."""
    nothing = torch.zeros((), dtype=torch.int64, device=x.device)
    one = torch.ones((), device=x.device)
    plans = BatchPlanner({}, x.device)  # a prediction asks for no batches
    local = Local(networks, plans, nothing, one, one.new_zeros(()), stacked=False)
    return method.predict(model, x, local)


class PersonalModel(nn.Module):
    """A client's own model, whatever its method deploys: one network or a mixture of several.

    It takes examples as they were read in (pixels from 0 to 255, a table's numbers), scales them
    itself and returns outputs [example, output]: a logit for each class, numbers in their own unit.
    `classes` names the outputs, `features` a table's columns. `predict` takes files, tables and
    images too, and gives names and probabilities.
    """

    shift: Tensor
    inverse: Tensor

    def __init__(
        self,
        method: Method,
        modules: Mapping[str, nn.Module],
        deployed: Tree,
        preprocessing: Preprocessing,
        threshold: float | None = None,
    ) -> None:
        """`modules` are the client's networks: `main`, and perhaps `auxiliary`.

        `threshold` is the probability from which a row is called positive, for two classes and for
        labels; without it the likelier answer is taken.
        """
        super().__init__()
        self.threshold = threshold
        self.preprocessing = preprocessing
        self.classes = preprocessing.classes
        self.features = preprocessing.features
        self._method = method
        self.task = preprocessing.task
        self._networks = {
            role: Network(own, stacked=False, task=self.task) for role, own in modules.items()
        }
        self._networks.setdefault("auxiliary", self._networks["main"])
        self._modules_made = dict(modules)  # no submodules: the method says how they are used
        self._form = tree.map(lambda leaf: leaf.new_empty(0), deployed)
        self._names = {name: f"leaf_{n}" for n, name in enumerate(tree.named(deployed))}
        for name, leaf in tree.named(deployed).items():
            self.register_buffer(self._names[name], leaf.detach().clone().contiguous())
        self._decodes = preprocessing.decodes
        self.register_buffer("shift", torch.from_numpy(np.array(preprocessing.shift)))
        inverse = 1 / torch.from_numpy(np.array(preprocessing.scale))
        self.register_buffer("inverse", inverse)
        self.eval()
        blank = torch.zeros((2, *preprocessing.shape), dtype=getattr(torch, preprocessing.dtype))
        for network in self._networks.values():
            network.find_head(self._decoded(blank))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for examples as they were read in."""
        model = tree.like(self._form, self.leaves)
        outputs = predict_alone(self._method, self._networks, model, self._decoded(x))
        if isinstance(self.task, Number):  # learnt in units of the training rows' deviation
            outputs = outputs * self.task.scale + self.task.shift
        return outputs

    def _decoded(self, x: Tensor) -> Tensor:
        return (x.to(self.shift.dtype) - self.shift) * self.inverse if self._decodes else x

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The tensors that the method deploys, by name."""
        return {name: getattr(self, place) for name, place in self._names.items()}

    @property
    def network(self) -> nn.Module:
        """The bare network, for examples that are scaled already; of a mixture there is none."""
        return fill(copy.deepcopy(self._modules_made["main"]), self.leaves)

    def predict(self, given: Any, options: Mapping[str, Any] | None = None) -> "Predictions":
        """Predict a file, a folder of images, a DataFrame, an array, texts or images.

        Labels are not needed; where there are some, it is also said how often they are met.
        """
        return self.predict_rows(self.preprocessing.rows(given, options))

    def predict_rows(self, rows: NewRows) -> "Predictions":
        """Predict rows that were read; a model of the next word predicts the one after the last."""
        outputs, right, seen = [], 0, 0
        for start in range(0, len(rows.x), _ROWS):
            x = np.array(rows.x[start : start + _ROWS])
            with torch.no_grad():
                found = self(torch.from_numpy(x).to(self.shift.device)).cpu().numpy()
            if rows.y is not None and self.task.kind == "classes":
                y = np.array(rows.y[start : start + _ROWS])
                right += int((_chosen(found, self.threshold) == y).sum())
                seen += int((y >= 0).sum())
            if self.preprocessing.sequential:
                last = np.maximum((x != PAD).sum(1) - 1, 0)
                found = found[np.arange(len(x)), last]
            outputs.append(found)
        joined = np.concatenate(outputs)
        score = right / seen if seen else None
        if rows.y is not None and self.task.kind != "classes":
            score = metric("", self.task.kind)(answers(self.task.kind, joined, rows.y))
        return Predictions(
            rows.names,
            rows.column,
            self.classes,
            self.task,
            joined,
            score,
            self.threshold,
            rows.remarks,
        )

    def _apply(self, fn: Any, recurse: bool = True) -> "PersonalModel":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for network in self._networks.values():
            network.to(self.shift.device)  # what it holds beside its parameters
        return self


def fill(module: nn.Module, leaves: Mapping[str, Tensor]) -> nn.Module:
    """Load a client's leaves into a network, wherever in the deployed tree its parameters are."""
    wanted = {name: value.shape for name, value in batchnorm.learned(module).items()}
    first = next(iter(wanted))
    prefixes = sorted({name[: -len(first)] for name in leaves if name.endswith(first)})
    for prefix in prefixes:
        found = {name: leaves[prefix + name] for name in wanted if prefix + name in leaves}
        if {name: value.shape for name, value in found.items()} == wanted:
            module.load_state_dict(found, strict=False)
            return module.eval()
    raise MethodError(
        f"the deployed model has leaves {', '.join(list(leaves)[:4])}, ..., which do not fill a "
        f"{type(module).__name__}; use the model itself, or its `leaves`"
    )


@dataclass(frozen=True, eq=False)
class Predictions:
    """What a model says of every row: a class and its probability, labels, a number or a risk."""

    names: tuple[str, ...]  # of the rows
    column: str  # what the names are: row or file
    classes: tuple[str, ...]  # names of the outputs
    task: Task
    outputs: np.ndarray  # [row, output]; numbers in the user's unit
    score: float | None = None  # by the task's first metric, where labels were given
    threshold: float | None = None  # from which a row is called positive
    remarks: tuple[str, ...] = ()  # what is worth knowing about how rows were read

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.predicted)

    @property
    def accuracy(self) -> float | None:
        """The share of the labels given that are met; None without labels, or without classes."""
        return self.score if self.task.kind == "classes" else None

    @property
    def probabilities(self) -> np.ndarray:
        """Probabilities of classes or labels, or of surviving intervals; empty for numbers."""
        found = self.task.probabilities(self.outputs)
        return np.zeros((len(self), 0)) if found is None else found

    @property
    def predicted(self) -> list[Any]:
        """The most probable class of every row, its labels with | between, number, or risk."""
        if self.task.kind == "number":
            return [float(one) for one in self.outputs[:, 0]]
        if self.task.kind == "classes":
            return [self.classes[place] for place in _chosen(self.outputs, self.threshold)]
        if self.task.kind == "labels":
            least = 0.5 if self.threshold is None else self.threshold
            return [
                "|".join(n for n, one in zip(self.classes, row, strict=True) if one >= least)
                for row in self.probabilities
            ]
        return [float(one) for one in self.task.predictions(self.outputs)]

    @property
    def told(self) -> str:
        """How well the labels given are met, in words; nothing without labels."""
        if self.score is None:
            return ""
        own = metric("", self.task.kind)
        said = f"{100 * self.score:.2f} %" if own.percent else own.written(self.score)
        return f"{own.title} on the labels given: {said}"

    def table(self, every: bool | None = None) -> dict[str, list[Any]]:
        """Return columns: row (or file), predicted, probability; with `every` each class's too.

        By default each class's where there are few. Survival has a risk, the higher the sooner.
        """
        word = "risk" if self.task.kind == "survival" else "predicted"
        found: dict[str, list[Any]] = {self.column: list(self.names), word: self.predicted}
        shares = self.probabilities
        if self.task.kind == "classes":
            said = _chosen(self.outputs, self.threshold)
            found["probability"] = [
                round(float(row[n]), 6) for row, n in zip(shares, said, strict=True)
            ]
        few = every is None and len(self.classes) <= _FEW
        if every or few or self.task.kind in ("labels", "survival"):
            for place, name in enumerate(self._shown[: shares.shape[1]]):
                key = name if name not in found else f"probability of {name}"
                found[key] = [round(float(share), 6) for share in shares[:, place]]
        return found

    @property
    def _shown(self) -> list[str]:
        """Names of the columns of probabilities."""
        if isinstance(self.task, Discrete):
            return [f"survives {cut:g}" for cut in self.task.cuts]  # the last has no end
        return list(self.classes)

    def to_pandas(self, every: bool | None = None) -> Any:
        """Return the table as a pandas DataFrame."""
        try:
            import pandas  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            raise ConfigError(
                "to_pandas needs pandas, which is not installed: `pip install pandas`, or use "
                "table() or to_csv()"
            ) from None
        return pandas.DataFrame(self.table(every))

    def to_csv(self, path: str | Path | None = None, every: bool | None = None) -> str:
        """Return the table as CSV; with a path, write it there too."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        held = self.table(every)
        writer.writerow(held)
        for row in zip(*held.values(), strict=True):
            writer.writerow(_cell(value) for value in row)
        if path is not None:
            Path(path).write_text(out.getvalue(), encoding="utf-8")
        return out.getvalue()

    def __repr__(self) -> str:
        told = f"; {self.told}" if self.told else ""
        held = self.table(every=False)
        rows = list(zip(*held.values(), strict=True))[:10]
        lines = ["  " + "  ".join(str(_cell(value)) for value in row) for row in (held, *rows)]
        more = [f"  ... {len(self) - 10} more"] * (len(self) > 10)
        return "\n".join([f"Predictions of {len(self)} rows{told}", *lines, *more])


def _chosen(outputs: np.ndarray, threshold: float | None) -> np.ndarray:
    """Return the class that is said: the likeliest, or of two the second from a threshold on."""
    if threshold is None or outputs.shape[-1] != 2:
        return np.asarray(outputs.argmax(-1))
    odds = outputs[..., 1].astype(np.float64) - outputs[..., 0]
    return np.asarray(1 / (1 + np.exp(-odds)) >= threshold, np.int64)


def _cell(value: Any) -> Any:
    """Write a probability with six digits behind the point, other numbers with seven in all."""
    if not isinstance(value, float):
        return value
    return f"{value:.6f}" if 0 <= value <= 1 else f"{value:.7g}"
