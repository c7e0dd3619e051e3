"""Methods, aggregation rules, attacks and networks: found by name, validated, and built."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, create_model
from torch import nn

from idiolect.aggregation import MODEL_ATTACKS, Attack, Attacked
from idiolect.aggregation.aggregator import Aggregated
from idiolect.aggregation.attacks import Replace
from idiolect.core.capabilities import Refit, has
from idiolect.core.method import Method
from idiolect.core.wrap import Wrapper
from idiolect.data import Federation
from idiolect.data.poison import attackers, backdoor, label_flip, unscored
from idiolect.engine.architecture import Architecture, Build, bound
from idiolect.errors import ConfigError, ModelError, suggest
from idiolect.experiment.schema import (
    AttackTable,
    Experiment,
    Labelled,
    MethodTable,
    ModelTable,
    Named,
    key_path,
    signature_model,
    validate,
    validate_options,
    with_defaults,
)
from idiolect.experiment.untrusted import (
    AGGREGATORS,
    CLOSED,
    Permissions,
    import_factory,
    imported_method,
)
from idiolect.methods.personalise import Combined
from idiolect.models import BASED, MODELS
from idiolect.models.adapters import ADAPTERS, AdaptedNetwork, make_adapter
from idiolect.models.bases import EMBEDDED, MARK, digest_of, find_base, remember

# Methods.

_COMMON = {spec.name for spec in fields(Wrapper)}
_PARTS = {spec.name for spec in fields(Combined)} - _COMMON - {"combinations"}


def build_method(table: MethodTable) -> Method:
    """Build the method of a resolved table, from the inside out."""
    parts = _PARTS if table.personalise else set()
    inner = {key: value for key, value in table.settings.items() if key not in parts}
    method: Method = imported_method(table.name)(**inner)
    if table.refit and has(method, Refit):
        method = method.refitted()
    if table.aggregate is not None:
        rule = AGGREGATORS[table.aggregate.name](**table.aggregate.options)
        method = Aggregated(method, rule)
    if table.personalise:
        own = {key: value for key, value in table.settings.items() if key in parts}
        method = Combined(method, combinations=table.combinations, **own)
    if table.refit and method.chooses:
        raise ConfigError(
            f"refit: {method.title} chooses by validation rows while it trains, so it cannot be "
            "trained on them; leave refit out, or fix what it chooses (of persfl one of shares and "
            "temperatures, and teacher = 'last')"
        )
    return method


def rows_of_table(table: MethodTable, held: Federation) -> Federation:
    """Return who trains on which rows: with `refit` on validation rows too.

    A method that chooses first, and then trains again, keeps the two apart by itself.
    """
    return held.refitted if table.refit and not has(build_method(table), Refit) else held


def settings_model(table: MethodTable, where: str, place: int) -> type[BaseModel]:
    """Return the settings a table may hold: the method's, and those of the parts around it."""
    kind = imported_method(table.name)
    own = signature_model(kind, kind.unused)
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
    """Read the settings of a form off a method and what it wraps."""
    found: dict[str, Any] = {}
    layer: Method | None = method
    while layer is not None:
        for name in form.model_fields:
            if name not in found and hasattr(layer, name):
                found[name] = getattr(layer, name)
        layer = layer.base if isinstance(layer, Wrapper) else None
    return {name: found[name] for name in form.model_fields}


def resolve_aggregate(
    given: Experiment, table: MethodTable, where: str, place: int
) -> Named | None:
    """Validate a method's aggregation rule, its own or everyone's, with every option."""
    own = table.aggregate is not None
    named = table.aggregate or given.aggregate
    method = imported_method(table.name)
    # A rule for everyone skips methods in which nobody's report could do harm.
    if named is None or (not own and (method.pooled or method.alone)):
        return None
    key = f"methods[{place}].aggregate" if own else "aggregate"
    if named.name not in AGGREGATORS:
        raise ConfigError(f"{where}: {key}.name: unknown rule {suggest(named.name, AGGREGATORS)}")
    # `cohort` is the experiment's.
    form = signature_model(AGGREGATORS[named.name], ("cohort",))
    options = validate(form, named.options, where, key.split("."))
    return Named(name=named.name, **{name: getattr(options, name) for name in form.model_fields})


# Simulated attacks.

# Attacks on data may enlarge the updates as well; 0 enlarges until the mean is the attackers'.
DATA_ATTACKS: dict[str, tuple[Callable[..., Federation], float]] = {
    "label-flip": (label_flip, 1.0),
    "backdoor": (backdoor, 1.0),
    "replace": (label_flip, 0.0),  # the whole model, by one that learnt wrong labels
}
REPORT_ATTACKS = {name: kind for name, kind in MODEL_ATTACKS.items() if name != "replace"}
ATTACKS = (*DATA_ATTACKS, *REPORT_ATTACKS)

