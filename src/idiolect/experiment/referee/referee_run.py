"""Judge a method: train it on every problem of the suite, and compare it with the baselines."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from idiolect.core.checkpoint import write_whole
from idiolect.data import Dataset
from idiolect.engine.outcome import Prefixed, Watch
from idiolect.errors import ConfigError, DataError, MethodError, ModelError
from idiolect.experiment.build import build_federations
from idiolect.experiment.referee.cells import Record, train_cell
from idiolect.experiment.referee.judgement import judge
from idiolect.experiment.referee.suite import Contestant, Suite, SuiteProblem, digest_of
from idiolect.experiment.repro.runs import experiments_folder
from idiolect.results.document import Document, versions
from idiolect.results.run_files import folder_name

FORMAT = 1
FILE = "referee.json"
NOT_ASKED = "not asked for, by --problem"


def stored_folder(size: str) -> Path:
    """Return where the results of methods are that came with the package, a file for each."""
    return experiments_folder() / "referee" / "results" / size


def read_lines(folder: Path) -> dict[str, Document]:
    """Read the stored results of a folder, by label."""
    found = [read_json(path) for path in sorted(folder.glob("*.json"))]
    return {one["label"]: one for one in found}


def read_json(path: Path) -> Document:
    """Read a JSON file that should hold an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}; give a file of the referee"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON ({error}); give a file of the referee") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} holds no JSON object; give a file of the referee")
    return content


def write_compact(path: Path, content: Any) -> None:
    """Write JSON with a line for each cell: small, and a difference between two files is seen."""
    write_whole(path, (_compact(content) + "\n").encode())


def _compact(value: Any, depth: int = 3) -> str:
    if isinstance(value, Mapping) and depth:
        inner = (f"{json.dumps(key)}: {_compact(one, depth - 1)}" for key, one in value.items())
        return "{\n" + ",\n".join(inner) + "\n}"
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


# Which problems can be run here.


def choose_problems(
    suite: Suite, data_dir: Path | None, datasets: dict[str, Dataset], only: Sequence[str] = ()
) -> tuple[list[SuiteProblem], dict[str, str]]:
    """Return the problems whose data is here, others' stand-ins, and why problems are left out."""
    chosen: dict[str, SuiteProblem] = {}
    asked = [suite.problem(name).name for name in only]
    left_out = {
        one.name: "not asked for, by --problem"
        for one in suite.first
        if asked and one.name not in asked
    }
    for problem in [suite.problem(name) for name in only] or suite.first:
        missing = _missing(problem, suite, data_dir, datasets)
        if not missing:
            chosen[problem.name] = problem
            continue
        left_out[problem.name] = missing
        if problem.instead:
            left_out[problem.name] = f"{missing}; {problem.instead} is run instead"
            chosen[problem.instead] = suite.problem(problem.instead)
    return list(chosen.values()), left_out


def _missing(
    problem: SuiteProblem, suite: Suite, data_dir: Path | None, datasets: dict[str, Dataset]
) -> str:
    experiment = problem.experiment(suite.baselines[0])
    try:
        build_federations(experiment.model_copy(update={"seeds": (0,)}), data_dir, datasets)
    except DataError as error:
        return str(error)
    return ""


# Training.


def train_line(
    suite: Suite,
    contestant: Contestant,
    problems: Sequence[SuiteProblem],
    out: Path,
    watch: Watch,
    *,
    device: str | None = None,
    data_dir: Path | None = None,
    datasets: dict[str, Dataset] | None = None,
) -> Document:
    """Train a method on problems; cells that are in the folder already are not trained again."""
    cells: dict[str, Record] = {}
    unable: dict[str, str] = {}
    first: Exception | None = None
    for problem in problems:
        path = out / "cells" / folder_name(contestant.label) / f"{problem.name}.json"
        kept = read_json(path) if path.is_file() else {}
        if (kept.get("problem"), kept.get("code")) == (problem.digest, contestant.code):
            cells[problem.name] = kept
            continue
        work = out / "training" / folder_name(contestant.label) / problem.name
        followed = Prefixed(watch, f"{problem.name}: ")
        try:
            record = train_cell(
                problem, contestant, work, followed,
                device=device, data_dir=data_dir, datasets=datasets,
            )  # fmt: skip
        except (ConfigError, MethodError, ModelError) as error:
            unable[problem.name] = str(error)
            first = first or error
            watch.note(f"{contestant.label} cannot do {problem.name}: {error}")
            continue
        write_whole(path, json.dumps(record, ensure_ascii=False).encode())
        shutil.rmtree(work, ignore_errors=True)
        cells[problem.name] = record
    if first is not None and not cells:
        raise first
    return {
        "format": FORMAT,
        "suite": described(suite),
        "label": contestant.label,
        "name": contestant.name,
        "code": contestant.code,
        "unable": unable,
        "cells": cells,
    }


def described(suite: Suite) -> Document:
    """Return which suite a file is of."""
    return {"size": suite.size, "version": suite.version, "digest": suite.digest}


def referee(
    suite: Suite,
    challenger: Contestant,
    out: Path,
    watch: Watch,
    *,
    again: bool = False,
    only: Sequence[str] = (),
    device: str | None = None,
    data_dir: Path | None = None,
) -> tuple[Document, Path]:
    """Train the challenger, take or train the baselines, and write what was found."""
    datasets: dict[str, Dataset] = {}
    problems, left_out = choose_problems(suite, data_dir, datasets, only)
    for name, why in left_out.items():
        if why != NOT_ASKED:
            watch.note(f"{name} is left out: {why}")
    if not problems:
        why = "; ".join(dict.fromkeys(left_out.values()))
        raise DataError(f"no problem of the suite can be run here: {why}")
    how: dict[str, Any] = {"device": device, "data_dir": data_dir, "datasets": datasets}
    lines = {challenger.label: train_line(suite, challenger, problems, out, watch, **how)}
    others = [one for one in suite.baselines if one.label != challenger.label]
    if again:
        for own in others:
            lines[own.label] = train_line(suite, own, problems, out, watch, **how)
    else:
        stored = read_lines(stored_folder(suite.size))
        for own in others:
            if own.label in stored and stored[own.label]["suite"] == described(suite):
                lines[own.label] = stored[own.label]
    trained = list(lines) if again else [challenger.label]
    content = laid_out(suite, challenger.label, problems, left_out, lines, trained)
    write_compact(out / FILE, content)
    write_compact(out / f"{folder_name(challenger.label)}.json", lines[challenger.label])
    return content, out / FILE


def laid_out(
    suite: Suite,
    challenger: str,
    problems: Sequence[SuiteProblem],
    left_out: Mapping[str, str],
    lines: Mapping[str, Document],
    trained: Sequence[str],
) -> Document:
    """Return the one file: what was measured, what follows from it, and its digest."""
    names = [problem.name for problem in problems]
    methods = {
        label: {
            **{key: line[key] for key in ("name", "code", "unable")},
            "cells": {name: line["cells"][name] for name in names if name in line["cells"]},
        }
        for label, line in lines.items()
    }
    cells = {label: own["cells"] for label, own in methods.items()}
    content = {
        "format": FORMAT,
        "suite": described(suite),
        "challenger": challenger,
        "problems": names,
        "left_out": dict(left_out),
        "trained_here": list(trained),
        "versions": versions(),
        "methods": methods,
        "findings": judge(cells, names, challenger),
    }
    return {**content, "digest": digest_of(content)}
