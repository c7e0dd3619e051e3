"""From a method's table in an experiment file to the method, with what is wrapped around it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from pydantic import BaseModel, create_model
from torch import nn

from idiolect.aggregation import MODEL_ATTACKS, Attack, Attacked
from idiolect.aggregation.aggregator import Aggregated, Aggregator
from idiolect.aggregation.attacks import Replace
from idiolect.core.method import Method
from idiolect.core.wrap import Wrapper
from idiolect.data import Federation
from idiolect.data.poison import attackers, backdoor, label_flip, unscored
from idiolect.engine.architecture import Architecture, Build, bound
from idiolect.errors import ConfigError
from idiolect.experiment.schema import (
    AttackTable,
    Experiment,
    Labelled,
    MethodTable,
    ModelTable,
    Named,
)
from idiolect.experiment.untrusted import AGGREGATORS, CLOSED, Permissions, import_factory
from idiolect.experiment.validation import (
    key_path,
    signature_model,
    suggest,
    validate,
    with_defaults,
)
from idiolect.methods import METHODS
from idiolect.methods.personalise import Combined
from idiolect.models import MODELS

_COMMON = {spec.name for spec in dataclasses.fields(Wrapper)}
_PARTS = {spec.name for spec in dataclasses.fields(Combined)} - _COMMON - {"combinations"}


def build_method(table: MethodTable) -> Method:
    """Make the method that a checked table describes, from the inside out."""
    parts = _PARTS if table.personalise else set()
    inner = {key: value for key, value in table.settings.items() if key not in parts}
    method: Method = METHODS[table.name](**inner)
    if table.aggregate is not None:
        method = Aggregated(method, build_rule(table.aggregate))
    if table.personalise:
        own = {key: value for key, value in table.settings.items() if key in parts}
        method = Combined(method, combinations=table.combinations, **own)
    return method


def settings_model(table: MethodTable, where: str, place: int) -> type[BaseModel]:
    """Say which settings a table may hold: the method's, and those of the parts around it."""
    own = signature_model(METHODS[table.name], METHODS[table.name].unused)
    if not table.personalise:
        return own
    both = sorted(_PARTS & set(own.model_fields))
    if both:
        raise ConfigError(
            f"{where}: methods[{place}].personalise: {table.name} has a {both[0]} of its own, so "
            "it would mean two things; personalise fedavg instead"
        )
    parts = signature_model(Combined, [*_COMMON, "combinations"])
    return create_model("Options", __base__=(own, parts))


def settings_of(method: Method, form: type[BaseModel]) -> dict[str, Any]:
    """Read the settings of a form off a method and what it is wrapped around."""
    found: dict[str, Any] = {}
    layer: Method | None = method
    while layer is not None:
        for name in form.model_fields:
            if name not in found and hasattr(layer, name):
                found[name] = getattr(layer, name)
        layer = layer.base if isinstance(layer, Wrapper) else None
    return {name: found[name] for name in form.model_fields}


def build_rule(named: Named) -> Aggregator:
    """Make a rule of aggregation."""
    return AGGREGATORS[named.name](**named.options)


def resolve_aggregate(
    given: Experiment, table: MethodTable, where: str, place: int
) -> Named | None:
    """Check a method's rule of aggregation, its own or everyone's, and write its options out."""
    own = table.aggregate is not None
    named = table.aggregate or given.aggregate
    if named is None or (not own and _needs_none(METHODS[table.name])):
        return None
    key = f"methods[{place}].aggregate" if own else "aggregate"
    if named.name not in AGGREGATORS:
        raise ConfigError(f"{where}: {key}.name: unknown rule {suggest(named.name, AGGREGATORS)}")
    # How many are drawn is the experiment's to say.
    options = signature_model(AGGREGATORS[named.name], ("cohort",))
    checked_options = validate(options, named.options, where, key.split("."))
    written: Mapping[str, Any] = {n: getattr(checked_options, n) for n in options.model_fields}
    return Named(name=named.name, **written)


def _needs_none(method: type[Method]) -> bool:
    """Say whether a rule for everyone passes a method by: nobody's report could do harm there."""
    return method.pooled or method.alone


# Simulated attacks in an experiment: who attacks, on data or on reports, and what is measured.


