"""A node's own checks of a run against its site's policy, and its count of what has left."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from idiolect.core.batches import Request
from idiolect.core.checkpoint import write_whole
from idiolect.core.method import Method, Plan
from idiolect.core.wrap import Wrapper
from idiolect.data.arrays import Rows
from idiolect.deploy import fingerprints
from idiolect.deploy.refusals import Refused
from idiolect.deploy.site_policy import SitePolicy
from idiolect.errors import IdiolectError
from idiolect.experiment.build import cohort_size
from idiolect.experiment.components import build_method as made_method
from idiolect.experiment.schema import Experiment

_FILE = "releases.json"  # in a node's home
_DAY = 86400.0  # seconds
_ALONE = 1e-6  # the chance that a round by coins has too few sites


class Behind(NamedTuple):
    """What is behind one training: gradient steps, and rows by their weight in it."""

    steps: int
    rows: float


def behind(request: Request, held: int) -> Behind:
    """Compute what is behind a training on `held` rows, without last batches of under a half.

    A row's weight is the sum of 1 / rows over the batches it is in, divided by the steps; the rows
    behind are 1 / the largest weight that a row can have. So a small batch counts as what it is,
    however many larger ones there are beside it.
    """
    if not held:
        return Behind(0, 0.0)
    full, rest = divmod(held, request.batch)
    epoch = [request.batch] * full + ([rest] if rest else [])
    steps = request.steps or request.epochs * len(epoch)
    whole, more = divmod(steps, len(epoch))
    done, weight = 0, 0.0
    for sizes, times in ((epoch, whole), (epoch[:more], 1 if more else 0)):
        kept = [size for size in sizes if not short(size, request.batch, held)]
        done += times * len(kept)
        weight += times / min(kept) if kept else 0.0
    return Behind(done, done / weight if weight else 0.0)


def short(size: int, batch: int, held: int) -> bool:
    """Say whether a batch is left out: it has less than half the rows of the others."""
    return size < min(batch, held) and 2 * size < batch


def refuse_training(policy: SitePolicy, request: Request, held: int) -> None:
    """Refuse a request for private rows by which a report would show too few of them."""
    if request.stream not in ("train", "val") or not held:
        return
    held = request.subset(held)
    if not request.shuffled:
        least = policy.min_scored if request.stream == "val" else policy.min_examples
        if held < least:
            limit = "min_scored" if request.stream == "val" else "min_examples"
            raise Refused(limit, f"a figure of {held} {request.stream} rows; {limit} is {least}")
        return
    if min(request.batch, held) < policy.min_batch:
        raise Refused(
            "min_batch",
            f"a gradient step of {min(request.batch, held)} rows; min_batch is {policy.min_batch}",
        )
    found = behind(request, held)
    if found.steps < policy.min_steps:
        raise Refused(
            "min_steps", f"{found.steps} gradient steps a report; min_steps is {policy.min_steps}"
        )
    if found.rows < policy.min_examples - 1e-6:
        raise Refused(
            "min_examples",
            f"{found.rows:.1f} rows behind a report (batches of {request.batch} from {held} rows, "
            f"{found.steps} steps); min_examples is {policy.min_examples}",
        )


def refuse_seeds(policy: SitePolicy, experiment: Experiment) -> None:
    """Refuse more seeds than are allowed; each is a release of its own."""
    if len(experiment.seeds) > policy.max_seeds:
        raise Refused(
            "max_seeds",
            f"{len(experiment.seeds)} seeds; max_seeds is {policy.max_seeds}",
        )


def refuse_run(
    policy: SitePolicy, experiment: Experiment, clients: int, sizes: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Refuse a run whose settings go beyond a limit; `sizes` are this site's rows by seed.

    Returns what the run spends of epsilon by method, where the site counts it.
    """
    if clients < policy.min_sites:
        raise Refused("min_sites", f"a run of {clients} sites; min_sites is {policy.min_sites}")
    _refuse_lonely(policy, experiment, clients)
    refuse_seeds(policy, experiment)
    rounds = [table.rounds or experiment.rounds for table in experiment.methods]
    if max(rounds) > policy.max_rounds:
        raise Refused("max_rounds", f"{max(rounds)} rounds; max_rounds is {policy.max_rounds}")
    reports = sum(rounds) * len(experiment.seeds)
    if reports > policy.max_reports:
        raise Refused("max_reports", f"{reports} reports; max_reports is {policy.max_reports}")
    for train, _, _ in sizes:
        if 0 < train < policy.min_examples:
            raise Refused(
                "min_examples", f"{train} training rows; min_examples is {policy.min_examples}"
            )
    refuse_scores(policy, sizes)
    for table in experiment.methods:
        if policy.methods and table.name not in policy.methods:
            raise Refused("methods", f"{table.name} is none of {', '.join(policy.methods)}")
        method = _inmost(made_method(table))
        if method.aggregates == "nothing":
            continue
        for train, _, _ in sizes:
            wanted = Request("train", method.batch, method.epochs, method.steps, True, 0)
            refuse_training(policy, wanted, train)
    return _refuse_open(policy, experiment, clients) if policy.require_privacy else {}


def refuse_scores(policy: SitePolicy, sizes: Sequence[Sequence[int]]) -> None:
    """Refuse a run in which scores of too few rows would leave."""
    for _, *scored in sizes:
        few = [rows for rows in scored if 0 < rows < policy.min_scored]
        if few:
            raise Refused(
                "min_scored",
                f"{few[0]} rows of validation or test data; min_scored is {policy.min_scored}",
            )


def _inmost(method: Method) -> Method:
    while isinstance(method, Wrapper):
        method = method.base
    return method


