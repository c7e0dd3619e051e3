"""Limits that a site sets for itself, and that its own node enforces whatever a run asks for.

Neither an experiment's author nor the server can change them: they are read from a file of the
site (`policy.toml` in its kit, or `idiolect node --policy FILE`).
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

from idiolect.core import capabilities
from idiolect.core.batches import Request
from idiolect.core.capabilities import Privacy, has
from idiolect.core.method import Method, RunPlan
from idiolect.core.wrap import Wrapper
from idiolect.deploy import buffered, protocol
from idiolect.deploy.protocol import Refused
from idiolect.errors import ConfigError, IdiolectError, suggest
from idiolect.experiment.build import cohort_size
from idiolect.experiment.components import build_method as made_method
from idiolect.experiment.load import read_toml
from idiolect.experiment.schema import Experiment, signature_model, validate
from idiolect.methods import METHODS

POLICY_FILE = "policy.toml"  # in a kit
_ALONE = 1e-6  # the chance that a Poisson round has too few sites


@dataclass(frozen=True, kw_only=True)
class SitePolicy:
    """What a site allows; `site_policy.toml`, which a kit starts with, explains each field."""

    min_sites: int = 2
    min_cohort: int = 2
    min_batch: int = 8
    min_steps: int = 1
    min_examples: int = 32
    min_scored: int = 5
    require_secure: bool = False
    require_privacy: bool = False
    max_epsilon: float = 8.0
    budget_epsilon: float = 0.0
    submitters: tuple[str, ...] = ()
    require_approval: bool = False
    hours: str = ""
    methods: tuple[str, ...] = ()
    max_rounds: int = 500
    max_seeds: int = 3
    max_reports: int = 2000
    max_runs: int = 20
    describe: Literal["all", "pooled", "none"] = "all"
    min_cell: int = 5
    describe_epsilon: float = 0.0
    short_batches: bool = False
    packages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name.startswith(("min_", "max_")) and not (
                value >= (0 if spec.name == "min_scored" else 1)
                if isinstance(value, int)
                else value > 0 and not math.isnan(value)
            ):
                raise ConfigError(f"{spec.name} is {value!r}, expected a number of 1 or more")
        for name in ("describe_epsilon", "budget_epsilon"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected 0 or more")
        read_hours(self.hours)
        for name in self.methods:
            if name not in METHODS and ":" not in name:  # of a package: `module:Class`
                raise ConfigError(f"methods: unknown method {suggest(name, METHODS)}")
        for name in self.packages:
            if not all(part.isidentifier() for part in name.split(".")):
                raise ConfigError(f"packages: {name!r} is no name of a Python package")

    @property
    def private(self) -> bool:
        """Whether only runs with differential privacy are joined: a budget can count no others."""
        return self.require_privacy or self.budget_epsilon > 0

    def refusal(self, limit: str, words: str) -> Refused:
        """Return the refusal of what goes beyond a limit, with its value for the node's log."""
        value = getattr(self, limit)
        return Refused(limit, f"{words}; {limit} is {value:{'g' if 'epsilon' in limit else ''}}")

    def refuse_submitter(self, submitter: str) -> None:
        """Refuse a run of someone who is not on the site's list."""
        if self.submitters and submitter not in self.submitters:
            allowed = ", ".join(self.submitters)
            raise Refused("submitters", f"submitted by {submitter!r}; submitters are {allowed}")

    def refuse_hours(self, now: datetime | None = None) -> None:
        """Refuse to work outside of the site's hours, by the clock of its machine."""
        if not within(self.hours, now or datetime.now().astimezone()):
            raise Refused("hours", f"hours is {self.hours!r}")

    def plain(self) -> dict[str, Any]:
        """Return the limits as JSON has them."""
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> "SitePolicy":
        """Read what `plain` wrote."""
        values: dict[str, Any] = {
            key: tuple(v) if isinstance(v, list) else v for key, v in plain.items()
        }
        return cls(**values)


_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_SPAN = re.compile(r"([A-Z][a-z]{2})(?:-([A-Z][a-z]{2}))? (\d\d):(\d\d)-(\d\d):(\d\d)")


