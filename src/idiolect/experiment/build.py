"""From a resolved experiment to jobs: data loaded and divided, networks bound, methods built."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from idiolect.data import SOURCES, Dataset, Federation, federate, load, read
from idiolect.data.dataset import (
    Rows,
    alike,
    encoded_alike,
    encoded_by,
    fitted,
    normalised,
    rows_of,
    with_classes,
    without,
)
from idiolect.data.federation import same_clients, same_test
from idiolect.data.inspection import refuse_unclear
from idiolect.data.sources import cache_root
from idiolect.data.targets import make_task, with_class_weights, with_task
from idiolect.data.text import SPECIAL, encoded_as, enlarged, hashed_words
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend, Ray
from idiolect.errors import ConfigError, DataError, suggest
from idiolect.experiment.components import (
    Wrap,
    apply_attack,
    build_architectures,
    build_method,
    rows_of_table,
)
from idiolect.experiment.job import Evaluate, SimulatedJob
from idiolect.experiment.schema import Data, Experiment, MethodTable, Named, Public, Text
from idiolect.experiment.untrusted import Permissions, by_digest

_PUBLIC = 5  # keeps the draw of public examples apart from other uses of the same seed


def build_federations(
    experiment: Experiment,
    data_dir: Path | None = None,
    datasets: dict[str, Dataset] | None = None,
    fetched: Collection[str] = tuple(SOURCES),
) -> tuple[Federation, ...]:
    """Load the data once and divide it for every seed; equal divisions are one object.

    `datasets` keeps what was loaded for experiments to come; `fetched` are the sources that may be
    downloaded where they are not at hand.
    """
    known = {} if datasets is None else datasets
    dataset, public = _sourced(experiment.data, data_dir, known, fetched)
    if experiment.data.source not in SOURCES:
        partition = experiment.data.partition
        refuse_unclear(dataset, partition.name if partition is not None else None)
    return divide(experiment, dataset, public)


def load_dataset(experiment: Experiment) -> Dataset:
    """Load an experiment's data as it is read, divided among nobody yet."""
    return _sourced(experiment.data, None, {}, tuple(SOURCES))[0]


def _sourced(
    data: Data, data_dir: Path | None, known: dict[str, Dataset], fetched: Collection[str]
) -> tuple[Dataset, Dataset | None]:
    """Load private and public examples; `known` keeps what was loaded."""
    options = source_options(data)
    key = repr((data.source, sorted(options.items()), data.normalise))
    if key not in known:
        known[key] = load_source(data.source, options, data_dir, data.normalise, fetched)
    dataset = encode_text(known[key], data.text)
    if data.task is not None and data.source in SOURCES:
        dataset = with_task(dataset, make_task(data.task.model_dump()))
    if data.classes is not None:
        dataset = with_classes(dataset, data.classes, "the experiment")
    if data.class_weights is not None:
        dataset = with_class_weights(dataset, data.class_weights)
    if data.public is None:
        return dataset, None
    if data.public.source == data.source:
        return _held_out(data.public, data, dataset)
    return dataset, public_examples(data.public, data, dataset, data_dir, fetched)


def load_public(
    data: Data, private: Dataset, divided: bool, data_dir: Path | None, fetched: Collection[str]
) -> Dataset | None:
    """Load the public examples where nobody's private ones are: `private` shows their form.

    Where clients' data was `divided` from a source, public examples may be rows of it.
    """
    if data.public is None:
        return None
    if divided and data.public.source == data.source:
        _, public = _sourced(data, data_dir, {}, fetched)
    else:
        public = public_examples(data.public, data, private, data_dir, fetched)
    if public is not None and public.vocabulary:
        return encoded_as(public, private.words)
    return public


def divide(
    experiment: Experiment,
    dataset: Dataset,
    public: Dataset | None,
    first: int = 0,
    newcomer: bool = False,
) -> tuple[Federation, ...]:
    """Divide a dataset for every seed; `first` is the first client's number where not all are.

    Clients of own data, who have names, are divided by these: a site's rows fall alike here and on
    its node, whoever else is there. `newcomer`: it is nobody of the run, and has no name in it.
    """
    data = experiment.data
    by_name = data.source not in SOURCES and dataset.clients is not None and not newcomer
    own = "iid" if dataset.clients is None else "natural"
    partition = data.partition or Named(name=own)
    made: dict[int, Federation] = {}
    for seed in data_seeds(experiment):
        if seed not in made:
            made[seed] = federate(
                dataset,
                partition.name,
                seed,
                data.split,
                pool=data.pool,
                min_size=data.min_size,
                drop=data.drop,
                stratify=data.stratify,
                ordered=data.ordered,
                val=data.val,
                public=public,
                first=first,
                by_name=by_name and partition.name == "natural",
                **partition.options,
            )
    made = _of_one_size(made)
    if data.common_test:
        made = {seed: _with_common_test(own, data.common_test) for seed, own in made.items()}
    return tuple(made[seed] for seed in data_seeds(experiment))