Wrap = Callable[[Method], Method]


def resolve_attack(table: AttackTable, where: str) -> AttackTable:
    """Validate an attack, with every option."""
    if table.name not in ATTACKS:
        raise ConfigError(f"{where}: attack.name: unknown attack {suggest(table.name, ATTACKS)}")
    if bool(table.fraction) == bool(table.clients):
        raise ConfigError(f"{where}: attack: give fraction or clients, such as fraction = 0.2")
    taken = ("federation", "chosen", "seed")
    if table.name in REPORT_ATTACKS:
        form = signature_model(REPORT_ATTACKS[table.name], taken)
    else:
        function, scale = DATA_ATTACKS[table.name]
        form = signature_model(function, taken)
        form = create_model("Options", __base__=form, scale=(float, scale))
    own = {name: getattr(table, name) for name in AttackTable.model_fields}
    options = validate_options(form, table.options, where, ["attack"], own)
    return AttackTable(**own, **with_defaults(options))


def apply_attack(
    table: AttackTable, held: Sequence[Federation]
) -> tuple[tuple[Federation, ...], Wrap]:
    """Return the federations as attackers change them, and what wraps a method in the attack."""
    chosen = attackers(held[0], table.fraction, table.clients, table.seed)
    options = dict(table.options)
    attack: Attack | None = None
    if table.name in REPORT_ATTACKS:
        attack = REPORT_ATTACKS[table.name](**options)
        change = partial(unscored, words=attack.title)
    else:
        scale = options.pop("scale")
        attack = None if scale == 1 else Replace(scale=scale)
        extra = {"seed": table.seed} if table.name == "backdoor" else {}
        change = partial(DATA_ATTACKS[table.name][0], **options, **extra)
    changed: dict[int, Federation] = {}
    for one in held:  # runs on one federation stay so: its examples are held once
        if id(one) not in changed:
            changed[id(one)] = change(one, chosen)

    def wrap(method: Method) -> Method:
        # A method that sends nothing cannot be attacked, and one on pooled data has no attackers.
        if attack is None or method.pooled or method.alone:
            return method
        return Attacked(method, attack, attackers=chosen)

    return tuple(changed[id(one)] for one in held), wrap


# Networks: which client runs which, and what of it is trained.


def resolve_adapter(given: Named, where: str, reach: Permissions) -> Named:
    """Validate an adapter, with every option."""
    if given.name not in ADAPTERS:
        raise ConfigError(f"{where}: adapter.name: unknown adapter {suggest(given.name, ADAPTERS)}")
    form = signature_model(ADAPTERS[given.name], ())
    options = validate_options(form, given.options, where, ["adapter"], ("name",))
    try:
        made = ADAPTERS[given.name](**with_defaults(options)).settings()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if made["start"] is not None:
        at = f"{where}: adapter.start"
        made["start"], made["digest"] = _base_found(made["start"], made["digest"], at, reach)
    return Named(name=given.name, **made)


