"""Data: data list, prepare, inspect, words."""

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from idiolect.cli.command_base import (
    DATA,
    JSON,
    SET,
    SIZE,
    CommandGroup,
    complete_source,
    guarded,
    reading_options,
)
from idiolect.errors import ConfigError, DataError, IdiolectError, shortened

if TYPE_CHECKING:
    from idiolect.cli.screen import PlainConsole
    from idiolect.data import Dataset
    from idiolect.data.federation import Federation
    from idiolect.data.inspection import Inspection
    from idiolect.experiment.schema import Experiment

app = typer.Typer(
    help="List, prepare and inspect data.",
    no_args_is_help=True,
    cls=CommandGroup,
    rich_markup_mode=None,
)

_SHADES = " ░▒▓█"
_MOST_CLIENTS, _MOST_CLASSES = 60, 16  # more do not fit a screen; --json and --svg show all


def _complete_partition(incomplete: str) -> Iterable[str]:
    from idiolect.data import PARTITIONS

    return [name for name in PARTITIONS if name.startswith(incomplete)]


def _complete_target(incomplete: str) -> Iterable[str]:
    """Complete what `data inspect` takes: an experiment file here, or a dataset."""
    from idiolect.data import SOURCES

    files = sorted(str(path) for path in Path().glob(f"{incomplete}*.toml"))
    return [*(name for name in SOURCES if name.startswith(incomplete)), *files]


@app.command(name="list")
@guarded
def list_data(json: Annotated[bool, JSON] = False) -> None:
    """List the datasets and the ways to divide them."""
    from idiolect.cli.layout import print_texts
    from idiolect.cli.screen import console, print_json
    from idiolect.data import PARTITIONS, SOURCES
    from idiolect.data.partition import describe

    sources = {name: source.about for name, source in SOURCES.items()}
    partitions = {name: describe(name) for name in PARTITIONS}
    if json:
        print_json({"sources": sources, "partitions": partitions})
        return
    screen = console()
    for head, listed in (("source", sources), ("partition", partitions)):
        print_texts(screen, (head, "what it is"), list(listed.items()))
    screen.say("A path to your own .csv, .parquet, .npz or folder of images is a source too.")


