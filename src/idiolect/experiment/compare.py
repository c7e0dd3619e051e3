"""Compare methods over seeds and splits in one go; what was done before is never done again."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from idiolect.analysis.comparison import ALPHA, Comparison
from idiolect.analysis.comparison import compare as compared
from idiolect.analysis.overall import overall
from idiolect.analysis.paired_tests import stats
from idiolect.core.checkpoint import write_whole
from idiolect.data import Dataset
from idiolect.engine.callbacks import Prefixed, Silent, Watch
from idiolect.errors import DataError
from idiolect.experiment.compare_split import Split
from idiolect.experiment.execute import written
from idiolect.experiment.resolve import load_experiment
from idiolect.experiment.run_methods import EXPERIMENT, opened
from idiolect.experiment.schema import Experiment
from idiolect.experiment.splits import divided
from idiolect.results import document, participation
from idiolect.results.document import Document, plain, versions
from idiolect.results.models import folder_name

FILE = "comparison.json"


def compare(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    data_dir: str | Path | None = None,
    alpha: float = ALPHA,
    target: float | None = None,
    unit: str | None = None,
) -> Document:
    """Compare an experiment file's methods, as `idiolect compare` does; return comparison.json.

    A folder of results, of `run` or `compare`, is compared as it is.
    """
    if Path(path).is_dir():
        return of_folder(Path(path), alpha, target, unit)
    content, _ = execute(
        load_experiment(path, overrides),
        Path(out) if out else None,
        data_dir=Path(data_dir) if data_dir else None,
        alpha=alpha,
        target=target,
        unit=unit,
    )
    return content


def of_folder(
    folder: Path, alpha: float = ALPHA, target: float | None = None, unit: str | None = None
) -> Document:
    """Compare what a folder holds: one result, or those of several splits."""
    if (folder / document.FILE).exists() or not (folder / FILE).exists():
        splits = {"": folder}
    else:
        listed = json.loads((folder / FILE).read_text(encoding="utf-8"))["splits"]
        splits = {one["name"]: folder / one["folder"] for one in listed}
    held = {name: document.read(own) for name, own in splits.items()}
    if not all(content["methods"] for content in held.values()):
        raise DataError(f"{folder} holds no finished method; run its experiment to the end")
    name = next(iter(held.values()))["name"].split(":")[0]
    return _laid_out(name, held, splits, folder, alpha, target, unit)


def execute(
    experiment: Experiment,
    out: Path | None = None,
    *,
    data_dir: Path | None = None,
    watch: Watch | None = None,
    alpha: float = ALPHA,
    target: float | None = None,
    unit: str | None = None,
) -> tuple[Document, Path]:
    """Train and compare; return the comparison and its folder, runs/NAME unless told otherwise."""
    folder = out or Path("runs") / folder_name(experiment.name)
    stats()  # missing at the end, it would cost the user the wait
    datasets: dict[str, Dataset] = {}
    # Data is divided, and refused, before anything is written.
    splits = {
        name: Split(own, experiment.tune, _at(folder, name), data_dir, datasets)
        for name, own in divided(experiment).items()
    }
    if watch is not None and any(experiment.logging.model_dump().values()):
        watch.note("[logging] is for `idiolect run`; a comparison logs nothing")
    held: dict[str, Document] = {}
    with opened(folder, resume=True):
        for name, split in splits.items():
            told = Prefixed(watch or Silent(), f"{name}: " if name else "")
            held[name] = split.run(told)
        write_whole(folder / EXPERIMENT, written(experiment).encode())
        content = _laid_out(
            experiment.name,
            held,
            {n: s.folder for n, s in splits.items()},
            folder,
            alpha,
            target,
            unit,
        )
        text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)
        write_whole(folder / FILE, (text + "\n").encode())
    return content, folder


def _at(folder: Path, split: str) -> Path:
    return folder / folder_name(split) if split else folder


def _laid_out(
    name: str,
    held: dict[str, Document],
    folders: dict[str, Path],
    folder: Path,
    alpha: float,
    target: float | None,
    unit: str | None,
) -> Document:
    told: dict[str, Comparison] = {
        split: compared(content, alpha=alpha, target=target, unit=unit)
        for split, content in held.items()
    }
    together = overall(told)
    return {
        "name": name,
        "complete": all(content["complete"] for content in held.values()),
        "splits": [
            {
                "name": split,
                "folder": str(folders[split].relative_to(folder)),
                "data": content["data"],
                "tuned": _tuned(content),
                "participation": participation.lines(content["methods"]),
                "comparison": told[split].as_dict(),
            }
            for split, content in held.items()
        ],
        "asked": {"alpha": alpha, "target": target, "unit": unit},
        "overall": None if together is None else plain(dataclasses.asdict(together)),
        "versions": versions(),
    }


def _tuned(content: Document) -> dict[str, Any]:
    return {
        label: method["tuned"] for label, method in content["methods"].items() if "tuned" in method
    }
