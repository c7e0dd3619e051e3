"""What a node records on its disk: personal state, what has left, sums, and who owns a run.

Personal state is written whole or not at all, with its round, the last report and a digest of the
message it answered, so that the same message gets the same answer and nothing is trained twice.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from idiolect.core import checkpoint, tree
from idiolect.core.checkpoint import write_whole
from idiolect.core.tree import Tree
from idiolect.data.dataset import Rows
from idiolect.deploy import protocol
from idiolect.deploy.limits import SitePolicy, refuse_over_budget, refuse_spent
from idiolect.deploy.protocol import Refused
from idiolect.errors import CheckpointError, ConfigError, DeployError, IdiolectError
from idiolect.results.run_files import folder_name


class StateOwner(NamedTuple):
    """Whose state it is."""

    federation: str
    client: int
    run: str
    label: str
    seed: int

    def folder(self, home: Path) -> Path:
        """Say where a run's state of this client stands."""
        return home / "state" / folder_name(self.federation) / f"client-{self.client}" / self.run


class StoredState(NamedTuple):
    """The state after `round` rounds, and the answer that led to it."""

    round: int
    request: str  # digest of the message that was answered last; empty before the first
    personal: Tree
    report: dict[str, Tensor]
    left: dict[str, Tensor]  # what a compressed report left out, for the next one