@app.command()
@guarded
def prepare(
    names: Annotated[
        list[str],
        typer.Argument(help="Datasets to fetch and decode.", autocompletion=complete_source),
    ],
    data_dir: Annotated[Path | None, DATA] = None,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Fetch and decode datasets now.

    Runs then start at once, and without a network.
    """
    from idiolect.cli.screen import print_json
    from idiolect.data import load

    found = {}
    for name in names:
        dataset = load(name, data_dir)
        found[name] = {
            "examples": len(dataset),
            "shape": list(dataset.x.shape[1:]),
            "classes": len(dataset.classes),
            "provenance": dataset.provenance,
        }
        if not json:
            shape = "x".join(map(str, dataset.x.shape[1:]))
            print(f"{name}: {len(dataset):,} examples of {shape}, {len(dataset.classes)} classes")
            print(f"  {dataset.provenance}")
    if json:
        print_json(found)


_CLIENT_COLUMN = typer.Option("--client", help="The column that says who holds a row.")
_LABELS = typer.Option("--label", help="The label column; repeat it for several.")
_TASK = typer.Option("--task", help="What the label is: classes, labels, number or survival.")


@app.command()
@guarded
def inspect(
    target: Annotated[
        str,
        typer.Argument(
            help="An experiment file, a dataset, or own data.", autocompletion=_complete_target
        ),
    ],
    label: Annotated[list[str] | None, _LABELS] = None,
    client: Annotated[str | None, _CLIENT_COLUMN] = None,
    task: Annotated[str | None, _TASK] = None,
    size: Annotated[str | None, SIZE] = None,
    partition: Annotated[
        str | None, typer.Option(help="How to divide it.", autocompletion=_complete_partition)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The seed; the first of the file.")] = None,
    part: Annotated[str, typer.Option(help="Count all, train, val or test rows.")] = "all",
    set: Annotated[list[str] | None, SET] = None,
    data_dir: Annotated[Path | None, DATA] = None,
    json: Annotated[bool, JSON] = False,
    svg: Annotated[Path | None, typer.Option(help="Also write the picture to a file.")] = None,
) -> None:
    """Show what data holds, what will be done with it, and who holds how much.

    Of a table every column: its type, what is missing, how it is encoded. Notes say what to write
    in an experiment where a guess is wrong.
    """
    from idiolect.cli.screen import console, print_json
    from idiolect.core.checkpoint import write_whole
    from idiolect.data.inspection import inspected
    from idiolect.experiment.build import build_federations
    from idiolect.experiment.early_checks import few_examples

    overrides = list(set or ())
    if partition is not None:
        overrides.append(f"data.partition.name={partition}")
    if seed is not None:
        overrides.append(f"seeds=[{seed}]")
    given = _reading(label, client, size)
    experiment, guessed = _inspected_experiment(target, given, task, overrides)
    read: dict[str, Dataset] = {}
    federation, trouble = None, ""
    try:
        federation = build_federations(experiment, data_dir, read)[0]
    except IdiolectError as error:
        if not read:
            raise
        trouble = str(error)
    found = inspected(next(iter(read.values())))
    notes = [] if federation is None else federation.warnings() + few_examples(federation)
    if federation is not None and svg is not None:
        write_whole(svg, _holdings_svg(federation, federation.counts(part)).encode())
    if json:
        whole = {} if federation is None else _holdings(federation, federation.counts(part))
        print_json({**whole, **_plain(found), "guessed": guessed, "trouble": trouble})
    else:
        screen = console()
        _print_inspection(screen, found, guessed)
        if federation is not None:
            _print_holdings(screen, federation, federation.counts(part))
        told = {one.what for one in found.advice}
        for text in dict.fromkeys(one for one in notes if one not in told):
            screen.say(f"note: {text}")
    if trouble:
        raise DataError(trouble)


def _reading(label: list[str] | None, client: str | None, size: str | None) -> dict[str, Any]:
    """Return the given options of reading own data."""
    named = None if not label else label[0] if len(label) == 1 else list(label)
    found = reading_options(size, client=client)
    found = {key: list(v) if isinstance(v, tuple) else v for key, v in found.items()}
    return {**({} if named is None else {"label": named}), **found}


def _inspected_experiment(
    target: str, given: dict[str, Any], task: str | None, overrides: list[str]
) -> "tuple[Experiment, dict[str, str]]":
    """Return the experiment that is meant: a file, or one around data, with what was guessed."""
    from idiolect.data import SOURCES
    from idiolect.experiment.load import dump_toml, load_experiment, parse_experiment
    from idiolect.experiment.starter import guess_options

    if target.endswith(".toml"):
        for option, value in (*given.items(), ("task", task)):
            if value is not None:
                raise ConfigError(
                    f"--{option} is for data; change the file, or --set data.options.{option}=..."
                )
        return load_experiment(target, overrides), {}
    options, said = given, dict[str, str]()
    if target not in SOURCES and Path(target).expanduser().exists():
        options, said = guess_options(Path(target).expanduser(), given)
        if "size" in said:  # for training; what is there is shown as it is
            options.pop("size")
            said.pop("size")
    data = {"source": target, "options": options, **({"task": task} if task else {})}
    raw = {"name": "inspect", "data": data, "methods": [{"name": "local"}]}
    shown = {key: _shown(options[key]) + f" ({why})" for key, why in said.items()}
    return parse_experiment(dump_toml(raw), overrides, target), shown


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else ", ".join(map(str, value))


def _plain(found: "Inspection") -> dict[str, Any]:
    return {
        "form": found.form,
        "rows": found.rows,
        "task": found.task,
        "columns": [one._asdict() for one in found.columns],
        "advice": [one._asdict() for one in found.advice],
    }


def _print_inspection(screen: "PlainConsole", found: "Inspection", guessed: dict[str, str]) -> None:
    """Print what was found, a line for each column, and what to write where it is wrong."""
    from idiolect.cli.layout import print_texts

    screen.say(f"{found.form}; {found.rows:,} rows; task {found.task}")
    for option, words in guessed.items():
        screen.say(f"guessed: {option} is {words}; another: --{option} COLUMN")
    rows = [
        [
            shortened(one.name, 28),
            one.kind,
            f"{one.missing:.0%}" if one.missing else "-",
            one.done or "-",
            shortened(one.holds, 200),
        ]
        for one in found.columns
    ]
    print_texts(screen, ("column", "type", "missing", "what is done", "what it holds"), rows)
    if any(one.kind == "number" and one.done == "as it is" for one in found.columns):
        screen.say(
            'note: numbers go in unscaled: write normalise = "feature" in [data] to scale them'
        )
    for one in found.advice:
        where = f" in [{one.where}]" if one.where else ""
        remedy = f": write {one.remedy}{where}" if one.remedy else ""
        screen.say(f"note: {one.what}{remedy}")


@guarded
def new(
    data: Annotated[
        str | None,
        typer.Argument(
            help="A dataset, or own data; the embedded digits if absent.",
            autocompletion=_complete_target,
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path(
        "experiment.toml"
    ),
    label: Annotated[list[str] | None, _LABELS] = None,
    client: Annotated[str | None, _CLIENT_COLUMN] = None,
    task: Annotated[str | None, _TASK] = None,
    size: Annotated[str | None, SIZE] = None,
    name: Annotated[str | None, typer.Option("--name", help="Of the experiment.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a first experiment file for your data, with comments; it runs as it is.

    Label, client and types of columns are guessed where they are not given, and said.
    """
    from idiolect.cli.screen import console
    from idiolect.core.checkpoint import write_whole
    from idiolect.experiment.starter import starter

    if out.suffix != ".toml":
        raise ConfigError(f"--out is {out}; expected a file that ends in .toml")
    if out.exists() and not force:
        raise ConfigError(f"{out} is there already; choose another --out, or --force")
    if not out.resolve().parent.is_dir():
        raise ConfigError(f"--out is {out}, and {out.parent} is no folder; make it first")
    made = starter(data, _reading(label, client, size), task, name, out.resolve().parent)
    write_whole(out, made.text.encode())
    screen = console()
    for text in made.said:
        screen.say(f"note: {text}")
    screen.say(f"Written: {out}")
    screen.say(f"Look: idiolect data inspect {out}   Train: idiolect run {out}")


def _holdings(federation: "Federation", counts: Any) -> dict[str, Any]:
    return {
        "description": federation.description,
        "provenance": federation.dataset.provenance,
        "classes": list(federation.columns),
        "clients": [
            {
                "client": name,
                "train": len(federation.train[place]),
                "val": len(federation.val[place]),
                "test": len(federation.test[place]),
                "counts": counts[place].tolist(),
            }
            for place, name in enumerate(federation.names)
        ],
        "warnings": federation.warnings(),
    }


def _print_holdings(screen: "PlainConsole", federation: "Federation", counts: Any) -> None:
    """Draw a row per client: a shade for each class, with counts where they fit, and totals."""
    from idiolect.cli.layout import NARROW, print_table

    classes = federation.columns
    roomy = len(classes) <= _MOST_CLASSES
    heads = [shortened(name, 14) for name in classes]
    if not roomy:
        heads = [f"{shortened(classes[0], 14)} to {shortened(classes[-1], 14)}"]
    most = max(int(counts.max()), 1)
    shaded = len(classes) <= 6 or screen.width >= NARROW
    rows = []
    for name, row in zip(federation.names[:_MOST_CLIENTS], counts, strict=False):
        cells = [f"{_shade(n, most)} {int(n)}" if shaded else str(n) for n in row]
        cells = [cell if n else "·" for cell, n in zip(cells, row, strict=True)]
        shades = cells if roomy else [_strip(row, most, screen.width - 40)]
        rows.append([name, f"{int(row.sum()):,}", *shades])
    totals = counts.sum(axis=0)
    sums = [f"{int(n):,}" for n in totals]
    if not roomy:
        sums = [_strip(totals, max(totals.max(), 1), screen.width - 40)]
    total = ["all", f"{int(counts.sum()):,}", *sums]
    print_table(
        screen, federation.description, ["client"], ["total", *heads], rows, total=total, cut=False
    )
    hidden = len(federation.names) - _MOST_CLIENTS
    if hidden > 0:
        screen.say(f"... and {hidden} more clients (--json or --svg shows all)")
    parts = (federation.train, federation.val, federation.test)
    train, val, test = (sum(len(rows) for rows in part) for part in parts)
    screen.say(f"{train:,} train, {val:,} validation, {test:,} test rows")


def _strip(row: Any, most: Any, width: int) -> str:
    """Draw many classes as a strip of shades; several share one where they do not fit."""
    import numpy as np

    parts = np.array_split(row, min(len(row), max(width, 10)))
    return "".join(_shade(part.max(), most) for part in parts)


def _shade(count: Any, most: int) -> str:
    """Return a darker block for more; anything above zero is visible."""
    return _SHADES[-(-int(count) * (len(_SHADES) - 1) // int(most))]


def _holdings_svg(federation: "Federation", counts: Any) -> str:
    """Draw the same as an SVG: darker is more."""
    side, left, top = 18, 110, 26
    most = max(int(counts.max()), 1)
    clients, classes = counts.shape
    width, height = left + classes * side + 60, top + clients * side + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="10">',
        f"<title>{escape(federation.description)}</title>",
    ]
    for column, name in enumerate(federation.columns):
        x = left + column * side + side / 2
        lines.append(f'<text x="{x}" y="{top - 8}" text-anchor="middle">{escape(name[:3])}</text>')
    for row, name in enumerate(federation.names):
        y = top + row * side
        lines.append(f'<text x="{left - 6}" y="{y + 12}" text-anchor="end">{escape(name)}</text>')
        for column in range(classes):
            share = counts[row, column] / most
            if share:
                lines.append(
                    f'<rect x="{left + column * side}" y="{y}" width="{side - 1}" '
                    f'height="{side - 1}" fill="#1f4e8c" fill-opacity="{share:.3f}">'
                    f"<title>{int(counts[row, column])}</title></rect>"
                )
        total = int(counts[row].sum())
        lines.append(f'<text x="{left + classes * side + 6}" y="{y + 12}">{total}</text>')
    return "\n".join([*lines, "</svg>", ""])


@app.command()
@guarded
def words(
    target: Annotated[
        str, typer.Argument(help="A corpus: a source, or own text.", autocompletion=complete_source)
    ],
    out: Annotated[Path, typer.Option("--out", help="The file to write, a word a line.")],
    size: Annotated[int, typer.Option(help="How many words at most.")] = 20_000,
    text: Annotated[str | None, typer.Option(help="The column of own text.")] = None,
    data_dir: Annotated[Path | None, DATA] = None,
) -> None:
    """List the most frequent words of a public corpus.

    The file is for `data.text.words` of an experiment.
    """
    from idiolect.core.checkpoint import write_whole
    from idiolect.data import SOURCES, load, read
    from idiolect.data.text import frequent_words

    if target in SOURCES:
        dataset = load(target, data_dir)
    else:
        dataset = read(target, labelled=False, text=text or "text")
    if not dataset.words:
        raise DataError(f"{target} holds no text; give a corpus")
    found = frequent_words(dataset, size)
    write_whole(out, ("\n".join(found) + "\n").encode())
    print(f"{len(found):,} words: {out}")
    print("Whoever reads the list sees its words: make it from text that is public.")
