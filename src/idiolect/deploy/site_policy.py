"""Limits that a site sets for itself, and that its own node enforces whatever a run asks for.

Whoever submits an experiment, or runs the server, cannot change them: they are read from a file of
the site (`policy.toml` in its kit, or `idiolect node --policy FILE`).
"""

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from idiolect.errors import ConfigError
from idiolect.experiment.load import read_toml
from idiolect.experiment.validation import signature_model, suggest, validate
from idiolect.methods import METHODS

FILE = "policy.toml"  # in a kit


@dataclass(frozen=True, kw_only=True)
class SitePolicy:
    """What a site allows; the defaults are what `idiolect federation init` writes.

    Each field is explained in `SITE_TEXT`, which is the file that a site starts with.
    """

    min_sites: int = 2
    min_cohort: int = 2
    min_batch: int = 8
    min_steps: int = 1
    min_examples: int = 32
    min_scored: int = 5
    require_secure: bool = False
    require_privacy: bool = False
    max_epsilon: float = 8.0
    methods: tuple[str, ...] = ()
    max_rounds: int = 500
    max_seeds: int = 3
    max_reports: int = 2000
    max_runs: int = 20
    short_batches: bool = False
    packages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name.startswith(("min_", "max_")) and not (
                value >= (0 if spec.name == "min_scored" else 1)
                if isinstance(value, int)
                else value > 0 and not math.isnan(value)
            ):
                raise ConfigError(f"{spec.name} is {value!r}, expected a number of 1 or more")
        for name in self.methods:
            if name not in METHODS:
                raise ConfigError(f"methods: unknown method {suggest(name, METHODS)}")
        for name in self.packages:
            if not all(part.isidentifier() for part in name.split(".")):
                raise ConfigError(f"packages: {name!r} is no name of a Python package")

    def plain(self) -> dict[str, Any]:
        """Return the limits as JSON has them."""
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> "SitePolicy":
        """Read what `plain` wrote."""
        values: dict[str, Any] = {
            key: tuple(v) if isinstance(v, list) else v for key, v in plain.items()
        }
        return cls(**values)


UNLIMITED = SitePolicy(
    min_sites=1,
    min_cohort=1,
    min_batch=1,
    min_examples=1,
    min_scored=0,
    max_rounds=10**9,
    max_seeds=10**9,
    max_reports=10**9,
    max_runs=10**9,
    short_batches=True,
)
"""No limits: for data that are nobody's secret."""


@dataclass(frozen=True, kw_only=True)
class ServerPolicy:
    """What the operator of a server allows."""

    packages: tuple[str, ...] = ()  # that an experiment from outside may name a network of


def read_site(path: Path) -> SitePolicy:
    """Read a site's policy; what the file leaves out has its default."""
    return SitePolicy(**_values(SitePolicy, path))


def read_server(path: Path) -> ServerPolicy:
    """Read the policy of a server's operator."""
    return ServerPolicy(**_values(ServerPolicy, path))


def in_kit(folder: Path, given: Path | None) -> Path | None:
    """Say where a kit's policy stands: in the file that was given, or in the kit, if there."""
    if given is not None:
        if not given.is_file():
            raise ConfigError(f"--policy: {given} is no file; give a TOML file of limits")
        return given
    return folder / FILE if (folder / FILE).is_file() else None


def _values(kind: type[SitePolicy] | type[ServerPolicy], path: Path) -> dict[str, Any]:
    raw = read_toml(path, "a policy")
    values = validate(signature_model(kind, ()), raw, str(path))
    found = {spec.name: getattr(values, spec.name) for spec in fields(kind)}
    try:
        kind(**found)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return found


_PACKAGES = """\
# Python packages, installed on this machine, that an experiment from outside may name a network of
# (model.name = "package.module:factory"). Naming one runs its code. None by default.
packages = []
"""

SITE_TEXT = (
    """\
# What this site allows. Its own node enforces these limits whatever the experiment or the server
# says; a run that goes beyond one is refused, and its author is told the name of the limit. The
# values are the defaults; a line that is left out has its default. Restart the node after a change.
# What the limits protect against, and what they do not: docs/deploy.md, "What a site allows".

# Least number of sites in a run, and in any one round. Of a round with one site, the global model
# is that site's report. With secure aggregation there are at least 3 in any case.
min_sites = 2
min_cohort = 2

# Least training rows in a gradient step.
min_batch = 8
# Least gradient steps behind one report.
min_steps = 1
# Least training rows behind one report, counted by their weight in it: 4 steps of 8 rows each are
# 32, one step of 16 rows is 16, any number of steps over the same 10 rows are 10.
min_examples = 32
# Least validation or test rows behind a score that leaves the site (0 rows: there is no score).
min_scored = 5

# Join only runs in which the server sees the sum of reports (deploy.secure = true); the same as
# `idiolect node --secure`.
require_secure = false
# Join only runs whose methods all have aggregate = "dp", with an epsilon, summed over methods and
# seeds, of at most max_epsilon.
require_privacy = false
max_epsilon = 8.0

# Methods by name, such as ["fedavg", "fedper"]; an empty list allows all. FedFomo and FedAMP send a
# site's model, or a mixture of few, to other sites.
methods = []

# Most rounds of a run, most seeds (each seed is a release of its own), most reports in all of a run
# (rounds x seeds x methods; as many scorings again), most new runs in 24 hours.
max_rounds = 500
max_seeds = 3
max_reports = 2000
max_runs = 20

# false: the last batch of an epoch is left out if it has less than half the rows of a batch; a
# batch of one row would show that row. true: it is trained on, as a simulation does.
short_batches = false

"""
    + _PACKAGES
)
"""What a site's kit starts with."""

SERVER_TEXT = (
    """\
# What the operator of this server allows, whatever a run asks for.

"""
    + _PACKAGES
)
"""What a server's kit starts with."""