def _with_common_test(federation: Federation, wanted: bool | int) -> Federation:
    """Add the source's test file, or so many rows of it, as a common test set of all clients."""
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
    return replace(federation, common=rows)


def _of_one_size(made: dict[int, Federation]) -> dict[int, Federation]:
    """Enlarge vocabularies, or a table's features, of all seeds to the largest: one shape."""
    if any(own.dataset.encoder is not None for own in made.values()):
        return _encoded_alike(made)
    size = max(len(own.dataset.words) for own in made.values())
    return {
        seed: own
        if len(own.dataset.words) == size
        else replace(
            own,
            dataset=enlarged(own.dataset, size),
            public=own.public and enlarged(own.public, size),
        )
        for seed, own in made.items()
    }


def _encoded_alike(made: dict[int, Federation]) -> dict[int, Federation]:
    private = encoded_alike([own.dataset for own in made.values()])
    found = {}
    for (seed, own), dataset in zip(made.items(), private, strict=True):
        public = own.public
        if public is not None and public.table is not None and dataset.encoder is not None:
            public = encoded_by(public, dataset.encoder)
        found[seed] = replace(own, dataset=dataset, public=public)
    return found


class SharedParts(NamedTuple):
    """What all jobs of an experiment share: data divided for every seed, and networks."""

    federations: Mapping[int, Federation]  # by seed
    architectures: Mapping[str, Architecture]
    attack: Wrap | None  # wraps a method in the attack, where one is simulated


def build_shared(
    experiment: Experiment, data_dir: Path | None = None, datasets: dict[str, Dataset] | None = None
) -> SharedParts:
    """Load and divide an experiment's data, and bind its networks to it."""
    held = build_federations(experiment, data_dir, datasets)
    if not any(len(rows) for federation in held for rows in federation.test):
        raise DataError(
            "no client has a test row, so nothing could be scored; give the third share of "
            "data.split more"
        )
    networks = build_architectures(experiment, held, Permissions(Path.cwd()))
    attack: Wrap | None = None
    if experiment.attack is not None:
        held, attack = apply_attack(experiment.attack, held)
    return SharedParts(dict(zip(experiment.seeds, held, strict=True)), networks, attack)


def build_jobs(
    experiment: Experiment,
    data_dir: Path | None = None,
    only: Sequence[str] = (),
) -> tuple[list[SimulatedJob], dict[str, Any]]:
    """Make a job of every method (or of the labels in `only`), and describe the data."""
    refuse_unknown_labels(experiment, only)
    held = build_shared(experiment, data_dir)
    tables = [table for table in experiment.methods if not only or table.label in only]
    made = [build_job(experiment, table, held, experiment.seeds) for table in tables]
    return made, describe(experiment, held)


def build_job(
    experiment: Experiment, table: MethodTable, held: SharedParts, seeds: tuple[int, ...]
) -> SimulatedJob:
    """Make the job of one method under some of the seeds that data was divided for."""
    own = tuple(rows_of_table(table, held.federations[seed]) for seed in seeds)
    method = build_method(table)
    return SimulatedJob(
        label=table.label_or_name,
        name=table.name,
        method=held.attack(method) if held.attack else method,
        seeds=seeds,
        federations=own,
        architectures=held.architectures,
        rounds=table.rounds or experiment.rounds,
        cohort=cohort_size(experiment.cohort, own[0].clients),
        draw=experiment.draw,
        bystanders=experiment.bystanders,
        unseen=cohort_size(experiment.unseen, own[0].clients, "unseen") or 0,
        backend=build_backend(experiment),
        evaluate=Evaluate(**experiment.evaluate.of_job()),
        checkpoint_every=experiment.backend.checkpoint_every,
        preset=table.preset or "",
        described={
            "data": _data_identity(experiment.data),
            "model": by_digest(experiment.model.model_dump(exclude_none=True)),
            **(
                {"adapter": by_digest(experiment.adapter.model_dump())}
                if experiment.adapter
                else {}
            ),
            # A checkpoint of an experiment without an attack has no such key.
            **({"attack": experiment.attack.model_dump()} if experiment.attack else {}),
        },
        releases=len(experiment.seeds),
    ).settled()


def describe(experiment: Experiment, held: SharedParts) -> dict[str, Any]:
    """Describe the data of a result."""
    own = [held.federations[seed] for seed in experiment.seeds]
    dataset, public = own[0].dataset, own[0].public
    about_public = public and {
        "source": public.name,
        "provenance": public.provenance,
        "examples": len(public),
    }
    return {
        "name": experiment.name,
        "data": {
            "source": dataset.name,
            "provenance": dataset.provenance,
            **({"public": about_public} if about_public else {}),
            "classes": list(own[0].columns),
            "clients": own[0].clients,
            "same_clients": same_clients(own),
            "same_test": same_test(own),
            "federations": [federation.description for federation in own],
        },
    }


def build_backend(experiment: Experiment) -> Backend:
    """Build the backend: where and how clients run."""
    return Backend(
        experiment.backend.kind,
        experiment.backend.device,
        experiment.backend.width or None,
        # Widths are kept between runs, so that a repeated run rounds as the first one did.
        cache_root(None) / "widths.json",
        experiment.backend.personal,
        experiment.backend.personal_mb,
        experiment.backend.precision,
        experiment.backend.graph,
        ray=Ray(**experiment.backend.ray.model_dump()),
        kernels=experiment.backend.kernels,
    )


