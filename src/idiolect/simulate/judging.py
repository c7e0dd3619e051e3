"""How one client's models are scored: the same function in a simulated block and on a node."""

import torch

from idiolect import losses
from idiolect.data.text import UNK
from idiolect.local import Batch, Local
from idiolect.method import Method, Sent
from idiolect.simulate.engine import ClientFunction
from idiolect.tree import Tree


def marking(
    method: Method,
    *,
    beside: bool = True,
    only_global: bool = False,
    keep: bool = False,
    newcomers: bool = False,
) -> ClientFunction:
    """Make the function that scores a client's models on its exam; it returns marks, facts, model.

    `beside` adds scores on validation data; `only_global` skips `deploy`, which may train; `keep`
    returns the personal model; clients that are `newcomers` adapt instead of deploying.
    """
    settle = method.adapt if newcomers else method.deploy

    def mark(sent: Sent, personal: Tree, local: Local, exam: Local) -> Tree:
        deployed = () if only_global else settle(sent, personal, local)
        models = method.models(sent, deployed)
        if only_global:
            models = {name: model for name, model in models.items() if name == "global"}

        def score(batch: Batch) -> Tree:
            return {
                name: _scores(method.predict(model, batch.x, local), batch)
                for name, model in models.items()
            }

        marks = _completed(exam.mean(score, "exam"))
        if beside:  # what a choice between methods may look at
            for name, seen in _completed(local.mean(score, "val")).items():
                marks[name] |= {f"val_{metric}": value for metric, value in seen.items()}
        facts = {} if only_global else method.facts(deployed)
        return marks, facts, models["personal"] if keep else ()

    return mark


def _scores(logits: torch.Tensor, batch: Batch) -> dict[str, torch.Tensor]:
    scores = {
        "accuracy": losses.accuracy(logits, batch.y, batch.weight),
        "loss": losses.cross_entropy(logits, batch.y, batch.weight),
    }
    if batch.y.dim() == 2:  # words: a network that says <unk> all the time should be found out
        known = torch.where(batch.y == UNK, -1, batch.y)
        scores["accuracy_unk_wrong"] = losses.accuracy(logits, known, batch.weight)
    return scores


def _completed(marks: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
    """Add what is no mean itself: the perplexity of next-word models, exp of the mean loss."""
    return {
        name: {**seen, "perplexity": seen["loss"].exp()} if "accuracy_unk_wrong" in seen else seen
        for name, seen in marks.items()
    }
