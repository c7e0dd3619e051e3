"""Options that several commands share, and what a shell may complete."""

from collections.abc import Callable, Iterable

import typer


def machine(device: str | None, backend: str | None) -> list[str]:
    """Write --device and --backend as changes to the experiment."""
    given = {"backend.device": device, "backend.kind": backend}
    return [f"{key}={value}" for key, value in given.items() if value is not None]


def _of(*words: str) -> Callable[[str], Iterable[str]]:
    def completed(incomplete: str) -> Iterable[str]:
        return [word for word in words if word.startswith(incomplete)]

    return completed


def complete_method(incomplete: str) -> Iterable[tuple[str, str]]:
    """Complete the name of a method, with its title."""
    from idiolect.methods import METHODS

    return [(n, METHODS[n].title) for n in METHODS if n.startswith(incomplete)]


def complete_source(incomplete: str) -> Iterable[tuple[str, str]]:
    """Complete the name of a dataset, with a word about it."""
    from idiolect.data import SOURCES

    return [(name, one.about) for name, one in SOURCES.items() if name.startswith(incomplete)]


def complete_partition(incomplete: str) -> Iterable[str]:
    """Complete the name of a partition."""
    from idiolect.data import PARTITIONS

    return [name for name in PARTITIONS if name.startswith(incomplete)]


def complete_label(context: typer.Context, incomplete: str) -> Iterable[str]:
    """Complete the label of a method in the run that was named before."""
    import json
    from pathlib import Path

    # Half a command line may not be parsed yet; then its words stand as they are.
    named = [context.params.get("folder"), *context.args]
    try:
        folder = next(Path(one) for one in named if one is not None)
        content = json.loads((folder / "result.json").read_text())
        return [label for label in content["methods"] if label.startswith(incomplete)]
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return []


def complete_target(incomplete: str) -> Iterable[str]:
    """Complete what `data inspect` takes: an experiment beside us, or a dataset."""
    from pathlib import Path

    from idiolect.data import SOURCES

    files = sorted(str(path) for path in Path().glob(f"{incomplete}*.toml"))
    return [*(name for name in SOURCES if name.startswith(incomplete)), *files]


SET = typer.Option("--set", help="Change a key of the file: --set training.lr=0.1.")
DATA = typer.Option("--data-dir", help="Folder with datasets; else IDIOLECT_DATA.")
TRUST = typer.Option(
    "--trust-code", help="Import the network's module that the folder names, and run it."
)
JSON = typer.Option("--json", help="Print JSON instead of tables.")
DEVICE = typer.Option(help="auto, cpu or cuda.", autocompletion=_of("auto", "cpu", "cuda"))
BACKEND = typer.Option(
    help="vectorised, sequential or ray.", autocompletion=_of("vectorised", "sequential", "ray")
)
