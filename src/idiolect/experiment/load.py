"""From a TOML file and --set options to a resolved experiment: validated, defaults written out."""

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from idiolect.data import PARTITIONS, SOURCES, read
from idiolect.data.partition import DEFAULT_SPLIT, USUAL_SPLIT
from idiolect.data.text import SPECIAL
from idiolect.data.tokenisers import EMBEDDED, Tokeniser
from idiolect.errors import ConfigError, DataError, IdiolectError, suggest
from idiolect.experiment.components import (
    build_method,
    resolve_adapter,
    resolve_aggregate,
    resolve_attack,
    resolve_network,
    settings_model,
    settings_of,
)
from idiolect.experiment.schema import (
    Data,
    Experiment,
    MethodTable,
    Named,
    SplitTable,
    signature_model,
    validate,
    validate_options,
    with_defaults,
)
from idiolect.experiment.tune import checked_tune
from idiolect.experiment.untrusted import (
    OWN,
    Permissions,
    import_method,
    imported_method,
    refuse_code,
)
from idiolect.methods import METHODS
from idiolect.results.run_files import folder_name

Raw = dict[str, Any]

EXPERIMENT = "experiment.toml"  # what a run's folder was run with
_LONGEST = 200  # letters of what an error is about
_DEPTH = 20  # tables in tables that a file may have


def read_toml(path: Path, wanted: str = "an experiment file") -> Raw:
    """Read a file; a syntax error names its line and column."""
    try:
        return parse_toml(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give the path of {wanted}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text; expected a TOML file") from None
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; give the path of {wanted}"
        ) from error


def parse_toml(text: str, where: str) -> Raw:
    """Parse TOML text."""
    try:
        raw = tomllib.loads(text)
        if _deeper(raw, _DEPTH):
            raise RecursionError
        return raw
    except RecursionError:
        raise ConfigError(f"{where}: tables nested deeper than {_DEPTH}; take some out") from None
    except tomllib.TOMLDecodeError as error:
        said = str(error)
        place = re.search(r"\(at (?:line (\d+), column (\d+)|end of document)\)", said)
        line = f":{place[1]}:{place[2]}" if place and place[1] else ""
        raise ConfigError(f"{where}{line}: not valid TOML: {said}") from None


