"""Experiments from outside: what one that a node or a server receives may name, and nothing else.

`admit` reads a raw table by a list of what is allowed. A key that is not on it, and a text where
only built-in names belong, is refused before anything is built. What a machine's own user or
operator allows beyond that is a `Reach`.
"""

import importlib
import importlib.machinery
import importlib.metadata
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, NamedTuple

from idiolect.aggregation import RULES, SERVER_OPTIMISERS, Private
from idiolect.aggregation.aggregator import Aggregator
from idiolect.core.method import Method
from idiolect.core.wrap import Wrapper
from idiolect.data import PARTITIONS, SOURCES
from idiolect.errors import ConfigError, suggest
from idiolect.methods import METHODS
from idiolect.methods.personalise import Combined
from idiolect.models import MODELS
from idiolect.models.adapters import ADAPTERS

AGGREGATORS: dict[str, type[Aggregator]] = {**RULES, **SERVER_OPTIMISERS, "dp": Private}

OWN = "own"  # stands for a file that whoever reads the experiment has to give

MOST = 8 << 20  # characters of an experiment
_LONGEST = 200  # characters of a label, a class or a word
_MANY = 1_000_000  # entries of a list
_DEPTH = 3  # of lists within lists

_WORD = re.compile(r"[A-Za-z0-9_+-]{0,40}")
_BASE = re.compile(r"sha256:[0-9a-f]{64}|embedded")

# Options of built-in networks, sources, partitions, methods and rules that are chosen by a word (or
# a list of words). Each of them compares the word with a fixed set; none opens anything by it.
_WORDS = "augmented candidates fb_names features folds home init kind middle norm order positions"
_WORDS += " scaling scheme sizes stem users variant"
# Names of classes and of clients, as the data have them: any line of text, compared with theirs.
_NAMES = frozenset(("leave_out", "only"))
WORDS = (
    _NAMES
    | frozenset(_WORDS.split())
    | {
        spec.name
        for owner in (*METHODS.values(), *AGGREGATORS.values(), Combined)
        for spec in fields(owner)
        if spec.metadata.get("choices")
    }
)


class Permissions(NamedTuple):
    """What may be opened and imported for an experiment beyond what is built in.

    Of a user's own experiment everything may be, with paths relative to `base`. Without a base the
    experiment came from outside: only what this machine's operator gave counts.
    """

    base: Path | None = None
    files: tuple[str, ...] = ()  # data that the operator gave, by path or name
    packages: tuple[str, ...] = ()  # installed packages that networks and methods may come from
    folders: tuple[str, ...] = ()  # where own modules may lie besides, on a user's own machine
    closed: tuple[str, ...] = ()  # folders that nothing is imported from


CLOSED = Permissions()


# Importing the module of a network or a method.


def import_factory(
    name: str, where: str, reach: Permissions, what: str = "model"
) -> Callable[..., Any]:
    """Import `package.module:factory`, if the reach allows the package; the only place to do so."""
    module, _, attribute = name.partition(":")
    if reach.base is None and not is_allowed(module, reach.packages):
        raise ConfigError(f"{where}: {refusal(name, reach.packages, what)}")
    with _path(reach):
        try:
            found = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # a module of somebody's raises anything
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ConfigError(
                f"{where}: {what} {name!r} cannot be imported ({said}); its module has to lie "
                "beside the experiment file or where the command is given, or be installed"
            ) from error
    own = reach.base is not None or reach.folders
    if not own and not _defined(found, attribute, reach.packages):
        raise ConfigError(
            f"{where}: {what} {name!r} is no function or class that {module} itself defines; from "
            "outside nothing else of it is called"
        )
    made: Callable[..., Any] = found
    return made


def packaged_methods() -> dict[str, str]:
    """List the methods that installed packages bring: a name, and its `module:Class`.

    A package declares them as entry points of the group `idiolect.methods`.
    """
    found = importlib.metadata.entry_points(group="idiolect.methods")
    return {one.name: one.value for one in found if one.name not in METHODS}


