"""Who takes part: nodes are told the experiment, tell their data's size and form, and agree."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from idiolect.core.checkpoint import write_whole
from idiolect.data.dataset import Moments, decoding
from idiolect.deploy import joint_statistics, wire
from idiolect.deploy.example_form import Form, listed, word
from idiolect.deploy.messenger import SILENT, Answer, Post
from idiolect.deploy.ownership import NOBODY
from idiolect.deploy.refusals import CODES, LIMITS, Refused
from idiolect.errors import ConfigError, DeployError
from idiolect.version import VERSION

log = logging.getLogger("idiolect.hub")


@dataclass(frozen=True)
class Entry:
    """What one node told when it joined."""

    site: str
    client: int
    name: str
    sizes: list[list[int]]  # for each seed: training, validation and test rows
    form: Form
    features: str
    source: str
    clients: int
    descriptions: list[str]


_SAME = {
    "form.shape": "the shape of an example",
    "form.dtype": "the type of its numbers",
    "form.classes": "the classes",
    "form.sequential": "whether every place of a sequence has a label",
    "form.words": "the words that its tokens stand for",
    "form.public": "the number of public examples",
    "form.public_labels": "whether public examples are of the same classes",
    "features": "the names or the order of a table's columns, or the vocabulary of text",
    "source": "the source of the data",
    "clients": "the number of clients of the partition",
}


_NEWCOMERS = (
    "form.shape",
    "form.dtype",
    "form.classes",
    "form.sequential",
    "form.words",
    "features",
)


@dataclass(frozen=True)
class Model:
    """What a run was like that is over: how many took part, and any one of them."""

    clients: int
    entry: Entry


class Roster:
    """The nodes of a run, in the order of their numbers; kept on disk between starts."""

    def __init__(
        self,
        post: Post,
        run: str,
        text: str,
        methods: Mapping[str, str],
        seeds: int,
        path: Path,
        model: Model | None = None,
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
        self.entries: dict[str, Entry] = self._read()
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
            entry = _entry(site, answer, self._seeds)
            known = self.entries.get(site)
            if known is not None and known != entry:
                raise Refused("data", f"{site} brings other data than when the run began")
            _refuse_false_scale(site, answer, entry, self._seeds)
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
        agreed = wire.pack("agree", {**self._head}, self._scaling(answers, normalise, robust))
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
            limited = any(why.reason in LIMITS for why in refused.values())
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
        return wire.pack(
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
        _refuse_unlike(entries[0].site, entries[0], entries[1:], tuple(_SAME))
        if self.model is not None:
            _refuse_unlike("the run", self.model.entry, entries, _NEWCOMERS)
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
            return _tensors(scalings(kept, self._seeds))
        told = {site: _scale(answer, self._seeds) for site, answer in sorted(answers.items())}
        first = next(iter(told.values()))
        if isinstance(first[0], Moments):
            found = [self._joined(told, seed, robust) for seed in range(self._seeds)]
            as_bytes = self.first.form.dtype == "uint8"
            each = [decoding(one, str(normalise), as_bytes) for one in found]
        else:
            for site, own in told.items():
                if not all(_equal(one, other) for one, other in zip(own, first, strict=True)):
                    raise DeployError(f"{site} scales its examples otherwise than the first node")
            each = [(np.asarray(own[0]), np.asarray(own[1])) for own in first]
        plain = [{"shift": shift.tolist(), "scale": scale.tolist()} for shift, scale in each]
        write_whole(kept, json.dumps({"seeds": plain}).encode())
        return _tensors(scalings(kept, self._seeds))

    def _joined(
        self, told: Mapping[str, list["Moments | Scaling"]], seed: int, robust: bool
    ) -> Moments:
        """Join the nodes' moments under one seed, naming who is far from the others."""
        own = {site: each[seed] for site, each in told.items()}
        moments = {site: one for site, one in own.items() if isinstance(one, Moments)}
        if len(moments) != len(own) or len({one.mean.shape for one in moments.values()}) > 1:
            raise DeployError("the nodes' statistics do not fit each other")
        found, far = joint_statistics.joined(moments, robust)
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
    def first(self) -> Entry:
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

    def _read(self) -> dict[str, Entry]:
        return entries_of(self._path) if self._path.exists() else {}

    def _write(self) -> None:
        plain = {site: asdict(entry) for site, entry in self.entries.items()}
        write_whole(self._path, (json.dumps(plain, indent=1) + "\n").encode())


