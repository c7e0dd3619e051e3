"""Reference rows: what a client would use without a federation, from scikit-learn.

A reference is trained on each client's own training rows, and scored as every method is. Nothing
is chosen by test rows; settings are scikit-learn's defaults, and the same for all clients.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from idiolect.core.metrics import CLASSES, LABELS, NUMBER
from idiolect.data.dataset import Rows
from idiolect.data.federation import Federation
from idiolect.engine.outcome import Members, Outcome, Scores, Speed, Wire
from idiolect.engine.row_metrics import ClientOutputs, MetricChoice, measure
from idiolect.errors import ConfigError, IdiolectError

_LEAST = 1e-6  # probability of a class that a client's training rows do not show

Array = NDArray[Any]


class Reference(NamedTuple):
    """A kind of model that each client could train alone."""

    title: str
    classifier: Callable[[], Any]
    regressor: Callable[[], Any]


def _boosting(kind: str) -> Callable[[], Any]:
    def make() -> Any:
        from sklearn import ensemble

        return getattr(ensemble, f"HistGradientBoosting{kind}")(random_state=0)

    return make


def _logistic() -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(max_iter=1000)


def _ridge() -> Any:
    from sklearn.linear_model import Ridge

    return Ridge()


REFERENCES = {
    "boosting": Reference("Boosted trees, alone", _boosting("Classifier"), _boosting("Regressor")),
    "logistic": Reference("Linear model, alone", _logistic, _ridge),
}


def refuse_references(names: Sequence[str], federation: Federation) -> None:
    """Refuse references that cannot be trained on this data, before anything is trained."""
    dataset = federation.dataset
    for name in names:
        if name not in REFERENCES:
            raise ConfigError(
                f"evaluate.references has {name!r}, expected some of {', '.join(REFERENCES)}"
            )
    if not names:
        return
    if dataset.task.kind not in (CLASSES, LABELS, NUMBER) or dataset.x.ndim != 2:
        raise ConfigError(
            "evaluate.references are for tables with classes, labels or numbers to predict; "
            f"'{dataset.name}' has examples of shape {dataset.x.shape[1:]} and the task "
            f"{dataset.task.kind}: leave them out"
        )
    try:
        import sklearn  # noqa: F401
    except ImportError:
        raise IdiolectError(
            "evaluate.references needs scikit-learn; install idiolect[boosting], or leave them out"
        ) from None


def train_reference(
    name: str, federations: Mapping[int, Federation], choice: MetricChoice
) -> Outcome:
    """Train and score a reference for every client under every seed."""
    reference = REFERENCES[name]
    began = time.perf_counter()
    found = [_seed_scores(reference, own, choice) for own in federations.values()]
    spent = time.perf_counter() - began
    final = {key: np.stack([one.scores[key] for one in found]) for key in found[0].scores}
    return Outcome(
        label=reference.title,
        about={
            "method": name,
            "title": reference.title,
            "paper": "",
            "settings": {"library": "scikit-learn", "settings": "its defaults"},
            "reference": True,
            "clients": next(iter(federations.values())).clients,
        },
        members=tuple(
            Members(
                seed,
                own.names,
                tuple(map(len, own.train)),
                tuple(map(len, own.test)),
                own.description,
            )
            for seed, own in federations.items()
        ),
        rounds=0,
        evaluated=(),
        curves={},
        final=final,
        facts={},
        wire=tuple(Wire() for _ in federations),
        speed=Speed(0, spent, 0.0),
        metric=choice.name,
        precision=choice.precision,
    )


class _SeedScores(NamedTuple):
    scores: Scores


def _seed_scores(reference: Reference, federation: Federation, choice: MetricChoice) -> _SeedScores:
    """Train and score one seed's clients; arrays are [client]."""
    marks = []
    for client in range(federation.clients):
        parts = federation.train[client], federation.val[client], federation.test[client]
        train, val, test = parts
        y = federation.dataset.y
        said = _outputs(reference, federation, train, {"val": val, "test": test})
        own = ClientOutputs(
            federation.dataset.task,
            {"personal": said["test"]},
            {"personal": said["val"]},
            y[test],
            y[val],
            y[train],
        )
        marks.append(measure(own, choice, detail=True, grouped=True).marks)
    keys = [(model, name) for model in marks[0] for name in marks[0][model]]
    return _SeedScores(
        {f"{model}/{name}": np.stack([one[model][name] for one in marks]) for model, name in keys}
    )


def _outputs(
    reference: Reference, federation: Federation, train: Rows, wanted: Mapping[str, Rows]
) -> dict[str, Array]:
    """Return outputs as a network's: logits of classes or labels, or scaled numbers."""
    dataset = federation.dataset
    x, y = dataset.decoded(train), dataset.y[train]
    examples = {part: dataset.decoded(rows) for part, rows in wanted.items()}
    width = len(dataset.classes)
    if dataset.task.kind == NUMBER:
        fitted = reference.regressor().fit(x, dataset.task.encode(y)) if len(train) else None
        return {
            part: (fitted.predict(own) if fitted and len(own) else np.zeros(len(own)))[:, None]
            for part, own in examples.items()
        }
    if dataset.task.kind == LABELS:
        columns = [_chances(reference, x, y[:, n] > 0, examples, 2) for n in range(width)]
        return {
            part: np.stack([np.log(one[part][:, 1] / one[part][:, 0]) for one in columns], 1)
            for part in examples
        }
    return {part: np.log(own) for part, own in _chances(reference, x, y, examples, width).items()}


def _chances(
    reference: Reference, x: Array, y: Array, examples: Mapping[str, Array], width: int
) -> dict[str, Array]:
    """Return probabilities [row, class]; where training rows show one class it is certain."""
    seen = np.unique(y).astype(np.int64)
    fitted = reference.classifier().fit(x, y) if len(seen) > 1 else None
    found = {}
    for part, own in examples.items():
        chances = np.full((len(own), width), _LEAST)
        if fitted is not None and len(own):
            chances[:, fitted.classes_.astype(np.int64)] = fitted.predict_proba(own)
        elif len(seen):
            chances[:, seen[0]] = 1.0
        chances = chances.clip(_LEAST, 1.0)
        found[part] = chances / chances.sum(1, keepdims=True)
    return found
