"""What an admin asks of a federation: to run an experiment, or to give newcomers their models."""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from idiolect.deploy.flare.kits import Kit
from idiolect.deploy.messenger import Policy
from idiolect.deploy.welcoming import Wanted
from idiolect.errors import ConfigError, DeployError
from idiolect.experiment.portable import export_experiment
from idiolect.experiment.schema import Experiment

RUN_FILE = "federation.json"  # in a run's folder: which run of which federation it is

_JOIN = 120.0  # seconds that newcomers have to connect


@dataclass(frozen=True)
class Task:
    """What a job is to do, and of whom it is asked."""

    run: str  # its own number, through however many jobs
    sites: tuple[str, ...]
    least: int  # sites that must be there
    join: float  # seconds the others have
    experiment: str = ""  # as TOML
    only: tuple[str, ...] = ()  # labels; empty: all methods
    wanted: Wanted | None = None  # of newcomers: what they adapt to


def running(kit: Kit, experiment: Experiment, folder: Path, only: Sequence[str]) -> Task:
    """Ask for an experiment; what a folder holds is gone on with."""
    deploy = experiment.deploy
    policy = Policy(deploy.timeout, deploy.join, deploy.minimum)
    run = known_run(kit, folder) or uuid.uuid4().hex[:12]
    least = policy.needed(len(kit.sites))
    return Task(run, kit.sites, least, deploy.join, export_experiment(experiment), tuple(only))


def welcoming(
    kit: Kit,
    folder: Path,
    sites: Sequence[str],
    method: str | None,
    seed: int | None,
    network: str | None,
) -> Task:
    """Ask for models of newcomers, from a run of which the folder holds the results."""
    run = known_run(kit, folder)
    if not run:
        raise ConfigError(
            f"{folder} holds no run of a federation (no {RUN_FILE}); give the --out folder of "
            "`idiolect run EXPERIMENT.toml --on KIT`"
        )
    if not sites or len(set(sites)) < len(sites):
        raise ConfigError("--site: name every newcomer once, such as --site lab")
    wanted = Wanted(run, method, seed, network)
    return Task(uuid.uuid4().hex[:12], tuple(sites), len(sites), _JOIN, wanted=wanted)


def known_run(kit: Kit, folder: Path) -> str:
    """Return the run that a folder holds, of this federation; empty where it holds none."""
    path = folder / RUN_FILE
    if not path.exists():
        return ""
    known = json.loads(path.read_text())
    if known.get("federation") != kit.federation:
        raise DeployError(
            f"{folder} holds a run of federation {known.get('federation')!r}, and the kit is of "
            f"{kit.federation!r}; choose another folder, or the other kit"
        )
    return str(known["run"])
