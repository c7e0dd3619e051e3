"""Compare methods over seeds and splits; what was trained before is not trained again."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from idiolect.analysis.comparison import ALPHA, Comparison
from idiolect.analysis.comparison import compare as compared
from idiolect.analysis.significance import stats
from idiolect.analysis.verdict import overall
from idiolect.core.checkpoint import write_whole
from idiolect.data import Dataset
from idiolect.data.federation import Federation
from idiolect.engine.outcome import Outcome, PlannedWork, Prefixed, Silent, Stage, Watch
from idiolect.errors import DataError
from idiolect.experiment.build import build_job, build_shared, describe
from idiolect.experiment.early_checks import refuse_misfits
from idiolect.experiment.job import Evaluate, Job
from idiolect.experiment.load import load_experiment, split_experiments
from idiolect.experiment.references import REFERENCES, references_of, train_reference
from idiolect.experiment.run import EXPERIMENT, experiment_toml, open_run_folder
from idiolect.experiment.schema import Experiment, MethodTable, Tune
from idiolect.experiment.seed_parts import (
    PartTrainer,
    Seeds,
    adopt_run,
    head_start,
    joined_outcome,
    joined_trace,
    list_parts,
    train_parts,
)
from idiolect.experiment.train import planned_work
from idiolect.experiment.tune import (
    Settings,
    proposals,
    search_space,
    settings_folder,
    settings_text,
    tune_method,
    with_settings,
)
from idiolect.results import document, run_files, statistics, trace
from idiolect.results.document import Document, plain, versions
from idiolect.results.run_files import PARTS, folder_name

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
    metric: str | None = None,
) -> Document:
    """Compare an experiment file's methods, as `idiolect compare` does; return comparison.json.

    A folder of results, of `run` or `compare`, is compared as it is.
    """
    if Path(path).is_dir():
        return compare_folder(Path(path), alpha, target, unit, metric)
    chosen = [f"evaluate.metric={metric}"] if metric else []
    content, _ = compare_experiment(
        load_experiment(path, [*overrides, *chosen]),
        Path(out) if out else None,
        data_dir=Path(data_dir) if data_dir else None,
        alpha=alpha,
        target=target,
        unit=unit,
    )
    return content


def compare_folder(
    folder: Path,
    alpha: float = ALPHA,
    target: float | None = None,
    unit: str | None = None,
    metric: str | None = None,
) -> Document:
    """Compare what a folder holds: one result, or those of several splits.

    `metric` is another than the run's own.
    """
    if (folder / document.FILE).exists() or not (folder / FILE).exists():
        splits = {"": folder}
    else:
        listed = json.loads((folder / FILE).read_text(encoding="utf-8"))["splits"]
        splits = {one["name"]: folder / one["folder"] for one in listed}
    held = {name: document.read_document(own) for name, own in splits.items()}
    if not all(content["methods"] for content in held.values()):
        raise DataError(f"{folder} holds no finished method; run its experiment to the end")
    name = next(iter(held.values()))["name"].split(":")[0]
    return _laid_out(name, held, splits, folder, alpha, target, unit, metric)


def compare_experiment(
    experiment: Experiment,
    out: Path | None = None,
    *,
    data_dir: Path | None = None,
    watch: Watch | None = None,
    alpha: float = ALPHA,
    target: float | None = None,
    unit: str | None = None,
) -> tuple[Document, Path]:
    """Train and compare; return the comparison and its folder, by default runs/NAME."""
    folder = out or Path("runs") / folder_name(experiment.name)
    stats()  # missing at the end, it would cost the user the wait
    watch = watch or Silent()
    watch.stage(Stage("reading data"))
    datasets: dict[str, Dataset] = {}
    # Data is divided, and refused, before anything is written.
    splits = {
        name: SplitComparison(own, experiment.tune, _at(folder, name), data_dir, datasets)
        for name, own in split_experiments(experiment).items()
    }
    if any(experiment.logging.model_dump().values()):
        watch.note("[logging] is for `idiolect run`; a comparison logs nothing")
    held: dict[str, Document] = {}
    with open_run_folder(folder, resume=True, comparison=True):
        followed = {name: Prefixed(watch, f"{name}: " if name else "") for name in splits}
        for name, split in splits.items():
            followed[name].plan(split.planned())
            for text in split.notes:
                followed[name].note(text)
        for name, split in splits.items():
            held[name] = split.run(followed[name])
        watch.stage(Stage("writing"))
        write_whole(folder / EXPERIMENT, experiment_toml(experiment).encode())
        content = _laid_out(
            experiment.name,
            held,
            {n: s.folder for n, s in splits.items()},
            folder,
            alpha,
            target,
            unit,
        )
        document.write_json(folder / FILE, content)
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
    metric: str | None = None,
) -> Document:
    comparisons: dict[str, Comparison] = {
        split: compared(content, alpha=alpha, target=target, unit=unit, metric=metric)
        for split, content in held.items()
    }
    together = overall(comparisons)
    return {
        "name": name,
        "complete": all(content["complete"] for content in held.values()),
        "splits": [
            {
                "name": split,
                "folder": str(folders[split].relative_to(folder)),
                "data": content["data"],
                "tuned": _tuned(content),
                "participation": statistics.participation_lines(content["methods"]),
                "comparison": comparisons[split].as_dict(),
            }
            for split, content in held.items()
        ],
        "asked": {"alpha": alpha, "target": target, "unit": unit, "metric": metric},
        "overall": None if together is None else plain(dataclasses.asdict(together)),
        "versions": versions(),
    }


def _tuned(content: Document) -> dict[str, Any]:
    return {
        label: method["tuned"] for label, method in content["methods"].items() if "tuned" in method
    }


# One division of the data in a comparison: all methods on it, tuned, trained and scored.


TRIALS = "tune"
_LONGEST = 60  # letters of settings in a label


class SplitComparison:
    """Everything a comparison does on one division of the data."""

    def __init__(
        self,
        experiment: Experiment,
        tune: Tune | None,
        folder: Path,
        data_dir: Path | None,
        datasets: dict[str, Dataset],
        *,
        detail: bool = True,
    ) -> None:
        """Load and divide the data; nothing is written yet.

        Without `detail` the chosen metric alone is taken of each client.
        """
        self.experiment, self.folder, self._tune = experiment, folder, tune
        self._detail = detail
        # Seeds that were trained together with some of ours go on together.
        parts = [part for home in folder.glob("*/*/*") for part in list_parts(home)]
        extra = tuple(sorted({s for part in parts for s in part.seeds} - set(experiment.seeds)))
        wider = experiment.model_copy(update={"seeds": experiment.seeds + extra})
        self._held = build_shared(wider, data_dir, datasets)
        bare = {seed: own.without_test() for seed, own in self._held.federations.items()}
        self._bare = self._held._replace(federations=bare)
        first = self._held.federations[experiment.seeds[0]]
        evaluated = Evaluate(**experiment.evaluate.of_job())
        self._choice = evaluated.choice(first.dataset.task.kind)
        asked = experiment.evaluate.references
        self._references = references_of(asked, first, len(experiment.seeds))
        jobs = [build_job(experiment, one, self._held, wider.seeds) for one in experiment.methods]
        self.rows: list[str] = jobs[0].identity["rows"]  # fingerprints of who holds which rows
        whole = experiment.model_copy(update={"tune": tune})
        self.notes = refuse_misfits(whole, jobs, folder)

    def planned(self) -> list[PlannedWork]:
        """List all that is going to be trained: trials of settings, then what they choose."""
        works = []
        for table in self.experiment.methods:
            made = build_job(self.experiment, table, self._held, self.experiment.seeds)
            space = search_space(self._tune, table) if self._tune else {}
            if self._tune and space:
                label, rounds = table.label_or_name, self._tune.rounds or made.rounds
                listed = self._tune.search != "optuna"
                each = 1 if listed or self._tune.choose == "all" else len(made.seeds)
                count = sum(1 for _ in proposals(self._tune, label, space)) if listed else 0
                work = planned_work(made, (count or self._tune.budget or 0) * each)
                works.append(
                    work._replace(
                        label=f"{made.label} with",
                        rounds=rounds,
                        round_work=work.round_work / each,
                        final_work=work.final_work / each,
                    )
                )
            works.append(planned_work(made))
        return works

    @property
    def described(self) -> dict[str, Any]:
        """What the data is, as a result says it."""
        return describe(self.experiment, self._held)

    def federation(self, seed: int) -> Federation:
        """Return the data as it is divided under a seed."""
        return self._held.federations[seed]

    def run(self, watch: Watch) -> Document:
        """Train every method; the result is written after each."""
        bench = PartTrainer(watch)
        described = self.described
        self._label(self.folder, self.experiment)
        seeds = self.experiment.seeds
        divided = [self._held.federations[seed] for seed in seeds]
        run_files.save_holdings(self.folder, seeds, divided)
        outcomes: list[Outcome] = []
        content: Document = {}
        for table in self.experiment.methods:
            outcomes.append(self.train(table, bench))
            complete = len(outcomes) == len(self.experiment.methods)
            content = document.write_results(self.folder, described, outcomes, complete)
        for name in self._references:
            own = {seed: self._held.federations[seed] for seed in seeds}
            watch.stage(Stage("training references", REFERENCES[name].title))
            outcomes.append(train_reference(name, own, self._choice))
            content = document.write_results(self.folder, described, outcomes, True)
        return content

    def train(self, table: MethodTable, bench: PartTrainer) -> Outcome:
        """Tune one method and train what was chosen."""
        label, seeds = table.label_or_name, self.experiment.seeds
        if self._tune is None:
            whole = self._final(table, _Group({}, list(seeds)), bench)
            self._record(label, [{}])
            return whole
        made = tune_method(
            self._tune,
            table,
            seeds,
            bench,
            self.folder / TRIALS / folder_name(label),
            lambda settings, own: self._trial(table, settings, own),
        )
        groups: list[_Group] = []
        for seed, settings in made.chosen.items():
            mine = next((one for one in groups if one.settings == settings), None)
            if mine is None:
                groups.append(_Group(settings, [seed]))
            else:
                mine.seeds.append(seed)
        whole = joined_outcome([self._final(table, one, bench) for one in groups], seeds)
        self._record(label, [one.settings for one in groups])
        return dataclasses.replace(whole, about={**whole.about, "tuned": made.record})

    def _record(self, label: str, chosen: Sequence[Settings]) -> None:
        """Write the traces of a method's parts beside the result, as a run does."""
        homes = [settings_folder(self.folder / PARTS / folder_name(label), own) for own in chosen]
        joined = joined_trace(homes, label, self.experiment.seeds)
        if joined is not None:
            trace.write_trace(self.folder, joined)

    def _final(self, table: MethodTable, group: "_Group", bench: PartTrainer) -> Outcome:
        """Train the settings that some seeds chose, resuming from existing checkpoints."""
        label = folder_name(table.label_or_name)
        place = settings_folder(self.folder / PARTS / label, group.settings)
        chosen = with_settings(table, group.settings)

        def make(own: Seeds) -> Job:
            made = build_job(self.experiment, chosen, self._held, own)
            evaluate = dataclasses.replace(made.evaluate, detail=self._detail)
            return dataclasses.replace(made, evaluate=evaluate)

        def start(own: Job, folder: Path) -> None:
            alone = {"seeds": own.seeds, "methods": (chosen,)}
            self._label(folder, self.experiment.model_copy(update=alone))
            if own.evaluate.watches or chosen.refit:
                return  # trials have taken no such curve, and trained on fewer rows
            for part in list_parts(settings_folder(self.folder / TRIALS / label, group.settings)):
                trial = self._trial(table, group.settings, part.seeds)
                if head_start(trial, part.folder, own, folder):
                    return

        if not group.settings:
            adopt_run(self.folder, place, table.label_or_name, tuple(group.seeds), make)
        return train_parts(bench, place, group.seeds, make, start)

    def _trial(self, table: MethodTable, settings: Settings, seeds: Seeds) -> Job:
        """Make a job that holds no test row, of as many rounds as trials have."""
        # What is chosen by validation rows is not trained on them.
        tried = with_settings(table, settings).model_copy(update={"refit": False})
        made = build_job(self.experiment, tried, self._bare, seeds)
        evaluate = dataclasses.replace(
            made.evaluate,
            test_curve=False,
            train_curve=False,
            save_models=False,
            keep_globals=False,
            detail=False,
        )
        if made.evaluate.watches:  # then the final training starts anew: no curve is needed
            evaluate = dataclasses.replace(
                evaluate, every=made.rounds, personal="auto", curves=False
            )
        by = self._tune and self._tune.metric
        if by and not evaluate.choice(made.task).natively(by):  # then it has to be measured
            evaluate = dataclasses.replace(evaluate, metric=by)
        rounds = (self._tune and self._tune.rounds) or made.rounds
        label = f"{made.label} with {settings_text(settings)[:_LONGEST]}"
        return dataclasses.replace(made, label=label, evaluate=evaluate, rounds=rounds)

    def _label(self, folder: Path, experiment: Experiment) -> None:
        """Write into a folder what it is of, so that newcomers can be adapted from it."""
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / EXPERIMENT, experiment_toml(experiment).encode())
        held = self._held.federations
        datasets = {seed: held[seed].dataset for seed in experiment.seeds}
        public = held[experiment.seeds[0]].public
        run_files.save_scaling(folder, datasets, experiment.data.options, public)


class _Group(NamedTuple):
    """Seeds that chose alike."""

    settings: Settings
    seeds: list[int]
