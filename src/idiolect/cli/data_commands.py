"""The commands about data: list, prepare, inspect."""

from pathlib import Path
from typing import Annotated, Any

import typer

from idiolect.cli.guard import guarded
from idiolect.cli.options import (
    DATA,
    JSON,
    complete_partition,
    complete_source,
    complete_target,
)

app = typer.Typer(
    help="List, prepare and look at data.", no_args_is_help=True, rich_markup_mode=None
)


@app.command(name="list")
@guarded
def list_data(json: Annotated[bool, JSON] = False) -> None:
    """List the datasets and the ways to divide them."""
    from idiolect.cli.screen import console, print_json
    from idiolect.data import PARTITIONS, SOURCES
    from idiolect.data.partition import describe

    sources = {name: source.about for name, source in SOURCES.items()}
    partitions = {name: describe(name) for name in PARTITIONS}
    if json:
        print_json({"sources": sources, "partitions": partitions})
        return
    screen = console()
    screen.print(_pairs("source", sources))
    screen.print(_pairs("partition", partitions))
    screen.print("A path to your own .csv, .parquet, .npz or folder of images is a source too.")


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
    """Fetch and decode datasets now, so that runs start at once, and without a network."""
    from idiolect.cli.screen import print_json
    from idiolect.data import load

    if json:
        print_json({name: _prepared(load(name, data_dir)) for name in names})
        return
    for name in names:
        dataset = load(name, data_dir)
        shape = "x".join(map(str, dataset.x.shape[1:]))
        print(f"{name}: {len(dataset):,} examples of {shape}, {len(dataset.classes)} classes")
        print(f"  {dataset.provenance}")


@app.command()
@guarded
def inspect(
    target: Annotated[
        str,
        typer.Argument(
            help="An experiment file, a dataset, or own data.", autocompletion=complete_target
        ),
    ],
    partition: Annotated[
        str | None, typer.Option(help="How to divide it.", autocompletion=complete_partition)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The seed; the first of the file.")] = None,
    part: Annotated[str, typer.Option(help="Count all, train, val or test rows.")] = "all",
    set: Annotated[
        list[str] | None, typer.Option("--set", help="As in run: data.partition.clients=20.")
    ] = None,
    data_dir: Annotated[Path | None, DATA] = None,
    json: Annotated[bool, JSON] = False,
    svg: Annotated[Path | None, typer.Option(help="Also write the picture to a file.")] = None,
) -> None:
    """Draw who holds how many examples of which class."""
    from idiolect.cli.picture import as_svg, print_picture
    from idiolect.cli.screen import console, print_json
    from idiolect.core.checkpoint import write_whole
    from idiolect.experiment.build import build_federations
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
        write_whole(svg, as_svg(federation, counts).encode())
    if json:
        print_json(_described(federation, counts))
        return
    print_picture(console(), federation, counts)


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
    """List the most frequent words of a public corpus, for `data.text.words` of an experiment."""
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


def _prepared(dataset: Any) -> dict[str, Any]:
    return {
        "examples": len(dataset),
        "shape": list(dataset.x.shape[1:]),
        "classes": len(dataset.classes),
        "provenance": dataset.provenance,
    }


def _described(federation: Any, counts: Any) -> dict[str, Any]:
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


def _pairs(head: str, pairs: dict[str, str]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(head)
    table.add_column("what it is")
    for name, about in pairs.items():
        table.add_row(name, about)
    return table
