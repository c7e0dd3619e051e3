"""Simulated attacks in an experiment: who attacks, on data or on reports, and what is measured."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from pydantic import create_model

from idiolect.aggregation import MODEL_ATTACKS, Attack, Attacked
from idiolect.aggregation.attacks import Replace
from idiolect.core.method import Method
from idiolect.data import Federation
from idiolect.data.poison import attackers, backdoor, label_flip, unscored
from idiolect.errors import ConfigError
from idiolect.experiment.schema import AttackTable
from idiolect.experiment.suggestions import meant
from idiolect.experiment.validation import checked, signature_model

# Attacks on data may enlarge the updates as well; 0 enlarges until the mean is the attackers'.
DATA_ATTACKS: dict[str, tuple[Callable[..., Federation], float]] = {
    "label-flip": (label_flip, 1.0),
    "backdoor": (backdoor, 1.0),
    "replace": (label_flip, 0.0),  # the whole model, by one that learnt wrong labels
}
REPORT_ATTACKS = {name: kind for name, kind in MODEL_ATTACKS.items() if name != "replace"}
ATTACKS = (*DATA_ATTACKS, *REPORT_ATTACKS)
_TAKEN = ("federation", "chosen", "seed")

Wrap = Callable[[Method], Method]


def complete(table: AttackTable, where: str) -> AttackTable:
    """Check an attack and write its options out."""
    if table.name not in ATTACKS:
        raise ConfigError(f"{where}: attack.name: unknown attack {meant(table.name, ATTACKS)}")
    if bool(table.fraction) == bool(table.clients):
        raise ConfigError(f"{where}: attack: give fraction or clients, such as fraction = 0.2")
    given = dict(table.options)
    if table.name in REPORT_ATTACKS:
        form = signature_model(REPORT_ATTACKS[table.name], _TAKEN)
    else:
        function, scale = DATA_ATTACKS[table.name]
        form = signature_model(function, _TAKEN)
        form = create_model("Options", __base__=form, scale=(float, scale))
    for key in given:
        if key not in form.model_fields:
            names = [*form.model_fields, "name", "fraction", "clients", "seed"]
            raise ConfigError(f"{where}: unknown key attack.{key}: {meant(key, names)}")
    options = checked(form, given, where, ["attack"])
    written = {name: getattr(options, name) for name in form.model_fields}
    return AttackTable(
        name=table.name,
        fraction=table.fraction,
        clients=table.clients,
        seed=table.seed,
        **{key: value for key, value in written.items() if value is not None},
    )


def attacked(
    table: AttackTable | None, held: Sequence[Federation]
) -> tuple[tuple[Federation, ...], Wrap]:
    """Return the federations as attackers make them, and what makes a method an attacked one."""
    if table is None:
        return tuple(held), lambda method: method
    chosen = attackers(held[0], table.fraction, table.clients, table.seed)
    options = dict(table.options)
    lie: Attack | None = None
    if table.name in REPORT_ATTACKS:
        lie = REPORT_ATTACKS[table.name](**options)
        change = partial(unscored, words=lie.title)
    else:
        scale = options.pop("scale")
        lie = None if scale == 1 else Replace(scale=scale)
        extra = {"seed": table.seed} if table.name == "backdoor" else {}
        change = partial(DATA_ATTACKS[table.name][0], **options, **extra)
    made: dict[int, Federation] = {}
    for one in held:  # runs on one federation stay so: its examples are held once
        if id(one) not in made:
            made[id(one)] = change(one, chosen)
    return tuple(made[id(one)] for one in held), lambda method: _wrapped(method, lie, chosen)


def _wrapped(method: Method, attack: Attack | None, chosen: tuple[int, ...]) -> Method:
    """A method that sends nothing cannot be attacked, and one on pooled data has no attackers."""
    if attack is None or method.pooled or method.aggregates == "nothing":
        return method
    return Attacked(method, attack, attackers=chosen)


def with_common(federation: Federation, wanted: bool | int) -> Federation:
    """Give every client the source's test file as a common test set; nobody may hold rows of it.

    A number takes so many of its rows, the same in every run.
    """
    dataset, origin = federation.dataset, federation.dataset.origin
    if origin is None or not (origin == 1).any() or dataset.sequential:
        raise ConfigError(
            f"data.common_test needs a test file with one label an example, and {dataset.name} "
            "has none; leave it out"
        )
    parts = (federation.train, federation.val, federation.test)
    if any((origin[rows] == 1).any() for part in parts for rows in part):
        raise ConfigError(
            "data.common_test: clients hold rows of the test file themselves; set data.pool = "
            "'train', so that the common test set is nobody's"
        )
    rows = dataset.pool("test")
    if wanted is not True:
        if wanted > len(rows):
            raise ConfigError(
                f"data.common_test is {wanted}, but the test file of {dataset.name} has "
                f"{len(rows)} rows; give fewer, or true for all"
            )
        rows = np.sort(np.random.default_rng(0).permutation(rows)[:wanted])
    return dataclasses.replace(federation, common=rows)
