"""Methods: methods, trace (what a server learned), privacy audit."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from idiolect.cli.command_base import DATA, JSON, SET, CommandGroup, guarded
from idiolect.errors import ConfigError, DataError

if TYPE_CHECKING:
    from idiolect.core.method import Method
    from idiolect.experiment.privacy_audit import Audit
    from idiolect.results.trace import Trace

privacy_app = typer.Typer(
    help="Audit differential privacy.",
    no_args_is_help=True,
    cls=CommandGroup,
    rich_markup_mode=None,
)

_SHADES = " ░▒▓█"
_BROKEN = 11  # exit status: an attack showed more than was promised


def _complete_method(incomplete: str) -> Iterable[tuple[str, str]]:
    from idiolect.methods import METHODS

    return [(name, METHODS[name].title) for name in METHODS if name.startswith(incomplete)]


@guarded
def list_methods(
    name: Annotated[
        str | None,
        typer.Argument(
            help="One method, with all its settings; your own as module:Class.",
            autocompletion=_complete_method,
        ),
    ] = None,
    json: Annotated[bool, JSON] = False,
) -> None:
    """List the methods, or describe one with all its settings."""
    from idiolect.cli.layout import print_texts
    from idiolect.cli.screen import console, print_json
    from idiolect.experiment.untrusted import Permissions, import_method, packaged_methods
    from idiolect.methods import METHODS

    here = Permissions(Path.cwd())
    keys = [*METHODS, *packaged_methods()] if name is None else [name]
    found = {key: _described(import_method(key, "methods", here)) for key in keys}
    if json:
        print_json(found if name is None else found[name])
        return
    screen = console()
    if name is None:
        rows = [[k, one["title"], one["about"], one["paper"] or "-"] for k, one in found.items()]
        print_texts(screen, ("name", "method", "what it is", "paper"), rows)
        screen.say("`idiolect methods NAME` shows a method's settings.")
        return
    about = found[name]
    screen.say(f"{about['title']} ({name}): {about['about']}")
    screen.say(f"Paper: {about['paper']}" if about["paper"] else "")
    rows = [
        [one["name"], str(one["default"]), one["range"] or one["type"], one["meaning"]]
        for one in about["settings"]
    ]
    print_texts(screen, ("setting", "default", "values", "meaning"), rows)
    for preset, given in about["presets"].items():
        screen.say(f"preset {preset}: " + ", ".join(f"{key} = {given[key]}" for key in given))


def _described(method: "type[Method]") -> dict[str, Any]:
    """Return what a method's declaration says about it."""
    return {
        "title": method.title or method.__name__,
        "about": (method.__doc__ or "").strip().split("\n\n")[0].replace("\n    ", " "),
        "paper": method.paper,
        "presets": method.presets,
        "settings": [
            {
                "name": spec.name,
                "default": spec.default,
                "type": str(getattr(spec.type, "__name__", spec.type)),
                "range": _allowed(spec.metadata),
                "meaning": spec.metadata.get("doc", ""),
            }
            for spec in dataclasses.fields(method)
            if spec.name not in method.unused
        ],
    }


def _allowed(rule: Any) -> str:
    """Return which values a setting may have, in words."""
    if rule.get("choices"):
        return ", ".join(rule["choices"])
    words = {"above": "> {}", "least": "≥ {}", "most": "≤ {}", "below": "< {}"}
    return ", ".join(
        text.format(rule[key]) for key, text in words.items() if rule.get(key) is not None
    )


