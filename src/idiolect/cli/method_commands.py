"""The command that lists methods and their settings."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from idiolect.cli.guard import guarded
from idiolect.cli.options import JSON, complete_method

if TYPE_CHECKING:
    from idiolect.core.method import Method


@guarded
def list_methods(
    name: Annotated[
        str | None,
        typer.Argument(help="One method, with all its settings.", autocompletion=complete_method),
    ] = None,
    json: Annotated[bool, JSON] = False,
) -> None:
    """List the methods, or tell all about one: paper, settings, defaults, ranges."""
    from idiolect.cli.screen import console, print_json
    from idiolect.errors import ConfigError
    from idiolect.experiment.validation import suggest
    from idiolect.methods import METHODS

    if name is not None and name not in METHODS:
        raise ConfigError(f"unknown method {suggest(name, METHODS)}")
    chosen = {key: METHODS[key] for key in METHODS if name in (None, key)}
    if json:
        found = {key: described(method) for key, method in chosen.items()}
        print_json(found if name is None else found[name])
        return
    screen = console()
    if name is None:
        screen.print(_overview(chosen))
        screen.print("`idiolect methods NAME` tells a method's settings.", markup=False)
    else:
        about = described(chosen[name])
        screen.print(f"{about['title']} ({name}): {about['about']}", markup=False, soft_wrap=True)
        if about["paper"]:
            screen.print(f"Paper: {about['paper']}", markup=False, soft_wrap=True)
        screen.print(_settings(about["settings"]))
        for preset, values in about["presets"].items():
            held = ", ".join(f"{key} = {value}" for key, value in values.items())
            screen.print(f"preset {preset}: {held}", markup=False, soft_wrap=True)


def described(method: "type[Method]") -> dict[str, Any]:
    """Tell what a method is, from its own declaration."""
    return {
        "title": method.title,
        "about": _first_line(method.__doc__),
        "paper": method.paper,
        "presets": method.presets,
        "settings": [
            {
                "name": spec.name,
                "default": spec.default,
                "type": str(getattr(spec.type, "__name__", spec.type)),
                "range": allowed(spec.metadata),
                "meaning": spec.metadata.get("doc", ""),
            }
            for spec in dataclasses.fields(method)
            if spec.name not in method.unused
        ],
    }


def allowed(rule: Any) -> str:
    """Say which values a setting may have."""
    if rule.get("choices"):
        return ", ".join(rule["choices"])
    words = {"above": "> {}", "least": "≥ {}", "most": "≤ {}"}
    return ", ".join(
        text.format(rule[key]) for key, text in words.items() if rule.get(key) is not None
    )


def _overview(methods: "dict[str, type[Method]]") -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for head in ("name", "method", "what it is", "paper"):
        table.add_column(head)
    for key, method in methods.items():
        table.add_row(key, method.title, _first_line(method.__doc__), method.paper or "-")
    return table


def _settings(settings: list[dict[str, Any]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for head in ("setting", "default", "values", "meaning"):
        table.add_column(head)
    for one in settings:
        values = one["range"] or one["type"]
        table.add_row(one["name"], str(one["default"]), values, one["meaning"])
    return table


def _first_line(doc: str | None) -> str:
    return (doc or "").strip().split("\n\n")[0].replace("\n    ", " ")
