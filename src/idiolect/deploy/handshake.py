"""Who takes part: nodes are told the experiment, tell their data's size and form, and agree."""

import dataclasses
import inspect
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from idiolect.core import client, losses, optim, tree
from idiolect.core import method as contract
from idiolect.core.checkpoint import write_whole
from idiolect.core.method import Method
from idiolect.data import Federation
from idiolect.data.dataset import Moments, decoding
from idiolect.deploy import data_summary, protocol
from idiolect.deploy.data_summary import (
    SAME,
    SAME_FOR_NEWCOMERS,
    NodeEntry,
    Scaling,
    is_list,
    read_entries,
    read_entry,
    read_scalings,
    read_statistics,
    refuse_impossible,
    refuse_unlike,
    same_scaling,
    scaling_tensors,
)
from idiolect.deploy.messenger import SILENT, Answer, Messenger
from idiolect.deploy.node_records import NOBODY
from idiolect.deploy.protocol import CODES, POLICY_LIMITS, Refused, digest
from idiolect.engine import batch_plan, block_runner
from idiolect.errors import ConfigError, DeployError
from idiolect.version import VERSION

log = logging.getLogger("idiolect.hub")


@dataclass(frozen=True)
class RunSummary:
    """What a run was like that is over: how many took part, and any one of them."""

    clients: int
    entry: NodeEntry


