"""Statistics before training, over a federation: each site tells what it allows, and no more."""

import json
import logging
import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from idiolect.core.checkpoint import write_whole
from idiolect.data.description import Description, SiteSums, description, site_warnings
from idiolect.deploy import audit, protocol
from idiolect.deploy.disclosure import read_site
from idiolect.deploy.messenger import Answer, Messenger
from idiolect.deploy.node_process import Processes
from idiolect.deploy.node_records import NOBODY
from idiolect.deploy.protocol import CODES
from idiolect.deploy.serve_experiment import (
    NO_SETTINGS,
    ServerSettings,
    local_sites,
    make_messenger,
)
from idiolect.errors import DeployError
from idiolect.experiment.build import build_federations
from idiolect.experiment.portable import export_experiment, import_experiment
from idiolect.experiment.schema import Experiment
from idiolect.version import VERSION

log = logging.getLogger("idiolect.hub")

DESCRIPTION = "description.json"  # in a run's folder


def describe_nodes(
    messenger: Messenger,
    text: str,
    run: str,
    folder: Path,
    submitter: str = NOBODY,
    host: ServerSettings = NO_SETTINGS,
) -> Description:
    """Ask every site for its statistics; write and return the description.

    Each site is told what is odd about its own data, on its console.
    """
    experiment = import_experiment(text, reach=host.reach)
    folder.mkdir(0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    sites: Sequence[str] = tuple(messenger.transport.sites)
    head = {
        "run": run,
        "submitter": submitter,
        "submission": messenger.transport.submission,
        "version": VERSION,
        "experiment": text,
        "clients": len(sites),
    }
    messenger.transport.note(audit.RUN, **audit.run_facts(run, submitter, text, {}))
    found: dict[str, SiteSums] = {}

    def read(site: str, answer: Answer) -> None:
        found[site] = read_site(site, answer.message)

    questions = {
        site: protocol.pack("describe", {**head, "place": place})
        for place, site in enumerate(sites)
    }
    refused = messenger.ask(questions, messenger.policy.join, read)
    if not found:
        words = "; ".join(f"{site}: {CODES[why.reason]}" for site, why in refused.items())
        raise DeployError(f"no site tells anything of its data; {words}")
    for site, why in refused.items():
        found[site] = SiteSums(site, tells="none", why=CODES[why.reason])
    told = [found[site] for site in sites if site in found]
    content = description(experiment.name, "train", told)
    write_whole(folder / DESCRIPTION, (json.dumps(content, indent=1) + "\n").encode())
    remarks = remarks_by_site(site_warnings(told))
    messages = {
        site: protocol.pack("remark", {"run": run, "remarks": words})
        for site, words in remarks.items()
    }
    messenger.ask(messages, messenger.policy.join, lambda site, answer: None)
    return content


def remarks_by_site(warnings: Sequence[Any]) -> dict[str, list[str]]:
    """Return what is said to each site of its own data."""
    found: dict[str, list[str]] = {}
    for one in warnings:
        found.setdefault(one["site"], []).append(one["text"])
    return found


def describe_local(experiment: Experiment, say: Callable[[str], None]) -> Description:
    """Describe an experiment's data with a process for every client of its partition."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        experiment, sites, host = local_sites(experiment, folder)
        names = build_federations(experiment)[0].names
        sites = [replace(site, name=name) for site, name in zip(sites, names, strict=True)]
        say(f"{len(sites)} nodes start, a process each")
        transport = Processes(sites)
        try:
            text = export_experiment(experiment)
            messenger = make_messenger(transport, text, folder, host)
            return describe_nodes(messenger, text, uuid.uuid4().hex[:12], folder, host=host)
        finally:
            transport.close()