# Attacks on data may enlarge the updates as well; 0 enlarges until the mean is the attackers'.
DATA_ATTACKS: dict[str, tuple[Callable[..., Federation], float]] = {
    "label-flip": (label_flip, 1.0),
    "backdoor": (backdoor, 1.0),
    "replace": (label_flip, 0.0),  # the whole model, by one that learnt wrong labels
}
REPORT_ATTACKS = {name: kind for name, kind in MODEL_ATTACKS.items() if name != "replace"}
ATTACKS = (*DATA_ATTACKS, *REPORT_ATTACKS)
_ATTACK_TAKEN = ("federation", "chosen", "seed")

Wrap = Callable[[Method], Method]


def resolve_attack(table: AttackTable, where: str) -> AttackTable:
    """Check an attack and write its options out."""
    if table.name not in ATTACKS:
        raise ConfigError(f"{where}: attack.name: unknown attack {suggest(table.name, ATTACKS)}")
    if bool(table.fraction) == bool(table.clients):
        raise ConfigError(f"{where}: attack: give fraction or clients, such as fraction = 0.2")
    given = dict(table.options)
    if table.name in REPORT_ATTACKS:
        form = signature_model(REPORT_ATTACKS[table.name], _ATTACK_TAKEN)
    else:
        function, scale = DATA_ATTACKS[table.name]
        form = signature_model(function, _ATTACK_TAKEN)
        form = create_model("Options", __base__=form, scale=(float, scale))
    for key in given:
        if key not in form.model_fields:
            names = [*form.model_fields, "name", "fraction", "clients", "seed"]
            raise ConfigError(f"{where}: unknown key attack.{key}: {suggest(key, names)}")
    options = validate(form, given, where, ["attack"])
    written = {name: getattr(options, name) for name in form.model_fields}
    return AttackTable(
        name=table.name,
        fraction=table.fraction,
        clients=table.clients,
        seed=table.seed,
        **{key: value for key, value in written.items() if value is not None},
    )


