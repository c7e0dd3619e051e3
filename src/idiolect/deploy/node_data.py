"""The data of one node: its own file, or one client's share of the experiment's partition."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from idiolect.data import SOURCES, Dataset, Federation
from idiolect.data.dataset import Moments, fixed_decoding, moments, with_classes
from idiolect.deploy.refusals import Refused
from idiolect.deploy.site import Site
from idiolect.errors import DataError
from idiolect.experiment.build import (
    build_federations,
    divide,
    encode_text,
    load_source,
    public_examples,
    source_options,
)
from idiolect.experiment.portable import import_experiment, parse_untrusted, source_of
from idiolect.experiment.schema import Experiment


@dataclass(frozen=True, eq=False)
class Holding:
    """What a node brings: for each seed a federation of one client, itself."""

    experiment: Experiment
    client: int  # its number among all
    federations: tuple[Federation, ...]
    source: str  # the named source it has a share of; empty for own data
    clients: int = 0  # of the experiment's partition, where the node has a share of one
    # Moments of the training rows under each seed, where all nodes' together decide the scaling.
    seen: tuple[Moments, ...] | None = None

    @property
    def dataset(self) -> Dataset:
        """The examples, of the first seed."""
        return self.federations[0].dataset

    def scaled(self, shift: np.ndarray, scale: np.ndarray) -> "Holding":
        """Decode examples as all nodes agreed to; the first axis is of seeds."""
        made = []
        for held, own_shift, own_scale in zip(self.federations, shift, scale, strict=True):
            dataset = dataclasses.replace(held.dataset, shift=own_shift, scale=own_scale)
            made.append(dataclasses.replace(held, dataset=dataset))
        return dataclasses.replace(self, federations=tuple(made))


def hold(site: Site, text: str, place: int, newcomer: bool = False) -> Holding:
    """Read a node's data as an experiment asks; `place` is the node's number among all."""
    parse_untrusted(text, site.reach)  # before anything is looked at
    if newcomer and site.client is not None:
        raise DataError(
            "this node was given a client of the experiment's own partition, all of whom took part "
            "in the run; start it without --client, with data of its own, to adapt to it"
        )
    return _share(site, text) if site.client is not None else _own(site, text, place)


def _share(site: Site, text: str) -> Holding:
    """Take one client's share of the experiment's own partition, as a simulation divides it."""
    client, wanted = site.client or 0, source_of(text)
    if site.data != wanted:
        raise DataError(
            f"the experiment divides {wanted!r}, and this node was given a client of {site.data!r};"
            f" start it with --data {wanted}, or without --client for data of its own"
        )
    experiment = import_experiment(text, source=site.data, public=site.public, reach=site.reach)
    held = build_federations(experiment, site.data_dir, fetched=_given(site))
    if client >= held[0].clients:
        raise DataError(
            f"--client is {client}, and the experiment's partition has clients "
            f"0..{held[0].clients - 1}"
        )
    own = tuple(_compact(federation, client) for federation in held)
    return Holding(experiment, client, own, held[0].dataset.name, held[0].clients)


def _given(site: Site) -> tuple[str, ...]:
    """Return the data that the operator named: no other is downloaded because a run names it."""
    return tuple(name for name in (site.data, site.public) if name is not None)


def _compact(federation: Federation, client: int) -> Federation:
    """Keep one client and its rows only: a node needs no one else's examples in memory."""
    one = federation.subset([client])
    parts = [part[0] for part in (one.train, one.val, one.test)]
    rows, ends = np.concatenate(parts), np.cumsum([len(part) for part in parts])
    dataset = dataclasses.replace(
        one.dataset,
        x=np.asarray(one.dataset.x[rows]),
        y=one.dataset.y[rows],
        clients=None,
        client_names=(),
        origin=None,
    )
    train, val, test = np.split(np.arange(len(rows)), ends[:-1])
    return dataclasses.replace(
        one,
        dataset=dataset,
        train=(train,),
        val=(val,),
        test=(test,),
        description=federation.description,
    )


def _own(site: Site, text: str, place: int) -> Holding:
    """Read the node's own file; classes are the experiment's, so that labels mean the same."""
    if site.data in SOURCES:
        raise DataError(
            f"{site.data!r} is a dataset that everyone can have; add --client to take one client's "
            "share of it, or give the path of this node's own data"
        )
    path = str(Path(site.data).expanduser().resolve())
    own: dict[str, Any] = {"options": site.options, "public": site.public, "reach": site.reach}
    experiment = import_experiment(text, source=path, **own)
    data = experiment.data
    dataset = load_source(data.source, source_options(data), site.data_dir)
    if dataset.words and data.text is None:
        raise Refused(
            "words",
            "the experiment does not say how words are numbered, so every node would number its "
            "own; add [data.text] with words to the experiment",
        )
    dataset = encode_text(dataset, data.text)
    if dataset.sequential:
        return _held(site, experiment, dataset, place)
    if data.classes is None:
        raise Refused(
            "classes",
            "the experiment declares no classes, so labels could be numbered differently on "
            "every node; add data.classes = [...] to the experiment",
        )
    try:
        dataset = with_classes(dataset, data.classes, "the experiment")
    except DataError as error:
        raise Refused("classes", str(error)) from error
    how = data.normalise
    if how is None:
        return _held(site, experiment, dataset, place)
    fixed = fixed_decoding(dataset, how)
    found = _held(site, experiment, dataset if fixed is None else fixed, place)
    if fixed is not None:
        return found
    # Only the training rows are told of: which they are depends on the seed.
    seen = tuple(moments(own.dataset, how, own.train[0]) for own in found.federations)
    return dataclasses.replace(found, seen=seen)


def _held(site: Site, experiment: Experiment, dataset: Dataset, place: int) -> Holding:
    """Make one client of all rows, with the public examples beside them."""
    data, public = experiment.data, None
    if data.public is not None:
        public = public_examples(data.public, data, dataset, site.data_dir, _given(site))
    one = np.zeros(len(dataset), np.int64)
    dataset = dataclasses.replace(dataset, clients=one, client_names=(site.name,))
    return Holding(experiment, place, divide(experiment, dataset, public, place), "")
