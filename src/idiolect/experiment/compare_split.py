"""One division of the data in a comparison: all methods on it, tuned, trained and scored."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from idiolect.core.checkpoint import write_whole
from idiolect.data import Dataset
from idiolect.engine.callbacks import Watch
from idiolect.engine.outcome import Outcome
from idiolect.experiment.build import about, job, shared
from idiolect.experiment.execute import written
from idiolect.experiment.job import Job
from idiolect.experiment.run_methods import EXPERIMENT
from idiolect.experiment.schema import Experiment, MethodTable, Tune
from idiolect.experiment.search_space import Settings, named, with_settings
from idiolect.experiment.seed_parts import (
    Bench,
    Seeds,
    adopted,
    found,
    head_start,
    recorded,
    trained,
)
from idiolect.experiment.tune import home, tuned
from idiolect.results import document, holdings, metrics, scaling, trace
from idiolect.results.document import Document
from idiolect.results.joining import joined
from idiolect.results.models import PARTS, folder_name

TRIALS = "tune"
_LONGEST = 60  # letters of settings in a label


class Split:
    """Everything a comparison does on one division of the data."""

    def __init__(
        self,
        experiment: Experiment,
        tune: Tune | None,
        folder: Path,
        data_dir: Path | None,
        datasets: dict[str, Dataset],
    ) -> None:
        """Load and divide the data; nothing is written yet."""
        self.experiment, self.folder, self._tune = experiment, folder, tune
        # Seeds that were trained together with some of ours go on together.
        parts = [part for home in folder.glob("*/*/*") for part in found(home)]
        extra = tuple(sorted({s for part in parts for s in part.seeds} - set(experiment.seeds)))
        wider = experiment.model_copy(update={"seeds": experiment.seeds + extra})
        self._held = shared(wider, data_dir, datasets)
        bare = {seed: own.without_test() for seed, own in self._held.federations.items()}
        self._bare = self._held._replace(federations=bare)

    def run(self, watch: Watch) -> Document:
        """Train every method; the result is written after each."""
        bench = Bench(watch)
        described = about(self.experiment, self._held)
        self._label(self.folder, self.experiment)
        seeds = self.experiment.seeds
        divided = [self._held.federations[seed] for seed in seeds]
        holdings.save(self.folder, holdings.of(seeds, divided))
        outcomes: list[Outcome] = []
        content: Document = {}
        for table in self.experiment.methods:
            outcomes.append(self._method(table, bench))
            complete = len(outcomes) == len(self.experiment.methods)
            content = document.document(described, outcomes, complete)
            metrics.write(self.folder, outcomes)
            document.write(self.folder, content)
        return content

    def _method(self, table: MethodTable, bench: Bench) -> Outcome:
        label, seeds = table.label or table.name, self.experiment.seeds
        if self._tune is None:
            whole = self._final(table, _Group({}, list(seeds)), bench)
            self._record(label, [{}])
            return whole
        made = tuned(
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
        whole = joined([self._final(table, one, bench) for one in groups], seeds)
        self._record(label, [one.settings for one in groups])
        return dataclasses.replace(whole, about={**whole.about, "tuned": made.record})

    def _record(self, label: str, chosen: Sequence[Settings]) -> None:
        """Put what the parts of a method recorded round by round beside the result, as of a run."""
        homes = [home(self.folder / PARTS / folder_name(label), own) for own in chosen]
        told = recorded(homes, label, self.experiment.seeds)
        if told is not None:
            trace.write(self.folder, told)

    def _final(self, table: MethodTable, group: "_Group", bench: Bench) -> Outcome:
        """Train what some seeds chose, going on from what there is of it."""
        label = folder_name(table.label or table.name)
        place = home(self.folder / PARTS / label, group.settings)
        chosen = with_settings(table, group.settings)

        def make(own: Seeds) -> Job:
            return job(self.experiment, chosen, self._held, own)

        def start(own: Job, folder: Path) -> None:
            alone = {"seeds": own.seeds, "methods": (chosen,)}
            self._label(folder, self.experiment.model_copy(update=alone))
            if own.evaluate.test_curve:
                return  # which trials have not taken
            for part in found(home(self.folder / TRIALS / label, group.settings)):
                trial = self._trial(table, group.settings, part.seeds)
                if head_start(trial, part.folder, own, folder):
                    return

        if not group.settings:
            adopted(self.folder, place, table.label or table.name, tuple(group.seeds), make)
        return trained(bench, place, group.seeds, make, start)

    def _trial(self, table: MethodTable, settings: Settings, seeds: Seeds) -> Job:
        """Make a job that holds no test row, of as many rounds as trials have."""
        made = job(self.experiment, with_settings(table, settings), self._bare, seeds)
        evaluate = dataclasses.replace(
            made.evaluate, test_curve=False, save_models=False, keep_globals=False
        )
        rounds = (self._tune and self._tune.rounds) or made.rounds
        label = f"{made.label} with {named(settings)[:_LONGEST]}"
        return dataclasses.replace(made, label=label, evaluate=evaluate, rounds=rounds)

    def _label(self, folder: Path, experiment: Experiment) -> None:
        """Say in a folder what it is of, so that newcomers can be adapted from it."""
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / EXPERIMENT, written(experiment).encode())
        held = self._held.federations
        scaling.save(folder, {seed: held[seed].dataset for seed in experiment.seeds})


class _Group(NamedTuple):
    """Seeds that chose alike."""

    settings: Settings
    seeds: list[int]