def _deeper(value: Any, depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(depth == 0 or _deeper(one, depth - 1) for one in inner)


def with_overrides(raw: Raw, overrides: Sequence[str]) -> Raw:
    """Apply --set key=value in turn; keys are those of the file, methods also by label or name."""
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {override!r}: expected key=value, such as training.lr=0.1")
        raw = _put(raw, _steps(raw, key.strip(), override), _parsed(value.strip()), override)
    return raw


def _parsed(value: str) -> Any:
    """Read a value as TOML; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return value


def _steps(raw: Raw, key: str, override: str) -> list[str | int]:
    """Part a dotted key; `methods.LABEL.lr` becomes `methods[place].lr`."""
    if found := re.fullmatch(r"methods\[(\d+)\]\.(.+)", key):
        place = int(found[1])
        if place >= len(raw.get("methods", ())):
            raise ConfigError(
                f"--set {override!r}: there are {len(raw.get('methods', ()))} methods"
            )
        return ["methods", place, found[2]]
    if not key.startswith("methods."):
        return list(key.split("."))
    rest = key.removeprefix("methods.")
    names = []
    for place, method in enumerate(raw.get("methods", ())):
        own = method.get("name")
        shown = METHODS[own].title if own in METHODS else None  # its label, where none is given
        for name in (method.get("label") or shown, own, str(own).rpartition(":")[2]):
            names += [name] if name else []
            if name and rest.startswith(f"{name}."):
                return ["methods", place, rest.removeprefix(f"{name}.")]
    raise ConfigError(
        f"--set {override!r}: unknown method {suggest(rest.rpartition('.')[0], names)}"
    )


def _put(table: Any, steps: Sequence[str | int], value: Any, override: str) -> Any:
    """Return the table with one value replaced; a bare name grows into a table of its options."""
    if not steps:
        return value
    first, rest = steps[0], steps[1:]
    if isinstance(first, int):
        return [
            _put(entry, rest, value, override) if place == first else entry
            for place, entry in enumerate(table)
        ]
    if isinstance(table, str):
        table = {"name": table}
    if not isinstance(table, dict):
        raise ConfigError(f"--set {override!r}: {first!r} lies in {table!r}, which is no table")
    return {**table, first: _put(table.get(first, {}), rest, value, override)}


# Complete an experiment: every option named, checked and written out with its default.


D = TypeVar("D", bound=Data)


def load_experiment(
    path: str | Path, overrides: Sequence[str] = (), trust_code: bool = False
) -> Experiment:
    """Read, check and complete an experiment file, or the experiment of a run's folder.

    A folder may be somebody else's: what it names as `module:name` needs `trust_code`.
    """
    path = Path(path)
    if path.is_dir():
        return _load_folder(path, overrides, trust_code)
    where = f"{path} with {', '.join(overrides)}" if overrides else str(path)
    where = where if len(where) <= _LONGEST else f"{where[:_LONGEST]}..."
    return resolve(with_overrides(read_toml(path), overrides), where, Permissions(path.parent))


def _load_folder(folder: Path, overrides: Sequence[str], trust_code: bool) -> Experiment:
    """Read the experiment that a folder was run with, here and now: with this machine's data."""
    path = folder / EXPERIMENT
    if not path.is_file():
        raise ConfigError(
            f"{folder} holds no {EXPERIMENT}; give an experiment file, or the folder of a run"
        )
    raw = with_overrides(read_toml(path), overrides)
    if not trust_code:
        refuse_code(raw, str(path), folder, Path.cwd())
    data = raw.get("data")
    source = data.get("source") if isinstance(data, dict) else None
    if isinstance(source, str) and source not in SOURCES and not Path(source).expanduser().exists():
        raise ConfigError(
            f"{path} was run on {source!r}, which is not on this machine; give your copy with "
            "--set data.source=PATH"
        )
    return resolve(raw, str(path), Permissions(Path.cwd()))


def parse_experiment(text: str, overrides: Sequence[str] = (), where: str = "text") -> Experiment:
    """Do the same for the text of a file."""
    return resolve(
        with_overrides(parse_toml(text, where), overrides), where, Permissions(Path.cwd())
    )


def resolve(raw: Raw, where: str, reach: Permissions) -> Experiment:
    """Check a raw table and write every default out; nothing beyond `reach` is opened."""
    given = validate(Experiment, with_splits(raw), where)
    methods = _methods(given, where, reach)
    made = given.model_copy(
        update={
            "data": _data(given.data, where, reach, "data"),
            "model": resolve_network(given.model, where, reach),
            "adapter": given.adapter and resolve_adapter(given.adapter, where, reach),
            "training": {},
            "aggregate": None,
            "attack": given.attack and resolve_attack(given.attack, where),
            "tune": given.tune and checked_tune(given.tune, methods, where),
            "methods": methods,
            "splits": tuple(
                _data(split, where, reach, f"splits[{place}]")
                for place, split in enumerate(refuse_equal_splits(given.splits, where))
            ),
        }
    )
    made._notes = tuple(_presets_before_training(given, methods))
    return made


def _data(data: D, where: str, reach: Permissions, key: str) -> D:
    """Complete a table of data, or a split's."""
    partition = data.partition and _partition(data.partition, where, key)
    source, options = _source(data.source, data.options, where, reach, key)
    public = data.public
    if public is not None:
        name, public_options = _source(public.source, public.options, where, reach, f"{key}.public")
        public = public.model_copy(update={"source": name, "options": public_options})
    found: dict[str, Any] = {"source": source, "options": options, "partition": partition}
    found["public"] = public
    if data.split is None:
        found["split"] = USUAL_SPLIT if partition is None else DEFAULT_SPLIT[partition.name]
    if data.text is not None and isinstance(data.text.words, str):
        if reach.base is None:
            raise ConfigError(f"{where}: {key}.text.words: no path from outside is opened")
        path = reach.base / Path(data.text.words).expanduser()
        words = _read_words(path, f"{where}: {key}.text")
        found["text"] = data.text.model_copy(update={"words": words})
    return data.model_copy(update=found)


# Methods.


def _methods(given: Experiment, where: str, reach: Permissions) -> tuple[MethodTable, ...]:
    for place, table in enumerate(given.methods):
        import_method(table.name, f"{where}: methods[{place}].name", reach)
    forms = [settings_model(table, where, place) for place, table in enumerate(given.methods)]
    known = {name for own in forms for name in own.model_fields}
    for key in given.training:
        if key not in known:
            raise ConfigError(f"{where}: unknown key training.{key}: {suggest(key, known)}")
    done = []
    for place, (table, own) in enumerate(zip(given.methods, forms, strict=True)):
        # Each table is checked apart, so that the error names the one the value stands in.
        shared = {key: given.training[key] for key in given.training if key in own.model_fields}
        settings = {
            **_given(validate(own, shared, where, ["training"])),
            **_preset(table, where, place),
            **_given(
                validate_options(
                    own, table.settings, where, ["methods", place], MethodTable.model_fields
                )
            ),
        }
        named: dict[str, Any] = {
            "name": table.name,
            "personalise": table.personalise,
            "aggregate": resolve_aggregate(given, table, where, place),
            "refit": table.refit,
        }
        try:
            method = build_method(MethodTable(**named, **settings))
        except IdiolectError as error:
            raise ConfigError(f"{where}: methods[{place}]: {error}") from None
        done.append(
            MethodTable(
                **named,
                label=table.label or method.title or table.name.rpartition(":")[2],
                rounds=table.rounds or given.rounds,
                preset=table.preset,
                **settings_of(method, own),
            )
        )
    _refuse_equal_labels(done, where)
    return tuple(done)


def _presets_before_training(given: Experiment, made: Sequence[MethodTable]) -> Iterator[str]:
    """Say which settings of [training] a method does not take, since its preset has them."""
    for table, own in zip(given.methods, made, strict=True):
        preset = imported_method(table.name).presets.get(table.preset or "", {})
        over = [
            f"{key} = {own.settings[key]}"
            for key, value in given.training.items()
            if key in preset and key not in table.settings and value != preset[key]
        ]
        if over:
            yield (
                f"{own.label}: its preset {table.preset!r} comes before [training], so "
                f"{', '.join(over)}; what should differ goes into its own [[methods]] table"
            )


def _preset(table: MethodTable, where: str, place: int) -> dict[str, Any]:
    """Return the settings a preset stands for."""
    presets = imported_method(table.name).presets
    if table.preset is not None and table.preset not in presets:
        none = f"{table.preset!r}; {table.name} has none: leave it out"
        known = suggest(table.preset, presets) if presets else none
        raise ConfigError(f"{where}: methods[{place}].preset: unknown preset {known}")
    return presets[table.preset] if table.preset is not None else {}


def _refuse_equal_labels(tables: Sequence[MethodTable], where: str) -> None:
    seen: dict[str, str] = {}
    for place, table in enumerate(tables):
        label = table.label_or_name
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
            f"{where}: {key}.partition: unknown partition {suggest(partition.name, PARTITIONS)}"
        )
    # `min_size` is the federation's: data.min_size.
    form = signature_model(PARTITIONS[partition.name], ("candidates", "min_size"))
    for name in partition.options:
        if name not in form.model_fields and name in Data.model_fields:
            raise ConfigError(
                f"{where}: {key}.partition.{name}: {name} stands beside partition, not in it; "
                f"write {key}.{name}"
            )
    options = validate(form, partition.options, where, [key, "partition"])
    return Named(name=partition.name, **with_defaults(options))


