"""The handshake: nodes get the experiment, state the size and form of their data, and agree."""

import ast
import dataclasses
import inspect
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from idiolect.core import client, losses, optim, tree
from idiolect.core import method as contract
from idiolect.core.checkpoint import write_whole
from idiolect.core.method import Method
from idiolect.core.survival import task_from_json
from idiolect.data import Federation
from idiolect.data.dataset import Moments, decoding
from idiolect.deploy import audit, protocol
from idiolect.deploy.data_summary import (
    OF_COLUMNS,
    SAME,
    SAME_FOR_NEWCOMERS,
    NodeEntry,
    Scaling,
    is_list,
    joined,
    read_entries,
    read_entry,
    read_scalings,
    read_statistics,
    refuse_impossible,
    refuse_unlike,
    unlike_means,
)
from idiolect.deploy.encoder_agreement import Agreement, SiteColumns, agree, odd_sites
from idiolect.deploy.messenger import SILENT, Answer, Messenger
from idiolect.deploy.node_records import NOBODY
from idiolect.deploy.protocol import CODES, POLICY_LIMITS, Refused, digest
from idiolect.engine import batch_plan, block_runner
from idiolect.errors import ConfigError, DeployError
from idiolect.results.attendance import AttendanceLog
from idiolect.version import VERSION

log = logging.getLogger("idiolect.hub")
_LATER = ("approval", "hours")  # refusals that time may mend
_PAUSE = 2.0  # seconds between two questions to a site that waits for a person
_FAREWELL = 10.0  # seconds that nodes have to hear that a run is over


@dataclass(frozen=True)
class RunSummary:
    """A finished run: how many clients it had, and the entry of one of its nodes."""

    clients: int
    entry: NodeEntry


