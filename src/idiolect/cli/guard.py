"""Turn what went wrong into one line and an exit status; a traceback only for our own mistakes."""

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, ParamSpec, TypeVar

import typer

from idiolect.errors import IdiolectError, printable

P = ParamSpec("P")
T = TypeVar("T")

INTERRUPTED, TERMINATED = 130, 143  # what shells give for Ctrl-C and for SIGTERM


class Terminated(KeyboardInterrupt):
    """SIGTERM, from a scheduler say: all that saves on Ctrl-C saves now too."""


def guarded(command: Callable[P, T]) -> Callable[P, T]:
    """Wrap a command so that a user's mistake ends in one line; IDIOLECT_DEBUG=1 shows it all."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with terminable():
                return command(*args, **kwargs)
        except IdiolectError as error:
            if debugging():
                raise
            complain(str(error))
            raise typer.Exit(error.code) from None
        except KeyboardInterrupt as error:
            if debugging():
                raise
            complain("interrupted")
            raise typer.Exit(interrupted(error)) from None
        except BrokenPipeError:
            # The reader, say `head`, has seen enough. Python would complain again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except (OSError, MemoryError, RuntimeError) as error:
            if debugging() or not (words := _of_the_system(error)):
                raise
            complain(words)
            raise typer.Exit(1) from None

    return wrapped


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM raise `Terminated` for as long as a command runs."""
    if threading.current_thread() is not threading.main_thread():  # which alone hears signals
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def interrupted(error: KeyboardInterrupt) -> int:
    """Give the exit status that says what ended the command."""
    return TERMINATED if isinstance(error, Terminated) else INTERRUPTED


def complain(text: str) -> None:
    """Say what went wrong, on one line of standard error."""
    print("error: " + printable(" ".join(text.split())), file=sys.stderr)


def debugging() -> bool:
    """Tell whether the user wants tracebacks."""
    return os.environ.get("IDIOLECT_DEBUG", "") not in ("", "0")


def _of_the_system(error: OSError | MemoryError | RuntimeError) -> str:
    """Put into words what the machine lacks; nothing for errors of another kind."""
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
