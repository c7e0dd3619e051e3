"""Run an experiment into a folder, from the command line or from Python."""

import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from idiolect.analysis.live import Address, address, serving
from idiolect.analysis.loggers import LOGGERS, Logger, logger
from idiolect.analysis.report import report
from idiolect.core.checkpoint import write_whole
from idiolect.engine.callbacks import Several, Silent, Watch
from idiolect.errors import CheckpointError, ConfigError, IdiolectError
from idiolect.experiment.build import build_jobs, refuse_unknown_labels
from idiolect.experiment.job import Job
from idiolect.experiment.load import dump_toml, load_experiment
from idiolect.experiment.run_state import PERSONAL, first_difference
from idiolect.experiment.schema import Experiment, Logging
from idiolect.experiment.train import finished, train
from idiolect.experiment.validation import suggest
from idiolect.results import data_record, document
from idiolect.results.document import Document
from idiolect.results.models import folder_name


def run(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    data_dir: str | Path | None = None,
    serve: str | None = None,
    log: Sequence[str] = (),
) -> Document:
    """Run an experiment file, as `idiolect run` does, and return what result.json holds.

    `serve` is where the page that grows with it is served, such as "127.0.0.1:8484"; `log` names
    loggers, as `--log` does.
    """
    content, _ = run_experiment(
        load_experiment(path, overrides),
        Path(out) if out else None,
        resume=resume,
        overwrite=overwrite,
        data_dir=Path(data_dir) if data_dir else None,
        serve=None if serve is None else address(serve),
        log=log,
    )
    return content


def run_experiment(
    experiment: Experiment,
    out: Path | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    data_dir: Path | None = None,
    only: Sequence[str] = (),
    watch: Watch | None = None,
    serve: Address | None = None,
    log: Sequence[str] = (),
) -> tuple[Document, Path]:
    """Run an experiment; return the result and its folder, runs/NAME unless told otherwise."""
    folder = out or Path("runs") / folder_name(experiment.name)
    for key in ("tune", "splits"):
        if getattr(experiment, key):
            raise ConfigError(
                f"the experiment has {key}, which `run` does not do; use `idiolect compare`, or "
                "leave it out"
            )
    with run_callbacks(experiment, folder, watch or Silent(), serve=serve, log=log) as everyone:
        content = _executed(experiment, folder, resume, overwrite, data_dir, only, everyone)
        if serve is not None:
            report(folder)  # the page that was served stays as a file
    return content, folder


def _executed(
    experiment: Experiment,
    folder: Path,
    resume: bool,
    overwrite: bool,
    data_dir: Path | None,
    only: Sequence[str],
    watch: Watch,
) -> Document:
    # Data and settings are refused before anything is written, or an older run is cleared away.
    refuse_unknown_labels(experiment, only)
    made, about = build_jobs(experiment, data_dir)
    with open_run_folder(folder, resume=resume, overwrite=overwrite):
        if resume:
            _refuse_another(folder, experiment)
        path = folder / EXPERIMENT
        before = path.read_bytes() if path.exists() else None
        write_whole(path, experiment_toml(experiment).encode())
        held = zip(experiment.seeds, made[0].federations, strict=True)
        data_record.save_scaling(folder, {seed: federation.dataset for seed, federation in held})
        data_record.save_holdings(folder, made[0].seeds, made[0].federations)
        try:
            return run_jobs(made, folder, about, resume=resume, only=only, watch=watch)
        except CheckpointError:  # refused: the folder stays as it was
            if before is not None:
                write_whole(path, before)
            raise


def experiment_toml(experiment: Experiment) -> str:
    """Write an experiment as TOML; reading it again gives the same one."""
    return dump_toml(experiment.model_dump(exclude={"training", "aggregate"}, exclude_none=True))


def _refuse_another(folder: Path, experiment: Experiment) -> None:
    """Compare with what the folder was begun with; more rounds and further methods are welcome."""
    path = folder / EXPERIMENT
    if not path.exists():
        return
    try:
        before = _essence(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError):
        raise CheckpointError(f"{path} is damaged; delete it to go on with this folder") from None
    now = _essence(tomllib.loads(experiment_toml(experiment)))
    shared = set(before["methods"]) & set(now["methods"])
    for side in (before, now):
        side["methods"] = {k: v for k, v in side["methods"].items() if k in shared}
    if difference := first_difference(before, now):
        raise CheckpointError(
            f"{folder} holds another experiment: {difference}; use another --out, or undo the "
            "change"
        )


