"""Data: data list, prepare, inspect, words."""

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from idiolect.cli.command_base import DATA, JSON, SET, CommandGroup, complete_source, guarded

if TYPE_CHECKING:
    from idiolect.cli.screen import PlainConsole
    from idiolect.data.federation import Federation

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


@app.command()
@guarded
def inspect(
    target: Annotated[
        str,
        typer.Argument(
            help="An experiment file, a dataset, or own data.", autocompletion=_complete_target
        ),
    ],
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
    """Show who holds how many examples of which class."""
    from idiolect.cli.screen import console, print_json
    from idiolect.core.checkpoint import write_whole
    from idiolect.experiment.build import build_federations
    from idiolect.experiment.early_checks import few_examples
    from idiolect.experiment.load import dump_toml, load_experiment, parse_experiment

    overrides = list(set or ())
    if partition is not None:
        overrides.append(f"data.partition.name={partition}")
    if seed is not None:
        overrides.append(f"seeds=[{seed}]")
    if target.endswith(".toml"):
        experiment = load_experiment(target, overrides)
    else:
        raw = {"name": "inspect", "data": {"source": target}, "methods": [{"name": "local"}]}
        experiment = parse_experiment(dump_toml(raw), overrides, "inspect")
    federation = build_federations(experiment, data_dir)[0]
    counts = federation.counts(part)
    if svg is not None:
        write_whole(svg, _holdings_svg(federation, counts).encode())
    if json:
        print_json(_holdings(federation, counts))
    else:
        screen = console()
        _print_holdings(screen, federation, counts)
        for text in dict.fromkeys([*federation.warnings(), *few_examples(federation)]):
            screen.say(f"note: {text}")


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
    from idiolect.cli.layout import NARROW, print_table, short

    classes = federation.columns
    roomy = len(classes) <= _MOST_CLASSES
    heads = [short(name, 14) for name in classes]
    if not roomy:
        heads = [f"{short(classes[0], 14)} to {short(classes[-1], 14)}"]
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
    from idiolect.errors import DataError

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
