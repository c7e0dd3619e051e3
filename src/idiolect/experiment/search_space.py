"""Which settings are tried: checked against each method, listed as a grid, or drawn."""

import itertools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from idiolect.errors import ConfigError, IdiolectError
from idiolect.experiment.build_methods import form, made
from idiolect.experiment.schema import MethodTable, Range, Tune
from idiolect.experiment.suggestions import meant
from idiolect.experiment.validation import as_tuples, checked

Settings = dict[str, Any]
Space = dict[str, "tuple[Any, ...] | Range"]

_TRIALS = 10  # of a random search that names no budget
_DRAWS = 9  # keeps these draws apart from other uses of a seed


def checked_tune(tune: Tune, methods: Sequence[MethodTable], where: str) -> Tune:
    """Check every value against the methods it is for, and write the budget out."""
    labels = [table.label or table.name for table in methods]
    for label in tune.methods:
        if label not in labels:
            raise ConfigError(f"{where}: unknown method tune.methods.{meant(label, labels)}")
    known = {name for table in methods for name in table.settings}
    for key in tune.space:
        if key not in known:
            raise ConfigError(f"{where}: unknown key tune.space.{key}: {meant(key, known)}")
    tune = tune.model_copy(
        update={
            "space": _values(tune.space, where, "tune.space"),
            "methods": {
                label: _values(own, where, f"tune.methods.{label}")
                for label, own in tune.methods.items()
            },
        }
    )
    spaces = {table.label or table.name: space(tune, table, where) for table in methods}
    if not any(spaces.values()):
        raise ConfigError(f"{where}: tune.space is empty; name settings to try, such as lr")
    for table in methods:
        if tune.rounds is not None and tune.rounds > (table.rounds or tune.rounds):
            raise ConfigError(
                f"{where}: tune.rounds is {tune.rounds}, more than the {table.rounds} of "
                f"{table.label}; lower it"
            )
    return tune.model_copy(update={"budget": _budget(tune, spaces, where)})


def space(tune: Tune, table: MethodTable, where: str = "[tune]") -> Space:
    """Return what is tried for one method: shared settings that it has, and its own."""
    label = table.label or table.name
    own = tune.methods.get(label, {})
    for key in own:
        if key not in table.settings:
            raise ConfigError(
                f"{where}: unknown key tune.methods.{label}.{key}: {meant(key, table.settings)}"
            )
    # In a setting of its own a method passes over the shared one, even to leave it untuned: [].
    found = {key: held for key, held in tune.space.items() if key in table.settings} | own
    return {
        key: _fitting(held, key, table, f"{where}: tune of {label}")
        for key, held in found.items()
        if held != ()
    }


def _fitting(held: "tuple[Any, ...] | Range", key: str, table: MethodTable, where: str) -> Any:
    """Refuse values that the method refuses; a range must fit with both its ends."""
    known = form(table, where, 0)
    values = []
    for value in (held.low, held.high) if isinstance(held, Range) else held:
        fitting = getattr(checked(known, {key: value}, where), key)
        try:
            made(with_settings(table, {key: fitting}))
        except IdiolectError as error:
            raise ConfigError(f"{where}: {error}") from None
        values.append(fitting)
    return held if isinstance(held, Range) else tuple(values)


def with_settings(table: MethodTable, settings: Mapping[str, Any]) -> MethodTable:
    """Return a method's table with some settings changed."""
    held = {name: getattr(table, name) for name in MethodTable.model_fields}
    return MethodTable(**held, **{**table.settings, **settings})


def listed(tune: Tune, label: str, held: Space) -> Iterator[Settings]:
    """List a grid's cells in the file's order, or draws; no cell twice, none beyond the budget."""
    if tune.search == "grid":
        choices = [values for values in held.values() if not isinstance(values, Range)]
        cells = itertools.product(*choices)
        yield from (dict(zip(held, cell, strict=True)) for cell in cells)
        return
    generator = np.random.default_rng((tune.seed, _DRAWS, zlib.crc32(label.encode())))
    seen: list[Settings] = []
    budget = tune.budget or _TRIALS
    for _ in range(100 * budget):  # a small space is soon exhausted
        if len(seen) == budget:
            return
        drawn = {key: _drawn(values, generator) for key, values in held.items()}
        if drawn not in seen:
            seen.append(drawn)
            yield drawn


def named(settings: Mapping[str, Any]) -> str:
    """Write settings as one would say them."""
    return ", ".join(f"{key}={value}" for key, value in settings.items()) or "as given"


def _values(table: Mapping[str, Any], where: str, path: str) -> Space:
    found: Space = {}
    for key, given in table.items():
        if isinstance(given, Mapping):
            found[key] = checked(Range, given, where, [path, key])
        elif isinstance(given, (Range, tuple)):
            found[key] = given
        elif isinstance(given, list):
            found[key] = as_tuples(given)
        else:
            raise ConfigError(
                f"{where}: {path}.{key} is {given!r}; expected a list of values to try, or "
                "{ low = ..., high = ... }"
            )
    return found


def _budget(tune: Tune, spaces: Mapping[str, Space], where: str) -> int:
    if tune.search != "grid":
        return tune.budget or _TRIALS
    sizes = {}
    for label, held in spaces.items():
        for key, values in held.items():
            if isinstance(values, Range):
                raise ConfigError(
                    f"{where}: tune of {label}: {key} is a range, which a grid cannot list; give "
                    'values in [ ], or search = "random"'
                )
        sizes[label] = sum(1 for _ in listed(tune, label, held))
    largest = max(sizes, key=lambda label: sizes[label])
    if tune.budget is not None and sizes[largest] > tune.budget:
        raise ConfigError(
            f"{where}: the grid of {largest} has {sizes[largest]} cells and tune.budget is "
            f'{tune.budget}; raise it, leave values out, or use search = "random"'
        )
    return tune.budget or sizes[largest]


def _drawn(values: "tuple[Any, ...] | Range", generator: np.random.Generator) -> Any:
    if not isinstance(values, Range):
        return values[int(generator.integers(len(values)))]
    low, high = values.low, values.high
    if isinstance(low, int) and isinstance(high, int) and not values.log:
        return int(generator.integers(low, high + 1))
    if values.log:
        number = math.exp(generator.uniform(math.log(low), math.log(high)))
    else:
        number = generator.uniform(low, high)
    if isinstance(low, int) and isinstance(high, int):
        return round(number)
    return min(max(rounded(number), low), high)


def rounded(number: float) -> float:
    """Keep three digits: what is reported can be typed, and no more of it matters."""
    return float(f"{number:.3g}")
