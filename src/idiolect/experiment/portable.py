"""An experiment read where its data is not: on a node with data of its own, or on the hub."""

from collections.abc import Mapping
from typing import Any

from idiolect.data import SOURCES
from idiolect.errors import ConfigError
from idiolect.experiment.load import Raw, parse_toml, resolve
from idiolect.experiment.run import experiment_toml
from idiolect.experiment.schema import Data, Experiment, Logging, Workers
from idiolect.experiment.untrusted import (
    CLOSED,
    MOST,
    OWN,
    Permissions,
    by_digest,
    refuse_untrusted,
)
from idiolect.methods import METHODS

NOWHERE = "embedded"  # stands where nothing is read
_WHERE = "the hub's experiment"


def export_experiment(experiment: Experiment) -> str:
    """Write an experiment for other machines; what they would refuse is refused here already.

    No path leaves this machine: who reads the experiment brings own data.
    """
    backend = experiment.backend.model_copy(update={"ray": Workers()})
    exported = experiment.model_copy(
        update={"data": _pathless(experiment.data), "backend": backend, "logging": Logging()}
    )
    text = experiment_toml(exported, by_digest)
    packages = experiment.deploy.packages
    try:
        parse_untrusted(text, Permissions(packages=packages))
    except ConfigError as error:
        said = str(error).removeprefix(f"{_WHERE}: ")
        code = ": neither built in" if "neither built in" in said else ""
        hint = (
            "; if the operators of all sites and of the server have installed its package and put "
            "it on their lists, say so with deploy.packages = ['PACKAGE']"
        )
        raise ConfigError(
            f"sites and server would refuse the experiment: {said}{hint if code else ''}"
        ) from None
    return text


def _pathless(data: Data) -> Data:
    """Put a mark in the place of every file."""
    if data.source not in SOURCES:
        data = data.model_copy(update={"source": OWN, "options": {}})
    if data.public is not None and data.public.source not in SOURCES:
        public = data.public.model_copy(update={"source": OWN, "options": {}})
        data = data.model_copy(update={"public": public})
    return data


def source_of(text: str) -> str:
    """Name the source that an experiment was written for."""
    data = parse_toml(text, _WHERE).get("data", {})
    return str(data.get("source", NOWHERE)) if isinstance(data, Mapping) else NOWHERE


def import_experiment(
    text: str,
    *,
    source: str | None = None,
    options: Mapping[str, Any] | None = None,
    public: str | None = None,
    side: str = "clients",
    divided: bool = False,
    reach: Permissions = CLOSED,
) -> Experiment:
    """Read an experiment with this machine's data instead of its author's.

    Data of another source is one client's, unless it is `divided` as the experiment says.
    Without a source it is read for its settings alone. `public` stands for the public examples
    where the experiment names a file of its author's; a side without use for them is spared them.
    Nothing else that the experiment names is opened, and no package but those in `reach` imported.
    """
    raw = parse_untrusted(text, reach)
    data: dict[str, Any] = {**raw.get("data", {})}
    if source is None:
        data.update(source=NOWHERE, options={}, partition={"name": "iid"})
        data.pop("public", None)
    elif divided:
        data.update(source=source, options={**data.get("options", {}), **(options or {})})
    elif source != data.get("source", NOWHERE):
        data.update(source=source, options=dict(options or {}), partition={"name": "natural"})
        named = [METHODS.get(own.get("name", "")) for own in raw.get("methods", ())]
        # A package's method is not imported yet, so it may need them.
        if not any(method is None or method.public == side for method in named):
            data.pop("public", None)
    elif options:
        data["options"] = {**data.get("options", {}), **options}
    if public is not None and "public" in data:
        data["public"] = {**data["public"], "source": public, "options": {}}
    given = tuple(own for own in (source, public) if own is not None and own != OWN)
    return resolve({**raw, "data": data}, _WHERE, reach._replace(base=None, files=given))


def parse_untrusted(text: str, reach: Permissions = CLOSED) -> Raw:
    """Parse an experiment from outside, and refuse it unless all it holds is allowed."""
    if len(text) > MOST:
        raise ConfigError(f"{_WHERE} has {len(text)} characters, expected {MOST} at most")
    raw = parse_toml(text, _WHERE)
    refuse_untrusted(raw, _WHERE, reach.packages)
    return raw
