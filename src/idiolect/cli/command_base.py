"""What commands share: errors as one line and an exit status, options, completion."""

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn, ParamSpec, TypeVar

import typer
from typer.core import TyperGroup

from idiolect.errors import ConfigError, IdiolectError
from idiolect.version import VERSION

# Heavy imports stand inside the commands, so that --help and completion answer at once.

P = ParamSpec("P")
T = TypeVar("T")

INTERRUPTED, TERMINATED = 130, 143  # exit status of shells for Ctrl-C and for SIGTERM


class CommandGroup(TyperGroup):
    """A group whose help has each command's whole first sentence, on several lines if need be."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a line or more for each command."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, str(one.help or "").strip().split("\n\n")[0].replace("\n", " "))
            for name, one in found
            if one is not None and not one.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class Terminated(KeyboardInterrupt):
    """SIGTERM, from a scheduler say: everything that saves on Ctrl-C saves now too."""


def guarded(command: Callable[P, T]) -> Callable[P, T]:
    """Wrap a command so that a user's mistake ends in one line; IDIOLECT_DEBUG=1 shows it all."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with _terminable(), interruptible("interrupted"):
                return command(*args, **kwargs)
        except IdiolectError as error:
            if _debugging():
                raise
            complain(str(error))
            raise typer.Exit(error.code) from None
        except BrokenPipeError:
            # The reader, say `head`, has seen enough. Python would complain again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except (OSError, MemoryError, RuntimeError) as error:
            if _debugging() or not (words := _system_error(error)):
                raise
            complain(words)
            raise typer.Exit(1) from None

    return wrapped


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """End the command with a message and its exit status on Ctrl-C or SIGTERM."""
    try:
        yield
    except KeyboardInterrupt as error:
        if _debugging():
            raise
        complain(message)
        code = TERMINATED if isinstance(error, Terminated) else INTERRUPTED
        raise typer.Exit(code) from None


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM raise `Terminated` for as long as a command runs."""
    if threading.current_thread() is not threading.main_thread():  # others get no signals
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def printable(text: str) -> str:
    """Return text that a terminal only shows: each control character is written as its escape.

    Names of clients, sites, classes and columns come from other people's files.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in "\n\t" else ascii(one)[1:-1] for one in text)


def say(text: str) -> None:
    """Print a line at once, for someone who waits."""
    print(printable(text), flush=True)


def say_aside(text: str) -> None:
    """Do the same where standard output is for a program."""
    print(printable(text), file=sys.stderr, flush=True)


def complain(text: str) -> None:
    """Print an error as one line."""
    print("error: " + printable(" ".join(text.split())), file=sys.stderr)


def _debugging() -> bool:
    return os.environ.get("IDIOLECT_DEBUG", "") not in ("", "0")


def _system_error(error: OSError | MemoryError | RuntimeError) -> str:
    """Put into words what the machine lacks; empty for errors of another kind."""
    less = "use fewer seeds at once, or a smaller backend.width"
    if isinstance(error, MemoryError):
        return f"out of memory; {less}"
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    # torch's error, known by its name: torch is not imported for every command.
    if type(error).__name__ == "OutOfMemoryError":
        return f"the GPU has no room left (nvidia-smi shows who else uses it); {less}"
    return ""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"idiolect {VERSION}")
        raise typer.Exit


def common_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Personalised federated learning: one model per client, trained together."""


def overrides_of(
    set: Iterable[str] | None, device: str | None = None, backend: str | None = None
) -> list[str]:
    """Return --set, --device and --backend as changes to the experiment."""
    given = {"backend.device": device, "backend.kind": backend}
    return [*(set or ()), *(f"{key}={value}" for key, value in given.items() if value is not None)]


def numbers(option: str, text: str, kind: type[int] | type[float], count: int) -> tuple[Any, ...]:
    """Parse an option of so many numbers with commas between them."""
    try:
        numbers = tuple(kind(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != count:
        raise ConfigError(f"{option} is {text!r}; expected {count} numbers with commas between")
    return numbers


def reading_options(size: str | None, **columns: str | None) -> dict[str, Any]:
    """Return the given options of reading own data: columns, and the size of images."""
    found: dict[str, Any] = {key: value for key, value in columns.items() if value is not None}
    return found if size is None else {**found, "size": numbers("--size", size, int, 2)}


def completing(*words: str) -> Callable[[str], Iterable[str]]:
    """Complete an option that takes one of these words."""

    def completed(incomplete: str) -> Iterable[str]:
        return [word for word in words if word.startswith(incomplete)]

    return completed


def complete_source(incomplete: str) -> Iterable[tuple[str, str]]:
    """Complete the name of a dataset, with its description."""
    from idiolect.data import SOURCES

    return [(name, one.about) for name, one in SOURCES.items() if name.startswith(incomplete)]


def complete_label(context: typer.Context, incomplete: str) -> Iterable[str]:
    """Complete the label of a method in the run that was named before."""
    import json

    # Half a command line may not be parsed yet; then its words stand as they are.
    named = [context.params.get("folder"), *context.args]
    try:
        folder = next(Path(one) for one in named if one is not None)
        content = json.loads((folder / "result.json").read_text())
        return [label for label in content["methods"] if label.startswith(incomplete)]
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return []


SET = typer.Option("--set", help="Change a key of the file: --set training.lr=0.1.")
DATA = typer.Option("--data-dir", help="Folder with datasets; else IDIOLECT_DATA.")
TRUST = typer.Option(
    "--trust-code", help="Import and run the modules (network, method) that the folder names."
)
JSON = typer.Option("--json", help="Print JSON instead of tables.")
DEVICE = typer.Option(
    help="auto, cpu, cuda or mps (Apple).",
    autocompletion=completing("auto", "cpu", "cuda", "mps"),
)
BACKEND = typer.Option(
    help="vectorised, sequential or ray.",
    autocompletion=completing("vectorised", "sequential", "ray"),
)
ONLY = typer.Option("--method", help="Run only this label; may be repeated.")
LABEL_COLUMN = typer.Option(help="The label column.")
SPLIT_COLUMN = typer.Option(help="The column that says train or test.")
TEXT_COLUMN = typer.Option(help="The column of text, where examples are text.")
SIZE = typer.Option(help="Width,height of a folder's images.")