class _Span(NamedTuple):
    """Days of the week, and minutes of the day from which and until which."""

    days: frozenset[int]
    first: int
    last: int


def read_hours(text: str) -> list[_Span]:
    """Read hours such as "Mon-Fri 18:00-06:00, Sat-Sun 00:00-24:00"."""
    found = []
    for part in text.split(",") if text.strip() else ():
        match = _SPAN.fullmatch(part.strip())
        names = [name for name in match.groups()[:2] if name] if match else ["?"]
        if match is None or not set(names) <= set(_DAYS):
            raise ConfigError(
                f"hours: {part.strip()!r} is no span such as 'Mon-Fri 18:00-06:00' (several with "
                "commas between them)"
            )
        first, last = _DAYS.index(names[0]), _DAYS.index(names[-1])
        days = frozenset((first + n) % 7 for n in range((last - first) % 7 + 1))
        numbers = [int(one) for one in match.groups()[2:]]
        begin, end = (60 * numbers[n] + numbers[n + 1] for n in (0, 2))
        if max(begin, end) > 24 * 60 or numbers[1] > 59 or numbers[3] > 59 or begin == end:
            raise ConfigError(f"hours: {part.strip()!r} has no such times; 00:00 to 24:00")
        found.append(_Span(days, begin, end))
    return found


def within(hours: str, now: datetime) -> bool:
    """Return whether a moment is in a site's hours; a span past midnight is of the day before."""
    minute, today = 60 * now.hour + now.minute, now.weekday()
    for span in read_hours(hours):
        late = span.last < span.first
        if today in span.days and span.first <= minute < (24 * 60 if late else span.last):
            return True
        if late and (today - 1) % 7 in span.days and minute < span.last:
            return True
    return not hours.strip()


UNLIMITED = SitePolicy(
    min_sites=1,
    min_cohort=1,
    min_batch=1,
    min_examples=1,
    min_scored=0,
    max_rounds=10**9,
    max_seeds=10**9,
    max_reports=10**9,
    max_runs=10**9,
    min_cell=1,
    short_batches=True,
)
"""No limits: for data that are nobody's secret."""


@dataclass(frozen=True, kw_only=True)
class ServerPolicy:
    """What the operator of a server allows."""

    packages: tuple[str, ...] = ()  # that an experiment from outside may name a network of


def read_site_policy(path: Path) -> SitePolicy:
    """Read a site's policy; what the file leaves out has its default."""
    return SitePolicy(**_values(SitePolicy, path))


def read_server_policy(path: Path) -> ServerPolicy:
    """Read the policy of a server's operator."""
    return ServerPolicy(**_values(ServerPolicy, path))


def initial_policy(role: str) -> bytes:
    """Return the policy file that the kit of a node or a server starts with."""
    name = "server_policy.toml" if role == "server" else "site_policy.toml"
    return files("idiolect.deploy").joinpath(name).read_bytes()


def policy_path(folder: Path, given: Path | None) -> Path | None:
    """Return the path of a kit's policy: the given file, or the one in the kit, if there."""
    if given is not None:
        if not given.is_file():
            raise ConfigError(f"--policy: {given} is no file; give a TOML file of limits")
        return given
    return folder / POLICY_FILE if (folder / POLICY_FILE).is_file() else None


def _values(kind: type[SitePolicy] | type[ServerPolicy], path: Path) -> dict[str, Any]:
    raw = read_toml(path, "a policy")
    values = validate(signature_model(kind, ()), raw, str(path))
    found = {spec.name: getattr(values, spec.name) for spec in fields(kind)}
    try:
        kind(**found)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return found


class Behind(NamedTuple):
    """What is behind one training: gradient steps, and rows by their weight in it."""

    steps: int
    rows: float


