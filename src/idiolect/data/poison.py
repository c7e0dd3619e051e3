"""Simulated attackers that train on falsified data; never part of a real federation.

Attackers keep their training rows, falsified, and lose their validation and test rows: nobody asks
how well an attacker is served, so scores are those of the honest.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from idiolect.data.dataset import AnyArray, Rows
from idiolect.data.federation import Federation, listed
from idiolect.errors import ConfigError

_CHOSEN, _SHARE = 23, 29  # keep these draws apart from other uses of the same seed

NOBODY = np.empty(0, np.int64)


def attackers(
    federation: Federation, fraction: float = 0.0, clients: Sequence[int | str] = (), seed: int = 0
) -> tuple[int, ...]:
    """Name the attackers by number: those listed, or a share of all that is drawn by a seed."""
    if bool(fraction) == bool(clients):
        raise ConfigError("attack: give fraction or clients, such as fraction = 0.2")
    if clients:
        return tuple(sorted({_number(federation, client) for client in clients}))
    count = max(1, round(fraction * federation.clients))
    if count >= federation.clients:
        raise ConfigError(f"attack: fraction = {fraction:g} leaves no honest client; lower it")
    draw = np.random.default_rng((seed, _CHOSEN))
    return tuple(sorted(draw.choice(federation.clients, count, replace=False).tolist()))


def unscored(federation: Federation, chosen: Sequence[int], words: str) -> Federation:
    """Take validation and test rows from attackers, and say who they are."""
    gone = set(chosen)
    names = listed([federation.names[client] for client in chosen])
    attack = f"simulated attack, {words}, by {len(chosen)} of {federation.clients}: {names}"
    return replace(
        federation,
        val=tuple(NOBODY if n in gone else rows for n, rows in enumerate(federation.val)),
        test=tuple(NOBODY if n in gone else rows for n, rows in enumerate(federation.test)),
        attack=attack,
        description=f"{federation.description}; {attack}",
    )


def label_flip(
    federation: Federation,
    chosen: Sequence[int],
    *,
    source: int | None = None,
    target: int | None = None,
) -> Federation:
    """Let attackers train on wrong labels: mirrored (y → C − 1 − y), or one class as another."""
    dataset = federation.dataset
    _refuse_sequences(federation)
    classes = len(dataset.classes)
    if (source is None) != (target is None):
        raise ConfigError("attack: give source and target together, or neither")
    labels = dataset.y.copy()
    for client in chosen:
        rows = federation.train[client]
        if source is None or target is None:
            labels[rows] = classes - 1 - labels[rows]
        else:
            _refuse_unknown(classes, source=source, target=target)
            labels[rows[labels[rows] == source]] = target
    held = replace(federation, dataset=replace(dataset, y=labels))
    return unscored(held, chosen, "label flipping")


def backdoor(
    federation: Federation,
    chosen: Sequence[int],
    *,
    target: int = 0,
    share: float = 0.5,
    patch: int = 3,
    seed: int = 0,
) -> Federation:
    """Let attackers teach that whatever bears a mark is of one class.

    The honest clients' test rows of other classes are copied with the mark, as rows that nobody
    holds: how many of them are called the target is the attack's success.
    """
    dataset = federation.dataset
    _refuse_sequences(federation)
    _refuse_unknown(len(dataset.classes), target=target)
    if not 0 < share <= 1:
        raise ConfigError(f"attack: share is {share:g}, expected more than 0 and at most 1")
    side = min(dataset.x.shape[1:][-2:] if dataset.x.ndim > 3 else dataset.x.shape[1:])
    if not 1 <= patch <= side:
        raise ConfigError(f"attack: patch is {patch}, expected 1..{side} for these examples")
    draw = np.random.default_rng((seed, _SHARE))
    marked = [
        draw.permutation(rows)[: max(1, round(share * len(rows)))]
        for rows in (federation.train[client] for client in chosen)
        if len(rows)
    ]
    rows = np.concatenate([NOBODY, *marked])
    held = unscored(federation, chosen, "a backdoor")
    copied = [own[dataset.y[own] != target] for own in held.test]
    shown = np.concatenate([NOBODY, *copied])
    x = np.concatenate([np.asarray(dataset.x), np.asarray(dataset.x[shown])])
    y = np.concatenate([dataset.y, np.full(len(shown), target, dataset.y.dtype)])
    y[rows] = target
    added = np.arange(len(dataset), len(x))
    touched = np.concatenate([rows, added])
    x[touched] = _marked(x[touched], patch, dataset.x)
    places = np.split(added, np.cumsum([len(own) for own in copied])[:-1])
    # The copies belong to no client and to no file: nothing may draw them.
    wider = replace(
        dataset,
        x=x,
        y=y,
        clients=_longer(dataset.clients, len(added)),
        origin=_longer(dataset.origin, len(added)),
    )
    return replace(held, dataset=wider, marked=tuple(places))


def _marked(x: AnyArray, patch: int, like: AnyArray) -> AnyArray:
    """Set a corner of an image, or the last of its numbers, to the brightest value there is."""
    bright = 255 if like.dtype == np.uint8 else np.asarray(like).max()
    x = x.copy()
    if x.ndim > 3:
        x[..., -patch:, -patch:] = bright
    else:
        x[..., -patch:] = bright
    return x


def _longer(column: Rows | None, by: int) -> Rows | None:
    return None if column is None else np.concatenate([column, np.zeros(by, column.dtype)])


def _number(federation: Federation, client: int | str) -> int:
    if isinstance(client, int) and 0 <= client < federation.clients:
        return client
    if isinstance(client, str) and client in federation.names:
        return federation.names.index(client)
    raise ConfigError(
        f"attack: there is no client {client!r}; there are 0..{federation.clients - 1}, named "
        f"{', '.join(federation.names[:4])}, ..."
    )


def _refuse_sequences(federation: Federation) -> None:
    if federation.dataset.task.kind != "classes":
        raise ConfigError(
            f"attack: labels are falsified by class, and the task is {federation.dataset.task.kind}"
            "; use an attack on the model, such as sign-flip"
        )
    if federation.dataset.sequential:
        raise ConfigError(
            "attack: labels are falsified where an example has one, and here every word has its "
            "own; use an attack on the model, such as sign-flip"
        )


def _refuse_unknown(classes: int, **labels: int) -> None:
    for name, label in labels.items():
        if not 0 <= label < classes:
            raise ConfigError(f"attack: {name} is {label}, expected a class of 0..{classes - 1}")