@guarded
def trace(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    method: Annotated[
        str | None, typer.Option("--method", help="A label; needed where several recorded.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="One seed; the mean of all by default.")
    ] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Draw it into this file.")] = None,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Show which client learns from which.

    Clients are in the order of similarity. --svg draws the rounds too.
    """
    from idiolect.cli.screen import print_json
    from idiolect.core.checkpoint import write_whole
    from idiolect.results.trace import matrix_svg, read_trace, similar_order

    found = read_trace(folder, method or _only_label(folder))
    name, course = found.matrix(seed)
    order = similar_order(course[-1])
    one = found.seeds[0] if len(found.seeds) == 1 else seed
    seeds = f"mean of {len(found.seeds)} seeds" if one is None else f"seed {one}"
    title = f"{found.label}: {name}, {seeds}"
    if json:
        print_json(
            {
                "label": found.label,
                "matrix": name,
                "rounds": found.rounds,
                "clients": found.clients,
                "order": order,
                "course": course.tolist(),
            }
        )
    elif svg is not None:
        write_whole(svg, matrix_svg(title, found.clients, found.rounds, course).encode())
        print(f"Drawn: {svg}")
    else:
        _print_matrix(title, found, course[-1], order)


def _only_label(folder: Path) -> str:
    from idiolect.results.trace import traced_labels

    labels = traced_labels(folder)
    if not labels:
        raise DataError(
            f"{folder} holds no trace; give the folder of a run of a method that records one, such "
            "as ktpfl"
        )
    if len(labels) > 1:
        raise ConfigError(f"several methods recorded a trace; add --method {' | '.join(labels)}")
    return labels[0]


def _print_matrix(title: str, found: "Trace", matrix: Any, order: list[int]) -> None:
    from idiolect.cli.layout import print_table
    from idiolect.cli.screen import MOST_CLIENTS, console

    top = max(float(matrix.max()), 1e-12)
    shown = order[:MOST_CLIENTS]
    heads = [found.clients[place].removeprefix("client ") for place in shown]
    rows = []
    for row in shown:
        values = [float(matrix[row, column]) for column in shown]
        shades = [round(value / top * (len(_SHADES) - 1)) for value in values]
        cells = [
            f"{_SHADES[min(len(_SHADES) - 1, max(0, shade))]}{100 * value:.0f}"
            for shade, value in zip(shades, values, strict=True)
        ]
        rows.append([found.clients[row], *cells])
    screen = console()
    print_table(screen, f"{title}, round {found.rounds[-1]}, %", ["learns from"], heads, rows)
    if len(order) > len(shown):
        screen.print(f"... and {len(order) - len(shown)} more clients (--svg or --json shows all)")


@privacy_app.callback()
def _privacy() -> None:
    """Audit differential privacy."""


@privacy_app.command()
@guarded
def audit(
    experiment: Annotated[Path, typer.Argument(help="The experiment, a TOML file.")],
    set: Annotated[list[str] | None, SET] = None,
    method: Annotated[
        list[str] | None, typer.Option("--method", help="Only this label; may be repeated.")
    ] = None,
    trials: Annotated[int, typer.Option(help="Canaries of each attack.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Of the random choice of canaries.")] = 0,
    data_dir: Annotated[Path | None, DATA] = None,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Attack the private rule with canaries.

    Prints a lower bound on epsilon beside the promised one.
    """
    from idiolect.cli.screen import print_json
    from idiolect.experiment.load import load_experiment
    from idiolect.experiment.privacy_audit import audit_experiment

    loaded = load_experiment(experiment, set or ())
    found = audit_experiment(loaded, data_dir, method or (), trials, seed)
    if json:
        print_json({label: one.plain() for label, one in found.items()})
    else:
        for label, one in found.items():
            _print_audit(label, one)
    if not all(one.passed for one in found.values()):
        raise typer.Exit(_BROKEN)


def _print_audit(label: str, found: "Audit") -> None:
    from idiolect.cli.layout import print_table
    from idiolect.cli.screen import console

    heads = ("rounds", "promised at most", "shown at least", "promise")
    rows = []
    for row in found.rows:
        kept = "broken" if row.broken else "kept"
        figures = (f"{row.promised:.3g}", f"{row.found:.3g}")
        rows.append([row.attack, str(row.rounds), *figures, kept])
    screen = console()
    print_table(screen, f"{label}: ε at δ = {found.delta:.2g}", ["attack"], heads, rows)
    broken = "" if found.passed else " The promise is broken: publish nothing of this run."
    screen.say(
        f"{label}: the run promises ε ≤ {found.promised:.3g}, the attacks show ε ≥ "
        f"{found.lower:.3g} (95 % confidence, {found.canaries} canaries an attack).{broken}"
    )
