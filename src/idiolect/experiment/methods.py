"""From a method's table in an experiment file to the method, with what is wrapped around it."""

from collections.abc import Mapping
from typing import Any

from idiolect.aggregate import Aggregated, Aggregator
from idiolect.errors import ConfigError
from idiolect.experiment.checked import checked, signature_model
from idiolect.experiment.schema import Experiment, MethodTable, Named
from idiolect.experiment.words import meant
from idiolect.method import Method
from idiolect.methods import METHODS
from idiolect.robust import RULES

AGGREGATORS: dict[str, type[Aggregator]] = {**RULES}


def made(table: MethodTable) -> Method:
    """Make the method that a checked table describes."""
    method: Method = METHODS[table.name](**table.settings)
    if table.aggregate is not None:
        method = Aggregated(method, rule(table.aggregate))
    return method


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
    form = signature_model(AGGREGATORS[named.name], ())
    values = checked(form, named.options, where, key.split("."))
    options: Mapping[str, Any] = {n: getattr(values, n) for n in form.model_fields}
    return Named(name=named.name, **options)


def _needs_none(method: type[Method]) -> bool:
    """Say whether a rule for everyone passes a method by: nobody's report could do harm there."""
    return method.pooled or method.aggregates == "nothing"
