"""The referee's suite: its problems, its baselines, what each may try, and the digest of it all."""

import ast
import hashlib
import inspect
import io
import json
import math
import tokenize
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from idiolect.core.method import Method
from idiolect.errors import ConfigError, suggest
from idiolect.experiment.load import read_toml, resolve
from idiolect.experiment.repro.runs import experiments_folder
from idiolect.experiment.schema import Experiment
from idiolect.experiment.untrusted import Permissions
from idiolect.methods import METHODS

SIZES = ("small", "whole")
_LOCAL_WORK = {"epochs": 1, "steps": 0}  # of a round, where a problem does not say otherwise
SAME_FOR_ALL = ("batch", *_LOCAL_WORK)
"""Settings that are a problem's, and no method's."""

_TOLD = ("title", "paper", "presets")  # class variables that no result of the suite depends on

Raw = dict[str, Any]


def digest_of(value: Any) -> str:
    """Fingerprint plain values: of their JSON, with keys in order and no blanks."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def code_digest(kind: type[Method]) -> str:
    """Fingerprint the file in which a method's class is written."""
    return hashlib.sha256(Path(inspect.getfile(kind)).read_bytes()).hexdigest()


def baseline_digest(text: str) -> str:
    """Fingerprint what decides numbers in the file of a baseline: its stored results are of that.

    Comments, texts that stand alone, presets and what is told of a paper do not count. A user's
    file is taken as it is: it might read its own texts.
    """
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and _decides_nothing(node):
            last = node.end_lineno or node.lineno
            lines[node.lineno - 1 : last] = [""] * (last - node.lineno + 1)
    bare = "\n".join(line.rstrip() for line in lines if line.strip())
    return hashlib.sha256(bare.encode()).hexdigest()


def _decides_nothing(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(ast.Constant(str())) | ast.ImportFrom("typing"):
            return True
        case ast.AnnAssign(ast.Name(name)):
            return name in _TOLD
    return False


@dataclass(frozen=True)
class Contestant:
    """A method that the referee trains: its name, what it is called, and what may be tried."""

    name: str  # as in an experiment file: registered, or `module:Class`
    label: str
    code: str  # digest of the file it is written in
    settings: Mapping[str, Any] = field(default_factory=dict)
    search: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    untuned: tuple[str, ...] = ()  # settings of all methods that it does not have
    base: Path = Path()  # where its module lies, if it is a user's


@dataclass(frozen=True)
class SuiteProblem:
    """A federation to learn: an experiment file, in which methods take turns."""

    name: str
    raw: Raw
    instead: str = ""  # the problem that is run where the data of this one is missing

    @cached_property
    def digest(self) -> str:
        """Fingerprint of the file, without its comments and blanks."""
        return digest_of(self.raw)

    @property
    def training(self) -> Raw:
        """Settings that all methods have in common, whatever defaults a class has."""
        return {**_LOCAL_WORK, **self.raw["training"]}

    @property
    def budget(self) -> int:
        """How many settings each method may try."""
        return int(self.raw["tune"]["budget"])

    def space(self, contestant: Contestant) -> dict[str, list[Any]]:
        """Return what is tried: own values times as many middle learning rates as fit the budget.

        A contestant that lists learning rates of its own tries those.
        """
        own = {key: list(values) for key, values in contestant.search.items()}
        cells = math.prod(len(values) for values in own.values())
        if cells > self.budget or not cells:
            raise ConfigError(
                f"{contestant.label}: `search` lists {cells} settings and each method of the suite "
                f"tries at most {self.budget}, at least one; take values out"
            )
        for key, rates in self.raw["tune"]["space"].items():
            if key in own or key in contestant.untuned:
                continue
            count = min(self.budget // cells, len(rates))
            first = (len(rates) - count) // 2
            own[key] = rates[first : first + count]
            cells *= count
        return own

    def experiment(self, contestant: Contestant, device: str | None = None) -> Experiment:
        """Return the experiment of one method."""
        table = {"name": contestant.name, "label": contestant.label, **contestant.settings}
        tune = {**self.raw["tune"], "space": {}}
        tune["methods"] = {contestant.label: self.space(contestant)}
        fixed = {
            key: value
            for key, value in self.training.items()
            if key in self.raw["training"] or key not in contestant.untuned
        }
        raw = {**self.raw, "methods": [table], "tune": tune, "training": fixed}
        if device is not None:
            raw["backend"] = {**raw.get("backend", {}), "device": device}
        return resolve(raw, f"problem {self.name}", Permissions(contestant.base))


@dataclass(frozen=True)
class Suite:
    """Problems and baselines of one size."""

    size: str
    version: int
    problems: Mapping[str, SuiteProblem]  # those that are run instead are the last
    baselines: tuple[Contestant, ...]

    @cached_property
    def digest(self) -> str:
        """Fingerprint of the problems and of what the baselines may try; not of their code."""
        listed = [[one.name, one.label, one.settings, one.search] for one in self.baselines]
        problems = {name: [one.raw, one.instead] for name, one in self.problems.items()}
        return digest_of([self.size, self.version, problems, listed])

    @property
    def first(self) -> list[SuiteProblem]:
        """The problems that are run where all data is there."""
        stand_ins = {one.instead for one in self.problems.values()}
        return [one for one in self.problems.values() if one.name not in stand_ins]

    def problem(self, name: str) -> SuiteProblem:
        """Return a problem by its name."""
        if name not in self.problems:
            raise ConfigError(f"the suite has no problem {suggest(name, self.problems)}")
        return self.problems[name]


@cache
def load_suite(size: str) -> Suite:
    """Read the suite that came with the package."""
    if size not in SIZES:
        raise ConfigError(f"the size is {size!r}; expected one of {', '.join(SIZES)}")
    text = resources.files("idiolect.experiment.referee").joinpath("suite.toml").read_text("utf-8")
    raw = tomllib.loads(text)
    listed = {one["name"]: one.get("instead", "") for one in raw[size]}
    names = list(dict.fromkeys([*listed, *filter(None, listed.values())]))
    home = experiments_folder() / "referee" / size
    problems = {
        name: SuiteProblem(name, read_toml(home / f"{name}.toml"), listed.get(name, ""))
        for name in names
    }
    return Suite(size, raw["version"], problems, tuple(map(_baseline, raw["baselines"])))


def _baseline(raw: Raw) -> Contestant:
    kind = METHODS[raw["name"]]
    settings, search = raw.get("settings", {}), raw.get("search", {})
    code = baseline_digest(Path(inspect.getfile(kind)).read_text(encoding="utf-8"))
    return Contestant(raw["name"], kind.title, code, settings, search, kind.unused)