def import_method(name: str, where: str, reach: Permissions) -> type[Method]:
    """Find a method: a built-in one, one of a package, or `module:Class` where permitted."""
    if name in METHODS:
        return METHODS[name]
    packaged = packaged_methods()
    if name in AGGREGATORS:
        raise ConfigError(
            f"{where}: {name!r} is no method but a rule of the server, for any method that "
            f"averages; write name = 'fedavg', aggregate = {name!r}"
        )
    if name not in packaged and ":" not in name:
        raise ConfigError(
            f"{where}: unknown method {suggest(name, [*METHODS, *packaged])} (your own: "
            "'module:Class')"
        )
    found = import_factory(packaged.get(name, name), where, reach, "method")
    _refuse_half_methods(found, f"{where}: method {name!r}")
    return found  # type: ignore[return-value]


def imported_method(name: str) -> type[Method]:
    """Return the method of a resolved experiment; its module was imported when it was allowed."""
    if name in METHODS:
        return METHODS[name]
    module, _, attribute = packaged_methods().get(name, name).partition(":")
    if module not in sys.modules:
        raise ConfigError(f"method {name!r} was not imported; load the experiment again")
    found: type[Method] = getattr(sys.modules[module], attribute)
    return found


def _refuse_half_methods(found: Any, what: str) -> None:
    """Refuse what is no method, or one that would fail in its first round."""
    if not inspect.isclass(found) or not issubclass(found, Method) or issubclass(found, Wrapper):
        raise ConfigError(f"{what} is no class derived from Method; see docs/method.md")
    if any(isinstance(value, Field) for value in vars(found).values()):
        raise ConfigError(
            f"{what} declares settings and is no dataclass; write @dataclass(frozen=True, "
            "kw_only=True) above the class"
        )
    if found.client_step is Method.client_step:
        raise ConfigError(f"{what} has no client_step, which says what a client does in a round")


def is_allowed(module: str, packages: Collection[str]) -> bool:
    """Return whether a module is one of some packages, or lies in one."""
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        return False
    return any(parts[: len(own)] == own for own in (one.split(".") for one in packages if one))


def refusal(name: str, packages: Collection[str], what: str = "model") -> str:
    """Return that a network or a method is somebody's code, and how to allow it."""
    known = f"; this list has {', '.join(packages)}" if packages else ""
    return (
        f"{what} {name!r} is neither built in nor of a package that is allowed here{known} (built "
        f"in: {', '.join(METHODS if what == 'method' else MODELS)})"
    )


def custom_code(raw: Mapping[str, Any]) -> dict[str, str]:
    """Find what of a raw experiment is not built in: `module:attribute`, and whether a network."""
    methods = raw.get("methods", ())
    named = [
        own.get("name") if isinstance(own, Mapping) else own
        for own in (methods if isinstance(methods, list | tuple) else ())
    ]
    packaged = packaged_methods() if any(name not in METHODS for name in named) else {}
    codes = [packaged.get(name, name) for name in named if isinstance(name, str)]
    return {
        **dict.fromkeys(custom_networks(raw), "network"),
        **{name: "method" for name in codes if ":" in name},
    }


def custom_networks(raw: Mapping[str, Any]) -> list[str]:
    """List the networks of a raw experiment that are not built in: `module:factory` each."""
    model = raw.get("model", {})
    if not isinstance(model, Mapping):
        return [model] if isinstance(model, str) and model not in MODELS else []
    several, assign = model.get("architectures", ()), model.get("assign", {})
    tables = [
        model,
        model.get("auxiliary"),
        *(several if isinstance(several, list | tuple) else ()),
    ]
    tables += assign.values() if isinstance(assign, Mapping) else ()
    names = [own.get("name") if isinstance(own, Mapping) else own for own in tables]
    each = model.get("each", {})
    names += each if isinstance(each, Mapping) else ()
    return list(dict.fromkeys(n for n in names if isinstance(n, str) and ":" in n))


