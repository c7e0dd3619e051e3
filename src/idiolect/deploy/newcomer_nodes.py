"""Nodes that come when a run is over: each gets its personal model from what the run kept.

They get the run's experiment, with its classes, words and scaling, look at earlier states if the
method needs that, adapt to the last one and score their models. Only the scores leave them, and the
run stays as it was.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from idiolect.core.checkpoint import write_whole
from idiolect.data.columns import embedded_blocks
from idiolect.data.text import SPECIAL
from idiolect.deploy import handshake
from idiolect.deploy.data_summary import read_entries, read_scalings
from idiolect.deploy.encoder_agreement import Agreement
from idiolect.deploy.handshake import NodeRegistry, RunSummary
from idiolect.deploy.messenger import Messenger
from idiolect.deploy.node_records import NOBODY
from idiolect.deploy.serve_experiment import NO_SETTINGS, ServerSettings
from idiolect.deploy.server import Server
from idiolect.errors import DataError
from idiolect.experiment.adapt import (
    FinishedRun,
    adaptation_document,
    catch_up,
    load_finished,
    metric_choice,
    network_index,
    refuse_per_client_state,
    write_adaptation,
)
from idiolect.experiment.components import assign_networks, build_method
from idiolect.experiment.portable import import_experiment
from idiolect.experiment.run import EXPERIMENT, experiment_toml
from idiolect.experiment.schema import Deployment, Experiment, MethodTable, Text
from idiolect.experiment.stored_models import choose_method, with_one_network
from idiolect.results import document
from idiolect.results.document import Document

_KEPT = ("timeout", "join", "patience", "limit_mb")  # how nodes are waited for


class WantedModel(NamedTuple):
    """Which model of a run newcomers are to have."""

    run: str
    method: str | None = None  # its label; None: the only one
    seed: int | None = None  # None: the first
    network: str | None = None  # where the run had several


class AvailableModel(NamedTuple):
    """The model of a run for newcomers."""

    text: str  # the experiment that they get
    experiment: Experiment  # the run's own
    table: MethodTable
    kept: FinishedRun
    model: RunSummary
    place: int  # of their network among the run's
    folder: Path


def find_model(
    folder: Path, wanted: WantedModel, host: ServerSettings = NO_SETTINGS
) -> AvailableModel:
    """Find the model of a finished run for newcomers."""
    if not (folder / EXPERIMENT).is_file():
        raise DataError(f"this server holds no run {wanted.run}; was it done on another one?")
    experiment = import_experiment((folder / EXPERIMENT).read_text(), reach=host.reach)
    table = choose_method(experiment, wanted.method)
    label = table.label or table.name
    run = load_finished(folder, label, wanted.seed)
    first = next(iter(read_entries(folder / "roster.json").values()))
    # A digest of columns and words for each of the run's seeds.
    digest = first.features.split()[experiment.seeds.index(run.seed)]
    clients = int(document.read_document(folder)["data"]["clients"])
    model = RunSummary(clients, dataclasses.replace(first, features=digest))
    one = with_one_network(experiment, wanted.network)
    classed = not first.form.sequential and first.form.task["kind"] == "classes"
    classes = tuple(first.form.classes) if classed else None
    text = one.data.text
    if text is None and first.form.words:  # then a newcomer's words are numbered as the run's were
        own = tuple(first.form.words[len(SPECIAL) :])
        text = Text(words=own, length=first.form.shape[0], next_word=first.form.sequential)
    unscaled = one.data.model_copy(update={"classes": classes, "normalise": None, "text": text})
    patience = {key: getattr(one.deploy, key) for key in _KEPT}
    shortened = one.model_copy(
        update={
            "seeds": (run.seed,),
            "cohort": None,
            "data": unscaled,
            "methods": (table,),
            "deploy": Deployment(**patience, minimum=1),
        }
    )
    place = network_index(experiment, wanted.network)
    return AvailableModel(experiment_toml(shortened), experiment, table, run, model, place, folder)


def adapt_nodes(
    messenger: Messenger,
    found: AvailableModel,
    visit: str,
    folder: Path,
    submitter: str = NOBODY,
    host: ServerSettings = NO_SETTINGS,
) -> Document:
    """Give the nodes of a messenger their models; write the scores into a folder.

    `visit` names this occasion, and with it the nodes' state.
    """
    label, run = found.kept.label, found.kept
    experiment, method = import_experiment(found.text, reach=host.reach), build_method(found.table)
    digests = {label: handshake.method_fingerprint(method)}
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # for the server's own account alone
    # Newcomers are scaled as the run was under the seed they are given a model of.
    seeds = found.experiment.seeds
    shift, scale = read_scalings(found.folder / "scaling.json", len(seeds))[seeds.index(run.seed)]
    own = {"seeds": [{"shift": shift.tolist(), "scale": scale.tolist()}]}
    write_whole(folder / "scaling.json", json.dumps(own).encode())
    place = seeds.index(run.seed)
    agreed = Agreement.load(found.folder, len(seeds))
    if agreed != Agreement():
        Agreement(agreed.encoders[place:][:1], agreed.tasks[place:][:1]).save(folder)
    path = folder / "roster.json"
    registry = NodeRegistry(messenger, visit, found.text, digests, 1, path, found.model, submitter)
    registry.gather(None)
    form, clients = registry.first.form, found.model.clients
    shape, words = tuple(form.shape), tuple(form.words)
    names, classes = registry.names, len(form.classes)
    blocks = embedded_blocks(registry.agreement.encoders)
    bound = assign_networks(
        experiment, shape, classes, registry.clients, words, names, host.reach, blocks
    )
    refuse_per_client_state(method, bound, form.blank(2), clients)
    server = Server(
        label, method, (run.seed,), visit, registry, bound, None, "fixed", experiment.deploy
    )
    test_data = () if any(registry.sizes(2, 0)) else None  # they are the nodes' own
    choice = metric_choice(found.experiment, form.blank(2).task)
    done = catch_up(server, method, run, test_data, found.place, choice=choice)
    sizes = [[registry.sizes(part, 0)[n] for part in range(3)] for n in range(registry.clients)]
    about: Mapping[str, str] = {"source": "the nodes' own data", "federation": ""}
    done = done._replace(notices=(*done.notices, *server.remarks()))
    content = adaptation_document(
        found.experiment, found.table, run, about, registry.names, sizes, done
    )
    write_adaptation(folder, content)
    registry.close()
    return content