def _source(
    source: str, options: Mapping[str, Any], where: str, reach: Permissions, key: str
) -> tuple[str, dict[str, Any]]:
    """Resolve a named source or a path, which becomes absolute: the file will be copied."""
    path = [*key.split("."), "options"]
    options = _tokeniser_found(options, where, reach, key)
    if source in SOURCES:
        taker = SOURCES[source].make or SOURCES[source].read
        if SOURCES[source].table is not None:  # a small table, which is read as it is
            if options:
                raise ConfigError(f"{where}: {key}.options: {source!r} has no options")
            return source, {}
        form = signature_model(taker, ("files", "name", "provenance"))
        return source, with_defaults(validate(form, options, where, path))
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
        raise ConfigError(f"{where}: {key}.source: unknown source {suggest(source, SOURCES)}")
    return str(file), _given(
        validate(signature_model(read, ("path", "labelled")), options, where, path)
    )


def _tokeniser_found(
    options: Mapping[str, Any], where: str, reach: Permissions, key: str
) -> Mapping[str, Any]:
    """Make the place of a tokeniser absolute, and see that one is there."""
    given = options.get("tokeniser")
    if not isinstance(given, str) or given in ("", EMBEDDED):
        return options
    if reach.base is None:
        raise ConfigError(
            f"{where}: {key}.options.tokeniser is {given!r}, and no path from outside is opened; "
            f"whoever runs this machine has to give it among the options of the data, or use "
            f"'{EMBEDDED}'"
        )
    file = str((reach.base / Path(given).expanduser()).resolve())
    try:
        Tokeniser.load(file)
    except DataError as error:
        raise DataError(f"{where}: {key}.options.tokeniser: {error}") from error
    return {**options, "tokeniser": file}


