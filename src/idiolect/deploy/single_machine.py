"""A federation on one machine, one process a node: to try an experiment before others join."""

import json
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from idiolect.core.checkpoint import write_whole
from idiolect.data import SOURCES
from idiolect.deploy.serve_experiment import post, serve
from idiolect.deploy.server_data import Host
from idiolect.deploy.site import Site
from idiolect.deploy.site_policy import UNLIMITED
from idiolect.deploy.transport import Processes
from idiolect.engine.callbacks import Silent, Tick
from idiolect.errors import ConfigError
from idiolect.experiment.build import build_federations
from idiolect.experiment.portable import export_experiment
from idiolect.experiment.schema import Experiment
from idiolect.experiment.untrusted import trust_named_code

_MOST = 32  # processes, each with a torch of its own
_FILE = "federation.json"


class _Told(Silent):
    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def tick(self, tick: Tick) -> None:
        self._say(f"{tick.label}: round {tick.round} of {tick.rounds}")

    def note(self, text: str) -> None:
        self._say(f"note: {text}")


def run_local(
    experiment: Experiment, folder: Path, only: Sequence[str], say: Callable[[str], None]
) -> Path:
    """Run an experiment with a process for every client of its partition."""
    clients = build_federations(experiment)[0].clients
    if clients > _MOST:
        raise ConfigError(
            f"--on local would start {clients} processes, one a client; {_MOST} at most: use the "
            "simulator, or fewer clients"
        )
    path = folder / _FILE
    run = json.loads(path.read_text())["run"] if path.exists() else uuid.uuid4().hex[:12]
    write_whole(path, json.dumps({"run": run, "federation": "local"}).encode())
    source = experiment.data.source
    # Own files and own modules are the user's, who sits at this very machine.
    given = experiment.data.public
    public = None if given is None or given.source in SOURCES else given.source
    own = trust_named_code(experiment.model_dump())
    told: dict[str, Any] = {"packages": own.packages, "folders": own.folders, "public": public}
    deploy = experiment.deploy.model_copy(update={"packages": own.packages})
    experiment = experiment.model_copy(update={"deploy": deploy})
    sites = [
        # One machine's own data: no site whose limits would protect it from another.
        Site(
            f"node-{n}",
            "local",
            folder / "nodes" / f"node-{n}",
            source,
            client=n,
            policy=UNLIMITED,
            **told,
        )
        for n in range(clients)
    ]
    transport = Processes(sites)
    say(f"{clients} nodes start, a process each; their state is in {folder / 'nodes'}")
    try:
        text = export_experiment(experiment)
        calls, watch = post(transport, text, folder, Host(**told)), _Told(say)
        serve(calls, text, run, folder, only=only, watch=watch, host=Host(**told))
    finally:
        transport.close()
    return folder