def behind(request: Request, held: int, least: int = 0) -> Behind:
    """Return what is behind a training on `held` rows, without last batches of under a half.

    Nor are those of under `least` rows trained on.

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
        kept = [size for size in sizes if not short(size, request.batch, held, least)]
        done += times * len(kept)
        weight += times / min(kept) if kept else 0.0
    return Behind(done, done / weight if weight else 0.0)


def short(size: int, batch: int, held: int, least: int) -> bool:
    """Return whether a batch is left out: it has less than half the rows of the others, or few."""
    return size < min(batch, held) and (2 * size < batch or size < least)


def refuse_training(policy: SitePolicy, request: Request, held: int) -> None:
    """Refuse a request for private rows by which a report would show too few of them."""
    if request.stream == "public" or not held:
        return
    held = request.subset(held)
    if not request.shuffled:
        limit = "min_scored" if request.stream == "val" else "min_examples"
        if held < getattr(policy, limit):
            raise policy.refusal(limit, f"a figure of {held} {request.stream} rows")
        return
    if min(request.batch, held) < policy.min_batch:
        raise policy.refusal("min_batch", f"a gradient step of {min(request.batch, held)} rows")
    found = behind(request, held, policy.min_batch)
    if found.steps < policy.min_steps:
        raise policy.refusal("min_steps", f"{found.steps} gradient steps a report")
    if found.rows < policy.min_examples - 1e-6:
        raise policy.refusal(
            "min_examples",
            f"{found.rows:.1f} rows behind a report (batches of {request.batch} from {held} rows, "
            f"{found.steps} steps)",
        )


def refuse_seeds(policy: SitePolicy, experiment: Experiment) -> None:
    """Refuse more seeds than are allowed; each is a release of its own."""
    if len(experiment.seeds) > policy.max_seeds:
        raise policy.refusal("max_seeds", f"{len(experiment.seeds)} seeds")


def refuse_methods(policy: SitePolicy, experiment: Experiment) -> None:
    """Refuse methods that are not on the site's list."""
    for table in experiment.methods:
        if policy.methods and table.name not in policy.methods:
            raise Refused("methods", f"{table.name} is none of {', '.join(policy.methods)}")