def _read_words(path: Path, where: str) -> tuple[str, ...]:
    """Read a list of words, one a line; those that stand for none (<pad>, ...) are left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{where}.words: {path} cannot be read ({type(error).__name__}); give a file with a "
            "word a line, or a number to hash words to"
        ) from error
    words = [line.strip() for line in lines if line.strip() and line.strip() not in SPECIAL]
    if not words:
        raise DataError(f"{where}.words: {path} holds no word")
    word, count = Counter(words).most_common(1)[0]
    if count > 1:
        raise DataError(f"{where}.words: {path} has {word!r} twice; each word needs one number")
    return tuple(words)


def _given(values: BaseModel) -> dict[str, Any]:
    """Return what was set, without defaults."""
    return {name: getattr(values, name) for name in values.model_fields_set}


# Several divisions of data in one experiment: what each changes in [data].


def with_splits(raw: Raw) -> Raw:
    """Return every split the keys of [data] that it does not change itself."""
    data, splits = raw.get("data", {}), raw.get("splits", ())
    if not isinstance(data, Mapping) or not isinstance(splits, (list, tuple)) or not splits:
        return raw
    whole = [{**data, **own} if isinstance(own, Mapping) else own for own in splits]
    return {**raw, "splits": whole}


def refuse_equal_splits(splits: Sequence[SplitTable], where: str) -> Sequence[SplitTable]:
    """Refuse splits whose results would stand in one folder."""
    seen: dict[str, str] = {}
    for place, split in enumerate(splits):
        key = folder_name(split.name).casefold()
        if key in seen or not split.name:
            raise ConfigError(
                f"{where}: splits[{place}].name: {split.name!r} is too like "
                f"{seen.get(key, '')!r}; give each split a name of its own"
            )
        seen[key] = split.name
    return splits


def split_experiments(experiment: Experiment) -> dict[str, Experiment]:
    """Return an experiment for each split, by its name; without splits one, named ""."""
    plain = {"splits": (), "tune": None}
    if not experiment.splits:
        return {"": experiment.model_copy(update=plain)}
    return {
        split.name: experiment.model_copy(
            update={
                **plain,
                "name": f"{experiment.name}: {split.name}",
                "data": Data(**{name: getattr(split, name) for name in Data.model_fields}),
            }
        )
        for split in experiment.splits
    }


# Write the small part of TOML that experiments use; the standard library only reads it.


_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dump_toml(content: Mapping[str, Any]) -> str:
    """Write values, then tables, then lists of tables; None is left out, for TOML has none."""
    lines = [f"{_key(key)} = {_value(value)}" for key, value in _kept(content) if not _table(value)]
    for key, value in _kept(content):
        if isinstance(value, Mapping):
            lines += ["", f"[{_key(key)}]", *_entries(value)]
    for key, value in _kept(content):
        if _table(value) and not isinstance(value, Mapping):
            for entry in value:
                lines += ["", f"[[{_key(key)}]]", *_entries(entry)]
    return "\n".join(lines).strip() + "\n"


def _entries(content: Mapping[str, Any]) -> list[str]:
    return [f"{_key(key)} = {_value(value)}" for key, value in _kept(content)]


def _kept(content: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in content.items() if value is not None]


def _table(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(entry, Mapping) for entry in value)
    return isinstance(value, Mapping)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else quoted_text(key)


def quoted_text(text: str) -> str:
    """Quote as JSON does: its escapes are TOML's, save that TOML wants DEL escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)  # of inf and nan too, it is what TOML calls them
    if isinstance(value, str):
        return quoted_text(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(inner) for inner in value) + "]"
    if isinstance(value, Mapping):
        inner = ", ".join(_entries(value))
        return "{ " + inner + " }" if inner else "{}"
    raise TypeError(f"TOML has no {type(value).__name__}")