def trust_named_code(raw: Mapping[str, Any]) -> Permissions:
    """Allow the modules that an experiment names, installed or where the command was given.

    Those that were imported already, for a user's own experiment, may lie where they were found.
    """
    packages = tuple(name.partition(":")[0] for name in custom_code(raw))
    folders = {str(Path.cwd()): None}
    for name in packages:
        top = sys.modules.get(name.partition(".")[0])
        if top is not None and top.__file__:
            file = Path(top.__file__).resolve()
            folders[str(file.parents[1] if file.name == "__init__.py" else file.parent)] = None
    return Permissions(packages=packages, folders=tuple(folders))


def refuse_code(raw: Mapping[str, Any], where: str, *folders: Path) -> None:
    """Refuse to import what an experiment names, saying what that is and from where it would come.

    For files that may be somebody else's: only their user can say that they are trusted.
    """
    for name, what in custom_code(raw).items():
        raise ConfigError(
            f"{where} names the {what} {name!r}, which is code: it would be imported from "
            f"{_origin(name, folders)}. If you trust it, add --trust-code (from Python: "
            "trust_code=True)"
        )


def _origin(name: str, folders: Collection[Path]) -> str:
    """Return the file that a network's module would be imported from, without importing it."""
    top = name.partition(":")[0].partition(".")[0]
    path = [*(str(folder.resolve()) for folder in folders), *sys.path]
    try:
        spec = importlib.machinery.PathFinder.find_spec(top, path)
    except (ImportError, ValueError):
        spec = None
    return (
        "no file that is found here (give the command in its folder)"
        if spec is None
        else spec.origin or top
    )


def _defined(found: Any, attribute: str, packages: Collection[str]) -> bool:
    """Return whether a thing was written in one of the packages, and not merely imported there."""
    written = inspect.isfunction(found) or inspect.isclass(found)
    public = attribute.isidentifier() and not attribute.startswith("_")
    return written and public and is_allowed(str(getattr(found, "__module__", "")), packages)


@contextmanager
def _path(reach: Permissions) -> Iterator[None]:
    """Set sys.path to where modules may be imported from."""
    before = list(sys.path)
    if reach.base is not None:
        # A user's module stands beside the experiment file, or where the command was given.
        sys.path[:0] = [str(reach.base), str(Path.cwd())]
    else:
        closed = [Path(folder).resolve() for folder in reach.closed]
        installed = [own for own in before if os.path.isabs(own) and not _inside(own, closed)]
        sys.path[:] = [*reach.folders, *installed]
    try:
        yield
    finally:
        sys.path[:] = before


def _inside(path: str, folders: Collection[Path]) -> bool:
    return any(Path(path).resolve().is_relative_to(folder) for folder in folders)


def by_digest(raw: Any) -> Any:
    """Name bases by their digest alone, in every table that has one: a path is one machine's."""
    if isinstance(raw, list | tuple):
        return [by_digest(one) for one in raw]
    if not isinstance(raw, Mapping):
        return raw
    found = {key: by_digest(value) for key, value in raw.items()}
    known = isinstance(raw.get("digest"), str) and _BASE.fullmatch(raw["digest"])
    return found | (
        {key: raw["digest"] for key in ("weights", "start") if key in raw} if known else {}
    )


# What an experiment from outside may hold.

Rule = Callable[[Any, str], None]


def refuse_untrusted(raw: Mapping[str, Any], where: str, packages: Collection[str] = ()) -> None:
    """Refuse an experiment from outside that holds anything but what is listed here."""
    try:
        _experiment(packages)(raw, "")
    except _Forbidden as error:
        raise ConfigError(f"{where}: {error}") from None


class _Forbidden(Exception):
    pass


