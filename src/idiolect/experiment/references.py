"""Reference rows: what a client would use without a federation, from scikit-learn.

A reference is trained on each client's own training rows, and scored as every method is. Nothing
is chosen by test rows; settings are scikit-learn's defaults, and the same for all clients.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from idiolect.core import metrics
from idiolect.core.metrics import CLASSES, LABELS, NUMBER, Answers
from idiolect.data.dataset import Rows
from idiolect.data.federation import Federation
from idiolect.engine.outcome import Members, Outcome, Scores, Speed, Wire
from idiolect.engine.row_metrics import NATIVE, ClientOutputs, MetricChoice, measure, pooled
from idiolect.errors import ConfigError, IdiolectError

_LEAST = 1e-6  # probability of a class that a client's training rows do not show
_MOST = 200  # models that are trained without being asked for

MODEL = "personal"

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


def references_of(
    asked: Sequence[str] | None, federation: Federation, seeds: int
) -> tuple[str, ...]:
    """Return which references are trained: those asked for, or all where a table is small.

    What cannot be trained on this data is refused, or left out where nobody asked for it.
    """
    dataset = federation.dataset
    unknown = [name for name in asked or () if name not in REFERENCES]
    if unknown:
        raise ConfigError(
            f"evaluate.references has {unknown[0]!r}, expected some of {', '.join(REFERENCES)}"
        )
    if asked is not None and not asked:
        return ()
    table = bool(dataset.features) and dataset.x.ndim == 2
    fits = table and dataset.task.kind in (CLASSES, LABELS, NUMBER)
    installed = find_spec("sklearn") is not None
    if asked is None:
        few = federation.clients * seeds <= _MOST
        return tuple(REFERENCES) if fits and installed and few else ()
    if not fits:
        raise ConfigError(
            "evaluate.references are for tables with classes, labels or numbers to predict; "
            f"'{dataset.name}' has examples of shape {dataset.x.shape[1:]} and the task "
            f"{dataset.task.kind}: leave them out"
        )
    if not installed:
        raise IdiolectError(
            "evaluate.references needs scikit-learn: pip install 'idiolect[boosting]', or leave "
            "them out"
        )
    return tuple(asked)


def train_reference(
    name: str, federations: Mapping[int, Federation], choice: MetricChoice
) -> Outcome:
    """Train and score a reference for every client under every seed."""
    reference = REFERENCES[name]
    from threadpoolctl import threadpool_limits

    began = time.perf_counter()
    with threadpool_limits(1):  # threads that wait for each other cost more than small tables do
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
        task=choice.kind,
        precision=choice.precision,
        pooled=tuple(one.pooled for one in found),
    )


class _SeedScores(NamedTuple):
    scores: Scores  # [client]
    pooled: dict[str, Any]  # by model: all clients' rows together


def _seed_scores(reference: Reference, federation: Federation, choice: MetricChoice) -> _SeedScores:
    """Train and score one seed's clients."""
    y, task = federation.dataset.y, federation.dataset.task
    marks: list[dict[str, dict[str, Any]]] = []
    answers: dict[str, list[tuple[int, Answers]]] = {}
    for client in range(federation.clients):
        train, val, test = (
            part[client] for part in (federation.train, federation.val, federation.test)
        )
        said = _outputs(reference, federation, train, {"val": val, "test": test})
        own = ClientOutputs(
            task, {MODEL: said["test"]}, {MODEL: said["val"]}, y[test], y[val], y[train]
        )
        found = measure(own, choice, detail=True, grouped=True)
        for name, one in found.answers.items():
            answers.setdefault(name, []).append((client, one))
        marks.append(
            {**found.marks, MODEL: {**_native(found.answers[MODEL]), **found.marks[MODEL]}}
        )
    keys = [(model, name) for model in marks[0] for name in marks[0][model]]
    scores = {
        f"{model}/{name}": np.stack([one[model][name] for one in marks]) for model, name in keys
    }
    return _SeedScores(scores, pooled(answers, choice))


def _native(own: Answers) -> dict[str, float]:
    """Take the metrics that the engine adds up itself where it trains."""
    loss = {NUMBER: "rmse"}.get(own.kind, "log_loss")
    apart = ("loss", "perplexity")  # the latter is of next words, which no reference predicts
    names = {name: name for name in NATIVE[own.kind] if name not in apart} | {"loss": loss}
    return {name: metrics.metric(used, own.kind)(own) for name, used in names.items()}


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
