"""Check raw TOML values against a pydantic model, or against what a function's signature says."""

import difflib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, Union

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from idiolect.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)

STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)
"""Nothing unknown, nothing changed later, no "5" for 5."""


def validate(model: type[Model], raw: Any, where: str, path: Sequence[str | int] = ()) -> Model:
    """Validate, or raise one line about the first key that is wrong."""
    if not isinstance(raw, Mapping):
        raise ConfigError(
            f"{where}: {key_path(path)} is {_shown(raw)}, expected a table of "
            f"{', '.join(model.model_fields)}"
        )
    try:
        return model.model_validate(as_tuples(raw))
    except ValidationError as error:
        raise ConfigError(_line(model, error, where, path)) from None


def validate_options(
    model: type[Model],
    options: Mapping[str, Any],
    where: str,
    path: Sequence[str | int],
    beside: Iterable[str],
) -> Model:
    """Validate options that are written beside the keys `beside` of their table."""
    for key in options:
        if key not in model.model_fields:
            known = [*model.model_fields, *beside]
            raise ConfigError(
                f"{where}: unknown key {key_path([*path, key])}: {suggest(key, known)}"
            )
    return validate(model, options, where, path)


def signature_model(function: Callable[..., Any], without: Sequence[str]) -> type[BaseModel]:
    """Make a model of a function's options: their names, types and defaults."""
    fields: dict[str, Any] = {}
    for name, option in inspect.signature(function, eval_str=True).parameters.items():
        if name in without or option.kind in (option.VAR_KEYWORD, option.VAR_POSITIONAL):
            continue
        default = ... if option.default is option.empty else option.default
        fields[name] = (Any if option.annotation is option.empty else option.annotation, default)
    return create_model("Options", __config__=STRICT, **fields)


def with_defaults(values: BaseModel) -> dict[str, Any]:
    """Return every option that has a value, defaults too."""
    named = {name: getattr(values, name) for name in type(values).model_fields}
    return {name: value for name, value in named.items() if value is not None}


def as_tuples(value: Any) -> Any:
    """Turn lists into tuples, all the way down: what is frozen holds no list."""
    if isinstance(value, Mapping):
        return {key: as_tuples(inner) for key, inner in value.items()}
    return tuple(as_tuples(inner) for inner in value) if isinstance(value, list) else value


def _line(
    model: type[BaseModel], error: ValidationError, where: str, path: Sequence[str | int]
) -> str:
    # Unknown keys first: a misspelt required key gives two errors, and this one explains both.
    problems = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    problem = problems[0]
    steps = [step for step in problem["loc"] if not _is_branch(step)]
    key = key_path([*path, *steps])
    kind = problem["type"]
    if kind == "extra_forbidden":
        known = _fields_at(model, steps[:-1])
        return f"{where}: unknown key {key}: {suggest(str(steps[-1]), known)}"
    if kind == "missing":
        return f"{where}: {key} is missing; add it"
    said = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if kind == "tuple_type":
        said = "a list in [ ]"
    if kind == "too_short":
        said = f"a list of {problem['ctx']['min_length']} or more"
    if kind == "value_error":
        return f"{where}: {key or 'the experiment'}: {said}"
    return f"{where}: {key} is {_shown(problem['input'])}, expected {said}"


def _is_branch(step: str | int) -> bool:
    """Return whether a step is pydantic's name for a member of a union, and no key of the file."""
    return isinstance(step, str) and (step in {"int", "float", "str", "bool"} or "[" in step)


def _fields_at(model: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """List the keys that exist where a path leads."""
    here: Any = model
    for step in path:
        if isinstance(step, str) and _is_model(here) and step in here.model_fields:
            here = here.model_fields[step].annotation
        models = [part for part in _parts(here) if _is_model(part)]
        here = models[0] if models else here
    return list(here.model_fields) if _is_model(here) else []


def _parts(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) in (Union, types.UnionType, tuple):
        return [inner for part in typing.get_args(annotation) for inner in _parts(part)]
    return [annotation]


def _is_model(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseModel)


def _shown(value: Any) -> str:
    shown = repr(list(value) if isinstance(value, tuple) else value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


# Errors about keys, in one line: the file, the key, what was found, what was meant.


# Names that other libraries use for the same thing, too far from ours to be found by spelling.
_ELSEWHERE = {
    "learning_rate": "lr",
    "eta": "lr",
    "batch_size": "batch",
    "minibatch": "batch",
    "local_epochs": "epochs",
    "num_clients": "clients",
    "num_users": "clients",
    "n_clients": "clients",
    "num_rounds": "rounds",
    "global_rounds": "rounds",
    "communication_rounds": "rounds",
    "fraction": "cohort",
    "participation": "cohort",
    "clients_per_round": "cohort",
    "optimizer": "optimiser",
    "wd": "weight_decay",
    "dataset": "source",
    "normalize": "normalise",
    "algorithm": "methods",
    "mu": "pull",
    "seed": "seeds",
}


def suggest(key: str, known: Iterable[str]) -> str:
    """Quote a wrong name with the nearest right one, or else with all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(key, names, 1, 0.6)
    if _ELSEWHERE.get(key) in names:
        close = [_ELSEWHERE[key]]
    if close:
        return f"{key!r}; did you mean {close[0]!r}?"
    return f"{key!r}; expected one of {', '.join(names) or 'nothing'}"


def key_path(path: Iterable[Any]) -> str:
    """Write a path of keys and places as one types it: methods[1].lr."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}"
    return text.removeprefix(".")