def _experiment(packages: Collection[str]) -> Rule:
    numbers = _listed(_number)
    column = _table(
        **dict.fromkeys(("type", "encode", "impute"), _word),
        scale=_number,
        missing=_listed(_text),
        format=_text,
    )
    data = _table(
        source=_one_of((*SOURCES, OWN), "source"),
        options=_options(),
        normalise=_word,
        columns=_mapping(_text, _either(_word, column)),
        classes=_listed(_text),
        task=_either(
            _word,
            _table(name=_word, form=_word, loss=_word, intervals=_number, cuts=numbers),
        ),
        class_weights=_either(_word, _mapping(_text, _number)),
        partition=_named(_one_of(PARTITIONS, "partition")),
        split=_either(_word, numbers),
        pool=_word,
        public=_table(source=_one_of((*SOURCES, OWN), "source"), size=_number, options=_options()),
        text=_table(words=_either(_number, _listed(_text)), length=_number, next_word=_number),
        **dict.fromkeys(
            ("val", "stratify", "ordered", "min_size", "drop", "seed", "common_test"), _number
        ),
    )
    network = _network(packages)
    base = dict.fromkeys(("weights", "digest"), _base)
    labelled = _named(network, words=bool(packages), label=_text, **base)
    aggregate = _named(_one_of(AGGREGATORS, "rule"))
    parts = _listed(_either(_word, _listed(_word)))
    return _table(
        name=_text,
        seeds=numbers,
        rounds=_number,
        cohort=_number,
        draw=_word,
        bystanders=_word,
        unseen=_number,
        data=data,
        model=_named(
            network,
            words=bool(packages),
            each=_mapping(network, _number),
            architectures=_listed(labelled),
            assign=_mapping(_text, labelled),
            auxiliary=labelled,
            **base,
        ),
        adapter=_table(
            name=_one_of(ADAPTERS, "adapter"),
            targets=_listed(_text),
            start=_base,
            digest=_base,
            **dict.fromkeys(("rank", "alpha", "count", "layers", "head"), _number),
        ),
        training=_options(),
        aggregate=aggregate,
        evaluate=_table_of(_either(_number, _word)),
        backend=_backend,
        logging=_table_of(_false),
        deploy=_named(_never, packages=_listed(_text), compress=_word),
        methods=_listed(
            _named(
                _method(packages),
                words=bool(packages),
                label=_text,
                preset=_word,
                personalise=parts,
                aggregate=aggregate,
            )
        ),
        # For simulations and comparisons; nodes and servers have no use for them.
        splits=_empty,
        tune=_never,
        attack=_never,
    )


def _network(packages: Collection[str]) -> Rule:
    return _code(packages, MODELS, "model")


def _method(packages: Collection[str]) -> Rule:
    return _code(packages, METHODS, "method")


def _code(packages: Collection[str], known: Collection[str], what: str) -> Rule:
    """Allow what is built in, and `module:attribute` of the operator's packages."""

    def rule(value: Any, at: str) -> None:
        if not isinstance(value, str):
            raise _Forbidden(f"{at} is {_shown(value)}, expected the name of a {what}")
        if value in known:
            return
        full = packaged_methods().get(value, value) if what == "method" else value
        module, colon, attribute = full.partition(":")
        if not colon:
            raise _Forbidden(f"{at}: unknown {what} {suggest(value[:_LONGEST], known)}")
        if not is_allowed(module, packages) or not attribute.isidentifier():
            raise _Forbidden(f"{at}: {refusal(value[:_LONGEST], packages, what)}")

    return rule


def _backend(value: Any, at: str) -> None:
    """Nodes and servers choose their own machine; an address in it is nobody's to give."""
    nowhere = _table(address=_one_of(("",), "address"), workers=_number, cpus=_number, gpus=_number)
    keys = ("kind", "device", "width", "checkpoint_every", "personal", "personal_mb", "precision",
            "kernels")  # fmt: skip
    both = _either(_number, _word)
    _table(ray=nowhere, graph=_number, **dict.fromkeys(keys, both))(value, at)


def _number(value: Any, at: str) -> None:
    if not isinstance(value, bool | int | float):
        raise _Forbidden(f"{at} is {_shown(value)}, expected a number or true or false")


def _word(value: Any, at: str) -> None:
    if not isinstance(value, str) or not _WORD.fullmatch(value):
        raise _Forbidden(f"{at} is {_shown(value)}, expected one plain word; no path is opened")


def _base(value: Any, at: str) -> None:
    if not isinstance(value, str) or not _BASE.fullmatch(value):
        raise _Forbidden(
            f"{at} is {_shown(value)}, expected a base's digest, 'sha256:...'; no path is opened"
        )