class NodeRegistry:
    """The nodes of a run, in the order of their numbers; kept on disk between starts."""

    def __init__(
        self,
        post: Messenger,
        run: str,
        text: str,
        methods: Mapping[str, str],
        seeds: int,
        path: Path,
        model: RunSummary | None = None,
        submitter: str = NOBODY,
    ) -> None:
        """`model`: what the nodes must be like who come when a run is over."""
        self._post = post
        self.model = model
        self._seeds = seeds
        self._run = run
        self._open = {
            "run": run,
            "submitter": submitter,
            "version": VERSION,
            "experiment": text,
            "methods": dict(methods),
            "clients": model.clients if model else len(post.transport.sites),
            "newcomer": model is not None,
        }
        self._path = path
        self.entries: dict[str, NodeEntry] = self._read()
        self._agreed = b""
        self._least: dict[str, tuple[int, int]] = {}  # what each site's policy asks for
        self.remarks: list[str] = []  # what whoever reads the result should know of the sites
        self.how: str | None = None
        post.reopen = self._reopen

    # Joining.

    def gather(self, normalise: str | None, robust: bool = False) -> None:
        """Let every node join; whoever refuses is named, whoever is not there is passed over.

        `robust`: statistics are joined so that a site that lies moves them within bounds only.
        """
        post, sites = self._post, list(self._post.transport.sites)
        first_time = not self.entries
        answers: dict[str, Answer] = {}

        def read(site: str, answer: Answer) -> None:
            entry = read_entry(site, answer, self._seeds)
            known = self.entries.get(site)
            if known is not None and known != entry:
                raise Refused("data", f"{site} brings other data than when the run began")
            refuse_impossible(site, answer, entry, self._seeds)
            self._least[site] = _least(answer)
            answers[site] = answer
            self.entries[site] = entry

        letters = {site: self._letter(site) for site in sites}
        refused = post.ask(letters, post.policy.join, read)
        for site, why in refused.items():
            if why.reason not in SILENT:
                post.lose(site)
        self._refuse(refused, first_time)
        self._refuse_few()
        self._compare(answers)
        agreed = protocol.pack("agree", {**self._head}, self._scaling(answers, normalise, robust))
        self._agreed = agreed
        post.ask(dict.fromkeys(answers, agreed), post.policy.join, lambda site, answer: None)
        self._write()

    def _refuse(self, refused: Mapping[str, Refused], first_time: bool) -> None:
        """Say who cannot join; on the first start nobody who is there is left behind silently."""
        told = [f"{site}: {CODES[why.reason]}" for site, why in refused.items()]
        # Who tells what cannot be is left out; who could take part if something were mended is not.
        passed = (*SILENT, "statistics")
        wrong = [site for site, why in refused.items() if why.reason not in passed]
        there = len(self._post.transport.sites) - len(refused)
        needed = self._post.policy.needed(len(self._post.transport.sites))
        if (wrong and first_time) or there < needed:
            # What a site does not allow is not mended by another start.
            limited = any(why.reason in POLICY_LIMITS for why in refused.values())
            raise (ConfigError if limited else DeployError)(
                f"{there} of {len(self._post.transport.sites)} nodes can take part, "
                f"{needed if not wrong else 'all that are there'} needed; {'; '.join(told)}"
            )
        for text in told:
            log.warning("goes on without %s", text)

    def _refuse_few(self) -> None:
        """Refuse a run of fewer sites with training rows than one of them allows."""
        if self.model is not None:
            return
        site, least = self._strictest(0)
        for seed in range(self._seeds):
            training = sum(self.entries[name].sizes[seed][0] > 0 for name in self._least)
            if training < least:
                raise ConfigError(
                    f"{training} sites joined that have training rows; {site}: {CODES['min_sites']}"
                )

    def _strictest(self, place: int) -> tuple[str, int]:
        """Name the site of those that joined which asks for most, and what it asks for."""
        asked = [(least[place], site) for site, least in self._least.items()]
        most, site = max(asked, default=(1, ""))
        return site, most

    @property
    def least_cohort(self) -> tuple[str, int]:
        """The least number of sites in a round, and which site asks for it."""
        return self._strictest(1)

    def _letter(self, site: str) -> bytes:
        return protocol.pack(
            "open", {**self._open, "place": list(self._post.transport.sites).index(site)}
        )

    @property
    def _head(self) -> dict[str, Any]:
        return {"run": self._run, "classes": self.first.form.classes}

    def _reopen(self, site: str) -> None:
        """Tell a node that was started anew all it was told before."""
        for blob in (self._letter(site), self._agreed):
            if blob:
                answer = self._post.once(site, blob, self._post.policy.join)
                if "least" in answer.message.head:
                    self._least[site] = _least(answer)

    # Agreement.

    def _compare(self, answers: Mapping[str, Answer]) -> None:
        """Refuse nodes whose data cannot be learnt from together, naming who differs in what."""
        entries = list(self.entries.values())
        refuse_unlike(entries[0].site, entries[0], entries[1:], tuple(SAME))
        if self.model is not None:
            refuse_unlike("the run", self.model.entry, entries, SAME_FOR_NEWCOMERS)
        numbers = [entry.client for entry in entries]
        total = len(self._post.transport.sites)
        if len(set(numbers)) != len(numbers) or max(numbers) >= total:
            raise DeployError(
                f"the nodes are clients {sorted(numbers)}, expected different ones of "
                f"0..{total - 1}; start each node with a --client of its own"
            )
        if self.first.clients not in (0, total):
            raise DeployError(
                f"the experiment's partition has {self.first.clients} clients and the federation "
                f"{total} sites; divide the data among as many clients"
            )

    def _scaling(
        self, answers: Mapping[str, Answer], normalise: str | None, robust: bool
    ) -> dict[str, torch.Tensor]:
        """Find how examples are scaled under each seed: as everyone has it, or from statistics."""
        kept = self._path.with_name("scaling.json")
        if kept.exists():  # decided when the run began
            return scaling_tensors(read_scalings(kept, self._seeds))
        told = {
            site: read_statistics(answer, self._seeds) for site, answer in sorted(answers.items())
        }
        first = next(iter(told.values()))
        if isinstance(first[0], Moments):
            found = [self._joined(told, seed, robust) for seed in range(self._seeds)]
            as_bytes = self.first.form.dtype == "uint8"
            each = [decoding(one, str(normalise), as_bytes) for one in found]
        else:
            for site, own in told.items():
                if not all(same_scaling(one, other) for one, other in zip(own, first, strict=True)):
                    raise DeployError(f"{site} scales its examples otherwise than the first node")
            each = [(np.asarray(own[0]), np.asarray(own[1])) for own in first]
        plain = [{"shift": shift.tolist(), "scale": scale.tolist()} for shift, scale in each]
        write_whole(kept, json.dumps({"seeds": plain}).encode())
        return scaling_tensors(read_scalings(kept, self._seeds))

    def _joined(
        self, told: Mapping[str, list["Moments | Scaling"]], seed: int, robust: bool
    ) -> Moments:
        """Join the nodes' moments under one seed, naming who is far from the others."""
        own = {site: each[seed] for site, each in told.items()}
        moments = {site: one for site, one in own.items() if isinstance(one, Moments)}
        if len(moments) != len(own) or len({one.mean.shape for one in moments.values()}) > 1:
            raise DeployError("the nodes' statistics do not fit each other")
        found, far = data_summary.joined(moments, robust)
        for site in far:
            words = (
                f"{site} told means or deviations far from the other sites'; the columns in which "
                "it did are scaled by the median over the sites: check its units and its data"
            )
            if words not in self.remarks:
                log.warning(words)
                self.remarks.append(words)
        return found

    # What is known.

    @property
    def first(self) -> NodeEntry:
        """Any one node's entry: in what matters they are alike."""
        return next(iter(self.entries.values()))

    @property
    def clients(self) -> int:
        """How many sites the federation has."""
        return len(self._post.transport.sites)

    @property
    def sites(self) -> list[str]:
        """The site of every client number; one that never joined takes a free number."""
        placed = {entry.client: site for site, entry in self.entries.items()}
        rest = iter(site for site in self._post.transport.sites if site not in self.entries)
        return [placed[n] if n in placed else next(rest) for n in range(self.clients)]

    def sizes(self, part: int, seed: int) -> list[int]:
        """Return rows of a part (0 training, 1 validation, 2 test) for every client."""
        return [
            self.entries[site].sizes[seed][part] if site in self.entries else 0
            for site in self.sites
        ]

    @property
    def names(self) -> tuple[str, ...]:
        """What every client is called in results."""
        return tuple(
            self.entries[site].name if site in self.entries else site for site in self.sites
        )

    def _read(self) -> dict[str, NodeEntry]:
        return read_entries(self._path) if self._path.exists() else {}

    def _write(self) -> None:
        plain = {site: asdict(entry) for site, entry in self.entries.items()}
        write_whole(self._path, (json.dumps(plain, indent=1) + "\n").encode())


def _least(answer: Answer) -> tuple[int, int]:
    """Read how many sites a node asks for: in the run, and in a round."""
    least = answer.message.head.get("least", [1, 1])
    if not is_list(least, int, 2) or min(least) < 1:
        raise Refused("format", "a node told in another form how many sites it asks for")
    return least[0], least[1]


def method_fingerprint(method: Method) -> str:
    """Digest a method: its settings, and the source that its steps and batches are made of."""
    modules = {contract, client, losses, optim, tree, block_runner, batch_plan, *_modules(method)}
    # A module without source (frozen into an executable) is told apart by its name alone.
    sources = [_source(module).encode() for module in sorted(modules, key=lambda m: m.__name__)]
    return digest(repr(method).encode(), *sources)


def features_fingerprint(federations: Sequence[Federation]) -> str:
    """Digest what the numbers of an example mean, under each seed: columns' names, tokens' words.

    It tells whether two nodes mean the same, and nothing of what.
    """
    meant = [[list(held.dataset.features), list(held.dataset.words)] for held in federations]
    return " ".join(digest(json.dumps(one).encode()) for one in meant)


def _modules(part: Any) -> set[ModuleType]:
    """List where a method's classes are written, and those of the methods and rules inside it."""
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
