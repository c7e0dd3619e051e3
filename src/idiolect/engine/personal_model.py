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
from idiolect.core.network import Network
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
    itself and returns logits [example, class]. `classes` names the outputs, `features` a table's
    columns. `predict` takes files, tables and images too, and gives names and probabilities.
    """

    shift: Tensor
    inverse: Tensor

    def __init__(
        self,
        method: Method,
        modules: Mapping[str, nn.Module],
        deployed: Tree,
        preprocessing: Preprocessing,
    ) -> None:
        """`modules` are the client's networks: `main`, and perhaps `auxiliary`."""
        super().__init__()
        self.preprocessing = preprocessing
        self.classes = preprocessing.classes
        self.features = preprocessing.features
        self._method = method
        self._networks = {role: Network(own, stacked=False) for role, own in modules.items()}
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
        """Return logits [example, class] of examples as they were read in."""
        model = tree.like(self._form, self.leaves)
        return predict_alone(self._method, self._networks, model, self._decoded(x))

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
                logits = self(torch.from_numpy(x).to(self.shift.device)).cpu().numpy()
            if rows.y is not None:
                y = np.array(rows.y[start : start + _ROWS])
                right += int((logits.argmax(-1) == y).sum())
                seen += int((y >= 0).sum())
            if self.preprocessing.sequential:
                last = np.maximum((x != PAD).sum(1) - 1, 0)
                logits = logits[np.arange(len(x)), last]
            outputs.append(torch.from_numpy(logits).softmax(1).numpy())
        return Predictions(
            rows.names,
            rows.column,
            self.classes,
            np.concatenate(outputs),
            right / seen if seen else None,
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
    """A class for every row and its probability; the share that is right where that is known."""

    names: tuple[str, ...]  # of the rows
    column: str  # what the names are: row or file
    classes: tuple[str, ...]
    probabilities: np.ndarray  # [row, class]
    accuracy: float | None = None

    def __len__(self) -> int:
        return len(self.names)

    @property
    def predicted(self) -> list[str]:
        """The most probable class of every row."""
        return [self.classes[place] for place in self.probabilities.argmax(1)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.predicted)

    def table(self, every: bool | None = None) -> dict[str, list[Any]]:
        """Return columns: row (or file), predicted, probability; with `every` each class's too.

        By default each class's where there are few.
        """
        best = self.probabilities.max(1)
        found: dict[str, list[Any]] = {
            self.column: list(self.names),
            "predicted": self.predicted,
            "probability": [round(float(share), 6) for share in best],
        }
        if every or (every is None and len(self.classes) <= _FEW):
            for place, name in enumerate(self.classes):
                key = name if name not in found else f"probability of {name}"
                found[key] = [round(float(share), 6) for share in self.probabilities[:, place]]
        return found

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
            writer.writerow(f"{v:.6f}" if isinstance(v, float) else v for v in row)
        if path is not None:
            Path(path).write_text(out.getvalue(), encoding="utf-8")
        return out.getvalue()

    def __repr__(self) -> str:
        head = f"Predictions of {len(self)} rows"
        if self.accuracy is not None:
            head += f", {self.accuracy:.1%} of the labels given are met"
        names, predicted = self.names[:10], self.predicted[:10]
        shares = self.probabilities.max(1)[:10]
        lines = [
            f"  {name}: {one} ({share:.1%})"
            for name, one, share in zip(names, predicted, shares, strict=True)
        ]
        more = [f"  ... {len(self) - 10} more"] * (len(self) > 10)
        return "\n".join([head, *lines, *more])