def refuse_run(
    policy: SitePolicy, experiment: Experiment, clients: int, sizes: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Refuse a run whose settings go beyond a limit; `sizes` are this site's rows by seed.

    Returns what the run spends of epsilon by method, where the site counts it.
    """
    if clients < policy.min_sites:
        raise policy.refusal("min_sites", f"a run of {clients} sites")
    _refuse_lonely(policy, experiment, clients)
    refuse_seeds(policy, experiment)
    rounds = [table.rounds or experiment.rounds for table in experiment.methods]
    if max(rounds) > policy.max_rounds:
        raise policy.refusal("max_rounds", f"{max(rounds)} rounds")
    reports = sum(rounds) * len(experiment.seeds)
    if reports > policy.max_reports:
        raise policy.refusal("max_reports", f"{reports} reports")
    for train, _, _ in sizes:
        if 0 < train < policy.min_examples:
            raise policy.refusal("min_examples", f"{train} training rows")
    refuse_scores(policy, sizes)
    refuse_methods(policy, experiment)
    for table in experiment.methods:
        method = _inmost(made_method(table))
        if method.alone:
            continue
        for train, _, _ in sizes:
            wanted = Request("train", method.batch, method.epochs, method.steps, True, 0)
            refuse_training(policy, wanted, train)
    return _refuse_open(policy, experiment, clients) if policy.private else {}


def refuse_scores(policy: SitePolicy, sizes: Sequence[Sequence[int]]) -> None:
    """Refuse a run in which scores of too few rows would leave."""
    for _, *scored in sizes:
        few = [rows for rows in scored if 0 < rows < policy.min_scored]
        if few:
            raise policy.refusal("min_scored", f"{few[0]} rows of validation or test data")


def _inmost(method: Method) -> Method:
    while isinstance(method, Wrapper):
        method = method.base
    return method


def _refuse_lonely(policy: SitePolicy, experiment: Experiment, clients: int) -> None:
    """Refuse rounds of too few sites; with Poisson sampling, rounds likely to have too few."""
    cohort = cohort_size(experiment.cohort, clients) or clients
    if experiment.deploy.buffer:  # a round is over with so many reports
        cohort = min(cohort, buffered.needed(experiment.deploy, clients))
    if cohort < policy.min_cohort:
        raise policy.refusal("min_cohort", f"rounds of {cohort} sites")
    if experiment.draw != "poisson" or policy.min_cohort == 1:
        return
    share, others = cohort / clients, clients - 1
    alone = sum(
        math.comb(others, n) * share**n * (1 - share) ** (others - n)
        for n in range(policy.min_cohort - 1)
    )
    if alone > _ALONE and not all(has(made_method(t), Privacy) for t in experiment.methods):
        raise policy.refusal(
            "min_cohort",
            f"with draw = 'poisson' this site's round has fewer than {policy.min_cohort} sites "
            f"with probability {alone:.2g}",
        )


def _refuse_open(policy: SitePolicy, experiment: Experiment, clients: int) -> dict[str, float]:
    """Refuse methods without differential privacy, and more epsilon than is allowed."""
    spent: dict[str, float] = {}
    for table in experiment.methods:
        method = made_method(table)
        if method.alone:
            continue
        if not has(method, Privacy):
            raise Refused("require_privacy", f"{table.name} has no aggregate = 'dp'")
        if table.aggregate is not None and table.aggregate.options.get("force"):
            # Without it the server itself refuses few clients, and a large epsilon.
            raise Refused("require_privacy", f"{table.name} has force = true")
        try:
            rounds, promised = _promised(
                method, table.rounds or experiment.rounds, experiment, clients
            )
        except IdiolectError as error:
            raise Refused("require_privacy", f"{table.name}: {error}") from error
        if not promised.get("meaningful"):
            raise Refused("require_privacy", f"{table.name} promises nothing worth the name")
        # The same again spends nothing more; another sampling or number of sites is another.
        drawn = experiment.cohort, experiment.draw, clients
        release = repr((table, rounds, experiment.seeds, drawn))
        spent[protocol.digest(release.encode())] = promised.get("epsilon") or math.inf
    refuse_spent(policy, spent)
    return spent


def _promised(
    method: Method, rounds: int, experiment: Experiment, clients: int
) -> tuple[int, Mapping[str, Any]]:
    """Return how many rounds a method will do, and what privacy it promises over all seeds."""
    cohort, seeds = cohort_size(experiment.cohort, clients), len(experiment.seeds)
    plan = RunPlan(rounds, clients, cohort, experiment.draw, seeds, federated=True)
    ready, rounds = capabilities.settled(method, plan)
    return rounds, capabilities.promise(ready, plan._replace(rounds=rounds)).get("privacy", {})


def promises(experiment: Experiment, clients: int) -> dict[str, Any]:
    """Say what a run promises: masks, and of each method rounds and privacy (None: none)."""
    found: dict[str, Any] = {}
    for table in experiment.methods:
        method, rounds = made_method(table), table.rounds or experiment.rounds
        privacy = None
        if has(method, Privacy):
            try:
                rounds, told = _promised(method, rounds, experiment, clients)
                privacy = {key: told.get(key) for key in ("epsilon", "delta")}
            except IdiolectError:
                privacy = None
        found[table.label_or_name] = {"rounds": rounds, "privacy": privacy}
    return {"secure": experiment.deploy.secure, "methods": found, "seeds": len(experiment.seeds)}


def refuse_spent(policy: SitePolicy, spent: Mapping[str, float]) -> None:
    """Refuse more epsilon than is allowed in a run."""
    total = sum(spent.values())
    if not total <= policy.max_epsilon:
        words = f"epsilon = {total:.4g} over all methods and seeds"
        raise policy.refusal("max_epsilon", words)


def refuse_over_budget(policy: SitePolicy, before: float, spent: float) -> None:
    """Refuse what would spend more epsilon over all runs than the site has."""
    if policy.budget_epsilon and not before + spent <= policy.budget_epsilon * (1 + 1e-12):
        words = f"epsilon = {spent:.4g} beside {before:.4g} that other runs have spent"
        raise policy.refusal("budget_epsilon", words)
