"""An experiment read where its data is not: on a node with data of its own, or on the hub."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from idiolect.data import SOURCES
from idiolect.experiment.execute import written
from idiolect.experiment.reading import parse_toml
from idiolect.experiment.resolve import completed
from idiolect.experiment.schema import Experiment
from idiolect.methods import METHODS

NOWHERE = "embedded"  # stands where nothing is read


def travelling(experiment: Experiment) -> str:
    """Write an experiment for other machines: of paths only the last part leaves this one."""
    data = experiment.data
    if data.source not in SOURCES:
        data = data.model_copy(update={"source": Path(data.source).name})
    if data.public is not None and data.public.source not in SOURCES:
        public = data.public.model_copy(update={"source": Path(data.public.source).name})
        data = data.model_copy(update={"public": public})
    return written(experiment.model_copy(update={"data": data}))


def source_of(text: str) -> str:
    """Name the source that an experiment was written for."""
    return str(parse_toml(text, "the hub's experiment").get("data", {}).get("source", NOWHERE))


def visiting(
    text: str,
    *,
    source: str | None = None,
    options: Mapping[str, Any] | None = None,
    public: str | None = None,
    side: str = "clients",
) -> Experiment:
    """Read an experiment with this machine's data instead of its author's.

    Without a source it is read for its settings alone. `public` stands for the public examples
    where the experiment names a file of its author's; a side without use for them is spared them.
    """
    raw = parse_toml(text, "the hub's experiment")
    data: dict[str, Any] = {**raw.get("data", {})}
    if source is None:
        data.update(source=NOWHERE, options={}, partition={"name": "iid"})
        data.pop("public", None)
    elif source != data.get("source", NOWHERE):
        data.update(source=source, options=dict(options or {}), partition={"name": "natural"})
        named = [METHODS.get(own.get("name", "")) for own in raw.get("methods", ())]
        if not any(method and method.public == side for method in named):
            data.pop("public", None)
    elif options:
        data["options"] = {**data.get("options", {}), **options}
    if public is not None and "public" in data:
        data["public"] = {**data["public"], "source": public, "options": {}}
    return completed({**raw, "data": data}, "the hub's experiment", Path.cwd())
