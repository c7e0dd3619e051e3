"""Run an experiment into a folder, from the command line or from Python."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from idiolect.analysis.live import Address, address
from idiolect.analysis.report import report
from idiolect.core.checkpoint import write_whole
from idiolect.engine.callbacks import Silent, Watch
from idiolect.errors import CheckpointError, ConfigError
from idiolect.experiment.build import jobs, refuse_unknown_labels
from idiolect.experiment.resolve import load_experiment
from idiolect.experiment.run_methods import EXPERIMENT, opened
from idiolect.experiment.run_methods import run as run_jobs
from idiolect.experiment.run_state import first_difference
from idiolect.experiment.schema import Experiment
from idiolect.experiment.toml import dumps
from idiolect.experiment.watchers import watched
from idiolect.results import holdings, scaling
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
    content, _ = execute(
        load_experiment(path, overrides),
        Path(out) if out else None,
        resume=resume,
        overwrite=overwrite,
        data_dir=Path(data_dir) if data_dir else None,
        serve=None if serve is None else address(serve),
        log=log,
    )
    return content


def execute(
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
    with watched(experiment, folder, watch or Silent(), serve=serve, log=log) as everyone:
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
    made, about = jobs(experiment, data_dir)
    with opened(folder, resume=resume, overwrite=overwrite):
        if resume:
            _refuse_another(folder, experiment)
        path = folder / EXPERIMENT
        before = path.read_bytes() if path.exists() else None
        write_whole(path, written(experiment).encode())
        held = zip(experiment.seeds, made[0].federations, strict=True)
        scaling.save(folder, {seed: federation.dataset for seed, federation in held})
        holdings.save(folder, holdings.of(made[0].seeds, made[0].federations))
        try:
            return run_jobs(made, folder, about, resume=resume, only=only, watch=watch)
        except CheckpointError:  # refused: the folder stays as it was
            if before is not None:
                write_whole(path, before)
            raise


def written(experiment: Experiment) -> str:
    """Write an experiment as TOML; reading it again gives the same one."""
    return dumps(experiment.model_dump(exclude={"training", "aggregate"}, exclude_none=True))


def _refuse_another(folder: Path, experiment: Experiment) -> None:
    """Compare with what the folder was begun with; more rounds and further methods are welcome."""
    path = folder / EXPERIMENT
    if not path.exists():
        return
    try:
        before = _essence(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError):
        raise CheckpointError(f"{path} is damaged; delete it to go on with this folder") from None
    now = _essence(tomllib.loads(written(experiment)))
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