def entries_of(path: Path) -> dict[str, Entry]:
    """Read what a roster wrote: each site's entry."""
    known = json.loads(path.read_text())
    return {
        site: Entry(**{**entry, "form": Form(**entry["form"])}) for site, entry in known.items()
    }


def _refuse_unlike(name: str, one: Entry, others: Sequence[Entry], keys: Sequence[str]) -> None:
    for other in others:
        for key in keys:
            if attrgetter(key)(other) != attrgetter(key)(one):
                raise DeployError(
                    f"{name} and {other.site} differ in {_SAME[key]}; bring their data to one form "
                    "before they learn together"
                )


def _entry(site: str, answer: Answer, seeds: int) -> Entry:
    """Read what a node told, trusting nothing in it."""
    head: dict[str, Any] = {key: answer.message.head.get(key) for key in Entry.__dataclass_fields__}
    good = (
        all(type(head[key]) is int and head[key] >= 0 for key in ("client", "clients"))
        and all(word(head[key]) for key in ("name", "features", "source"))
        and listed(head["descriptions"], str, seeds)
        and all(word(one) for one in head["descriptions"])
        and listed(head["sizes"], list, seeds)
        and all(listed(one, int, 3) and min(one) >= 0 for one in head["sizes"])
    )
    if not good:
        raise Refused("format", f"{site} joined with an answer of another form")
    return Entry(**{**head, "site": site, "form": Form.read(head["form"])})


def _least(answer: Answer) -> tuple[int, int]:
    """Read how many sites a node asks for: in the run, and in a round."""
    least = answer.message.head.get("least", [1, 1])
    if not listed(least, int, 2) or min(least) < 1:
        raise Refused("format", "a node told in another form how many sites it asks for")
    return least[0], least[1]


Scaling = tuple[np.ndarray, np.ndarray]  # shift and scale


def scalings(path: Path, seeds: int) -> list[Scaling]:
    """Read what a roster decided: shift and scale under each seed, in the experiment's order."""
    known = json.loads(path.read_text())
    # Earlier runs had one scaling for all seeds.
    each = known["seeds"] if "seeds" in known else [known] * seeds
    return [
        (np.array(one["shift"], np.float32), np.array(one["scale"], np.float32)) for one in each
    ]


def _tensors(each: Sequence[Scaling]) -> dict[str, torch.Tensor]:
    shift, scale = (np.stack([one[part] for one in each]) for part in range(2))
    return {"shift": torch.from_numpy(shift), "scale": torch.from_numpy(scale)}


def _equal(one: Moments | Scaling, other: Moments | Scaling) -> bool:
    if isinstance(one, Moments) or isinstance(other, Moments):
        return False
    return np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1])


def _refuse_false_scale(site: str, answer: Answer, entry: Entry, seeds: int) -> None:
    """Refuse a node's statistics where they are impossible for what it told of its data."""
    try:
        told = _scale(answer, seeds)
    except DeployError as error:
        raise Refused("statistics", f"{site}: {error}") from error
    for one, sizes in zip(told, entry.sizes, strict=True):
        if isinstance(one, Moments):
            joint_statistics.refuse_impossible(site, one, sizes[0], entry.form)


def _scale(answer: Answer, seeds: int) -> list[Moments | Scaling]:
    """Read what a node told of its scaling under each seed: statistics, or what it uses."""
    leaves = {name: leaf.numpy() for name, leaf in answer.message.leaves.items()}
    wire.refuse_nonfinite(answer.message.leaves)
    if any(leaf.ndim == 0 or len(leaf) != seeds for leaf in leaves.values()):
        raise DeployError(f"a node told the scaling of its data for other than {seeds} seeds")
    if set(leaves) == {"shift", "scale"}:
        return list(zip(leaves["shift"], leaves["scale"], strict=True))
    counts: Any = answer.message.head.get("count")
    if set(leaves) != {"mean", "squares"} or not (
        listed(counts, float, seeds) and all(0 < count < math.inf for count in counts)
    ):
        raise DeployError("a node told its data's statistics in another form")
    return [
        Moments(count, mean, squares)
        for count, mean, squares in zip(counts, leaves["mean"], leaves["squares"], strict=True)
    ]
