"""Who watches an experiment: the screen, a page served beside it, loggers."""

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from idiolect.analysis.live import Address, serving
from idiolect.analysis.loggers import LOGGERS, Logger, logger
from idiolect.engine.callbacks import Several, Watch
from idiolect.errors import ConfigError
from idiolect.experiment.schema import Experiment, Logging
from idiolect.experiment.suggestions import meant


@contextmanager
def watched(
    experiment: Experiment,
    folder: Path,
    screen: Watch,
    *,
    serve: Address | None = None,
    log: Sequence[str] = (),
) -> Iterator[Watch]:
    """Gather those who watch; a port that is taken or a library that is missing is told at once."""
    wanted = {**_asked(experiment.logging), **given(log)}
    loggers = [logger(name, target, folder, experiment.name) for name, target in wanted.items()]
    with ExitStack() as stack:
        watches: list[Watch] = [screen, *loggers]
        if serve is not None:
            command = shlex.join(["idiolect", *sys.argv[1:]])
            live = stack.enter_context(serving(folder, serve, command))
            screen.note(f"the report grows at {live.url} while this runs")
            watches.append(live)
        try:
            yield Several(watches)
        finally:
            _tell_troubles(loggers, screen)


def given(log: Sequence[str]) -> dict[str, str]:
    """Read what --log was given: a logger's name, or NAME=TARGET."""
    found = {}
    for text in log:
        name, _, target = text.partition("=")
        if name not in LOGGERS:
            raise ConfigError(f"--log: unknown logger {meant(name, LOGGERS)}")
        found[name] = target
    return found


def _asked(table: Logging) -> Mapping[str, str]:
    """Read the [logging] table: true, or where to."""
    values = table.model_dump()
    return {name: "" if value is True else value for name, value in values.items() if value}


def _tell_troubles(loggers: Sequence[Logger], screen: Watch) -> None:
    for one in loggers:
        if one.trouble:
            screen.note(one.trouble)
