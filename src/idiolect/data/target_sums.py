"""What a task takes from training labels, from sums that add up over sites."""

from dataclasses import replace

import numpy as np

from idiolect.core.survival import Discrete
from idiolect.core.task import Number, Task
from idiolect.data.column_sums import ColumnPlan, ColumnSums, RawColumn
from idiolect.data.dataset import Dataset, Rows
from idiolect.errors import DataError


def target_sums(dataset: Dataset, task: Task, rows: Rows) -> ColumnSums:
    """Sum up what a task waits for: counts of classes, the number's moments, times of events."""
    own = dataset.y[np.sort(rows)]
    if isinstance(task, Number):
        found = ColumnSums.of(RawColumn(ColumnPlan("number"), own.astype(np.float64)))
        return replace(found, bins={})  # mean and deviation are enough
    if isinstance(task, Discrete):
        times = own[own[:, 1] > 0, 0].astype(np.float64)
        return ColumnSums.of(RawColumn(ColumnPlan("number"), times))
    codes = own[own >= 0].reshape(-1)
    return ColumnSums.of(RawColumn(ColumnPlan("category"), codes, dataset.classes))


def task_from_sums(task: Task, sums: ColumnSums, classes: tuple[str, ...]) -> Task:
    """Return the task as it is after it saw the rows that were summed up."""
    if isinstance(task, Number):
        if not sums.present:
            raise DataError("there is no training row to take the mean and deviation of y from")
        return task.scaled(sums.mean, sums.deviation)
    if isinstance(task, Discrete):
        if not sums.bins:
            return task.fit(np.empty((0, 2)), task.intervals)  # says what is missing
        shares = [n / task.intervals for n in range(1, task.intervals)]
        cuts = sorted({sums.quantile(share) for share in shares})
        return replace(task, cuts=tuple(cut for cut in cuts if cut > 0), fitted=True)
    counts = [sums.counts.get(name, 0) for name in classes]
    return task.fit(np.repeat(np.arange(len(classes)), counts), len(classes))
