"""Run an experiment into a folder, from the command line or from Python."""

import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from idiolect.analysis.live import Address, address, serving
from idiolect.analysis.loggers import LOGGERS, logger
from idiolect.analysis.report import report
from idiolect.core.checkpoint import write_whole
from idiolect.engine.outcome import Several, Silent, Stage, Watch
from idiolect.errors import CheckpointError, ConfigError, IdiolectError, suggest
from idiolect.experiment.build import build_jobs, refuse_unknown_labels
from idiolect.experiment.early_checks import refuse_misfits
from idiolect.experiment.job import Job
from idiolect.experiment.load import EXPERIMENT as EXPERIMENT
from idiolect.experiment.load import dump_toml, load_experiment
from idiolect.experiment.run_state import PERSONAL, first_difference
from idiolect.experiment.schema import Experiment
from idiolect.experiment.train import finished, planned_work, train
from idiolect.experiment.untrusted import by_digest
from idiolect.results import document, run_files
from idiolect.results.document import Document
from idiolect.results.run_files import folder_name

_FILES = (
    EXPERIMENT,
    run_files.SCALING_FILE,
    run_files.HOLDINGS_FILE,
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
    run_files.VOCABULARY,
    PERSONAL,
)


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
    """Run an experiment; return the result and its folder, by default runs/NAME."""
    folder = out or Path("runs") / folder_name(experiment.name)
    for key in ("tune", "splits"):
        if getattr(experiment, key):
            raise ConfigError(
                f"the experiment has {key}, which `run` does not do; use `idiolect compare`, or "
                "leave it out"
            )
    with run_callbacks(experiment, folder, watch or Silent(), serve=serve, log=log) as callbacks:
        # Data and settings are refused before anything is written, or an older run is cleared away.
        refuse_unknown_labels(experiment, only)
        callbacks.stage(Stage("reading data"))
        jobs, about = build_jobs(experiment, data_dir)
        wanted = [job for job in jobs if not only or job.label in only]
        for text in refuse_misfits(experiment, wanted, folder):
            callbacks.note(text)
        with open_run_folder(folder, resume=resume, overwrite=overwrite):
            path = folder / EXPERIMENT
            if resume and path.exists():
                _refuse_another(path, experiment)
            before = path.read_bytes() if path.exists() else None
            write_whole(path, experiment_toml(experiment).encode())
            federations = jobs[0].federations
            decoded = [federation.dataset for federation in federations]
            held = dict(zip(experiment.seeds, decoded, strict=True))
            options, public = experiment.data.options, federations[0].public
            run_files.save_scaling(folder, held, options, public)
            run_files.save_holdings(folder, experiment.seeds, federations)
            try:
                content = run_jobs(jobs, folder, about, resume=resume, only=only, watch=callbacks)
            except CheckpointError:  # refused: the folder stays as it was
                if before is not None:
                    write_whole(path, before)
                raise
        if serve is not None:
            report(folder)  # the page that was served stays as a file
    return content, folder


def experiment_toml(experiment: Experiment, change: Callable[[Any], Any] = lambda raw: raw) -> str:
    """Write an experiment as TOML; reading it again gives the same one, but for a `change`."""
    raw = experiment.model_dump(exclude={"training", "aggregate"}, exclude_none=True)
    return dump_toml(change(raw))


def _refuse_another(path: Path, experiment: Experiment) -> None:
    """Refuse a folder begun with another experiment; more rounds and more methods are fine."""
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
            f"{path.parent} holds another experiment: {difference}; use another --out, or undo the "
            "change"
        )


def _essence(raw: dict[str, Any]) -> dict[str, Any]:
    """Leave out what may change between a run and its continuation."""
    kept: dict[str, Any] = {key: raw[key] for key in ("seeds", "cohort") if key in raw}
    kept |= {key: by_digest(raw[key]) for key in ("model", "adapter") if key in raw}
    kept["draw"] = raw.get("draw", "fixed")
    kept["bystanders"] = raw.get("bystanders", "rest")
    kept["unseen"] = raw.get("unseen") or None
    kept["attack"] = raw.get("attack")
    data = {**raw["data"], "source": Path(raw["data"]["source"]).name}
    seen = ("every", "personal", "test_curve", "clients")
    watched = {key: raw["evaluate"][key] for key in seen if key in raw["evaluate"]}
    watched["train_curve"] = raw["evaluate"].get("train_curve", False)
    methods = {
        table["label"]: {key: value for key, value in table.items() if key != "rounds"}
        for table in raw["methods"]
    }
    return {**kept, "data": data, "evaluate": watched, "methods": methods}


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
    watch = watch or Silent()
    watch.plan([planned_work(job) for job in wanted])
    for job in wanted:
        earlier = list(done.values())
        done[job.label] = train(job, folder, resume=resume, watch=watch, earlier=earlier)
        outcomes = [done[job.label].outcome for job in jobs if job.label in done]
        complete = len(outcomes) == len(jobs)
        watch.stage(Stage("writing"))
        content = document.write_results(folder, about, outcomes, complete)
    return content


@contextmanager
def open_run_folder(
    folder: Path, *, resume: bool, overwrite: bool = False, comparison: bool = False
) -> Iterator[Path]:
    """Lock a folder for a run; refuse one that holds another run, or is in use.

    Only a `comparison` goes on in a comparison's folder.
    """
    held = [name for name in (*_FILES, *_FOLDERS) if (folder / name).exists()]
    if (folder / run_files.PARTS).is_dir() and not (comparison or overwrite):
        raise CheckpointError(
            f"{folder} holds a comparison, whose results a run would overwrite; go on with "
            "`idiolect compare`, or choose another --out"
        )
    if held and not (resume or overwrite):
        raise CheckpointError(
            f"{folder} already holds a run; add --resume to go on with it (or to see its result), "
            "or choose another --out"
        )
    lock = FileLock(folder / ".lock", timeout=0)  # released with the process, however it ends
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise IdiolectError(
            f"another process is running in {folder}; wait until it ends, or choose another --out"
        ) from None
    except OSError as error:
        raise IdiolectError(
            f"cannot write to {folder}: {error.strerror}; choose another --out"
        ) from error
    try:
        if held and overwrite:
            clear_run_folder(folder)
        for part in folder.rglob(".*.part"):  # left by a process that was killed while writing
            part.unlink(missing_ok=True)
        yield folder
    finally:
        lock.release()


def clear_run_folder(folder: Path) -> None:
    """Remove a run's files from its folder, and nothing else."""
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)
    for name in _FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)


@contextmanager
def run_callbacks(
    experiment: Experiment,
    folder: Path,
    screen: Watch,
    *,
    serve: Address | None = None,
    log: Sequence[str] = (),
) -> Iterator[Watch]:
    """Collect callbacks: screen, loggers, live page; a taken port or missing library fails here."""
    table = experiment.logging.model_dump()  # true, or where to
    asked = {name: "" if value is True else value for name, value in table.items() if value}
    wanted = {**asked, **parse_log_options(log)}
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
            for one in loggers:
                if one.trouble:
                    screen.note(one.trouble)


def parse_log_options(log: Sequence[str]) -> dict[str, str]:
    """Read what --log was given: a logger's name, or NAME=TARGET."""
    found = {}
    for text in log:
        name, _, target = text.partition("=")
        if name not in LOGGERS:
            raise ConfigError(f"--log: unknown logger {suggest(name, LOGGERS)}")
        found[name] = target
    return found
