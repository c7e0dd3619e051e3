"""Which client runs which network: found by name, completed, and assigned."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from idiolect.data import Federation
from idiolect.engine.architecture import Architecture, Build, bound
from idiolect.errors import ConfigError
from idiolect.experiment.schema import Experiment, Labelled, Named, Network
from idiolect.experiment.suggestions import dotted, meant
from idiolect.experiment.untrusted import CLOSED, Reach, factory
from idiolect.experiment.validation import checked, everything, signature_model
from idiolect.models import MODELS

_KEYS = ("name", "each", "architectures", "assign", "auxiliary")


def completed_network(network: Network, where: str, reach: Reach) -> Network:
    """Check every network and write its options out."""

    def whole(one: Named, *path: str | int) -> dict[str, Any]:
        return _options(one.name, one.options, where, reach, ["model", *path])

    auxiliary = network.auxiliary
    if auxiliary is not None:
        auxiliary = Named(name=auxiliary.name, **whole(auxiliary, "auxiliary"))
    several: tuple[Labelled, ...] | None = None
    if network.architectures is not None:
        several = tuple(
            Labelled(name=one.name, label=one.label, **whole(one, "architectures", place))
            for place, one in enumerate(network.architectures)
        )
        _refuse_equal_labels(several, where)
    if network.name is None and network.options:
        key = next(iter(network.options))
        way = "each" if network.each is not None else "architectures"
        hint = "takes networks as they are" if way == "each" else "takes options beside each name"
        raise ConfigError(f"{where}: unknown key model.{key}: `{way}` {hint}")
    for name in network.each or {}:
        _options(name, {}, where, reach, ["model", "each"])
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
    return Network(
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


def listed(network: Network) -> dict[str, Named]:
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


def architectures(
    experiment: Experiment, held: Sequence[Federation], reach: Reach
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
    return networks(experiment, shape, classes, first.clients, words, first.names, reach)


def networks(
    experiment: Experiment,
    shape: tuple[int, ...],
    classes: int,
    clients: int,
    words: tuple[str, ...] = (),
    names: Sequence[str] = (),
    reach: Reach = CLOSED,
) -> dict[str, Architecture]:
    """Bind the networks to the examples' shape (and words), and every client to its network.

    Without names (a node of a real federation knows only its own) clients go by their numbers.
    """
    network = experiment.model

    def built(one: Named) -> Build:
        maker = model_factory(one.name, "model", reach)
        return bound(maker, shape, classes, words, one.options)

    second = None if network.auxiliary is None else built(network.auxiliary)
    known, labels = listed(network), _labels(network, clients, names)
    if len(known) == 1:
        return {label: Architecture(built(one), second) for label, one in known.items()}
    own = {label: tuple(n for n in range(clients) if labels[n] == label) for label in known}
    return {
        label: Architecture(built(known[label]), second, numbers)
        for label, numbers in own.items()
        if numbers
    }


def _labels(network: Network, clients: int, names: Sequence[str]) -> list[str]:
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
        f"model.assign: there is no client {meant(key, names)}; or give a number, 0..{clients - 1}"
    )


def _refuse_equal_labels(several: Sequence[Labelled], where: str) -> None:
    seen: set[str] = set()
    for place, one in enumerate(several):
        if label_of(one) in seen:
            raise ConfigError(
                f"{where}: model.architectures[{place}]: there are two {label_of(one)!r}; give "
                "each a label, such as { name = 'resnet18', label = 'wide', width = 96 }"
            )
        seen.add(label_of(one))


def _options(
    name: str, options: Mapping[str, Any], where: str, reach: Reach, path: list[str | int]
) -> dict[str, Any]:
    maker = model_factory(name, where, reach)
    form = signature_model(maker, ("shape", "classes", "words"))
    for key in options:
        if key not in form.model_fields:
            names = [*form.model_fields, *(_KEYS if path == ["model"] else ("name", "label"))]
            raise ConfigError(f"{where}: unknown key {dotted([*path, key])}: {meant(key, names)}")
    return everything(checked(form, options, where, path))


def model_factory(name: str, where: str, reach: Reach) -> Callable[..., nn.Module]:
    """Find a network by name, or one by `package.module:factory` where the reach allows it."""
    if name in MODELS:
        return MODELS[name]
    if ":" not in name:
        raise ConfigError(
            f"{where}: model: unknown model {meant(name, MODELS)} (your own: 'module:factory')"
        )
    return factory(name, where, reach)
