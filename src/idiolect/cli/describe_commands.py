"""Statistics before training: describe."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from idiolect.cli import command_base as base
from idiolect.cli.command_base import guarded

if TYPE_CHECKING:
    from idiolect.cli.screen import PlainConsole
    from idiolect.experiment.schema import Experiment

_MOST_SITES = 8  # that get a row of their own in a table of numbers
_MOST_SHARES = 6  # and a column in a table of categories
_NAME = 16  # letters of a name in a table of 80 columns


@guarded
def describe(
    target: Annotated[
        str,
        typer.Argument(
            help="An experiment file, a dataset, or own data.",
            autocompletion=base.complete_source,
        ),
    ],
    on: Annotated[
        str | None,
        typer.Option("--on", help="An admin's kit of a federation, or `local`: a process a node."),
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(
            help="Rows: train, val, test or all; of an experiment train, of a dataset all."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Also write a page, such as data.html.")
    ] = None,
    set: Annotated[list[str] | None, base.SET] = None,
    data_dir: Annotated[Path | None, base.DATA] = None,
    json: Annotated[bool, base.JSON] = False,
) -> None:
    """Show statistics of each site's columns before training.

    Rows, gaps, means, deviations, quantiles, categories and the target, per site and pooled, with
    warnings where a site is unlike the others. Over a federation each site tells what its policy
    allows.
    """
    from idiolect.analysis.description_page import description_html
    from idiolect.cli.screen import console, print_json
    from idiolect.core.checkpoint import write_whole
    from idiolect.errors import ConfigError

    if part not in (None, "train", "val", "test", "all"):
        raise ConfigError(f"--part is {part!r}; expected train, val, test or all")
    experiment = _experiment(target, list(set or ()))
    if on is None:
        content = _simulated(experiment, part or ("train" if _is_file(target) else "all"), data_dir)
    elif part not in (None, "train"):
        raise ConfigError(f"--part {part}: sites tell of training rows only; leave it out")
    else:
        content = _asked(on, experiment, base.say_aside if json else base.say)
    if out is not None:
        command = shlex.join(["idiolect", *sys.argv[1:]])
        page = out / "description.html" if out.is_dir() else out
        write_whole(page, description_html(content, command).encode())
    if json:
        print_json(content)
        return
    screen = console()
    _print(screen, content)
    if out is not None:
        screen.say(f"Page: {page}")


def _is_file(target: str) -> bool:
    return target.endswith(".toml")


def _experiment(target: str, overrides: list[str]) -> "Experiment":
    from idiolect.experiment.load import dump_toml, load_experiment, parse_experiment

    if _is_file(target):
        return load_experiment(target, overrides)
    raw = {"name": Path(target).stem, "data": {"source": target}, "methods": [{"name": "local"}]}
    return parse_experiment(dump_toml(raw), overrides, "describe")


def _simulated(experiment: "Experiment", part: str, data_dir: Path | None) -> dict[str, Any]:
    """Describe the clients of a simulation, under the first seed."""
    import numpy as np

    from idiolect.data.description import SiteSums, column_sums, description
    from idiolect.experiment.build import build_federations

    held = build_federations(experiment, data_dir)[0]
    sites = []
    for place, name in enumerate(held.names):
        parts = {key: getattr(held, key)[place] for key in ("train", "val", "test")}
        rows = np.concatenate(list(parts.values())) if part == "all" else parts[part]
        sizes = {key: len(own) for key, own in parts.items()}
        sites.append(SiteSums(name, sizes, column_sums(held.dataset, rows)))
    return description(experiment.name, part, sites)


def _asked(place: str, experiment: "Experiment", echo: Any) -> dict[str, Any]:
    """Describe the sites of a federation: that of a kit, or processes on this machine."""
    if place == "local":
        from idiolect.deploy.describe_nodes import describe_local

        return describe_local(experiment, echo)
    import json
    import tempfile

    from idiolect.deploy.describe_nodes import DESCRIPTION
    from idiolect.deploy.flare.admin import FederationRun, describe_task
    from idiolect.deploy.flare.kits import read

    kit = read(place, "admin")
    with tempfile.TemporaryDirectory() as scratch:
        folder = FederationRun(kit, describe_task(kit, experiment), Path(scratch), echo).finish()
        content: dict[str, Any] = json.loads((folder / DESCRIPTION).read_text())
        return content


def _print(screen: "PlainConsole", content: dict[str, Any]) -> None:
    """Print tables that fit 80 columns, then the warnings."""
    from idiolect.analysis import description_page as page
    from idiolect.cli.screen import new_table

    pooled = content["pooled"]
    screen.say(
        f"{content['title']}: {pooled['rows']:,} {page.rows_words(content)} of "
        f"{len(pooled['sites'])} sites, {len(content['columns'])} columns"
    )
    table = new_table("Sites", ["site"], ["train", "validation", "test"])
    table.add_column("tells")
    shown = page.site_rows(content)
    for site, train, val, test, words in shown[:30]:
        table.add_row(_cut(site), *map(_figure, (train, val, test)), words)
    screen.print(table)
    if len(shown) > 30:
        screen.say(f"... and {len(shown) - 30} more sites (--json or --out shows all)")
    few = sum(1 for one in content["sites"] if one["columns"]) <= _MOST_SITES
    for role, title in (("target", "Target"), ("feature", "Columns")):
        _print_numbers(screen, content, page.columns_of(content, role, numbers=True), title, few)
        names = page.columns_of(content, role, numbers=False)
        _print_categories(screen, content, names, title)
    for one in content["warnings"]:
        screen.say(f"warning: {one['text']}")


def _print_numbers(
    screen: "PlainConsole", content: dict[str, Any], names: list[str], title: str, few: bool
) -> None:
    from idiolect.analysis import description_page as page
    from idiolect.cli.screen import new_table

    if not names:
        return
    heads = ["gaps", "mean", "± sd", "5 %", "median", "95 %"]
    table = new_table(f"{title}: numbers", ["column", "site"], heads)
    before = ""
    for name, site, _, gaps, mean, sd, low, _, middle, _, high in page.number_rows(content, names):
        if site != page.ALL and not few:
            continue
        if name != before and few and before:
            table.add_section()
        figures = map(_figure, (gaps, mean, sd, low, middle, high))
        table.add_row("" if name == before else _cut(name), _cut(site), *figures)
        before = name
    screen.print(table)
    if not few:
        screen.say("The figures of each site: --json or --out PAGE.html")


def _print_categories(
    screen: "PlainConsole", content: dict[str, Any], names: list[str], title: str
) -> None:
    from idiolect.analysis import description_page as page
    from idiolect.cli.screen import new_table, percent

    if not names:
        return
    sites = [site for site, _ in page.parts_of(content)]
    kept = sites if len(sites) <= _MOST_SHARES else sites[:1]
    table = new_table(f"{title}: % of rows", ["column", "category"], [_cut(one, 9) for one in kept])
    before = ""
    for name, category, *shares in page.category_rows(content, names):
        cells = [percent(share) for share in shares[: len(kept)]]
        table.add_row("" if name == before else _cut(name), _cut(category), *cells)
        before = name
    screen.print(table)


def _cut(name: str, most: int = _NAME) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _figure(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