class PersonalState:
    """Where one method's personal state of one seed is kept."""

    def __init__(self, home: Path, owner: StateOwner, personal: Tree) -> None:
        """Open what is there, or start with the given state."""
        self._owner = owner
        name = f"{folder_name(owner.label)}-seed-{owner.seed}.safetensors"
        self.path = owner.folder(home) / name
        self.kept = StoredState(0, "", personal, {}, {})
        if self.path.exists():
            self.kept = self._read(personal)

    def _read(self, template: Tree) -> StoredState:
        try:
            named, meta = checkpoint.read(self.path)
            parts: dict[str, dict[str, Tensor]] = {"personal": {}, "report": {}, "left": {}}
            for name, leaf in named.items():
                part, _, rest = name.partition(".")
                parts[part][rest] = leaf
            if meta["owner"] != list(self._owner):
                raise CheckpointError(f"{self.path} belongs to {meta['owner']}")
            # A tree that is a single tensor has no name of its own.
            own = {name or "value": leaf for name, leaf in parts["personal"].items()}
            personal = checkpoint.fitted(template, own, self.path)
            kept = int(meta["round"]), str(meta["request"]), personal
            return StoredState(*kept, parts["report"], parts["left"])
        except (CheckpointError, KeyError, ValueError, TypeError) as error:
            raise Refused("state", f"{self.path}: {error}") from error

    def put(
        self,
        round: int,
        request: str,
        personal: Tree,
        report: Tree,
        left: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Replace the state; if the disk is full, the old one stays."""
        kept = StoredState(round, request, personal, tree.named(report), dict(left or {}))
        meta = {"owner": list(self._owner), "round": round, "request": request}
        try:
            parts = {"personal": personal, "report": kept.report, "left": kept.left}
            checkpoint.save(self.path, parts, meta)
        except CheckpointError as error:
            raise Refused("state", str(error)) from error
        except IdiolectError as error:
            raise Refused("disk", str(error)) from error
        self.kept = kept


_RELEASES = "releases.json"  # in a node's home
_DAY = 86400.0  # seconds


@dataclass
class ReleaseLog:
    """How many reports and scores left this site in each run, counted on disk across restarts."""

    home: Path
    policy: SitePolicy
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        path = self.home / _RELEASES
        if not path.exists():
            return
        try:
            self.runs = dict(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise Refused(
                "state", f"{path} cannot be read, so it is not known what has left; mend it"
            ) from error

    def begin(
        self,
        run: str,
        seeds: Sequence[int] = (),
        division: str = "",
        spent: Mapping[str, float] | None = None,
        client: int | None = None,
    ) -> None:
        """Count a run that is new here; all starts of one share its limits and its data.

        So does its number among the clients: as another one it would do the rounds once more.
        """
        self._new(run)
        known = self.runs[run]
        met = sorted({*known.get("seeds", []), *seeds})
        if len(met) > self.policy.max_seeds:
            raise self.policy.refusal("max_seeds", f"{len(met)} seeds in this run")
        if division and known.get("division", division) != division:
            raise Refused("data", "the run divided its data in another way before")
        if client is not None and known.get("client", client) != client:
            raise Refused("data", f"this site was client {known['client']} of the run before")
        spends = {**known.get("epsilon", {}), **(spent or {})}
        if spends:
            refuse_spent(self.policy, spends)
            refuse_over_budget(self.policy, self.spent(run), sum(spends.values()))
        known.update(seeds=met, division=division or known.get("division", ""), epsilon=spends)
        if client is not None:
            known["client"] = client
        self._write()

    def spent(self, but: str = "") -> float:
        """Return the epsilon of all runs but one, and of descriptions: a sum, so a bound."""
        runs = [one for name, one in self.runs.items() if name != but]
        told = (self.home / "descriptions").glob("*.noisy")
        return sum(sum(one.get("epsilon", {}).values()) for one in runs) + sum(
            float(json.loads(path.read_text())["epsilon"]) for path in told
        )

    def divide(self, rows: Sequence[Rows]) -> None:
        """Record the rows of statistics that leave, of each seed; refuse nearly equal sets.

        The difference of two sums over nearly the same rows reveals the rows that differ.
        Pairs are compared, over all runs of the site.
        """
        folder = self.home / "divisions"
        known = {path.name: path.read_bytes() for path in folder.glob("*.bits")}
        new: dict[str, bytes] = {}
        for own in rows:
            held = np.zeros(int(own.max(initial=-1)) + 1, bool)
            held[own] = True
            bits = np.packbits(held).tobytes()
            name = f"{protocol.digest(bits)}.bits"
            for other in () if name in known else (*known.values(), *new.values()):
                gap = _apart(bits, other)
                if 0 < gap < self.policy.min_examples:
                    raise self.policy.refusal(
                        "min_examples",
                        f"statistics of training rows that differ in {gap} from others that were "
                        f"told, or of another seed",
                    )
            new[name] = bits
        for name in new.keys() - known.keys():
            write_whole(folder / name, new[name], private=True)

    def _new(self, run: str) -> None:
        if run in self.runs:
            return
        now = time.time()
        recent = sum(one["began"] > now - _DAY for one in self.runs.values())
        if recent >= self.policy.max_runs:
            raise self.policy.refusal("max_runs", f"{recent} runs in 24 hours")
        self.runs[run] = {"began": now, "reports": 0, "scores": 0}
        self._write()

    def count(self, run: str, what: str) -> None:
        """Count one report, scoring or exchange at the end, before it leaves."""
        so_far = self.runs[run].get(what, 0)
        if so_far >= self.policy.max_reports:
            raise self.policy.refusal("max_reports", f"{so_far} {what} have left in this run")
        self.runs[run][what] = so_far + 1
        self._write()

    def _write(self) -> None:
        write_whole(self.home / _RELEASES, (json.dumps(self.runs, indent=1) + "\n").encode())


def _apart(left: bytes, right: bytes) -> int:
    """Count the bits in which two sets of rows differ."""
    size = max(len(left), len(right))
    numbers = (int.from_bytes(one.ljust(size, b"\0")) for one in (left, right))
    return (next(numbers) ^ next(numbers)).bit_count()


_PENDING = "-"  # masked, and nobody has said yet who survived


class SumLog:
    """One node's record; a line is added before anything leaves the node."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, str] = {}  # digest of a report: digest of the survivors' names
        if path.exists():
            for line in path.read_text(errors="replace").splitlines():
                report, _, survivors = line.partition(" ")
                self._known[report] = survivors or _PENDING  # the end of it may be torn off

    def check(self, report: str, members: Collection[str] | None = None) -> None:
        """Refuse a report that was in another sum; `members` are those of the one at hand."""
        known = self._known.get(report)
        if known is None:
            return
        if known == _PENDING:
            raise Refused("summed", "this report was masked before, for a sum that was not ended")
        if members is not None and known != _names_digest(members):
            raise Refused("summed", "this report was in a sum of other members before")

    def masked(self, report: str) -> None:
        """Note that a masked report is about to leave."""
        if report not in self._known:
            self._add(report, _PENDING)

    def survived(self, report: str, survivors: Collection[str]) -> None:
        """Settle whose sum a report is in; refuse if that was settled otherwise."""
        known = self._known.get(report, _PENDING)
        if known == _PENDING:
            self._add(report, _names_digest(survivors))
        elif known != _names_digest(survivors):
            raise Refused("summed", "this report was in a sum of other members before")

    def _add(self, report: str, survivors: str) -> None:
        try:
            if not self._path.exists():
                write_whole(self._path, b"")  # after this a power cut leaves the name too
                self._path.chmod(0o600)
            with self._path.open("ab") as file:
                file.write(f"\n{report} {survivors}".encode())
                file.flush()
                os.fsync(file.fileno())
        except (OSError, IdiolectError) as error:
            raise Refused("disk", f"{self._path}: {error}") from error
        self._known[report] = survivors


def report_digest(values: np.ndarray) -> str:
    """Name a report by what it holds."""
    return hashlib.sha256(values.tobytes()).hexdigest()


def _names_digest(names: Collection[str]) -> str:
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()


_OWNERS = "owners"  # in a home: a file for each run
NOBODY = ""  # where there are no members: runs in one process, or --on local
_LONGEST_NAME = 64  # characters of a run's name


class NotOwner(ConfigError):
    """A run of someone else."""


def run_name(run: str) -> str:
    """Return a run's name if it can name files and nothing else."""
    if not (run.isascii() and run.isalnum() and len(run) <= _LONGEST_NAME):
        raise ConfigError(f"a run is named by at most {_LONGEST_NAME} letters and digits")
    return run


def claim_run(home: Path, run: str, submitter: str, *traces: Path) -> None:
    """Make a new run the submitter's, or check that it is; otherwise nothing is changed.

    `traces`: what there is of a run only if it began before; then somebody must own it.
    """
    path = _owner_path(home, run)
    if not path.exists():
        if any(trace.exists() for trace in traces):
            raise NotOwner(
                f"nobody is known to own run {run} here (an older version kept no owners); start a "
                f"new run, or let the operator of this machine write {path.name} into {_OWNERS}"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        # Of two at once only one creates the file.
        with contextlib.suppress(FileExistsError), path.open("x") as file:
            json.dump({"run": run, "submitter": submitter}, file)
            file.flush()
            os.fsync(file.fileno())
    check_owner(home, run, submitter)


def owner_of(home: Path, run: str) -> str:
    """Return who submitted a run, as far as that is known here."""
    try:
        return str(json.loads(_owner_path(home, run).read_text())["submitter"])
    except (OSError, ValueError, TypeError, KeyError):
        return ""


def check_owner(home: Path, run: str, submitter: str) -> None:
    """Refuse a run that is not the submitter's, or that is not known here."""
    path = _owner_path(home, run)
    try:
        known = json.loads(path.read_text())["submitter"]
    except FileNotFoundError:
        raise NotOwner(f"this server holds no run {run} of {submitter}") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DeployError(f"{path} is damaged; the operator must mend it") from error
    if known != submitter:
        raise NotOwner(
            f"run {run} was not started by {submitter}: only whoever started a run goes on with "
            "it, adds to it or uses its models; start a run of your own in another --out folder"
        )


def _owner_path(home: Path, run: str) -> Path:
    return home / _OWNERS / f"{run_name(run)}.json"