def resolve_network(network: ModelTable, where: str, reach: Permissions) -> ModelTable:
    """Validate every network, with every option."""

    def whole(one: Named, *path: str | int) -> dict[str, Any]:
        return _network_options(one.name, one.options, where, reach, ["model", *path])

    def labelled(one: Labelled, *path: str | int) -> Labelled:
        return Labelled(name=one.name, label=one.label, **whole(one, *path))

    auxiliary = network.auxiliary
    if auxiliary is not None:
        auxiliary = Named(name=auxiliary.name, **whole(auxiliary, "auxiliary"))
    several: tuple[Labelled, ...] | None = None
    if network.architectures is not None:
        several = tuple(
            labelled(one, "architectures", place) for place, one in enumerate(network.architectures)
        )
        _refuse_equal_networks(several, where)
    if network.name is None and network.options:
        key = next(iter(network.options))
        way = "each" if network.each is not None else "architectures"
        hint = "takes networks as they are" if way == "each" else "takes options beside each name"
        raise ConfigError(f"{where}: unknown key model.{key}: `{way}` {hint}")
    for name in network.each or {}:
        _network_options(name, {}, where, reach, ["model", "each"])
    known = {network.name, *(one.label_or_name for one in several or ()), *(network.each or {})}
    assign = None
    if network.assign is not None:
        assign = {
            client: one
            if one.name in known and not one.options
            else labelled(one, "assign", client)
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


def networks_by_label(network: ModelTable) -> dict[str, Named]:
    """Return every network by its label, in the order of the file."""
    found: dict[str, Named] = {}
    if network.name is not None:
        found[network.name] = Named(name=network.name, **network.options)
    found |= {name: Named(name=name) for name in network.each or {}}
    found |= {one.label_or_name: one for one in network.architectures or ()}
    for client, one in (network.assign or {}).items():
        label = one.label_or_name
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
    blocks = first.dataset.embedded
    return assign_networks(
        experiment, shape, classes, first.clients, words, first.names, reach, blocks
    )


def assign_networks(
    experiment: Experiment,
    shape: tuple[int, ...],
    classes: int,
    clients: int,
    words: tuple[str, ...] = (),
    names: Sequence[str] = (),
    reach: Permissions = CLOSED,
    blocks: Sequence[tuple[int, int]] = (),
) -> dict[str, Architecture]:
    """Bind the networks to the examples' shape (words, categories), each client to its network.

    Without names (a node of a real federation knows only its own) clients go by their numbers.
    """
    network = experiment.model

    def bare(one: Named) -> Build:
        maker = model_factory(one.name, "model", reach)
        return bound(maker, shape, classes, words, one.options, blocks)

    def built(one: Named) -> Build:
        if experiment.adapter is None:
            return bare(one)
        return AdaptedNetwork(bare(one), make_adapter(experiment.adapter.model_dump()))

    second = None if network.auxiliary is None else bare(network.auxiliary)
    known, labels = networks_by_label(network), client_labels(network, clients, names)
    if len(known) == 1:
        return {label: Architecture(built(one), second) for label, one in known.items()}
    own = {label: tuple(n for n in range(clients) if labels[n] == label) for label in known}
    return {
        label: Architecture(built(known[label]), second, numbers)
        for label, numbers in own.items()
        if numbers
    }


def client_labels(network: ModelTable, clients: int, names: Sequence[str]) -> list[str]:
    """Return the label of each client's network."""
    if network.each is not None:
        labels = [name for name, times in network.each.items() for _ in range(times)]
        if len(labels) != clients:
            raise ConfigError(
                f"model.each gives {len(labels)} clients a network and there are {clients}; the "
                "counts must add up"
            )
    elif network.architectures is not None:
        given = [one.label_or_name for one in network.architectures]
        labels = [given[n % len(given)] for n in range(clients)]
    else:
        labels = [network.name or ""] * clients
    for client, one in (network.assign or {}).items():
        labels[_client_number(client, clients, names)] = one.label_or_name
    return labels


def _client_number(key: str, clients: int, names: Sequence[str]) -> int:
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
        if one.label_or_name in seen:
            raise ConfigError(
                f"{where}: model.architectures[{place}]: there are two {one.label_or_name!r}; give "
                "each a label, such as { name = 'resnet18', label = 'wide', width = 96 }"
            )
        seen.add(one.label_or_name)


def _network_options(
    name: str, options: Mapping[str, Any], where: str, reach: Permissions, path: list[str | int]
) -> dict[str, Any]:
    form = signature_model(
        model_factory(name, where, reach), ("shape", "classes", "words", "blocks")
    )
    beside = ModelTable.model_fields if path == ["model"] else ("name", "label")
    found = with_defaults(validate_options(form, options, where, path, beside))
    if name in BASED and "weights" in found:
        at = f"{where}: {key_path([*path, 'weights'])}"
        named = _base_found(found["weights"], found.get("digest"), at, reach)
        found["weights"], found["digest"] = named
    return found


def _base_found(named: str, digest: str | None, where: str, reach: Permissions) -> tuple[str, str]:
    """Find a base, and its digest; a path is taken from the experiment's own folder."""
    if named != EMBEDDED and not named.startswith(MARK):
        if reach.base is None:
            raise ConfigError(
                f"{where} is {named!r}, and no path from outside is opened; an experiment "
                f"from outside names a base by its digest, '{MARK}...'"
            )
        named = str((reach.base / Path(named).expanduser()).resolve())
    try:
        folder = find_base(named, digest)
        remember(folder)
        return named, digest_of(folder)
    except ModelError as error:
        raise ConfigError(f"{where}: {error}") from None


def model_factory(name: str, where: str, reach: Permissions) -> Callable[..., nn.Module]:
    """Find a network by name, or one by `package.module:factory` where that is permitted."""
    if name in MODELS:
        return MODELS[name]
    if ":" not in name:
        raise ConfigError(
            f"{where}: model: unknown model {suggest(name, MODELS)} (your own: 'module:factory')"
        )
    return import_factory(name, where, reach)