def apply_attack(
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
    if attack is None or method.pooled or method.alone:
        return method
    return Attacked(method, attack, attackers=chosen)


def with_common_test(federation: Federation, wanted: bool | int) -> Federation:
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


# Which client runs which network: found by name, completed, and assigned.


_KEYS = ("name", "each", "architectures", "assign", "auxiliary")


def resolve_network(network: ModelTable, where: str, reach: Permissions) -> ModelTable:
    """Check every network and write its options out."""

    def whole(one: Named, *path: str | int) -> dict[str, Any]:
        return _network_options(one.name, one.options, where, reach, ["model", *path])

    auxiliary = network.auxiliary
    if auxiliary is not None:
        auxiliary = Named(name=auxiliary.name, **whole(auxiliary, "auxiliary"))
    several: tuple[Labelled, ...] | None = None
    if network.architectures is not None:
        several = tuple(
            Labelled(name=one.name, label=one.label, **whole(one, "architectures", place))
            for place, one in enumerate(network.architectures)
        )
        _refuse_equal_networks(several, where)
    if network.name is None and network.options:
        key = next(iter(network.options))
        way = "each" if network.each is not None else "architectures"
        hint = "takes networks as they are" if way == "each" else "takes options beside each name"
        raise ConfigError(f"{where}: unknown key model.{key}: `{way}` {hint}")
    for name in network.each or {}:
        _network_options(name, {}, where, reach, ["model", "each"])
    labels = {network.name, *(label_of(one) for one in several or ()), *(network.each or {})}
    assign = None
    if network.assign is not None:
        assign = {
            client: one
            if one.name in labels and not one.options  # one of those listed above
            else Labelled(name=one.name, label=one.label, **whole(one, "assign", client))
            for client, one in network.assign.items()
        }
    own = whole(Named(name=network.name, **network.options)) if network.name is not None else {}
    return ModelTable(
        name=network.name,
        each=network.each,
        architectures=several,
        assign=assign,
        auxiliary=auxiliary,
        **own,
    )


def label_of(one: Labelled) -> str:
    """Return what a network is called: its label, else its name."""
    return one.label or one.name


def networks_by_label(network: ModelTable) -> dict[str, Named]:
    """Return every network by its label, in the order of the file."""
    found: dict[str, Named] = {}
    if network.name is not None:
        found[network.name] = Named(name=network.name, **network.options)
    found |= {name: Named(name=name) for name in network.each or {}}
    found |= {label_of(one): one for one in network.architectures or ()}
    for client, one in (network.assign or {}).items():
        label = label_of(one)
        if one.options and label in found and found[label].options != one.options:
            raise ConfigError(
                f"model.assign: {client!r} gets a {label!r} with other options than another has; "
                "give it a label of its own"
            )
        found.setdefault(label, one)
    return found


def build_architectures(
    experiment: Experiment, held: Sequence[Federation], reach: Permissions
) -> dict[str, Architecture]:
    """Bind the networks to the federations of all seeds."""
    first = held[0]
    for key in experiment.model.assign or {}:
        if key in first.names and any(other.names != first.names for other in held):
            raise ConfigError(
                f"model.assign: the clients' names differ from seed to seed, so {key!r} is not the "
                "same one; use its number, or fix data.seed"
            )
    shape, classes = tuple(first.dataset.x.shape[1:]), len(first.dataset.classes)
    words = first.dataset.words
    return assign_networks(experiment, shape, classes, first.clients, words, first.names, reach)


def assign_networks(
    experiment: Experiment,
    shape: tuple[int, ...],
    classes: int,
    clients: int,
    words: tuple[str, ...] = (),
    names: Sequence[str] = (),
    reach: Permissions = CLOSED,
) -> dict[str, Architecture]:
    """Bind the networks to the examples' shape (and words), and every client to its network.

    Without names (a node of a real federation knows only its own) clients go by their numbers.
    """
    network = experiment.model

    def built(one: Named) -> Build:
        maker = model_factory(one.name, "model", reach)
        return bound(maker, shape, classes, words, one.options)

    second = None if network.auxiliary is None else built(network.auxiliary)
    known, labels = networks_by_label(network), _labels(network, clients, names)
    if len(known) == 1:
        return {label: Architecture(built(one), second) for label, one in known.items()}
    own = {label: tuple(n for n in range(clients) if labels[n] == label) for label in known}
    return {
        label: Architecture(built(known[label]), second, numbers)
        for label, numbers in own.items()
        if numbers
    }


def _labels(network: ModelTable, clients: int, names: Sequence[str]) -> list[str]:
    """Return the label of each client's network."""
    if network.each is not None:
        labels = [name for name, times in network.each.items() for _ in range(times)]
        if len(labels) != clients:
            raise ConfigError(
                f"model.each gives {len(labels)} clients a network and there are {clients}; the "
                "counts must add up"
            )
    elif network.architectures is not None:
        dealt = [label_of(one) for one in network.architectures]
        labels = [dealt[n % len(dealt)] for n in range(clients)]
    else:
        labels = [network.name or ""] * clients
    for client, one in (network.assign or {}).items():
        labels[_client(client, clients, names)] = label_of(one)
    return labels


def _client(key: str, clients: int, names: Sequence[str]) -> int:
    """Find a client by its name, else by its number."""
    if key in names:
        return list(names).index(key)
    if key.isdecimal() and int(key) < clients:
        return int(key)
    if not names:
        raise ConfigError(f"model.assign: {key!r} is no client's number; expected 0..{clients - 1}")
    raise ConfigError(
        f"model.assign: there is no client {suggest(key, names)}; or give a number, "
        f"0..{clients - 1}"
    )


def _refuse_equal_networks(several: Sequence[Labelled], where: str) -> None:
    seen: set[str] = set()
    for place, one in enumerate(several):
        if label_of(one) in seen:
            raise ConfigError(
                f"{where}: model.architectures[{place}]: there are two {label_of(one)!r}; give "
                "each a label, such as { name = 'resnet18', label = 'wide', width = 96 }"
            )
        seen.add(label_of(one))


def _network_options(
    name: str, options: Mapping[str, Any], where: str, reach: Permissions, path: list[str | int]
) -> dict[str, Any]:
    maker = model_factory(name, where, reach)
    form = signature_model(maker, ("shape", "classes", "words"))
    for key in options:
        if key not in form.model_fields:
            names = [*form.model_fields, *(_KEYS if path == ["model"] else ("name", "label"))]
            raise ConfigError(
                f"{where}: unknown key {key_path([*path, key])}: {suggest(key, names)}"
            )
    return with_defaults(validate(form, options, where, path))


def model_factory(name: str, where: str, reach: Permissions) -> Callable[..., nn.Module]:
    """Find a network by name, or one by `package.module:factory` where the reach allows it."""
    if name in MODELS:
        return MODELS[name]
    if ":" not in name:
        raise ConfigError(
            f"{where}: model: unknown model {suggest(name, MODELS)} (your own: 'module:factory')"
        )
    return import_factory(name, where, reach)