def _refuse_lonely(policy: SitePolicy, experiment: Experiment, clients: int) -> None:
    """Refuse rounds of too few sites; where coins decide, rounds in which it is not unlikely."""
    cohort = cohort_size(experiment.cohort, clients) or clients
    if cohort < policy.min_cohort:
        raise Refused("min_cohort", f"rounds of {cohort} sites; min_cohort is {policy.min_cohort}")
    if experiment.draw != "poisson" or policy.min_cohort == 1:
        return
    share, others = cohort / clients, clients - 1
    alone = sum(
        math.comb(others, n) * share**n * (1 - share) ** (others - n)
        for n in range(policy.min_cohort - 1)
    )
    if alone > _ALONE and not all(made_method(t).hides for t in experiment.methods):
        raise Refused(
            "min_cohort",
            f"with draw = 'poisson' this site's round has fewer than {policy.min_cohort} sites "
            f"with probability {alone:.2g}; min_cohort is {policy.min_cohort}",
        )


def _refuse_open(policy: SitePolicy, experiment: Experiment, clients: int) -> dict[str, float]:
    """Refuse methods without differential privacy, and more epsilon than is allowed."""
    spent: dict[str, float] = {}
    cohort = cohort_size(experiment.cohort, clients)
    for table in experiment.methods:
        method = made_method(table)
        if method.aggregates == "nothing":
            continue
        if not method.hides:
            raise Refused("require_privacy", f"{table.name} has no aggregate = 'dp'")
        if table.aggregate is not None and table.aggregate.options.get("force"):
            # Without it the server itself refuses few clients, and a large epsilon.
            raise Refused("require_privacy", f"{table.name} has force = true")
        rounds, seeds = table.rounds or experiment.rounds, len(experiment.seeds)
        plan = Plan(rounds, clients, cohort, experiment.draw, seeds, federated=True)
        try:
            settled, rounds = method.settled(plan)
            promised = settled.promise(plan._replace(rounds=rounds)).get("privacy", {})
        except IdiolectError as error:
            raise Refused("require_privacy", f"{table.name}: {error}") from error
        if not promised.get("meaningful"):
            raise Refused("require_privacy", f"{table.name} promises nothing worth the name")
        release = repr((table, rounds, experiment.seeds))  # the same again spends nothing more
        spent[fingerprints.of_bytes(release.encode())] = promised.get("epsilon") or math.inf
    _refuse_spent(policy, spent)
    return spent


def _refuse_spent(policy: SitePolicy, spent: Mapping[str, float]) -> None:
    total = sum(spent.values())
    if not total <= policy.max_epsilon:
        raise Refused(
            "max_epsilon",
            f"epsilon = {total:.4g} over all methods and seeds; max_epsilon is "
            f"{policy.max_epsilon:g}",
        )


@dataclass
class Releases:
    """How much left this site in which run, over all starts of its node; kept on disk."""

    home: Path
    policy: SitePolicy
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        path = self.home / _FILE
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
    ) -> None:
        """Count a run that is new here; all starts of one share its limits and its data."""
        self._new(run)
        known = self.runs[run]
        met = sorted({*known.get("seeds", []), *seeds})
        if len(met) > self.policy.max_seeds:
            raise Refused(
                "max_seeds", f"{len(met)} seeds in this run; max_seeds is {self.policy.max_seeds}"
            )
        if division and known.get("division", division) != division:
            raise Refused("data", "the run divided its data in another way before")
        spends = {**known.get("epsilon", {}), **(spent or {})}
        if spends:
            _refuse_spent(self.policy, spends)
        known.update(seeds=met, division=division or known.get("division", ""), epsilon=spends)
        self._write()

    def divide(self, rows: Sequence[Rows]) -> None:
        """Record of which rows statistics are told, those of each seed; refuse near-equal ones.

        The difference of two sums over nearly the same rows tells the rows in which they differ.
        Pairs are compared, over all runs of the site.
        """
        folder = self.home / "divisions"
        known = {path.name: path.read_bytes() for path in folder.glob("*.bits")}
        new: dict[str, bytes] = {}
        for own in rows:
            held = np.zeros(int(own.max(initial=-1)) + 1, bool)
            held[own] = True
            bits = np.packbits(held).tobytes()
            name = f"{fingerprints.of_bytes(bits)}.bits"
            for other in () if name in known else (*known.values(), *new.values()):
                gap = _apart(bits, other)
                if 0 < gap < self.policy.min_examples:
                    raise Refused(
                        "min_examples",
                        f"statistics of training rows that differ in {gap} from others that were "
                        f"told, or of another seed; min_examples is {self.policy.min_examples}",
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
            raise Refused(
                "max_runs", f"{recent} runs in 24 hours; max_runs is {self.policy.max_runs}"
            )
        self.runs[run] = {"began": now, "reports": 0, "scores": 0}
        self._write()

    def count(self, run: str, what: str) -> None:
        """Count one report, scoring or exchange at the end, before it leaves."""
        so_far = self.runs[run].get(what, 0)
        if so_far >= self.policy.max_reports:
            raise Refused(
                "max_reports",
                f"{so_far} {what} have left in this run; max_reports is {self.policy.max_reports}",
            )
        self.runs[run][what] = so_far + 1
        self._write()

    def _write(self) -> None:
        write_whole(self.home / _FILE, (json.dumps(self.runs, indent=1) + "\n").encode())


def _apart(left: bytes, right: bytes) -> int:
    """Count the bits in which two sets of rows differ."""
    size = max(len(left), len(right))
    numbers = (int.from_bytes(one.ljust(size, b"\0")) for one in (left, right))
    return (next(numbers) ^ next(numbers)).bit_count()