class NodeRegistry:
    """The nodes of a run, in the order of their numbers; kept on disk across restarts."""

    def __init__(
        self,
        messenger: Messenger,
        run: str,
        text: str,
        methods: Mapping[str, str],
        seeds: int,
        path: Path,
        finished: RunSummary | None = None,
        submitter: str = NOBODY,
    ) -> None:
        """`finished`: the run that newcomers adapt to, and whose data theirs must be like."""
        self.messenger = messenger
        self.finished = finished
        self._seeds = seeds
        self._run = run
        self._open: dict[str, Any] = {
            "run": run,
            "submitter": submitter,
            "submission": messenger.transport.submission,
            "version": VERSION,
            "experiment": text,
            "methods": dict(methods),
            "clients": finished.clients if finished else self.clients,
            "newcomer": finished is not None,
        }
        self._path = path
        self.attendance = AttendanceLog(path.parent)
        self.entries: dict[str, NodeEntry] = read_entries(path) if path.exists() else {}
        self._agreed = b""
        self.agreement = Agreement.load(path.parent, seeds)  # on encoders and tasks
        self._least: dict[str, tuple[int, int]] = {}  # sites in a run and a round, by each policy
        self.able = 0  # sites that could train when the run began: later ones make it no more
        self.remarks: list[str] = []  # about sites, for the lead and for readers of the result
        self._shown: set[str] = set()  # sites whose figures others may see
        self._odd: dict[str, list[str]] = {}  # the same by site, for the sites
        self.say: Callable[[str], None] = log.warning  # to the lead, while nodes join
        messenger.reopen = self._reopen

    # Joining.

    def gather(self, normalise: str | None, robust: bool = False) -> None:
        """Let every node join; refusals are reported, absent nodes skipped.

        `robust`: statistics are joined so that a site that lies moves them within bounds only.
        """
        messenger, known = self.messenger, self._open
        messenger.transport.note(
            audit.RUN,
            **audit.run_facts(self._run, known["submitter"], known["experiment"], known["methods"]),
        )
        first_time = not self.entries
        answers: dict[str, Answer] = {}

        def read(site: str, answer: Answer) -> None:
            entry = read_entry(site, answer, self._seeds)
            known = self.entries.get(site)
            if known is not None and known != entry:
                raise Refused("data", f"{site} brings other data than when the run began")
            refuse_impossible(site, answer, entry, self._seeds)
            self._least[site] = _least(answer)
            if answer.message.head.get("shown", True) is True:
                self._shown.add(site)
            answers[site] = answer
            self.entries[site] = entry

        messages = {site: self._open_message(site) for site in messenger.transport.sites}
        refused = messenger.ask(messages, messenger.policy.join, read)
        refused = self._await_people(messages, dict(refused), read)
        for site, why in refused.items():
            if why.reason not in SILENT:
                messenger.lose(site, why.reason)
        self._refuse(refused, first_time)
        self._refuse_few()
        encoded = self._encoded()
        self._compare(OF_COLUMNS if encoded else ())
        self._agree_columns(answers, encoded, robust, first_time)
        head = {"run": self._run, "classes": self.first.form.classes}
        if self.agreement.encoders:
            ones = torch.ones(self._seeds, 1)
            content = {"shift": torch.zeros(self._seeds, 1), "scale": ones}
            self._keep_scaling([(np.zeros(1), np.ones(1))] * self._seeds)
        else:
            content = self._scaling(answers, normalise, robust)
        if self.agreement != Agreement():
            content = {**content, "agreed": self.agreement.leaf()}
        self._agreed = protocol.pack("agree", head, content)
        agreed = dict.fromkeys(answers, self._agreed)
        messenger.ask(agreed, messenger.policy.join, lambda site, answer: None)
        self._tell_remarks()
        messenger.close_doors(answers)
        plain = {site: asdict(entry) for site, entry in self.entries.items()}
        write_whole(self._path, (json.dumps(plain, indent=1) + "\n").encode())
        self.able = self._able_at_first()

    def _able_at_first(self) -> int:
        """Return how many sites could train under every seed when the run began."""
        kept = self._path.with_name("able.json")
        if not kept.exists():
            now = min(sum(n > 0 for n in self.sizes(0, seed)) for seed in range(self._seeds))
            write_whole(kept, (json.dumps(now) + "\n").encode())
        return int(json.loads(kept.read_text()))

    def _await_people(
        self,
        messages: Mapping[str, bytes],
        refused: dict[str, Refused],
        read: Callable[[str, Answer], None],
    ) -> dict[str, Refused]:
        """Ask again while sites wait for a person's approval, or for their working hours."""
        messenger, until = self.messenger, time.monotonic() + self.messenger.policy.approval
        told: set[str] = set()
        while waiting := [site for site, why in refused.items() if why.reason in _LATER]:
            for site in waiting:
                words = f"{site}: {CODES[refused[site].reason]}"
                if words not in told:
                    told.add(words)
                    self.say(f"waiting for {words}")
            if time.monotonic() > until or messenger.transport.stopped():
                break
            time.sleep(min(_PAUSE, messenger.policy.approval / 4))
            for site in waiting:
                try:
                    answer = messenger.once(site, messages[site], messenger.policy.join)
                    read(site, answer)
                    del refused[site]
                except Refused as error:
                    refused[site] = error
        return refused

    def close(self) -> None:
        """Tell nodes that the run is over; nothing depends on their receiving it."""
        messenger, message = self.messenger, protocol.pack("close", {"run": self._run})
        there = {site: message for site in self.entries if messenger.there(site)}
        messenger.tell(there, _FAREWELL)

    def _tell_remarks(self) -> None:
        """Tell each site what is odd about its own data beside the others', before round 1."""
        messages = {
            site: protocol.pack("remark", {"run": self._run, "remarks": words})
            for site, words in self._odd.items()
            if self.messenger.there(site)
        }
        self.messenger.ask(messages, self.messenger.policy.join, lambda site, answer: None)

    def _note(self, site: str, text: str, figures: bool = False) -> None:
        """Remark on a site once: for the log, the lead, the result, and the site itself.

        Remarks with `figures` of a site that is not to be shown are for this site alone.
        """
        if text in self._odd.setdefault(site, []):
            return
        self._odd[site].append(text)
        if not figures or site in self._shown:
            log.warning(text)
            self.remarks.append(text)

    def _refuse(self, refused: Mapping[str, Refused], first_time: bool) -> None:
        """Report who cannot join; at the first start, go on only without absent nodes."""
        # Of a person's no, the words that were meant to be told.
        reasons = [
            f"{site}: {why if why.reason == 'declined' else CODES[why.reason]}"
            for site, why in refused.items()
        ]
        # A site that states impossible things is left out; one that could mend something is not.
        passed = (*SILENT, "statistics")
        wrong = [site for site, why in refused.items() if why.reason not in passed]
        there = self.clients - len(refused)
        needed = self.messenger.policy.needed(self.clients)
        if (wrong and first_time) or there < needed:
            # A restart does not change what a site allows.
            final = (*POLICY_LIMITS, "declined", "submitter", "revoked", *_LATER)
            limited = any(why.reason in final for why in refused.values())
            raise (ConfigError if limited else DeployError)(
                f"{there} of {self.clients} nodes can take part, "
                f"{needed if not wrong else 'all that are there'} needed; {'; '.join(reasons)}"
            )
        for text in reasons:
            log.warning("goes on without %s", text)

    def _refuse_few(self) -> None:
        """Refuse a run of fewer sites with training rows than one of them allows."""
        if self.finished is not None:
            return
        site, least = self._strictest(0)
        for seed in range(self._seeds):
            training = sum(self.entries[name].sizes[seed][0] > 0 for name in self._least)
            if training < least:
                raise ConfigError(
                    f"{training} sites joined that have training rows; {site}: {CODES['min_sites']}"
                )

    def _strictest(self, place: int) -> tuple[str, int]:
        """Return the joined site with the largest minimum, and that minimum."""
        minima = [(least[place], site) for site, least in self._least.items()]
        most, site = max(minima, default=(1, ""))
        return site, most

    @property
    def least_cohort(self) -> tuple[str, int]:
        """The site with the largest minimum of sites in a round, and that minimum."""
        return self._strictest(1)

    def _open_message(self, site: str) -> bytes:
        # By name, as a simulation of the same sites numbers them.
        place = sorted(self.messenger.transport.sites).index(site)
        return protocol.pack("open", {**self._open, "place": place})

    def _reopen(self, site: str) -> None:
        """Repeat the handshake with a node that was restarted."""
        for blob in (self._open_message(site), self._agreed):
            if blob:
                answer = self.messenger.once(site, blob, self.messenger.policy.join)
                if "least" in answer.message.head:
                    self._least[site] = _least(answer)

    # Agreement.

    def _encoded(self) -> bool:
        """Return whether an encoder is to make the features: of categories, gaps, other columns."""
        tables = [entry.table for entry in self.entries.values()]
        if self.agreement.encoders or "typed" in tables:
            return True
        features = {entry.features for entry in self.entries.values()}
        return self.finished is None and all(tables) and len(features) > 1

    def _agree_columns(
        self, answers: Mapping[str, Answer], encoded: bool, robust: bool, first_time: bool
    ) -> None:
        """Let nodes tell sums of their columns, and fit encoder and task for all of them."""
        task = task_from_json(self.first.form.task)
        decided = self.agreement != Agreement() or self.finished is not None
        if decided or not (encoded or (task.waiting and not self.first.source)):
            return
        if plain := [site for site in answers if encoded and not self.entries[site].table]:
            raise DeployError(
                f"{plain[0]} holds no table of columns, and others do; bring their data to one form"
            )
        told: dict[str, SiteColumns] = {}

        def read(site: str, answer: Answer) -> None:
            told[site] = SiteColumns.read(site, answer.message, self.entries[site].sizes)

        message = protocol.pack("columns", {"run": self._run, "table": encoded})
        asked = {site: message for site in self.sites if site in answers}
        refused = self.messenger.ask(asked, self.messenger.policy.join, read)
        for site, why in refused.items():
            if why.reason not in SILENT:
                self.messenger.lose(site, why.reason)
        self._refuse(refused, first_time)
        for site, text in odd_sites(told, self._shown):
            self._note(site, text, figures=True)
        try:
            self.agreement = agree(told, task, self.first.form.classes, self._seeds, robust)
        except ConfigError:
            self._tell_remarks()
            raise
        self.agreement.save(self._path.parent)

    def _compare(self, spared: Sequence[str] = ()) -> None:
        """Refuse nodes whose data cannot be learnt from together, naming who differs in what."""
        entries = list(self.entries.values())
        alike = [key for key in SAME if key not in spared]
        refuse_unlike(entries[0].site, entries[0], entries[1:], alike)
        if self.finished is not None:
            alike = [key for key in SAME_FOR_NEWCOMERS if key not in spared]
            refuse_unlike("the run", self.finished.entry, entries, alike)
        numbers = [entry.client for entry in entries]
        if len(set(numbers)) != len(numbers) or max(numbers) >= self.clients:
            raise DeployError(
                f"the nodes are clients {sorted(numbers)}, expected different ones of "
                f"0..{self.clients - 1}; start each node with a --client of its own"
            )
        if self.first.clients not in (0, self.clients):
            raise DeployError(
                f"the experiment's partition has {self.first.clients} clients and the federation "
                f"{self.clients} sites; divide the data among as many clients"
            )

    def _scaling(
        self, answers: Mapping[str, Answer], normalise: str | None, robust: bool
    ) -> dict[str, torch.Tensor]:
        """Return how examples are scaled under each seed: as all nodes do, or by statistics."""
        kept = self._path.with_name("scaling.json")
        if not kept.exists():  # else decided when the run began
            stated = {
                site: read_statistics(answer, self._seeds)
                for site, answer in sorted(answers.items())
            }
            self._keep_scaling(self._decided(stated, str(normalise), robust))
        shift, scale = zip(*read_scalings(kept, self._seeds), strict=True)
        stacked = {"shift": np.stack(shift), "scale": np.stack(scale)}
        return {name: torch.from_numpy(leaf) for name, leaf in stacked.items()}

    def _keep_scaling(self, each: Sequence[Scaling]) -> None:
        plain = [{"shift": shift.tolist(), "scale": scale.tolist()} for shift, scale in each]
        kept = self._path.with_name("scaling.json")
        write_whole(kept, json.dumps({"seeds": plain}).encode())

    def _decided(
        self, stated: Mapping[str, list["Moments | Scaling"]], normalise: str, robust: bool
    ) -> list[Scaling]:
        first = next(iter(stated.values()))
        if isinstance(first[0], Moments):
            joint = [self._joined(stated, seed, robust) for seed in range(self._seeds)]
            as_bytes = self.first.form.dtype == "uint8"
            return [decoding(one, normalise, as_bytes) for one in joint]
        for site, own in stated.items():
            if not all(_same_scaling(one, other) for one, other in zip(own, first, strict=True)):
                raise DeployError(f"{site} scales its examples otherwise than the first node")
        return [(np.asarray(own[0]), np.asarray(own[1])) for own in first]

    def _joined(
        self, stated: Mapping[str, list["Moments | Scaling"]], seed: int, robust: bool
    ) -> Moments:
        """Join the nodes' moments under one seed; remark on sites far from the others."""
        own = {site: each[seed] for site, each in stated.items()}
        moments = {site: one for site, one in own.items() if isinstance(one, Moments)}
        if len(moments) != len(own) or len({one.mean.shape for one in moments.values()}) > 1:
            raise DeployError("the nodes' statistics do not fit each other")
        found, far = joined(moments, robust)
        for site in far:
            self._note(
                site,
                f"{site} sent means or deviations far from the other sites'; the columns in which "
                "it did are scaled by the median over the sites: check its units and its data",
            )
        for site, text in unlike_means(moments, self._shown):
            if site not in far:
                self._note(site, text, figures=True)
        return found

    # What is known.

    @property
    def first(self) -> NodeEntry:
        """Any one node's entry: in what matters they are alike, once tables are encoded."""
        entry = next(iter(self.entries.values()))
        if not self.agreement.encoders:
            return entry
        width = self.agreement.encoders[0].width
        form = dataclasses.replace(entry.form, shape=[width], dtype="float32")
        return dataclasses.replace(entry, form=form)

    @property
    def clients(self) -> int:
        """The number of sites of the federation."""
        return len(self.messenger.transport.sites)

    @property
    def sites(self) -> list[str]:
        """The site of every client number; one that never joined takes a free number."""
        placed = {entry.client: site for site, entry in self.entries.items()}
        all_sites = self.messenger.transport.sites
        rest = iter(site for site in all_sites if site not in self.entries)
        return [placed[n] if n in placed else next(rest) for n in range(self.clients)]

    def sizes(self, part: int, seed: int) -> list[int]:
        """Return rows of a part (0 training, 1 validation, 2 test) for every client."""
        return [
            self.entries[site].sizes[seed][part] if site in self.entries else 0
            for site in self.sites
        ]

    @property
    def names(self) -> tuple[str, ...]:
        """The name of every client in results."""
        return tuple(
            self.entries[site].name if site in self.entries else site for site in self.sites
        )