def _essence(raw: dict[str, Any]) -> dict[str, Any]:
    """Leave out what may change between a run and its continuation."""
    kept: dict[str, Any] = {key: raw[key] for key in ("seeds", "cohort", "model") if key in raw}
    kept["draw"] = raw.get("draw", "fixed")
    kept["bystanders"] = raw.get("bystanders", "rest")
    kept["attack"] = raw.get("attack")
    data = {**raw["data"], "source": Path(raw["data"]["source"]).name}
    seen = ("every", "personal", "test_curve", "clients")
    watched = {key: raw["evaluate"][key] for key in seen if key in raw["evaluate"]}
    methods = {
        table["label"]: {key: value for key, value in table.items() if key != "rounds"}
        for table in raw["methods"]
    }
    return {**kept, "data": data, "evaluate": watched, "methods": methods}


# Run several methods into one folder and write what they found.


EXPERIMENT = "experiment.toml"
_FILES = (
    EXPERIMENT,
    data_record.SCALING_FILE,
    data_record.HOLDINGS_FILE,
    document.FILE,
    document.METRICS_FILE,
    "comparison.json",
)
_FOLDERS = (
    "checkpoints",
    "globals",
    "models",
    "newcomers",
    "traces",
    "parts",
    "tune",
    data_record.VOCABULARY,
    PERSONAL,
)


def run_jobs(
    jobs: Sequence[Job],
    folder: Path,
    about: Mapping[str, Any],
    *,
    resume: bool = False,
    only: Sequence[str] = (),
    watch: Watch | None = None,
) -> Document:
    """Train every job in turn; finished ones are read from their checkpoints.

    The result is written after each method, so that a later one's failure does not cost it. With
    labels in `only`, other methods stand in the result if they were finished before.
    """
    wanted = [job for job in jobs if not only or job.label in only]
    left_out = [job for job in jobs if resume and job not in wanted]
    done = {job.label: kept for job in left_out if (kept := finished(job, folder))}
    content: Document = {}
    for job in wanted:
        earlier = list(done.values())
        done[job.label] = train(job, folder, resume=resume, watch=watch, earlier=earlier)
        outcomes = [done[job.label].outcome for job in jobs if job.label in done]
        complete = len(outcomes) == len(jobs)
        content = document.write_results(folder, about, outcomes, complete)
    return content


@contextmanager
def open_run_folder(folder: Path, *, resume: bool, overwrite: bool = False) -> Iterator[Path]:
    """Hold a folder for a run; one that holds another run, or is in use, is refused."""
    held = [name for name in (*_FILES, *_FOLDERS) if (folder / name).exists()]
    if held and not (resume or overwrite):
        raise CheckpointError(
            f"{folder} already holds a run; add --resume to go on with it (or to see its result), "
            "or choose another --out"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise IdiolectError(
            f"cannot write to {folder}: {error.strerror}; choose another --out"
        ) from error
    with lock:
        _hold(lock, folder)
        if held and overwrite:
            clear_run_folder(folder)
        for part in folder.rglob(".*.part"):  # left by a process that was killed while writing
            part.unlink(missing_ok=True)
        yield folder


def _hold(lock: IO[str], folder: Path) -> None:
    """Lock a folder against other processes; the lock goes with the process, however it ends."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system: two runs in a folder are the user's risk
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise IdiolectError(
            f"another process is running in {folder}; wait until it ends, or choose another --out"
        ) from None


def clear_run_folder(folder: Path) -> None:
    """Remove a run's files from its folder, and nothing else."""
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)
    for name in _FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)


# Who watches an experiment: the screen, a page served beside it, loggers.


@contextmanager
def run_callbacks(
    experiment: Experiment,
    folder: Path,
    screen: Watch,
    *,
    serve: Address | None = None,
    log: Sequence[str] = (),
) -> Iterator[Watch]:
    """Gather those who watch; a port that is taken or a library that is missing is told at once."""
    wanted = {**_asked(experiment.logging), **parse_log_options(log)}
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


def parse_log_options(log: Sequence[str]) -> dict[str, str]:
    """Read what --log was given: a logger's name, or NAME=TARGET."""
    found = {}
    for text in log:
        name, _, target = text.partition("=")
        if name not in LOGGERS:
            raise ConfigError(f"--log: unknown logger {suggest(name, LOGGERS)}")
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
