"""Complete an experiment: every option named, checked and written out with its default."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from idiolect.data import PARTITIONS, SOURCES, read
from idiolect.errors import ConfigError, DataError, IdiolectError
from idiolect.experiment import text_options
from idiolect.experiment.attacks import complete
from idiolect.experiment.build_methods import aggregate, form, made, values
from idiolect.experiment.build_networks import completed_network
from idiolect.experiment.load import Raw, parse_toml, read_toml, with_overrides
from idiolect.experiment.schema import Data, Experiment, MethodTable, Named
from idiolect.experiment.search_space import checked_tune
from idiolect.experiment.splits import distinct, with_splits
from idiolect.experiment.suggestions import meant
from idiolect.experiment.untrusted import OWN, Reach
from idiolect.experiment.validation import checked, everything, signature_model
from idiolect.methods import METHODS
from idiolect.results.models import folder_name

D = TypeVar("D", bound=Data)

# Keys of a method's table that are no settings.
_TAKEN = ("name", "label", "rounds", "preset", "personalise", "aggregate")


def load_experiment(path: str | Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read, check and complete an experiment file."""
    path = Path(path)
    where = f"{path} with --set" if overrides else str(path)
    return completed(with_overrides(read_toml(path), overrides), where, Reach(path.parent))


def parse_experiment(text: str, overrides: Sequence[str] = (), where: str = "text") -> Experiment:
    """Do the same for the text of a file."""
    return completed(with_overrides(parse_toml(text, where), overrides), where, Reach(Path.cwd()))


def completed(raw: Raw, where: str, reach: Reach) -> Experiment:
    """Check a raw table and write every default out; nothing beyond `reach` is opened."""
    given = checked(Experiment, with_splits(raw), where)
    methods = _methods(given, where)
    return given.model_copy(
        update={
            "data": _data(given.data, where, reach, "data"),
            "model": completed_network(given.model, where, reach),
            "training": {},
            "aggregate": None,
            "attack": given.attack and complete(given.attack, where),
            "tune": given.tune and checked_tune(given.tune, methods, where),
            "methods": methods,
            "splits": tuple(
                _data(split, where, reach, f"splits[{place}]")
                for place, split in enumerate(distinct(given.splits, where))
            ),
        }
    )


def _data(data: D, where: str, reach: Reach, key: str) -> D:
    """Complete a table of data, or a split's."""
    partition = data.partition and _partition(data.partition, where, key)
    source, options = _source(data.source, data.options, where, reach, key)
    public = data.public
    if public is not None:
        name, public_options = _source(public.source, public.options, where, reach, f"{key}.public")
        public = public.model_copy(update={"source": name, "options": public_options})
    found: dict[str, Any] = {"source": source, "options": options, "partition": partition}
    found["public"] = public
    if data.text is not None and isinstance(data.text.words, str):
        if reach.base is None:
            raise ConfigError(f"{where}: {key}.text.words: no path from outside is opened")
        path = reach.base / Path(data.text.words).expanduser()
        words = text_options.listed(path, f"{where}: {key}.text")
        found["text"] = data.text.model_copy(update={"words": words})
    return data.model_copy(update=found)


# Methods.


def _methods(given: Experiment, where: str) -> tuple[MethodTable, ...]:
    for place, table in enumerate(given.methods):
        if table.name not in METHODS:
            raise ConfigError(
                f"{where}: methods[{place}].name: unknown method {meant(table.name, METHODS)}"
            )
    forms = [form(table, where, place) for place, table in enumerate(given.methods)]
    known = {name for own in forms for name in own.model_fields}
    for key in given.training:
        if key not in known:
            raise ConfigError(f"{where}: unknown key training.{key}: {meant(key, known)}")
    done = []
    for place, (table, own) in enumerate(zip(given.methods, forms, strict=True)):
        # Each table is checked apart, so that the error names the one the value stands in.
        shared = {key: given.training[key] for key in given.training if key in own.model_fields}
        settings = {
            **_given(checked(own, shared, where, ["training"])),
            **_preset(table, where, place),
            **_given(_own_settings(own, table, where, place)),
        }
        named: dict[str, Any] = {
            "name": table.name,
            "personalise": table.personalise,
            "aggregate": aggregate(given, table, where, place),
        }
        try:
            method = made(MethodTable(**named, **settings))
        except IdiolectError as error:
            raise ConfigError(f"{where}: methods[{place}]: {error}") from None
        done.append(
            MethodTable(
                **named,
                label=table.label or method.title or table.name,
                rounds=table.rounds or given.rounds,
                preset=table.preset,
                **values(method, own),
            )
        )
    _refuse_equal_labels(done, where)
    return tuple(done)


