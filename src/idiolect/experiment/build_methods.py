"""From a method's table in an experiment file to the method, with what is wrapped around it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, create_model

from idiolect.aggregation.aggregator import Aggregated, Aggregator
from idiolect.core.method import Method
from idiolect.core.wrap import Wrapper
from idiolect.errors import ConfigError
from idiolect.experiment.schema import Experiment, MethodTable, Named
from idiolect.experiment.suggestions import meant
from idiolect.experiment.untrusted import AGGREGATORS
from idiolect.experiment.validation import checked, signature_model
from idiolect.methods import METHODS
from idiolect.methods.personalise import Combined

_COMMON = {spec.name for spec in dataclasses.fields(Wrapper)}
_PARTS = {spec.name for spec in dataclasses.fields(Combined)} - _COMMON - {"combinations"}


def made(table: MethodTable) -> Method:
    """Make the method that a checked table describes, from the inside out."""
    parts = _PARTS if table.personalise else set()
    inner = {key: value for key, value in table.settings.items() if key not in parts}
    method: Method = METHODS[table.name](**inner)
    if table.aggregate is not None:
        method = Aggregated(method, rule(table.aggregate))
    if table.personalise:
        own = {key: value for key, value in table.settings.items() if key in parts}
        method = Combined(method, combinations=table.combinations, **own)
    return method


def form(table: MethodTable, where: str, place: int) -> type[BaseModel]:
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


def values(method: Method, form: type[BaseModel]) -> dict[str, Any]:
    """Read the settings of a form off a method and what it is wrapped around."""
    found: dict[str, Any] = {}
    layer: Method | None = method
    while layer is not None:
        for name in form.model_fields:
            if name not in found and hasattr(layer, name):
                found[name] = getattr(layer, name)
        layer = layer.base if isinstance(layer, Wrapper) else None
    return {name: found[name] for name in form.model_fields}


def rule(named: Named) -> Aggregator:
    """Make a rule of aggregation."""
    return AGGREGATORS[named.name](**named.options)


def aggregate(given: Experiment, table: MethodTable, where: str, place: int) -> Named | None:
    """Check a method's rule of aggregation, its own or everyone's, and write its options out."""
    own = table.aggregate is not None
    named = table.aggregate or given.aggregate
    if named is None or (not own and _needs_none(METHODS[table.name])):
        return None
    key = f"methods[{place}].aggregate" if own else "aggregate"
    if named.name not in AGGREGATORS:
        raise ConfigError(f"{where}: {key}.name: unknown rule {meant(named.name, AGGREGATORS)}")
    # How many are drawn is the experiment's to say.
    options = signature_model(AGGREGATORS[named.name], ("cohort",))
    checked_options = checked(options, named.options, where, key.split("."))
    written: Mapping[str, Any] = {n: getattr(checked_options, n) for n in options.model_fields}
    return Named(name=named.name, **written)


def _needs_none(method: type[Method]) -> bool:
    """Say whether a rule for everyone passes a method by: nobody's report could do harm there."""
    return method.pooled or method.aggregates == "nothing"
