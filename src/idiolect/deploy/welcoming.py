"""Nodes that come when a run is over: each gets its personal model from what the run kept.

They are told the run's experiment, with its classes, words and scaling; look at earlier states
where the method gains from that; adapt to the last one, and score what came of it. Nothing that
they compute leaves them but the scores, and the run stays as it was.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from idiolect.core.checkpoint import write_whole
from idiolect.data.text import SPECIAL
from idiolect.deploy import fingerprints
from idiolect.deploy.handshake import Model, Roster, entries_of, scalings
from idiolect.deploy.hub import Hub
from idiolect.deploy.messenger import Post
from idiolect.deploy.ownership import NOBODY
from idiolect.deploy.server_data import HOST, Host
from idiolect.errors import DataError
from idiolect.experiment.adapt import (
    chosen,
    laid_out,
    network_place,
    with_one_network,
    write_findings,
)
from idiolect.experiment.build_methods import made
from idiolect.experiment.build_networks import networks
from idiolect.experiment.execute import written
from idiolect.experiment.newcomers import Kept, caught_up, kept, refuse_counted
from idiolect.experiment.portable import visiting
from idiolect.experiment.run_methods import EXPERIMENT
from idiolect.experiment.schema import Deployment, Experiment, MethodTable, Text
from idiolect.results import document
from idiolect.results.document import Document

_KEPT = ("timeout", "join", "patience", "limit_mb")  # how nodes are waited for


class Wanted(NamedTuple):
    """Which model of a run newcomers are to have."""

    run: str
    method: str | None = None  # its label; None: the only one
    seed: int | None = None  # None: the first
    network: str | None = None  # where the run had several


class Offer(NamedTuple):
    """What a run has for newcomers."""

    text: str  # the experiment as they are told it
    experiment: Experiment  # the run's own
    table: MethodTable
    kept: Kept
    model: Model
    place: int  # of their network among the run's
    folder: Path


def offer(folder: Path, wanted: Wanted, host: Host = HOST) -> Offer:
    """Find what a run of this server left for newcomers."""
    if not (folder / EXPERIMENT).is_file():
        raise DataError(f"this server holds no run {wanted.run}; was it done on another one?")
    experiment = visiting((folder / EXPERIMENT).read_text(), reach=host.reach)
    table = chosen(experiment, wanted.method)
    label = table.label or table.name
    run = kept(folder, label, wanted.seed)
    first = next(iter(entries_of(folder / "roster.json").values()))
    # A digest of columns and words for each of the run's seeds.
    digest = first.features.split()[experiment.seeds.index(run.seed)]
    clients = int(document.read(folder)["data"]["clients"])
    model = Model(clients, dataclasses.replace(first, features=digest))
    one = with_one_network(experiment, wanted.network)
    classes = None if first.form.sequential else tuple(first.form.classes)
    text = one.data.text
    if text is None and first.form.words:  # then a newcomer's words are numbered as the run's were
        own = tuple(first.form.words[len(SPECIAL) :])
        text = Text(words=own, length=first.form.shape[0], next_word=first.form.sequential)
    unscaled = one.data.model_copy(update={"classes": classes, "normalise": None, "text": text})
    patience = {key: getattr(one.deploy, key) for key in _KEPT}
    told = one.model_copy(
        update={
            "seeds": (run.seed,),
            "cohort": None,
            "data": unscaled,
            "methods": (table,),
            "deploy": Deployment(**patience, minimum=1),
        }
    )
    place = network_place(experiment, wanted.network)
    return Offer(written(told), experiment, table, run, model, place, folder)


def welcome(
    post: Post,
    found: Offer,
    visit: str,
    folder: Path,
    submitter: str = NOBODY,
    host: Host = HOST,
) -> Document:
    """Give the nodes of a post their models; write what was found, their scores, into a folder.

    `visit` names this occasion, and with it the nodes' state.
    """
    label, run = found.kept.label, found.kept
    experiment, method = visiting(found.text, reach=host.reach), made(found.table)
    digests = {label: fingerprints.of_method(method)}
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # for the server's own account alone
    # Newcomers are scaled as the run was under the seed they are given a model of.
    seeds = found.experiment.seeds
    shift, scale = scalings(found.folder / "scaling.json", len(seeds))[seeds.index(run.seed)]
    own = {"seeds": [{"shift": shift.tolist(), "scale": scale.tolist()}]}
    write_whole(folder / "scaling.json", json.dumps(own).encode())
    path = folder / "roster.json"
    roster = Roster(post, visit, found.text, digests, 1, path, found.model, submitter)
    roster.gather(None)
    form, clients = roster.first.form, found.model.clients
    shape, words = tuple(form.shape), tuple(form.words)
    names, classes = roster.names, len(form.classes)
    bound = networks(experiment, shape, classes, roster.clients, words, names, host.reach)
    refuse_counted(method, bound, len(form.classes), clients)
    hub = Hub(
        label, method, (run.seed,), visit, post, roster, bound, None, "fixed", experiment.deploy
    )
    exams = () if any(roster.sizes(2, 0)) else None  # they are the nodes' own
    done = caught_up(hub, method, run, exams, found.place)
    sizes = [[roster.sizes(part, 0)[n] for part in range(3)] for n in range(roster.clients)]
    about: Mapping[str, str] = {"source": "the nodes' own data", "federation": ""}
    done = done._replace(notices=(*done.notices, *hub.remarks()))
    content = laid_out(found.experiment, found.table, run, about, roster.names, sizes, done)
    write_findings(folder, content)
    return content
