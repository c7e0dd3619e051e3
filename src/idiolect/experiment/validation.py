"""Check raw TOML values against a pydantic model, or against what a function's signature says."""

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, Union

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from idiolect.errors import ConfigError
from idiolect.experiment.suggestions import dotted, meant

Model = TypeVar("Model", bound=BaseModel)

STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)
"""Nothing unknown, nothing changed later, no "5" for 5."""


def checked(model: type[Model], raw: Any, where: str, path: Sequence[str | int] = ()) -> Model:
    """Validate, or raise one line about the first key that is wrong."""
    if not isinstance(raw, Mapping):
        raise ConfigError(
            f"{where}: {dotted(path)} is {_shown(raw)}, expected a table of "
            f"{', '.join(model.model_fields)}"
        )
    try:
        return model.model_validate(as_tuples(raw))
    except ValidationError as error:
        raise ConfigError(_line(model, error, where, path)) from None


def signature_model(function: Callable[..., Any], without: Sequence[str]) -> type[BaseModel]:
    """Make a model of a function's options: their names, types and defaults."""
    fields: dict[str, Any] = {}
    for name, option in inspect.signature(function, eval_str=True).parameters.items():
        if name in without or option.kind in (option.VAR_KEYWORD, option.VAR_POSITIONAL):
            continue
        default = ... if option.default is option.empty else option.default
        fields[name] = (Any if option.annotation is option.empty else option.annotation, default)
    return create_model("Options", __config__=STRICT, **fields)


def everything(values: BaseModel) -> dict[str, Any]:
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
    key = dotted([*path, *steps])
    kind = problem["type"]
    if kind == "extra_forbidden":
        known = _fields_at(model, steps[:-1])
        return f"{where}: unknown key {key}: {meant(str(steps[-1]), known)}"
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
    """Tell pydantic's names for the members of a union, which are no keys of the file."""
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