def _text(value: Any, at: str) -> None:
    """Text that stands for itself: a label, a class, a word of a vocabulary."""
    if not isinstance(value, str) or len(value) > _LONGEST or not value.isprintable():
        raise _Forbidden(f"{at} is {_shown(value)}, expected a line of {_LONGEST} letters at most")


def _false(value: Any, at: str) -> None:
    if value is not False:
        raise _Forbidden(f"{at} is {_shown(value)}; nodes and servers log nowhere: leave it out")


def _empty(value: Any, at: str) -> None:
    if value != []:
        raise _Forbidden(f"{at} has no meaning on a federation of nodes; leave it out")


def _never(value: Any, at: str) -> None:
    raise _Forbidden(f"{at} has no meaning on a federation of nodes; leave it out")


def _one_of(known: Collection[str], what: str) -> Rule:
    def rule(value: Any, at: str) -> None:
        if not isinstance(value, str) or value not in known:
            given = repr(value) if not isinstance(value, str) else value
            raise _Forbidden(
                f"{at}: unknown {what} {suggest(given[:_LONGEST], known)} (no path in an "
                "experiment from outside is opened)"
            )

    return rule


def _either(*rules: Rule) -> Rule:
    def rule(value: Any, at: str) -> None:
        for own in rules[:-1]:
            try:
                return own(value, at)
            except _Forbidden:
                continue
        return rules[-1](value, at)

    return rule


def _listed(entry: Rule) -> Rule:
    def rule(value: Any, at: str) -> None:
        if not isinstance(value, list) or len(value) > _MANY:
            raise _Forbidden(f"{at} is {_shown(value)}, expected a list; no path is opened")
        for place, own in enumerate(value):
            entry(own, f"{at}[{place}]")

    return rule


def _mapping(key: Rule, entry: Rule) -> Rule:
    def rule(value: Any, at: str) -> None:
        for name, own in _dict(value, at).items():
            key(name, at)
            entry(own, f"{at}.{name}")

    return rule


def _table(**rules: Rule) -> Rule:
    def rule(value: Any, at: str) -> None:
        for name, own in _dict(value, at).items():
            if name not in rules:
                raise _Forbidden(f"unknown key {_at(at, suggest(name[:_LONGEST], rules))}")
            rules[name](own, _at(at, name))

    return rule


def _table_of(entry: Rule) -> Rule:
    def rule(value: Any, at: str) -> None:
        for name, own in _dict(value, at).items():
            _word(name, at)
            entry(own, _at(at, name))

    return rule


def _options(words: bool = False) -> Rule:
    """Numbers, and words where the option is known to be chosen by a word; or `words` anywhere."""

    def option(value: Any, at: str, name: str, depth: int = 0) -> None:
        if isinstance(value, list) and depth < _DEPTH and len(value) <= _MANY:
            for place, own in enumerate(value):
                option(own, f"{at}[{place}]", name, depth + 1)
        elif isinstance(value, str) and not (words or name in WORDS):
            raise _Forbidden(
                f"{at} is {_shown(value)}: from outside, no text is taken here and no path opened"
            )
        elif isinstance(value, str):
            (_text if name in _NAMES and not words else _word)(value, at)
        else:
            _number(value, at)

    def rule(value: Any, at: str) -> None:
        for name, own in _dict(value, at).items():
            _word(name, at)
            option(own, _at(at, name), name)

    return rule


def _named(name: Rule, words: bool = False, **rules: Rule) -> Rule:
    """A name, alone or in a table with some keys of its own and options beside them."""
    known = {"name": name, **rules}

    def rule(value: Any, at: str) -> None:
        if isinstance(value, str):
            return name(value, at)
        own = _dict(value, at)
        _table(**known)({key: own[key] for key in own if key in known}, at)
        # What is built in takes no text that is not in the list; a package's own may.
        builtin = own.get("name") in (*MODELS, *METHODS) or not words
        _options(not builtin)({key: own[key] for key in own if key not in known}, at)

    return rule


def _dict(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Forbidden(f"{at or 'the experiment'} is {_shown(value)}, expected a table")
    return value


def _at(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def _shown(value: Any) -> str:
    shown = repr(value)[:120]
    return shown if len(shown) <= 60 else shown[:57] + "..."
