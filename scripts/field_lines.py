"""Which lines of the outside tables `run_field.py` trains, in order, and what each takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reproduce_field import TABLES, figures, key_of

from idiolect.experiment.load import load_experiment
from idiolect.experiment.repro.index import items
from idiolect.experiment.repro.runs import experiments_folder, name_of
from idiolect.experiment.schema import Experiment

TRAINED_AS = {"FedAvg": "FedAvg + FT"}  # the same rounds, and fine-tuned after the last one
ALPHAS = ("0.05", "0.1", "0.5")
FINAL = "pfedkdh"  # whose figures are of the last round alone
# The splits of a table that one simulation trains together: all that have images of one size, as
# what a line does once, recording a round above all, takes no longer for more of them.
SPLITS = {
    "pfllib-fmnist": ("pfllib-fmnist-pat", "pfllib-fmnist-dir"),
    "pfllib-fmnist-fomo": ("pfllib-fmnist-fomo-pat", "pfllib-fmnist-fomo-dir"),
    "fedala-cifar10": ("fedala-cifar10",),
    "fedala-cifar10-fomo": ("fedala-cifar10-fomo",),
    "pfedkdh-grey": tuple(f"pfedkdh-{own}-{a}" for own in ("mnist", "fmnist") for a in ALPHAS),
    "pfedkdh-cifar10": tuple(f"pfedkdh-cifar10-{a}" for a in ALPHAS),
}
LINES = Path(__file__).resolve().parent.parent / "experiments" / "field" / "lines.txt"
# What a line takes, by estimate: seconds of a round of FedAvg, or of one as long, in a process that
# has an H200 for itself (TF32), and how many of them a round of others takes.
PACES = {"pfllib": 0.2, "fedala": 0.13, "pfedkdh-grey": 0.35, "pfedkdh-cifar10": 0.4}
PASSES = {"FedProx": 1.5, "FedRep": 1.3, "FedCP": 3.2, "GPFL": 4.0, "Ditto": 2.0, "APFL": 3.1,
          "FedBABU": 0.7, "Per-FedAvg": 1.3, "pFedMe": 5.0, "FedFomo": 1.2, "FedAMP": 2.0,
          "FedDBE, no pull": 1.2, "FedDistill": 1.3, "APPLE": 3.0, "FedPHP": 1.6,
          "FedGen": 6.0}  # fmt: skip
FIRST = 8.0  # seconds of a line's first two rounds and its scorings
SLOWED = 0.5  # by which part each further process slows the others down


@dataclass(frozen=True)
class Line:
    """One method of one table, for so many rounds at most."""

    table: str
    label: str
    rounds: int

    @property
    def name(self) -> str:
        return f"{self.table}--{self.label.replace(' ', '')}"

    @property
    def runs(self) -> tuple[str, ...]:
        return SPLITS.get(self.table, (self.table,))

    def seconds(self, workers: int) -> float:
        """Return the estimated seconds in a process beside the others."""
        pace = next(own for key, own in PACES.items() if self.table.startswith(key))
        alone = FIRST + self.rounds * pace * PASSES.get(self.label, 1.0)
        return alone * (1 + SLOWED * (workers - 1))


def plan(only: Sequence[str] = ()) -> list[Line]:
    """List the lines, or those whose names hold one of the words, without what results/ has."""
    lines = []
    for text in LINES.read_text().splitlines():
        if text and not text.startswith("#"):
            table, label, rounds = (part.strip() for part in text.split("|"))
            lines.append(Line(table, label, int(rounds)))
    asked = [one for one in lines if not only or any(word in one.name for word in only)]
    return [one for one in asked if rounds_had(one) < one.rounds]


def rounds_had(line: Line) -> int:
    """Return of how many rounds results/ has a line."""
    held = figures(key_of(line.table))
    own = [held.get(run, {}).get("methods", {}).get(line.label, {}) for run in line.runs]
    return min(int(one["rounds"]) if "curve" in one else 0 for one in own)


def loaded(run: str, changes: Sequence[str]) -> Experiment:
    named = {name_of(one): one for item in TABLES.values() for one in items()[item][1].experiments}
    return load_experiment(experiments_folder() / named[run].file, [*named[run].set, *changes])