def _preset(table: MethodTable, where: str, place: int) -> dict[str, Any]:
    """Return the settings a preset stands for."""
    presets = METHODS[table.name].presets
    if table.preset is not None and table.preset not in presets:
        none = f"{table.preset!r}; {table.name} has none: leave it out"
        known = meant(table.preset, presets) if presets else none
        raise ConfigError(f"{where}: methods[{place}].preset: unknown preset {known}")
    return presets[table.preset] if table.preset is not None else {}


def _own_settings(form: type[BaseModel], table: MethodTable, where: str, place: int) -> BaseModel:
    for key in table.settings:
        if key not in form.model_fields:
            names = [*form.model_fields, *_TAKEN]
            raise ConfigError(f"{where}: unknown key methods[{place}].{key}: {meant(key, names)}")
    return checked(form, table.settings, where, ["methods", place])


def _refuse_equal_labels(tables: Sequence[MethodTable], where: str) -> None:
    seen: dict[str, str] = {}
    for place, table in enumerate(tables):
        label = table.label or table.name
        key = folder_name(label).casefold()
        if key in seen:
            raise ConfigError(
                f"{where}: methods[{place}].label: {label!r} is too like {seen[key]!r}; give each "
                "method a label of its own"
            )
        seen[key] = label


# Data and models.


def _partition(partition: Named, where: str, key: str) -> Named:
    if partition.name not in PARTITIONS:
        raise ConfigError(
            f"{where}: {key}.partition: unknown partition {meant(partition.name, PARTITIONS)}"
        )
    # `min_size` is the federation's: data.min_size.
    form = signature_model(
        PARTITIONS[partition.name], ("labels", "codes", "seed", "rows", "min_size")
    )
    options = checked(form, partition.options, where, [key, "partition"])
    return Named(name=partition.name, **everything(options))


def _source(
    source: str, options: Mapping[str, Any], where: str, reach: Reach, key: str
) -> tuple[str, dict[str, Any]]:
    """Tell a named source from a path; a path becomes absolute, since the file will be copied."""
    path = [*key.split("."), "options"]
    if source in SOURCES:
        taker = SOURCES[source].make or SOURCES[source].read
        if taker is None:
            if options:
                raise ConfigError(f"{where}: {key}.options: {source!r} has no options")
            return source, {}
        form = signature_model(taker, ("files", "name", "provenance"))
        return source, everything(checked(form, options, where, path))
    if reach.base is None and source not in reach.files:
        given = "a file of its author" if source == OWN else repr(source)
        raise DataError(
            f"{where}: {key}.source is {given}, and no path from outside is opened; whoever runs "
            "this machine has to give the data, with --data or --public"
        )
    file = ((reach.base or Path()) / Path(source).expanduser()).resolve()
    if not file.exists():
        looks_like_path = any(mark in source for mark in "/\\.~")
        if looks_like_path:
            raise DataError(f"{where}: {key}.source: {file} does not exist; correct the path")
        raise ConfigError(f"{where}: {key}.source: unknown source {meant(source, SOURCES)}")
    return str(file), _given(
        checked(signature_model(read, ("path", "labelled")), options, where, path)
    )


def _given(values: BaseModel) -> dict[str, Any]:
    """Return what was set, without defaults."""
    return {name: getattr(values, name) for name in values.model_fields_set}