def _least(answer: Answer) -> tuple[int, int]:
    """Read how many sites a node's policy asks for: in the run, and in a round."""
    least = answer.message.head.get("least", [1, 1])
    if not is_list(least, int, 2) or min(least) < 1:
        raise Refused("format", "a node stated in another form how many sites it asks for")
    return least[0], least[1]


def _same_scaling(one: Moments | Scaling, other: Moments | Scaling) -> bool:
    if isinstance(one, Moments) or isinstance(other, Moments):
        return False
    return np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1])


def method_fingerprint(method: Method) -> str:
    """Digest a method: its settings, and the code that its steps and batches are made of.

    Of the code what it does counts, not how it is written: comments, docstrings and the layout of
    lines may differ between two versions.
    """
    modules = {contract, client, losses, optim, tree, block_runner, batch_plan, *_modules(method)}
    # A module without source (frozen into an executable) is known by its name alone.
    sources = [_meaning(_source(module)) for module in sorted(modules, key=lambda m: m.__name__)]
    return digest(_written(method).encode(), *sources)


class _WithoutWords(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        words = node.value
        return None if isinstance(words, ast.Constant) and isinstance(words.value, str) else node


@cache
def _meaning(source: str) -> bytes:
    """Write code as its syntax tree, without docstrings and other bare strings."""
    return ast.dump(_WithoutWords().visit(ast.parse(source))).encode()


def _written(part: Any) -> str:
    """Write out every setting of a method, and of the methods and rules inside it."""
    if not dataclasses.is_dataclass(part):
        return repr(part)
    fields = [
        f"{spec.name}={_written(getattr(part, spec.name))}" for spec in dataclasses.fields(part)
    ]
    return f"{type(part).__qualname__}({', '.join(fields)})"


def features_fingerprint(federations: Sequence[Federation]) -> str:
    """Digest what the numbers of an example mean, under each seed: columns' names, tokens' words.

    It shows whether two nodes mean the same, and nothing of what.
    """
    meant = [[list(held.dataset.features), list(held.dataset.words)] for held in federations]
    return " ".join(digest(json.dumps(one).encode()) for one in meant)


def _modules(part: Any) -> set[ModuleType]:
    """Return the modules of a method's classes, and of the methods and rules inside it."""
    found = {sys.modules[kind.__module__] for kind in type(part).__mro__ if kind is not object}
    for spec in dataclasses.fields(part):
        inner = getattr(part, spec.name)
        if dataclasses.is_dataclass(inner):
            found |= _modules(inner)
    return found


def _source(module: Any) -> str:
    try:
        return inspect.getsource(module)
    except OSError:
        return str(module.__name__)