def refuse_unknown_labels(experiment: Experiment, only: Sequence[str]) -> None:
    """Refuse labels that no method has."""
    labels = [table.label_or_name for table in experiment.methods]
    for label in only:
        if label not in labels:
            raise ConfigError(f"--method: unknown label {suggest(label, labels)}")


def load_source(
    source: str,
    options: Mapping[str, Any],
    data_dir: Path | None,
    normalise: str | None = None,
    fetched: Collection[str] = tuple(SOURCES),
) -> Dataset:
    """Load a named dataset, or read a user's own; only what may be `fetched` is downloaded."""
    if source in SOURCES:
        dataset = load(source, data_dir, download=source in fetched, **options)
    else:
        dataset = read(source, **options)
    return normalised(dataset, normalise) if normalise else dataset


def public_examples(
    public: Public,
    data: Data,
    private: Dataset,
    data_dir: Path | None,
    fetched: Collection[str] = tuple(SOURCES),
) -> Dataset:
    """Draw the public examples, the same for all seeds: they stand for a published set."""
    dataset = load_source(public.source, public.options, data_dir, fetched=fetched)
    dataset = encode_text(rows_of(dataset, _draw_public(public, data, dataset)), data.text)
    dataset = alike(dataset, tuple(private.x.shape[1:]), private.name)
    if data.normalise is None:
        return dataset
    # Everyone holds all of them to learn from, so their own statistics are those of training rows.
    return fitted(normalised(dataset, data.normalise), np.arange(len(dataset)))


def _held_out(public: Public, data: Data, dataset: Dataset) -> tuple[Dataset, Dataset]:
    """Split a source into private and public examples."""
    if public.size is None:
        raise DataError(
            f"data.public takes its examples from {dataset.name}, as the private ones do; say how "
            "many: data.public.size"
        )
    rows = _draw_public(public, data, dataset)
    return without(dataset, rows), rows_of(dataset, rows)


def _draw_public(public: Public, data: Data, dataset: Dataset) -> Rows:
    rows = dataset.pool("train")
    if public.size is None:
        return rows
    if public.size > len(rows):
        raise DataError(
            f"data.public.size is {public.size}, and {dataset.name} has {len(rows)} examples"
        )
    draw = np.random.default_rng((data.seed or 0, _PUBLIC))
    return np.sort(draw.choice(rows, public.size, replace=False))


def data_seeds(experiment: Experiment) -> tuple[int, ...]:
    """Return the seed that divides the data, for each run."""
    fixed = experiment.data.seed
    return experiment.seeds if fixed is None else (fixed,) * len(experiment.seeds)


def cohort_size(cohort: int | float | None, clients: int, key: str = "cohort") -> int | None:
    """Return how many clients a round has; None for all. So for other keys that count clients."""
    if isinstance(cohort, float):
        return max(1, round(cohort * clients))
    if cohort is not None and cohort > clients:
        raise ConfigError(f"{key} is {cohort}, and there are {clients} clients; lower it")
    return cohort


def _data_identity(data: Data) -> dict[str, Any]:
    """Describe the data for a checkpoint; of an own file only the name, for it may be moved."""
    described = data.model_dump(exclude_none=True)
    described["source"] = Path(data.source).name
    if data.text is not None and not isinstance(data.text.words, int):
        # Thousands of words; a digest is enough.
        digest = sha256("\n".join(data.text.words).encode()).hexdigest()
        described["text"] = {**described["text"], "words": digest}
    return described


def source_options(data: Data) -> dict[str, Any]:
    """Return the options that a source is read with; those of [data.text] take precedence."""
    given = dict(data.options)
    if data.task is not None and data.source not in SOURCES:
        given["task"] = data.task.model_dump()
    if data.columns:
        if data.source in SOURCES:
            raise ConfigError(
                f"data.columns is for own tables, and data.source is {data.source!r}; leave it out"
            )
        given["columns"] = {
            name: own.model_dump(exclude_none=True) for name, own in data.columns.items()
        }
    if data.text is None:
        return given
    own = {"length": data.text.length, "next_word": data.text.next_word}
    if data.source not in SOURCES:
        return {**given, **own}
    if any(own.values()):
        raise ConfigError(
            f"data.text has a length or next_word, which are for own text, and data.source is "
            f"{data.source!r}; give them in data.options, as far as the source has them"
        )
    return dict(data.options)


def encode_text(dataset: Dataset, text: Text | None) -> Dataset:
    """Encode a corpus by [data.text]; without it, words are numbered later."""
    if text is None:
        return dataset
    if not dataset.words:
        raise DataError(f"{dataset.name} holds no text, and data.text says how words are numbered")
    if isinstance(text.words, int):
        return encoded_as(dataset, hashed_words(text.words))
    return encoded_as(dataset, (*SPECIAL, *text.words))
